"""Stored soft labels: the teacher runs once, and its answers are kept with the inputs they belong to.

What the teacher says about a text does not depend on the student, so it can be computed once and serve
every student in every epoch. A distribution over 96 characters is 192 bytes a token in 16 bits; the k
best and the mass of all others take 3k + 2. The table shows which of that a student needs: the same
student, trained on the same windows, with all of it, with less of it, and with the text alone.

Exact: all V values, up to 16-bit rounding; so are V - 1 values, as the rest is then one token. Approximate:
a smaller k loses the order among the rest; leaving the rest out and renormalising is biased as well.

Run: python main_distillation_store.py

Source: Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, 2015; Anshumann et al.,
Sparse Logit Sampling, 2025 (why renormalised top-k labels are biased).
"""

import torch
import torch.nn.functional as F
from tqdm import tqdm

from inference_training import autocast, optimizer_step
from main_distillation import distillation_loss, logit_mse


def merge_rest(logits, indices):
    """Logits [..., V] -> [..., k+1]: of the k tokens in indices [..., k], and of all others as one token."""
    kept = logits.gather(-1, indices)  # [..., k]
    rest = logits.scatter(-1, indices, float("-inf")).logsumexp(dim=-1, keepdim=True)  # [..., 1]
    return torch.cat([kept, rest], dim=-1)


def keep_best(log_p, k, renormalise=False):
    """What is stored of log-probabilities [..., V].

    Args: k: how many of the best, None or V for all; renormalise: give the others no probability at all
        and the k best theirs, instead of one entry for the sum of the others.
    Returns: values [..., V] and None, or values [..., k+1] and indices [..., k]. Raises ValueError for a
        k outside 1 to V.
    """
    V = log_p.shape[-1]
    if k is not None and not 1 <= k <= V:
        raise ValueError(f"of {V} tokens the {k} best cannot be stored")
    if k is None or k == V:
        return log_p, None
    best, indices = log_p.topk(k, dim=-1)  # [..., k]
    if renormalise:
        nothing = torch.full_like(best[..., :1], -6e4)  # [..., 1]: a probability of 0, finite in float16
        return torch.cat([best.log_softmax(dim=-1), nothing], dim=-1), indices
    return merge_rest(log_p, indices), indices


@torch.no_grad()
def store_soft_labels(teacher, inputs, temperature, k=None, batch_size=16):
    """Runs the teacher, in evaluation mode, over all inputs and keeps its softened log-probabilities.

    Args: inputs: token ids [N, T]; temperature: divides the logits; k: as in keep_best.
    Returns: values float16 [N, T, V or k+1] and indices uint8 [N, T, k] (None without k); row i belongs to
        inputs[i]. Raises ValueError as keep_best does, and for k with more than 256 tokens.
    """
    device = next(teacher.parameters()).device
    was_training = teacher.training
    teacher.eval()
    stored = []
    for start in tqdm(range(0, len(inputs), batch_size), desc="soft labels", leave=False, disable=None):
        with autocast(device):
            logits = teacher(inputs[start : start + batch_size].to(device))  # [B, T, V]
        logits = logits[0] if isinstance(logits, tuple) else logits
        log_p = F.log_softmax(logits.float() / temperature, dim=-1)  # [B, T, V]
        values, indices = keep_best(log_p, k)
        if indices is not None and log_p.shape[-1] > 256:
            raise ValueError(f"indices are stored in 8 bits, and there are {log_p.shape[-1]} tokens")
        if not stored:  # one allocation: joining pieces in the end would take the memory twice
            stored = [torch.empty(len(inputs), *values.shape[1:], dtype=torch.float16), None]
            if indices is not None:
                stored[1] = torch.empty(len(inputs), *indices.shape[1:], dtype=torch.uint8)
        stored[0][start : start + batch_size] = values
        if indices is not None:
            stored[1][start : start + batch_size] = indices
    teacher.train(was_training)
    return stored


