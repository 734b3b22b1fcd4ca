"""FlashAttention: exact attention without the score matrix in memory.

Textbook attention writes all Sq x Sk scores to memory and reads them back several times; that traffic,
not the arithmetic, is what it waits for. FlashAttention computes the scores tile by tile and keeps per
query only a running maximum, a running sum and an unnormalised output, so memory grows linearly.
Exact in all its forms here, up to rounding: PyTorch's fused attention (SDPA) in GPTlite, and the
algorithm from scratch in plain PyTorch, with the backward pass that recomputes the scores.

Run: python main_flash_attention.py

Source: Dao et al., FlashAttention, 2022; Dao, FlashAttention-2, 2023 (the order of loops used here);
Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

import contextlib
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptlite import MultiHeadAttention, scaled_dot_product_attention

# ---- Fused attention in the model ----


class MultiHeadAttention_SDPA(MultiHeadAttention):
    """MultiHeadAttention whose attention is one fused call: same weights, same outputs."""

    def forward(self, x, causal_mask=True):
        Q = self.split_heads(self.query_proj(x))  # [B, H, T, D]
        K = self.split_heads(self.key_proj(x))  # [B, H, T, D]
        V = self.split_heads(self.value_proj(x))  # [B, H, T, D]
        mask = causal_mask if isinstance(causal_mask, torch.Tensor) else None
        # the fused call drops out whatever the mode is, so the mode has to be asked for here
        dropout_p = self.dropout.p if self.training else 0.0
        is_causal = mask is None and bool(causal_mask)
        out = F.scaled_dot_product_attention(Q, K, V, mask, dropout_p, is_causal)  # [B, H, T, D]
        return self.dropout(self.out_proj(self.merge_heads(out)))  # [B, T, E]


def use_sdpa(model):
    """Makes a GPTlite use fused attention, in place, and returns it.

    Raises ValueError for a model whose attention is another one already (with a cache, with groups).
    """
    for block in model.blocks:
        if type(block.mha) not in (MultiHeadAttention, MultiHeadAttention_SDPA):
            raise ValueError(f"use_sdpa replaces MultiHeadAttention, not {type(block.mha).__name__}")
    for block in model.blocks:
        block.mha.__class__ = MultiHeadAttention_SDPA  # the same object and weights, another forward
    return model


# ---- From scratch ----


def score_tiles(Sq, Sk, causal, tile_q, tile_k):
    """Yields (queries, [keys, ...]), as slices: the tiles of the score matrix that hold a visible score.

    With causal, the last query belongs to the last key, and tiles above the diagonal are left out.
    """
    for start in range(0, Sq, tile_q):
        queries = slice(start, min(start + tile_q, Sq))
        n_seen = min(queries.stop + Sk - Sq, Sk) if causal else Sk  # by the last query of the tile
        yield queries, [slice(j, min(j + tile_k, n_seen)) for j in range(0, n_seen, tile_k)]


def hide_scores(scores, causal_mask, queries, keys, diagonal):
    """Puts -inf, in place, where a tile's queries may not see its keys.

    Args: scores [B*H, tile_q, tile_k]; causal_mask: True, False, or bool [B, H, Sq, Sk], True where
        visible; queries, keys: slices, the tile's place; diagonal: Sk - Sq, the last key of query 0.
    """
    if isinstance(causal_mask, torch.Tensor):
        hidden = ~causal_mask[..., queries, keys]  # [B, H, tile_q, tile_k]
        scores.view(hidden.shape).masked_fill_(hidden, float("-inf"))
    elif causal_mask and keys.stop - 1 > queries.start + diagonal:  # only tiles that the diagonal cuts
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        visible = visible.tril(queries.start + diagonal - keys.start)  # [tile_q, tile_k]
        scores.masked_fill_(~visible, float("-inf"))


class FlashAttention(torch.autograd.Function):
    """Tiled attention with its own backward pass; flash_attention() is the function to call."""

    @staticmethod
    def forward(ctx, Q, K, V, causal_mask, tile_q, tile_k):
        (B, H, Sq, D), Sk = Q.shape, K.shape[-2]
        dtype = torch.promote_types(Q.dtype, torch.float32)  # sums over many keys need more than 16 bits
        q, k, v = (t.to(dtype).flatten(0, 1) for t in (Q, K, V))  # [B*H, S, D]
        q = q / math.sqrt(D)
        out = q.new_empty(B * H, Sq, D)
        lse = q.new_empty(B * H, Sq, 1)
        is_causal = causal_mask is True
        for queries, key_tiles in score_tiles(Sq, Sk, is_causal, tile_q, tile_k):
            q_tile = q[:, queries]  # [B*H, tile_q, D]
            row_max = q.new_full((*q_tile.shape[:2], 1), float("-inf"))  # [B*H, tile_q, 1]
            row_sum = torch.zeros_like(row_max)  # of exp(score - row_max)
            acc = torch.zeros_like(q_tile)  # output before division by row_sum, [B*H, tile_q, D]
            for keys in key_tiles:
                scores = torch.bmm(q_tile, k[:, keys].transpose(1, 2))  # [B*H, tile_q, tile_k]
                hide_scores(scores, causal_mask, queries, keys, Sk - Sq)
                new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True))  # [B*H, tile_q, 1]
                # before its first visible key a query's maximum is -inf, and -inf - -inf would be NaN
                shift = new_max.masked_fill(new_max == float("-inf"), 0.0)
                weights = scores.sub_(shift).exp_()  # [B*H, tile_q, tile_k]
                rescale = torch.exp(row_max - shift)  # what the earlier tiles count under the new maximum
                row_sum = row_sum.mul_(rescale).add_(weights.sum(dim=-1, keepdim=True))
                acc = acc.mul_(rescale).baddbmm_(weights, v[:, keys])
                row_max = new_max
            # a query without keys: 0 / 1 = 0 is its output, -inf + log(0) = -inf its log-sum-exp
            out[:, queries] = acc.div_(row_sum.masked_fill(row_sum == 0.0, 1.0))
            lse[:, queries] = row_max + row_sum.log()
        out, lse = out.view(B, H, Sq, D).to(Q.dtype), lse.view(B, H, Sq)
        ctx.save_for_backward(Q, K, V, out, lse)  # linear in Sq: the scores are computed again
        ctx.options = causal_mask, is_causal, tile_q, tile_k
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_lse):
        Q, K, V, out, lse = ctx.saved_tensors
        causal_mask, is_causal, tile_q, tile_k = ctx.options
        (B, H, Sq, D), Sk = Q.shape, K.shape[-2]
        q, k, v, do, o = (t.to(lse.dtype).flatten(0, 1) for t in (Q, K, V, grad_out, out))  # [B*H, S, D]
        q = q / math.sqrt(D)
        no_keys = (lse == float("-inf")).view(B * H, Sq, 1)
        lse = lse.reshape(B * H, Sq, 1).masked_fill(no_keys, 0.0)
        # softmax couples the scores of a row only through this sum
        delta = (do * o).sum(dim=-1, keepdim=True) - grad_lse.reshape(B * H, Sq, 1)  # [B*H, Sq, 1]
        delta = delta.masked_fill(no_keys, 0.0)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, key_tiles in score_tiles(Sq, Sk, is_causal, tile_q, tile_k):
            for keys in key_tiles:
                scores = torch.bmm(q[:, queries], k[:, keys].transpose(1, 2))  # [B*H, tile_q, tile_k]
                hide_scores(scores, causal_mask, queries, keys, Sk - Sq)
                weights = scores.sub_(lse[:, queries]).exp_()  # the softmax itself, thanks to lse
                dv[:, keys].baddbmm_(weights.transpose(1, 2), do[:, queries])
                d_scores = torch.bmm(do[:, queries], v[:, keys].transpose(1, 2))  # [B*H, tile_q, tile_k]
                d_scores.sub_(delta[:, queries]).mul_(weights)
                dq[:, queries].baddbmm_(d_scores, k[:, keys])
                dk[:, keys].baddbmm_(d_scores.transpose(1, 2), q[:, queries])  # q holds the scale
        dq.div_(math.sqrt(D))
        dq, dk, dv = (g.view(t.shape).to(t.dtype) for g, t in zip((dq, dk, dv), (Q, K, V), strict=True))
        return dq, dk, dv, None, None, None


def flash_attention(Q, K, V, causal_mask=True, tile_q=64, tile_k=64):
    """Exact attention by tiles of tile_q queries and tile_k keys, never a tensor of Sq x Sk.

    Args: Q [B, H, Sq, D]; K, V [B, H, Sk, D]; causal_mask: True hides later positions (query i sees the
        keys up to Sk - Sq + i), False hides nothing, a boolean tensor that broadcasts to
        [B, H, Sq, Sk] is True where a key may be seen.
    Returns: the output [B, H, Sq, D] and the natural log of each query's sum of exp(scores) [B, H, Sq],
        in float32 at least. A query that may see no key gets zeros and -inf. Both have gradients.
    Raises: ValueError for a tile below 1, a mask that is not boolean, Q, K, V that do not fit together.
    Source: Dao, FlashAttention-2, 2023, algorithms 1 and 2.
    """
    if tile_q < 1 or tile_k < 1:
        raise ValueError(f"a tile has at least 1 query and 1 key, not {tile_q} and {tile_k}")
    if K.shape != V.shape or Q.shape[:2] != K.shape[:2] or Q.shape[-1] != K.shape[-1]:
        shapes = ", ".join(str(list(t.shape)) for t in (Q, K, V))
        raise ValueError(f"Q, K, V must be [B, H, Sq, D], [B, H, Sk, D], [B, H, Sk, D], not {shapes}")
    if isinstance(causal_mask, torch.Tensor):
        if causal_mask.dtype != torch.bool:
            raise ValueError(f"the mask must be boolean, True where visible, not {causal_mask.dtype}")
        causal_mask = causal_mask.expand(*Q.shape[:3], K.shape[2])  # a view: [B, H, Sq, Sk]
    else:
        causal_mask = bool(causal_mask)
    with torch.autocast(Q.device.type, enabled=False):  # the tiles are added up in one type
        return FlashAttention.apply(Q, K, V, causal_mask, tile_q, tile_k)


def merge_attention(out_a, lse_a, out_b, lse_b):
    """Joins two attentions of the same queries over separate sets of keys into that over all the keys.

    Args: out_a, out_b: outputs [B, H, Sq, D], each a softmax average over its own keys; lse_a, lse_b:
        log-sum-exp of the scores [B, H, Sq], -inf for a part without keys (its output must be finite).
    Returns: output and log-sum-exp over both sets. Any order and grouping of merges gives the same.
    """
    lse = torch.logaddexp(lse_a, lse_b)  # [B, H, Sq]
    shift = lse.masked_fill(lse == float("-inf"), 0.0)  # no keys on either side: both weights are 0
    weight_a = torch.exp(lse_a - shift).unsqueeze(-1)  # share of the sum that part a holds, [B, H, Sq, 1]
    weight_b = torch.exp(lse_b - shift).unsqueeze(-1)  # [B, H, Sq, 1]
    return (weight_a * out_a + weight_b * out_b).to(out_a.dtype), lse


def sdpa(Q, K, V, backend=None):
    """PyTorch's fused causal attention [B, H, T, D], by the kernel it picks or by the backend given."""
    with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
        return F.scaled_dot_product_attention(Q, K, V, is_causal=True)


