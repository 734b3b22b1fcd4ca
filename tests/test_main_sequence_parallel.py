"""Sequence parallelism: any length, any number of ranks, whole attention; nothing of the padding is seen."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, large_scores, random_tokens, run_script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from threaded_ranks import ForkedRanks, run_threads

from gptlite import GPTlite
from gptlite_merging import attend, fused_attend
from main_kvcache import generate
from main_sequence_parallel import (
    FORMS,
    GPTlite_Sequence,
    chunks_of,
    generate_sequence_parallel,
    keep,
    positions_of,
    prefill,
    ring_attention,
    ulysses_attention,
    visible_pairs,
)

SIZES = {"n_heads": 6, "d_head": 4}
MODEL, PARTS = tiny_model(GPTlite, **SIZES), tiny_model(GPTlite_Sequence, **SIZES)
every_form = pytest.mark.parametrize("form", FORMS)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ---- Who has which tokens ----


def test_positions_of_a_zigzag():
    def of(W, T):
        return [positions_of(rank, W, T, True).tolist() for rank in range(W)]

    assert of(2, 8) == of(2, 7) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert of(2, 9) == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    assert of(3, 2) == [[0, 5], [1, 4], [2, 3]]  # more ranks than tokens
    assert [positions_of(rank, 2, 7, False).tolist() for rank in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@given(st.integers(1, 6), st.integers(1, 40), st.booleans())
def test_each_token_is_somewhere_once(W, T, zigzag):
    parts = [positions_of(rank, W, T, zigzag).tolist() for rank in range(W)]
    assert len({len(part) for part in parts}) == 1 and all(part == sorted(part) for part in parts)
    assert sorted(sum(parts, [])) == list(range(W * len(parts[0])))
    assert W * len(parts[0]) < T + 2 * W  # less than a token of padding for each chunk


@pytest.mark.parametrize("W", [1, 2, 3, 4])
def test_pairs_are_those_that_causality_leaves_and_a_zigzag_shares_them_evenly(W):
    for zigzag in (False, True):
        of_ranks, seen = [], []
        for rank in range(W):
            pairs = [
                (chunks_of(rank, W, zigzag)[i], chunks_of(source, W, zigzag)[j], diagonal)
                for source in range(W)
                for i, j, diagonal in visible_pairs(rank, source, W, zigzag)
            ]
            of_ranks.append(len(pairs))
            seen += pairs
        n = W * (2 if zigzag else 1)
        assert sorted(seen) == [(a, b, a == b) for a in range(n) for b in range(a + 1)]
        assert of_ranks == ([2 * W + 1] * W if zigzag else list(range(1, W + 1)))


# ---- Attention ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("Sq, Sk, causal", [(1, 1, True), (5, 5, True), (3, 7, False), (1, 4, False)])
def test_both_forms_tell_output_and_log_sum_exp(Sq, Sk, causal, dtype):
    q, k, v = draw(2, 3, Sq, 8), draw(2, 3, Sk, 8, seed=1), draw(2, 3, Sk, 8, seed=2)
    scores = q @ k.transpose(-2, -1) / math.sqrt(8)
    if causal:
        scores = scores.masked_fill(torch.ones(Sq, Sk, dtype=torch.bool).triu(1), -math.inf)
    for form in (attend, fused_attend):
        out, lse = form(*(t.to(dtype) for t in (q, k, v)), causal)
        assert out.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)
        tolerance = 0.05 if dtype == torch.bfloat16 else None
        assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=causal), tolerance)
        assert_close(lse, torch.logsumexp(scores, dim=-1), tolerance)


def test_no_keys_weigh_nothing():
    for form in (attend, fused_attend):
        out, lse = form(draw(1, 2, 1, 4), draw(1, 2, 0, 4), draw(1, 2, 0, 4), False)
        assert torch.equal(out, torch.zeros_like(out)) and (lse == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_beyond_16_bits(dtype):
    for q, k, v, expected in large_scores(dtype):
        for form in (attend, fused_attend):
            assert_close(form(q, k, v, True)[0], expected)


def attention_on(team, form, q, k, v, by_definition):
    """The part of a rank of whole q, k, v [B, H, T, D], padding being zeros; its positions."""
    attention, zigzag = FORMS[form]
    T = q.shape[2]
    positions = positions_of(team.rank, team.world_size, T, zigzag)
    padded = [
        F.pad(t, (0, 0, 0, int(positions.max()) + team.world_size * len(positions) - T)) for t in (q, k, v)
    ]
    part = [t[:, :, positions] for t in padded]
    how = {"attend": attend} if by_definition else {}
    return attention(team, *part, **how), positions


def joined(results, T):
    out = torch.cat([part for part, _ in results], dim=2)
    return out[:, :, torch.cat([positions for _, positions in results]).argsort()[:T]]


@every_form
@settings(max_examples=10)
@given(
    W=st.sampled_from([1, 2, 3]), T=st.integers(1, 20), seed=st.integers(0, 99), by_definition=st.booleans()
)
def test_equals_whole_attention(form, W, T, seed, by_definition):
    q, k, v = (draw(2, 6, T, 4, seed=seed + i) for i in range(3))
    results = run_threads(W, attention_on, form, q, k, v, by_definition)
    assert_close(joined(results, T), F.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("T", [7, 8, 9])
def test_gradients(T):
    """Through the ring's merging and past its padding, with an exchange that autograd can follow."""
    W, size = 2, -(-T // 2)
    qkv = [draw(1, 2, T, 4, seed=i).requires_grad_() for i in range(3)]
    weight = draw(1, 2, T, 4, seed=9)
    q, k, v = (F.pad(t, (0, 0, 0, W * size - T)).split(size, dim=2) for t in qkv)
    outs = []
    for rank in range(W):

        class Team:
            world_size, at = W, rank

            def __init__(self, rank):
                self.rank = rank

            def shift(self, kv):
                self.at = (self.at - 1) % W
                return (torch.stack([k[self.at], v[self.at]]),), lambda: None

        team = Team(rank)
        outs.append(ring_attention(team, q[rank], k[rank], v[rank], zigzag=False, attend=attend))
    found = torch.autograd.grad((torch.cat(outs, dim=2)[:, :, :T] * weight).sum(), qkv)
    whole = F.scaled_dot_product_attention(*qkv, is_causal=True)
    assert_close(found, torch.autograd.grad((whole * weight).sum(), qkv))


def test_heads_that_do_not_divide_are_refused_on_all_ranks():
    x = draw(1, 4, 2, 4)

    def on_rank(team):
        with pytest.raises(ValueError, match="4 cannot be split over 3 ranks"):
            ulysses_attention(team, x, x, x)
        return sum(team.calls.values())

    assert run_threads(3, on_rank) == [0, 0, 0]


# ---- The model ----


def model_on(team, function, *args):
    team.kept.model = copy.deepcopy(PARTS)
    return function(team, *args)


@every_form
@settings(max_examples=8)
@given(W=st.sampled_from([1, 2, 3]), B=st.integers(1, 2), T=st.integers(1, 16))
def test_logits_and_cache(form, W, B, T):
    tokens = random_tokens(B, T, seed=T)

    def on_rank(team):
        with torch.no_grad():
            return prefill(team, copy.deepcopy(PARTS), tokens, form)

    results = run_threads(W, on_rank)
    order = torch.cat([positions for _, positions, _ in results]).argsort()[:T]
    with torch.no_grad():
        assert_close(torch.cat([logits for logits, *_ in results], dim=1)[:, order], MODEL(tokens))
    held = [cache[layer][part].shape[2] for *_, cache in results for layer in range(2) for part in range(2)]
    assert sum(held) == 4 * T  # each token on one rank, padding on none
    assert max(held) <= -(-T // W) + 1


@every_form
@settings(max_examples=6)
@given(W=st.sampled_from([1, 2, 3]), B=st.integers(1, 2), T=st.integers(1, 16), data=st.data())
def test_tokens_of_a_split_cache(form, W, B, T, data):
    n_tokens = data.draw(st.integers(0, 17 - T))
    prompt = random_tokens(B, T, seed=T)
    results = run_threads(W, model_on, generate_sequence_parallel, form, prompt, n_tokens, 16)
    assert all(torch.equal(tokens, generate(MODEL, prompt, n_tokens, 16)) for tokens in results)


def test_what_does_not_fit_is_refused():
    for prompt, n_tokens in ((random_tokens(1, 12), 6), (random_tokens(1, 0), 1)):
        with pytest.raises(ValueError, match="the context holds 1 to 16"):
            run_threads(1, model_on, generate_sequence_parallel, "ring", prompt, n_tokens, 16)


@pytest.mark.parametrize("W", [2, 3])
def test_bytes_are_counted(W):
    """Queries, keys, values and outputs in Ulysses; keys and values in the ring; a row a head in decoding."""
    T, L, H, D = 12, 2, 6, 4
    prompt, n_tokens = random_tokens(1, T), 3

    def on_rank(team, form):
        model_on(team, generate_sequence_parallel, form, prompt, n_tokens, 16)
        return dict(team.sent_bytes)

    for form in FORMS:
        for sent in run_threads(W, on_rank, form):
            t = T // W
            one = L * t * H * D * 8
            exchanged = sent.get("all_to_all" if form == "Ulysses" else "shift")
            assert exchanged == (one * 4 * (W - 1) // W if form == "Ulysses" else one * 2 * (W - 1))
            assert sent["all_gather"] == (n_tokens - 1) * L * H * (D + 1) * 8


def test_processes():
    """gloo between two processes does what the threads do."""
    prompt = random_tokens(2, 9)
    with ForkedRanks(2, "cpu") as team:
        team.run(keep, PARTS)
        for form in FORMS:
            results = team.gather(generate_sequence_parallel, form, prompt, 5, 16)
            assert all(torch.equal(tokens, generate(MODEL, prompt, 5, 16)) for tokens in results)


# ---- The script ----


@pytest.mark.slow
def test_the_script(checkpoint):
    run = run_script("main_sequence_parallel.py", "--quick", "--json", "-", checkpoint=checkpoint)
    assert run.status == 0, run.stderr
    report = run.json
    assert all(report["checks"].values())
    rows = {row["method"]: row for row in report["rows"]}
    assert [*rows] == ["one process", "a rank alone", *FORMS]
    assert all(row["same_output"] for row in rows.values())
    whole = rows["one process"]["kv_bytes_per_token"]
    assert all(whole / 2 <= rows[form]["kv_bytes_per_token"] < 0.56 * whole for form in FORMS)
    ring, zigzag = report["sweeps"]["Pairs of chunks, queries and keys, that a rank computes"]
    assert [ring["rank 0"], ring["rank 1"]] == [1, 2] and zigzag["rank 0"] == zigzag["rank 1"] == 5
    long, by_link = list(report["sweeps"].values())[-2:]
    assert by_link[0]["spares ms at 256"] == long[-1]["one process"] / 2
    assert by_link[0]["adds ms at 256"] == long[-1]["ring's exchanges"]


@pytest.mark.parametrize(
    "options, line",
    [
        (["--world-size", "4"], "Ulysses splits heads: 6 cannot be split over 4 ranks evenly"),
        (
            ["--prompt-len", "200", "--n-tokens", "100"],
            "200 tokens and 100 new ones do not fit the context of 256",
        ),
    ],
)
def test_sizes_that_do_not_fit(options, line, checkpoint):
    run = run_script("main_sequence_parallel.py", "--quick", *options, checkpoint=checkpoint)
    assert run.status == 2 and run.stderr == f"main_sequence_parallel.py: {line}\n"
