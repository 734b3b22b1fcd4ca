"""Layouts, a window and a state in one layer by definition, conversion, parts that give zeros, the script."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite, MultiHeadAttention
from gptlite_kvcache import window_mask
from gptlite_linear import GatedDelta, GPTlite_Linear, convert_to_linear, recurrent
from main_kvcache import generate, generate_kvcache
from main_linear_hybrid import (
    WindowPlusLinear,
    attention_transfer,
    hybrid_layout,
    silenced,
    step_forms,
)


class NarrowWindow(WindowPlusLinear):
    window = 3


class WideWindow(WindowPlusLinear):
    window = 16


def layer_of(layer_class, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = layer_class(32, 2, 16, 0.0).double()
        for p in (layer.feature_maps, layer.window_logit):
            torch.nn.init.normal_(p)
        return layer, torch.randn(2, 12, 32, dtype=torch.float64)


def heads_of(layer, x):
    return [layer.split_heads(f(x)) for f in (layer.query_proj, layer.key_proj, layer.value_proj)]


# ---- Layouts ----


def test_layouts():
    assert hybrid_layout(6, 2) == (2, 5) and hybrid_layout(6, 5) == (3,) and hybrid_layout(3, 2) == (1,)
    assert hybrid_layout(8, 3) == (3, 7)  # Kimi Linear, Qwen3-Next: every fourth
    assert hybrid_layout(80, 7) == tuple(range(7, 80, 8))  # MiniMax-01: every eighth
    for wrong in (0, 6, 7):
        with pytest.raises(ValueError, match=f"{wrong}:1 needs {wrong + 1} layers, not 6"):
            hybrid_layout(6, wrong)


@given(full=st.sampled_from([(), (0,), (1,), (0, 1)]), prompt_len=st.integers(1, 12), seed=st.integers(0, 9))
def test_cached_decoding_equals_one_pass(full, prompt_len, seed):
    for layer in (GatedDelta, NarrowWindow):
        model = tiny_model(GPTlite_Linear, linear_class=layer, full_layers=full, seed=seed)
        tokens = random_tokens(2, 12, seed)
        assert_close(utils.cached_logits(model, tokens, prompt_len)[0], model(tokens)[0])


def test_generates_what_one_pass_chooses():
    model, prompt = (
        tiny_model(GPTlite_Linear, linear_class=NarrowWindow, full_layers=(1,)),
        random_tokens(2, 5),
    )
    expected = generate(lambda tokens: model(tokens)[0], prompt, 9, 16)
    assert torch.equal(generate_kvcache(model, prompt, 9, 16), expected)


# ---- A window and a state in one layer ----


@pytest.mark.parametrize("silent", [None, "window", "linear"])
def test_by_definition(silent):
    """All weights at once: exp of scores in the window, products of features behind it, one divisor."""
    layer, x = layer_of(NarrowWindow)
    layer.silent = silent
    Q, K, V = heads_of(layer, x)
    near = window_mask(12, 12, 3)
    scores = (Q @ K.mT / 4).masked_fill(~near, -math.inf)
    share = torch.sigmoid(layer.window_logit)
    by_window = share * torch.exp(scores - scores.amax(-1, keepdim=True))
    q, k = (
        torch.cat([F.softmax(t @ one, dim=-1), F.softmax(-(t @ one), dim=-1)], dim=-1)
        for t, one in zip((Q, K), layer.feature_maps, strict=True)
    )
    by_features = (1 - share) * (q @ k.mT) * (torch.ones(12, 12).tril() * ~near)
    parts = {"window": by_window, "linear": by_features}
    weights = sum(part for name, part in parts.items() if name != silent)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
    assert_close(layer(x)[0], layer.out_proj(layer.merge_heads(weights @ V)))
    if silent == "linear":
        expected = F.scaled_dot_product_attention(Q, K, V, attn_mask=near)
        assert_close(layer(x)[0], layer.out_proj(layer.merge_heads(expected)))


def test_a_window_over_all_of_the_text_is_softmax_attention():
    layer, x = layer_of(WideWindow)
    plain = MultiHeadAttention(32, 2, 16, 0.0).double()
    plain.load_state_dict({name: t for name, t in layer.state_dict().items() if "proj" in name})
    out, (k, v, state) = layer(x)
    assert_close(out, plain(x))
    assert state is None and k.shape == v.shape == (2, 2, 12, 16)


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 20))
def test_pieces_equal_the_whole(lengths, seed):
    """Pieces shorter and longer than the window; a cache that was given is left alone."""
    layer, _ = layer_of(NarrowWindow, seed)
    x, out, cache = torch.randn(1, sum(lengths), 32, dtype=torch.float64), [], None
    for piece in x.split(lengths, dim=1):
        before = None if cache is None else [None if t is None else t.clone() for t in cache]
        given_cache = cache
        one, cache = layer(piece, cache)
        out.append(one)
        for t, copy in zip(given_cache or (), before or (), strict=True):
            assert (t is None and copy is None) or torch.equal(t, copy)
    whole, expected = layer(x)
    assert_close(torch.cat(out, dim=1), whole)
    assert_close([t for t in cache if t is not None], [t for t in expected if t is not None])
    assert cache[0].shape[-2] == min(sum(lengths), 3)
    assert cache[2] is None or cache[2].shape == (1, 2, 32, 17)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    layer, x = layer_of(NarrowWindow)
    expected = layer.float()(x.float())[0]
    out, (k, _, state) = layer.to(dtype)(x.to(dtype))
    assert out.dtype == k.dtype == dtype and state.dtype == torch.float32
    assert_close(out.float(), expected, 5e-2)


def test_no_other_mask():
    layer, x = layer_of(NarrowWindow)
    with pytest.raises(ValueError, match="no other mask"):
        layer(x, causal_mask=False)


# ---- Conversion ----


def pair(layer, full=(1,)):
    teacher = tiny_model(GPTlite, dtype=torch.float32)
    model = tiny_model(GPTlite_Linear, linear_class=layer, full_layers=full, dtype=torch.float32)
    return convert_to_linear(teacher.state_dict(), model), teacher


TEXT = torch.arange(400) * 7 % 16


def test_transfer_trains_the_linear_layers_alone():
    model, teacher = pair(GatedDelta)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    original = {name: t.clone() for name, t in teacher.state_dict().items()}
    losses = attention_transfer(model, teacher, TEXT, 25, 1e-2, 4, 16)
    assert losses[-1] < 0.8 * losses[0] and len(losses) == 25
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name]) or name.startswith("blocks.0.mha."), name
    changed = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    assert {"blocks.0.mha.query_proj.weight", "blocks.0.mha.out_gain"} <= changed
    assert all(torch.equal(t, original[name]) for name, t in teacher.state_dict().items())
    assert not any(block.mha._forward_hooks for block in teacher.blocks)
    again, _ = pair(GatedDelta)
    assert attention_transfer(again, teacher, TEXT, 25, 1e-2, 4, 16) == losses  # the seed decides the batches


def test_a_layer_that_is_softmax_already_has_nothing_to_learn():
    model, teacher = pair(WideWindow, ())
    assert attention_transfer(model, teacher, TEXT, 1, 0.0, 4, 16)[0] < 1e-4  # bfloat16's rounding
    assert attention_transfer(*pair(NarrowWindow, ()), TEXT, 1, 0.0, 4, 16)[0] > 1e-3
    assert attention_transfer(model, teacher, TEXT, 0, 1e-2, 4, 16) == []


def test_zeroed_layers_attend_to_nothing():
    model, tokens = tiny_model(GPTlite_Linear, full_layers=(1,)), random_tokens(2, 9)
    expected = model(tokens)[0]
    silent = silenced(model, [0])
    assert all(a is b for a, b in zip(silent.parameters(), model.parameters(), strict=True))
    x = model.token_embedding(tokens) + model.position_embedding(torch.arange(9))
    x = x + model.blocks[0].ffwd(model.blocks[0].ln2(x))
    x = model.blocks[1](x)[0]
    assert_close(silent(tokens)[0], model.fc_out(model.ln(x)))
    assert torch.equal(model(tokens)[0], expected)
    both = tiny_model(GPTlite_Linear, linear_class=NarrowWindow)
    parts = [silenced(both, range(2), part)(tokens)[0] for part in (None, "window", "linear")]
    assert all(utils.largest_difference(one, both(tokens)[0]) > 1e-3 for one in parts)
    assert both.blocks[0].mha.silent is None


def test_what_is_timed():
    k, v = torch.randn(2, 1, 2, 9, 8)
    layouts = {"softmax": range(3), "mixed": (1,)}
    out = {name: form() for name, form in step_forms(layouts, 3, k, v).items()}
    softmax = F.scaled_dot_product_attention(k[..., -1:, :], k, v)
    gates = -torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1, 1)
    last = k[..., -1:, :], k[..., -1:, :], v[..., -1:, :]
    linear = recurrent("gated delta", *last, *gates, k.mT @ v)[0]
    assert_close(out["softmax"], [softmax] * 3)
    assert_close(out["mixed"], [linear, softmax, linear])


# ---- The script ----


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("main_linear_hybrid.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    soft, hybrid, linear = (rows[n] for n in ("softmax", "2:1", "all linear"))
    assert soft["baseline"] and hybrid["approximate"] and len(report["why"]) == 4
    assert soft["kv_bytes_per_token"] == 3 * hybrid["kv_bytes_per_token"] == 2 * 3 * 192 * 4
    assert linear["kv_bytes_per_token"] is None
    assert 3 * hybrid["state_bytes"] == 2 * linear["state_bytes"]
    window, state = 2 * 3 * 8 * 64, 3 * 128 * 65
    assert rows["window + linear"]["state_bytes"] == 4 * 3 * (window + state)
    parts, memory, times = report["sweeps"].values()
    assert [line["zeroed"] for line in parts] == [
        "its softmax layers",
        "its linear layers",
        "its window",
        "its state",
    ]
    assert memory[0]["softmax"] < memory[0]["2:1"] < memory[0]["all linear"]  # 32 tokens: states are larger
    assert memory[-1]["softmax"] > memory[-1]["2:1"] > memory[-1]["all linear"]
    assert [line["tokens"] for line in times] == [256, 1024]


@pytest.mark.slow
def test_orders_that_training_shows(distilled_checkpoint, tmp_path):
    """Equal steps: transfer and fine-tuning below fine-tuning alone, both above softmax; parts are in use."""
    if distilled_checkpoint != utils.GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("the order of losses needs trained weights, and there are none")
    run = run_script("main_linear_hybrid.py", "--quick", "--uptrain-steps", "30", "--json", "-", cwd=tmp_path)
    assert run.status == 0, run.stderr + run.stdout
    loss = {row["method"]: row["valid_loss"] for row in run.json["rows"]}
    assert loss["softmax, trained on"] < loss["2:1"] < loss["2:1, no transfer"] - 0.05
    parts = next(iter(run.json["sweeps"].values()))
    assert min(line["rise"] for line in parts if line["zeroed"] != "its softmax layers") > 0
