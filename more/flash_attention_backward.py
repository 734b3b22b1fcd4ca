"""FlashAttention's backward pass: the scores are computed again instead of kept.

Idea: the gradient of attention needs the softmax weights. Textbook attention keeps them from the forward
pass, Sq x Sk numbers for each head and layer until the backward pass; so does PyTorch's record of the tiled
form, tile by tile. FlashAttention keeps one number for each query, the log-sum-exp, from which the weights of
a tile follow by one product and one exponential.

Exact up to rounding. Wins memory, which stays linear in the length, and against the textbook form time on
long texts. Loses one product more (7 in the place of 6, 2 of them forward), which recorded tiles spare, and
from scratch on short texts its many calls of PyTorch. A second derivative is refused.

Run: python more/flash_attention_backward.py

Source: Dao et al., FlashAttention, 2022; Dao, FlashAttention-2, 2023, algorithm 2 (the order of loops and
the log-sum-exp); Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (recomputation).
"""

import math

import torch

import _root  # noqa: F401 (the files above become importable)
from main_flash_attention import flash_attention, hide_scores, score_tiles, tile_scores


class FlashAttention(torch.autograd.Function):
    """flash_attention with its own backward pass; flash_attention_recomputed() is the function to call."""

    @staticmethod
    def forward(ctx, Q, K, V, causal_mask, tile_q, tile_k):
        out, lse = flash_attention(Q, K, V, causal_mask, tile_q, tile_k)  # [B, H, Sq, D], [B, H, Sq]
        ctx.save_for_backward(Q, K, V, out, lse)  # linear in Sq: no score is kept
        ctx.options = causal_mask, tile_q, tile_k
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_lse):
        Q, K, V, out, lse = ctx.saved_tensors
        causal_mask, tile_q, tile_k = ctx.options
        (B, H, Sq, D), Sk = Q.shape, K.shape[-2]
        has_mask = isinstance(causal_mask, torch.Tensor)
        causal_mask = causal_mask.expand(B, H, Sq, Sk) if has_mask else bool(causal_mask)
        q, k, v, do, o = (t.to(lse.dtype).flatten(0, 1) for t in (Q, K, V, grad_out, out))  # [B*H, S, D]
        q = q / math.sqrt(D)
        no_keys = (lse == float("-inf")).view(B * H, Sq, 1)
        lse = lse.reshape(B * H, Sq, 1).masked_fill(no_keys, 0.0)
        # softmax couples the scores of a row only through this sum
        delta = (do * o).sum(dim=-1, keepdim=True) - grad_lse.reshape(B * H, Sq, 1)  # [B*H, Sq, 1]
        delta = delta.masked_fill(no_keys, 0.0)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        with torch.autocast(Q.device.type, enabled=False):  # the tiles are added up in one type
            for queries, key_tiles in score_tiles(Sq, Sk, causal_mask is True, tile_q, tile_k):
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


def flash_attention_recomputed(Q, K, V, causal_mask=True, tile_q=64, tile_k=64):
    """flash_attention, equal in arguments, results and gradients, whose memory stays linear in training.

    Args: Q [B, H, Sq, D]; K, V [B, H, Sk, D]; causal_mask, tile_q, tile_k: as in flash_attention.
    Returns: the output [B, H, Sq, D] and the log-sum-exp of the scores [B, H, Sq], both with first
        derivatives (a second one raises RuntimeError). Raises ValueError as flash_attention does.
    """
    return FlashAttention.apply(Q, K, V, causal_mask, tile_q, tile_k)


