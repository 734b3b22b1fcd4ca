"""Prefix cache: keys and values of a shared beginning are computed once and reused by every request.

Keys and values of a token depend on the tokens before it and on nothing behind it, so prompts that begin
alike (a system prompt, a set of examples) share the cache of that beginning, and a request computes only
what is new. Exact, token for token, under two rules: the beginnings are equal in every token id, from
position 0 on, and all of it fits the context. Breaking the first gives wrong text without an error; the
script measures how wrong. main_prefix_cache_chat.py reuses answers too.

Run: python main_prefix_cache.py            (--shared 0.5: share of the prompt that the requests share)

Source: Zheng et al., SGLang, 2024 (reuse across requests, RadixAttention); Kwon et al., PagedAttention, 2023.
"""

import torch
import torch.nn.functional as F

from gptlite_kvcache import cache_bytes, cache_length, common_length, cut_cache, expand_cache
from main_kvcache import generate_kvcache


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


@torch.no_grad()
def wrong_reuse(model, prompts, kv_cache):
    """What becomes of prompts [N, T] behind a cache of P other tokens, as if it were that of their first P.

    Returns: mean KL divergence in nats of the next-token distribution from the right one, over the positions
        from P on, and the share of these positions where the most likely token is another one.
    """
    P = cache_length(kv_cache)
    right = model(prompts)[0][:, P:].float().log_softmax(dim=-1)  # [N, T - P, V]
    guess = model(prompts[:, P:], expand_cache(kv_cache, len(prompts)))[0].float().log_softmax(dim=-1)
    kl = F.kl_div(guess, right, reduction="none", log_target=True).sum(dim=-1).mean()
    return kl.item(), (guess.argmax(-1) != right.argmax(-1)).float().mean().item()


