"""On-policy distillation: divergences as PyTorch has them, own texts as likely as the student says."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script
from test_inference_distillation import V, checked_report, logits, student_like

from gptlite import GPTlite
from more.distillation_on_policy import OwnTexts, divergence, write_on


def test_divergences():
    q, p = logits(1, 4, 5), logits(2, 4, 5)
    log_q, log_p = q.log_softmax(-1), p.log_softmax(-1)
    assert_close(divergence(q, p, "forward"), F.kl_div(log_q, log_p, log_target=True, reduction="sum") / 20)
    assert_close(divergence(q, p, "reverse"), F.kl_div(log_p, log_q, log_target=True, reduction="sum") / 20)
    m = 0.3 * p.softmax(-1) + 0.7 * q.softmax(-1)
    halves = [F.kl_div(m.log(), log, log_target=True, reduction="sum") / 20 for log in (log_p, log_q)]
    assert_close(divergence(q, p, "mixed", 0.3), 0.3 * halves[0] + 0.7 * halves[1])
    for kind in ("forward", "reverse", "mixed"):
        assert abs(divergence(q, q, kind).item()) < 1e-12 and divergence(q, p, kind) > 0.01
    assert divergence(q, p, "mixed").item() <= math.log(2)  # its bound
    for beta, limit in ((1e-7, "forward"), (1 - 1e-7, "reverse")):  # of the paper
        share = min(beta, 1 - beta)
        assert abs(divergence(q, p, "mixed", beta) / share - divergence(q, p, limit)) < 0.01 * divergence(
            q, p, limit
        )


@pytest.mark.parametrize(("kind", "beta"), [("other", 0.5), ("mixed", 0.0), ("mixed", 1.0)])
def test_no_such_divergence(kind, beta):
    with pytest.raises(ValueError, match="no divergence"):
        divergence(logits(1, 2), logits(2, 2), kind, beta)
    with pytest.raises(ValueError, match="must belong together"):
        divergence(logits(1, 2), logits(2, 3), "forward")


def test_own_texts_follow_the_students_distribution():
    """The share of each first token, over many draws, against the model's probabilities."""
    student = student_like(3, seqlen=16)
    prompts, n = random_tokens(1, 5, vocab_size=V).expand(3000, -1), 3000
    text = write_on(student, prompts, 2, torch.Generator().manual_seed(0))
    assert text.shape == (n, 7) and text[:, :5].equal(prompts)
    p = student(prompts[:1])[0, -1].softmax(-1)
    counts = torch.bincount(text[:, 5], minlength=V) / n
    assert ((counts - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 1e-9).all()
    first = text[0, 5]
    given = text[text[:, 5] == first]
    p = student(given[:1, :6])[0, -1].softmax(-1)
    counts = torch.bincount(given[:, 6], minlength=V) / len(given)
    assert ((counts - p).abs() < 5 * (p * (1 - p) / len(given)).sqrt() + 1e-9).all()
    assert student.training is False and type(student) is GPTlite


def test_texts_are_written_anew_every_few_steps():
    asked = []

    def prompts_of(step):
        asked.append(step)
        return random_tokens(2, 4, vocab_size=V)

    texts = OwnTexts(student_like(1, seqlen=16), prompts_of, 3, 4, seed=1)
    written = [texts(step) for step in range(9)]
    assert asked == [0, 4, 8] and written[0] is written[3] and not written[3].equal(written[4])


# The script


@pytest.mark.slow
def test_script(distilled_checkpoint):
    checked_report("more/distillation_on_policy.py", distilled_checkpoint)


def test_bad_option(distilled_checkpoint):
    args, message = ["--prompt-len", "256"], "--prompt-len 256: 47 at most"
    run = run_script("more/distillation_on_policy.py", "--quick", *args, checkpoint=distilled_checkpoint)
    assert run.status == 2 and message in run.stderr
