"""Prefix cache for chats: everything that was computed is stored, so a turn computes only what is new.

The prompt of the next turn is the previous prompt, the answer and a new message, so all of it but the message
was in a cache already when the answer was complete. A store keeps such caches by their token ids; the longest
common beginning is reused, and the least recently used entry leaves when the bytes are used up. Exact, token
for token, under the two rules of main_prefix_cache.py.

Run: python main_prefix_cache_chat.py            (--quick: two short chats)

Source: Zheng et al., SGLang, 2024 (RadixAttention); Gao et al., CachedAttention, 2024 (turns of a chat).
"""

from collections import OrderedDict

import torch

from main_kvcache import generate_kvcache
from main_prefix_cache import cache_bytes, cache_length, check_fits, common_length, match_prefix


def own_memory(t):
    """The tensor, or a copy where it is a view that keeps more bytes in memory than its own."""
    return t.clone() if t.untyped_storage().nbytes() > t.numel() * t.element_size() else t


class PrefixStore:
    """Token ids -> KV cache. The longest common beginning wins, the least recently used entry leaves.

    The key is the token ids themselves: not a text, and not a short hash of them. A store holds what one
    model computed: see use(). Entries share no bytes: two chats hold their system prompt twice (blocks or a
    tree avoid that).
    """

    def __init__(self, capacity_bytes):
        self.capacity_bytes = capacity_bytes
        self.entries = OrderedDict()  # tuple of token ids -> cache, least recently used first
        self.n_bytes = self.n_evicted = 0
        self.model, self.weights = None, []

    def use(self, model):
        """Says whose keys and values these are; for another model, or other weights, the store is emptied.

        To be called before the first put: what was stored earlier is of an unknown model, and goes too.
        Seen are new tensors and changes in place (load_state_dict, an optimizer), but not those through
        .data, which PyTorch does not count.
        """
        weights = [(p.detach(), p._version) for p in model.parameters()]  # kept: no other gets their memory
        old, new = ([(p.data_ptr(), version) for p, version in each] for each in (self.weights, weights))
        if old != new:
            self.entries.clear()
            self.n_bytes = 0
        self.model, self.weights = model, weights

    def match(self, tokens):
        """Token ids -> (n, cache of the first n of them, None for n = 0), n as large as the store allows.

        At most len(tokens) - 1: the last token has to run through the model, its logits are not stored.
        The cache is a view of the entry, to be read only.
        """
        if self.model is not None:
            self.use(self.model)  # nothing of before its weights changed
        asked = tokens[:-1]
        longest = max(self.entries, key=lambda stored: common_length(stored, asked), default=())
        n, kv_cache = match_prefix(tokens, longest, self.entries.get(longest))
        if n:
            self.entries.move_to_end(longest)
        return n, kv_cache

    def put(self, tokens, kv_cache):
        """Stores the cache of these tokens, [1, H, len(tokens), D] a layer, if the capacity allows it.

        Entries that are a beginning of it go: it contains them. A view of a larger tensor is copied, or it
        would keep all of that in memory. Raises ValueError if sizes do not agree.
        """
        key, n_bytes = tuple(tokens), cache_bytes(kv_cache)
        if len(key) != cache_length(kv_cache) or kv_cache and kv_cache[0][0].shape[0] != 1:
            raise ValueError(f"{len(key)} tokens of one sequence need a cache of as many, and of batch 1")
        if not key:
            return
        contains_it = next((stored for stored in self.entries if stored[: len(key)] == key), None)
        if contains_it is not None:
            self.entries.move_to_end(contains_it)
        elif 0 < n_bytes <= self.capacity_bytes:
            for stored in [stored for stored in self.entries if key[: len(stored)] == stored]:
                self.n_bytes -= cache_bytes(self.entries.pop(stored))
            while self.n_bytes + n_bytes > self.capacity_bytes:
                self.n_bytes -= cache_bytes(self.entries.popitem(last=False)[1])
                self.n_evicted += 1
            self.entries[key] = [tuple(own_memory(t) for t in kv) for kv in kv_cache]
            self.n_bytes += n_bytes


def generate_with_store(model, store, prompt, n_tokens, seqlen, keep=True):
    """Continues a prompt [1, T] behind what the store has of it; keep: stores what was computed.

    Returns: prompt and generated tokens [1, T + n_tokens], and how many prompt tokens came from the store:
        none, and the store is emptied, where the model or its weights are not those that filled it.
        The last generated token is not stored: no step has computed its keys and values yet.
    """
    check_fits(0, prompt.shape[1], n_tokens, seqlen)
    store.use(model)
    n_hit, kv_cache = store.match(prompt[0].tolist())

    def remember(*args, **kwargs):  # generate_kvcache hands the growing cache to the model alone
        nonlocal kv_cache
        logits, kv_cache = model(*args, **kwargs)
        return logits, kv_cache

    generated = generate_kvcache(remember, prompt[:, n_hit:], n_tokens, seqlen, kv_cache)
    tokens = torch.cat([prompt[:, :n_hit], generated], dim=1)  # [1, T + n_tokens]
    if keep:
        store.put(tokens[0, : cache_length(kv_cache)].tolist(), kv_cache)
    return tokens, n_hit


