"""A queue of requests: how it is drawn, served in several ways in alternation, and timed for each request.

draw_requests() draws what the options name. compare_queue() serves the same requests in several ways that
take the form function(model, requests, batch_size, seqlen) -> (outputs, n_steps); slot_steps() counts the
steps in which such a way gives each request its tokens. waiting_figures() makes the figures of a row from the
times that requests waited (for schedulers inference_clock.py takes them).
"""

import heapq
from collections import namedtuple
from functools import partial
from statistics import median

import torch

from inference_utils import (
    TOLERANCE,
    cache_tensors,
    check_room,
    measure,
    peak_memory_mb,
    percentile,
    served_as_alone,
)
from inference_utils import Method as TimedMethod

COLUMNS = {  # of a report, for what slots do
    "n_steps": ("steps", "{}"),
    "slot_utilisation": ("useful", "{:.0%}"),
    "answer_s": ("answer s", "{:.2f}"),
    "answer_p90_s": ("p90 s", "{:.2f}"),
}


# ---- Requests ----


def make_requests(data, n_requests, seqlen, generator=None):
    """Draws requests that fit seqlen tokens: prompts cut from data, answers of very different lengths.

    Args: data: token ids [N]; seqlen: tokens of the longest request, prompt and answer; generator: a
        torch.Generator on the CPU, to repeat the draw.
    Returns: a list of (prompt [T], n_tokens): T uniform in seqlen / 16 to seqlen / 4, n_tokens uniform in
        seqlen / 16 to 3/4 seqlen (16 to 192 for a context of 256). Raises ValueError for too short a text,
        and for a seqlen below 2.
    """
    if seqlen < 2:
        raise ValueError(f"requests of {seqlen} tokens: a prompt and an answer need at least 2 together")
    shortest, longest = max(seqlen // 16, 1), max(seqlen // 4, 1)
    if len(data) < longest:
        raise ValueError(f"the text has {len(data)} tokens: too short for prompts of {longest}")
    requests = []
    for _ in range(n_requests):
        T = torch.randint(shortest, longest + 1, (), generator=generator).item()
        start = torch.randint(len(data) - T + 1, (), generator=generator).item()
        n_tokens = torch.randint(shortest, seqlen - longest + 1, (), generator=generator).item()
        requests.append((data[start : start + T], n_tokens))
    return requests


def draw_requests(args, text, seqlen):
    """The requests of --n-requests, --longest and --seed, on the device, the same at every call.

    Args: text: of load_text(); seqlen: the model's context. Raises ValueError for requests beyond it, for
        more than a million, and for a batch of them that does not fit the memory that is free.
    """
    if args.longest > seqlen:
        raise ValueError(f"--longest {args.longest}: the context holds {seqlen} tokens")
    if args.n_requests > 1_000_000:
        raise ValueError(f"--n-requests {args.n_requests}: at most a million")
    check_room(min(args.batch_size, args.n_requests) * args.longest, args.device)
    generator = torch.Generator().manual_seed(args.seed)
    return make_requests(text.valid.to(args.device), args.n_requests, args.longest, generator)


def expected_longest(lengths, n_drawn):
    """Mean of the largest of n_drawn of these lengths, drawn without replacement; exact, no sampling."""
    ordered, none_above, mean = sorted(lengths), 1.0, 0.0
    n_drawn = min(n_drawn, len(ordered))
    for rank in range(len(ordered), n_drawn - 1, -1):  # from the longest down
        chosen = n_drawn / rank  # chance that this one is drawn, given that none above it is
        mean += none_above * chosen * ordered[rank - 1]
        none_above *= 1 - chosen
    return mean


def slot_steps(lengths, n_slots, refill=True):
    """The numbers of the steps that give each request its tokens, if all are there from the start: [range].

    Args: lengths: tokens of each answer; refill: True gives a slot that becomes free to the next request
        (continuous batching), False waits until the whole group is finished (static batching).
    """
    free_at, steps = [0] * n_slots, []  # a heap: the step from which on each slot is free
    for i, n_tokens in enumerate(lengths):
        if not refill and i % n_slots == 0:
            free_at = [max(free_at)] * n_slots
        begin = heapq.heappop(free_at)
        heapq.heappush(free_at, begin + n_tokens)
        steps.append(range(begin, begin + n_tokens))
    return steps


def step_ratio(lengths, n_slots):
    """How many times the steps of continuous batching static batching takes for these answers."""
    static, continuous = (slot_steps(lengths, n_slots, refill) for refill in (False, True))
    return max(run.stop for run in static) / max(run.stop for run in continuous)


def slots_in_use(steps):
    """How many requests receive a token in each step, from what slot_steps() gives."""
    return [sum(i in run for run in steps) for i in range(max(run.stop for run in steps))]


# ---- Serving it in several ways ----

# serve(model, requests, n_slots, seqlen) -> (outputs, n_steps); model: whose forwards are the steps; refill:
# as in slot_steps; buffers: a cache of one slot or more as serve() makes it, for its bytes, or None
Way = namedtuple("Way", "name serve model n_slots refill buffers", defaults=[True, None])


def compare_queue(report, model, requests, ways):
    """Serves the same requests in several ways, in alternation: a row and the checks of each, baseline first.

    A request's TTFT counts from the start, when all of them arrive: waiting in the queue is part of it.
    Peak memory is that of the heaviest step: all slots full, with prompts where there is a cache, else with
    whole texts. Args: model: GPTlite, which tells what each request gets alone; ways: list of Way.
    Returns: {name: row}.
    """
    lengths, seqlen, rows = [n for _, n in requests], model.seqlen, {}
    margin = max(1e-3, 2 * TOLERANCE[report.args.dtype])
    timed = [
        TimedMethod(way.name, partial(way.serve, way.model, requests, way.n_slots, seqlen), [way.model])
        for way in ways
    ]
    results = measure(timed, sum(lengths), report.args.repeats)
    for way in ways:
        (outputs, n_steps), steps = results[way.name].output, slot_steps(lengths, way.n_slots, way.refill)
        same = served_as_alone(model, outputs, requests, margin)
        report.check(f"{way.name}: each request gets the tokens it gets alone", same)
        counted = max(run.stop for run in steps)
        report.check(f"{way.name}: {counted} steps, as counted", n_steps == counted)
        sizes = [len(prompt) + (n - 1 if way.model is model else 0) for prompt, n in requests]
        heavy = [(requests[0][0].new_zeros(T), 1) for T in sorted(sizes, reverse=True)[: way.n_slots]]
        kv_bytes = None
        if way.buffers is not None:
            tensors = cache_tensors(way.buffers)
            kv_bytes = sum(t.nbytes for t in tensors) / (way.buffers.n_slots * way.buffers.seqlen)
        rows[way.name] = report.row(
            way.name,
            results[way.name],
            baseline=way is ways[0],
            peak_memory_mb=peak_memory_mb(
                partial(way.serve, way.model, heavy, way.n_slots, seqlen), way.model
            ),
            kv_bytes_per_token=kv_bytes,
            same_output=same,
            n_steps=n_steps,
            slot_utilisation=sum(lengths) / n_steps / way.n_slots,
            **queue_figures(steps, results[way.name].runs_ms),
        )
    return rows


def queue_figures(steps, runs_ms):
    """TTFT and the time until the whole answer is there, of requests that all arrive at the start.

    Args: steps: of slot_steps(); runs_ms: the time of every step, for each run.
    """
    ttft, answers = [], []
    for times in runs_ms:
        ends = torch.tensor(times).cumsum(dim=0).tolist()
        ttft.append(median(ends[run.start] for run in steps if run))
        answers += [ends[run.stop - 1] / 1000 for run in steps if run]
    return {
        "ttft_ms": median(ttft),
        "ttft_ms_spread": (min(ttft), max(ttft)),
        "answer_s": percentile(answers, 50),
        "answer_p90_s": percentile(answers, 90),
    }


def waiting_figures(ttft_runs, gap_runs):
    """Figures of a row from what requests waited: medians, spreads over the runs, and the tail of all runs.

    Args: ttft_runs, gap_runs: for each run the times in ms to first tokens, and from each token to the next.
    The 99th percentile and the worst gap are taken over all gaps of all runs, never over medians.
    """
    ttft = [median(run) for run in ttft_runs]
    tpot = [median(run) for run in gap_runs if run]
    gaps = [gap for run in gap_runs for gap in run]
    return {
        "ttft_ms": median(ttft),
        "ttft_ms_spread": (min(ttft), max(ttft)),
        "tpot_ms": median(gaps) if gaps else None,
        "tpot_ms_spread": (min(tpot), max(tpot)) if gaps else None,
        "tpot_p99_ms": percentile(gaps, 99) if gaps else None,
        "worst_gap_ms": max(gaps) if gaps else None,
    }
