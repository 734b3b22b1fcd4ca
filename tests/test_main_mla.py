"""Multi-head latent attention against GPTlite with the same projections multiplied out, and PyTorch's."""

import inspect
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_training as training
import inference_utils as utils
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, window_mask
from linear_packed import can_pack, pack_linears
from main_kvcache import generate, generate_kvcache
from main_mla import GPTlite_MLA, MultiHeadAttention_MLA, convert_mha_to_mla, low_rank
from mla_absorption import attention_operations

SIGNATURES = {
    MultiHeadAttention_MLA: "d_model n_heads d_head dropout_p d_latent",
    MultiHeadAttention_MLA.forward: "self x kv_cache causal_mask max_seqlen",
    GPTlite_MLA: "vocab_size d_model n_heads d_head n_layers dropout_p seqlen d_latent",
    GPTlite_MLA.forward: "self x kv_cache max_seqlen",
    convert_mha_to_mla: "state_dict n_heads d_head d_latent",
}
FORMS = {"absorbed": (True, False), "explicit": (False, False), "by cost": (True, True)}
every_form = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature(function):
    assert " ".join(inspect.signature(function).parameters) == SIGNATURES[function]


def test_names_of_the_attention():
    """Those of the post, whose state dictionaries load: biases in the up-projections, none below."""
    mha = MultiHeadAttention_MLA(32, 2, 16, 0.0, 8)
    shapes = {name: tuple(tensor.shape) for name, tensor in mha.state_dict().items()}
    assert shapes == {
        "query_proj.weight": (32, 32),
        "query_proj.bias": (32,),
        "kv_down_proj.weight": (8, 32),
        "key_up_proj.weight": (32, 8),
        "key_up_proj.bias": (32,),
        "value_up_proj.weight": (32, 8),
        "value_up_proj.bias": (32,),
        "out_proj.weight": (32, 32),
        "out_proj.bias": (32,),
    }
    assert mha.absorb is True


def test_as_the_post_calls_it():
    """A model, its weights by SVD, a few steps, all by position; absorb False recomputes keys and values."""
    from inference_utils import train_steps

    state = tiny_model(GPTlite, dtype=torch.float32).state_dict()
    model = GPTlite_MLA(16, 32, 2, 16, 2, 0.0, 16, 8)
    model.load_state_dict(convert_mha_to_mla(state, 2, 16, 8))
    train_steps(model, torch.arange(400) % 7, 2, 1e-3, 4, 16)
    mha, x = model.blocks[0].mha, torch.randn(3, 5, 32)
    out, cache = mha(x)
    assert out.shape == (3, 5, 32) and cache[0].shape == (3, 1, 5, 8)
    mha.absorb = False
    assert_close(mha(x)[0], out)


def mla_model(d_latent, form="absorbed", **kwargs):
    model = tiny_model(GPTlite_MLA, d_latent=d_latent, **kwargs)
    for block in model.blocks:
        block.mha.absorb, block.mha.absorb_by_cost = FORMS[form]
    return model


def multiplied_out(model, model_class):
    """GPTlite, or its cached form, with W_up W_down as its projections: the same function."""
    n_heads, d_head = model.blocks[0].mha.n_heads, model.blocks[0].mha.d_head
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("_up_proj.weight"):
            tensor = tensor @ model.state_dict()[f"{name.rsplit('.', 2)[0]}.kv_down_proj.weight"]
        if "kv_down_proj" not in name:
            state[name.replace("_up_proj", "_proj")] = tensor
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
        C = torch.randn(B, 1, Sq + n_past, d_latent, dtype=torch.float64)
    K, V = (mha.split_heads(proj(C[:, 0])) for proj in (mha.key_up_proj, mha.value_up_proj))
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
        Q, C = torch.randn(2, 6, 33, 64), torch.randn(2, 1, 70, 96)
    assert_close(mha.absorbed_attention(Q, C), mha.explicit_attention(Q, C), 5e-5)


def both(mha):
    return mha.absorbed_attention, mha.explicit_attention