if __name__ == "__main__":
    from statistics import median

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters
    from gptlite_kvcache import GPTlite_KVCache
    from main_prefix_cache import compute_prefix_cache

    parser = rep.options(__doc__, plot=False)
    with rep.script(parser) as args, torch.no_grad():
        p, dev, W = get_gptlite_model_parameters(), args.device, get_gptlite_model_parameters().seqlen
        n_chats, n_turns = (2, 2) if args.quick else (6, 4)
        S, n_user, n_reply = 48, 20, 4 if args.quick else 28  # tokens of system prompt, message, answer
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        model = utils.load_model(GPTlite_KVCache, vocab_size, args.checkpoint).to(dev, args.dtype)
        columns = {
            "hit_share": ("hit share", "{:.0%}"),
            "stored_mb": ("stored MB", "{:.1f}"),
            "n_evicted": ("evicted", "{}"),
        }
        system = utils.sample_prompts(valid_data, 1, S).to(dev)  # [1, S]
        said = utils.sample_prompts(valid_data, n_chats, n_turns * n_user).to(dev)  # [chats, turns * user]
        system_cache = compute_prefix_cache(model, system)
        token_bytes = cache_bytes(system_cache) // S
        n_longest = S + n_turns * (n_user + n_reply)  # tokens of a whole chat
        room = n_chats * n_longest * token_bytes
        sizes = {"batch_size": 1, "prompt_len": n_longest - n_reply, "n_tokens": n_reply}
        turns = {"n_chats": n_chats, "n_turns": n_turns, "n_shared": S}
        report = rep.Report(args, "prefix cache for chats", model, columns, **turns, **sizes)

        # Chats in turns, behind one system prompt: each turn's prompt is all of the chat so far
        reference, rows, match_ms = None, {}, 0.0
        kinds = [("no reuse", 0, False), ("system prompt", room, False), ("whole history", room, True)]
        for name, capacity, keep in [*kinds, ("history, half the room", room // 2, True)]:
            store, history, clocks, n_prompt, n_hits = PrefixStore(capacity), [system] * n_chats, [], 0, 0
            store.use(model)
            store.put(system[0].tolist(), system_cache)
            for message in said.split(n_user, dim=1):  # [chats, user]
                for i in range(n_chats):
                    prompt = torch.cat([history[i], message[i : i + 1]], dim=1)  # [1, T]
                    with utils.StepClock(model) as clock:
                        history[i], n_hit = generate_with_store(model, store, prompt, n_reply, W, keep)
                    n_prompt, n_hits = n_prompt + prompt.shape[1], n_hits + n_hit
                    clocks.append(clock)
            tokens = torch.cat(history)  # [chats, N]
            reference = tokens if reference is None else reference
            logits = model(reference[:, :-1])[0]  # [chats, N - 1, V]
            first = utils.first_difference(tokens[:, 1:], reference[:, 1:], logits)
            n_computed = sum(clock.forward_tokens for clock in clocks)
            rows[name] = {
                "ttft_ms": median(clock.steps_ms[0] for clock in clocks),
                "tpot_ms": median(ms for clock in clocks for ms in clock.steps_ms[1:]),
                "tokens_per_s": 1000 * n_reply * len(clocks) / sum(clock.total_ms for clock in clocks),
                "forward_tokens": n_computed,
                "hit_share": n_hits / n_prompt,
                "stored_mb": store.n_bytes / 1e6,
                "n_evicted": store.n_evicted,
                "n_parameters": utils.n_parameters(model),
            }
            report.row(name, baseline=name == "no reuse", same_output=first is None, **rows[name])
            less = n_computed == n_prompt - n_hits + (n_reply - 1) * len(clocks)
            what = f"same tokens as without reuse, {n_hits} of {n_prompt} prompt tokens less work"
            report.check(f"{name}: {what}", first is None and less)
            if name == "whole history":
                longest, n_entries = tokens[0].tolist(), len(store.entries)
                match_ms = utils.median_ms(lambda s=store, asked=longest: s.match(asked), args.repeats, dev)
        shares = {name: row["hit_share"] for name, row in rows.items()}
        ordered = 0 == shares["no reuse"] < shares["system prompt"] < shares["whole history"]
        report.check("the more is stored, the more of a prompt is found", ordered)

        n_asked = n_chats * n_turns
        T, n_found = n_prompt // n_asked, round(shares["whole history"] * n_prompt / n_asked)
        limits = rep.measure_ceilings(dev, args.dtype)
        costs = [rep.forward_cost(p, vocab_size, 1, T - n, n, args.dtype) for n in (0, n_found)]
        least = [rep.lower_bound_ms(cost, limits) for cost in costs]
        ttft = [rows[name]["ttft_ms"] for name in ("no reuse", "whole history")]
        report.why(
            f"A prompt has {T} tokens on average, {n_found} of them stored: {costs[0].flops / 1e9:.2f} GFLOP "
            f"become {costs[1].flops / 1e9:.2f}. {limits.flops_per_s / 1e9:.0f} GFLOP/s and "
            f"{limits.bytes_per_s / 1e9:.0f} GB/s allow {least[0]:.1f} and {least[1]:.1f} ms, share reached "
            f"{rep.share_of(least[0], ttft[0])} and {rep.share_of(least[1], ttft[1])} (median TTFT "
            f"{ttft[0]:.1f} and {ttft[1]:.1f} ms)."
        )
        report.why(
            "Share of the prompts found: "
            + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
            + ". Answers count too, and each turn gains more: without reuse a chat of n turns reads its text "
            "(n + 1) / 2 times. Chats in turns evict each other just before they come back."
        )
        report.why(
            f"A stored token takes {token_bytes} bytes, a whole chat {n_longest * token_bytes / 1e6:.1f} MB "
            f"({room / 1e6:.0f} MB for {n_chats}), its system prompt every time. The search compares ids "
            f"with all {n_entries} entries and takes {match_ms:.3f} ms: with "
            f"{max(ttft[0] - ttft[1], 0) / max(match_ms, 1e-9) * n_entries:.0f} entries it would take what "
            "the store saves. A tree or hashed blocks find in the time of one comparison, and share."
        )
        report.finish()
