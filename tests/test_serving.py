"""Serving on a virtual clock: the times follow from the schedule, the tokens do not depend on it."""

import pytest
import torch
from helpers import run_script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_main_static_batching import CONTEXT, alone, refusal, requests_of

from gptlite import GPTlite
from gptlite_slots import GPTlite_Slots, SlotBatch
from inference_queue import goodput, load_figures, run_figures, waiting_times
from serving import poisson_arrivals, serve_on_clock

TIME_OUT = 2.5


def one_second(batch, newcomers):
    """A step that takes a second of virtual time."""
    return batch.step(newcomers), 1.0


def serve_tiny(sizes, arrivals, n_slots, timeout=None, run_step=one_second):
    batch = SlotBatch(tiny_model(GPTlite_Slots), n_slots, CONTEXT, refill=timeout is None)
    requests = requests_of(sizes)
    outputs, times = serve_on_clock(batch, requests, arrivals, run_step, timeout)
    assert not batch.running
    return requests, outputs, times


def test_arrivals_are_poisson_and_repeat():
    draw = [poisson_arrivals(4000, 5.0, torch.Generator().manual_seed(1)) for _ in range(2)]
    gaps = torch.tensor([0.0, *draw[0]]).double().diff()
    assert draw[0] == draw[1] and (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=0.05) and gaps.std() == pytest.approx(0.2, rel=0.1)
    faster = poisson_arrivals(4000, 10.0, torch.Generator().manual_seed(1))
    assert faster[-1] == pytest.approx(draw[0][-1] / 2)


@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), st.floats(0, 4)), max_size=7),
    st.integers(1, 4),
    st.sampled_from([None, 0.0, TIME_OUT]),
)
def test_tokens_and_times_of_any_arrivals(drawn, n_slots, timeout):
    sizes, arrivals, now = [], [], 0.0
    for T, n_tokens, gap in drawn:
        now += gap
        sizes.append((T, n_tokens))
        arrivals.append(now)
    requests, outputs, times = serve_tiny(sizes, arrivals, n_slots, timeout)
    for output, expected in zip(outputs, alone(tiny_model(GPTlite), requests), strict=True):
        assert output == expected.tolist()
    assert [len(t) for t in times] == [n for _, n in sizes]  # each exactly once
    first_tokens = [t[0] for t in times if t]
    assert first_tokens == sorted(first_tokens)  # first come, first served
    for arrival, t in zip(arrivals, times, strict=True):
        # a step that begins after the arrival takes a second, and no step is skipped
        assert all(when >= arrival + 1 - 1e-9 for when in t[:1])
        assert [later - t[0] for later in t] == pytest.approx(list(range(len(t))))


def test_newcomers_join_the_running_batch():
    # (prompt, new tokens), arrivals and, by hand, the steps in which each gets its tokens
    _, _, times = serve_tiny([(3, 4), (2, 2), (2, 2)], [0.5, 1.0, 1.1], n_slots=2)
    assert times[0] == [1.5, 2.5, 3.5, 4.5]  # the idle clock jumps to the first arrival
    assert times[1] == [2.5, 3.5]  # arrived during a step: joins the next
    assert times[2] == [4.5, 5.5]  # both slots were taken until 3.5


def test_static_batches_wait_to_be_full_or_for_the_time_out():
    sizes = [(3, 1), (2, 3), (2, 2), (4, 1)]
    _, _, times = serve_tiny(sizes, [1.0, 2.0, 2.5, 9.0], n_slots=2, timeout=TIME_OUT)
    assert times[0] == [3.0]  # full with the second arrival, at 2.0
    assert times[1] == [3.0, 4.0, 5.0]
    assert times[2] == [6.0, 7.0]  # alone; its time-out, 5.0, is over when the first batch ends
    assert times[3] == [12.5]  # alone: the server waits for its time-out
    _, _, times = serve_tiny([(3, 1)], [1.0], n_slots=2, timeout=TIME_OUT)
    assert times[0] == [4.5]  # the server cannot know that nobody else comes


def test_a_burst_waits_in_line():
    _, _, times = serve_tiny([(2, 2)] * 6, [0.0] * 6, n_slots=2)
    assert [t[0] for t in times] == [1.0, 1.0, 3.0, 3.0, 5.0, 5.0]


