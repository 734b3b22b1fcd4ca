"""The kernels in Triton, interpreted on a CPU and compiled on CUDA: against float64, at any lengths."""

import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, assert_close, large_scores, run_script
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attention_triton import check_inputs, check_triton, flash_attention_triton, flash_decoding_triton
from gptlite_kvcache import window_mask

try:
    check_triton()
    MISSING = ""
except ModuleNotFoundError as error:
    MISSING = str(error)
needs_triton = pytest.mark.skipif(bool(MISSING), reason=MISSING)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for s in shapes]


def reference(Q, K, V, causal=True):
    """Attention and log-sum-exp in float64 by PyTorch, on the CPU."""
    Q, K, V = (t.double().cpu() for t in (Q, K, V))
    Sq, Sk = Q.shape[-2], K.shape[-2]
    mask = window_mask(Sq, Sk, Sk) if causal else torch.ones(Sq, Sk, dtype=torch.bool)
    scores = (Q @ K.mT / math.sqrt(Q.shape[-1])).masked_fill(~mask, -math.inf)
    return F.scaled_dot_product_attention(Q, K, V, attn_mask=mask), scores.logsumexp(-1)


def assert_equals_reference(Q, K, V, causal=True, tolerance=5e-6, **tiles):
    out, lse = flash_attention_triton(Q, K, V, causal, **tiles)
    exact, exact_lse = reference(Q, K, V, causal)
    assert out.dtype == Q.dtype and out.shape == Q.shape and lse.dtype == torch.float32
    blind = exact_lse == -math.inf  # queries without keys
    assert not out.cpu()[blind].any() and (lse.cpu()[blind] == -math.inf).all()
    assert_close(out.cpu().double()[~blind], exact[~blind], tolerance)
    assert_close(lse.cpu().double()[~blind], exact_lse[~blind], max(1e-5, tolerance))


@needs_triton
@settings(max_examples=12)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([1, 5, 16, 24]),
    st.booleans(),
    st.sampled_from([(16, 16), (32, 16), (16, 32)]),
    st.integers(0, 99),
)
def test_equals_float64(Sq, Sk, D, causal, tiles, seed):
    """Lengths and widths that no tile divides, more queries than keys and fewer."""
    Q, K, V = draw((2, 2, Sq, D), (2, 2, Sk, D), (2, 2, Sk, D), seed=seed)
    assert_equals_reference(Q, K, V, causal, tile_q=tiles[0], tile_k=tiles[1])


@needs_triton
@pytest.mark.parametrize("n", [64, 65, 100])
def test_gptlites_heads(n):
    Q, K, V = draw(*[(1, 2, n, 64)] * 3)
    assert_equals_reference(Q, K, V)


TYPES_16 = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.cuda)]


@needs_triton
@pytest.mark.parametrize("dtype", TYPES_16)
def test_16_bits(dtype):
    tolerance = 4 * torch.finfo(dtype).eps
    Q, K, V = draw(*[(1, 2, 33, 16)] * 3, dtype=dtype)
    assert_equals_reference(Q, K, V, tolerance=tolerance, tile_q=16, tile_k=16)
    out = flash_decoding_triton(Q[:, :, -1:], K, V, 2, 16)
    assert out.dtype == dtype
    assert_close(out.cpu().double(), reference(Q[:, :, -1:], K, V)[0], tolerance)


@needs_triton
@pytest.mark.parametrize("dtype", TYPES_16)
def test_scores_larger_than_16_bits_hold(dtype):
    for Q, K, V, expected in large_scores(dtype):
        Q, K, V = (t.to(DEVICE) for t in (Q, K, V))
        assert_close(flash_attention_triton(Q, K, V, tile_q=16, tile_k=16)[0].cpu(), expected)
        assert_close(flash_decoding_triton(Q[:, :, 1:], K, V, 2, 16).cpu(), expected[:, :, 1:])


@needs_triton
def test_a_key_that_is_hidden_cannot_win():
    """FA-1: scores far below any finite fill, and leading tiles that are masked in full."""
    Q = torch.full((1, 1, 2, 1), -30000.0, device=DEVICE)
    K, V = (torch.tensor(t, device=DEVICE).view(1, 1, 2, 1) for t in ([1.0, 0.0], [1.0, 7.0]))
    out, _ = flash_attention_triton(Q, K, V, tile_q=16, tile_k=16)
    assert out[0, 0, 0, 0].item() == 1.0 and out[0, 0, 1, 0].item() == 7.0
    Q, K, V = draw((1, 1, 40, 16), (1, 1, 3, 16), (1, 1, 3, 16))  # the first 37 queries see nothing
    assert_equals_reference(Q, K, V, tile_q=16, tile_k=16)


