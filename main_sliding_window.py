"""Sliding windows, Longformer and BigBird: each query sees a fixed number of keys, however long the text is.

A query sees the last w keys; to that Longformer adds gaps between them (dilation, in some of the heads) and
tokens that everybody sees, BigBird works in blocks and adds blocks drawn at random. So attention grows with
the length instead of its square, and a cache that holds a window is a ring: token t lies in row t mod w.

Approximate for a model that was trained with all keys (its loss is measured), and exact where the window is
the context. Every fast form is exact against the mask it stands for. Wins where the text is several windows
long: time of a prompt, keys that a step reads, and memory, which stops growing. Loses what lies behind the
window: after L layers a token still depends on L * (w - 1) + 1 tokens, but only by way of others. BigBird's
random blocks and dilated heads keep the whole cache and read a part of it.

Run: python main_sliding_window.py            (--windows 64 for one window)

Source: Beltagy et al., Longformer, 2020; Zaheer et al., Big Bird, 2020; Child et al., Sparse Transformers,
2019; Dong et al., FlexAttention, 2024. Causal forms. Longformer's separate projections for global tokens
begin as copies of the others, so trained weights convert without them.
"""

import os
import shutil
import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gptlite_gqa import grouped_attention

# A pattern says which keys are seen: (head, query, key) -> bool, for integer tensors that broadcast. It is
# what FlexAttention calls a mask_mod, without the batch. Patterns never depend on the length of the text.


def window_pattern(window, n_global=0, dilations=(1,)):
    """Longformer's: the last `window` keys, in steps of the head's dilation, and the first n_global tokens.

    Args: dilations: one for each head, or one for all. Raises ValueError for numbers below 1 (0 globals).
    """
    if window < 1 or n_global < 0 or min(dilations) < 1:
        raise ValueError(f"a window of {window}, {n_global} globals, dilations {dilations}: too small")

    def pattern(h, q, k):
        step = torch.as_tensor(dilations, device=q.device)[h % len(dilations)]
        distance = q - k
        near = (distance < window * step) & (distance % step == 0)
        return (distance >= 0) & (near | (k < n_global))

    return pattern


def bigbird_layout(n_blocks, n_window, n_global, n_random, seed):
    """Which blocks of keys a block of queries sees: bool [n_blocks, n_blocks], none of the future.

    The n_window blocks that end with its own, the first n_global, and n_random others of the past, each as
    likely as any other and none twice. The seed alone decides; a longer text has the same rows.
    """
    generator, layout = torch.Generator().manual_seed(seed), torch.zeros(n_blocks, n_blocks, dtype=torch.bool)
    for i in range(n_blocks):
        layout[i, max(i - n_window + 1, 0) : i + 1] = True
        layout[i, : min(n_global, i + 1)] = True
        others = (~layout[i, : i + 1]).nonzero()[:, 0]  # blocks of the past that are not seen yet
        layout[i, others[torch.randperm(len(others), generator=generator)[:n_random]]] = True
    return layout


