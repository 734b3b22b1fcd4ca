"""What the scripts on serving share: prefix caches over whole workloads, and one prompt alone.

serve_workloads() serves those of data/workloads.py in several ways and checks that no cache changes an
output; prompts_alone() times one prompt of which more and more is found. The schedulers are in
inference_scheduling.py, the times of requests in inference_clock.py; a script finds both here as well.
"""

from functools import partial
from itertools import cycle
from statistics import median

import torch

from gptlite_paged import Sequence
from inference_clock import ServingClock, clock_figures, measure_serving, pool_usage, usage_figures
from inference_cost import forward_cost, lower_bound_ms
from inference_scheduling import LongestFirstScheduler, PagedScheduler, SlotScheduler, refusals, serve  # noqa: F401
from inference_utils import parameters_of, peak_memory_mb, sample_prompts, served_as_alone, tie_margin

COLUMNS = {  # of a report; hit, miss: from admission to first token
    "hit_ms": ("hit ms", "{:.1f}"),
    "miss_ms": ("miss ms", "{:.1f}"),
    "n_found": ("found tokens", "{}"),
    "found_share": ("share found", "{:.0%}"),
    "n_evicted": ("evicted tokens", "{}"),
}


def serve_queue(report, plain, makers, requests):
    """Serves a queue that is there from the start with several schedulers over blocks, in alternation.

    The warm-up is the pass in which memory is counted, the pool's included. Adds two checks for each.
    Args: plain: GPTlite, which tells what each request gets alone; makers: {name: function that makes a
        scheduler}; requests: list of (prompt [T], n_tokens).
    Returns: {name: (figures of a row, scheduler, what pool_usage observed)} of the last run.
    """
    run, peaks, results = partial(serve, requests=requests), {}, {}
    for name, make in makers.items():
        peaks[name] = peak_memory_mb(lambda make=make: run(make()), make().model)
    served = measure_serving(makers, run, report.args.repeats, pool_usage)
    for name, (scheduler, outputs, clocks) in served.items():
        same = served_as_alone(plain, outputs, requests, tie_margin(report.args.dtype))
        report.check(f"{name}: each request gets the tokens it gets alone", same)
        figures = clock_figures(clocks) | {"same_output": same, "peak_memory_mb": peaks[name]}
        if hasattr(scheduler, "pool"):
            report.check(f"{name}: at the end all blocks are free", all_free(scheduler.pool))
            figures |= {"n_preempted": scheduler.n_preempted, **usage_figures(clocks[-1].observed)}
            figures["kv_bytes_per_token"] = scheduler.pool.kv[:, 0, 0].nbytes
        results[name] = figures, scheduler, clocks[-1].observed
    return results


def serve_chats(scheduler, chats, n_new):
    """Serves conversations at the same time: a prompt is all that was said so far and the next message.

    A conversation's next turn joins the end of the queue when its answer is there.
    Returns: the sequences of all turns by request number, turn * len(chats) + chat. Raises ValueError for
        answers without tokens.
    """
    if n_new < 1:
        raise ValueError(f"answers of {n_new} tokens: a conversation needs at least 1")
    sequences, asked = {}, [(i, list(chat[0])) for i, chat in enumerate(chats)]  # (request, prompt)
    while asked or scheduler.waiting or scheduler.running:
        for request, prompt in asked:
            sequences[request] = Sequence(request, prompt, len(prompt) + n_new)
            scheduler.add(sequences[request])
        asked = []
        for sequence in scheduler.step():
            turn, i = divmod(sequence.request + len(chats), len(chats))
            if turn < len(chats[i]):
                asked.append((turn * len(chats) + i, sequence.ids + chats[i][turn]))
    return [sequences[request] for request in sorted(sequences)]


def working_set(sequences, block_size):
    """Different full blocks in these texts: with room for as many nothing has to be evicted."""
    ends = range(block_size, max(len(s.ids) for s in sequences), block_size)
    return len({tuple(s.ids[:end]) for s in sequences for end in ends if end < len(s.ids)})


def each_as_alone(model, sequences, dtype):
    """served_as_alone for sequences. model: GPTlite, without any cache; dtype: whose rounding is a tie."""
    texts = [torch.tensor(sequence.ids, device=model.fc_out.weight.device) for sequence in sequences]
    requests = [(t[: s.n_prompt], len(t) - s.n_prompt) for t, s in zip(texts, sequences, strict=True)]
    return served_as_alone(model, texts, requests, tie_margin(dtype))


def all_free(pool):
    """Whether nobody uses a block of the pool any more."""
    return len(pool.free) == pool.n_blocks and not any(pool.ref)


