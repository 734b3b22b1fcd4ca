"""main_distillation.py and main_distillation_store.py: losses, paired labels, runs that stop and go on."""

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
import main_distillation_store
from gptlite import GPTlite, GPTliteParameters
from gptlite_kvcache import GPTlite_KVCache
from inference_training import distill
from inference_utils import GPTLITE_CKPT_PATH, load_checkpoint
from main_distillation import compare_with_teacher, distillation_loss, logit_mse
from main_distillation_store import (
    keep_best,
    merge_rest,
    rows_of,
    store_soft_labels,
    student_loss,
    student_step,
    windows_of_step,
)

V = 16  # tokens of the tiny models


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


def test_signatures_of_the_post():
    assert list(inspect.signature(distillation_loss).parameters) == [
        "logits_student",
        "logits_teacher",
        "temperature",
    ]
    names = "model teacher train_data iters lr batch_size seqlen temperature loss_function"
    assert list(inspect.signature(distill).parameters) == names.split()
    assert inspect.signature(distill).parameters["temperature"].default == 2


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


def test_high_temperature_is_mean_squared_error():
    student, teacher = random_logits(3, 4, V), random_logits(3, 4, V, seed=1)
    assert_close(distillation_loss(student, teacher, 1e4), logit_mse(student, teacher) / 2, 1e-3)
    assert_close(logit_mse(student + 5, teacher), logit_mse(student, teacher))
    assert logit_mse(student + 5, student) < 1e-20


def test_gradient_keeps_its_size_at_any_temperature():
    student, teacher = random_logits(32, V, scale=0.1), random_logits(32, V, scale=0.1, seed=1)
    student.requires_grad_()
    losses = [distillation_loss(student, teacher, temperature) for temperature in (1.0, 2.0, 8.0)]
    sizes = [torch.autograd.grad(loss, student)[0].norm() for loss in losses]
    assert_close(sizes[1:], [sizes[0], sizes[0]], 0.05)


# ---- distill ----


def test_copy_of_the_teacher_starts_at_zero_and_the_teacher_stays():
    teacher = tiny_model(GPTlite, dropout_p=0.5).train()
    student = tiny_model(GPTlite)  # the same weights, without dropout
    before = copy.deepcopy(teacher.state_dict())
    losses = distill(student, teacher, random_tokens(1, 200)[0], 3, 1e-3, 4, 8)
    # with dropout in the teacher, or other inputs, this would be about 1
    assert losses[0] < 1e-6 and len(losses) == 3
    assert teacher.training and not student.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert all(p.grad is None for p in teacher.parameters())
    assert not torch.equal(student.fc_out.weight, before["fc_out.weight"]) or losses[1] == 0


def test_teacher_and_student_read_the_same_batches():
    teacher, student = tiny_model(GPTlite), tiny_model(GPTlite, n_layers=1, dropout_p=0.5, seed=1)
    seen = {teacher: [], student: []}
    for model, inputs in seen.items():
        model.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
    data = torch.arange(V).repeat(20)
    for _ in range(2):
        torch.manual_seed(5)  # repeats the batches, though the student's dropout draws in between
        distill(student, teacher, data, 4, 1e-3, 3, 8)
    assert len(seen[teacher]) == 8
    for x, y in zip(seen[teacher], seen[student], strict=True):
        assert x.shape == (3, 8) and torch.equal(x, y)
    assert all(torch.equal(seen[student][i], seen[student][i + 4]) for i in range(4))
    assert not torch.equal(seen[student][0], seen[student][1])


def test_distill_equals_a_plain_loop():
    teacher, student = tiny_model(GPTlite), tiny_model(GPTlite, n_layers=1, seed=1)
    expected = copy.deepcopy(student)
    inputs = []
    handle = teacher.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    losses = distill(student, teacher, random_tokens(1, 100)[0], 4, 1e-2, 2, 8, temperature=3)
    handle.remove()
    optimizer = training.make_optimizer(expected, 1e-2)
    for step, x in enumerate(list(inputs)):
        with torch.no_grad():
            p = (teacher(x) / 3).softmax(-1)  # [B, T, V]
        log_q = (expected(x) / 3).log_softmax(-1)  # [B, T, V]
        loss = 9 * (p * (p.log() - log_q)).sum() / x.numel()
        assert_close(losses[step], loss.item(), 1e-4)
        lr = training.learning_rate((step + 1) / 4, 1e-2, 0.5, 0.1)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        optimizer.step()
    assert_close(student(inputs[0]), expected(inputs[0]), 1e-3)