if __name__ == "__main__":
    import math

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
        p, dev, dtype, tolerance = get_gptlite_model_parameters(), args.device, args.dtype, utils.TOLERANCE
        W, T, n_tokens = p.seqlen, args.prompt_len, min(args.n_tokens, 4) if args.quick else args.n_tokens
        check_fits(0, T, args.n_tokens, W)
        if not 0 <= args.shared <= 1:
            raise ValueError(f"--shared {args.shared} is no share: it lies between 0 and 1")
        P = min(round(T * args.shared), T - 1)  # at least one token is computed
        vocab_size, _, valid_data, encode, decode = get_shakespeare_data(args.data)
        model = utils.load_model(GPTlite_KVCache, vocab_size, args.checkpoint).to(dev, dtype)
        columns = {"hit_share": ("hit share", "{:.0%}"), "stored_mb": ("stored MB", "{:.1f}")}
        sizes = {"batch_size": args.batch_size, "prompt_len": T, "n_tokens": n_tokens, "n_shared": P}
        report = rep.Report(args, "prefix cache", model, columns, **sizes)
        texts = utils.sample_prompts(valid_data, max(args.batch_size, 8), T).to(dev)  # [N, T]
        prompts = torch.cat([texts[:1, :P].expand(len(texts), -1), texts[:, P:]], dim=1)  # [N, T]
        whole = compute_prefix_cache(model, prompts[:1])  # of T tokens
        stored = compute_prefix_cache(model, prompts[:1, :P])
        copies, stored_mb = [t.clone() for kv in stored or [] for t in kv], cache_bytes(stored) / 1e6

        def method(name, batch, kv_cache, n_new):
            n = cache_length(kv_cache)

            def run():
                generated = generate_with_prefix(model, kv_cache, batch[:, n:], n_new, W)
                return torch.cat([batch[:, :n], generated], dim=1)  # [B, T + n_new]

            return utils.Method(name, run, [model], [t for kv in kv_cache or [] for t in kv])

        # One prefix, behind it a batch of requests, then one alone
        for B in sorted({args.batch_size, 1}, reverse=True):
            batch, kinds = prompts[:B], {"no reuse": None, "prefix cache": stored}  # [B, T]
            methods = [method(name, batch, kv_cache, n_tokens) for name, kv_cache in kinds.items()]
            results = utils.measure(methods, B * n_tokens, args.repeats)
            logits = model(results["no reuse"].output)[0]  # [B, T + n_tokens, V]
            figures = {"prefix cache": {"hit_share": P / T, "stored_mb": stored_mb}}
            report.method_rows(methods, results, batch, logits[:, T - 1 :], f", batch {B}", figures)
        behind_prefix = model(prompts[:, P:], expand_cache(stored, len(prompts)))[0]  # [N, T - P, V]
        difference = utils.largest_difference(behind_prefix, model(prompts)[0][:, P:])
        name = f"logits behind the stored prefix differ by {difference:.1e}, at most {tolerance[dtype]:.0e}"
        report.check(name, difference <= tolerance[dtype])
        unchanged = all(map(torch.equal, copies, [t for kv in stored or [] for t in kv]))
        report.check("the stored prefix is unchanged by its users", unchanged)
        prefill_ms = utils.median_ms(lambda: compute_prefix_cache(model, prompts[:1, :P]), args.repeats, dev)

        # TTFT over the stored share of the prompt: the two ends predict what lies between
        shares = (0, 0.25, 0.5, 0.75, 0.9, 0.95, 1)
        lengths = sorted({P} | {min(round(T * share), T - 1) for share in shares})
        methods = [method(n, prompts[:1], cut_cache(whole, n), 1) for n in lengths]
        ttft = {n: m.ttft_ms for n, m in utils.measure(methods, 1, args.repeats).items()}
        cost = {n: rep.forward_cost(p, vocab_size, 1, T - n, n, dtype) for n in lengths}
        more = {n: cost[n].flops - cost[T - 1].flops for n in lengths}  # operations beyond those of one token
        slope = (ttft[0] - ttft[T - 1]) / max(more[0], 1)  # ms per operation
        predicted = {n: ttft[T - 1] + slope * more[n] for n in lengths}
        names = ("stored", "tokens computed", "TTFT ms", "predicted ms", "times faster")
        lines = [(f"{n / T:.0%}", T - n, ttft[n], predicted[n], ttft[0] / ttft[n]) for n in lengths]
        title = f"Prompt of {T} tokens; the first and the last line make the prediction"
        report.sweep(title, [dict(zip(names, line, strict=True)) for line in lines])

        # The rules broken on purpose: what the output silently becomes
        wrong, other = [], texts[-1]  # other: [T]
        capitals = torch.tensor(encode(decode(prompts[0, :P]).upper()), device=dev)  # [P]
        cases = [("one early token", other, 8, 9), ("its last 16 tokens", other, P - 16, P)]
        cases += [("every token", other, 0, P), ("capitals, same words", capitals, 0, P)]
        for name, tokens, start, stop in cases if P > 16 else ():
            asked = prompts.clone()  # [N, T]
            asked[:, start:stop] = tokens[start:stop]
            n, kv_cache = match_prefix(asked[0].tolist(), prompts[0, :P].tolist(), stored)
            reused, right = model(asked[:1, n:], kv_cache)[0][:, -1], model(asked[:1])[0][:, -1]  # [1, V]
            exact = utils.largest_difference(reused, right) <= tolerance[dtype]
            report.check(f"prompt differs in {name}: {n} of {P} tokens reused, right logits", exact)
            kl, changed = wrong_reuse(model, asked, stored)
            wrong.append({"differs in": name, "reusable": n, "KL (nats)": kl, "next token changed": changed})
        if wrong:
            report.sweep(f"All {P} tokens reused although the prompt differs", wrong)

        limits = rep.measure_ceilings(dev, dtype)
        least = {n: rep.lower_bound_ms(cost[n], limits) for n in (0, P)}
        machine = f"{limits.flops_per_s / 1e9:.0f} GFLOP/s and {limits.bytes_per_s / 1e9:.0f} GB/s"
        if P:
            report.why(
                f"With {P} of {T} tokens stored a prompt needs {cost[0].flops / cost[P].flops:.1f} times "
                f"fewer operations; its TTFT goes from {ttft[0]:.1f} to {ttft[P]:.1f} ms. This machine's "
                f"{machine} allow {least[0]:.1f} and {least[P]:.1f} ms: share reached "
                f"{rep.share_of(least[0], ttft[0])} and {rep.share_of(least[P], ttft[P])}."
            )
        else:
            report.why(
                f"No token is stored, so both rows compute all {T}, in {ttft[0]:.1f} ms. This machine's "
                f"{machine} allow {least[0]:.1f} ms: share reached {rep.share_of(least[0], ttft[0])}."
            )
        per_token = (ttft[0] - ttft[T - 1]) / max(T - 1, 1)  # ms
        if per_token > 0:
            n_least = math.ceil(ttft[T - 1] / per_token)  # stored ones, behind them one to compute
            needs = f"at least {n_least} stored tokens, and more for a longer request"
            if n_least >= W:
                needs = f"more stored tokens than the context of {W} holds"
            report.why(
                f"One token takes {ttft[T - 1]:.1f} ms, each further one {per_token:.3f} ms, and only the "
                f"latter is saved: a factor of 2 needs {needs}. With fewer a prompt alone gains less than a "
                "factor of 2; in a full batch every request saves its tokens."
            )
        else:
            report.why(
                f"One token takes {ttft[T - 1]:.1f} ms, the prompt of {T} {ttft[0]:.1f} ms: too short to "
                "save time by storing it."
            )
        saved = ttft[0] - ttft[P]  # ms
        if P:
            paid = "not even 1000 pay it back"
            if 1000 * saved > prefill_ms:
                paid = f"{math.ceil(prefill_ms / saved)} pay it back"
            report.why(
                f"The prefix took {prefill_ms:.1f} ms once and holds {stored_mb:.2f} MB; a request alone "
                f"saves {saved:.1f} ms by it: {paid}. Decoding is no faster: a step reads all keys and "
                "values, the stored ones too."
            )
        report.why(
            "Wrong reuse raises no error, it changes the text. So ids are compared, and all of them; not the "
            "text, which a tokenizer may cut in another way when something else follows."
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
