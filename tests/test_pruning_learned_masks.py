"""Learned masks: the distribution, the expected size, masks of 0 and 1 against slices, and what is kept."""

import copy
import math

import pytest
import torch
import torch.nn as nn
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_pruned import with_kv_cache
from inference_utils import n_parameters
from main_kvcache import generate, generate_kvcache
from pruning_learned_masks import (
    BETA,
    hard_concrete,
    harden,
    learn_masks,
    mask_shapes,
    masked,
    open_probability,
    size_of,
    slice_out,
)

CONTEXT, H, N, E, L = 16, 4, 128, 32, 3
DATA = random_tokens(1, 400)[0]


def model_of(**kwargs):
    return tiny_model(GPTlite, n_layers=L, n_heads=H, d_head=8, **kwargs)


def drawn(seed, share=0.5):
    """Masks of 0 and 1 with at least one head and neuron in every block, one channel and one block."""
    generator = torch.Generator().manual_seed(seed)
    masks = {}
    for axis, shape in mask_shapes(model_of()).items():
        masks[axis] = (torch.rand(shape, generator=generator) < share).double()
        masks[axis][..., torch.randint(shape[-1], (), generator=generator)] = 1.0
    return masks


def draw(log_alpha, generator):
    uniform = {axis: torch.rand(log.shape, generator=generator) for axis, log in log_alpha.items()}
    return {axis: hard_concrete(log, uniform[axis]) for axis, log in log_alpha.items()}


def n_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# ---- The distribution ----


@pytest.mark.parametrize("log_alpha", [-3.0, -0.7, 0.0, 1.5, 4.0])
def test_samples_against_the_closed_form_and_numerical_integration(log_alpha):
    """P(z = 0), P(z = 1), mean and second moment: by sampling, by the quantile function, by the density."""
    n = 200_000
    generator = torch.Generator().manual_seed(0)
    log = torch.tensor(log_alpha, dtype=torch.float64)
    z = hard_concrete(log, torch.rand(n, generator=generator, dtype=torch.float64))
    noise = 5 / math.sqrt(n)
    assert z.min() >= 0 and z.max() <= 1
    assert abs((z != 0).double().mean() - open_probability(log)) < noise
    # at even distances instead of at random
    grid = hard_concrete(log, (torch.arange(n, dtype=torch.float64) + 0.5) / n)
    assert_close((grid != 0).double().mean(), open_probability(log), 1e-4)
    # Louizos et al.: the density of the binary concrete, s in (0, 1), integrated over what is stretched
    s = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    alpha = math.exp(log_alpha)
    density = BETA * alpha * s ** (-BETA - 1) * (1 - s) ** (-BETA - 1)
    density = density / (alpha * s**-BETA + (1 - s) ** -BETA) ** 2
    stretched = (1.2 * s - 0.1).clamp(0, 1)
    assert_close(density.mean(), 1.0, 1e-2)
    for power in (1, 2):
        expected = (stretched**power * density).mean()
        assert_close(grid.pow(power).mean(), expected, 1e-2)
        assert abs(z.pow(power).mean() - expected) < noise + 1e-2 * expected
    assert_close((z == 1).double().mean(), (density * (stretched == 1)).mean(), 1e-2)


