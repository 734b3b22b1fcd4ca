"""Packed linear layers against float64, for every shape of the collection's models and 0 to 300 rows."""

import copy

import pytest
import torch
from helpers import assert_close, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import inference_utils as utils
import linear_packed
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from linear_packed import PackedLinear, can_pack, linear_naive, pack_linears, unpack

packs = pytest.mark.skipif(not can_pack(torch.zeros(4, 4)), reason="this PyTorch reorders no weights")
D, SMALL = 384, 192  # widths of GPTlite and of the distilled model
SHAPES = [  # (in, out)
    *((width, width) for width in (D, SMALL)),  # projections
    *((width, 4 * width) for width in (D, SMALL)),
    *((4 * width, width) for width in (D, SMALL)),
    *((width, 96) for width in (D, SMALL)),  # heads of the vocabulary
    (D, 128),  # grouped keys and values: 2 groups,
    (D, 64),  # 1 group (MQA)
    (D, 192),  # latents of MLA
    (D, 96),
    (D, 48),
    (96, D),
    (256, D),  # 4 heads left of 6
    (D, 1023),  # neurons left by pruning, an odd number
    (1023, D),
    (7, 5),
    (1, 1),
]
ROWS = [(1,), (2,), (7,), (8,), (9,), (33,), (64,), (300,), (1, 1), (8, 1), (2, 3, 5), (0,), (2, 0), ()]


def layer(n_in, n_out, bias=True, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(n_in, n_out, bias)


def reference(linear, x):
    """The product in float64: how far float32 may be from it depends on the number of terms."""
    bias = None if linear.bias is None else linear.bias.detach().double()
    weight = linear.state_dict()["weight"].double()
    return linear_naive(x.double(), weight, bias)


@packs
@pytest.mark.parametrize("n_in, n_out", SHAPES)
def test_every_shape_of_the_models(n_in, n_out):
    linear = pack_linears(layer(n_in, n_out))
    assert type(linear) is PackedLinear and linear.weight.is_mkldnn
    for rows in ROWS:
        x = torch.randn(*rows, n_in, generator=torch.Generator().manual_seed(1))
        out = linear(x)
        assert out.dtype == torch.float32 and out.shape == (*rows, n_out) and out.is_contiguous()
        assert_close(out, reference(linear, x).float(), 1e-5)


@packs
@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 70), st.booleans(), st.integers(0, 99))
def test_any_shape(rows, n_in, n_out, bias, seed):
    linear = pack_linears(layer(n_in, n_out, bias, seed))
    x = torch.randn(rows, n_in, generator=torch.Generator().manual_seed(seed))
    assert_close(linear(x), reference(linear, x).float(), 1e-5)


@packs
def test_strided_input():
    linear, x = pack_linears(layer(6, 5)), torch.randn(4, 6, 3)
    for view in (x.transpose(1, 2), x[:, :, :1].transpose(1, 2), x.permute(2, 0, 1), x[::2].transpose(1, 2)):
        assert_close(linear(view), reference(linear, view).float(), 1e-5)
    x = torch.randn(1, 6).expand(3, 6)
    assert_close(linear(x), reference(linear, x).float(), 1e-5)


@packs
def test_an_input_is_not_changed():
    linear, x = pack_linears(layer(6, 5)), torch.randn(4, 6)
    before = x.clone()
    linear(x)
    assert torch.equal(x, before)


# Models


def model_of(kind):
    """A tiny model in float32: plain, cached, grouped, latent or pruned."""
    from gptlite_gqa import GPTlite_GQA
    from main_mla import GPTlite_MLA
    from main_pruning import prune

    if kind == "pruned":
        heads, neurons = [torch.tensor([1.0, 2.0])] * 2, [torch.arange(128.0)] * 2
        return prune(tiny_model(GPTlite_KVCache, dtype=torch.float32), heads, neurons, 1, 67)
    classes = {"plain": GPTlite, "cached": GPTlite_KVCache, "grouped": GPTlite_GQA}
    more = {"grouped": {"n_groups": 1}, "absorbed": {"d_latent": 12}, "recomputed": {"d_latent": 12}}
    model = tiny_model(classes.get(kind, GPTlite_MLA), dtype=torch.float32, **more.get(kind, {}))
    for block in model.blocks:
        block.mha.absorb = kind == "absorbed"  # no matter to the others
    return model


@packs
@pytest.mark.parametrize("kind", ["plain", "cached", "grouped", "absorbed", "recomputed", "pruned"])
def test_every_model_computes_the_same(kind):
    model, tokens = model_of(kind), random_tokens(3, 12)
    expected = utils.first_of(copy.deepcopy(model).double()(tokens)).detach()
    packed = pack_linears(model)
    assert any(type(module) is PackedLinear for module in packed.modules())
    with torch.no_grad():
        assert_close(utils.first_of(packed(tokens)), expected.float(), 1e-4)
        if kind != "plain":
            assert_close(utils.cached_logits(packed, tokens, 5)[0], expected.float(), 1e-4)


