"""GPTQ: the greedy form against least squares, the blocked form against the greedy one, and the script."""

import copy

import pytest
import torch
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from inference_calibration import change_blocks, input_products, linear_layers
from inference_utils import GPTLITE_DISTILLED_CKPT_PATH
from main_quantization import dequantize, grid_of, round_to
from quantization_gptq import (
    METHODS,
    gptq,
    gptq_act_order,
    gptq_naive,
    order_of,
    quantize_block,
    round_nearest,
    rounded_column,
)


def layer(n_out=4, n_in=12, n_tokens=40, seed=0):
    """Weights [O, I] and inputs [N, I] that go together, as those of a model do; of very different size."""
    generator = torch.Generator().manual_seed(seed)
    W, mix, X = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((n_out, n_in), (n_in, n_in), (n_tokens, n_in))
    )
    return W, (X @ mix) * torch.linspace(0.2, 3.0, n_in, dtype=torch.float64)[
        torch.randperm(n_in, generator=generator)
    ]


def error(W, made, X):
    return ((dequantize(*made).double() - W) @ X.T).square().sum().item()


def by_least_squares(W, X, n_bits, group, act_order):
    """After each rounded input the weights that are left are solved for anew, by torch's least squares."""
    grid, order = grid_of(W, n_bits, group, symmetric=False), order_of(X.T @ X, act_order)
    now, codes = W.clone(), torch.zeros_like(W, dtype=torch.int8)
    for i, j in enumerate(order.tolist()):
        codes[:, j], now[:, j] = rounded_column(now[:, j], grid, j // (group or W.shape[1]), n_bits)
        fixed, left = order[: i + 1], order[i + 1 :]
        if len(left):
            target = X @ W.T - X[:, fixed] @ now[:, fixed].T  # [N, O]
            now[:, left] = torch.linalg.lstsq(X[:, left], target).solution.T
    return codes


@given(st.integers(2, 4), st.sampled_from([None, 4, 6]), st.booleans(), st.integers(0, 30))
def test_the_greedy_form_is_the_best_that_the_others_can_do(n_bits, group, act_order, seed):
    W, X = layer(seed=seed)
    codes, _ = gptq_naive(W, X.T @ X, n_bits, group, act_order, damping=1e-12)
    assert (codes == by_least_squares(W, X, n_bits, group, act_order)).double().mean() > 0.97  # ties


@given(st.sampled_from([5, 8, 12, 1, 100]), st.sampled_from([None, 4]), st.booleans(), st.integers(0, 50))
def test_blocks_change_no_result(block_size, group, act_order, seed):
    """Cases N-41 and N-42: 4 x 12 weights, groups of 4 and one group, in both orders."""
    W, X = layer(seed=seed)
    expected, grid = gptq_naive(W, X.T @ X, 3, group, act_order)
    codes, same_grid = gptq(W, X.T @ X, 3, group, act_order, block_size=block_size)
    assert torch.equal(codes, expected)
    assert_close(dequantize(codes, same_grid), dequantize(expected, grid))


@pytest.mark.parametrize("group", [None, 4])
@pytest.mark.parametrize("method", list(METHODS))
def test_inputs_with_nothing_in_common_are_rounded_to_the_nearest(method, group):
    W, _ = layer()
    expected = round_nearest(W, None, 4, group)[0]
    for products in (torch.eye(12), torch.diag(torch.arange(12.0)), torch.zeros(12, 12)):  # dead ones too
        assert torch.equal(METHODS[method](W, products, 4, group)[0], expected)


@pytest.mark.parametrize("n_bits, group", [(2, None), (3, 16), (4, 16), (4, None)])
def test_the_error_on_what_calibrates_is_below_roundings(n_bits, group):
    """Not for every tiny layer: what makes up for an error may leave the grid. In each that is less tiny."""
    for seed in range(4):
        W, X = layer(16, 48, 200, seed=seed)
        rounded = error(W, round_nearest(W, None, n_bits, group), X)
        for solve in (gptq, gptq_act_order):
            assert error(W, solve(W, X.T @ X, n_bits, group), X) < 0.8 * rounded


def test_codes_belong_to_the_groups_of_their_place():
    """Case N-42: the order of rounding must not move a weight into another group's grid."""
    W, X = layer()
    W[:, 4:8] *= 100  # one group needs a grid of its own
    products = X.T @ X
    codes, grid = gptq(W, products, 4, 4, act_order=True)
    assert not torch.equal(order_of(products, True), torch.arange(12))
    for made, expected in zip(grid, grid_of(W, 4, 4, symmetric=False), strict=True):
        assert torch.equal(made, expected)
    step = grid.scale.double().repeat_interleave(4, dim=1)
    assert ((dequantize(codes, grid) - W).abs() < 20 * step).all()
    moved = order_of(products, True)
    permuted = dequantize(codes, grid).double()[:, moved] @ X[:, moved].T
    assert_close(permuted, dequantize(codes, grid).double() @ X.T, 1e-9)


def test_order_of_equal_inputs_is_theirs():
    assert torch.equal(order_of(torch.eye(5), True), torch.arange(5))
    assert order_of(torch.diag(torch.tensor([1.0, 3.0, 0.0, 2.0])), True).tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("method", list(METHODS))
def test_a_whole_model(method):
    model, tokens = tiny_model(GPTlite), random_tokens(4, 16)
    small = change_blocks(
        copy.deepcopy(model), tokens, input_products, lambda b, k: quantize_block(b, k, method, 4, 16)
    )
    for name, one in linear_layers(small.blocks).items():
        grid = grid_of(linear_layers(model.blocks)[name].weight, 4, 16, symmetric=False)
        assert_close(dequantize(round_to(one.weight, grid, 4), grid), one.weight, 1e-5)  # points of the grid
    assert torch.equal(small.fc_out.weight, model.fc_out.weight)
    assert not torch.equal(small(tokens), model(tokens))


def test_quick_run(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("what rounding costs needs trained weights")
    report = quick_report("more/quantization_gptq.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["float32"]["baseline"] and len(rows) == 7 and len(report["checks"]) == 5
    for n_bits in (3, 2):
        rounded, solved, ordered = (rows[f"int{n_bits} g64, {method}"] for method in METHODS)
        assert rounded["bits"] == solved["bits"] == ordered["bits"] == n_bits + 0.5
        assert rounded["kl"] > 1.5 * solved["kl"] > 1.5 * ordered["kl"] > 0
        assert rounded["layer_error"] > solved["layer_error"] > ordered["layer_error"]
    assert len(report["why"]) == 4


@pytest.mark.parametrize(
    "args, message", [(["--bits", "9"], "9 bits in groups"), (["--group", "50"], "groups of 50 of 192")]
)
def test_bad_options(args, message, distilled_checkpoint):
    run = run_script("more/quantization_gptq.py", "--quick", *args, checkpoint=distilled_checkpoint)
    assert run.status == 2 and message in run.stderr