def test_row_without_a_key_is_zero_with_finite_gradients():
    """Under a mask, and where the causal rule leaves the first queries none; the values' bias is zero too."""
    mha = MultiHeadAttention_MLA(8, 2, 4, 0.0, 3)
    for attention in both(mha):
        Q, C = torch.randn(1, 2, 3, 4, requires_grad=True), torch.randn(1, 1, 3, 3, requires_grad=True)
        out = attention(Q, C, torch.tensor([[False] * 3, [True] * 3, [True, False, False]]))
        assert_close(out[:, :, 0], torch.zeros(1, 2, 4))
        out.sum().backward()
        assert Q.grad.isfinite().all() and C.grad.isfinite().all()
        Q, C = torch.randn(1, 2, 5, 4, requires_grad=True), torch.randn(1, 1, 3, 3, requires_grad=True)
        out = attention(Q, C)
        assert_close(out[:, :, :2], torch.zeros(1, 2, 2, 4))
        assert_close(out[:, :, 2:], attention(Q[:, :, 2:], C))
        out.sum().backward()
        assert Q.grad.isfinite().all() and C.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_16_bits_do_not_overflow(dtype):
    """All of q and k 40, values 1 and 3. A turned query is 102,400, a score 102,400 before it is scaled."""
    mha = MultiHeadAttention_MLA(64, 1, 64, 0.0, 2).to(dtype)
    with torch.no_grad():
        for projection in (mha.key_up_proj, mha.value_up_proj):
            projection.weight.zero_()
            projection.bias.zero_()
        mha.key_up_proj.weight[:, 0] = 40.0
        mha.value_up_proj.weight[:, 1] = 1.0
    Q = torch.full((1, 1, 1, 64), 40.0, dtype=dtype)
    C = torch.tensor([[1.0, 1.0], [1.0, 3.0]], dtype=dtype).view(1, 1, 2, 2)
    for attention in both(mha):
        out = attention(Q, C)
        assert out.dtype == dtype
        assert_close(out, torch.full((1, 1, 1, 64), 2.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("Sq, Sk", [(1, 33), (7, 33)])
def test_agrees_with_float64_in_16_bits(dtype, Sq, Sk):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mha = MultiHeadAttention_MLA(32, 2, 16, 0.0, 8).to(dtype)
        Q, C = torch.randn(2, 2, Sq, 16).to(dtype), torch.randn(2, 1, Sk, 8).to(dtype)
    actual = [attention(Q, C) for attention in both(mha)]
    mha.double()
    for one, attention in zip(actual, both(mha), strict=True):
        assert_close(one, attention(Q.double(), C.double()))


def record(form, taken, Q, *_):
    taken.append(form)
    return torch.zeros_like(Q)


def test_takes_what_computes_less():
    """Counted with turning queries into the latents' space and results back, at any number of keys."""
    for d_latent in (1, 5, 16, 17, 31, 32):
        mha = mla_model(d_latent, "by cost").blocks[0].mha
        for Sq, Sk in ((1, 1), (1, 2), (1, 300), (2, 2), (17, 17), (40, 40), (5, 300), (200, 300)):
            costs = [attention_operations(Sq, Sk, 2, 16, d_latent, absorb) for absorb in (True, False)]
            assert mha.is_cheaper(Sq, Sk) == (costs[0] <= costs[1])
        taken = []
        for form in ("absorbed", "explicit"):
            setattr(mha, f"{form}_attention", partial(record, form, taken))
        mha.float()
        with torch.no_grad():
            _, cache = mha(torch.randn(1, 12, 32))
            mha(torch.randn(1, 1, 32), cache)
        # a prompt without a past: absorbed computes less only for latents no wider than a head
        assert taken == ["absorbed" if d_latent <= 16 else "explicit", "absorbed"]


def test_dropout_only_while_training():
    for form in ("absorbed", "explicit"):
        model = mla_model(8, form, dropout_p=0.5)
        tokens = random_tokens(2, 9)
        assert torch.equal(model(tokens)[0], model(tokens)[0])
        model.train()
        assert not torch.equal(model(tokens)[0], model(tokens)[0])


# ---- The model and its cache ----


@every_form
@pytest.mark.parametrize("n_heads, d_latent", [(2, 8), (1, 32), (4, 1)])
def test_equals_the_model_multiplied_out(form, n_heads, d_latent):
    model = mla_model(d_latent, form, n_heads=n_heads, d_head=32 // n_heads)
    reference, tokens = multiplied_out(model, GPTlite), random_tokens(3, 16)
    assert_close(model(tokens)[0], reference(tokens))
    for prompt_len, n_new in ((1, 15), (5, 11), (15, 1)):
        prompt = tokens[:, :prompt_len]
        assert torch.equal(generate_kvcache(model, prompt, n_new, 16), generate(reference, prompt, n_new, 16))


@given(
    form=st.sampled_from([*FORMS]),
    d_latent=st.sampled_from([1, 8, 32]),
    B=st.integers(1, 3),
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    window=st.integers(1, 16),
    seed=st.integers(0, 99),
)
def test_any_split_of_the_input_across_the_window(form, d_latent, B, pieces, window, seed):
    model = mla_model(d_latent, form)
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
    assert all(c.shape == (B, 1, min(sum(pieces), window), d_latent) for (c,) in cache)


def test_cache_rolls_at_the_moment_the_window_is_full():
    """KV-5: contents 012 -> 0123 -> 1234 -> 2345, and a new text starts empty."""
    model, tokens = mla_model(8), random_tokens(1, 6)
    block = model.blocks[0]
    x = model.token_embedding(tokens) + model.position_embedding(torch.tensor([0, 1, 2, 3, 3, 3]))
    latents = block.mha.kv_down_proj(block.ln1(x))
    _, cache = model(tokens[:, :3], max_seqlen=4)
    assert_close(cache[0][0][:, 0], latents[:, :3])
    for newest in (3, 4, 5):
        _, cache = model(tokens[:, newest : newest + 1], cache, max_seqlen=4)
        assert_close(cache[0][0][:, 0], latents[:, max(newest - 3, 0) : newest + 1])
    assert torch.equal(model(tokens[:, :3], max_seqlen=4)[0], model(tokens[:, :3], max_seqlen=4)[0])


@every_form
def test_prompt_longer_than_the_window(form):
    """KV-4: changing the last token leaves the rows before it; every row sees its own 4 latents."""
    model, tokens = mla_model(8, form), random_tokens(2, 7)
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


def test_packing_leaves_what_absorbing_reads():
    model = mla_model(8, dtype=torch.float32)
    tokens = random_tokens(2, 9)
    expected = model(tokens)[0]
    packed = pack_linears(model)
    assert_close(packed(tokens)[0], expected)
    mha = packed.blocks[0].mha
    assert not mha.key_up_proj.weight.is_mkldnn and not mha.value_up_proj.weight.is_mkldnn
    assert mha.query_proj.weight.is_mkldnn == can_pack(torch.empty(8, 8))


def test_bad_input():
    with pytest.raises(ValueError, match="no tokens"):
        mla_model(8)(random_tokens(1, 0))
    for d_latent in (0, -1, 33):
        with pytest.raises(ValueError, match="d_latent"):
            mla_model(d_latent)


# ---- Conversions ----


def test_plain_conversion_is_the_truncated_svd():
    state = tiny_model(GPTlite).state_dict()
    converted = convert_mha_to_mla(state, 2, 16, 5)
    up = torch.cat([converted[f"blocks.1.mha.{name}_up_proj.weight"] for name in ("key", "value")])
    M = torch.cat([state[f"blocks.1.mha.{name}_proj.weight"] for name in ("key", "value")])
    error = M - up @ converted["blocks.1.mha.kv_down_proj.weight"]
    assert_close((error**2).sum(), (torch.linalg.svdvals(M)[5:] ** 2).sum())
    S = torch.linalg.svdvals(M)[:5].sqrt()  # half of the singular values on each side
    assert_close(up.norm(dim=0), S)
    assert_close(converted["blocks.1.mha.kv_down_proj.weight"].norm(dim=1), S)
    for name in ("key", "value"):
        old = state[f"blocks.1.mha.{name}_proj.bias"]
        assert torch.equal(converted[f"blocks.1.mha.{name}_up_proj.bias"], old)
    assert torch.equal(converted["blocks.1.mha.out_proj.bias"], state["blocks.1.mha.out_proj.bias"])
    alone = convert_mha_to_mla(tiny_model(GPTlite).blocks[0].mha.state_dict(), 2, 16, 5)
    assert alone["kv_down_proj.weight"].shape == (5, 32)


def test_conversions_that_cannot_be():
    state = tiny_model(GPTlite).state_dict()
    for d_latent in (0, 33):
        with pytest.raises(ValueError, match="rank"):
            convert_mha_to_mla(state, 2, 16, d_latent)
    with pytest.raises(ValueError, match="3 heads of 16"):
        convert_mha_to_mla(state, 3, 16, 4)
    with pytest.raises(ValueError, match="no key_proj"):
        convert_mha_to_mla(convert_mha_to_mla(state, 2, 16, 4), 2, 16, 4)
    M = torch.randn(4, 3)
    up, down = low_rank(M, 3)
    assert_close(up @ down, M)


def test_training_a_converted_model_lowers_its_loss():
    model = mla_model(4, dtype=torch.float32)
    losses = training.train_steps(model, torch.arange(400) % 7, 12, 3e-3, 4, 16)
    assert losses[-1] < losses[0]


# ---- The script ----


def test_script(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != utils.GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("the order of losses needs trained weights, and there are none")
    run = run_script("main_mla.py", "--quick", "--json", "-", "--plot", "a.png", cwd=tmp_path)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert all(report["checks"].values()) and (tmp_path / "a.png").is_file()
    rows = {row["method"]: row for row in report["rows"]}
    mha = rows["MHA"]
    assert mha["baseline"] and mha["kv_bytes_per_token"] == 2 * 3 * 192 * 4
    for r in (192, 24):
        absorbed, explicit = (rows[f"MLA {r}, {form}"] for form in ("absorbed", "explicit"))
        assert absorbed["kv_bytes_per_token"] == explicit["kv_bytes_per_token"] == 3 * r * 4
        assert absorbed["forward_tokens"] == explicit["forward_tokens"] == mha["forward_tokens"]
        assert absorbed["uptrained_loss"] is not None and "uptrained_loss" not in explicit
    for form in FORMS:
        row = rows[f"MLA 192, {form}"]
        assert row["same_output"] is True and abs(row["valid_loss"] - mha["valid_loss"]) < 1e-4
    narrow, grouped = rows["MLA 24, absorbed"], rows["GQA 1, mean"]
    assert narrow["valid_loss"] < grouped["valid_loss"]
    assert narrow["kv_bytes_per_token"] < grouped["kv_bytes_per_token"]
    assert rows["MHA, trained on"]["valid_loss"] == pytest.approx(mha["valid_loss"], abs=0.05)


def test_script_refuses_a_latent_that_is_too_wide(distilled_checkpoint):
    run = run_script("main_mla.py", "--quick", "--d-latent", "400", checkpoint=distilled_checkpoint)
    assert run.status == 2
    assert "d_latent" in run.stderr and "Traceback" not in run.stderr
