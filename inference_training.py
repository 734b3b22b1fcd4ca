"""What scripts that train share: attention for training, the optimiser, a few steps, runs that can go on.

A training step is the same everywhere: AdamW, clipped gradients, a learning rate that follows the progress.
A long run also saves its state, stops between two steps, goes on later, and writes beside its weights how
they came about.
"""

import contextlib
import copy
import hashlib
import json
import math
import shlex
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from data.shakespeare import TEXT_SHA256, VALIDATION_PLAYS, VOCABULARY, get_batch
from gptlite import MultiHeadAttention
from inference_options import check_writable
from inference_report import device_name
from inference_utils import Timer, first_of, load_file, validation_loss, write_atomically

# ---- Attention for training ----


def tiled_causal_attention(Q, K, V, tile=128):
    """Textbook causal attention, one tile of queries at a time, on the keys that this tile can see.

    Args: Q, K, V [B, H, T, D]; tile: queries in a tile.
    Returns: [B, H, T, D]. With T = 2 * tile a quarter of the score matrix is never computed.
    """
    T, D = Q.shape[-2:]
    if Q.dtype == torch.float16:  # scores overflow before they are scaled; bfloat16 has float32's range
        return tiled_causal_attention(Q.float(), K.float(), V.float(), tile).half()
    out = []
    for start in range(0, T, tile):
        stop = min(start + tile, T)
        scores = Q[..., start:stop, :] @ K[..., :stop, :].transpose(-2, -1)  # [B, H, tile, stop]
        hidden = torch.full((stop - start, stop), float("-inf"), dtype=scores.dtype, device=Q.device)
        hidden = hidden.triu(start + 1)  # [tile, stop]: 0 where a key is visible
        weights = F.softmax(scores / math.sqrt(D) + hidden, dim=-1)  # [B, H, tile, stop]
        out.append(weights @ V[..., :stop, :])  # [B, H, tile, D]
    return torch.cat(out, dim=-2)


class MultiHeadAttention_Training(MultiHeadAttention):
    """The same attention for training: fused on a GPU, tiled on a CPU (whose fused backward is slow)."""

    def forward(self, x, causal_mask=True):
        Q = self.split_heads(self.query_proj(x))  # [B, H, T, D]
        K = self.split_heads(self.key_proj(x))  # [B, H, T, D]
        V = self.split_heads(self.value_proj(x))  # [B, H, T, D]
        if x.device.type == "cpu":
            out = tiled_causal_attention(Q, K, V)  # [B, H, T, D]
        else:
            out = F.scaled_dot_product_attention(Q, K, V, is_causal=True)  # [B, H, T, D]
        return self.dropout(self.out_proj(self.merge_heads(out)))  # [B, T, E]


def use_training_attention(model):
    """Gives every block of GPTlite that attention; the weights stay. Returns the model."""
    for block in model.blocks:
        block.mha.__class__ = MultiHeadAttention_Training
    return model


# ---- Steps ----


def learning_rate(progress, peak_lr, warmup=0.02, floor=0.0):
    """Linear warm-up to peak_lr, then a cosine to floor * peak_lr. progress: share done, 0 to 1."""
    if progress < warmup:
        return peak_lr * progress / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
    return peak_lr * (floor + (1 - floor) * cosine)


def make_optimizer(model, lr, weight_decay=0.1):
    """AdamW with weight decay on what multiplies: biases, norms and embeddings may grow as they like."""
    decaying, free = [], []
    for name, p in model.named_parameters():
        (decaying if p.ndim >= 2 and "embedding" not in name else free).append(p)  # each in one of them
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True)


def optimizer_step(model, optimizer, loss, lr):
    """Backward, gradients clipped at norm 1, update with this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def has_bfloat16(device):
    """Whether this processor or GPU multiplies matrices in bfloat16 faster than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and _mkldnn_has_bfloat16()


def _mkldnn_has_bfloat16():
    try:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except (AttributeError, RuntimeError):  # a build of torch without this question
        return False


def autocast(device):
    """Context in which matrix products run in bfloat16 where has_bfloat16(device), else nothing changes."""
    return torch.autocast(device.type, torch.bfloat16, enabled=has_bfloat16(device))


