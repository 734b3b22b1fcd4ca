"""Routing over processes: the same tokens as alone, whoever dies or hangs, and nobody is left behind.

Most replicas here are threads that do what a process of the script does, at the other end of a real pipe.
"""

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from helpers import ROOT, random_tokens, run_script
from test_gptlite_paged import PAGED, alone
from test_inference_distributed import left_behind, none_left

import inference_routing as routing
import routing_processes
from inference_replicas import Started, start_processes
from main_cache_routing import CacheAware, LeastLoaded, RoundRobin, make_request
from routing_processes import Router, call_all, run_replica

POLICIES = {
    "turns": RoundRobin,
    "least": lambda _n: LeastLoaded(),
    "longest": lambda n: CacheAware(n, 12, max_difference=float("inf")),
    "balanced": lambda n: CacheAware(n, 12),
}
SIZES = pickle.dumps(PAGED), "cpu", 12, 4, 2  # blocks, their tokens, requests at a time


class Faulty:
    """A replica's end of a pipe that closes, or is read no more, after so many sent messages."""

    def __init__(self, pipe, n_sends, fault, released):
        self.pipe, self.left, self.fault, self.released = pipe, n_sends, fault, released

    def poll(self, timeout):
        if self.left <= 0 and self.fault == "hangs":
            self.released.wait(20)
            raise EOFError
        return self.pipe.poll(timeout)

    def recv(self):
        return self.pipe.recv()

    def send(self, message):
        if self.left <= 0:
            self.pipe.close()
            raise EOFError
        self.left -= 1
        self.pipe.send(message)


class Process:
    """In the place of the process of a thread."""

    killed = False

    def kill(self):
        self.killed = True


@contextlib.contextmanager
def replicas_of(*faults):
    """Threads as replicas, each with None or (fault, after how many messages)."""
    threads, replicas, released, n_threads = [], [], threading.Event(), torch.get_num_threads()
    for i, fault in enumerate(faults):
        ours, theirs = Pipe()
        end = Faulty(theirs, fault[1], fault[0], released) if fault else theirs
        threads.append(threading.Thread(target=run_replica, args=(end, *SIZES), daemon=True))
        threads[-1].start()
        replicas.append(Started(i, Process(), ours))
    yield replicas
    released.set()
    for replica in replicas:
        replica.pipe.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "a replica does not end with its pipe"
    torch.set_num_threads(n_threads)


def draw(seed, n_requests=10, gap=0.004, least=1):
    """Requests that share beginnings, with answers of at least so many tokens, and their prompts."""
    rng, at, base = random.Random(seed), 0.0, random_tokens(3, 9, seed).tolist()
    requests, prompts = [], []
    for i in range(n_requests):
        ids = rng.choice(base)[: rng.randint(1, 9)] + [rng.randrange(16) for _ in range(rng.randint(0, 3))]
        at += rng.random() * 2 * gap
        requests.append(make_request(i, at, ids, rng.randint(least, 5), 4))
        prompts.append(ids)
    return requests, prompts


def expected(requests, prompts):
    return [alone(ids, r.n_new) for r, ids in zip(requests, prompts, strict=True)]


class Checks:
    def __init__(self):
        self.found = []

    def check(self, _name, passed):
        self.found.append(passed)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("n", [1, 3])
def test_every_request_gets_what_it_gets_alone(name, n):
    """And what the replicas tell adds up: tokens once, after their request, work without what was found."""
    with replicas_of(*[None] * n) as replicas:
        for seed in range(3):
            requests, prompts = draw(seed)
            texts, run = Router(replicas, POLICIES[name]).serve(requests, prompts)
            assert texts == expected(requests, prompts) and prompts == draw(seed)[1]
            checks = Checks()
            routing.check_runs(checks, name, [run])
            assert checks.found == [True, True]
            assert len(run[0]) == n and set(run[2]) <= set(range(n))
            if name == "turns":
                assert run[2] == [i % n for i in range(len(requests))]


