"""Continuous batching: a sequence that is finished leaves at once, and the next request takes its slot.

Static batching waits for the longest answer of a group. Here the batch is put together anew at every step,
so all slots generate useful tokens as long as requests wait. The second half is the form that serving
engines have: each slot holds the KV cache of its sequence, and one forward computes the prompts of newcomers
and one token of all the others. Exact: every request gets the tokens it would get alone.

Run: python main_continuous_batching.py            (--peer adds transformers' generate on padded batches)

Source: Yu et al., Orca: A Distributed Serving System for Transformer-Based Generative Models, 2022
(iteration-level scheduling, selective batching). As in the paper a slot holds a whole context, and a prompt
is computed in one piece. main_serving.py lets the requests arrive over time.
"""

from collections import deque

import torch

from gptlite_slots import Sequence, SlotBatch
from main_static_batching import next_tokens, refusals


@torch.no_grad()
def continuous_batching(model, requests, batch_size, seqlen):
    """Serves requests in order, batch_size at a time; a slot is refilled right after its last token.

    Args: model: token ids [B, T] -> logits [B, T, V]; requests: list of (prompt [T], n_tokens).
    Returns: (outputs, n_steps): for each request its prompt and answer [T + n_tokens], or a ValueError that
        says why it was refused; and the number of forwards. Raises ValueError for batch_size below 1.
    """
    refused = refusals(requests, batch_size)
    outputs = [refusal or prompt for refusal, (prompt, _) in zip(refused, requests, strict=True)]
    waiting = deque(i for i, (_, n_tokens) in enumerate(requests) if refused[i] is None and n_tokens > 0)
    running, n_steps = [], 0
    while waiting or running:
        while waiting and len(running) < batch_size:
            running.append(waiting.popleft())
        tokens = next_tokens(model, [outputs[i] for i in running], seqlen)  # [B]
        for i, token in zip(running, tokens.split(1), strict=True):
            outputs[i] = torch.cat([outputs[i], token])  # [T + 1]
        running = [i for i in running if len(outputs[i]) < len(requests[i][0]) + requests[i][1]]
        n_steps += 1
    return outputs, n_steps


def continuous_batching_kvcache(model, requests, batch_size, seqlen, refill=True):
    """continuous_batching with a KV cache: the same outputs and steps, one computed token for each new one.

    Args: model: GPTlite_Slots; refill: False is static batching, its slots refilled when all are finished.
        The cache cannot slide, so prompt and answer must fit: a request of more than seqlen + 1 tokens
        (the last is never read) is refused alone.
    """
    refused = refusals(requests, batch_size, max_tokens=seqlen + 1)
    outputs = [refusal or prompt for refusal, (prompt, _) in zip(refused, requests, strict=True)]
    waiting = deque(
        Sequence(i, prompt.tolist(), len(prompt) + n_tokens)
        for i, (prompt, n_tokens) in enumerate(requests)
        if refused[i] is None and n_tokens > 0
    )
    batch, n_steps = SlotBatch(model, batch_size, seqlen, refill), 0
    while waiting or batch.running:
        newcomers = [waiting.popleft() for _ in range(min(batch.n_free(), len(waiting)))]
        for sequence in batch.step(newcomers):
            outputs[sequence.request] = outputs[sequence.request].new_tensor(sequence.tokens)  # [T + n]
        n_steps += 1
    return outputs, n_steps


