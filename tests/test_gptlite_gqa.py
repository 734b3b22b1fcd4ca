"""Grouped-query attention against PyTorch's, and against GPTlite with each group's weights written out."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import gptlite_gqa
import inference_training as training
import inference_utils as utils
from gptlite import GPTlite, MultiHeadAttention
from gptlite_gqa import (
    GPTlite_GQA,
    convert_mha_to_gqa,
    expanded_attention,
    grouped_attention,
    grouped_weights,
    use_expanded,
)
from gptlite_kvcache import GPTlite_KVCache, window_mask
from main_kvcache import generate, generate_kvcache

SIGNATURES = {
    gptlite_gqa.MultiHeadAttention_GQA: "d_model n_heads d_head dropout_p n_groups",
    gptlite_gqa.MultiHeadAttention_GQA.forward: "self x kv_cache causal_mask max_seqlen",
    GPTlite_GQA: "vocab_size d_model n_heads d_head n_layers dropout_p seqlen n_groups",
    GPTlite_GQA.forward: "self x kv_cache max_seqlen",
    convert_mha_to_gqa: "state_dict n_heads d_head n_groups",
}
FORMS = [grouped_attention, expanded_attention]
GROUPS = [1, 2, 4]  # of 4 heads of 8


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature(function):
    assert " ".join(inspect.signature(function).parameters) == SIGNATURES[function]


def gqa_model(n_groups, seed=0, **kwargs):
    return tiny_model(GPTlite_GQA, n_heads=4, d_head=8, n_groups=n_groups, seed=seed, **kwargs)


def mha_model(model_class=GPTlite, **kwargs):
    return tiny_model(model_class, n_heads=4, d_head=8, **kwargs)


def written_out(model, model_class):
    """GPTlite, or its cached form, with every head's own copy of its group's weights: the same function."""
    mha = model.blocks[0].mha
    state = model.state_dict()
    for name, tensor in state.items():
        if "key_proj" in name or "value_proj" in name:
            heads = tensor.view(mha.n_groups, mha.d_head, -1)
            heads = torch.cat([heads[h * mha.n_groups // mha.n_heads] for h in range(mha.n_heads)])
            state[name] = heads.reshape(-1, *tensor.shape[1:])
    reference = mha_model(model_class)
    reference.load_state_dict(state)
    return reference


# ---- The attention ----


@pytest.mark.parametrize("attention", FORMS)
@given(
    B=st.integers(1, 3),
    G=st.integers(1, 3),
    heads_per_group=st.integers(1, 3),
    Sq=st.integers(1, 7),
    n_past=st.integers(0, 9),
    D=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_attention_equals_pytorch(attention, B, G, heads_per_group, Sq, n_past, D, seed):
    generator = torch.Generator().manual_seed(seed)
    H, Sk = G * heads_per_group, Sq + n_past
    Q = torch.randn(B, H, Sq, D, generator=generator, dtype=torch.float64)
    K, V = torch.randn(2, B, G, Sk, D, generator=generator, dtype=torch.float64)
    mask = torch.ones(Sq, Sk, dtype=torch.bool).tril(n_past)
    expected = F.scaled_dot_product_attention(Q, K, V, mask, enable_gqa=True)
    assert_close(attention(Q, K, V), expected)
    assert_close(attention(Q, K, V, mask), expected)
    mask = torch.rand(B, H, Sq, Sk, generator=generator) < 0.7  # any mask, another for every head
    mask[..., 0] = True
    expected = F.scaled_dot_product_attention(Q, K, V, mask, enable_gqa=True)
    assert_close(attention(Q, K, V, mask), expected)
    assert_close(attention(Q, K, V, False), F.scaled_dot_product_attention(Q, K, V, enable_gqa=True))


def test_scale_and_width_of_values():
    Q, K, V = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)
    mask = torch.ones(3, 5, dtype=torch.bool).tril(2)
    expected = F.scaled_dot_product_attention(Q, K, V, mask, scale=0.3, enable_gqa=True)
    weights = grouped_weights(Q, K, scale=0.3)  # [B, H, Sq, Sk]
    assert_close(weights @ V.repeat_interleave(2, dim=1), expected)
    assert_close(grouped_attention(Q, K, V), F.scaled_dot_product_attention(Q, K, V, mask, enable_gqa=True))


@pytest.mark.parametrize("attention", FORMS)
def test_row_without_a_key_is_zero_with_finite_gradients(attention):
    Q, K, V = (torch.randn(1, heads, 3, 4, requires_grad=True) for heads in (4, 2, 2))
    mask = torch.tensor([[False] * 3, [True] * 3, [True, False, False]])
    out = attention(Q, K, V, mask)
    assert_close(out[:, :, 0], torch.zeros(1, 4, 4))
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (Q, K, V))


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("n_past", [-1, -2, -5])
def test_fewer_keys_than_queries(attention, n_past):
    """The causal rule leaves the first queries without any key: zeros there, and finite gradients."""
    Q, K, V = (
        torch.randn(1, heads, n, 4, dtype=torch.float64, requires_grad=True)
        for heads, n in ((4, 5), (2, 5 + n_past), (2, 5 + n_past))
    )
    out = attention(Q, K, V)
    assert_close(out[:, :, :-n_past], torch.zeros(1, 4, -n_past, 4, dtype=torch.float64))
    if n_past > -5:
        assert_close(out[:, :, -n_past:], attention(Q[:, :, -n_past:], K, V))
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (Q, K, V))


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_16_bits_do_not_overflow(attention, dtype):
    """q.k is 102,400 before it is scaled; one key ten times as large as the rest overflows scaled as well."""
    Q, K = torch.full((1, 2, 1, 64), 40.0, dtype=dtype), torch.full((1, 1, 2, 64), 40.0, dtype=dtype)
    V = torch.tensor([1.0, 3.0], dtype=dtype).view(1, 1, 2, 1).expand(1, 1, 2, 64)
    for mask in (True, False, torch.ones(1, 2, dtype=torch.bool)):
        out = attention(Q, K, V, mask)
        assert out.dtype == dtype
        assert_close(out, torch.full((1, 2, 1, 64), 2.0))
    K = torch.cat([K[:, :, :1] * 100, K[:, :, 1:]], dim=2)
    assert_close(attention(Q, K, V), torch.ones(1, 2, 1, 64))


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("Sq, Sk", [(1, 33), (7, 33), (33, 33)])
def test_agrees_with_float64_in_every_type(attention, dtype, Sq, Sk):
    generator = torch.Generator().manual_seed(0)
    Q, K, V = (
        torch.randn(2, heads, n, 16, generator=generator).to(dtype)
        for heads, n in ((6, Sq), (3, Sk), (3, Sk))
    )
    assert_close(attention(Q, K, V), attention(Q.double(), K.double(), V.double()))


def test_extremely_low_scores_do_not_lose_to_the_mask():
    Q, K = torch.full((1, 2, 1, 1), -30000.0), torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    V = torch.tensor([1.0, 7.0]).view(1, 1, 2, 1)
    out = grouped_attention(Q, K, V, torch.tensor([[True, False]]))
    assert_close(out, torch.ones(1, 2, 1, 1))


def test_dropout_only_while_training():
    model = gqa_model(2, dropout_p=0.5)
    tokens = random_tokens(2, 9)
    assert torch.equal(model(tokens)[0], model(tokens)[0])
    model.train()
    assert not torch.equal(model(tokens)[0], model(tokens)[0])


# ---- The model and its cache ----


@pytest.mark.parametrize("n_groups", GROUPS)
def test_equals_the_model_written_out(n_groups):
    model = gqa_model(n_groups)
    reference, tokens = written_out(model, GPTlite), random_tokens(3, 16)
    assert_close(model(tokens)[0], reference(tokens))
    for prompt_len, n_new in ((1, 15), (5, 11), (15, 1)):
        prompt = tokens[:, :prompt_len]
        assert torch.equal(generate_kvcache(model, prompt, n_new, 16), generate(reference, prompt, n_new, 16))


def test_expanded_model_is_equal():
    model, expanded, tokens = gqa_model(2), use_expanded(gqa_model(2)), random_tokens(2, 16)
    calls = []
    expanded.blocks[1].mha.attend = lambda *inputs: calls.append(1) or expanded_attention(*inputs)
    assert_close(expanded(tokens)[0], model(tokens)[0])
    assert calls == [1] and expanded.blocks[0].mha.attend is expanded_attention


@given(
    n_groups=st.sampled_from(GROUPS),
    B=st.integers(1, 3),
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    window=st.integers(1, 16),
    seed=st.integers(0, 99),
)
def test_any_split_of_the_input_across_the_window(n_groups, B, pieces, window, seed):
    model = gqa_model(n_groups)
    tokens = random_tokens(B, sum(pieces), seed)
    expected, expected_cache = written_out(model, GPTlite_KVCache)(tokens, max_seqlen=window)
    logits, cache = [], None
    for piece in tokens.split(pieces, dim=1):
        before = None if cache is None else [(k.clone(), v.clone()) for k, v in cache]
        given_cache = cache
        out, cache = model(piece, cache, max_seqlen=window)
        logits.append(out)
        if before is not None:  # a cache that is given is not modified: another text can go on from it
            assert_close(given_cache, before, 0.0)
    assert_close(torch.cat(logits, dim=1), expected)
    first_of_group = range(0, 4, 4 // n_groups)
    for (k, v), (all_k, all_v) in zip(cache, expected_cache, strict=True):
        assert k.shape == v.shape == (B, n_groups, min(sum(pieces), window), 8)
        assert_close((k, v), (all_k[:, first_of_group], all_v[:, first_of_group]))


def test_cache_rolls_at_the_moment_the_window_is_full():
    """KV-5: contents 012 -> 0123 -> 1234 -> 2345, and a new text starts empty."""
    model, tokens = gqa_model(2), random_tokens(1, 6)
    mha = model.blocks[0].mha
    x = model.token_embedding(tokens) + model.position_embedding(torch.tensor([0, 1, 2, 3, 3, 3]))
    keys = mha.split_heads(mha.key_proj(model.blocks[0].ln1(x)))
    _, cache = model(tokens[:, :3], max_seqlen=4)
    assert_close(cache[0][0], keys[:, :, :3])
    for newest in (3, 4, 5):
        _, cache = model(tokens[:, newest : newest + 1], cache, max_seqlen=4)
        assert_close(cache[0][0], keys[:, :, max(newest - 3, 0) : newest + 1])
    again = model(tokens[:, :3], max_seqlen=4)[0]
    assert torch.equal(again, model(tokens[:, :3], max_seqlen=4)[0])


def test_prompt_longer_than_the_window():
    """KV-4: changing the last token leaves the rows before it; every row sees its own 4 keys."""
    model, tokens = gqa_model(2), random_tokens(2, 7)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 16
    logits, other = model(tokens, max_seqlen=4)[0], model(changed, max_seqlen=4)[0]
    assert torch.equal(logits[:, :-1], other[:, :-1])
    assert not torch.equal(logits[:, -1], other[:, -1])
    mha = model.blocks[0].mha
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    Q, K, V = (mha.split_heads(proj(x)) for proj in (mha.query_proj, mha.key_proj, mha.value_proj))
    banded = F.scaled_dot_product_attention(Q, K, V, window_mask(7, 7, 4), enable_gqa=True)
    assert_close(mha(x, max_seqlen=4)[0], mha.out_proj(mha.merge_heads(banded)))


def test_last_query_sees_every_key():
    """KV-1: one query on 4 cached keys, then two new tokens on 6."""
    model, tokens = gqa_model(2), random_tokens(1, 8)
    full = model(tokens)[0]
    logits, cache = model(tokens[:, :5])
    one, cache = model(tokens[:, 5:6], cache)
    two, _ = model(tokens[:, 6:], cache)
    assert_close(torch.cat([logits, one, two], dim=1), full)


def test_bytes_of_the_cache():
    for n_groups in GROUPS:
        _, cache = gqa_model(n_groups)(random_tokens(3, 7))
        kv_bytes = utils.cache_bytes_per_token([t for kv in cache for t in kv], 7, 3)
        assert kv_bytes == 2 * 2 * n_groups * 8 * 8  # layers, k and v, groups, d_head, bytes


@pytest.mark.parametrize("n_groups", [0, -1, 3, 5, 8])
def test_groups_that_do_not_divide_the_heads(n_groups):
    with pytest.raises(ValueError, match="4 heads"):
        gqa_model(n_groups)
    with pytest.raises(ValueError, match="4 heads"):
        convert_mha_to_gqa(mha_model().state_dict(), 4, 8, n_groups)


def test_empty_prompt():
    with pytest.raises(ValueError, match="no tokens"):
        gqa_model(2)(random_tokens(1, 0))


# ---- Conversion ----


def test_as_the_post_calls_it():
    """A model, its weights by the mean, a few steps, all by position."""
    from inference_utils import train_steps

    state, train_data = mha_model(dtype=torch.float32).state_dict(), torch.arange(400) % 7
    model = GPTlite_GQA(16, 32, 4, 8, 2, 0.0, 16, 2)
    model.load_state_dict(convert_mha_to_gqa(state, 4, 8, 2))
    train_steps(model, train_data, 2, 1e-3, 4, 16)
    mha = gptlite_gqa.MultiHeadAttention_GQA(32, 4, 8, 0.0, 2)
    out, (k, v) = mha(torch.randn(3, 5, 32))
    assert out.shape == (3, 5, 32) and k.shape == v.shape == (3, 2, 5, 8)


def test_as_many_groups_as_heads_is_the_identity():
    state = mha_model().state_dict()
    converted = convert_mha_to_gqa(state, 4, 8, 4)
    assert list(converted) == list(state)
    assert all(torch.equal(converted[name], state[name]) for name in state)


def test_mean_of_consecutive_heads():
    state = mha_model().state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    converted = convert_mha_to_gqa(state, 4, 8, 2)
    name = "blocks.1.mha.value_proj.weight"
    heads = state[name].split(8)
    assert_close(converted[name], torch.cat([(heads[0] + heads[1]) / 2, (heads[2] + heads[3]) / 2]))
    heads = state["blocks.0.mha.key_proj.bias"].split(8)
    expected = torch.cat([(heads[0] + heads[1]) / 2, (heads[2] + heads[3]) / 2])
    assert_close(converted["blocks.0.mha.key_proj.bias"], expected)
    utils.load_weights(gqa_model(2), converted)
    assert all(torch.equal(state[name], before[name]) for name in state)  # not modified
    alone = convert_mha_to_gqa(mha_model().blocks[0].mha.state_dict(), 4, 8, 1)
    assert alone["key_proj.weight"].shape == (8, 32)


def test_converting_twice_is_refused():
    converted = convert_mha_to_gqa(mha_model().state_dict(), 4, 8, 2)
    with pytest.raises(ValueError, match="key_proj"):
        convert_mha_to_gqa(converted, 4, 8, 2)


def test_training_a_converted_model_lowers_its_loss():
    model = gqa_model(1, dtype=torch.float32)
    data = torch.arange(400) % 7
    losses = training.train_steps(model, data, 12, 3e-3, 4, 16)
    assert losses[-1] < losses[0]
    assert not model.training


def test_parameters_that_are_saved():
    mha, gqa = MultiHeadAttention(32, 4, 8, 0.0), gptlite_gqa.MultiHeadAttention_GQA(32, 4, 8, 0.0, 1)
    assert utils.n_parameters(mha) - utils.n_parameters(gqa) == 2 * (32 - 8) * 33
