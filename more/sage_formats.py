"""SageAttention's later formats, simulated: integers of 4 bits, floats of 8 and of 4 bits.

Idea: with 8-bit integers attention loses next to nothing, so fewer bits are tried, and the product with the
values as well. Each format has its own remedy: scales for rows that are alike, queries without their mean,
weights scaled to the whole range of a small float. Here numbers are rounded as the units of such a GPU would
and then multiplied in float32, so errors are told, and no times.

Approximate, and simulated: the sums inside a GPU's unit are wider or narrower than here, and the softmax runs
over whole rows. Wins in the errors where its remedy meets its trouble: queries that lean towards a vector,
weights that are far from 1. Loses there where numbers are evenly spread, since fewer bits are fewer.

Run: python more/sage_formats.py

Source: Zhang et al., SageAttention2, 2024; Zhang et al., SageAttention3: Microscaling FP4 Attention, 2025.
"""

import math

import torch
import torch.nn.functional as F

import _root  # noqa: F401 (the files above become importable)
from main_sage_attention import quantize, scale_groups, smooth_keys, use_attention, visible_keys


def as_integers(x, n_bits, by, keys):
    codes, scale = quantize(x, n_bits, scale_groups(x.shape[-2], by, keys, x.device))
    return codes * scale


def as_fp8(x, largest):
    """The nearest 8-bit floats (E4M3), scaled so that `largest`, which broadcasts to x, is theirs, 448."""
    scale = largest.clamp(min=1e-12) / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def as_nvfp4(x):
    """The nearest 4-bit floats, 0 to 6, and an 8-bit scale (E4M3) for each 16 numbers along the last axis."""
    n = x.shape[-1]
    groups = F.pad(x, (0, -n % 16)).unflatten(-1, (-1, 16))  # [..., n / 16, 16]
    scale = (groups.abs().amax(dim=-1, keepdim=True) / 6).clamp(max=448)
    scale = scale.to(torch.float8_e4m3fn).to(x.dtype)  # below their smallest: 0, and so are the numbers
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=x.device, dtype=x.dtype)
    sizes = (groups / scale.clamp(min=1e-9)).abs()
    nearest = levels[torch.bucketize(sizes.contiguous(), (levels[1:] + levels[:-1]) / 2)]
    return (nearest * groups.sign() * scale).flatten(-2)[..., :n]


def simulated_attention(Q, K, V, causal_mask=True, qk=None, pv=None, smooth_k=True, smooth_q=False):
    """Attention with rounded operands of both products, multiplied in float32 at least.

    Args: qk: (x [..., S, D], keys) -> x rounded, None for none; pv: None, "fp8" or "nvfp4" for weights and
        values; smooth_q: subtracts the mean of each 128 queries as well, whose scores are added unrounded.
    Returns: [B, H, Sq, D]; as sage_attention otherwise.
    """
    (Sq, D), Sk, wide = Q.shape[-2:], K.shape[-2], torch.promote_types(Q.dtype, torch.float32)
    q, k, v = Q.to(wide) / math.sqrt(D), K.to(wide), V.to(wide)
    if smooth_k:
        k, _ = smooth_keys(k)
    added = 0
    if smooth_q:
        means = torch.cat([b.mean(dim=-2, keepdim=True).expand_as(b) for b in q.split(128, dim=-2)], dim=-2)
        q, added = q - means, means @ k.mT  # [B, H, Sq, D], [B, H, Sq, Sk]
    if qk is not None:
        q, k = qk(q, False), qk(k, True)
    scores, visible = q @ k.mT + added, visible_keys(causal_mask, Sq, Sk, Q.device)
    top = scores.masked_fill(~visible, float("-inf")).amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - top).masked_fill(~visible, 0.0)  # [B, H, Sq, Sk], the largest of a row is 1
    weights, total = weights.nan_to_num(0.0), weights.sum(dim=-1, keepdim=True)
    if pv == "fp8":  # one scale for all weights, one for each channel of the values
        weights, v = as_fp8(weights, weights.new_ones(1)), as_fp8(v, v.abs().amax(dim=-2, keepdim=True))
    elif pv == "nvfp4":  # two levels: a row's weights up to 448 * 6 first, so that small scales have bits
        weights, v = as_nvfp4(weights * (448 * 6)) / (448 * 6), as_nvfp4(v.mT).mT
    return (weights @ v / total.clamp(min=1e-30)).to(V.dtype)


