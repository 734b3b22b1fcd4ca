"""Features as labels: a student also learns what the teacher's layers hold, not only what it answers.

Hidden states: each of the student's blocks is compared with one of the teacher's, through a projection that
is learned along and thrown away afterwards, since the widths differ. Relations: how strongly the positions of
a text are like each other, by the values or by queries and keys of the last block; regrouped into as many
heads on both sides, they need no projection and no equal number of heads (MiniLM).

Approximate, as every student is. Wins where an answer says little about how it was found: deep students,
short trainings, few labels. Loses time: each layer that is compared is one more product, and relations cost
T x T numbers a head. A small student may have no room for what a large one holds: whether features help
beside the whole distribution over the next token is what the table shows.

Run: python more/distillation_features.py

Source: Romero et al., FitNets, 2015; Jiao et al., TinyBERT, 2020; Wang et al., MiniLM, 2020, MiniLMv2, 2021.
"""

import torch
import torch.nn.functional as F
from torch import nn

import _root  # noqa: F401 (the files above become importable)
from main_distillation import distillation_loss


def record(model):
    """Makes a model keep what passes through it, in model.seen, anew with each forward.

    "hidden": a list of each block's output [B, T, E]; "query", "key", "value": of the last block [B, T, E].
    """
    model.seen = {"hidden": [None] * len(model.blocks)}

    def keep(where, key):
        return lambda _module, _inputs, output: where.__setitem__(key, output)

    for i, block in enumerate(model.blocks):
        block.register_forward_hook(keep(model.seen["hidden"], i))
    for name in ("query", "key", "value"):
        getattr(model.blocks[-1].mha, f"{name}_proj").register_forward_hook(keep(model.seen, name))
    return model


def hidden_loss(student, teacher, projections):
    """Mean squared difference of hidden states, each scaled to mean 0 and variance 1 over its numbers.

    Args: student, teacher: lists of [B, T, E_s] and of [B, T, E_t]; projections: one module E_s -> E_t for
        each of the student's blocks; its last is compared with the teacher's last, the others evenly.
    Returns: a scalar. Raises ValueError for a student of more blocks than the teacher has.
    """
    if len(student) > len(teacher):
        raise ValueError(f"{len(student)} blocks cannot each learn from one of {len(teacher)}")
    loss = 0.0
    for i, (h, project) in enumerate(zip(student, projections, strict=True), 1):
        goal = teacher[i * len(teacher) // len(student) - 1].float()  # [B, T, E_t]
        mine = project(h).float()  # [B, T, E_t]
        loss = loss + F.mse_loss(F.layer_norm(mine, mine.shape[-1:]), F.layer_norm(goal, goal.shape[-1:]))
    return loss / len(student)


def relations(X, Y, n_heads):
    """How like each position's part of X is to the parts of Y up to it, as scores of a causal attention.

    Args: X, Y [B, T, E]; n_heads: into how many parts E is cut. Returns: [B, n_heads, T, T], -inf above the
    diagonal. Raises ValueError where E cannot be cut so.
    """
    if X.shape[-1] % n_heads:
        raise ValueError(f"{X.shape[-1]} numbers cannot be cut into {n_heads} heads")
    X, Y = (part.float().unflatten(-1, (n_heads, -1)).transpose(1, 2) for part in (X, Y))  # [B, H, T, D]
    scores = X @ Y.transpose(-2, -1) / X.shape[-1] ** 0.5  # [B, H, T, T]
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)  # [T, T]
    return scores.masked_fill(hidden, float("-inf"))


def relation_loss(student, teacher, n_heads, pairs=(("query", "key"), ("value", "value"))):
    """KL divergence between the two models' relations, the mean over pairs, heads and positions.

    Args: student, teacher: what record keeps; pairs: of which two each relation is.
    """
    losses = []
    for one, other in pairs:
        mine, goal = (relations(seen[one], seen[other], n_heads) for seen in (student, teacher))
        log_q, log_p = mine.log_softmax(-1), goal.log_softmax(-1)  # [B, H, T, T]
        hidden = log_p == float("-inf")  # [B, H, T, T]: they say nothing, and 0 * -inf would be NaN
        difference = (log_p - log_q.masked_fill(hidden, 0.0)).masked_fill(hidden, 0.0)
        losses.append((log_p.exp() * difference).sum(dim=-1).mean())
    return sum(losses) / len(losses)


