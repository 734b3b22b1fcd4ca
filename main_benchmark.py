"""Every method of the collection in one table and one figure, each on the same weights, prompts and clock.

The scripts explain one technique each; here they stand side by side, in alternation, for one sequence and
for a batch. Methods that claim to be exact are compared with the baseline token for token; the others
are labelled approximate and have their own validation loss. A method that fails is a row that says why.

Run: python main_benchmark.py                 (--only "KV cache,GQA 3" picks, --skip leaves out, --peers adds)

Source: the scripts named in each method's line below.
"""

import torch

from gptlite import GPTlite
from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from gptlite_paged import BlockPool, GPTlite_Paged
from gptlite_slots import GPTlite_Slots
from main_continuous_batching import continuous_batching_kvcache
from main_flash_attention import use_sdpa
from main_flash_decoding import GPTlite_FlashDecoding
from main_gqa import align_heads, attention_inputs
from main_kvcache import CompiledStep, CudaGraphStep, generate, generate_kvcache, generate_static
from main_mla import GPTlite_MLA
from main_mla_conversion import convert_mha_to_mla_calibrated
from main_paged_attention import PagedScheduler, serve
from main_prefix_cache import compute_prefix_cache, generate_with_prefix
from main_pruning import compute_importance, prune
from main_static_batching import static_batching


def frontier(points):
    """Names of the points (name, tokens/s, loss) that no other point beats without a loss elsewhere."""
    return [
        name
        for name, speed, loss in points
        if not any(s >= speed and x <= loss and (s, x) != (speed, loss) for _, s, x in points)
    ]


