"""A stored prefix against prompts computed in full; the store of chats against a search by hand."""

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from inference_utils import StepClock
from main_kvcache import generate, generate_kvcache
from main_prefix_cache import (
    PrefixStore,
    cache_bytes,
    cache_length,
    common_length,
    compute_prefix_cache,
    cut_cache,
    expand_cache,
    generate_with_prefix,
    generate_with_store,
)

CONTEXT = 16


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


BYTES = 2 * 2 * 2 * 16 * 8  # of a token: layers, k and v, heads, head size, float64


# One prefix for many requests


@given(st.integers(0, 12), st.integers(1, 4), st.integers(1, 3), st.data())
def test_requests_behind_a_prefix_equal_whole_prompts(n_prefix, n_request, batch_size, data):
    """Against the model without any cache, up to the last token that fits the context."""
    n_tokens = data.draw(st.integers(0, CONTEXT - n_prefix - n_request))
    prompts = random_tokens(batch_size, n_prefix + n_request, data.draw(st.integers(0, 99)))
    prompts[:, :n_prefix] = prompts[0, :n_prefix].clone()
    expected = generate(tiny_model(GPTlite), prompts, n_tokens, CONTEXT)
    model = tiny_model(GPTlite_KVCache)
    prefix_cache = compute_prefix_cache(model, prompts[:1, :n_prefix])
    assert cache_length(prefix_cache) == n_prefix
    with StepClock(model) as clock:
        generated = generate_with_prefix(model, prefix_cache, prompts[:, n_prefix:], n_tokens, CONTEXT)
    assert torch.equal(torch.cat([prompts[:, :n_prefix], generated], dim=1), expected)
    computed = n_request + n_tokens - 1 if n_tokens else 0  # 0 new tokens need no step
    assert clock.forward_tokens == batch_size * computed


def test_logits_behind_a_prefix_in_float32():
    model = tiny_model(GPTlite_KVCache, dtype=torch.float32)
    tokens = random_tokens(3, 14)
    tokens[:, :9] = tokens[0, :9].clone()
    prefix_cache = expand_cache(compute_prefix_cache(model, tokens[:1, :9]), 3)
    assert_close(model(tokens[:, 9:], prefix_cache)[0], model(tokens)[0][:, 9:])


def test_stored_prefix_is_not_changed_by_its_users():
    """Case PC-7: P+S1, P+S2, P+S1 with one stored cache."""
    model, prefix = tiny_model(GPTlite_KVCache), random_tokens(1, 6)
    stored = compute_prefix_cache(model, prefix)
    copies = [t.clone() for t in tensors(stored)]
    first, second = random_tokens(1, 3, seed=1), random_tokens(2, 4, seed=2)
    once = generate_kvcache(model, first, 5, CONTEXT, kv_cache=stored)  # the form that the post shows
    generate_with_prefix(model, stored, second, 5, CONTEXT)
    assert torch.equal(generate_kvcache(model, first, 5, CONTEXT, kv_cache=stored), once)
    assert torch.equal(generate_with_prefix(model, stored, first, 5, CONTEXT), once)
    assert cache_length(stored) == 6
    assert all(map(torch.equal, tensors(stored), copies))


def test_batch_shares_the_memory_of_the_prefix():
    stored = compute_prefix_cache(tiny_model(GPTlite_KVCache), random_tokens(1, 6))
    expanded = expand_cache(stored, 4)
    assert [t.shape[0] for t in tensors(expanded)] == [4] * 4
    assert [t.data_ptr() for t in tensors(expanded)] == [t.data_ptr() for t in tensors(stored)]
    assert expand_cache(None, 4) is None


@pytest.mark.parametrize("sizes", [(8, 6, 3), (16, 1, 0), (0, 17, 0), (0, 16, 1)])
def test_what_exceeds_the_context_is_refused_with_the_sizes(sizes):
    n_prefix, n_request, n_tokens = sizes
    model = tiny_model(GPTlite_KVCache)
    stored = compute_prefix_cache(model, random_tokens(1, n_prefix))
    with pytest.raises(ValueError) as error:
        generate_with_prefix(model, stored, random_tokens(1, n_request), n_tokens, CONTEXT)
    for number in (*sizes, sum(sizes), CONTEXT):
        assert str(number) in str(error.value)
    with pytest.raises(ValueError, match="17"):
        compute_prefix_cache(model, random_tokens(1, 17))
    with pytest.raises(ValueError, match="more than the context of 16"):
        generate_with_store(model, PrefixStore(10**6), random_tokens(1, 12), 5, CONTEXT)


