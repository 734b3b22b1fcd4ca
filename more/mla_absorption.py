"""Multi-head latent attention (MLA): when to absorb the up-projections, in operations, bytes and time.

The attention of one layer over cached latents, without the rest of the model, which at its context of 256
tokens hides it. Explicit rebuilds keys and values of all heads from the latents and attends to those;
absorbed attends to the latents, and turns each query into their space and each result back. The two are
equal.

Absorbed wins in a decode step: one query cannot share the rebuilding, and the cache is much smaller than
that of multi-head attention. Explicit wins in a prefill, where many queries share it, unless a latent is no
longer than a head. In between, the number of queries up to which absorbed computes less depends on the
number of keys: break_even says it. Random numbers: only shapes matter for time.

Run: python more/mla_absorption.py

Source: DeepSeek-AI, DeepSeek-V2, 2024.
"""

import math
from functools import partial

import torch

import _root  # noqa: F401 (the files above become importable)


def attention_operations(Sq, Sk, n_heads, d_head, d_latent=None, absorb=False):
    """Operations of the attention of Sq queries over Sk keys in one layer, two for each multiply-add.

    Every query meets every key once in the scores and once in the sum of the values. d_latent None is
    multi-head attention; explicit first rebuilds each key and value from its latent; absorbed works at
    length d_latent, and also turns each query into the latents' space and each result back.
    """
    if d_latent is None:
        return 4 * n_heads * d_head * Sq * Sk
    if absorb:
        return 4 * n_heads * d_latent * Sq * (Sk + d_head)
    return 4 * n_heads * d_head * Sk * (Sq + d_latent)


def break_even(Sk, d_head, d_latent):
    """The most queries over Sk keys for which absorbed needs no more operations than explicit.

    From attention_operations: C Sq (Sk + D) <= D Sk (Sq + C). Infinite where absorbed needs fewer for any.
    """
    more = d_latent * (Sk + d_head) - d_head * Sk  # what a query costs more, but for the rebuilding
    return d_head * Sk * d_latent // more if more > 0 else math.inf


if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from gptlite import get_gptlite_model_parameters
    from gptlite_kvcache import scaled_dot_product_attention_kv_cache
    from inference_utils import alternating_ms
    from main_mla import MultiHeadAttention_MLA

    quick = {"batch_size": 1, "contexts": [256, 1024]}
    parser = harness.options(__doc__, 3, quick=quick, data=False, weights=False, batch_size=8)
    several = {"type": harness.positive_int, "nargs": "+"}
    parser.add_argument("--d-latent", **several, default=[384, 192, 96, 48], help="widths of latents")
    parser.add_argument("--contexts", **several, default=[1024, 4096, 16384], help="keys of a decode step")
    with harness.script(parser) as args, torch.no_grad():
        p, B = get_gptlite_model_parameters(), args.batch_size
        H, D, to = p.n_heads, p.d_head, {"device": args.device, "dtype": args.dtype}
        latents = sorted(set(args.d_latent), reverse=True)
        mlas = {r: MultiHeadAttention_MLA(p.d_model, H, D, 0.0, r).eval().to(**to) for r in latents}
        checkpoint = "one layer, random weights"
        report = harness.Report(args, "MLA, absorbed or explicit", mlas[latents[0]], checkpoint=checkpoint)
        shapes, tables = [(p.seqlen, p.seqlen), *((1, n) for n in sorted(args.contexts))], {}
        for Sq, Sk in shapes:
            Q, K, V = (torch.randn(B, H, n, D).to(**to) for n in (Sq, Sk, Sk))
            forms = {"MHA": partial(scaled_dot_product_attention_kv_cache, Q, K, V)}
            operations = {"MHA": attention_operations(Sq, Sk, H, D)}
            widths = {"MHA": 2 * H * D}  # numbers that a token takes in the cache
            for r, mla in mlas.items():
                C = torch.randn(B, 1, Sk, r).to(**to)  # [B, 1, Sk, C]
                pair = f"MLA {r}, absorbed", f"MLA {r}, explicit"
                for name, attention in zip(
                    pair, (mla.absorbed_attention, mla.explicit_attention), strict=True
                ):
                    operations[name] = attention_operations(Sq, Sk, H, D, r, name == pair[0])
                    widths[name], forms[name] = r, partial(attention, Q, C)
                outputs = (forms[name]() for name in pair)  # [B, H, Sq, D] each
                report.check_close(f"{Sq} on {Sk}, d_latent {r}: absorbed equals explicit", *outputs)
            tables[Sq, Sk] = table = {}
            for name, ms in alternating_ms(forms, args.repeats, args.device).items():
                cost = harness.Cost(B * operations[name], B * Sk * widths[name] * args.dtype.itemsize)
                row = {"method": name, "cache MB": cost.n_bytes / 1e6, "GFLOP": cost.flops / 1e9}
                share = harness.share_of(harness.lower_bound_ms(cost, report.ceilings()), ms)
                table[name] = row | {"time (ms)": ms, "share of the ceiling": share}
            what = "Prefill of" if Sq > 1 else "Decode step,"
            report.sweep(f"{what} {Sq} on {Sk} tokens, {B} sequences, one layer", list(table.values()))
        rows = []
        for Sk in sorted({Sk for _, Sk in shapes}):
            limits = {f"d_latent {r}": break_even(Sk, D, r) for r in latents}
            rows.append({"keys": Sk} | {name: "all" if n == math.inf else n for name, n in limits.items()})
        report.sweep("Queries up to which absorbed computes no more than explicit", rows)

        for Sq, Sk in (shapes[0], shapes[-1]):
            absorbed, explicit = (
                tables[Sq, Sk][f"MLA {latents[0]}, {form}"] for form in ("absorbed", "explicit")
            )
            here = absorbed | {"method": f"{absorbed['method']} ({Sq} on {Sk} tokens)"}
            report.why(
                words.compare(here, explicit, "time (ms)") + words.compare(absorbed, explicit, "GFLOP")
            )
        narrow, mha = tables[Sq, Sk][f"MLA {latents[-1]}, absorbed"], tables[Sq, Sk]["MHA"]
        here = narrow | {"method": f"{narrow['method']} ({Sq} on {Sk} tokens)"}
        more = [words.compare(narrow, mha, key) for key in ("cache MB", "GFLOP")]
        report.why(words.compare(here, mha, "time (ms)") + more[0] + more[1])
        decode = [shape for shape in shapes if shape[0] == 1]
        lines = {
            name: ([Sk for _, Sk in decode], [tables[shape][name]["time (ms)"] for shape in decode])
            for name in tables[decode[0]]
        }
        report.plot_lines(lines, "context", "time of one layer (ms)", "Decode attention", "xy")
        report.finish()