# Peak learning rate of up-training. It is low because training on must not harm a model that nothing was
# done to: over 80 steps of 8 x 256 tokens GPTlite's loss falls by 0.010 at half of it, by 0.007 here, and by
# nothing at twice of it (differences of 128 windows, +- 0.003)
UPTRAIN_LR = 2e-4
# Of a conversion whose layers must learn their work anew, as a state instead of a softmax: Mamba-2's decay in
# all layers falls to 2.04 in 30 steps of 8 x 256 tokens at this, to 2.33 at UPTRAIN_LR (16 windows)
CONVERSION_LR = 1e-3


def take_steps(module, loss_of, train_data, iters, lr, batch_size, seqlen, generator, schedule, label):
    """Trains a module for a few steps, with a progress bar; it is in evaluation mode afterwards.

    Args: loss_of: (inputs, next tokens) [B, T] -> scalar; train_data: token ids [N]; batch_size, seqlen:
        windows per step and their length, which the generator draws; schedule: step -> learning rate.
    Returns: the loss of every step.
    """
    device, optimizer, losses = next(module.parameters()).device, make_optimizer(module, lr), []
    module.train()
    for step in (bar := tqdm(range(iters), desc=label, leave=False, disable=None)):
        x, y = (t.to(device) for t in get_batch(train_data, batch_size, seqlen, generator))  # [B, T]
        loss = loss_of(x, y)
        optimizer_step(module, optimizer, loss, schedule(step))
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
    module.eval()
    return losses


def short_schedule(iters, lr):
    """step -> learning rate: lr is reached after a tenth of the steps and gone at the end."""
    return lambda step: learning_rate((step + 0.5) / iters, lr, warmup=0.1)


def train_steps(model, train_data, iters, lr, batch_size, seqlen, seed=42, label="training"):
    """Trains the model on next-token prediction for a few steps, as up-training does after a change.

    Args: train_data: token ids [N]; lr: peak learning rate, reached after a tenth of the steps and gone at
        the end; batch_size, seqlen: windows per step and their length. The seed alone decides the batches.
    Returns: the loss of every step in nats per token. The model is back in evaluation mode.
    """
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(seed)

    def loss_of(x, y):
        with autocast(device):
            logits = first_of(model(x))  # [B, T, V]
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    schedule = short_schedule(iters, lr)
    return take_steps(model, loss_of, train_data, iters, lr, batch_size, seqlen, generator, schedule, label)


def check_same_shape(logits_student, logits_teacher):
    """Raises ValueError for logits of other tokens or another vocabulary, which would broadcast."""
    if logits_student.shape != logits_teacher.shape:
        student, teacher = list(logits_student.shape), list(logits_teacher.shape)
        raise ValueError(f"student's logits are {student}, teacher's {teacher}: they must belong together")


def soft_label_loss(logits_student, logits_teacher, temperature):
    """What distill minimises unless told otherwise: distillation_loss of main_distillation.py."""
    check_same_shape(logits_student, logits_teacher)
    log_q = F.log_softmax(logits_student / temperature, dim=-1).flatten(0, -2)  # [N, V]
    p = F.softmax(logits_teacher / temperature, dim=-1).flatten(0, -2)  # [N, V]
    log_q = log_q.masked_fill(p == 0, 0.0)  # [N, V]: 0 log 0 is 0, also where both rule a token out
    return F.kl_div(log_q, p, reduction="batchmean") * temperature**2  # of the N tokens


def distill(
    model, teacher, train_data, iters, lr, batch_size, seqlen, temperature=2, loss_function=soft_label_loss
):
    """Trains the model on the teacher's distributions, the teacher running along.

    Args: model, teacher: token ids [B, T] -> logits [B, T, V], or a tuple that begins with them; the model
        is changed, the teacher frozen and in evaluation mode meanwhile; train_data: token ids [N]; lr: peak
        learning rate, warm-up over 20 steps, cosine to a tenth; batch_size, seqlen: windows per step and
        their length; loss_function: (logits, teacher's logits, temperature) -> scalar. torch.manual_seed
        repeats the batches.
    Returns: the loss of every step in nats per token. The model is in evaluation mode afterwards.
    """
    device, teacher_was_training = next(model.parameters()).device, teacher.training
    # a generator of its own: dropout in the model must not change which batches come
    generator = torch.Generator().manual_seed(torch.randint(2**62, ()).item())

    def loss_of(x, _):
        with autocast(device):
            with torch.no_grad():
                target = first_of(teacher(x))  # [B, T, V]
            logits = first_of(model(x))  # [B, T, V]
        return loss_function(logits.float(), target.float(), temperature)

    def schedule(step):
        return learning_rate((step + 1) / iters, lr, min(20 / iters, 0.5), 0.1)

    teacher.eval()
    losses = take_steps(
        model, loss_of, train_data, iters, lr, batch_size, seqlen, generator, schedule, "distillation"
    )
    teacher.train(teacher_was_training)
    return losses