def test_each_router_begins_with_empty_caches():
    with replicas_of(None) as replicas:
        requests = [make_request(i, 0.05 * i, [1, 2, 3, 4, 5, 6, i], 1, 4) for i in range(3)]
        for _ in range(2):
            _, (served, *_) = Router(replicas, RoundRobin).serve(
                requests, [[1, 2, 3, 4, 5, 6, i] for i in range(3)]
            )
            assert served[0].n_found == {0: 0, 1: 4, 2: 4} and served[0].n_computed == 7 + 3 + 3


@pytest.mark.parametrize("fault", ["dies", "hangs"])
@pytest.mark.parametrize("n_sends", [0, 2, 5])
def test_requests_of_a_lost_replica_go_on_elsewhere(fault, n_sends):
    """They keep the tokens that were received; the lost one is killed, so that it cannot wake up."""
    requests, prompts = draw(n_sends, 18, least=5)
    with replicas_of((fault, n_sends), None, None) as replicas:
        router = Router(replicas, RoundRobin, patience=0.3)
        texts, (_, _, chosen) = router.serve(requests, prompts)
        assert texts == expected(requests, prompts)
        assert [r.number for r in router.alive] == [1, 2] and router.n_moved >= 1
        assert [r.process.killed for r in replicas] == [True, False, False]
        assert [len(t) for t in router.times] == [r.n_new for r in requests]
        assert all(t == sorted(t) for t in router.times)
        moved = [i for i, number in enumerate(chosen) if number != i % 3]
        assert moved and all(i % 3 == 0 or chosen[i] in (1, 2) for i in moved)


def test_two_of_three_are_lost():
    requests, prompts = draw(4, 18, least=5)
    with replicas_of(("dies", 3), None, ("hangs", 1)) as replicas:
        router = Router(replicas, POLICIES["balanced"], patience=0.3)
        texts, _ = router.serve(requests, prompts)
        assert texts == expected(requests, prompts)
        assert {r.number for r in router.alive} >= {1}


def test_when_nobody_is_left_it_is_said():
    requests, prompts = draw(5, 18, least=5)
    with (
        replicas_of(("dies", 1), ("dies", 2)) as replicas,
        pytest.raises(ChildProcessError, match="no replica"),
    ):
        Router(replicas, RoundRobin).serve(requests, prompts)


def test_an_idle_replica_may_be_silent():
    """A gap between requests is longer than the patience with those that work."""
    requests = [make_request(i, at, [1, 2, 3], 2, 4) for i, at in enumerate((0.0, 0.5, 1.0))]
    with replicas_of(None, None) as replicas:
        router = Router(replicas, lambda _n: LeastLoaded(), patience=0.3)
        texts, _ = router.serve(requests, [[1, 2, 3]] * 3)
        assert texts == [alone([1, 2, 3], 2)] * 3 and len(router.alive) == 2


def test_a_replica_that_does_not_read_is_lost(monkeypatch):
    """Its pipe is full: a router that writes into it would wait for ever."""
    requests, prompts = draw(6, 4)
    with replicas_of(None, None) as replicas:
        full = replicas[0].pipe
        free = lambda r, w, x, t: ([], [pipe for pipe in w if pipe is not full], [])  # noqa: E731
        monkeypatch.setattr(routing_processes.select, "select", free)
        router = Router(replicas, RoundRobin)
        texts, (_, _, chosen) = router.serve(requests, prompts)
        assert texts == expected(requests, prompts) and chosen == [1] * 4 and replicas[0].process.killed


def test_a_policy_hears_of_the_queues():
    """Loads are the requests that are sent and not finished, of those that are alive."""
    seen = []

    class Spy:
        def __init__(self, n):
            self.n = n

        def choose(self, _request, loads):
            seen.append(list(loads))
            return loads.index(min(loads))

    requests = [make_request(i, 0.0, [1, 2, 3, i], 3, 4) for i in range(5)]
    with replicas_of(None, None) as replicas:
        Router(replicas, Spy).serve(requests, [[1, 2, 3, i] for i in range(5)])
    assert seen == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]


def add_seqlen(model, x):
    return model.seqlen + x


def test_calls_in_all_replicas():
    with replicas_of(None, None) as replicas:
        assert call_all(replicas, add_seqlen, 5) == [21, 21]


