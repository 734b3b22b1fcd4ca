"""FlashAttention: exact attention without the score matrix in memory.

Idea: textbook attention writes all Sq x Sk scores to memory and reads them back several times; that traffic,
not the arithmetic, is what it waits for. FlashAttention computes the scores tile by tile and keeps for each
query only a running maximum, a running sum and an unnormalised output. Two forms: PyTorch's fused attention
(SDPA) in GPTlite, and the algorithm from scratch in plain PyTorch.

Exact up to rounding. Wins memory at every length (linear instead of quadratic), and time where the scores no
longer fit the processor's cache: long texts. Gains little in GPTlite, whose attention over 256 tokens is a
small part of the work. From scratch it loses on short texts, where its calls of PyTorch cost more than the
traffic that they spare. A decode step has one row of scores: more on it in main_flash_decoding.py.
Deeper: more/flash_attention_backward.py (training), more/flash_attention_kernels.py (tiles and kernels).

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


def tile_scores(Sq, Sk, causal, tile_q, tile_k):
    """How many scores these tiles compute, of Sq x Sk: tiles that the diagonal cuts in full."""
    tiles = score_tiles(Sq, Sk, causal, tile_q, tile_k)
    return sum((q.stop - q.start) * (k.stop - k.start) for q, keys in tiles for k in keys)


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
        which PyTorch keeps every tile's weights; more/flash_attention_backward.py computes them again.
    As in the textbook form, scores are in float32 at least, and weights have the type of V.
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
    wide = torch.promote_types(Q.dtype, torch.float32)  # scores of 16 bits overflow before they are scaled
    q, k, v = (t.flatten(0, 1) for t in (Q, K, V))  # [B*H, S, D]
    q = q.to(wide) / math.sqrt(D)
    out, lse = q.new_empty(B * H, Sq, D), q.new_empty(B * H, Sq, 1)
    with torch.autocast(Q.device.type, enabled=False):  # the tiles are added up in one type
        for queries, key_tiles in score_tiles(Sq, Sk, causal_mask is True, tile_q, tile_k):
            q_tile = q[:, queries]  # [B*H, tile_q, D]
            row_max = q.new_full((*q_tile.shape[:2], 1), float("-inf"))  # [B*H, tile_q, 1]
            row_sum = torch.zeros_like(row_max)  # of exp(score - row_max)
            acc = torch.zeros_like(q_tile)  # output before division by row_sum, [B*H, tile_q, D]
            for keys in key_tiles:
                scores = torch.bmm(q_tile, k[:, keys].to(wide).transpose(1, 2))  # [B*H, tile_q, tile_k]
                hide_scores(scores, causal_mask, queries, keys, Sk - Sq)
                # the maximum cancels in the end, so no gradient passes through it
                new_max = torch.maximum(row_max, scores.detach().amax(dim=-1, keepdim=True))
                # before its first visible key a query's maximum is -inf, and -inf - -inf would be NaN
                shift = new_max.masked_fill(new_max == float("-inf"), 0.0)  # [B*H, tile_q, 1]
                weights = scores.sub_(shift).exp_()  # [B*H, tile_q, tile_k]
                rescale = torch.exp(row_max - shift)  # what the earlier tiles count under the new maximum
                row_sum = row_sum.mul_(rescale).add_(weights.sum(dim=-1, keepdim=True))
                part = torch.bmm(weights.to(V.dtype), v[:, keys])  # [B*H, tile_q, D]
                acc = acc.mul_(rescale).add_(part)
                row_max = new_max
            # a query without keys: its output is 0 / 1 = 0, its log-sum-exp -inf + log(1) = -inf
            row_sum = row_sum.masked_fill(row_sum == 0.0, 1.0)
            out[:, queries] = acc / row_sum
            lse[:, queries] = row_max + row_sum.log()
    return out.view(B, H, Sq, D).to(Q.dtype), lse.view(B, H, Sq)


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite, scaled_dot_product_attention
    from inference_report import Cost, Method
    from inference_utils import alternating_ms, parameters_of
    from main_kvcache import generate

    lengths = [256 * 2**i for i in range(7)]
    parser = harness.options(__doc__, repeats=3, batch_size=16, quick={"batch_size": 2, "max_tokens": 1024})
    parser.add_argument("--max-tokens", type=int, choices=lengths[1:], default=8192, help="longest text")
    parser.add_argument("--tile", type=harness.positive_int, default=256, help="queries and keys of a tile")
    with harness.script(parser) as args:
        text, tile, device = harness.load_text(args), args.tile, args.device
        plain, fused = harness.load_models(args, GPTlite, GPTlite)
        use_sdpa(fused)
        p, B, T = parameters_of(plain), args.batch_size, plain.seqlen
        H, D = p.n_heads, p.d_head
        report = harness.Report(args, "FlashAttention", plain, text=text, prompt_len=T, n_tokens=1)

        # In GPTlite: the prefill of whole contexts
        prompts = text.prompts(B, T)  # [B, T]
        methods = Method("textbook", generate, plain), Method("SDPA", generate, fused)
        rows = report.compare(prompts, 1, *methods, label="")
        with torch.no_grad():
            report.check_close("GPTlite's logits, SDPA and textbook", fused(prompts), plain(prompts))

        # Attention alone, causal, over lengths
        forms = {
            "textbook": scaled_dot_product_attention,
            "from scratch": lambda *qkv: flash_attention(*qkv, True, tile, tile)[0],
            "SDPA": partial(F.scaled_dot_product_attention, is_causal=True),
        }

        def attentions(n, B=1):
            """{form: a call of it on n tokens, whose args are Q, K, V [B, H, n, D]}"""
            qkv = torch.randn(3, B, H, n, D, device=device).to(args.dtype)
            return {name: partial(form, *qkv) for name, form in forms.items()}

        runs = attentions(1000)  # a length that no tile divides
        exact = scaled_dot_product_attention(*(t.float() for t in runs["SDPA"].args))  # [1, H, T, D]
        close = max(1e-5, 4 * torch.finfo(args.dtype).eps)  # the rounding of values up to 4
        for name, run in runs.items():
            report.check_close(f"{name}, 1000 tokens, and float32", run().float(), exact, close)
        lengths = lengths[: lengths.index(args.max_tokens) + 1]
        title = f"Causal attention alone, {H} heads of {D}, tiles of {tile}"
        times = report.time_sweep(f"{title}: time (ms)", "tokens", lengths, attentions)
        peaks = report.memory_sweep(f"{title}: peak memory (MB)", "tokens", lengths, attentions)
        for name in forms if device.type != "mps" else ():  # which has no count of its memory
            grows = peaks[-1][name] / peaks[-2][name]
            as_told = grows > 3 if name == "textbook" else grows < 3
            report.check(f"{name}: twice the tokens, {grows:.1f} times the memory", as_told)

        n, size = lengths[-1], H * D * args.dtype.itemsize
        n_run = tile_scores(n, n, True, tile, tile)
        costs = {  # the textbook form writes or reads the scores, 4 bytes each, 8 times
            "textbook": Cost(4 * H * D * n**2, 4 * n * size + 32 * H * n**2),
            "from scratch": Cost(4 * H * D * n_run, 2 * (n + n_run // min(tile, n)) * size),
            "SDPA": Cost(2 * H * D * n * (n + 1), 4 * n * size),
        }
        report.why(words.compare(rows["SDPA"], rows["textbook"], "ttft_ms"))
        report.why(words.crossover(times, "tokens", "from scratch", "textbook"))
        report.why(words.bounds(times[-1], costs, report.ceilings()))
        alone = p.n_layers * alternating_ms(attentions(T, B), args.repeats, device)["textbook"]
        report.why(words.part("Textbook attention", alone, rows["textbook"]["ttft_ms"], "TTFT"))
        report.plot_sweep(f"{title}: time (ms)")
        report.finish()
