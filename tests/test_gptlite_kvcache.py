"""The caches against a banded reference in PyTorch's attention: any split of any sequence, any window."""

import io

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, large_scores, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import (
    GPTlite_KVCache,
    GPTlite_StaticKVCache,
    StaticKVCache,
    scaled_dot_product_attention_kv_cache,
    window_mask,
)
from inference_utils import cache_bytes_per_token, cached_logits

CONTEXT = 16


@pytest.fixture(autouse=True, scope="module")
def no_gradients():
    with torch.no_grad():
        yield


def band(n_tokens, window):
    """Which keys a token sees: itself and the window - 1 before it, spelled out."""
    rows = [[key <= query < key + window for key in range(n_tokens)] for query in range(n_tokens)]
    return torch.tensor(rows)  # [N, N]


def reference_logits(model, tokens, window):
    """GPTlite's weights in one pass without a cache: clamped positions, a band, PyTorch's attention."""
    positions = torch.tensor([min(i, window - 1) for i in range(tokens.shape[1])])
    x = model.token_embedding(tokens) + model.position_embedding(positions)  # [B, N, E]
    for block in model.blocks:
        mha, y = block.mha, block.ln1(x)
        Q, K, V = (
            projection(y).unflatten(-1, (mha.n_heads, mha.d_head)).transpose(1, 2)  # [B, H, N, D]
            for projection in (mha.query_proj, mha.key_proj, mha.value_proj)
        )
        out = F.scaled_dot_product_attention(Q, K, V, attn_mask=band(tokens.shape[1], window))
        x = x + mha.out_proj(out.transpose(1, 2).flatten(2))
        x = x + block.ffwd(block.ln2(x))
    return model.fc_out(model.ln(x))  # [B, N, V]


def dirty_cache(model, batch_size, window):
    """A static cache whose buffers hold NaN where nothing was written."""
    cache = StaticKVCache(model, batch_size, window)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


def feed_dynamic(model, pieces, window):
    cache, logits = None, []
    for piece in pieces:
        rows, cache = model(piece, cache, max_seqlen=window)
        logits.append(rows)
    return torch.cat(logits, dim=1), cache


def feed_static(model, pieces, cache):
    logits = []
    for piece in pieces:
        rows, same_cache = model(piece, cache)
        assert same_cache is cache
        logits.append(rows)
    return torch.cat(logits, dim=1)


# Attention of few queries over more keys


@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 6), st.integers(0, 6), st.integers(0, 99))
def test_attention_equals_pytorch(B, H, Sq, n_past, seed):
    torch.manual_seed(seed)
    Q = 3 * torch.randn(B, H, Sq, 4, dtype=torch.float64)
    K, V = (3 * torch.randn(B, H, n_past + Sq, 4, dtype=torch.float64) for _ in range(2))
    shifted = band(n_past + Sq, n_past + Sq)[n_past:]  # [Sq, Sk]
    expected = F.scaled_dot_product_attention(Q, K, V, attn_mask=shifted)
    assert_close(scaled_dot_product_attention_kv_cache(Q, K, V), expected)
    assert_close(
        scaled_dot_product_attention_kv_cache(Q, K, V, False), F.scaled_dot_product_attention(Q, K, V)
    )
    mask = torch.rand(B, 1, Sq, n_past + Sq) < 0.5
    expected = F.scaled_dot_product_attention(Q, K, V, attn_mask=mask)
    assert_close(scaled_dot_product_attention_kv_cache(Q, K, V, mask), expected)


