"""Routing over real processes: the policies of main_cache_routing.py, with an engine in each replica.

Each replica is a process with a model, a prefix cache of blocks and continuous batching, on one thread. The
router sends it requests through a pipe and hears of every token, so it knows the queues; what a cache holds
it guesses from what it sent. A replica that dies closes its pipe, one that hangs is silent for too long: its
requests go to the others, which go on behind the tokens that were received, and the router guesses anew.

Exact: every request gets the tokens it gets alone, also one that moved. Wins and loses as the policies do
that are simulated; real replicas share the memory of a machine as well, and a pipe takes time. Left out:
starting a new replica, and refusing a request that ends each replica that it is sent to.

Run: python more/routing_processes.py            (--n-replicas 3, --load 0.5: replicas half as busy)

Source: Zheng et al., SGLang, 2024 (its router, release v0.4); Srivatsa et al., Preble, 2024.
"""

import contextlib
import pickle
import select
import time
from collections import Counter, deque
from multiprocessing.connection import wait
from types import SimpleNamespace

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_paged import Sequence
from inference_scheduling import PagedScheduler
from linear_packed import pack_linears
from main_block_cache import BlockCache


def run_replica(pipe, model, device, n_blocks, block_size, max_running):
    """What the process of a replica does, until the router closes the pipe or is gone.

    It receives ("serve", number, ids, end, n_prompt), ("fresh",) for an empty cache, and ("call", function,
    *args), and sends what function(model, *args) returns. After each step it sends the tokens that there are
    [(number, token)], what was found of requests that began [(number, n_tokens)], and how many it computed.

    Args: model: a pickled GPTlite_Paged; n_blocks, block_size: of its BlockCache; max_running: requests.
    """
    torch.set_num_threads(1)
    model, computed = pack_linears(pickle.loads(model).to(device)), []
    model.register_forward_pre_hook(lambda _, args: computed.append(args[0].numel()))

    def empty():
        pool = BlockCache(model, n_blocks, block_size)
        return PagedScheduler(model, pool, max_running=max_running, watermark=0.0)

    scheduler = empty()
    with contextlib.suppress(EOFError, OSError):
        while True:
            while pipe.poll(0 if scheduler.waiting or scheduler.running else None):  # None: waits for one
                kind, *rest = pipe.recv()
                if kind == "serve":
                    scheduler.add(Sequence(*rest))
                elif kind == "fresh":
                    scheduler = empty()
                else:
                    pipe.send(rest[0](model, *rest[1:]))
            computed.clear()
            n_begun = len(scheduler.found)
            served = [*scheduler.step(), *scheduler.running]
            found = [(number, n) for number, _, n in scheduler.found[n_begun:]]
            pipe.send(([(one.request, one.ids[-1]) for one in served], found, sum(computed)))


def call_all(replicas, function, *args):
    """function(model, *args) in all replicas at once: what each returns."""
    for replica in replicas:
        replica.pipe.send(("call", function, *args))
    return [replica.pipe.recv() for replica in replicas]


