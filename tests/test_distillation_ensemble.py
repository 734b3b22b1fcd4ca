"""An ensemble as teacher: the mean of probabilities, which is never worse than the members on the mean."""

import pytest
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script
from test_inference_distillation import V, checked_report, student_like

from more.distillation_ensemble import Ensemble


def test_the_mean_of_probabilities():
    models = [student_like(seed) for seed in (1, 2, 3)]
    x = random_tokens(2, 9, vocab_size=V)
    mean = sum(model(x).softmax(-1) for model in models) / 3
    assert_close(Ensemble(models)(x).exp(), mean)
    assert_close(Ensemble(models[:1])(x), models[0](x).log_softmax(-1))
    assert_close(Ensemble([models[0]] * 2)(x), models[0](x).log_softmax(-1))
    with pytest.raises(ValueError, match="at least one model"):
        Ensemble([])


def test_an_ensemble_is_never_worse_than_its_members_on_the_mean():
    models, x = [student_like(seed) for seed in range(4)], random_tokens(5, 12, vocab_size=V)
    loss = lambda model: F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction="none")  # noqa: E731
    assert (loss(Ensemble(models)) <= sum(loss(model) for model in models) / 4 + 1e-6).all()


# The script


@pytest.mark.slow
def test_script(distilled_checkpoint):
    report = checked_report("more/distillation_ensemble.py", distilled_checkpoint)
    *members, ensemble = next(iter(report["sweeps"].values()))
    assert ensemble["loss"] < sum(line["loss"] for line in members) / len(members)


def test_bad_option(distilled_checkpoint):
    args, message = ["--members", "0"], "not a number from 1 up"
    run = run_script("more/distillation_ensemble.py", "--quick", *args, checkpoint=distilled_checkpoint)
    assert run.status == 2 and message in run.stderr
