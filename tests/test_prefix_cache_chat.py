"""The store of chats against a search by hand, and chats in turns against the model without a cache."""

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from inference_utils import StepClock
from main_kvcache import generate, generate_kvcache
from main_prefix_cache import cache_bytes, cache_length, compute_prefix_cache, expand_cache
from main_prefix_cache_chat import PrefixStore, generate_with_store

CONTEXT = 16
BYTES = 2 * 2 * 2 * 16 * 8  # of a token: layers, k and v, heads, head size, float64


@pytest.fixture(autouse=True, scope="module")
def no_gradients():
    with torch.no_grad():
        yield


def tensors(kv_cache):
    return [t for kv in kv_cache for t in kv]


def store_of(*sequences, capacity_bytes=10**9):
    """A store with the caches of these token sequences; its model is tiny_model's."""
    store = PrefixStore(capacity_bytes)
    for tokens in sequences:
        store.put(tokens, compute_prefix_cache(tiny_model(GPTlite_KVCache), torch.tensor([tokens])))
    return store


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=5), st.data())
def test_longest_common_beginning_wins(sequences, data):
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    store = store_of(*sequences)
    n, kv_cache = store.match(tokens)
    by_hand = [k for s in sequences for k in range(len(s) + 1) if s[:k] == tokens[:k] and k < len(tokens)]
    assert n == max(by_hand, default=0)
    assert cache_length(kv_cache) == n
    if n:
        expected = compute_prefix_cache(tiny_model(GPTlite_KVCache), torch.tensor([tokens[:n]]))
        assert_close(tensors(kv_cache), tensors(expected))
    keys = list(store.entries)
    assert not any(a != b and b[: len(a)] == a for a in keys for b in keys), "one entry contains another"
    assert store.n_bytes == sum(map(cache_bytes, store.entries.values())) == BYTES * sum(map(len, keys))


def test_an_early_difference_must_miss():
    store = store_of([1, 2, 3, 4, 5])
    assert store.match([9, 2, 3, 4, 5, 6]) == (0, None)
    assert store.match([1, 9, 3, 4, 5, 6])[0] == 1
    assert store.match([1, 2, 3, 4, 5, 6])[0] == 5
    assert PrefixStore(0).match([1, 2]) == (0, None)


def test_a_stored_prompt_still_computes_its_last_token():
    prompt = random_tokens(1, 7)
    model, store = tiny_model(GPTlite_KVCache), store_of(prompt[0].tolist())
    with StepClock(model) as clock:
        tokens, n_hit = generate_with_store(model, store, prompt, 3, CONTEXT)
    assert n_hit == 6 and clock.forward_tokens == 3  # the last of the prompt, two of the three new ones
    assert torch.equal(tokens, generate_kvcache(model, prompt, 3, CONTEXT))
    one = random_tokens(1, 1)
    assert generate_with_store(model, store_of(one[0].tolist()), one, 2, CONTEXT)[1] == 0


def test_zero_new_tokens_store_nothing():
    model, store = tiny_model(GPTlite_KVCache), PrefixStore(10**6)
    prompt = random_tokens(1, 5)
    tokens, n_hit = generate_with_store(model, store, prompt, 0, CONTEXT)
    assert torch.equal(tokens, prompt) and n_hit == 0 and not store.entries


def test_least_recently_used_leaves_and_capacity_holds():
    model = tiny_model(GPTlite_KVCache)
    a, b, c, long = [1, 2, 3], [2, 3, 4], [3, 4, 5], [4] * 7
    store = store_of(a, b, capacity_bytes=6 * BYTES)
    assert store.n_bytes == 6 * BYTES and store.n_evicted == 0
    store.match([*a, 0])  # a is now the more recent one
    store.put(c, compute_prefix_cache(model, torch.tensor([c])))
    assert list(store.entries) == [tuple(a), tuple(c)] and store.n_evicted == 1
    assert store.match([*b, 0]) == (0, None)
    store.put(long, compute_prefix_cache(model, torch.tensor([long])))  # larger than the room: not stored
    assert list(store.entries) == [tuple(a), tuple(c)] and store.n_bytes == 6 * BYTES
    store.put([*c, 1], compute_prefix_cache(model, torch.tensor([[*c, 1]])))  # takes the place of c, a leaves
    assert list(store.entries) == [(*c, 1)] and store.n_bytes == 4 * BYTES
    store.put(c, compute_prefix_cache(model, torch.tensor([c])))  # contained already
    assert list(store.entries) == [(*c, 1)]


def test_put_refuses_what_does_not_fit_together():
    model = tiny_model(GPTlite_KVCache)
    kv_cache = compute_prefix_cache(model, random_tokens(1, 4))
    with pytest.raises(ValueError, match="3 tokens"):
        PrefixStore(10**6).put([1, 2, 3], kv_cache)
    with pytest.raises(ValueError, match="batch 1"):
        PrefixStore(10**6).put([1, 2, 3, 4], expand_cache(kv_cache, 2))


@given(st.integers(1, 3), st.integers(0, 4), st.integers(0, 99), st.booleans())
def test_chats_in_turns_equal_chats_without_reuse(n_chats, n_tokens, seed, small):
    """All turns through one store, in a full-sized and in a thrashing one, against the uncached model."""
    plain, model = tiny_model(GPTlite), tiny_model(GPTlite_KVCache)
    store = PrefixStore(7 * BYTES if small else 10**9)
    histories = [random_tokens(1, 3, 1000)] * n_chats
    for turn in range(2):
        for i in range(n_chats):
            message = random_tokens(1, 2, seed + 10 * turn + i)
            prompt = torch.cat([histories[i], message], dim=1)
            with StepClock(model) as clock:
                histories[i], n_hit = generate_with_store(model, store, prompt, n_tokens, CONTEXT)
            assert torch.equal(histories[i], generate(plain, prompt, n_tokens, CONTEXT))
            assert clock.forward_tokens == (prompt.shape[1] - n_hit + n_tokens - 1 if n_tokens else 0)
            assert store.n_bytes <= store.capacity_bytes
            if not small and turn and n_tokens:  # all but the newest answer's last token and the message
                assert n_hit >= prompt.shape[1] - 3


def test_what_exceeds_the_context_and_an_empty_prompt_are_refused():
    model = tiny_model(GPTlite_KVCache)
    with pytest.raises(ValueError, match="more than the context of 16"):
        generate_with_store(model, PrefixStore(10**6), random_tokens(1, 12), 5, CONTEXT)
    with pytest.raises(ValueError, match="empty"):
        generate_with_store(model, PrefixStore(10**6), random_tokens(1, 5)[:, :0], 4, CONTEXT)


def test_script(checkpoint):
    options = ["--quick", "--repeats", "1", "--json", "-"]
    run = run_script("main_prefix_cache_chat.py", *options, checkpoint=checkpoint)
    assert run.status == 0, run.stderr
    assert run.json["checks"] and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    assert all(row["same_output"] for row in rows.values())
    chats = [rows[name] for name in ("no reuse", "system prompt", "whole history")]
    shares = [chat["hit_share"] for chat in chats]
    assert shares[0] == 0 and shares == sorted(set(shares))
    computed = [chat["forward_tokens"] for chat in chats]
    assert computed == sorted(set(computed), reverse=True)
    half = rows["history, half the room"]
    assert half["n_evicted"] > 0 and half["stored_mb"] < chats[-1]["stored_mb"]
