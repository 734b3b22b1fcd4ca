"""Moments, contributions and the refit against the inputs themselves and a regression by hand."""

import copy

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model

import inference_utils as utils
from gptlite import GPTlite
from gptlite_gqa import GPTlite_GQA
from gptlite_pruned import with_kv_cache
from main_pruning import keep_largest, mask, prune
from pruning_importance import score_units
from pruning_refit import contribution, input_moments, prune_silent, prune_units, refit, structures

H, D, E, N = 4, 8, 32, 128
CONTEXT, L = 16, 2
DATA = random_tokens(1, 400)[0]
UNITS = {"heads": H, "neurons": N}
KINDS = list(UNITS)


def model_of(**kwargs):
    return tiny_model(GPTlite, n_heads=H, d_head=D, **kwargs)


def inputs_of(model, linear, windows):
    """What enters a linear layer over some windows, [N, in]."""
    seen = []
    hook = linear.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with torch.no_grad():
        model(windows)
    hook.remove()
    return seen[0].flatten(0, 1)


def n_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 5, 12])
def test_moments(kind, batch_size):
    model, windows = model_of(), utils.sample_prompts(DATA, 12, CONTEXT)
    outputs = [output for _, output, _ in structures(model, kind)]
    for (mean, second), output in zip(
        input_moments(model, outputs, windows, batch_size), outputs, strict=True
    ):
        x = inputs_of(model, output, windows)
        assert_close(mean, x.mean(dim=0))
        assert_close(second, x.T @ x / len(x))
    assert n_hooks(model) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_contribution_is_the_size_of_what_a_unit_adds(kind):
    model, windows = model_of(), utils.sample_prompts(DATA, 12, CONTEXT)
    _, output, size = structures(model, kind)[1]
    x = inputs_of(model, output, windows)  # [N, in]
    ((_, second),) = input_moments(model, [output], windows)
    scores = contribution(output, size, second)
    assert scores.shape == (UNITS[kind],)
    for unit in (0, 1, UNITS[kind] - 1):
        own = slice(unit * size, (unit + 1) * size)
        added = x[:, own] @ output.weight[:, own].T  # [N, E]
        assert_close(scores[unit], added.square().sum(dim=1).mean().sqrt())
        if kind == "neurons":  # activation x column, as its name says
            rms = x[:, unit].square().mean().sqrt()
            assert_close(scores[unit], rms * output.weight[:, unit].norm())


# ---- The repair ----


@pytest.mark.parametrize("kind", KINDS)
def test_refit_is_least_squares(kind):
    """With hardly any decay: the solution that torch finds for outputs from kept inputs and a constant."""
    model, windows = model_of(), utils.sample_prompts(DATA, 24, CONTEXT)
    _, output, size = structures(model, kind)[1]
    x = inputs_of(model, output, windows)  # [N, in]
    wanted = output(x)  # [N, E]
    (moments,) = input_moments(model, [output], windows)
    kept = torch.tensor([0, 2] if kind == "heads" else [3, 4, 50, 90])
    columns = (kept[:, None] * size + torch.arange(size)).flatten()
    before, after = refit(output, size, kept, *moments, ridge=1e-12)
    design = torch.cat([x[:, columns], torch.ones(len(x), 1)], dim=1)  # [N, k+1]
    solution = torch.linalg.lstsq(design, wanted).solution  # [k+1, E]
    assert_close(output.weight[:, columns].T, solution[:-1], 1e-5)
    assert_close(output.bias, solution[-1], 1e-5)
    removed = [i for i in range(x.shape[1]) if i not in columns.tolist()]
    lost = x[:, removed] @ structures(model_of(), kind)[1][1].weight[:, removed].T  # [N, E]
    assert_close(before, (lost - lost.mean(dim=0)).square().sum(dim=1).mean())
    assert_close(after, (wanted - design @ solution).square().sum(dim=1).mean(), 1e-6)
    assert 0 < after < before