@packs
def test_only_linear_layers_are_packed_and_once():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 3), Own(3, 3), nn.LayerNorm(3), nn.Embedding(3, 3))
    assert pack_linears(model) is model
    weight = model[0].weight
    assert [type(module) for module in model] == [PackedLinear, Own, nn.LayerNorm, nn.Embedding]
    assert pack_linears(model)[0].weight is weight  # not packed again


# Weights: counted, saved, loaded, copied, converted


@packs
def test_weights_lie_in_memory_once():
    model = tiny_model(GPTlite, dtype=torch.float32)
    plain = utils.weight_bytes(model)

    def pack_it():
        pack_linears(model)

    linear = sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear))
    largest = max(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear))
    held = torch.zeros(1)
    assert utils.peak_memory_mb(pack_it, inputs=[held]) <= (linear + 2 * largest) / 1e6 + 0.1
    assert utils.weight_bytes(model) == plain and utils.n_parameters(model) * 4 == plain
    assert not any(
        p.requires_grad for m in model.modules() if type(m) is PackedLinear for p in m.parameters()
    )


@packs
def test_state_dictionary_is_that_of_the_ordinary_model():
    model = tiny_model(GPTlite, dtype=torch.float32)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    packed = pack_linears(model).state_dict()
    assert list(packed) == list(state)
    for name, tensor in packed.items():
        assert torch.equal(tensor, state[name]) and not tensor.is_mkldnn
    other = tiny_model(GPTlite, dtype=torch.float32, seed=1)
    other.load_state_dict(packed)
    assert torch.equal(other.fc_out.weight, state["fc_out.weight"])


@packs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_loading_packs_again(dtype):
    packed = pack_linears(tiny_model(GPTlite, dtype=torch.float32))
    other = tiny_model(GPTlite, dtype=torch.float32, seed=1).to(dtype)
    packed.load_state_dict(other.state_dict())
    tokens = random_tokens(2, 9)
    assert_close(packed(tokens), other.float()(tokens))
    assert type(packed.fc_out) is PackedLinear and packed.fc_out.weight.is_mkldnn


@packs
def test_weights_that_do_not_fit_are_told_as_by_any_module():
    packed = pack_linears(nn.Sequential(nn.Linear(3, 4)))
    before = packed.state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for 0.weight"):
        packed.load_state_dict({"0.weight": torch.zeros(4, 5), "0.bias": torch.zeros(4)})
    with pytest.raises(RuntimeError, match="Missing key.*0.weight"):
        packed.load_state_dict({"0.bias": torch.zeros(4)})
    assert packed.load_state_dict({}, strict=False).missing_keys == ["0.weight", "0.bias"]
    assert type(packed[0]) is PackedLinear and torch.equal(
        packed.state_dict()["0.weight"], before["0.weight"]
    )


@packs
def test_copies():
    packed = pack_linears(tiny_model(GPTlite, dtype=torch.float32)).eval()
    torch.manual_seed(3)
    copied, drawn = copy.deepcopy(packed), torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))  # the copy drew nothing
    tokens = random_tokens(2, 9)
    assert torch.equal(copied(tokens), packed(tokens)) and not copied.training
    with torch.no_grad():
        copied.fc_out.bias.add_(1.0)
    copied.load_state_dict(tiny_model(GPTlite, dtype=torch.float32, seed=1).state_dict())
    assert not torch.equal(copied(tokens), packed(tokens))  # the first one stayed


@packs
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_conversion_to_another_type_and_back(dtype):
    model = tiny_model(GPTlite, dtype=torch.float32)
    expected = copy.deepcopy(model).to(dtype).float()
    packed = pack_linears(model).to(dtype)
    assert (type(packed.fc_out) is PackedLinear) == (dtype == torch.float32)
    assert packed.fc_out.weight.dtype == dtype
    packed = pack_linears(packed.float())
    assert type(packed.fc_out) is PackedLinear
    assert_close(packed(random_tokens(2, 9)), expected(random_tokens(2, 9)))


@packs
def test_unpacked_layers_are_ordinary_ones():
    linear = layer(6, 5)
    weight = linear.weight.detach().clone()
    linear = unpack(pack_linears(linear))
    assert type(linear) is nn.Linear and torch.equal(linear.weight, weight)
    linear.weight.requires_grad_(True)
    linear(torch.randn(2, 6)).sum().backward()
    assert linear.weight.grad.shape == (5, 6)


# Other builds and types


def test_a_build_without_the_operation_leaves_a_model_as_it_is(monkeypatch):
    model, tokens = tiny_model(GPTlite, dtype=torch.float32), random_tokens(2, 9)
    expected = model(tokens)
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not can_pack(model.fc_out.weight)
    assert type(pack_linears(model).fc_out) is nn.Linear and torch.equal(model(tokens), expected)


def test_a_build_without_onednn_leaves_a_model_as_it_is(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert type(pack_linears(nn.Linear(3, 3))) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_are_left(dtype):
    model = pack_linears(tiny_model(GPTlite, dtype=dtype))
    assert type(model.fc_out) is nn.Linear and model.fc_out.weight.dtype == dtype
    assert linear_packed.can_pack(torch.zeros(2, 2, device="meta")) is False