class Collection:
    """Makes the methods, each from the weights that all share.

    Args: load(model_class, **kwargs): a model with the trained weights; make(model_class, state, **kwargs):
        one with converted weights; state: the trained weights; text: to calibrate conversions on [N];
        distilled_path: the student's checkpoint.
    Every function takes prompts [B, T] with a common beginning of n_shared tokens and the number of new
    tokens, and returns (run, models, buffers, cache): run() gives prompt and answer [B, T + n]; cache: the
    tensors that hold keys and values of the prompts (dynamic) or of the whole room, and its tokens.
    """

    def __init__(self, load, make, state, text, distilled_path, n_shared):
        self.load, self.make, self.state, self.text = load, make, state, text
        self.distilled_path, self.n_shared = distilled_path, n_shared
        self.cached = load(GPTlite_KVCache)
        self.seqlen, mha = self.cached.seqlen, self.cached.blocks[0].mha
        self.H, self.D = mha.n_heads, mha.d_head

    def methods(self, cuda):
        """[(name, exact, function)], the baseline first."""
        return [
            ("no cache", True, self.no_cache),  # main_kvcache.py
            ("SDPA, no cache", True, self.sdpa),  # main_flash_attention.py
            ("KV cache", True, lambda x, n: self.dynamic(self.cached, x, n)),
            ("static KV cache", True, self.static),
            ("compiled step", True, lambda x, n: self.static(x, n, lambda model, _: CompiledStep(model))),
            *([("CUDA graph", True, lambda x, n: self.static(x, n, CudaGraphStep))] if cuda else []),
            ("flash decoding", True, self.flash_decoding),  # main_flash_decoding.py
            ("prefix cache", True, self.prefix),  # main_prefix_cache.py
            ("static batching", True, lambda x, n: self.served(GPTlite, static_batching, x, n)),
            (
                "continuous batching",
                True,
                lambda x, n: self.served(GPTlite_Slots, continuous_batching_kvcache, x, n),
            ),
            ("paged KV cache", True, self.paged),  # main_paged_attention.py
            ("GQA 3, converted", False, lambda x, n: self.gqa(3, x, n)),  # main_gqa.py
            ("MQA, converted", False, lambda x, n: self.gqa(1, x, n)),
            ("MLA 192, converted", False, lambda x, n: self.mla(192, x, n)),  # main_mla.py
            ("pruned by 1/6", False, self.pruned),  # main_pruning.py
            ("distilled", False, self.distilled),  # main_distillation.py
        ]

    def dynamic(self, model, x, n):
        cache = [t for kv in model(x)[1] for t in kv]
        return lambda: generate_kvcache(model, x, n, self.seqlen), [model], [], (cache, x.shape[1])

    def no_cache(self, x, n):
        model = self.load(GPTlite)
        return lambda: generate(model, x, n, self.seqlen), [model], [], None

    def sdpa(self, x, n):
        model = use_sdpa(self.load(GPTlite))
        return lambda: generate(model, x, n, self.seqlen), [model], [], None

    def static(self, x, n, make_step=None, model_class=GPTlite_StaticKVCache, **kwargs):
        model = self.load(model_class, **kwargs)
        cache = StaticKVCache(model, len(x))
        step = make_step(model, cache) if make_step else None
        kept = [cache.k, cache.v]
        models = [model, step] if step else [model]
        return lambda: generate_static(model, x, n, cache, step), models, kept, (kept, self.seqlen)

    def flash_decoding(self, x, n):
        return self.static(x, n, model_class=GPTlite_FlashDecoding, n_splits=2)

    def prefix(self, x, n):
        first, rest = x[:, : self.n_shared], x[:, self.n_shared :]  # [B, S], [B, T - S]
        stored = compute_prefix_cache(self.cached, first[:1])

        def run():
            return torch.cat([first, generate_with_prefix(self.cached, stored, rest, n, self.seqlen)], dim=1)

        kept = [t for kv in stored for t in kv]
        return run, [self.cached], kept, (kept, self.n_shared)

    def served(self, model_class, serve_all, x, n):
        model, requests = self.load(model_class), [(row, n) for row in x]
        return lambda: torch.stack(serve_all(model, requests, len(x), self.seqlen)[0]), [model], [], None

    def paged(self, x, n):
        model, requests = self.load(GPTlite_Paged), [(row, n) for row in x]
        pool = BlockPool(model, len(x) * -(-(x.shape[1] + n) // 16))
        room = pool.n_blocks * pool.block_size / len(x)
        return (
            lambda: torch.stack(serve(PagedScheduler(model, pool), requests)),
            [model],
            [pool.kv],
            ([pool.kv], room),
        )

    def calibration(self):
        texts = (
            self.text[: 16 * 4096].view(16, 4096)[:, : self.seqlen].to(next(self.cached.parameters()).device)
        )
        return attention_inputs(self.make(GPTlite_KVCache, self.state).float(), texts)

    def gqa(self, n_groups, x, n):
        aligned = align_heads(self.state, self.H, self.D, n_groups, self.calibration())
        weights = convert_mha_to_gqa(aligned, self.H, self.D, n_groups)
        return self.dynamic(self.make(GPTlite_GQA, weights, n_groups=n_groups), x, n)

    def mla(self, d_latent, x, n):
        weights = convert_mha_to_mla_calibrated(self.state, self.H, self.D, d_latent, self.calibration())
        return self.dynamic(self.make(GPTlite_MLA, weights, d_latent=d_latent), x, n)

    def pruned(self, x, n):
        model = self.load(GPTlite_KVCache)
        heads, neurons = compute_importance(model, self.text, 2, 8, self.seqlen)
        n_neurons = neurons.shape[1] * (self.H - 1) // self.H
        return self.dynamic(prune(model, heads, neurons, self.H - 1, n_neurons), x, n)

    def distilled(self, x, n):
        model = self.load(GPTlite_KVCache, ckpt_path=self.distilled_path, distilled=True)
        return self.dynamic(model, x, n)


if __name__ == "__main__":
    from pathlib import Path

    import inference_report as rep
    import inference_utils as utils
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
        if args.peers:
            from gptlite_opt import opt_from_gptlite

            opt = opt_from_gptlite(collection.cached)

            def peer(x, n, **how):
                how |= {"max_new_tokens": n, "do_sample": False, "attention_mask": torch.ones_like(x)}
                return lambda: opt.generate(x, **how), [opt], [], None

            methods += [("transformers", True, peer)]
            methods += [
                ("transformers, static", True, lambda x, n: peer(x, n, cache_implementation="static"))
            ]
        known = [name for name, _, _ in methods]
        for name in [*(args.only or []), *args.skip]:
            if name not in known:
                raise ValueError(f"no method {name!r}; there are: {', '.join(known)}")
        chosen = [known[0], *(args.only or known[1:])]
        methods = [m for m in methods if m[0] in chosen and (m[0] not in args.skip or m is methods[0])]
        report = rep.Report(
            args, "all methods", collection.cached, batch_size=B, prompt_len=T, n_tokens=n, n_shared=n_shared
        )
        losses, points, best = {}, {}, {}
        for size in dict.fromkeys((1, B)):
            prompts = utils.sample_prompts(valid_data, size, T)  # [B, T]
            prompts[:, :n_shared] = prompts[:1, :n_shared]  # a beginning to share
            prompts = prompts.to(dev)
            built, why_not, kv_bytes = [], {}, {}
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
                    report.check(f"{row}: runs ({why_not[name]})", False)
                    continue
                m, method = results[name], by_name[name]
                first = utils.first_difference(m.output[:, T:], reference[:, T:], logits) if exact else None
                if exact and method is not built[0]:
                    report.check(f"{row}: same tokens as without a cache", first is None)
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
                    points[size].append((name, m.tokens_per_s, losses[name]))
            best[size] = frontier(points[size])

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
                f"On the frontier of speed against loss at batch {size}: {', '.join(best[size])}. All others "
                "are slower than one of these at no lower loss."
            )
        report.why(
            "Methods for many requests (batching, paging) gain nothing on equal requests that all start at "
            "once; their own scripts have the queues on which they do. Conversions and pruning are shown "
            "without training on, which their scripts add."
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
                edge = sorted((f for f in found if f[0] in best[size]), key=lambda f: f[1])
                axes.plot([f[1] for f in edge], [f[2] for f in edge], color=dots.get_facecolor()[0])
                for name, speed, loss in edge:
                    axes.annotate(name, (speed, loss), fontsize=7)
            axes.set(xlabel="tokens/s", ylabel="validation loss (nats)", xscale="log")
            axes.set_title("Loss against speed, and the frontier")
            axes.legend()
            rep.save_figure(figure, args.plot.with_stem(args.plot.stem + "-frontier"))
        report.finish()