def train_heads(heads, loss_of, train_data, iters, lr, batch_size, seqlen, seed=42, label="heads"):
    """Trains what stands on a frozen model, as train_steps trains a model.

    Args: heads: a module, whose parameters alone are changed; loss_of: (heads, tokens [B, T]) -> scalar; the
        others as in train_steps.
    Returns: the loss of every step. The heads are in evaluation mode afterwards.
    """
    device, generator = next(heads.parameters()).device, torch.Generator().manual_seed(seed)

    def loss_of_batch(x, _):
        with autocast(device):
            return loss_of(heads, x)

    schedule = short_schedule(iters, lr)
    return take_steps(
        heads, loss_of_batch, train_data, iters, lr, batch_size, seqlen, generator, schedule, label
    )


def uptrained(model, train_data, iters, lr, batch_size, seqlen, label="up-training"):
    """A copy of the model after train_steps, trained in float32 and then of the model's own type again."""
    trained = copy.deepcopy(model).float()
    train_steps(trained, train_data, iters, lr, batch_size, seqlen, label=label)
    return trained.to(next(model.parameters()).dtype)


UPTRAINED_COLUMNS = {  # of a report: what uptrained_figures adds to a row
    "uptrained_loss": ("up-trained loss", "{:.4f}"),
    "uptrained_loss_difference": ("to control", "{:+.4f}"),
    "uptrained_loss_difference_se": ("+-", "{:.4f}"),
}


def uptrained_figures(report, trained, control):
    """Figures of a row after up-training: its loss, and the difference to that of the unconverted model.

    Args: report: Report; trained, control: models after the same steps on the same batches.
    """
    figures = report.loss_figures(trained, control)
    return {f"uptrained_{key.removeprefix('valid_')}": value for key, value in figures.items()}


# ---- A run that can be stopped, resumed and told from others ----


@contextlib.contextmanager
def stop_between_steps(*numbers):
    """with stop_between_steps(signal.SIGINT) as stop: the first signal fills the list, for the loop to end.

    A second one acts at once, as if this were not there; signals that are ignored stay so.
    """
    stop, before = [], {number: signal.getsignal(number) for number in numbers}

    def ask(number, _frame):
        stop.append(number)
        signal.signal(number, before[number])

    for number, handler in before.items():
        if handler in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) == ask:
                signal.signal(number, handler)


def check_finite(step, *losses):
    """Raises ValueError if a loss of this step is NaN or infinite, before anything of it is written."""
    if not all(math.isfinite(loss) for loss in losses):
        raise ValueError(f"training went wrong: a loss of step {step} is not finite; files stay as they are")


def save_state(path, state, *models, may_fail=False):
    """Writes the state of a run that trains these models, whole or not at all.

    Raises ValueError if a weight is NaN or too large for the 16 bits of a checkpoint, OSError if the disk
    is full; may_fail: says that instead, for the last good state stays, and training need not stop for it.
    """
    if not all(weight.half().isfinite().all() for model in models for weight in model.parameters()):
        where = f"a weight after step {state['step']}"
        raise ValueError(f"training went wrong: {where} is not finite; files stay as they are")
    try:
        write_atomically(path, lambda temporary: torch.save(state, temporary))
    except OSError as error:
        if not may_fail:
            raise
        tqdm.write(f"state not saved: {error}", file=sys.stderr)


