"""KV eviction: a cache with a fixed number of keys, and rules that say which key goes when a new one comes.

A full cache makes room before it takes a new token: each head drops the key that its rule finds worth least.
H2O goes by the attention that a key has received so far, SnapKV by that of the last few queries, TOVA by that
of the last one; a window by age. Beside them stands an oracle, which keeps all keys and reads those that each
query gives most to. What the others have dropped is gone: a later query cannot ask for it.

Approximate, and exact while the text is no longer than the budget. Wins memory, which stops growing with the
text, and time where reading keys takes longer than the rule's bookkeeping: thousands of keys a sequence, or
large batches. Loses time below that, in the prompt too, since a rule needs the attention weights themselves,
which fused kernels never write. Sums of attention favour old keys, which more queries have seen: here they
are divided by that number, and the raw sums stand beside them.

Run: python main_kv_eviction.py            (--budgets 32 for one budget)

Source: Zhang et al., H2O, 2023; Oren et al., Transformers are Multi-State RNNs (TOVA), 2024; Li et al.,
SnapKV, 2024. SnapKV cuts the prompt once and evicts nothing afterwards; its rule at every step is ours.
"""

from functools import partial

import torch
import torch.nn.functional as F

from gptlite_bounded import EvictingCache, RollingCache, by_group
from gptlite_gqa import grouped_attention, grouped_weights
from gptlite_kvcache import window_mask


class WindowCache(EvictingCache):
    """The oldest goes."""

    def __init__(self, budget, prompt_budget=None):
        super().__init__(budget, 1, prompt_budget)

    def worth(self):
        return self.token.float()