def test_gradient_reaches_log_alpha():
    """Of a mask between 0 and 1, against finite differences; one that is cut off has none, and no NaN."""
    log = torch.tensor([0.3, -0.4, 9.0, -9.0, 0.0], dtype=torch.float64, requires_grad=True)
    uniform = torch.tensor([0.5, 0.6, 0.5, 0.5, 0.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(hard_concrete(log, uniform).sum(), log)
    step = 1e-6
    slope = (hard_concrete(log + step, uniform) - hard_concrete(log - step, uniform)).detach() / (2 * step)
    assert_close(gradient, slope, 1e-6)
    assert (gradient[:2] > 0.1).all() and (gradient[2:] == 0).all()


def test_gradient_of_the_loss_and_of_the_size_reaches_every_axis():
    model, tokens = model_of(), random_tokens(2, CONTEXT)
    log_alpha = {
        k: torch.zeros(s, dtype=torch.float64, requires_grad=True) for k, s in mask_shapes(model).items()
    }
    generator = torch.Generator().manual_seed(0)
    masks = {
        k: hard_concrete(log, torch.rand(log.shape, generator=generator)) for k, log in log_alpha.items()
    }
    with masked(model, masks):
        loss = model(tokens).log_softmax(-1)[..., 0].mean()
    size = size_of(model, {k: open_probability(log) for k, log in log_alpha.items()})
    for of_what in (loss, size):
        for axis, gradient in zip(
            log_alpha, torch.autograd.grad(of_what, list(log_alpha.values()), retain_graph=True), strict=True
        ):
            assert gradient.isfinite().all() and (gradient != 0).any(), axis
    assert all((g > 0).all() for g in torch.autograd.grad(size, list(log_alpha.values())) if g is not None)


# ---- Size ----


@given(st.integers(0, 999), st.sampled_from([0.0, 0.3, 0.8]))
def test_size_is_that_of_the_sliced_model(seed, share):
    masks = drawn(seed, share)
    assert size_of(model_of(), masks) == n_parameters(slice_out(model_of(), masks))


def test_size_of_everything_is_that_of_the_model():
    model = model_of()
    ones = {axis: torch.ones(shape) for axis, shape in mask_shapes(model).items()}
    assert size_of(model, ones) == n_parameters(model)


def test_expected_size_against_counting_draws():
    model, n = model_of(), 4000
    generator = torch.Generator().manual_seed(1)
    log_alpha = {
        k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in mask_shapes(model).items()
    }
    expected = size_of(model, {axis: open_probability(log) for axis, log in log_alpha.items()})
    sizes = []
    for _ in range(n):
        z = {
            k: hard_concrete(log, torch.rand(log.shape, generator=generator)) for k, log in log_alpha.items()
        }
        sizes.append(size_of(model, {axis: (mask != 0).double() for axis, mask in z.items()}))
    sizes = torch.stack(sizes)
    assert abs(sizes.mean() - expected) < 4 * sizes.std() / math.sqrt(n)
    assert sizes.std() < 0.5 * expected < n_parameters(model)


# ---- Masks of 0 and 1 ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_open_is_the_identity_bit_for_bit(dtype):
    model, tokens = model_of(dtype=dtype), random_tokens(2, CONTEXT)
    expected = model(tokens)
    with masked(model, {axis: torch.ones(shape) for axis, shape in mask_shapes(model).items()}):
        assert torch.equal(model(tokens), expected)
    assert n_hooks(model) == 0
    kept = harden(model, {k: torch.zeros(s) for k, s in mask_shapes(model).items()}, n_parameters(model))
    assert all(mask.all() for mask in kept.values())


@given(st.integers(0, 999), st.sampled_from([0.0, 0.3, 0.8]), st.integers(1, CONTEXT))
def test_sliced_equals_masked(seed, share, n):
    """PR-1, PR-2: any heads and neurons, others in each block, any channels, any blocks."""
    masks, tokens, model = drawn(seed, share), random_tokens(2, n, seed), model_of()
    with masked(model, masks):
        expected = model(tokens)
    assert not torch.equal(model(tokens), expected) or all(mask.all() for mask in masks.values())
    sliced = slice_out(model, masks)
    assert_close(sliced(tokens), expected)
    assert len(sliced.blocks) == masks["blocks"].sum()


def test_masks_are_what_zeroed_weights_are():
    """The published meaning, written with weights: a block of zero output, a head of zero columns."""
    model, tokens = model_of(), random_tokens(2, CONTEXT)
    masks = {axis: torch.ones(shape) for axis, shape in mask_shapes(model).items()}
    masks["heads"][0, 2] = masks["neurons"][2, 5] = masks["blocks"][1] = 0.0
    masks["heads"][2, 1] = 0.25
    with masked(model, masks):
        found = model(tokens)
    with torch.no_grad():
        model.blocks[0].mha.out_proj.weight[:, 16:24] = 0
        model.blocks[2].ffwd.net[2].weight[:, 5] = 0
        model.blocks[2].mha.out_proj.weight[:, 8:16] *= 0.25
        for linear in (model.blocks[1].mha.out_proj, model.blocks[1].ffwd.net[2]):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
    assert_close(found, model(tokens))


def test_caches_of_blocks_of_different_widths():
    masks, prompt = drawn(5, 0.4), random_tokens(2, 5)
    masks["blocks"] = torch.tensor([1.0, 0.0, 1.0])
    masks["heads"][0], masks["heads"][2] = torch.tensor([0.0, 1, 0, 1]), torch.tensor([0.0, 0, 1, 0])
    model = slice_out(model_of(), masks)
    cached = with_kv_cache(model)
    assert torch.equal(generate_kvcache(cached, prompt, 8, CONTEXT), generate(model, prompt, 8, CONTEXT))
    assert [k.shape[1] for k, _ in cached(prompt)[1]] == [2, 1]


def test_hooks_are_removed_after_an_error():
    model = model_of()
    with pytest.raises(ValueError, match="does not fit the context"):
        with masked(model, drawn(0)):
            model(random_tokens(1, CONTEXT + 1))
    assert n_hooks(model) == 0


# ---- What is kept ----


@given(st.integers(0, 9999), st.floats(0, 1), st.floats(-6, 6))
@settings(max_examples=50)
def test_one_of_each_stays_and_the_size_fits(seed, share, shift):
    """However the masks are, also where all are closed or all open, and whatever size is wanted."""
    model, generator = model_of(), torch.Generator().manual_seed(seed)
    log_alpha = {k: 3 * torch.randn(s, generator=generator) + shift for k, s in mask_shapes(model).items()}
    n_whole, n_least = n_parameters(model), 1000
    n_wanted = round(n_least + share * (n_whole - n_least))
    masks = harden(model, log_alpha, n_wanted)
    stays = masks["blocks"].bool()
    assert stays.any() and masks["channels"].any()
    assert masks["heads"][stays].any(-1).all() and masks["neurons"][stays].any(-1).all()
    assert not masks["heads"][~stays].any() and not masks["neurons"][~stays].any()
    assert all(((mask == 0) | (mask == 1)).all() for mask in masks.values())
    size = n_parameters(slice_out(copy.deepcopy(model), masks))
    assert size == size_of(model, masks) <= n_wanted
    if not masks["neurons"][stays].all():  # another neuron would be too much, and it is the smallest part
        assert size + 2 * masks["channels"].sum() + 1 > n_wanted


def test_the_likeliest_stay():
    """Two shapes that fit exactly: what has the larger log alpha is kept."""
    model = model_of()
    log_alpha = {axis: torch.full(shape, 3.0) for axis, shape in mask_shapes(model).items()}
    log_alpha["neurons"][1, 10:] = -3.0
    log_alpha["heads"][0, 1] = -4.0
    log_alpha["blocks"][2] = -5.0
    log_alpha["channels"][7] = -2.0
    wanted = {axis: (log > 0).double() for axis, log in log_alpha.items()}
    masks = harden(model, log_alpha, int(size_of(model, wanted)))
    wanted["heads"][2] = wanted["neurons"][2] = 0.0
    assert all(torch.equal(masks[axis], wanted[axis]) for axis in masks)


def test_too_small_a_model_is_refused():
    model = model_of()
    log_alpha = {axis: torch.zeros(shape) for axis, shape in mask_shapes(model).items()}
    with pytest.raises(ValueError, match="less than one part of each kind"):
        harden(model, log_alpha, 100)


# ---- Learning ----


def test_masks_learn_what_matters_and_reach_the_size():
    """Of a model in which half of the neurons and one head do nothing, these are closed."""
    teacher = model_of(dtype=torch.float32)
    with torch.no_grad():
        for block in teacher.blocks:
            block.ffwd.net[2].weight[:, ::2] = 0
            block.mha.out_proj.weight[:, :8] = 0
    before = copy.deepcopy(teacher.state_dict())
    torch.manual_seed(0)
    n_whole = n_parameters(teacher)
    idle = {axis: torch.ones(shape) for axis, shape in mask_shapes(teacher).items()}
    idle["neurons"][:, ::2] = idle["heads"][:, 0] = 0.0
    n_wanted = int(size_of(teacher, idle))
    model = copy.deepcopy(teacher)
    log_alpha, curve = learn_masks(model, teacher, DATA, n_wanted, 200, 0.0, 4, CONTEXT)
    wanted, expected = zip(*curve, strict=True)
    assert wanted[0] > 0.99 * n_wanted + 0.01 * n_whole - 1 and wanted[99:] == (n_wanted,) * 101
    assert all(a >= b for a, b in zip(wanted, wanted[1:], strict=False))
    assert abs(expected[-1] / n_wanted - 1) < 0.1 and expected[0] > 0.95 * n_whole
    p = {axis: open_probability(log) for axis, log in log_alpha.items()}
    assert p["neurons"][:, ::2].mean() < p["neurons"][:, 1::2].mean() - 0.2
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())  # lr 0
    assert not model.training and n_hooks(model) == 0 and not teacher.training


# ---- The script ----


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("more/pruning_learned_masks.py", tmp_path, distilled_checkpoint)  # --quick
    assert len(report["checks"]) == 3 and len(report["why"]) == 4
    whole, *rows = report["rows"]
    names = ["learned masks", "activation", "learned masks, as cut", "activation, as cut"]
    assert whole["baseline"] and [row["method"] for row in rows] == names
    for row in rows:
        assert row["n_parameters"] == pytest.approx(whole["n_parameters"] / 2, rel=0.01)
        assert row["loss_difference_se"] > 0 and (row["tokens_per_s"] is None) == ("cut" in row["method"])
    assert rows[0]["n_parameters"] == rows[2]["n_parameters"] <= whole["n_parameters"] / 2
    assert rows[1]["kv_bytes_per_token"] * 3 == whole["kv_bytes_per_token"] * 2  # 2 of 3 heads
    (kept,) = report["sweeps"].values()
    assert len(kept) == 3 and rows[0]["kv_bytes_per_token"] == 512 * sum(line["heads"] for line in kept)
    assert all((line["heads"] > 0) == (line["neurons"] > 0) for line in kept)


def test_script_refuses_what_leaves_nothing():
    run = run_script("more/pruning_learned_masks.py", "--quick", "--keep", "0.01")
    assert run.status == 2 and run.stderr.startswith("pruning_learned_masks.py: cannot keep -")
