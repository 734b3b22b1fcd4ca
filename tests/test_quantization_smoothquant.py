"""W8A8: integer products against torch's, smoothing that changes nothing, and what outliers do to rows."""

import copy

import pytest
import torch
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gptlite import GPTlite
from inference_calibration import linear_layers
from inference_utils import GPTLITE_DISTILLED_CKPT_PATH
from quantization_awq import pairs_of
from quantization_smoothquant import (
    LinearW8A8,
    int8_product,
    int8_product_naive,
    largest_inputs,
    round_rows,
    smooth,
    smoothing_scale,
    to_w8a8,
)
from sparsity_outliers import rescale_channels


def linear(n_out, n_in, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(n_in, n_out).requires_grad_(False)
    for p in layer.parameters():
        p.copy_(torch.randn(p.shape, generator=generator))
    return layer


def rows(n, n_in, seed=7):
    return torch.randn(n, n_in, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 5, 3), (33, 1536, 16), (2, 16, 8), (0, 8, 4)])
def test_integer_products_are_exact(shape):
    """The largest sums of the widest layer, 1536 times 127 squared, are more than float32 can hold."""
    R, n_in, n_out = shape
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-127, 128, (n, n_in), generator=generator).to(torch.int8) for n in (R, n_out))
    if R:
        a[0], b[0] = 127, 127
    expected = a.long() @ b.long().T
    assert torch.equal(int8_product(a, b).long(), expected)
    assert torch.equal(int8_product_naive(a, b).long(), expected)
    assert int8_product(a, b).dtype == torch.int32


def test_a_row_of_zeros_and_a_row_of_an_outlier():
    """Case N-39: tokens for which no neuron fires occur."""
    x = torch.zeros(3, 8)
    x[1, 2], x[2] = 1e4, 1e-9
    codes, scale = round_rows(x)
    assert scale.isfinite().all() and (scale > 0).all()
    assert not codes[0].any() and codes[1].tolist() == [0, 0, 127, 0, 0, 0, 0, 0]
    assert ((codes * scale - x).abs() <= scale / 2 + 1e-12).all()
    assert_close(LinearW8A8(linear(4, 8))(x[:1]), linear(4, 8).bias[None])


@given(st.integers(0, 50), st.sampled_from([None, 0.5, 3.0]))
def test_codes_are_those_of_torchs_quantiser(seed, largest):
    x = rows(5, 9, seed)
    codes, scale = round_rows(x, None if largest is None else largest / 127)
    zeros = torch.zeros(5, dtype=torch.int32)
    scales = torch.as_tensor(scale).expand(5, 1)[:, 0].contiguous().float()
    theirs = torch.fake_quantize_per_channel_affine(x, scales, zeros, 0, -127, 127)
    assert_close(codes * scale, theirs, 1e-6)


@pytest.mark.parametrize("largest, outliers", [(None, False), (6.0, False), (None, True), (6.0, True)])
def test_a_layer_is_the_product_of_what_was_rounded(largest, outliers):
    layer, x = linear(6, 40), rows(3, 40)[:, None]
    apart = torch.zeros(40, dtype=torch.bool)
    apart[[3, 17]] = outliers
    x[..., 3] *= 100 if outliers else 1
    ours = LinearW8A8(layer, largest, apart)
    codes, scale = round_rows(x[:, 0].masked_fill(apart, 0.0), None if largest is None else largest / 127)
    W = ours.weight8.dense().clone()
    assert not W[:, apart].any()
    expected = (codes * scale).double() @ W.double().T + layer.bias
    expected += x[:, 0, apart].double() @ layer.weight[:, apart].bfloat16().double().T
    assert_close(ours(x), expected[:, None].float(), 1e-4)
    assert_close(ours(x), layer(x), 0.1)
    naive = copy.deepcopy(ours)
    naive.product = int8_product_naive
    assert torch.equal(naive(x), ours(x))