def student_loss(logits, targets, values, indices, temperature, alpha=0.0, kind="kl"):
    """alpha times the loss on the text plus 1 - alpha times that on stored soft labels.

    Args: logits [B, T, V]; targets: the text's next tokens [B, T]; values, indices: of the same windows,
        stored with this temperature; kind: "kl", or "mse" of the logits (all V stored, else ValueError).
    Returns: a scalar per token, in nats for "kl".
    """
    loss = 0.0
    if alpha > 0:
        loss = alpha * F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    if alpha < 1:
        stored = temperature * values.float()  # [B, T, V or k+1]: logits up to a constant for each token
        if kind == "mse":
            if indices is not None:
                raise ValueError("the mean squared error takes all logits, and only the best are stored")
            return loss + (1 - alpha) * logit_mse(logits, stored)
        if indices is not None:
            logits = temperature * merge_rest(logits / temperature, indices.long())  # [B, T, k+1]
        loss = loss + (1 - alpha) * distillation_loss(logits, stored, temperature)
    return loss


def student_step(student, optimizer, batch, labels, lr, temperature, alpha=0.0, kind="kl"):
    """One training step on windows and their stored labels.

    Args: batch: token ids [B, T+1]; labels: (values, indices) stored for batch[:, :-1]; the others: as in
        student_loss and optimizer_step.
    Returns: the loss of the batch, a float.
    """
    with autocast(batch.device):
        logits = student(batch[:, :-1])  # [B, T, V]
    loss = student_loss(logits.float(), batch[:, 1:], *labels, temperature, alpha, kind)
    optimizer_step(student, optimizer, loss, lr)
    return loss.item()


