"""Chunked prefill: a long prompt is computed in pieces, between the tokens of those who are generating.

The time of a step grows with its tokens, so a prompt that is computed whole makes everybody else wait. Here
a step has a budget of tokens: one for each sequence that generates, none of which is ever paused, and what
is left of it for pieces of prompts; only the last piece gives a token. Exact: a piece attends to the keys and
values of the pieces before it, which are in the cache, so every request gets the tokens it would get alone.

Run: python main_chunked_prefill.py            (--max-gap 30 for the budget that keeps gaps below 30 ms)

Source: Agrawal et al., Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve, 2024;
Yu et al., Orca, 2022 (whole prompts mixed in). As in Sarathi-Serve, memory for a prompt is taken when it is
admitted; admission and preemption are those of main_paged_attention.py.
"""

from collections import deque
from itertools import accumulate, pairwise

from gptlite_paged import Sequence
from main_paged_attention import PagedScheduler
from main_static_batching import refusals

# A policy chooses the work of a step: running sequences, the oldest first -> list of (sequence, n tokens). A
# sequence generates if one token is pending. More of them are a prompt, or the text of a preempted sequence.


def prefill_first(running):
    """Whole prompts, and nobody generates meanwhile: the first token comes soon, the others wait for it."""
    return [(s, s.pending) for s in running if s.pending > 1] or [(s, 1) for s in running]


def decode_first(running):
    """Prompts only when nobody generates: no gaps, and a first token that may never come."""
    return [(s, 1) for s in running if s.pending == 1] or [(s, s.pending) for s in running]


def mixed(running):
    """Everything that is pending, prompts as a whole beside the tokens of the others (Orca)."""
    return [(s, s.pending) for s in running]


def chunked(running, budget):
    """One token for each sequence that generates, the rest of the budget for prompts, the oldest first.

    A budget that those who generate use up leaves nothing for prompts until one of them ends.
    Raises ValueError for a budget below 1.
    """
    if budget < 1:
        raise ValueError(f"a budget of {budget} tokens: a step needs at least 1")
    work = [(s, 1) for s in running if s.pending == 1]
    left = budget - len(work)
    for s in running:
        if s.pending > 1 and left > 0:
            work.append((s, min(s.pending, left)))
            left -= work[-1][1]
    return work


def choose_budget(t0, slope, max_gap, n_running, most, multiple=8):
    """The largest budget whose steps stay within max_gap.

    Args: t0, slope: a step of n tokens takes t0 + slope * n; max_gap: in the same unit; n_running: sequences
        that generate; most: tokens that are ever pending at once; multiple: of which tokens the budget is
        one, as matrix products are computed in tiles.
    Raises ValueError where no budget leaves anything for prompts.
    """
    fitting = (max_gap - t0) / slope + 1e-9 if slope > 0 else most  # not one less by rounding
    budget = int(max(min(fitting, most), 0)) // multiple * multiple
    if budget <= n_running:
        raise ValueError(
            f"no budget keeps gaps within {max_gap:.4g} ms: {n_running} sequences that generate and a piece "
            f"of a prompt take about {t0 + slope * (n_running // multiple + 1) * multiple:.4g}"
        )
    return budget


class PolicyScheduler(PagedScheduler):
    """PagedScheduler whose steps compute what a policy chooses, not all that is pending.

    Args: policy: as above, never without work for running sequences; the others as in PagedScheduler.
    """

    def __init__(self, model, pool, policy, **how):
        super().__init__(model, pool, **how)
        self.policy = policy

    def choose_work(self):
        return self.policy(self.running)


