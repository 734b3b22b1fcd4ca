"""A queue of requests: how it is drawn, served in several ways in alternation, and timed for each request.

draw_requests() draws what the options name. compare_queue() serves the same requests in several ways that
take the form function(model, requests, batch_size, seqlen) -> (outputs, n_steps); slot_steps() counts the
steps in which such a way gives each request its tokens. waiting_figures() makes the figures of a row from the
times that requests waited (for schedulers inference_clock.py takes them), fit_step() tells how the time of
a step grows with its tokens.
"""

import heapq
import math
from collections import namedtuple
from functools import partial
from itertools import pairwise
from statistics import linear_regression, median

import torch

from gptlite_paged import BlockPool, Sequence
from inference_utils import (
    TimedMethod,
    alternating_ms,
    cache_tensors,
    check_room,
    measure,
    peak_memory_mb,
    percentile,
    served_as_alone,
    tie_margin,
)

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
        more than a million, and for a batch whose slots do not fit the memory that is free.
    """
    if args.longest > seqlen:
        raise ValueError(f"--longest {args.longest}: the context holds {seqlen} tokens")
    if args.n_requests > 1_000_000:
        raise ValueError(f"--n-requests {args.n_requests}: at most a million")
    check_room(args.batch_size * args.longest, args.device)
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


def check_served(report, name, model, outputs, requests):
    """Adds a check that each request got the tokens that it gets alone; two logits that tie may swap."""
    margin = tie_margin(report.args.dtype)
    same = served_as_alone(model, outputs, requests, margin)
    return report.check(f"{name}: each request gets the tokens it gets alone", same)


def compare_queue(report, model, requests, ways):
    """Serves the same requests in several ways, in alternation: a row and the checks of each, baseline first.

    A request's TTFT counts from the start, when all of them arrive: waiting in the queue is part of it.
    Peak memory is that of the heaviest step: all slots full, with prompts where there is a cache, else with
    whole texts. Args: model: GPTlite, which tells what each request gets alone; ways: list of Way.
    Returns: {name: row}.
    """
    lengths, seqlen, rows = [n for _, n in requests], model.seqlen, {}
    timed = [
        TimedMethod(way.name, partial(way.serve, way.model, requests, way.n_slots, seqlen), [way.model])
        for way in ways
    ]
    results = measure(timed, sum(lengths), report.args.repeats)
    for way in ways:
        (outputs, n_steps), steps = results[way.name].output, slot_steps(lengths, way.n_slots, way.refill)
        same = check_served(report, way.name, model, outputs, requests)
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


def waiting_times(arrivals, times):
    """[(TTFT, TPOT)] of requests: from arrival to first token, and mean from token to token after it.

    TPOT is 0 for a single token: there is nothing to wait for. Requests without tokens are left out.
    """
    return [
        (tokens[0] - arrival, (tokens[-1] - tokens[0]) / max(len(tokens) - 1, 1))
        for arrival, tokens in zip(arrivals, times, strict=True)
        if tokens
    ]


def check_runs(report, model, requests, runs):
    """Checks of runs of the same requests at any arrivals: tokens, their numbers, and no answer too early.

    Args: runs: list of (arrivals, outputs, times), outputs as lists of token ids. Returns: whether all hold.
    """
    texts = {str(outputs): outputs for _, outputs, _ in runs}  # one, unless rounding decides a tie
    same = True
    for i, outputs in enumerate(texts.values(), 1):
        outputs = [prompt.new_tensor(ids) for ids, (prompt, _) in zip(outputs, requests, strict=True)]
        same &= check_served(report, f"text {i} of {len(runs)} runs", model, outputs, requests)
    counts = all([len(t) for t in times] == [n for _, n in requests] for *_, times in runs)
    report.check("each request is finished exactly once, with as many tokens as it asked for", counts)
    after = all(t[0] > at for ats, _, times in runs for at, t in zip(ats, times, strict=True) if t)
    report.check("no request is served before it arrives", after)
    return same and counts and after


def run_figures(runs):
    """waiting_figures of runs, a list of (arrivals, outputs, times), times in s."""
    first = [[1000 * (t[0] - at) for at, t in zip(ats, times, strict=True) if t] for ats, _, times in runs]
    gaps = [[1000 * (b - a) for t in times for a, b in pairwise(t)] for *_, times in runs]
    return waiting_figures(first, gaps)


def load_figures(waits, max_ttft, max_tpot):
    """Percentiles of the waits of requests, [(TTFT, TPOT)] in s, and the share that meets both targets."""
    figures = {}
    for name, seconds in zip(("TTFT", "TPOT"), zip(*waits, strict=True), strict=True):
        figures |= {f"{name} p{percent}": 1000 * percentile(seconds, percent) for percent in (50, 90, 99)}
    met = [ttft <= max_ttft and tpot <= max_tpot for ttft, tpot in waits]
    return figures | {"meet both": sum(met) / len(met)}


def goodput(attained, share=0.9):
    """The highest rate of {rate: share of its requests that meet both targets} that reaches share, or 0."""
    return max((rate for rate, reached in attained.items() if reached >= share), default=0.0)


def gaps_between(clock, received, start, stop=math.inf):
    """Times in ms from each token to the next, for tokens of steps start to stop - 1.

    Args: clock: a ServingClock; received: for each of the first requests, the steps that gave its tokens.
    """
    gaps = []
    for i, steps in enumerate(received):
        pairs = zip(steps[1:], pairwise(clock.received.get(i, [])), strict=True)
        gaps += [b - a for step, (a, b) in pairs if start <= step < stop]
    return gaps


def fit_step(paged, n_running, text_len, repeats):
    """What a step of n_running single tokens and a piece of a prompt takes, in texts of text_len tokens.

    Returns: (t0, slope) in ms: about t0 + slope * n for n tokens in all, by the least squares of a few sizes.
    """
    pool = BlockPool(paged, (n_running + 1) * -(-text_len // 16))
    texts = [Sequence(i, [0] * text_len, text_len + 1) for i in range(n_running + 1)]
    for sequence in texts:
        pool.grow(sequence, text_len)

    def step(n_piece):
        work = [(s, 1) for s in texts[:-1]] + [(texts[-1], n_piece)] * (n_piece > 0)
        for sequence, n in work:
            sequence.done = text_len - n
        paged.step(pool, work)

    sizes = {n_running + n: partial(step, n) for n in (0, 8, 24, 56, 120) if n <= text_len}
    times = alternating_ms(sizes, repeats, pool.kv.device)
    slope, t0 = linear_regression(list(times), list(times.values()))
    return t0, slope
