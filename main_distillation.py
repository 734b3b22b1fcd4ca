"""Distillation: a small model learns from the probabilities of a large one instead of from single characters.

A text shows one next character; the teacher's distribution tells how likely each of the 96 was, so the same
tokens carry more information. Students with the same first weights and the same batches compare it: hard
labels (the text), soft labels (the teacher), and both mixed. The teacher's answers do not depend on the
student, so they are computed once, stored in 16 bits, and used by every student in every epoch.

Approximate: a student is a smaller, different model. Wins in all that a small model takes less of: weights,
memory, time of every token; and on soft labels a student learns more from the same text. Loses what it is
too small for, and a training, with a pass of the teacher over the text first. What a teacher knows by heart
of its training text is no use on other texts, so after a long training a student can come out ahead there.

Run: python main_distillation.py     (--steps 8000 trains the student that the collection carries)

Source: Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, 2015.
"""

import functools

import torch
import torch.nn.functional as F
from tqdm import tqdm

from gptlite import GPTlite
from inference_agreement import agreement
from inference_training import (
    autocast,
    check_same_shape,
    train_side_by_side,
    use_training_attention,
    windows_of_step,
)
from inference_utils import first_of


def distillation_loss(logits_student, logits_teacher, temperature):
    """KL divergence from the teacher's to the student's softened distribution, times temperature squared.

    Args: logits_student, logits_teacher [..., V]; temperature > 0: both are divided by it first, so that
        above 1 the improbable tokens count for more. The square keeps the size of the gradient.
    Returns: the mean per token in nats, a scalar; 0 exactly where both are equal. A token that the teacher
        rules out (-inf) adds nothing. Raises ValueError for logits of different shapes.
    """
    check_same_shape(logits_student, logits_teacher)
    log_q = F.log_softmax(logits_student / temperature, dim=-1)  # [..., V]
    log_p = F.log_softmax(logits_teacher / temperature, dim=-1)  # [..., V]
    difference = (log_p - log_q).masked_fill(log_p == float("-inf"), 0.0)  # [..., V]: 0 log 0 is 0
    return (log_p.exp() * difference).sum(dim=-1).mean() * temperature**2


LOWEST = torch.finfo(torch.float16).min  # a stored log-probability that is a probability of 0


@torch.no_grad()
def store_soft_labels(teacher, inputs, temperature, batch_size=16):
    """Runs the teacher once over all inputs, in evaluation mode, and keeps its softened log-probabilities.

    Args: inputs: token ids [N, T]; temperature: divides the logits.
    Returns: float16 [N, T, V] on the CPU, all finite; row i belongs to inputs[i]. Raises ValueError for a
        temperature so low that logits divided by it overflow.
    """
    device, was_training = next(teacher.parameters()).device, teacher.training
    teacher.eval()
    stored = None
    for start in tqdm(range(0, len(inputs), batch_size), desc="soft labels", leave=False, disable=None):
        with autocast(device):
            logits = first_of(teacher(inputs[start : start + batch_size].to(device)))  # [B, T, V]
        log_p = F.log_softmax(logits.float() / temperature, dim=-1)  # [B, T, V]
        if log_p.isnan().any():
            raise ValueError(f"logits divided by the temperature {temperature} are no numbers any more")
        if stored is None:  # one allocation: joining pieces in the end would take the memory twice
            stored = torch.empty(len(inputs), *log_p.shape[1:], dtype=torch.float16)
        stored[start : start + batch_size] = log_p.clamp(min=LOWEST)  # below it 16 bits have -inf alone
    teacher.train(was_training)
    return stored