def found_figures(scheduler, sequences, clocks):
    """What was found, and how long a request takes from its admission to its first token, for a row.

    A request is a hit if at least half of its prompt was found.
    """
    found, times = {}, {True: [], False: []}
    for request, _, n in scheduler.found:
        found.setdefault(request, n)  # the first admission counts, not one after a preemption
    n_prompt = {sequence.request: sequence.n_prompt for sequence in sequences}
    for clock in clocks:
        for request, ms in clock.waits(clock.begun).items():
            times[found[request] >= n_prompt[request] / 2].append(ms)
    pool = scheduler.pool
    return {
        "hit_ms": median(times[True]) if times[True] else None,
        "miss_ms": median(times[False]) if times[False] else None,
        "n_found": sum(found.values()),
        "found_share": sum(found.values()) / sum(n_prompt.values()),
        "n_evicted": getattr(pool, "n_evicted", 0) * pool.block_size,
        "pool_tokens": pool.n_blocks * pool.block_size,
        **{f"n_{level}": n for level, n in getattr(pool, "n_loaded", {}).items()},  # more/radix_offload.py
    }


def serve_workloads(report, plain, workloads, block_size, no_cache, ways):
    """Serves workloads in several ways, in alternation: their rows, and checks that no output changes.

    Args: plain: GPTlite, which tells what each request gets alone; workloads: {name: (chats, n_new)};
        no_cache: function that makes a scheduler; ways: function of the working set in blocks, returns
        {method: function that makes a scheduler}.
    Returns: {(workload, method): row} and {(workload, method): (scheduler, sequences)} of the last run.
    """
    rows, last = {}, {}
    for name, (chats, n_new) in workloads.items():
        run = partial(serve_chats, chats=chats, n_new=n_new)
        sequences = run(no_cache())  # also the warm-up
        reference, kept = [s.ids for s in sequences], working_set(sequences, block_size)
        right, counted, free = each_as_alone(plain, sequences, report.args.dtype), True, True
        served = measure_serving({"no cache": no_cache} | ways(kept), run, report.args.repeats)
        for method, (scheduler, sequences, clocks) in served.items():
            same = right and [s.ids for s in sequences] == reference
            same = same or each_as_alone(plain, sequences, report.args.dtype)  # where two logits tie
            right, free = right and same, free and all_free(scheduler.pool)
            n_work = sum(n - n_found - 1 for _, n, n_found in scheduler.found)
            n_work += sum(len(s.ids) - s.n_prompt for s in sequences)
            counted = counted and clocks[-1].forward_tokens == n_work
            figures = clock_figures(clocks) | found_figures(scheduler, sequences, clocks)
            figures |= {"working_set": kept * block_size}
            baseline = method == "no cache"
            rows[name, method] = report.row(
                f"{name}: {method}", baseline=baseline, same_output=same, **figures
            )
            last[name, method] = scheduler, sequences
        report.check(f"{name}: each request gets the tokens it gets alone, in each way", right)
        report.check(f"{name}: a token that is found is one computed less", counted)
        report.check(f"{name}: at the end all blocks are free and all reference counts zero", free)
    return rows, last


def distinct_texts(data, n_texts, n_tokens):
    """Texts cut from token ids [N] at even distances, as lists; no two of them begin alike."""
    return [[i, *text[1:].tolist()] for i, text in enumerate(sample_prompts(data, n_texts, n_tokens))]


def prompts_alone(report, paged, texts, makers, what="found", name="{} tokens found"):
    """Times prompts as long as each text, one at a time; what follows the n tokens that are found differs.

    Args: texts: of distinct_texts, the first one begins every prompt; makers: {label: (n, function that makes
        a scheduler whose pool has room for one text; from the second prompt on it finds n tokens)}; what:
        the heading of the labels; name: how a label is called in a sentence. Adds a table and a check.
    Returns: {label: {"method", "ttft_ms", "ttft_ms_spread", "cost"}}.
    """
    T, p, V = len(texts[0]), parameters_of(paged), paged.fc_out.out_features
    first, others, times, found = texts[0], cycle(texts[1:]), {label: [] for label in makers}, True
    for repeat in range(1 + (2 if report.args.quick else max(report.args.repeats, 10))):
        for label, (n, make) in makers.items():
            scheduler = make()
            with ServingClock(scheduler) as clock:
                scheduler.add(Sequence(0, first[:n] + next(others)[: T - n], T + 1))
                scheduler.step()
            if repeat > 0:
                times[label] += clock.waits(clock.arrived).values()
                found = found and scheduler.found == [(0, T, n)]
    report.check(f"of {T} tokens {', '.join(str(n) for n, _ in makers.values())} are found", found)
    rows, lines = {}, []
    for label, ms in times.items():
        n = makers[label][0]
        cost = forward_cost(p, V, 1, T - n, n, report.args.dtype)
        rows[label] = {"method": name.format(label), "ttft_ms": median(ms), "cost": cost}
        rows[label]["ttft_ms_spread"] = min(ms), max(ms)
        line = {what: label, "computed": T - n, "TTFT ms": median(ms)}
        line["at least ms"] = lower_bound_ms(cost, report.ceilings())
        line["times faster"] = next(iter(rows.values()))["ttft_ms"] / line["TTFT ms"]
        lines.append(line | {"GFLOP": cost.flops / 1e9})
    report.sweep(f"A prompt of {T} tokens alone", lines)
    return rows
