"""Serving: requests arrive over time, and what counts is how long each of them waits.

A queue that is full from the start measures throughput; users feel the time to the first token and between
tokens. Here requests arrive at random (open loop: they come whether the server keeps up or not). With
continuous batching they join the running batch at its next step; a static batch starts when it is full or a
time-out is over, and ends with its longest answer. The clock is virtual: it advances by the measured duration
of each step, and jumps while the server is idle.

Exact: every request gets the tokens it would get alone. Continuous batching wins at every load: on a server
that is mostly idle static batching adds its time-out, and it keeps up with E[length] / E[longest of a batch]
of the load only; above that its queue grows as long as requests come. Continuous batching loses steadiness:
newcomers' prompts are computed between the tokens of the others (../main_chunked_prefill.py).

Goodput is the highest rate of requests at which 90% of them meet both targets, here 5 times the first token's
and 3 times a further token's time on an idle server. Capacity and tokens/s are those of a queue that is there
from the start.

Run: python more/serving.py            (--repeats 5 for more draws of the arrivals)

Source: Yu et al., Orca, 2022 (continuous batching); Zhong et al., DistServe: Disaggregating Prefill and
Decoding for Goodput-optimized Large Language Model Serving, 2024 (goodput, targets for both times).
"""

from collections import deque

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_paged import Sequence
from gptlite_slots import SlotBatch
from inference_serving import refusals


def poisson_arrivals(n_requests, rate, generator=None):
    """Arrival times in s, ascending: independent gaps, exponential with mean 1 / rate (requests per s)."""
    uniform = torch.rand(n_requests, dtype=torch.float64, generator=generator)  # [n_requests]
    return (-torch.log1p(-uniform) / rate).cumsum(dim=0).tolist()


def serve_on_clock(batch, requests, arrivals, run_step, timeout=None):
    """Serves requests as they arrive, first come, first served, on a virtual clock that starts at 0.

    Args: batch: an empty SlotBatch; requests: list of (prompt [T], n_tokens); arrivals: their times in s,
        ascending; run_step: (batch, newcomers) -> (batch.step(newcomers), how long it took in s);
        timeout: None lets newcomers take any free slot; a number of s makes an empty batch wait until it can
        be full, or its oldest request has waited so long (for a SlotBatch with refill=False).
    Returns: (outputs, times): for each request its token ids as a list, or a ValueError that says why it was
        refused; and the times at which it received its tokens.
    """
    outputs = refusals(requests, batch.n_slots, batch.seqlen + 1, batch.model)
    waiting, times, now = deque(), [[] for _ in requests], 0.0
    for i, (prompt, n_tokens) in enumerate(requests):
        if outputs[i] is None:
            outputs[i] = prompt.tolist()
            if n_tokens > 0:
                waiting.append(Sequence(i, outputs[i], len(prompt) + n_tokens))
    while waiting or batch.running:
        n_arrived = sum(arrivals[sequence.request] <= now for sequence in waiting)
        n_new, events = min(n_arrived, batch.n_free()), []
        if timeout is not None and 0 < n_new < batch.n_slots:
            deadline = arrivals[waiting[0].request] + timeout
            if now < deadline:
                n_new, events = 0, [deadline]
        if n_new == 0 and not batch.running:  # idle: the clock jumps to what happens next
            now = min([*events, *(arrivals[sequence.request] for sequence in list(waiting)[n_arrived:][:1])])
            continue
        newcomers = [waiting.popleft() for _ in range(n_new)]
        served = [sequence for sequence in [*batch.running, *newcomers] if not sequence.finished]
        _, seconds = run_step(batch, newcomers)
        now += seconds
        for sequence in served:
            times[sequence.request].append(now)
    return outputs, times