def windows_of_step(n_windows, batch_size, seed, step):
    """Indices [B] of the windows of a step. Each epoch has an order of its own, from seed and epoch alone."""
    epoch, place = divmod(step, n_windows // batch_size)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(n_windows, generator=generator)[place * batch_size : (place + 1) * batch_size]


def rows_of(labels, rows, device):
    """(values, indices) of some windows, on the device: always taken together with their inputs."""
    return [None if part is None else part[rows].to(device) for part in labels]


if __name__ == "__main__":
    import inference_report as rep
    import inference_training as training
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_distilled_model_parameters
    from main_distillation import LR, N_STORED, compare_with_teacher
    from main_training import MultiHeadAttention_Training, model_for_training

    parser = rep.options(__doc__, repeats=3, checkpoint_help="weights of the teacher", plot=False)
    parser.add_argument("--steps", type=rep.positive_int, default=250, help="training steps of each student")
    parser.add_argument("--top-k", type=rep.positive_int, nargs="+", default=[8, 4, 1], help="values to keep")
    with rep.script(parser) as args:
        p, dev = get_gptlite_distilled_model_parameters(), args.device
        n_valid = 128
        if args.quick:
            p, n_valid, args.steps = p._replace(batch_size=4, seqlen=64), 8, 12
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        V, B = vocab_size, p.batch_size
        if args.steps * B > N_STORED:
            raise ValueError(f"--steps {args.steps}: at most {N_STORED // B}, all labels are kept in memory")
        if max(args.top_k) >= V:
            raise ValueError(f"--top-k {max(args.top_k)}: all {V} tokens are a row of its own, keep fewer")
        teacher = utils.load_model(GPTlite, V, args.checkpoint).to(dev)
        for block in teacher.blocks:
            block.mha.__class__ = MultiHeadAttention_Training  # the same attention, tiled
        windows = utils.sample_prompts(train_data, args.steps * B, p.seqlen + 1)  # [N, T+1]
        valid_windows = utils.sample_prompts(valid_data, n_valid, p.seqlen + 1)[:, :-1].to(dev)  # [N, T]
        with utils.Timer(dev) as timer:
            values, _ = store_soft_labels(teacher, windows[:, :-1], 1.0)  # [N, T, V]
        teacher_ms = timer.ms / args.steps

        kinds = {f"all {V}": (None, False)}
        kinds |= {f"{k} best and the rest": (k, False) for k in args.top_k}
        kinds |= {f"{k} best, renormalised": (k, True) for k in args.top_k if k > 1}
        kinds["text alone"] = None
        students, optimizers, step_ms = {}, {}, []
        for name in kinds:
            torch.manual_seed(args.seed)  # the same initial weights
            students[name] = model_for_training(V, p).to(dev)
            optimizers[name] = training.make_optimizer(students[name], LR)
        for step in (
            bar := tqdm(range(args.steps), desc=f"{len(kinds)} students", leave=False, disable=None)
        ):
            rows = windows_of_step(len(windows), B, args.seed, step)  # [B]
            batch, lr = windows[rows].to(dev), training.learning_rate((step + 1) / args.steps, LR)
            log_p = values[rows].to(dev).float()  # [B, T, V]
            for name, kind in kinds.items():
                labels = keep_best(log_p, *kind) if kind else (None, None)
                alpha = 0.0 if kind else 1.0
                with utils.Timer(dev) as timer:
                    loss = student_step(students[name], optimizers[name], batch, labels, lr, 1.0, alpha)
                step_ms.append(timer.ms)
            bar.set_postfix_str(f"loss {loss:.3f}")

        columns = {
            "bytes_per_token": ("bytes/token", "{}"),
            "store_mb": ("MB for the text", "{:.0f}"),
            "kl_to_teacher": ("KL to teacher", "{:.4f}"),
            "same_best_token": ("same best token", "{:.1%}"),
        }
        report = rep.Report(args, "stored soft labels", teacher, columns, batch_size=B, steps=args.steps)
        with torch.no_grad():
            targets = torch.cat([teacher(x) for x in valid_windows.split(16)])  # [N, T, V]
        loss_of = {}
        for name, kind in kinds.items():
            kl, same = compare_with_teacher(students[name].eval(), valid_windows, targets)
            loss_of[name] = utils.validation_loss(students[name], valid_data, n_valid, p.seqlen)
            n_bytes = 1 if kind is None else 2 * V if kind[0] is None else 3 * kind[0] + 2 * (not kind[1])
            report.row(
                name,
                baseline=name == f"all {V}",
                bytes_per_token=n_bytes,
                store_mb=n_bytes * len(train_data) / 1e6,
                valid_loss=loss_of[name],
                kl_to_teacher=kl,
                same_best_token=same,
                n_parameters=utils.n_parameters(students[name]),
            )
        x = windows[:4, :-1].to(dev)
        with torch.no_grad():
            exact, other = teacher(x), students["text alone"](x)  # [4, T, V]
        off = distillation_loss(exact, values[:4].to(dev).float(), 1.0).item()
        report.check(f"stored labels are the teacher's on these inputs (KL {off:.0e})", off < 1e-3)
        full = student_loss(other, x, exact.log_softmax(-1), None, 1.0).item()
        most = student_loss(other, x, *keep_best(exact.log_softmax(-1), V - 1), 1.0).item()
        report.check(f"{V - 1} values and the rest are all {V}", abs(full - most) < 1e-4)
        with torch.no_grad():
            mass = {k: exact.softmax(-1).topk(k, dim=-1).values.sum(-1).mean().item() for k in args.top_k}
        held = ", ".join(f"{k} best {share:.1%}" for k, share in mass.items())
        report.why(f"Of the teacher's probability the best tokens hold: {held}; the rest is the tail.")
        gaps = ", ".join(
            f"{name} {loss - loss_of[f'all {V}']:+.4f}" for name, loss in list(loss_of.items())[1:]
        )
        report.why(f"Validation loss against all {V} values, after {args.steps} steps: {gaps} nats.")
        one_ms = sorted(step_ms)[len(step_ms) // 2]
        report.why(
            f"The teacher takes {teacher_ms:.0f} ms for the {B * p.seqlen} tokens of a batch, a student's "
            f"step {one_ms:.0f} ms: with the teacher running along, a step takes "
            f"{1 + teacher_ms / one_ms:.1f} times as long. Stored labels pay from the second use on: here "
            f"{len(kinds) - 1} students share them, in a long training the epochs."
        )
        report.why(
            f"All {V} values of the {len(train_data):,} training characters are "
            f"{2 * V * len(train_data) / 1e6:.0f} MB, so characters need no top-k. With 50,000 tokens a row "
            "is 100 kB, and 8 best and the rest, with indices of 2 bytes, 34 bytes."
        )
        report.finish()
