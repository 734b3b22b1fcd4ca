"""Serving in real time over several processes: requests that come, replicas that do everything, and times.

The clock is that of the machine (time.monotonic is one for all its processes), so a start that rank 0 sets
holds for all ranks. `receive_tokens` notes when a text got its tokens; `serve_replica` is what one of several
equal replicas does; `serve_merged` puts what the ranks return together. The technique that is compared with
replicas is in main_disaggregation.py. `start_processes` starts replicas that may die, for
more/routing_processes.py.
"""

import contextlib
import multiprocessing
import signal
import time
from collections import deque, namedtuple
from functools import partial
from statistics import median

import torch

from gptlite_paged import BlockPool, Sequence
from inference_queue import goodput, load_figures, run_figures, waiting_times
from inference_scheduling import PagedScheduler, refusals
from inference_utils import served_as_alone, tie_margin
from linear_packed import pack_linears


def since(start):
    """Seconds since a time of time.monotonic()."""
    return time.monotonic() - start


Started = namedtuple("Started", "number process pipe")


@contextlib.contextmanager
def start_processes(n, function, *args):
    """with start_processes(n, function, *args) as started: n processes that each run function(pipe, *args).

    They live and die on their own, unlike the ranks of inference_distributed.py: a pipe closes at both ends
    when either process dies. Afterwards none is left. Ctrl-C reaches this process alone.
    """
    context, started = multiprocessing.get_context("spawn"), []
    try:
        for i in range(n):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_in_process, args=(function, theirs, *args), daemon=True)
            process.start()
            theirs.close()  # the only other end is the process's
            started.append(Started(i, process, ours))
        yield started
    finally:
        for one in started:
            one.pipe.close()
        for one in started:
            one.process.join(2)
            one.process.kill()
            one.process.join()


def run_in_process(function, pipe, *args):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    function(pipe, *args)


def keep_model(team, model, device):
    """Every rank keeps the model as team.kept.model, on a device of its own where there are several."""
    if device.type == "cuda":
        device = torch.device("cuda", team.rank % torch.cuda.device_count())
    team.kept.model = pack_linears(model.to(device))


def receive_tokens(scheduler, times, clock):
    """One step of a scheduler; adds to times {request: [when]} who got a token. Returns who is finished."""
    finished = scheduler.step()
    now = clock()
    for sequence in [*scheduler.running, *finished]:
        received = times.setdefault(sequence.request, [])
        if len(sequence.ids) - sequence.n_prompt > len(received):
            received.append(now)
    return finished


class BudgetScheduler(PagedScheduler):
    """PagedScheduler whose steps have at most `budget` tokens, as in main_chunked_prefill.py.

    One for each text that generates, what is left for pieces of prompts; None: whole prompts beside them.
    """

    budget = None

    def choose_work(self):
        if self.budget is None:
            return super().choose_work()
        work = [(sequence, 1) for sequence in self.running if sequence.pending == 1]
        left = self.budget - len(work)
        for sequence in self.running:
            if sequence.pending > 1 and left > 0:
                work.append((sequence, min(sequence.pending, left)))
                left -= work[-1][1]
        return work


