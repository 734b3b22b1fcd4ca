"""Rotations: Hadamard matrices by their definition, two small products as one, and where they help."""

import copy

import pytest
import torch
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gptlite import GPTlite
from inference_utils import GPTLITE_DISTILLED_CKPT_PATH
from main_quantization import nearest
from quantization_rotation import (
    LinearLowBits,
    hadamard_factors,
    paley,
    random_signs,
    rotate,
    rotate_naive,
    rotation_matrix,
    round_rows,
    sylvester,
    with_low_bits,
)


def matrix(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 4, 64, 12, 24, 192, 384, 768, 1536])
def test_hadamard_matrices(n):
    small, large = hadamard_factors(n)
    H = torch.kron(small, large)
    assert H.shape == (n, n) and (H.abs() == 1).all()
    assert torch.equal(H @ H.T, n * torch.eye(n))
    R = rotation_matrix(random_signs(n).double())
    assert_close(R @ R.T, torch.eye(n, dtype=torch.float64), 1e-12)


def test_hadamard_matrices_of_scipy():
    linalg = pytest.importorskip("scipy.linalg")
    assert torch.equal(sylvester(16), torch.tensor(linalg.hadamard(16), dtype=torch.float32))


@pytest.mark.parametrize("n", [3, 0, 20, 28, 36, 6])
def test_sizes_without_a_matrix_are_refused(n):
    with pytest.raises(ValueError, match=f"a rotation of {n} channels"):
        hadamard_factors(n)


@given(st.sampled_from([1, 2, 32, 12, 48, 192]), st.lists(st.integers(0, 4), max_size=2), st.integers(0, 9))
def test_two_small_products_are_the_large_one(n, shape, seed):
    x, signs = matrix(*shape, n, seed=seed), random_signs(n, seed)
    assert_close(rotate(x, signs), rotate_naive(x, signs), 1e-12)
    assert_close(rotate(x, signs).norm(), x.norm(), 1e-12)


def test_an_outlier_is_shared_by_all_channels():
    x = torch.zeros(192)
    x[5] = 100.0
    assert_close(rotate(x, random_signs(192)).abs(), torch.full((192,), 100 / 192**0.5))
    assert not torch.equal(random_signs(192, 0), random_signs(192, 1))
    assert paley()[0].tolist() == [1] * 12


@pytest.mark.parametrize("n_bits, unsigned", [(4, False), (4, True), (8, False), (2, True)])
def test_rounded_rows(n_bits, unsigned):
    x = matrix(5, 40).abs() if unsigned else matrix(5, 40)
    x[2] = 0
    rounded = round_rows(x, n_bits, unsigned)
    assert not rounded[2].any() and rounded.isfinite().all()
    top = 2**n_bits - 1 if unsigned else 2 ** (n_bits - 1) - 1
    scale = x.abs().amax(-1) / top
    assert all(len(row.unique()) <= (top + 1 if unsigned else 2 * top + 1) for row in rounded)
    assert ((x - rounded).abs() <= scale[:, None] / 1.999).all()
    theirs = torch.fake_quantize_per_channel_affine(
        x.float(), scale.clamp(min=1e-12).float(), torch.zeros(5, dtype=torch.int32), 0, -127, 255
    )
    assert_close(rounded.float(), theirs, 1e-5)


@pytest.mark.parametrize("signs", [None, random_signs(48)])
def test_a_layer_is_what_its_parts_are(signs):
    layer = nn.Linear(48, 6).double().requires_grad_(False)
    layer.weight.copy_(matrix(6, 48))
    x = matrix(3, 48, seed=1)
    assert_close(LinearLowBits(layer, signs=signs)(x), layer(x), 1e-12)
    R = torch.eye(48, dtype=torch.float64) if signs is None else rotation_matrix(signs.double())
    expected = round_rows(x @ R, 4) @ nearest(layer.weight @ R, 4).T + layer.bias
    assert_close(LinearLowBits(layer, 4, 4, signs)(x), expected, 1e-12)


def test_rotations_alone_change_nothing():
    model, tokens = tiny_model(GPTlite), random_tokens(2, 9)
    before = copy.deepcopy(model.state_dict())
    for how in ({}, {"rotated": True}, {"rotated": True, "behind_relu": "unsigned"}):
        turned = with_low_bits(model, None, **how)
        assert_close(turned(tokens), model(tokens), 1e-9)
        layers = [module for module in turned.modules() if isinstance(module, LinearLowBits)]
        assert len(layers) == 12 and sum(layer.unsigned for layer in layers) == (2 if len(how) == 2 else 0)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_outliers_need_the_rotation_and_zeros_do_not():
    """4 bits of the activations alone: one channel sticks out, or most are zero as behind a ReLU."""
    layer, signs = nn.Linear(192, 24).double().requires_grad_(False), random_signs(192)
    layer.weight.copy_(matrix(24, 192))

    def error(x, *how):
        return (LinearLowBits(layer, None, 4, *how)(x) - layer(x)).square().mean().item()

    sparse = matrix(50, 192, seed=1).sub(1.5).relu()
    assert error(sparse, None, True) < 0.5 * error(sparse, None) < error(sparse, signs)
    x = matrix(50, 192, seed=2)
    x[:, 3] *= 64
    layer.weight[:, 3] /= 64
    assert error(x, signs) < 0.2 * error(x, None)


def test_quick_run(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("what rounding costs needs trained weights")
    report = quick_report("more/quantization_rotation.py", tmp_path, distilled_checkpoint)  # --quick
    kl = {row["method"]: row.get("kl") for row in report["rows"]}
    assert len(kl) == 13 and len(report["checks"]) == 6
    assert 2 * kl["W4A4, rotated, outliers"] < kl["W4A4, outliers"]
    assert kl["W4, outliers"] < kl["W4, rotated, outliers"]  # rotations are for activations
    assert kl["W4A4, unsigned, as trained"] < kl["W4A4, as trained"]
    assert kl["W4A4, rotated, unsigned, as trained"] < kl["W4A4, rotated, as trained"]
    assert kl["W4, as trained"] < kl["W4A4, as trained"] and len(report["why"]) == 4


def test_bad_options(distilled_checkpoint):
    args = "--quick", "--weight-bits", "9"
    run = run_script("more/quantization_rotation.py", *args, checkpoint=distilled_checkpoint)
    assert run.status == 2 and "9 bits in groups" in run.stderr
