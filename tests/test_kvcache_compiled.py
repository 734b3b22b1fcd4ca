"""The decode step that writes nothing, its products, and the compiled step against the static cache."""

import copy

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gptlite_compiled import CompiledStep, LinearAsSum, decode_step, replace_linears
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from inference_utils import StepClock, weight_bytes
from linear_packed import LinearInGraph, can_pack
from main_kvcache import generate_kvcache, generate_static

CONTEXT = 16


@pytest.fixture(autouse=True, scope="module")
def no_gradients():
    with torch.no_grad():
        yield


class PlainStep(nn.Module):
    """decode_step as CompiledStep runs it, over views of any number of rows, not compiled."""

    def __init__(self, model, bucket):
        super().__init__()
        self.model, self.bucket = model, bucket

    def forward(self, x, kv_cache):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", lambda function, **_: function)
            step = CompiledStep(self.model, len(x), bucket=self.bucket)
        return step(x, kv_cache)


@given(st.integers(1, 3), st.integers(1, 20), st.integers(0, 20), st.integers(1, CONTEXT), st.data())
def test_tokens_equal_those_of_the_dynamic_cache(batch_size, prompt_len, n_tokens, bucket, data):
    """Before, at and past the window, over views of every size, with NaN in the rows not yet written."""
    window = data.draw(st.integers(1, CONTEXT))
    prompt = random_tokens(batch_size, prompt_len, data.draw(st.integers(0, 99)))
    static = tiny_model(GPTlite_StaticKVCache)
    buffers = StaticKVCache(static, batch_size, window)
    buffers.k.fill_(float("nan"))
    buffers.v.fill_(float("nan"))
    expected = generate_kvcache(tiny_model(GPTlite_KVCache), prompt, n_tokens, window)
    for _ in range(2):  # the second time in used buffers
        output = generate_static(static, prompt, n_tokens, buffers, PlainStep(static, bucket))
        assert torch.equal(output, expected)


def test_nothing_is_written_inside():
    static = tiny_model(GPTlite_StaticKVCache)
    buffers = StaticKVCache(static, 2)
    static(random_tokens(2, 5), buffers)
    before = buffers.k.clone(), buffers.v.clone()
    expected = static(random_tokens(2, 1, 7), copy.deepcopy(buffers))[0][:, 0]
    logits, K, V = decode_step(
        static, random_tokens(2, 1, 7)[:, 0], buffers.k, buffers.v, torch.tensor([5]), buffers.window
    )
    assert torch.equal(before[0], buffers.k) and torch.equal(before[1], buffers.v)
    assert K.shape == V.shape == (2, 2, 2, 16)
    assert_close(logits, expected, 1e-9)


def test_one_graph_for_each_view(monkeypatch):
    """Traced here, not translated to machine code: 64-row views in the script, 8 rows here."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    static = tiny_model(GPTlite_StaticKVCache)
    step, buffers = CompiledStep(static, 2, bucket=8, backend=keep), StaticKVCache(static, 2)
    for seed in (0, 1):
        prompt = random_tokens(2, 4, seed)
        with StepClock(static, step) as clock:
            output = generate_static(static, prompt, 20, buffers, step)
        assert torch.equal(output, generate_kvcache(tiny_model(GPTlite_KVCache), prompt, 20, CONTEXT))
        assert clock.n_steps == 20 and clock.forward_tokens == 2 * (4 + 19)
    assert len(graphs) == 2  # views of 8 and 16 rows


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_compiled_to_machine_code(batch_size):
    static = tiny_model(GPTlite_StaticKVCache, dtype=torch.float32)
    step, buffers = CompiledStep(static, batch_size, bucket=16), StaticKVCache(static, batch_size)
    prompt = random_tokens(batch_size, 4)
    output = generate_static(static, prompt, 12, buffers, step)
    assert torch.equal(output, generate_static(static, prompt, 12, buffers))


def test_another_cache_or_batch_is_refused():
    static = tiny_model(GPTlite_StaticKVCache)
    step = CompiledStep(static, 2, backend="eager")
    with pytest.raises(ValueError, match="does not fit"):
        step(random_tokens(2, 1), StaticKVCache(static, 3))


@given(st.integers(1, 4), st.integers(1, 70), st.integers(1, 70), st.integers(0, 99))
def test_a_linear_layer_as_a_sum(rows, n_in, n_out, seed):
    torch.manual_seed(seed)
    linear, x = nn.Linear(n_in, n_out), torch.randn(rows, n_in)
    assert_close(LinearAsSum(linear)(x), linear(x), 1e-5)
    for dtype, share in ((torch.bfloat16, 2**-8), (torch.int8, 0.5 / 127)):
        layer = LinearAsSum(linear, dtype)
        assert_close(layer(x), layer.as_linear()(x), 1e-5)
        largest = linear.weight.abs().amax(dim=1, keepdim=True)
        assert ((layer.as_linear().weight - linear.weight).abs() <= share * largest + 1e-9).all()
        assert layer.weight.dtype == dtype


def test_weights_of_zero_stay_zero_in_8_bits():
    linear = nn.Linear(3, 2)
    linear.weight.zero_()
    assert LinearAsSum(linear, torch.int8).as_linear().weight.abs().max() == 0


def test_packed_rows_and_bytes():
    if not can_pack(torch.zeros(2, 2)):
        pytest.skip("this build cannot pack")
    model = tiny_model(GPTlite_StaticKVCache, dtype=torch.float32)
    packed = replace_linears(model, LinearInGraph)
    x = random_tokens(3, 9)
    assert_close(packed(x)[0], model(x)[0], 1e-4)
    assert type(model.fc_out) is nn.Linear and type(packed.fc_out) is LinearInGraph
    n = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2), (torch.int8, 1)):
        smaller = replace_linears(model, lambda linear, dtype=dtype: LinearAsSum(linear, dtype))
        assert weight_bytes(smaller) == weight_bytes(model) - (4 - size) * n


@pytest.mark.slow
def test_script():
    run = run_script("more/kvcache_compiled.py", "--quick", "--json", "-")
    assert run.status == 0 and all(run.json["checks"].values()), run.stderr
    rows = {row["method"]: row for row in run.json["rows"]}
    names = [name for name in rows if name.endswith("batch 1")]
    assert names[:3] == ["static, batch 1", "dynamic, batch 1", "compiled, batch 1"]
    sizes = [
        rows[f"compiled{kind}, batch 1"]["weights_mb"]
        for kind in ("", ", bfloat16 weights", ", int8 weights")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert abs(rows["compiled, int8 weights, batch 1"]["loss_difference"]) < 0.01
    assert rows["compiled, batch 2"]["same_output"] is True


def test_other_tokens_than_one_a_sequence_are_refused():
    """A second token would be dropped, a single sequence broadcast over the cache."""
    static = tiny_model(GPTlite_StaticKVCache, n_layers=1)
    step, buffers = CompiledStep(static, 3, backend=None), StaticKVCache(static, 3)
    for x in (random_tokens(3, 2), random_tokens(1, 1), random_tokens(3, 1)[:, 0]):
        with pytest.raises(ValueError, match="3 sequences and one token"):
            step(x, buffers)
    assert buffers.length == 0 and step(random_tokens(3, 1), buffers)[0].shape == (3, 1, 16)