@needs_triton
def test_later_tokens_change_nothing_before_them():
    Q, K, V = draw(*[(1, 1, 40, 16)] * 3)
    before, _ = flash_attention_triton(Q, K, V, tile_q=16, tile_k=16)
    K[:, :, 39], V[:, :, 39] = 100.0, float("nan")
    after, _ = flash_attention_triton(Q, K, V, tile_q=16, tile_k=16)
    assert torch.equal(before[:, :, :32], after[:, :, :32])
    assert_close(after[:, :, 32:39].nan_to_num(0.0).cpu() * 0, torch.zeros(1, 1, 7, 16))


@needs_triton
@settings(max_examples=12)
@given(st.integers(1, 90), st.integers(1, 9), st.sampled_from([1, 5, 16]), st.integers(0, 99))
def test_a_step_in_any_splits(Sk, n_splits, D, seed):
    q, K, V = draw((2, 2, 1, D), (2, 2, Sk, D), (2, 2, Sk, D), seed=seed)
    out = flash_decoding_triton(q, K, V, n_splits, tile_k=16)
    assert_close(out.cpu().double(), reference(q, K, V)[0], 5e-6)


@needs_triton
def test_without_keys():
    q, K, V = draw((1, 2, 1, 16), (1, 2, 0, 16), (1, 2, 0, 16))
    assert not flash_decoding_triton(q, K, V).any()
    out, lse = flash_attention_triton(q, K, V)
    assert not out.any() and (lse == -math.inf).all()


@needs_triton
def test_inputs_that_are_not_contiguous():
    Q, K, V = (t.transpose(1, 2) for t in draw(*[(1, 20, 2, 16)] * 3))
    assert_equals_reference(Q, K, V, tile_q=16, tile_k=16)


def test_bad_inputs():
    Q, K, V = draw((1, 2, 5, 16), (1, 2, 5, 16), (1, 2, 6, 16))
    with pytest.raises(ValueError, match="Q, K, V must be"):
        check_inputs(Q, K, V)
    with pytest.raises(ValueError, match="16 or 32 bits"):
        check_inputs(*(t.double() for t in (Q, K, K)))
    with pytest.raises(ValueError, match="of one type"):
        check_inputs(Q, K.half(), K.half())
    with pytest.raises(ValueError, match="interpreter has no bfloat16"):
        check_inputs(*(t.cpu().bfloat16() for t in (Q, K, K)))
    if not MISSING:
        with pytest.raises(ValueError, match="one query per sequence"):
            flash_decoding_triton(Q, K, K)
        with pytest.raises(ValueError, match="one query per sequence"):
            flash_decoding_triton(Q[:, :, :1], K, K, 0)


# The script


@needs_triton
def test_script(distilled_checkpoint, tmp_path):
    run = run_script(
        "more/flash_attention_triton.py",
        "--quick",
        "--json",
        "-",
        cwd=tmp_path,
        checkpoint=distilled_checkpoint,
    )
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert len(report["checks"]) == 8 and all(report["checks"].values())
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["prompt: textbook"]["baseline"] and rows["prompt: Triton"]["error"] < 1e-5
    assert rows["step: Triton, split"]["error"] < 1e-5
    if DEVICE == "cpu":  # no times of the interpreter
        assert len(report["sweeps"]) == 1 and len(report["why"]) == 2


def test_script_without_triton(distilled_checkpoint, tmp_path):
    """One line that says what is missing, status 2; --help works all the same."""
    (tmp_path / "triton.py").write_text("raise ImportError('as if it was not there')")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "more" / "flash_attention_triton.py")]
    runs = []
    for options in (["--quick", "--checkpoint", str(distilled_checkpoint)], ["--help"]):
        env = os.environ | {"PYTHONPATH": paths}
        runs.append(subprocess.run([*command, *options], env=env, capture_output=True, text=True))
    assert [run.returncode for run in runs] == [2, 0] and "Triton" in runs[1].stdout
    assert runs[0].stderr.count("\n") == 1 and "python -m pip install triton" in runs[0].stderr
