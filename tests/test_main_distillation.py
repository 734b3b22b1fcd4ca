"""main_distillation.py: the loss, paired labels, and a run that stops and goes on."""

import copy
import hashlib
import inspect
import json
import math
import runpy
import signal
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import gptlite
import inference_report
import inference_training as training
import inference_utils
from gptlite import GPTlite, GPTliteParameters
from gptlite_kvcache import GPTlite_KVCache
from inference_utils import load_checkpoint
from main_distillation import (
    compare_with_teacher,
    distillation_loss,
    make_students,
    store_soft_labels,
    student_loss,
)

V = 16  # tokens of the tiny models
SIZES = {"d_head": 16, "batch_size": 4, "lr": 1e-3, "seqlen": 32, "dropout_p": 0.1}
P = GPTliteParameters(1, 16, 1, **SIZES)


def random_logits(*shape, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)


def kl_by_hand(student, teacher, temperature):
    """The published equation, token by token, in Python numbers."""
    total = 0.0
    rows = list(zip(student.reshape(-1, V).tolist(), teacher.reshape(-1, V).tolist(), strict=True))
    for s, t in rows:
        q, p = ([math.exp(z / temperature) for z in logits] for logits in (s, t))
        q, p = ([e / sum(part) for e in part] for part in (q, p))
        total += sum(pi * math.log(pi / qi) for pi, qi in zip(p, q, strict=True))
    return temperature**2 * total / len(rows)


def test_signature_of_the_post():
    names = list(inspect.signature(distillation_loss).parameters)
    assert names == ["logits_student", "logits_teacher", "temperature"]


@given(
    leading=st.lists(st.integers(1, 4), max_size=3),
    temperature=st.sampled_from([0.5, 1, 2, 7.5]),
    seed=st.integers(0, 99),
)
def test_loss_is_the_equation_for_any_leading_shape(leading, temperature, seed):
    student, teacher = random_logits(*leading, V, seed=seed), random_logits(*leading, V, seed=seed + 100)
    loss = distillation_loss(student, teacher, temperature)
    assert loss.shape == ()
    assert_close(loss, kl_by_hand(student, teacher, temperature))
    assert_close(loss, distillation_loss(student.reshape(-1, V), teacher.reshape(-1, V), temperature))
    assert distillation_loss(teacher, teacher, temperature) == 0
    assert_close(distillation_loss(student + 5, teacher - 3, temperature), loss)  # softmax ignores both


def test_loss_of_strided_logits():
    student, teacher = random_logits(2, V, 5), random_logits(2, V, 5, seed=1)
    student, teacher = student.transpose(1, 2), teacher.transpose(1, 2)  # [2, 5, V], not contiguous
    assert_close(distillation_loss(student, teacher, 2.0), kl_by_hand(student, teacher, 2.0))


def test_gradient_keeps_its_size_at_any_temperature():
    student, teacher = random_logits(32, V, scale=0.1), random_logits(32, V, scale=0.1, seed=1)
    student.requires_grad_()
    losses = [distillation_loss(student, teacher, temperature) for temperature in (1.0, 2.0, 8.0)]
    sizes = [torch.autograd.grad(loss, student)[0].norm() for loss in losses]
    assert_close(sizes[1:], [sizes[0], sizes[0]], 0.05)


@pytest.mark.parametrize(
    ("teacher", "expected"), [((2, 0, -math.inf), 0.73328), ((math.log(3), 0, -math.inf), 0.53628)]
)
def test_what_the_teacher_rules_out_adds_nothing(teacher, expected):
    student = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    loss = distillation_loss(student, torch.tensor([teacher], dtype=torch.float64), 1.0)
    assert_close(loss, expected, 1e-5)
    (gradient,) = torch.autograd.grad(loss, student)
    assert_close(gradient[0, 2], 1 / 3)  # the student's probability of it goes down
    both = torch.tensor([[1.0, 0.0, -math.inf]], requires_grad=True)  # a student that rules it out as well
    loss = distillation_loss(both, torch.tensor([[2.0, 0.0, -math.inf]]), 1.0)
    assert loss > 0 and torch.autograd.grad(loss, both)[0].isfinite().all()
    assert distillation_loss(torch.tensor([[-math.inf, 0.0]]), torch.zeros(1, 2), 1.0) == math.inf