def serve_arrivals(scheduler, requests, arrivals):
    """Serves requests that arrive over time. The clock counts steps, so that a schedule repeats.

    Args: requests: list of (prompt [T], n_tokens); arrivals: the number of the step before which each comes;
        where nothing is left to do, the next one comes at once.
    Returns: (outputs, received): for each request its prompt and answer [T + n_tokens], or a ValueError that
        says why it was refused; and the numbers of the steps in which it received its tokens.
    """
    room = min(scheduler.model.seqlen, scheduler.pool.n_blocks * scheduler.pool.block_size)
    outputs = refusals(requests, 1, max_tokens=room + 1)  # the last token is never in the cache
    received, coming, served, n_steps = [[] for _ in requests], deque(), [], 0
    for i in sorted(range(len(requests)), key=lambda i: arrivals[i]):
        prompt, n_tokens = requests[i]
        if outputs[i] is None:
            outputs[i] = prompt
            if n_tokens > 0:
                coming.append(Sequence(i, prompt.tolist(), len(prompt) + n_tokens))
    while coming or served:
        while coming and (arrivals[coming[0].request] <= n_steps or not served):
            served.append(coming.popleft())
            scheduler.add(served[-1])
        for sequence in scheduler.step():
            outputs[sequence.request] = outputs[sequence.request].new_tensor(sequence.ids)  # [T + n]
        for sequence in served:
            if len(sequence.ids) - sequence.n_prompt > len(received[sequence.request]):
                received[sequence.request].append(n_steps)
        served = [sequence for sequence in served if not sequence.finished]
        n_steps += 1
    return outputs, received


def gaps(received, step_times, first, stop):
    """Times from each token to the next, of all these sequences, for tokens of steps first to stop - 1."""
    ends = list(accumulate(step_times))
    return [ends[b] - ends[a] for steps in received for a, b in pairwise(steps) if first <= b < stop]


