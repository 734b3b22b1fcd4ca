"""What studies of distillation share: answers are asked once, arms get equal tokens and equal time."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import random_tokens, run_script, tiny_model
from torch import nn

import inference_distillation
from gptlite import GPTlite
from inference_distillation import Answers, batches, train_arms

V = 7


def logits(seed, *shape):
    return 3 * torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def student_like(seed, **sizes):
    return tiny_model(GPTlite, seed=seed, vocab_size=V, **sizes)


def checked_report(script, checkpoint):
    """Of a quick run of any study: checks hold, arms have equal tokens or fewer, figures are there."""
    run = run_script(script, "--quick", "--json", "-", checkpoint=checkpoint)
    assert run.status == 0, run.stderr
    report = run.json
    assert report["checks"] and all(report["checks"].values()) and 3 <= len(report["why"]) <= 4
    base, *rows = report["rows"]
    assert base["baseline"] and len(rows) >= 3 and len({row["n_parameters"] for row in report["rows"]}) == 1
    for row in rows:
        equal_time = row["method"].endswith(", equal time")
        assert row["steps"] < base["steps"] if equal_time else row["steps"] == base["steps"]
        assert row["kl_to_teacher"] > 0 and row["loss_difference_se"] > 0
    return report


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.n = nn.Parameter(torch.ones(())), 0
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        self.n += 1
        return self.dropout(F.one_hot(x, V).float() * self.weight)


def test_answers_are_asked_once_without_gradient_and_without_dropout():
    models = {"a": Counted().train(), "b": Counted()}
    answers = Answers(models, random_tokens(2, 5, vocab_size=V))
    assert answers["a"] is answers["a"] and not answers["a"].requires_grad
    assert answers["a"].equal(F.one_hot(answers.x, V).float())  # dropout would double and drop
    assert (models["a"].n, models["b"].n) == (1, 0) and models["a"].training


class Rows:
    """Stands in for a Report: takes rows."""

    def loss_figures(self, student, baseline):
        return {"same": student is baseline}

    def row(self, name, baseline=False, **figures):
        return {"method": name, "baseline": baseline, **figures}


def test_what_takes_longer_is_trained_again_for_as_long(monkeypatch):
    now, trained, costs = [0.0], [], {"base": 1.0, "slow": 2.5, "fast": 0.5, "as long": 1.04}

    def train(models, batch_of, loss_of, settings, *_args, **_kwargs):
        trained.append((batch_of, settings["steps"]))
        now[0] += settings["steps"] * costs[batch_of]

    monkeypatch.setattr(inference_distillation, "train_side_by_side", train)
    monkeypatch.setattr(inference_distillation.time, "perf_counter", lambda: now[0])
    arms = {name: lambda name=name: ({"student": student_like(1)}, name, None) for name in costs}
    text = SimpleNamespace(valid=None)
    rows, students = train_arms(Rows(), text, arms, {"steps": 40}, lambda student: {"known": student})
    assert trained == [("base", 1), *((name, 40) for name in costs), ("slow", 16)]  # the first one warms up
    assert [*rows] == [*costs, "slow, equal time"] and rows["base"]["baseline"] and rows["base"]["same"]
    assert [row["training_step_ms"] for row in rows.values()] == pytest.approx([1000, 2500, 500, 1040, 2500])
    assert all(rows[name]["known"] is students[name] for name in rows)


def test_batches_are_windows_of_the_text_and_the_same_for_the_same_seed():
    text = SimpleNamespace(train=torch.arange(1000) % V)
    settings = {"batch_size": 3, "seqlen": 8, "steps": 5, "seed": 1}
    one, other = (batches(text, {}, settings, "cpu") for _ in range(2))
    for step in (0, 4, 7):
        x, y, answers = one(step)
        assert x.shape == (3, 8) and y.equal((x + 1) % V) and answers.x.equal(x) and x.equal(other(step)[0])
    assert not one(0)[0].equal(one(1)[0])
