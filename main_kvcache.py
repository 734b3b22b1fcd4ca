"""KV cache: keys and values of earlier tokens are kept, so that a decode step computes one token.

Idea: without a cache, generating token t runs the model over all t tokens again. Keys and values of a token
do not depend on later tokens, so a step can keep them and run the model over the new token only. Two forms: a
dynamic cache that grows by concatenation, and a static one that is preallocated and written in place.

Exact while the text fits the context of 256 tokens (past it: more/kvcache_past_window.py). Wins from the
second token on: the prompt must be computed either way, a step without a cache grows with the text, one with
it hardly does. Loses memory: for each token of each sequence a key and a value of d_model numbers in every
layer. Concatenation holds all of that twice for a moment, preallocation a whole window from the start.
Compiled and recorded steps: more/kvcache_compiled.py, more/kvcache_graph.py.

Run: python main_kvcache.py            (--prompt "ROMEO:" shows text, --peers adds transformers' generate)

Source: Vaswani et al., Attention Is All You Need, 2017; Shazeer, Fast Transformer Decoding, 2019.
"""

import torch

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache


def check_prompt(prompt, n_tokens=0, seqlen=1):
    """Raises ValueError for a prompt [B, 0], which has nothing to continue, or an impossible number."""
    if prompt.shape[1] == 0:
        raise ValueError("the prompt is empty: it needs at least one character")
    if n_tokens < 0:
        raise ValueError(f"n_tokens is {n_tokens}; new tokens are 0 or more")
    if seqlen < 1:  # tokens[:, -0:] would be all tokens, not none
        raise ValueError(f"seqlen is {seqlen}; the model reads at least 1 token")


@torch.no_grad()
def generate(model, prompt, n_tokens, seqlen):
    """Greedy decoding without a cache: every step runs the model over the last seqlen tokens.

    Args: model: token ids [B, T] -> logits [B, T, V]; prompt: token ids [B, T].
    Returns: prompt and generated tokens, [B, T + n_tokens]. Raises ValueError for an empty prompt, n_tokens
        below 0 or seqlen below 1.
    """
    check_prompt(prompt, n_tokens, seqlen)
    tokens = prompt
    for _ in range(n_tokens):
        logits = model(tokens[:, -seqlen:])  # [B, T, V]
        next_token = logits[:, -1].argmax(dim=-1, keepdim=True)  # [B, 1]
        tokens = torch.cat([tokens, next_token], dim=1)  # [B, T+1]
    return tokens


@torch.no_grad()
def generate_kvcache(model, prompt, n_tokens, seqlen, kv_cache=None):
    """Greedy decoding with a KV cache: the prompt once, then one token a step.

    Args: model: (token ids, cache, max_seqlen=) -> (logits, cache), in evaluation mode; prompt: token ids
        [B, T], cut to the last seqlen; seqlen: the model's context; kv_cache: cache of the tokens in front of
        the prompt (a shared prefix, of as many sequences), a list of (keys, values) [B, H, S, D] of each
        layer, not modified.
    Returns: prompt and generated tokens, [B, T + n_tokens]. Raises ValueError as generate does. Past seqlen
        every further token gets the last position: a rule, no longer what generate computes.
    """
    check_prompt(prompt, n_tokens, seqlen)
    tokens, new_tokens = prompt, prompt[:, -seqlen:]  # [B, T]
    for _ in range(n_tokens):
        logits, kv_cache = model(new_tokens, kv_cache, max_seqlen=seqlen)  # [B, S, V]
        new_tokens = logits[:, -1].argmax(dim=-1, keepdim=True)  # [B, 1]
        tokens = torch.cat([tokens, new_tokens], dim=1)  # [B, T+1]
    return tokens