if __name__ == "__main__":
    from functools import partial

    from torch.nn.utils.rnn import pad_sequence

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from gptlite_slots import GPTlite_Slots
    from main_kvcache import generate
    from main_static_batching import expected_longest, make_requests, static_batching

    parser = rep.options(__doc__, repeats=2)
    parser.add_argument("--batch-size", type=rep.positive_int, default=8, help="slots of the batch")
    parser.add_argument("--n-requests", type=rep.positive_int, help="long requests (default: 64)")
    parser.add_argument("--longest", type=rep.positive_int, help="most tokens of one (default: the context)")
    parser.add_argument("--peer", action="store_true", help="add a row of transformers' generate")
    with rep.script(parser) as args:
        p, dev, quick, B = get_gptlite_model_parameters(), args.device, args.quick, args.batch_size
        W = p.seqlen
        longest, n_requests = (
            args.longest or (32 if quick else W),
            args.n_requests or (2 * B if quick else 64),
        )
        if longest > W:
            raise ValueError(f"--longest {longest}: a slot holds {W} tokens")
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        model, cached = [
            utils.load_model(c, vocab_size, args.checkpoint).to(dev, args.dtype)
            for c in (GPTlite, GPTlite_Slots)
        ]
        config = {"batch_size": B, "n_requests": n_requests, "longest_request": longest}
        columns = {"n_steps": ("steps", "{}"), "slot_utilisation": ("useful", "{:.0%}")}
        report = rep.Report(args, "continuous batching", model, columns, **config)

        def one_at_a_time(model, requests, _batch_size, seqlen):
            outputs = [generate(model, prompt[None], n, seqlen)[0] for prompt, n in requests]
            return outputs, sum(n for _, n in requests)

        def padded_generate(opt, requests, batch_size, _seqlen):
            """transformers' batches, padded on the left; its continuous batching does not run OPT (5.24)."""
            outputs, n_steps = [], 0
            for start in range(0, len(requests), batch_size):
                group = requests[start : start + batch_size]
                n_new, ids = max(n for _, n in group), [prompt for prompt, _ in group]
                tokens = pad_sequence(ids, True, 0, "left")  # [B, T]
                seen = pad_sequence([torch.ones_like(prompt) for prompt in ids], True, 0, "left")  # [B, T]
                how = {"attention_mask": seen, "do_sample": False, "pad_token_id": 0}
                rows, T = opt.generate(tokens, max_new_tokens=n_new, **how), tokens.shape[1]  # [B, T + n]
                outputs += [row[T - len(q) : T + n] for row, (q, n) in zip(rows, group, strict=True)]
                n_steps += n_new
            return outputs, n_steps

        def compare(label, requests, n_alone, forms):
            """Adds a row a form, first the baseline on n_alone of the requests; returns what was measured."""
            jobs = {"one at a time": (one_at_a_time, model, requests[:n_alone])}
            jobs |= {name: (serve, m, requests) for name, (serve, m) in forms.items()}
            methods = [utils.Method(name, partial(f, m, r, B, W), [m]) for name, (f, m, r) in jobs.items()]
            n_tokens = [sum(n for _, n in r) for _, _, r in jobs.values()]
            results = utils.measure(methods[:1], n_tokens[0], args.repeats)
            results |= utils.measure(methods[1:], n_tokens[1], args.repeats)
            for (name, (serve, m, served)), total in zip(jobs.items(), n_tokens, strict=True):
                outputs, n_steps = results[name].output
                same = utils.served_as_alone(
                    model, outputs, served, max(1e-3, 2 * utils.TOLERANCE[args.dtype])
                )
                report.check(f"{name}, {label}: each request gets the tokens it gets alone", same)
                # the heaviest step: all slots full, with prompts if there is a cache, else with whole texts
                heavy = sorted((len(q) + (0 if m is cached else n - 1) for q, n in served), reverse=True)[:B]
                heavy = partial(serve, m, [(served[0][0].new_zeros(T), 1) for T in heavy], B, W)
                report.row(
                    f"{name}, {label}",
                    results[name],
                    baseline=serve is one_at_a_time,
                    peak_memory_mb=None if serve is padded_generate else utils.peak_memory_mb(heavy, m),
                    kv_bytes_per_token=kv_bytes if m is cached else None,
                    same_output=same,
                    n_steps=n_steps,
                    slot_utilisation=total / n_steps / (1 if serve is one_at_a_time else B),
                )
            return results

        buffers = SlotBatch(cached, B, W)
        kv_bytes = utils.cache_bytes_per_token([buffers.k, buffers.v], W, B)
        forms = {
            "static, KV cache": (partial(continuous_batching_kvcache, refill=False), cached),
            "continuous, KV cache": (continuous_batching_kvcache, cached),
        }
        if args.peer:
            from gptlite_opt import opt_from_gptlite

            forms["transformers, padded"] = (padded_generate, opt_from_gptlite(model))
        # without a cache every step computes whole texts: those forms get fewer and shorter requests
        without_cache = {"static": (static_batching, model), "continuous": (continuous_batching, model)}
        draw = partial(make_requests, valid_data.to(dev), generator=torch.Generator().manual_seed(args.seed))
        short, long = draw(3 * B, max(longest // 4, 2)), draw(n_requests, longest)
        compare("short", short, len(short), without_cache | forms)
        results = compare("long", long, 2, forms)

        # Steps do not depend on the model: a stand-in counts them on a queue so long that its end is nothing
        def slots_in_use(serve, requests):
            in_use = []
            stand_in = lambda x: in_use.append(len(x)) or x.new_zeros(*x.shape, 2)  # noqa: E731
            serve(stand_in, requests, B, W)
            return in_use

        def step_ratio(requests):
            static, continuous = (slots_in_use(f, requests) for f in (static_batching, continuous_batching))
            return len(static) / len(continuous)

        queue = draw(60 * B, 64)
        lengths = [n for _, n in queue]
        predicted = expected_longest(lengths, B) * len(lengths) / sum(lengths)
        counted, here = step_ratio(queue), step_ratio(long)
        name = (
            f"static takes {counted:.2f} times the steps on {len(queue)} requests ({predicted:.2f} predicted)"
        )
        report.check(name, abs(counted / predicted - 1) <= 0.1)

        alone, static, ours = (results[name] for name in ("one at a time", *list(forms)[:2]))
        n_alone, n_long = (sum(n for _, n in requests) for requests in (long[:2], long))
        context = sum(len(q) + n / 2 for q, n in long) / n_requests
        report.why(
            f"Static batching waits for the longest of {B} answers: E[longest of {B}] / E[length] = "
            f"{predicted:.2f} times the steps. Counted {counted:.2f} on a long queue, {here:.2f} on these "
            f"{n_requests} requests, whose end leaves slots empty. One slot or equal lengths gain nothing."
        )
        if None in (ours.tpot_ms, static.tpot_ms):  # one step did it all
            steps = "steps; with so few of them there is no time from step to step to compare."
        else:
            steps = (
                f"steps of {ours.tpot_ms:.1f} against {static.tpot_ms:.1f} ms. With a prompt in it a step "
                f"takes longer (p99 {ours.tpot_p99_ms:.1f} ms), and every sequence waits."
            )
        report.why(
            f"With a cache: {ours.tokens_per_s / static.tokens_per_s:.2f} times the tokens/s of static, with "
            f"{here:.2f} times fewer {steps}"
        )
        report.why(
            f"One at a time computes {alone.forward_tokens / n_alone:.0f} tokens for a new one; slots do "
            f"{ours.forward_tokens / n_long:.2f}, and read the weights once for up to {B}: "
            f"{ours.tokens_per_s / alone.tokens_per_s:.1f} times the tokens/s."
        )
        cost = rep.forward_cost(p, vocab_size, B, 1, int(context), args.dtype)
        bound = rep.lower_bound_ms(cost, rep.measure_ceilings(dev, args.dtype))
        report.why(
            f"A step of {B} texts of {context:.0f} tokens computes {cost.flops / 1e9:.2f} GFLOP and reads "
            f"{cost.n_bytes / 1e6:.0f} MB: {bound:.1f} ms at least, {rep.share_of(bound, ours.tpot_ms)} of "
            f"what it takes. The slots reserve {B * W * kv_bytes / 1e6:.0f} MB, {context / W:.0%} of it used."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            groups = [[n for _, n in long[start : start + B]] for start in range(0, n_requests, B)]
            static = [sum(n > i for n in group) for group in groups for i in range(max(group))]
            for name, in_use in (("static", static), ("continuous", slots_in_use(continuous_batching, long))):
                axes.step(range(len(in_use)), in_use, label=name, linewidth=1)
            axes.set(
                xlabel="step",
                ylabel="slots that generate useful tokens",
                title=f"{n_requests} requests, {B} slots",
            )
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