class RandomCache(EvictingCache):
    """Any but the newest half, by a number that looks drawn, from the token's and the head's number."""

    def __init__(self, budget, prompt_budget=None):
        super().__init__(budget, max(budget // 2, 1), prompt_budget)

    def worth(self):
        head = torch.arange(self.token.shape[1], device=self.token.device)[:, None]  # [G, 1]
        return ((self.token * 12.9898 + head * 78.233).sin() * 43758.5453) % 1


class H2OCache(EvictingCache):
    """Heavy hitters: the attention that a key has received from all queries so far; half of all are recent.

    Args: by_age: divides by the number of those queries; False is the paper's sum.
    """

    def __init__(self, budget, prompt_budget=None, by_age=True):
        super().__init__(budget, max(budget // 2, 1), prompt_budget)
        self.by_age = by_age

    def observe(self, given):
        self.received[..., : given.shape[-1]] += given.sum(dim=2)

    def worth(self):
        return self.received / (self.n_read - self.token if self.by_age else 1)


class TOVACache(EvictingCache):
    """The attention of the last query alone; no token is recent enough to be safe.

    Args: by_layer: all heads drop the same key, by their mean, as the paper has it.
    """

    def __init__(self, budget, prompt_budget=None, by_layer=False):
        super().__init__(budget, 1, prompt_budget)
        self.by_layer = by_layer

    def observe(self, given):
        self.received[..., : given.shape[-1]] = given[:, :, -1]

    def worth(self):
        if self.by_layer:
            return self.received.mean(dim=1, keepdim=True).expand_as(self.received)  # [B, G, S]
        return self.received


class SnapKVCache(EvictingCache):
    """The attention of the last n_window queries to the keys that are held; their own keys stay."""

    neighbours = 5

    def __init__(self, budget, prompt_budget=None, n_window=None):
        least = budget if prompt_budget is None else prompt_budget
        super().__init__(budget, n_window or max(least // 4, 1), prompt_budget)
        self.queries = None

    def remember(self, Q):
        Q = Q if self.queries is None else torch.cat([self.queries, Q], dim=-2)
        self.queries = Q[..., -self.n_recent :, :]  # [B, H, W, D]

    def step(self, q, k, v):
        out = super().step(q, k, v)
        self.remember(q)
        return out

    def read_prompt(self, Q, K, V):
        self.remember(Q)
        return super().read_prompt(Q, K, V)

    def worth(self):
        (H, W), G = self.queries.shape[1:3], self.token.shape[1]
        number = torch.arange(self.n_read - W, self.n_read, device=self.token.device)  # [W]
        visible = self.token.unsqueeze(2) <= number[:, None]  # [B, G, W, S]
        weights = grouped_weights(self.queries, self.k, visible.repeat_interleave(H // G, dim=1))
        return by_group(weights, G).mean(dim=2)  # [B, G, S]


class OracleCache:
    """Keeps all keys, and each query reads the `budget` that it gives most to: no rule can know them."""

    def __init__(self, budget):
        self.budget, self.k, self.v, self.keys_total = budget, None, None, 0

    def attend(self, Q, K, V):
        self.k = K if self.k is None else torch.cat([self.k, K], dim=-2)  # [B, G, Sk, D]
        self.v = V if self.v is None else torch.cat([self.v, V], dim=-2)  # [B, G, Sk, D]
        (B, G, Sk, _), Sq = self.k.shape, Q.shape[-2]
        given = by_group(grouped_weights(Q, self.k), G)  # [B, G, Sq, Sk]
        best = given.topk(min(self.budget, Sk), dim=-1).indices
        chosen = torch.zeros_like(given, dtype=torch.bool).scatter_(-1, best, True)
        chosen &= window_mask(Sq, Sk, Sk, Q.device)  # a query with fewer keys than the budget has no others
        self.keys_total += chosen.sum().item() / (B * G)
        return grouped_attention(Q, self.k, self.v, chosen.repeat_interleave(Q.shape[1] // G, dim=1))


def attention_steps(n_heads, d_head, like, n_keys, held=256):
    """{form: a call of it}: one query of a sequence to n_keys keys, or to as many as a rule holds."""
    q, K, V = (like.new_empty(1, n_heads, n, d_head).normal_() for n in (1, n_keys, n_keys))  # [1, H, n, D]
    runs = {"all keys": partial(F.scaled_dot_product_attention, q, K, V)}
    for name in ("window", "TOVA", "H2O", "SnapKV's rule"):
        cache = RULES[name](held, held)
        cache.attend(*(x[..., :held, :] for x in (K, K, V)))
        runs[name] = partial(cache.step, q, q, q)  # makes room, writes, attends, and takes note
    return runs


def streaming_cache(budget):
    """What StreamingLLM keeps: the first tokens, 4 at most, and the newest, at the text's positions."""
    n_sinks = min(4, budget // 2)
    return RollingCache(budget - n_sinks, n_sinks)


RULES = {  # name: cache of a budget
    "oracle": OracleCache,
    "TOVA": TOVACache,
    "TOVA by layer": partial(TOVACache, by_layer=True),
    "H2O": H2OCache,
    "H2O, raw sums": partial(H2OCache, by_age=False),
    "SnapKV's rule": SnapKVCache,
    "window": WindowCache,
    "window, sinks": streaming_cache,
    "random": RandomCache,
}

if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from gptlite_bounded import GPTlite_Bounded, cache_bytes, kept_tokens
    from gptlite_kvcache import GPTlite_KVCache
    from inference_report import Method
    from inference_utils import answer_losses, loss_difference, parameters_of
    from main_kvcache import generate_kvcache

    quick = {"budgets": [32], "prompt_len": 224, "n_tokens": 8}
    parser = harness.options(__doc__, 3, quick=quick, n_windows=32, prompt_len=128, n_tokens=64)
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64], help="keys of a query")
    columns = {"answer_loss": ("answer loss", "{:.4f}"), "answer_difference": ("difference", "{:+.4f}")}
    columns |= {"answer_se": ("+-", "{:.4f}"), "cache_bytes": ("cache bytes", "{:,}")}
    hide = ("kv_bytes_per_token", "tpot_p99_ms", "forward_tokens", "speedup", "n_parameters", "same_output")
    with harness.script(parser) as args:
        text, (full,) = harness.load_text(args), harness.load_models(args, GPTlite_KVCache)
        (_, _, H, D, *_), W, budgets = parameters_of(full), full.seqlen, sorted(set(args.budgets))
        T, n, middle = args.prompt_len, args.n_windows, budgets[len(budgets) // 2]
        if T + args.n_tokens > W or not 2 <= budgets[0] <= budgets[-1] < T:
            raise ValueError(f"--budgets are 2 to below --prompt-len, which with --n-tokens is at most {W}")
        report = harness.Report(args, "KV eviction", full, columns, hide, text)
        texts = text.prompts(n, W + 1)  # [n, W + 1]

        def model_with(make, *sizes):
            cache = partial(make, *sizes)
            return harness.load_models(args, partial(GPTlite_Bounded, make_cache=cache))[0]

        # A prompt that is read with all its keys, and its answer
        methods, losses = [], {}
        for name in ("all keys", "TOVA", "H2O", "SnapKV", "window"):
            sizes = (middle + W - T if name == "SnapKV" else middle), middle  # SnapKV keeps all of the answer
            model = full if name == "all keys" else model_with(RULES.get(name, SnapKVCache), *sizes)
            losses[name], logits, cache = answer_losses(model, texts, T)
            figures = {"answer_loss": losses[name].mean().item(), "cache_bytes": cache_bytes(cache) // n}
            if model is full:
                expected = logits  # [n, W, V]
            else:
                pair = loss_difference(losses[name], losses["all keys"])
                figures["answer_difference"], figures["answer_se"] = pair
                report.check_close(f"{name}: the prompt sees all its keys", logits[:, :T], expected[:, :T])
            methods.append(Method(name, generate_kvcache, model, exact=False, loss=model is full, **figures))
        rows = report.compare(text.prompts(1, T), args.n_tokens, *methods, label="")
        # Loss against budget: texts token by token from their start, as a stream
        streams, sweep, x = {}, [], texts[:4, :-1]  # [4, W]
        for name, make in RULES.items():
            whole = model_with(make, W)(x)[0]  # [4, W, V]
            report.check_close(f"{name}: a budget of {W} is all keys", whole, expected[:4])
            for budget in budgets:
                model = streams[name, budget] = model_with(RollingCache if name == "window" else make, budget)
                cache, losses_of = model(x)[1], report.loss_figures(model, full, 64)
                row = {"rule": name, "budget": budget, "keys read": cache.keys_read}
                row["cache bytes"] = cache_bytes(cache) // len(x)
                sweep.append(row | dict(zip(("loss", "difference", "+-"), losses_of.values(), strict=True)))
        by_age, ring = model_with(WindowCache, middle)(x)[0], streams["window", middle](x)[0]
        report.check_close("window: evicting the oldest equals a ring", by_age, ring)
        report.sweep(f"Loss against budget: {n} windows, evicted from their first tokens on", sweep)

        contexts = [1024, 4096] if args.quick else [1024, 4096, 16384, 65536]
        steps = partial(attention_steps, H, D, expected)
        times = report.time_sweep("One step of attention (ms), 256 keys held", "keys", contexts, steps)

        def between(one, other):
            pair = (report.loss_of(streams[name, middle]) for name in (one, other))
            return words.loss_between(f"{one}, {middle} keys,", other, *loss_difference(*pair))

        report.why(between("TOVA", "oracle") + between("H2O", "TOVA") + between("window", "H2O"))
        report.why(between("H2O, raw sums", "H2O") + between("TOVA by layer", "TOVA"))
        names, pair = ("SnapKV, on answers,", "a window"), (losses["SnapKV"], losses["window"])
        answers = words.loss_between(*names, *loss_difference(*pair))
        report.why(answers + words.compare(rows["TOVA"], rows["all keys"]))
        one, other = (words.crossover(times, "keys", name, "all keys") for name in ("TOVA", "SnapKV's rule"))
        report.why(one + other)
        points = {n: [(r["budget"], r["difference"]) for r in sweep if r["rule"] == n] for n in RULES}
        lines = {name: tuple(zip(*line, strict=True)) for name, line in points.items()}
        report.plot_lines(lines, "keys of a query at most", "loss difference (nats)", log="x")
        for name in ("H2O", "TOVA") if args.plot else ():
            kept = {name: kept_tokens(streams[name, middle], texts[:1, :-1])}
            report.plot_dots(kept, "tokens read", "tokens held", f"{name}, {middle} keys, one head")
        report.finish()
