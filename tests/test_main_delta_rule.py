"""The delta rule by the papers' matrices, what a state holds, its layers, and the script."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite_linear import GPTlite_Linear, chunked, recurrent
from inference_training import train_steps
from inference_utils import cached_logits
from main_delta_rule import (
    LAYERS,
    delta_by_matrices,
    prompt_forms,
    random_inputs,
    read_back,
    recall_error,
    recall_table,
)
from main_kvcache import generate, generate_kvcache

every_layer = pytest.mark.parametrize("name", LAYERS)


def layer_of(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LAYERS[name](32, 2, 16, 0.0).double(), torch.randn(2, 21, 32, dtype=torch.float64)


# ---- The rule ----


@given(
    T=st.integers(1, 20),
    width=st.sampled_from([0, 1, 5]),
    chunk=st.sampled_from([1, 2, 16]),
    length=st.sampled_from([1.0, 3.0]),
    seed=st.integers(0, 99),
)
def test_three_forms_agree(T, width, chunk, length, seed):
    """Keys of length 1 and longer ones, which the rule takes as they are, beta keeping it stable."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, decay = torch.randn(4, 1, 2, T, 5, generator=generator, dtype=torch.float64)
    beta = torch.rand(1, 2, T, 1, generator=generator, dtype=torch.float64) / length**2
    state = torch.randn(1, 2, 5, 5, generator=generator, dtype=torch.float64)
    k = length * F.normalize(k, dim=-1)
    log_decay = -decay[..., :width].abs() if width else None
    rule = {0: "delta", 1: "gated delta", 5: "kda"}[width]
    expected = recurrent(rule, q, k, v, log_decay, beta, state)
    assert_close(delta_by_matrices(q, k, v, log_decay, beta, state), expected)
    assert_close(chunked(q, k, v, log_decay, beta, state, chunk), expected)


@pytest.mark.parametrize("chunk", [1, 2, 16])
def test_decay_then_error_then_write(chunk):
    """State 2 under the key 1, decay 0.5, value 5: beta 1 gives 5, beta 0.5 gives 3."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for beta, expected in ((1.0, 5.0), (0.5, 3.0)):
        given = one, one, 5 * one, math.log(0.5) * one, beta * one, 2 * one
        assert chunked(*given, chunk)[1].item() == pytest.approx(expected)
        assert recurrent("gated delta", *given)[1].item() == pytest.approx(expected)
        assert delta_by_matrices(*given)[1].item() == pytest.approx(expected)


def test_the_last_value_of_a_key_stays():
    keys = F.normalize(torch.randn(1, 1, 3, 64), dim=-1)[:, :, [0, 1, 0]]  # the first key once more
    values = torch.randn(1, 1, 3, 64)
    found = read_back("delta", keys, values)
    assert_close(found[:, :, 2], values[:, :, 2])
    assert_close(found[:, :, 0], values[:, :, 2])


# ---- What a state holds ----


def test_keys_at_right_angles_are_no_trouble_for_either_rule():
    keys, values = torch.eye(16)[None, None], torch.randn(1, 1, 16, 16)
    for rule in ("linear", "delta", "softmax"):
        assert_close(read_back(rule, keys, values), values)


def test_random_pairs():
    """Errors grow with the pairs; correcting is better than adding; what keeps all pairs finds them all."""
    table = recall_table(64)
    for rule in ("linear", "delta"):
        errors = [line[rule] for line in table]
        assert errors == sorted(errors)
    for line in table[1:]:
        assert line["softmax"] < 0.05 < line["delta"] < line["linear"]
    by_pairs = {line["pairs"]: line for line in table}
    for n, linear, delta in ((16, 0.48, 0.36), (32, 0.70, 0.55), (64, 0.99, 0.77), (128, 1.41, 1.03)):
        assert by_pairs[n]["linear"] == pytest.approx(linear, abs=0.03)
        assert by_pairs[n]["delta"] == pytest.approx(delta, abs=0.03)
    assert table[0]["delta"] < 1e-5 and table[0]["linear"] < 1e-5  # a single pair
    assert recall_error("linear", 16, 256) < recall_error("linear", 16, 64)  # a wider head holds more


# ---- The layers ----


def test_gates_of_the_layers():
    shapes = {"decay alone": (1, None), "DeltaNet": (None, 1), "Gated DeltaNet": (1, 1), "KDA": (16, 1)}
    for name, widths in shapes.items():
        layer, x = layer_of(name)
        for gate, width in zip(layer.gates(x), widths, strict=True):
            assert (gate is None) == (width is None)
            if gate is not None:
                assert gate.shape == (2, 2, 21, width)
        if widths[0]:
            assert (layer.gates(x)[0] < 0).all()


def test_kda_with_equal_channels_is_gated_deltanet():
    layer, x = layer_of("KDA")
    other, _ = layer_of("Gated DeltaNet")
    shared = {name: t for name, t in layer.state_dict().items() if not name.startswith("decay")}
    other.load_state_dict(shared, strict=False)
    assert_close(layer(x)[0], other(x)[0])  # both begin with decays that do not depend on the token
    torch.nn.init.normal_(layer.decay.proj.weight)
    assert (layer(x)[0] - other(x)[0]).abs().max() > 1e-3


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
    assert all(p.isfinite().all() and p.grad is not None for p in model.parameters())


@every_layer
def test_bfloat16(name):
    layer, x = layer_of(name)
    expected = layer.float()(x.float())[0]
    out, (state, _) = layer.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert_close(out.float(), expected, 5e-2)


def test_what_is_timed():
    q, k, v, log_decay, beta = random_inputs(40, 1, 8)
    out = {name: form() for name, form in prompt_forms(q, k, v, log_decay, beta).items()}
    assert_close(out["DeltaNet"][0], recurrent("delta", q, k, v, None, beta)[0])
    assert_close(out["Gated DeltaNet"][0], recurrent("gated delta", q, k, v, log_decay[..., :1], beta)[0])
    assert_close(out["KDA"][0], recurrent("kda", q, k, v, log_decay, beta)[0])
    assert_close(out["decay alone"][0], recurrent("decay", q, k, v, log_decay[..., :1])[0])


# ---- The script ----


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != utils.GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("the order of losses needs trained weights, and there are none")
    run = run_script("main_delta_rule.py", "--quick", "--json", "-", "--plot", "a.png", cwd=tmp_path)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert all(report["checks"].values()) and (tmp_path / "a.png").is_file()
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["softmax"]["baseline"]
    for name in LAYERS:
        row = rows[name]
        assert row["kv_bytes_per_token"] is None and row["approximate"] is True
        assert row["state_bytes"] == 4 * 3 * (3 * 64 * 64 + 3 * 3 * 192)  # and the convolution's tail
        assert row["loss_difference"] > 0.1 and math.isfinite(row["valid_loss"])  # after a single step
    (recall,) = (table for name, table in report["sweeps"].items() if "pairs" in name)
    assert all(line["softmax"] < line["delta"] < line["linear"] for line in recall[1:])
    assert "lower than that of linear" in report["why"][0]