def test_distill_learns_and_accepts_models_with_a_cache():
    teacher = tiny_model(GPTlite_KVCache)
    student = tiny_model(GPTlite_KVCache, n_layers=1, d_model=16, n_heads=1, seed=1)
    torch.manual_seed(0)
    losses = distill(student, teacher, random_tokens(1, 400)[0], 40, 1e-2, 8, 16, temperature=1)
    assert losses[-1] < 0.8 * losses[0]


# ---- Stored labels ----


def test_merging_the_rest():
    logits = random_logits(2, 3, V)
    indices = logits.topk(4, dim=-1).indices
    p = logits.softmax(-1)
    merged = merge_rest(logits, indices).softmax(-1)
    assert_close(merged[..., :4], p.gather(-1, indices))
    assert_close(merged[..., 4], 1 - merged[..., :4].sum(-1))


@given(
    temperature=st.sampled_from([1.0, 2.0]), alpha=st.sampled_from([0.0, 0.3, 1.0]), seed=st.integers(0, 99)
)
def test_top_k_of_all_tokens_is_the_full_loss(temperature, alpha, seed):
    student, teacher = random_logits(2, 5, V, seed=seed), random_logits(2, 5, V, seed=seed + 100)
    targets = random_tokens(2, 5, seed)
    log_p = (teacher / temperature).log_softmax(-1)
    hard = F.cross_entropy(student.flatten(0, 1), targets.flatten())
    soft = kl_by_hand(student, teacher, temperature)
    losses = {}
    for k in (None, V, V - 1, 8, 3, 1):
        values, indices = keep_best(log_p, k)
        assert (indices is None) == (k in (None, V))
        losses[k] = student_loss(student, targets, values, indices, temperature, alpha).item()
    expected = alpha * hard.item() + (1 - alpha) * soft
    for k in (None, V, V - 1):  # one left-over token is no approximation
        assert_close(losses[k], expected, 1e-5)
    # what merges outcomes cannot tell distributions better apart
    assert (
        losses[V - 1] >= losses[8] - 1e-6 and losses[8] >= losses[3] - 1e-6 and losses[3] >= losses[1] - 1e-6
    )


def test_renormalised_labels_are_another_target():
    student, teacher = random_logits(4, V), random_logits(4, V, seed=1)
    values, indices = keep_best(teacher.log_softmax(-1), 3, renormalise=True)
    p = teacher.topk(3, dim=-1).values.softmax(-1)  # [4, 3]
    log_q = student.log_softmax(-1).gather(-1, indices)  # [4, 3]
    expected = (p * (p.log() - log_q)).sum(-1).mean()
    targets = random_tokens(1, 4)
    labels = (values[None].half(), indices[None].to(torch.uint8))
    assert_close(student_loss(student[None], targets, *labels, 1.0), expected, 1e-2)


def test_mean_squared_error_on_stored_labels():
    student, teacher = random_logits(2, 5, V), random_logits(2, 5, V, seed=1)
    values = (teacher / 2).log_softmax(-1)
    loss = student_loss(student, random_tokens(2, 5), values, None, 2.0, 0.0, "mse")
    assert_close(loss, logit_mse(student, teacher), 1e-5)


