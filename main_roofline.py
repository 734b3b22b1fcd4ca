"""Roofline: whether computing or reading limits a step of a language model, and where its computing goes.

A step is no faster than its operations at the processor's best rate, nor than its bytes at the memory's.
Their ratio, the arithmetic intensity, tells which of the two limits it: a prompt uses every weight it reads
for all its tokens, a decode step for one token of each sequence. Operations are exact counts, checked against
PyTorch's; the ceilings are measured here, or given with --ceilings, and then the times are predictions.

Run: python main_roofline.py            (--ceilings 500 4800 --dtype bfloat16 predicts for a GPU)

Source: Williams et al., Roofline: An Insightful Visual Performance Model for Multicore Architectures, 2009;
Pope et al., Efficiently Scaling Transformer Inference, 2022 (operations and bytes of both phases).
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from gptlite import FeedForward


def intensity(cost):
    """Arithmetic intensity of a Cost(flops, n_bytes): operations for each byte that is read or written."""
    return cost.flops / cost.n_bytes


def attainable(intensity, ceilings):
    """The roof: operations per second that a program of this intensity reaches at most.

    Args: ceilings: Ceilings(flops_per_s, bytes_per_s). The two lines meet at their ratio, the ridge.
    """
    return min(ceilings.flops_per_s, intensity * ceilings.bytes_per_s)


def layer_flops(d_model, n_keys):
    """Operations of one token in one layer, by part; a product of numbers and its addition are two."""
    return {
        "projections": 8 * d_model**2,  # queries, keys, values and output
        "MLP": 16 * d_model**2,  # to 4 d_model and back
        "attention": 4 * n_keys * d_model,  # scores, and the weighted sum of values
    }


def layer_parts(d_model, n_heads, n_tokens, device=None, dtype=None):
    """{part: function} that computes this part of a layer with random weights, for n_tokens at once.

    Attention sees all n_tokens keys (no mask), so each does the operations that layer_flops counts.
    """
    how = {"device": device, "dtype": dtype}
    x = torch.randn(n_tokens, d_model, **how)  # [T, E]
    q, k, v = torch.randn(3, 1, n_heads, n_tokens, d_model // n_heads, **how)  # [1, H, T, D]
    projections = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4)).to(**how)
    mlp = FeedForward(d_model, 0.0).to(**how)
    return {
        "projections": lambda: [project(x) for project in projections],  # 4 times [T, E]
        "MLP": lambda: mlp(x),  # [T, E]
        "attention": lambda: F.scaled_dot_product_attention(q, k, v),  # [1, H, T, D]
    }


def crossover(sizes, falling_behind, overtaking):
    """The size from which the second of two curves is above the first, None if it never is.

    Between two sizes both curves are taken as powers of the size (straight lines in a logarithmic plot).
    """
    behind = [math.log(b / a) for a, b in zip(falling_behind, overtaking, strict=True)]
    for i in reversed(range(len(sizes))):
        if behind[i] < 0:
            if i + 1 == len(sizes):
                return None
            share = behind[i] / (behind[i] - behind[i + 1])
            return sizes[i] * (sizes[i + 1] / sizes[i]) ** share
    return sizes[0]


if __name__ == "__main__":
    from torch.utils.flop_counter import FlopCounterMode

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters
    from gptlite_kvcache import GPTlite_StaticKVCache, StaticKVCache
    from gptlite_kvcache import scaled_dot_product_attention_kv_cache as attend

    parser = rep.options(__doc__, repeats=15)
    parser.add_argument(
        "--context", type=rep.positive_int, default=128, help="cached tokens in a decode step"
    )
    parser.add_argument(
        "--ceilings", type=float, nargs=2, metavar=("TFLOPS", "GB/S"), help="predict for such a machine"
    )
    with rep.script(parser) as args:
        p, dev, quick, context = get_gptlite_model_parameters(), args.device, args.quick, args.context
        W, d = p.seqlen, p.d_model
        if context >= W:
            raise ValueError(f"--context {context}: at most {W - 1} tokens and a new one fit the model")
        if args.ceilings and not all(0 < ceiling < math.inf for ceiling in args.ceilings):
            raise ValueError("--ceilings: two numbers above 0, TFLOP/s and GB/s")
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        model = utils.load_model(GPTlite_StaticKVCache, vocab_size, args.checkpoint).to(dev, args.dtype)
        tokens = utils.sample_prompts(valid_data, 64, W).to(dev)  # [64, W]
        args.repeats = min(args.repeats, 3) if quick else args.repeats
        limits, repeats = rep.measure_ceilings(dev, args.dtype), args.repeats
        described = rep.Ceilings(args.ceilings[0] * 1e12, args.ceilings[1] * 1e9) if args.ceilings else None
        columns = {"gflop": ("GFLOP", "{:.3f}"), "n_mb": ("MB", "{:.1f}"), "intensity": ("FLOP/B", "{:.1f}")}
        columns |= {"least_ms": ("least ms", "{:.2f}"), "limit": ("bound by", "{}")}
        columns |= {"share": ("reached", "{:.0%}"), "gflop_per_s": ("GFLOP/s", "{:.0f}")}
        columns |= {"predicted_ms": ("predicted ms", "{:.4f}")} if described else {}
        ceilings = {"flops_per_s": limits.flops_per_s, "bytes_per_s": limits.bytes_per_s}
        report = rep.Report(args, "roofline", model, columns, context=context, ceilings=ceilings)
        points, exact = {}, []

        @torch.no_grad()
        def measure(name, B, n_new, n_past):
            """Adds the row of a forward over n_new tokens of B sequences, behind n_past cached ones."""
            cache = StaticKVCache(model, B)
            if n_past:
                model(tokens[:B, :n_past], cache)
            new = tokens[:B, n_past : n_past + n_new]  # [B, n_new]

            def forward():
                model(new, cache)
                cache.advance(-n_new)

            ms, cost = (
                utils.median_ms(forward, repeats, dev),
                rep.forward_cost(p, vocab_size, B, n_new, n_past, args.dtype),
            )
            with FlopCounterMode(display=False) as counter:
                forward()
            # the causal mask hides scores that this attention computes nevertheless
            hidden = B * n_new * (n_new - 1) // 2
            exact.append(counter.get_total_flops() == cost.flops + 4 * p.n_layers * d * hidden)
            computing, reading = cost.flops / limits.flops_per_s, cost.n_bytes / limits.bytes_per_s
            least = rep.lower_bound_ms(cost, limits)
            points[name] = {
                "gflop": cost.flops / 1e9,
                "n_mb": cost.n_bytes / 1e6,
                "intensity": intensity(cost),
            }
            points[name] |= {"least_ms": least, "limit": "computing" if computing > reading else "reading"}
            points[name] |= {"ms": ms, "share": least / ms, "gflop_per_s": cost.flops / ms / 1e6}
            predicted = rep.lower_bound_ms(cost, described) if described else None
            times = {"tpot_ms": ms} if n_past else {"ttft_ms": ms}
            report.row(
                name, baseline=not report.data["rows"], **times, predicted_ms=predicted, **points[name]
            )

        prompts, batches = (
            ((1, 64, W), (1, 8, 64)) if quick else ((1, 4, 16, 64, W), (1, 2, 4, 8, 16, 32, 64))
        )
        for T in prompts:
            measure(f"prefill, {T} tokens", 1, T, 0)
        for B in batches:
            measure(f"decode, batch {B}", B, 1, context)
        report.check("the operations are those that PyTorch counts, to the last one", all(exact))
        embeddings = model.token_embedding.weight.numel() + model.position_embedding.weight.numel()
        n_weights = utils.n_parameters(model) - embeddings  # of the embeddings a step reads a row a token
        weights = rep.forward_cost(p, vocab_size, 0, 0, 0, args.dtype).n_bytes
        report.check("a step reads each weight once", weights == n_weights * args.dtype.itemsize)
        cache = StaticKVCache(model, 1)
        kv_bytes = utils.cache_bytes_per_token([cache.k, cache.v], W, 1)
        report.check("a token's cache is 2 L d numbers", kv_bytes == 2 * p.n_layers * d * args.dtype.itemsize)

        # Where the computing goes, over the length of the text
        sizes = [2**i for i in range(8, 13 if quick else 15)]
        by_formula, by_time, rows = [], [], []
        with torch.no_grad():
            for n in sizes:
                flops, parts = layer_flops(d, n), layer_parts(d, p.n_heads, n, dev, args.dtype)
                ms = {part: utils.median_ms(parts[part], 1 if n > 4096 else 3, dev) for part in parts}
                by_formula.append((flops["projections"] + flops["MLP"], flops["attention"]))
                by_time.append((ms["projections"] + ms["MLP"], ms["attention"]))
                row = {"tokens": n} | {f"{part} ms": ms[part] for part in parts}
                row |= {"attention's share of the time": ms["attention"] / sum(ms.values())}
                rows.append(row | {"of the operations": flops["attention"] / sum(flops.values())})
        report.sweep("One layer with random weights; all tokens see all of them", rows)
        formula, measured = (crossover(sizes, *zip(*pairs, strict=True)) for pairs in (by_formula, by_time))
        report.check(f"by the formula attention overtakes at 6 d = {6 * d} tokens", round(formula) == 6 * d)
        full = [
            {"sequences": B, "KV MB": B * W * kv_bytes / 1e6, "weights MB": weights / 1e6}
            | {"cache's share of a step's bytes": B * W * kv_bytes / (B * W * kv_bytes + weights)}
            for B in batches
        ]
        report.sweep(f"Bytes of the cache and of the weights, for full contexts of {W}", full)

        ridge = limits.flops_per_s / limits.bytes_per_s
        most, n_equal = batches[-1], weights / kv_bytes
        one, many = points["decode, batch 1"], points[f"decode, batch {most}"]
        longest = points[f"prefill, {W} tokens"]
        report.why(
            f"This machine computes {limits.flops_per_s / 1e9:.0f} GFLOP/s and reads "
            f"{limits.bytes_per_s / 1e9:.0f} GB/s: below {ridge:.1f} operations a byte (the ridge) a step "
            "waits for memory, above it for the processor."
        )
        report.why(
            f"A prompt of {W} has {longest['intensity']:.0f}: each weight serves {W} tokens. A decode step "
            f"of one sequence has {one['intensity']:.2f}, and computes {one['gflop_per_s']:.0f} GFLOP/s "
            f"where the prompt does {longest['gflop_per_s']:.0f}. A batch shares the weights, but each "
            f"sequence reads its own cache: {many['intensity']:.1f} for {most}, in "
            f"{many['ms'] / one['ms']:.1f} times the time of one."
        )
        bound = [B for B in batches if points[f"decode, batch {B}"]["limit"] == "computing"]
        knee = f"from a batch of {bound[0]} on" if bound else f"at no batch up to {most}"
        cache = StaticKVCache(model, most)
        k, v = cache.k[..., : context + 1, :], cache.v[..., : context + 1, :]  # [L, B, H, Sk, D]
        q = torch.randn_like(k[:, ..., :1, :])  # [L, B, H, 1, D]
        attention_ms = utils.median_ms(lambda: list(map(attend, q, k, v)), repeats, dev)
        read_mb = most * (context + 1) * kv_bytes / 1e6
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        inputs = {n: torch.randn(1, n, device=dev).to(args.dtype) for n in (d, 4 * d)}  # [1, E], [1, 4E]
        with torch.no_grad():
            run = lambda: [layer(inputs[layer.in_features]) for layer in layers]  # noqa: E731
            products_ms = utils.median_ms(run, repeats, dev)
        report.why(
            f"By this bound decode is limited by computing {knee} (tried: {', '.join(map(str, batches))}). "
            f"One sequence takes {one['ms']:.1f} ms where the bound is {one['least_ms']:.1f}: the products "
            f"with the weights alone take {products_ms:.1f} ms, {weights / products_ms / 1e6:.0f} GB/s, the "
            f"rest are about a hundred small operations. With {most} it is "
            f"{many['ms'] - many['least_ms']:.1f} ms more than the bound: attention alone takes "
            f"{attention_ms:.1f} ms for {read_mb:.0f} MB of cache, {read_mb / attention_ms:.0f} GB/s, as "
            "a matrix times one query uses neither the products' rate nor, with textbook attention, the "
            "memory's."
        )
        attends, others = (
            flops * sizes[-1] / ms / 1e6
            for flops, ms in zip(by_formula[-1][::-1], by_time[-1][::-1], strict=True)
        )
        seen = f"at about {measured:.0f} tokens" if measured else f"not up to {sizes[-1]}"
        report.why(
            "In a layer a token's projections take 8 d^2 operations, its MLP 16 d^2, its attention 4 n d: "
            f"as many as the others at n = 6 d = {6 * d}. By the clock attention takes over {seen}, as it "
            f"reaches {attends:.0f} GFLOP/s and the others {others:.0f} ({sizes[-1]} tokens). Within the "
            f"context of {W} it is {rows[0]['of the operations']:.0%} of the operations, half as much behind "
            "a causal mask."
        )
        report.why(
            f"The cache of {n_equal:.0f} tokens, {n_equal / W:.1f} full contexts, has as many bytes as the "
            "weights; beyond it a step reads more cache than weights, and larger batches save little."
        )
        if described:
            report.why(
                f"Predicted, not measured: the least times at {args.ceilings[0]:g} TFLOP/s and "
                f"{args.ceilings[1]:g} GB/s. On a GPU the launches of a hundred kernels, about 0.7 ms, hide "
                "them unless a CUDA graph replays the step."
            )
        if args.plot:
            figure, axes = rep.new_figure()
            spread = sorted([0.25, ridge, 500.0])
            axes.plot(spread, [attainable(x, limits) / 1e9 for x in spread], "k-", label="roof (measured)")
            for phase, marker in (("prefill", "o"), ("decode", "s")):
                shown = [point for name, point in points.items() if name.startswith(phase)]
                x, y = ([point[key] for point in shown] for key in ("intensity", "gflop_per_s"))
                axes.plot(x, y, marker, label=phase)
            axes.set(xlabel="operations per byte", ylabel="GFLOP/s", xscale="log", yscale="log")
            axes.set_title(f"GPTlite on {report.data['config']['device_name']}")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