if __name__ == "__main__":
    from functools import partial
    from statistics import linear_regression, median

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from gptlite_paged import BlockPool, GPTlite_Paged

    parser = rep.options(__doc__, repeats=5)
    parser.add_argument("--batch-size", type=rep.positive_int, default=8, help="sequences that generate")
    parser.add_argument("--n-tokens", type=rep.positive_int, help="tokens each of them gets (default: 100)")
    parser.add_argument("--prompt-len", type=rep.positive_int, help="tokens of a long prompt (default: 200)")
    parser.add_argument("--max-gap", type=float, metavar="MS", help="to choose the budget (default: 2 steps)")
    with rep.script(parser) as args:
        p, dev, quick, B = get_gptlite_model_parameters(), args.device, args.quick, args.batch_size
        W, n_new = p.seqlen, 4 if quick else 16  # context; tokens of the answers to the long prompts
        n_tokens, T = args.n_tokens or (20 if quick else 100), args.prompt_len or (48 if quick else 200)
        if not 10 <= n_tokens <= W or not 16 <= T <= W + 1 - n_new:
            raise ValueError(
                f"--n-tokens {n_tokens} must be 10 to {W}, --prompt-len {T} 16 to {W + 1 - n_new}"
            )
        if args.max_gap is not None and not 0 < args.max_gap < float("inf"):
            raise ValueError(f"--max-gap {args.max_gap:g} ms must be a number above 0")
        args.repeats = min(args.repeats, 2) if quick else args.repeats
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        model, paged = (
            utils.load_model(c, vocab_size, args.checkpoint).to(dev, args.dtype)
            for c in (GPTlite, GPTlite_Paged)
        )
        prompts = utils.sample_prompts(valid_data, B + 5, T).to(dev)  # [B + 5, T]
        # from one character all of them generate at once: until the first prompt all policies do the same
        requests = [(prompt[:1], n_tokens) for prompt in prompts[:B]] + [(q, n_new) for q in prompts[B:]]
        first, second = n_tokens // 5, n_tokens * 3 // 5  # steps at which one prompt comes, then four
        arrivals = [0] * B + [first] + [second] * 4
        n_blocks = (B + 5) * -(-W // 16)  # room for everybody

        def step_ms(n_chunk):
            """Measured time of a step of B single tokens and the last n_chunk of a prompt, in long texts."""
            work = [(Sequence(i, [0] * T, W, T, T - 1), 1) for i in range(B)]
            work += [(Sequence(B, [0] * T, W, T, T - n_chunk), n_chunk)] if n_chunk else []
            pool = BlockPool(paged, n_blocks)

            def step():
                for text, n in work:
                    pool.grow(text, n)
                paged.step(pool, work)
                for text, n in work:
                    text.done -= n

            return utils.median_ms(step, 5 if quick else 15, dev)

        chunks = [n for n in (0, 8, 24, 56, 120) if n <= T]
        costs = [step_ms(n) for n in chunks]
        slope, t0 = linear_regression([B + n for n in chunks], costs)
        max_gap = args.max_gap
        if max_gap is None:
            max_gap = max(2 * (t0 + slope * B), t0 + slope * (B + 8))
        best = choose_budget(t0, slope, max_gap, B, most=B + 4 * T)
        policies = {"prefill first": prefill_first, "decode first": decode_first, "whole, mixed in": mixed}
        budgets = sorted({best, *(n for n in ((16, 64) if quick else (16, 32, 64, 128)) if n > B)})
        policies |= {f"chunked, {n} tokens": partial(chunked, budget=n) for n in budgets}
        config = {"batch_size": B, "prompt_len": T, "n_tokens": n_tokens, "max_gap_ms": max_gap}
        config |= {"budget": best, "step_fixed_ms": t0, "step_ms_per_token": slope}
        columns = {"worst_gap_ms": ("worst ms", "{:.1f}"), "total_ms": ("total ms", "{:.0f}")}
        report = rep.Report(args, "chunked prefill", paged, columns, **config)

        def serve(policy, served=requests, arrivals=arrivals):
            """(outputs, received, tokens of each step)"""
            n_computed = []

            def observed(running):
                work = policy(running)
                n_computed.append(sum(n for _, n in work))
                return work

            scheduler = PolicyScheduler(paged, BlockPool(paged, n_blocks), observed)
            return *serve_arrivals(scheduler, served, arrivals), n_computed

        methods = [utils.Method(name, partial(serve, policy), [paged]) for name, policy in policies.items()]
        results = utils.measure(methods, sum(n for _, n in requests), args.repeats)
        heavy = [(q, min(n, 3)) for q, n in requests[:B] + requests[B + 1 :]]  # has the heaviest steps
        events, rows, margin = {}, {}, max(1e-3, 2 * utils.TOLERANCE[args.dtype])
        for name, policy in policies.items():
            # of each step the median over the repeats: they all have the same schedule, not the same noise
            (outputs, received, n_computed), times = results[name].output, results[name].steps_ms
            same = utils.served_as_alone(model, outputs, requests, margin)
            report.check(f"{name}: each request gets the tokens it gets alone", same)
            waits = gaps(received[:B], times, first, len(times))
            ttft = [sum(times[a : steps[0] + 1]) for a, steps in zip(arrivals, received, strict=True)][B:]
            rows[name] = {"ttft_ms": median(ttft), "tpot_ms": median(waits), "worst_gap_ms": max(waits)}
            rows[name] |= {"tpot_p99_ms": utils.percentile(waits, 99), "total_ms": sum(times)}
            peak = utils.peak_memory_mb(partial(serve, policy, heavy, [0] * B + [1] * 4), paged)
            rows[name] |= {"peak_memory_mb": peak, "kv_bytes_per_token": BlockPool(paged, 1, 1).kv.nbytes}
            report.row(name, results[name], name == "prefill first", same_output=same, **rows[name])
            events[name] = {"policy": name, "largest step": max(n_computed)}
            events[name] |= {"1 prompt: worst gap": max(gaps(received[:B], times, first, second))}
            events[name] |= {"first token": ttft[0]}
            events[name] |= {"4 prompts: worst gap": max(gaps(received[:B], times, second, len(times)))}
            events[name] |= {"soonest token": min(ttft[1:]), "latest token": max(ttft[1:])}
        title = f"Largest step in tokens, and times in ms from when prompts of {T} tokens arrive"
        report.sweep(title, list(events.values()))
        tried = {n: results[f"chunked, {n} tokens"].output for n in budgets}
        steps = [steps for _, received, _ in tried.values() for steps in received[:B]]
        never = all(b - a == 1 for received in steps for a, b in pairwise(received))
        report.check("chunked: nobody who generates is ever paused", never)
        kept = all(max(n_computed) <= max(n, B + 5) for n, (*_, n_computed) in tried.items())
        report.check("chunked: a step has as many tokens as its budget or its sequences at most", kept)
        counts = {result.forward_tokens for result in results.values()}
        report.check("all policies compute the same number of tokens", len(counts) == 1)

        limits, name = rep.measure_ceilings(dev, args.dtype), f"chunked, {best} tokens"
        prompt, step = (rep.forward_cost(p, vocab_size, 1, n, 0, args.dtype) for n in (T, 1))
        least, read = 1e3 * prompt.flops / T / limits.flops_per_s, 1e3 * step.n_bytes / limits.bytes_per_s
        felt = t0 / slope if slope > 0 else float("inf")  # tokens
        reached = rep.share_of(least, max(slope, 0))
        error = max(abs(t0 + slope * (B + n) - ms) / ms for n, ms in zip(chunks, costs, strict=True))
        report.why(
            f"A step of n tokens takes {t0:.1f} + {slope:.3f} n ms (fitted up to {B + chunks[-1]} tokens, "
            f"off by {error:.0%} at most). At least: {read:.1f} ms to read the weights, {least:.3f} ms a "
            f"token for its {prompt.flops / T / 1e6:.0f} MFLOP ({reached} reached). A prompt is felt from "
            f"about {felt:.0f} tokens on, which take as long as the fixed part; below, chunks gain nothing."
        )
        whole, starved, ours = (events[way] for way in ("prefill first", "decode first", name))
        gap_1, gap_4 = ((whole[key], ours[key]) for key in ("1 prompt: worst gap", "4 prompts: worst gap"))
        report.why(
            f"Prefill first: those who generate wait {gap_1[0]:.0f} ms for one prompt and {gap_4[0]:.0f} for "
            f"four, otherwise {rows[whole['policy']]['tpot_ms']:.1f}. In chunks, {best} tokens a step, they "
            f"wait {gap_1[1]:.1f} and {gap_4[1]:.1f} ms at most: {gap_1[0] / gap_1[1]:.1f} and "
            f"{gap_4[0] / gap_4[1]:.1f} times less. Mixing in whole prompts only saves one step of the gap."
        )
        report.why(
            f"{best} is the largest multiple of 8 whose steps should take {max_gap:.1f} ms at most: "
            f"{t0 + slope * best:.1f} predicted, {max(gap_1[1], gap_4[1]):.1f} was the longest."
        )
        share = rows[name]["total_ms"] / rows["prefill first"]["total_ms"]
        report.why(
            f"Newcomers pay, as each piece of {best - B} tokens pays the fixed part again: one alone has its "
            f"first token after {ours['first token']:.0f} ms instead of {whole['first token']:.0f}, four "
            f"have theirs after {ours['soonest token']:.0f} to {ours['latest token']:.0f}, one after the "
            f"other, instead of {whole['latest token']:.0f}. Decode first lets them wait "
            f"{starved['latest token']:.0f} ms. All is over after {share:.2f} times the time."
        )
        sizes = []
        models = (("GPTlite", 1.08e7, 6), ("1.3 billion weights", 1.3e9, 24), ("7 billion", 7e9, 32))
        for label, n, layers in models:
            fixed, token = max(2 * n / 4.8e12, 16 * layers * 7e-6), 2 * n / 500e12  # s
            sizes.append(f"{label} {1000 * fixed:.1f} ms, in which {fixed / token:.0f} tokens are computed")
        report.why(
            "Prediction, not measured, for a GPU with 500 TFLOP/s in 16 bit, 4.8 TB/s, 16 kernels a layer "
            f"and 7 us to launch one. Fixed part of a step: {'; '.join(sizes)}. Shorter prompts are not felt "
            f"there: with GPTlite none is, its context is {W}, and chunks only add steps."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for shown in ("prefill first", name):
                steps, times = results[shown].output[1][0], results[shown].steps_ms
                ends = list(accumulate(times))
                waits = gaps([steps], times, 0, len(times))  # drawn over the time that they last
                axes.step([ends[b] for b in steps[1:]], waits, where="pre", label=shown)
            axes.set(xlabel="time (ms)", ylabel="gap between tokens (ms)", yscale="log")
            axes.set_title(f"{B} sequences generate; 1, then 4 prompts of {T} tokens arrive")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
