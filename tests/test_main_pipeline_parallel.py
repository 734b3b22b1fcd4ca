"""Pipeline parallelism: stages and groups compute what one process does; idle time as the schedule says."""

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from threaded_ranks import ForkedRanks, run_threads

from gptlite_kvcache import GPTlite_KVCache
from gptlite_stages import layers_of
from inference_distributed import OnAllRanks, counted, function_ms, group_figures, idle_of
from inference_utils import window_losses
from main_kvcache import generate_kvcache
from main_pipeline_parallel import forward_pipeline, generate_pipeline, idle_share, keep_stage

E = 32


def model_of(n_layers=6, **kwargs):
    return tiny_model(GPTlite_KVCache, n_layers=n_layers, **kwargs)


def with_stage(team, model, function, *args):
    keep_stage(team, "stage", model)
    return function(team, "stage", *args)


# ---- Equal to one process ----


@pytest.mark.parametrize("S", [1, 2, 4, 6])
@pytest.mark.parametrize("M", [1, 2, 5, 9])
def test_logits_of_a_pass(S, M):
    """Groups that do not divide the batch, and more groups than sequences."""
    model, tokens = model_of(), random_tokens(5, 11)
    with torch.no_grad():
        expected = torch.cat([model(group)[0] for group in tokens.tensor_split(min(M, 5))])
    results = run_threads(S, with_stage, model, forward_pipeline, tokens, M)
    assert torch.equal(results[0][0], expected), "the same groups in one process, bit for bit"
    assert_close(results[0][0], model(tokens)[0], 1e-12)
    assert all(logits is None for logits, _ in results[1:])
    for rank, (_, caches) in enumerate(results):
        assert len(caches) == min(M, 5)
        assert all(len(cache) == len(layers_of(rank, S, 6)) for cache in caches)


@given(
    S=st.sampled_from([1, 2, 3, 4]),
    B=st.integers(1, 5),
    M=st.integers(1, 5),
    T=st.integers(1, 20),  # the context is 16
    n=st.integers(0, 5),
)
def test_generated_tokens(S, B, M, T, n):
    model, prompt = model_of(4), random_tokens(B, T, T)
    if M > B:
        with pytest.raises(ValueError, match=f"{B} sequences cannot be divided into {M} groups"):
            run_threads(S, with_stage, model, generate_pipeline, prompt, n, 16, M)
        return
    results = run_threads(S, with_stage, model, generate_pipeline, prompt, n, 16, M)
    assert torch.equal(results[0], generate_kvcache(model, prompt, n, 16))
    assert results[1:] == [None] * (S - 1)


def test_more_stages_than_layers_are_refused_on_all_ranks():
    def refused(team):
        with pytest.raises(ValueError, match="2 layers cannot fill 3 stages"):
            keep_stage(team, "stage", model_of(2))
        return dict(team.calls)

    assert run_threads(3, refused) == [{}] * 3


# ---- What is sent ----


@pytest.mark.parametrize("S", [1, 2, 3])
@pytest.mark.parametrize("M", [1, 3])
def test_bytes_are_counted(S, M):
    B, T, n = 4, 5, 3
    model = model_of(dtype=torch.float32)
    work = generate_pipeline, random_tokens(B, T), n, 16, M

    def run(team):
        keep_stage(team, "stage", model)
        run = counted(team, work[0], "stage", *work[1:])
        return run.calls, run.sent_bytes

    for rank, (calls, sent) in enumerate(run_threads(S, run)):
        if S == 1:
            assert calls == sent == {}
        elif rank < S - 1:  # E numbers of every token that is read
            assert sent["send"] == B * (T + n - 1) * E * 4 and calls["send"] == M * n
        else:
            assert sent["send"] == B * n * 8 and calls["send"] == M * n
        if S > 1:
            assert calls["receive"] == M * n


# ---- The schedule ----


@given(S=st.integers(1, 8), M=st.integers(1, 16))
def test_one_pass_of_equal_stages_leaves_the_bubble_idle(S, M):
    assert_close(idle_share([2.5] * S, M), (S - 1) / (M + S - 1), 1e-9)


