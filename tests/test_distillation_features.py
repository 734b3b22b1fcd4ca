"""Features as labels: what is recorded, which layers are compared, relations as attention has them."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script
from test_inference_distillation import V, checked_report, student_like
from torch import nn

from main_distillation import distillation_loss
from more.distillation_features import feature_loss, hidden_loss, record, relation_loss, relations


def features_of(model, x):
    model(x)
    return model.seen


def test_what_is_recorded_is_what_passes_through():
    model, x = record(student_like(1)), random_tokens(2, 8, vocab_size=V)
    seen = features_of(model, x)
    h = model.token_embedding(x) + model.position_embedding(torch.arange(8))
    for block, kept in zip(model.blocks, seen["hidden"], strict=True):
        before, h = h, block(h)
        assert_close(kept, h)
    last = model.blocks[-1]
    assert_close(seen["value"], last.mha.value_proj(last.ln1(before)))


def test_hidden_states_of_a_twin_and_of_a_scaled_copy_have_loss_0():
    hidden = [torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    same = [nn.Identity()] * 4
    assert hidden_loss(hidden, hidden, same) == 0
    assert hidden_loss([3 * h + 1 for h in hidden], hidden, same) < 1e-4  # eps of the norm
    other = [torch.randn_like(h) for h in hidden]
    assert abs(hidden_loss(other, hidden, same).item() - 2) < 0.6  # E (a - b)^2 of what has nothing in common
    with pytest.raises(ValueError, match="cannot each learn"):
        hidden_loss(hidden, hidden[:3], same)


@pytest.mark.parametrize(("n", "expected"), [(1, [5]), (2, [2, 5]), (3, [1, 3, 5]), (6, [0, 1, 2, 3, 4, 5])])
def test_which_blocks_are_compared(n, expected):
    """Evenly, the last with the last: only the teacher's layers that are expected count."""
    teacher = [torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    student = [teacher[i] for i in expected]
    assert hidden_loss(student, teacher, [nn.Identity()] * n) == 0


def test_relations_are_scores_of_causal_attention():
    X, Y = torch.randn(2, 2, 5, 12).unbind(0)
    by_pytorch = F.scaled_dot_product_attention(
        *(part.unflatten(-1, (3, 4)).transpose(1, 2) for part in (X, Y)),
        torch.eye(5).expand(2, 3, 5, 5),
        is_causal=True,
    )
    assert_close(relations(X, Y, 3).softmax(-1), by_pytorch)
    with pytest.raises(ValueError, match="cannot be cut"):
        relations(X, Y, 5)


def test_relations_of_other_widths():
    """Against F.kl_div, for a student half as wide; 0 for the same relations in other coordinates."""
    wide, narrow = ({name: torch.randn(2, 6, E) for name in ("query", "key", "value")} for E in (16, 8))
    pairs = (("query", "key"), ("value", "value"))
    expected = 0.0
    for one, other in pairs:
        p, q = (relations(seen[one], seen[other], 2).softmax(-1) for seen in (wide, narrow))
        expected += F.kl_div(q.clamp(min=1e-30).log(), p, reduction="sum") / (2 * 2 * 6) / 2
    assert_close(relation_loss(narrow, wide, 2, pairs), expected)
    padded = {name: torch.cat([part.unflatten(-1, (2, 4)), torch.zeros(2, 6, 2, 4)], -1).flatten(2) * 2**0.25
              for name, part in narrow.items()}  # fmt: skip
    assert relation_loss(narrow, padded, 2).item() < 1e-6


def test_feature_loss_reaches_the_student_alone():
    student, teacher = record(student_like(1)), record(student_like(2, n_layers=4, d_model=24, n_heads=3))
    student.projections = nn.ModuleList(
        nn.Linear(32, 24, bias=False, dtype=torch.float64) for _ in student.blocks
    )
    x = random_tokens(2, 8, vocab_size=V)
    with torch.no_grad():
        answer = teacher(x)
    for kinds in (
        (),
        ("hidden states",),
        ("attention",),
        ("values",),
        ("hidden states", "attention", "values"),
    ):
        student.zero_grad()
        loss = feature_loss(student(x), answer, student, teacher, kinds, 0.5)
        loss.backward()
        assert all(p.grad is None for p in teacher.parameters())
        assert (student.projections[0].weight.grad is not None) == ("hidden states" in kinds)
        plain = distillation_loss(student(x), answer, 1.0)
        assert (loss > plain + 1e-3) if kinds else (abs(loss - plain) < 1e-6)


# The script


@pytest.mark.slow
def test_script(distilled_checkpoint):
    checked_report("more/distillation_features.py", distilled_checkpoint)


def test_bad_option(distilled_checkpoint):
    args, message = ["--weight", "0"], "--weight"
    run = run_script("more/distillation_features.py", "--quick", *args, checkpoint=distilled_checkpoint)
    assert run.status == 2 and message in run.stderr
