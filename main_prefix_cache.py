"""Prefix cache: keys and values of a shared beginning are computed once and reused by every request.

Idea: keys and values of a token depend on the tokens before it and on nothing behind it. Prompts that begin
alike (a system prompt, a set of examples) therefore share the cache of that beginning, and a request computes
only what is new.

Exact, token for token, under two rules: the beginnings are equal in every token id, from position 0 on, and
all of it fits the context. A prefix that differs raises no error, it changes the text; the script measures
how much. Compare ids, not text: a tokenizer may cut the same words in another way when others follow.
Wins the more of a prompt is shared, and most in a batch, where each request saves its share of one long step.
Loses the memory of the stored prefix; decoding is no faster, since a step reads all keys and values, and a
short prefix of a single prompt saves little, since one token takes as long as reading the weights.
more/prefix_cache_chat.py reuses answers too.

Run: python main_prefix_cache.py            (--shared 0.5: share of the prompt that the requests share)

Source: Zheng et al., SGLang, 2024 (reuse across requests, RadixAttention); Kwon et al., PagedAttention, 2023.
"""

import torch

from gptlite_kvcache import cache_length, common_length, cut_cache, expand_cache
from main_kvcache import generate_kvcache


def generate_requests(model, prefix, requests, n_tokens, seqlen):
    """The prefix once, then each request behind its cache, which no request changes.

    Args: model: GPTlite_KVCache; prefix: token ids [1, P]; requests: token ids [T] each, behind the prefix.
    Returns: a list of request and generated tokens, [1, T + n_tokens] each.
    """
    with torch.no_grad():
        _, prefix_cache = model(prefix)  # one (k, v) a layer, [1, H, P, D] each
    return [
        generate_kvcache(model, request[None], n_tokens, seqlen, kv_cache=prefix_cache)
        for request in requests
    ]


# ---- A batch of requests, what may be reused, and what wrong reuse does ----


def check_fits(n_prefix, n_request, n_tokens, seqlen):
    """Raises ValueError past the context: positions would shift there, and a stored prefix be wrong."""
    if (total := n_prefix + n_request + n_tokens) > seqlen:
        sizes = f"a prefix of {n_prefix}, a request of {n_request} and {n_tokens} new tokens make {total}"
        raise ValueError(f"{sizes}, more than the context of {seqlen}")