def bigbird_pattern(longest, block, n_window=1, n_global=1, n_random=1, seed=0):
    """BigBird's, for texts of at most `longest` tokens. Raises ValueError for a block or window below 1."""
    if block < 1 or n_window < 1 or min(n_global, n_random) < 0:
        raise ValueError(f"blocks of {block}, a window of {n_window} blocks: both must be at least 1")
    layout = bigbird_layout(-(-longest // block), n_window, n_global, n_random, seed)

    def pattern(h, q, k):
        return (k <= q) & layout.to(q.device)[q // block, k // block]

    return pattern


def mask_of(pattern, n_heads, q, k):
    """The mask of queries number q [Sq] and keys number k [Sk]: bool [H, Sq, Sk], True where visible."""
    h = torch.arange(n_heads, device=q.device)
    visible = pattern(h[:, None, None], q[None, :, None], k[None, None, :])
    return visible.expand(n_heads, len(q), len(k))


def masked_attention(Q, K, V, pattern):
    """The naive twin: all T x T scores, and a mask. Q, K, V [B, H, T, D] -> [B, H, T, D]."""
    t = torch.arange(Q.shape[-2], device=Q.device)  # [T]
    return grouped_attention(Q, K, V, mask_of(pattern, Q.shape[1], t, t))


def sparse_plan(pattern, n_heads, T, block=64, device=None):
    """What has to be computed: [(first query, keys [n], mask [H, queries, n])] for each block of queries.

    Keys are those of all blocks in which some query of some head sees some key. Made once for a length; what
    it holds grows with T if the pattern does, though finding it looks at all pairs.
    """
    plan, t = [], torch.arange(T, device=device)  # [T]
    for start in range(0, T, block):
        queries = t[start : start + block]
        end = int(queries[-1]) + 1
        visible = mask_of(pattern, n_heads, queries, t[:end])  # [H, queries, end]
        seen = F.pad(visible.any(dim=0).any(dim=0), (0, -end % block)).view(-1, block).any(dim=1)  # [blocks]
        keys = t[:end][seen.repeat_interleave(block)[:end]]  # [n]
        plan.append((start, keys, visible[..., keys].contiguous()))
    return plan


def sparse_attention(Q, K, V, plan):
    """Attention that touches only a plan's blocks. Q, K, V [B, H, T, D] -> [B, H, T, D]."""
    out = torch.empty_like(Q)
    for start, keys, visible in plan:
        rows = slice(start, start + visible.shape[1])
        k, v = K[..., keys, :], V[..., keys, :]  # [B, H, n, D]
        # a mask of four dimensions: with three, PyTorch's fused kernel for CPUs is not taken
        out[..., rows, :] = F.scaled_dot_product_attention(Q[..., rows, :], k, v, visible[None])
    return out


def flex_mask(pattern, n_heads, T, device="cpu"):
    """The same as FlexAttention takes it: flex_attention(Q, K, V, block_mask=...) skips what is masked."""
    return create_block_mask(lambda b, h, q, k: pattern(h, q, k), None, n_heads, T, T, device=device)


def plain_flex(*QKV, block_mask):
    """FlexAttention without a compiler: the same numbers, but all of the scores in memory."""
    with warnings.catch_warnings(action="ignore"):  # of that
        return flex_attention(*QKV, block_mask=block_mask)


def fastest_flex(device):
    """(name, function): FlexAttention compiled where that is possible: on CUDA, or with a C++ compiler."""
    if device.type == "cuda" or shutil.which(os.environ.get("CXX", "g++")):
        return "FlexAttention", torch.compile(flex_attention, dynamic=False)
    return "FlexAttention, not compiled", plain_flex


def window_forms(Q, K, V, window, plan, flex):
    """{form: a call of it}: causal attention over [B, H, T, D] by all keys and by a window, and one step."""
    T, sdpa, t = Q.shape[-2], F.scaled_dot_product_attention, torch.arange(Q.shape[-2], device=Q.device)
    pattern, ring = window_pattern(window), [x[..., -window:, :].contiguous() for x in (K, V)]
    return {
        "all keys": partial(sdpa, Q, K, V, is_causal=True),
        "masked": partial(sdpa, Q, K, V, mask_of(pattern, 1, t, t)[None]),
        "in blocks": partial(sparse_attention, Q, K, V, plan),
        flex[0]: partial(flex[1], Q, K, V, block_mask=flex_mask(pattern, None, T, Q.device)),
        "step": partial(sdpa, Q[..., -1:, :], K, V),
        "step, window": partial(sdpa, Q[..., -1:, :], *ring),
    }


# ---- Caches, for GPTlite_Bounded ----


class PatternCache:
    """Keeps all keys and masks them by a pattern: the naive twin, and what patterns without a ring need."""

    def __init__(self, pattern):
        self.pattern, self.k, self.v, self.keys_total = pattern, None, None, 0

    def attend(self, Q, K, V):
        self.k = K if self.k is None else torch.cat([self.k, K], dim=-2)  # [B, G, Sk, D]
        self.v = V if self.v is None else torch.cat([self.v, V], dim=-2)  # [B, G, Sk, D]
        t = torch.arange(self.k.shape[-2], device=Q.device)  # [Sk]
        visible = mask_of(self.pattern, Q.shape[1], t[-Q.shape[-2] :], t)  # [H, Sq, Sk]
        self.keys_total += visible.sum().item() / Q.shape[1]
        return grouped_attention(Q, self.k, self.v, visible)  # [B, H, Sq, D]


if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from gptlite_bounded import GPTlite_Bounded, RollingCache, cache_bytes
    from gptlite_kvcache import GPTlite_KVCache
    from inference_report import Method
    from inference_utils import cached_logits, loss_difference, parameters_of
    from main_kvcache import generate_kvcache

    quick = {"windows": [64], "prompt_len": 240, "n_tokens": 8}
    parser = harness.options(__doc__, repeats=3, quick=quick, prompt_len=192, n_tokens=64)
    parser.add_argument("--windows", type=int, nargs="+", default=[128, 64, 32], help="keys of a query")
    columns = {"keys_read": ("keys read", "{:.1f}"), "cache_bytes": ("cache bytes", "{:,}")}
    hide = ("kv_bytes_per_token", "tpot_p99_ms", "forward_tokens", "speedup", "n_parameters")
    with harness.script(parser) as args:
        text, (full,) = harness.load_text(args), harness.load_models(args, GPTlite_KVCache)
        (_, _, H, D, *_), W = parameters_of(full), full.seqlen
        windows = sorted(set(args.windows) - {W}, reverse=True) or [W]
        if max(args.prompt_len + args.n_tokens - 1, windows[0]) > W or windows[-1] < 1:
            raise ValueError(f"windows, and prompt with new tokens, are 1 to the context of {W}")
        report = harness.Report(args, "sliding window", full, columns, hide, text)

        # GPTlite: a pattern shows a query as many keys at most as the middle one of the windows
        w = windows[len(windows) // 2]
        bigbird = bigbird_pattern(8192, max(w // 4, 1), n_window=2, seed=args.seed)
        dilations = (1,) * (H - H // 3) + (2,) * (H // 3)
        shapes = {f"window {n}": (n, 0) for n in (W, *windows)} | {"window and globals": (w - w // 4, w // 4)}
        caches = {n: (partial(RollingCache, *one), window_pattern(*one)) for n, one in shapes.items()}
        for n, one in (("dilated in some heads", window_pattern(w, 0, dilations)), ("BigBird", bigbird)):
            caches[n] = partial(PatternCache, one), one
        tokens = text.prompts(1, W)  # [1, W]
        figures = {"keys_read": (W + 1) / 2, "cache_bytes": cache_bytes(full(tokens)[1])}
        methods = [Method("all keys", generate_kvcache, full, **figures)]
        for name, (make, pattern) in caches.items():
            masked = partial(GPTlite_Bounded, make_cache=partial(PatternCache, pattern))
            (model,) = harness.load_models(args, masked)
            expected, model.make_cache = model(tokens)[0], make  # [1, W, V]
            logits, cache = cached_logits(model, tokens, args.prompt_len)  # [1, W, V]
            report.check_close(f"{name}, token by token, equals one pass with a mask", logits, expected)
            figures = {"keys_read": cache.keys_read, "cache_bytes": cache_bytes(cache)}
            methods.append(Method(name, generate_kvcache, model, exact=name == f"window {W}", **figures))
        rows = report.compare(text.prompts(1, args.prompt_len), args.n_tokens, *methods, label="")

        # Attention alone, over lengths
        contexts, device = [512] if args.quick else [1024, 2048, 4096, 8192], args.device
        draw = lambda T: (torch.randn(1, H, T, D, device=device).to(args.dtype) for _ in range(3))  # noqa: E731
        flex, counts = ("FlexAttention, not compiled", plain_flex) if args.quick else fastest_flex(device), []

        def forms(T):
            QKV, counted = [*draw(T)], {"tokens": T, "all keys": T * (T + 1) // 2}  # scores of one head
            plans = [sparse_plan(pattern, 1, T, device=device) for pattern in (window_pattern(256), bigbird)]
            for name, plan in zip(("window", "BigBird"), plans, strict=True):
                counted[name] = sum(int(visible[0].sum()) for _, _, visible in plan)
                counted[f"{name} in blocks"] = sum(visible[0].numel() for _, _, visible in plan)
            counts.append(counted)
            more = {"BigBird in blocks": partial(sparse_attention, *QKV, plans[1])}
            return window_forms(*QKV, 256, plans[0], flex) | more

        for name, pattern in (("Longformer", window_pattern(w, 3, dilations)), ("BigBird", bigbird)):
            QKV = [*draw(300)]  # a length that no block divides
            naive, plan = masked_attention(*QKV, pattern), sparse_plan(pattern, H, 300, device=device)
            report.check_close(f"{name}: in blocks equals masked", sparse_attention(*QKV, plan), naive)
            one = plain_flex(*QKV, block_mask=flex_mask(pattern, H, 300, device))
            report.check_close(f"{name}: FlexAttention equals masked", one, naive)
        title = "Attention of a prompt, and of one step (ms), window 256"
        times = report.time_sweep(title, "tokens", contexts, forms)
        known = all(row["window"] == 256 * row["tokens"] - 256 * 255 // 2 for row in counts)
        report.check("a window of w keeps T w - w (w - 1) / 2 scores", known)
        report.sweep("Scores of one head: kept by a pattern, computed by blocks of 64", counts)
        narrow, equal = rows[f"window {windows[-1]}"], f"window {w}"
        report.why(words.loss(narrow) + words.compare(narrow, rows["all keys"]))
        losses = {method.name: report.loss_of(method.model) for method in methods}
        pairs = [(n, equal, *loss_difference(losses[n], losses[equal])) for n in [*losses][-3:]]
        report.why(words.loss_between(*pairs[0]) + words.loss_between(*pairs[2]))
        pairs = ("in blocks", "all keys"), (flex[0], "all keys"), ("step, window", "step")
        one, other, step = (words.crossover(times, "tokens", *pair) for pair in pairs)
        report.why(one + other + step)
        points = {name: (row["keys_read"], row["valid_loss"]) for name, row in rows.items()}
        report.plot_points(points, "keys that a query reads", "validation loss (nats)")
        report.plot_sweep(title)
        report.finish()
