"""Prefix cache: keys and values of a shared beginning are computed once and reused by every request.

Keys and values of a token depend on the tokens before it and on nothing behind it, so prompts that begin
alike (a system prompt, the history of a chat) share the cache of that beginning, and a request computes
only what is new. Exact, token for token, under two rules: the beginnings are equal in every token id, from
position 0 on, and all of it fits the context. Breaking the first gives wrong text without an error; the
script measures how wrong.

Run: python main_prefix_cache.py            (--shared 0.5: share of the prompt that the requests share)

Source: Zheng et al., SGLang, 2024 (reuse across requests, RadixAttention); Kwon et al., PagedAttention, 2023.
"""

from collections import OrderedDict

import torch

from main_kvcache import generate_kvcache


def cache_length(kv_cache):
    """Number of tokens in a cache: one (k, v) a layer, [B, H, S, D] each. None holds none."""
    return 0 if kv_cache is None else kv_cache[0][0].shape[-2]


def cache_bytes(kv_cache):
    return sum(t.numel() * t.element_size() for kv in kv_cache or [] for t in kv)


def cut_cache(kv_cache, n):
    """The first n tokens of a cache, as views; None for n = 0. Right because a token sees no later one."""
    return [(k[..., :n, :], v[..., :n, :]) for k, v in kv_cache] if n else None  # [B, H, n, D]


def expand_cache(kv_cache, batch_size):
    """The cache of one sequence for a whole batch: every request reads the same memory, as views."""
    return kv_cache and [
        (k.expand(batch_size, -1, -1, -1), v.expand(batch_size, -1, -1, -1)) for k, v in kv_cache
    ]


def check_fits(n_prefix, n_request, n_tokens, seqlen):
    """Raises ValueError past the context: positions would shift there, and a stored prefix be wrong."""
    if (total := n_prefix + n_request + n_tokens) > seqlen:
        sizes = f"a prefix of {n_prefix}, a request of {n_request} and {n_tokens} new tokens make {total}"
        raise ValueError(f"{sizes}, more than the context of {seqlen}")


@torch.no_grad()
def compute_prefix_cache(model, prefix):
    """Runs the shared tokens [1, P] through the model, once: returns their cache, None for an empty prefix.

    Raises ValueError for a prefix longer than the model's context.
    """
    check_fits(prefix.shape[1], 0, 0, model.seqlen)
    return model(prefix)[1] if prefix.shape[1] else None


def generate_with_prefix(model, prefix_cache, request, n_tokens, seqlen):
    """generate_kvcache behind a stored prefix, for a batch of requests that share it.

    Args: model: GPTlite_KVCache; prefix_cache: cache of P tokens, batch 1, or None; it is not modified,
        because the model appends by concatenation; request: the tokens behind the prefix [B, T].
    Returns: request and generated tokens, [B, T + n_tokens]. Raises ValueError for an empty request, and
        where prefix, request and new tokens do not fit the context.
    """
    check_fits(cache_length(prefix_cache), request.shape[1], n_tokens, seqlen)
    kv_cache = expand_cache(prefix_cache, request.shape[0])  # [B, H, P, D] a layer
    return generate_kvcache(model, request, n_tokens, seqlen, kv_cache)


# ---- Multi-turn chat: a store of everything that was computed ----


