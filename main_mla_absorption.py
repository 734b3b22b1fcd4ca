"""Multi-head latent attention (MLA): when to absorb the up-projections, in operations, bytes and time.

The attention of one layer over cached latents, without the rest of the model, which at its context of 256
tokens hides it. Explicit rebuilds keys and values of all heads from the latents and attends to those;
absorbed attends to the latents. The two are equal. Prefill has many queries to share the rebuilding, so
explicit computes less; a decode step has one, so absorbed does, and reads a cache that is much smaller
than that of multi-head attention. Random numbers: only shapes matter for time.

Run: python main_mla_absorption.py

Source: DeepSeek-AI, DeepSeek-V2, 2024.
"""


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


if __name__ == "__main__":
    import torch

    import inference_report as rep
    import inference_utils as utils
    from gptlite import get_gptlite_model_parameters
    from gptlite_kvcache import scaled_dot_product_attention_kv_cache
    from main_mla import MultiHeadAttention_MLA

    parser = rep.options(__doc__, repeats=3, plot=False, data=False, weights=False)
    parser.add_argument("--batch-size", type=rep.positive_int, default=8, help="sequences of the batch")
    widths = {"type": rep.positive_int, "nargs": "+", "default": [384, 192, 96, 48]}
    parser.add_argument("--d-latent", **widths, help="width of latents")
    with rep.script(parser) as args:
        p, dev, B = get_gptlite_model_parameters(), args.device, args.batch_size
        H, D, size = p.n_heads, p.d_head, args.dtype.itemsize
        latents = sorted(set(args.d_latent), reverse=True)
        shapes = [
            (p.seqlen, p.seqlen),
            *((1, n) for n in ((256, 1024) if args.quick else (1024, 4096, 16384))),
        ]
        mlas = {
            r: MultiHeadAttention_MLA(p.d_model, H, D, 0.0, r).eval().to(dev, args.dtype) for r in latents
        }
        config = {"checkpoint": "one layer, random weights", "batch_size": B}
        report = rep.Report(args, "MLA, absorbed or explicit", mlas[latents[0]], **config)
        limits, tables = rep.measure_ceilings(dev, args.dtype), {}
        for Sq, Sk in shapes:
            K, V = (torch.randn(B, H, Sk, D, device=dev).to(args.dtype) for _ in range(2))
            Q, table = torch.randn(B, H, Sq, D, device=dev).to(args.dtype), []

            def add(name, attend, cache, operations, Q=Q, table=table):
                n_bytes = sum(t.numel() for t in cache) * size
                bound = rep.lower_bound_ms(rep.Cost(B * operations, n_bytes), limits)
                with torch.no_grad():
                    ms = utils.median_ms(lambda: attend(Q, *cache), args.repeats, dev)
                table.append(
                    {
                        "form": name,
                        "cache MB": n_bytes / 1e6,
                        "GFLOP": B * operations / 1e9,
                        "ms": ms,
                        "share of the ceiling": rep.share_of(bound, ms),
                    }
                )

            add("MHA", scaled_dot_product_attention_kv_cache, (K, V), attention_operations(Sq, Sk, H, D))
            del K, V
            for r, mla in mlas.items():
                C = torch.randn(B, Sk, r, device=dev).to(args.dtype)  # [B, Sk, C]
                with torch.no_grad():
                    out = [mla.absorbed_attention(Q, C), mla.explicit_attention(Q, C)]  # [B, H, Sq, D]
                same, allowed = utils.largest_difference(*out), utils.TOLERANCE[args.dtype] / 2
                name = f"{Sq} on {Sk}, d_latent {r}: absorbed equals explicit (differ by {same:.0e})"
                report.check(name, same <= allowed)
                costs = [attention_operations(Sq, Sk, H, D, r, absorb) for absorb in (True, False)]
                add(f"MLA {r}, absorbed", mla.absorbed_attention, (C,), costs[0])
                add(f"MLA {r}, explicit", mla.explicit_attention, (C,), costs[1])
            what = "Prefill of" if Sq > 1 else "Decode step,"
            report.sweep(f"{what} {Sq} on {Sk} tokens, {B} sequences, one layer", table)
            tables[Sq, Sk] = {row["form"]: row for row in table}

        W, longest, r = p.seqlen, shapes[-1][1], latents[-1]
        wide = [r for r in latents if r > D]
        even = [f"{D * r / (r - D):.0f} queries at d_latent {r}" for r in latents if r > D]
        report.why(
            "A key costs Sq products of length d_latent if absorbed, else d_latent of length d_head to "
            "rebuild it and Sq to use it. Absorbed computes less up to "
            f"{', '.join(even) or 'any number of queries'}; latents no longer than a head ({D}), always."
        )
        for Sq, Sk in ((W, W), (1, longest)):
            rows = tables[Sq, Sk]
            ratios = []
            for r in latents:
                absorbed, explicit = rows[f"MLA {r}, absorbed"], rows[f"MLA {r}, explicit"]
                more = explicit["GFLOP"] / absorbed["GFLOP"]
                ratios.append(f"{explicit['ms'] / absorbed['ms']:.2f} at {r} (operations {more:.2f})")
            report.why(f"{Sq} on {Sk} tokens: time of explicit over absorbed {', '.join(ratios)}.")
        mha, mla = rows["MHA"], rows[f"MLA {r}, absorbed"]
        report.why(
            f"Against MHA at {Sk} tokens: d_latent {r} reads {mha['cache MB'] / mla['cache MB']:.0f} times "
            f"fewer bytes and computes {mla['GFLOP'] / mha['GFLOP']:.1f} times as much, {mla['ms']:.2f} ms "
            f"against {mha['ms']:.2f} ms. Fewer bytes are time only where reading is the limit: wide latents "
            "trade them for operations, and lose where computing is. The two products read the latents once "
            "each, a fused kernel would once for both."
        )
        report.finish()