@torch.no_grad()
def generate_static(model, prompt, n_tokens, kv_cache, step=None):
    """Greedy decoding with a static cache.

    Args: model: GPTlite_StaticKVCache; kv_cache: StaticKVCache, emptied first; step: what runs a decode
        step, (token ids [B, 1], cache) -> (logits, cache), default the model itself.
    Returns: prompt and generated tokens, [B, T + n_tokens]. Raises ValueError for an empty prompt, n_tokens
        below 0, or a cache that does not fit.
    """
    check_prompt(prompt, n_tokens)
    step = step or model
    kv_cache.reset()
    tokens, new_tokens = prompt, prompt[:, -kv_cache.window :]  # [B, T]
    for i in range(n_tokens):
        logits, _ = (model if i == 0 else step)(new_tokens, kv_cache)  # [B, S, V]
        new_tokens = logits[:, -1].argmax(dim=-1, keepdim=True)  # [B, 1]
        tokens = torch.cat([tokens, new_tokens], dim=1)  # [B, T+1]
    return tokens


if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from inference_report import Method
    from inference_utils import cached_logits, parameters_of
    from linear_packed import pack_linears

    sizes = {"batch_size": 8, "prompt_len": 64, "n_tokens": 128}
    parser = harness.options(__doc__, repeats=3, quick={"n_tokens": 8, "batch_size": 2}, **sizes)
    parser.add_argument("--prompt", metavar="TEXT", help="generate from this text and print what comes")
    parser.add_argument("--peers", action="store_true", help="add rows of transformers' generate")
    with harness.script(parser) as args:
        text = harness.load_text(args)
        plain, cached, static = harness.load_models(args, GPTlite, GPTlite_KVCache, GPTlite_StaticKVCache)
        W, n_new = plain.seqlen, args.n_tokens
        prompts = text.prompts(args.batch_size, min(args.prompt_len, W))  # [B, T]
        if args.prompt is not None:
            prompts = text.prompt(args.prompt)[:, -W:].expand(args.batch_size, -1)  # [B, T]
        T, peers = prompts.shape[1], []
        if args.peers:
            from gptlite_opt import generate_opt, opt_from_gptlite

            if T + n_new > W + 1:  # the last token is not read
                raise ValueError(f"--peers: OPT ends at the context, so --n-tokens {W + 1 - T} at most")
            opt = pack_linears(opt_from_gptlite(harness.load_models(args, GPTlite, packed=False)[0]))
            peers = [Method("transformers", generate_opt, opt, None, loss=False)]
        report = harness.Report(args, "KV cache", plain, hide=["n_parameters"], text=text, prompt_len=T)
        tables = {}
        for B in sorted({1, len(prompts)}):
            tables[B] = report.compare(
                prompts[:B],
                n_new,
                Method("no cache", generate, plain),
                Method("dynamic", generate_kvcache, cached),
                Method("static", generate_static, static, StaticKVCache(static, B)),
                *peers,
            )
        tokens = report.measured["no cache, batch 1"].output[:, :W]  # [1, S]
        with torch.no_grad():
            report.check_close(
                "logits with and without a cache", cached_logits(cached, tokens, T)[0], plain(tokens)
            )
        p = parameters_of(plain)
        n_bytes = 2 * p.n_layers * p.n_heads * p.d_head * args.dtype.itemsize
        one, many = tables[1], tables[len(prompts)]
        report.check(
            f"a token's cache is 2 L H D numbers, {n_bytes} bytes",
            one["dynamic"]["kv_bytes_per_token"] == n_bytes,
        )

        n = T + n_new // 2  # tokens in the middle of the answer
        whole = harness.forward_cost(p, text.vocab_size, 1, n, 0, args.dtype)
        step = harness.forward_cost(p, text.vocab_size, 1, 1, n - 1, args.dtype)
        report.why_step({"no cache": whole, "dynamic": step, "static": step}, one)
        report.why(
            words.compare(one["dynamic"], one["no cache"])
            + words.compare(one["dynamic"], one["no cache"], "ttft_ms")
        )
        report.why(
            words.compare(one["static"], one["dynamic"]) + words.compare(many["static"], many["dynamic"])
        )
        report.why(words.batching(one["dynamic"], many["dynamic"], len(prompts)))
        if args.prompt is not None:
            for name in ("no cache", "dynamic"):
                print(f"---- {name} ----\n{text.decode(report.measured[f'{name}, batch 1'].output[0])}\n")
        report.plot_steps([f"{name}, batch 1" for name in one])
        report.finish()
