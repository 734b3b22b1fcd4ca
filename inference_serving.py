"""What the scripts on prefix caches share about measuring: a workload in several ways, one prompt alone.

serve_chats() serves a workload of data/workloads.py; serve_workload() does so in several ways, times each
request, and checks that no cache changes an output; prompt_alone() times one prompt of which more and more
is found.
"""

from itertools import cycle
from statistics import median

import torch

import inference_report as rep
import inference_utils as utils
from gptlite_paged import Sequence

FIGURES = {  # columns of a report
    "hit_ms": ("hit TTFT", "{:.1f}"),
    "miss_ms": ("miss TTFT", "{:.1f}"),
    "n_found": ("found tokens", "{}"),
    "found_share": ("share found", "{:.0%}"),
    "n_evicted": ("evicted tokens", "{}"),
}


def serve_chats(scheduler, chats, n_new):
    """Serves conversations at the same time: a prompt is all that was said so far and the next message.

    A conversation's next turn joins the end of the queue when its answer is there.
    Returns: (sequences, first_steps): all turns by request number, turn * len(chats) + chat; and for each
        the number of the step that gave its first token. Raises ValueError for answers without tokens.
    """
    if n_new < 1:
        raise ValueError(f"answers of {n_new} tokens: a conversation needs at least 1")
    sequences, first_steps, n_steps = {}, {}, 0
    asked = [(i, list(chat[0])) for i, chat in enumerate(chats)]  # (request, prompt), which will grow
    while asked or scheduler.waiting or scheduler.running:
        for request, prompt in asked:
            sequences[request] = Sequence(request, prompt, len(prompt) + n_new)
            scheduler.add(sequences[request])
        finished, asked = scheduler.step(), []
        for sequence in [*scheduler.running, *finished]:
            first_steps.setdefault(sequence.request, n_steps)
        n_steps += 1
        for sequence in finished:
            turn, i = divmod(sequence.request + len(chats), len(chats))
            if turn < len(chats[i]):
                asked.append((turn * len(chats) + i, sequence.ids + chats[i][turn]))
    order = sorted(sequences)
    return [sequences[request] for request in order], [first_steps[request] for request in order]


def working_set(sequences, block_size):
    """Tokens of the different full blocks in these texts: with as much room nothing has to be evicted."""
    beginnings = {tuple(s.ids[:end]) for s in sequences for end in range(block_size, len(s.ids), block_size)}
    return len(beginnings) * block_size


def each_as_alone(model, sequences, dtype):
    """served_as_alone for sequences. model: GPTlite, without any cache; dtype: whose rounding is a tie."""
    texts = [torch.tensor(sequence.ids, device=model.fc_out.weight.device) for sequence in sequences]
    requests = [(t[: s.n_prompt], len(t) - s.n_prompt) for t, s in zip(texts, sequences, strict=True)]
    return utils.served_as_alone(model, texts, requests, max(1e-3, 2 * utils.TOLERANCE[dtype]))


def serving_figures(scheduler, sequences, first_steps, clocks):
    """What runs of serve_chats show, for a report's row. clocks: the StepClock of each run.

    A request is a hit if at least half of its prompt was found; its time is that of the step that computed
    the rest of its prompt, whatever else was in it.
    """
    found, hits, misses = {}, [], []
    for request, _, n in getattr(scheduler, "found", []):
        found.setdefault(request, n)  # the first admission counts, not one after a preemption
    for sequence, step in zip(sequences, first_steps, strict=True):
        times = hits if found.get(sequence.request, 0) >= sequence.n_prompt / 2 else misses
        times += [clock.steps_ms[step] for clock in clocks]
    later = set(range(clocks[0].n_steps)) - set(first_steps)  # steps without newcomers
    n_generated, pool = sum(len(s.ids) - s.n_prompt for s in sequences), scheduler.pool
    return {
        "ttft_ms": median(hits + misses),
        "hit_ms": median(hits) if hits else None,
        "miss_ms": median(misses) if misses else None,
        "tpot_ms": median(clock.steps_ms[i] for clock in clocks for i in later) if later else None,
        "tokens_per_s": median(1000 * n_generated / clock.total_ms for clock in clocks),
        "forward_tokens": clocks[-1].forward_tokens,
        "n_found": sum(found.values()),
        "found_share": sum(found.values()) / sum(sequence.n_prompt for sequence in sequences),
        "n_evicted": getattr(pool, "n_evicted", 0) * pool.block_size,
        "n_preempted": scheduler.n_preempted,
        "all_free": len(pool.free) == pool.n_blocks and not any(pool.ref),
    }