@pytest.mark.parametrize("k", [None, 4])
def test_stored_rows_belong_to_their_inputs(k):
    teacher = tiny_model(GPTlite, dropout_p=0.5).train()
    inputs = random_tokens(7, 16)
    state = copy.deepcopy(teacher.state_dict())
    labels = store_soft_labels(teacher, inputs, 2.0, k, batch_size=3)
    again = store_soft_labels(teacher, inputs, 2.0, k, batch_size=7)
    assert teacher.training and all(torch.equal(t, state[name]) for name, t in teacher.state_dict().items())
    assert_close([part for part in labels if part is not None], [part for part in again if part is not None])
    with torch.no_grad():
        logits = teacher.eval()(inputs)  # [7, 16, V]
    order = windows_of_step(7, 3, seed=1, step=1)  # [3]
    values, indices = rows_of(labels, order, inputs.device)
    expected, best = keep_best((logits[order] / 2).log_softmax(-1), k)
    assert_close(values.exp(), expected.exp(), 2e-3)
    n_bytes = sum(part.numel() * part.element_size() for part in labels if part is not None)
    assert n_bytes / inputs.numel() == (2 * V if k is None else 3 * k + 2)
    if k:
        assert torch.equal(indices.long(), best)
    else:  # labels that match their inputs best, of all inputs
        found = values.argmax(-1).flatten(1)
        matches = [[(row == other).sum() for other in logits.argmax(-1)] for row in found]
        assert torch.equal(torch.tensor(matches).argmax(-1), order)


def test_what_cannot_be_stored():
    log_p = random_logits(2, V).log_softmax(-1)
    for k in (0, -1, V + 1):
        with pytest.raises(ValueError, match="cannot be stored"):
            keep_best(log_p, k)
    large = tiny_model(GPTlite, vocab_size=300)
    with pytest.raises(ValueError, match="8 bits"):
        store_soft_labels(large, random_tokens(2, 4), 1.0, 8)
    assert store_soft_labels(large, random_tokens(2, 4), 1.0)[0].shape == (2, 4, 300)


