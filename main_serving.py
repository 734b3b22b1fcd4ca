"""Serving: requests arrive over time, and what counts is how long each of them waits.

A queue that is full from the start measures throughput; users feel the time to the first token and between
tokens. Here requests arrive at random (open loop: they come whether the server keeps up or not). With
continuous batching they join the running batch at its next step; a static batch starts when it is full or a
time-out is over, and ends with its longest answer. The clock is virtual: it advances by the measured duration
of each step, and jumps while the server is idle. Exact: every request gets the tokens it would get alone.

Run: python main_serving.py            (--repeats 5 for more draws of the arrivals)

Source: Yu et al., Orca, 2022 (continuous batching); Zhong et al., DistServe: Disaggregating Prefill and
Decoding for Goodput-optimized Large Language Model Serving, 2024 (goodput, targets for both times).
"""

from collections import deque

import torch

from gptlite_slots import Sequence, SlotBatch
from main_static_batching import refusals


def poisson_arrivals(n_requests, rate, generator=None):
    """Arrival times in s, ascending: independent gaps, exponential with mean 1 / rate (requests per s)."""
    uniform = torch.rand(n_requests, dtype=torch.float64, generator=generator)  # [n_requests]
    return (-torch.log1p(-uniform) / rate).cumsum(dim=0).tolist()


def serve(batch, requests, arrivals, run_step, timeout=None):
    """Serves requests as they arrive, first come, first served, on a virtual clock that starts at 0.

    Args: batch: an empty SlotBatch; requests: list of (prompt [T], n_tokens); arrivals: their times in s,
        ascending; run_step: (batch, newcomers) -> (batch.step(newcomers), how long it took in s);
        timeout: None lets newcomers take any free slot; a number of s makes an empty batch wait until it can
        be full, or its oldest request has waited so long (for a SlotBatch with refill=False).
    Returns: (outputs, times): for each request its token ids as a list, or a ValueError that says why it was
        refused; and the times at which it received its tokens.
    """
    outputs = refusals(requests, batch.n_slots, max_tokens=batch.seqlen + 1)
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


def waiting_times(arrivals, times):
    """[(TTFT, TPOT)] of requests in s: from arrival to first token, and mean from token to token after it.

    TPOT is 0 for a single token: there is nothing to wait for. Requests without tokens are left out.
    """
    return [
        (tokens[0] - arrival, (tokens[-1] - tokens[0]) / max(len(tokens) - 1, 1))
        for arrival, tokens in zip(arrivals, times, strict=True)
        if tokens
    ]


def attainment(waits, max_ttft, max_tpot):
    """Share of the requests that meet both targets."""
    return sum(ttft <= max_ttft and tpot <= max_tpot for ttft, tpot in waits) / len(waits)


def goodput(attained, share=0.9):
    """The highest rate of {rate: share of its requests that meet both targets} that reaches share, or 0."""
    return max((rate for rate, reached in attained.items() if reached >= share), default=0.0)


