"""FlashAttention's backward pass: against finite differences and PyTorch's gradients, and in memory."""

import inspect
import runpy
import sys

import pytest
import torch
from helpers import ROOT, assert_close, large_scores, run_script
from hypothesis import given
from hypothesis import strategies as st
from test_main_flash_attention import causal, draw, partly_visible, reference

import flash_attention_backward
import inference_utils as utils
import main_flash_attention
from flash_attention_backward import FlashAttention, flash_attention_recomputed
from main_flash_attention import flash_attention
from main_flash_decoding import merge_attention


def test_names_and_signatures():
    same = inspect.signature(flash_attention)
    assert inspect.signature(flash_attention_recomputed) == same
    assert issubclass(FlashAttention, torch.autograd.Function)
    assert flash_attention_backward.__doc__.startswith("FlashAttention")


@pytest.mark.parametrize("mask", [True, False, "partly"])
@pytest.mark.parametrize(("Sq", "Sk", "tiles"), [(5, 5, (2, 3)), (3, 7, (2, 2)), (4, 6, (64, 64))])
def test_gradcheck(Sq, Sk, tiles, mask):
    mask = partly_visible(Sq, Sk) if mask == "partly" else mask
    Q, K, V = draw((2, 1, Sq, 3), (2, 1, Sk, 3), (2, 1, Sk, 3), requires_grad=True)

    def function(Q, K, V):
        out, lse = flash_attention_recomputed(Q, K, V, mask, *tiles)
        return out, lse[lse.isfinite()]  # gradcheck cannot subtract infinities

    assert torch.autograd.gradcheck(function, (Q, K, V))


def test_gradients_equal_pytorchs():
    for seed, (Sq, Sk, mask) in enumerate(
        [(70, 70, causal(70, 70)), (33, 130, causal(33, 130)), (20, 50, partly_visible(20, 50))]
    ):
        Q, K, V = draw((2, 2, Sq, 16), (2, 2, Sk, 16), (2, 2, Sk, 16), seed=seed, requires_grad=True)
        grad = draw((2, 2, Sq, 16), seed=9)[0]
        ours = torch.autograd.grad(flash_attention_recomputed(Q, K, V, mask, 16, 32)[0], (Q, K, V), grad)
        theirs = torch.autograd.grad(reference(Q, K, V, mask)[0], (Q, K, V), grad)
        assert_close(ours, theirs)


def test_second_derivatives_are_refused():
    Q, K, V = draw(*[(1, 1, 3, 2)] * 3, requires_grad=True)
    (grad,) = torch.autograd.grad(flash_attention_recomputed(Q, K, V)[0].square().sum(), Q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_memory_is_linear_forward_and_backward():
    def peak_mb(n):
        Q, K, V = draw(*[(1, 1, n, 8)] * 3, dtype=torch.float32, requires_grad=True)
        return utils.peak_memory_mb(
            lambda: flash_attention_recomputed(Q, K, V, True, 32, 32)[0].sum().backward()
        )

    small, large = peak_mb(512), peak_mb(1024)
    assert large < 2.2 * small
    assert large < 0.1 * 1024**2 * 4 / 1e6  # far from one score matrix


def test_merging_has_the_gradient_of_the_whole():
    Q, K, V = draw((1, 2, 3, 4), (1, 2, 9, 4), (1, 2, 9, 4), requires_grad=True)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, :5] = False  # a query whose first part is empty
    mask[2] = False  # one without keys at all
    a = flash_attention_recomputed(Q, K[:, :, :5], V[:, :, :5], mask[:, :5], 2, 2)
    b = flash_attention_recomputed(Q, K[:, :, 5:], V[:, :, 5:], mask[:, 5:], 2, 2)
    merged = torch.autograd.grad(merge_attention(*a, *b)[0].square().sum(), (Q, K, V))
    whole = torch.autograd.grad(reference(Q, K, V, mask)[0].square().sum(), (Q, K, V))
    assert_close(merged, whole)