def load_state(path, settings, unsettled=None, **types):
    """The state that save_state wrote. Args: settings: of the run that goes on; types: of its other entries;
    unsettled: share of a run before which "steps" may still be changed.

    Raises FileNotFoundError where there is none, ValueError if it is damaged or another run's.
    """
    if not path.is_file():
        raise FileNotFoundError(f"nothing to resume: there is no {path}")
    state, types = load_file(path), types | {"settings": dict, "step": int}
    if not isinstance(state, dict) or not all(isinstance(state.get(key), t) for key, t in types.items()):
        raise ValueError(f"{path} is not the state of a training run")
    free = unsettled is not None and state["step"] < unsettled * min(
        settings["steps"], state["settings"]["steps"]
    )
    for key, wanted in settings.items():
        if (found := state["settings"].get(key)) != wanted and not (free and key == "steps"):
            raise ValueError(f"{path} is of a run with {key} {found}, not {wanted}")
    return state


def digest(data):
    """A short text that tells one text of token ids [N] from another."""
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]


def settings_of(args, text, p, *names):
    """What tells a run from others when it goes on: parameters of its model, options, and its text."""
    texts = {"training_text": digest(text.train), "validation_text": digest(text.valid)}
    return {name: getattr(args, name) for name in names} | p._asdict() | texts


def output_of(args, path, teacher=None):
    """The file that a run writes its weights to: path, but with --quick one that vanishes with args.

    Raises ValueError or OSError, before any work, for a file that cannot be written, the file of the
    teacher, or --quick --resume.
    """
    if args.quick:
        if args.resume:
            raise ValueError("--quick keeps nothing, so there is nothing to --resume")
        args.folder = tempfile.TemporaryDirectory()
        return Path(args.folder.name) / "quick.pth"
    check_writable(path, (".pth",))
    for beside in (path.with_suffix(".json"), path.with_suffix(".state")):  # the card, and what resumes
        check_writable(beside, (beside.suffix,))
        if args.json and Path(args.json).resolve() == beside.resolve():
            raise ValueError(f"--json {args.json}: that file will say how {path.name} came about")
    if teacher is not None and path.resolve() == teacher.resolve():
        raise ValueError(f"{path} is the teacher's own file")
    return path


