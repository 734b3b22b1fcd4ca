"""Prefix cache for chats: everything that was computed is stored, so a turn computes only what is new.

Idea: the prompt of the next turn is the previous prompt, the answer and a new message. All of it but the
message was in a cache already when the answer was complete. A store keeps such caches by their token ids,
finds the longest common beginning, and lets the least recently used entry go when its bytes are used up.

Exact, token for token, under the two rules of main_prefix_cache.py. Wins with every turn, because a chat of n
turns reads its text (n + 1) / 2 times without reuse. Loses memory: each chat holds its system prompt again,
and a search compares the ids with all entries, where a tree (main_radix_cache.py) or hashed blocks
(main_block_cache.py) share what is common and find it in the time of one comparison. Where the room is too
small, chats in turns evict each other just before they come back.

Run: python more/prefix_cache_chat.py            (--n-chats 12: more of them take turns)

Source: Zheng et al., SGLang, 2024 (RadixAttention); Gao et al., CachedAttention, 2024 (turns of a chat).
"""

from collections import OrderedDict

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_blocks import weights_of
from gptlite_kvcache import cache_bytes, cache_length, common_length
from main_kvcache import generate_kvcache
from main_prefix_cache import check_fits, match_prefix


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
        weights = weights_of(model)
        if [w[1:] for w in weights] != [w[1:] for w in self.weights]:  # addresses and versions
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


def chats_in_turns(model, store, system, messages, n_tokens, seqlen, keep=True):
    """All chats in turns: a prompt is all that was said in a chat so far, and its next message.

    Args: system: token ids that every chat begins with [1, S]; messages: token ids [chats, turns, T].
    Yields what generate_with_store returns for each turn, and the turn's prompt.
    """
    history = [system] * len(messages)  # [1, tokens so far] each
    for turn in messages.unbind(dim=1):  # [chats, T]
        for i, message in enumerate(turn.split(1)):  # [1, T]
            prompt = torch.cat([history[i], message], dim=1)  # [1, tokens so far + T]
            history[i], n_hit = generate_with_store(model, store, prompt, n_tokens, seqlen, keep)
            yield history[i], n_hit, prompt


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_utils as utils
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_kvcache import GPTlite_KVCache
    from inference_calls import generation_figures, measure_calls
    from main_prefix_cache import compute_prefix_cache

    quick = {"n_chats": 2, "n_turns": 2, "n_tokens": 4}
    parser = harness.options(__doc__, repeats=3, plot=False, quick=quick, n_tokens=28)
    parser.add_argument("--n-chats", type=harness.positive_int, default=6, help="chats that take turns")
    parser.add_argument("--n-turns", type=harness.positive_int, default=4, help="turns of a chat")
    S, n_user = 48, 20  # tokens of the system prompt and of a message
    with harness.script(parser) as args, torch.no_grad():
        text, (plain, model) = harness.load_text(args), harness.load_models(args, GPTlite, GPTlite_KVCache)
        n_new, n_asked, W = args.n_tokens, args.n_chats * args.n_turns, model.seqlen
        check_fits(S, args.n_turns * n_user, args.n_turns * n_new, W)
        n_longest = S + args.n_turns * (n_user + n_new)  # tokens of a whole chat
        columns = {"hit_share": ("hit share", "{:.0%}"), "stored_mb": ("stored MB", "{:.1f}")}
        columns |= {"n_evicted": ("evicted", "{}")}
        sizes = {"batch_size": 1, "prompt_len": n_longest - n_new, "n_shared": S}
        report = harness.Report(args, "prefix cache for chats", model, columns, **sizes)
        system = text.prompts(1, S)  # [1, S]
        said = text.prompts(args.n_chats, args.n_turns * n_user)  # [chats, turns * user]
        system_cache, stores = compute_prefix_cache(model, system), {}
        room = args.n_chats * n_longest * cache_bytes(system_cache) // S
        ways = {"no reuse": (0, False), "system prompt": (room, False), "whole history": (room, True)}
        ways["history, half the room"] = (room // 2, True)  # name: (bytes, whether answers are stored)

        def serve(name):
            capacity, keep = ways[name]
            stores[name] = store = PrefixStore(capacity)
            store.use(model)
            store.put(system[0].tolist(), system_cache)
            messages = said.unflatten(1, (args.n_turns, n_user))  # [chats, turns, user]
            return chats_in_turns(model, store, system, messages, n_new, W, keep)

        # a pass of its own, which is the warm-up as well
        memory = {name: utils.peak_memory_mb(lambda n=name: list(serve(n)), model) for name in ways}
        makers = {name: partial(serve, name) for name in ways}
        measured = measure_calls(makers, n_asked, args.repeats, partial(utils.StepClock, model))
        rows, margin = {}, utils.tie_margin(args.dtype)  # closer logits are a tie
        for name, (turns, runs) in measured.items():
            requests = [(prompt[0], n_new) for *_, prompt in turns]
            n_prompt, n_hits = sum(len(prompt) for prompt, _ in requests), sum(n for _, n, _ in turns)
            same = utils.served_as_alone(plain, [tokens[0] for tokens, *_ in turns], requests, margin)
            rows[name] = row = report.row(
                name,
                baseline=name == "no reuse",
                same_output=same,
                peak_memory_mb=memory[name],
                kv_bytes_per_token=harness.kv_bytes_per_token(model, system),
                n_parameters=utils.n_parameters(model),
                hit_share=n_hits / n_prompt,
                stored_mb=stores[name].n_bytes / 1e6,
                n_evicted=stores[name].n_evicted,
                **generation_figures(runs, n_new),
            )
            report.check(f"{name}: each turn gets the tokens that it gets without any cache", same)
            less = row["forward_tokens"] == n_prompt - n_hits + (n_new - 1) * n_asked
            report.check(f"{name}: {n_hits} of {n_prompt} prompt tokens less work", less)
        none, shared, full, half = rows.values()
        shares = [row["hit_share"] for row in rows.values()]
        report.check("the more is stored, the more is found", 0 == shares[0] < shares[1] <= shares[2])

        T, n = n_prompt // n_asked, round(shares[2] * n_prompt / n_asked)  # of a mean prompt
        forward = partial(harness.forward_cost, utils.parameters_of(model), text.vocab_size, 1)
        costs = {"no reuse": forward(T, 0, args.dtype), "whole history": forward(T - n, n, args.dtype)}
        report.why_step(costs, rows, "ttft_ms")
        report.why(words.compare(full, none, "ttft_ms") + words.compare(full, shared, "ttft_ms"))
        found = f"Half the room finds {shares[3]:.0%} of the prompts' tokens, all of it {shares[2]:.0%}"
        texts = f"{found}: little is missed.", f"{found}: chats evict what others come back to."
        report.why(words.choose(shares[3] / shares[2], (0.95, texts[0]), texts[1]))
        report.why(words.compare(half, none, "tokens_per_s") + words.compare(full, none, "tokens_per_s"))
        report.finish()
