"""Sparse-linear attention: each part against its definition, the limits, and fits that cannot be worse."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, quick_report, run_script
from hypothesis import given
from hypothesis import strategies as st

from main_sla import (
    fit_projection,
    linear_part,
    masked_part,
    sla_attention,
    sla_parts,
    smooth_field,
    sort_blocks,
    sparse_part,
)


def draw(T, D=6, seed=0, B=2, H=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, T, D, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


def shares():
    return st.tuples(st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.sampled_from([0.0, 0.3, 1.0]))


@given(st.integers(1, 6), st.integers(1, 5), shares(), st.integers(0, 50))
def test_blocks_are_sorted_by_the_scores_of_their_means(n, block, shares, seed):
    critical, negligible = shares
    Q, K, _ = draw(n * block, seed=seed)
    chosen, marginal = sort_blocks(Q, K, block, critical, negligible)
    n_critical = max(round(critical * n), 1)
    assert chosen.shape == (2, 3, n, n_critical)
    assert (marginal.sum(-1) == max(n - n_critical - round(negligible * n), 0)).all()
    assert not marginal.gather(-1, chosen).any()  # no block is both
    smoothed = K - K.mean(2, keepdim=True)  # as the paper has it
    q, k = (t.view(2, 3, n, block, -1).mean(3) for t in (Q, smoothed))
    scores = (q @ k.mT / math.sqrt(6)).softmax(-1)
    best = torch.zeros_like(marginal).scatter_(-1, chosen, True)
    for better, worse in ((best, marginal), (best | marginal, ~(best | marginal))):
        low = scores.masked_fill(~better, torch.inf).amin(-1)
        high = scores.masked_fill(~worse, -torch.inf).amax(-1)
        assert (low >= high - 1e-12).all()


@given(st.integers(1, 6), st.integers(1, 5), shares(), st.integers(0, 50))
def test_gathered_blocks_are_masked_ones(n, block, shares, seed):
    Q, K, V = draw(n * block, seed=seed)
    chosen, _ = sort_blocks(Q, K, block, *shares)
    out = sparse_part(Q, K, V, chosen, block)
    assert_close(out, masked_part(Q, K, V, chosen, block))
    for i in range(n):  # a block of queries by itself, over the keys that it chose
        keys = torch.cat([torch.arange(j * block, (j + 1) * block) for j in chosen[1, 2, i].tolist()])
        rows = slice(i * block, (i + 1) * block)
        exact = F.scaled_dot_product_attention(Q[1:2, 2:3, rows], K[1:2, 2:3, keys], V[1:2, 2:3, keys])
        assert_close(out[1:2, 2:3, rows], exact)


@given(st.integers(1, 5), st.integers(1, 4), shares(), st.integers(0, 50))
def test_the_linear_part_by_its_weights(n, block, shares, seed):
    """Weights phi(q) . phi(k) over the marginal keys, divided by their sum; none gives zeros."""
    Q, K, V = draw(n * block, seed=seed)
    _, marginal = sort_blocks(Q, K, block, *shares)
    mask = marginal.repeat_interleave(block, -1).repeat_interleave(block, -2)
    weights = (Q.softmax(-1) @ K.softmax(-1).mT) * mask
    expected = weights @ V / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    assert_close(linear_part(Q, K, V, marginal, block), expected)


def test_all_blocks_critical_is_full_attention():
    Q, K, V = draw(12)
    for projection in (torch.eye(6).double(), torch.zeros(12, 6).double()):
        out = sla_attention(Q, K, V, projection, block=4, critical=1.0)
        assert_close(out, F.scaled_dot_product_attention(Q, K, V))


def test_projections():
    """Zeros leave the exact part; one matrix takes the linear part, two take both."""
    Q, K, V = draw(12)
    settings = {"block": 4, "critical": 0.3, "negligible": 0.3}
    exact, linear = sla_parts(Q, K, V, **settings)
    one, two = draw(6, B=1, H=1)[:2]
    one, two = one[0, 0], two[0, 0]  # [6, 6]
    assert torch.equal(sla_attention(Q, K, V, 0 * one, **settings), exact)
    assert_close(sla_attention(Q, K, V, one, **settings), exact + linear @ one)
    both = sla_attention(Q, K, V, torch.cat([one, two]), **settings)
    assert_close(both, exact + exact @ one + linear @ two)


def test_a_fit_finds_what_is_there():
    parts = torch.randn(2, 3, 50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = torch.arange(24.0).double().view(6, 4)
    assert_close(fit_projection(parts, parts @ matrix, ridge=1e-12), matrix, 1e-6)
    assert not fit_projection(torch.zeros_like(parts), parts).any()  # nothing to learn from
    expected = torch.linalg.lstsq(parts.flatten(0, 2), (parts @ matrix + 1).flatten(0, 2)).solution
    assert_close(fit_projection(parts, parts @ matrix + 1, ridge=1e-12), expected, 1e-6)


def test_fits_are_ordered_and_smooth_texts_are_easier():
    """On the fit's text more parts are no worse; where neighbours are not alike the blocks tell nothing."""
    torch.manual_seed(0)
    errors = {}
    for width in (64, 1):
        Q, K, V = (t.double() for t in smooth_field(2, 1024, 32, width))
        full = F.scaled_dot_product_attention(Q, K, V)
        exact, linear = sla_parts(Q, K, V, critical=0.06)
        one = exact + linear @ fit_projection(linear, full - exact)
        pair = torch.cat([exact, linear], dim=-1)
        two = exact + pair @ fit_projection(pair, full - exact)
        errors[width] = [((out - full).norm() / full.norm()).item() for out in (exact, one, two)]
    for found in errors.values():
        assert found[0] > found[1] > found[2]
    assert errors[64][0] < 0.5 < errors[1][0]


