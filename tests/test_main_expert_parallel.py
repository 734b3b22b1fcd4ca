"""Expert parallelism: tokens find their experts on other ranks, and the sum is that of one process."""

import copy

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from threaded_ranks import ForkedRanks, run_threads

from gptlite_kvcache import GPTlite_KVCache
from gptlite_moe import upcycle
from inference_distributed import OnAllRanks, part_of
from inference_utils import window_losses
from main_expert_parallel import forward_experts, generate_experts, keep_experts, load_of
from main_kvcache import generate_kvcache

L, E = 2, 32


def mixture_of(n, k, capacity=None, noise=1.0, dtype=torch.float64, **kwargs):
    return upcycle(tiny_model(GPTlite_KVCache, dtype=dtype, **kwargs), n, k, capacity, noise=noise)


def with_experts(team, model, function, *args):
    keep_experts(team, "experts", model)
    return function(team, "experts", *args)


@given(
    W=st.integers(1, 5),
    n=st.integers(1, 6),
    k=st.integers(1, 3),
    B=st.integers(1, 4),
    T=st.integers(1, 9),
)
def test_logits(W, n, k, B, T):
    """Experts that do not divide, ranks without experts, ranks without sequences."""
    if k > n:
        return
    model, tokens = mixture_of(n, k), random_tokens(B, T)
    with torch.no_grad():
        expected = model(tokens)[0]
    for logits, _ in run_threads(W, with_experts, model, forward_experts, tokens):
        assert_close(logits, expected, 1e-12)


@pytest.mark.parametrize("W, B", [(2, 3), (3, 2), (4, 1)])
def test_generated_tokens(W, B):
    model, prompt = mixture_of(6, 2), random_tokens(B, 5)
    expected = generate_kvcache(model, prompt, 15, 16)  # beyond the context
    for tokens in run_threads(W, with_experts, model, generate_experts, prompt, 15, 16):
        assert torch.equal(tokens, expected)


def test_experts_that_no_token_chooses():
    model, tokens = mixture_of(6, 2), random_tokens(3, 7)
    for block in model.blocks:
        router = block.ffwd.router = torch.nn.Linear(E, 6).double()
        with torch.no_grad():
            router.weight.zero_()  # all tokens choose the same two
            router.bias.copy_(torch.tensor([0.0, 3.0, 0.0, 0.0, 2.0, 0.0]))
    expected = model(tokens)[0]
    loads = run_threads(4, with_experts, model, load_of, tokens)
    assert 0 in loads and sum(loads) == 2 * tokens.numel() * L
    for logits, _ in run_threads(4, with_experts, model, forward_experts, tokens):
        assert_close(logits, expected, 1e-12)


@given(W=st.integers(1, 6), n=st.integers(1, 9))
def test_each_expert_is_on_one_rank(W, n):
    assert [i for r in range(W) for i in part_of(n, r, W)] == list(range(n))
    model = mixture_of(n, 1)
    whole = {name: p for name, p in model.named_parameters() if ".experts." in name}

    def parts(team):
        keep_experts(team, "experts", model)
        return {name: p for name, p in team.kept.experts.named_parameters() if ".experts." in name}

    ranks = run_threads(W, parts)
    for name, parameter in whole.items():
        assert torch.equal(torch.cat([rank[name] for rank in ranks]), parameter)


def test_capacity_counts_each_ranks_own_tokens():
    roomy, tight = mixture_of(4, 2, capacity=4.0), mixture_of(4, 2, capacity=0.5)
    tokens = random_tokens(4, 8)
    expected = mixture_of(4, 2)(tokens)[0]
    for logits, _ in run_threads(2, with_experts, roomy, forward_experts, tokens):
        assert_close(logits, expected, 1e-12)
    loads = run_threads(2, with_experts, tight, load_of, tokens)
    assert sum(loads) <= 2 * L * 4 * 8  # ranks, layers, experts, ceil(0.5 * 16 tokens * 2 / 4)
    logits = run_threads(2, with_experts, tight, forward_experts, tokens)[0][0]
    assert logits.isfinite().all() and (logits - expected).abs().max() > 1e-3


