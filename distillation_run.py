"""Trains several students side by side on the same batches: the run behind main_distillation.py.

All students are equally far after every step, so that their losses compare at any time, and one state file
resumes them all. The labels are main_distillation_store.py's, stopping and resuming inference_training.py's.
"""

import signal
import statistics
import time

import torch
from tqdm import tqdm

from inference_training import check_finite, learning_rate, make_optimizer, save_state, stop_between_steps
from inference_utils import Timer
from main_distillation_store import rows_of, student_step, windows_of_step
from main_training import model_for_training


def make_students(names, vocab_size, p, seed, device):
    """A student of the parameters p for each name, all with the same initial weights."""
    students = {}
    for name in names:
        torch.manual_seed(seed)
        students[name] = model_for_training(vocab_size, p).to(device)
    return students


def train_students(students, weight_of_text, windows, stored, settings, evaluate, interval, path, state=None):
    """Trains all students for settings["steps"] steps, or until Ctrl-C or SIGTERM ends the run between two.

    Args: students, weight_of_text: a model and its alpha for each name; windows: token ids [N, T+1]; stored:
        their (values, indices); settings: steps, batch_size, seed, lr, temperature, loss and what else tells
        runs apart; evaluate: model -> validation loss, every `interval` steps; path: file of the state,
        written every three minutes and at the end; state: of a run that goes on, as load_state returns it.
    Returns: the state: settings, step, times (seconds of each step, all students), curves ([step, training
        loss, validation loss] by name), students, optimizers; and whether a signal ended the run. Raises
        ValueError if a loss or a weight is not finite.
    """
    device, n_steps = next(iter(students.values())).fc_out.weight.device, settings["steps"]
    optimizers = {name: make_optimizer(student, settings["lr"]) for name, student in students.items()}
    step, times, curves = 0, [], {name: [] for name in students}
    losses = {name: [] for name in students}  # of the steps since the last evaluation
    if state is not None:
        if not {*students} == {*state["students"]} == {*state["optimizers"]}:
            raise ValueError(f"{path} is of a run with the students {', '.join(state['students'])}")
        for name in students:
            students[name].load_state_dict(state["students"][name])
            optimizers[name].load_state_dict(state["optimizers"][name])
        step, times, curves, losses = state["step"], state["times"], state["curves"], state["losses"]

    def current_state():
        now = {"settings": settings, "step": step, "times": times, "curves": curves, "losses": losses}
        for key, parts in (("students", students), ("optimizers", optimizers)):
            now[key] = {name: part.state_dict() for name, part in parts.items()}
        return now

    bar = tqdm(total=n_steps, initial=step, desc="students", disable=None)
    last_save = time.monotonic()
    with bar, stop_between_steps(signal.SIGINT, signal.SIGTERM) as stop:
        while step < n_steps and not stop:
            with Timer(device) as timer:
                rows = windows_of_step(len(windows), settings["batch_size"], settings["seed"], step)  # [B]
                batch, labels = windows[rows].to(device), rows_of(stored, rows, device)  # [B, T+1]
                lr = learning_rate((step + 1) / n_steps, settings["lr"])
                for name, student in students.items():
                    how = (lr, settings["temperature"], weight_of_text[name], settings["loss"])
                    losses[name].append(student_step(student, optimizers[name], batch, labels, *how))
            step += 1
            times.append(timer.seconds)
            check_finite(step, *(values[-1] for values in losses.values()))
            if step % interval == 0 or step == n_steps:
                for name, student in students.items():
                    valid, mean = evaluate(student), statistics.fmean(losses[name])
                    check_finite(step, valid)
                    curves[name].append([step, round(mean, 4), round(valid, 4)])
                    losses[name] = []
                known = ", ".join(f"{name} {curve[-1][2]:.4f}" for name, curve in curves.items())
                bar.set_postfix_str(known)
                if bar.disable:
                    speed = batch[:, 1:].numel() / statistics.median(times)
                    print(f"step {step}: {known}; {sum(times):.0f} s, {speed:.0f} tokens/s", flush=True)
            bar.update()
            if time.monotonic() - last_save > 180:
                save_state(path, current_state(), *students.values(), may_fail=True)
                last_save = time.monotonic()
        # a disk that is full now must not take the weights as well, which are much smaller
        save_state(path, current_state(), *students.values(), may_fail=step == n_steps)
    return current_state(), bool(stop)
