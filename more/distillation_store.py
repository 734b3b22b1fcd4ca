"""Stored soft labels: how much of a teacher's answer has to be kept for a student to learn from it.

What the teacher says about a text does not depend on the student, so it is computed once and serves every
student in every epoch. A distribution over 96 characters is 192 bytes a token in 16 bits; the k best and
the mass of all others take 3k + 2. The table shows which of that a student needs: the same student on the
same windows, with all of it, with less of it, with squared differences of logits, and with the text alone.

Exact: all V values, up to 16-bit rounding; so are V - 1 values, as the rest is then one token. Approximate:
a smaller k loses the order among the rest; leaving the rest out and renormalising is biased as well. Storing
wins from the second use of a window on; with 96 characters it needs no top-k. Top-k wins where V is large:
with 50,000 tokens a row is 100 kB, and 8 best and the rest, with indices of 2 bytes, 34 bytes.

Run: python more/distillation_store.py

Source: Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, 2015; Ba and Caruana, Do Deep
Nets Really Need to be Deep?, 2014 (logits); Anshumann et al., Sparse Logit Sampling, 2025 (biased top-k).
"""

import torch
import torch.nn.functional as F

import _root  # noqa: F401 (the files above become importable)
from inference_training import check_same_shape
from main_distillation import LOWEST, distillation_loss


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
        nothing = torch.full_like(best[..., :1], LOWEST)  # [..., 1]: a probability of 0, and finite
        return torch.cat([best.log_softmax(dim=-1), nothing], dim=-1), indices
    return merge_rest(log_p, indices), indices


def in_16_bits(values, indices):
    """What keep_best returns as it is stored: float16, all finite, and uint8.

    Raises ValueError for indices that 8 bits cannot tell apart.
    """
    if indices is not None and indices.numel() and indices.max() > 255:
        raise ValueError(f"indices are stored in 8 bits, and there is a token {indices.max()}")
    return values.clamp(min=LOWEST).half(), None if indices is None else indices.to(torch.uint8)


def logit_mse(logits_student, logits_teacher):
    """Mean squared error of logits [..., V] after taking each token's mean away, which softmax ignores.

    A token that the teacher rules out (-inf) has no logit to reach and is left out of both means. Raises
    ValueError for logits of different shapes.
    """
    check_same_shape(logits_student, logits_teacher)
    possible = logits_teacher > float("-inf")  # [..., V]
    difference = (logits_student - logits_teacher).masked_fill(~possible, 0.0)  # [..., V]
    n_possible = possible.sum(dim=-1, keepdim=True)  # [..., 1]
    mean = difference.sum(dim=-1, keepdim=True) / n_possible  # [..., 1]
    return ((difference - mean).square() * possible).sum() / n_possible.sum()


def stored_loss(logits, values, indices, temperature, kind="kl"):
    """The loss of logits [..., V] on what keep_best has stored of the teacher's at this temperature.

    Args: kind: "kl", or "mse" for the squared error of all logits. Raises ValueError for "mse" where only
        the best are stored.
    """
    stored = temperature * values.float()  # [..., V or k+1]: logits up to a constant for each token
    if kind == "mse":
        if indices is not None:
            raise ValueError("the mean squared error takes all logits, and only the best are stored")
        return logit_mse(logits, stored.masked_fill(values <= LOWEST, float("-inf")))
    if indices is not None:
        logits = temperature * merge_rest(logits / temperature, indices.long())  # [..., k+1]
    return distillation_loss(logits, stored, temperature)


