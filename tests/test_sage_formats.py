"""SageAttention's later formats: the numbers of each, free smoothing, errors in the published order."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, large_scores, quick_report
from hypothesis import given
from hypothesis import strategies as st
from test_main_sage_attention import draw, reference

from main_sage_attention import integer_attention
from sage_formats import FORMATS, as_fp8, as_integers, as_nvfp4, simulated_attention

FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def e4m3():
    """All finite numbers of 8 bits: a sign, 4 bits of exponent, 3 of mantissa, by their definition."""
    sizes = [m * 2.0**-9 for m in range(8)]
    sizes += [(1 + m / 8) * 2.0 ** (e - 7) for e, m in itertools.product(range(1, 16), range(8))][:-1]
    return torch.tensor(sorted({sign * size for sign in (1, -1) for size in sizes}), dtype=torch.float64)


def nearest(x, numbers):
    return numbers[(x.unsqueeze(-1) - numbers).abs().argmin(dim=-1)]


def test_8_bit_floats():
    (x,) = draw((3, 400))
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = largest / 448
    assert_close(as_fp8(x, largest) / scale, nearest(x / scale, e4m3()), 1e-6)
    assert not as_fp8(torch.zeros(3), torch.zeros(1)).any()  # not 0 / 0


def test_4_bit_floats():
    """The nearest of the sixteen numbers times a scale of 8 bits for each 16, an odd end as well."""
    (x,) = draw((5, 40))
    x[1] *= 50
    out = as_nvfp4(x)
    for start in (0, 16, 32):
        part = x[:, start : start + 16]
        scale = nearest(part.abs().amax(-1, keepdim=True) / 6, e4m3())
        numbers = torch.tensor(sorted({s * f for s in (1, -1) for f in FP4})).double()
        assert_close(out[:, start : start + 16], nearest(part / scale, numbers) * scale, 1e-6)
    assert not as_nvfp4(torch.zeros(2, 5)).any() and as_nvfp4(torch.full((16,), 1e-9)).isfinite().all()
    x = torch.tensor([[6.0, -4, 3, 1.5, 0.5, 0, -0.5, 2]])
    assert torch.equal(as_nvfp4(x), x)


@given(st.booleans(), st.booleans(), st.booleans(), st.sampled_from([(3, 200), (150, 150), (5, 3)]))
def test_unrounded_is_attention(smooth_k, smooth_q, causal, sizes):
    Sq, Sk = sizes
    Q, K, V = draw((2, 2, Sq, 16), (2, 2, Sk, 16), (2, 2, Sk, 16))
    out = simulated_attention(Q, K + 3, V, causal, smooth_k=smooth_k, smooth_q=smooth_q)
    n_blind = max(Sq - Sk, 0) if causal else 0  # queries before the first key
    assert not out[:, :, :n_blind].any()
    assert_close(out[:, :, n_blind:], reference(Q, K + 3, V, causal)[0][:, :, n_blind:])


@pytest.mark.parametrize("by", ["tensor", "block", "thread", "token"])
def test_simulated_integers_are_integers(by):
    """The same as the products of real integers."""
    Q, K, V = draw((1, 2, 130, 16), (1, 2, 130, 16), (1, 2, 130, 16))
    out = simulated_attention(Q, K, V, qk=lambda x, keys: as_integers(x, 8, by, keys))
    assert_close(out, integer_attention(Q, K, V, by=by))


def test_order_of_the_errors():
    """On even numbers finer scales and more bits; where queries lean too, their mean has to go."""
    Q, K, V = draw((1, 4, 512, 64), (1, 4, 512, 64), (1, 4, 512, 64))
    lean = 20.0 * (torch.arange(64) % 10 == 0)

    def errors(Q, K):
        exact = reference(Q, K, V)[0]
        outs = {name: simulated_attention(Q, K, V, **settings) for name, settings in FORMATS.items()}
        return {name: (out - exact).abs().mean() for name, out in outs.items()}

    even, both = errors(Q, K), errors(Q + lean, K + lean)
    block, thread, smoothed, eight, four, floats = FORMATS
    assert even[eight] < even[thread] < even[block] and even[eight] < even[floats] < even[block]
    assert both[thread] > 2 * both[smoothed] and both[four] < 0.5 * both[thread]


def test_two_levels_of_the_weights_use_the_small_scales():
    """Weights far below 1 would meet scales that are 0; scaled by rows first they do not."""
    Q = torch.zeros(1, 1, 1, 16)
    K, V = draw((1, 1, 4096, 16), (1, 1, 4096, 16), dtype=torch.float32)
    out = simulated_attention(Q, K, V, False, pv="nvfp4")
    assert_close(out, as_nvfp4(V.mT).mT.mean(dim=2, keepdim=True), 1e-3)  # equal weights are exact
    weights = torch.full((1, 16), 1e-3)
    assert not as_nvfp4(weights).equal(weights)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_hold_16_bits_and_hidden_queries(name):
    for Q, K, V, expected in large_scores(torch.float16):
        out = simulated_attention(Q, K, V, **FORMATS[name])
        assert out.dtype == torch.float16 and (out - expected).abs().max() < 0.6
    Q, K, V = draw((1, 1, 4, 16), (1, 1, 2, 16), (1, 1, 2, 16))
    out = simulated_attention(Q, K, V, **FORMATS[name])
    assert out.isfinite().all() and not out[:, :, :2].any()
    assert F.cosine_similarity(out[:, :, 2:], reference(Q, K, V)[0][:, :, 2:], dim=-1).min() > 0.9


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("more/sage_formats.py", tmp_path, distilled_checkpoint)  # --quick
    names = [row["method"] for row in report["rows"]]
    assert names == ["textbook"] + [f"{name} (simulated)" for name in FORMATS]
    (errors,) = report["sweeps"].values()
    by_name = {line["format"]: line for line in errors}
    assert by_name["SageAttention2, 8 bits"]["random"] < by_name["4 bits by thread"]["random"]
    assert len(report["checks"]) == 12 and len(report["why"]) == 4
