"""Attention that reads a quantised cache without unpacking it first, and from how many keys on that pays.

Idea: a decode step over a long context waits for reading keys and values, so a cache of a quarter of the
bytes should take a quarter of the time. It does only if no unpacked copy is written: one loop must read a
byte, take it apart and add the numbers to a sum. Scales and zero points leave the sums, q (c s + z) =
(q s) c + q z, and the compiler makes a loop of what is written here as products and sums.

Approximate as the quantisation is; the forms agree up to rounding. Wins where the cache is larger than the
processor's own caches, so that reading it takes longer than taking bytes apart. Loses where it is not, and
as long as it is not compiled, since sums of products are then written to memory. The fewer bits, the more
arithmetic a byte needs: where computing is the limit, fewer bits buy memory alone.

Run: python more/kv_quantization_speed.py

Source: Liu et al., KIVI, 2024 (its kernels join unpacking and the product); Milakov and Gimelshein, Online
normalizer calculation for softmax, 2018.
"""

import math
import os
import shutil

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_gqa import grouped_attention
from main_kv_quantization import dequantize_groups, quantize_groups, unpack


def unpacked_attention(q, packed_k, packed_v, new_k, new_v, key_bits, value_bits):
    """Attention of one query to a quantised cache: unpacks it, then attends. The naive twin of the next."""
    k = torch.cat([dequantize_groups(packed_k, key_bits, q), new_k], dim=-2)  # [B, H, Sk, D]
    v = torch.cat([dequantize_groups(packed_v, value_bits, q), new_v], dim=-2)  # [B, H, Sk, D]
    return grouped_attention(q, k, v, False)


def quantized_attention(q, packed_k, packed_v, new_k, new_v, key_bits, value_bits):
    """The same without an unpacked copy: compiled, numbers are unpacked while the sums read them.

    Scales and zero points of keys leave the sum over a group's numbers: q (c * s + z) = (q * s) c + q z.
    Args: q [B, H, 1, D]; packed_k by channel, packed_v by token, of H heads; new_k, new_v: keys and values
        that are not packed [B, H, R, D]. Returns: [B, H, 1, D].
    """
    D, wide = q.shape[-1], torch.promote_types(q.dtype, torch.float32)
    query = q.to(wide).unsqueeze(2)  # [B, H, 1, 1, D]
    codes = unpack(packed_k.codes, key_bits, D).to(wide)  # [B, H, n, group, D]
    old = (codes * (query * packed_k.scale)).sum(dim=-1) + (query * packed_k.zero).sum(dim=-1)
    new = (q.to(wide) * new_k).sum(dim=-1)  # [B, H, R]
    weights = torch.softmax(torch.cat([old.flatten(2), new], dim=-1) / math.sqrt(D), dim=-1)  # [B, H, Sk]
    n_old = old.shape[2] * old.shape[3]
    old = weights[..., :n_old].view(old.shape).unsqueeze(-1)  # [B, H, n, group, 1]
    new = weights[..., n_old:].unsqueeze(-1)  # [B, H, R, 1]
    codes = unpack(packed_v.codes, value_bits, D).to(wide)  # [B, H, n, group, D]
    out = (codes * (old * packed_v.scale) + old * packed_v.zero).sum(dim=(2, 3))  # [B, H, D]
    return (out + (new * new_v).sum(dim=2)).unsqueeze(2).to(q.dtype)


def packed_cache(K, V, n_bits, group=32, residual=32):
    """Keys and values [B, H, S, D] as the functions above take them: all but the last `residual` packed.

    Raises ValueError where those are no whole groups, or none.
    """
    n_packed = K.shape[-2] - residual
    if n_packed <= 0 or n_packed % group:
        raise ValueError(f"{K.shape[-2]} keys, the last {residual} not packed: no groups of {group}")
    packed_k = quantize_groups(K[:, :, :n_packed], n_bits, group, "channel")
    packed_v = quantize_groups(V[:, :, :n_packed], n_bits, group, "token")
    return packed_k, packed_v, K[:, :, n_packed:].clone(), V[:, :, n_packed:].clone()


