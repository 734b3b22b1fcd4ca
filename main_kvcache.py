"""KV cache: keys and values of earlier tokens are kept, so that a decode step computes one token.

Without a cache, generating token t runs the model over all t tokens again. A cache turns that into one
token a step, and leaves attention and memory traffic as the cost that grows. Exact while the text fits
the context (256 tokens). Past it this model and a cache part ways: the script measures what the rule
"keep the last 256, give each new token the last position" costs in loss, and what refilling costs in time.

Run: python main_kvcache.py            (--prompt "ROMEO:" shows text, --peer adds transformers' generate)

Source: Vaswani et al., Attention Is All You Need, 2017; Shazeer, Fast Transformer Decoding, 2019.
"""

import torch
import torch.nn.functional as F

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
def generate_kvcache(model, prompt, n_tokens, seqlen, kv_cache=None, refill=None):
    """Greedy decoding with a KV cache: the prompt once, then one token a step.

    Args: model: (token ids, cache) -> (logits, cache); prompt: token ids [B, T], cut to the last seqlen;
        kv_cache: cache of the tokens in front of the prompt (a shared prefix), not modified; refill:
        what to do when the cache is full: None gives every further token the last position (the rule
        of the post), a number keeps that many last tokens and encodes them anew from position 0.
    Returns: prompt and generated tokens, [B, T + n_tokens]. Raises ValueError as generate does, for a
        refill that is not below seqlen, or one together with a cache (whose text it would not know).
    """
    check_prompt(prompt, n_tokens, seqlen)
    if refill is not None and not 1 <= refill < seqlen:
        raise ValueError(f"refill keeps 1 to {seqlen - 1} tokens, not {refill}")
    if refill is not None and kv_cache is not None:
        raise ValueError("refill encodes the text anew: give the whole text as the prompt, not a cache of it")
    tokens, new_tokens = prompt, prompt[:, -seqlen:]  # [B, T]
    for _ in range(n_tokens):
        if refill is not None and kv_cache is not None and kv_cache[0][0].shape[-2] == seqlen:
            kv_cache, new_tokens = None, tokens[:, -refill:]  # [B, refill]
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


class CompiledStep(torch.nn.Module):
    """The static decode step compiled: fewer, fused operations. One compilation serves every step."""

    def __init__(self, model):
        super().__init__()
        self.decode = torch.compile(model.decode, fullgraph=True)

    def forward(self, x, kv_cache):
        logits = self.decode(x, kv_cache)  # [B, 1, V]
        kv_cache.advance(1)
        return logits, kv_cache


class CudaGraphStep(torch.nn.Module):
    """The static decode step recorded once as a CUDA graph: one launch replaces about a hundred.

    A graph replays the same kernels on the same addresses, so the token goes into a fixed buffer, the
    logits come out of one, and the position is read from a tensor that advances between replays.
    """

    def __init__(self, model, kv_cache):
        super().__init__()
        self.x = torch.zeros(kv_cache.k.shape[1], 1, dtype=torch.int64, device=kv_cache.k.device)  # [B, 1]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up outside the recording
            model.decode(self.x, kv_cache)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = model.decode(self.x, kv_cache)  # [B, 1, V]

    def forward(self, x, kv_cache):
        self.x.copy_(x)
        self.graph.replay()
        kv_cache.advance(1)
        return self.logits, kv_cache


@torch.no_grad()
def loss_past_window(model, streams, seqlen, rule, stride=8):
    """Loss of the next token on texts longer than the context, at every stride-th position past it.

    Args: model: GPTlite_KVCache; streams: token ids [B, N], N > seqlen; rule: "recompute" (the last
        seqlen tokens again for each token), "last position" (generate_kvcache's default), or a number
        (its refill).
    Returns: mean loss in nats per token; the positions are the same for every rule.
    """
    B, N = streams.shape
    targets = torch.arange(seqlen, N, stride)  # index of the token that is predicted
    if rule == "recompute":
        windows = torch.cat([streams[:, t - seqlen : t] for t in targets.tolist()])  # [targets * B, seqlen]
        last = [model(w, max_seqlen=seqlen)[0][:, -1] for w in windows.split(16)]  # [16, V] each
        logits = torch.cat(last).view(len(targets), B, -1).transpose(0, 1)  # [B, targets, V]
    elif rule == "last position":
        logits = model(streams[:, :-1], max_seqlen=seqlen)[0][:, targets - 1]  # [B, targets, V]
    else:
        pieces, start, done = [], 0, 0
        while done < N - 1:  # each turn reads the text that one filling of the cache holds
            text = streams[:, start : min(start + seqlen, N - 1)]  # [B, S]
            pieces.append(model(text, max_seqlen=seqlen)[0][:, done - start :])  # [B, new tokens, V]
            done = min(start + seqlen, N - 1)
            start = done + 1 - rule  # the newest token is one of those kept
        logits = torch.cat(pieces, dim=1)[:, targets - 1]  # [B, targets, V]
    return F.cross_entropy(logits.float().flatten(0, 1), streams[:, targets].flatten()).item()


