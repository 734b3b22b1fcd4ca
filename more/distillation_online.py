"""Online distillation: the teacher is trained beside the student, or two students teach each other.

Offline, a trained teacher must be there first. Online, models learn from the text and from what another model
that is being trained beside them says about it: two of one size (mutual learning), or a large one and a small
one. Each asks the other once a step, without gradient to it.

Approximate, as every student is. Wins where there is no trained teacher and the extra models are needed
anyway, or run on other machines (codistillation); two peers that make different mistakes know more than
either. Loses time: a step of two students and their answers takes more than twice as long, so that the
same time buys fewer tokens; and a teacher that is trained beside a student teaches it little at first.

Run: python more/distillation_online.py

Source: Zhang et al., Deep Mutual Learning, 2018; Anil et al., Large Scale Distributed Neural Network Training
through Online Distillation (codistillation), 2018.
"""

import _root  # noqa: F401 (the files above become importable)
from main_distillation import student_loss


def online_loss(logits, targets, answers, other, share=0.5):
    """A model's loss on the text and on what another model says about it: no gradient reaches that one.

    Args: logits [B, T, V]; targets [B, T]; answers: Answers of all models about this batch; other: name of
        the model to learn from, None for the text alone; share: of the text in the loss.
    Returns: a scalar in nats per token. The order of Deep Mutual Learning: who is updated second learns from
    what the first says after its update, since answers are asked when they are needed.
    """
    if other is None:
        return student_loss(logits, targets, None, 1.0, 1.0)
    return student_loss(logits, targets, answers[other], 1.0, share)


if __name__ == "__main__":
    from functools import partial

    import inference_distillation as distillation
    import inference_report as harness
    import inference_utils as utils
    import inference_words as words
    from gptlite import get_gptlite_distilled_model_parameters, get_gptlite_model_parameters
    from main_distillation import LR, compare_with_teacher, make_students

    options = {"checkpoint_help": "trained teacher to compare with", "plot": False, "dtype": False}
    parser = harness.options(__doc__, repeats=None, quick={"steps": 3}, **options)
    parser.add_argument("--steps", type=harness.positive_int, default=120, help="steps of each student")
    with harness.script(parser) as args:
        p, dev = get_gptlite_distilled_model_parameters(), args.device
        large = p if args.quick else get_gptlite_model_parameters()
        text, teacher, report, settings = distillation.begin(args, "online distillation", p, LR)
        V = text.vocab_size
        compare = partial(
            compare_with_teacher, teacher=teacher, windows=text.prompts(args.n_windows, p.seqlen)
        )

        def arm(learns_from):  # {model: whom it learns from}, the student first
            models = {}
            for i, name in enumerate(learns_from):
                shape = large if name == "large" else p
                models |= make_students([name], V, shape, args.seed + i, dev)
            everyone = models | {"trained teacher": teacher}
            batch_of = distillation.batches(text, everyone, settings, dev)
            return models, batch_of, lambda name, logits, b: online_loss(logits, *b[1:], learns_from[name])

        arms = {"text alone": {"student": None}, "trained teacher": {"student": "trained teacher"}}
        arms["two students"] = {"student": "peer", "peer": "student"}
        arms["large one beside"] = {"student": "large", "large": None}
        arms = {name: partial(arm, learns_from) for name, learns_from in arms.items()}
        rows, students = distillation.train_arms(report, text, arms, settings, compare)
        fresh, other = (make_students("s", V, p, args.seed + i, dev)["s"] for i in (0, 1))
        x = text.prompts(2, p.seqlen)  # [2, T]
        first = distillation.Answers({"a": fresh, "b": other}, x)
        report.check("students of different seeds differ at first", not first["a"].equal(first["b"]))
        slower = [name for name in rows if name.endswith("equal time")]
        for name in [*arms][1:] + sorted(slower, key=lambda name: rows[name]["valid_loss"])[:1]:
            losses = [report.loss_of(students[one]) for one in (name, "text alone")]
            report.why(words.loss_between(name, "text alone", *utils.loss_difference(*losses)))
        report.finish()