def test_empty_prefix_and_empty_request():
    model, request = tiny_model(GPTlite_KVCache), random_tokens(1, 5)
    assert compute_prefix_cache(model, request[:, :0]) is None
    assert torch.equal(
        generate_with_prefix(model, None, request, 4, CONTEXT), generate_kvcache(model, request, 4, CONTEXT)
    )
    stored = compute_prefix_cache(model, request)
    with pytest.raises(ValueError, match="empty"):
        generate_with_prefix(model, stored, request[:, :0], 4, CONTEXT)
    with pytest.raises(ValueError, match="empty"):
        generate_with_store(model, PrefixStore(10**6), request[:, :0], 4, CONTEXT)


# The store


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


def test_wrong_reuse_changes_the_logits():
    """What the comparison of all token ids prevents: one early token differs, the rest is equal."""
    model, tokens = tiny_model(GPTlite_KVCache), random_tokens(1, 12)
    changed = tokens.clone()
    changed[0, 1] = (tokens[0, 1] + 1) % 16
    wrong = model(changed[:, 8:], compute_prefix_cache(model, tokens[:, :8]))[0][:, -1]
    right = model(changed)[0][:, -1]
    assert (wrong - right).abs().max() > 1e-3
    n, kv_cache = store_of(tokens[0, :8].tolist()).match(changed[0].tolist())
    assert n == 1
    assert_close(model(changed[:, n:], kv_cache)[0][:, -1], right)


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


def test_common_length_and_cut():
    assert [common_length(a, b) for a, b in [([], [1]), ([1, 2], [1, 2, 3]), ([1, 2, 4], [1, 3, 4])]] == [
        0,
        2,
        1,
    ]
    kv_cache = compute_prefix_cache(tiny_model(GPTlite_KVCache), random_tokens(1, 5))
    assert cut_cache(kv_cache, 0) is None
    assert cache_length(cut_cache(kv_cache, 3)) == 3


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


# The script


def test_script(checkpoint, tmp_path):
    figure = tmp_path / "ttft.png"
    options = ["--quick", "--repeats", "1", "--json", "-", "--plot", figure]
    run = run_script("main_prefix_cache.py", *options, checkpoint=checkpoint)
    assert run.status == 0, run.stderr
    assert figure.stat().st_size > 1000
    assert run.json["checks"] and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    assert all(row["same_output"] for row in rows.values())
    for batch in ("batch 1", "batch 8"):
        without, reused = rows[f"no reuse, {batch}"], rows[f"prefix cache, {batch}"]
        assert without["baseline"] and not reused["baseline"]
        n_sequences = int(batch.split()[1])
        assert without["forward_tokens"] - reused["forward_tokens"] == 180 * n_sequences
        assert reused["stored_mb"] == pytest.approx(180 * 18_432 / 1e6)
    chats = [rows[f"chat: {name}"] for name in ("no reuse", "system prompt", "whole history")]
    shares = [chat["hit_share"] for chat in chats]
    assert shares[0] == 0 and shares == sorted(set(shares))
    computed = [chat["forward_tokens"] for chat in chats]
    assert computed == sorted(set(computed), reverse=True)
    half = rows["chat: history, half the room"]
    assert half["n_evicted"] > 0 and half["stored_mb"] < chats[-1]["stored_mb"]
    wrong = next(lines for title, lines in run.json["sweeps"].items() if "differs" in title)
    assert all(line["KL (nats)"] > 0 for line in wrong) and wrong[0]["reusable"] == 8


def test_script_refuses_what_does_not_fit(checkpoint):
    for options, words in (
        (["--prompt-len", "240", "--n-tokens", "30"], ("240", "30", "270", "256")),
        (["--shared", "1.5"], ("1.5",)),
    ):
        run = run_script("main_prefix_cache.py", "--quick", *options, checkpoint=checkpoint)
        assert run.status == 2 and run.stdout == ""
        assert len(run.stderr.strip().splitlines()) == 1 and all(word in run.stderr for word in words)