def test_smooth_fields():
    torch.manual_seed(0)
    Q, K, V = smooth_field(3, 512, 16, 32)
    assert Q.shape == K.shape == V.shape == (1, 3, 512, 16)
    alike = F.cosine_similarity(V[:, :, 1:], V[:, :, :-1], dim=-1).mean()
    assert alike > 0.9 and 0.7 < V.std() < 1.3
    assert F.cosine_similarity(Q, K, dim=-1).mean() > 0.8  # a token asks for its like
    V = smooth_field(3, 512, 16, 1)[2]
    assert F.cosine_similarity(V[:, :, 1:], V[:, :, :-1], dim=-1).mean().abs() < 0.1
    V = smooth_field(1, 512, 16, 512, n_spikes=5)[2]
    assert (F.cosine_similarity(V, V.median(dim=2, keepdim=True).values, dim=-1) < 0.9).sum() >= 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype):
    Q, K, V = draw(64, D=16)
    out = sla_attention(*(t.to(dtype) for t in (Q, K, V)), torch.eye(16, dtype=dtype), block=8, critical=0.25)
    assert out.dtype == dtype
    assert_close(out.double(), sla_attention(Q, K, V, torch.eye(16).double(), block=8, critical=0.25), 0.2)


def test_bad_arguments():
    Q, K, V = draw(10)
    for block, critical, negligible in ((4, 0.1, 0.1), (5, 1.1, 0.1), (5, 0.1, -0.1)):
        with pytest.raises(ValueError, match="do not fit"):
            sla_attention(Q, K, V, torch.eye(6).double(), block, critical, negligible)


def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("main_sla.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    assert [*rows] == ["full attention", "exact part alone", "linear part alone", "SLA", "both parts fitted"]
    errors = {name: row["error"] for name, row in rows.items()}
    assert errors["both parts fitted"] < errors["SLA"] < errors["exact part alone"]
    by_kind, times = report["sweeps"].values()
    smooth, spikes, independent = (line["exact part alone"] for line in by_kind)
    assert smooth < 0.5 * independent and spikes < 0.5 * independent
    assert [line["tokens"] for line in times] == [1024, 2048]
    assert len(report["checks"]) == 4 and len(report["why"]) == 4


def test_script_refuses_a_text_of_no_whole_blocks():
    run = run_script("main_sla.py", "--quick", "--n-tokens", "1000")
    assert run.status == 2 and "1000 tokens in blocks of 64" in run.stderr and "Traceback" not in run.stderr
