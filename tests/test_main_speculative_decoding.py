"""Speculative decoding: greedy the same tokens, sampled the same distribution, and caches that forget."""

import itertools
from collections import Counter

import pytest
import torch
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import main_speculative_decoding as speculative
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from main_kvcache import generate_kvcache
from main_speculative_decoding import (
    DraftModel,
    accept_sampled,
    acceptance_probability,
    distribution,
    generate_speculative,
    residual,
)

TARGET, PLAIN = tiny_model(GPTlite_StaticKVCache), tiny_model(GPTlite_KVCache)
OTHER = tiny_model(GPTlite_StaticKVCache, n_layers=1, seed=1)


class WatchedDraft(DraftModel):
    """DraftModel that fails unless both caches hold what they may in front of every round."""

    def __init__(self, model, target_cache):
        super().__init__(model)
        self.target_cache, self.read_before = target_cache, []

    def propose(self, ids, n, *more):
        assert self.target_cache.length == len(ids) - 1
        kept = min(self.cache.length, len(ids) - 1)
        assert kept >= len(ids) - 2 or kept == 0  # at most its own last draft is missing
        assert self.read_before[:kept] == ids[:kept]
        drafted, q = super().propose(ids, n, *more)
        assert drafted.shape == (1, n) and self.cache.length == len(ids) + n - 1
        self.read_before = ids + drafted[0, :-1].tolist()
        return drafted, q


class WrongDraft:
    """Proposes what the target never chooses."""

    def reset(self):
        pass

    def propose(self, ids, n, *more):
        text = generate_kvcache(PLAIN, torch.tensor([ids]), n, 16)[0, len(ids) :]
        return (text[None] + 1) % 16, None


class Certain(WrongDraft):
    """Proposes tokens of a given text."""

    def __init__(self, text):
        self.text = text

    def propose(self, ids, n, *more):
        return self.text[:, len(ids) : len(ids) + n], None


# Greedy


@given(st.integers(1, 16), st.integers(0, 16), st.integers(1, 7), st.integers(0, 99))
def test_greedy_tokens_equal_plain_decoding(T, n_tokens, draft_len, seed):
    """Any prompt, budget and draft length, up to the last position of the context; caches as they must be."""
    prompt, n_tokens, cache = random_tokens(1, T, seed), min(n_tokens, 17 - T), StaticKVCache(TARGET, 1)
    cache.k.fill_(float("nan"))  # what is not written is never read
    cache.v.fill_(float("nan"))
    draft, rounds = WatchedDraft(OTHER, cache), []
    out = generate_speculative(TARGET, prompt, n_tokens, draft, draft_len, cache, rounds=rounds)
    assert torch.equal(out, generate_kvcache(PLAIN, prompt, n_tokens, 16))
    assert cache.length == (T + n_tokens - 1 if n_tokens else 0)
    assert sum(accepted + 1 for _, accepted in rounds) == max(n_tokens - 1, 0)
    assert all(accepted <= drafted <= draft_len for drafted, accepted in rounds)


def test_the_target_as_its_own_draft_is_accepted_for_ever():
    target = tiny_model(GPTlite_StaticKVCache, seqlen=64)
    cache, rounds = StaticKVCache(target, 1), []
    draft = WatchedDraft(target, cache)
    generate_speculative(target, random_tokens(1, 5), 41, draft, 3, cache, rounds=rounds)
    assert rounds == [(3, 3)] * 10


@given(st.integers(1, 5), st.integers(0, 99))
def test_a_draft_that_is_always_wrong_costs_no_token(draft_len, seed):
    prompt, cache, rounds = random_tokens(1, 6, seed), StaticKVCache(TARGET, 1), []
    out = generate_speculative(TARGET, prompt, 9, WrongDraft(), draft_len, cache, rounds=rounds)
    assert torch.equal(out, generate_kvcache(PLAIN, prompt, 9, 16))
    assert len(rounds) == 8 and all(accepted == 0 for _, accepted in rounds)


@pytest.mark.parametrize("n_tokens", [1, 2, 5, 7])
def test_budgets_are_exact_with_the_token_on_top_counted(n_tokens):
    prompt, cache = random_tokens(1, 4), StaticKVCache(TARGET, 1)
    text, rounds = generate_kvcache(PLAIN, prompt, 12, 16), []
    out = generate_speculative(TARGET, prompt, n_tokens, Certain(text), 4, cache, rounds=rounds)
    assert torch.equal(out, text[:, : 4 + n_tokens])
    assert [drafted for drafted, _ in rounds] == {1: [], 2: [0], 5: [3], 7: [4, 0]}[n_tokens]


