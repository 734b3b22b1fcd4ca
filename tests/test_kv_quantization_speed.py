"""Attention over a quantised cache by sums equals unpacking it first, and that is attention."""

import os

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, large_scores, quick_report, run_script
from hypothesis import given
from hypothesis import strategies as st
from test_main_kv_quantization import draw, value_of

import kv_quantization_speed
from kv_quantization_speed import fastest_form, packed_cache, quantized_attention, unpacked_attention
from main_kv_quantization import quantize


@given(
    st.integers(1, 3),
    st.integers(2, 5),
    st.integers(0, 4),
    st.sampled_from([(8, 8), (4, 4), (2, 2)]),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_equals_pytorch_on_rounded_keys_and_values(n_groups, group, residual, bits, D, seed):
    S = n_groups * group + residual
    q, K, V = draw((2, 3, 1, D), (2, 3, S, D), (2, 3, S, D), seed=seed)
    k, v = K.clone(), V.clone()
    for start in range(0, n_groups * group, group):
        part = slice(start, start + group)
        k[:, :, part] = value_of(quantize(K[:, :, part], bits[0], 2))
        v[:, :, part] = value_of(quantize(V[:, :, part], bits[1], 3))
    packed = packed_cache(K, V, bits[0], group, residual)
    expected = F.scaled_dot_product_attention(q, k, v)
    for form in (unpacked_attention, quantized_attention):
        assert_close(form(q, *packed, *bits), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_larger_than_16_bits_hold(dtype):
    for Q, K, V, expected in large_scores(dtype):
        packed = packed_cache(K, V, 8, 2, 0)
        for form in (unpacked_attention, quantized_attention):
            out = form(Q[:, :, 1:], *packed, 8, 8)
            assert out.dtype == dtype
            assert_close(out, expected[:, :, 1:], 0.05)


def test_no_whole_groups():
    K, V = draw((1, 1, 10, 4), (1, 1, 10, 4))
    for residual in (10, 1):
        with pytest.raises(ValueError, match="no groups of 4"):
            packed_cache(K, V, 8, 4, residual)


def test_what_is_compiled_where(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: ("compiled", function))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert fastest_form(torch.device("cpu")) == ("not compiled", quantized_attention)
    assert fastest_form(torch.device("cuda"))[0] == "compiled"
    assert fastest_form(torch.device("cuda"), may_compile=False)[0] == "not compiled"
    monkeypatch.setattr(kv_quantization_speed.shutil, "which", lambda name: os.sep + name)
    assert fastest_form(torch.device("cpu"))[0] == "compiled"


@pytest.mark.slow
@pytest.mark.skipif(not kv_quantization_speed.shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled():
    q, K, V = draw((1, 2, 1, 64), (1, 2, 160, 64), (1, 2, 160, 64), dtype=torch.float32)
    _, fused = fastest_form(torch.device("cpu"))
    packed = packed_cache(K, V, 2)
    assert_close(fused(q, *packed, 2, 2), quantized_attention(q, *packed, 2, 2))


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("more/kv_quantization_speed.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    assert [*rows][:2] == ["dense, 4096 keys", "SDPA, 4096 keys"] and len(rows) == 6
    assert rows["dense, 4096 keys"]["number_bits"] == 32
    eight, two = (rows[f"{b} bits, not compiled, 4096 keys"] for b in (8, 2))
    assert two["cache_mb"] < eight["cache_mb"] < rows["dense, 4096 keys"]["cache_mb"] / 3
    assert 2 < two["number_bits"] < 3.3 and len(report["checks"]) == 2 and len(report["why"]) == 4
    (times,) = report["sweeps"].values()
    assert [line["keys"] for line in times] == [1024, 4096]


def test_script_refuses_bad_input():
    run = run_script("more/kv_quantization_speed.py", "--bits", "3")
    assert run.status == 2 and "invalid choice" in run.stderr