def test_every_epoch_reads_every_window_in_an_order_of_its_own():
    epochs = [torch.cat([windows_of_step(12, 4, 7, 3 * e + i) for i in range(3)]) for e in range(3)]
    assert all(torch.equal(epoch.sort().values, torch.arange(12)) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    assert torch.equal(windows_of_step(12, 4, 7, 5), epochs[1][8:])


def test_student_step_trains_on_the_text_alone_with_alpha_one():
    model = tiny_model(GPTlite, dtype=torch.float32)
    optimizer = training.make_optimizer(model, 1e-2)
    batch = random_tokens(4, 17)
    losses = [student_step(model, optimizer, batch, (None, None), 1e-2, 1.0, 1.0) for _ in range(10)]
    assert losses[-1] < losses[0]


def test_comparison_with_the_teacher():
    teacher, student = tiny_model(GPTlite), tiny_model(GPTlite_KVCache, seed=1)
    windows = random_tokens(5, 16)
    with torch.no_grad():
        targets, logits = teacher(windows), student(windows)[0]
    kl, same = compare_with_teacher(student, windows, targets, batch_size=2)
    assert_close(kl, kl_by_hand(logits, targets, 1.0), 1e-4)
    assert same == (logits.argmax(-1) == targets.argmax(-1)).double().mean()
    kl, same = compare_with_teacher(tiny_model(GPTlite_KVCache), windows, targets.float())
    assert abs(kl) < 1e-6 and same == 1


# ---- The scripts ----


def checkpoints():
    folder = ROOT / "checkpoints"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_quick_run(checkpoint, tmp_path):
    before = checkpoints()
    figure = tmp_path / "figure.png"
    args = ("--quick", "--json", "-", "--plot", str(figure))
    run = run_script("main_distillation.py", *args, checkpoint=checkpoint)
    assert run.status == 0, run.stderr
    assert len(run.json["checks"]) == 3 and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    assert {"teacher", "hard labels", "soft labels", "mixed"} <= set(rows)
    teacher = rows.pop("teacher")
    assert teacher["baseline"] and teacher["kl_to_teacher"] < 1e-5 and teacher["same_best_token"] > 0.99
    for row in rows.values():
        assert not row["baseline"] and row["n_parameters"] < teacher["n_parameters"] / 7
        assert row["weights_mb"] < teacher["weights_mb"] / 7 and row["kl_to_teacher"] > 0
        assert row["peak_memory_mb"] < teacher["peak_memory_mb"] / 5
        assert row["forward_tokens"] == teacher["forward_tokens"] == 32 + 7
    if checkpoint == GPTLITE_CKPT_PATH:
        new = [row["valid_loss"] for name, row in rows.items() if name != "shipped student"]
        assert teacher["valid_loss"] < min(new)
        assert rows["soft labels"]["valid_loss"] < rows["hard labels"]["valid_loss"]
        assert rows["soft labels"]["kl_to_teacher"] < rows["hard labels"]["kl_to_teacher"]
    assert run.json["why"] and figure.stat().st_size > 1000
    assert checkpoints() == before


def test_quick_run_of_the_store(checkpoint):
    run = run_script("main_distillation_store.py", "--quick", "--json", "-", checkpoint=checkpoint)
    assert run.status == 0, run.stderr
    assert len(run.json["checks"]) == 2 and all(run.json["checks"].values())
    n_bytes = {row["method"]: row["bytes_per_token"] for row in run.json["rows"]}
    assert n_bytes["all 96"] == 192 and n_bytes["8 best and the rest"] == 26 and n_bytes["text alone"] == 1


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
    """Runs a script in this process on tiny models and a short text: run(script, *args) -> exit status."""
    sizes = {"d_head": 16, "batch_size": 4, "lr": 1e-3, "seqlen": 32, "dropout_p": 0.1}
    parameters = {
        "get_gptlite_model_parameters": GPTliteParameters(2, 32, 2, **sizes),
        "get_gptlite_distilled_model_parameters": GPTliteParameters(1, 16, 1, **sizes),
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

    def run(*args, script="main_distillation.py"):
        fixed = ["--device", "cpu", "--data", str(text), "--checkpoint", str(teacher), "--repeats", "1"]
        monkeypatch.setattr(sys, "argv", [script, *fixed, *args])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
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
    options = ["--steps", "6", "--top-k", "8"]
    assert tiny_run(*options, "--output", str(whole)) == 0

    calls, real_step = [], main_distillation_store.optimizer_step

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 8:  # between two students of step 3
            signal.raise_signal(signal.SIGTERM)
        return real_step(*args)

    monkeypatch.setattr(main_distillation_store, "optimizer_step", interrupted)
    assert tiny_run(*options, "--output", str(parts)) == 130
    output = capsys.readouterr().out
    assert "stopped at step 3" in output and "--resume' goes on" in output
    assert len(calls) == 9 and not parts.exists() and parts.with_suffix(".state").exists()
    monkeypatch.setattr(main_distillation_store, "optimizer_step", real_step)

    assert tiny_run("--steps", "7", "--top-k", "8", "--output", str(parts), "--resume") == 2
    assert "is of a run with steps 6, not 7" in capsys.readouterr().err
    assert tiny_run(*options, "--output", str(parts), "--resume") == 0
    states = [inference_utils.load_file(path.with_suffix(".state")) for path in (whole, parts)]
    for name in ("hard labels", "soft labels", "mixed"):
        expected, resumed = (state["students"][name] for state in states)
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
    monkeypatch.setattr(main_distillation_store, "optimizer_step", None)
    assert tiny_run(*options, "--output", str(parts), "--resume", "--plot", str(tmp_path / "x.png")) == 0
    assert all(torch.equal(resumed[name], tensor) for name, tensor in load_checkpoint(parts).items())


@pytest.mark.parametrize(
    ("bad_step", "message"), [(1, "a loss of step 2 is not"), (3, "a weight after step 3 is not")]
)
def test_a_run_that_diverges_leaves_all_files(tiny_run, monkeypatch, tmp_path, capsys, bad_step, message):
    output, calls, real_step = tmp_path / "one.pth", [], main_distillation_store.optimizer_step
    for suffix in (".pth", ".json", ".state"):
        output.with_suffix(suffix).write_text(f"the last good {suffix}")
    before = {path.name for path in tmp_path.iterdir()}

    def diverging(model, *args):
        calls.append(real_step(model, *args))
        if len(calls) == 3 * bad_step - 1:  # the second of three students
            model.fc_out.weight.data.fill_(float("inf"))

    monkeypatch.setattr(main_distillation_store, "optimizer_step", diverging)
    monkeypatch.setattr(inference_utils, "validation_loss", lambda *_: 1.0)  # of no help here
    assert tiny_run("--steps", "3", "--output", str(output)) == 2
    line = f"training went wrong: {message} finite; files stay as they are"
    assert capsys.readouterr().err == f"main_distillation.py: {line}\n"
    for suffix in (".pth", ".json", ".state"):
        assert output.with_suffix(suffix).read_text() == f"the last good {suffix}"
    assert {path.name for path in tmp_path.iterdir()} == before


def test_variants_and_the_shipped_student(tiny_run, tmp_path, capsys):
    output = tmp_path / "one.pth"
    assert tiny_run("--steps", "3", "--loss", "mse", "--temperature", "2", "--output", str(output)) == 0
    assert "shipped student" not in capsys.readouterr().out
    for suffix in (".pth", ".json"):
        output.with_suffix(suffix).rename(tmp_path / f"shipped{suffix}")
    shipped = (tmp_path / "shipped.pth").read_bytes()
    assert tiny_run("--steps", "3", "--alpha", "0", "--dtype", "bfloat16", "--output", str(output)) == 0
    text = capsys.readouterr().out
    assert "mixed" not in text and "The shipped student saw 0 million tokens" in text
    assert (tmp_path / "shipped.pth").read_bytes() == shipped
    assert tiny_run("--steps", "2", "--top-k", "2", "1", script="main_distillation_store.py") == 0
    assert "2 best, renormalised" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "0"], "--temperature must be above 0"),
        (["--temperature", "nan"], "--temperature must be above 0"),
        (["--alpha", "1.5"], "--alpha from 0 to 1"),
        (["--loss", "mse", "--top-k", "4"], "stores only some"),
        (["--top-k", "97"], "cannot be stored"),
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
    monkeypatch.setattr(main_distillation_store, "optimizer_step", None)  # would be a TypeError
    teacher = tmp_path / "teacher.pth"
    before = teacher.read_bytes()
    assert tiny_run("--steps", "3", "--output", str(teacher)) == 2
    assert "is the teacher's own file" in capsys.readouterr().err and teacher.read_bytes() == before
    assert tiny_run("--quick", "--resume") == 2
    assert "there is nothing to --resume" in capsys.readouterr().err
    (tmp_path / "shipped.pth").write_bytes(before)  # a student of the teacher's size
    assert tiny_run("--steps", "3", "--output", str(tmp_path / "one.pth")) == 2
    assert "shipped.pth does not fit GPTlite" in capsys.readouterr().err
    short = tmp_path / "short.txt"
    short.write_text("To be, or not to be\n" * 16)  # its last tenth is 32 characters
    assert tiny_run("--steps", "3", "--output", str(tmp_path / "one.pth"), "--data", str(short)) == 2
    assert "too short" in capsys.readouterr().err


