"""A queue of requests: what is drawn, when each request gets its tokens, and the figures that follow."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers import random_tokens, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import inference_queue
from gptlite import GPTlite
from gptlite_paged import GPTlite_Paged
from inference_queue import (
    Way,
    compare_queue,
    draw_requests,
    expected_longest,
    fit_step,
    gaps_between,
    make_requests,
    queue_figures,
    slot_steps,
    slots_in_use,
    step_ratio,
    waiting_figures,
)
from main_continuous_batching import continuous_batching
from main_static_batching import static_batching


def test_requests_fit_and_repeat():
    data = torch.arange(1000) % 16
    draw = [make_requests(data, 200, 64, torch.Generator().manual_seed(3)) for _ in range(2)]
    for (prompt, n_tokens), (again, n_again) in zip(*draw, strict=True):
        assert torch.equal(prompt, again) and n_tokens == n_again
        assert 4 <= len(prompt) <= 16 and 4 <= n_tokens <= 48
        assert (prompt.diff() % 16 == 1).all()  # cut from the data in one piece
    assert {n for _, n in draw[0]} >= {4, 48} or len({n for _, n in draw[0]}) > 35
    for seqlen in range(2, 20):
        drawn = make_requests(data, 40, seqlen)
        assert all(len(q) >= 1 and n >= 1 and len(q) + n <= seqlen for q, n in drawn)
    for seqlen in (1, 0, -3):
        with pytest.raises(ValueError, match="at least 2"):
            make_requests(data, 3, seqlen)
    assert len(make_requests(data[:16], 3, 64)) == 3
    with pytest.raises(ValueError, match="too short"):
        make_requests(data[:15], 3, 64)


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=9),
    st.integers(1, 4),
    st.booleans(),
)
def test_the_steps_of_each_request_are_known_beforehand(sizes, n_slots, refill):
    """Against the functions themselves: a model that records how many tokens each text has."""
    requests = [(torch.full((T,), i), n) for i, (T, n) in enumerate(sizes)]  # of request i: all its tokens
    seen = []  # at each step the requests in it, by their tokens

    def model(tokens):
        seen.append(tokens[:, 0].tolist())
        return torch.nn.functional.one_hot(tokens, 16).double()  # [B, T, 16]: the next token is the last one

    serve = continuous_batching if refill else static_batching
    serve(model, requests, n_slots, 99)
    steps = slot_steps([n for _, n in requests], n_slots, refill)
    for i, run in enumerate(steps):
        assert len(run) == sizes[i][1]
        in_it = [step for step, requests in enumerate(seen) if i in requests]
        assert in_it[: len(run)] == list(run)  # a group holds a finished one until its end
    assert max((run.stop for run in steps), default=0) == len(seen)
    if refill and seen:
        assert slots_in_use(steps) == list(map(len, seen))


def test_ratio_of_steps():
    assert step_ratio([1, 4, 2, 3], 2) == 7 / 6  # groups of 4 and 3; slots of 1 + 2 + 3 and 4
    assert step_ratio([5] * 12, 4) == 1.0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 7))
def test_expected_longest_against_all_draws(lengths, n_drawn):
    draws = list(itertools.combinations(lengths, min(n_drawn, len(lengths))))
    assert expected_longest(lengths, n_drawn) == pytest.approx(sum(map(max, draws)) / len(draws))


def test_expected_longest_of_uniform_lengths():
    """a + (b - a) B / (B + 1) of a uniform distribution on a to b."""
    assert expected_longest(range(16, 193), 8) == pytest.approx(16 + 176 * 8 / 9, rel=0.01)


def test_drawn_by_the_options():
    text = SimpleNamespace(valid=torch.arange(500) % 16)
    args = SimpleNamespace(n_requests=5, longest=16, batch_size=2, seed=3, device=torch.device("cpu"))
    drawn, again = draw_requests(args, text, 16), draw_requests(args, text, 16)
    assert [(q.tolist(), n) for q, n in drawn] == [(q.tolist(), n) for q, n in again] and len(drawn) == 5
    with pytest.raises(ValueError, match="--longest 16"):
        draw_requests(args, text, 15)
    args.n_requests = 1_000_001
    with pytest.raises(ValueError, match="--n-requests"):
        draw_requests(args, text, 16)
    args.n_requests, args.batch_size = 5, 99_999_999
    with pytest.raises(ValueError, match="tokens at once"):
        draw_requests(args, text, 16)


def test_a_request_waits_from_its_arrival():
    """The last of four one-token requests gets its token in the fourth step, whatever a step takes."""
    figures = queue_figures([range(i, i + 1) for i in range(4)], [[10.0] * 4, [20.0] * 4])
    assert figures["ttft_ms"] == pytest.approx((25 + 50) / 2)
    assert figures["ttft_ms_spread"] == pytest.approx((25, 50))
    assert figures["answer_p90_s"] == pytest.approx(0.08) and figures["answer_s"] == pytest.approx(0.03)


def test_the_tail_is_that_of_all_runs():
    """One stall in one of five runs: a median over the runs would not have it."""
    runs = [[1.0] * 40 for _ in range(5)]
    runs[3][7] = runs[3][8] = runs[1][2] = 100.0
    figures = waiting_figures([[5.0, 6.0, 70.0]] * 5, runs)
    assert figures["worst_gap_ms"] == 100.0 and figures["tpot_p99_ms"] == 100.0
    assert figures["tpot_ms"] == 1.0 and figures["tpot_ms_spread"] == (1.0, 1.0)
    assert figures["ttft_ms"] == 6.0 and figures["ttft_ms_spread"] == (6.0, 6.0)
    assert waiting_figures([[5.0]], [[]])["worst_gap_ms"] is None


def test_gaps_of_some_steps():
    ends = [1.0, 3.0, 7.0, 15.0, 31.0]  # when each step ends
    steps = [[0, 1, 3], [2, 4], []]
    clock = SimpleNamespace(received={i: [ends[step] for step in run] for i, run in enumerate(steps)})
    assert gaps_between(clock, steps, 0) == [2.0, 12.0, 24.0]
    assert gaps_between(clock, steps, 2, 4) == [12.0]


def test_a_step_is_fitted_to_a_line(monkeypatch):
    """Of steps that take 3 ms and 0.5 ms a token; the work is B single tokens and a piece of a prompt."""
    paged, sizes = tiny_model(GPTlite_Paged), {}

    def times(functions, *_):
        counts = []
        hook = paged.register_forward_pre_hook(lambda _, args: counts.append(len(args[0])))
        for function in functions.values():
            function()
        hook.remove()
        sizes.update(zip(functions, counts, strict=True))
        return {n: 3 + 0.5 * n for n in functions}

    monkeypatch.setattr(inference_queue, "alternating_ms", times)
    assert fit_step(paged, 4, 12, 1) == pytest.approx((3, 0.5))
    assert sizes == {4: 4, 12: 12}


class FakeReport:
    """Keeps rows and checks."""

    def __init__(self):
        self.args = SimpleNamespace(dtype=torch.float64, repeats=1)
        self.rows, self.checks = [], {}

    def check(self, name, passed):
        self.checks[name] = passed
        return passed

    def row(self, name, measured, **figures):
        self.rows.append({"method": name, "forward_tokens": measured.forward_tokens} | figures)
        return self.rows[-1]


def test_all_rows_are_the_same_work_and_a_wrong_way_is_seen():
    model, report = tiny_model(GPTlite), FakeReport()
    requests = [(random_tokens(1, 3, i)[0], n) for i, n in enumerate((5, 1, 3, 4))]

    def wrong(*args):
        outputs, n_steps = static_batching(*args)
        return [(output + 1) % 16 for output in outputs], n_steps + 1

    ways = [Way("alone", static_batching, model, 1, False), Way("static", static_batching, model, 2, False)]
    ways += [Way("continuous", continuous_batching, model, 2), Way("wrong", wrong, model, 2, False)]
    rows = compare_queue(report, model, requests, ways)
    assert [row["same_output"] for row in rows.values()] == [True, True, True, False]
    assert {name.split(":")[0] for name, passed in report.checks.items() if not passed} == {"wrong"}
    assert len([name for name, passed in report.checks.items() if not passed]) == 2  # tokens and steps
    assert [row["baseline"] for row in rows.values()] == [True, False, False, False]
    assert rows["alone"]["n_steps"] == 13 and rows["static"]["n_steps"] == 9
    assert rows["continuous"]["n_steps"] == 8 and rows["continuous"]["slot_utilisation"] == 13 / 16
    assert rows["alone"]["forward_tokens"] == sum(3 + i for _, n in requests for i in range(n))