def test_arrivals_do_not_wait_for_the_server():
    """Open loop: slower steps change when requests are served, never when they arrived."""
    sizes, arrivals = [(2, 3)] * 5, [0.0, 0.1, 0.2, 0.3, 0.4]
    waits = []
    for seconds in (0.01, 1.0):
        _, _, times = serve_tiny(sizes, arrivals, 1, None, lambda b, new, s=seconds: (b.step(new), s))
        waits.append([ttft for ttft, _ in waiting_times(arrivals, times)])
    assert waits[0] == pytest.approx([0.01] * 5) and waits[1][-1] == pytest.approx(4 * 3 + 1 - 0.4)


def test_requests_that_cannot_be_served_are_refused_alone():
    batch = SlotBatch(tiny_model(GPTlite_Slots), 2, CONTEXT)
    requests = requests_of([(3, 2), (CONTEXT, 2), (2, 1)])
    requests.insert(1, (torch.tensor([]), 4))
    outputs, times = serve_on_clock(batch, requests, [0.0, 0.1, 0.2, 0.3], one_second)
    assert isinstance(outputs[1], ValueError) and isinstance(outputs[2], ValueError)
    assert [len(t) for t in times] == [2, 0, 0, 1]
    kept = [requests[0], requests[3]]
    expected = [out.tolist() for out in alone(tiny_model(GPTlite), kept)]
    assert [outputs[0], outputs[3]] == expected


def test_what_the_figures_mean():
    waits = waiting_times([1.0, 2.0, 0.0, 5.0], [[1.5, 1.7, 2.1], [4.0], [], [5.1, 5.2]])
    assert [w for pair in waits for w in pair] == pytest.approx([0.5, 0.3, 2.0, 0.0, 0.1, 0.1])

    def met(waits, max_ttft, max_tpot):
        return load_figures(waits, max_ttft, max_tpot)["meet both"]

    assert met([(1.0, 0.5)], 1.0, 0.5) == 1.0  # a target that is just met is met
    assert met(waits, 0.5, 0.31) == pytest.approx(2 / 3)
    assert met(waits, 2.0, 0.2) == pytest.approx(2 / 3)
    assert met(waits, 0.4, 0.2) == pytest.approx(1 / 3)
    assert goodput({1.0: 1.0, 2.0: 0.9, 3.0: 0.89}) == 2.0
    assert goodput({1.0: 0.5}) == 0.0


def test_the_tail_is_not_the_slowest_request():
    """Of 128 requests the 99th percentile is the second slowest; a gap is a single one, not a mean."""
    waits = [(0.001 * (i + 1), 0.0) for i in range(128)]
    assert load_figures(waits, 1.0, 1.0)["TTFT p99"] == pytest.approx(127)
    figures = run_figures([([0.0, 1.0], None, [[1.0, 1.1, 1.2, 2.2], [3.0]])])
    assert figures["worst_gap_ms"] == pytest.approx(1000) and figures["tpot_ms"] == pytest.approx(100)
    assert figures["ttft_ms"] == pytest.approx(1500)


def test_refuses_requests_without_a_second_token(distilled_checkpoint, monkeypatch, capsys):
    options = ("--quick", "--checkpoint", distilled_checkpoint, "--longest", 2)
    assert "second token" in refusal("more/serving.py", options, monkeypatch, capsys)


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "serving.png"
    options = ("--quick", "--json", "-", "--plot", figure)
    run = run_script("more/serving.py", *options, cwd=tmp_path, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert all(report["checks"].values()) and len(report["why"]) == 3
    assert [row["baseline"] for row in report["rows"]] == [True, False]
    assert all(row["same_output"] and row["capacity"] > 0 <= row["goodput"] for row in report["rows"])
    (table,) = report["sweeps"].values()
    assert [row["load"] for row in table] == sorted(row["load"] for row in table)
    for static, ours in zip(table[::2], table[1::2], strict=True):
        assert static["method"] != ours["method"] and static["requests/s"] == ours["requests/s"]
    for row in table:
        assert row["TTFT p50"] <= row["TTFT p90"] <= row["TTFT p99"]
        assert row["TPOT p50"] <= row["TPOT p90"] <= row["TPOT p99"]
        assert 0 <= row["meet both"] <= 1
    assert figure.stat().st_size > 1000
