"""FlashAttention's kernels: each that runs here gives textbook attention, and the tiles are counted right."""

import pytest
import torch
from helpers import assert_close, run_script
from test_flash_attention import draw
from torch.nn.attention import SDPBackend

from gptlite import scaled_dot_product_attention
from main_flash_attention_kernels import flex_causal, sdpa, tile_counts


def test_tile_counts():
    assert tile_counts(256, 64) == (10, 16) and tile_counts(1000, 64) == (136, 256)
    assert tile_counts(5, 8) == (1, 1) and tile_counts(9, 1) == (45, 81)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_backends_of_the_cpu(backend):
    Q, K, V = draw(*[(2, 2, 9, 8)] * 3, dtype=torch.float32)
    assert_close(sdpa(Q, K, V, backend), scaled_dot_product_attention(Q, K, V), 1e-6)


def test_a_backend_that_cannot_raises():
    Q, K, V = draw(*[(2, 2, 9, 8)] * 3, dtype=torch.float32)
    with pytest.raises(RuntimeError):
        sdpa(Q, K, V, SDPBackend.CUDNN_ATTENTION)


def test_flex_attention_uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    Q, K, V = draw(*[(1, 2, 300, 16)] * 3, dtype=torch.float32)
    with pytest.warns(UserWarning):
        out = flex_causal(300, torch.device("cpu"))(Q, K, V)
    assert_close(out, scaled_dot_product_attention(Q, K, V), 1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_backends_of_cuda(name):
    Q, K, V = (t.cuda().half() for t in draw(*[(2, 2, 300, 64)] * 3))
    try:
        out = sdpa(Q, K, V, getattr(SDPBackend, name))
    except RuntimeError:
        pytest.skip(f"{name} does not run on this GPU")
    assert_close(out.float(), scaled_dot_product_attention(Q.float(), K.float(), V.float()), 1e-2)


def test_script(checkpoint):
    arguments = ("--quick", "--repeats", 1, "--batch-size", 2, "--json", "-")
    run = run_script("main_flash_attention_kernels.py", *arguments, checkpoint=checkpoint)
    assert run.status == 0, run.stderr
    report = run.json
    assert report["checks"] and all(report["checks"].values())
    assert [row["method"] for row in report["rows"]][:3] == ["textbook", "from scratch", "SDPA"]
    tiles, kernels = report["sweeps"].values()
    assert all(row["tiles computed"] < row["of"] for row in tiles)
    longest = {row["form"]: row["peak MB"] for row in kernels if row["tokens"] == 512}
    assert longest["SDPA"] < longest["textbook"] and len(report["why"]) >= 2


def test_script_refuses_bad_input(checkpoint):
    run = run_script("main_flash_attention_kernels.py", "--batch-size", 0, checkpoint=checkpoint)
    assert run.status == 2 and "not a number from 1 up" in run.stderr
