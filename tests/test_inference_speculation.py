"""Rounds and what follows from them: acceptance, the formula, the times of forwards."""

import random
from types import SimpleNamespace

import torch
from helpers import assert_close, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_speculation as study
from gptlite_kvcache import GPTlite_StaticKVCache, StaticKVCache

ROUNDS = [(3, 3), (3, 0), (3, 1), (1, 1), (0, 0)]


def test_figures_of_rounds_by_hand():
    """Judged were 3 + 1 + 2 + 1 drafts, of which 3 + 0 + 1 + 1 passed; behind a miss none is judged."""
    assert study.acceptance(ROUNDS) == 5 / 7
    assert study.accepted_by_place(ROUNDS) == [3 / 4, 1 / 3, 1 / 3]
    assert study.round_figures(ROUNDS) == {"tokens_per_round": 2.0, "accepted": 0.5}
    assert study.acceptance([(0, 0)]) is None and study.accepted_by_place([(0, 0)]) == []
    assert study.round_figures([]) == {"tokens_per_round": None, "accepted": None}


@given(st.floats(0.0, 1.0), st.integers(1, 12))
def test_the_formula_of_the_paper(alpha, n):
    """(1 - alpha^(n+1)) / (1 - alpha), and n + 1 where all is accepted."""
    expected = n + 1 if alpha == 1 else (1 - alpha ** (n + 1)) / (1 - alpha)
    assert_close(study.expected_tokens(alpha, n), float(expected), 1e-6)


def test_rounds_that_are_drawn_have_the_tokens_of_the_formula():
    """Independent drafts, accepted with probability 0.8: estimate and mean within five standard errors."""
    draw, rounds = random.Random(0), []
    for _ in range(4000):
        accepted = next((i for i in range(5) if draw.random() > 0.8), 5)
        rounds.append((5, accepted))
    assert abs(study.acceptance(rounds) - 0.8) < 0.015
    mean = study.round_figures(rounds)["tokens_per_round"]
    assert abs(mean / study.expected_tokens(study.acceptance(rounds), 5) - 1) < 0.05
    assert mean > study.round_figures([(5, 0)] * 9)["tokens_per_round"] == 1


def test_times_leave_the_caches_as_they_are(monkeypatch):
    model, calls = tiny_model(GPTlite_StaticKVCache), {}

    def timed(functions, repeats, device):
        for name, function in functions.items():
            function()
            function()
            calls[name] = function
        return {name: 2.0 * (name if isinstance(name, int) else 3) for name in functions}

    monkeypatch.setattr(study, "alternating_ms", timed)
    args = SimpleNamespace(repeats=1, device=torch.device("cpu"))
    for n_past, batch_size in ((1, 1), (9, 2), (16, 1), (40, 1)):
        steps = {"draft": study.forward_behind(model, n_past)}
        times = study.RowTimes(args, model, n_past, [4, 7], steps, batch_size)
        assert [*calls] == [1, 4, 7, "draft"] and times.of(4) == 4.0 and times.of("draft") == 3.0


def test_bytes_of_a_token_from_the_tensors():
    model = tiny_model(GPTlite_StaticKVCache)
    one, many = StaticKVCache(model, 1), StaticKVCache(model, 3)
    expected = 2 * 2 * 32 * 8  # keys and values, layers, width, bytes of float64
    assert study.bytes_per_token([one]) == study.bytes_per_token([many]) == expected
    assert study.bytes_per_token([one, one]) == 2 * expected


def test_rounds_by_part_of_the_answers():
    """Two answers of 6 tokens: rounds begin at tokens 1, 3, 4 and at 1, 5."""
    rounds = [(2, 1), (0, 0), (1, 1), (4, 3), (0, 0)]
    assert study.by_part(rounds, 6) == [(3.0, 1.0), (1.0, 0.0), (1.5, 0.5)]
    assert study.by_part([], 6) == [(None, None)] * 3