if __name__ == "__main__":
    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from gptlite_slots import GPTlite_Slots
    from main_static_batching import expected_longest, make_requests

    parser = rep.options(__doc__, repeats=1)
    parser.add_argument("--batch-size", type=rep.positive_int, default=8, help="slots of the batch")
    parser.add_argument("--n-requests", type=rep.positive_int, help="requests of a draw (default: 64)")
    parser.add_argument("--longest", type=rep.positive_int, help="most tokens of one (default: 128)")
    with rep.script(parser) as args:
        p, dev, quick, B = get_gptlite_model_parameters(), args.device, args.quick, args.batch_size
        longest, n_requests = args.longest or (24 if quick else 128), args.n_requests or (16 if quick else 64)
        if longest > p.seqlen:
            raise ValueError(f"--longest {longest}: a slot holds {p.seqlen} tokens")
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        model, cached = (
            utils.load_model(c, vocab_size, args.checkpoint).to(dev, args.dtype)
            for c in (GPTlite, GPTlite_Slots)
        )
        generator = torch.Generator().manual_seed(args.seed)
        requests = make_requests(valid_data.to(dev), n_requests, longest, generator)
        lengths = [n for _, n in requests]
        longer = [request for request in requests if request[1] > 1][:4]
        if not longer:
            reason = "no request has a second token, so nothing is from token to token"
            raise ValueError(f"--longest {longest}, --n-requests {n_requests}: {reason}; try larger ones")
        config = {"batch_size": B, "n_requests": n_requests, "longest_request": longest}
        columns = {"capacity": ("capacity 1/s", "{:.2f}"), "goodput": ("goodput 1/s", "{:.2f}")}
        report = rep.Report(args, "serving", model, columns, **config)
        runs = []  # (arrivals, outputs, times) of every run, for the checks

        def timed_step(batch, newcomers):
            with utils.Timer(dev) as timer:
                finished = batch.step(newcomers)
            return finished, timer.seconds

        def waits_of(arrivals, timeout=None):
            """[(TTFT, TPOT)] of the requests, and when the last one ended; with a time-out static batches."""
            batch = SlotBatch(cached, B, p.seqlen, refill=timeout is None)
            runs.append((arrivals, *serve(batch, requests, arrivals, timed_step, timeout)))
            return waiting_times(arrivals, runs[-1][2]), max(tokens[-1] for tokens in runs[-1][2])

        def median_and_tail(waits):
            """p50, p90 and p99 of TTFT and TPOT in ms."""
            columns = {"TTFT": [1000 * ttft for ttft, _ in waits], "TPOT": [1000 * tpot for _, tpot in waits]}
            return {
                f"{name} p{percent}": utils.percentile(column, percent)
                for name, column in columns.items()
                for percent in (50, 90, 99)
            }

        # On an idle server, then with all requests there from the start
        alone = []
        for request in [longer[0], *longer]:  # the first one warms up
            _, times = serve(SlotBatch(cached, 1, p.seqlen), [request], [0.0], timed_step)
            alone += waiting_times([0.0], times)
        ttft, tpot = (utils.percentile([wait[i] for wait in alone[1:] if wait[i] > 0], 50) for i in (0, 1))
        targets = 5 * ttft, 3 * tpot
        policies = {"static, time-out": 2 * ttft, "continuous": None}
        capacity, attained, sweeps = {}, {}, {}
        for policy, timeout in policies.items():
            capacity[policy] = n_requests / waits_of([0.0] * n_requests, timeout)[1]
        for policy, timeout in policies.items():
            attained[policy], sweeps[policy] = {}, []
            for load in (0.3, 1.1) if quick else (0.3, 0.5, 0.7, 0.9, 1.1):
                rate, waits = load * capacity["continuous"], []
                for repeat in range(args.repeats):  # the same draws for both policies and all rates
                    generator = torch.Generator().manual_seed(args.seed + repeat)
                    waits += waits_of(poisson_arrivals(n_requests, rate, generator), timeout)[0]
                attained[policy][rate] = attainment(waits, *targets)
                figures = {"load": load, "requests/s": rate} | median_and_tail(waits)
                sweeps[policy].append(figures | {"meet both": attained[policy][rate]})
            report.sweep(
                f"{policy}: times in ms; load is the share of continuous batching's capacity", sweeps[policy]
            )

        # The first run is checked against the model, the others must equal it
        first = runs[0][1]
        outputs = [prompt.new_tensor(out) for out, (prompt, _) in zip(first, requests, strict=True)]
        margin = max(1e-3, 2 * utils.TOLERANCE[args.dtype])
        same = utils.served_as_alone(model, outputs, requests, margin)
        report.check("each request gets the tokens it gets alone", same)
        for _, later, _ in runs[1:]:  # rounding may decide a tie: then it is looked at again
            outputs = [prompt.new_tensor(out) for out, (prompt, _) in zip(later, requests, strict=True)]
            same = same and (later == first or utils.served_as_alone(model, outputs, requests, margin))
        report.check(f"the same in all {len(runs)} runs, at every load and with both policies", same)
        counts = all([len(tokens) for tokens in times] == lengths for _, _, times in runs)
        report.check("each request is finished exactly once, with as many tokens as it asked for", counts)
        after = all(
            tokens[0] > at for at_all, _, times in runs for at, tokens in zip(at_all, times, strict=True)
        )
        report.check("no request is served before it arrives", after)

        best = {policy: goodput(attained[policy]) for policy in policies}
        shown = {policy: rows[(len(rows) - 1) // 2] for policy, rows in sweeps.items()}  # the middle load
        for policy, row in shown.items():
            report.row(
                f"{policy}, load {row['load']}",
                baseline=policy != "continuous",
                ttft_ms=row["TTFT p50"],
                tpot_ms=row["TPOT p50"],
                tpot_p99_ms=row["TPOT p99"],
                tokens_per_s=capacity[policy] * sum(lengths) / n_requests,
                same_output=same,
                capacity=capacity[policy],
                goodput=best[policy],
            )

        static, ours = policies
        share = capacity[static] / capacity[ours]
        predicted = sum(lengths) / n_requests / expected_longest(lengths, B)
        report.why(
            f"An idle server needs {1000 * ttft:.1f} ms to the first token and {1000 * tpot:.1f} ms for each "
            f"further one; the targets are 5 and 3 times that, {1000 * targets[0]:.0f} and "
            f"{1000 * targets[1]:.0f} ms, for 90% of the requests. Capacity and "
            "tokens/s are those of a queue that is there from the start."
        )
        report.why(
            f"Static batching finishes {share:.0%} of the requests per second that continuous batching does; "
            f"E[length] / E[longest of {B}] predicts {predicted:.0%} for an endless queue. Above such a load "
            "its queue grows as long as requests come, and its times with it; continuous batching has to 1."
        )
        report.why(
            f"Below it a request still waits for the batch before. At load {shown[ours]['load']} half of "
            f"them have their first token after {shown[static]['TTFT p50']:.0f} ms, with continuous batching "
            f"after {shown[ours]['TTFT p50']:.0f} ms; then a token takes {shown[static]['TPOT p50']:.1f} and "
            f"{shown[ours]['TPOT p50']:.1f} ms: newcomers' prompts are computed between those of the others."
        )
        report.why(
            f"Goodput among these loads: {best[ours]:.2f} requests/s, static {best[static]:.2f}. On a server "
            "that is mostly idle both serve a request alone, and static batching adds its time-out "
            f"({1000 * policies[static]:.0f} ms)."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for policy, rows in sweeps.items():
                axes.plot(
                    [row["load"] for row in rows], [row["TTFT p90"] for row in rows], "o-", label=policy
                )
            axes.axhline(1000 * targets[0], linestyle="--", color="grey", label="target")
            axes.set(
                xlabel="load (share of continuous batching's capacity)", ylabel="TTFT p90 (ms)", yscale="log"
            )
            axes.set_title(f"{n_requests} requests, {B} slots, {report.data['config']['device_name']}")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
