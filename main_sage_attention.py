"""SageAttention: products of queries and keys in 8-bit integers, with a scale for each small block of rows.

Queries and keys are rounded to whole numbers, each block of rows with its own scale, so that the product runs
on units for integers; softmax and the product with the values stay as they are. All keys of a head lean
towards one vector, which spoils a scale: it is subtracted from the keys first. That changes all scores of a
query by the same number, so the attention stays exactly what it was.

Approximate, by rounding alone. Wins time on processors whose units for 8 bits are faster than those for 16,
in prompts of thousands of tokens; nothing in a decode step, which waits for reading. Loses where the scores
go through memory, as in the plain form here: int32 products, scaled, are more traffic than the product saves.
A row's rounding depends on the other rows of its block and on the mean of all keys, later ones too, so a text
read in pieces is not bitwise what it is at once. Fewer bits and small floats: more/sage_formats.py.

Run: python main_sage_attention.py

Source: Zhang et al., SageAttention: Accurate 8-Bit Attention for Plug-and-play Inference Acceleration, 2024;
SageAttention2, 2024 (scales by thread).
"""

import math

import torch
import torch.nn.functional as F

from gptlite import masked_softmax
from gptlite_kvcache import window_mask


def smooth_keys(K):
    """Keys [B, H, Sk, D] -> new keys without the mean over all of them, and that mean [B, H, 1, D]."""
    mean = K.mean(dim=-2, keepdim=True)  # [B, H, 1, D]
    return K - mean, mean


