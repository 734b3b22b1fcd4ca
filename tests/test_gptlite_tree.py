"""A tree of tokens in one forward: each path as it is alone, and a cache that keeps one of them."""

import pytest
import torch
from helpers import assert_close, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import StaticKVCache
from gptlite_tree import GPTlite_Tree, Tree, accepted_path, keep_path

MODEL, WHOLE = tiny_model(GPTlite_Tree), tiny_model(GPTlite)


@st.composite
def parents(draw, most=9):
    return [0] + [draw(st.integers(0, i)) for i in range(draw(st.integers(0, most)))]


def way_to(parents, node):
    """By definition: the nodes from the root to this one."""
    return [*way_to(parents, parents[node]), node] if node else [0]


@given(parents())
def test_depths_and_ancestors_by_definition(parents):
    tree = Tree(parents)
    for i in range(len(parents)):
        way = way_to(parents, i)
        assert tree.sees[i].nonzero()[:, 0].tolist() == sorted(way) and tree.depth[i] == len(way) - 1


@given(parents(), st.integers(0, 6), st.integers(0, 99))
def test_each_path_is_what_it_is_alone(parents, n_past, seed):
    """Behind any text, with NaN in the rows that were not written; nothing is written meanwhile."""
    tokens, cache = random_tokens(1, n_past + len(parents), seed), StaticKVCache(MODEL, 1)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    if n_past:
        MODEL(tokens[:, :n_past], cache)
    before = cache.k.clone().nan_to_num()
    logits, kept = MODEL(tokens[:, n_past:], cache, Tree(parents))
    assert torch.equal(cache.k.nan_to_num(), before) and cache.length == n_past
    assert_close(MODEL.fc_out(MODEL.hidden), logits)
    for node in range(len(parents)):
        way = [n_past + i for i in way_to(parents, node)]
        alone = tokens[:, [*range(n_past), *way]]
        assert_close(logits[0, node], WHOLE(alone)[0, -1])
    keep_path(cache, kept, way_to(parents, len(parents) - 1))
    _, expected = MODEL(alone)
    assert cache.length == alone.shape[1]
    for ours, theirs in ((cache.k, expected.k), (cache.v, expected.v)):
        assert_close(ours[..., : cache.length, :], theirs[..., : cache.length, :])


@given(parents(), st.integers(0, 4), st.data())
def test_the_accepted_path_is_the_longest_right_one(parents, longest, data):
    """By trying every node: right is a way whose every token is what its parent's best says."""
    token = st.integers(0, 1)
    tokens, best = ([data.draw(token) for _ in parents] for _ in range(2))
    path = accepted_path(tokens, Tree(parents), best, longest)
    ways = [way_to(parents, i) for i in range(len(parents))]
    right = [w for w in ways if all(tokens[b] == best[a] for a, b in zip(w, w[1:], strict=False))]
    right = [w for w in right if len(w) - 1 <= longest]
    assert path in right and len(path) == max(map(len, right))


def test_equal_siblings_do_not_hide_each_other():
    """Two children with the same token: the way through the second goes on further."""
    tree = Tree([0, 0, 0, 1, 2])
    assert accepted_path([1, 5, 5, 7, 6], tree, [5, 6, 6, 0, 0], 9) == [0, 2, 4]


def test_bad_trees():
    for parents in ([], [1, 0], [0, 1], [0, 0, 5], [0, -1]):
        with pytest.raises(ValueError, match="node 0 is the root"):
            Tree(parents)


def test_nodes_beyond_the_context_harm_no_others():
    cache, tokens = StaticKVCache(MODEL, 1), random_tokens(1, 19)
    MODEL(tokens[:, :15], cache)
    logits, _ = MODEL(tokens[:, 15:], cache, Tree([0, 0, 1, 2]))
    assert_close(logits[0, 0], WHOLE(tokens[:, :16])[0, -1])
    assert logits.isfinite().all()


def test_without_a_tree_it_is_the_static_model():
    tokens = random_tokens(2, 9)
    assert_close(MODEL(tokens)[0], WHOLE(tokens))