def fastest_form(device, may_compile=True):
    """(name, function): quantized_attention, compiled where that works: on CUDA, or with a C++ compiler."""
    if may_compile and (device.type == "cuda" or shutil.which(os.environ.get("CXX", "g++"))):
        return "compiled", torch.compile(quantized_attention, dynamic=True)
    return "not compiled", quantized_attention


if __name__ == "__main__":
    from functools import partial

    import torch.nn.functional as F

    import inference_report as harness
    import inference_sparse as study
    import inference_words as words
    from gptlite import GPTlite
    from inference_agreement import counted_bits
    from inference_report import Cost
    from inference_utils import Timer, cache_tensors, parameters_of

    lengths = [1024 * 4**i for i in range(4)]
    quick = {"bits": [8, 2], "max_keys": 4096}
    parser = harness.options(__doc__, quick=quick, data=False)
    add, choices = parser.add_argument, [8, 4, 2]
    add("--bits", type=int, nargs="+", choices=choices, default=choices, help="bits of keys and values")
    add("--max-keys", type=int, choices=lengths[1:], default=lengths[-1], help="longest context")
    columns = {"attention_ms": ("ms", "{:.3f}"), "cache_mb": ("cache MB", "{:.2f}")}
    columns |= {"number_bits": ("bits a number", "{:.2f}"), "first_call_ms": ("first call ms", "{:.0f}")}
    with harness.script(parser) as args:
        (model,) = harness.load_models(args, GPTlite)  # only its shape matters here
        p, bits = parameters_of(model), sorted(set(args.bits), reverse=True)
        (H, D), contexts = (p.n_heads, p.d_head), lengths[: lengths.index(args.max_keys) + 1]
        report = harness.Report(
            args, "attention over a quantised cache", model, columns, max_keys=args.max_keys
        )
        form, fused = fastest_form(args.device, not args.quick)

        def forms(n):
            """{form: a call of it}: one query of all heads to n keys."""
            q, K, V = study.decode_step(args, H, D, n)
            runs = {"dense": partial(grouped_attention, q, K, V, False)}
            runs["SDPA"] = partial(F.scaled_dot_product_attention, q, K, V)
            for b in bits:
                packed = packed_cache(K, V, b)
                runs[f"{b} bits, unpacked first"] = partial(unpacked_attention, q, *packed, b, b)
                runs[f"{b} bits, {form}"] = partial(fused, q, *packed, b, b)
            return runs

        first_ms, runs = {}, forms(lengths[0])
        for b in bits:
            name = f"{b} bits, {form}"
            with Timer(args.device) as timer:
                out = runs[name]()
            first_ms[name] = timer.ms
            report.check_close(f"{name}, and unpacked first", out, runs[f"{b} bits, unpacked first"]())
        title = f"Attention of a decode step, {H} heads of {D} (ms)"
        times = report.time_sweep(title, "keys", contexts, forms)
        report.plot_sweep(title)

        n, costs, rows = contexts[-1], {}, {}
        flops = study.reading_cost(2 * n, H, D, args.dtype).flops
        for name, run in forms(n).items():
            tensors = cache_tensors([part for part in run.args[1:] if not isinstance(part, int | bool)])
            n_bytes = sum(t.nbytes for t in tensors)
            if "unpacked" not in name:
                costs[name] = Cost(flops, n_bytes)
            figures = {"cache_mb": n_bytes / 1e6, "number_bits": 8 * n_bytes / (2 * n * H * D)}
            figures |= {"attention_ms": times[-1][name], "first_call_ms": first_ms.get(name)}
            rows[name] = report.row(f"{name}, {n} keys", baseline=name == "dense", **figures)
        best = f"{bits[-1]} bits, {form}"
        for name in (f"{bits[0]} bits, {form}", best):
            report.why(
                words.crossover(times, "keys", name, "dense") + words.crossover(times, "keys", name, "SDPA")
            )
        report.why(words.about(f"{n} keys", words.bounds(times[-1], costs, report.ceilings())))
        dense_bits = 8 * args.dtype.itemsize
        report.why(counted_bits(f"{bits[-1]} bits", bits[-1], rows[best]["number_bits"], dense_bits))
        report.finish()