def flex_causal(T, device):
    """FlexAttention with a causal mask for T tokens: a function of Q, K, V [B, H, T, D].

    The function compiles itself at its first call, and raises RuntimeError where that is not possible.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, T, T, device=str(device))
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)


if __name__ == "__main__":
    import statistics
    import warnings

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from main_kvcache import generate

    parser = rep.options(__doc__, repeats=3)
    parser.add_argument("--batch-size", type=rep.positive_int, default=16, help="sequences of the prefill")
    with rep.script(parser) as args:
        p, dev, quick, dtype = get_gptlite_model_parameters(), args.device, args.quick, args.dtype
        B = min(args.batch_size, 4) if quick else args.batch_size
        H, D, W, tolerance = p.n_heads, p.d_head, p.seqlen, utils.TOLERANCE[dtype]
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        model, fused = (
            utils.load_model(GPTlite, vocab_size, args.checkpoint).to(dev, dtype) for _ in range(2)
        )
        use_sdpa(fused)
        report = rep.Report(args, "FlashAttention", model, batch_size=B, prompt_len=W, n_tokens=1)

        # GPTlite: a prefill
        prompts = utils.sample_prompts(valid_data, B, W).to(dev)  # [B, W]
        with torch.no_grad():
            logits = model(prompts)  # [B, W, V]
            apart = utils.largest_difference(fused(prompts), logits)
        losses = [utils.validation_loss(m, valid_data, 4 if quick else 128) for m in (model, fused)]
        report.check(f"GPTlite's logits differ by {apart:.1e}, at most {tolerance:.0e}", apart <= tolerance)
        report.check("the same validation loss", abs(losses[0] - losses[1]) <= tolerance)
        methods = [
            utils.Method("textbook", lambda: generate(model, prompts, 1, W), [model]),
            utils.Method("SDPA", lambda: generate(fused, prompts, 1, W), [fused]),
        ]
        prefill = utils.measure(methods, B, args.repeats)
        figures = {m.name: {"valid_loss": loss} for m, loss in zip(methods, losses, strict=True)}
        report.method_rows(methods, prefill, prompts, logits[:, -1:], figures=figures)

        # Attention alone: the best tile, at one length
        def draw(batch_size, T):
            return torch.randn(3, batch_size, H, T, D, device=dev).to(dtype).unbind(0)  # [B, H, T, D]

        def n_tiles(T, tile):
            return sum(len(keys) for _, keys in score_tiles(T, T, True, tile, tile))

        T = 512 if quick else 4096
        Q, K, V = draw(1, T)  # [1, H, T, D]
        tiles = [
            {
                "tile": t,
                "ms": utils.median_ms(partial(flash_attention, Q, K, V, True, t, t), args.repeats, dev),
                "tiles computed": n_tiles(T, t),
                "of": (T // t) ** 2,
                "scores computed %": 100 * n_tiles(T, t) * t**2 / T**2,
                "scores of a tile MB": 4e-6 * H * t**2,
            }
            for t in ((64, 128, 256) if quick else (64, 128, 256, 512, 1024))
        ]
        report.sweep(f"From scratch at {T} tokens, {H} heads of {D}, causal", tiles)
        tile = min(tiles, key=lambda row: row["ms"])["tile"]

        # Attention alone: all forms, over lengths
        lengths = (256, 512, 1024) if quick else (256, 512, 1024, 2048, 4096, 8192)
        names = ("textbook", "from scratch", "SDPA")
        functions = (
            scaled_dot_product_attention,
            lambda *qkv: flash_attention(*qkv, True, tile, tile)[0],
            sdpa,
        )
        forms = dict(zip(names, functions, strict=True))
        if dev.type == "cuda":
            for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
                forms[f"SDPA {backend.lower()}"] = partial(sdpa, backend=getattr(SDPBackend, backend))
        anchor = torch.nn.Linear(1, 1, device=dev)  # tells the memory count which device to look at
        sweep = {}  # (batch, tokens, form): row
        for batch_size, T in dict.fromkeys([(B, W), *((1, T) for T in lengths)]):
            Q, K, V = draw(batch_size, T)  # [B, H, T, D]
            if not quick and dev.type != "mps":
                forms["FlexAttention"] = flex_causal(T, dev)
            times = {name: [] for name in forms}
            for _ in range(args.repeats + 1):
                for name in [*times]:
                    try:
                        with warnings.catch_warnings(action="ignore"), utils.Timer(dev) as timer:
                            forms[name](Q, K, V)
                        times[name].append(timer.ms)
                    except RuntimeError:  # a backend that does not take these inputs, no compiler
                        if name in names:
                            raise
                        del times[name]
            exact = scaled_dot_product_attention(Q.float(), K.float(), V.float())  # [B, H, T, D]
            for name, (first, *ms) in times.items():
                run = partial(forms[name], Q, K, V)
                row = {"batch": batch_size, "tokens": T, "form": name, "first call ms": first}
                row["ms"] = statistics.median(ms)
                row["speed-up"] = statistics.median(times["textbook"][1:]) / row["ms"]
                row["peak MB"] = utils.peak_memory_mb(run, anchor, inputs=(Q, K, V))
                row["largest difference"] = utils.largest_difference(run().float(), exact)
                sweep[batch_size, T, name] = row
        title = f"Causal attention alone, {H} heads of {D}, from scratch by tiles of {tile}"
        report.sweep(title, [*sweep.values()])
        worst = {  # form: largest difference from the textbook form in float32
            name: max(row["largest difference"] for row in sweep.values() if row["form"] == name)
            for _, _, name in sweep
        }
        for name in [*worst][1:]:  # in 16 bits the textbook form itself rounds
            equal = worst[name] <= 1e-5 + 2 * worst["textbook"]
            report.check(f"{name}: output differs by {worst[name]:.1e} at most", equal)
        Q, K, V = (t.float().requires_grad_() for t in draw(1, W))  # [1, H, W, D]
        grads = [torch.autograd.grad(f(Q, K, V).square().sum(), (Q, K, V)) for f in functions[:2]]
        apart = max(utils.largest_difference(a, b) for a, b in zip(*grads, strict=True))
        report.check(f"from scratch: gradients differ by {apart:.1e} at most", apart <= 1e-4)
        fitted = lengths[-4:]
        for name in names if dev.type != "mps" else ():
            mb = [math.log(sweep[1, n, name]["peak MB"]) for n in fitted]
            slope = statistics.linear_regression([math.log(n) for n in fitted], mb).slope
            as_promised = 1.6 < slope < 2.1 if name == "textbook" else slope < 1.2
            report.check(f"{name}: memory ~ tokens^{slope:.2f} from {fitted[0]} to {T}", as_promised)

        last = {name: sweep[1, T, name] for name in names}
        limits = rep.measure_ceilings(dev, dtype)
        n_run, n_all, work = n_tiles(T, tile), (T / tile) ** 2, 4 * D * H * T**2  # of all the scores
        gb_whole = 1e-9 * dtype.itemsize * H * (8 * T**2 + 4 * T * D)
        gb_tiles = 1e-9 * max(dtype.itemsize, 4) * H * D * (2 * T + 2 * tile * n_run)
        report.why(
            f"At {T} tokens the textbook form moves {gb_whole:.2f} GB: a product writes the scores, scale, "
            "mask and softmax read and write them, the last product reads them. Tiles of "
            f"{tile} move {gb_tiles:.3f} GB: keys and values once for every {tile} queries."
        )
        report.why(
            f"That is {1e-9 * work / gb_whole:.0f} operations a byte against "
            f"{1e-9 * work * n_run / n_all / gb_tiles:.0f}; this machine computes "
            f"{limits.flops_per_s / limits.bytes_per_s:.0f} while it reads one. Below that memory decides."
        )
        bound = 1000 * work * (T + 1) / (2 * T) / limits.flops_per_s  # ms, for the visible scores
        shares = ", ".join(f"{name} {rep.share_of(bound, row['ms'])}" for name, row in last.items())
        report.why(
            f"Causality hides half of the scores; tiles leave out {100 - 100 * n_run / n_all:.0f}% "
            f"({n_run} of {n_all:.0f} run), the textbook form none. The visible ones take {bound:.0f} ms at "
            f"{limits.flops_per_s / 1e9:.0f} GFLOP/s. Share reached: {shares}."
        )
        (small, larger, *_), largest = tiles, tiles[-1]
        saved = (small["ms"] - larger["ms"]) / (small["tiles computed"] - larger["tiles computed"])
        saves = f"each one less saves {1000 * saved:.0f} us" if saved > 0 else "fewer save nothing here"
        report.why(
            f"The best tile is {tile}. A tile takes about 15 calls of PyTorch: from {small['tile']} to "
            f"{larger['tile']}, {saves}. At {largest['tile']} more hidden scores are computed "
            f"({largest['scores computed %']:.0f}% of all are), and {largest['scores of a tile MB']:.1f} MB "
            "have to stay in the cache between the calls."
        )
        faster = next((n for n in lengths if sweep[1, n, "from scratch"]["speed-up"] > 1), "no")
        report.why(
            f"From scratch beats the textbook form from {faster} tokens on, at {T} by "
            f"{last['from scratch']['speed-up']:.1f} times. A fused kernel (SDPA) spares the calls as well: "
            f"{last['SDPA']['speed-up']:.1f} times."
        )
        operations = rep.forward_cost(p, vocab_size, B, W, 0, dtype).flops
        share = 2 * p.n_layers * p.d_model * B * W * (W + 1) / operations
        ttft, ms = prefill["textbook"].ttft_ms, p.n_layers * sweep[B, W, "textbook"]["ms"]
        without = ttft / max(ttft - ms, 1e-9)
        report.why(
            f"GPTlite gains little: at {W} tokens attention is {100 * share:.0f}% of the operations and "
            f"{100 * ms / ttft:.0f}% of the textbook form's TTFT. Without any, TTFT would be {without:.2f} "
            f"times faster; SDPA reached {ttft / prefill['SDPA'].ttft_ms:.2f}."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for name in names:
                mb = [sweep[1, n, name]["peak MB"] for n in lengths]
                axes.plot(lengths, mb, marker="o", label=name)
            axes.set(xlabel="tokens", ylabel="peak memory (MB)", xscale="log", yscale="log")
            axes.set_xticks(lengths, lengths, minor=False)
            axes.tick_params(axis="x", which="minor", labelbottom=False)
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
