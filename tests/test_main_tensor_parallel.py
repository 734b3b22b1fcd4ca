"""Tensor parallelism: every number of ranks computes what one process does, and sends what is said."""

import copy

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from threaded_ranks import ForkedRanks, run_threads

from gptlite import GPTlite
from gptlite_blocks import Sequence
from gptlite_gqa import GPTlite_GQA
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache
from gptlite_slots import GPTlite_Slots, SlotBatch
from inference_distributed import OnAllRanks, compare_shard, profiled
from inference_utils import window_losses
from main_kvcache import generate_kvcache
from main_tensor_parallel import (
    choose_together,
    generate_tensor_parallel,
    heads_of,
    keep_shard,
    part_of,
    shard_by_dtensor,
    shard_model,
)

SIZES = {"n_heads": 6, "d_head": 4, "vocab_size": 17}  # neither neurons nor characters divide by 3 or 6
V, L, E = 17, 2, 32


def model_of(model_class=GPTlite_KVCache, **kwargs):
    return tiny_model(model_class, **SIZES | kwargs)


def forward(team, model, *args):
    with torch.no_grad():
        return shard_model(team, copy.deepcopy(model))(*args)


# ---- Equal to one process ----


@pytest.mark.parametrize("W", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.2)]
)
def test_logits_and_cache(W, dtype, tolerance):
    model, tokens = model_of(dtype=dtype), random_tokens(3, 16, vocab_size=V)
    with torch.no_grad():
        expected, cache = model(tokens)
    results = run_threads(W, forward, model, tokens)
    for logits, _ in results:
        assert_close(logits, expected, tolerance)
        assert torch.equal(logits, results[0][0])
    for layer in range(L):  # the ranks' heads side by side are the whole cache
        for part in (0, 1):
            heads = [result[1][layer][part] for result in results]
            assert all(h.shape[1] == 6 // W for h in heads)
            assert_close(torch.cat(heads, dim=1), cache[layer][part], tolerance)


@pytest.mark.parametrize("G, W", [(1, 2), (1, 3), (1, 6), (2, 1), (2, 2), (2, 6), (3, 3), (3, 6), (6, 3)])
def test_fewer_heads_of_keys_and_values_than_ranks(G, W):
    model, tokens = model_of(GPTlite_GQA, n_groups=G), random_tokens(2, 9, vocab_size=V)
    with torch.no_grad():
        expected, cache = model(tokens)
    results = run_threads(W, forward, model, tokens)
    for rank, (logits, parts) in enumerate(results):
        assert_close(logits, expected, 1e-12)
        held = max(G // W, 1)
        first = rank * G // W
        assert parts[0][0].shape[1] == held
        assert_close(parts[0][0], cache[0][0][:, first : first + held], 1e-12)


@given(
    W=st.sampled_from([1, 2, 3, 6]),
    B=st.integers(1, 3),
    T=st.integers(1, 20),  # the context is 16
    n=st.integers(0, 6),
    seed=st.integers(0, 9),
)
def test_generated_tokens(W, B, T, n, seed):
    model, prompt = model_of(seed=seed), random_tokens(B, T, seed, V)

    def generate(team):
        keep_shard(team, "model", model, packed=False)
        return generate_tensor_parallel(team, "model", prompt, n, 16)

    expected = generate_kvcache(model, prompt, n, 16)
    for tokens in run_threads(W, generate):
        assert torch.equal(tokens, expected)


@given(W=st.sampled_from([2, 3, 6]), cut=st.integers(1, 15))
def test_cached_decoding_equals_one_pass_for_every_split(W, cut):
    model, tokens = model_of(), random_tokens(2, 16, vocab_size=V)

    def in_two(team):
        shard = shard_model(team, copy.deepcopy(model))
        with torch.no_grad():
            first, cache = shard(tokens[:, :cut])
            return torch.cat([first, shard(tokens[:, cut:], cache)[0]], dim=1)

    expected = model_of(GPTlite)(tokens)
    for logits in run_threads(W, in_two):
        assert_close(logits, expected, 1e-12)


@pytest.mark.parametrize("W", [2, 3])
def test_sequences_of_different_lengths(W):
    """Slots and static caches are made by the shard's own number of heads."""
    prompts = [random_tokens(1, T, seed=T, vocab_size=V)[0].tolist() for T in (1, 5, 11)]

    def serve(team):
        model = shard_model(team, model_of(GPTlite_Slots))
        batch = SlotBatch(model, 3, 16)
        sequences = [Sequence(i, list(prompt), len(prompt) + 4) for i, prompt in enumerate(prompts)]
        batch.step(sequences)
        while batch.running:
            batch.step()
        return [sequence.ids for sequence in sequences]

    whole = model_of()
    expected = [generate_kvcache(whole, torch.tensor([p]), 4, 16)[0].tolist() for p in prompts]
    assert run_threads(W, serve) == [expected] * W
    tokens = random_tokens(2, 7, vocab_size=V)
    for logits, cache in run_threads(W, forward, model_of(GPTlite_StaticKVCache), tokens):
        assert_close(logits, whole(tokens)[0], 1e-12)
        assert cache.k.shape[2] == 6 // W


# ---- Parts ----


@given(n=st.integers(0, 40), W=st.integers(1, 9))
def test_parts_are_everything_once_and_of_nearly_equal_size(n, W):
    parts = [part_of(n, rank, W) for rank in range(W)]
    assert [i for part in parts for i in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(H=st.integers(1, 24), W=st.integers(1, 12), share=st.integers(1, 6))
def test_a_head_finds_its_keys_on_its_rank(H, W, share):
    G = max(H // share, 1)
    if H % G:
        return
    if H % W or G % W and W % G:
        with pytest.raises(ValueError, match="evenly"):
            heads_of(0, W, H, G)
        return
    seen = []
    for rank in range(W):
        heads, groups = heads_of(rank, W, H, G)
        seen += heads
        # the shard takes consecutive heads as a group: each must be the group that the head has in the whole
        for i, head in enumerate(heads):
            assert groups[i // (len(heads) // len(groups))] == head // (H // G)
    assert seen == list(range(H))


def test_weights_are_split_and_small_ones_copied():
    model, W = model_of(), 3
    whole = dict(model.named_parameters())

    def parameters(team):
        return {n: p.detach() for n, p in shard_model(team, copy.deepcopy(model)).named_parameters()}

    parts = run_threads(W, parameters)
    for name, part in parts[0].items():
        original = whole[name.replace("linear.", "")]
        if part.shape == original.shape:
            assert all(torch.equal(other[name], original) for other in parts)
            assert original.numel() < V * E or "embedding" in name, (
                f"{name} is large, and whole on every rank"
            )
        else:
            dim = next(d for d in range(part.ndim) if part.shape[d] != original.shape[d])
            assert torch.equal(torch.cat([other[name] for other in parts], dim=dim), original)
    largest = max(sum(p.numel() for p in part.values()) for part in parts)
    assert largest < 0.5 * sum(p.numel() for p in whole.values())


@pytest.mark.parametrize("H, G, W", [(4, 4, 3), (6, 2, 3), (6, 6, 4), (2, 2, 3)])
def test_what_does_not_divide_is_refused_on_all_ranks_before_any_collective(H, G, W):
    model = tiny_model(GPTlite_GQA, n_heads=H, d_head=4, n_groups=G)

    def refused(team):
        with pytest.raises(ValueError, match="evenly"):
            shard_model(team, copy.deepcopy(model))
        return dict(team.calls)

    assert run_threads(W, refused) == [{}] * W


# ---- What is sent, and drawn ----


@pytest.mark.parametrize("W", [1, 2, 3])
def test_collectives_are_counted(W):
    model, prompt, n = model_of(dtype=torch.float32), random_tokens(2, 5, vocab_size=V), 4

    def generate(team):
        keep_shard(team, "model", model)
        generate_tensor_parallel(team, "model", prompt, n, 16)
        return dict(team.calls), dict(team.sent_bytes)

    for rank, (calls, sent) in enumerate(run_threads(W, generate)):
        if W == 1:
            assert calls == sent == {}
            continue
        assert calls == {"all_reduce": 2 * L * n, "all_gather": n, "broadcast": n}
        n_read = 2 * (5 + n - 1)  # tokens
        assert sent["all_reduce"] == 2 * L * E * 4 * n_read
        assert sent["all_gather"] == -(-V // W) * 4 * n_read
        assert sent["broadcast"] == (rank == 0) * n * 2 * 8


def test_a_token_is_drawn_once():
    logits = torch.zeros(4, 50, dtype=torch.float64)
    logits[:, 7] = 1e-3

    def draw(team):
        return choose_together(team, logits, temperature=1.0), choose_together(team, logits)

    for _ in range(3):
        results = run_threads(3, draw)
        for drawn, greedy in results:
            assert torch.equal(drawn, results[0][0]) and greedy.tolist() == [[7]] * 4
    counts = torch.bincount(torch.cat([run_threads(1, draw)[0][0] for _ in range(100)])[:, 0], minlength=50)
    assert counts.max() < 40, "it is drawn, not chosen"


# ---- Processes ----


def seed_by_rank(team):
    torch.manual_seed(team.rank)


def generate_both(team, prompt):
    """Greedy, drawn; the logits of the prompt."""
    greedy, drawn = (generate_tensor_parallel(team, "model", prompt, 8, 16, t) for t in (0.0, 1.0))
    with torch.no_grad():
        return greedy, drawn, team.kept.model(prompt)[0]


def test_two_processes():
    model, prompt = model_of(dropout_p=0.5), random_tokens(2, 6, vocab_size=V)
    with ForkedRanks(2) as team:
        team.run(keep_shard, "model", model, shard_model, False)
        team.run(seed_by_rank)
        results = team.gather(generate_both, prompt)
        spread = OnAllRanks(team, "model")
        losses = [window_losses(one, torch.arange(200) % V, 4) for one in (spread, model, spread)]
        assert not spread.training and not team.kept.model.training, "dropout stays off behind a loss"
    assert_close(losses[0], losses[1], 1e-12)
    assert torch.equal(losses[0], losses[2])
    expected = model_of()(prompt)[0]
    for greedy, drawn, logits in results:
        assert torch.equal(greedy, generate_kvcache(model, prompt, 8, 16))
        assert torch.equal(drawn, results[0][1]) and torch.equal(logits, results[0][2])
        assert_close(logits, expected, 1e-12)


class Checks:
    """Of a report: what was checked."""

    def __init__(self):
        self.failed, self.n = [], 0

    def check(self, name, passed):
        self.n += 1
        self.failed += [] if passed else [name]

    def check_close(self, name, actual, expected):
        self.check(name, actual.shape == expected.shape and (actual - expected).abs().max().item() < 1e-12)


def counted_by_team(team, name, tokens):
    team.reset_counts()
    with torch.no_grad():
        getattr(team.kept, name)(tokens)
    return dict(team.calls), dict(team.sent_bytes)


@torch.no_grad()
def test_dtensor_makes_the_same_split():
    """PyTorch's tensor parallelism and its profiler: the same logits, parts, caches and bytes."""
    tokens, checks = random_tokens(2, 9, vocab_size=V), Checks()
    models = [model_of(), model_of(GPTlite_GQA, n_groups=2)]
    with ForkedRanks(2) as team:
        for model in models:
            lines = []
            for shard in (shard_model, shard_by_dtensor):
                team.run(keep_shard, "model", model, shard, False)
                lines.append(compare_shard(checks, "a split", team, "model", model, tokens))
                if shard is shard_model:
                    seen, (calls, sent) = (team.run(f, "model", tokens) for f in (profiled, counted_by_team))
                    assert {kind: len(numbers) for kind, numbers in seen.items()} == calls
                    assert {kind: 8 * sum(numbers) for kind, numbers in seen.items()} == sent
            assert lines[0] == lines[1]
            assert lines[0]["all-reduces"] == 2 * L and lines[0]["B/token"] == 2 * L * E * 8
            assert lines[0]["on a rank"] == lines[0]["KV B/token"] / 2
            assert lines[0]["weights"] / 2 < lines[0]["of a rank"] < 0.6 * lines[0]["weights"]
            drawn = [team.gather(generate_tensor_parallel, "model", tokens, 5, 16, t) for t in (0.0, 1.0)]
            assert torch.equal(drawn[0][0], generate_kvcache(model, tokens, 5, 16))
            assert all(torch.equal(one, other) for one, other in drawn)
        assert checks.n == 8 and not checks.failed
        compare_shard(
            checks, "another model", team, "model", model_of(GPTlite_GQA, n_groups=2, seed=1), tokens
        )
        assert len(checks.failed) == 1 and "logits" in checks.failed[0]


def test_heads_that_do_not_divide_are_one_line():
    result = run_script("main_tensor_parallel.py", "--quick", "--world-size", "4")
    assert result.status == 2
    assert result.stderr == "main_tensor_parallel.py: 6 heads cannot be split over 4 ranks evenly\n"


@pytest.mark.slow
def test_quick_run():
    result = run_script("main_tensor_parallel.py", "--quick", "--json", "-")
    assert result.status == 0, result.stderr + result.stdout
    report = result.json
    assert all(report["checks"].values()) and report["config"]["world_size"] == 2
    one, ranks = report["rows"][0], next(row for row in report["rows"] if row["method"].startswith("2 ranks"))
    assert one["baseline"] and ranks["same_output"]
    assert ranks["kv_bytes_per_token"] == one["kv_bytes_per_token"] / 2
    assert ranks["n_parameters"] < 0.52 * one["n_parameters"]
    assert ranks["peak_memory_mb"] < 0.6 * one["peak_memory_mb"]
    held, by_length, by_width, by_link = report["sweeps"].values()
    assert [(line["KV heads"], line["split by"]) for line in held] == [
        (1, "hand"),
        (6, "hand"),
        (6, "DTensor"),
    ]
    assert held[0]["on a rank"] == held[0]["KV B/token"], "one head is copied to both ranks"
    assert all(line["on a rank"] == line["KV B/token"] / 2 for line in held[1:])
    assert all(line["its all-reduces"] > 0 for line in by_length + by_width)
    assert by_link[0]["adds ms at 768"] == by_width[-1]["its all-reduces"]
