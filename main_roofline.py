"""Roofline: whether computing or reading limits a step of a language model, and where its computing goes.

Idea: a step is no faster than its operations at the processor's best rate, nor than its bytes at the best of
the memory's. Their ratio, the arithmetic intensity, tells which of the two limits it: a prompt uses every
weight it reads for all its tokens, a decode step for one token of each sequence. Operations are exact counts,
checked against PyTorch's; ceilings are measured here, or given with --ceilings: then times are predictions.

A model, not a method: it tells what a technique can win. Fewer bytes (quantisation, a smaller cache) win
where reading limits, fewer operations where computing does. It does not see what is neither: launches,
Python, a product whose form its library does poorly; the share of the roof that is reached shows how much of
that there is. In a layer a token's projections take 8 E^2 operations, its MLP 16 E^2, its attention 4 n E
over n keys: as many as the rest from n = 6 E on. On a GPU the launches of a step's hundred kernels hide the
roof.

Run: python main_roofline.py            (--ceilings 500 4800 --dtype bfloat16 predicts for a GPU)

Source: Williams et al., Roofline: An Insightful Visual Performance Model for Multicore Architectures, 2009;
Pope et al., Efficiently Scaling Transformer Inference, 2022 (operations and bytes of both phases).
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gptlite import FeedForward
from inference_cost import limit_of, lower_bound_ms


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
    x = torch.randn(n_tokens, d_model, device=device, dtype=dtype)  # [T, E]
    shape = (3, 1, n_heads, n_tokens, d_model // n_heads)
    q, k, v = torch.randn(shape, device=device, dtype=dtype)  # [1, H, T, D]
    projections = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4)).to(device, dtype)
    mlp = FeedForward(d_model, 0.0).to(device, dtype)
    for module in (projections, mlp):
        module.requires_grad_(False)
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


def under_the_roof(cost, ms, ceilings):
    """Where a step of this Cost(flops, n_bytes) that took ms stands under the roof."""
    least = lower_bound_ms(cost, ceilings)
    return {
        "gflop": cost.flops / 1e9,
        "n_mb": cost.n_bytes / 1e6,
        "intensity": intensity(cost),
        "least_ms": least,
        "limit": limit_of(cost, ceilings),
        "share": least / ms,  # of the roof's speed that is reached
        "gflop_per_s": cost.flops / ms / 1e6,
    }


def counted_flops(function):
    """Operations that PyTorch counts while function() runs, those of hidden scores among them."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import GPTlite_StaticKVCache, StaticKVCache
    from inference_utils import alternating_ms, n_parameters, parameters_of

    prompts, batches, lengths = [1, 4, 16, 64, 256], [2**i for i in range(7)], [2**i for i in range(8, 17)]
    quick = {"batches": [1, 8, 64], "prompts": [1, 64, 256], "max_tokens": 2048}
    parser = harness.options(__doc__, repeats=9, quick=quick)
    add, size, names = parser.add_argument, harness.positive_int, ("TFLOPS", "GB/S")
    add("--context", type=size, default=128, help="cached tokens in a decode step")
    add("--prompts", type=size, nargs="+", default=prompts, help="tokens of the prefills")
    add("--batches", type=size, nargs="+", default=batches, help="sequences of the decode steps")
    add("--max-tokens", type=int, choices=lengths[1:], default=16384, help="longest text of one layer")
    add("--ceilings", type=harness.positive, nargs=2, metavar=names, help="predict for such a machine")
    columns = {"gflop": ("GFLOP", "{:.3f}"), "n_mb": ("MB", "{:.1f}"), "intensity": ("FLOP/B", "{:.1f}")}
    columns |= {"least_ms": ("least ms", "{:.2f}"), "limit": ("bound by", "{}"), "share": ("share", "{:.0%}")}
    columns |= {"gflop_per_s": ("GFLOP/s", "{:.0f}"), "predicted_ms": ("predicted ms", "{:.4f}")}
    with harness.script(parser) as args:
        (model,), text = harness.load_models(args, GPTlite_StaticKVCache), harness.load_text(args)
        (plain,) = harness.load_models(args, GPTlite_StaticKVCache, packed=False)  # PyTorch counts no other
        p, T = parameters_of(model), model.seqlen
        if max(args.context + 1, *args.prompts) > T:
            raise ValueError(f"--context, --prompts: the model reads at most {T} tokens, a new one included")
        report = harness.Report(args, "roofline", model, columns, context=args.context)
        tokens = text.prompts(max(args.batches), T)
        roof, costs, runs, rows = report.ceilings(), {}, {}, {}
        given = harness.Ceilings(args.ceilings[0] * 1e12, args.ceilings[1] * 1e9) if args.ceilings else None
        batches, steps = sorted({1, *args.batches}), {f"prefill, {n} tokens": (1, n, 0) for n in args.prompts}
        steps |= {f"decode, batch {B}": (B, 1, args.context) for B in batches}
        for name, (B, n, past) in steps.items():
            new, cache = tokens[:B, past : past + n], StaticKVCache(model, B)  # [B, n]
            cache.advance(past)  # what these rows hold changes no time

            def step(model=model, new=new, cache=cache):
                model(new, cache)[1].advance(-new.shape[1])

            runs[name] = step
            cost = costs[name] = harness.forward_cost(p, text.vocab_size, B, n, past, args.dtype)
            hidden = 2 * p.n_layers * p.d_model * B * n * (n - 1)  # computed although the mask hides it
            exact = counted_flops(partial(step, plain)) == cost.flops + hidden
            report.check(f"{name}: the operations are those that PyTorch counts", exact)
        for name, ms in alternating_ms(runs, args.repeats, args.device).items():
            figures = under_the_roof(costs[name], ms, roof)
            figures["predicted_ms"] = harness.lower_bound_ms(costs[name], given) if given else None
            figures["ttft_ms" if steps[name][2] == 0 else "tpot_ms"] = ms
            rows[name] = report.row(name, baseline=not rows, **figures)
        weights = harness.forward_cost(p, text.vocab_size, 0, 0, 0, args.dtype).n_bytes
        n_read = n_parameters(plain) - (text.vocab_size + T) * p.d_model  # of embeddings a row for each token
        report.check("a step reads each weight once", weights == n_read * args.dtype.itemsize)

        # Where the computing goes, over the length of the text
        lengths = lengths[: lengths.index(args.max_tokens) + 1]
        title = "One layer with random weights, all tokens see all of them: time (ms)"
        make = partial(layer_parts, p.d_model, p.n_heads, device=args.device, dtype=args.dtype)
        times = report.time_sweep(title, "tokens", lengths, make)
        for row in times:
            row["the rest"] = row["projections"] + row["MLP"]
        by_time = crossover(lengths, *([row[key] for row in times] for key in ("the rest", "attention")))
        both = [{"by": "operations", "tokens": 6 * p.d_model}, {"by": "the clock", "tokens": by_time}]
        report.sweep("From how many tokens on attention takes more than the rest of a layer", both)
        kv_mb = 2e-6 * p.n_layers * p.d_model * T * args.dtype.itemsize  # of a full context
        shares = [{"sequences": B, "KV MB": B * kv_mb, "weights MB": weights / 1e6} for B in batches]
        report.sweep(f"Bytes of a step with full contexts of {T}", shares)

        first, last = "decode, batch 1", f"decode, batch {batches[-1]}"
        ridge, reached = roof.flops_per_s / roof.bytes_per_s, rows[last]["intensity"]
        told = f"it has {words.number(reached)} operations a byte, the ridge is {words.number(ridge)}."
        above = f"The largest batch is limited by computing: {told}"
        report.why(words.choose(reached / ridge, (1, above), f"The largest batch waits for reading: {told}"))
        report.why(words.batching(rows[first], rows[last], batches[-1]))
        report.why_step({name: costs[name] for name in (first, last)}, rows)
        report.why(words.crossover(times, "tokens", "the rest", "attention"))
        lines = {"roof": ((0.25, ridge, 500), [attainable(x, roof) / 1e9 for x in (0.25, ridge, 500)])}
        for phase in ("prefill", "decode"):
            points = [(r["intensity"], r["gflop_per_s"]) for n, r in rows.items() if n.startswith(phase)]
            lines[phase] = tuple(zip(*points, strict=True))
        report.plot_lines(lines, "operations per byte", "GFLOP/s", "GPTlite under the roof", "xy")
        report.finish()
