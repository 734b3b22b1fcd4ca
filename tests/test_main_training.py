"""main_training.py: its dropout, its schedule, and runs that stop and go on."""

import json
import runpy
import signal
import sys

import pytest
import torch
from helpers import ROOT, assert_close, random_tokens, run_script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import inference_training as training
from gptlite import GPTlite
from inference_training import check_finite, save_state, stop_between_steps
from inference_utils import load_checkpoint
from main_training import ByteDropout, GPTlite_Training, batch_of_step, warmup_stable_decay, without_blocks


def test_training_changes_nothing_in_evaluation():
    model, training_model = tiny_model(GPTlite), tiny_model(GPTlite_Training, dropout_p=0.5)
    x = random_tokens(3, 16)
    assert_close(training_model(x), model(x))
    assert {*training_model.state_dict()} == {*model.state_dict()}
    assert not torch.equal(training_model.train()(x), training_model(x))  # dropout is on


@given(st.integers(1, 40), st.integers(0, 99), st.sampled_from([0.0, 0.2, 0.5]))
@settings(max_examples=20)
def test_byte_dropout(n, seed, p):
    """Zeros or x * 1 / (1 - p), of the share that is asked for; reproducible; nothing in evaluation."""
    torch.manual_seed(seed)
    x, dropout = torch.full((50, n), 3.0), ByteDropout(p)
    out = dropout(x)
    kept = 1 - round(256 * p) / 256
    assert ((out == 0) | (out == 3.0 / kept)).all()
    assert abs((out != 0).float().mean().item() - kept) < 4 * (0.25 / out.numel()) ** 0.5 + 1e-9
    torch.manual_seed(seed)
    assert torch.equal(out, dropout(x)) and torch.equal(dropout.eval()(x), x)


def test_dropout_of_one_half_has_a_mean_of_one():
    torch.manual_seed(0)
    assert ByteDropout(0.5)(torch.ones(1000, 100)).mean() == pytest.approx(1.0, abs=0.02)


@given(st.floats(0, 1))
def test_the_schedule(progress):
    rate = warmup_stable_decay(progress, 2.0)
    if progress <= 0.01:
        assert rate == pytest.approx(200 * progress)
    elif progress < 0.7:
        assert rate == 2.0
    else:
        assert rate == pytest.approx(2.0 * (1 - progress) / 0.3)


def test_batches_follow_from_seed_and_step():
    data = torch.arange(1000)
    x, y = batch_of_step(data, 4, 8, seed=1, step=7)
    drawn = torch.rand(())
    again, _ = batch_of_step(data, 4, 8, seed=1, step=7)
    assert torch.equal(x, again) and torch.equal(y, x + 1) and torch.rand(()) == drawn
    assert not torch.equal(x, batch_of_step(data, 4, 8, seed=1, step=8)[0])


def test_without_blocks():
    model, x = tiny_model(GPTlite, n_layers=3), random_tokens(2, 8)
    shorter = without_blocks(model, [0, 2])
    embedded = model.token_embedding(x) + model.position_embedding(torch.arange(8))
    assert_close(shorter(x), model.fc_out(model.ln(model.blocks[1](embedded))))
    assert len(model.blocks) == 3