def test_last_query_sees_every_key():
    """KV-1: with equal scores the weights are one over the number of keys seen."""
    weights = scaled_dot_product_attention_kv_cache(
        torch.zeros(1, 1, 2, 8), torch.randn(1, 1, 8, 8), torch.eye(8)[None, None]
    )
    assert_close(weights[0, 0], torch.tensor([[1 / 7] * 7 + [0.0], [1 / 8] * 8]))
    V = torch.randn(1, 1, 4, 4)
    out = scaled_dot_product_attention_kv_cache(torch.zeros(1, 1, 1, 4), torch.randn(1, 1, 4, 4), V)
    assert_close(out, V.mean(dim=2, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_larger_than_16_bits_hold(dtype):
    """With a mask, as prefills and chunks have one, and for a single query, which has none."""
    for Q, K, V, expected in large_scores(dtype):
        assert_close(scaled_dot_product_attention_kv_cache(Q, K, V), expected)
        assert_close(scaled_dot_product_attention_kv_cache(Q, K, V, band(2, 2)), expected)
        assert_close(scaled_dot_product_attention_kv_cache(Q[:, :, 1:], K, V), expected[:, :, 1:])


@pytest.mark.parametrize("model_class", [GPTlite_KVCache, GPTlite_StaticKVCache])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_with_scores_larger_than_16_bits_hold(model_class, dtype):
    """Prefill, chunk and single token, with and past the window."""
    model = tiny_model(model_class, dtype=torch.float64)
    for block in model.blocks:  # scores of about a million, most of them far from a tie
        for projection in (block.mha.query_proj, block.mha.key_proj):
            projection.weight.mul_(40)
    tokens = random_tokens(1, 12)
    model.to(dtype)
    cache = None if model_class is GPTlite_KVCache else StaticKVCache(model, 1, 8)
    options = {"max_seqlen": 8} if cache is None else {}
    for piece in tokens.split([5, 1, 4, 1, 1], dim=1):
        logits, cache = model(piece, cache, **options)
        assert logits.isfinite().all()


def test_queries_without_keys():
    """Five queries on three keys: the first two precede every key and get zeros, with finite gradients."""
    with torch.enable_grad():
        Q, K, V = (torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 3, 3))
        out = scaled_dot_product_attention_kv_cache(Q, K, V)
        grads = torch.autograd.grad(out.square().sum(), (Q, K, V))
        seen = F.scaled_dot_product_attention(Q[:, :, 2:], K, V, is_causal=True)
        wanted = torch.autograd.grad(seen.square().sum(), (Q, K, V))
    assert (out[:, :, :2] == 0).all()
    assert_close(out[:, :, 2:], seen)
    assert_close(grads, wanted)
    assert (scaled_dot_product_attention_kv_cache(Q, K[:, :, :0], V[:, :, :0]) == 0).all()


@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 14))
def test_window_mask(Sq, n_past, window):
    assert torch.equal(window_mask(Sq, n_past + Sq, window), band(n_past + Sq, window)[n_past:])


# Any split of any sequence


@st.composite
def splits(draw):
    """Tokens [B, N], cut into pieces, and a window: before, at, across and after it."""
    sizes = draw(st.lists(st.one_of(st.just(1), st.integers(1, 20)), min_size=1, max_size=8))
    tokens = random_tokens(draw(st.integers(1, 3)), sum(sizes), draw(st.integers(0, 999)))
    return tokens, tokens.split(sizes, dim=1), draw(st.integers(1, CONTEXT))


@given(splits())
def test_dynamic_cache_in_any_split_equals_one_pass(case):
    tokens, pieces, window = case
    model = tiny_model(GPTlite_KVCache)
    expected = reference_logits(model, tokens, window)
    logits, cache = feed_dynamic(model, pieces, window)
    assert_close(logits, expected)
    assert_close(feed_dynamic(model, tokens.split(1, dim=1), window)[0], expected)
    assert_close(model(tokens, max_seqlen=window)[0], expected)
    assert len(cache) == len(model.blocks)
    assert all(t.shape == (len(tokens), 2, min(tokens.shape[1], window), 16) for kv in cache for t in kv)


@given(splits())
def test_static_cache_in_any_split_equals_one_pass(case):
    """What an unused row holds, NaN here, has no effect."""
    tokens, pieces, window = case
    model = tiny_model(GPTlite_StaticKVCache)
    expected = reference_logits(model, tokens, window)
    cache = dirty_cache(model, len(tokens), window)
    assert_close(feed_static(model, pieces, cache), expected)
    assert cache.length == tokens.shape[1]
    cache.reset()  # and again in the used buffers
    assert_close(feed_static(model, tokens.split(1, dim=1), cache), expected)
    cache.reset()
    assert_close(feed_static(model, [tokens], cache), expected)


