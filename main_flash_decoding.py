"""Flash decoding: the keys of one query are split, so that all of a processor's cores have work.

A decode step has one query per sequence, so attention falls into only batch x heads pieces of work; on a
GPU with over a hundred cores and a long context most of them idle. Here each sequence's keys and values
are cut into splits that are attended in parallel, and the partial outputs are joined by their
log-sum-exp. Exact up to rounding for any number of splits; it moves no byte less.

Run: python main_flash_decoding.py

Source: Dao, Haziza, Massa and Sizov, Flash-Decoding for long-context inference, 2023; the rule for the
number of splits follows FlashAttention-2's.
"""

import math

import torch

from gptlite_kvcache import Block_StaticKVCache, GPTlite_StaticKVCache, MultiHeadAttention_StaticKVCache
from main_flash_attention import merge_attention


def partial_attention(q, K, V):
    """One query's attention over some of its keys.

    Args: q [..., 1, D]; K, V [..., S, D].
    Returns: the output [..., D], averaged over these keys alone, and the log-sum-exp of the scores [...].
    """
    scores = (q @ K.transpose(-2, -1)).squeeze(-2) / math.sqrt(q.shape[-1])  # [..., S]
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    lse = torch.logsumexp(scores, dim=-1)  # [...]
    weights = torch.exp(scores - lse.unsqueeze(-1)).to(V.dtype)  # [..., S]
    return (weights.unsqueeze(-2) @ V).squeeze(-2), lse


def flash_decoding(q, K, V, n_splits):
    """Attention of one query per sequence, its keys cut into n_splits parts that are attended at once.

    Args: q [B, H, 1, D]; K, V [B, H, Sk, D], all of them visible; n_splits: any number from 1; splits
        that are left without keys are empty and count for nothing.
    Returns: [B, H, 1, D], the same for every n_splits. Zeros where there are no keys.
    Raises: ValueError for more than one query, or no split.
    Where n_splits divides Sk the splits are views of K and V; else a batched matrix product in PyTorch
    first copies them (for B = H = 1 it does not), which a kernel of its own would not.
    """
    (B, H, Sk, D), n_queries = K.shape, q.shape[-2]
    if n_queries != 1:
        raise ValueError(f"flash decoding takes one query per sequence, not {n_queries}")
    if n_splits < 1:
        raise ValueError(f"the keys need at least 1 split, not {n_splits}")
    n_splits = min(n_splits, max(Sk, 1))  # more would be empty, and take memory
    size = max(math.ceil(Sk / n_splits), 1)  # keys of a split
    n_whole = Sk // size  # splits of that size; the next may be shorter, and those after it empty
    n_rows = 2 ** (n_splits - 1).bit_length()  # one a split, and empty ones up to a power of two
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(B, H, n_rows, D, dtype=dtype, device=q.device)
    lse = torch.full((B, H, n_rows), float("-inf"), dtype=dtype, device=q.device)

    if n_whole > 0:
        k, v = (t[:, :, : n_whole * size].unflatten(2, (n_whole, size)) for t in (K, V))  # [B, H, n, S, D]
        out[:, :, :n_whole], lse[:, :, :n_whole] = partial_attention(q.unsqueeze(2), k, v)
    if n_whole * size < Sk:
        k, v = K[:, :, n_whole * size :], V[:, :, n_whole * size :]  # [B, H, S, D]
        out[:, :, n_whole], lse[:, :, n_whole] = partial_attention(q, k, v)

    while out.shape[2] > 1:  # neighbours join, so that n splits take log2(n) rounds
        out, lse = merge_attention(out[:, :, ::2], lse[:, :, ::2], out[:, :, 1::2], lse[:, :, 1::2])
    return out.to(q.dtype)


def choose_n_splits(batch_size, n_heads, context, n_slots, block=256, max_splits=128):
    """The number of splits that keeps a processor's slots busy, and no more than that takes.

    Args: context: keys per sequence; n_slots: pieces of work that run at once (slots_of); block: keys
        that one piece reads at a time, the smallest split worth making.
    Returns: 1 where batch x heads fill the slots; else the smallest number of splits that uses the slots
        at least 85% as well as the best number. FlashAttention-2's rule.
    """
    pieces = batch_size * n_heads
    if pieces >= 0.8 * n_slots:
        return 1
    n_blocks = math.ceil(context / block)
    use = {}  # n splits: share of the slots' time that is used; the last round may be partly empty
    for n in range(1, min(max_splits, n_slots, n_blocks) + 1):
        if n > 1 and math.ceil(n_blocks / n) == math.ceil(n_blocks / (n - 1)):
            continue  # the longest split is as long as with one split less
        rounds = pieces * n / n_slots
        use[n] = rounds / math.ceil(rounds)
    return min((n for n in use if use[n] >= 0.85 * max(use.values())), default=1)


