"""Chunked prefill: a long prompt is computed in pieces, between the tokens of those who are generating.

The time of a step grows with its tokens, so a prompt that is computed whole makes everybody else wait. Here
a step has a budget of tokens: one for each sequence that generates, none of which is ever paused, and what
is left of it for pieces of prompts; only the last piece gives a token. choose_budget() takes the largest
budget that keeps a gap between tokens within a target.

Exact: a piece attends to the keys and values of the pieces before it, which are in the cache, so every
request gets the tokens it would get alone. Wins in the worst gap between tokens, where a prompt has more
tokens than take as long as the part that every step costs: a few dozen on a CPU. Loses in the time to the
newcomer's first token, as each piece pays that part again, and one prompt after the other is computed. On a
large GPU a step's fixed part is worth more than a thousand tokens of this model: no prompt within its context
is felt there, and chunks only add steps.

Run: python main_chunked_prefill.py            (--max-gap 30 for the budget that keeps gaps below 30 ms)

Source: Agrawal et al., Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve, 2024;
Yu et al., Orca, 2022 (whole prompts mixed in). As in Sarathi-Serve, memory for a prompt is taken when it is
admitted; admission and preemption are those of main_paged_attention.py.
"""

from collections import deque

from gptlite_paged import Sequence
from inference_serving import PagedScheduler, refusals

# A policy chooses the work of a step: running sequences, the oldest first -> list of (sequence, n tokens). A
# sequence generates if one token is pending. More of them are a prompt, or the text of a preempted sequence.


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


def prefill_first(running):
    """Whole prompts, and nobody generates meanwhile: the first token comes soon, the others wait for it."""
    return [(s, s.pending) for s in running if s.pending > 1] or [(s, 1) for s in running]


def decode_first(running):
    """Prompts only when nobody generates: no gaps, and a first token that may never come."""
    return [(s, 1) for s in running if s.pending == 1] or [(s, s.pending) for s in running]


def mixed(running):
    """Everything that is pending, prompts as a whole beside the tokens of the others (Orca)."""
    return [(s, s.pending) for s in running]


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

    def __init__(self, model, pool, policy, swap=False, max_running=256, temperature=0.0):
        super().__init__(model, pool, swap=swap, max_running=max_running, temperature=temperature)
        self.policy = policy

    def choose_work(self):
        return self.policy(self.running)


def serve_arrivals(scheduler, requests, arrivals):
    """Serves requests that arrive over time, which is counted in steps, so that a schedule repeats.

    Args: requests: list of (prompt [T], n_tokens); arrivals: the number of the step before which each comes;
        where nothing is left to do, the next one comes at once.
    Returns: (outputs, received): for each request its prompt and answer [T + n_tokens], or a ValueError that
        says why it was refused; and the numbers of the steps in which it received its tokens.
    """
    outputs = refusals(requests, 1, scheduler.max_tokens, scheduler.model)
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


