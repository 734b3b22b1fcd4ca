"""PagedAttention: KV memory is taken block by block as a text grows, not reserved for the longest text.

A contiguous cache reserves room for the longest text that a request may become; most of it never holds a
token. With blocks (gptlite_paged.py) a request is admitted when its prompt fits; if the pool is full later,
the newest sequence makes room, and is computed anew or copied back afterwards. Exact: every request gets the
tokens it would get alone.

Run: python main_paged_attention.py            (--block-size 1 wastes nothing, --block-size 64 more)

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.
Left out: a kernel that reads the blocks in place (here they are gathered first). main_paged_sharing.py is
the paper's other half: samples and beams of one prompt share its blocks.
"""

from inference_serving import PagedScheduler, serve

if __name__ == "__main__":
    from functools import partial

    import torch

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from gptlite_paged import BlockPool, GPTlite_Paged
    from gptlite_slots import GPTlite_Slots
    from main_continuous_batching import continuous_batching_kvcache
    from main_static_batching import make_requests

    parser = rep.options(__doc__, repeats=3)
    parser.add_argument("--batch-size", type=rep.positive_int, default=8, help="longest texts the pool holds")
    parser.add_argument("--block-size", type=rep.positive_int, default=16, help="tokens of a block")
    parser.add_argument("--n-requests", type=rep.positive_int, help="requests to serve (default: 36)")
    parser.add_argument("--longest", type=rep.positive_int, help="most tokens of one (default: the context)")
    with rep.script(parser) as args:
        p, dev, quick = get_gptlite_model_parameters(), args.device, args.quick
        B, size, longest = args.batch_size, args.block_size, args.longest or (40 if quick else p.seqlen)
        n_requests = args.n_requests or (2 * B if quick else 36)
        args.repeats = 1 if quick else args.repeats
        if not 16 <= longest <= p.seqlen:
            raise ValueError(f"--longest {longest}: 16 to {p.seqlen} tokens, the context")
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        model, slots, paged = (
            utils.load_model(c, vocab_size, args.checkpoint).to(dev, args.dtype)
            for c in (GPTlite, GPTlite_Slots, GPTlite_Paged)
        )
        generator = torch.Generator().manual_seed(args.seed)
        requests = make_requests(valid_data.to(dev), n_requests, longest, generator)
        n_blocks, margin = B * -(-longest // size), max(1e-3, 2 * utils.TOLERANCE[args.dtype])
        columns = {"n_steps": ("steps", "{}"), "held_share": ("holds tokens", "{:.0%}")}
        columns |= {"at_a_time": ("at a time", "{:.1f}"), "n_preempted": ("preempted", "{}")}
        config = {"batch_size": B, "block_size": size, "n_blocks": n_blocks, "n_requests": n_requests}
        report = rep.Report(args, "paged attention", paged, columns, longest_request=longest, **config)
        token_bytes, clean = BlockPool(paged, 1, 1).kv.nbytes, []

        def serve_paged(served, n_blocks=n_blocks, **how):
            """(outputs, scheduler, at each step: tokens held, tokens reserved, sequences, waiting)."""
            pool, usage = BlockPool(paged, n_blocks, size), []
            scheduler = PagedScheduler(paged, pool, **how)

            def observe(*_):
                held, reserved = sum(len(s.ids) for s in scheduler.running), n_blocks - len(pool.free)
                usage.append((held, reserved * size, len(scheduler.running), len(scheduler.waiting)))

            hook = paged.register_forward_pre_hook(observe)
            outputs = serve(scheduler, served)
            hook.remove()
            clean.append(len(pool.free) == n_blocks and not any(pool.ref))
            return outputs, scheduler, usage

        def power_of_2(sequence):
            answer = 2 ** (sequence.end - sequence.n_prompt - 1).bit_length()
            return min(sequence.n_prompt + answer, longest)

        # One amount of memory, and ways to give it away
        policies = {"reserve the longest": lambda s: longest, "reserve a power of 2": power_of_2}
        policies |= {"reserve the exact length": lambda s: s.end - 1, "paged": None}
        in_slots = partial(continuous_batching_kvcache, slots, batch_size=B, seqlen=longest)
        ways = {"contiguous slots": (in_slots, slots)}
        ways |= {name: (partial(serve_paged, reserve=way), paged) for name, way in policies.items()}
        methods = [utils.Method(name, partial(way, requests), [m]) for name, (way, m) in ways.items()]
        results, used = utils.measure(methods, sum(n for _, n in requests), args.repeats), {}
        for name in policies:
            _, scheduler, usage = results[name].output
            limited = [u for u in usage if u[3] > 0] or usage  # while requests wait, memory is the limit
            held, reserved, n_running, _ = map(sum, zip(*limited, strict=True))
            used[name] = {"held_share": held / reserved, "at_a_time": n_running / len(limited)}
            used[name] |= {"mean_length": held / n_running, "n_preempted": scheduler.n_preempted}
        slot, equal, full = (results[way] for way in ("contiguous slots", "reserve the longest", "paged"))
        report.check(f"slots and reserved blocks take {slot.n_steps} steps", slot.n_steps == equal.n_steps)
        used["contiguous slots"] = used["reserve the longest"]  # the same schedule, in the same memory
        for name, (way, m) in ways.items():
            same = utils.served_as_alone(model, results[name].output[0], requests, margin)
            report.check(f"{name}: each request gets the tokens it gets alone", same)
            begin = [(prompt, min(n, 4)) for prompt, n in requests[: 2 * B]]
            peak = utils.peak_memory_mb(partial(way, begin), m)
            figures = {"peak_memory_mb": peak, "kv_bytes_per_token": token_bytes, "same_output": same}
            report.row(name, results[name], baseline=m is slots, **figures, **used[name])

        # A pool that is too small
        fewer, small = requests[: -(-n_requests // 3)], max(n_blocks // 4, n_blocks // B)
        methods = [
            utils.Method(way, partial(serve_paged, fewer, small, swap=swap), [paged])
            for way, swap in {"computed anew": False, "swapped": True}.items()
        ]
        rows, needed = [], sum(len(prompt) + n - 1 for prompt, n in fewer)  # tokens, each computed once
        for way, measured in utils.measure(methods, sum(n for _, n in fewer), args.repeats).items():
            outputs, scheduler, _ = measured.output
            same = utils.served_as_alone(model, outputs, fewer, margin)
            report.check(f"preempted and {way}: each request gets the tokens it gets alone", same)
            row = {"the newest is": way, "preempted": scheduler.n_preempted, "steps": measured.n_steps}
            row |= {"tokens computed again": measured.forward_tokens - needed}
            row |= {"MB swapped out": scheduler.n_bytes_swapped / 1e6, "tokens/s": measured.tokens_per_s}
            rows.append(row)
        report.sweep(f"Preemption: {len(fewer)} requests in a pool of {small} blocks", rows)
        report.check("at the end all blocks are free and all reference counts zero", all(clean))

        most, power, ours = (used[way] for way in ("reserve the longest", "reserve a power of 2", "paged"))
        length, half = ours["mean_length"], (size - 1) / 2
        report.why(
            f"A running text has {length:.0f} tokens on average: of {longest} reserved ones "
            f"{most['held_share']:.0%} hold a token, of the next power of 2 {power['held_share']:.0%}. "
            f"Blocks waste half a block a text, {half:g} tokens: {length / (length + half):.0%} expected, "
            f"{ours['held_share']:.0%} measured. {ours['at_a_time']:.1f} texts fit instead of "
            f"{most['at_a_time']:.1f}, {ours['at_a_time'] / most['at_a_time']:.1f} times as many."
        )
        limits, n_texts = rep.measure_ceilings(dev, args.dtype), round(ours["at_a_time"])
        moved = 2 * most["at_a_time"] * most["mean_length"] * token_bytes  # read and written once more
        step = rep.forward_cost(p, vocab_size, n_texts, 1, round(length), args.dtype)
        bound, speedup = rep.lower_bound_ms(step, limits), full.tokens_per_s / slot.tokens_per_s
        report.why(
            f"With as many texts as slots, blocks reach {equal.tokens_per_s / slot.tokens_per_s:.2f} of the "
            f"slots' tokens/s: gathering moves {moved / 1e6:.0f} MB a step, at least "
            f"{1000 * moved / limits.bytes_per_s:.1f} of {equal.tpot_ms:.1f} ms. With all that fit paging "
            f"{'gains' if speedup > 1 else 'loses'}, {speedup:.2f} times: a step of {n_texts} texts takes "
            f"{full.tpot_ms:.1f} ms (at least {bound:.1f}, {rep.share_of(bound, full.tpot_ms)} reached). "
            "More texts pay as far as they share a step's fixed cost: on a CPU that ends soon, on a GPU a "
            "step costs the same for hundreds of them."
        )
        flops = rep.forward_cost(p, vocab_size, 1, round(length), 0, args.dtype).flops / length  # of a token
        seconds = [sum(n for _, n in fewer) / row["tokens/s"] for row in rows]
        report.why(
            f"The small pool takes {seconds[0]:.2f} s if {rows[0]['tokens computed again']} tokens are "
            f"computed again ({flops / 1e6:.0f} MFLOP a token), {seconds[1]:.2f} if they are copied "
            f"({2 * token_bytes / 1e3:.0f} kB a token, out and in). Over a link of 25 GB/s computing wins "
            f"from {flops * 25e9 / (2 * token_bytes) / 1e12:.0f} TFLOP/s on."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for name in policies:
                axes.plot([held / n_blocks / size for held, *_ in results[name].output[2]], label=name)
            axes.set(xlabel="step", ylabel="share of the memory that holds tokens", ylim=(0, 1))
            axes.set_title(f"{n_requests} requests in {n_blocks} blocks of {size} tokens")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