@pytest.mark.parametrize("W", [1, 2, 3])
def test_bytes_are_counted(W):
    """Rows to other ranks, there and back, and the numbers of rows."""
    model, tokens = mixture_of(4, 2, dtype=torch.float32), random_tokens(6, 5)

    def run(team):
        keep_experts(team, "experts", model)
        team.reset_counts()
        forward_experts(team, "experts", tokens)
        return team.calls["all_to_all"], team.sent_bytes["all_to_all"]

    results = run_threads(W, run)
    n_moved = 0
    own_only = copy.deepcopy(model)
    for r, block_tokens in enumerate(tokens.tensor_split(W)):
        seen = []
        for block in own_only.blocks:
            block.ffwd.router.register_forward_hook(lambda _m, _x, out, seen=seen: seen.append(out))
        own_only(block_tokens)
        for logits in seen[-L:]:
            chosen = logits.topk(2, dim=-1).indices.flatten().tolist()
            n_moved += sum(expert not in part_of(4, r, W) for expert in chosen)
    assert all(calls == (0 if W == 1 else 3 * L) for calls, _ in results)
    announced = sum(8 * L * (4 - len(part_of(4, r, W))) for r in range(W))
    assert sum(sent for _, sent in results) == (0 if W == 1 else 2 * n_moved * E * 4 + announced)


# ---- Processes ----


def test_two_processes():
    model = mixture_of(3, 2, dropout_p=0.5)
    prompts = [random_tokens(B, 6) for B in (3, 1)]  # the second rank has one sequence, then none
    with ForkedRanks(2) as team:
        team.run(keep_experts, "experts", model)
        tokens = [team.run(generate_experts, "experts", prompt, 8, 16) for prompt in prompts]
        spread = OnAllRanks(team, "experts", forward_experts)
        losses = [window_losses(one, torch.arange(200) % 16, 4) for one in (spread, model, spread)]
    for found, prompt in zip(tokens, prompts, strict=True):
        assert torch.equal(found, generate_kvcache(model, prompt, 8, 16))
    assert_close(losses[0], losses[1], 1e-12)
    assert torch.equal(losses[0], losses[2])


def test_more_experts_for_a_token_than_there_are():
    result = run_script("main_expert_parallel.py", "--quick", "--top-k", "5")
    assert result.status == 2
    assert result.stderr == "main_expert_parallel.py: a token cannot have 5 of 4 experts\n"


@pytest.mark.slow
def test_a_run_with_a_capacity():
    """It is labelled approximate, and does not say of all tokens that their experts compute them."""
    result = run_script("main_expert_parallel.py", "--quick", "--capacity", "1", "--json", "-")
    assert result.status == 0, result.stderr + result.stdout
    report = result.json
    assert all(report["checks"].values()) and "at most 2 experts compute each token" in report["checks"]
    *exact, limited = report["rows"]
    assert limited["approximate"] and all(row["same_output"] for row in exact)
    held = next(lines for title, lines in report["sweeps"].items() if title.startswith("What a rank holds"))
    assert sum(line["rows"] for line in held) < 3 * 64 * 2 * 3  # sequences, tokens, experts, layers


@pytest.mark.slow
def test_quick_run():
    result = run_script("main_expert_parallel.py", "--quick", "--json", "-")
    assert result.status == 0, result.stderr + result.stdout
    report = result.json
    assert all(report["checks"].values()) and report["config"]["world_size"] == 2
    dense, one, ranks = report["rows"]
    assert dense["baseline"] and one["same_output"] and ranks["same_output"], (
        "the copies equal the dense model"
    )
    assert dense["n_parameters"] < ranks["n_parameters"] < 0.7 * one["n_parameters"]
    held = next(lines for title, lines in report["sweeps"].items() if title.startswith("What a rank holds"))
    assert [line["experts"] for line in held] == [2, 2] and all(line["exchanges"] == 9 for line in held)
    assert all(line["sent MB"] > 0 and line["rows"] > 0 for line in held)
    by_tokens, by_link = list(report["sweeps"].values())[-2:]
    spared, added = by_tokens[-1]["mixture, one process"] / 2, by_tokens[-1]["its exchanges"]
    assert (by_link[0]["spares ms at 64"], by_link[0]["adds ms at 64"]) == (spared, added)
