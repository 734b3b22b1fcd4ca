"""FlashAttention's kernels: each that runs here gives textbook attention, and the tiles are counted right."""

import pytest
import torch
from helpers import assert_close, run_script
from test_main_flash_attention import draw
from torch.nn.attention import SDPBackend

from flash_attention_kernels import flex_causal, kernels, sdpa
from gptlite import scaled_dot_product_attention


def test_kernels_of_a_device():
    assert [*kernels(64, torch.device("cpu"), compiled=False)] == ["SDPA"]
    assert [*kernels(64, torch.device("mps"))] == ["SDPA"]
    on_cuda = [*kernels(64, torch.device("cuda"), compiled=False)]
    assert on_cuda[0] == "SDPA" and len(on_cuda) == 5 and "SDPA flash_attention" in on_cuda


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_backends_of_the_cpu(backend):
    Q, K, V = draw(*[(2, 2, 9, 8)] * 3, dtype=torch.float32)
    assert_close(sdpa(Q, K, V, backend), scaled_dot_product_attention(Q, K, V), 1e-6)


def test_a_backend_that_cannot_raises():
    Q, K, V = draw(*[(2, 2, 9, 8)] * 3, dtype=torch.float32)
    with pytest.raises(RuntimeError):
        sdpa(Q, K, V, SDPBackend.CUDNN_ATTENTION)


@pytest.mark.filterwarnings("ignore::UserWarning")  # that it is not compiled, once a process
def test_flex_attention_uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    Q, K, V = draw(*[(1, 2, 300, 16)] * 3, dtype=torch.float32)
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


@pytest.mark.slow
def test_script(tmp_path):
    run = run_script("more/flash_attention_kernels.py", "--quick", "--json", "-", cwd=tmp_path)
    assert run.status == 0, run.stderr
    report = run.json
    assert report["checks"] and all(report["checks"].values())
    names = [row["method"] for row in report["rows"]]
    assert names[:3] == ["textbook, 2 x 256", "from scratch, 2 x 256", "SDPA, 2 x 256"]
    (tiles,) = report["sweeps"].values()
    shares = [row["scores computed (%)"] for row in tiles]
    assert shares == sorted(shares) and 50 < shares[0] and shares[-1] <= 100
    long = {row["method"]: row["peak_memory_mb"] for row in report["rows"][3:]}
    assert long["SDPA, 1 x 512"] < long["textbook, 1 x 512"] and len(report["why"]) == 3


def test_script_refuses_bad_input():
    run = run_script("more/flash_attention_kernels.py", "--batch-size", 0)
    assert run.status == 2 and "not a number from 1 up" in run.stderr
