"""Lookahead and Jacobi: the tokens of plain decoding, from guesses that the model makes for itself."""

import pytest
import torch
from helpers import quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite_kvcache import GPTlite_KVCache, StaticKVCache
from gptlite_tree import GPTlite_Tree
from main_kvcache import generate_kvcache
from speculative_lookahead import NgramPool, generate_jacobi, generate_lookahead, lookahead_tree

TARGET, PLAIN = tiny_model(GPTlite_Tree), tiny_model(GPTlite_KVCache)


@given(st.integers(1, 16), st.integers(1, 5), st.integers(2, 5), st.integers(1, 4), st.integers(0, 99))
def test_lookahead_gives_the_tokens_of_plain_decoding(T, width, n, n_kept, seed):
    """Any window, n-gram and pool, up to the last position of the context."""
    prompt, n_tokens, cache, rounds = random_tokens(1, T, seed), 17 - T, StaticKVCache(TARGET, 1), []
    out = generate_lookahead(TARGET, prompt, n_tokens, width, n, n_kept, cache, rounds)
    assert torch.equal(out, generate_kvcache(PLAIN, prompt, n_tokens, 16)) and cache.length == 16
    assert sum(accepted + 1 for _, accepted in rounds) == n_tokens - 1
    assert all(rows <= (n - 1) * (width + n_kept) for rows, _ in rounds)


@given(st.integers(1, 16), st.integers(1, 6), st.integers(0, 99))
def test_jacobi_gives_the_tokens_of_plain_decoding(T, n_guesses, seed):
    prompt, n_tokens, cache, rounds = random_tokens(1, T, seed), 17 - T, StaticKVCache(TARGET, 1), []
    out = generate_jacobi(TARGET, prompt, n_tokens, n_guesses, cache, rounds)
    assert torch.equal(out, generate_kvcache(PLAIN, prompt, n_tokens, 16)) and cache.length == 16
    assert sum(accepted + 1 for _, accepted in rounds) == n_tokens - 1


@pytest.mark.parametrize("n_tokens", [0, 1, 2, 5])
def test_budgets_are_exact(n_tokens):
    prompt, cache = random_tokens(1, 4), StaticKVCache(TARGET, 1)
    expected = generate_kvcache(PLAIN, prompt, n_tokens, 16)
    assert torch.equal(generate_lookahead(TARGET, prompt, n_tokens, 3, 3, 3, cache), expected)
    assert torch.equal(generate_jacobi(TARGET, prompt, n_tokens, 4, cache), expected)


def test_the_window_sees_what_the_paper_says():
    """Level 0: the root and what comes before in it; level j: level 0 up to its column, then that."""
    width, levels, candidates = 3, 3, [(7, 8), (9,)]
    tree, node = lookahead_tree(width, levels, candidates), lambda j, i: 1 + j * width + i
    assert len(tree.parents) == 1 + 9 + 3
    for j in range(levels):
        for i in range(width):
            seen = {0, *(node(0, c) for c in range(i + 1)), *(node(level, i) for level in range(j + 1))}
            assert set(tree.sees[node(j, i)].nonzero()[:, 0].tolist()) == seen
            assert tree.depth[node(j, i)] == 1 + i + j
    assert tree.parents[10:] == [0, 10, 0]


def test_the_pool_keeps_the_newest():
    pool = NgramPool(2)
    for ngram in ((1, 2, 3), (1, 4, 5), (2, 9, 9), (1, 2, 3), (1, 6, 7)):
        pool.add(ngram)
    assert pool.behind(1) == [(2, 3), (6, 7)] and pool.behind(2) == [(9, 9)] and pool.behind(5) == []


class Cycle(torch.nn.Module):
    """Stands in for GPTlite_Tree: the next token is always one more, mod 6, whatever came before."""

    seqlen = 64

    def forward(self, x, cache, tree=None):
        logits = torch.nn.functional.one_hot((x + 1) % 6, 6).double()
        if tree is None:
            cache.advance(x.shape[1])
            return logits, cache
        return logits, torch.zeros(2, 2, 2, x.shape[1], 16, dtype=torch.float64)


def test_a_text_that_goes_round_is_taken_in_whole_n_grams():
    """Once all six n-grams are in the pool, a step gives as many tokens as an n-gram has."""
    cache, rounds = StaticKVCache(tiny_model(GPTlite_Tree, seqlen=64), 1), []
    out = generate_lookahead(Cycle(), torch.arange(6)[None], 50, 4, 4, 2, cache, rounds)
    assert out[0].tolist() == [i % 6 for i in range(56)]
    assert [accepted for _, accepted in rounds[-5:-1]] == [3] * 4 and len(rounds) < 25


def test_jacobi_settles_where_a_token_repeats():
    class Same(Cycle):
        def forward(self, x, cache, tree=None):
            cache.advance(x.shape[1])
            return torch.nn.functional.one_hot(torch.full_like(x, 3), 6).double(), cache

    cache, rounds = StaticKVCache(tiny_model(GPTlite_Tree, seqlen=64), 1), []
    out = generate_jacobi(Same(), torch.tensor([[1, 2]]), 31, 4, cache, rounds)
    assert out[0].tolist() == [1, 2] + [3] * 31 and rounds == [(4, 4)] * 6


def test_bad_requests():
    cache = StaticKVCache(TARGET, 1)
    with pytest.raises(ValueError, match="2, 1 and 1 at least"):
        generate_lookahead(TARGET, random_tokens(1, 4), 3, 2, 1, 2, cache)
    for generate, more in ((generate_lookahead, (2, 3, 2)), (generate_jacobi, (2,))):
        with pytest.raises(ValueError, match="leave the context"):
            generate(TARGET, random_tokens(1, 9), 9, *more, cache)


def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("more/speculative_lookahead.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    assert [*rows] == ["static", "Jacobi, 8 guesses", "lookahead, width 3"]
    assert all(row["same_output"] for row in rows.values()) and len(report["why"]) == 3
    lines = report["sweeps"]["Steps traded for rows"]
    assert [line["form"] for line in lines] == [*rows][1:]
    for line in lines:
        assert 1 <= line["tokens a call"] and line["rows"] > 1
        assert line["calls a token"] <= 1  # never more calls than plain decoding


def test_script_refuses_n_grams_of_one(distilled_checkpoint):
    more = "--quick", "--levels", "1"
    run = run_script("more/speculative_lookahead.py", *more, checkpoint=distilled_checkpoint)
    assert run.status == 2 and "2 tokens or more" in run.stderr