@pytest.mark.parametrize(
    "shapes", [((1, 1, 4), (1, 2, 4)), ((2, 4), (2, 1)), ((2, 4), (2, 5)), ((4,), (1, 4))]
)
def test_logits_that_would_broadcast_are_refused(shapes):
    with pytest.raises(ValueError, match="must belong together"):
        distillation_loss(torch.zeros(shapes[0]), torch.zeros(shapes[1]), 1.0)


# ---- Stored labels ----


def test_loss_of_a_student():
    logits, teacher = random_logits(2, 5, V), random_logits(2, 5, V, seed=1)
    targets, labels = random_tokens(2, 5), (teacher / 2).log_softmax(-1).float()
    hard, soft = F.cross_entropy(logits.flatten(0, 1), targets.flatten()), kl_by_hand(logits, teacher, 2.0)
    for alpha in (0.0, 0.3, 1.0):
        loss = student_loss(logits, targets, labels, 2.0, alpha)
        assert_close(loss, alpha * hard + (1 - alpha) * soft, 1e-5)


def test_stored_rows_belong_to_their_inputs():
    teacher = tiny_model(GPTlite, dropout_p=0.5).train()
    inputs = random_tokens(7, 16)
    state = copy.deepcopy(teacher.state_dict())
    labels = store_soft_labels(teacher, inputs, 2.0, batch_size=3)  # [7, 16, V]
    assert_close(labels, store_soft_labels(teacher, inputs, 2.0, batch_size=7))
    assert teacher.training and all(torch.equal(t, state[name]) for name, t in teacher.state_dict().items())
    with torch.no_grad():
        logits = teacher.eval()(inputs)  # [7, 16, V]
    assert labels.dtype == torch.float16
    assert_close(labels.float().exp(), (logits / 2).softmax(-1).float(), 2e-3)
    found = labels.argmax(-1)  # [7, 16]: those of each input match its own logits best
    matches = [[(row == other).sum() for other in logits.argmax(-1)] for row in found]
    assert torch.equal(torch.tensor(matches).argmax(-1), torch.arange(7))
    assert store_soft_labels(tiny_model(GPTlite, vocab_size=300), random_tokens(2, 4), 1.0).shape[-1] == 300


def test_labels_of_a_teacher_with_a_cache():
    tokens = random_tokens(3, 8)
    plain, cached = (store_soft_labels(tiny_model(c), tokens, 2.0) for c in (GPTlite, GPTlite_KVCache))
    assert_close(plain, cached)


def test_labels_of_a_low_temperature_are_finite():
    teacher, tokens = tiny_model(GPTlite), random_tokens(2, 8)
    teacher.fc_out.weight.data *= 5
    labels = store_soft_labels(teacher, tokens, 0.0003)
    assert labels.isfinite().all() and labels.min() == torch.finfo(torch.float16).min
    student = tiny_model(GPTlite, seed=1)(tokens).float()  # [2, 8, V]
    with torch.no_grad():
        expected = distillation_loss(student, teacher(tokens).float(), 0.0003)
    loss = student_loss(student, tokens, labels, 0.0003, 0.0)
    assert_close(loss, expected, 1e-2)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, student))
    with pytest.raises(ValueError, match="no numbers"):
        store_soft_labels(teacher, tokens, 1e-42)