def common_length(a, b):
    """How many tokens two sequences have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class PrefixStore:
    """Token ids -> KV cache. The longest common beginning wins, the least recently used entry leaves.

    The key is the token ids themselves: not a text, and not a short hash of them. A store belongs to one
    model. Entries share no bytes: two chats hold their system prompt twice (blocks or a tree avoid that).
    """

    def __init__(self, capacity_bytes):
        self.capacity_bytes = capacity_bytes
        self.entries = OrderedDict()  # tuple of token ids -> cache, least recently used first
        self.n_bytes = self.n_evicted = 0

    def match(self, tokens):
        """Token ids -> (n, cache of the first n of them, None for n = 0), n as large as the store allows.

        At most len(tokens) - 1: the last token has to run through the model, its logits are not stored.
        The cache is a view of the entry, to be read only.
        """
        lengths = {stored: common_length(stored, tokens[:-1]) for stored in self.entries}
        longest = max(lengths, key=lengths.get, default=None)
        if longest is None or lengths[longest] == 0:
            return 0, None
        self.entries.move_to_end(longest)
        return lengths[longest], cut_cache(self.entries[longest], lengths[longest])

    def put(self, tokens, kv_cache):
        """Stores the cache of these tokens, [1, H, len(tokens), D] a layer, if the capacity allows it.

        Entries that are a beginning of it go: it contains them. Raises ValueError if sizes do not agree.
        """
        key, n_bytes = tuple(tokens), cache_bytes(kv_cache)
        if len(key) != cache_length(kv_cache) or kv_cache and kv_cache[0][0].shape[0] != 1:
            raise ValueError(f"{len(key)} tokens of one sequence need a cache of as many, and of batch 1")
        contains_it = next((stored for stored in self.entries if stored[: len(key)] == key), None)
        if contains_it is not None:
            self.entries.move_to_end(contains_it)
        elif 0 < n_bytes <= self.capacity_bytes:
            for stored in [stored for stored in self.entries if key[: len(stored)] == stored]:
                self.n_bytes -= cache_bytes(self.entries.pop(stored))
            while self.n_bytes + n_bytes > self.capacity_bytes:
                self.n_bytes -= cache_bytes(self.entries.popitem(last=False)[1])
                self.n_evicted += 1
            self.entries[key] = kv_cache
            self.n_bytes += n_bytes


def generate_with_store(model, store, prompt, n_tokens, seqlen, keep=True):
    """Continues a prompt [1, T] behind what the store has of it; keep: stores what was computed.

    Returns: prompt and generated tokens [1, T + n_tokens], and how many prompt tokens came from the store.
        The last generated token is not stored: no step has computed its keys and values yet.
    """
    check_fits(0, prompt.shape[1], n_tokens, seqlen)
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

    import torch.nn.functional as F

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters
    from gptlite_kvcache import GPTlite_KVCache

    parser = rep.options(__doc__, repeats=3)
    parser.add_argument("--prompt-len", type=rep.positive_int, default=200, help="tokens of the prompts")
    parser.add_argument("--shared", type=float, default=0.9, help="share of them that all prompts share")
    parser.add_argument("--n-tokens", type=rep.positive_int, default=32, help="new tokens of a request")
    parser.add_argument("--batch-size", type=rep.positive_int, default=8, help="requests of the batch")
    with rep.script(parser) as args, torch.no_grad():
        p, dev, quick, dtype = get_gptlite_model_parameters(), args.device, args.quick, args.dtype
        W, T, n_tokens = p.seqlen, args.prompt_len, min(args.n_tokens, 4) if quick else args.n_tokens
        tolerance = utils.TOLERANCE[dtype]
        check_fits(0, T, args.n_tokens, W)
        if not 0 <= args.shared <= 1:
            raise ValueError(f"--shared {args.shared} is no share: it lies between 0 and 1")
        P = min(round(T * args.shared), T - 1)  # at least one token is computed
        vocab_size, _, valid_data, encode, decode = get_shakespeare_data(args.data)
        model = utils.load_model(GPTlite_KVCache, vocab_size, args.checkpoint).to(dev, dtype)
        extra = {"hit_share": ("hit share", "{:.0%}"), "stored_mb": ("stored MB", "{:.1f}")}
        sizes = {"batch_size": args.batch_size, "prompt_len": T, "n_tokens": n_tokens, "n_shared": P}
        report = rep.Report(args, "prefix cache", model, extra | {"n_evicted": ("evicted", "{}")}, **sizes)
        texts = utils.sample_prompts(valid_data, max(args.batch_size, 8), T).to(dev)  # [N, T]
        prompts = torch.cat([texts[:1, :P].expand(len(texts), -1), texts[:, P:]], dim=1)  # [N, T]
        whole = compute_prefix_cache(model, prompts[:1])  # of T tokens
        stored = compute_prefix_cache(model, prompts[:1, :P])
        copies, stored_mb = [t.clone() for kv in stored or [] for t in kv], cache_bytes(stored) / 1e6

        def method(name, batch, kv_cache, n_new):
            n = cache_length(kv_cache)
            requests = batch[:, n:]

            def run():
                generated = generate_with_prefix(model, kv_cache, requests, n_new, W)
                return torch.cat([batch[:, :n], generated], dim=1)  # [B, T + n_new]

            return utils.Method(name, run, [model], [t for kv in kv_cache or [] for t in kv])

        # One prefix, behind it a batch of requests, then one alone
        for B in sorted({args.batch_size, 1}, reverse=True):
            batch = prompts[:B]  # [B, T]
            methods = [
                method("no reuse", batch, None, n_tokens),
                method("prefix cache", batch, stored, n_tokens),
            ]
            results = utils.measure(methods, B * n_tokens, args.repeats)
            logits = model(results["no reuse"].output)[0]  # [B, T + n_tokens, V]
            figures = {"prefix cache": {"hit_share": P / T, "stored_mb": stored_mb}}
            report.method_rows(methods, results, batch, logits[:, T - 1 :], f", batch {B}", figures)
        behind_prefix = model(prompts[:, P:], expand_cache(stored, len(prompts)))[0]  # [N, T - P, V]
        difference = utils.largest_difference(behind_prefix, model(prompts)[0][:, P:])
        name = f"logits behind the stored prefix differ by {difference:.1e}, at most {tolerance:.0e}"
        report.check(name, difference <= tolerance)
        unchanged = all(map(torch.equal, copies, [t for kv in stored or [] for t in kv]))
        report.check("the stored prefix is unchanged by its users", unchanged)
        prefill_ms = utils.median_ms(lambda: compute_prefix_cache(model, prompts[:1, :P]), args.repeats, dev)

        # TTFT over the stored share of the prompt: the two ends predict what lies between
        shares = (0, 0.25, 0.5, 0.75, 0.9, 0.95, 1)
        lengths = sorted({P} | {min(round(T * share), T - 1) for share in shares})
        methods = [method(n, prompts[:1], cut_cache(whole, n), 1) for n in lengths]
        ttft = {n: m.ttft_ms for n, m in utils.measure(methods, 1, args.repeats).items()}
        cost = {n: rep.forward_cost(p, vocab_size, 1, T - n, n, dtype) for n in lengths}
        extra_flops = {n: cost[n].flops - cost[T - 1].flops for n in lengths}  # beyond those of one token
        slope = (ttft[0] - ttft[T - 1]) / max(extra_flops[0], 1)  # ms per operation
        predicted = {n: ttft[T - 1] + slope * extra_flops[n] for n in lengths}
        names = ("stored", "tokens computed", "TTFT ms", "predicted ms", "times faster")
        lines = [(f"{n / T:.0%}", T - n, ttft[n], predicted[n], ttft[0] / ttft[n]) for n in lengths]
        title = f"Prompt of {T} tokens; the first and the last line make the prediction"
        report.sweep(title, [dict(zip(names, line, strict=True)) for line in lines])

        # The rules broken on purpose: what the output silently becomes
        store, wrong = PrefixStore(10**12), []
        store.put(prompts[0, :P].tolist(), stored)
        capitals = torch.tensor(encode(decode(prompts[0, :P]).upper()), device=dev)  # [P]
        cases = [("one early token", texts[-1], 8, 9), ("its last 16 tokens", texts[-1], P - 16, P)]
        cases += [("every token", texts[-1], 0, P), ("capitals, same words", capitals, 0, P)]
        for name, other, start, stop in cases if P > 16 else ():
            asked = prompts.clone()  # [N, T]
            asked[:, start:stop] = other[start:stop]
            right = model(asked)[0][:, P:].float().log_softmax(dim=-1)  # [N, T - P, V]
            guess = model(asked[:, P:], expand_cache(stored, len(asked)))[0].float().log_softmax(dim=-1)
            n_hit, kv_cache = store.match(asked[0].tolist())
            reused = model(asked[:1, n_hit:], kv_cache)[0][:, -1].float().log_softmax(dim=-1)  # [1, V]
            exact = utils.largest_difference(reused, right[:1, -1]) <= tolerance
            report.check(f"prompt differs in {name}: {n_hit} of {P} tokens reused, right logits", exact)
            kl = F.kl_div(guess, right, reduction="none", log_target=True).sum(dim=-1).mean().item()
            changed = (guess.argmax(-1) != right.argmax(-1)).float().mean().item()
            line = {"differs in": name, "reusable": n_hit, "KL (nats)": kl, "next token changed": changed}
            wrong.append(line)
        if wrong:
            report.sweep(f"All {P} tokens reused although the prompt differs", wrong)

        # Chats in turns, behind one system prompt: each turn's prompt is all of the chat so far
        n_chats, n_turns, n_user, n_reply = (2, 2, 20, 4) if quick else (6, 4, 20, 28)
        system = texts[:1, : min(48, T)]  # [1, S]
        said = utils.sample_prompts(valid_data, n_chats, n_turns * n_user).to(dev)  # [chats, turns * user]
        room = n_chats * (system.shape[1] + n_turns * (n_user + n_reply)) * cache_bytes(whole) // T
        reference, shares = None, {}  # share of the prompt tokens that was stored
        kinds = [("no reuse", 0, False), ("system prompt", room, False), ("whole history", room, True)]
        for name, capacity, keep in [*kinds, ("history, half the room", room // 2, True)]:
            store, history, clocks, n_prompt, n_hits = PrefixStore(capacity), [system] * n_chats, [], 0, 0
            store.put(system[0].tolist(), compute_prefix_cache(model, system))
            for message in said.split(n_user, dim=1):  # [chats, user]
                for i in range(n_chats):
                    prompt = torch.cat([history[i], message[i : i + 1]], dim=1)  # [1, T]
                    with utils.StepClock(model) as clock:
                        history[i], n_hit = generate_with_store(model, store, prompt, n_reply, W, keep)
                    n_prompt, n_hits = n_prompt + prompt.shape[1], n_hits + n_hit
                    clocks.append(clock)
            tokens, shares[name] = torch.cat(history), n_hits / n_prompt  # [chats, N]
            reference = tokens if reference is None else reference
            logits = model(reference[:, :-1])[0]  # [chats, N - 1, V]
            first = utils.first_difference(tokens[:, 1:], reference[:, 1:], logits)
            n_computed = sum(clock.forward_tokens for clock in clocks)
            report.row(
                f"chat: {name}",
                baseline=name == "no reuse",
                ttft_ms=median(clock.steps_ms[0] for clock in clocks),
                tpot_ms=median(ms for clock in clocks for ms in clock.steps_ms[1:]),
                tokens_per_s=1000 * n_reply * len(clocks) / sum(clock.total_ms for clock in clocks),
                forward_tokens=n_computed,
                same_output=first is None,
                hit_share=n_hits / n_prompt,
                stored_mb=store.n_bytes / 1e6,
                n_evicted=store.n_evicted,
                n_parameters=utils.n_parameters(model),
            )
            counted = n_computed == n_prompt - n_hits + (n_reply - 1) * len(clocks)
            name = (
                f"chat, {name}: same tokens as without reuse, {n_hits} of {n_prompt} prompt tokens less work"
            )
            report.check(name, first is None and counted)
        ordered = 0 == shares["no reuse"] < shares["system prompt"] < shares["whole history"]
        report.check("the more is stored, the more of a prompt is found", ordered)

        limits = rep.measure_ceilings(dev, dtype)
        least = {n: rep.lower_bound_ms(cost[n], limits) for n in (0, P)}
        per_token = max(ttft[0] - ttft[T - 1], 1e-9) / max(T - 1, 1)
        report.why(
            f"With {P} of {T} tokens stored a prompt costs {cost[0].flops / cost[P].flops:.1f} times fewer "
            f"operations, and its TTFT is {ttft[0] / ttft[P]:.1f} times lower. This machine's "
            f"{limits.flops_per_s / 1e9:.0f} GFLOP/s and {limits.bytes_per_s / 1e9:.0f} GB/s allow "
            f"{least[0]:.1f} and {least[P]:.1f} ms: share reached {rep.share_of(least[0], ttft[0])} and "
            f"{rep.share_of(least[P], ttft[P])}."
        )
        report.why(
            f"One token takes {ttft[T - 1]:.1f} ms, each further one {per_token:.3f} ms, and only the latter "
            f"is saved: a factor of 2 needs {ttft[T - 1] / per_token:.0f} stored tokens. Where that exceeds "
            "the context (GPUs), a prompt alone gains nothing, only full batches do."
        )
        report.why(
            f"The prefix took {prefill_ms:.1f} ms once and holds {stored_mb:.2f} MB: the second request pays "
            "it back. Decoding is no faster: a step reads all keys and values, the stored ones too."
        )
        report.why(
            "Wrong reuse raises no error, it changes the text. So ids are compared, and all of them; not the "
            "text, which a tokenizer may cut in another way when something else follows."
        )
        report.why(
            "Share of the prompts found in chats: "
            + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
            + ". Answers count too. Chats in turns evict each other just before they come back."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            axes.plot([100 * n / T for n in lengths], list(ttft.values()), "o", label="measured")
            axes.plot(
                [100 * n / T for n in lengths], list(predicted.values()), label="predicted from the ends"
            )
            axes.set(xlabel="stored share of the prompt (%)", ylabel="TTFT (ms)", ylim=(0, None))
            axes.set_title(f"Prompt of {T} tokens, {report.data['config']['device_name']}")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
