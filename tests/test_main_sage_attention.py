"""SageAttention: integers are exact, smoothing is free, errors are those of rounding, whatever the shapes."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, large_scores, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, window_mask
from gptlite_merging import merge_attention
from main_sage_attention import (
    int8_product,
    integer_attention,
    quantize,
    sage_attention,
    scale_groups,
    smooth_keys,
    use_attention,
)

GRANULARITIES = ("tensor", "block", "thread", "token")


def draw(*shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def reference(Q, K, V, causal=True):
    """PyTorch's attention in float64, and the log-sum-exp by its definition."""
    Sq, Sk = Q.shape[-2], K.shape[-2]
    mask = window_mask(Sq, Sk, Sk) if causal else torch.ones(Sq, Sk, dtype=torch.bool)
    scores = (Q @ K.mT / math.sqrt(Q.shape[-1])).masked_fill(~mask, -math.inf)
    return F.scaled_dot_product_attention(Q, K, V, attn_mask=mask), scores.logsumexp(-1)


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 70), st.integers(0, 99))
def test_products_of_integers_are_exact(Sq, Sk, D, seed):
    """Against 64-bit integers, at the largest sums as well; shapes that CUDA's kernel needs padded."""
    generator = torch.Generator().manual_seed(seed)
    A, B = (torch.randint(-128, 128, (2, 3, n, D), generator=generator).to(torch.int8) for n in (Sq, Sk))
    A[0], B[0] = -128, -128
    product = int8_product(A, B)
    assert product.dtype == torch.int32 and torch.equal(product.long(), A.long() @ B.long().mT)


def test_which_rows_share_a_scale():
    rows = {by: scale_groups(200, by, keys=False) for by in GRANULARITIES}
    assert rows["tensor"].unique().tolist() == [0] and rows["token"].tolist() == [*range(200)]
    assert rows["block"].tolist() == [0] * 128 + [1] * 72
    # in 32 rows of queries those 8 apart, in 64 of keys pairs of neighbours 8 apart
    assert [i for i in range(200) if rows["thread"][i] == rows["thread"][33]] == [33, 41, 49, 57]
    keys = scale_groups(200, "thread", keys=True)
    assert [i for i in range(200) if keys[i] == keys[66]] == [i for i in range(64, 128) if i % 8 in (2, 3)]
    assert scale_groups(200, "block", keys=True).tolist() == [i // 64 for i in range(200)]


@given(st.sampled_from(GRANULARITIES), st.booleans(), st.sampled_from([4, 8]), st.integers(1, 150))
def test_an_error_is_at_most_half_a_step(by, keys, n_bits, S):
    (x,) = draw((2, S, 5), seed=S)
    x[0, 0], x[1] = 0.0, x[1] * 1e-9
    groups = scale_groups(S, by, keys)
    codes, scale = quantize(x, n_bits, groups)
    top = 2 ** (n_bits - 1) - 1
    assert codes.dtype == torch.int8 and codes.abs().max() <= top
    for number in groups.unique():
        rows = groups == number
        largest = x[:, rows].abs().amax(dim=(1, 2))  # of each of the two
        assert_close(scale[:, rows], (largest / top).clamp(min=1e-12).view(2, 1, 1).expand_as(scale[:, rows]))
    assert ((codes * scale - x).abs() <= scale / 2 * (1 + 1e-9)).all()


def test_a_scale_of_nothing():
    codes, scale = quantize(torch.zeros(1, 3, 4), 8, scale_groups(3, "block", True))
    assert not codes.any() and scale.isfinite().all() and (scale > 0).all()


@given(
    st.sampled_from([1, 3, 17, 70]),
    st.sampled_from([70, 129, 200]),
    st.sampled_from(GRANULARITIES),
    st.booleans(),
    st.booleans(),
)
def test_other_numbers_of_queries_than_keys(Sq, Sk, by, smooth, causal):
    """N-31: the error is that of rounding to 8 bits for every shape, and so is the log-sum-exp's."""
    Q, K, V = draw((2, 3, Sq, 64), (2, 3, Sk, 64), (2, 3, Sk, 64), seed=Sq + Sk)
    out, lse = sage_attention(Q, K, V, causal, by, smooth=smooth)
    exact, exact_lse = reference(Q, K, V, causal)
    assert (out - exact).abs().sum() / exact.abs().sum() < 0.03
    assert (lse - exact_lse).abs().max() < 0.05


def test_the_finer_the_scales_the_smaller_the_error():
    """And smoothing pays where keys lean, where it is nearly all that counts; nowhere else."""
    Q, K, V = draw((1, 4, 512, 64), (1, 4, 512, 64), (1, 4, 512, 64))
    lean = K + 30.0 * (torch.arange(64) % 10 == 0)
    exact = reference(Q, K, V)[0]

    def error(K, by, smooth, exact=exact):
        return (integer_attention(Q, K, V, by=by, smooth=smooth) - exact).abs().mean().item()

    errors = [error(K, by, True) for by in GRANULARITIES]
    assert errors == sorted(errors, reverse=True) and errors[0] > 1.3 * errors[3]
    assert error(K, "block", False) == pytest.approx(error(K, "block", True), rel=0.1)
    exact_lean = reference(Q, lean, V)[0]
    raw, smoothed = (error(lean, "block", smooth, exact_lean) for smooth in (False, True))
    assert raw > 5 * smoothed and smoothed == pytest.approx(errors[1], rel=0.1)


def test_smoothing_over_keys_not_channels():
    """SA-2: the mean over the keys leaves all weights, that over the channels does not."""
    Q, K = draw((1, 1, 3, 8), (1, 1, 6, 8))
    K += 5.0 + torch.arange(8.0)
    weights = (Q @ K.mT).softmax(-1)
    smoothed, mean = smooth_keys(K)
    assert_close((Q @ smoothed.mT).softmax(-1), weights)
    assert_close(smoothed + mean, K)
    other = K - K.mean(dim=-1, keepdim=True)
    assert ((Q @ other.mT).softmax(-1) - weights).abs().max() > 0.05


def test_parts_are_joined_by_the_log_sum_exp():
    """SA-2: each part subtracts another mean, and only with it in the log-sum-exp do the parts fit."""
    Q, K, V = draw((1, 2, 3, 64), (1, 2, 40, 64), (1, 2, 40, 64))
    K[:, :, :20] += 4.0
    K[:, :, 20:] -= 4.0
    parts = [sage_attention(Q, K[:, :, part], V[:, :, part], False) for part in (slice(0, 20), slice(20, 40))]
    out, lse = merge_attention(*parts[0], *parts[1])
    exact, exact_lse = reference(Q, K, V, causal=False)
    assert_close(out, exact, 0.05)
    assert_close(lse, exact_lse, 0.05)


def test_the_callers_keys_stay():
    """N-30: bitwise, and two calls give the same."""
    Q, K, V = draw((1, 2, 9, 16), (1, 2, 9, 16), (1, 2, 9, 16))
    before = [t.clone() for t in (Q, K, V)]
    first, second = sage_attention(Q, K, V), sage_attention(Q, K, V)
    assert all(map(torch.equal, (Q, K, V), before)) and all(map(torch.equal, first, second))


def test_masks():
    """Any boolean mask; a query without keys gets zeros and -inf."""
    Q, K, V = draw((1, 2, 4, 16), (1, 2, 5, 16), (1, 2, 5, 16))
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1], mask[2, :3] = False, False
    out, lse = sage_attention(Q, K, V, mask)
    assert torch.equal(out[:, :, 1], torch.zeros(1, 2, 16).double()) and (lse[:, :, 1] == -math.inf).all()
    seen = torch.tensor([0, 2, 3])
    exact = F.scaled_dot_product_attention(Q, K, V, mask)
    assert_close(out[:, :, seen], exact[:, :, seen], 0.05)
    out, lse = sage_attention(Q, K[:, :, :2], V[:, :, :2])  # more queries than keys
    assert not out[:, :, :2].any() and (lse[:, :, :2] == -math.inf).all() and out[:, :, 2:].all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_larger_than_16_bits_hold(dtype):
    for Q, K, V, expected in large_scores(dtype):
        out = integer_attention(Q, K, V)
        assert out.dtype == dtype
        assert_close(out[:, :, 1], expected[:, :, 1])