def test_the_end_token_ends_inside_a_round():
    """As a draft of each place, as the token on top, and never."""
    prompt, cache = random_tokens(1, 4, seed=3), StaticKVCache(TARGET, 1)
    text = generate_kvcache(PLAIN, prompt, 12, 16)
    for place in range(4, 16):
        end = text[0, place].item()
        first = text[0, 4:].tolist().index(end) + 4
        out = generate_speculative(TARGET, prompt, 12, Certain(text), 4, cache, end=end)
        assert torch.equal(out, text[:, : first + 1]) and cache.length == first
    absent = next(token for token in range(16) if token not in text[0, 4:])
    assert torch.equal(generate_speculative(TARGET, prompt, 12, Certain(text), 4, cache, end=absent), text)


def test_room_of_two_tokens_and_no_position_past_the_context():
    prompt, cache, rounds = random_tokens(1, 14), StaticKVCache(TARGET, 1), []
    draft = WatchedDraft(OTHER, cache)
    out = generate_speculative(TARGET, prompt, 3, draft, 4, cache, rounds=rounds)
    assert torch.equal(out, generate_kvcache(PLAIN, prompt, 3, 16)) and cache.length == 16
    assert all(drafted <= 1 for drafted, _ in rounds)


def test_caches_are_used_again():
    cache = StaticKVCache(TARGET, 1)
    draft = WatchedDraft(OTHER, cache)
    for seed in range(3):
        prompt = random_tokens(1, 3 + seed, seed)
        out = generate_speculative(TARGET, prompt, 9, draft, 3, cache)
        assert torch.equal(out, generate_kvcache(PLAIN, prompt, 9, 16))


def test_bad_requests():
    cache = StaticKVCache(TARGET, 1)
    draft = DraftModel(OTHER)
    for shape, n_tokens, draft_len, words in (
        ((1, 0), 3, 2, "prompt is empty"),
        ((2, 3), 3, 2, "2 prompts"),
        ((1, 3), -1, 2, "0 and 1 at least"),
        ((1, 3), 3, 0, "0 and 1 at least"),
        ((1, 10), 8, 2, "leave the context"),
    ):
        with pytest.raises(ValueError, match=words):
            prompt = torch.zeros(shape, dtype=torch.int64)
            generate_speculative(TARGET, prompt, n_tokens, draft, draft_len, cache)


# Sampled


def test_the_rule_of_the_papers_on_three_tokens():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    accepted = (q * acceptance_probability(p, q)).sum()
    assert_close(accepted, torch.minimum(p, q).sum())
    assert_close(accepted, 0.7)
    assert_close(residual(p, q), torch.tensor([1.0, 0.0, 0.0]).double())
    assert_close(residual(p, p), p)  # nothing is left: never used, and no 0/0


@given(st.integers(0, 10**6), st.integers(2, 9), st.floats(0.05, 4.0))
def test_what_the_rule_emits_is_p(seed, V, temperature):
    """Enumerated over drafts, with tokens that p or q never gives; without the residual it is not p."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, V, generator=generator, dtype=torch.float64).mul(2)
    p, q = distribution(p, temperature), distribution(q, temperature)
    p, q = (torch.where(t > t.sort().values[0], t, 0) for t in (p, q))
    p, q = p / p.sum(), q / q.sum()
    kept = q * acceptance_probability(p, q)
    assert_close(kept + (1 - kept.sum()) * residual(p, q), p)


def test_distribution_is_softmax_or_the_best():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert_close(distribution(logits, 2.0), torch.softmax(logits.double() / 2, -1))
    assert distribution(logits, 0).tolist() == [[0.0, 1.0, 0.0]]


class TableCache:
    """Counts tokens, for models that look at the last token only."""

    def __init__(self):
        self.length, self.window, self.k = 0, 64, torch.zeros(0)

    def reset(self):
        self.length = 0

    def advance(self, n):
        self.length += n


class Table:
    """A model of bigrams: logits of the next token are a row of a table [V, V]."""

    seqlen = 64

    def __init__(self, V, seed, scale=1.0):
        generator = torch.Generator().manual_seed(seed)
        self.table = scale * torch.randn(V, V, generator=generator, dtype=torch.float64)

    def __call__(self, tokens, cache):
        cache.advance(tokens.shape[1])
        return self.table[tokens], cache


class TableDraft(DraftModel):
    def __init__(self, model):
        self.model, self.cache = model, TableCache()


class CertainTable(TableDraft):
    """Greedy drafts, which come without q."""

    def propose(self, ids, n, temperature=0.0, generators=None):
        return super().propose(ids, n)


def chi_square(draft, draft_len, n=3000, V=3):
    """How far the four-token texts of n runs are from the target's, with 80 degrees of freedom."""
    target = Table(V, 0, 0.7)
    counts = Counter()
    for request in range(n):
        prompt = torch.zeros(1, 1, dtype=torch.int64)
        out = generate_speculative(target, prompt, 4, draft, draft_len, TableCache(), 1.0, request)
        counts[tuple(out[0, 1:].tolist())] += 1
    p, total = target.table.softmax(-1), 0.0
    for a, b, c, d in itertools.product(range(V), repeat=4):
        expected = n * (p[0, a] * p[a, b] * p[b, c] * p[c, d]).item()
        total += (counts[a, b, c, d] - expected) ** 2 / expected
    return total


