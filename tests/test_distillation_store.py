"""more/distillation_store.py: what is kept of a teacher's answer, and the losses on it."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, run_script
from hypothesis import given
from hypothesis import strategies as st

from distillation_store import in_16_bits, keep_best, logit_mse, merge_rest, stored_loss
from main_distillation import distillation_loss

V = 16  # tokens


def random_logits(*shape, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)


def kl_by_hand(student, teacher, temperature):
    """The published equation, token by token, in Python numbers."""
    total = 0.0
    rows = list(zip(student.reshape(-1, V).tolist(), teacher.reshape(-1, V).tolist(), strict=True))
    for s, t in rows:
        q, p = ([math.exp(z / temperature) for z in logits] for logits in (s, t))
        q, p = ([e / sum(part) for e in part] for part in (q, p))
        total += sum(pi * math.log(pi / qi) for pi, qi in zip(p, q, strict=True))
    return temperature**2 * total / len(rows)


def test_high_temperature_is_mean_squared_error():
    student, teacher = random_logits(3, 4, V), random_logits(3, 4, V, seed=1)
    assert_close(distillation_loss(student, teacher, 1e4), logit_mse(student, teacher) / 2, 1e-3)
    assert_close(logit_mse(student + 5, teacher), logit_mse(student, teacher))
    assert logit_mse(student + 5, student) < 1e-20


def test_merging_the_rest():
    logits = random_logits(2, 3, V)
    indices = logits.topk(4, dim=-1).indices
    p = logits.softmax(-1)
    merged = merge_rest(logits, indices).softmax(-1)
    assert_close(merged[..., :4], p.gather(-1, indices))
    assert_close(merged[..., 4], 1 - merged[..., :4].sum(-1))


@given(temperature=st.sampled_from([1.0, 2.0]), seed=st.integers(0, 99))
def test_top_k_of_all_tokens_is_the_full_loss(temperature, seed):
    student, teacher = random_logits(2, 5, V, seed=seed), random_logits(2, 5, V, seed=seed + 100)
    log_p = (teacher / temperature).log_softmax(-1)
    expected = kl_by_hand(student, teacher, temperature)
    losses = {}
    for k in (None, V, V - 1, 8, 3, 1):
        values, indices = keep_best(log_p, k)
        assert (indices is None) == (k in (None, V))
        losses[k] = stored_loss(student, values, indices, temperature).item()
    for k in (None, V, V - 1):  # one left-over token is no approximation
        assert_close(losses[k], expected, 1e-5)
    # what merges outcomes cannot tell distributions better apart
    assert (
        losses[V - 1] >= losses[8] - 1e-6 and losses[8] >= losses[3] - 1e-6 and losses[3] >= losses[1] - 1e-6
    )


def test_renormalised_labels_are_another_target():
    student, teacher = random_logits(4, V), random_logits(4, V, seed=1)
    values, indices = keep_best(teacher.log_softmax(-1), 3, renormalise=True)
    p = teacher.topk(3, dim=-1).values.softmax(-1)  # [4, 3]
    log_q = student.log_softmax(-1).gather(-1, indices)  # [4, 3]
    expected = (p * (p.log() - log_q)).sum(-1).mean()
    assert_close(stored_loss(student, *in_16_bits(values, indices), 1.0), expected, 1e-2)


def test_mean_squared_error_on_stored_labels():
    student, teacher = random_logits(2, 5, V), random_logits(2, 5, V, seed=1)
    values = (teacher / 2).log_softmax(-1)
    loss = stored_loss(student, values, None, 2.0, "mse")
    assert_close(loss, logit_mse(student, teacher), 1e-5)


def test_what_cannot_be_stored():
    log_p = random_logits(2, V).log_softmax(-1)
    for k in (0, -1, V + 1):
        with pytest.raises(ValueError, match="cannot be stored"):
            keep_best(log_p, k)
    values, indices = keep_best(random_logits(2, 300).log_softmax(-1), 8)
    indices[0, 0] = 299
    with pytest.raises(ValueError, match="8 bits"):
        in_16_bits(values, indices)
    assert in_16_bits(*keep_best(random_logits(2, 300), None))[0].shape == (2, 300)
    values, indices = keep_best(log_p, 4)  # 5 values
    with pytest.raises(ValueError, match="takes all logits"):
        stored_loss(log_p, values, indices, 1.0, "mse")


@pytest.mark.parametrize("k", [None, V - 1, 4, 1])
def test_what_is_stored_takes_so_many_bytes(k):
    values, indices = in_16_bits(*keep_best(random_logits(3, 5, V).log_softmax(-1), k))
    n_bytes = values.nbytes + (0 if indices is None else indices.nbytes)
    assert n_bytes / 15 == (2 * V if k is None else 3 * k + 2)


@pytest.mark.parametrize("k", [None, 4, 1])
def test_labels_are_finite_whatever_the_teacher_rules_out(k):
    teacher, student = random_logits(3, V), random_logits(3, V, seed=1).requires_grad_()
    teacher[:, 2] = -math.inf
    teacher[1, 1:] = -math.inf  # one token is certain
    log_p = (teacher / 0.0003).log_softmax(-1)
    for values, indices in (keep_best(log_p, k), keep_best(teacher.log_softmax(-1), k)):
        values, indices = in_16_bits(values, indices)
        assert values.isfinite().all()
        loss = stored_loss(student, values, indices, 0.0003)
        assert loss.isfinite() and torch.autograd.grad(loss, student)[0].isfinite().all()


def test_mean_squared_error_of_what_the_teacher_rules_out():
    student = torch.tensor([[1.0, 2.0, 50.0], [0.0, 3.0, 3.0]], requires_grad=True)
    teacher = torch.tensor([[4.0, 3.0, -math.inf], [1.0, 1.0, 1.0]])
    expected = (2 * 1.0**2 + (2.0**2 + 1.0**2 + 1.0**2)) / 5  # of the five logits that there are
    loss = logit_mse(student, teacher)
    assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, student)
    assert gradient.isfinite().all() and gradient[0, 2] == 0
    with pytest.raises(ValueError, match="must belong together"):
        logit_mse(student[:1], teacher)


@pytest.mark.slow
def test_quick_run(checkpoint):
    run = run_script("more/distillation_store.py", "--quick", "--json", "-", checkpoint=checkpoint)
    assert run.status == 0, run.stderr
    assert len(run.json["checks"]) == 2 and all(run.json["checks"].values())
    n_bytes = {row["method"]: row["bytes_per_token"] for row in run.json["rows"]}
    assert n_bytes["all 96"] == 192 and n_bytes["2 best and the rest"] == 8 and n_bytes["text alone"] is None
    assert len(run.json["why"]) == 4
    (times,) = run.json["sweeps"].values()
    assert all(times[0][name] > 0 for name in ("teacher running along", "teacher alone"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dtype", "bfloat16"], "unrecognized arguments: --dtype"),  # students train in float32
        (["--top-k", "97"], "cannot be stored"),
        (["--steps", "0"], "not a number from 1 up"),
    ],
)
def test_bad_options(args, message):
    run = run_script("more/distillation_store.py", "--quick", *args)
    assert run.status == 2 and message in run.stderr


def test_a_stored_token_that_the_teacher_rules_out_has_no_logit_to_reach():
    log_p = F.log_softmax(torch.tensor([[math.log(3), 0.0, -math.inf]]), dim=-1)
    stored = stored_loss(torch.zeros(1, 3), *in_16_bits(*keep_best(log_p, None)), 1.0, "mse")
    assert_close(stored, logit_mse(torch.zeros(1, 3), log_p), 1e-3)
