"""FlashAttention's speed: the size of a tile, and the fused kernels that PyTorch has.

The algorithm is one, how fast it runs is a matter of two choices. The tile: small ones mean many calls,
large ones compute hidden scores and no longer fit the processor's cache. The kernel: SDPA picks one of
several fused backends, FlexAttention compiles one for the mask it is given. All are exact up to rounding.

Run: python main_flash_attention_kernels.py

Source: Dao, FlashAttention-2, 2023; Dong et al., Flex Attention: A Programming Model for Generating
Optimized Attention Kernels, 2024.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from main_flash_attention import flash_attention, score_tiles


def sdpa(Q, K, V, backend):
    """PyTorch's fused causal attention [B, H, T, D] by one of its backends. RuntimeError if it cannot."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(Q, K, V, is_causal=True)


def flex_causal(T, device):
    """FlexAttention with a causal mask for T tokens: a function of Q, K, V [B, H, T, D].

    The function compiles itself at its first call, and raises RuntimeError where that is not possible.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, T, T, device=str(device))
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)


def tile_counts(T, tile):
    """(tiles that causal attention over T tokens computes, tiles in all)."""
    n_run = sum(len(keys) for _, keys in score_tiles(T, T, True, tile, tile))
    return n_run, math.ceil(T / tile) ** 2


if __name__ == "__main__":
    import warnings

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters, scaled_dot_product_attention

    parser = rep.options(__doc__, repeats=3, plot=False, data=False)
    parser.add_argument(
        "--batch-size", type=rep.positive_int, default=16, help="sequences of GPTlite's shape"
    )
    with rep.script(parser) as args:
        p, dev, quick, dtype = get_gptlite_model_parameters(), args.device, args.quick, args.dtype
        H, D, W, B = p.n_heads, p.d_head, p.seqlen, args.batch_size
        lengths = (512,) if quick else (1024, 4096)
        vocab_size, _, _, _, _ = get_shakespeare_data()
        model = utils.load_model(GPTlite, vocab_size, args.checkpoint)  # only its shape matters here
        columns = {"attention_ms": ("ms", "{:.2f}"), "first_call_ms": ("first call ms", "{:.0f}")}
        report = rep.Report(args, "FlashAttention's kernels", model, columns, batch_size=B, prompt_len=W)

        # From scratch: the size of a tile, at one length
        T, tile_sizes = (512, (64, 128, 256)) if quick else (4096, (64, 128, 256, 512, 1024))
        Q, K, V = torch.randn(3, 1, H, T, D, device=dev).to(dtype)  # [1, H, T, D]
        runs = {t: partial(flash_attention, Q, K, V, True, t, t) for t in tile_sizes}
        tiles = []
        for t, ms in utils.alternating_ms(runs, args.repeats, dev).items():
            n_run, n_all = tile_counts(T, t)
            counts = {"tiles computed": n_run, "of": n_all, "scores computed %": 100 * n_run / n_all}
            tiles.append({"tile": t, "ms": ms, **counts, "scores of a tile MB": 4e-6 * H * t**2})
        report.sweep(f"From scratch at {T} tokens, {H} heads of {D}, causal", tiles)
        best = min(tiles, key=lambda row: row["ms"])

        # PyTorch's kernels: GPTlite's shape, then longer
        forms = {
            "textbook": scaled_dot_product_attention,
            "from scratch": lambda *qkv: flash_attention(*qkv, True, best["tile"], best["tile"])[0],
            "SDPA": partial(F.scaled_dot_product_attention, is_causal=True),
        }
        always = tuple(forms)
        if dev.type == "cuda":
            for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
                forms[f"SDPA {name.lower()}"] = partial(sdpa, backend=getattr(SDPBackend, name))
        sweep, worst = {}, {}  # (tokens, form): row; form: largest difference
        for batch_size, T in ((B, W), *((1, n) for n in lengths)):
            Q, K, V = torch.randn(3, batch_size, H, T, D, device=dev).to(dtype)  # [B, H, T, D]
            exact = scaled_dot_product_attention(Q.float(), K.float(), V.float())  # [B, H, T, D]
            if not quick and dev.type != "mps":
                forms["FlexAttention"] = flex_causal(T, dev)
            runs, first_ms = {}, {}
            for name, form in forms.items():
                run = partial(form, Q, K, V)
                try:
                    with warnings.catch_warnings(action="ignore"), utils.Timer(dev) as timer:
                        out = run()  # [B, H, T, D]
                except RuntimeError:  # a backend that does not take these inputs, no compiler
                    if name in always:
                        raise
                    continue
                runs[name], first_ms[name] = run, timer.ms
                worst[name] = max(worst.get(name, 0.0), utils.largest_difference(out.float(), exact))
            ms = utils.alternating_ms(runs, args.repeats, dev)
            for name, run in runs.items():
                mb = utils.peak_memory_mb(run, inputs=(Q, K, V))
                sweep[T, name] = {
                    "batch": batch_size,
                    "tokens": T,
                    "form": name,
                    "first call ms": first_ms[name],
                }
                sweep[T, name] |= {"ms": ms[name], "speed-up": ms["textbook"] / ms[name], "peak MB": mb}
                if T == W:
                    figures = {
                        "attention_ms": ms[name],
                        "first_call_ms": first_ms[name],
                        "peak_memory_mb": mb,
                    }
                    report.row(name, baseline=name == "textbook", **figures)
        report.sweep(f"Causal attention, {H} heads of {D}; the first call compiles", [*sweep.values()])
        for name in [*worst][1:]:  # in 16 bits the textbook form itself rounds
            equal = worst[name] <= 1e-5 + 2 * worst["textbook"]
            report.check(f"{name}: output differs by {worst[name]:.1e} at most", equal)

        (small, larger, *_), largest = tiles, tiles[-1]
        saved = (small["ms"] - larger["ms"]) / (small["tiles computed"] - larger["tiles computed"])
        saves = f"each one less saves {1000 * saved:.0f} us" if saved > 0 else "fewer save nothing here"
        report.why(
            f"The best tile is {best['tile']}. A tile takes about 15 calls of PyTorch: from {small['tile']} "
            f"to {larger['tile']}, {saves}. At {largest['tile']} more hidden scores are computed "
            f"({largest['scores computed %']:.0f}% of all are), and {largest['scores of a tile MB']:.1f} MB "
            "have to stay in the cache between the calls."
        )
        limits = rep.measure_ceilings(dev, dtype)
        bound = (
            2e3 * D * H * T * (T + 1) / limits.flops_per_s
        )  # ms, for the visible scores at the last length
        rows = [row for (n, _), row in sweep.items() if n == T]
        fastest = min(rows, key=lambda row: row["ms"])
        shares = ", ".join(f"{row['form']} {rep.share_of(bound, row['ms'])}" for row in rows)
        report.why(
            f"At {T} tokens the visible scores take at least {bound:.1f} ms at "
            f"{limits.flops_per_s / 1e9:.0f} GFLOP/s. Share reached: {shares}. {fastest['form']} is the "
            f"fastest, {fastest['speed-up']:.1f} times the textbook form. A fused kernel keeps a tile in "
            "registers and cache from one product to the next."
        )
        if "FlexAttention" in worst:
            flex, fused = (sweep[T, name] for name in ("FlexAttention", "SDPA"))
            report.why(
                f"FlexAttention's first call compiled for {flex['first call ms'] / 1000:.1f} s; then it "
                f"takes {flex['ms'] / fused['ms']:.2f} times the time of SDPA. What it adds: it skips the "
                "blocks that a mask hides, whatever the mask is."
            )
        report.finish()
