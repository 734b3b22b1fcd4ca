"""A decode step compiled, and what smaller weights buy it.

Idea: a step of one sequence should take as long as reading the weights does, but some 400 small calls of
Python and PyTorch cost more than that. torch.compile fuses them into a few kernels. Three things make that
fast on a CPU (gptlite_compiled.py): nothing is written inside (it attends to past and new token apart, and
returns the new keys and values), a product of one row is a sum that the compiler fuses with reading the
weight, and the past is a view of the next multiple of 64 rows. Recorded instead: more/kvcache_graph.py.

Exact up to rounding with 32-bit weights; weights of 16 and 8 bits are cast while they are read, approximate,
with their loss. Wins where a step is short against its calls: small models, few sequences. Loses the time to
compile, once for each batch size and each view of the cache, and gains little where the products are large.

Run: python more/kvcache_compiled.py

Source: Ansel et al., PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and
Graph Compilation, 2024; Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_compiled import CompiledStep, LinearAsSum, replace_linears
from linear_packed import pack_linears

if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
    from inference_report import Method
    from inference_utils import Timer, parameters_of, weight_bytes
    from main_kvcache import generate_kvcache, generate_static

    sizes = {"batch_size": 8, "prompt_len": 64, "n_tokens": 64}
    quick = {"batch_size": 2, "prompt_len": 8, "n_tokens": 6}  # within one view: one graph a method
    parser = harness.options(__doc__, quick=quick, **sizes)
    parser.add_argument("--peers", action="store_true", help="add transformers' generate and engines")
    columns = {"weights_mb": ("weights MB", "{:.1f}"), "compile_s": ("compile s", "{:.0f}")}
    with harness.script(parser) as args:
        text = harness.load_text(args)
        if args.prompt_len + args.n_tokens > 257:
            raise ValueError("--prompt-len and --n-tokens: 257 tokens at most, the last of which is not read")
        cached, static = harness.load_models(args, GPTlite_KVCache, GPTlite_StaticKVCache)
        (ordinary,) = harness.load_models(args, GPTlite_StaticKVCache, packed=False)
        hide = ("forward_tokens", "n_parameters")
        report = harness.Report(args, "compiled decode steps", static, columns, hide, text)
        whole_mb = weight_bytes(static) / 1e6
        backend = None if args.quick else "inductor"  # compiling alone takes longer than a quick run

        def compiled(name, B, dtype):
            """A Method whose steps are compiled, with the time that took and the loss of its weights."""
            step, buffers = CompiledStep(ordinary, B, dtype, backend=backend), StaticKVCache(static, B)
            with Timer(args.device) as timer:
                generate_static(static, text.prompts(B, args.prompt_len), args.n_tokens, buffers, step)
            as_read = replace_linears(step.model, LinearAsSum.as_linear, LinearAsSum)
            figures = report.loss_figures(pack_linears(as_read), static)
            figures |= {"compile_s": timer.seconds, "weights_mb": weight_bytes(step) / 1e6}
            how = {"exact": dtype == torch.float32, "steps": [static, step]}
            return Method(name, generate_static, static, buffers, step, **how, **figures)

        tables = {}
        for B in sorted({1, args.batch_size}):
            methods = [Method("static", generate_static, static, StaticKVCache(static, B))]
            methods.append(Method("dynamic", generate_kvcache, cached))
            methods.append(compiled("compiled", B, torch.float32))
            if B == 1 and args.device.type == "cpu" and args.dtype == torch.float32:
                methods.append(compiled("compiled, bfloat16 weights", B, torch.bfloat16))
                methods.append(compiled("compiled, int8 weights", B, torch.int8))
            if args.peers:
                from gptlite_opt import generate_opt, opt_from_gptlite
                from inference_engines import engine_methods

                methods.append(
                    Method(
                        "transformers",
                        generate_opt,
                        pack_linears(opt_from_gptlite(ordinary)),
                        None,
                        loss=False,
                    )
                )
                methods += engine_methods(args, ordinary)
            tables[B] = report.compare(text.prompts(B, args.prompt_len), args.n_tokens, *methods)

        p, n = parameters_of(static), args.prompt_len + args.n_tokens // 2
        cost = harness.forward_cost(p, text.vocab_size, 1, 1, n - 1, args.dtype)
        one, many = tables[1], tables[args.batch_size]
        saved = {}
        for name in one:
            n_bytes = cost.n_bytes + 1e6 * (one[name].get("weights_mb", whole_mb) - whole_mb)
            saved[name] = harness.Cost(cost.flops, n_bytes)
        report.why_step({name: saved[name] for name in one if name.startswith(("static", "compiled"))}, one)
        report.why(
            words.compare(one["compiled"], one["static"]) + words.compare(many["compiled"], many["static"])
        )
        smallest = one.get("compiled, int8 weights", one["compiled"])
        report.why(words.compare(smallest, one["compiled"]) + words.loss(smallest))
        gain = (one["static"]["tpot_ms"] or 0) - (one["compiled"]["tpot_ms"] or 0)
        report.why(words.pays_back(1000 * one["compiled"]["compile_s"], gain, "ms", "tokens"))
        report.plot_steps([f"{name}, batch 1" for name in one])
        report.finish()
