"""Zeros behind the ReLU: gathering is the product, counts are counts, silent neurons are cut for nothing."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, quick_report, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from main_kvcache import generate_kvcache
from relu_sparsity import GatheredLinear, cut_neurons, fired, gather_by_token, gather_rows, use_gathered


def draw(N, n_neurons, E, share, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(N, n_neurons, generator=generator, dtype=torch.float64)
    h = h.abs() * (torch.rand(N, n_neurons, generator=generator) < share)
    weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((E, n_neurons), (E,)))
    return [t.to(dtype) for t in (h, weight, bias)]


@given(
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.integers(0, 99),
)
def test_gathering_is_the_product(N, n_neurons, E, share, seed):
    """Rows without any neuron as well, at every place of the batch."""
    h, weight, bias = draw(N, n_neurons, E, share, seed)
    expected = F.linear(h, weight, bias)
    assert_close(gather_rows(h, weight.t().contiguous(), bias), expected)
    assert_close(gather_by_token(h, weight.t(), bias), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types(dtype):
    h, weight, bias = draw(5, 40, 8, 0.2, dtype=dtype)
    out = gather_rows(h, weight.t().contiguous(), bias)
    assert out.dtype == dtype
    expected = F.linear(*(t.double() for t in (h, weight, bias)))
    assert_close(out.double(), expected, 0.1 if dtype.itemsize == 2 else 1e-5)


def test_a_nan_is_not_zero():
    h, weight, bias = draw(2, 6, 3, 0.5)
    h[1, 2] = float("nan")
    out = gather_rows(h, weight.t().contiguous(), bias)
    assert out[1].isnan().all() and out[0].isfinite().all()


def test_a_layer_of_any_shape():
    layer = nn.Linear(6, 3).double()
    h = torch.relu(torch.randn(2, 4, 6, dtype=torch.float64))
    assert_close(GatheredLinear(layer)(h), layer(h))


def test_the_model_gives_the_same_tokens():
    plain, gathered = tiny_model(GPTlite_KVCache), use_gathered(tiny_model(GPTlite_KVCache))
    tokens = random_tokens(3, 9)
    assert_close(gathered(tokens)[0], plain(tokens)[0])
    assert torch.equal(generate_kvcache(gathered, tokens, 7, 16), generate_kvcache(plain, tokens, 7, 16))


def test_which_neurons_fire():
    """Counted over batches as at once, against the first product by hand; no hook stays."""
    model, tokens = tiny_model(GPTlite), random_tokens(5, 7)
    seen = fired(model, tokens, batch_size=2)
    assert seen.shape == (2, 5, 7, 128) and seen.dtype == torch.bool
    x = model.token_embedding(tokens) + model.position_embedding.weight[:7]
    for layer, block in zip(seen, model.blocks, strict=True):
        inside = x + block.mha(block.ln1(x))
        assert torch.equal(layer, block.ffwd.net[0](block.ln2(inside)) > 0)
        x = block(x)
        assert not block.ffwd.net[1]._forward_hooks


def test_cutting_what_never_fires():
    """Made so by a bias that no input reaches: the same outputs with fewer neurons, others than those not."""
    models = [tiny_model(GPTlite) for _ in range(3)]
    silent = torch.zeros(2, 128, dtype=torch.bool)
    silent[0, 3:50], silent[1, ::2] = True, True
    with torch.no_grad():
        for model in models:
            for block, off in zip(model.blocks, silent, strict=True):
                block.ffwd.net[0].bias[off] = -1e6
    tokens = random_tokens(4, 16)
    seen = fired(models[0], tokens).flatten(1, 2).any(dim=1)  # [L, F]
    assert not (seen & silent).any()
    expected = models[0](tokens)
    small = cut_neurons(models[1], ~silent)
    assert_close(small(tokens), expected)
    assert [block.ffwd.net[0].out_features for block in small.blocks] == [81, 64]
    assert small.blocks[1].ffwd.net[2].weight.shape == (32, 64)
    assert (cut_neurons(models[2], seen.roll(1, 1))(tokens) - expected).abs().max() > 1e-3


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("more/relu_sparsity.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["dense, batch 1"]["baseline"] and rows["gathered, batch 1"]["same_output"]
    cut = rows["never fired: cut, batch 2"]
    assert cut["approximate"] and cut["n_parameters"] <= rows["dense, batch 2"]["n_parameters"]
    layers, times = report["sweeps"].values()
    assert [line["layer"] for line in layers] == [0, 1, 2]
    for line in layers:  # whatever the weights are
        assert line["neurons of a token"] == pytest.approx(768 * (1 - line["zeros (%)"] / 100))
        assert line["neurons of a token"] / 7.68 <= line["of 2 rows (%)"] + 1e-4
        assert line["of 2 rows (%)"] <= 100 * (1 - line["never fired"] / 768) + 1e-4
    assert [line["width"] for line in times] == [384, 768] and len(report["why"]) == 4