if __name__ == "__main__":
    import math
    from statistics import median

    import inference_queue as queueing
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_slots import GPTlite_Slots
    from inference_utils import Timer

    sizes = {"batch_size": 8, "n_requests": 128, "longest": 64}
    parser = harness.options(__doc__, repeats=2, quick={"n_requests": 12, "longest": 24}, **sizes)
    columns = {"capacity": ("capacity 1/s", "{:.2f}"), "goodput": ("goodput 1/s", "{:.2f}")}
    with harness.script(parser) as args:
        text, n, n_slots = harness.load_text(args), args.n_requests, args.batch_size
        plain, cached = harness.load_models(args, GPTlite, GPTlite_Slots)
        requests = queueing.draw_requests(args, text, plain.seqlen)
        lengths = [n_tokens for _, n_tokens in requests]
        longer = [request for request in requests if request[1] > 1][:4]
        if not longer:
            raise ValueError(f"--longest {args.longest}: no request has a second token; try a larger one")
        report = harness.Report(args, "serving", plain, columns, text=text)

        def timed_step(batch, newcomers):
            with Timer(args.device) as timer:
                finished = batch.step(newcomers)
            return finished, timer.seconds

        def run(arrivals, timeout=None, requests=requests, n_slots=n_slots):
            """(arrivals, outputs, times) of the requests; with a time-out static batches."""
            batch = SlotBatch(cached, n_slots, plain.seqlen, refill=timeout is None)
            return arrivals, *serve_on_clock(batch, requests, arrivals, timed_step, timeout)

        # On an idle server; the first one warms up
        alone = [run([0.0], None, [request], 1) for request in [longer[0], *longer]][1:]
        idle = [queueing.waiting_times(arrivals, times)[0] for arrivals, _, times in alone]
        ttft, tpot = (median(waits) for waits in zip(*idle, strict=True))
        policies, runs, capacity = {"static, time-out": 2 * ttft, "continuous": None}, {}, {}
        loads = (0.3, 1.1) if args.quick else (0.3, 0.5, 0.7, 0.9, 1.1)  # shares of the capacity
        for load in (math.inf, *loads):  # first all requests are there from the start: the capacity
            rate = load * capacity.get("continuous", 1.0)
            for repeat in range(args.repeats):  # the same arrivals for both policies, which take turns
                arrivals = poisson_arrivals(n, rate, torch.Generator().manual_seed(args.seed + repeat))
                for policy, timeout in policies.items():
                    runs.setdefault((policy, load), []).append(run(arrivals, timeout))
            if load == math.inf:
                ends = {p: [max(t[-1] for t in times) for *_, times in runs[p, load]] for p in policies}
                capacity = {policy: n / median(seconds) for policy, seconds in ends.items()}

        table, attained, rows = [], {policy: {} for policy in policies}, {}
        for load in loads:
            for policy in policies:
                waits = [w for at, _, times in runs[policy, load] for w in queueing.waiting_times(at, times)]
                row = {"load": load, "requests/s": load * capacity["continuous"], "method": policy}
                table.append(row | queueing.load_figures(waits, 5 * ttft, 3 * tpot))
                attained[policy][row["requests/s"]] = table[-1]["meet both"]
        report.sweep("Times in ms; load is the share of continuous batching's capacity", table)
        same = queueing.check_runs(report, plain, requests, [run for some in runs.values() for run in some])
        middle = loads[(len(loads) - 1) // 2]
        for policy in policies:
            speeds = [sum(lengths) / seconds for seconds in ends[policy]]
            figures = queueing.run_figures(runs[policy, middle]) | {"capacity": capacity[policy]}
            figures |= {"tokens_per_s": median(speeds), "tokens_per_s_spread": (min(speeds), max(speeds))}
            figures |= {"goodput": queueing.goodput(attained[policy]), "same_output": same}
            rows[policy] = report.row(f"{policy}, load {middle}", None, policy != "continuous", **figures)

        static, ours = rows.values()
        predicted = sum(lengths) / n / queueing.expected_longest(lengths, n_slots)
        share = static["capacity"] / ours["capacity"]
        figures = f"{share:.0%} of continuous batching's requests per second ({predicted:.0%} predicted)"
        keeps, lags = f"Static batching keeps up: {figures}.", f"Static batching serves {figures}."
        report.why(words.choose(share, (0.97, keeps), lags))
        report.why(words.compare(ours, static, "ttft_ms") + words.compare(ours, static, "tpot_ms"))
        report.why(words.compare(ours, static, "tokens_per_s") + words.compare(ours, static, "goodput"))
        lines = {p: (loads, [row["TTFT p90"] for row in table if row["method"] == p]) for p in policies}
        lines["target"] = loads, [5000 * ttft] * len(loads)
        report.plot_lines(lines, "load", "TTFT p90 (ms)", f"{n} requests, {n_slots} slots", "y")
        report.finish()
