"""FlashAttention's speed: the size of a tile, and the fused kernels that PyTorch has.

Idea: the algorithm is one, how fast it runs is a matter of two choices. The tile: small ones mean many calls,
large ones compute hidden scores and no longer fit the processor's cache. The kernel: SDPA picks one of
several fused backends, FlexAttention compiles one for the mask that it is given.

Exact up to rounding. A fused kernel wins since a tile stays in registers and cache from one product to the
next; it loses a form of one's own, as each computes what it was written for. FlexAttention wins where a mask
hides whole blocks, which it skips whatever the mask is, and loses the seconds that its first call compiles.

Run: python more/flash_attention_kernels.py

Source: Dao, FlashAttention-2, 2023; Dong et al., Flex Attention: A Programming Model for Generating
Optimized Attention Kernels, 2024.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import _root  # noqa: F401 (the files above become importable)
from main_flash_attention import flash_attention, tile_scores

BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")


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


def kernels(T, device, compiled=True):
    """{name: function of Q, K, V [B, H, T, D]}: what computes causal attention over T tokens on this device.

    compiled: False leaves out what compiles itself.
    """
    forms = {"SDPA": partial(F.scaled_dot_product_attention, is_causal=True)}
    if device.type == "cuda":
        forms |= {f"SDPA {n.lower()}": partial(sdpa, backend=getattr(SDPBackend, n)) for n in BACKENDS}
    if compiled and device.type != "mps":
        forms["FlexAttention"] = flex_causal(T, device)
    return forms


if __name__ == "__main__":
    import warnings

    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite, scaled_dot_product_attention
    from inference_report import Cost
    from inference_utils import Timer, alternating_ms, parameters_of, peak_memory_mb

    quick = {"batch_size": 2, "max_tokens": 512}
    parser = harness.options(__doc__, repeats=3, batch_size=16, quick=quick, data=False, plot=False)
    parser.add_argument("--max-tokens", type=harness.positive_int, default=4096, help="longest text")
    columns = {"attention_ms": ("ms", "{:.2f}"), "first_call_ms": ("first call ms", "{:.0f}")}
    with harness.script(parser) as args:
        (model,) = harness.load_models(args, GPTlite)  # only its shape matters here
        p, device, n = parameters_of(model), args.device, args.max_tokens
        H, D = p.n_heads, p.d_head
        report = harness.Report(args, "FlashAttention's kernels", model, columns, max_tokens=n)

        def draw(B, T):
            return torch.randn(3, B, H, T, D, device=device).to(args.dtype)  # Q, K, V [B, H, T, D]

        # From scratch: the size of a tile
        inputs, tiles = draw(1, n), [64 * 2**i for i in range(3 if args.quick else 5)]
        runs = {tile: partial(flash_attention, *inputs, True, tile, tile) for tile in tiles}
        ms, sizes = alternating_ms(runs, args.repeats, device), []
        for tile in tiles:
            row = {"tile": tile, "ms": ms[tile], "a tile's scores (MB)": 4e-6 * H * min(tile, n) ** 2}
            sizes.append(row | {"scores computed (%)": 100 * tile_scores(n, n, True, tile, tile) / n**2})
        report.sweep(f"From scratch, {n} tokens, {H} heads of {D}, causal", sizes)
        best = min(tiles, key=ms.get)

        # All kernels: GPTlite's shape, then one long text
        close = max(1e-5, 4 * torch.finfo(args.dtype).eps)  # the rounding of values up to 4
        own = {"textbook": scaled_dot_product_attention}
        own["from scratch"] = lambda *qkv: flash_attention(*qkv, True, best, best)[0]
        for B, T in ((args.batch_size, model.seqlen), (1, n)):
            inputs, first_ms, runs = draw(B, T), {}, {}
            exact = scaled_dot_product_attention(*inputs.float())  # [B, H, T, D]
            for name, form in (own | kernels(T, device, compiled=not args.quick)).items():
                run = partial(form, *inputs)
                try:
                    with warnings.catch_warnings(action="ignore"), Timer(device) as timer:
                        out = run()  # [B, H, T, D]
                except RuntimeError:  # a backend that does not take these inputs, or no compiler
                    if name in (*own, "SDPA"):
                        raise
                    report.row(f"{name}, {B} x {T}")  # a row without figures: it does not apply here
                    continue
                runs[name], first_ms[name] = run, timer.ms
                report.check_close(f"{name}, {B} x {T}, and float32", out.float(), exact, close)
            ms, tables = alternating_ms(runs, args.repeats, device), {}
            for name, run in runs.items():
                figures = {"attention_ms": ms[name], "first_call_ms": first_ms[name]}
                figures["peak_memory_mb"] = peak_memory_mb(run, inputs=inputs)
                tables[name] = report.row(f"{name}, {B} x {T}", baseline=name == "textbook", **figures)

        report.why(
            words.choose(
                tiles.index(best),
                (len(tiles) - 1, f"The largest tile is the fastest, {best}: fewer calls still save time."),
                (1, f"Tiles of {best} are the fastest: smaller take more calls, larger more scores."),
                f"The smallest tile is the fastest, {best}: calls cost less here than hidden scores.",
            )
        )
        rest = {name: row for name, row in tables.items() if name not in own}
        fastest = min(rest.values(), key=lambda row: row["attention_ms"])
        report.why(words.compare(fastest, tables["textbook"], "attention_ms"))
        visible = Cost(2 * H * D * n * (n + 1), 4 * n * H * D * args.dtype.itemsize)
        report.why(words.bounds(ms, dict.fromkeys(ms, visible), report.ceilings()))
        if "FlexAttention" in ms:
            saved = ms["textbook"] - ms["FlexAttention"]
            report.why(words.pays_back(first_ms["FlexAttention"], saved, "ms", "calls"))
        report.finish()
