"""The times of requests: from arrival, all that a step does in that step, on a clock that is set by hand."""

from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_model

import inference_clock
from gptlite_paged import GPTlite_Paged, Sequence
from inference_clock import ServingClock, clock_figures, measure_serving, pool_usage, usage_figures
from inference_scheduling import PagedScheduler, SlotScheduler, serve
from main_block_cache import BlockCache

FORWARD, LOOK_UP, GROW = 10.0, 200.0, 3.0  # ms that these take on the clock


@pytest.fixture
def slow(monkeypatch):
    """A scheduler whose forward, look-up and growth take time on a clock that nothing else moves."""
    now = [0.0]
    monkeypatch.setattr(inference_clock, "time", SimpleNamespace(perf_counter=lambda: now[0] / 1000))

    def taking(function, ms):
        def run(*args):
            now[0] += ms
            return function(*args)

        return run

    def make(max_running=1):
        model = tiny_model(GPTlite_Paged)
        pool = BlockCache(model, 12, 4)
        model.register_forward_hook(lambda *_: now.__setitem__(0, now[0] + FORWARD))
        pool.match, pool.grow = taking(pool.match, LOOK_UP), taking(pool.grow, GROW)
        return PagedScheduler(model, pool, max_running=max_running)

    return make


def test_what_a_step_does_belongs_to_it(slow):
    """A6: two requests, one after the other; the second's look-up is in its own first step."""
    scheduler = slow()
    with ServingClock(scheduler) as clock:
        serve(scheduler, [(torch.tensor([1, 2, 3]), 2), (torch.tensor([4, 5]), 3)])
    first, decode = LOOK_UP + GROW + FORWARD, GROW + FORWARD
    assert clock.steps_ms == pytest.approx([first, decode, first, decode, decode])
    assert clock.total_ms == pytest.approx(sum(clock.steps_ms))
    assert clock.forward_tokens == 3 + 1 + 2 + 1 + 1
    assert clock.waits(clock.begun) == pytest.approx({0: first, 1: first})
    assert clock.waits(clock.arrived) == pytest.approx({0: first, 1: first + decode + first})  # A7: it waited
    assert clock.gaps() == pytest.approx([decode] * 3)
    assert "step" not in vars(scheduler) and "add" not in vars(scheduler)


def test_a_request_that_comes_later_waits_from_then_on(slow):
    scheduler = slow(max_running=2)
    with ServingClock(scheduler) as clock:
        scheduler.add(Sequence(0, [1, 2], 5))
        scheduler.step()
        scheduler.add(Sequence(1, [3], 2))
        scheduler.step()
    assert clock.arrived[1] == pytest.approx(LOOK_UP + GROW + FORWARD)
    assert clock.waits(clock.arrived)[1] == pytest.approx(GROW + LOOK_UP + GROW + FORWARD)


def test_figures_over_several_runs(slow):
    requests = [(torch.tensor([1, 2, 3]), 2), (torch.tensor([4, 5]), 3)]
    served = measure_serving({"one": slow}, lambda scheduler: serve(scheduler, requests), 3, pool_usage)
    (_, outputs, clocks), first = served["one"], LOOK_UP + GROW + FORWARD
    assert [len(output) for output in outputs] == [5, 5] and len(clocks) == 3
    figures = clock_figures(clocks)
    assert figures["ttft_ms"] == pytest.approx((first + 2 * first + GROW + FORWARD) / 2)
    assert [figures["tpot_p99_ms"], figures["tpot_ms"]] == pytest.approx([GROW + FORWARD] * 2)
    assert figures["tokens_per_s"] == pytest.approx(1000 * 5 / clocks[0].total_ms)
    assert (figures["n_steps"], figures["forward_tokens"]) == (5, 8)
    assert clocks[0].observed[0] == (3, 4, 1, 1)  # tokens, reserved, texts, waiting


def test_usage_counts_while_requests_wait():
    observed = [(3, 4, 1, 1), (5, 8, 2, 1), (100, 100, 9, 0)]
    assert usage_figures(observed) == {"held_share": 8 / 12, "at_a_time": 1.5, "mean_length": 8 / 3}
    assert usage_figures(observed[2:])["at_a_time"] == 9
    assert pool_usage(SlotScheduler.__new__(SlotScheduler)) is None