def slots_of(device):
    """How many pieces of work a device runs at once: two a multiprocessor on CUDA, else one a thread."""
    if device.type == "cuda":
        return 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return torch.get_num_threads()


# ---- In the model ----


class MultiHeadAttention_FlashDecoding(MultiHeadAttention_StaticKVCache):
    """Attention over a static cache that splits the keys when there is one new token per sequence."""

    n_splits = 1

    def forward(self, x, cache, layer):
        if x.shape[1] > 1:  # a prompt has queries enough to fill the cores
            return super().forward(x, cache, layer)
        Q = self.split_heads(self.query_proj(x))  # [B, H, 1, D]
        k, v, row = cache.k[layer], cache.v[layer], cache.length % cache.window  # [B, H, W, D]
        k[..., row, :] = self.split_heads(self.key_proj(x))[..., 0, :]  # [B, H, D]
        v[..., row, :] = self.split_heads(self.value_proj(x))[..., 0, :]
        n = min(cache.length + 1, cache.window)  # rows that hold a token; their order does not matter
        out = flash_decoding(Q, k[..., :n, :], v[..., :n, :], self.n_splits)  # [B, H, 1, D]
        return self.out_proj(self.merge_heads(out))  # [B, 1, E]


class Block_FlashDecoding(Block_StaticKVCache):
    mha_class = MultiHeadAttention_FlashDecoding


class GPTlite_FlashDecoding(GPTlite_StaticKVCache):
    """GPTlite over a StaticKVCache, decoding with n_splits splits; the weights are GPTlite's."""

    block_class = Block_FlashDecoding

    def __init__(self, *args, n_splits=1, **kwargs):
        super().__init__(*args, **kwargs)
        for block in self.blocks:
            block.mha.n_splits = n_splits


