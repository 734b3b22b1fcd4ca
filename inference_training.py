"""What scripts that train share: attention for training, the optimiser, a few steps, runs that can go on.

A training step is the same everywhere: AdamW, clipped gradients, a learning rate that follows the progress.
A long run also saves its state, stops between two steps, goes on later, and writes beside its weights how
they came about.
"""

import contextlib
import hashlib
import json
import math
import shlex
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from data.shakespeare import TEXT_SHA256, VALIDATION_PLAYS, VOCABULARY, get_batch
from gptlite import MultiHeadAttention
from inference_utils import first_of, load_file, validation_loss, write_atomically

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


def train_steps(model, data, n_steps, lr, batch_size, seqlen, seed=42, label="training"):
    """Trains the model on next-token prediction for a few steps, as up-training does after a change.

    Args: data: token ids [N]; lr: peak learning rate, warm-up over 20 steps, cosine to a tenth;
        batch_size, seqlen: windows per step and their length. The batches follow from the seed alone.
    Returns: the loss of every step in nats per token. The model is back in evaluation mode.
    """
    model_device = next(model.parameters()).device
    optimizer = make_optimizer(model, lr)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    losses = []
    for step in (bar := tqdm(range(n_steps), desc=label, leave=False, disable=None)):
        x, y = (t.to(model_device) for t in get_batch(data, batch_size, seqlen, generator))  # [B, T]
        with autocast(model_device):
            logits = model(x)  # [B, T, V]
            logits = logits[0] if isinstance(logits, tuple) else logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        progress = (step + 1) / n_steps
        optimizer_step(model, optimizer, loss, learning_rate(progress, lr, min(20 / n_steps, 0.5), 0.1))
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
    model.eval()
    return losses


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
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, lr)
    # a generator of its own: dropout in the model must not change which batches come
    generator = torch.Generator().manual_seed(torch.randint(2**62, ()).item())
    teacher_was_training = teacher.training
    teacher.eval()
    model.train()
    losses = []
    for step in (bar := tqdm(range(iters), desc="distillation", leave=False, disable=None)):
        x = get_batch(train_data, batch_size, seqlen, generator)[0].to(device)  # [B, T]
        with autocast(device):
            with torch.no_grad():
                target = first_of(teacher(x))  # [B, T, V]
            logits = first_of(model(x))  # [B, T, V]
        loss = loss_function(logits.float(), target.float(), temperature)
        progress = (step + 1) / iters
        optimizer_step(model, optimizer, loss, learning_rate(progress, lr, min(20 / iters, 0.5), 0.1))
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
    teacher.train(teacher_was_training)
    model.eval()
    return losses


def uptrained_losses(model, train_data, valid_data, n_windows, n_steps, *how):
    """Validation loss of a model as it is and after train_steps(model, train_data, n_steps, *how).

    Returns: {"valid_loss", "uptrained_loss"} in nats per token over n_windows windows, the second only if
        there are steps. The model is changed.
    """
    losses = {"valid_loss": validation_loss(model, valid_data, n_windows)}
    if n_steps:
        train_steps(model, train_data, n_steps, *how)
        losses["uptrained_loss"] = validation_loss(model, valid_data, n_windows)
    return losses


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


def load_state(path, settings, **types):
    """The state that save_state wrote. Args: settings: of the run that goes on; types: of its other entries.

    Raises FileNotFoundError where there is none, ValueError if it is damaged or another run's.
    """
    if not path.is_file():
        raise FileNotFoundError(f"nothing to resume: there is no {path}")
    state, types = load_file(path), types | {"settings": dict, "step": int}
    if not isinstance(state, dict) or not all(isinstance(state.get(key), t) for key, t in types.items()):
        raise ValueError(f"{path} is not the state of a training run")
    for key, wanted in settings.items():
        if (found := state["settings"].get(key)) != wanted:
            raise ValueError(f"{path} is of a run with {key} {found}, not {wanted}")
    return state


def digest(data):
    """A short text that tells one text of token ids [N] from another."""
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]


def command_line():
    """The command that started this run, --resume left out."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return shlex.join(["python", Path(sys.argv[0]).name, *words])


def write_weights(path, model):
    """Writes a model's weights as checkpoints hold them, in 16 bits, and returns them."""
    weights = {name: tensor.cpu().half() for name, tensor in model.state_dict().items()}
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
