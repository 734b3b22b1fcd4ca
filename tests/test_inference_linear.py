"""What the reports of linear layers share: bytes from real tensors, training, rows beside a control."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import random_tokens, tiny_model

import inference_linear as study
import inference_report as harness
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from gptlite_linear import GatedDelta, GPTlite_Linear
from main_kvcache import generate_kvcache


@pytest.mark.parametrize("full", [(), (1,), (0, 1)])
def test_bytes_of_a_model(full):
    """Counted by hand: a state and a convolution's tail a linear layer, keys and values for the others."""
    model = tiny_model(GPTlite_Linear, full_layers=full)
    fixed, per_token = study.memory_of(model, random_tokens(1, 16))
    assert fixed == 8 * (2 - len(full)) * (2 * 16 * 16 + 3 * 3 * 32)
    assert per_token == 8 * len(full) * 2 * 2 * 16
    row = {"state_bytes": fixed, "kv_bytes_per_token": per_token or None}
    assert study.bytes_at(row, 10) == fixed + 10 * per_token
    assert study.bytes_at({"kv_bytes_per_token": 3.0}, 10) == 30


def test_lengths():
    parser = study.options("Doc.", max_tokens=4096)
    assert study.lengths(parser.parse_args([])) == [256, 1024, 4096]
    assert study.lengths(parser.parse_args(["--max-tokens", "65536"]))[-1] == 65536
    for wrong in ("1000", "256", "-1"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--max-tokens", wrong])


@pytest.fixture
def run(monkeypatch):
    """(args, report, text, softmax model) over a tiny model and text."""

    def load(args, model_class, packed=True):
        return [tiny_model(model_class, dtype=torch.float32)]

    monkeypatch.setattr(harness, "load_models", load)
    monkeypatch.setattr(sys, "argv", ["main_x.py"])
    args = SimpleNamespace(quick=False, device=torch.device("cpu"), dtype=torch.float32, n_windows=4, seed=0)
    args.repeats, args.checkpoint, args.uptrain_steps = 1, harness.Path("absent.pth"), 3
    args.batch_size, args.prompt_len, args.n_tokens = 2, 5, 3
    data = torch.arange(400) * 7 % 16
    text = SimpleNamespace(valid=data, train=data, prompts=lambda n, T: harness.sample_prompts(data, n, T))
    (soft,) = load(args, GPTlite_KVCache)
    report = harness.Report(args, "x", soft, study.COLUMNS, study.HIDE, text)
    return args, report, text, soft


def test_rows_beside_a_control(run):
    args, report, text, soft = run

    def make(full):
        model = tiny_model(GPTlite_Linear, full_layers=full, dtype=torch.float32)
        return study.trained_on(args, text, model, "x")

    makers = {"linear": partial(make, ()), "mixed": partial(make, (0,))}
    rows, models = study.compare_trained(args, report, text, soft, generate_kvcache, makers)
    assert [*rows] == ["softmax", "linear", "mixed", study.CONTROL]
    assert {*models} == {"linear", "mixed", study.CONTROL} and isinstance(models[study.CONTROL], GPTlite)
    assert rows["softmax"]["baseline"] and rows["linear"]["approximate"]
    assert rows["linear"]["kv_bytes_per_token"] is None and rows["mixed"]["kv_bytes_per_token"] == 256
    assert rows["linear"]["state_bytes"] == 2 * rows["mixed"]["state_bytes"]
    checks = report.data["checks"]
    assert len(checks) == 2 and all(checks.values())
    said = study.between(report, models, "mixed", "linear")
    assert "mixed" in said and "linear" in said
    best = min(("linear", "mixed"), key=lambda name: rows[name]["valid_loss"])
    assert f"After 3 steps: {best[0].upper()}{best[1:]}" in study.explain_losses(args, report, rows, makers)
    study.plot_memory(report, rows, makers, 16)
    points = report.panels[0].keywords["points"]
    assert points["linear"][0] == pytest.approx(rows["linear"]["state_bytes"] / 1e6)
    assert points[study.CONTROL][0] == pytest.approx(16 * 512 / 1e6)


def test_training_on_leaves_the_model_alone(run):
    args, _, text, _ = run
    model = tiny_model(GPTlite_Linear, dtype=torch.float32)
    before = [p.clone() for p in model.parameters()]
    trained, none = (study.trained_on(args, text, model, "x", n_steps=n) for n in (None, 0))
    assert all(map(torch.equal, before, model.parameters()))
    tokens = random_tokens(1, 9)
    assert (trained(tokens)[0] - model(tokens)[0]).abs().max() > 1e-4
    assert (none(tokens)[0] - model(tokens)[0]).abs().max() < 1e-4


def test_conversion_by_the_options(distilled_checkpoint):
    args = SimpleNamespace(checkpoint=distilled_checkpoint, device=torch.device("cpu"), dtype=torch.bfloat16)
    model = study.converted(args, SimpleNamespace(vocab_size=96), GatedDelta, (1,))
    kinds = [type(block.mha) is GatedDelta for block in model.blocks]
    assert kinds == [True, False, True] and next(model.parameters()).dtype == torch.bfloat16
