"""AWQ: scales that change nothing, the search against all candidates, and what outliers do to rounding."""

import copy
from functools import partial

import pytest
import torch
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from inference_calibration import change_blocks, linear_layers, sum_inputs
from inference_utils import GPTLITE_DISTILLED_CKPT_PATH
from main_quantization import nearest
from quantization_awq import (
    awq_block,
    awq_naive,
    errors_by_power,
    magnitudes_and_products,
    move_scale,
    pairs_of,
    round_block,
    scale_block,
    scale_of,
)
from sparsity_outliers import rescale_channels

RULE = {"n_bits": 4, "group": 16}


def matrix(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_scale_is_a_power_of_the_mean_around_one():
    magnitudes = torch.tensor([1.0, 4.0, 16.0])
    assert_close(scale_of(magnitudes, 0.5), [0.5, 1.0, 2.0])
    assert_close(scale_of(magnitudes, 0.5), scale_of(100 * magnitudes, 0.5))  # sums do as well as means
    assert torch.equal(scale_of(magnitudes, 0.0), torch.ones(3))
    dead = scale_of(torch.tensor([0.0, 1.0, 0.0]), 0.9)  # inputs that were never anything but zero
    assert dead.isfinite().all() and (dead > 0).all()
    assert torch.equal(scale_of(torch.zeros(3), 0.5), torch.ones(3))


def test_magnitudes_are_means_of_absolute_values():
    """Case N-43: inputs that average to zero still count."""
    x = torch.tensor([[1.0, -2.0], [-1.0, 4.0]])
    assert magnitudes_and_products(x).tolist() == [[2.0, 6.0], [2.0, -6.0], [-6.0, 20.0]]


@given(st.integers(0, 20), st.sampled_from([None, 4]))
def test_the_search_knows_the_error_of_each_scale(seed, group):
    W, X = matrix(6, 12, seed=seed), matrix(50, 12, seed=seed + 1) * torch.linspace(0.1, 5, 12)
    errors = errors_by_power([W, -W], X.abs().sum(0), X.T @ X, 4, group, n_steps=4)
    assert list(errors) == [0.0, 0.25, 0.5, 0.75]
    for power, error in errors.items():
        scale = scale_of(X.abs().mean(0), power)
        made = [(X @ (awq_naive(w, scale, 4, group) - w).T).norm() / (X @ w.T).norm() for w in (W, -W)]
        assert_close(error, sum(made).item() / 2, 1e-6)
    rounded = (X @ (nearest(W, 4, group, False) - W).T).norm() / (X @ W.T).norm()
    other = (X @ (nearest(-W, 4, group, False) + W).T).norm() / (X @ W.T).norm()
    assert_close(errors[0.0], (rounded + other).item() / 2, 1e-6)


def test_every_linear_layer_is_read_once():
    block = tiny_model(GPTlite).blocks[0]
    readers = [layer for _, readers in pairs_of(block).values() for layer in readers]
    assert len(readers) == len(linear_layers(block)) == len({*map(id, readers)})
    assert set(pairs_of(block)) <= set(linear_layers(block))


@given(st.sampled_from(["mha.query_proj", "mha.out_proj", "ffwd.net.0", "ffwd.net.2"]), st.integers(0, 20))
def test_moved_scales_change_nothing(name, seed):
    model, tokens = tiny_model(GPTlite), random_tokens(2, 9, seed)
    expected = model(tokens)
    maker, readers = pairs_of(model.blocks[1])[name]
    before = readers[0].weight.clone()
    move_scale(maker, readers, matrix(readers[0].in_features, seed=seed).exp())
    assert_close(model(tokens), expected, 1e-9)
    assert not torch.allclose(readers[0].weight, before)


def test_scaled_and_rounded_blocks():
    model, texts = tiny_model(GPTlite), random_tokens(4, 16)
    scaled = change_blocks(copy.deepcopy(model), texts, magnitudes_and_products, partial(scale_block, **RULE))
    assert_close(scaled(texts), model(texts), 1e-9)
    awq = change_blocks(copy.deepcopy(model), texts, magnitudes_and_products, partial(awq_block, **RULE))
    # the first layer reads what it always did: folded, it is the naive form
    block, known = (
        model.blocks[0],
        sum_inputs(linear_layers(model.blocks[0]), magnitudes_and_products, lambda: model(texts)),
    )
    powers = scale_block(copy.deepcopy(block), known, **RULE)
    scale = scale_of(known["mha.query_proj"][0], powers["mha.query_proj"])
    folded = awq.blocks[0].mha.query_proj.weight / (block.ln1.weight / awq.blocks[0].ln1.weight)
    assert_close(folded, awq_naive(block.mha.query_proj.weight, scale, **RULE), 1e-9)


def test_outliers_hurt_rounding_and_not_awq():
    """Coarse groups, in which a large input's weights are small next to others: errors of the outputs."""
    model, texts = tiny_model(GPTlite, d_model=64, n_heads=4), random_tokens(8, 16)
    rescale_channels(model, 3, 32)
    expected, found = model(texts), {}
    awq = change_blocks(copy.deepcopy(model), texts, magnitudes_and_products, partial(awq_block, n_bits=4))
    for block in model.blocks:
        round_block(block, 4)
    for name, small in (("rounding", model), ("AWQ", awq)):
        found[name] = (small(texts) - expected).square().mean().item()
    assert found["AWQ"] < 0.5 * found["rounding"]


def test_quick_run(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("what rounding costs needs trained weights")
    report = quick_report("more/quantization_awq.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["float32"]["baseline"] and len(rows) == 5 and len(report["checks"]) == 5
    kl = {name: row.get("kl") for name, row in rows.items()}
    assert 1.5 * kl["int4 g64, AWQ, outliers"] < kl["int4 g64, rounding, outliers"]
    assert kl["int4 g64, rounding, as trained"] < kl["int4 g64, rounding, outliers"]
    assert {row["bits"] for row in rows.values() if row.get("bits")} == {4.5}
    (table,) = report["sweeps"].values()
    best = min(table, key=lambda line: line["outliers"])
    assert 0 < best["power"] < 1 and len(report["why"]) == 3


def test_bad_options(distilled_checkpoint):
    run = run_script("more/quantization_awq.py", "--quick", "--group", "50", checkpoint=distilled_checkpoint)
    assert run.status == 2 and "groups of 50 of 192" in run.stderr