@given(splits())
def test_static_cache_holds_what_the_dynamic_one_holds(case):
    tokens, pieces, window = case
    model = tiny_model(GPTlite_StaticKVCache)
    buffers = dirty_cache(model, len(tokens), window)
    feed_static(model, pieces, buffers)
    _, cache = feed_dynamic(tiny_model(GPTlite_KVCache), pieces, window)
    state = buffers.state_dict()
    for layer, (k, v) in enumerate(cache):
        assert_close([state["k"][layer], state["v"][layer]], [k, v])


@given(st.integers(1, 3), st.integers(1, CONTEXT), st.integers(1, CONTEXT), st.integers(0, 99))
def test_caches_equal_gptlite_inside_the_window(batch_size, n_tokens, prompt_len, seed):
    prompt_len = min(prompt_len, n_tokens)
    tokens = random_tokens(batch_size, n_tokens, seed)
    expected = tiny_model(GPTlite)(tokens)
    for model_class in (GPTlite_KVCache, GPTlite_StaticKVCache):
        logits, _ = cached_logits(tiny_model(model_class), tokens, prompt_len)
        assert_close(logits, expected)


def test_five_then_one_then_two_equal_eight():
    """KV-1, in float32"""
    tokens = random_tokens(2, 8)
    model = tiny_model(GPTlite_KVCache, dtype=torch.float32)
    logits, _ = feed_dynamic(model, tokens.split([5, 1, 2], dim=1), None)
    assert_close(logits, tiny_model(GPTlite, dtype=torch.float32)(tokens), 1e-5)


def test_prompt_longer_than_the_window_sees_no_later_token():
    """KV-4: window 4, 7 tokens in one pass; the last token changes nothing before it."""
    tokens = random_tokens(1, 7)
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 16
    dynamic, static = tiny_model(GPTlite_KVCache), tiny_model(GPTlite_StaticKVCache)
    expected = reference_logits(dynamic, tokens, 4)
    for run in (
        lambda x: dynamic(x, max_seqlen=4)[0],
        lambda x: static(x, dirty_cache(static, 1, 4))[0],
    ):
        assert_close(run(tokens), expected)
        difference = (run(tokens) - run(changed)).abs().amax(dim=(0, 2))  # [T]
        assert (difference[:6] < 1e-12).all() and difference[6] > 1e-6


# What a cache holds


def tokens_in(model, keys, window):
    """The tokens, with their positions, whose keys these are: found by comparing with all keys there are."""
    block = model.blocks[0]
    table = model.token_embedding.weight[:, None] + model.position_embedding.weight[:window]  # [V, W, E]
    table = block.mha.key_proj(block.ln1(table)).flatten(0, 1)  # [V*W, H*D]
    keys = keys.transpose(0, 1).flatten(1)  # [S, H*D]
    distance, place = torch.cdist(keys, table).min(dim=1)
    assert distance.max() < 1e-6
    return [divmod(i, window) for i in place.tolist()]


@pytest.mark.parametrize("form", ["dynamic", "static"])
def test_rolling_at_the_moment_the_window_is_full(form):
    """KV-5: window 4, tokens 0, 1, 2 at once, then 3, 4, 5 one by one."""
    seen = []
    if form == "dynamic":
        model, cache = tiny_model(GPTlite_KVCache), None
    else:
        model = tiny_model(GPTlite_StaticKVCache)
        cache = dirty_cache(model, 1, 4)
    for piece in torch.arange(6)[None].split([3, 1, 1, 1], dim=1):
        if form == "dynamic":
            cache = model(piece, cache, max_seqlen=4)[1]
            keys = cache[0][0]
        else:
            feed_static(model, [piece], cache)
            keys = cache.state_dict()["k"][0]
        seen.append(tokens_in(model, keys[0], 4))
    assert seen == [
        [(0, 0), (1, 1), (2, 2)],
        [(0, 0), (1, 1), (2, 2), (3, 3)],
        [(1, 1), (2, 2), (3, 3), (4, 3)],
        [(2, 2), (3, 3), (4, 3), (5, 3)],
    ]


