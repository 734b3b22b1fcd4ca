"""The roofline: counts against PyTorch's, the roof, and where the curves cross."""

import pytest
import torch
from helpers import assert_close, run_script
from torch.nn.attention import SDPBackend, sdpa_kernel

from inference_cost import Ceilings, Cost
from main_roofline import (
    attainable,
    counted_flops,
    crossover,
    intensity,
    layer_flops,
    layer_parts,
    under_the_roof,
)


@pytest.mark.parametrize("d_model, n_heads, n_tokens", [(32, 2, 8), (48, 3, 100)])
def test_operations_of_a_layer_are_those_that_are_counted(d_model, n_heads, n_tokens):
    parts = layer_parts(d_model, n_heads, n_tokens, dtype=torch.float64)
    for part, flops in layer_flops(d_model, n_tokens).items():
        # as single products: the fused attention of a CPU is not counted
        with sdpa_kernel(SDPBackend.MATH):
            assert counted_flops(parts[part]) == n_tokens * flops


def test_parts_have_the_shapes_of_a_layer():
    parts = layer_parts(32, 2, 5, dtype=torch.float64)
    assert [out.shape for out in parts["projections"]()] == [(5, 32)] * 4
    assert parts["MLP"]().shape == (5, 32)
    assert parts["attention"]().shape == (1, 2, 5, 16)


def test_roof():
    machine = Ceilings(flops_per_s=100.0, bytes_per_s=10.0)
    assert intensity(Cost(30, 10)) == 3.0
    assert [attainable(x, machine) for x in (0.1, 5.0, 10.0, 20.0)] == [1.0, 50.0, 100.0, 100.0]


def test_a_step_under_the_roof():
    machine = Ceilings(flops_per_s=100e9, bytes_per_s=10e9)
    step = under_the_roof(Cost(2e9, 4e7), 40.0, machine)
    assert step["limit"] == "computing" and step["least_ms"] == pytest.approx(20)
    assert step["share"] == pytest.approx(0.5) and step["gflop_per_s"] == pytest.approx(50)
    assert step["intensity"] == 50 and (step["gflop"], step["n_mb"]) == (2, 40)
    other = under_the_roof(Cost(1e7, 4e7), 8.0, machine)
    assert other["limit"] == "reading" and other["share"] == pytest.approx(0.5)


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


def test_script(tmp_path):
    figure = tmp_path / "roofline.png"
    options = ("--quick", "--json", "-", "--plot", figure, "--ceilings", "500", "4800")
    run = run_script("main_roofline.py", *options)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert report["checks"]
    assert all(report["checks"].values())
    assert len(report["why"]) == 4
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
        assert (row["ttft_ms"] is None) == row["method"].startswith("decode")
    times, overtakes, shares = report["sweeps"].values()
    assert [row["tokens"] for row in times] == [256, 512, 1024, 2048]
    assert overtakes[0] == {"by": "operations", "tokens": 6 * 192}  # of the distilled model
    assert [row["KV MB"] / shares[0]["KV MB"] for row in shares] == [1, 8, 64]
    assert figure.stat().st_size > 1000


@pytest.mark.slow
def test_no_predictions_without_ceilings_of_another_machine():
    options = ("--quick", "--batches", 2, "--prompts", 3, "--max-tokens", 512, "--json", "-")
    run = run_script("main_roofline.py", *options)
    assert run.status == 0, run.stderr + run.stdout
    names = [row["method"] for row in run.json["rows"]]
    assert names == ["prefill, 3 tokens", "decode, batch 1", "decode, batch 2"]  # one to compare with
    assert all(row["predicted_ms"] is None for row in run.json["rows"]) and "predicted ms" not in run.stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--context", "256"),
        ("--prompts", "4", "257"),
        ("--ceilings", "0", "1"),
        ("--ceilings", "nan", "1"),
        ("--ceilings", "1", "inf"),
    ],
)
def test_bad_input(options):
    run = run_script("main_roofline.py", *options)
    assert run.status == 2
    assert options[0] in run.stderr
    assert "Traceback" not in run.stderr