class Router:
    """Sends requests to replicas as they arrive, and brings them to the others when a replica is lost.

    Args: replicas: of start_processes(), which do run_replica; their caches are emptied; make_policy: from
        their number to an object with choose(request, loads), as in main_cache_routing.py; patience: for how
        many s a replica that has work may be silent.
    """

    def __init__(self, replicas, make_policy, patience=20.0):
        self.replicas, self.alive, self.patience = replicas, [*replicas], patience
        self.make_policy, self.policy, self.n_moved = make_policy, make_policy(len(replicas)), 0
        for replica in replicas:
            replica.pipe.send(("fresh",))

    def serve(self, requests, prompts):
        """Serves each Request at its time, in s from now. Args: prompts: their token ids, lists.

        Returns: texts, prompt and answer of each; the run as inference_routing.py takes it: what each replica
        found, sent and computed, the requests, and the number of the replica that finished each.
        Raises ChildProcessError, an OSError, when no replica is left.
        """
        self.requests, self.texts = requests, [list(ids) for ids in prompts]
        coming, start = deque(range(len(requests))), time.monotonic()
        self.work, self.heard = {replica: set() for replica in self.alive}, {}
        self.times, self.found, self.chosen, self.n_computed = [[] for _ in requests], {}, {}, Counter()
        while coming or any(self.work.values()):
            now = time.monotonic() - start
            while coming and requests[coming[0]].at <= now:
                self.send(coming.popleft(), now)
            until = requests[coming[0]].at if coming else now + self.patience
            ready = wait([replica.pipe for replica in self.alive], max(min(until - now, self.patience), 0.0))
            now = time.monotonic() - start
            for replica in [*self.alive]:
                if replica in self.alive and replica.pipe in ready:
                    self.hear(replica, now)
                elif self.work.get(replica) and now - self.heard[replica] > self.patience:
                    self.lose(replica, now)
        served = []
        for replica in self.replicas:
            mine = [i for i, chosen in self.chosen.items() if chosen == replica.number]
            n_found, received = {i: self.found[i] for i in mine}, {i: self.times[i] for i in mine}
            n_computed = self.n_computed[replica]
            served.append(SimpleNamespace(n_found=n_found, received=received, n_computed=n_computed))
        return self.texts, (served, requests, [self.chosen[i] for i in range(len(requests))])

    def send(self, i, now):
        """Sends request i, with the tokens that it has, to the replica that the policy chooses."""
        request = self.requests[i]
        message = "serve", i, self.texts[i], request.n_prompt + request.n_new, request.n_prompt
        while self.alive:
            loads = [len(self.work[replica]) for replica in self.alive]
            replica = self.alive[self.policy.choose(request, loads)]
            with contextlib.suppress(OSError):
                if select.select([], [replica.pipe], [], 0)[1]:  # else it is full: the replica does not read
                    replica.pipe.send(message)
                    if not self.work[replica]:
                        self.heard[replica] = now  # it had nothing to say
                    self.work[replica].add(i)
                    self.chosen[i] = replica.number
                    return
            self.lose(replica, now)
        raise ChildProcessError("no replica is left: all have ended")

    def hear(self, replica, now):
        """Takes what a replica tells after a step, or that it has died."""
        try:
            tokens, found, n_computed = replica.pipe.recv()
        except (EOFError, OSError):
            self.lose(replica, now)
            return
        self.heard[replica] = now
        self.n_computed[replica] += n_computed
        for i, n_tokens in found:
            self.found.setdefault(i, n_tokens)
        for i, token in tokens:
            self.texts[i].append(token)
            self.times[i].append(now)
            if len(self.times[i]) == self.requests[i].n_new:
                self.work[replica].remove(i)

    def lose(self, replica, now):
        """Ends a replica and sends its requests to those that are left."""
        replica.process.kill()  # one that hangs must not wake up
        self.alive.remove(replica)
        if self.alive:
            self.policy = self.make_policy(len(self.alive))
        for i in sorted(self.work.pop(replica)):
            self.n_moved += 1
            self.send(i, now)


