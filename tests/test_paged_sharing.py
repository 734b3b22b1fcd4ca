"""Sharing of KV blocks: forks, copy on write, samples and beams give what each answer gets alone."""

import random

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from test_gptlite_paged import MODEL, PAGED, alone, assert_clean
from test_main_paged_attention import refusal

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_StaticKVCache, StaticKVCache
from gptlite_paged import GPTlite_Paged, Sequence, choose_tokens
from inference_serving import PagedScheduler
from paged_sharing import SharingPool, beam_search, beam_search_contiguous, parallel_samples


def poisoned(n_blocks, block_size):
    """A pool in which everything that was never written is NaN: reading it would be seen."""
    pool = SharingPool(PAGED, n_blocks, block_size)
    pool.kv.fill_(float("nan"))
    return pool


@given(st.integers(0, 10**6), st.integers(1, 8))
def test_forks_in_a_running_batch(seed, block_size):
    """Forks at any time, copy on write, also preempted: each continues its text with its own noise."""
    draw = random.Random(seed)
    smallest = -(-16 // block_size)
    pool = poisoned(draw.randint(smallest, 3 * smallest), block_size)
    scheduler = PagedScheduler(PAGED, pool, swap=draw.random() < 0.5, temperature=1.0)
    prompt = random_tokens(1, draw.randint(1, 9), seed)[0].tolist()
    sequences = [Sequence(0, list(prompt), 16), Sequence(1, list(prompt), 14)]
    starts = [list(prompt), list(prompt)]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.running or scheduler.waiting:
        scheduler.step()
        if scheduler.running and len(sequences) < 6 and draw.random() < 0.5:
            child = pool.fork(draw.choice(scheduler.running), len(sequences))
            starts.append(list(child.ids))
            sequences.append(child)
            scheduler.running.append(child)
    for i, sequence in enumerate(sequences):
        assert sequence.ids == alone(starts[i], sequence.end - len(starts[i]), i, 1.0)
    assert_clean(pool)


def prefilled(pool, length, room):
    """A sequence of `length` cached tokens in blocks for `room`."""
    sequence = Sequence(0, random_tokens(1, length)[0].tolist(), 16)
    pool.grow(sequence, room)
    PAGED.step(pool, [(sequence, length)])
    return sequence


def test_a_half_full_shared_block_is_copied_once():
    """PC-6: two texts continue one half-full block; full blocks stay shared."""
    pool = poisoned(8, 4)
    first = prefilled(pool, 6, 6)
    second, before, prefix = pool.fork(first, 1), pool.kv.clone(), list(first.ids)
    first.ids.append(3)
    second.ids.append(5)
    assert pool.n_missing(first, 1) == 1
    with pytest.raises(ValueError, match="cannot compute"):
        PAGED.step(pool, [(first, 1)])  # it would write into what the other reads
    pool.grow(first, 1)
    assert pool.n_copied == 1
    pool.grow(second, 1)
    assert pool.n_copied == 1
    assert first.table[0] == second.table[0]
    assert first.table[1] != second.table[1]
    assert torch.equal(pool.kv[:, first.table[1], :2], before[:, second.table[1], :2])
    _, logits = PAGED.step(pool, [(first, 1), (second, 1)])
    assert_close(logits, MODEL(torch.tensor([first.ids, second.ids]))[:, -1].detach())
    assert torch.equal(pool.kv[:, second.table[0]], before[:, second.table[0]])
    for sequence, row in zip((first, second), logits, strict=True):
        sequence.ids += choose_tokens(row[None], [sequence])
    for sequence in (first, second) * 3:  # in turns
        pool.grow(sequence, 1)
        _, logits = PAGED.step(pool, [(sequence, 1)])
        sequence.ids += choose_tokens(logits, [sequence])
    assert (first.ids, second.ids) == (alone([*prefix, 3], 4), alone([*prefix, 5], 4))
    assert first.table[0] == second.table[0]
    assert pool.n_copied == 1
    for sequence in (first, second):
        pool.drop(sequence)
    assert_clean(pool)


def test_only_blocks_that_are_written_next_are_copied():
    """Blocks that were taken ahead are shared by a fork too, and copied when their turn comes."""
    pool = poisoned(8, 4)
    first = prefilled(pool, 6, 10)
    pool.fork(first, 1)
    assert (pool.n_missing(first, 1), pool.n_missing(first, 4)) == (1, 2)
    pool.grow(first, 1)
    assert (pool.n_copied, pool.n_missing(first, 2), pool.n_missing(first, 4)) == (1, 0, 1)


def test_growing_beyond_the_pool_changes_nothing():
    pool = poisoned(2, 4)
    first = prefilled(pool, 6, 6)
    second = pool.fork(first, 1)
    second.ids.append(2)
    with pytest.raises(ValueError, match="free"):
        pool.grow(second, 1)
    assert second.table == first.table
    assert pool.ref == [2, 2]
    assert pool.n_copied == 0


@pytest.mark.parametrize("length", [3, 4, 5])
def test_parallel_samples(length):
    """Each sample is what it is alone; the prompt's full blocks are kept once, a half-full one is copied."""
    pool, k, n = poisoned(16, 4), 3, 6
    prompt = random_tokens(1, length)[0].tolist()
    samples = parallel_samples(PAGED, pool, Sequence(0, list(prompt), length + n), [1, 2], 1.0)
    assert [s.ids for s in samples] == [alone(prompt, n, i, 1.0) for i in range(k)]
    assert len({tuple(s.ids) for s in samples}) > 1
    cached, shared = -(-(length + n - 1) // 4), length // 4
    assert pool.n_blocks - len(pool.free) == shared + k * (cached - shared)
    assert pool.n_copied == (k - 1 if length % 4 else 0)
    for sample in samples:
        pool.drop(sample)
    assert_clean(pool)


@torch.no_grad()
def plain_beam_search(prompt, n_tokens, n_beams):
    """By the definition, without cache: all continuations, sorted."""
    beams = [(0.0, prompt)]
    for _ in range(n_tokens):
        found = []
        for score, ids in beams:
            logs = F.log_softmax(MODEL(torch.tensor([ids]))[0, -1], dim=-1).tolist()
            found += [(score + log, [*ids, token]) for token, log in enumerate(logs)]
        beams = sorted(found, reverse=True)[:n_beams]
    return beams


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 7), st.integers(1, 5), st.integers(1, 6))
def test_beams(seed, length, n_tokens, n_beams, block_size):
    prompt = random_tokens(1, length, seed)
    expected = plain_beam_search(prompt[0].tolist(), n_tokens, n_beams)
    pool = poisoned((n_beams + 1) * -(-16 // block_size), block_size)
    sequence = Sequence(0, prompt[0].tolist(), length + n_tokens)
    beams, scores = beam_search(PAGED, pool, sequence, n_beams)
    assert [beam.ids for beam in beams] == [ids for _, ids in expected]
    assert_close(scores, torch.tensor([score for score, _ in expected], dtype=torch.float64))
    assert pool.n_copied <= (n_beams - 1) * (n_tokens - 1)
    if block_size == 1 or n_beams == 1:
        assert pool.n_copied == 0
    for beam in beams:
        pool.drop(beam)
    assert_clean(pool)
    static = tiny_model(GPTlite_StaticKVCache)
    tokens, row_scores, n_tokens_copied = beam_search_contiguous(
        static, StaticKVCache(static, n_beams), prompt, n_tokens
    )
    assert tokens.tolist() == [ids for _, ids in expected]
    assert_close(row_scores, scores)
    assert n_tokens_copied == n_beams * sum(length + i for i in range(n_tokens))


@pytest.mark.parametrize("n_tokens", [2, 3])
def test_more_beams_than_the_vocabulary_has(n_tokens):
    """Six beams, five characters: the first step has five texts, from the second on there are six."""
    sizes = {"vocab_size": 5, "seqlen": 8}
    paged, static, plain = (tiny_model(c, **sizes) for c in (GPTlite_Paged, GPTlite_StaticKVCache, GPTlite))
    pool, prompt = SharingPool(paged, 32, 2), torch.tensor([[1, 4]])
    beams, scores = beam_search(paged, pool, Sequence(0, [1, 4], 2 + n_tokens), 6)
    tokens, row_scores, _ = beam_search_contiguous(static, StaticKVCache(static, 6), prompt, n_tokens)
    assert [beam.ids for beam in beams] == tokens.tolist() and len(tokens.unique(dim=0)) == 6
    assert_close(scores, row_scores)
    if n_tokens == 2:  # all 25 texts are compared
        every = [(a, b) for a in range(5) for b in range(5)]
        with torch.no_grad():
            logs = plain(torch.tensor([[1, 4, a] for a, _ in every])).log_softmax(dim=-1)  # [25, 3, V]
        total = [(logs[i, 1, a] + logs[i, 2, b]).item() for i, (a, b) in enumerate(every)]
        assert_close(scores, torch.tensor(sorted(total)[:-7:-1], dtype=torch.float64))


@pytest.mark.slow
def test_script(checkpoint):
    run = run_script("more/paged_sharing.py", "--quick", "--json", "-", checkpoint=checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    assert all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    in_rows, beams, apart, samples = rows.values()
    assert beams["copied_mb_per_step"] < in_rows["copied_mb_per_step"]
    assert all(row["n_blocks"] < row["n_unshared"] for row in (beams, samples))
    assert samples["n_blocks"] < apart["n_blocks"] == samples["n_unshared"]
    assert samples["forward_tokens"] < apart["forward_tokens"]


@pytest.mark.parametrize(
    "option, value", [("--prompt-len", "250"), ("--n-answers", "1"), ("--n-tokens", "1")]
)
def test_bad_input(checkpoint, option, value, monkeypatch, capsys):
    options = [option, value, "--checkpoint", checkpoint]
    assert f"{option} {value}" in refusal("more/paged_sharing.py", options, monkeypatch, capsys)