def serve_replica(team, requests, arrivals, start, n_slots, budget=None, temperature=0.0):
    """One of W replicas, on every rank: serves every W-th request as it arrives, prompt and answer.

    Args: requests: list of (prompt [T], n_tokens); arrivals: when they come, in s after start, ascending;
        n_slots: texts at a time; budget: of BudgetScheduler.
    Returns: {request: (token ids, [when each token of the answer was there])}.
    """
    model, clock, answers, times = team.kept.model, partial(since, start), {}, {}
    pool = BlockPool(model, n_slots * -(-model.seqlen // 16))
    scheduler = BudgetScheduler(model, pool, max_running=n_slots, watermark=0.0, temperature=temperature)
    scheduler.budget = budget
    coming = deque(range(team.rank, len(requests), team.world_size))
    while coming or scheduler.waiting or scheduler.running:
        while coming and arrivals[coming[0]] <= clock():
            i = coming.popleft()
            prompt, n_tokens = requests[i]
            scheduler.add(Sequence(i, prompt.tolist(), len(prompt) + n_tokens))
        if scheduler.waiting or scheduler.running:
            for sequence in receive_tokens(scheduler, times, clock):
                answers[sequence.request] = sequence.ids, times[sequence.request]
        elif coming:
            time.sleep(max(arrivals[coming[0]] - clock(), 0.0))
    return answers


def check_servable(requests, seqlen):
    """Raises ValueError for the first request that no replica could serve."""
    for reason in filter(None, refusals(requests, 1, max_tokens=seqlen + 1)):
        raise reason


def serve_merged(team, serve, requests, arrivals, *args, **options):
    """Serves requests on all ranks with serve(team, requests, arrivals, start, ...), called on rank 0.

    Returns: (outputs, times): for each request its token ids as a list and when it received its tokens. Of a
        request that several ranks know, the first token counts where it was there first, the rest of the
        times is that of the rank that went on.
    """
    check_servable(requests, team.kept.model.seqlen)
    start = time.monotonic() + 0.05  # when every rank has heard of it
    answers = {i: (prompt.tolist(), []) for i, (prompt, _) in enumerate(requests)}
    for found in team.gather(partial(serve, **options), requests, arrivals, start, *args):
        for i, (ids, times) in found.items():
            first = min(times[:1] + answers[i][1][:1])
            longer = max(answers[i], (ids, times), key=lambda answer: len(answer[0]))
            answers[i] = longer[0], [first, *longer[1][1:]]
    outputs, times = zip(*(answers[i] for i in range(len(requests))), strict=True)
    return list(outputs), list(times)


def draw_workload(text, n_requests, prompt_len, n_tokens, seed):
    """Requests with prompts and answers of about these lengths, a quarter more or less: [(prompt [T], n)]."""
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for row in text.prompts(n_requests, max(5 * prompt_len // 4, 1)).cpu():
        T, n = (
            torch.randint(max(3 * size // 4, 1), 5 * size // 4 + 1, (), generator=generator).item()
            for size in (prompt_len, n_tokens)
        )
        requests.append((row[:T], n))
    return requests


def draw_arrivals(n_requests, rate, seed):
    """Arrival times in s, ascending, of independent requests (Poisson), `rate` a second."""
    uniform = torch.rand(n_requests, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (-torch.log1p(-uniform) / rate).cumsum(dim=0).tolist()


# ---- Ways to serve, side by side ----

COLUMNS = {
    "first_gap_ms": ("first gap ms", "{:.1f}"),
    "worst_gap_ms": ("worst ms", "{:.1f}"),
    "goodput": ("goodput 1/s", "{:.2f}"),
}


def compare_ways(report, team, plain, ways, workloads, loads, n_slots):
    """Serves workloads in several ways, in alternation: a row of each, the first way being the baseline.

    First all requests are there at once: tokens/s, and the baseline's requests per second, of which the loads
    are shares. Then they arrive at random; the figures of a row are those of the last load, its gaps
    included; goodput is the highest rate at which 90% of the requests meet both targets, 5 times the first
    and 3 times the mean further token of a request alone.

    Args: plain: GPTlite, which tells what each request gets alone; ways: {name: (function for serve_merged,
        its options)}; workloads: {name: requests}. Adds two checks. Returns {(workload, way): row}.
    """
    n_runs, seed, rows, same, timely = report.args.repeats, report.args.seed, {}, True, True
    base = next(iter(ways))
    for workload, requests in workloads.items():
        lengths, known = [n for _, n in requests], {}

        def run(way, arrivals, requests=requests):
            serve, options = ways[way]
            return arrivals, *serve_merged(team, serve, requests, arrivals, n_slots, **options)

        alone = [run(base, [0.0], [max(requests, key=lambda r: r[1])]) for _ in range(3)][1:]
        waits = [waiting_times(arrivals, times)[0] for arrivals, _, times in alone]
        ttft, tpot = (min(values) for values in zip(*waits, strict=True))
        runs, attained, rate = {}, {way: {} for way in ways}, 0.0
        for load in (None, *loads):
            for repeat in range(n_runs):
                arrivals = [0.0] * len(requests)
                if load is not None:
                    arrivals = draw_arrivals(len(requests), load * rate, seed + repeat)
                for way in ways:
                    runs.setdefault((way, load), []).append(run(way, arrivals))
            if load is None:
                rate = len(requests) / median(max(map(max, times)) for *_, times in runs[base, None])
            for way in ways if load is not None else ():
                waits = [w for at, _, times in runs[way, load] for w in waiting_times(at, times)]
                attained[way][load * rate] = load_figures(waits, 5 * ttft, 3 * tpot)["meet both"]
        for way in ways:
            mine = [one for load in (None, *loads) for one in runs[way, load]]
            for at, outputs, times in mine:
                if str(outputs) not in known:
                    texts = [
                        prompt.new_tensor(ids) for ids, (prompt, _) in zip(outputs, requests, strict=True)
                    ]
                    known[str(outputs)] = served_as_alone(
                        plain, texts, requests, tie_margin(report.args.dtype)
                    )
                same &= known[str(outputs)]
                timely &= all(
                    len(t) == n and t == sorted(t) and (n == 0 or t[0] > at[i])
                    for i, (t, n) in enumerate(zip(times, lengths, strict=True))
                )
            speeds = [sum(lengths) / max(map(max, times)) for *_, times in runs[way, None]]
            last = runs[way, loads[-1]]
            gaps = [1000 * (t[1] - t[0]) for *_, times in last for t in times if len(t) > 1]
            figures = run_figures(last) | {"first_gap_ms": median(gaps) if gaps else None}
            p99 = [run_figures([one])["tpot_p99_ms"] for one in last]
            figures["tpot_p99_ms_spread"] = None if None in p99 else (min(p99), max(p99))
            figures |= {"tokens_per_s": median(speeds), "tokens_per_s_spread": (min(speeds), max(speeds))}
            figures |= {"goodput": goodput(attained[way]), "same_output": known[str(last[-1][1])]}
            rows[workload, way] = report.row(f"{workload}: {way}", None, way == base, **figures)
    report.check("each request gets the tokens it gets alone, in each way", same)
    report.check("each token is there once, in order, and none before its request", timely)
    return rows
