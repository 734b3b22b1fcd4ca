"""Scores and the refit against what they say they are: gradients, contributions and a regression by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script, tiny_model

import inference_utils as utils
from gptlite import GPTlite
from main_pruning import keep_largest, mask, prune
from main_pruning_importance import (
    contribution,
    input_moments,
    magnitude,
    prune_units,
    refit,
    score_units,
    structures,
    taylor,
)

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


@pytest.mark.parametrize("kind", KINDS)
def test_magnitude_by_hand(kind):
    inputs, output, size = structures(model_of(), kind)[0]
    scores = magnitude(inputs, output, size)
    for unit in range(0, UNITS[kind], 3):
        own = slice(unit * size, (unit + 1) * size)
        into = sum(f.weight[own].square().sum() + f.bias[own].square().sum() for f in inputs).sqrt()
        assert_close(scores[unit], into * output.weight[:, own].norm())


def test_magnitude_ignores_the_scale_of_a_neuron():
    """Scaling its input up and its output down changes nothing, behind a ReLU."""
    model = model_of()
    before = magnitude(*structures(model, "neurons")[0])
    with torch.no_grad():
        first, last = model.blocks[0].ffwd.net[0], model.blocks[0].ffwd.net[2]
        first.weight[3] *= 10
        first.bias[3] *= 10
        last.weight[:, 3] /= 10
    assert_close(magnitude(*structures(model, "neurons")[0]), before)


@pytest.mark.parametrize("kind", KINDS)
def test_taylor_by_hand(kind):
    model = model_of()
    windows = utils.sample_prompts(DATA, 8, CONTEXT + 1)
    scores, _ = score_units(model, DATA, 8, CONTEXT, batch_size=2)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).backward()
    inputs, output, size = structures(model, kind)[1]
    assert_close(scores[kind]["Taylor"][1], taylor(inputs, output, size))
    for unit in (0, 2, UNITS[kind] - 1):
        own = slice(unit * size, (unit + 1) * size)
        parts = [(f.weight[own], f.weight.grad[own]) for f in inputs]
        parts += [(f.bias[own], f.bias.grad[own]) for f in inputs]
        parts += [(output.weight[:, own], output.weight.grad[:, own])]
        assert_close(scores[kind]["Taylor"][1, unit], sum((w * g).abs().sum() for w, g in parts))


def test_scores_depend_on_the_text_and_the_seed_alone():
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    scores, moments = score_units(model, DATA, 8, CONTEXT, batch_size=2, seed=3)
    others, _ = score_units(model_of(), DATA, 8, CONTEXT, batch_size=8, seed=3)
    for kind in KINDS:
        assert len(moments[kind]) == L
        for name, importance in scores[kind].items():
            assert importance.shape == (L, UNITS[kind]) and (importance >= 0).all()
            assert_close(importance, others[kind][name])
    assert not torch.equal(
        score_units(model, DATA, 8, CONTEXT, seed=4)[0]["heads"]["random"], scores["heads"]["random"]
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert n_hooks(model) == 0


# ---- The refit ----


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
        kept = keep_largest(scores[kind]["random"][layer], UNITS[kind] // 2)
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
    how = (importance, torch.zeros(L, N), 3, N) if kind == "heads" else (torch.zeros(L, H), importance, H, 3)
    assert explained is None
    assert torch.equal(pruned(tokens), prune(copy.deepcopy(model), *how)(tokens))
    assert_close(pruned(tokens), mask(copy.deepcopy(model), *how)(tokens))


# ---- The script ----


def test_script(checkpoint, tmp_path):
    figure = tmp_path / "figure.png"
    run = run_script(
        "main_pruning_importance.py", "--quick", "--json", "-", "--plot", figure, checkpoint=checkpoint
    )
    report = run.json
    assert report is not None, run.stderr
    checks = report["checks"]
    if checkpoint == utils.GPTLITE_CKPT_PATH:
        assert run.status == 0, run.stdout
    else:  # untrained: all neurons are as good
        checks = {name: passed for name, passed in checks.items() if name.startswith("no ")}
    assert len(checks) >= 2 and all(checks.values()), checks
    dense, *rows = report["rows"]
    assert dense["baseline"] and len(rows) == 7
    for row in rows:
        assert row["n_parameters"] < dense["n_parameters"] and row["distilled_loss"] is not None
        assert (row["explained"] is not None) == row["method"].split(",")[0].endswith("refit")
    pruned, distilled, heads, texts = report["sweeps"].values()
    if checkpoint == utils.GPTLITE_CKPT_PATH:  # a regression on too little text learns it by heart
        assert texts[0]["loss"] > texts[-1]["loss"]
    assert [row["decided by"] for row in pruned] == [row["decided by"] for row in distilled]
    loss = {row["decided by"]: row["30%"] for row in pruned}
    if checkpoint == utils.GPTLITE_CKPT_PATH:
        assert loss["activation x column + refit"] < loss["activation x column"] < loss["random"]
        assert loss["Taylor + refit"] < loss["Taylor"] < loss["random"]
    assert len(heads) == 7 and report["why"] and figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("percent", ["-1", "100"])
def test_script_refuses_shares_out_of_range(percent, checkpoint):
    run = run_script("main_pruning_importance.py", "--removed", percent, checkpoint=checkpoint)
    assert run.status == 2
    assert "--removed takes 0 to 99 percent" in run.stderr.strip().splitlines()[-1]
