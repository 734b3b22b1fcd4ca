"""What studies of distillation share: a teacher, its answers, and students at equal tokens and equal time.

An arm is one way to train a student: models that are trained together, the student first, with what their
batches and losses are. Each arm is trained on its own, so that its time has all in it that it needs, the
teacher's answers included; what takes longer than the baseline is trained once more, for as long as that.
"""

import time

import torch

from gptlite import GPTlite
from inference_report import Report, load_text
from inference_training import autocast, train_side_by_side, use_training_attention, windows_of_step
from inference_utils import first_of, load_checkpoint, model_from, n_parameters, sample_prompts

COLUMNS = {
    "steps": ("steps", "{}"),
    "training_step_ms": ("ms a step", "{:.0f}"),
    "kl_to_teacher": ("KL to teacher", "{:.4f}"),
    "same_best_token": ("same best", "{:.1%}"),
}


def load_teacher(args, vocab_size):
    """The model of --checkpoint, in evaluation mode, with the attention for training."""
    weights = load_checkpoint(args.checkpoint)
    teacher = model_from(weights, GPTlite, vocab_size, str(args.checkpoint)).to(args.device)
    return use_training_attention(teacher).requires_grad_(False)


def begin(args, technique, p, lr):
    """(text, teacher, report, settings of train_side_by_side) for students of the parameters p."""
    text = load_text(args)
    teacher = load_teacher(args, text.vocab_size)
    report = Report(args, technique, teacher, COLUMNS, text=text, steps=args.steps)
    settings = {"steps": args.steps, "lr": lr, "seqlen": p.seqlen, "seed": args.seed}
    return text, teacher, report, settings | {"batch_size": 2 if args.quick else p.batch_size}


class Answers:
    """What models say about a batch [B, T]: answers[name] is [B, T, V], asked when it is first needed.

    Without gradient, in float32. Args: models: {name: model}.
    """

    def __init__(self, models, x):
        self.models, self.x, self.known = models, x, {}

    @torch.no_grad()
    def __getitem__(self, name):
        if name not in self.known:
            model = self.models[name]
            was_training = model.training
            model.eval()
            with autocast(self.x.device):
                self.known[name] = first_of(model(self.x)).float()  # [B, T, V]
            model.train(was_training)
        return self.known[name]


def batches(text, models, settings, device):
    """step -> (inputs [B, T], next tokens [B, T], Answers of the models): windows in an order by the seed."""
    B, T = settings["batch_size"], settings["seqlen"]
    n_windows = min(settings["steps"] * B, len(text.train) // T)
    windows = sample_prompts(text.train, max(n_windows, B), T + 1)  # [N, T+1]

    def batch_of(step):
        window = windows[windows_of_step(len(windows), B, settings["seed"], step)].to(device)  # [B, T+1]
        return window[:, :-1], window[:, 1:], Answers(models, window[:, :-1])

    return batch_of


def train_arms(report, text, arms, settings, figures_of):
    """Trains each arm's student and adds its row; the first arm is the baseline.

    Args: arms: {name: function -> (models, batch_of, loss_of)}, models {name: model} with the student first,
        the others as in train_side_by_side; settings: as there; figures_of: student -> figures of its row.
    Returns: ({name: row}, {name: student}); a slower arm has a second row, "..., equal time".
    """
    rows, students = {}, {}

    def train(name, arm, n_steps):
        models, batch_of, loss_of = arm()
        start = time.perf_counter()
        how = settings | {"steps": n_steps}
        train_side_by_side(models, batch_of, loss_of, how, text.valid, 2, n_evaluations=2)
        step_ms = 1000 * (time.perf_counter() - start) / n_steps
        student = students[name] = next(iter(models.values()))
        figures = figures_of(student) | report.loss_figures(student, next(iter(students.values())))
        figures |= {"steps": n_steps, "training_step_ms": step_ms, "n_parameters": n_parameters(student)}
        rows[name] = report.row(name, baseline=not rows, **figures)

    models, batch_of, loss_of = next(iter(arms.values()))()  # what comes first in a process takes longer
    train_side_by_side(models, batch_of, loss_of, settings | {"steps": 1}, text.valid, 2)
    for name, arm in arms.items():
        train(name, arm, settings["steps"])
    base = rows[next(iter(arms))]["training_step_ms"]
    for name, arm in arms.items():
        fewer = round(settings["steps"] * base / rows[name]["training_step_ms"])
        if fewer < 0.95 * settings["steps"]:
            train(f"{name}, equal time", arm, max(fewer, 1))
    return rows, students
