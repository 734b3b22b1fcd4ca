"""Online distillation: what a model learns from the text and from another, and who learns from whom when."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script
from test_inference_distillation import V, checked_report, logits, student_like

from inference_distillation import Answers
from more.distillation_online import online_loss


def test_online_loss():
    mine, other = logits(0, 2, 3).requires_grad_(), logits(1, 2, 3).requires_grad_()
    targets = random_tokens(2, 3, vocab_size=V)
    text = F.cross_entropy(mine.flatten(0, 1), targets.flatten())
    assert_close(online_loss(mine, targets, {}, None), text)
    kl = (
        F.kl_div(mine.log_softmax(-1), other.log_softmax(-1), log_target=True, reduction="none")
        .sum(-1)
        .mean()
    )
    loss = online_loss(mine, targets, {"peer": other.detach()}, "peer")
    assert abs(loss.item() - (text + kl).item() / 2) < 1e-4  # answers are read in float32
    loss.backward()
    assert mine.grad.abs().sum() > 0 and other.grad is None


def test_who_is_updated_second_learns_from_what_the_first_says_then():
    first, second = student_like(1), student_like(2)
    answers = Answers({"first": first, "second": second}, random_tokens(1, 6, vocab_size=V))
    before = first(answers.x).detach()
    answers["second"]  # asked for the first one's loss
    with torch.no_grad():
        first.fc_out.bias.add_(torch.arange(V))
    assert_close(answers["first"], before + torch.arange(V))


# The script


@pytest.mark.slow
def test_script(distilled_checkpoint):
    checked_report("more/distillation_online.py", distilled_checkpoint)


def test_bad_option(distilled_checkpoint):
    args, message = ["--dtype", "bfloat16"], "unrecognized arguments: --dtype"
    run = run_script("more/distillation_online.py", "--quick", *args, checkpoint=distilled_checkpoint)
    assert run.status == 2 and message in run.stderr
