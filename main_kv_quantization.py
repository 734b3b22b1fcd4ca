"""Quantised KV cache: old keys and values in 8, 4 or 2 bits, the newest tokens as they are.

A cache that holds small integers, and a scale and a zero point for each group of them, takes a fraction of
the bytes. Keys have channels that are larger than others in every token, so KIVI gives each channel of a key
scales of its own, each for a group of tokens; values have no such channels, and each token of a head has its
own scale. So a group of tokens must be complete before it is packed, and until then, and for a window of
tokens behind that, keys and values stay as they are.

Approximate. Wins memory, in large batches and long contexts, which hold more cache than weights. Counted
honestly the factor is smaller than that of the bits: scales and zero points come on top, and the window.
Wins time only where reading a cache is what a step waits for, and only in one kernel that unpacks numbers
while it reads them: whoever writes an unpacked copy first moves more bytes than without quantisation. In a
context as short as GPTlite's it loses time. KIVI reads a prompt with exact keys; here each query sees the
cache as it is at its own token, so a prompt at once gives what token by token gives.

Run: python main_kv_quantization.py            (--bits 2 for one number of bits, --residual 0 for no window)

Source: Liu et al., KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, 2024; Hooper et al.,
KVQuant, 2024 (keys by channel as well).
"""

from collections import namedtuple

import torch
import torch.nn.functional as F

from gptlite_gqa import grouped_attention

Packed = namedtuple("Packed", "codes scale zero")  # codes: several to a byte; 16-bit scales and zero points


def quantize(x, n_bits, dim):
    """Rounds numbers to 2^n_bits steps from the smallest to the largest of them along dim.

    Args: x: numbers that fit 16 bits. Returns: Packed(codes, uint8 of x's shape; scale, zero, of size 1 along
        dim, of x's type if that has 16 bits, else float16). code * scale + zero is at most scale / 2 away.
    """
    stored = x.dtype if x.element_size() == 2 else torch.float16
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    eps, least, n_steps = torch.finfo(stored).eps, torch.finfo(stored).smallest_normal, 2**n_bits - 1
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    zero = (low - eps * low.abs()).to(stored)  # rounded down and the scale up: all numbers lie between
    scale = ((high - zero) * ((1 + eps) / n_steps)).to(stored).clamp(min=least)  # equal numbers: not 0 / 0
    codes = ((x - zero) / scale).round().clamp(0, n_steps).to(torch.uint8)
    return Packed(codes, scale, zero)


def pack(codes, n_bits):
    """Puts codes of n_bits side by side into bytes: uint8 [..., D] -> [..., ceil(D * n_bits / 8)].

    A byte holds codes of one part of the channels each: those of 4 bits have the first half of them in the
    low bits, the second in the high ones, so that unpacking gives whole parts.
    """
    per_byte = 8 // n_bits
    codes = F.pad(codes, (0, -codes.shape[-1] % per_byte))
    parts = codes.chunk(per_byte, dim=-1)  # [..., D / per_byte] each
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        packed |= part << (n_bits * i)
    return packed


def unpack(packed, n_bits, D):
    """What pack() was given: [..., ceil(D * n_bits / 8)] -> [..., D], uint8."""
    parts = [(packed >> shift) & (2**n_bits - 1) for shift in range(0, 8, n_bits)]
    return torch.cat(parts, dim=-1)[..., :D]


def quantize_groups(x, n_bits, group, by):
    """Keys or values of whole groups of tokens [B, G, S, D] -> Packed, [B, G, S / group, group, ...] each.

    Args: by: "channel" for a scale of each channel and group of tokens, [B, G, S / group, 1, D]; "token" for
        one of each token, [B, G, S / group, group, 1].
    """
    x = x.unflatten(-2, (-1, group))  # [B, G, n, group, D]
    codes, scale, zero = quantize(x, n_bits, dim={"channel": -2, "token": -1}[by])
    return Packed(pack(codes, n_bits), scale, zero)


def dequantize_groups(packed, n_bits, like):
    """The numbers that are left of keys or values, of the type and width of `like`: [B, G, S, D]."""
    wide = torch.promote_types(like.dtype, torch.float32)  # a code of 8 bits times a scale of 16 needs more
    codes = unpack(packed.codes, n_bits, like.shape[-1]).to(wide)  # [B, G, n, group, D]
    return (codes * packed.scale.to(wide) + packed.zero.to(wide)).flatten(2, 3).to(like.dtype)


