"""GPTlite with adapters: beside the weights and merged into them the same model, whatever the product."""

import pytest
import torch
from helpers import assert_close, random_tokens, tiny_model

from gptlite import GPTlite
from gptlite_lora import (
    adapter_bytes,
    adapter_key,
    in_type,
    merge,
    new_adapter,
    target_layers,
    with_adapters,
)
from gptlite_lora import random_adapter as drawn_adapter
from main_multi_lora import gathered_product, grouped_product, naive_product

PRODUCTS = naive_product, gathered_product, grouped_product


def random_adapter(model, rank, seed=0):
    """An adapter that does something: both parts are random."""
    generator = torch.Generator().manual_seed(100 + seed)
    draw = lambda part: 0.3 * torch.randn(part.shape, generator=generator, dtype=part.dtype)  # noqa: E731
    return [(draw(A), draw(B)) for A, B in new_adapter(model, rank, seed)]


def test_shapes_and_bytes():
    model = tiny_model(GPTlite)
    layers, adapter = target_layers(model), new_adapter(model, 3)
    assert len(layers) == len(adapter) == 6 * len(model.blocks)
    for (module, name), (A, B) in zip(layers, adapter, strict=True):
        linear = getattr(module, name)
        assert A.shape == (linear.in_features, 3) and B.shape == (3, linear.out_features)
        assert A.dtype == linear.weight.dtype and A.abs().sum() > 0 and not B.any()
    assert adapter_bytes(adapter) == 8 * 3 * 2 * (4 * 64 + 2 * 160)  # 4 layers 32 x 32, 2 of 32 x 128, twice
    with pytest.raises(ValueError, match="rank 0"):
        new_adapter(model, 0)


def test_keys_tell_weights_not_names():
    adapter = random_adapter(tiny_model(GPTlite), 2)
    key = adapter_key(adapter)
    assert adapter_key([(A.clone(), B.clone()) for A, B in adapter]) == key and len(key) == 32
    assert adapter_key([(A.T.contiguous().T, B) for A, B in adapter]) == key  # the same in another order
    for change in (lambda A: A * (1 + 1e-9), lambda A: A.float(), lambda A: A.flatten(), lambda A: -A):
        assert adapter_key([(change(adapter[0][0]), adapter[0][1]), *adapter[1:]]) != key
    assert adapter_key(in_type(adapter, torch.bfloat16)) != key


def test_a_random_adapter_changes_the_model():
    model, x = tiny_model(GPTlite), random_tokens(2, 7)
    one, other = (merge(tiny_model(GPTlite), drawn_adapter(model, 4, seed))(x) for seed in (0, 1))
    assert (one - model(x)).abs().max() > 0.1 and (one - other).abs().max() > 0.1


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_new_adapter_adds_nothing_and_another_does(product):
    model, x = tiny_model(GPTlite), random_tokens(2, 7)
    many = with_adapters(model, [new_adapter(model, 2), random_adapter(model, 5)], product)
    for which, same in (([0, 0], True), ([1, 1], True), ([2, 2], False)):
        many.rows.use(torch.tensor(which))
        assert torch.equal(many(x), model(x)) == same


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("ranks", [(1,), (4, 8, 16), (16, 1, 3)])
def test_beside_the_weights_is_merged_into_them(product, ranks):
    """Ranks filled up with zeros, in float64, against a model of its own for each adapter."""
    model = tiny_model(GPTlite)
    adapters = [random_adapter(model, rank, i) for i, rank in enumerate(ranks)]
    many, x = with_adapters(model, adapters, product), random_tokens(3, 9)
    for a, adapter in enumerate(adapters, 1):
        alone = merge(tiny_model(GPTlite), adapter)
        many.rows.use(torch.full((3,), a))
        assert_close(many(x), alone(x))


def test_weights_are_shared_not_copied():
    model = tiny_model(GPTlite)
    many = with_adapters(model, [new_adapter(model, 2)], naive_product)
    addresses = {p.data_ptr() for p in many.parameters()}
    assert all(p.data_ptr() in addresses for p in model.parameters())
    own = [
        name
        for name, p in many.named_parameters()
        if p.data_ptr() not in {q.data_ptr() for q in model.parameters()}
    ]
    assert len(own) == 2 * len(target_layers(model)) and all(name.endswith((".A", ".B")) for name in own)
    assert type(model.blocks[0].mha.query_proj) is torch.nn.Linear  # the model that was given is what it was


def test_merging_and_taking_out_again():
    model, x = tiny_model(GPTlite), random_tokens(2, 7)
    before, adapter = model(x), random_adapter(model, 4)
    after = merge(model, adapter)(x)
    assert (after - before).abs().max() > 0.1
    assert_close(merge(model, adapter, -1)(x), before)


def test_gradients_reach_the_adapter_alone():
    """And only that of the rows' adapter."""
    model = tiny_model(GPTlite)
    for product in PRODUCTS:
        many = with_adapters(model, [random_adapter(model, 2, i) for i in range(2)], product)
        many.rows.use(torch.tensor([2, 2]))
        many(random_tokens(2, 5)).square().sum().backward()
        layer = many.blocks[0].ffwd.net[2]
        assert layer.A.grad[2].abs().sum() > 0 and layer.B.grad[2].abs().sum() > 0
        assert not layer.A.grad[:2].any() and not layer.B.grad[:2].any()
        model.zero_grad()
