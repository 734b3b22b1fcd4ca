"""FlashAttention: exact attention without the score matrix in memory.

Textbook attention writes all Sq x Sk scores to memory and reads them back several times; that traffic,
not the arithmetic, is what it waits for. FlashAttention computes the scores tile by tile and keeps per
query only a running maximum, a running sum and an unnormalised output, so memory grows linearly.
Exact in both forms here, up to rounding: PyTorch's fused attention (SDPA) in GPTlite, and the algorithm
from scratch in plain PyTorch. Training: main_flash_attention_backward.py.

Run: python main_flash_attention.py

Source: Dao et al., FlashAttention, 2022; Dao, FlashAttention-2, 2023 (the order of loops used here);
Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

import math

import torch
import torch.nn.functional as F

from gptlite import MultiHeadAttention

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
    """Makes a GPTlite use fused attention, in place, and returns it. ValueError for a variant of GPTlite."""
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
        scores.masked_fill_(~visible.tril(queries.start + diagonal - keys.start), float("-inf"))


def flash_attention(Q, K, V, causal_mask=True, tile_q=64, tile_k=64):
    """Exact attention by tiles of tile_q queries and tile_k keys, never a tensor of Sq x Sk.

    Args: Q [B, H, Sq, D]; K, V [B, H, Sk, D]; causal_mask: True hides later positions (query i sees the
        keys up to Sk - Sq + i), False hides nothing, a boolean tensor that broadcasts to
        [B, H, Sq, Sk] is True where a key may be seen.
    Returns: the output [B, H, Sq, D] and the natural log of each query's sum of exp(scores) [B, H, Sq],
        in float32 at least. A query that may see no key gets zeros and -inf. Both have gradients, for
        which PyTorch keeps every tile's weights; main_flash_attention_backward.py computes them again.
    Raises: ValueError for a tile below 1, a mask that is not boolean, Q, K, V that do not fit together.
    """
    if tile_q < 1 or tile_k < 1:
        raise ValueError(f"a tile has at least 1 query and 1 key, not {tile_q} and {tile_k}")
    if K.shape != V.shape or Q.shape[:2] != K.shape[:2] or Q.shape[-1] != K.shape[-1]:
        shapes = ", ".join(str(list(t.shape)) for t in (Q, K, V))
        raise ValueError(f"Q, K, V must be [B, H, Sq, D], [B, H, Sk, D], [B, H, Sk, D], not {shapes}")
    has_mask = isinstance(causal_mask, torch.Tensor)
    if has_mask and causal_mask.dtype != torch.bool:
        raise ValueError(f"the mask must be boolean, True where visible, not {causal_mask.dtype}")
    (B, H, Sq, D), Sk = Q.shape, K.shape[-2]
    causal_mask = causal_mask.expand(B, H, Sq, Sk) if has_mask else bool(causal_mask)
    dtype = torch.promote_types(Q.dtype, torch.float32)  # sums over many keys need more than 16 bits
    q, k, v = (t.to(dtype).flatten(0, 1) for t in (Q, K, V))  # [B*H, S, D]
    q = q / math.sqrt(D)
    out, lse = q.new_empty(B * H, Sq, D), q.new_empty(B * H, Sq, 1)
    with torch.autocast(Q.device.type, enabled=False):  # the tiles are added up in one type
        for queries, key_tiles in score_tiles(Sq, Sk, causal_mask is True, tile_q, tile_k):
            q_tile = q[:, queries]  # [B*H, tile_q, D]
            row_max = q.new_full((*q_tile.shape[:2], 1), float("-inf"))  # [B*H, tile_q, 1]
            row_sum = torch.zeros_like(row_max)  # of exp(score - row_max)
            acc = torch.zeros_like(q_tile)  # output before division by row_sum, [B*H, tile_q, D]
            for keys in key_tiles:
                scores = torch.bmm(q_tile, k[:, keys].transpose(1, 2))  # [B*H, tile_q, tile_k]
                hide_scores(scores, causal_mask, queries, keys, Sk - Sq)
                # the maximum cancels in the end, so no gradient passes through it
                new_max = torch.maximum(row_max, scores.detach().amax(dim=-1, keepdim=True))
                # before its first visible key a query's maximum is -inf, and -inf - -inf would be NaN
                shift = new_max.masked_fill(new_max == float("-inf"), 0.0)  # [B*H, tile_q, 1]
                weights = scores.sub_(shift).exp_()  # [B*H, tile_q, tile_k]
                rescale = torch.exp(row_max - shift)  # what the earlier tiles count under the new maximum
                row_sum = row_sum.mul_(rescale).add_(weights.sum(dim=-1, keepdim=True))
                acc = acc.mul_(rescale).baddbmm_(weights, v[:, keys])
                row_max = new_max
            # a query without keys: its output is 0 / 1 = 0, its log-sum-exp -inf + log(1) = -inf
            row_sum = row_sum.masked_fill(row_sum == 0.0, 1.0)
            out[:, queries] = acc / row_sum
            lse[:, queries] = row_max + row_sum.log()
    return out.view(B, H, Sq, D).to(Q.dtype), lse.view(B, H, Sq)


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


if __name__ == "__main__":
    import statistics
    from functools import partial

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters, scaled_dot_product_attention
    from main_kvcache import generate

    parser = rep.options(__doc__, repeats=3)
    parser.add_argument("--batch-size", type=rep.positive_int, default=16, help="sequences of the prefill")
    with rep.script(parser) as args:
        p, dev, quick, dtype = get_gptlite_model_parameters(), args.device, args.quick, args.dtype
        H, D, W, tolerance = p.n_heads, p.d_head, p.seqlen, utils.TOLERANCE[dtype]
        B = min(args.batch_size, 4) if quick else args.batch_size
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        load = partial(utils.load_model, GPTlite, vocab_size, args.checkpoint)
        model, fused = load().to(dev, dtype), use_sdpa(load().to(dev, dtype))
        report = rep.Report(args, "FlashAttention", model, batch_size=B, prompt_len=W, n_tokens=1)

        # GPTlite: a prefill
        prompts = utils.sample_prompts(valid_data, B, W).to(dev)  # [B, W]
        with torch.no_grad():
            logits = model(prompts)  # [B, W, V]
            apart = utils.largest_difference(fused(prompts), logits)
        losses = [utils.validation_loss(m, valid_data, 4 if quick else 128) for m in (model, fused)]
        report.check(f"GPTlite's logits differ by {apart:.1e}, at most {tolerance:.0e}", apart <= tolerance)
        report.check("the same validation loss", abs(losses[0] - losses[1]) <= tolerance)
        models = {"textbook": model, "SDPA": fused}
        methods = [utils.Method(n, partial(generate, m, prompts, 1, W), [m]) for n, m in models.items()]
        prefill = utils.measure(methods, B, args.repeats)
        figures = {n: {"valid_loss": loss} for n, loss in zip(models, losses, strict=True)}
        report.method_rows(methods, prefill, prompts, logits[:, -1:], figures=figures)

        # Attention alone: the fastest tile (main_flash_attention_kernels.py says why it is that one)
        T, tile_sizes = (512, (64, 128, 256)) if quick else (4096, (64, 128, 256, 512, 1024))
        Q, K, V = torch.randn(3, 1, H, T, D, device=dev).to(dtype)  # [1, H, T, D]
        runs = {t: partial(flash_attention, Q, K, V, True, t, t) for t in tile_sizes}
        tile_ms = utils.alternating_ms(runs, args.repeats, dev)
        tile = min(tile_ms, key=tile_ms.get)

        # Attention alone: all forms, over lengths
        forms = {
            "textbook": scaled_dot_product_attention,
            "from scratch": lambda *qkv: flash_attention(*qkv, True, tile, tile)[0],
            "SDPA": partial(F.scaled_dot_product_attention, is_causal=True),
        }
        lengths = (256, 512, 1024) if quick else (256, 512, 1024, 2048, 4096, 8192)
        sweep = {}  # (batch, tokens, form): row
        for batch_size, T in dict.fromkeys([(B, W), *((1, n) for n in lengths)]):
            Q, K, V = torch.randn(3, batch_size, H, T, D, device=dev).to(dtype)  # [B, H, T, D]
            runs = {name: partial(form, Q, K, V) for name, form in forms.items()}
            ms = utils.alternating_ms(runs, args.repeats, dev)
            exact = scaled_dot_product_attention(Q.float(), K.float(), V.float())  # [B, H, T, D]
            for name, run in runs.items():
                row = {"batch": batch_size, "tokens": T, "form": name, "ms": ms[name]}
                row["speed-up"] = ms["textbook"] / ms[name]
                row["peak MB"] = utils.peak_memory_mb(run, inputs=(Q, K, V))
                row["largest difference"] = utils.largest_difference(run().float(), exact)
                sweep[batch_size, T, name] = row
        report.sweep(
            f"Causal attention, {H} heads of {D}, from scratch by tiles of {tile}", [*sweep.values()]
        )
        worst = {f: max(r["largest difference"] for r in sweep.values() if r["form"] == f) for f in forms}
        for name in forms:
            if name != "textbook":  # in 16 bits the textbook form itself rounds
                equal = worst[name] <= 1e-5 + 2 * worst["textbook"]
                report.check(f"{name}: output differs by {worst[name]:.1e} at most", equal)
            if dev.type != "mps":
                points = [(math.log(n), math.log(sweep[1, n, name]["peak MB"])) for n in lengths[-4:]]
                slope = statistics.linear_regression(*zip(*points, strict=True)).slope
                as_promised = 1.6 < slope < 2.1 if name == "textbook" else slope < 1.2
                report.check(f"{name}: memory grows as tokens^{slope:.2f} up to {T}", as_promised)

        # the scores of long texts lie in memory, so its speed is measured with more than a cache holds
        limits = rep.measure_ceilings(dev, dtype, working_set=50_000_000 if quick else 400_000_000)
        last = {name: sweep[1, T, name] for name in forms}
        n_run = sum(len(keys) for _, keys in score_tiles(T, T, True, tile, tile))
        n_all, work = (T / tile) ** 2, 4 * D * H * T**2  # of all the scores
        gb_whole = 1e-9 * dtype.itemsize * H * (8 * T**2 + 4 * T * D)
        gb_tiles = 1e-9 * max(dtype.itemsize, 4) * H * D * (2 * T + 2 * tile * n_run)
        a_byte, balance = 1e-9 * work / gb_whole, limits.flops_per_s / limits.bytes_per_s
        report.why(
            f"At {T} tokens the textbook form moves {gb_whole:.2f} GB, as five operations write or read the "
            f"scores; tiles of {tile} (the fastest here) {gb_tiles:.3f} GB, keys and values once for {tile} "
            f"queries. That is {a_byte:.1f} operations a byte against "
            f"{1e-9 * work * n_run / n_all / gb_tiles:.1f}; this machine computes {balance:.1f} while it "
            "reads one from memory, so "
            + (
                "memory decides for the textbook form."
                if a_byte < balance
                else "arithmetic decides here: tiles can win only by leaving out hidden scores, and by "
                "scores that stay in the cache from one operation to the next."
            )
        )
        bound = 1000 * work * (T + 1) / (2 * T) / limits.flops_per_s  # ms, for the visible scores
        shares = ", ".join(f"{name} {rep.share_of(bound, row['ms'])}" for name, row in last.items())
        slower = [i for i, n in enumerate(lengths) if sweep[1, n, "from scratch"]["speed-up"] <= 1]
        faster = lengths[max(slower, default=-1) + 1 :]  # lengths from which on it wins
        report.why(
            f"Causality hides half of the scores; tiles leave out {100 - 100 * n_run / n_all:.0f}% "
            f"({n_run} of {n_all:.0f} run), the textbook form none. The visible ones take {bound:.0f} ms at "
            f"{limits.flops_per_s / 1e9:.0f} GFLOP/s. Share reached: {shares}. From scratch wins "
            + (f"from {faster[0]} tokens on" if faster else f"at no length up to {T} for good")
            + f"; at {T} it is {last['from scratch']['speed-up']:.1f} times as fast as the textbook form, a "
            f"fused kernel (SDPA), which spares the calls of PyTorch as well, {last['SDPA']['speed-up']:.1f}."
        )
        cost = rep.forward_cost(p, vocab_size, B, W, 0, dtype)
        share = 2 * p.n_layers * p.d_model * B * W * (W + 1) / cost.flops
        ttft, ms = prefill["textbook"].ttft_ms, p.n_layers * sweep[B, W, "textbook"]["ms"]
        report.why(
            f"GPTlite gains little: at {W} tokens attention is {100 * share:.0f}% of the operations and "
            f"{100 * ms / ttft:.0f}% of the textbook form's TTFT. Without any, it would be "
            f"{ttft / max(ttft - ms, 1e-9):.2f} times faster; SDPA is {ttft / prefill['SDPA'].ttft_ms:.2f}."
        )
        if args.plot:
            lines = {name: [sweep[1, n, name]["peak MB"] for n in lengths] for name in forms}
            rep.plot_lines(args.plot, lengths, lines, "tokens", "peak memory (MB)")
        report.finish()