class QuantizedCache:
    """A layer's cache for GPTlite_Bounded, whose old keys and values are packed. Form that teaches.

    Each step writes an unpacked copy of all keys and values and attends to that; in one pass, without a copy:
    more/kv_quantization_speed.py. Packed are whole groups of tokens; the newest `residual` to
    residual + group - 1 tokens are not. Tokens fed at once or one by one leave the same cache, to the bit.
    Args: key_bits, value_bits: 8, 4 or 2; group: tokens that are packed together; residual: newest tokens
        that are never packed; keys_by: "channel" (KIVI), or "token" as values are. k, v: all tensors of keys
        and of values. Raises ValueError for other numbers.
    """

    def __init__(self, key_bits, value_bits=None, group=32, residual=32, keys_by="channel"):
        self.key_bits, self.value_bits = key_bits, value_bits or key_bits
        if not {self.key_bits, self.value_bits} <= {2, 4, 8}:
            raise ValueError(f"keys of {key_bits} and values of {value_bits} bits: a number has 8, 4 or 2")
        if group < 2 or residual < 0:  # the scales of a single token are as many numbers as the token
            raise ValueError(f"groups of {group} tokens and {residual} unpacked ones: at least 2 and 0")
        self.group, self.residual, self.keys_by = group, residual, keys_by
        self.n_packed = self.n_read = self.keys_total = 0
        self.packed_k = self.packed_v = self.new_k = self.new_v = None

    @property
    def k(self):
        return [*(self.packed_k or ()), self.new_k]

    @property
    def v(self):
        return [*(self.packed_v or ()), self.new_v]

    def packed_of(self, n):
        """How many tokens are packed when n were read; n may be a tensor."""
        return (n - self.residual) // self.group * self.group * (n > self.residual)

    def attend(self, Q, K, V):
        """Q [B, H, Sq, D], K and V [B, G, Sq, D] of new tokens -> [B, H, Sq, D]."""
        n_before, first = self.n_read, self.n_packed
        self.n_read += K.shape[-2]
        k = K if self.new_k is None else torch.cat([self.new_k, K], dim=-2)  # [B, G, S, D], from first on
        v = V if self.new_v is None else torch.cat([self.new_v, V], dim=-2)  # [B, G, S, D]
        self.n_packed = self.packed_of(self.n_read)
        if (leaving := self.n_packed - first) > 0:
            old_k = quantize_groups(k[..., :leaving, :], self.key_bits, self.group, self.keys_by)
            old_v = quantize_groups(v[..., :leaving, :], self.value_bits, self.group, "token")
            self.packed_k, self.packed_v = join(self.packed_k, old_k), join(self.packed_v, old_v)
        self.new_k, self.new_v = (t[..., leaving:, :].clone() for t in (k, v))  # a view would keep the rest
        if self.packed_k:
            k = torch.cat([dequantize_groups(self.packed_k, self.key_bits, K), k], dim=-2)  # [B, G, Sk, D]
            v = torch.cat([dequantize_groups(self.packed_v, self.value_bits, V), v], dim=-2)

        # what was packed in this call stands there twice, and a query sees it as it was at its own token
        packed, new = (
            torch.arange(*ends, device=Q.device) for ends in ((self.n_packed,), (first, self.n_read))
        )
        n_seen = torch.arange(n_before + 1, self.n_read + 1, device=Q.device)[:, None]  # [Sq, 1]
        n_packed = self.packed_of(n_seen)  # [Sq, 1]
        visible = torch.cat([packed < n_packed, (new >= n_packed) & (new < n_seen)], dim=-1)  # [Sq, Sk]
        self.keys_total += n_seen.sum().item()
        return grouped_attention(Q, k, v, visible)


def join(packed, more):
    """Two Packed of consecutive groups as one; None is no group."""
    return more if packed is None else Packed(*(torch.cat(t, dim=2) for t in zip(packed, more, strict=True)))


@torch.no_grad()
def enlarge_key_channels(model, factor, n_channels=2):
    """Makes the first channels of each head's keys `factor` times as large, in place; returns the model.

    Its queries become as much smaller, so the scores stay: large models have such channels by themselves.
    """
    for block in model.blocks:
        mha = block.mha
        for layer, scale in ((mha.key_proj, factor), (mha.query_proj, 1 / factor)):
            for parameter in (layer.weight, layer.bias):
                parameter.unflatten(0, (-1, mha.d_head))[:, :n_channels] *= scale
    return model


