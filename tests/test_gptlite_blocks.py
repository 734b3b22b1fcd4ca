"""Keys of blocks, and whether a model still has the weights that a cache was computed with."""

import torch
from helpers import tiny_model

from gptlite import GPTlite
from gptlite_blocks import block_keys, weights_of
from linear_packed import pack_linears


def test_keys():
    """A block's key holds all that is before it; halves that are swapped differ; a root separates users."""
    one = list(block_keys([1, 2, 3, 4, 5], 2))
    assert len(one) == len(set(one)) == 2
    assert list(block_keys([9, 2, 3, 4], 2))[1] != one[1]
    assert list(block_keys([3, 4, 1, 2], 2))[0] != one[0]
    assert list(block_keys([1, 2, 3, 4], 4)) != one[1:]
    assert set(block_keys([1, 2, 3, 4], 2, root=b"adapter")).isdisjoint(one)
    assert list(block_keys([1], 2)) == list(block_keys([], 2)) == []
    assert list(block_keys([1, 2, 1, 2], 2))[0] != list(block_keys([1, 2, 1, 2], 2))[1]


def test_weights_of_tells_other_weights():
    """Changes in place, new tensors and packed weights; the same weights are the same."""

    def seen(model):
        return [entry[1:] for entry in weights_of(model)]

    for prepare in (lambda model: model, lambda model: pack_linears(model.float())):
        model, other = prepare(tiny_model(GPTlite)), tiny_model(GPTlite, seed=1)
        kept = weights_of(model)
        before = [entry[1:] for entry in kept]
        model(torch.tensor([[1, 2]]))
        assert seen(model) == before
        model.load_state_dict(other.float().state_dict())
        after = seen(model)
        assert after != before
        state = {"fc_out.weight": other.fc_out.weight.detach().float()}
        model.load_state_dict(state, strict=False)  # one layer alone
        assert seen(model) != after
        assert seen(prepare(tiny_model(GPTlite))) != before  # equal values, another model