def test_in_the_model():
    """Close to the model, not equal; a cache holds keys as they were."""
    tokens = random_tokens(2, 16)
    model = use_attention(tiny_model(GPTlite_KVCache), integer_attention)
    logits, cache = model(tokens)
    exact, exact_cache = tiny_model(GPTlite_KVCache)(tokens)
    assert 1e-4 < (logits - exact).abs().max() < 0.5 and torch.equal(cache[0][0], exact_cache[0][0])
    step, _ = model(random_tokens(2, 1), model(tokens[:, :15])[1])
    assert step.isfinite().all() and tiny_model(GPTlite)(tokens).shape == logits.shape


@pytest.mark.cuda
def test_cuda():
    Q, K, V = (t.cuda() for t in draw((2, 3, 70, 64), (2, 3, 129, 64), (2, 3, 129, 64), dtype=torch.float16))
    exact = reference(*(t.double() for t in (Q, K, V)))[0]
    assert (integer_attention(Q, K, V) - exact).abs().sum() / exact.abs().sum() < 0.03


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("main_sage_attention.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    assert [*rows] == ["textbook", "by block", "by thread", "by token", "by tensor"]
    assert (
        rows["textbook"]["baseline"] and rows["by block"]["approximate"] and rows["by block"]["ttft_ms"] > 0
    )
    errors, times = report["sweeps"].values()
    lean = {(line["scales"], line["keys"]): line["keys lean"] for line in errors}
    assert all(lean[by, "smoothed"] < 0.5 * lean[by, "as they are"] for by in ("tensor", "block"))
    assert len(report["checks"]) == 3 and len(report["why"]) == 4 and len(times) == 2


def test_script_refuses_bad_input():
    run = run_script("main_sage_attention.py", "--max-tokens", "100")
    assert run.status == 2 and "invalid choice" in run.stderr
