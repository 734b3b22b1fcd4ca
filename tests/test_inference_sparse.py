"""The rows of choices: losses of models that share their weights, lines for the figure, costs."""

import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close, tiny_model

import gptlite_sparse as sparse
import inference_report as harness
import inference_sparse as study
import inference_utils as utils
from gptlite import GPTlite


@pytest.fixture
def choices(monkeypatch):
    def load(args, model_class):
        return [tiny_model(model_class, seqlen=16, dtype=torch.float32)]

    monkeypatch.setattr(harness, "load_models", load)
    args = SimpleNamespace(quick=False, device=torch.device("cpu"), dtype=torch.float32, n_windows=4, seed=0)
    args.repeats, args.checkpoint = 1, harness.Path("absent.pth")
    monkeypatch.setattr(sys, "argv", ["main_x.py"])
    data = torch.arange(400) * 7 % 16
    text = SimpleNamespace(valid=data, prompts=lambda n, T: harness.sample_prompts(data, n, T))
    base = tiny_model(GPTlite, seqlen=16, dtype=torch.float32)
    return study.Choices(args, harness.Report(args, "x", base, text=text), base, text)


def window(budget):
    return lambda Q, K: sparse.choose_window(Q, K, budget)


def test_rows(choices):
    whole, four = (choices.row("window", n, window(n)) for n in (16, 4))
    assert whole["loss_difference"] == pytest.approx(0, abs=1e-5) and whole["keys_read"] == 8.5
    assert abs(four["loss_difference"]) > 1e-3 and four["keys_read"] < 4 and four["budget"] == 4
    assert [row["method"] for row in choices.report.data["rows"]] == ["window 16", "window 4"]
    points = choices.lines["window"]
    assert points == [(8.5, whole["valid_loss"]), (four["keys_read"], four["valid_loss"])]
    assert "window 4" in choices.between("window 4", "window 16")
    mixed = choices.row("window", 4, window(4), n_dense_layers=1)
    assert mixed["method"] == "window 4, 1 layers dense" and len(choices.lines["window"]) == 2
    assert mixed["keys_read"] is None and "mass" not in mixed
    choices.add_trained("window 4", four, choices.models["window 16"], choices.base)
    choices.plot_losses()
    assert len(choices.report.panels) == 1
    ((title, lines),) = choices.report.data["sweeps"].items()
    assert title == "Loss against budget: 4 windows"
    assert [(line["rule"], line["budget"]) for line in lines] == [
        ("window", 16),
        ("window", 4),
        ("window, trained on", 4),
    ]
    assert lines[1]["difference"] == pytest.approx(four["loss_difference"])
    assert lines[2]["difference"] == pytest.approx(0, abs=1e-5) and lines[2]["keys read"] == four["keys_read"]


def test_the_familys_windows_are_some_of_the_reports(choices, monkeypatch):
    """The table's losses are what a report of fewer windows has."""
    monkeypatch.setattr(study, "FAMILY_WINDOWS", 32)
    choices.args.n_windows = 128
    choices.row("window", 4, window(4))
    choices.budget_sweep()
    ((title, (line,)),) = choices.report.data["sweeps"].items()
    expected = utils.window_losses(choices.models["window 4"], choices.report.valid, 32).mean().item()
    assert title.endswith(": 32 windows") and line["loss"] == pytest.approx(expected)


def test_models_share_weights_and_not_rules(choices):
    one, other = choices.model(window(2)), choices.model(window(16))
    assert all(a is b for a, b in zip(one.parameters(), other.parameters(), strict=True))
    tokens = choices.tokens
    assert (one(tokens)[0] - other(tokens)[0]).abs().max() > 1e-3
    assert_close(other(tokens)[0], choices.base(tokens))


def test_mean_figures_and_costs():
    assert study.mean_figures([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 2.0}]) == {"a": 2.0, "b": 2.0}
    assert study.reading_cost(10, 2, 4, torch.bfloat16) == (160, 160)
    args = SimpleNamespace(device="cpu", dtype=torch.bfloat16)
    q, K, V = study.decode_step(args, 2, 4, 9)
    assert q.shape == (1, 2, 1, 4) and K.shape == V.shape == (1, 2, 9, 4) and K.dtype == torch.bfloat16
