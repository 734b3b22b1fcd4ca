"""Calls side by side: order and clocks, the figures of a row, and what a stream of questions counts."""

import time

import pytest
import torch
from helpers import tiny_model

from gptlite_kvcache import GPTlite_KVCache
from inference_calls import answer_cost, exact_match, generation_figures, measure_calls, no_cache, replay
from inference_cost import forward_cost
from inference_utils import parameters_of


def test_calls_alternate_and_every_run_begins_afresh():
    order = []

    def make(name):
        order.append(f"make {name}")
        state = []
        for i in range(3):
            state.append(i)
            order.append(f"{name}{i}")
            yield tuple(state)

    measured = measure_calls({"a": lambda: make("a"), "b": lambda: make("b")}, 3, 2)
    run = ["make a", "a0", "make b", "b0", "a1", "b1", "a2", "b2"]
    assert order == run + run
    for values, runs in measured.values():
        assert values == [(0,), (0, 1), (0, 1, 2)]
        assert [len(clocks) for clocks in runs] == [3, 3] and all(c.ms > 0 for r in runs for c in r)


def test_what_a_call_does_first_belongs_to_its_first_token():
    """A look-up of 30 ms before the second call counts for it, and not for the last step of the first."""

    class Clock:
        def __init__(self, steps_ms):
            self.steps_ms, self.total_ms, self.forward_tokens = steps_ms, sum(steps_ms), 5

    figures = generation_figures(
        [[Clock([4.0, 1.0]), Clock([34.0, 1.0])], [Clock([4.0, 9.0]), Clock([4.0, 1.0])]], 2
    )
    assert figures["ttft_ms"] == 11.5 and figures["ttft_ms_spread"] == (4, 19)  # medians of the runs
    assert figures["tpot_ms"] == 1 and figures["tpot_p99_ms"] == 9 and figures["forward_tokens"] == 10
    speeds = 1000 * 4 / 40, 1000 * 4 / 18
    assert figures["tokens_per_s"] == pytest.approx(sum(speeds) / 2)
    assert figures["tokens_per_s_spread"] == pytest.approx(speeds)


def test_replay_counts_hits_and_wrong_answers():
    """The second cache takes every question for the first one: what it serves is wrong but once."""
    meaning = {"a": "A", "a again": "A", "b": "B"}
    stream = ["a", "b", "a", "a again", "a again"]

    def takes_all_for_one():
        answers = []

        def cache(query, generate_fn):
            hit = bool(answers)
            answers.append(answers[0] if hit else generate_fn(query))
            time.sleep(1e-4)
            return answers[0], 1.0, hit

        return cache

    makers = {"none": no_cache, "exact": exact_match, "bold": takes_all_for_one}
    rows = replay(makers, stream, meaning, 100.0, repeats=2)
    none, exact, bold = rows.values()
    assert none["hit_rate"] == none["recall"] == none["wrong_per_thousand"] == 0
    assert none["precision"] is None and none["time_saved"] is None and none["hit_p50_ms"] is None
    assert exact["hit_rate"] == 0.4 and exact["precision"] == 1 and exact["wrong_per_thousand"] == 0
    assert exact["recall"] == pytest.approx(2 / 3)  # of "a" again, and the other words for it twice
    assert bold["hit_rate"] == 0.8 and bold["precision"] == 0.75 and bold["wrong_per_thousand"] == 200
    assert (
        bold["recall"] == 1 and 20 < bold["latency_ms"] < 100 and bold["hit_p99_ms"] >= bold["hit_p50_ms"] > 0
    )
    assert bold["time_saved"] == pytest.approx(1 - bold["latency_ms"] / 100)
    low, high = bold["latency_ms_spread"]
    assert low <= bold["latency_ms"] <= high


def test_cost_of_an_answer_is_that_of_its_steps():
    model = tiny_model(GPTlite_KVCache, dtype=torch.float32)
    cost = answer_cost(model, 5, 3, torch.float32)
    steps = [
        forward_cost(parameters_of(model), 16, 1, n, past, torch.float32)
        for n, past in ((5, 0), (1, 5), (1, 6))
    ]
    assert cost.flops == sum(step.flops for step in steps)
    assert cost.n_bytes == sum(step.n_bytes for step in steps)