if __name__ == "__main__":
    import inference_report as harness
    import inference_training as training
    import inference_utils as utils
    import inference_words as words
    from gptlite import get_gptlite_distilled_model_parameters
    from inference_distillation import load_teacher
    from main_distillation import LR, N_STORED, compare_with_teacher, make_students, store_soft_labels

    options = {"checkpoint_help": "teacher", "plot": False, "dtype": False}  # students train in float32
    parser = harness.options(__doc__, 3, quick={"steps": 5, "top_k": [2]}, **options)
    parser.add_argument("--steps", type=harness.positive_int, default=200, help="steps of each student")
    parser.add_argument(
        "--top-k", type=harness.positive_int, nargs="+", default=[8, 4, 1], help="kept values"
    )
    columns = {"bytes_per_token": ("bytes/token", "{}"), "store_mb": ("MB for the text", "{:.0f}")}
    columns |= {"kl_to_teacher": ("KL to teacher", "{:.4f}"), "same_best_token": ("same best", "{:.1%}")}
    with harness.script(parser) as args:
        text, p, dev = harness.load_text(args), get_gptlite_distilled_model_parameters(), args.device
        V, B, T = text.vocab_size, 2 if args.quick else p.batch_size, p.seqlen
        full, k = f"all {V}", max(args.top_k)
        kinds = {full: (None, False)} | {f"{k} best and the rest": (k, False) for k in args.top_k}
        kinds |= {f"{k} best, renormalised": (k, True) for k in args.top_k}
        kinds |= {"squared logits": (None, False), "text alone": None}
        one = torch.zeros(1, V)  # what is stored of one token
        parts = {name: in_16_bits(*keep_best(one, *kind)) if kind else () for name, kind in kinds.items()}
        teacher = load_teacher(args, V)
        windows = utils.sample_prompts(text.train, min(args.steps * B, N_STORED), T + 1)  # [N, T+1]
        unseen = text.prompts(args.n_windows, T)  # [N, T]
        report = harness.Report(args, "stored soft labels", teacher, columns, text=text, steps=args.steps)
        log_p = store_soft_labels(teacher, windows[:, :-1], 1.0)  # [N, T, V]
        students = make_students(kinds, V, p, args.seed, dev)

        def batch_of(step):
            rows = training.windows_of_step(len(windows), B, args.seed, step)  # [B]
            window = windows[rows].to(dev)  # [B, T+1]
            return window[:, :-1], window[:, 1:], log_p[rows].to(dev).float()

        def loss_of(name, logits, batch):
            if name == "text alone":
                return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
            labels = in_16_bits(*keep_best(batch[2], *kinds[name]))
            return stored_loss(logits, *labels, 1.0, "mse" if name == "squared logits" else "kl")

        settings = {"steps": args.steps, "lr": LR, "batch_size": B, "seqlen": T}
        training.train_side_by_side(students, batch_of, loss_of, settings, text.valid, 4)
        for name, student in students.items():
            n_bytes = sum(part.nbytes for part in parts[name] if part is not None) or None
            figures = compare_with_teacher(student, teacher, unseen) | {"bytes_per_token": n_bytes}
            figures |= {"store_mb": n_bytes and n_bytes * len(text.train) / 1e6}
            figures |= report.loss_figures(student, students[full])
            report.row(name, baseline=name == full, n_parameters=utils.n_parameters(student), **figures)

        x, _, soft = batch = batch_of(0)  # [B, T], [B, T, V]
        with torch.no_grad():
            exact, other = teacher(x).log_softmax(-1), students["text alone"](x)  # [B, T, V]
        off = distillation_loss(soft, exact, 1.0)
        report.check_close("stored labels are the teacher's", off, torch.zeros_like(off), 1e-3)
        most, whole = stored_loss(other, *keep_best(exact, V - 1), 1.0), distillation_loss(other, exact, 1.0)
        report.check_close(f"{V - 1} values and the rest are all {V}", most, whole)
        student, optimizer = students[full], training.make_optimizer(students[full], LR)

        def stored_step():
            with training.autocast(dev):
                logits = student(x)
            training.optimizer_step(student, optimizer, loss_of(full, logits.float(), batch), LR)

        steps = {"stored labels": stored_step, "teacher alone": lambda: store_soft_labels(teacher, x, 1.0)}
        steps["teacher running along"] = lambda: training.distill(student, teacher, text.train, 1, LR, B, T)
        (ms,) = report.time_sweep("Time of a training step (ms)", "batch", [B], lambda _: steps)
        saved = ms["teacher running along"] - ms["stored labels"]
        report.why(words.pays_back(ms["teacher alone"], saved, "ms a batch", "uses"))
        rest, biased = f"{k} best and the rest", f"{k} best, renormalised"
        for one, other in ((full, "text alone"), (rest, full), (biased, rest)):
            losses = [report.loss_of(students[name]) for name in (one, other)]
            report.why(words.loss_between(one, other, *utils.loss_difference(*losses)))
        report.finish()