@torch.no_grad()
def compute_prefix_cache(model, prefix):
    """Runs the shared tokens [1, P] through the model, once: returns their cache, None for an empty prefix.

    It belongs to these weights, others need another. Raises ValueError for more tokens than the context.
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


def match_prefix(tokens, stored, kv_cache):
    """What a prompt may reuse of a stored prefix: both as token ids, kv_cache: the cache of the stored ones.

    Returns: (n, cache of the first n tokens, None for n = 0), up to the first token that differs, and at most
        len(tokens) - 1: the last token has to run through the model, its logits are not stored.
    """
    n = common_length(stored, tokens[:-1])
    return n, cut_cache(kv_cache, n)


def generate_reusing(model, prompts, n_tokens, seqlen, stored, kv_cache):
    """Continues whole prompts [B, T] behind what all of them have in common with the stored tokens.

    Args: stored: token ids, a list of P numbers; kv_cache: their cache, None for none.
    Returns: prompts and generated tokens, [B, T + n_tokens], as generate_kvcache gives them.
    """
    n = min((match_prefix(prompt, stored, kv_cache)[0] for prompt in prompts.tolist()), default=0)
    generated = generate_with_prefix(model, cut_cache(kv_cache, n), prompts[:, n:], n_tokens, seqlen)
    return torch.cat([prompts[:, :n], generated], dim=1)  # [B, T + n_tokens]


@torch.no_grad()
def wrong_reuse(model, prompts, kv_cache):
    """What becomes of prompts [N, T] behind a cache of P other tokens, as if it were that of their first P.

    Returns: mean KL divergence in nats of the next-token distribution from the right one, over the positions
        from P on, and the share of these positions where the most likely token is another one.
    """
    P = cache_length(kv_cache)
    right = model(prompts)[0][:, P:].float().log_softmax(dim=-1)  # [N, T - P, V]
    guess = model(prompts[:, P:], expand_cache(kv_cache, len(prompts)))[0].float().log_softmax(dim=-1)
    p = right.exp()  # 0 where a token is ruled out: it adds nothing, though its difference may be NaN
    kl = torch.where(p > 0, p * (right - guess), 0.0).sum(dim=-1)  # [N, T - P]
    return kl.mean().item(), (guess.argmax(-1) != right.argmax(-1)).float().mean().item()


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import GPTlite_KVCache, cache_bytes
    from inference_report import Method
    from inference_utils import cache_tensors, median_ms, parameters_of

    sizes = {"batch_size": 8, "prompt_len": 200, "n_tokens": 32}
    parser = harness.options(__doc__, repeats=3, quick={"n_tokens": 4}, **sizes)
    parser.add_argument("--shared", type=float, default=0.9, help="share of a prompt that all prompts share")
    with harness.script(parser) as args, torch.no_grad():
        if not 0 <= args.shared <= 1:
            raise ValueError(f"--shared {args.shared} is no share: it lies between 0 and 1")
        (model,) = harness.load_models(args, GPTlite_KVCache)
        p, W, T, text = parameters_of(model), model.seqlen, args.prompt_len, harness.load_text(args)
        check_fits(0, T, args.n_tokens, W)
        P = min(round(T * args.shared), T - 1)  # at least one token is computed
        texts = text.prompts(max(args.batch_size, 8), T)  # [N, T]
        prompts = torch.cat([texts[:1, :P].expand(len(texts), -1), texts[:, P:]], dim=1)  # [N, T]
        columns = {"hit_share": ("hit share", "{:.0%}"), "stored_mb": ("stored MB", "{:.1f}")}
        report = harness.Report(args, "prefix cache", model, columns, text=text, n_shared=P)
        ids, whole = prompts[0].tolist(), compute_prefix_cache(model, prompts[:1])
        stored = compute_prefix_cache(model, prompts[:1, :P])
        copies = [t.clone() for t in cache_tensors(stored)]
        figures, tables = {"hit_share": P / T, "stored_mb": cache_bytes(stored) / 1e6}, {}
        figures["kv_bytes_per_token"] = harness.kv_bytes_per_token(model, prompts)  # a sequence copies it
        for B in sorted({1, args.batch_size}):
            tables[B] = report.compare(
                prompts[:B],
                args.n_tokens,
                Method("no reuse", generate_kvcache, model),
                Method("prefix cache", generate_reusing, model, W, ids[:P], stored, loss=False, **figures),
            )
        behind = model(prompts[:, P:], expand_cache(stored, len(prompts)))[0]  # [N, T - P, V]
        report.check_close("logits behind the stored prefix", behind, model(prompts)[0][:, P:])
        report.check("the stored prefix is unchanged", all(map(torch.equal, copies, cache_tensors(stored))))

        # TTFT over the stored tokens: the two ends predict what lies between
        title, shares = f"TTFT (ms) of one prompt of {T} tokens", (0, 0.25, 0.5, 0.75, 0.9, 0.95, 1)
        lengths = sorted({P} | {min(round(T * share), T - 1) for share in shares})
        one = (model, prompts[:1], 1, W)

        def ways(n):
            no_reuse, reuse = partial(generate_kvcache, *one), partial(generate_reusing, *one, ids[:n], whole)
            return {"no reuse": no_reuse, "prefix cache": reuse}

        rows = report.time_sweep(title, "stored tokens", lengths, ways)
        costs = {n: harness.forward_cost(p, text.vocab_size, 1, T - n, n, args.dtype) for n in lengths}
        most, least = (row["prefix cache"] for row in (rows[0], rows[-1]))  # ms
        for n, row in zip(lengths, rows, strict=True):
            share = (costs[n].flops - costs[T - 1].flops) / max(costs[0].flops - costs[T - 1].flops, 1)
            row["predicted"] = least + share * (most - least)

        # The first rule broken on purpose: what the output silently becomes
        wrong, other = [], texts[-1]  # other: [T]
        capitals = torch.tensor(text.encode(text.decode(prompts[0, :P]).upper()), device=args.device)  # [P]
        cases = [("one early token", other, 8, 9), ("its last 16 tokens", other, P - 16, P)]
        cases += [("every token", other, 0, P), ("capitals, same words", capitals, 0, P)]
        for name, tokens, start, stop in cases if P > 16 else ():
            asked = prompts.clone()  # [N, T]
            asked[:, start:stop] = tokens[start:stop]
            n, kv_cache = match_prefix(asked[0].tolist(), ids[:P], stored)
            reused, right = model(asked[:1, n:], kv_cache)[0][:, -1], model(asked[:1])[0][:, -1]  # [1, V]
            report.check_close(f"differs in {name}: {n} of {P} tokens reused, right logits", reused, right)
            kl, changed = wrong_reuse(model, asked, stored)
            wrong.append({"differs in": name, "reusable": n, "KL (nats)": kl, "next token changed": changed})
        if wrong:
            report.sweep(f"All {P} tokens reused although the prompt differs", wrong)

        report.why_step({"no reuse": costs[0], "prefix cache": costs[P]}, tables[1], "ttft_ms")
        alone, many = ((tables[B]["prefix cache"], tables[B]["no reuse"]) for B in (1, args.batch_size))
        report.why(words.compare(*alone, "ttft_ms") + words.compare(*many, "ttft_ms"))
        report.why(words.crossover(rows, "stored tokens", "prefix cache", "no reuse"))
        saved = 0 if words.overlap(*alone, "ttft_ms") else alone[1]["ttft_ms"] - alone[0]["ttft_ms"]
        once = median_ms(lambda: compute_prefix_cache(model, prompts[:1, :P]), args.repeats, args.device)
        report.why(words.pays_back(once, saved, "ms", "requests") + words.compare(*alone))
        report.plot_sweep(title, "TTFT (ms)", log="")
        report.finish()
