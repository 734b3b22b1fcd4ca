"""KV cache past the context: what each way of going on costs, in loss and in work.

Idea: GPTlite has learned positions for 256 tokens, so a longer text must give up something. Three rules:
compute the last 256 tokens anew for each token (what a model without cache does), keep the last 256 keys and
values and give every new token the last position, or refill: when the cache is full, keep the last tokens of
the text and encode them anew from position 0.

Approximate against the first rule, all of them exact below the context. The last position costs one token a
token and loses much, since its keys were made at positions that they no longer have; refilling loses little
where the tokens that are kept say enough, and costs W / (W - kept) tokens a token. Models with relative
positions can roll on instead.

Run: python more/kvcache_past_window.py

Source: Vaswani et al., Attention Is All You Need, 2017; Xiao et al., StreamingLLM, 2024 (rolling caches).
"""

import torch
import torch.nn.functional as F

import _root  # noqa: F401 (the files above become importable)
from main_kvcache import check_prompt, generate, generate_kvcache


@torch.no_grad()
def generate_refill(model, prompt, n_tokens, seqlen, n_kept):
    """Greedy decoding with a KV cache that is emptied when it is full, and refilled with the last tokens.

    Args: as generate_kvcache; n_kept: tokens that a refill encodes anew from position 0.
    Returns: prompt and generated tokens, [B, T + n_tokens]. Raises ValueError as generate_kvcache does, and
        for n_kept that leaves no room.
    """
    check_prompt(prompt, n_tokens, seqlen)
    if not 1 <= n_kept < seqlen:
        raise ValueError(f"a refill keeps 1 to {seqlen - 1} tokens, not {n_kept}")
    tokens, new_tokens, kv_cache = prompt, prompt[:, -seqlen:], None  # [B, T]
    for _ in range(n_tokens):
        if kv_cache is not None and kv_cache[0][0].shape[-2] == seqlen:
            kv_cache, new_tokens = None, tokens[:, -n_kept:]  # [B, n_kept]
        logits, kv_cache = model(new_tokens, kv_cache, max_seqlen=seqlen)  # [B, S, V]
        new_tokens = logits[:, -1].argmax(dim=-1, keepdim=True)  # [B, 1]
        tokens = torch.cat([tokens, new_tokens], dim=1)  # [B, T+1]
    return tokens


@torch.no_grad()
def loss_recomputed(model, texts, seqlen, targets):
    """Loss of the tokens at `targets` [n] of texts [B, N] if the last seqlen are read anew for each: [B]."""
    last = []
    for t in targets.tolist():
        last.append(model(texts[:, t - seqlen : t], max_seqlen=seqlen)[0][:, -1])  # [B, V]
    return text_losses(torch.stack(last, dim=1), texts[:, targets])


@torch.no_grad()
def loss_last_position(model, texts, seqlen, targets):
    """The same if every token past the context gets the last position: [B]."""
    logits = model(texts[:, :-1], max_seqlen=seqlen)[0]  # [B, N-1, V]
    return text_losses(logits[:, targets - 1], texts[:, targets])


@torch.no_grad()
def loss_refilled(model, texts, seqlen, targets, n_kept):
    """The same if a full cache is refilled with the last n_kept tokens: [B]."""
    N, pieces, start, done = texts.shape[1], [], 0, 0
    while done < N - 1:  # each turn reads the text that one filling of the cache holds
        text = texts[:, start : min(start + seqlen, N - 1)]  # [B, S]
        pieces.append(model(text, max_seqlen=seqlen)[0][:, done - start :])  # [B, new tokens, V]
        done = min(start + seqlen, N - 1)
        start = done + 1 - n_kept  # the newest token is one of those kept
    return text_losses(torch.cat(pieces, dim=1)[:, targets - 1], texts[:, targets])


def text_losses(logits, targets):
    """Mean loss of each text in nats per token, float64 [B]; logits [B, n, V], targets [B, n]."""
    losses = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")  # [B, n]
    return losses.mean(dim=1).cpu().double()


if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_kvcache import GPTlite_KVCache
    from inference_report import Method
    from inference_utils import loss_difference

    parser = harness.options(
        __doc__, repeats=2, n_tokens=160, quick={"n_tokens": 20, "n_texts": 4, "stride": 16}
    )
    parser.add_argument("--n-texts", type=harness.positive_int, default=32, help="texts of 512 tokens")
    parser.add_argument(
        "--stride", type=harness.positive_int, default=8, help="every which position is judged"
    )
    parser.add_argument(
        "--kept", type=harness.positive_int, nargs="+", default=[192, 128, 64], help="tokens kept"
    )
    with harness.script(parser) as args:
        text = harness.load_text(args)
        plain, cached = harness.load_models(args, GPTlite, GPTlite_KVCache)
        W, prompt_len = plain.seqlen, plain.seqlen - 16
        if bad := [n for n in args.kept if n >= W]:
            raise ValueError(f"--kept {bad[0]}: a refill keeps at most {W - 1} of {W} tokens")
        texts = text.prompts(args.n_texts, 2 * W)  # [B, 2W]
        report = harness.Report(args, "KV cache past the context", plain, text=text, prompt_len=prompt_len)
        rows = report.compare(
            text.prompts(1, prompt_len),
            args.n_tokens,
            Method("no cache", generate, plain),
            Method("last position", generate_kvcache, cached),
            *(Method(f"refill {n}", generate_refill, cached, W, n) for n in args.kept),
            label="",
        )
        same = [report.measured[name].output[:, : W + 1] for name in rows]  # the last of them was not read
        report.check("all rules agree up to the context", all(torch.equal(same[0], one) for one in same))

        targets = torch.arange(W, 2 * W, args.stride)  # tokens that are predicted past the context
        losses = {"no cache": loss_recomputed(cached, texts, W, targets)}
        losses["last position"] = loss_last_position(cached, texts, W, targets)
        losses |= {f"refill {n}": loss_refilled(cached, texts, W, targets, n) for n in args.kept}
        work = {"no cache": W, "last position": 1} | {f"refill {n}": W / (W - n + 1) for n in args.kept}
        sweep = []
        for name, one in losses.items():
            difference, se = loss_difference(one, losses["no cache"])
            row = {"rule": name, "loss past the context": one.mean().item(), "difference": difference}
            sweep.append(row | {"+-": se, "tokens computed a new token": work[name]})
            rows[name] |= {"loss_difference": difference, "loss_difference_se": se}
        title = f"Tokens {W} to {2 * W} of {len(texts)} texts, every {args.stride}th"
        report.sweep(title, sweep)

        best = min(sweep[2:], key=lambda row: row["loss past the context"])
        gap = sweep[1]["loss past the context"] - best["loss past the context"]  # nats
        report.why(
            words.choose(
                gap,
                (0.01, f"The last position loses {gap:.2f} nats a token more than {best['rule']}."),
                f"The last position loses no more than {best['rule']} here ({gap:+.3f} nats).",
            )
        )
        report.why(words.loss(rows["last position"]) + words.loss(rows[best["rule"]]))
        report.why(words.compare(rows[best["rule"]], rows["no cache"], "forward_tokens"))
        report.why(words.compare(rows[best["rule"]], rows["last position"], "tokens_per_s"))
        report.plot_steps(list(rows))
        report.finish()
