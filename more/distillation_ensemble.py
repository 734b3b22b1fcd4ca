"""An ensemble as teacher: the mean of several models' probabilities, distilled into one of them.

Models trained from different random weights make different mistakes. The mean of their probabilities has a
lower loss than they have on the mean, always: the logarithm is concave. But it takes all of them for every
token. A student that learns from this mean takes the time of one model, and keeps a part of what the ensemble
knows more.

Approximate: the student is one model. Wins over each member, as far as the ensemble does, at a member's cost
for every token. Loses the training of all members and their answers. One large teacher that is trained for
longer may teach more than several small ones: it stands in the same table.

Run: python more/distillation_ensemble.py

Source: Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, 2015; Hansen and Salamon,
Neural Network Ensembles, 1990.
"""

import torch
from torch import nn

import _root  # noqa: F401 (the files above become importable)
from inference_utils import first_of
from main_distillation import student_loss


class Ensemble(nn.Module):
    """The mean of the probabilities of several models with one vocabulary, as log-probabilities.

    Args: models: token ids [B, T] -> logits [B, T, V], or a tuple that begins with them. Raises ValueError
        for no model at all.
    """

    def __init__(self, models):
        super().__init__()
        if not models:
            raise ValueError("an ensemble needs at least one model")
        self.models = nn.ModuleList(models)
        self.seqlen = models[0].seqlen

    def forward(self, x):
        """[B, T] -> [B, T, V]"""
        log_p = torch.stack([first_of(model(x)).float().log_softmax(-1) for model in self.models])
        return log_p.logsumexp(dim=0) - torch.tensor(float(len(self.models))).log()  # [B, T, V]


if __name__ == "__main__":
    from functools import partial

    import inference_distillation as distillation
    import inference_report as harness
    import inference_training as training
    import inference_utils as utils
    import inference_words as words
    from gptlite import get_gptlite_distilled_model_parameters
    from main_distillation import LR, compare_with_teacher, make_students

    options = {"checkpoint_help": "large teacher", "plot": False, "dtype": False}
    parser = harness.options(__doc__, repeats=None, quick={"steps": 3, "members": 2}, **options)
    parser.add_argument("--steps", type=harness.positive_int, default=150, help="steps of each model")
    parser.add_argument("--members", type=harness.positive_int, default=3, help="models of the ensemble")
    with harness.script(parser) as args:
        p, dev = get_gptlite_distilled_model_parameters(), args.device
        text, teacher, report, settings = distillation.begin(args, "an ensemble as teacher", p, LR)
        V = text.vocab_size
        compare = partial(
            compare_with_teacher, teacher=teacher, windows=text.prompts(args.n_windows, p.seqlen)
        )

        members = {}  # of other first weights, on the same batches
        for i in range(args.members):
            members |= make_students([f"member {i + 1}"], V, p, args.seed + 1 + i, dev)
        batch_of = distillation.batches(text, {}, settings, dev)
        on_text = lambda name, logits, b: student_loss(logits, b[1], None, 1.0, 1.0)  # noqa: E731
        training.train_side_by_side(members, batch_of, on_text, settings, text.valid, 2, n_evaluations=2)
        ensemble = Ensemble([*members.values()])
        losses = {name: report.loss_of(model) for name, model in (members | {"ensemble": ensemble}).items()}
        lines = [{"model": name, "loss": each.mean().item()} for name, each in losses.items()]
        report.sweep("Loss of the members and of the mean of their probabilities", lines)
        mean = sum(losses[name] for name in members) / len(members)  # [n_windows]
        whole = losses["ensemble"]  # [n_windows]
        report.check(
            "the ensemble's loss is at most the members' mean, on each window",
            bool((whole <= mean + 1e-6).all()),
        )

        teachers = {"one member": members["member 1"], "ensemble": ensemble, "large teacher": teacher}

        def arm(source):
            models = make_students(["student"], V, p, args.seed, dev)
            batch_of = distillation.batches(text, teachers, settings, dev)

            def loss_of(_, logits, batch):
                labels = None if source is None else batch[2][source]  # [B, T, V]
                return student_loss(logits, batch[1], labels, 1.0, 1.0 if source is None else 0.0)

            return models, batch_of, loss_of

        arms = {"text alone": partial(arm, None)} | {f"from {name}": partial(arm, name) for name in teachers}
        rows, students = distillation.train_arms(report, text, arms, settings, compare)
        report.why(words.loss_between("the ensemble", "its members", *utils.loss_difference(whole, mean)))
        student = report.loss_of(students["from ensemble"])
        for name, others in {"its ensemble": whole, "its ensemble's members": mean}.items():
            report.why(words.loss_between("the student", name, *utils.loss_difference(student, others)))
        other = report.loss_of(students["from one member"])
        difference = utils.loss_difference(student, other)
        report.why(words.loss_between("the ensemble's student", "one member's", *difference))
        report.finish()
