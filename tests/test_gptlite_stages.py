"""GPTlite in stages: the same model, cut anywhere."""

import copy

import pytest
import torch
from helpers import assert_close, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from gptlite_stages import Stage, forward_stages, layers_of


def stages_of(model, S):
    return [Stage(copy.deepcopy(model), rank, S).eval() for rank in range(S)]


def test_uneven_stages():
    assert [len(layers_of(rank, 4, 6)) for rank in range(4)] == [2, 2, 1, 1]
    for S in (0, 7):
        with pytest.raises(ValueError, match=f"6 layers cannot fill {S} stages"):
            layers_of(0, S, 6)


@given(L=st.integers(1, 12), S=st.integers(1, 12))
def test_every_layer_is_in_one_stage(L, S):
    if S <= L:
        assert [layer for rank in range(S) for layer in layers_of(rank, S, L)] == list(range(L))


@pytest.mark.parametrize("S", [1, 2, 3, 4, 6])
def test_one_after_the_other_they_are_the_model(S):
    model, tokens = tiny_model(GPTlite_KVCache, n_layers=6), random_tokens(2, 9)
    stages = stages_of(model, S)
    with torch.no_grad():
        assert torch.equal(forward_stages(stages, tokens), model(tokens)[0])
        assert_close(forward_stages(stages, tokens), tiny_model(GPTlite, n_layers=6)(tokens), 1e-12)
    parts = [p for stage in stages for p in stage.parameters()]
    assert sum(p.numel() for p in parts) == sum(p.numel() for p in model.parameters()), (
        "nothing is held twice"
    )


@given(S=st.sampled_from([1, 2, 4]), cut=st.integers(1, 15), more=st.integers(0, 6))
def test_a_stage_keeps_the_cache_of_its_layers(S, cut, more):
    """In two passes, also beyond the context of 16, as the whole model does."""
    model, tokens = tiny_model(GPTlite_KVCache, n_layers=6), random_tokens(2, 16 + more)
    with torch.no_grad():
        first, cache = model(tokens[:, :cut])
        expected = torch.cat([first, model(tokens[:, cut:], cache)[0]], dim=1)
        parts, caches = [], [None] * S
        for piece in (tokens[:, :cut], tokens[:, cut:]):
            x = piece
            for rank, stage in enumerate(stages_of(model, S)):
                x, caches[rank] = stage(x, caches[rank])
                assert len(caches[rank]) == len(layers_of(rank, S, 6))
            parts.append(x)
    assert torch.equal(torch.cat(parts, dim=1), expected)