# ---- Real processes ----


def test_processes_that_are_killed(tmp_path):
    """One of two replicas gets SIGKILL while it works: its requests move, and none is left at the end."""
    requests, prompts = draw(7, 30, gap=0.02)
    with start_processes(2, run_replica, *SIZES) as replicas:
        assert call_all(replicas, add_seqlen, 1) == [17, 17]  # both are there
        router = Router(replicas, RoundRobin)
        timer = threading.Timer(requests[12].at, os.kill, (replicas[0].process.pid, signal.SIGKILL))
        timer.start()
        texts, (_, _, chosen) = router.serve(requests, prompts)
        timer.join()
        assert texts == expected(requests, prompts)
        assert router.alive == [replicas[1]] and chosen[-1] == 1 and 0 in chosen
        assert replicas[1].process.is_alive()
    assert not any(replica.process.is_alive() for replica in replicas)


@pytest.mark.slow
def test_a_process_that_is_stopped_is_lost_and_ended():
    """SIGSTOP: it does not die, it is silent; afterwards it is gone as well."""
    requests, prompts = draw(8, 30, gap=0.02)
    with start_processes(2, run_replica, *SIZES) as replicas:
        call_all(replicas, add_seqlen, 1)
        router = Router(replicas, RoundRobin, patience=1.0)
        timer = threading.Timer(requests[12].at, os.kill, (replicas[1].process.pid, signal.SIGSTOP))
        timer.start()
        texts, _ = router.serve(requests, prompts)
        assert texts == expected(requests, prompts)
    assert not any(replica.process.is_alive() for replica in replicas)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are told by /proc")
def test_no_process_outlives_the_script(distilled_checkpoint, how):
    mark = f"MARK={uuid.uuid4()}"
    command = [
        sys.executable,
        str(ROOT / "more/routing_processes.py"),
        "--checkpoint",
        str(distilled_checkpoint),
    ]
    run = subprocess.Popen(
        command,
        env=os.environ | {"MARK": mark[5:]},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(left_behind(mark)) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(8.0)  # until they serve
    assert run.poll() is None
    os.kill(run.pid, how)
    _, error = run.communicate(timeout=60)
    assert run.returncode == (-9 if how == signal.SIGKILL else 130), error
    assert "Traceback" not in error and none_left(mark, 20)


# ---- Words, and the script ----


def test_words_follow_the_figures():
    row = {"ttft_ms": 110.0, "predicted_ms": 100.0, "found_share": 0.5, "predicted_found": 0.48}
    near = routing.as_simulated([row])
    assert "near" in near and "1.10 to 1.10 times" in near and "2%" in near
    for ms in (160.0, 60.0):
        assert "far" in routing.as_simulated([row, row | {"ttft_ms": ms}])
    sentences = [routing.moved(n) for n in (0, 1, 3)]
    assert all(
        x in y for x, y in zip(("no requests", "One request of", "3 requests"), sentences, strict=True)
    )


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "ttft.png"
    options = ["--quick", "--json", "-", "--plot", figure]
    run = run_script("more/routing_processes.py", *options, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stdout + run.stderr
    assert figure.stat().st_size > 1000 and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    names = ["round robin", "least loaded", "longest prefix", "balanced", "balanced, one dies"]
    assert [*rows] == [f"skewed: {name}" for name in names]
    assert all(row["same_output"] and row["ttft_ms"] > 0 for row in rows.values())
    for name in names[:-1]:
        row = rows[f"skewed: {name}"]
        assert 0 <= row["found_share"] < 1 and row["predicted_ms"] > 0
    assert rows["skewed: longest prefix"]["found_share"] >= rows["skewed: round robin"]["found_share"]


@pytest.mark.parametrize(
    "options", [["--n-tokens", "57"], ["--n-replicas", "1"], ["--load", "0.001"]], ids=str
)
def test_script_refuses(distilled_checkpoint, options):
    run = run_script("more/routing_processes.py", "--quick", *options, checkpoint=distilled_checkpoint)
    assert run.status == 2 and run.stdout == "" and "2 to 64 replicas" in run.stderr
