"""FlashAttention's backward pass: the scores are computed again instead of kept.

The gradient of attention needs the softmax weights. Textbook attention keeps them from the forward pass,
Sq x Sk numbers a head and layer until the backward pass; so does PyTorch's record of the tiled form, tile
by tile. FlashAttention keeps one number a query, the log-sum-exp, from which each tile's weights follow by
one product and one exponential: more arithmetic, memory linear in the length. Exact up to rounding.

Run: python main_flash_attention_backward.py

Source: Dao et al., FlashAttention, 2022; Dao, FlashAttention-2, 2023, algorithm 2 (the order of loops and
the log-sum-exp); Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (recomputation).
"""

import math

import torch

from main_flash_attention import flash_attention, hide_scores, score_tiles


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
    import statistics
    from functools import partial

    import torch.nn.functional as F

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters, scaled_dot_product_attention
    from main_flash_attention import use_sdpa

    parser = rep.options(__doc__, repeats=3)
    parser.add_argument("--batch-size", type=rep.positive_int, default=16, help="texts of a training step")
    parser.add_argument("--tile", type=rep.positive_int, default=256, help="queries and keys of a tile")
    with rep.script(parser) as args:
        p, dev, quick, dtype = get_gptlite_model_parameters(), args.device, args.quick, args.dtype
        H, D, W, L, tile = p.n_heads, p.d_head, p.seqlen, p.n_layers, args.tile
        tolerances = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # of gradients
        B = min(args.batch_size, 2) if quick else args.batch_size
        lengths = (256, 512, 1024) if quick else (256, 512, 1024, 2048, 4096)
        vocab_size, train_data, _, _, _ = get_shakespeare_data(args.data)
        load = partial(utils.load_model, GPTlite, vocab_size, args.checkpoint)
        models = {"textbook": load().to(dev, dtype), "SDPA": use_sdpa(load().to(dev, dtype))}
        columns = {"step_ms": ("step ms", "{:.1f}"), "same_output": ("same gradient", "{}")}
        sizes = {"batch_size": B, "prompt_len": W}
        report = rep.Report(args, "FlashAttention, backward", models["textbook"], columns, **sizes)

        # GPTlite: forward and backward of a training step
        def training_step(model, x, y):
            loss = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
            return torch.autograd.grad(loss, [*model.parameters()])

        def share_apart(gradients, expected, scales=None):
            """Largest difference in any tensor, as a share of the largest gradient in that tensor."""
            shares = []
            for a, b, scale in zip(gradients, expected, scales or expected, strict=True):
                shares.append(utils.largest_difference(a.float(), b.float()) / scale.abs().max().item())
            return max(shares)

        tokens = utils.sample_prompts(train_data, B, W + 1).to(dev)  # [B, T + 1]
        x, y = tokens[:, :-1], tokens[:, 1:]  # [B, T]
        steps = {name: partial(training_step, m, x, y) for name, m in models.items()}
        step_ms = utils.alternating_ms(steps, args.repeats, dev)
        # compared in float32, as six layers of rounding to 16 bits would hide what is wrong
        found = {name: training_step(copy.deepcopy(m).float(), x, y) for name, m in models.items()}
        names, step_mb = [name for name, _ in models["textbook"].named_parameters()], {}
        by_name = dict(zip(names, found["textbook"], strict=True))
        # softmax ignores a shift of all keys: the gradient of their bias is 0, what is found is rounding
        scales = [by_name[name.replace("key_proj.bias", "query_proj.bias")] for name in names]
        for name, step in steps.items():
            apart = share_apart(found[name], found["textbook"], scales)
            same = apart <= tolerances[torch.float32]
            step_mb[name] = utils.peak_memory_mb(step, models[name], inputs=(x, y))
            figures = {"step_ms": step_ms[name], "peak_memory_mb": step_mb[name], "same_output": same}
            report.row(name, baseline=name == "textbook", **figures)
        report.check(f"GPTlite, SDPA: gradients (float32) differ by {apart:.0e} of a tensor's largest", same)

        # Attention alone
        forms = {
            "textbook": scaled_dot_product_attention,
            "from scratch, recorded": lambda *qkv: flash_attention(*qkv, True, tile, tile)[0],
            "from scratch": lambda *qkv: flash_attention_recomputed(*qkv, True, tile, tile)[0],
            "SDPA": partial(F.scaled_dot_product_attention, is_causal=True),
        }

        def gradients(form, Q, K, V, grad):
            return torch.autograd.grad(form(Q, K, V), (Q, K, V), grad)

        sweep, worst = {}, dict.fromkeys(forms, 0.0)  # (tokens, form): row; form: largest difference
        for T in lengths:
            *qkv, grad = torch.randn(4, 1, H, T, D, device=dev).to(dtype).unbind(0)  # [1, H, T, D]
            Q, K, V = (t.requires_grad_() for t in qkv)
            exact = gradients(
                forms["textbook"], *(t.detach().float().requires_grad_() for t in qkv), grad.float()
            )
            forward = {name: partial(form, Q, K, V) for name, form in forms.items()}
            both = {name: partial(gradients, form, Q, K, V, grad) for name, form in forms.items()}
            forward_ms, ms = (utils.alternating_ms(runs, args.repeats, dev) for runs in (forward, both))
            for name, run in both.items():
                apart = share_apart(run(), exact)
                worst[name] = max(worst[name], apart)
                sweep[T, name] = {"tokens": T, "form": name, "forward ms": forward_ms[name]}
                sweep[T, name] |= {"both ms": ms[name], "speed-up": ms["textbook"] / ms[name]}
                sweep[T, name] |= {"peak MB": utils.peak_memory_mb(run, inputs=(Q, K, V, grad))}
                sweep[T, name] |= {"difference / largest": apart}
        title = f"Attention alone, forward and backward, {H} heads of {D}, causal, tiles of {tile}"
        report.sweep(title, [*sweep.values()])
        small = torch.randn(3, 1, 2, 7, 3, dtype=torch.float64)  # finite differences need float64
        Q, K, V = (t.requires_grad_() for t in small.unbind(0))  # [1, 2, 7, 3]
        checked = partial(flash_attention_recomputed, causal_mask=True, tile_q=2, tile_k=3)
        passed = torch.autograd.gradcheck(checked, (Q[:, :, :5], K, V), raise_exception=False)
        report.check("from scratch: gradients equal finite differences (gradcheck)", passed)
        for name in [*forms][1:]:
            equal = worst[name] <= tolerances[dtype]
            report.check(f"{name}: gradients differ by {worst[name]:.1e} of a tensor's largest", equal)
        for name in ("textbook", "from scratch", "SDPA") if dev.type != "mps" else ():
            points = [(math.log(n), math.log(sweep[n, name]["peak MB"])) for n in lengths[-4:]]
            slope = statistics.linear_regression(*zip(*points, strict=True)).slope
            as_promised = 1.6 < slope < 2.1 if name == "textbook" else slope < 1.2
            report.check(f"{name}: memory grows as tokens^{slope:.2f} up to {T}", as_promised)

        _, recorded, ours, fused = (sweep[T, name] for name in forms)
        n_run = sum(len(keys) for _, keys in score_tiles(T, T, True, tile, tile))
        mb_scores = 1e-6 * dtype.itemsize * H * T**2
        mb_tiles = 1e-6 * max(dtype.itemsize, 4) * H * n_run * min(tile, T) ** 2
        report.why(
            f"For the backward pass over {T} tokens the textbook form keeps {mb_scores:.0f} MB of softmax "
            f"weights, the recorded tiles up to {mb_tiles:.0f} MB (none is above the diagonal), recomputing "
            f"one number a query, {4e-6 * H * T:.2f} MB. GPTlite has {L} such layers."
        )
        limits = rep.measure_ceilings(dev, dtype)
        bound = 1000 * 7 * D * H * T * (T + 1) / limits.flops_per_s  # ms: 7 products over visible scores
        named = {"from scratch": ours, "SDPA": fused}
        shares = ", ".join(f"{name} {rep.share_of(bound, row['both ms'])}" for name, row in named.items())
        report.why(
            "A tile takes 2 products forward and 5 backward; 1 of these repeats the scores: 7 in place of 6. "
            f"Over the visible scores that is {bound:.0f} ms at {limits.flops_per_s / 1e9:.0f} GFLOP/s. "
            f"Share reached: {shares}."
        )
        ratio = [(row["both ms"] - row["forward ms"]) / row["forward ms"] for row in named.values()]
        report.why(
            f"By the products alone backward takes 2.5 times the forward: {ratio[0]:.1f} from scratch, "
            f"{ratio[1]:.1f} SDPA. Reading recorded tiles spares the repeated product and takes "
            f"{recorded['both ms'] / ours['both ms']:.2f} times the time of recomputing them."
        )
        slower = [n for n in lengths if sweep[n, "from scratch"]["speed-up"] <= 1]
        report.why(
            f"At {T} tokens from scratch trains {ours['speed-up']:.1f} times as fast as the textbook form, "
            f"SDPA {fused['speed-up']:.1f} times. "
            + (
                f"Up to {slower[-1]} from scratch can lose: there its calls of PyTorch cost more than the "
                "traffic they spare."
                if slower
                else f"From scratch wins at every length here, from {lengths[0]} on."
            )
        )
        if dev.type != "mps":
            report.why(
                f"GPTlite's step of {B} x {W} tokens keeps {1e-6 * dtype.itemsize * L * B * H * W**2:.0f} MB "
                f"of softmax weights. SDPA keeps none: {step_mb['SDPA'] / step_mb['textbook']:.2f} of the "
                f"peak, and {step_ms['textbook'] / step_ms['SDPA']:.2f} times as fast."
            )
        if args.plot:
            lines = {name: [sweep[n, name]["peak MB"] for n in lengths] for name in forms}
            rep.plot_lines(args.plot, lengths, lines, "tokens", "peak memory, forward and backward (MB)")
        report.finish()
