"""Replicas that serve in real time: the same tokens as alone, budgets kept, merged by request."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import random_tokens
from test_gptlite_paged import PAGED, alone
from threaded_ranks import run_threads

from gptlite_paged import BlockPool, Sequence
from inference_replicas import (
    BudgetScheduler,
    draw_arrivals,
    draw_workload,
    serve_merged,
    serve_replica,
    since,
)


def serve(world_size, requests, arrivals, **options):
    def gather(function, *args):
        def on_rank(team):
            team.kept.model = PAGED
            return function(team, *args)

        return run_threads(world_size, on_rank)

    team = SimpleNamespace(gather=gather, kept=SimpleNamespace(model=PAGED))
    return serve_merged(team, serve_replica, requests, arrivals, 2, **options)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"budget": 3}, {"budget": 1, "temperature": 1.0}])
def test_every_request_gets_what_it_gets_alone(world_size, options):
    shapes = ((3, 5), (9, 1), (12, 4), (1, 9), (5, 0), (7, 7), (2, 2))
    requests = [(random_tokens(1, T, T)[0], n) for T, n in shapes]
    arrivals = [0.01 * i for i in range(len(requests))]
    outputs, times = serve(world_size, requests, arrivals, **options)
    temperature = options.get("temperature", 0.0)
    assert outputs == [alone(p.tolist(), n, i, temperature) for i, (p, n) in enumerate(requests)]
    assert [len(t) for t in times] == [n for _, n in requests]
    assert all(t == sorted(t) and (not t or t[0] > at) for t, at in zip(times, arrivals, strict=True))


def test_of_two_ranks_the_first_token_counts_once():
    """One rank has the prompt's token, the other goes on from it, and notes when it came."""
    found = [{0: ([1, 2, 7], [0.5])}, {0: ([1, 2, 7, 8, 9], [0.6, 0.7, 0.8])}, {1: ([3, 4], [0.1])}]
    requests = [(torch.tensor([1, 2]), 3), (torch.tensor([3]), 1), (torch.tensor([5]), 0)]
    for answers in (found, found[::-1]):
        team = SimpleNamespace(gather=lambda *_, a=answers: a, kept=SimpleNamespace(model=PAGED))
        outputs, times = serve_merged(team, serve_replica, requests, [0.0] * 3)
        assert outputs == [[1, 2, 7, 8, 9], [3, 4], [5]]
        assert times == [[0.5, 0.7, 0.8], [0.1], []]


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_no_step_is_beyond_the_budget(budget):
    scheduler = BudgetScheduler(PAGED, BlockPool(PAGED, 8))
    scheduler.budget = budget
    for i, T in enumerate((9, 4, 11)):
        scheduler.add(Sequence(i, random_tokens(1, T, i)[0].tolist(), T + 4))
    sizes = []
    while scheduler.running or scheduler.waiting:
        before = [(s, s.done) for s in scheduler.running]
        scheduler.step()
        sizes.append(sum(s.done - done for s, done in before if s in scheduler.running))
    assert max(sizes) <= max(budget, 3)


def test_workloads_and_arrivals_repeat():
    text = SimpleNamespace(prompts=lambda n, T: random_tokens(n, T))
    requests = draw_workload(text, 50, 16, 8, seed=1)
    again = draw_workload(text, 50, 16, 8, seed=1)
    assert all(torch.equal(a, b) and m == n for (a, m), (b, n) in zip(requests, again, strict=True))
    assert {len(p) for p, _ in requests} <= set(range(12, 21)) and {n for _, n in requests} <= set(
        range(6, 11)
    )
    arrivals = draw_arrivals(4000, 20.0, seed=1)
    assert arrivals == sorted(arrivals) == draw_arrivals(4000, 20.0, seed=1)
    assert 0.9 < arrivals[-1] * 20 / 4000 < 1.1
    clock = partial(since, time.monotonic() - 5)
    assert 5 <= clock() < 6
