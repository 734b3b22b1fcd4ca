"""inference_training.py: attention for training, the optimiser's groups, distilling, runs that can go on."""

import copy
import functools
import inspect
import math
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import assert_close, random_tokens, tiny_model

import inference_training as training
from gptlite import GPTlite, GPTliteParameters, scaled_dot_product_attention
from gptlite_kvcache import GPTlite_KVCache
from inference_training import distill, train_side_by_side
from inference_utils import validation_loss
from main_distillation import distillation_loss

V = 16  # tokens of the tiny models


# ---- Attention for training ----


@pytest.mark.parametrize("T", [1, 5, 16])
def test_tiled_attention_is_the_textbook_s(T):
    Q, K, values = torch.randn(3, 2, 3, T, 8, dtype=torch.float64).unbind(0)
    expected = scaled_dot_product_attention(Q, K, values)
    for tile in (1, 3, 16):
        assert_close(training.tiled_causal_attention(Q, K, values, tile), expected)
    model, tokens = tiny_model(GPTlite), random_tokens(2, T)
    expected = model(tokens)
    assert_close(training.use_training_attention(copy.deepcopy(model))(tokens), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_beyond_16_bits_are_scaled_before_they_overflow(dtype):
    Q = torch.full((1, 1, 2, 64), 40.0, dtype=dtype)
    values = torch.tensor([1.0, 3.0], dtype=dtype).view(1, 1, 2, 1).expand(1, 1, 2, 64)
    out = training.tiled_causal_attention(Q, Q, values)  # [1, 1, 2, 64]
    assert out.dtype == dtype and (out[0, 0, 0] == 1).all() and (out[0, 0, 1] == 2).all()


# ---- Steps ----


def test_every_parameter_belongs_to_one_group():
    model = nn.ModuleDict({"token_embedding": nn.Embedding(4, 8), "fc": nn.Linear(8, 8)})
    model["convolution"], model["norm"] = nn.Conv1d(8, 8, 3), nn.LayerNorm(8)
    model["experts"] = nn.ParameterList([torch.ones(4, 8, 8), torch.ones(2, 2, 8, 8)])
    model["gate"] = nn.ParameterList([torch.ones(())])
    decaying, free = training.make_optimizer(model, 1e-3).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    decaying, free = ({names[id(p)] for p in group["params"]} for group in (decaying, free))
    assert decaying == {"fc.weight", "convolution.weight", "experts.0", "experts.1"}
    assert not decaying & free and decaying | free == set(names.values())


def test_emulated_bfloat16_does_not_count(monkeypatch):
    def is_supported(including_emulation=True):
        return including_emulation  # a GPU that only emulates it

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert not training.has_bfloat16(torch.device("cuda"))


# ---- distill ----


def test_signature_of_the_post():
    names = list(inspect.signature(distill).parameters)
    assert names[:7] == "model teacher train_data iters lr batch_size seqlen".split()
    assert inspect.signature(distill).parameters["temperature"].default == 2


def test_the_default_loss_is_the_one_of_main_distillation():
    student, teacher = torch.randn(2, 2, 5, V, dtype=torch.float64).unbind(0)
    teacher[..., 3] = -math.inf
    for temperature in (0.5, 1.0, 2.0):
        expected = distillation_loss(student, teacher, temperature)
        assert_close(training.soft_label_loss(student, teacher, temperature), expected)
    with pytest.raises(ValueError, match="must belong together"):
        training.soft_label_loss(student[:1], teacher, 1.0)


def test_models_of_other_vocabularies_are_refused():
    teacher, student = tiny_model(GPTlite), tiny_model(GPTlite, vocab_size=17)
    with pytest.raises(ValueError, match="must belong together"):
        distill(student, teacher, random_tokens(1, 100)[0], 1, 1e-3, 2, 8)


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


# ---- A run that can go on ----


def test_every_epoch_reads_every_window_in_an_order_of_its_own():
    epochs = [torch.cat([training.windows_of_step(12, 4, 7, 3 * e + i) for i in range(3)]) for e in range(3)]
    assert all(torch.equal(epoch.sort().values, torch.arange(12)) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    assert torch.equal(training.windows_of_step(12, 4, 7, 5), epochs[1][8:])


P = GPTliteParameters(2, 32, 2, 16, batch_size=3, lr=1e-2, seqlen=8, dropout_p=0.0)


def own_text(train=0, valid=1):
    return SimpleNamespace(train=random_tokens(1, 200, train)[0], valid=random_tokens(1, 60, valid)[0])


def run(path, text=None, resume=False, stop_after=None, names=("one", "two"), steps=6):
    """Trains two tiny models; returns them and what train_side_by_side returned."""
    text = text or own_text()
    models = {name: tiny_model(GPTlite, seqlen=8, seed=i) for i, name in enumerate(names)}
    settings = training.settings_of(SimpleNamespace(steps=steps), text, P, "steps")

    def batch_of(step):
        if step == stop_after:
            signal.raise_signal(signal.SIGTERM)
        generator = torch.Generator().manual_seed(step)
        return training.get_batch(text.train, 3, 8, generator)

    def loss_of(name, logits, batch):
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    return models, train_side_by_side(models, batch_of, loss_of, settings, text.valid, 2, path, resume)


def test_an_interrupted_run_goes_on_to_the_same_weights(tmp_path, capsys):
    expected, (curves, facts) = run(tmp_path / "whole.state")
    assert facts["tokens_seen"] == 6 * 3 * 8 and [point[0] for point in curves["one"]] == [5, 6]
    path = tmp_path / "parts.state"
    with pytest.raises(SystemExit) as stop:
        run(path, stop_after=3)
    assert stop.value.code == 130 and "stopped at step 4; " in capsys.readouterr().out
    models, (resumed, _) = run(path, resume=True)
    assert resumed == curves
    for name, model in models.items():
        assert not model.training
        assert all(
            torch.equal(*pair) for pair in zip(model.parameters(), expected[name].parameters(), strict=True)
        )


def test_a_run_on_another_text_or_split_does_not_go_on(tmp_path):
    path = tmp_path / "one.state"
    run(path)
    for text, what in ((own_text(train=5), "training_text"), (own_text(valid=5), "validation_text")):
        with pytest.raises(ValueError, match=f"is of a run with {what}"):
            run(path, text, resume=True)
    moved = own_text()  # the same text, cut elsewhere
    moved.train, moved.valid = moved.train[:-1], torch.cat([moved.train[-1:], moved.valid])
    with pytest.raises(ValueError, match="is of a run with training_text"):
        run(path, moved, resume=True)
    with pytest.raises(ValueError, match="is of a run with steps 6, not 7"):
        run(path, resume=True, steps=7)
    with pytest.raises(ValueError, match="is of a run with the models one, two"):
        run(path, resume=True, names=("one", "other"))
    run(path, resume=True)


def test_a_run_without_a_file_leaves_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run(None, stop_after=1)
    assert capsys.readouterr().out.strip().endswith("stopped at step 2") and not list(tmp_path.iterdir())


def test_where_a_run_writes_its_weights(tmp_path):
    args, path = SimpleNamespace(quick=False, resume=False, json=None), tmp_path / "one.pth"
    assert training.output_of(args, path) == path
    with pytest.raises(ValueError, match="the teacher's own file"):
        training.output_of(args, path, tmp_path / "." / "one.pth")
    with pytest.raises(ValueError, match="must end in .pth"):
        training.output_of(args, tmp_path / "one.bin")
    args.quick = True
    assert training.output_of(args, path) != path
    args.resume = True
    with pytest.raises(ValueError, match="nothing to --resume"):
        training.output_of(args, path)


# ---- A few steps ----


def test_learning_rate():
    rate = functools.partial(training.learning_rate, peak_lr=3.0, warmup=0.1, floor=0.2)
    assert rate(0.0) == 0 and rate(0.05) == pytest.approx(1.5) and rate(0.1) == pytest.approx(3.0)
    assert rate(0.55) == pytest.approx(3.0 * 0.6) and rate(1.0) == pytest.approx(0.6)
    rates = [rate(i / 200) for i in range(201)]
    assert all(a < b for a, b in zip(rates[:20], rates[1:21], strict=True))
    assert all(a > b for a, b in zip(rates[20:], rates[21:], strict=False))
    assert training.learning_rate(1.0, 3.0) == pytest.approx(0) and training.learning_rate(0.02, 3.0) == 3.0


def test_optimizer_step_clips_gradients():
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
    before = model.weight.item()
    training.optimizer_step(model, optimizer, 1000 * model.weight.sum(), lr=0.5)
    assert model.weight.item() == pytest.approx(before - 0.5, abs=1e-3)


@pytest.mark.parametrize("model_class", [GPTlite, GPTlite_KVCache])
def test_train_steps(model_class):
    """The loss falls on a text that repeats; the run follows from the seed alone."""
    data = torch.arange(400) % 7

    def run(seed=42):
        model = tiny_model(model_class, dtype=torch.float32)
        losses = training.train_steps(model, data, 30, 1e-2, 8, 16, seed)
        assert not model.training
        return model, losses

    (model, losses), (same_model, same_losses) = run(), run()
    assert len(losses) == 30 and losses == same_losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same_model.parameters(), strict=True))
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]
    assert validation_loss(model, data, 8) < 0.5 * losses[0]
    assert run(seed=1)[1] != losses