if __name__ == "__main__":
    from functools import partial

    import torch.nn.functional as F

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters
    from gptlite_kvcache import StaticKVCache
    from main_kvcache import generate_static

    parser = rep.options(__doc__)
    parser.add_argument("--n-splits", type=rep.positive_int, help="splits in place of the rule's number")
    parser.add_argument("--n-tokens", type=rep.positive_int, default=64, help="new tokens of GPTlite's rows")
    with rep.script(parser) as args:
        p, dev, quick, dtype = get_gptlite_model_parameters(), args.device, args.quick, args.dtype
        H, D, W, slots = p.n_heads, p.d_head, p.seqlen, slots_of(args.device)
        tolerance = utils.TOLERANCE[dtype]
        n_tokens = 8 if quick else min(args.n_tokens, W - 1)
        prompt_len = W - n_tokens
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)

        def load(model_class, **kwargs):
            return utils.load_model(model_class, vocab_size, args.checkpoint, **kwargs).to(dev, dtype)

        static = load(GPTlite_StaticKVCache)
        sizes = {"batch_size": 1, "prompt_len": prompt_len, "n_tokens": n_tokens}
        report = rep.Report(args, "Flash decoding", static, slots=slots, **sizes)

        # GPTlite with its static cache
        by_rule = args.n_splits or choose_n_splits(1, H, W, slots)
        split_models = {n: load(GPTlite_FlashDecoding, n_splits=n) for n in dict.fromkeys([by_rule, 4])}
        prompt = utils.sample_prompts(valid_data, 1, prompt_len).to(dev)  # [1, T]
        named = {"static cache": static} | {f"splits: {n}": m for n, m in split_models.items()}
        buffers = StaticKVCache(static, 1)
        run_of = {name: partial(generate_static, m, prompt, n_tokens, buffers) for name, m in named.items()}
        kept = [buffers.k, buffers.v]  # memory that is there before a run
        methods = [utils.Method(name, run, [named[name]], kept) for name, run in run_of.items()]
        results = utils.measure(methods, n_tokens, args.repeats)
        tokens = results["static cache"].output[:, :-1]  # [1, T + n - 1]
        logits, cache = utils.cached_logits(static, tokens, prompt_len)  # [1, T + n - 1, V]
        for n, m in split_models.items():
            apart = utils.largest_difference(utils.cached_logits(m, tokens, prompt_len)[0], logits)
            report.check(f"GPTlite, splits: {n}, logits differ by {apart:.1e}", apart <= tolerance)
        kv_bytes = utils.cache_bytes_per_token([cache.k, cache.v], W, 1)
        figures = {m.name: {"kv_bytes_per_token": kv_bytes} for m in methods}
        report.method_rows(methods, results, prompt, logits[:, prompt_len - 1 :], figures=figures)

        # Attention alone, over contexts
        thousands = (1, 4) if quick else (1, 2, 4, 8, 16, 32, 64)
        cases = [(B, heads, 1024 * k) for B, heads in ((1, 1), (1, H), (8, H)) for k in thousands]
        buffer = torch.randn(2, 8 * H * 1024 * thousands[-1] * D, device=dev).to(dtype)  # keys and values
        sweep, worst = [], 0.0
        for B, heads, context in cases:
            q = torch.randn(B, heads, 1, D, device=dev).to(dtype)  # [B, H, 1, D]
            K, V = (t[: B * heads * context * D].view(B, heads, context, D) for t in buffer)
            rule = choose_n_splits(B, heads, context, slots)
            n = args.n_splits or (rule if rule > 1 else 4)
            runs = {
                "unsplit": partial(flash_decoding, q, K, V, 1),
                "split": partial(flash_decoding, q, K, V, n),
                "SDPA": partial(F.scaled_dot_product_attention, q, K, V),
            }
            ms = utils.alternating_ms(runs, args.repeats, dev)
            apart = max(utils.largest_difference(runs[f](), runs["SDPA"]()) for f in ("unsplit", "split"))
            worst = max(worst, apart)
            sweep.append(
                {"batch": B, "heads": heads, "context / 1024": context // 1024, "rule": rule, "splits": n}
                | {f"{name} ms": ms[name] for name in runs}
                | {"gain": ms["unsplit"] / ms["split"], "KV MB": 2e-6 * K.numel() * dtype.itemsize}
                | {"largest difference": apart}
            )
        report.sweep("One step of attention alone (rule: splits by the rule for this device)", sweep)
        allowed = 1e-5 if dtype == torch.float32 else 3e-2
        report.check(f"split, unsplit and SDPA differ by {worst:.1e} at most", worst <= allowed)

        limits = rep.measure_ceilings(dev, dtype, working_set=50_000_000 if quick else 400_000_000)
        single, one, many = (  # the longest context of each case
            next(row for row in reversed(sweep) if (row["batch"], row["heads"]) == case)
            for case in ((1, 1), (1, H), (8, H))
        )
        longest, gpu = thousands[-1], 2 * 132
        bound = 1e9 * one["KV MB"] / limits.bytes_per_s  # ms
        shares = ", ".join(f"{f} {rep.share_of(bound, one[f + ' ms'])}" for f in ("unsplit", "split", "SDPA"))
        report.why(
            f"A step over {longest}K keys reads {one['KV MB']:.0f} MB of keys and values for one sequence, "
            f"split or not: at least {bound:.2f} ms at this machine's {limits.bytes_per_s / 1e9:.0f} GB/s. "
            f"Splitting can only raise the share of that speed which is reached: {shares}."
        )
        report.why(
            f"Unsplit attention is batch x heads pieces of work, {H} or {8 * H} here; this device runs "
            f"{slots} at once: from {math.ceil(0.8 * slots)} on the split cannot help. At {longest}K keys it "
            f"is {one['gain']:.2f} times as fast at batch 1, {many['gain']:.2f} at batch 8, and "
            f"{single['gain']:.2f} for a single head, where one piece would leave the others idle."
        )
        at_1, at_8 = ([choose_n_splits(B, H, 1024 * k, gpu) for k in (1, 4, 16, 64)] for B in (1, 8))
        report.why(
            f"A GPU of 132 multiprocessors runs {gpu} pieces. The rule for 1K, 4K, 16K, 64K keys: {at_1} "
            f"splits at batch 1, {at_8} at batch 8, and 1 from batch {math.ceil(0.8 * gpu / H)} on."
        )
        keys, rounds = 1024 * longest // one["splits"], math.ceil(math.log2(one["splits"]))
        report.why(
            f"A split adds {D + 1} numbers, its partial result, to the {2 * D * keys} that it reads, and "
            f"{one['splits']} of them {rounds} rounds of merging, in PyTorch calls of their own: a loss "
            "where the context is short."
        )
        share = 100 * kv_bytes * W / rep.forward_cost(p, vocab_size, 1, 1, W - 1, dtype).n_bytes
        report.why(
            f"GPTlite's context of {W} is one block of keys, so the rule gives "
            f"{choose_n_splits(1, H, W, gpu)} split on any device; its cache is {share:.0f}% of the bytes "
            "of a step, the weights are the rest."
        )
        if args.plot:
            rows = [row for row in sweep if (row["batch"], row["heads"]) == (1, H)]
            lines = {name: [row[f"{name} ms"] for row in rows] for name in ("unsplit", "split", "SDPA")}
            title = f"Attention of one step, {H} heads, {report.data['config']['device_name']}"
            rep.plot_lines(args.plot, thousands, lines, "context (K tokens)", "time (ms)", title)
        report.finish()
