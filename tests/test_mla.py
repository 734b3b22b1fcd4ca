"""Multi-head latent attention against GPTlite with the same projections multiplied out, and PyTorch's."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import inference_training as training
import inference_utils as utils
import main_mla
import main_mla_absorption
import main_mla_conversion
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, window_mask
from main_gqa import attention_inputs
from main_kvcache import generate, generate_kvcache
from main_mla import GPTlite_MLA, MultiHeadAttention_MLA, convert_mha_to_mla, low_rank
from main_mla_conversion import convert_mha_to_mla_calibrated, square_root

SIGNATURES = {
    MultiHeadAttention_MLA: "d_model n_heads d_head dropout_p d_latent",
    MultiHeadAttention_MLA.forward: "self x kv_cache causal_mask max_seqlen",
    GPTlite_MLA: "vocab_size d_model n_heads d_head n_layers dropout_p seqlen d_latent",
    GPTlite_MLA.forward: "self x kv_cache max_seqlen",
    convert_mha_to_mla: "state_dict n_heads d_head d_latent",
}
CONVERSIONS = {
    "plain": lambda state, n_heads, r, _: convert_mha_to_mla(state, n_heads, 32 // n_heads, r),
    "weighted": lambda state, n_heads, r, inputs: convert_mha_to_mla_calibrated(
        state, n_heads, 32 // n_heads, r, inputs, two_sided=False
    ),
    "two-sided": lambda state, n_heads, r, inputs: convert_mha_to_mla_calibrated(
        state, n_heads, 32 // n_heads, r, inputs
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature(function):
    assert " ".join(inspect.signature(function).parameters) == SIGNATURES[function]


def test_names_of_the_attention():
    mha = MultiHeadAttention_MLA(32, 2, 16, 0.0, 8)
    assert mha.kv_down_proj.weight.shape == (8, 32)
    assert mha.key_up_proj.weight.shape == mha.value_up_proj.weight.shape == (32, 8)
    assert mha.absorb is None and not hasattr(mha, "key_proj")


def mla_model(d_latent, absorb=None, **kwargs):
    model = tiny_model(GPTlite_MLA, d_latent=d_latent, **kwargs)
    for block in model.blocks:
        block.mha.absorb = absorb
    return model


def multiplied_out(model, model_class):
    """GPTlite, or its cached form, with W_up W_down as its projections: the same function."""
    n_heads, d_head = model.blocks[0].mha.n_heads, model.blocks[0].mha.d_head
    state = {}
    for name, tensor in model.state_dict().items():
        if "_up_proj" in name:
            down = model.state_dict()[f"{name.rsplit('.', 2)[0]}.kv_down_proj.weight"]
            name = name.replace("_up_proj", "_proj")
            state[name] = tensor @ down
            state[name.replace("weight", "bias")] = torch.zeros(n_heads * d_head)
        elif "kv_down_proj" not in name:
            state[name] = tensor
    reference = tiny_model(model_class, n_heads=n_heads, d_head=d_head)
    reference.load_state_dict(state)
    return reference


# ---- The attention ----


@given(
    B=st.integers(1, 3),
    H=st.integers(1, 3),
    d_latent=st.integers(1, 12),
    Sq=st.integers(1, 7),
    n_past=st.integers(0, 9),
    D=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_absorbed_and_explicit_equal_pytorch(B, H, d_latent, Sq, n_past, D, seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mha = MultiHeadAttention_MLA(12, H, D, 0.0, d_latent).double()
        Q = torch.randn(B, H, Sq, D, dtype=torch.float64)
        C = torch.randn(B, Sq + n_past, d_latent, dtype=torch.float64)
    K, V = (mha.split_heads(proj(C)) for proj in (mha.key_up_proj, mha.value_up_proj))
    mask = torch.ones(Sq, Sq + n_past, dtype=torch.bool).tril(n_past)
    expected = F.scaled_dot_product_attention(Q, K, V, mask)  # scaled by the size of a head
    for attention in (mha.absorbed_attention, mha.explicit_attention):
        assert_close(attention(Q, C), expected)
        assert_close(attention(Q, C, mask), expected)
        assert_close(attention(Q, C, False), F.scaled_dot_product_attention(Q, K, V))


def test_absorbed_equals_explicit_in_float32_at_full_size():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mha = MultiHeadAttention_MLA(384, 6, 64, 0.0, 96)
        Q, C = torch.randn(2, 6, 33, 64), torch.randn(2, 70, 96)
    assert_close(mha.absorbed_attention(Q, C), mha.explicit_attention(Q, C), 5e-5)


@pytest.mark.parametrize("absorb", [True, False])
def test_row_without_a_key_is_zero_with_finite_gradients(absorb):
    mha = MultiHeadAttention_MLA(8, 2, 4, 0.0, 3)
    attention = mha.absorbed_attention if absorb else mha.explicit_attention
    Q, C = torch.randn(1, 2, 3, 4, requires_grad=True), torch.randn(1, 3, 3, requires_grad=True)
    out = attention(Q, C, torch.tensor([[False] * 3, [True] * 3, [True, False, False]]))
    assert_close(out[:, :, 0], torch.zeros(1, 2, 4))
    out.sum().backward()
    assert Q.grad.isfinite().all() and C.grad.isfinite().all()


def test_takes_what_computes_less():
    for d_latent in (1, 5, 16, 17, 31, 32):
        mha = MultiHeadAttention_MLA(32, 2, 16, 0.0, d_latent)
        for Sq in (1, 2, 16, 17, 40, 300):
            costs = [
                main_mla_absorption.attention_operations(Sq, 10**6, 2, 16, d_latent, absorb)
                for absorb in (True, False)
            ]
            assert mha.absorbs(Sq) == (costs[0] <= costs[1] * (1 + 1e-4))
        assert mha.absorbs(1)
        mha.absorb = False
        assert not mha.absorbs(1)


def test_dropout_only_while_training():
    for absorb in (True, False):
        model = mla_model(8, absorb, dropout_p=0.5)
        tokens = random_tokens(2, 9)
        assert torch.equal(model(tokens)[0], model(tokens)[0])
        model.train()
        assert not torch.equal(model(tokens)[0], model(tokens)[0])


# ---- The model and its cache ----


@pytest.mark.parametrize("absorb", [None, True, False])
@pytest.mark.parametrize("n_heads, d_latent", [(2, 8), (1, 32), (4, 1)])
def test_equals_the_model_multiplied_out(absorb, n_heads, d_latent):
    model = mla_model(d_latent, absorb, n_heads=n_heads, d_head=32 // n_heads)
    reference, tokens = multiplied_out(model, GPTlite), random_tokens(3, 16)
    assert_close(model(tokens)[0], reference(tokens))
    for prompt_len, n_new in ((1, 15), (5, 11), (15, 1)):
        prompt = tokens[:, :prompt_len]
        assert torch.equal(generate_kvcache(model, prompt, n_new, 16), generate(reference, prompt, n_new, 16))


@given(
    absorb=st.sampled_from([None, True, False]),
    d_latent=st.sampled_from([1, 8, 32]),
    B=st.integers(1, 3),
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    window=st.integers(1, 16),
    seed=st.integers(0, 99),
)
def test_any_split_of_the_input_across_the_window(absorb, d_latent, B, pieces, window, seed):
    model = mla_model(d_latent, absorb)
    tokens = random_tokens(B, sum(pieces), seed)
    expected, _ = multiplied_out(model, GPTlite_KVCache)(tokens, max_seqlen=window)
    logits, cache = [], None
    for piece in tokens.split(pieces, dim=1):
        before = None if cache is None else [c.clone() for (c,) in cache]
        given_cache = cache
        out, cache = model(piece, cache, max_seqlen=window)
        logits.append(out)
        if before is not None:  # a cache that is given is not modified: another text can go on from it
            assert_close([c for (c,) in given_cache], before, 0.0)
    assert_close(torch.cat(logits, dim=1), expected)
    assert all(c.shape == (B, min(sum(pieces), window), d_latent) for (c,) in cache)


def test_cache_rolls_at_the_moment_the_window_is_full():
    """KV-5: contents 012 -> 0123 -> 1234 -> 2345, and a new text starts empty."""
    model, tokens = mla_model(8), random_tokens(1, 6)
    block = model.blocks[0]
    x = model.token_embedding(tokens) + model.position_embedding(torch.tensor([0, 1, 2, 3, 3, 3]))
    latents = block.mha.kv_down_proj(block.ln1(x))
    _, cache = model(tokens[:, :3], max_seqlen=4)
    assert_close(cache[0][0], latents[:, :3])
    for newest in (3, 4, 5):
        _, cache = model(tokens[:, newest : newest + 1], cache, max_seqlen=4)
        assert_close(cache[0][0], latents[:, max(newest - 3, 0) : newest + 1])
    assert torch.equal(model(tokens[:, :3], max_seqlen=4)[0], model(tokens[:, :3], max_seqlen=4)[0])


@pytest.mark.parametrize("absorb", [True, False])
def test_prompt_longer_than_the_window(absorb):
    """KV-4: changing the last token leaves the rows before it; every row sees its own 4 latents."""
    model, tokens = mla_model(8, absorb), random_tokens(2, 7)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 16
    logits, other = model(tokens, max_seqlen=4)[0], model(changed, max_seqlen=4)[0]
    assert_close(logits[:, :-1], other[:, :-1])
    assert utils.largest_difference(logits[:, -1], other[:, -1]) > 1e-3
    mha, x = model.blocks[0].mha, torch.randn(2, 7, 32, dtype=torch.float64)
    C = mha.kv_down_proj(x)
    Q, K, V = (mha.split_heads(t) for t in (mha.query_proj(x), mha.key_up_proj(C), mha.value_up_proj(C)))
    banded = F.scaled_dot_product_attention(Q, K, V, window_mask(7, 7, 4))
    assert_close(mha(x, max_seqlen=4)[0], mha.out_proj(mha.merge_heads(banded)))


def test_last_query_sees_every_key():
    """KV-1: one query on 5 cached latents, then two new tokens on 6."""
    model, tokens = mla_model(8), random_tokens(1, 8)
    full = model(tokens)[0]
    logits, cache = model(tokens[:, :5])
    one, cache = model(tokens[:, 5:6], cache)
    two, _ = model(tokens[:, 6:], cache)
    assert_close(torch.cat([logits, one, two], dim=1), full)


def test_bytes_of_the_cache():
    _, cache = mla_model(8)(random_tokens(3, 7))
    assert utils.cache_bytes_per_token([t for c in cache for t in c], 7, 3) == 2 * 8 * 8


def test_bad_input():
    with pytest.raises(ValueError, match="no tokens"):
        mla_model(8)(random_tokens(1, 0))
    for d_latent in (0, -1, 33):
        with pytest.raises(ValueError, match="d_latent"):
            mla_model(d_latent)


# ---- Conversions ----


def calibrated(n_heads=2, seed=0, n_texts=8):
    """A model, tokens, its logits, and the inputs of its attention on them."""
    model = tiny_model(GPTlite, n_heads=n_heads, d_head=32 // n_heads, seed=seed)
    tokens = random_tokens(n_texts, 16, seed)
    return model, tokens, model(tokens), attention_inputs(model, tokens)


@pytest.mark.parametrize("how", CONVERSIONS)
@pytest.mark.parametrize("n_heads", [1, 2, 4])
@pytest.mark.parametrize("n_texts", [1, 8])  # 16 inputs span less than the width of 32
def test_latent_as_wide_as_the_model_is_exact(how, n_heads, n_texts):
    model, tokens, expected, inputs = calibrated(n_heads, n_texts=n_texts)
    state = model.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    converted = CONVERSIONS[how](state, n_heads, 32, inputs)
    assert all(torch.equal(state[name], before[name]) for name in state)  # not modified
    mla = utils.load_weights(mla_model(32, n_heads=n_heads, d_head=32 // n_heads), converted)
    unseen = random_tokens(4, 16, 7)
    assert_close(mla(tokens)[0], expected, 1e-8)
    assert_close(mla(unseen)[0], model(unseen), 1e-6)
    _, cache = mla(tokens)
    mha_numbers = 2 * 32  # a token and layer
    assert cache[0][0].shape[-1] * 2 == mha_numbers


def test_latent_as_wide_as_the_model_is_exact_in_float32():
    model, tokens, _, _ = calibrated()
    model = model.float()
    inputs = attention_inputs(model, tokens)
    for convert in CONVERSIONS.values():
        mla = mla_model(32, dtype=torch.float32)
        utils.load_weights(mla, convert(model.state_dict(), 2, 32, inputs))
        assert_close(mla(tokens)[0], model(tokens), 1e-3)


def errors(model, state, converted, inputs, layer=0):
    """Mean squared errors of keys and values, of scores, and of each head's part of the output."""
    old = {n.rsplit("mha.")[1]: t for n, t in state.items() if n.startswith(f"blocks.{layer}.mha.")}
    new = {n.rsplit("mha.")[1]: t for n, t in converted.items() if n.startswith(f"blocks.{layer}.mha.")}
    x, D = inputs[layer], model.blocks[0].mha.d_head
    latents = x @ new["kv_down_proj.weight"].T
    dk = latents @ new["key_up_proj.weight"].T - x @ old["key_proj.weight"].T
    dv = latents @ new["value_up_proj.weight"].T - x @ old["value_proj.weight"].T
    dk, dv = dk - dk.mean(0), dv - dv.mean(0)  # equal parts are invisible or repaired
    q = (x @ old["query_proj.weight"].T + old["query_proj.bias"]).view(len(x), -1, D)
    scores = torch.einsum("ihd,jhd->hij", q, dk.view(len(x), -1, D)) / D**0.5
    out = torch.einsum("jhd,ehd->jhe", dv.view(len(x), -1, D), old["out_proj.weight"].view(32, -1, D))
    squared = [(t**2).mean(0).sum() if t.ndim == 2 else (t**2).sum() / len(x) for t in (dk, dv, out)]
    return squared[0] + squared[1], (scores**2).sum() / len(x) ** 2, squared[2]


