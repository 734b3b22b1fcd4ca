"""Grouped-query attention against PyTorch's, and against GPTlite with each group's weights written out."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import gptlite_gqa
import inference_training as training
import inference_utils as utils
import main_gqa
from gptlite import GPTlite, MultiHeadAttention
from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa, expanded_attention, grouped_attention
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
    assert_close(grouped_attention(Q, K, V, scale=0.3), expected)


@pytest.mark.parametrize("attention", FORMS)
def test_row_without_a_key_is_zero_with_finite_gradients(attention):
    Q, K, V = (torch.randn(1, heads, 3, 4, requires_grad=True) for heads in (4, 2, 2))
    mask = torch.tensor([[False] * 3, [True] * 3, [True, False, False]])
    out = attention(Q, K, V, mask)
    assert_close(out[:, :, 0], torch.zeros(1, 4, 4))
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (Q, K, V))


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
    model, expanded, tokens = gqa_model(2), gqa_model(2), random_tokens(2, 16)
    for block in expanded.blocks:
        block.mha.expanded = True
    assert_close(expanded(tokens)[0], model(tokens)[0])


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


@pytest.mark.parametrize("model_class", [GPTlite, GPTlite_KVCache])
def test_attention_inputs(model_class):
    model, tokens = mha_model(model_class), random_tokens(5, 6)
    inputs = main_gqa.attention_inputs(model, tokens, batch_size=2)
    x = model.token_embedding(tokens) + model.position_embedding(torch.arange(6))
    assert len(inputs) == 2
    assert_close(inputs[0], model.blocks[0].ln1(x).flatten(0, 1))
    assert not model.blocks[0].mha._forward_pre_hooks


@settings(max_examples=8)
@given(n_groups=st.sampled_from(GROUPS), n_texts=st.sampled_from([1, 8]), seed=st.integers(0, 99))
def test_rotated_heads_compute_the_same(n_groups, n_texts, seed):
    model, tokens = mha_model(seed=seed), random_tokens(n_texts, 16, seed)
    state = model.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    expected = model(tokens)
    inputs = main_gqa.attention_inputs(model, tokens)
    rotated = main_gqa.align_heads(state, 4, 8, n_groups, inputs)
    assert all(torch.equal(state[name], before[name]) for name in state)  # not modified
    model.load_state_dict(rotated)
    assert_close(model(tokens), expected)


@pytest.mark.parametrize("n_groups", [1, 2])
def test_heads_that_differ_by_a_rotation_merge_without_loss(n_groups):
    model, tokens = mha_model(), random_tokens(8, 16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for block in model.blocks:
            for proj in (block.mha.key_proj, block.mha.value_proj):
                for h in range(4):
                    source = h * n_groups // 4 * (4 // n_groups)  # the first head of the group
                    noise = torch.randn(8, 8, generator=generator, dtype=torch.float64)
                    R = torch.linalg.qr(noise).Q if h != source else torch.eye(8, dtype=torch.float64)
                    for tensor in (proj.weight, proj.bias):
                        heads = tensor.view(4, 8, -1)
                        heads[h] = R @ heads[source]
    expected = model(tokens)
    inputs = main_gqa.attention_inputs(model, tokens)
    aligned = main_gqa.align_heads(model.state_dict(), 4, 8, n_groups, inputs)
    merged = utils.load_weights(gqa_model(n_groups), convert_mha_to_gqa(aligned, 4, 8, n_groups))
    assert_close(merged(tokens)[0], expected, 1e-8)
    mean = utils.load_weights(gqa_model(n_groups), convert_mha_to_gqa(model.state_dict(), 4, 8, n_groups))
    assert utils.largest_difference(mean(tokens)[0], expected) > 0.1


def test_rotations_bring_heads_closer():
    A = torch.randn(2, 3, 40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    R = main_gqa.procrustes_rotations(A)
    assert_close(R @ R.mT, torch.eye(5, dtype=torch.float64).expand(2, 3, 5, 5))

    def spread(heads):
        return ((heads - heads.mean(dim=1, keepdim=True)) ** 2).sum()

    assert spread(A @ R) < spread(A)


def test_training_a_converted_model_lowers_its_loss():
    model = gqa_model(1, dtype=torch.float32)
    data = torch.arange(400) % 7
    losses = training.train_steps(model, data, 12, 3e-3, 4, 16)
    assert losses[-1] < losses[0]
    assert not model.training


def test_parameters_that_are_saved():
    mha, gqa = MultiHeadAttention(32, 4, 8, 0.0), gptlite_gqa.MultiHeadAttention_GQA(32, 4, 8, 0.0, 1)
    assert utils.n_parameters(mha) - utils.n_parameters(gqa) == 2 * (32 - 8) * 33


# ---- The script ----


def test_script(checkpoint):
    if checkpoint != utils.GPTLITE_CKPT_PATH:
        pytest.skip("the order of losses needs trained weights, and there is no checkpoints/gptlite.pth")
    run = run_script("main_gqa.py", "--quick", "--repeats", "1", "--json", "-", checkpoint=checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert report["checks"] and all(report["checks"].values())
    rows = {row["method"]: row for row in report["rows"]}
    mha = rows["MHA"]
    assert mha["baseline"] and mha["kv_bytes_per_token"] == 2 * 6 * 6 * 64 * 4
    for G, family in ((3, "GQA"), (2, "GQA"), (1, "MQA")):
        aligned, mean = rows[f"{family} {G}, aligned"], rows[f"{family} {G}, mean"]
        assert aligned["kv_bytes_per_token"] * 6 == mha["kv_bytes_per_token"] * G
        assert aligned["forward_tokens"] == mha["forward_tokens"]
        assert aligned["n_parameters"] < mha["n_parameters"]
        assert mha["valid_loss"] < aligned["valid_loss"] < mean["valid_loss"]
        assert aligned["peak_memory_mb"] < mha["peak_memory_mb"]
    assert rows["MHA, control"]["uptrained_loss"] is not None
    assert report["why"]


def test_script_refuses_groups_that_do_not_divide(checkpoint):
    run = run_script("main_gqa.py", "--quick", "--n-groups", "4", checkpoint=checkpoint)
    assert run.status == 2
    assert run.stderr.strip().splitlines()[-1] == (
        "main_gqa.py: 6 heads cannot share 4 groups of keys and values evenly"
    )