@given(st.data())
def test_results_and_gradients_are_those_of_flash_attention(data):
    Sk = data.draw(st.integers(1, 12))
    Sq = data.draw(st.integers(1, 12))
    tile_q, tile_k = data.draw(st.integers(1, 13)), data.draw(st.integers(1, 13))
    shape = data.draw(st.sampled_from([(2, 3, Sq, Sk), (3, Sq, Sk), (Sq, Sk), (Sk,), (Sq, 1), None]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    mask = True if shape is None else torch.rand(shape, generator=generator) < 0.6
    inputs = draw((2, 3, Sq, 4), (2, 3, Sk, 4), (2, 3, Sk, 4), requires_grad=True)
    results, gradients = [], []
    for form in (flash_attention_recomputed, flash_attention):
        out, lse = form(*inputs, mask, tile_q, tile_k)
        results.append((out, lse))
        loss = out.square().sum() + lse.masked_fill(lse.isinf(), 0.0).square().sum()
        gradients.append(torch.autograd.grad(loss, inputs))
    assert_close(*results)
    assert_close(*gradients)


def test_autocast_and_16_bits():
    Q, K, V = draw(*[(1, 2, 9, 8)] * 3, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = flash_attention_recomputed(Q, K, V, True, 4, 4)
    grads = torch.autograd.grad(out.float().square().sum(), (Q, K, V))
    exact = [t.detach().float().requires_grad_() for t in (Q, K, V)]
    expected = torch.autograd.grad(reference(*exact, causal(9, 9))[0].square().sum(), exact)
    assert all(g.dtype == torch.bfloat16 for g in grads)
    assert_close(grads, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_larger_than_16_bits_hold(dtype):
    for Q, K, V, expected in large_scores(dtype):
        inputs = [t.requires_grad_() for t in (Q, K, V)]
        exact = [t.detach().double().requires_grad_() for t in inputs]
        wanted = torch.autograd.grad(reference(*exact, causal(2, 2))[0].sum(), exact)
        for tiles in [(1, 1), (64, 64)]:
            out, _ = flash_attention_recomputed(*inputs, True, *tiles)
            assert_close(out, expected)
            assert_close(torch.autograd.grad(out.double().sum(), inputs), wanted)


def test_backward_inside_autocast():
    """It adds up in one type there as well."""
    inputs = draw(*[(1, 2, 9, 8)] * 3, dtype=torch.float32, requires_grad=True)
    out, _ = flash_attention_recomputed(*inputs, True, 4, 4)
    plain = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(out.square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_queries_without_keys():
    """Five queries on three keys: the first two see none, their output and gradient are zero."""
    inputs = draw((1, 2, 5, 4), (1, 2, 3, 4), (1, 2, 3, 4), requires_grad=True)
    out, lse = flash_attention_recomputed(*inputs, True, 2, 2)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    assert (out[:, :, :2] == 0).all() and (lse[:, :, :2] == -torch.inf).all()
    assert (grads[0][:, :, :2] == 0).all() and all(g.isfinite().all() for g in grads)
    seen = [inputs[0][:, :, 2:], *inputs[1:]]
    wanted = torch.autograd.grad(reference(*seen, causal(3, 3))[0].square().sum(), inputs)
    assert_close(grads, wanted)


def test_keeps_no_tile():
    """What waits for the backward pass is linear: inputs, output, one number a query."""
    Q, K, V = draw(*[(1, 1, 64, 4)] * 3, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        flash_attention_recomputed(Q, K, V, True, 8, 8)
    assert sorted(kept) == [64, 256, 256, 256, 256]


def test_bad_input():
    Q, K, V = draw(*[(1, 2, 5, 4)] * 3)
    with pytest.raises(ValueError, match="at least 1 query and 1 key"):
        flash_attention_recomputed(Q, K, V, True, 0, 4)
    with pytest.raises(ValueError, match="must be boolean"):
        flash_attention_recomputed(Q, K, V, torch.zeros(5, 5))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda(dtype):
    Q, K, V = (t.cuda().to(dtype).requires_grad_() for t in draw(*[(2, 2, 300, 64)] * 3))
    out, _ = flash_attention_recomputed(Q, K, V, True, 128, 128)
    grads = torch.autograd.grad(out.float().square().sum(), (Q, K, V))
    exact = [t.detach().double().requires_grad_() for t in (Q, K, V)]
    out = reference(*exact, causal(300, 300).cuda())[0]
    expected = torch.autograd.grad(out.square().sum(), exact)
    for ours, theirs in zip(grads, expected, strict=True):
        assert_close(ours.float(), theirs.float(), 1e-4 if dtype == torch.float32 else 5e-2)


@pytest.mark.slow
def test_script(tmp_path):
    figure = tmp_path / "figure.png"
    arguments = ("--quick", "--json", "-", "--plot", figure)
    run = run_script("more/flash_attention_backward.py", *arguments, cwd=tmp_path)
    assert run.status == 0, run.stderr
    report = run.json
    assert report["checks"] and all(report["checks"].values())
    textbook, fused = report["rows"]
    assert fused["peak_memory_mb"] < textbook["peak_memory_mb"] and fused["same_output"]
    times, peaks = report["sweeps"].values()
    assert [row["tokens"] for row in times] == [256, 512, 1024]
    half, largest = peaks[-2:]
    assert largest["from scratch"] < largest["recorded tiles"] < largest["textbook"]
    assert largest["textbook"] > 3 * half["textbook"]
    for form in ("from scratch", "SDPA"):  # linear in the length
        assert largest[form] < largest["textbook"] / 3 and largest[form] < 2.5 * half[form]
    assert figure.stat().st_size > 1000 and len(report["why"]) == 4


@pytest.mark.slow
def test_script_in_16_bits_passes_and_finds_a_wrong_gradient(distilled_checkpoint, monkeypatch, capsys):
    """The values are right, GPTlite's gradient is 1% off: that check fails, all the others pass."""
    right = main_flash_attention.MultiHeadAttention_SDPA.forward

    def wrong(self, x, causal_mask=True):
        out = right(self, x, causal_mask)
        return out + 0.01 * (out - out.detach())

    monkeypatch.setattr(main_flash_attention.MultiHeadAttention_SDPA, "forward", wrong)
    script = str(ROOT / "more" / "flash_attention_backward.py")
    args = [
        "--quick",
        "--max-tokens",
        "512",
        "--dtype",
        "bfloat16",
        "--checkpoint",
        str(distilled_checkpoint),
    ]
    monkeypatch.setattr(sys, "argv", [script, *args])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    page, errors = capsys.readouterr()
    assert end.value.code == 1, errors
    failed = [line for line in page.splitlines() if "FAILED" in line]
    assert len(failed) == 1 and "GPTlite's gradient" in failed[0], page


def test_script_refuses_bad_input():
    run = run_script("more/flash_attention_backward.py", "--tile", 0)
    assert run.status == 2 and "not a number from 1 up" in run.stderr