def test_students_begin_alike():
    one, other = make_students(["one", "other"], V, P, 7, torch.device("cpu")).values()
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def test_comparison_with_the_teacher():
    teacher, student = tiny_model(GPTlite), tiny_model(GPTlite_KVCache, seed=1)
    windows = random_tokens(5, 16)
    figures = compare_with_teacher(student, teacher, windows, batch_size=2)
    with torch.no_grad():
        targets, logits = teacher(windows), student(windows)[0]
    assert_close(figures["kl_to_teacher"], kl_by_hand(logits, targets, 1.0), 1e-4)
    assert_close(figures["same_best_token"], (logits.argmax(-1) == targets.argmax(-1)).double().mean().item())
    assert compare_with_teacher(teacher, teacher, windows) == {"kl_to_teacher": 0, "same_best_token": 1}


# ---- The script ----


def checkpoints():
    folder = ROOT / "checkpoints"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_quick_run(checkpoint, tmp_path):
    before = checkpoints()
    figure = tmp_path / "figure.png"
    args = ("--quick", "--json", "-", "--plot", str(figure))
    run = run_script("main_distillation.py", *args, checkpoint=checkpoint)
    assert run.status == 0, run.stderr
    assert len(run.json["checks"]) == 2 and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    assert {"teacher", "hard labels", "soft labels", "mixed"} <= set(rows)
    teacher = rows.pop("teacher")
    assert teacher["baseline"] and teacher["kl_to_teacher"] < 1e-5 and teacher["same_best_token"] > 0.99
    assert teacher["loss_difference"] is None and teacher["kv_bytes_per_token"] == 4 * 2 * 6 * 384
    for row in rows.values():
        assert not row["baseline"] and row["n_parameters"] < teacher["n_parameters"] / 7
        assert row["weights_mb"] < teacher["weights_mb"] / 7 and row["kl_to_teacher"] > 0
        assert row["peak_memory_mb"] < teacher["peak_memory_mb"] / 5
        assert row["forward_tokens"] == teacher["forward_tokens"] == 32 + 7
        assert_close(row["loss_difference"], row["valid_loss"] - teacher["valid_loss"])
    assert len(run.json["why"]) == 4 and figure.stat().st_size > 1000
    assert checkpoints() == before


def test_the_shipped_student_beats_hard_labels():
    path = inference_utils.GPTLITE_DISTILLED_CKPT_PATH
    if not path.is_file():
        pytest.skip("no distilled checkpoint here")
    facts = json.loads(path.with_suffix(".json").read_text())
    assert facts["weights_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert facts["tokens_seen"] >= 8000 * 16 * 256
    compared = facts["compared"]
    assert compared["soft labels"]["valid_loss"] == facts["validation_loss"]
    assert compared["teacher"]["kl_to_teacher"] < 1e-3 < compared["soft labels"]["kl_to_teacher"]
    assert compared["soft labels"]["kl_to_teacher"] < compared["hard labels"]["kl_to_teacher"]
    assert compared["soft labels"]["valid_loss"] < compared["hard labels"]["valid_loss"]


@pytest.fixture
def tiny_run(monkeypatch, tmp_path):
    """Runs the script in this process on tiny models and a short text: run(*args) -> exit status."""
    parameters = {
        "get_gptlite_model_parameters": GPTliteParameters(2, 32, 2, **SIZES),
        "get_gptlite_distilled_model_parameters": P,
    }
    for name, p in parameters.items():
        for module in (gptlite, inference_utils):
            monkeypatch.setattr(module, name, lambda p=p: p)
    monkeypatch.setattr(inference_utils, "GPTLITE_DISTILLED_CKPT_PATH", tmp_path / "shipped.pth")
    ceilings = inference_report.Ceilings(1e12, 1e10)  # measuring them would take most of these tests' time
    monkeypatch.setattr(inference_report, "measure_ceilings", lambda *_: ceilings)
    text = tmp_path / "own text.txt"
    text.write_text("To be, or not to be, that is the question:\n" * 80)
    teacher = tmp_path / "teacher.pth"
    torch.save(inference_utils.make_model(GPTlite, 96).state_dict(), teacher)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*args):
        fixed = ["--device", "cpu", "--data", str(text), "--checkpoint", str(teacher), "--repeats", "1"]
        monkeypatch.setattr(sys, "argv", ["main_distillation.py", *fixed, *args])
        try:
            runpy.run_path(str(ROOT / "main_distillation.py"), run_name="__main__")
        except SystemExit as stop:
            return stop.code
        finally:
            now = {number: signal.getsignal(number) for number in handlers}
            for number, handler in handlers.items():
                signal.signal(number, handler)
            assert now == handlers  # the script leaves Ctrl-C as it was
        return 0

    return run


