"""Linear attention's layers by their definitions, their forms against each other, and the script."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite_linear import DecayGate, GPTlite_Linear, chunked, recurrent
from inference_training import train_steps
from inference_utils import cached_logits
from main_kvcache import generate, generate_kvcache
from main_linear_attention import (
    LAYERS,
    EluAttention,
    Mamba2Attention,
    RetNetAttention,
    all_at_once,
    prompt_forms,
    random_inputs,
    step_forms,
)

every_layer = pytest.mark.parametrize("name", LAYERS)


def layer_of(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LAYERS[name](32, 2, 16, 0.0).double(), torch.randn(2, 70, 32, dtype=torch.float64)


@given(T=st.integers(1, 40), width=st.sampled_from([0, 1, 6]), seed=st.integers(0, 99))
def test_all_at_once_equals_token_by_token(T, width, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, decay = torch.randn(4, 2, 3, T, 6, generator=generator, dtype=torch.float64)
    log_decay = -decay[..., :width].abs() if width else None
    rule = {0: "linear", 1: "decay", 6: "gla"}[width]
    expected = recurrent(rule, q, k, v, log_decay)[0]
    assert_close(all_at_once(q, k, v, log_decay), expected)
    assert_close(chunked(q, k, v, log_decay, chunk=8)[0], expected)


def test_elu_attention_is_softmax_attention_with_other_weights():
    """By definition: phi(q) . phi(k) for all earlier tokens, divided by their sum, times the values."""
    layer, x = layer_of("elu + 1")
    q, k, v = (layer.split_heads(proj(x)) for proj in (layer.query_proj, layer.key_proj, layer.value_proj))
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()  # [B, H, T, T]
    weights = weights / weights.sum(-1, keepdim=True)
    assert_close(layer(x)[0], layer.out_proj(layer.merge_heads(weights @ v)), 1e-6)  # divisor + 1e-6


def test_retnet_decays_are_fixed_and_double_in_reach():
    layer, x = layer_of("RetNet")
    log_decay, beta = layer.gates(x)
    assert beta is None and log_decay.shape == (2, 2, 70, 1)
    assert_close(log_decay[1, :, 7, 0].exp(), torch.tensor([1 - 2**-5, 1 - 2**-6]), 1e-6)
    out, (state, _) = layer(x)
    q, k, v = (layer.split_heads(proj(x)) for proj in (layer.query_proj, layer.key_proj, layer.value_proj))
    age = torch.arange(69, -1, -1, dtype=torch.float64)  # [T]
    for head, keep in enumerate((1 - 2**-5, 1 - 2**-6)):
        expected = (k[0, head] * (keep**age)[:, None]).mT @ v[0, head]
        assert_close(state[0, head], expected, 1e-5)


def test_mamba2_decays_follow_the_token():
    layer, x = layer_of("Mamba-2")
    torch.nn.init.normal_(layer.decay.proj.weight)
    log_decay, _ = layer.gates(x)
    assert log_decay.shape == (2, 2, 70, 1) and (log_decay <= 0).all()
    assert log_decay[0, 0].std() > 0.01
    gate = layer.decay
    expected = -gate.log_rate.exp() * torch.log1p(torch.exp(x @ gate.proj.weight.T + gate.proj.bias))
    assert_close(log_decay[..., 0].mT, expected)


def test_decays_begin_from_long_to_short():
    gate = DecayGate(32, 6, 6)
    keep = gate(torch.randn(1, 1, 32)).exp()[0, 0]  # [H]
    assert keep[0] > 0.998 and keep[-1] < 0.25 and (keep.diff() < 0).all()
    by_channel = DecayGate(32, 12, 6, n_inner=4)(torch.randn(1, 1, 32)).exp()[0, 0]
    assert_close(by_channel, keep.repeat_interleave(2))


def test_gla_decays_by_channel():
    layer, x = layer_of("GLA")
    log_decay, beta = layer.gates(x)
    assert beta is None and log_decay.shape == (2, 2, 70, 16)
    logits = layer.decay_up(layer.decay_down(x))[0, 3].view(2, 16)
    assert_close(log_decay[0, :, 3].exp(), torch.sigmoid(logits) ** (1 / 16))


@every_layer
@given(prompt_len=st.integers(1, 12), seed=st.integers(0, 9))
def test_cached_decoding_equals_one_pass(name, prompt_len, seed):
    model = tiny_model(GPTlite_Linear, linear_class=LAYERS[name], seed=seed)
    tokens = random_tokens(2, 12, seed)
    assert_close(cached_logits(model, tokens, prompt_len)[0], model(tokens)[0])


@every_layer
def test_generates_what_one_pass_chooses(name):
    model, prompt = tiny_model(GPTlite_Linear, linear_class=LAYERS[name]), random_tokens(2, 5)
    expected = generate(lambda tokens: model(tokens)[0], prompt, 9, 16)
    assert torch.equal(generate_kvcache(model, prompt, 9, 16), expected)


@every_layer
def test_training_a_layer_lowers_the_loss(name):
    model = tiny_model(GPTlite_Linear, linear_class=LAYERS[name], dtype=torch.float32)
    losses = train_steps(model, torch.arange(400) % 7, 12, 3e-3, 4, 16)
    assert losses[-1] < losses[0]
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_layer
def test_16_bits(name, dtype):
    layer, x = layer_of(name)
    expected = layer.float()(x.float())[0]
    out, (state, _) = layer.to(dtype)(x.to(dtype))
    assert out.dtype == dtype and state.dtype == torch.float32
    assert_close(out.float(), expected, 5e-2)


def test_elu_sums_stay_finite_over_a_long_text():
    layer, _ = layer_of("elu + 1")
    out, (state, _) = layer(torch.ones(1, 3000, 32, dtype=torch.float64))
    assert out.isfinite().all() and state.shape == (1, 2, 16, 17)
    assert_close(out[0, -1], out[0, 0], 1e-5)  # equal tokens have an equal average


def test_what_is_timed():
    q, k, v, log_decay = random_inputs(40, 2, 8)
    assert_close(k.norm(dim=-1), torch.ones(1, 2, 40))
    prompt = {name: form() for name, form in prompt_forms(q, k, v, log_decay).items()}
    assert_close(prompt["one decay"][0], recurrent("decay", q, k, v, log_decay[..., :1])[0])
    assert_close(prompt["decay by channel"][0], recurrent("gla", q, k, v, log_decay)[0])
    step = {name: form() for name, form in step_forms(q, k, v, log_decay).items()}
    assert_close(step["SDPA"], prompt["SDPA"][..., -1:, :])
    assert step["one decay"][0].shape == (1, 2, 1, 8)


def test_heads_without_a_decay_are_the_plain_rule():
    class Undecayed(RetNetAttention):
        def gates(self, x):
            return torch.zeros_like(super().gates(x)[0]), None

    models = [tiny_model(GPTlite_Linear, linear_class=layer) for layer in (Undecayed, RetNetAttention)]
    tokens = random_tokens(1, 12)
    q = models[0](tokens)[1].layers[0][0]
    assert not torch.equal(q, models[1](tokens)[1].layers[0][0])
    layer = models[0].blocks[0].mha
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    k, v = (layer.split_heads(proj(x)) for proj in (layer.key_proj, layer.value_proj))
    assert_close(layer(x)[1][0], k.mT @ v)


def test_layers_keep_gptlites_names():
    names = {"query_proj", "key_proj", "value_proj", "out_proj"}
    for layer in (EluAttention, Mamba2Attention):
        assert names <= {name.split(".")[0] for name in layer(32, 2, 16, 0.0).state_dict()}


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != utils.GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("the order of losses needs trained weights, and there are none")
    run = run_script("main_linear_attention.py", "--quick", "--json", "-", "--plot", "a.png", cwd=tmp_path)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert all(report["checks"].values()) and (tmp_path / "a.png").is_file()
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["softmax"]["baseline"] and rows["softmax"]["kv_bytes_per_token"] == 2 * 3 * 192 * 4
    for name in LAYERS:
        row = rows[name]
        assert row["kv_bytes_per_token"] is None and row["approximate"] is True
        assert row["state_bytes"] == 4 * 3 * 3 * 64 * (65 if name == "elu + 1" else 64)
        assert row["forward_tokens"] == rows["softmax"]["forward_tokens"]
        assert row["loss_difference"] > 0.1 and math.isfinite(row["valid_loss"])  # after a single step
    assert "32 tokens" in report["why"][0]


def test_script_refuses_impossible_sizes(distilled_checkpoint):
    run = run_script("main_linear_attention.py", "--max-tokens", "1000", checkpoint=distilled_checkpoint)
    assert run.status == 2 and "Traceback" not in run.stderr