if __name__ == "__main__":
    from functools import partial
    from itertools import pairwise
    from statistics import median

    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_paged import BlockPool, GPTlite_Paged
    from inference_queue import check_served, fit_step, gaps_between, waiting_figures
    from inference_serving import clock_figures, measure_serving
    from inference_utils import peak_memory_mb

    sizes = {"batch_size": 8, "prompt_len": 200, "n_tokens": 100}
    parser = harness.options(__doc__, quick={"prompt_len": 48, "n_tokens": 20}, **sizes)
    parser.add_argument("--max-gap", type=harness.positive, metavar="MS", help="target (default: 2 steps)")
    columns = {"worst_gap_ms": ("worst ms", "{:.1f}"), "largest_step": ("largest step", "{}")}
    with harness.script(parser) as args:
        B, T, n_new = args.batch_size, args.prompt_len, 4 if args.quick else 16  # new tokens of newcomers
        text, (model, paged) = harness.load_text(args), harness.load_models(args, GPTlite, GPTlite_Paged)
        seqlen, n_blocks = model.seqlen, (B + 5) * -(-model.seqlen // 16)  # room for everybody
        if not 10 <= args.n_tokens <= seqlen or not 16 <= T <= seqlen + 1 - n_new:
            raise ValueError(f"--n-tokens is 10 to {seqlen}, --prompt-len 16 to {seqlen + 1 - n_new}")
        prompts = text.prompts(B + 5, T)  # [B + 5, T]
        # from one character all of them generate at once: until the first prompt all policies do the same
        requests = [(q[:1], args.n_tokens) for q in prompts[:B]] + [(q, n_new) for q in prompts[B:]]
        first, second = args.n_tokens // 5, args.n_tokens * 3 // 5  # steps at which one prompt comes, then 4
        run = partial(serve_arrivals, requests=requests, arrivals=[0] * B + [first] + [second] * 4)

        report = harness.Report(args, "chunked prefill", paged, columns, text=text)
        t0, slope = fit_step(paged, B, T, 3 * args.repeats)  # ms: a step of n tokens takes t0 + slope * n
        max_gap = args.max_gap or max(2 * (t0 + slope * B), t0 + slope * (B + 8))
        best = choose_budget(t0, slope, max_gap, B, most=B + 4 * T)
        report.data["config"] |= {"max_gap_ms": max_gap, "budget": best, "t0_ms": t0, "slope_ms": slope}
        policies = {"prefill first": prefill_first, "decode first": decode_first, "whole, mixed in": mixed}
        for n in sorted({best, *(n for n in ((16, 64) if args.quick else (16, 32, 64, 128)) if n > B)}):
            policies[f"chunked, {n} tokens"] = partial(chunked, budget=n)
        make = lambda policy: PolicyScheduler(paged, BlockPool(paged, n_blocks), policy)  # noqa: E731
        makers, rows, events = {name: partial(make, policy) for name, policy in policies.items()}, {}, {}
        measure_serving(makers, run, 1)  # a warm-up
        results = measure_serving(makers, run, args.repeats, lambda s: sum(n for _, n in s.choose_work()))
        for name, (_, (outputs, received), clocks) in results.items():
            ttft = [[c.received[i][0] - c.arrived[i] for i in range(B, B + 5)] for c in clocks]
            # of those who generate, while one prompt is computed, and four
            one = [gaps_between(c, received[:B], first, second) for c in clocks]
            four = [gaps_between(c, received[:B], second) for c in clocks]
            waits = waiting_figures(ttft, [a + b for a, b in zip(one, four, strict=True)])
            same, largest = check_served(report, name, model, outputs, requests), max(clocks[-1].observed)
            if name.startswith("chunked"):
                never = all(b - a == 1 for steps in received[:B] for a, b in pairwise(steps))
                report.check(f"{name}: nobody who generates is ever paused", never)
                kept = largest <= max(int(name.split()[1]), B + 5)
                report.check(f"{name}: no step has more than that, or than one for each sequence", kept)
            figures = clock_figures(clocks) | waits | {"same_output": same, "largest_step": largest}
            figures["kv_bytes_per_token"] = BlockPool(paged, 1, 1).kv.nbytes
            figures["peak_memory_mb"] = peak_memory_mb(lambda make=makers[name]: run(make()), paged)
            rows[name] = report.row(name, None, name == "prefill first", **figures)
            alone, *others = (median(times) for times in zip(*ttft, strict=True))
            events[name] = {"method": name, "worst gap for 1 prompt": max(map(max, one)), "its TTFT": alone}
            events[name] |= {"worst gap for 4 prompts": max(map(max, four)), "latest TTFT": max(others)}
        report.sweep(f"ms when prompts of {T} tokens arrive: worst of all runs, medians", [*events.values()])
        n_computed = {row["forward_tokens"] for row in rows.values()}
        report.check("all policies compute the same number of tokens", len(n_computed) == 1)

        name = f"chunked, {best} tokens"
        ours, whole = rows[name], rows["prefill first"]
        for key in ("worst gap for 1 prompt", "worst gap for 4 prompts"):
            report.why(words.compare(events[name], events["prefill first"], key))
        report.why(words.compare(ours, whole, "ttft_ms") + words.compare(ours, whole, "tokens_per_s"))
        longest, knee = ours["worst_gap_ms"], max(t0, 1e-9) / slope if slope > 0 else float("inf")
        target = f"the target of {max_gap:.1f} ms with {best} tokens a step (the longest is {longest:.1f})."
        step = f"felt: it takes {knee:.0f} tokens to double the {t0:.1f} ms that every step costs."
        kept = words.choose(max_gap / longest, (1, f"All gaps keep {target}"), f"Some gap misses {target}")
        prompt = f"A prompt of {T} tokens is"
        report.why(kept + words.choose(T / knee, (1, f"{prompt} {step}"), f"{prompt} hardly {step}"))
        shown = {n: results[n].clocks[-1].received[0] for n in ("prefill first", name)}
        lines = {n: (ends[1:], [b - a for a, b in pairwise(ends)]) for n, ends in shown.items()}
        report.plot_lines(lines, "time (ms)", "gap between tokens (ms)", "1, then 4 prompts arrive", "y")
        report.finish()