@settings(max_examples=10)
@given(d_latent=st.integers(1, 31), seed=st.integers(0, 99))
def test_each_conversion_is_the_best_in_its_own_measure(d_latent, seed):
    model, _, _, inputs = calibrated(seed=seed)
    state = model.state_dict()
    found = {}
    for how, convert in CONVERSIONS.items():
        found[how] = errors(model, state, convert(state, 2, d_latent, inputs), inputs)
    weighted, two_sided = ([found[how][0] for how in CONVERSIONS], [e[1] * 64 + e[2] for e in found.values()])
    assert weighted[1] <= min(weighted[0], weighted[2]) * (1 + 1e-3) + 1e-4
    assert two_sided[2] <= min(two_sided[:2]) * (1 + 1e-3) + 1e-4


def test_plain_conversion_is_the_truncated_svd():
    state = tiny_model(GPTlite).state_dict()
    converted = convert_mha_to_mla(state, 2, 16, 5)
    up = torch.cat([converted[f"blocks.1.mha.{name}_up_proj.weight"] for name in ("key", "value")])
    M = torch.cat([state[f"blocks.1.mha.{name}_proj.weight"] for name in ("key", "value")])
    error = M - up @ converted["blocks.1.mha.kv_down_proj.weight"]
    assert_close((error**2).sum(), (torch.linalg.svdvals(M)[5:] ** 2).sum())
    alone = convert_mha_to_mla(tiny_model(GPTlite).blocks[0].mha.state_dict(), 2, 16, 5)
    assert alone["kv_down_proj.weight"].shape == (5, 32)