if __name__ == "__main__":
    import copy
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from gptlite_bounded import GPTlite_Bounded
    from gptlite_kvcache import GPTlite_KVCache
    from inference_agreement import COLUMNS, agreement, closer, counted_bits
    from inference_report import Method
    from inference_utils import cache_tensors, load_checkpoint, parameters_of
    from main_kvcache import generate_kvcache

    quick = {"bits": [2], "n_tokens": 8}
    parser = harness.options(__doc__, 3, quick=quick, prompt_len=192, n_tokens=32)
    add, choices = parser.add_argument, [8, 4, 2]
    add("--bits", type=int, nargs="+", choices=choices, default=choices, help="bits of keys and values")
    add("--group", type=harness.positive_int, default=32, help="tokens that are packed together")
    add("--residual", type=harness.count, default=32, help="newest tokens that are never packed")
    columns = COLUMNS | {"number_bits": ("bits a number", "{:.2f}")}
    hide = ("tpot_p99_ms", "speedup", "forward_tokens", "n_parameters", "same_output")
    with harness.script(parser) as args:
        text, state = harness.load_text(args), load_checkpoint(args.checkpoint)
        full = harness.build(args, state, GPTlite_KVCache)
        (L, _, H, D, *_), W = parameters_of(full), full.seqlen
        bits, kivi = sorted(set(args.bits)), {"group": args.group, "residual": args.residual}
        few, dense_bits = bits[0], 8 * args.dtype.itemsize
        report = harness.Report(args, "KV cache quantisation", full, columns, hide, text, **kivi)
        texts = text.prompts(2 if args.quick else 16, W)  # [N, W]

        def model_with(weights=state, **settings):
            make = partial(QuantizedCache, **{"key_bits": few} | kivi | settings)
            return harness.build(args, weights, GPTlite_Bounded, make_cache=make)

        def figures_of(model):
            per_token = sum(t.nbytes for t in cache_tensors(model(texts[:1])[1])) / W  # of a whole context
            figures = {"kv_bytes_per_token": per_token, "number_bits": 8 * per_token / (2 * L * H * D)}
            return agreement(model, full, texts) | figures

        # The methods, then one choice of KIVI at a time taken back
        models = {f"{b} bits": model_with(key_bits=b) for b in bits}
        methods = [Method(n, generate_kvcache, m, exact=False, **figures_of(m)) for n, m in models.items()]
        methods = [Method("dense", generate_kvcache, full, number_bits=float(dense_bits)), *methods]
        rows = report.compare(text.prompts(1, args.prompt_len), args.n_tokens, *methods, label="")
        ways = {"keys by token": {"keys_by": "token"}, "no window": {"residual": 0}}
        for name, way in ways.items():
            figures = report.loss_figures(model := model_with(**way), full) | figures_of(model)
            rows[name] = report.row(f"{few} bits, {name}", same_output="approximate", **figures)
        tokens = torch.randn(3, 1, H, W, D, device=args.device).to(args.dtype)  # Q, K, V
        caches = QuantizedCache(few, **kivi), QuantizedCache(few, **kivi)
        pieces = torch.cat([caches[0].attend(*token) for token in tokens.split(1, dim=-2)], dim=-2)
        report.check_close("token by token as at once", pieces, caches[1].attend(*tokens))
        same = zip(*(cache_tensors([cache.k, cache.v]) for cache in caches), strict=True)
        report.check("and the same cache, to the bit", all(torch.equal(a, b) for a, b in same))
        exact = model_with(residual=W)(texts[:1])[0]
        report.check_close("a window of the whole text changes nothing", exact, full(texts[:1])[0].detach())
        ways = (
            {"KIVI": {}} | ways | {"values of 8 bits": {"value_bits": 8}, "keys of 8 bits": {"key_bits": 8}}
        )
        table, larger, plain = [], [], harness.build(args, state, GPTlite_KVCache, packed=False)
        for b in bits:
            compared = {n: model_with(**{"key_bits": b, "value_bits": b} | way) for n, way in ways.items()}
            table.append({"bits": b} | {n: agreement(m, full, texts)["kl"] for n, m in compared.items()})
        report.sweep(title := "KL to the dense model (nats) against bits", table)
        for factor in (1, 8, 32):
            compared = {"not quantised": (other := enlarge_key_channels(copy.deepcopy(plain), factor))}
            for by in ("channel", "token"):
                compared[f"by {by}"] = model_with(other.state_dict(), keys_by=by)
            larger.append({"factor": factor})
            larger[-1] |= {n: agreement(m, full, texts)["kl"] for n, m in compared.items()}
        report.sweep(f"Two channels of each head's keys larger: KL at {few} bits (nats)", larger)
        most = max(line["not quantised"] for line in larger)
        report.check(f"larger channels leave the function as it was (KL {most:.0e})", most < 1e-4)
        row = rows[f"{few} bits"]
        report.why(counted_bits(row["method"], few, row["number_bits"], dense_bits))
        report.why(words.loss(row) + closer(rows["keys by token"], row) + closer(rows["no window"], row))
        ends = [{"method": f"keys by {by}", "kl": larger[-1][f"by {by}"]} for by in ("token", "channel")]
        report.why(words.about(f"channels {factor} times as large", closer(*ends)))
        report.why(words.compare(row, rows["dense"]) + words.compare(row, rows["dense"], "ttft_ms"))
        report.plot_sweep(title, "KL (nats)", "y")
        report.finish()