if __name__ == "__main__":
    from collections import defaultdict
    from functools import partial
    from itertools import accumulate, product
    from statistics import mean
    from threading import Timer

    import inference_report as harness
    import inference_routing as routing
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_paged import GPTlite_Paged
    from inference_queue import fit_step
    from inference_replicas import start_processes
    from inference_utils import served_as_alone, tie_margin
    from main_cache_routing import CacheAware, LeastLoaded, Replica, RoundRobin, make_request, serve

    parser = harness.options(__doc__, 2, quick={"n_requests": 8, "n_tokens": 4}, n_requests=60, n_tokens=16)
    parser.add_argument("--n-replicas", type=harness.positive_int, default=2, help="processes that serve")
    parser.add_argument("--load", type=harness.positive, default=0.8, help="share of capacity without caches")
    with harness.script(parser) as args:
        text, n, n_new, n_requests = harness.load_text(args), args.n_replicas, args.n_tokens, args.n_requests
        plain, paged = harness.load_models(args, GPTlite, GPTlite_Paged, packed=False)
        T, size, n_blocks, n_running = 200, 16, 80, 4
        if not (T + n_new <= plain.seqlen and 2 <= n <= 64 and n_requests <= 10_000 and args.load >= 0.01):
            most = f"10,000 requests and answers of {plain.seqlen - T} tokens at most"
            raise ValueError(f"2 to 64 replicas, a load from 0.01 on, {most}")
        columns = {"predicted_ms": ("simulated", "{:.0f}"), **routing.COLUMNS}
        report = harness.Report(args, "routing over processes", paged, columns, n_replicas=n, load=args.load)
        pieces = text.prompts(n_requests + routing.N_GROUPS, T).tolist()
        beside = n_blocks - 2 * n_running  # what answers leave of the cache
        balanced = partial(CacheAware, n_blocks=beside)
        policies = {"round robin": RoundRobin, "least loaded": lambda _n: LeastLoaded()}
        policies |= {"longest prefix": partial(balanced, max_difference=float("inf")), "balanced": balanced}
        kinds = {"skewed": "round robin"} | ({} if args.quick else {"bursts": "longest prefix"})
        real, guessed, texts, rows = defaultdict(list), defaultdict(list), set(), {}
        sizes = pickle.dumps(paged.cpu()), args.device, n_blocks, size, n_running
        with start_processes(n, run_replica, *sizes) as replicas:
            fits = call_all(replicas, fit_step, n_running, T, 3)  # at once, as they will run
            t0, slope = (max(mean(ms), 1e-3) / 1000 for ms in zip(*fits, strict=True))
            rate = args.load * n / routing.request_seconds(t0, slope, T, n_new, n_running)
            for kind, i in product(kinds, range(args.repeats)):
                drawn = routing.draw_prompts(pieces, n_requests, kind, args.seed + i)
                asked = enumerate(zip(accumulate(gap / rate for _, gap in drawn), drawn, strict=True))
                requests = [make_request(j, at, ids, n_new, size) for j, (at, (ids, _)) in asked]
                prompts = [ids for ids, _ in drawn]
                for name, make in policies.items():
                    outputs, run = Router(replicas, make).serve(requests, prompts)
                    texts |= {*map(tuple, outputs)}
                    real[kind, name].append(run)
                    simulated = [Replica(t0, slope, beside, size, n_running) for _ in range(n)]
                    guessed[kind, name].append((simulated, requests, serve(simulated, make(n), requests)))
            router, when = Router(replicas, balanced), requests[n_requests // 2].at
            Timer(when, replicas[0].process.kill).start()  # and the last requests once more
            outputs, run = router.serve(requests, prompts)
        report.check("no process is left", not any(replica.process.is_alive() for replica in replicas))

        texts = torch.tensor([*texts | {*map(tuple, outputs)}], device=args.device)  # [n, T + n_new]
        same = served_as_alone(plain, texts, [(ids[:T], n_new) for ids in texts], tie_margin(args.dtype))
        report.check("each request gets the tokens it gets alone, wherever it runs", same)
        for kind, name in real:
            guess, figures = (routing.routing_figures(runs[kind, name]) for runs in (guessed, real))
            figures["predicted_ms"], figures["predicted_found"] = guess["ttft_ms"], guess["found_share"]
            row = partial(report.row, f"{kind}: {name}", None, name == "round robin", same_output=same)
            rows[kind, name] = row(**figures)
        for kind, other in kinds.items():
            routing.check_runs(report, kind, [one for name in policies for one in real[kind, name]])
            draws = routing.by_draw("balanced", other, real[kind, "balanced"], real[kind, other])
            work = words.compare(rows[kind, "balanced"], rows[kind, other], "forward_tokens")
            report.why(words.about(kind, draws) + work)
        report.why(routing.as_simulated(rows.values()))
        figures = routing.routing_figures([run]) | {"same_output": same}
        dies = report.row(f"{kind}: balanced, one dies", None, **figures)
        report.why(routing.moved(router.n_moved) + words.compare(dies, rows[kind, "balanced"], "ttft_ms"))
        points = {f"{k}: {name}": (row["predicted_ms"], row["ttft_ms"]) for (k, name), row in rows.items()}
        report.plot_points(points, "simulated TTFT (ms)", "measured TTFT (ms)", f"{n} processes")
        report.finish()