def scale_groups(S, by, keys, device=None):
    """Which rows of S queries or keys share a scale: the number of each row's group, int64 [S].

    Args: by: "tensor", "block" (128 queries, 64 keys), "thread" (the rows that one thread of the GPU's matrix
        unit holds), "token".
    """
    i = torch.arange(S, device=device)
    if by == "thread":  # of queries 8 groups in 32 rows, of keys 4 in 64: neighbours in memory are not alike
        return i // 64 * 4 + i % 8 // 2 if keys else i // 32 * 8 + i % 8
    return {"tensor": i * 0, "block": i // (64 if keys else 128), "token": i}[by]


def quantize(x, n_bits, groups):
    """Symmetric rounding: x [..., S, D] -> whole numbers (int8 of its shape), each row's scale [..., S, 1].

    Args: groups [S]: rows with the same number share the scale, whose largest number gets the largest code.
    """
    largest = x.abs().amax(dim=-1)  # [..., S]
    groups = groups.expand_as(largest)
    of_group = torch.zeros_like(largest).scatter_reduce(-1, groups, largest, "amax")  # [..., S], by number
    scale = of_group.gather(-1, groups) / (2 ** (n_bits - 1) - 1)  # [..., S]
    scale = scale.clamp(min=1e-12).unsqueeze(-1)  # rows of zeros: not 0 / 0
    return (x / scale).round().to(torch.int8), scale


def int8_product(A, B):
    """A B^T of int8 matrices, summed in int32: A [..., Sq, D], B [..., Sk, D] -> [..., Sq, Sk]."""
    Sq, Sk, D = A.shape[-2], B.shape[-2], A.shape[-1]
    a = F.pad(A, (0, -D % 8, 0, max(17 - Sq, 0))).flatten(0, -3)  # CUDA's kernel wants more than 16 rows
    b = F.pad(B, (0, -D % 8, 0, -Sk % 8)).flatten(0, -3)  # and multiples of 8
    products = [torch._int_mm(one, other.T) for one, other in zip(a, b, strict=True)]
    return torch.stack(products)[:, :Sq, :Sk].reshape(*A.shape[:-1], Sk)


def visible_keys(causal_mask, Sq, Sk, device):
    """What an attention's causal_mask means: bool that broadcasts to [B, H, Sq, Sk], True where seen."""
    if isinstance(causal_mask, torch.Tensor):
        return causal_mask
    return window_mask(Sq, Sk, Sk, device) | (not causal_mask)


def sage_attention(Q, K, V, causal_mask=True, by="block", n_bits=8, smooth=True):
    """Attention whose scores are products of integers; the caller's tensors stay as they are.

    Args: Q [B, H, Sq, D]; K, V [B, H, Sk, D]; causal_mask: as in the textbook form, the last query belongs to
        the last key; by: which rows share a scale (scale_groups); smooth: False keeps the keys' mean.
    Returns: [B, H, Sq, D] and the log-sum-exp of the scores [B, H, Sq] with the mean's part in it, as joining
        partial attentions needs. A query that sees no key gets zeros and -inf.
    """
    (Sq, D), Sk, wide = Q.shape[-2:], K.shape[-2], torch.promote_types(Q.dtype, torch.float32)
    q, k = Q.to(wide) / math.sqrt(D), K.to(wide)
    mean = torch.zeros_like(k[..., :1, :])
    if smooth:
        k, mean = smooth_keys(k)
    q8, q_scale = quantize(q, n_bits, scale_groups(Sq, by, False, Q.device))
    k8, k_scale = quantize(k, n_bits, scale_groups(Sk, by, True, Q.device))
    scores = int8_product(q8, k8) * q_scale * k_scale.mT  # [B, H, Sq, Sk]
    visible = visible_keys(causal_mask, Sq, Sk, Q.device)
    lse = scores.masked_fill(~visible, float("-inf")).logsumexp(dim=-1) + (q @ mean.mT)[..., 0]
    return masked_softmax(scores, visible).to(V.dtype) @ V, lse


def integer_attention(Q, K, V, causal_mask=True, by="block", n_bits=8, smooth=True):
    """sage_attention's output alone, as the other forms return it."""
    return sage_attention(Q, K, V, causal_mask, by, n_bits, smooth)[0]


def use_attention(model, form):
    """Makes a GPTlite_KVCache attend by form(Q, K, V, causal_mask) -> [B, H, Sq, D]; returns the model."""
    for block in model.blocks:
        block.mha.attend = lambda Q, K, V, causal_mask=True, dropout=None: form(Q, K, V, causal_mask)
    return model


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from gptlite import scaled_dot_product_attention
    from gptlite_kvcache import GPTlite_KVCache
    from gptlite_sparse import attention_inputs
    from inference_agreement import COLUMNS, agreement, closer
    from inference_report import Method
    from inference_utils import alternating_ms, parameters_of
    from main_kvcache import generate_kvcache

    lengths = [256 * 2**i for i in range(5)]
    parser = harness.options(__doc__, 3, batch_size=8, quick={"batch_size": 1, "max_tokens": 512})
    parser.add_argument("--max-tokens", type=int, choices=lengths[1:], default=4096, help="longest text")
    hide = ("tpot_ms", "tpot_p99_ms", "speedup", "forward_tokens", "kv_bytes_per_token", "n_parameters")
    with harness.script(parser) as args:
        text, (full,) = harness.load_text(args), harness.load_models(args, GPTlite_KVCache)
        p, W, device = parameters_of(full), full.seqlen, args.device
        H, D, B = p.n_heads, p.d_head, args.batch_size
        report = harness.Report(args, "SageAttention", full, COLUMNS, hide, text, prompt_len=W)
        texts = text.prompts(2 if args.quick else 16, W)  # [N, W]

        # In GPTlite: the prefill of whole contexts, then other scales
        methods, models = [Method("textbook", generate_kvcache, full)], {}
        for by in ("block", "thread", "token", "tensor"):
            (model,) = harness.load_models(args, GPTlite_KVCache)
            models[by] = use_attention(model, partial(integer_attention, by=by))
        sage, figures = models["block"], agreement(models["block"], full, texts)
        methods.append(Method("by block", generate_kvcache, sage, exact=False, **figures))
        rows = report.compare(text.prompts(B, W), 1, *methods, label="")
        for by in ("thread", "token", "tensor"):
            figures = report.loss_figures(models[by], full) | agreement(models[by], full, texts)
            rows[f"by {by}"] = report.row(f"by {by}", same_output="approximate", **figures)

        # Errors of the output, on tensors of known kinds and on GPTlite's
        Q, K, V = torch.randn(3, 1, H, 512, D, dtype=torch.float64)
        lean = 10.0 * (torch.arange(D) % 10 == 0)  # every tenth channel is large in all rows
        kinds = {"random": (Q, K, V), "keys lean": (Q, K + lean, V), "queries too": (Q + lean, K + lean, V)}
        for i, (x, *QK) in enumerate(attention_inputs(full, texts[:1])):
            V = full.blocks[i].mha.split_heads(full.blocks[i].mha.value_proj(x)).detach()
            kinds[f"layer {i}"] = [t.cpu().double() for t in (*QK, V)]
        table = []
        for by in ("tensor", "block", "thread", "token"):
            for smooth in (False, True):
                line = {"scales": by, "keys": "smoothed" if smooth else "as they are"}
                for kind, QKV in kinds.items():
                    exact = scaled_dot_product_attention(*QKV)
                    error = (integer_attention(*QKV, by=by, smooth=smooth) - exact).abs().sum()
                    line[kind] = (error / exact.abs().sum()).item()
                table.append(line)
        report.sweep("Error of the output, causal, as a share of its size", table)

        codes = [torch.randint(-128, 128, (1, H, n, D), device=device).to(torch.int8) for n in (3, 70)]
        exact = codes[0].cpu().long() @ codes[1].cpu().long().mT
        report.check("products of integers are exact", torch.equal(int8_product(*codes).long().cpu(), exact))
        Q, K, V = kinds["keys lean"]
        exact, before = scaled_dot_product_attention(Q, K, V), K.clone()
        smoothed = scaled_dot_product_attention(Q, smooth_keys(K)[0], V)
        report.check_close("smoothing alone changes nothing", smoothed, exact)
        integer_attention(Q, K, V)
        report.check("the caller's keys stay as they are", torch.equal(K, before))

        def attentions(n):
            QKV = torch.randn(3, 1, H, n, D, device=device).to(args.dtype)
            named = {"textbook": scaled_dot_product_attention, "int8": integer_attention}
            named["SDPA"] = partial(F.scaled_dot_product_attention, is_causal=True)
            return {name: partial(form, *QKV) for name, form in named.items()}

        title, n = f"Causal attention, {H} heads of {D} (ms)", lengths.index(args.max_tokens) + 1
        times = report.time_sweep(title, "tokens", lengths[:n], attentions)
        report.plot_sweep(title)
        report.why(words.loss(rows["by block"]) + closer(rows["by block"], rows["by token"]))
        pair = [{"method": f"keys {line['keys']}", "error": line["keys lean"]} for line in table[2:4]]
        report.why(words.about("where keys lean", words.compare(*pair, "error")))
        one, other = (words.crossover(times, "tokens", "int8", name) for name in ("textbook", "SDPA"))
        report.why(one + other)
        alone = p.n_layers * alternating_ms(attentions(W), args.repeats, device)["textbook"]
        report.why(words.part("textbook attention", B * alone, rows["textbook"]["ttft_ms"], "TTFT"))
        report.finish()