if __name__ == "__main__":
    from itertools import accumulate

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters

    parser = rep.options(__doc__, repeats=3)
    parser.add_argument("--batch-size", type=rep.positive_int, default=8, help="sequences of the batch")
    parser.add_argument("--prompt-len", type=rep.positive_int, default=64, help="tokens of the prompts")
    parser.add_argument("--n-tokens", type=rep.positive_int, help="new tokens (default: up to the context)")
    parser.add_argument("--prompt", metavar="TEXT", help="generate from this text and print what comes")
    parser.add_argument("--compile", action="store_true", help="add rows of the compiled decode step")
    parser.add_argument("--peer", action="store_true", help="add rows of transformers' generate")
    with rep.script(parser) as args:
        p, dev, quick = get_gptlite_model_parameters(), args.device, args.quick
        W, tolerance = p.seqlen, utils.TOLERANCE[args.dtype]
        vocab_size, _, valid_data, encode, decode = get_shakespeare_data(args.data)
        text = None if args.prompt is None else torch.tensor([encode(args.prompt)], dtype=torch.int64)
        if text is not None:
            check_prompt(text)
        n_streams, n_past = (2, 32) if quick else (16, 256)  # the longest texts first: too short fails now
        streams = utils.sample_prompts(valid_data, n_streams, W + n_past).to(dev)  # [B, N]
        T = min(args.prompt_len if text is None else text.shape[1], W)  # tokens of a prompt
        n_tokens = args.n_tokens or (8 if quick else max(W - T, 1))
        if args.peer and T + n_tokens > W + 1:  # the last token is not read
            raise ValueError(
                f"--peer: OPT has no positions past the context; with a prompt of {T} tokens --n-tokens "
                f"can be {W + 1 - T} at most"
            )
        model, cached, static = models = [
            utils.load_model(c, vocab_size, args.checkpoint).to(dev, args.dtype)
            for c in (GPTlite, GPTlite_KVCache, GPTlite_StaticKVCache)
        ]
        sizes = {"batch_size": args.batch_size, "prompt_len": T, "n_tokens": n_tokens}
        report = rep.Report(args, "KV cache", model, **sizes)
        losses = [utils.validation_loss(m, valid_data, 4 if quick else 128) for m in models]
        same_losses = all(abs(loss - losses[0]) <= tolerance for loss in losses)  # so written, a NaN fails
        report.check("the same validation loss with caches", same_losses)
        kv_formula = 2 * p.n_layers * p.n_heads * p.d_head * args.dtype.itemsize

        def compare(B):
            """Measures all methods on B sequences; returns {name: Measurement}."""
            n_new = n_tokens if B == 1 else min(n_tokens, 32)  # the baseline's work grows with B
            prompts = utils.sample_prompts(valid_data, B, T) if text is None else text[:, -W:]
            prompts = prompts.expand(B, -1).to(dev)  # [B, T]
            buffers = StaticKVCache(static, B)
            kept = [buffers.k, buffers.v]  # memory of the static methods that is there before they run

            def run_static(step=None):
                return generate_static(static, prompts, n_new, buffers, step)

            methods = [
                utils.Method("no cache", lambda: generate(model, prompts, n_new, W), [model]),
                utils.Method("dynamic", lambda: generate_kvcache(cached, prompts, n_new, W), [cached]),
                utils.Method("static", run_static, [static], kept),
            ]
            if dev.type == "cuda":
                graph = CudaGraphStep(static, buffers)
                methods.append(utils.Method("CUDA graph", lambda: run_static(graph), [static, graph], kept))
            if args.compile:
                compiled = CompiledStep(static)
                try:
                    with utils.Timer(dev) as timer:
                        run_static(compiled)
                except RuntimeError as error:  # torch has no one name for "no compiler here"
                    raise ValueError(f"--compile does not work here: {error}"[:160]) from error
                report.why(f"Compiling the decode step for batch {B} took {timer.seconds:.0f} s.")
                methods.append(
                    utils.Method("compiled", lambda: run_static(compiled), [static, compiled], kept)
                )
            if args.peer:
                from gptlite_opt import opt_from_gptlite

                opt = opt_from_gptlite(model)
                how = {"max_new_tokens": n_new, "do_sample": False, "attention_mask": prompts * 0 + 1}
                methods.append(utils.Method("transformers", lambda: opt.generate(prompts, **how), [opt]))
            results = utils.measure(methods, B * n_new, args.repeats)

            tokens = results["no cache"].output[:, :W]  # [B, S], S <= W: where equality is promised
            with torch.no_grad():
                logits = model(tokens)  # [B, S, V]
            by_steps, cache = utils.cached_logits(cached, tokens, T)
            difference = utils.largest_difference(by_steps, logits)
            name = f"batch {B}: logits with and without a cache differ by {difference:.1e}"
            report.check(f"{name}, at most {tolerance:.0e}", difference <= tolerance)
            kv_bytes = utils.cache_bytes_per_token([t for kv in cache for t in kv], tokens.shape[1], B)
            name = f"batch {B}: a token's cache is 2 L H D numbers, {kv_formula} bytes"
            report.check(name, kv_bytes == kv_formula)
            static_bytes = utils.cache_bytes_per_token(kept, W, B)
            figures = {m.name: {"kv_bytes_per_token": static_bytes, "valid_loss": losses[2]} for m in methods}
            figures["no cache"] = {"valid_loss": losses[0]}
            figures["dynamic"] = {"kv_bytes_per_token": kv_bytes, "valid_loss": losses[1]}
            figures["transformers"] = {}
            report.method_rows(methods, results, prompts, logits[:, T - 1 :], f", batch {B}", figures)
            return results

        single = compare(1)
        batch = compare(args.batch_size) if args.batch_size > 1 else single

        # Past the context: outputs part there, and the rules differ in loss and in work
        long_prompt = utils.sample_prompts(valid_data, 1, W - 8).to(dev)  # [1, W-8]
        exact = generate(model, long_prompt, 40, W)  # [1, W+32]
        differs = (exact != generate_kvcache(cached, long_prompt, 40, W)).flatten().nonzero()  # [n, 1]
        rules = {"recompute": W, "last position": 1, 128: W / (W - 127), 64: W / (W - 63)}
        past = [
            {
                "rule": rule if isinstance(rule, str) else f"refill with the last {rule}",
                "loss of the next token": loss_past_window(cached, streams, W, rule),
                "forward tokens a new token": work,
            }
            for rule, work in rules.items()
        ]
        report.sweep(f"Past the context of {W} ({n_streams} texts, {n_past} tokens each)", past)
        anew, last_position, refilled = (row["loss of the next token"] for row in past[:3])
        report.check("past the context refilling loses less than the last position", last_position > refilled)

        context = T + n_tokens // 2
        full = rep.forward_cost(p, vocab_size, 1, context, 0, args.dtype)
        step = rep.forward_cost(p, vocab_size, 1, 1, context - 1, args.dtype)
        limits = rep.measure_ceilings(dev, args.dtype)
        least_full, least_step = rep.lower_bound_ms(full, limits), rep.lower_bound_ms(step, limits)
        shares = [
            f"{name} {m.tpot_ms:.2f} ms ({rep.share_of(least_step, m.tpot_ms)})"
            for name, m in list(single.items())[1:]
            if m.tpot_ms
        ]
        report.why(
            f"A step at {context} tokens computes {full.flops / 1e9:.2f} GFLOP without a cache; with one, "
            f"{step.flops / 1e9:.3f} GFLOP, and reads {step.n_bytes / 1e6:.0f} MB of weights and cache."
        )
        report.why(
            f"This machine does {limits.flops_per_s / 1e9:.0f} GFLOP/s and reads "
            f"{limits.bytes_per_s / 1e9:.0f} GB/s: at least {least_full:.1f} ms without, {least_step:.2f} ms "
            f"with a cache. Share reached: no cache {rep.share_of(least_full, single['no cache'].tpot_ms)}, "
            f"{', '.join(shares)}; with a cache the rest is products that read more slowly than this, and "
            "about a hundred small operations."
        )
        row, layers = torch.zeros(1, 1, p.d_model), [b.ffwd.net[0] for b in cached.blocks]
        if dev.type == "cpu" and args.dtype == torch.float32 and layers[0].n_parts > 1:
            whole, cut = (
                utils.median_ms(lambda f=f: [f(layer, row) for layer in layers], 50) / len(layers)
                for f in (torch.nn.Linear.forward, type(layers[0]).forward)
            )
            report.why(
                f"PyTorch leaves a product of one row to one thread: {p.d_model} by {4 * p.d_model} takes "
                f"{whole:.2f} ms so, {cut:.2f} ms cut into {layers[0].n_parts} (Linear_AllCores)."
            )
        knee = limits.flops_per_s * args.dtype.itemsize / 2 / limits.bytes_per_s
        if args.batch_size > 1 and single["static"].tpot_ms:
            ratio = batch["static"].tpot_ms / single["static"].tpot_ms
            report.why(
                f"A step of {args.batch_size} sequences reads the same weights, and each sequence's own "
                f"cache, for {args.batch_size} times the work: {ratio:.1f} times the time of one. From about "
                f"{knee:.0f} sequences on computing takes longer than reading the weights, and the step "
                "grows with the batch; on a large GPU in 16 bits that knee lies in the hundreds."
            )
        for name in ("compiled", "CUDA graph"):
            if name in batch and (batch[name].tpot_ms or 0) > (batch["static"].tpot_ms or 0):
                row_mb, filled = 1e-6 * kv_formula * args.batch_size, min(T + min(n_tokens, 32) // 2, W)
                report.why(
                    f"At batch {args.batch_size} the {name} step is slower than the static one. Its shapes "
                    f"are fixed, so it reads the caches' whole window, {row_mb * W:.1f} MB, and clears the "
                    f"values of empty rows; the static one reads what is written, {row_mb * filled:.1f} MB "
                    f"at {filled} tokens. This grows with the batch, the overhead that is saved does not."
                )
        report.why(
            f"The text equals the baseline's up to the context ({W} tokens) and differs from "
            + (f"token {differs[0, 0]} on. " if len(differs) else "some later token on (not in this run). ")
            + f"Past it the last position costs {last_position - anew:+.3f} nats a token against computing "
            f"everything anew, refilling with the last 128 {refilled - anew:+.3f}, for the work in the table."
        )
        plain, kept = (list(accumulate(single[name].steps_ms)) for name in ("no cache", "dynamic"))
        behind = [i for i, (a, b) in enumerate(zip(plain, kept, strict=True), 1) if b >= a]
        ahead = behind[-1] + 1 if behind else 2  # from this token on the cache's run is ahead, to the end
        report.why(
            f"TTFT is {plain[0]:.1f} ms without and {kept[0]:.1f} ms with a dynamic cache: the prompt has to "
            "be read either way. "
            + (
                f"The cache is ahead from token {ahead} on: "
                if ahead <= len(kept)
                else f"The cache is not ahead after these {len(kept)} tokens: "
            )
            + f"all of them take {kept[-1]:.1f} ms against {plain[-1]:.1f}. A step without it grows with the "
            f"text, one with it hardly does, and it costs {kv_formula} bytes a token of every sequence."
        )
        if text is not None:
            for name in ("no cache", "dynamic"):
                print(f"---- {name} ----\n{decode(single[name].output[0])}\n")
        if args.plot:
            figure, axes = rep.new_figure()
            for name, m in single.items():
                axes.plot(range(T + 1, T + 1 + len(m.steps_ms) - 1), m.steps_ms[1:], label=name)
            axes.set(xlabel="position of the token", ylabel="time (ms)", yscale="log")
            axes.set_title(f"Time per token, one sequence, {report.data['config']['device_name']}")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