if __name__ == "__main__":
    import copy
    from functools import partial

    import torch.nn.functional as F

    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite, scaled_dot_product_attention
    from inference_report import Cost
    from inference_utils import alternating_ms, parameters_of, peak_memory_mb
    from main_flash_attention import use_sdpa

    lengths = [256 * 2**i for i in range(6)]
    parser = harness.options(__doc__, repeats=3, batch_size=16, quick={"batch_size": 2, "max_tokens": 1024})
    parser.add_argument("--max-tokens", type=int, choices=lengths[1:], default=4096, help="longest text")
    parser.add_argument("--tile", type=harness.positive_int, default=256, help="queries and keys of a tile")
    columns = {"step_ms": ("step ms", "{:.1f}"), "same_output": ("same gradient", "{}")}
    with harness.script(parser) as args:
        plain, fused = harness.load_models(args, GPTlite, GPTlite, packed=False)
        models, T, tile = {"textbook": plain, "SDPA": use_sdpa(fused)}, plain.seqlen, args.tile
        H, D = parameters_of(plain).n_heads, parameters_of(plain).d_head
        report = harness.Report(args, "FlashAttention, backward", plain, columns, prompt_len=T)
        tokens = harness.load_text(args).prompts(args.batch_size, T + 1, "train")  # [B, T + 1]

        def apart(found, expected):
            """Length of the difference of two gradients, as a share of the gradient's length."""
            a, b = (torch.cat([g.float().flatten() for g in part]) for part in (found, expected))
            return ((a - b).norm() / b.norm()).item()

        def step(model):  # a training step of GPTlite, but for the optimiser
            loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
            return torch.autograd.grad(loss, [*model.parameters()])

        # compared in float32, as layers of rounding to 16 bits would hide what is wrong
        share = apart(*(step(copy.deepcopy(model).float()) for model in models.values()))
        report.check(f"GPTlite's gradient (float32), textbook and SDPA: {share:.0e} apart", share < 1e-4)
        ms = alternating_ms({n: partial(step, m) for n, m in models.items()}, args.repeats, args.device)
        for name, model in models.items():
            figures = {"peak_memory_mb": peak_memory_mb(partial(step, model), model, inputs=[tokens])}
            figures |= {"step_ms": ms[name], "same_output": share < 1e-4 or name == "textbook"}
            report.row(name, baseline=name == "textbook", **figures)

        forms = {
            "textbook": scaled_dot_product_attention,
            "from scratch": lambda *qkv: flash_attention_recomputed(*qkv, True, tile, tile)[0],
            "recorded tiles": lambda *qkv: flash_attention(*qkv, True, tile, tile)[0],
            "SDPA": partial(F.scaled_dot_product_attention, is_causal=True),
        }

        def gradients(form, Q, K, V, grad):
            inputs = [t.detach().requires_grad_() for t in (Q, K, V)]
            return torch.autograd.grad(form(*inputs), inputs, grad)

        def attentions(n):
            """{form: its gradients on n tokens, over Q, K, V and the output's gradient [1, H, n, D]}"""
            inputs = torch.randn(4, 1, H, n, D, device=args.device).to(args.dtype)
            return {name: partial(gradients, form, *inputs) for name, form in forms.items()}

        runs, close = attentions(1000), max(1e-5, 4 * torch.finfo(args.dtype).eps)  # no tile divides 1000
        exact = gradients(forms["textbook"], *(t.float() for t in runs["SDPA"].args[1:]))
        for name, run in runs.items():
            share = apart(run(), exact)
            report.check(f"{name}, 1000 tokens, and float32: gradients {share:.0e} apart", share < close)
        lengths = lengths[: lengths.index(args.max_tokens) + 1]
        title = f"Forward and backward of causal attention, {H} heads of {D}, tiles of {tile}"
        times = report.time_sweep(f"{title}: time (ms)", "tokens", lengths, attentions)
        report.memory_sweep(f"{title}: peak memory (MB)", "tokens", lengths, attentions)

        n, run = lengths[-1], tile_scores(lengths[-1], lengths[-1], True, tile, tile)
        # products over the scores: 2 forward and 4 backward, 5 where the scores are computed again
        products = {"textbook": 12 * n**2, "from scratch": 14 * run, "SDPA": 7 * n * (n + 1)}
        costs = {name: Cost(H * D * x, 8 * n * H * D * args.dtype.itemsize) for name, x in products.items()}
        plain, fused = report.data["rows"]
        report.why(words.compare(fused, plain, "step_ms") + words.compare(fused, plain, "peak_memory_mb"))
        report.why(words.crossover(times, "tokens", "from scratch", "textbook"))
        report.why(words.crossover(times, "tokens", "from scratch", "recorded tiles"))
        report.why(words.bounds(times[-1], costs, report.ceilings()))
        report.plot_sweep(f"{title}: time (ms)")
        report.finish()