def windows_of_step(n_windows, batch_size, seed, step):
    """Indices [B] of the windows of a step. Each epoch has an order of its own, from seed and epoch alone."""
    epoch, place = divmod(step, n_windows // batch_size)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(n_windows, generator=generator)[place * batch_size : (place + 1) * batch_size]


def train_side_by_side(
    models,
    batch_of,
    loss_of,
    settings,
    valid_data,
    n_windows,
    path=None,
    resume=False,
    schedule=learning_rate,
    n_evaluations=10,
    unsettled=None,
):
    """Trains models on the same batches for settings["steps"] steps each, so that all are equally far.

    One file resumes them all. Ctrl-C or SIGTERM ends the run between two steps, with status 130.
    Args: models: {name: model}; batch_of: step -> batch; loss_of: (name, logits, batch) -> scalar, for
        logits [B, T, V] of batch[0] [B, T]; settings: steps, batch_size, seqlen, lr (the peak learning
        rate), and what else tells this run from others; valid_data, n_windows: of the n_evaluations
        validation losses of each that are taken on the way; schedule: (share done, peak) -> learning rate;
        unsettled: share of the run before which its length may still be changed; path: file of the state,
        written every three minutes and at the end, None for a run that cannot go on; resume: goes on from it.
    Returns: {name: [[step, training loss, validation loss], ...]} and the facts of the run for its card.
        Raises ValueError if a loss or a weight is not finite, or if the state is another run's.
    """
    device = next(next(iter(models.values())).parameters()).device
    n_steps, batch_size, seqlen = (settings[key] for key in ("steps", "batch_size", "seqlen"))
    optimizers = {name: make_optimizer(model, settings["lr"]) for name, model in models.items()}
    step, seconds, curves = 0, 0.0, {name: [] for name in models}
    losses = {name: [] for name in models}  # of the steps since the last evaluation
    if resume:
        types = {"models": dict, "optimizers": dict, "seconds": float, "curves": dict, "losses": dict}
        state = load_state(path, settings, unsettled, **types)
        if not {*models} == {*state["models"]} == {*state["optimizers"]}:
            raise ValueError(f"{path} is of a run with the models {', '.join(state['models'])}")
        for name in models:
            models[name].load_state_dict(state["models"][name])
            optimizers[name].load_state_dict(state["optimizers"][name])
        step, seconds, curves, losses = (state[key] for key in ("step", "seconds", "curves", "losses"))

    for model in models.values():
        model.train()

    def save(may_fail):
        if path is None:
            return
        state = {"settings": settings, "step": step, "seconds": seconds, "curves": curves, "losses": losses}
        for key, parts in (("models", models), ("optimizers", optimizers)):
            state[key] = {name: part.state_dict() for name, part in parts.items()}
        save_state(path, state, *models.values(), may_fail=may_fail)

    bar = tqdm(total=n_steps, initial=step, desc="training", disable=None)
    last_save = time.monotonic()
    with bar, stop_between_steps(signal.SIGINT, signal.SIGTERM) as stop:
        while step < n_steps and not stop:
            with Timer(device) as timer:
                batch, now = batch_of(step), schedule((step + 1) / n_steps, settings["lr"])
                for name, model in models.items():
                    with autocast(device):
                        logits = first_of(model(batch[0]))  # [B, T, V]
                    loss = loss_of(name, logits.float(), batch)
                    optimizer_step(model, optimizers[name], loss, now)
                    losses[name].append(loss.item())
            step, seconds = step + 1, seconds + timer.seconds
            check_finite(step, *(values[-1] for values in losses.values()))
            bar.set_postfix_str(", ".join(f"{name} {values[-1]:.3f}" for name, values in losses.items()))
            if step % max(n_steps // n_evaluations, 5) == 0 or step == n_steps:
                for name, model in models.items():
                    valid = validation_loss(model, valid_data, n_windows)
                    mean = statistics.fmean(losses[name])
                    check_finite(step, valid)
                    curves[name].append([step, round(mean, 4), round(valid, 4)])
                    losses[name] = []
                if bar.disable:
                    known = ", ".join(f"{name} {curve[-1][2]:.4f}" for name, curve in curves.items())
                    print(f"step {step}: {known}; {seconds:.0f} s", flush=True)
            bar.update()
            if time.monotonic() - last_save > 180:
                save(may_fail=True)
                last_save = time.monotonic()
        # a disk that is full now must not take the weights as well, which are much smaller
        save(may_fail=step == n_steps)
    if stop:
        print(f"\nstopped at step {step}" + (f"; '{command_line()} --resume' goes on" if path else ""))
        sys.exit(130)
    for model in models.values():
        model.eval()
    facts = {"tokens_seen": step * batch_size * seqlen, "settings": settings}
    return curves, facts | {"training_minutes": round(seconds / 60, 1), "device": device_name(device)}


def command_line():
    """The command that started this run, --resume left out."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return shlex.join(["python", Path(sys.argv[0]).name, *words])


def weights_of(model):
    """A model's weights as checkpoints hold them, in 16 bits on the CPU."""
    return {name: tensor.cpu().half() for name, tensor in model.state_dict().items()}


def write_weights(path, model):
    """Writes a model's weights as checkpoints hold them, in 16 bits, and returns them."""
    weights = weights_of(model)
    write_atomically(path, lambda temporary: torch.save(weights, temporary))
    return weights


def write_card(path, parameters, valid_loss, data, facts, n_windows, curve):
    """Writes what the checkpoint at path is and how it came about to the JSON file beside it.

    Args: parameters: of the model; data: file of an own text or None; facts: tokens_seen, settings,
        training_minutes, device, and what else there is to tell; curve: losses of the training, the
        validation loss over n_windows windows. Returns the file's path.
    """
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    card = {"parameters": parameters, "vocabulary": VOCABULARY, "text_sha256": None if data else TEXT_SHA256}
    card |= {"validation": data.name if data else list(VALIDATION_PLAYS)}
    card |= {"validation_loss": round(valid_loss, 4), **facts, "command": command_line()}
    columns = ["step", "training", f"validation ({n_windows} windows)"]
    card |= {"weights_sha256": sha256, "loss_curve": {"columns": columns, "points": curve}}
    write_atomically(
        path.with_suffix(".json"), lambda file: file.write_text(json.dumps(card, indent=1) + "\n")
    )
    return path.with_suffix(".json")