def test_a_cache_serves_the_next_prompt():
    """KV-5: 7 tokens in a window of 4, then 3 tokens on the same cache."""
    model = tiny_model(GPTlite_StaticKVCache)
    cache = dirty_cache(model, 2, 4)
    model(random_tokens(2, 7), cache)
    cache.reset()
    assert cache.length == 0
    second = random_tokens(2, 3, seed=1)
    logits, _ = model(second, cache)
    assert cache.length == 3
    assert_close(logits, model(second, dirty_cache(model, 2, 4))[0])
    assert_close(logits, tiny_model(GPTlite)(second))


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@given(splits(), st.integers(1, CONTEXT), st.booleans(), st.booleans())
def test_a_saved_static_cache_continues(case, n_more, used, one_by_one):
    tokens, pieces, window = case
    model = tiny_model(GPTlite_StaticKVCache)
    cache = dirty_cache(model, len(tokens), window)
    feed_static(model, pieces, cache)
    state = saved_and_loaded(cache.state_dict())
    assert state["k"].shape[-2] == min(tokens.shape[1], window)
    restored = dirty_cache(model, len(tokens), window)
    if used:
        model(random_tokens(len(tokens), 5, seed=5), restored)
    restored.load_state_dict(state)
    assert restored.length == tokens.shape[1]
    more = random_tokens(len(tokens), n_more, seed=7)
    sizes = [1] * n_more if one_by_one else [n_more]
    expected = reference_logits(model, torch.cat([tokens, more], dim=1), window)[:, -n_more:]
    assert_close(feed_static(model, more.split(sizes, dim=1), restored), expected)


def test_saved_after_three_tokens():
    """KV-5: a 16-slot cache; the empty tail is not saved, the next position is 3."""
    model = tiny_model(GPTlite_StaticKVCache)
    cache = StaticKVCache(model, 1)
    model(torch.tensor([[0, 1, 2]]), cache)
    state = saved_and_loaded(cache.state_dict())
    assert state["length"] == 3 and state["k"].shape == state["v"].shape == (2, 1, 2, 3, 16)
    restored = dirty_cache(model, 1, None)
    restored.load_state_dict(state)
    model(torch.tensor([[3]]), restored)
    keys = restored.state_dict()["k"][0]
    assert tokens_in(model, keys[0], 16) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_an_empty_cache_can_be_saved():
    model = tiny_model(GPTlite_StaticKVCache)
    restored = dirty_cache(model, 1, 4)
    restored.load_state_dict(saved_and_loaded(StaticKVCache(model, 1, 4).state_dict()))
    tokens = random_tokens(1, 3)
    assert restored.length == 0
    assert_close(model(tokens, restored)[0], tiny_model(GPTlite)(tokens))


def test_a_cache_that_has_not_rolled_fits_a_larger_window():
    model = tiny_model(GPTlite_StaticKVCache)
    cache, larger = dirty_cache(model, 1, 4), dirty_cache(model, 1, 16)
    tokens = random_tokens(1, 9)
    model(tokens[:, :4], cache)
    larger.load_state_dict(cache.state_dict())
    assert_close(model(tokens[:, 4:], larger)[0], tiny_model(GPTlite)(tokens)[:, 4:])


@pytest.mark.parametrize(
    "saved, buffers, n_tokens",
    [
        ({"batch_size": 1, "max_seqlen": 8}, {"batch_size": 1, "max_seqlen": 4}, 6),  # too small
        ({"batch_size": 1, "max_seqlen": 4}, {"batch_size": 1, "max_seqlen": 8}, 6),  # rolled: a gap
        ({"batch_size": 2, "max_seqlen": 8}, {"batch_size": 1, "max_seqlen": 8}, 3),
    ],
)
def test_a_saved_cache_that_does_not_fit(saved, buffers, n_tokens):
    model = tiny_model(GPTlite_StaticKVCache)
    cache, other = StaticKVCache(model, **saved), StaticKVCache(model, **buffers)
    model(random_tokens(saved["batch_size"], n_tokens), cache)
    with pytest.raises(ValueError, match="does not fit"):
        other.load_state_dict(cache.state_dict())
    assert other.length == 0