def feature_loss(logits, answer, student, teacher, kinds, weight):
    """KL divergence from the teacher's answer, and weight times each kind of features: a scalar.

    Args: logits, answer [B, T, V]; student: with `projections`; both models recorded on this batch; kinds:
        some of "hidden states", "values", "attention".
    """
    loss = distillation_loss(logits, answer, 1.0)
    pairs = {"attention": ("query", "key"), "values": ("value", "value")}
    if "hidden states" in kinds:
        loss = loss + weight * hidden_loss(
            student.seen["hidden"], teacher.seen["hidden"], student.projections
        )
    if chosen := [pairs[kind] for kind in kinds if kind in pairs]:
        n_heads = student.blocks[-1].mha.n_heads
        loss = loss + weight * relation_loss(student.seen, teacher.seen, n_heads, chosen)
    return loss


if __name__ == "__main__":
    from functools import partial

    import inference_distillation as distillation
    import inference_report as harness
    import inference_utils as utils
    import inference_words as words
    from gptlite import get_gptlite_distilled_model_parameters
    from main_distillation import LR, compare_with_teacher, make_students

    options = {"checkpoint_help": "teacher", "plot": False, "dtype": False}
    parser = harness.options(__doc__, repeats=None, quick={"steps": 3}, **options)
    parser.add_argument("--steps", type=harness.positive_int, default=120, help="steps of each student")
    parser.add_argument("--weight", type=harness.positive, default=0.2, help="of each kind in the loss")
    with harness.script(parser) as args:
        p, dev = get_gptlite_distilled_model_parameters(), args.device
        text, teacher, report, settings = distillation.begin(args, "features as labels", p, LR)
        record(teacher)
        unseen = text.prompts(args.n_windows, p.seqlen)  # [N, T]
        d_model = teacher.token_embedding.embedding_dim

        def new_student():
            student = record(make_students(["student"], text.vocab_size, p, args.seed, dev)["student"])
            widths = [nn.Linear(p.d_model, d_model, bias=False) for _ in student.blocks]
            student.projections = nn.ModuleList(widths).to(dev)
            return student

        def arm(kinds):
            student = new_student()
            batch_of = distillation.batches(text, {"teacher": teacher}, settings, dev)

            def loss_of(_, logits, batch):
                return feature_loss(logits, batch[2]["teacher"], student, teacher, kinds, args.weight)

            return {"student": student}, batch_of, loss_of

        def compare(student):
            answer = distillation.Answers({"teacher": teacher, "student": student}, unseen[:8])
            answer["teacher"], answer["student"]  # asks both: what they have seen is compared
            figures = {
                "hidden": hidden_loss(student.seen["hidden"], teacher.seen["hidden"], student.projections)
            }
            figures["relations"] = relation_loss(student.seen, teacher.seen, p.n_heads)
            student.projections = nn.ModuleList()  # they are no part of the student
            figures = {f"features, {name}": value.item() for name, value in figures.items()}
            return compare_with_teacher(student, teacher, unseen) | figures

        report.columns |= {f"features, {name}": (name, "{:.3f}") for name in ("hidden", "relations")}
        kinds = ["hidden states", "attention", "values"]
        arms = {"soft labels": ()} | {f"{kind} too": (kind,) for kind in kinds} | {"all three too": kinds}
        arms = {name: partial(arm, chosen) for name, chosen in arms.items()}
        rows, students = distillation.train_arms(report, text, arms, settings, compare)
        twin = hidden_loss(
            teacher.seen["hidden"], teacher.seen["hidden"], [nn.Identity()] * len(teacher.blocks)
        )
        own = relation_loss(teacher.seen, teacher.seen, p.n_heads)
        report.check("the teacher's own features have loss 0", twin.item() == 0 and abs(own.item()) < 1e-5)
        best = min(
            [name for name in rows if name != "soft labels"], key=lambda name: rows[name]["valid_loss"]
        )
        for name in ("hidden states too", "all three too", best):
            losses = [report.loss_of(students[one]) for one in (name, "soft labels")]
            report.why(words.loss_between(name, "soft labels", *utils.loss_difference(*losses)))
        report.finish()