def format_qk(n_bits, by):
    return lambda x, keys: as_integers(x, n_bits, by, keys)


FORMATS = {  # name: what is simulated; the published three last
    "4 bits by block": {"qk": format_qk(4, "block")},
    "4 bits by thread": {"qk": format_qk(4, "thread")},
    "4 bits by thread, queries smoothed": {"qk": format_qk(4, "thread"), "smooth_q": True},
    "SageAttention2, 8 bits": {"qk": format_qk(8, "thread"), "pv": "fp8"},
    "SageAttention2, 4 bits": {"qk": format_qk(4, "thread"), "pv": "fp8", "smooth_q": True},
    "SageAttention3": {"qk": lambda x, keys: as_nvfp4(x), "pv": "nvfp4", "smooth_q": True},
}


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from gptlite import scaled_dot_product_attention
    from gptlite_kvcache import GPTlite_KVCache
    from inference_agreement import COLUMNS, agreement, closer

    parser = harness.options(__doc__, repeats=None)
    with harness.script(parser) as args:
        text, (full,) = harness.load_text(args), harness.load_models(args, GPTlite_KVCache)
        report = harness.Report(
            args, "SageAttention's formats, simulated", full, COLUMNS, ("n_parameters",), text
        )
        texts, rows = text.prompts(2 if args.quick else 16, full.seqlen), {}  # [N, W]
        forms = {name: partial(simulated_attention, **settings) for name, settings in FORMATS.items()}
        report.row("textbook", baseline=True, **report.loss_figures(full, full))
        for name, form in forms.items():
            model = use_attention(harness.load_models(args, GPTlite_KVCache)[0], form)
            figures = report.loss_figures(model, full) | agreement(model, full, texts)
            rows[name] = report.row(f"{name} (simulated)", same_output="approximate", **figures)

        # Errors of the output on tensors of known kinds
        Q, K, V = torch.randn(3, 1, 4, 512, 64, dtype=torch.float64)
        lean = 10.0 * (torch.arange(64) % 10 == 0)  # every tenth channel is large in all rows
        kinds = {"random": (Q, K, V), "keys lean": (Q, K + lean, V), "queries too": (Q + lean, K + lean, V)}
        kinds["sharp"] = 4 * Q, K, V  # few keys get most of the attention
        table = {name: {"format": name} for name in forms}
        for kind, QKV in kinds.items():
            exact = scaled_dot_product_attention(*QKV)
            for name, form in forms.items():
                error = (form(*QKV) - exact).abs().sum() / exact.abs().sum()
                table[name][kind] = error.item()
            for smooth_k, smooth_q in ((False, False), (True, False), (True, True)):
                out = simulated_attention(*QKV, smooth_k=smooth_k, smooth_q=smooth_q)
                name = f"{kind}: nothing rounded, smoothed {smooth_k + smooth_q} times, changes nothing"
                report.check_close(name, out, exact)
        report.sweep("Error of the output, causal, as a share of its size", [*table.values()])

        def compared(one, other, kind):
            pair = ({"method": name, "error": table[name][kind]} for name in (one, other))
            return words.about(kind, words.compare(*pair, "error"))

        thread = "4 bits by thread"
        report.why(compared("4 bits by block", thread, "random"))
        report.why(compared(thread, f"{thread}, queries smoothed", "queries too"))
        eight, four, floats = (rows[name] for name in [*FORMATS][-3:])
        report.why(words.loss(eight) + closer(four, eight))
        report.why(words.loss(floats) + closer(floats, four))
        bars = {n: (range(len(kinds)), [line[kind] for kind in kinds]) for n, line in table.items()}
        report.plot_lines(bars, f"inputs: {', '.join(kinds)}", "error / size of the output", log="y")
        report.finish()