def test_mean_error_of_the_values_is_repaired():
    """At rank 1 the mean of what attention adds stays that of the model when it sees every key alike."""
    model, _, _, inputs = calibrated()
    state = model.state_dict()
    for two_sided in (False, True):
        converted = convert_mha_to_mla_calibrated(state, 2, 16, 1, inputs, two_sided)
        name = "blocks.0.mha.{}".format
        W_o, x = state[name("out_proj.weight")], inputs[0].mean(0)
        before = W_o @ (state[name("value_proj.weight")] @ x + state[name("value_proj.bias")])
        latent = converted[name("kv_down_proj.weight")] @ x
        after = W_o @ converted[name("value_up_proj.weight")] @ latent
        before, after = before + state[name("out_proj.bias")], after + converted[name("out_proj.bias")]
        assert_close(after, before, 1e-8)


@given(n=st.integers(1, 6), rank=st.integers(0, 6), seed=st.integers(0, 99))
def test_square_root(n, rank, seed):
    A = torch.randn(2, n, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    C = A @ A.mT
    root, inverse = square_root(C)
    assert_close(root @ inverse, torch.eye(n, dtype=torch.float64).expand(2, n, n), 1e-6)
    scale = C.diagonal(dim1=-2, dim2=-1).sum().item()
    assert_close(root @ root, C, 1e-5 * max(scale, 1e-6))


def test_conversions_that_cannot_be():
    state = tiny_model(GPTlite).state_dict()
    for d_latent in (0, 33):
        with pytest.raises(ValueError, match="rank"):
            convert_mha_to_mla(state, 2, 16, d_latent)
    with pytest.raises(ValueError, match="3 heads of 16"):
        convert_mha_to_mla(state, 3, 16, 4)
    with pytest.raises(ValueError, match="3 heads of 16"):
        convert_mha_to_mla_calibrated(state, 3, 16, 4, calibrated()[3])
    M = torch.randn(4, 3)
    up, down = low_rank(M, 3)
    assert_close(up @ down, M)


def test_training_a_converted_model_lowers_its_loss():
    model = mla_model(4, dtype=torch.float32)
    losses = training.train_steps(model, torch.arange(400) % 7, 12, 3e-3, 4, 16)
    assert losses[-1] < losses[0]


# ---- The scripts ----


def test_operations_of_absorption():
    count = main_mla_absorption.attention_operations
    assert count(1, 100, 6, 64) == 4 * 6 * 64 * 100
    assert count(1, 100, 6, 64, 96, True) == 4 * 6 * 96 * 100 + 2 * 2 * 6 * 64 * 96
    assert count(3, 100, 6, 64, 96, False) == 4 * 6 * 64 * 100 * 3 + 2 * 2 * 6 * 64 * 96 * 100


@pytest.fixture
def trained(checkpoint):
    if checkpoint != utils.GPTLITE_CKPT_PATH:
        pytest.skip("the order of losses needs trained weights, and there is no checkpoints/gptlite.pth")
    return checkpoint


def test_script(trained):
    run = run_script("main_mla.py", "--quick", "--repeats", "1", "--json", "-", checkpoint=trained)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert report["checks"] and all(report["checks"].values())
    rows = {row["method"]: row for row in report["rows"]}
    mha = rows["MHA"]
    assert mha["baseline"] and mha["kv_bytes_per_token"] == 2 * 6 * 384 * 4
    for r in (384, 48):
        absorbed, explicit, plain = (rows[f"MLA {r}, {how}"] for how in ("absorbed", "explicit", "plain SVD"))
        for row in (absorbed, explicit, plain):
            assert row["kv_bytes_per_token"] * 768 == mha["kv_bytes_per_token"] * r
        assert absorbed["forward_tokens"] == explicit["forward_tokens"] == mha["forward_tokens"]
    exact = rows["MLA 384, absorbed"]
    assert abs(exact["valid_loss"] - mha["valid_loss"]) < 1e-4
    assert rows["MLA 48, absorbed"]["valid_loss"] < rows["MLA 48, plain SVD"]["valid_loss"]
    assert rows["MLA 48, absorbed"]["valid_loss"] < rows["GQA 1, aligned"]["valid_loss"]
    assert rows["MHA, control"]["uptrained_loss"] is not None
    assert report["why"]


def test_script_of_conversions(trained):
    run = run_script("main_mla_conversion.py", "--quick", "--json", "-", checkpoint=trained)
    assert run.status == 0, run.stderr + run.stdout
    rows = {row["method"]: row for row in run.json["rows"]}
    assert all(run.json["checks"].values())
    assert rows["weighted 48"]["loss_rise"] < rows["SVD 48"]["loss_rise"]
    assert rows["SVD 384"]["same_best_token"] > 0.999


def test_script_of_absorption():
    options = ("--quick", "--repeats", "1", "--json", "-", "--batch-size", "1")
    run = run_script("main_mla_absorption.py", *options)
    assert run.status == 0, run.stderr + run.stdout
    assert len(run.json["checks"]) == 12 and all(run.json["checks"].values())
    for title, table in run.json["sweeps"].items():
        rows = {row["form"]: row for row in table}
        assert rows["MLA 384, absorbed"]["cache MB"] * 2 == pytest.approx(rows["MHA"]["cache MB"])
        if title.startswith("Decode"):
            assert all(
                rows[f"MLA {r}, absorbed"]["GFLOP"] < rows[f"MLA {r}, explicit"]["GFLOP"]
                for r in (384, 192, 96, 48)
            )


def test_script_refuses_a_latent_that_is_too_wide(checkpoint):
    run = run_script("main_mla.py", "--quick", "--d-latent", "400", checkpoint=checkpoint)
    assert run.status == 2
    assert "d_latent" in run.stderr and "Traceback" not in run.stderr


def test_conversion_is_shared_by_the_scripts():
    assert main_mla_conversion.low_rank is main_mla.low_rank
