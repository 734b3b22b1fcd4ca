"""Scores against what they say they are: gradients and weights by hand; and the script's order."""

import copy
import runpy
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, assert_close, random_tokens, run_script, tiny_model

import inference_utils as utils
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from pruning_importance import magnitude, score_units, taylor
from pruning_refit import structures

H, D, N = 4, 8, 128
CONTEXT, L = 16, 2
DATA = random_tokens(1, 400)[0]
UNITS = {"heads": H, "neurons": N}
KINDS = list(UNITS)


def model_of(**kwargs):
    return tiny_model(GPTlite, n_heads=H, d_head=D, **kwargs)


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


def test_activations_are_those_of_the_windows():
    """Of the same windows as the moments: the mean of a neuron that is never negative is its mean size."""
    scores, moments = score_units(model_of(), DATA, 8, CONTEXT, batch_size=3)
    for layer, (mean, _) in enumerate(moments["neurons"]):
        assert_close(scores["neurons"]["activation"][layer] / (8 * CONTEXT), mean)


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
        score_units(model, DATA, 8, CONTEXT, seed=4)[0]["heads"]["random choice"],
        scores["heads"]["random choice"],
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# ---- The script ----


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "figure.png"
    args = ("--quick", "--json", "-", "--plot", figure)
    run = run_script("more/pruning_importance.py", *args, cwd=tmp_path, checkpoint=distilled_checkpoint)
    report = run.json
    assert run.status == 0, run.stderr + run.stdout
    assert len(report["checks"]) == 2 and all(report["checks"].values())
    dense, *rows = report["rows"]
    assert dense["baseline"] and dense["loss_difference"] is None and len(rows) == 2 * 7
    for pruned, distilled in zip(rows[::2], rows[1::2], strict=True):
        assert distilled["method"] == pruned["method"] + ", distilled"
        assert pruned["n_parameters"] == distilled["n_parameters"] < dense["n_parameters"]
        assert (pruned["explained"] is not None) == pruned["method"].split(",")[0].endswith("refit")
        assert pruned["loss_difference_se"] > 0 and distilled["loss_difference_se"] > 0
    pruned, distilled, heads = report["sweeps"].values()
    ways = [row["decided by"] for row in pruned]
    assert ways == [row["decided by"] for row in distilled] == [row["decided by"] for row in heads]
    assert "all losses over 4 windows" in report["technique"] and len(ways) == 7
    assert all("over 4 windows" in title for title in report["sweeps"])
    loss = {row["decided by"]: row["30"] for row in pruned}
    if distilled_checkpoint == utils.GPTLITE_DISTILLED_CKPT_PATH:
        assert loss["activation x column + refit"] < loss["activation x column"] < loss["random choice"]
        assert loss["Taylor + refit"] < loss["Taylor"] < loss["random choice"]
    assert len(report["why"]) == 4 and figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("percent", ["-1", "100"])
def test_script_refuses_shares_out_of_range(percent, monkeypatch, capsys):
    script = str(ROOT / "more" / "pruning_importance.py")
    monkeypatch.setattr(sys, "argv", [script, "--removed", percent])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert end.value.code == 2
    assert "--removed takes 0 to 99 percent" in capsys.readouterr().err


def test_scores_of_a_model_in_training_mode_or_with_a_cache():
    data = random_tokens(1, 400)[0]
    expected, _ = score_units(tiny_model(GPTlite), data, 8, 16)
    for model in (tiny_model(GPTlite, dropout_p=0.5).train(), tiny_model(GPTlite_KVCache)):
        was_training = model.training
        scores, _ = score_units(model, data, 8, 16)
        assert model.training == was_training
        assert_close(scores["neurons"]["Taylor"], expected["neurons"]["Taylor"])