def test_train_steps_leaves_frozen_weights():
    model = tiny_model(GPTlite, dtype=torch.float32)
    model.token_embedding.weight.requires_grad_(False)
    before = model.token_embedding.weight.clone()
    training.train_steps(model, torch.arange(100) % 7, 3, 1e-2, 2, 8)
    assert torch.equal(model.token_embedding.weight, before)


def test_rates_of_train_steps(monkeypatch):
    """A tenth of the steps warms up, however few they are, and the last steps hardly move the weights."""
    rates = []
    monkeypatch.setattr(training, "optimizer_step", lambda *args: rates.append(args[-1]))
    for n in (1, 2, 20, 40, 80):
        rates.clear()
        training.train_steps(tiny_model(GPTlite, dtype=torch.float32), torch.arange(100) % 7, n, 1.0, 2, 8)
        assert len(rates) == n and 0 < min(rates) and max(rates) <= 1
        if n >= 20:
            assert rates.index(max(rates)) <= n // 10 and rates[-1] < 0.01
        else:
            assert max(rates) > 0.4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uptrained_is_a_copy_of_the_same_type(dtype):
    data, model = torch.arange(400) % 7, tiny_model(GPTlite, dtype=dtype)
    before = [p.clone() for p in model.parameters()]
    trained = training.uptrained(model, data, 20, 1e-2, 8, 16)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert {p.dtype for p in trained.parameters()} == {dtype} and not trained.training
    assert validation_loss(trained, data, 8) < validation_loss(model, data, 8)
    alone = tiny_model(GPTlite, dtype=dtype).float()
    training.train_steps(alone, data, 20, 1e-2, 8, 16)
    assert all(
        torch.equal(a, b.to(dtype)) for a, b in zip(trained.parameters(), alone.parameters(), strict=True)
    )


