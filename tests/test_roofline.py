"""The roofline: counts against PyTorch's, the roof, and where the curves cross."""

import pytest
import torch
from helpers import assert_close, run_script
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from inference_report import Ceilings, Cost
from main_roofline import attainable, crossover, intensity, layer_flops, layer_parts


@pytest.mark.parametrize("d_model, n_heads, n_tokens", [(32, 2, 8), (48, 3, 100)])
def test_operations_of_a_layer_are_those_that_are_counted(d_model, n_heads, n_tokens):
    parts = layer_parts(d_model, n_heads, n_tokens, dtype=torch.float64)
    for part, flops in layer_flops(d_model, n_tokens).items():
        # as single products: the fused attention of a CPU is not counted
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            parts[part]()
        assert counter.get_total_flops() == n_tokens * flops


def test_parts_have_the_shapes_of_a_layer():
    parts = layer_parts(32, 2, 5, dtype=torch.float64)
    assert [out.shape for out in parts["projections"]()] == [(5, 32)] * 4
    assert parts["MLP"]().shape == (5, 32)
    assert parts["attention"]().shape == (1, 2, 5, 16)


def test_roof():
    machine = Ceilings(flops_per_s=100.0, bytes_per_s=10.0)
    assert intensity(Cost(30, 10)) == 3.0
    assert [attainable(x, machine) for x in (0.1, 5.0, 10.0, 20.0)] == [1.0, 50.0, 100.0, 100.0]


def test_crossover():
    sizes = [1, 2, 4, 8]
    assert crossover(sizes, [3.0] * 4, [1.0, 2.0, 4.0, 8.0]) == pytest.approx(3.0)
    assert crossover(sizes, [4.0] * 4, [1.0, 2.0, 4.0, 8.0]) == pytest.approx(4.0)
    assert crossover(sizes, [1.0] * 4, [2.0] * 4) == 1
    assert crossover(sizes, [2.0] * 4, [1.0] * 4) is None
    # a curve that noise makes cross twice has overtaken when it stays above
    assert crossover(sizes, [2.0] * 4, [1.0, 3.0, 1.0, 4.0]) == pytest.approx(4 * 2**0.5)
    by_formula = [layer_flops(384, n) for n in (256, 1024, 4096)]
    others, attention = zip(*((f["projections"] + f["MLP"], f["attention"]) for f in by_formula), strict=True)
    assert_close(crossover([256, 1024, 4096], others, attention), 6.0 * 384)


def test_script(checkpoint, tmp_path):
    figure = tmp_path / "roofline.png"
    options = ("--quick", "--json", "-", "--plot", figure, "--ceilings", "500", "4800")
    run = run_script("main_roofline.py", *options, checkpoint=checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert report["checks"]
    assert all(report["checks"].values())
    assert len(report["why"]) >= 5
    rows = report["rows"]
    prefill = [row["intensity"] for row in rows if row["method"].startswith("prefill")]
    decode = [row["intensity"] for row in rows if row["method"].startswith("decode")]
    assert prefill == sorted(prefill)
    assert decode == sorted(decode)
    assert prefill[0] == pytest.approx(0.5, rel=0.05)  # two operations for each weight of four bytes
    assert decode[-1] < 16  # each sequence reads its own cache: not 64 times one's
    assert prefill[-1] > 4 * decode[-1]
    for row in rows:
        assert row["predicted_ms"] == pytest.approx(
            1e3 * max(row["gflop"] * 1e9 / 500e12, row["n_mb"] * 1e6 / 4800e9)
        )
    shares = [row["of the operations"] for row in next(iter(report["sweeps"].values()))]
    assert shares == sorted(shares)
    assert shares[0] < 0.5 < shares[-1]
    assert figure.stat().st_size > 1000


@pytest.mark.parametrize(
    "options",
    [("--context", "256"), ("--ceilings", "0", "1"), ("--ceilings", "nan", "1"), ("--ceilings", "1", "inf")],
)
def test_bad_input(checkpoint, options):
    run = run_script("main_roofline.py", *options, checkpoint=checkpoint)
    assert run.status == 2
    assert options[0] in run.stderr
    assert "Traceback" not in run.stderr
