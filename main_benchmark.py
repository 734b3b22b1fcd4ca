"""Every method of the collection in one table and one figure, each on the same weights, prompts and clock.

The scripts explain one technique each; here they stand side by side, in alternation, for one sequence and
for a batch. Methods that claim to be exact are compared with the baseline token for token; the others
are labelled approximate and have their own validation loss. A method that fails is a row that says why.

Run: python main_benchmark.py           (--only "KV cache,MQA (converted)", --skip distilled, --peers)

Source: the scripts that benchmark_methods.py names, one for each method.
"""

PEERS = (  # what explains a difference: the products of a step are the same
    "transformers checks stop conditions, prepares masks and updates its cache object in Python in every "
    "step, and its attention is PyTorch's fused kernel where a new token's here is three plain operations; a "
    "product of few rows uses one core there, and all here (Linear_AllCores). Its assisted forms check "
    "several guessed tokens in one step, which pays where guesses are cheap and mostly right."
)


def frontier(points):
    """Names of the points (name, tokens/s, loss) that no other point beats without a loss elsewhere."""
    return [
        name
        for name, speed, loss in points
        if not any(s >= speed and x <= loss and (s, x) != (speed, loss) for _, s, x in points)
    ]


if __name__ == "__main__":
    from pathlib import Path

    import torch

    import inference_report as rep
    import inference_utils as utils
    from benchmark_methods import Collection, DoesNotApply
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters

    def names(text):
        return [name.strip() for name in text.split(",") if name.strip()]

    parser = rep.options(__doc__, repeats=3)
    parser.add_argument("--batch-size", type=rep.positive_int, default=8, help="sequences of the batch")
    parser.add_argument("--prompt-len", type=rep.positive_int, default=64, help="tokens of the prompts")
    parser.add_argument("--n-tokens", type=rep.positive_int, default=64, help="new tokens")
    parser.add_argument("--only", type=names, metavar="NAMES", help="these methods, separated by commas")
    parser.add_argument("--skip", type=names, metavar="NAMES", default=[], help="all but these methods")
    student = utils.GPTLITE_DISTILLED_CKPT_PATH
    parser.add_argument("--student", metavar="FILE", type=Path, default=student, help="distilled weights")
    parser.add_argument("--peers", action="store_true", help="add transformers' generate")
    with rep.script(parser) as args:
        p, dev, quick = get_gptlite_model_parameters(), args.device, args.quick
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        T, n, B = (32, 8, 2) if quick else (args.prompt_len, args.n_tokens, args.batch_size)
        if T + n > p.seqlen or T < 4:
            raise ValueError(f"{T} prompt and {n} new tokens: from 4 prompt tokens, {p.seqlen} in all")
        state = utils.load_checkpoint(args.checkpoint)

        def load(model_class, ckpt_path=args.checkpoint, **kwargs):
            return utils.load_model(model_class, vocab_size, ckpt_path, **kwargs).to(dev, args.dtype)

        def make(model_class, weights, **kwargs):
            model = utils.make_model(model_class, vocab_size, **kwargs)
            return utils.load_weights(model, weights).to(dev, args.dtype)

        n_shared = T * 3 // 4
        collection = Collection(load, make, state, train_data, args.student, n_shared)
        methods = collection.methods(dev.type == "cuda")
        peers = collection.peers() if args.peers else []
        methods += peers
        known = [name for name, _, _ in methods]
        if args.only == []:
            raise ValueError(f"--only needs a name; there are: {', '.join(known)}")
        for name in [*(args.only or []), *args.skip]:
            if name not in known:
                raise ValueError(f"no method {name!r}; there are: {', '.join(known)}")
        slow = ["compiled step"] if quick else []  # a quick run does not wait for the compiler
        chosen = [known[0], *(args.only or [name for name in known[1:] if name not in slow])]
        methods = [m for m in methods if m[0] in chosen and (m[0] not in args.skip or m is methods[0])]
        report = rep.Report(
            args, "all methods", collection.cached, batch_size=B, prompt_len=T, n_tokens=n, n_shared=n_shared
        )
        losses, points, best = {}, {}, {}
        for size in dict.fromkeys((1, B)):
            prompts = utils.sample_prompts(valid_data, size, T)  # [B, T]
            prompts[:, :n_shared] = prompts[:1, :n_shared]  # a beginning to share
            prompts = prompts.to(dev)
            built, why_not, kv_bytes, inapplicable = [], {}, {}, set()
            for name, exact, build in methods:
                try:
                    with torch.no_grad():
                        run, models, buffers, cache = build(prompts, n)
                        run()
                    if cache is not None:
                        kv_bytes[name] = utils.cache_bytes_per_token(cache[0], cache[1], size)
                    if exact and losses:  # the same weights, and the tokens are compared below
                        losses[name] = losses[known[0]]
                    elif name not in losses:
                        losses[name] = utils.validation_loss(models[0], valid_data, 2 if quick else 128)
                    built.append(utils.Method(name, run, models, buffers))
                except Exception as error:  # whatever it is, the others go on and the row says it
                    why_not[name] = " ".join(str(error).split())[:160] or type(error).__name__
                    if isinstance(error, DoesNotApply):
                        inapplicable.add(name)
            results = utils.measure(built, size * n, args.repeats) if built else {}
            if methods[0][0] in why_not:
                raise ValueError(f"the baseline fails: {why_not[methods[0][0]]}")
            reference = results[built[0].name].output  # [B, T + n]
            with torch.no_grad():
                logits = collection.cached(reference[:, :-1])[0][:, T - 1 :]  # [B, n, V]
            by_name = {method.name: method for method in built}
            points[size] = []
            for name, exact, _ in methods:
                row = f"{name}, batch {size}"
                if name in why_not:
                    report.row(row, error=why_not[name])
                    if name in inapplicable:
                        report.why(f"{row}: {why_not[name]}.")
                    else:
                        report.check(f"{row}: runs ({why_not[name]})", False)
                    continue
                m, method = results[name], by_name[name]
                first = utils.first_difference(m.output[:, T:], reference[:, T:], logits) if exact else None
                if exact and method is not built[0]:
                    report.check(f"{row}: same tokens as without a cache", first is None)
                if m.n_steps < n:  # several tokens a step: its time is not that of a token
                    m = m._replace(tpot_ms=None, tpot_p99_ms=None)
                report.row(
                    row,
                    m,
                    baseline=method is built[0],
                    peak_memory_mb=utils.peak_memory_mb(
                        method.run, *method.models, inputs=[prompts, *method.buffers]
                    ),
                    kv_bytes_per_token=kv_bytes.get(name),
                    valid_loss=losses.get(name),
                    n_parameters=utils.n_parameters(method.models[0]),
                    same_output=first is None if exact else "approximate",
                )
                if name in losses:
                    points[size].append(
                        (name, m.tokens_per_s, round(losses[name], 4))
                    )  # the rest is rounding
            winners = frontier(points[size])
            rest = [point for point in points[size] if point[0] not in winners]
            best[size] = winners, frontier(rest)

        limits = rep.measure_ceilings(dev, args.dtype)
        for size, found in points.items():
            fastest = max(found, key=lambda point: point[1])
            step = rep.forward_cost(p, vocab_size, size, 1, T + n // 2, args.dtype)
            report.why(
                f"Batch {size}: the fastest is {fastest[0]} with {fastest[1]:.0f} tokens/s, "
                f"{fastest[1] / found[0][1]:.1f} times the baseline's. A step with a cache computes "
                f"{step.flops / 1e9:.3f} GFLOP and reads {step.n_bytes / 1e6:.0f} MB: at least "
                f"{rep.lower_bound_ms(step, limits):.2f} ms here."
            )
            report.why(
                f"On the frontier of speed against loss at batch {size}: {', '.join(best[size][0])}. All "
                "others are slower than one of these at no lower loss. Without these the frontier is: "
                f"{', '.join(best[size][1])}."
            )
        for size, found in points.items():
            speed = {name: tokens_per_s for name, tokens_per_s, _ in found}
            ratios = {
                name: speed[name] / speed["KV cache"]
                for name, _, _ in peers
                if {name, "KV cache"} <= {*speed}
            }
            if ratios:
                listed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
                report.why(f"Batch {size}, tokens/s over those of the KV cache here: {listed}.")
        if peers:
            report.why(PEERS)
        report.why(
            "Methods for many requests (batching, paging) gain nothing on equal requests that all start at "
            "once; their own scripts have the queues on which they do. Conversions and pruning are shown "
            "without training on, which their scripts add. Sparsity and caches of answers change no step."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for size, found in points.items():
                axes.plot(
                    [point[0] for point in found], [point[1] for point in found], "o", label=f"batch {size}"
                )
            axes.set(ylabel="tokens/s", yscale="log", title="All methods on the same prompts")
            axes.tick_params(axis="x", rotation=75)
            axes.legend()
            rep.save_figure(figure, args.plot)
            figure, axes = rep.new_figure()
            for size, found in points.items():
                dots = axes.scatter([f[1] for f in found], [f[2] for f in found], label=f"batch {size}")
                for names_of_edge, style in zip(best[size], ("-", ":"), strict=True):  # and what comes next
                    edge = sorted((f for f in found if f[0] in names_of_edge), key=lambda f: f[1])
                    axes.plot(
                        [f[1] for f in edge], [f[2] for f in edge], style, color=dots.get_facecolor()[0]
                    )
                    for name, speed, loss in edge:
                        axes.annotate(name, (speed, loss), fontsize=7, ha="right", va="bottom")
            axes.set(xlabel="tokens/s", ylabel="validation loss (nats)", xscale="log")
            axes.set_title("Loss against speed, and the frontier")
            axes.legend()
            rep.save_figure(figure, args.plot.with_stem(args.plot.stem + "-frontier"))
        report.finish()