def run_training(monkeypatch, *args):
    """Runs the script in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["main_training.py", "--size", "distilled", "--device", "cpu", *args])
    try:
        runpy.run_path(str(ROOT / "main_training.py"), run_name="__main__")
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.mark.slow
def test_interrupted_run_resumes_to_the_same_weights(monkeypatch, tmp_path, capsys):
    own_text = tmp_path / "own text.txt"
    own_text.write_text("To be, or not to be, that is the question:\n" * 80)
    whole, parts = tmp_path / "whole.pth", tmp_path / "parts.pth"
    options = ["--steps", "4", "--data", str(own_text), "--checkpoint"]
    assert run_training(monkeypatch, *options, str(whole)) == 0

    calls = []

    def interrupted(*args):
        calls.append(args)
        real_step(*args)
        if len(calls) == 2:  # Ctrl-C when the weights are updated and the step is not counted yet
            signal.raise_signal(signal.SIGINT)

    real_step = training.optimizer_step
    monkeypatch.setattr(training, "optimizer_step", interrupted)
    assert run_training(monkeypatch, *options, str(parts)) == 130
    assert "--resume' goes on" in capsys.readouterr().out
    assert not parts.exists() and parts.with_suffix(".state").exists()
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    state = torch.load(parts.with_suffix(".state"))
    assert state["step"] == len(calls) == 2 and len(state["losses"]["GPTlite"]) == 2

    assert state["step"] < 0.7 * 4  # so early the run may still be made longer, and too short it is refused
    assert run_training(monkeypatch, "--resume", "--steps", "2", *options[2:], str(parts)) == 2
    assert "is of a run with steps 4, not 2" in capsys.readouterr().err
    other_text = tmp_path / "other.txt"
    other_text.write_text(own_text.read_text().replace("question", "QUESTION"))
    other = ["--steps", "4", "--data", str(other_text), "--checkpoint", str(parts), "--resume"]
    assert run_training(monkeypatch, *other) == 2
    assert "is of a run with training_text" in capsys.readouterr().err
    assert run_training(monkeypatch, *options, str(parts), "--resume") == 0
    expected, resumed = load_checkpoint(whole), load_checkpoint(parts)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    curves = [json.loads(path.with_suffix(".json").read_text())["loss_curve"] for path in (whole, parts)]
    assert curves[0] == curves[1]  # the mean training loss covers the steps before the interruption too

    facts = json.loads(parts.with_suffix(".json").read_text())
    assert facts["tokens_seen"] == 4 * 16 * 256
    assert facts["loss_curve"]["points"][-1][0] == 4
    assert "--resume" not in facts["command"]
    assert sorted(path.name for path in tmp_path.iterdir() if "part." in path.name) == []

    path = parts.with_suffix(".state")
    for wrong in (expected, [1], {**state, "step": "2"}, {k: v for k, v in state.items() if k != "curves"}):
        torch.save(wrong, path)
        assert run_training(monkeypatch, *options, str(parts), "--resume") == 2
        assert "parts.state is not the state of a training run" in capsys.readouterr().err
    path.write_bytes(whole.with_suffix(".state").read_bytes()[:1000])  # cut short: refused, not used
    assert run_training(monkeypatch, *options, str(parts), "--resume") == 2
    assert "truncated" in capsys.readouterr().err


def test_a_second_interrupt_ends_at_once(monkeypatch, tmp_path, capsys):
    own_text = tmp_path / "own.txt"
    own_text.write_text("To be, or not to be, that is the question:\n" * 80)

    def interrupted_twice(*_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second interrupt did nothing")

    monkeypatch.setattr(training, "optimizer_step", interrupted_twice)
    options = ["--steps", "4", "--data", str(own_text), "--checkpoint", str(tmp_path / "model.pth")]
    assert run_training(monkeypatch, *options) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "main_training.py: stopped"
    assert [path.name for path in tmp_path.iterdir()] == ["own.txt"]
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_full_disk_keeps_the_last_state(monkeypatch, tmp_path, capsys):
    own_text = tmp_path / "own.txt"
    own_text.write_text("To be, or not to be, that is the question:\n" * 80)
    path = tmp_path / "model.pth"
    path.write_bytes(b"the last good file")

    def no_space(_, file):
        file.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file: no space left")

    monkeypatch.setattr(torch, "save", no_space)
    assert run_training(monkeypatch, "--steps", "1", "--data", str(own_text), "--checkpoint", str(path)) == 2
    assert "cannot write" in capsys.readouterr().err
    assert path.read_bytes() == b"the last good file"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.pth", "own.txt"]


def test_signals_are_caught_once_and_given_back():
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    for i, number in enumerate(numbers):
        with stop_between_steps(*numbers) as stop:
            signal.raise_signal(number)
            assert stop == [number] and signal.getsignal(number) == before[i]  # a second one acts at once
        assert [signal.getsignal(number) for number in numbers] == before
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stop_between_steps(signal.SIGTERM) as stop:
            signal.raise_signal(signal.SIGTERM)
        assert not stop and signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before[1])


def test_only_finite_weights_become_a_state(monkeypatch, tmp_path, capsys):
    path, model = tmp_path / "model.state", tiny_model(GPTlite)
    save_state(path, {"step": 1}, model)
    before = path.read_bytes()
    for wrong in (float("nan"), float("-inf"), 1e5):  # the last is too large for a checkpoint's 16 bits
        model.ln.bias.data[3] = wrong
        with pytest.raises(ValueError, match="a weight after step 2 is not finite"):
            save_state(path, {"step": 2}, model, may_fail=True)
    model.ln.bias.data[3] = 0.0
    with pytest.raises(OSError):
        save_state(tmp_path, {"step": 2}, model)
    save_state(tmp_path, {"step": 2}, model, may_fail=True)
    assert "state not saved" in capsys.readouterr().err
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    check_finite(3, 1.0, 2.0)
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a loss of step 3 is not finite"):
            check_finite(3, 1.0, wrong)


@pytest.mark.parametrize("bad_step", [1, 2])  # seen in the next step's loss, or in the last evaluation
def test_a_run_that_diverges_leaves_all_files(monkeypatch, tmp_path, capsys, bad_step):
    own_text = tmp_path / "own.txt"
    own_text.write_text("To be, or not to be, that is the question:\n" * 80)
    path, calls, real_step = tmp_path / "model.pth", [], training.optimizer_step
    for suffix in (".pth", ".json", ".state"):
        path.with_suffix(suffix).write_text(f"the last good {suffix}")

    def diverging(model, *args):
        calls.append(real_step(model, *args))
        if len(calls) == bad_step:
            model.fc_out.weight.data.fill_(float("nan"))

    monkeypatch.setattr(training, "optimizer_step", diverging)
    assert run_training(monkeypatch, "--steps", "2", "--data", str(own_text), "--checkpoint", str(path)) == 2
    error = capsys.readouterr().err
    assert (
        error
        == "main_training.py: training went wrong: a loss of step 2 is not finite; files stay as they are\n"
    )
    for suffix in (".pth", ".json", ".state"):
        assert path.with_suffix(suffix).read_text() == f"the last good {suffix}"
    assert len(list(tmp_path.iterdir())) == 4
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--resume", "--checkpoint", "nowhere.pth"], "nothing to resume"),
        (["--checkpoint", "no such folder/x.pth"], "there is no folder"),
        (["--checkpoint", "weights.bin"], "must end in .pth"),
        (["--steps", "0"], "not a number from 1 up"),
        (["--dtype", "bfloat16"], "unrecognized arguments: --dtype"),  # it would change nothing
        (["--repeats", "3"], "unrecognized arguments: --repeats"),
        (["--seed", str(10**15)], "too large"),
        (["--data", "short.txt"], "the text is too short: 200 tokens"),
    ],
)
def test_bad_options(monkeypatch, tmp_path, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("To be, or not to be\n" * 100)
    assert run_training(monkeypatch, *args) == 2
    assert message in capsys.readouterr().err


def test_script():
    run = run_script("main_training.py", "--quick", "--json", "-")
    assert run.status == 0 and all(run.json["checks"].values()), run.stderr
    (row,) = run.json["rows"]
    assert row["tokens_seen"] == 10 * 4 * 256 and 1 < row["valid_loss"] < 4.6
    (blocks,) = run.json["sweeps"].values()
    assert [line["blocks left out"] for line in blocks] == ["none", "1", "2", "3", "2, 3"]
    assert blocks[0]["costs"] == 0
