"""more/sparsity_speed.py: products that skip zeros against dense ones, and 2:4 compressed bit for bit."""

import copy

import pytest
import torch
import torch.nn as nn
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from main_sparsity import prune_magnitude, prune_model
from sparsity_speed import (
    CSRLinear,
    SemiStructuredLinear,
    compress_2_4,
    decompress_2_4,
    refusal,
    replace_linears,
)

sparsities = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.7, 0.9, 1.0])
seeds = st.integers(0, 1000)


def random_matrix(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(rows=st.integers(1, 5), fours=st.integers(1, 4), seed=seeds)
def test_2_4_compresses_bit_for_bit(rows, fours, seed):
    W = prune_magnitude(random_matrix(rows, 4 * fours, seed=seed).float(), None, "2:4")
    W[0, :4] = 0.0  # a four may hold fewer than two
    values, places = compress_2_4(W)
    assert torch.equal(decompress_2_4(values, places), W)
    assert values.numel() == W.numel() // 2 and places.numel() == -(-W.numel() // 8)


def test_2_4_refuses_a_dense_matrix():
    for refuse in (compress_2_4, lambda W: SemiStructuredLinear(nn.Linear(8, 4))):
        with pytest.raises(ValueError, match="never pruned"):
            refuse(random_matrix(4, 8))


@pytest.mark.filterwarnings("ignore:Sparse")
@given(share=sparsities, B=st.integers(1, 3), T=st.integers(1, 4), seed=seeds)
def test_csr_layer_equals_the_dense_one(share, B, T, seed):
    layer = nn.Linear(8, 6).double()
    layer.weight.data = prune_magnitude(random_matrix(6, 8, seed=seed), None, share)
    x = random_matrix(B, T, 8, seed=seed + 1)
    sparse = CSRLinear(layer)
    assert_close(sparse(x), layer(x))
    assert sparse.values.numel() == 48 - round(share * 48)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_model_with_csr_layers_gives_the_same_logits_and_is_smaller():
    tokens = random_tokens(2, 9)
    model = prune_model(tiny_model(GPTlite), tokens, "magnitude", "row", 0.9)
    cached = tiny_model(GPTlite_KVCache)
    cached.load_state_dict(model.state_dict())
    sparse = replace_linears(copy.deepcopy(cached), CSRLinear)
    assert all(isinstance(block.mha.query_proj, CSRLinear) for block in sparse.blocks)
    assert_close(sparse(tokens)[0], model(tokens))
    logits, _ = utils.cached_logits(sparse, tokens, 3)
    assert_close(logits, model(tokens))
    assert utils.weight_bytes(sparse) < utils.weight_bytes(model)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("bias", [True, False])
def test_csr_layer_of_nothing_and_of_strided_inputs(bias):
    layer = nn.Linear(8, 6, bias).double()
    layer.weight.data = prune_magnitude(layer.weight.data, None, 0.5)
    sparse, x = CSRLinear(layer), random_matrix(5, 3, 8)
    strided = [x.transpose(0, 1), x[:, ::2], x[0, 0], random_matrix(8, 5).T, random_matrix(8).expand(4, 8)]
    for inputs in (*strided, x[:0], x[:, :0], torch.empty(0, 8, dtype=torch.float64)):
        out = sparse(inputs)
        assert out.shape == layer(inputs).shape
        assert_close(out, layer(inputs))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_2_4_of_nothing(shape):
    assert decompress_2_4(*compress_2_4(torch.zeros(shape))).shape == shape


def test_2_4_of_a_strided_matrix():
    weight = prune_magnitude(random_matrix(8, 4), None, "2:4")
    strided = weight.T.contiguous().T
    assert not strided.is_contiguous() and torch.equal(decompress_2_4(*compress_2_4(strided)), weight)


def test_2_4_needs_inputs_by_fours():
    with pytest.raises(ValueError, match="by fours"):
        compress_2_4(random_matrix(4, 6))


def test_what_torch_refuses_is_told():
    def make(layer):
        raise RuntimeError("no  kernel\nhere")

    assert refusal(make, None, None) == "no kernel here"
    assert refusal(nn.Identity, None, torch.zeros(1)) == ""


@pytest.mark.cuda
def test_2_4_layer_on_cuda_equals_the_dense_one():
    layer = nn.Linear(384, 384, device="cuda", dtype=torch.float16)
    layer.weight.data = prune_magnitude(layer.weight.data, None, "2:4")
    x = torch.randn(2, 5, 384, device="cuda", dtype=torch.float16)
    sparse = SemiStructuredLinear(layer)
    assert_close(sparse(x), layer(x))
    assert torch.equal(sparse.weight.to_dense(), layer.weight)
    for inputs in (x[:0], x.transpose(0, 1), x[:, ::2], x[0, 0]):
        assert_close(sparse(inputs), layer(inputs))


def test_csr_layer_without_bias():
    linear = nn.Linear(8, 4, bias=False).double()
    x = random_matrix(3, 8)
    assert_close(CSRLinear(linear)(x), linear(x))


@pytest.mark.slow
def test_quick_run(distilled_checkpoint):
    run = run_script("more/sparsity_speed.py", "--quick", "--json", "-", checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr
    assert len(run.json["checks"]) >= 4 and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    assert rows["95% zeros"]["weights_mb"] == rows["dense"]["weights_mb"]  # stored zeros save nothing
    assert rows["95% zeros, CSR"]["weights_mb"] < 0.2 * rows["dense"]["weights_mb"]
    assert rows["50% zeros, CSR"]["weights_mb"] > rows["dense"]["weights_mb"]
    assert rows["95% zeros, CSR"]["peak_memory_mb"] < rows["dense"]["peak_memory_mb"]
    assert rows["95% zeros, CSR"]["n_parameters"] < rows["50% zeros, CSR"]["n_parameters"]
    assert len({row["forward_tokens"] for row in rows.values()}) == 1
    (table,) = run.json["sweeps"].values()
    assert [row["zeros (%)"] for row in table] == [50.0, 99.0] and len(run.json["why"]) == 4
    if not torch.cuda.is_available():
        assert any("CUDA" in line for line in run.json["why"])  # the reason why 2:4 stays dense


@pytest.mark.slow
def test_a_type_without_products_of_compressed_rows_leaves_them_out(distilled_checkpoint):
    args = ("--quick", "--json", "-", "--dtype", "bfloat16", "--device", "cpu")
    run = run_script("more/sparsity_speed.py", *args, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr
    assert all(run.json["checks"].values()) and {row["method"] for row in run.json["rows"]} >= {
        "dense",
        "2:4",
    }