def test_refit_repeats_what_copies_and_silent_neurons_did():
    model, windows = model_of(), utils.sample_prompts(DATA, 24, CONTEXT)
    with torch.no_grad():  # neuron 1 does half of what neuron 0 does, neuron 2 is silent
        net = model.blocks[0].ffwd.net
        net[0].weight[1], net[0].bias[1] = net[0].weight[0] / 2, net[0].bias[0] / 2
        net[0].weight[2], net[0].bias[2] = 0, -1
    _, output, size = structures(model, "neurons")[0]
    x = inputs_of(model, output, windows)
    wanted = output(x)
    (moments,) = input_moments(model, [output], windows)
    kept = torch.tensor([0, *range(3, N)])
    before, after = refit(output, size, kept, *moments, ridge=1e-10)
    assert abs(after) < 1e-6 * before
    assert_close(x[:, kept] @ output.weight[:, kept].T + output.bias, wanted, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_refit_lowers_the_error_of_every_layer(kind):
    model, windows = model_of(), utils.sample_prompts(DATA, 24, CONTEXT)
    scores, moments = score_units(model, DATA, 24, CONTEXT)
    inputs = [inputs_of(model, output, windows) for _, output, _ in structures(model, kind)]
    for layer, (_, output, size) in enumerate(structures(model, kind)):
        kept = keep_largest(scores[kind]["random choice"][layer], UNITS[kind] // 2)
        columns = (kept[:, None] * size + torch.arange(size)).flatten()
        x, wanted = inputs[layer], output(inputs[layer])  # [N, in], [N, E]
        plain = x[:, columns] @ output.weight[:, columns].T + output.bias  # [N, E]
        refit(output, size, kept, *moments[kind][layer])
        fitted = x[:, columns] @ output.weight[:, columns].T + output.bias  # [N, E]
        assert (fitted - wanted).square().sum() < (plain - wanted).square().sum()


def test_refit_with_inputs_that_are_all_zero():
    linear = torch.nn.Linear(6, 3, dtype=torch.float64)
    before = copy.deepcopy(linear.state_dict())
    zeros = torch.zeros(6, dtype=torch.float64)
    assert refit(linear, 1, torch.tensor([0, 4]), zeros, zeros.outer(zeros)) == (0.0, 0.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in linear.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_keeping_all_units_is_the_identity(kind):
    model, tokens = model_of(), random_tokens(2, CONTEXT)
    scores, moments = score_units(model, DATA, 8, CONTEXT)
    pruned, explained = prune_units(
        copy.deepcopy(model), kind, scores[kind]["Taylor"], UNITS[kind], moments[kind]
    )
    assert torch.equal(pruned(tokens), model(tokens)) and explained == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_prune_units_without_refit_is_prune(kind):
    model, tokens = model_of(), random_tokens(2, CONTEXT)
    importance = score_units(model, DATA, 8, CONTEXT)[0][kind]["activation"]
    pruned, explained = prune_units(copy.deepcopy(model), kind, importance, 3)
    sizes = (
        (importance, torch.zeros(L, N), 3, N) if kind == "heads" else (torch.zeros(L, H), importance, H, 3)
    )
    assert explained is None
    assert torch.equal(pruned(tokens), prune(copy.deepcopy(model), *sizes)(tokens))
    assert_close(pruned(tokens), mask(copy.deepcopy(model), *sizes)(tokens))


# ---- Neurons that never fire ----


def test_silent_neurons_are_cut_for_nothing():
    """Each block its own; on the text that was read nothing changes, and it decodes with a cache."""
    model, windows = model_of(), utils.sample_prompts(DATA, 12, CONTEXT)
    with torch.no_grad():
        for layer, neurons in ((0, [3, 4, 100]), (1, [0])):
            model.blocks[layer].ffwd.net[0].weight[neurons] = 0.0
            model.blocks[layer].ffwd.net[0].bias[neurons] = -1.0
    outputs = [output for _, output, _ in structures(model, "neurons")]
    fired = [(inputs_of(model, output, windows) != 0).any(dim=0) for output in outputs]
    moments = input_moments(model, outputs, windows)
    found, n_gone = prune_silent(copy.deepcopy(model), moments)
    assert n_gone == sum(int((~one).sum()) for one in fired) >= 4
    sizes = [block.ffwd.net[0].out_features for block in found.blocks]
    assert sizes == [int(one.sum()) for one in fired] and sizes[0] != sizes[1]
    assert_close(found(windows), model(windows))
    assert_close(utils.cached_logits(with_kv_cache(found), windows, 5)[0], model(windows))


def test_a_block_in_which_no_neuron_fires_keeps_one():
    model, windows = model_of(), utils.sample_prompts(DATA, 12, CONTEXT)
    with torch.no_grad():
        model.blocks[1].ffwd.net[0].weight.zero_()
        model.blocks[1].ffwd.net[0].bias.fill_(-1.0)
    outputs = [output for _, output, _ in structures(model, "neurons")]
    found, _ = prune_silent(copy.deepcopy(model), input_moments(model, outputs, windows))
    assert found.blocks[1].ffwd.net[0].out_features == 1
    assert_close(found(windows), model(windows))


# ---- The script ----


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    args = ("--quick", "--json", "-")
    run = run_script("more/pruning_refit.py", *args, cwd=tmp_path, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert len(report["checks"]) == 3 and all(report["checks"].values())
    whole, silent, neurons, neurons_refitted, heads, heads_refitted = report["rows"]
    assert whole["baseline"] and 0 <= silent["kl_to_teacher"] < 0.01
    n_silent = int(silent["method"].partition(" ")[0])
    assert silent["n_parameters"] == whole["n_parameters"] - n_silent * (2 * 192 + 1)
    assert abs(silent["loss_difference"]) < 0.01
    for cut, repaired in ((neurons, neurons_refitted), (heads, heads_refitted)):
        assert cut["n_parameters"] == repaired["n_parameters"] < whole["n_parameters"]
        assert cut.get("explained") is None and 0 < repaired["explained"] < 1
        assert cut["loss_difference_se"] > 0 and repaired["loss_difference_se"] > 0
    (texts,) = report["sweeps"].values()
    assert texts[0]["explained on them"] > texts[-1]["explained on them"]
    if distilled_checkpoint == utils.GPTLITE_DISTILLED_CKPT_PATH:
        assert texts[0]["loss"] > texts[-1]["loss"]  # a regression on too little text learns it by heart
        assert whole["valid_loss"] < neurons_refitted["valid_loss"] < neurons["valid_loss"]
    assert len(report["why"]) == 4


def test_refit_of_shared_heads_repairs_those_that_stay():
    """Heads that share keys stay in whole groups, whatever their own scores; an error changes nothing."""
    model = tiny_model(GPTlite_GQA, n_heads=4, d_head=8, n_groups=2)
    windows, scores = random_tokens(40, 16), torch.tensor([[10.0, 0.0, 9.0, 8.0]] * 2)
    outputs = [output for _, output, _ in structures(model, "heads")]
    moments = input_moments(model, outputs, windows)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="no whole groups"):
        prune_units(model, "heads", scores, 3, moments)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    expected, _ = prune_units(
        copy.deepcopy(model), "heads", torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 2), 2, moments
    )
    repaired, _ = prune_units(copy.deepcopy(model), "heads", scores, 2, moments)
    assert_close(repaired(windows)[0], expected(windows)[0])