def test_channels_apart_save_what_an_outlier_takes_from_a_row():
    layer, x = linear(6, 40), rows(3, 40)
    x[:, 3] *= 1000
    apart = torch.arange(40) == 3
    layer.weight[:, 3] /= 1000
    errors = [(LinearW8A8(layer, None, a)(x) - layer(x)).abs().max().item() for a in (None, apart)]
    assert errors[1] < 0.1 * errors[0]


def test_smoothing_scale_balances_inputs_and_weights():
    """At one half both sides end with the same largest value (the paper's equation 4)."""
    largest, W = torch.tensor([100.0, 1.0, 0.0]), torch.tensor([[0.1, -2.0, 5.0], [0.04, 1.0, 0.0]])
    scale = smoothing_scale(largest, [W[:1], W[1:]])
    assert_close(largest[:2] / scale[:2], (W * scale).abs().amax(0)[:2], 1e-5)
    assert scale[2] == 1  # never seen: it stays
    assert_close(smoothing_scale(largest, [W], 1.0)[:2], largest[:2], 1e-5)  # all of it moves


@given(st.sampled_from([0.0, 0.5, 0.8, 1.0]))
def test_smoothing_alone_changes_nothing(alpha):
    model, texts = tiny_model(GPTlite), random_tokens(4, 16)
    smoothed = smooth(copy.deepcopy(model), texts, alpha)
    assert_close(smoothed(texts), model(texts), 1e-9)
    for before, after in zip(model.blocks, smoothed.blocks, strict=True):
        assert torch.equal(before.ffwd.net[2].weight, after.ffwd.net[2].weight)
        assert not torch.allclose(before.ln1.weight, after.ln1.weight)


def test_smoothing_takes_outliers_back():
    model, texts = tiny_model(GPTlite), random_tokens(4, 16)
    rescale_channels(model, 2, 64)
    before, after = (
        largest_inputs(linear_layers(m.blocks), lambda m=m: m(texts))["1.ffwd.net.0"]
        for m in (model, smooth(copy.deepcopy(model), texts))
    )
    assert before.max() / before.median() > 20 > after.max() / after.median()


@pytest.mark.parametrize("how", [{}, {"in_advance": True}, {"threshold": 3.0}])
def test_every_linear_layer_of_the_blocks_is_replaced(how):
    """Case N-38."""
    model, texts = tiny_model(GPTlite, dtype=torch.float32), random_tokens(4, 16)
    small = to_w8a8(copy.deepcopy(model), texts, **how)
    layers = [module for module in small.modules() if isinstance(module, LinearW8A8)]
    assert len(layers) == len(linear_layers(model.blocks)) == 12 and not linear_layers(small.blocks)
    assert_close(small(texts), model(texts), 0.3)
    if "threshold" in how:
        apart = [layer.apart is not None for layer in layers]
        assert any(apart) and not any(
            r.apart is not None
            for block in small.blocks
            for maker, readers in pairs_of(block).values()
            for r in readers
            if not isinstance(maker, nn.LayerNorm)
        )
    assert all((layer.scale is not None) == ("in_advance" in how) for layer in layers)


def test_quick_run(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("what rounding costs needs trained weights")
    report = quick_report("more/quantization_smoothquant.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["float32"]["baseline"] and len(rows) == 9 and len(report["checks"]) == 3
    kl = {name: row.get("kl") for name, row in rows.items()}
    assert 3 * kl["SmoothQuant, in advance, outliers"] < kl["a scale in advance, outliers"]
    assert 3 * kl["LLM.int8(), outliers"] < kl["a scale a row, outliers"]
    assert 3 * kl["a scale a row, as trained"] < kl["a scale a row, outliers"]
    assert 0 < rows["LLM.int8(), outliers"]["apart"] < 0.2 and len(report["why"]) == 4


def test_bad_options():
    run = run_script("more/quantization_smoothquant.py", "--quick", "--alpha", "1.5")
    assert run.status == 2 and "1.5 is not a share from 0 to 1" in run.stderr