def test_interrupted_run_resumes_to_the_same_weights(tiny_run, monkeypatch, tmp_path, capsys):
    whole, parts = tmp_path / "whole.pth", tmp_path / "parts.pth"
    options = ["--steps", "6"]
    assert tiny_run(*options, "--output", str(whole)) == 0

    calls, real_step = [], training.optimizer_step

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 8:  # between two students of step 3
            signal.raise_signal(signal.SIGTERM)
        return real_step(*args)

    monkeypatch.setattr(training, "optimizer_step", interrupted)
    assert tiny_run(*options, "--output", str(parts)) == 130
    output = capsys.readouterr().out
    assert "stopped at step 3" in output and "--resume' goes on" in output
    assert len(calls) == 9 and not parts.exists() and parts.with_suffix(".state").exists()
    monkeypatch.setattr(training, "optimizer_step", real_step)

    assert tiny_run("--steps", "7", "--output", str(parts), "--resume") == 2
    assert "is of a run with steps 6, not 7" in capsys.readouterr().err
    path = tmp_path / "own text.txt"
    same, other = path.read_text(), tmp_path / "other text.txt"
    assert len(same) % 2 == 0
    for text in (same.replace("question", "Question"), same[:-44] + same[-44:].upper()):
        other.write_text(text)  # as long, but other words in the training or in the validation part
        assert tiny_run(*options, "--output", str(parts), "--resume", "--data", str(other)) == 2
        assert "is of a run with" in capsys.readouterr().err
    assert tiny_run(*options, "--output", str(parts), "--resume") == 0
    states = [inference_utils.load_file(path.with_suffix(".state")) for path in (whole, parts)]
    for name in ("hard labels", "soft labels", "mixed"):
        expected, resumed = (state["models"][name] for state in states)
        assert all(torch.equal(expected[key], resumed[key]) for key in expected)
    expected, resumed = load_checkpoint(whole), load_checkpoint(parts)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)

    facts = json.loads(parts.with_suffix(".json").read_text())
    assert facts["tokens_seen"] == 6 * 4 * 32 and "--resume" not in facts["command"]
    assert facts["weights_sha256"] == hashlib.sha256(parts.read_bytes()).hexdigest()
    assert set(facts["compared"]) == {"teacher", "hard labels", "soft labels", "mixed"}
    assert facts["loss_curve"]["points"]["soft labels"][-1][0] == 6
    assert [path.name for path in tmp_path.iterdir() if ".part" in path.name] == []

    # a finished run resumes to its report: the same weights again, nothing trained, no labels stored
    monkeypatch.setattr(training, "optimizer_step", None)
    assert tiny_run(*options, "--output", str(parts), "--resume", "--plot", str(tmp_path / "x.png")) == 0
    assert all(torch.equal(resumed[name], tensor) for name, tensor in load_checkpoint(parts).items())