@given(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(1, CONTEXT))
def test_a_given_cache_is_not_modified(n_prefix, sizes, window):
    model = tiny_model(GPTlite_KVCache)
    _, cache = model(random_tokens(1, n_prefix), max_seqlen=window)
    before = [(k.clone(), v.clone()) for k, v in cache]
    first = []
    for size in sizes:  # several texts behind one prefix
        first.append(model(random_tokens(1, size, seed=size), cache, max_seqlen=window)[0])
    assert len(cache) == len(before)
    for kv, kv_before in zip(cache, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kv, kv_before, strict=True))
    for size, logits in zip(sizes, first, strict=True):
        again = model(random_tokens(1, size, seed=size), cache, max_seqlen=window)[0]
        assert torch.equal(again, logits)


@pytest.mark.parametrize("model_class", [GPTlite_KVCache, GPTlite_StaticKVCache])
def test_bytes_of_a_token(model_class):
    """2 L H D numbers, whatever the form; buffers hold them for the whole window."""
    model = tiny_model(model_class, n_layers=3, dtype=torch.float32)
    _, cache = model(random_tokens(2, 5))
    if model_class is GPTlite_KVCache:
        tensors, n_tokens = [t for kv in cache for t in kv], 5
    else:
        tensors, n_tokens = [cache.k, cache.v], 16
    assert cache_bytes_per_token(tensors, n_tokens, 2) == 2 * 3 * 2 * 16 * 4


# The same weights, the same limits


@pytest.mark.parametrize("model_class", [GPTlite_KVCache, GPTlite_StaticKVCache])
def test_gptlites_weights_load_unchanged(model_class):
    expected = tiny_model(GPTlite, seed=3)
    model = tiny_model(model_class, seed=4)
    model.load_state_dict(expected.state_dict())
    tokens = random_tokens(2, 7)
    assert_close(model(tokens)[0], expected(tokens))


@pytest.mark.parametrize("model_class", [GPTlite_KVCache, GPTlite_StaticKVCache])
def test_no_tokens(model_class):
    model = tiny_model(model_class)
    with pytest.raises(ValueError, match="no tokens"):
        model(random_tokens(1, 0))
    _, cache = model(random_tokens(1, 3))
    with pytest.raises(ValueError, match="no tokens"):
        model(random_tokens(1, 0), cache)


@pytest.mark.parametrize(
    "change", [{"batch_size": 1}, {"batch_size": 3}, {"n_layers": 3}, {"n_heads": 1}, {"d_head": 8}]
)
def test_a_static_cache_of_another_shape_is_refused(change):
    """KV-5: one row of tokens on a cache of two would be broadcast, a layer too many ignored."""
    model = tiny_model(GPTlite_StaticKVCache)
    batch_size = change.get("batch_size", 2)
    sizes = {key: value for key, value in change.items() if key != "batch_size"}
    cache = StaticKVCache(tiny_model(GPTlite_StaticKVCache, **sizes), batch_size)
    with pytest.raises(ValueError, match="does not fit: this model and batch need"):
        model(random_tokens(2, 1), cache)
    assert cache.length == 0 and not cache.k.any() and not cache.v.any()


def test_a_static_cache_keeps_no_graph_of_gradients():
    model = tiny_model(GPTlite_StaticKVCache)
    cache = StaticKVCache(model, 1, 4)
    with torch.enable_grad():
        for token in random_tokens(1, 6).split(1, dim=1):  # past the window as well
            logits, _ = model(token, cache)
            assert torch.is_grad_enabled()
            assert not (logits.requires_grad or cache.k.requires_grad or cache.v.requires_grad)


@pytest.mark.parametrize("window", [-1, 0, 17])
def test_window_that_the_model_has_no_positions_for(window):
    with pytest.raises(ValueError, match=f"max_seqlen is {window}; .* positions for 1 to 16"):
        tiny_model(GPTlite_KVCache)(random_tokens(1, 3), max_seqlen=window)
    with pytest.raises(ValueError, match=f"max_seqlen is {window}; .* positions for 1 to 16"):
        StaticKVCache(tiny_model(GPTlite_StaticKVCache), 1, window)