def test_uptrained_figures_are_against_the_control():
    losses = {"trained": {"valid_loss": 1.5, "loss_difference": 0.2, "loss_difference_se": 0.1}}
    report = SimpleNamespace(
        loss_figures=lambda model, control: losses[model] if control == "control" else None
    )
    figures = training.uptrained_figures(report, "trained", "control")
    assert figures == dict(zip(training.UPTRAINED_COLUMNS, (1.5, 0.2, 0.1), strict=True))


def test_a_token_that_both_rule_out_adds_nothing():
    """0 log 0 is 0; without that one NaN would go into all weights."""
    inf = float("inf")
    for student in ([0.0, 0.0, -inf], [0.5, 0.0, 1.0]):
        logits = torch.tensor([student], requires_grad=True), torch.tensor([[math.log(3), 0.0, -inf]])
        loss = training.soft_label_loss(*logits, 1.0)
        assert_close(loss, distillation_loss(*logits, 1.0), 1e-6)
        loss.backward()
        assert logits[0].grad.isfinite().all()


def test_the_card_is_not_replaced_by_the_report(tmp_path):
    args = SimpleNamespace(quick=False, resume=False, json=str(tmp_path / "my.json"))
    with pytest.raises(ValueError, match="will say how my.pth came about"):
        training.output_of(args, tmp_path / "my.pth")
    assert training.output_of(args, tmp_path / "other.pth").name == "other.pth"
    (tmp_path / "third.state").mkdir()
    with pytest.raises(ValueError, match="third.state is a folder"):
        training.output_of(args, tmp_path / "third.pth")