@pytest.mark.parametrize(
    ("bad_step", "message"), [(1, "a loss of step 2 is not"), (3, "a weight after step 3 is not")]
)
def test_a_run_that_diverges_leaves_all_files(tiny_run, monkeypatch, tmp_path, capsys, bad_step, message):
    output, calls, real_step = tmp_path / "one.pth", [], training.optimizer_step
    for suffix in (".pth", ".json", ".state"):
        output.with_suffix(suffix).write_text(f"the last good {suffix}")
    before = {path.name for path in tmp_path.iterdir()}

    def diverging(model, *args):
        calls.append(real_step(model, *args))
        if len(calls) == 3 * bad_step - 1:  # the second of three students
            model.fc_out.weight.data.fill_(float("inf"))

    monkeypatch.setattr(training, "optimizer_step", diverging)
    monkeypatch.setattr(training, "validation_loss", lambda *_: 1.0)  # of no help here
    assert tiny_run("--steps", "3", "--output", str(output)) == 2
    line = f"training went wrong: {message} finite; files stay as they are"
    assert capsys.readouterr().err == f"main_distillation.py: {line}\n"
    for suffix in (".pth", ".json", ".state"):
        assert output.with_suffix(suffix).read_text() == f"the last good {suffix}"
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_variants_and_the_shipped_student(tiny_run, tmp_path, capsys):
    output = tmp_path / "one.pth"
    assert tiny_run("--steps", "3", "--temperature", "0.0003", "--output", str(output)) == 0
    assert "shipped" not in capsys.readouterr().out
    output.rename(tmp_path / "shipped.pth")
    shipped = (tmp_path / "shipped.pth").read_bytes()
    assert tiny_run("--steps", "3", "--alpha", "0", "--dtype", "bfloat16", "--output", str(output)) == 0
    page = capsys.readouterr().out
    assert "mixed" not in page and "shipped" in page
    assert (tmp_path / "shipped.pth").read_bytes() == shipped


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "0"], "0 is not a number above 0"),
        (["--temperature", "nan"], "nan is not a number above 0"),
        (["--temperature", "1e200"], "1e200 is not a number above 0, of at most a billion"),
        (["--temperature", "1e-42"], "are no numbers any more"),
        (["--alpha", "1.5"], "1.5 is not a share from 0 to 1"),
        (["--resume"], "nothing to resume"),
        (["--output", "weights.bin"], "must end in .pth"),
        (["--output", "no such folder/x.pth"], "there is no folder"),
        (["--steps", "0"], "not a number from 1 up"),
    ],
)
def test_bad_options(tiny_run, monkeypatch, tmp_path, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    assert tiny_run("--output", "x.pth", *args) == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_is_refused_before_any_training(tiny_run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(training, "optimizer_step", None)  # would be a TypeError
    teacher = tmp_path / "teacher.pth"
    before = teacher.read_bytes()
    assert tiny_run("--steps", "3", "--output", str(teacher)) == 2
    assert "is the teacher's own file" in capsys.readouterr().err and teacher.read_bytes() == before
    assert tiny_run("--quick", "--resume") == 2
    assert "there is nothing to --resume" in capsys.readouterr().err
    (tmp_path / "shipped.pth").write_bytes(before[:1000])
    assert tiny_run("--steps", "3", "--output", str(tmp_path / "one.pth")) == 2
    assert "shipped.pth is truncated" in capsys.readouterr().err
    (tmp_path / "shipped.pth").unlink()
    short = tmp_path / "short.txt"
    short.write_text("To be, or not to be\n" * 16)  # its last tenth is 32 characters
    assert tiny_run("--steps", "3", "--output", str(tmp_path / "one.pth"), "--data", str(short)) == 2
    assert "too short" in capsys.readouterr().err


def test_weights_and_card_are_written_together(tiny_run, monkeypatch, tmp_path):
    output = tmp_path / "one.pth"
    assert tiny_run("--steps", "2", "--output", str(output)) == 0
    before = [output.with_suffix(suffix).read_bytes() for suffix in (".pth", ".json")]

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(inference_report, "measure", interrupt)
    assert tiny_run("--steps", "2", "--seed", "7", "--output", str(output)) == 130
    assert [output.with_suffix(suffix).read_bytes() for suffix in (".pth", ".json")] == before


def test_targets_of_another_shape_are_refused():
    """As many tokens in another order would be compared with the wrong logits."""
    with pytest.raises(ValueError, match="targets"):
        student_loss(torch.randn(2, 3, 5), torch.zeros(3, 2).long(), torch.randn(2, 3, 5), 1.0, 0.5)
