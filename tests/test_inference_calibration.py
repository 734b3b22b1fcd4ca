"""inference_calibration.py: what layers read, and errors of their outputs."""

import pytest
import torch
from helpers import assert_close, random_tokens, tiny_model

from gptlite import GPTlite
from inference_calibration import (
    change_blocks,
    input_products,
    input_squares,
    linear_layers,
    relative_error,
    sum_inputs,
)


def test_statistics_are_those_of_the_inputs_and_hooks_go():
    model, tokens = tiny_model(GPTlite), random_tokens(3, 7)
    layers, seen = linear_layers(model.blocks), []
    hook = layers["1.ffwd.net.2"].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    sums = sum_inputs(layers, input_products, lambda: model(tokens))
    x = seen[0].reshape(-1, 128)
    assert_close(sums["1.ffwd.net.2"], sum(torch.outer(row, row) for row in x), 1e-9)
    hook.remove()
    with pytest.raises(ZeroDivisionError):
        sum_inputs(layers, input_squares, lambda: 1 / 0)
    assert all(not layer._forward_pre_hooks for layer in layers.values())


def test_relative_error_is_that_of_the_outputs():
    generator = torch.Generator().manual_seed(0)
    W, other, X = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (5, 5, 20))
    expected = (X @ (W - other).T).norm() / (X @ W.T).norm()
    assert_close(relative_error(W, other, input_products(X)), expected.item(), 1e-9)
    assert relative_error(W, W, input_products(X)) == 0
    assert relative_error(W, other, torch.zeros(8, 8)) == 0  # no inputs, no outputs, no error


def test_each_block_is_changed_by_what_it_reads_behind_the_changed_ones():
    """A first block that is made to add nothing: the second reads the embeddings alone."""
    model, tokens, seen = tiny_model(GPTlite), random_tokens(3, 7), []

    def change(block, known):
        seen.append(known)
        for layer in (block.mha.out_proj, block.ffwd.net[2]):
            layer.weight.zero_(), layer.bias.zero_()

    x = model.token_embedding(tokens) + model.position_embedding.weight[:7]  # [B, T, E]
    assert change_blocks(model, tokens, input_products, change, batch_size=2) is model
    assert list(seen[0]) == list(linear_layers(model.blocks[0]))
    for block, known in zip(model.blocks, seen, strict=True):
        assert_close(known["mha.query_proj"], input_products(block.ln1(x).flatten(0, 1)))