LIMIT = 124.8  # exceeded by chance in one of 1000 tests at 80 degrees of freedom


@pytest.mark.parametrize("draft_len", [1, 2])
def test_sampled_texts_have_the_targets_distribution(draft_len):
    """All 81 texts of four tokens are counted."""
    assert chi_square(TableDraft(Table(3, 1, 2.0)), draft_len) < LIMIT


def test_greedy_drafts_of_a_sampled_target_are_judged_as_certain():
    assert chi_square(CertainTable(Table(3, 1, 2.0)), 2) < LIMIT


@pytest.mark.parametrize("wrong", ["p for the residual", "q(x) for certain drafts"])
def test_wrong_rules_are_seen(wrong, monkeypatch):
    """The control: with a rule that is nearly right the same count must fail."""
    draft = TableDraft(Table(3, 1, 2.0))
    if wrong == "p for the residual":
        monkeypatch.setattr(speculative, "residual", lambda p, q: p)
    else:

        class Biased(CertainTable):
            def propose(self, ids, n, temperature=0.0, generators=None):
                drafted, _ = super().propose(ids, n)
                before = torch.cat([torch.tensor([ids[-1]]), drafted[0, :-1]])
                return drafted, self.model.table[before].softmax(-1)

        draft = Biased(Table(3, 1, 2.0))
    assert chi_square(draft, 2) > 1.5 * LIMIT


def test_random_numbers_depend_on_request_and_position_alone():
    """A text does not change with what was drawn before it, nor with another request's; requests differ."""
    cache, draft = StaticKVCache(TARGET, 1), DraftModel(OTHER)
    prompt = random_tokens(1, 3)
    texts = [generate_speculative(TARGET, prompt, 12, draft, 3, cache, 2.0, r) for r in range(4)]
    torch.manual_seed(5)
    again = [generate_speculative(TARGET, prompt, 12, draft, 3, cache, 2.0, r) for r in (2, 0, 3, 1)]
    assert all(torch.equal(texts[r], one) for r, one in zip((2, 0, 3, 1), again, strict=True))
    assert len({tuple(text[0].tolist()) for text in texts}) == 4


def test_p_equal_to_q_accepts_and_what_p_never_gives_is_rejected():
    generators = lambda i, use: speculative.generator_of(i, 0, use)  # noqa: E731
    p = torch.tensor([[0.5, 0.5, 0.0]] * 3).double()
    assert accept_sampled([0, 1], p, p[:2], generators)[:2] == [0, 1]
    for drafted in ([2, 0], [2, 2]):
        (emitted,) = accept_sampled(drafted, p, torch.full((2, 3), 1 / 3).double(), generators)
        assert emitted in (0, 1)


# The script


def test_script(distilled_checkpoint, tmp_path):
    """--quick: the target drafts for itself under another name, so every draft is accepted, up to ties."""
    report = quick_report("main_speculative_decoding.py", tmp_path, distilled_checkpoint)
    rows = {row["method"]: row for row in report["rows"]}
    assert [*rows] == ["static", "2 drafts", "2 of its own"] and len(report["checks"]) == 5
    assert rows["static"]["baseline"] and rows["2 drafts"]["same_output"]
    assert rows["2 drafts"]["kv_bytes_per_token"] == 2 * rows["static"]["kv_bytes_per_token"]
    assert rows["2 drafts"]["peak_memory_mb"] > rows["static"]["peak_memory_mb"]
    for name in ("2 drafts", "2 of its own"):
        assert 1 <= rows[name]["tokens_per_round"] <= 3 and rows[name]["tpot_ms"] is None
        assert rows[name]["n_steps"] > 0 and rows[name]["predicted"] > 0
    assert rows["2 of its own"]["accepted"] > 0.8
    temperatures = report["sweeps"]["Drafts accepted by temperature"]
    assert [line["temperature"] for line in temperatures] == [0.0, 0.5, 1.0]
    assert all(line["real text, greedy drafts"] <= line["real text"] + 1e-9 for line in temperatures)
    speed = report["sweeps"]["Speed-up by the drafts of a round"]
    assert [line["drafts"] for line in speed] == [2] and len(report["why"]) == 4


def test_script_refuses_what_leaves_the_context(distilled_checkpoint):
    run = run_script(
        "main_speculative_decoding.py", "--quick", "--n-tokens", "300", checkpoint=distilled_checkpoint
    )
    assert run.status == 2 and "leave the context, 257 at most" in run.stderr
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.slow
def test_script_with_peers(distilled_checkpoint):
    """Another library's assisted generation gives the same tokens."""
    run = run_script(
        "main_speculative_decoding.py", "--quick", "--peers", "--json", "-", checkpoint=distilled_checkpoint
    )
    assert run.status == 0, run.stderr + run.stdout
    rows = {row["method"]: row for row in run.json["rows"]}
    assert rows["transformers"]["same_output"] and rows["transformers, assisted"]["same_output"]