def serve_workload(report, model, paged, workload, block_size, no_cache, ways, more=lambda pool: {}):
    """Serves a workload in several ways, in alternation: their rows, and checks that no output changes.

    Args: model: GPTlite; paged: GPTlite_Paged, whose forwards are timed; workload: (name, (chats, n_new));
        no_cache: function that makes a scheduler; ways: function of the working set in blocks, returns
        {method: function that makes a scheduler}; more: function pool -> further figures of the row.
    Returns: {method: (scheduler, sequences, figures)}, of the last run and of all runs.
    """
    (name, (chats, n_new)), args = workload, report.args
    sequences, _ = serve_chats(no_cache(), chats, n_new)
    kept, runs, clocks = working_set(sequences, block_size) // block_size, {}, {}
    for _ in range(args.repeats):
        for method, make in ({"no cache": no_cache} | ways(kept)).items():
            scheduler = make()
            with utils.StepClock(paged) as clock:
                runs[method] = scheduler, *serve_chats(scheduler, chats, n_new)
            clocks.setdefault(method, []).append(clock)
    reference, results = [s.ids for s in sequences], {}
    for method, (scheduler, sequences, first_steps) in runs.items():
        baseline, pool = method == "no cache", scheduler.pool
        same = not baseline and [s.ids for s in sequences] == reference
        same = same or each_as_alone(model, sequences, args.dtype)  # where two logits tie
        report.check(f"{name}, {method}: each request gets the tokens it gets alone", same)
        figures = serving_figures(scheduler, sequences, first_steps, clocks[method]) | more(pool)
        figures |= {"pool_blocks": pool.n_blocks * pool.block_size // block_size, "working_set_blocks": kept}
        report.row(f"{name}: {method}", baseline=baseline, same_output=same, **figures)
        results[method] = scheduler, sequences, figures
    return results


def prompt_alone(report, paged, p, schedulers, texts):
    """Times prompts as long as each text, one at a time: n tokens are found, what follows differs each time.

    Args: p: parameters of the model; schedulers: {n: function that makes a scheduler, always over the same
        pool, with room for one}. Adds a table and a check to the report.
    Returns: (ttft, least, cost, limits): time in ms, its lower bound and Cost, {n: ...} each; Ceilings.
    """
    args, T, lengths = report.args, len(texts[0]), list(schedulers)

    def method(n, make):
        others = cycle(texts[1:])

        def run():
            scheduler = make()
            scheduler.add(Sequence(0, texts[0][:n] + next(others)[: T - n], T + 1))
            scheduler.step()
            return scheduler.found

        return utils.Method(n, run, [paged])

    methods = [method(n, make) for n, make in schedulers.items()]
    results = utils.measure(methods, 1, 2 if args.quick else max(args.repeats, 10))
    as_planned = all(m.output == [(0, T, n)] for n, m in results.items())
    report.check(f"of {T} tokens {', '.join(map(str, lengths))} are found", as_planned)
    limits, vocab_size = rep.measure_ceilings(args.device, args.dtype), paged.fc_out.out_features
    ttft = {n: m.ttft_ms for n, m in results.items()}
    cost = {n: rep.forward_cost(p, vocab_size, 1, T - n, n, args.dtype) for n in lengths}
    least = {n: rep.lower_bound_ms(cost[n], limits) for n in lengths}
    names = ("found", "computed", "TTFT ms", "at least ms", "times faster", "GFLOP")
    lines = [(n, T - n, ttft[n], least[n], ttft[0] / ttft[n], cost[n].flops / 1e9) for n in lengths]
    report.sweep(f"A prompt of {T} tokens alone", [dict(zip(names, line, strict=True)) for line in lines])
    return ttft, least, cost, limits
