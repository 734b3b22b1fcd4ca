"""NF4: the published points, packing, scales quantised twice, and which numbers they suit."""

import math

import pytest
import torch
from helpers import assert_close, quick_report, run_script
from hypothesis import given
from hypothesis import strategies as st

from inference_utils import GPTLITE_DISTILLED_CKPT_PATH
from main_quantization import grid_of, round_to
from quantization_nf4 import (
    Codes,
    bits_per_weight,
    dequantize_nf4,
    dequantize_scales,
    nearest_point,
    nearest_point_naive,
    nf4_points,
    quantize_nf4,
    quantize_scales,
)

PUBLISHED = [  # QLoRA, appendix E
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]


def matrix(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_points_are_the_published_ones():
    assert_close(nf4_points(), torch.tensor(PUBLISHED), 1e-6)
    assert nf4_points()[7] == 0 and nf4_points()[[0, 15]].tolist() == [-1, 1]


@given(st.lists(st.floats(-1.5, 1.5, width=32), min_size=1, max_size=20))
def test_nearest_points_by_midpoints_as_by_all_distances(numbers):
    x, points = torch.tensor(numbers), nf4_points()
    one, two = nearest_point(x, points), nearest_point_naive(x, points)
    gap = ((x - points[one]).abs() - (x - points[two]).abs()).abs()
    assert (gap < 1e-6).all()  # a number half way between two may go either way


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("block", [2, 64])
def test_what_is_left_of_a_weight(block, double):
    weight = matrix(6, 128)
    made = quantize_nf4(weight, block, double)
    left = dequantize_nf4(made, weight.shape)
    assert made.packed.dtype == torch.uint8 and made.packed.numel() == weight.numel() // 2
    assert left.shape == weight.shape and left.dtype == torch.float32
    largest = weight.reshape(-1, block).abs().amax(-1)
    # the widest gap between points is 0.304: half of it, and what the scale itself is off by
    off = largest / 127 if double else torch.zeros_like(largest)
    error = (left - weight).reshape(-1, block).abs().amax(-1)
    assert (error <= 0.153 * largest + 2 * off.max()).all()
    if not double:
        assert (left.reshape(-1, block).abs().amax(-1) == largest).all()  # the largest is a point itself


@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000])
def test_scales_quantised_again(n):
    scale = matrix(n).abs() + 0.1
    double = quantize_scales(scale)
    assert double.codes.dtype == torch.int8 and double.codes.shape == (-(-n // 256), 256)
    left = dequantize_scales(double)
    assert left.shape == (n,) and ((left - scale).abs() <= double.scale.max() / 2 + 1e-6).all()


@pytest.mark.parametrize("double", [False, True])
def test_weights_of_nothing_and_of_one_outlier(double):
    """Case N-39."""
    weight = matrix(4, 64)
    weight[0], weight[1] = 0, 1e-20
    weight[2, 3] = 1e4
    left = dequantize_nf4(quantize_nf4(weight, 64, double), weight.shape)
    assert left.isfinite().all() and not left[0].any()
    assert abs(left[2, 3] - 1e4) < 100


def test_bits_are_those_of_all_tensors():
    """The paper's figures: 0.5 bits a weight for scales of 32 bits and blocks of 64, 0.127 quantised."""
    weight = matrix(256, 1024)
    n = weight.numel()
    assert bits_per_weight(quantize_nf4(weight, 64, False), n) == 4.5
    assert_close(bits_per_weight(quantize_nf4(weight, 64, True), n), 4 + 8 / 64 + 32 / (64 * 256), 1e-3)
    assert bits_per_weight(Codes(torch.zeros(8, dtype=torch.uint8), torch.zeros(2)), 16) == 8


def test_normal_numbers_use_the_codes_more_alike_than_equal_distances():
    x = matrix(1, 2**16)
    packed = quantize_nf4(x, 64, False).packed
    even = round_to(x, grid_of(x, 4, 64), 4).flatten().long() + 8
    bits = []
    for codes in (even, torch.cat([packed & 15, packed >> 4]).flatten().long()):
        shares = torch.bincount(codes, minlength=16) / codes.numel()
        bits.append(torch.distributions.Categorical(shares).entropy() / math.log(2))
    assert 3.5 < bits[0] < bits[1] - 0.1 < 4


@pytest.mark.parametrize("block", [48, 3])
def test_blocks_that_do_not_fit_are_refused(block):
    with pytest.raises(ValueError, match=f"blocks of {block} of"):
        quantize_nf4(matrix(4, 33 if block == 3 else 65), block)


def test_quick_run(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("what rounding costs needs trained weights")
    report = quick_report("more/quantization_nf4.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    even, zero, plain, double = list(rows.values())[1:]
    assert plain["kl"] < even["kl"] and plain["used"] > even["used"]
    assert [row["bits"] for row in (even, zero, plain)] == [4.25, 4.5, 4.5]
    assert double["bits"] == pytest.approx(4.127, abs=0.02) and double["kl"] < 1.2 * plain["kl"]
    normal, flat, _ = next(iter(report["sweeps"].values()))
    assert normal[plain["method"]] < normal[even["method"]] and flat[plain["method"]] > flat[even["method"]]
    assert len(report["why"]) == 4 and len(report["checks"]) == 2


def test_bad_options(distilled_checkpoint):
    run = run_script("more/quantization_nf4.py", "--quick", "--block", "50", checkpoint=distilled_checkpoint)
    assert run.status == 2 and "groups of 50 of 192" in run.stderr
