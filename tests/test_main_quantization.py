"""main_quantization.py: grids and codes against torch's own quantiser, whole models, and the script."""

import copy

import pytest
import torch
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gptlite import GPTlite
from gptlite_compiled import CompiledStep
from gptlite_gqa import GPTlite_GQA
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from inference_utils import GPTLITE_DISTILLED_CKPT_PATH, weight_bytes
from linear_packed import pack_linears
from main_kvcache import generate_kvcache, generate_static
from main_pruning import prune
from main_quantization import (
    QUANTIZED,
    LinearInt4,
    LinearInt8,
    bits_per_weight,
    dequantize,
    grid_of,
    quantize_model,
    round_to,
    use_fast_forms,
)


def matrix(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rounded(weight, n_bits, group=None, symmetric=True):
    grid = grid_of(weight, n_bits, group, symmetric)
    codes = round_to(weight, grid, n_bits)
    return codes, grid, dequantize(codes, grid)


@given(
    n_bits=st.integers(2, 8),
    group=st.sampled_from([1, 2, 4, 12]),
    symmetric=st.booleans(),
    seed=st.integers(0, 99),
    shift=st.sampled_from([0.0, 3.0, -100.0]),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_no_weight_is_further_than_half_a_step(n_bits, group, symmetric, seed, shift, scale):
    weight = scale * (matrix(3, 12, seed=seed) + shift)
    codes, grid, dense = rounded(weight, n_bits, group, symmetric)
    assert codes.dtype == torch.int8 and grid.scale.shape == (3, 12 // group)
    assert codes.min().item() >= -(2 ** (n_bits - 1)) + symmetric and codes.max().item() < 2 ** (n_bits - 1)
    half_step = grid.scale.double().repeat_interleave(group, dim=1) / 2
    error = (dense.double() - weight).abs()
    assert (error <= half_step * (1 + 1e-6) + 1e-6 * weight.abs()).all()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls its own quantiser deprecated
@pytest.mark.parametrize("n_in", [7, 64])
def test_codes_are_those_of_torchs_quantiser(n_in):
    weight = matrix(5, n_in, dtype=torch.float32)
    codes, grid, dense = rounded(weight, 8)
    scale = grid.scale[:, 0].float()
    zeros = torch.zeros(5, dtype=torch.int64)
    theirs = torch.fake_quantize_per_channel_affine(weight, scale, zeros.int(), 0, -127, 127)
    assert_close(dense, theirs, 1e-6)
    if hasattr(torch, "quantize_per_channel"):
        assert torch.equal(torch.quantize_per_channel(weight, scale, zeros, 0, torch.qint8).int_repr(), codes)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("n_bits", [2, 4, 8])
def test_rows_of_nothing_of_almost_nothing_and_of_an_outlier(n_bits, symmetric):
    """Case N-39."""
    weight = matrix(4, 8).half()
    weight[0], weight[1] = 0, torch.full((8,), 1e-9).half()  # 0 in 16 bits
    weight[2, 3] = 1e4
    dense = rounded(weight, n_bits, 8, symmetric)[2]
    assert dense.isfinite().all() and not dense[:2].any()
    assert abs(dense[2, 3] - 1e4) <= 1e4 / 2 ** (n_bits - 1)
    layer = nn.Linear(8, 4).half()
    layer.weight.data = weight
    for quantised in (LinearInt8(layer), LinearInt4(layer, 4)):
        assert quantised(torch.ones(2, 8).half()).isfinite().all()


@pytest.mark.parametrize("n_bits, group", [(1, 4), (9, 4), (4, 5), (4, 13)])
def test_bad_grids_are_refused(n_bits, group):
    with pytest.raises(ValueError, match="2 to 8, and whole groups"):
        grid_of(matrix(3, 12), n_bits, group)


def test_finer_grids_are_closer():
    weight = matrix(16, 256)
    errors = [
        (rounded(weight, *how)[2] - weight).square().mean().item()
        for how in ((8,), (4, 32, False), (4, 128, False), (4, 128), (4, None), (3, 128), (2, 128))
    ]
    assert errors == sorted(errors)


# ---- Models ----


def quantised_layers(model):
    return [module for module in model.modules() if isinstance(module, QUANTIZED)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n_bits", [8, 4])
def test_every_linear_layer_is_replaced(n_bits, packed):
    """Case N-38: layers are not found by their exact class, and the model is as small as its integers are."""
    model = tiny_model(GPTlite_KVCache, dtype=torch.float32)
    n = sum(isinstance(module, nn.Linear) for module in model.modules())
    untouched = copy.deepcopy(model.state_dict())
    small = quantize_model(pack_linears(model) if packed else model, n_bits, 16)
    assert len(quantised_layers(small)) == n == 13
    assert not any(isinstance(module, nn.Linear) for module in small.modules())
    n_weights = sum(layer.dense().numel() for layer in quantised_layers(small))
    n_head = small.fc_out.weight.numel()
    codes = n_weights if n_bits == 8 else (n_weights - n_head) // 2 + n_head
    scales = sum(2 * layer.scale.numel() * (1 + hasattr(layer, "zero")) for layer in quantised_layers(small))
    assert weight_bytes(small) == weight_bytes(tiny_model(GPTlite, dtype=torch.float32)) - (
        4 * n_weights - codes - scales
    )
    assert_close(bits_per_weight(small), 8 * (codes + scales) / n_weights, 1e-9)
    assert all(torch.equal(t, untouched[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("n_bits", [8, 4])
def test_models_of_other_shapes(n_bits):
    """Case N-38 again: a pruned model, whose widths fit no kernel, and one of grouped queries."""
    torch.manual_seed(0)
    pruned = tiny_model(GPTlite, dtype=torch.float32)
    scores = [torch.rand(2) for _ in range(2)], [torch.rand(128) for _ in range(2)]
    prune(pruned, *scores, 1, 100)
    for model in (pruned, tiny_model(GPTlite_GQA, n_groups=1, dtype=torch.float32)):
        small = quantize_model(model, n_bits, 4)
        logits = small(random_tokens(2, 9))
        fast = use_fast_forms(small, 8)(random_tokens(2, 9))
        first = logits[0] if isinstance(logits, tuple) else logits
        assert_close(fast[0] if isinstance(fast, tuple) else fast, first, 0.3)
        assert not any(isinstance(module, nn.Linear) for module in small.modules())


@pytest.mark.parametrize("n_bits", [8, 4])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_step_of_integers_gives_the_tokens_of_dense_weights(n_bits, batch_size, monkeypatch):
    """In float64, where the sums are exact: whole texts, the step run as it is written."""
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    monkeypatch.delattr(torch, "_weight_int4pack_mm_for_cpu")
    model = tiny_model(GPTlite_StaticKVCache)
    small = quantize_model(model, n_bits, 8)
    dense = tiny_model(GPTlite_KVCache)
    for layer, other in zip(
        quantised_layers(small), [m for m in dense.modules() if isinstance(m, nn.Linear)], strict=True
    ):
        other.weight.data = layer.dense().double()
    prompt = random_tokens(batch_size, 5)
    expected = generate_kvcache(dense, prompt, 14, 16)
    fast = use_fast_forms(small, batch_size)
    step = CompiledStep(fast, batch_size, bucket=8, backend=None)
    buffers = StaticKVCache(fast, batch_size)
    assert torch.equal(generate_static(fast, prompt, 14, buffers, step), expected)
    assert torch.equal(generate_static(small, prompt, 14, buffers), expected)


@pytest.mark.parametrize("n_bits, batch_size", [(8, 1), (8, 3), (4, 1), (4, 3)])
def test_the_step_is_one_graph(n_bits, batch_size):
    """Traced, not translated to machine code: nothing in the layers breaks the graph, kernels included."""
    graphs = []
    model = use_fast_forms(
        quantize_model(tiny_model(GPTlite_StaticKVCache, dtype=torch.float32), n_bits, 32), batch_size
    )
    step = CompiledStep(model, batch_size, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    prompt, buffers = random_tokens(batch_size, 4), StaticKVCache(model, batch_size)
    output = generate_static(model, prompt, 5, buffers, step)
    assert len(graphs) == 1
    plain = CompiledStep(model, batch_size, backend=None)
    assert torch.equal(output, generate_static(model, prompt, 5, buffers, plain))
    names = {str(node.target) for node in graphs[0].graph.nodes}
    kernel = "_weight_int8pack_mm" if n_bits == 8 else "_weight_int4pack_mm_for_cpu"
    assert any(kernel in name for name in names) == (n_bits == 8 or batch_size > 1)


# ---- The script ----


def test_quick_run(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("what rounding costs needs trained weights")
    report = quick_report("main_quantization.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    names = ("float32, compiled", "int8, naive", "int8, compiled", "int4 g64, naive", "int4 g64, compiled")
    for batch in ("batch 1", "batch 2"):
        assert rows[f"float32, {batch}"]["baseline"]
        sizes = [rows[f"{name}, {batch}"]["weights_mb"] for name in names]
        assert sizes[0] > 3 * sizes[1] and sizes == sorted(sizes, reverse=True)
        assert rows[f"{names[0]}, {batch}"]["same_output"] and rows[f"{names[2]}, {batch}"]["approximate"]
        assert abs(rows[f"{names[2]}, {batch}"]["loss_difference"]) < 0.01
    kl = [rows[name]["kl"] for name in ("int8, compiled, batch 1", "int4 g32", "int4 g64, compiled, batch 1")]
    assert 0 < 10 * kl[0] < kl[1] < kl[2]
    assert rows["int8, naive, batch 1"]["kl"] < kl[0]  # the kernel also rounds the inputs
    assert [rows[n]["bits"] for n in ("int8, naive, batch 1", "int4 g32")] == pytest.approx(
        [8.06, 5.0], abs=0.1
    )
    assert len(report["why"]) == 4 and len(report["checks"]) == 7


def test_bad_options():
    run = run_script("main_quantization.py", "--quick", "--batch-size", "0")
    assert run.status == 2 and "0 is not a number from 1 up" in run.stderr