def student_loss(logits, targets, soft_labels, temperature, alpha):
    """alpha times the loss on the text plus 1 - alpha times that on stored soft labels.

    Args: logits [B, T, V]; targets: the text's next tokens [B, T]; soft_labels: of the same windows, stored
        with this temperature [B, T, V]. Returns: a scalar, in nats per token. Raises ValueError for targets
        of another shape, which would be read in another order.
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets {list(targets.shape)} for logits {list(logits.shape)}")
    loss = 0.0
    if alpha > 0:
        loss = alpha * F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    if alpha < 1:
        logits_teacher = temperature * soft_labels.float()  # [B, T, V]: up to a constant for each token
        loss = loss + (1 - alpha) * distillation_loss(logits, logits_teacher, temperature)
    return loss


def make_students(names, vocab_size, p, seed, device):
    """A student of the parameters p for each name, all with the same first weights and no dropout."""
    students = {}
    for name in names:
        torch.manual_seed(seed)
        student = GPTlite(vocab_size, p.d_model, p.n_heads, p.d_head, p.n_layers, 0.0, p.seqlen)
        students[name] = use_training_attention(student).to(device)
    return students


def train_students(
    students, alphas, teacher, windows, settings, valid_data, n_windows, path=None, resume=False
):
    """Trains students side by side: on the text, on soft labels that the teacher gives once, or on both.

    Args: students, alphas: a model and its weight of the text for each name; windows: token ids [N, T+1];
        settings: steps, batch_size, seqlen, lr, seed, temperature, and what else tells this run from others;
        the others: as in train_side_by_side. Returns: as train_side_by_side does.
    """
    device, temperature = next(teacher.parameters()).device, settings["temperature"]

    @functools.cache  # once, and not for a run that only goes on to its report
    def soft_labels():
        return store_soft_labels(teacher, windows[:, :-1], temperature)  # [N, T, V]

    def batch_of(step):
        rows = windows_of_step(len(windows), settings["batch_size"], settings["seed"], step)  # [B]
        window = windows[rows].to(device)  # [B, T+1]
        return window[:, :-1], window[:, 1:], soft_labels()[rows].to(device)

    def loss_of(name, logits, batch):
        _, targets, labels = batch  # [B, T], [B, T, V]
        return student_loss(logits, targets, labels, temperature, alphas[name])

    return train_side_by_side(students, batch_of, loss_of, settings, valid_data, n_windows, path, resume)


def compare_with_teacher(student, teacher, windows, batch_size=16):
    """How far a student is from the teacher, at every position of some texts, token ids [N, T].

    Returns: {"kl_to_teacher": KL divergence from teacher to student in nats per token, "same_best_token":
        share of positions where both find the same token best}.
    """
    figures = agreement(student, teacher, windows, batch_size)
    return {"kl_to_teacher": figures["kl"], "same_best_token": figures["top1"]}


LR = 3e-3  # peak learning rate of AdamW: a narrow model wants more than GPTlite's
N_STORED = 24_576  # windows with stored labels at most: 1.5 times the plays, 1.2 GB; epochs reuse them


if __name__ == "__main__":
    import copy
    from pathlib import Path

    import inference_report as harness
    import inference_training as training
    import inference_utils as utils
    import inference_words as words
    from gptlite import get_gptlite_distilled_model_parameters
    from gptlite_kvcache import GPTlite_KVCache
    from main_kvcache import generate_kvcache

    shipped = utils.GPTLITE_DISTILLED_CKPT_PATH
    default = shipped.with_name("gptlite_distilled_trained.pth")
    quick = {"steps": 5, "n_tokens": 8}
    parser = harness.options(__doc__, 3, checkpoint_help="teacher", quick=quick, prompt_len=32, n_tokens=128)
    parser.add_argument("--steps", type=harness.positive_int, default=300, help="steps of each student")
    parser.add_argument("--temperature", type=harness.positive, default=1.0, help="softens distributions")
    parser.add_argument("--alpha", type=harness.share, default=0.5, help="the text in the mix; 0: no mix")
    parser.add_argument("--output", type=Path, metavar="FILE", default=default, help="student to write")
    parser.add_argument("--resume", action="store_true", help="go on from the last saved state")
    columns = {"weights_mb": ("MB", "{:.1f}"), "train_loss": ("train loss", "{:.4f}")}
    columns |= {"kl_to_teacher": ("KL to teacher", "{:.4f}"), "same_best_token": ("same best", "{:.1%}")}
    with harness.script(parser) as args:
        output, text = training.output_of(args, args.output, args.checkpoint), harness.load_text(args)
        p = get_gptlite_distilled_model_parameters()._replace(lr=LR, dropout_p=0.0)
        p, V, dev = p._replace(batch_size=2) if args.quick else p, text.vocab_size, args.device
        n_windows = min(args.steps * p.batch_size, N_STORED)
        windows = utils.sample_prompts(text.train, n_windows, p.seqlen + 1)  # [N, T+1]
        unseen = text.prompts(args.n_windows, p.seqlen + 1)[:, :-1]  # [N, T]
        weights = utils.load_checkpoint(args.checkpoint)
        teacher = utils.model_from(weights, GPTlite, V, str(args.checkpoint)).to(dev)
        models = {"teacher": harness.build(args, weights, GPTlite_KVCache)}
        if shipped.is_file():
            models["shipped student"] = harness.build(args, utils.load_checkpoint(shipped), GPTlite_KVCache)
        before = copy.deepcopy(use_training_attention(teacher).state_dict())
        report = harness.Report(args, "distillation", teacher, columns, text=text, steps=args.steps)
        alphas = {"hard labels": 1.0, "soft labels": 0.0} | ({"mixed": args.alpha} if args.alpha else {})
        students = make_students(alphas, V, p, args.seed, dev)
        settings = training.settings_of(args, text, p, "steps", "temperature", "alpha", "seed")
        settings["teacher_sha256"] = harness.sha256_of(args.checkpoint)
        trained = (students, alphas, teacher, windows, settings, text.valid, args.n_windows)
        curves, facts = train_students(*trained, output.with_suffix(".state"), args.resume)
        for name, student in students.items():
            models[name] = harness.build(args, training.weights_of(student), GPTlite_KVCache)
        methods = []
        for name, model in models.items():
            figures = compare_with_teacher(model, teacher, unseen)
            figures["weights_mb"] = utils.model_size_mb(model)
            figures["train_loss"] = utils.validation_loss(model, text.train, args.n_windows)
            methods.append(harness.Method(name, generate_kvcache, model, exact=not methods, **figures))
        rows = report.compare(text.prompts(1, args.prompt_len), args.n_tokens, *methods, label="")
        large, soft = rows["teacher"], rows["soft labels"]
        keys = ("valid_loss", "train_loss", "kl_to_teacher", "same_best_token")
        facts["compared"] = {name: {key: round(row[key], 4) for key in keys} for name, row in rows.items()}
        parameters = p._asdict() | {"vocab_size": V, "n_parameters": soft["n_parameters"]}
        training.write_weights(output, students["soft labels"])  # together: the card holds their hash
        training.write_card(output, parameters, soft["valid_loss"], args.data, facts, args.n_windows, curves)
        kl = compare_with_teacher(copy.deepcopy(teacher), teacher, unseen[:2])["kl_to_teacher"]
        report.check(f"a copy of the teacher starts with loss 0 ({kl:.0e})", kl < 1e-6)
        same = all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
        report.check("the teacher is what it was, bit for bit", same)
        losses = [report.loss_of(models[name]) for name in ("soft labels", "hard labels")]
        report.why(words.loss_between("soft labels", "hard labels", *utils.loss_difference(*losses)))
        rise, own = (row["valid_loss"] - row["train_loss"] for row in (large, soft))
        figures = f"from training to unseen text its loss rises by {rise:.3f}, the student's by {own:.3f}"
        report.why(
            words.choose(
                rise - own,
                (0.01, f"The teacher knows more by heart: {figures}."),
                f"The teacher knows no more by heart: {figures}.",
            )
        )
        report.why(words.compare(soft, large) + words.compare(soft, large, "peak_memory_mb"))
        costs = {n: harness.step_cost(models[n], args.prompt_len) for n in ("teacher", "soft labels")}
        report.why_step(costs, rows)
        lines = {name: tuple(zip(*curve, strict=True))[::2] for name, curve in curves.items()}
        report.plot_lines(lines, "training step", "validation loss (nats)", "Students that start alike")
        report.finish()
