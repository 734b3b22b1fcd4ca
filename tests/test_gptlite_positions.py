"""Tokens at given positions against the model with a cache, which counts its own."""

import pytest
import torch
from helpers import assert_close, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite_kvcache import GPTlite_KVCache
from gptlite_positions import GPTlite_Positions, join_caches


@pytest.fixture(autouse=True, scope="module")
def no_gradients():
    with torch.no_grad():
        yield


@given(st.integers(1, 15), st.integers(0, 99))
def test_successive_positions_are_the_model_with_a_cache(n_past, seed):
    model, plain, tokens = (
        tiny_model(GPTlite_Positions),
        tiny_model(GPTlite_KVCache),
        random_tokens(2, 16, seed),
    )
    whole, places = plain(tokens)[0], torch.arange(16)
    assert_close(model(tokens)[0], whole)
    first, cache = model(tokens[:, :n_past], positions=places[:n_past])
    rest, _ = model(tokens[:, n_past:], cache, positions=places[n_past:], key_positions=places[:n_past])
    assert_close(torch.cat([first, rest], dim=1), whole)


@given(st.permutations(range(8)))
def test_order_does_not_matter_only_positions_do(order):
    """All tokens in any order, and in two passes: each sees those at lower positions."""
    model, tokens, places = tiny_model(GPTlite_Positions), random_tokens(1, 8), torch.tensor(order)
    logits, _ = model(tokens[:, places], positions=places)
    expected = model(tokens)[0]
    assert_close(logits, expected[:, places])


def test_gaps_are_allowed_and_positions_count():
    model, tokens = tiny_model(GPTlite_Positions), random_tokens(1, 4)
    gaps = torch.tensor([0, 3, 9, 15])
    logits, cache = model(tokens, positions=gaps)
    steps, past = [], None
    for i in range(4):  # one by one
        out, past = model(tokens[:, i : i + 1], past, positions=gaps[i : i + 1], key_positions=gaps[:i])
        steps.append(out)
    assert_close(torch.cat(steps, dim=1), logits)
    assert (logits - model(tokens)[0]).abs().max() > 1e-3 and cache[0][0].shape[2] == 4
    with pytest.raises(IndexError):
        model(tokens, positions=gaps + 1)


def test_joined_caches():
    a, b = ([(torch.full((1, 2, n, 3), float(n)),) * 2] * 2 for n in (2, 1))
    joined = join_caches(a, None, b)
    assert len(joined) == 2 and [t.shape[2] for t in joined[1]] == [3, 3]
    assert joined[0][0][0, 0, :, 0].tolist() == [2.0, 2.0, 1.0]
    assert join_caches(None) == [] and join_caches() == []
