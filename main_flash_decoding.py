"""Flash decoding: the keys of one query are split, so that all of a processor's cores have work.

Idea: a decode step has one query for each sequence, so attention falls into only batch x heads pieces of
work; on a GPU with over a hundred multiprocessors and a long context most of them idle. Here the keys and
values of each sequence are cut into splits that are attended at once, and the partial outputs are joined by
their log-sum-exp.

Exact up to rounding for any number of splits. Wins where batch x heads leave cores idle and the context is
long. Loses where they do not: a split moves no byte less, and adds its partial result and rounds of joining.
GPTlite's context of 256 is a single block of keys, which the rule below never splits. A product of matrices
(bmm) is no honest "unsplit" form, since libraries split it themselves; a fused kernel that does not is.

Run: python main_flash_decoding.py

Source: Dao, Haziza, Massa and Sizov, Flash-Decoding for long-context inference, 2023; the rule for the
number of splits follows FlashAttention-2's.
"""

import math

import torch

from gptlite_kvcache import Block_StaticKVCache, GPTlite_StaticKVCache, MultiHeadAttention_StaticKVCache
from gptlite_merging import merge_attention, merge_parts  # noqa: F401 (a reader looks for both here)


def partial_attention(q, K, V):
    """One query's attention over some of its keys, by definition.

    Args: q [B, H, 1, D]; K, V [B, H, S, D].
    Returns: the output [B, H, 1, D], averaged over these keys alone, and the log-sum-exp of the scores
        [B, H, 1], in float32 at least. Zeros and -inf without keys.
    """
    wide = torch.promote_types(q.dtype, torch.float32)  # scores of 16 bits overflow before they are scaled
    scores = q.to(wide) @ K.to(wide).transpose(-2, -1) / math.sqrt(q.shape[-1])  # [B, H, 1, S]
    lse = torch.logsumexp(scores, dim=-1)  # [B, H, 1]
    weights = torch.exp(scores - lse.unsqueeze(-1)).to(V.dtype)  # [B, H, 1, S]
    return weights @ V, lse


def fused_partial_attention(q, K, V):
    """The same by a fused kernel of PyTorch that does not split keys: one piece of work a head."""
    (S, D), kind = K.shape[-2:], q.device.type
    if kind == "cpu" and S > 0:  # it divides by the number of keys
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, K, V)
    if kind == "cuda" and S > 0 and D % 8 == 0 and q.dtype != torch.float64:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse, *_ = kernel(q.contiguous(), K, V, None, True)
        return out, lse[..., :1]  # it pads the queries
    return partial_attention(q, K, V)