@given(S=st.integers(1, 6), M=st.integers(1, 8), n=st.integers(1, 6))
def test_groups_in_flight(S, M, n):
    """With a group for each stage only filling and draining is idle; with fewer, stages wait for tokens."""
    share = idle_share([1.0] * S, M, n)
    if M >= S:
        assert_close(share, (S - 1) / (n * M + S - 1), 1e-9)
    else:
        assert_close(share, 1 - n * M / ((n - 1) * S + M + S - 1), 1e-9)


def test_the_slowest_stage_sets_the_pace():
    assert_close(idle_share([2.0, 1.0], 1000), 0.25, 1e-3)
    assert idle_share([2.0, 2.0, 1.0, 1.0], 4) > idle_share([1.5] * 4, 4)


def test_a_sequence_gets_its_token_when_its_turn_comes_again():
    figures = group_figures([[5.0, 6.0, 1.0, 2.0, 3.0, 4.0], [7.0, 8.0, 1.0, 1.0, 1.0, 1.0]], 2)
    assert figures["ttft_ms"] == 13.0 and figures["ttft_ms_spread"] == (11.0, 15.0)
    assert (
        figures["tpot_ms"] == 2.5
        and figures["tpot_p99_ms"] == 7.0
        and figures["tpot_ms_spread"] == (2.0, 5.0)
    )
    assert set(group_figures([[5.0, 6.0]], 2)) == {"ttft_ms", "ttft_ms_spread"}


# ---- Processes ----


def test_two_processes():
    model, prompt = model_of(dropout_p=0.5), random_tokens(5, 6)
    with ForkedRanks(2) as team:
        team.run(keep_stage, "stage", model)
        tokens = [team.run(generate_pipeline, "stage", prompt, 8, 16, M) for M in (1, 2, 5)]
        spread = OnAllRanks(team, "stage", forward_pipeline)
        losses = [window_losses(one, torch.arange(200) % 16, 4) for one in (spread, model, spread)]
        logits, _ = spread(prompt)
        work = forward_pipeline, "stage", prompt, 2
        assert 0 < idle_of(team, "stage", *work) < 1 and function_ms(team, 2, *work) > 0
    for found in tokens:
        assert torch.equal(found, generate_kvcache(model, prompt, 8, 16))
    assert_close(logits, model(prompt)[0], 1e-12)
    assert_close(losses[0], losses[1], 1e-12)
    assert torch.equal(losses[0], losses[2])


def test_more_stages_than_layers_are_one_line():
    result = run_script("main_pipeline_parallel.py", "--quick", "--world-size", "4")
    assert result.status == 2
    assert result.stderr == "main_pipeline_parallel.py: 3 layers cannot fill 4 stages\n"


@pytest.mark.slow
def test_quick_run():
    result = run_script("main_pipeline_parallel.py", "--quick", "--json", "-")
    assert result.status == 0, result.stderr + result.stdout
    report = result.json
    assert all(report["checks"].values()) and report["config"]["world_size"] == 2
    rows = {row["method"]: row for row in report["rows"]}
    one, staged = rows["one process"], [row for name, row in rows.items() if "stages" in name]
    assert [name for name in rows if "stages" in name] == [
        "2 stages, 1 group",
        "2 stages, 2 groups",
        "2 stages, 4 groups",
    ]
    assert all(row["same_output"] for row in staged)
    assert all(row["n_parameters"] < 0.7 * one["n_parameters"] for row in staged)
    expected = [row["expected"] for row in staged]
    assert expected == sorted(expected, reverse=True) and expected[0] == 0.5, "more groups leave less idle"
    held = report["sweeps"]["What a stage holds and sends"]
    assert [line["layers"] for line in held] == [2, 1] and held[0]["sent B/token"] == 192 * 4
    assert held[1]["sent B/token"] < 8
    assert sum(line["parameters"] for line in held) == one["n_parameters"]
    steps, by_link = list(report["sweeps"].values())[-2:]
    assert [line["sequences"] for line in steps] == [2, 16] and all(line["its sends"] > 0 for line in steps)
    last = by_link[0]
    assert last["spares ms at 16"] == steps[-1]["one process"] - steps[-1]["a group"]
    assert last["adds ms at 16"] == steps[-1]["its sends"]
