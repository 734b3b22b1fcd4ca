"""What the scripts on serving share: refusals of requests, the scheduler over blocks, measuring workloads.

refusals() says which requests cannot be served; PagedScheduler and serve() are continuous batching over a
BlockPool (gptlite_paged.py). For prefix caches:

serve_chats() serves a workload of data/workloads.py; serve_workload() does so in several ways, times each
request, and checks that no cache changes an output; prompt_alone() times one prompt of which more and more
is found.
"""

from collections import deque
from itertools import cycle
from statistics import median

import torch

import inference_report as rep
import inference_utils as utils
from gptlite_paged import Sequence, choose_tokens


def refusals(requests, batch_size, max_tokens=None):
    """For each request a ValueError that says why it cannot be served, or None. The others are served.

    Args: requests: list of (prompt [T], n_tokens); max_tokens: most tokens of prompt and answer together.
    Raises: ValueError for a batch without slots.
    """
    if batch_size < 1:
        raise ValueError(f"a batch of {batch_size}: it needs at least one slot")
    reasons = []
    for prompt, n_tokens in requests:
        T, reason = len(prompt), None
        if T == 0:
            reason = "the prompt is empty: it needs at least one character"
        elif n_tokens < 0:
            reason = f"{n_tokens} new tokens: their number cannot be negative"
        elif max_tokens is not None and T + n_tokens > max_tokens:
            reason = f"a prompt of {T} and {n_tokens} new tokens do not fit: at most {max_tokens} together"
        reasons.append(reason and ValueError(reason))
    return reasons


def swap_out(pool, sequence):
    """Moves a sequence's keys and values to host memory; returns them [L, blocks, block_size, 2, H, D]."""
    filled = sequence.table[: pool.blocks_for(sequence.done)]
    data = pool.kv[:, filled].cpu()  # a copy: what is indexed by a list is never a view
    pool.release(sequence.table)
    sequence.table = []
    return data


def swap_in(pool, sequence, data):
    """Brings them back, into any free blocks."""
    sequence.table = pool.allocate(data.shape[1])
    pool.kv[:, sequence.table] = data.to(pool.kv.device)


class PagedScheduler:
    """Continuous batching over a BlockPool, first come, first served.

    Args: model: GPTlite_Paged; swap: what becomes of the newest sequence when a running one finds no free
        block: False drops its blocks and computes its tokens anew, True copies them to host memory and back;
        reserve: None takes blocks when they are needed; a function sequence -> n_tokens takes room for so
        many at admission, which is what a contiguous cache does; max_running: sequences at a time at most;
        watermark: share of the pool that admission leaves free, so that those who run can grow;
        temperature: as in choose_tokens.
    """

    def __init__(
        self, model, pool, swap=False, reserve=None, max_running=256, watermark=0.01, temperature=0.0
    ):
        self.model, self.pool, self.swap, self.reserve = model, pool, swap, reserve
        self.max_running, self.temperature = max_running, temperature
        self.spare = 0 if reserve else int(watermark * pool.n_blocks)  # blocks
        self.waiting, self.running, self.swapped = deque(), [], {}
        self.n_preempted = self.n_bytes_swapped = 0

    def n_tokens(self, sequence):
        """For how many more tokens the sequence needs room now."""
        reserved = self.reserve(sequence) - sequence.done if self.reserve else 0
        return max(sequence.pending, reserved)

    def add(self, sequence):
        """Puts a sequence at the end of the queue. Raises ValueError for one that could never run."""
        n_tokens = max(sequence.end - 1, self.n_tokens(sequence))  # the last token is never in the cache
        too_long = n_tokens > self.model.seqlen or self.pool.blocks_for(n_tokens) > self.pool.n_blocks
        if too_long or not sequence.ids:
            raise ValueError(
                f"request {sequence.request}: {n_tokens} tokens do not fit the pool or the context"
            )
        if not sequence.finished:
            self.waiting.append(sequence)

    def preempt(self):
        """The newest sequence gives all its blocks back, and is the next to be admitted. Nothing is lost."""
        sequence = self.running.pop()
        if self.swap:
            self.swapped[sequence] = swap_out(self.pool, sequence)
            self.n_bytes_swapped += self.swapped[sequence].nbytes
        else:
            self.pool.drop(sequence)
        self.waiting.appendleft(sequence)
        self.n_preempted += 1

    def admit(self):
        """Admits waiting sequences, in order, while their tokens so far fit and the watermark is kept."""
        while self.waiting and len(self.running) < self.max_running:
            sequence, spare = self.waiting[0], self.spare if self.running else 0
            total = self.pool.blocks_for(sequence.done + self.n_tokens(sequence))
            if total + spare > len(self.pool.free):
                break
            self.running.append(self.waiting.popleft())
            if sequence in self.swapped:
                swap_in(self.pool, sequence, self.swapped.pop(sequence))
            self.pool.grow(sequence, self.n_tokens(sequence))

    def choose_work(self):
        """What a step computes, [(sequence, n tokens), ...]: all that is pending."""
        return [(sequence, sequence.pending) for sequence in self.running]

    def step(self):
        """One forward over the chosen work; returns the sequences that are finished and leave."""
        n_before = self.n_preempted
        for sequence in list(self.running):  # the oldest first: it always gets on, so all are finished once
            while sequence in self.running and self.pool.n_missing(sequence, 1) > len(self.pool.free):
                self.preempt()
            if sequence in self.running:
                self.pool.grow(sequence, 1)
        if self.n_preempted == n_before:  # else what was just made free would be taken at once
            self.admit()
        complete, logits = self.model.step(self.pool, self.choose_work())
        for sequence, token in zip(complete, choose_tokens(logits, complete, self.temperature), strict=True):
            sequence.ids.append(token)
        done = [sequence for sequence in self.running if sequence.finished]
        for sequence in done:
            self.running.remove(sequence)
            self.pool.drop(sequence)
        return done


def serve(scheduler, requests):
    """Serves requests that are all there from the start.

    Args: requests: list of (prompt [T], n_tokens).
    Returns: for each its prompt and answer [T + n_tokens], or a ValueError that says why it was refused.
    """
    room = min(scheduler.model.seqlen, scheduler.pool.n_blocks * scheduler.pool.block_size)
    outputs = refusals(requests, 1, max_tokens=room + 1)
    for i, (prompt, n_tokens) in enumerate(requests):
        if outputs[i] is None:
            outputs[i] = prompt
            scheduler.add(Sequence(i, prompt.tolist(), len(prompt) + n_tokens))
    while scheduler.waiting or scheduler.running:
        for sequence in scheduler.step():
            outputs[sequence.request] = outputs[sequence.request].new_tensor(sequence.ids)  # [T + n]
    return outputs


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