def flash_decoding(q, K, V, n_splits, attend=fused_partial_attention):
    """Attention of one query per sequence, its keys cut into n_splits parts that are attended at once.

    Args: q [B, H, 1, D]; K, V [B, H, Sk, D], all of them visible; n_splits: any number from 1; splits
        that are left without keys are empty and count for nothing; attend: what attends to a split.
    Returns: [B, H, 1, D], the same for every n_splits. Zeros where there are no keys.
    Raises: ValueError for more than one query, or no split.
    Splits are views where the heads of a sequence lie behind each other, as in a static cache.
    """
    (B, H, Sk, D), n_queries = K.shape, q.shape[-2]
    if n_queries != 1:
        raise ValueError(f"flash decoding takes one query per sequence, not {n_queries}")
    if n_splits < 1:
        raise ValueError(f"the keys need at least 1 split, not {n_splits}")
    size = max(math.ceil(Sk / n_splits), 1)  # keys of a split
    n_whole = Sk // size  # splits of that size; the next may be shorter, and those after it are empty
    parts = []  # outputs [B, H, n, D] and log-sum-exps [B, H, n] of n splits
    if n_whole > 0:
        # sequences and heads stand in the batch, splits in the heads: as many pieces of work at once
        k, v = (t[:, :, : n_whole * size].unflatten(2, (n_whole, size)).flatten(0, 1) for t in (K, V))
        out, lse = attend(q.flatten(0, 1).unsqueeze(1).expand(B * H, n_whole, 1, D), k, v)  # k [B*H, n, S, D]
        parts.append((out.view(B, H, n_whole, D), lse.view(B, H, n_whole)))
    if n_whole * size < Sk or Sk == 0:
        parts.append(attend(q, K[:, :, n_whole * size :], V[:, :, n_whole * size :]))
    out, lse = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))  # [B, H, n, D], [B, H, n]
    return merge_parts(out, lse)[0].unsqueeze(2)


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

    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import StaticKVCache
    from inference_report import Cost, Method
    from inference_utils import parameters_of
    from main_kvcache import generate_static

    contexts = [1024 * 2**i for i in range(8)]
    parser = harness.options(__doc__, n_tokens=64, quick={"n_tokens": 8, "max_context": 4096})
    add = parser.add_argument
    add("--n-splits", type=harness.positive_int, help="splits (default: by the rule, or 4)")
    add("--max-context", type=int, choices=contexts, default=contexts[6], help="most keys, attention alone")
    with harness.script(parser) as args:
        device, text, slots = args.device, harness.load_text(args), slots_of(args.device)
        contexts = contexts[: contexts.index(args.max_context) + 1]
        (static,) = harness.load_models(args, GPTlite_StaticKVCache)
        p, T = parameters_of(static), max(static.seqlen - args.n_tokens, 1)
        H, D = p.n_heads, p.d_head
        report = harness.Report(args, "flash decoding", static, text=text, prompt_len=T, slots=slots)

        def splits_of(B, heads, context):
            by_rule = choose_n_splits(B, heads, context, slots)
            return args.n_splits or (by_rule if by_rule > 1 else 4)  # 4 show what the rule spares

        # GPTlite with its static cache
        methods = [Method("static cache", generate_static, static, StaticKVCache(static, 1))]
        for name, n in (("unsplit", 1), ("split", splits_of(1, H, static.seqlen))):
            (model,) = harness.load_models(args, partial(GPTlite_FlashDecoding, n_splits=n))
            methods.append(Method(name, generate_static, model, StaticKVCache(model, 1), splits=n))
        rows = report.compare(text.prompts(1, T), args.n_tokens, *methods, label="")

        # Attention alone, over contexts
        cases = {(1, 1): "one head", (1, H): f"{H} heads", (8, H): f"8 sequences of {H} heads"}
        buffer = torch.randn(2, 8 * H * contexts[-1] * D, device=device).to(args.dtype)  # keys and values

        def attentions(case, context):
            """{form: a call of it} for case's batch and heads: q [B, H, 1, D], K and V [B, H, context, D]"""
            n_splits, shape = splits_of(*case, context), (*case, context, D)
            q = torch.randn(*case, 1, D, device=device).to(args.dtype)
            K, V = (t[: math.prod(shape)].view(shape) for t in buffer)
            return {
                "unsplit": partial(flash_decoding, q, K, V, 1),
                "split": partial(flash_decoding, q, K, V, n_splits),
                "split, by definition": partial(flash_decoding, q, K, V, n_splits, partial_attention),
                "SDPA": partial(F.scaled_dot_product_attention, q, K, V),
            }

        tables, close = {}, max(1e-5, 4 * torch.finfo(args.dtype).eps)
        for case, title in cases.items():
            runs = attentions(case, 1021)  # which no number of splits divides
            exact = partial_attention(*(t.float() for t in runs["SDPA"].args))[0]  # [B, H, 1, D]
            for name, run in runs.items():
                report.check_close(f"{name}, {title}, 1021 keys, and float32", run().float(), exact, close)
            title = f"One step of attention, {title}: time (ms)"
            tables[case] = report.time_sweep(title, "keys", contexts, partial(attentions, case))
        by_rule = [
            {"keys": n} | {f"batch {B}": choose_n_splits(B, H, n, 264) for B in (1, 8)} for n in contexts
        ]
        report.sweep(f"Splits by the rule for {H} heads on a GPU of 132 multiprocessors", by_rule)

        unsplit, split, base = rows["unsplit"], rows["split"], rows["static cache"]
        report.why(words.compare(unsplit, base) + words.compare(split, unsplit))
        for case in ((1, 1), (8, H)):
            report.why(words.about(cases[case], words.crossover(tables[case], "keys", "split", "unsplit")))
        n = contexts[-1]
        cost = Cost(4 * H * n * D, 2 * H * n * D * args.dtype.itemsize)
        costs = dict.fromkeys(("unsplit", "split", "SDPA"), cost)
        report.why(words.bounds(tables[1, H][-1], costs, report.ceilings()))
        report.plot_sweep(title)
        report.finish()