def test_a_shipped_student_of_another_origin_has_no_comparison(tiny_run, tmp_path, capsys):
    output = tmp_path / "one.pth"
    assert tiny_run("--steps", "2", "--output", str(output)) == 0
    output.rename(tmp_path / "shipped.pth")
    (tmp_path / "shipped.json").write_text('{"tokens_seen": 5}')  # main_training.py compares nothing
    capsys.readouterr()
    assert tiny_run("--steps", "2", "--output", str(output)) == 0
    page = capsys.readouterr().out
    assert "shipped student" in page and "The shipped student saw" not in page


def test_weights_and_card_are_written_together(tiny_run, monkeypatch, tmp_path):
    output = tmp_path / "one.pth"
    assert tiny_run("--steps", "2", "--output", str(output)) == 0
    before = [output.with_suffix(suffix).read_bytes() for suffix in (".pth", ".json")]

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(inference_utils, "measure", interrupt)
    assert tiny_run("--steps", "2", "--seed", "7", "--output", str(output)) == 130
    assert [output.with_suffix(suffix).read_bytes() for suffix in (".pth", ".json")] == before


def test_mean_squared_error_needs_all_logits():
    logits, targets = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    values, indices = keep_best(logits.log_softmax(-1), 4)  # 5 values, as many as there are tokens
    with pytest.raises(ValueError, match="takes all logits"):
        student_loss(logits, targets, values, indices, 1.0, kind="mse")


def test_labels_of_a_teacher_with_a_cache():
    tokens = random_tokens(3, 8)
    plain, cached = (store_soft_labels(tiny_model(c), tokens, 2.0)[0] for c in (GPTlite, GPTlite_KVCache))
    assert_close(plain, cached)
