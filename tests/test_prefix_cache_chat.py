"""The store of chats against a search by hand, and chats in turns against the model without a cache."""

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, cache_bytes, cache_length, cut_cache, expand_cache
from inference_utils import StepClock
from linear_packed import pack_linears
from main_kvcache import generate, generate_kvcache
from main_prefix_cache import compute_prefix_cache
from prefix_cache_chat import PrefixStore, chats_in_turns, generate_with_store

CONTEXT = 16
BYTES = 2 * 2 * 2 * 16 * 8  # of a token: layers, k and v, heads, head size, float64


@pytest.fixture(autouse=True, scope="module")
def no_gradients():
    with torch.no_grad():
        yield


def tensors(kv_cache):
    return [t for kv in kv_cache for t in kv]


def store_of(*sequences, capacity_bytes=10**9, model=None):
    """A store with the caches of these token sequences, of a given model or of a tiny_model."""
    store, model = PrefixStore(capacity_bytes), model or tiny_model(GPTlite_KVCache)
    store.use(model)
    for tokens in sequences:
        store.put(tokens, compute_prefix_cache(model, torch.tensor([tokens], dtype=torch.int64)))
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
    model = tiny_model(GPTlite_KVCache)
    store = store_of(prompt[0].tolist(), model=model)
    with StepClock(model) as clock:
        tokens, n_hit = generate_with_store(model, store, prompt, 3, CONTEXT)
    assert n_hit == 6 and clock.forward_tokens == 3  # the last of the prompt, two of the three new ones
    assert torch.equal(tokens, generate_kvcache(model, prompt, 3, CONTEXT))
    one = random_tokens(1, 1)
    assert generate_with_store(model, store_of(one[0].tolist(), model=model), one, 2, CONTEXT)[1] == 0


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


def set_in_place(model, other):
    with torch.no_grad():
        model.fc_out.weight.copy_(other.fc_out.weight)
        model.blocks[1].mha.key_proj.weight.copy_(other.blocks[1].mha.key_proj.weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, other: model.load_state_dict(other.state_dict()),
        lambda model, other: model.load_state_dict(other.state_dict(), assign=True),
        set_in_place,
        lambda model, other: setattr(model.blocks[0].mha, "key_proj", other.blocks[0].mha.key_proj),
        lambda model, other: model.float(),
        lambda model, other: torch.optim.SGD(model.parameters(), 1.0).step(),
    ],
    ids=["load", "assign", "in place", "replaced", "other type", "optimizer"],
)
def test_new_weights_find_nothing_of_the_old(change):
    """Case LO-2: the weights of one model object are replaced between two requests."""
    model, other = (tiny_model(GPTlite_KVCache, seed=seed) for seed in (0, 1))
    prompt, store = random_tokens(1, 7), PrefixStore(10**9)
    assert [generate_with_store(model, store, prompt, 3, CONTEXT)[1] for _ in range(2)] == [0, 6]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    change(model, other)
    assert store.match(prompt[0].tolist()) == (0, None) and store.n_bytes == 0
    for n_hit in (0, 6):
        tokens, found = generate_with_store(model, store, prompt, 3, CONTEXT)
        assert found == n_hit and torch.equal(tokens, generate_kvcache(model, prompt, 3, CONTEXT))


def test_new_weights_of_packed_layers_find_nothing_of_the_old():
    """Packed weights have no address: the store must see that they are others all the same."""
    model, other = (
        pack_linears(tiny_model(GPTlite_KVCache, seed=seed, dtype=torch.float32)) for seed in (0, 1)
    )
    prompt, store = random_tokens(1, 7), PrefixStore(10**9)
    assert [generate_with_store(model, store, prompt, 3, CONTEXT)[1] for _ in range(2)] == [0, 6]
    model.load_state_dict(other.state_dict())
    tokens, found = generate_with_store(model, store, prompt, 3, CONTEXT)
    assert found == 0 and torch.equal(tokens, generate_kvcache(other, prompt, 3, CONTEXT))


def test_another_model_finds_nothing():
    """Case LO-2: none, A, B, A through one store; each output is that of its own cold run."""
    prompt, store = random_tokens(1, 7), store_of([1, 2, 3])
    a, b = (tiny_model(GPTlite_KVCache, seed=seed) for seed in (0, 1))
    for model, n_hit in ((a, 0), (a, 6), (b, 0), (b, 6), (a, 0)):
        tokens, found = generate_with_store(model, store, prompt, 3, CONTEXT)
        assert found == n_hit and torch.equal(tokens, generate_kvcache(model, prompt, 3, CONTEXT))
    unknown = PrefixStore(10**9)
    unknown.put(prompt[0].tolist(), compute_prefix_cache(b, prompt))
    assert generate_with_store(a, unknown, prompt, 3, CONTEXT)[1] == 0
    for seed in range(3):  # a model that may come to lie where the last one was
        model = tiny_model(GPTlite_KVCache, seed=seed)
        assert generate_with_store(model, store, prompt, 3, CONTEXT)[1] == 0
        del model


def test_views_are_counted_and_kept_by_their_own_bytes():
    """Case PC-7: neither a longer cache behind a view nor what its owner writes next matters."""
    model, tokens = tiny_model(GPTlite_KVCache), random_tokens(1, 16)[0].tolist()
    whole = compute_prefix_cache(model, torch.tensor([tokens]))
    expected = [t[..., :2, :].clone() for t in tensors(whole)]
    stacked = torch.stack([torch.stack(kv) for kv in whole])  # one tensor for all, as buffers are
    views = {
        "cut": cut_cache(whole, 2),
        "buffers": [(k[..., :2, :], v[..., :2, :]) for k, v in stacked],
        "rows": [tuple(t[:1, :, :2] for t in kv) for kv in expand_cache(whole, 3)],
    }
    for name, view in views.items():
        store = PrefixStore(2 * BYTES)
        store.put(tokens[:2], view)
        storages = [t.untyped_storage() for t in tensors(store.match(tokens)[1])]
        assert store.n_bytes == 2 * BYTES == sum(storage.nbytes() for storage in storages), name
        for t in tensors(view):
            t.add_(0 if name == "rows" else 1)
        assert_close(tensors(store.match(tokens)[1]), expected)
        for t in tensors(view):
            t.sub_(0 if name == "rows" else 1)


def test_nothing_to_store_changes_nothing():
    store = store_of([1, 2], [3, 4])
    for empty in (None, []):
        store.put([], empty)
    assert list(store.entries) == [(1, 2), (3, 4)] and store.n_bytes == 4 * BYTES


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


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.booleans(), st.integers(0, 99))
def test_chats_go_on_from_what_was_said(n_chats, n_turns, n_tokens, keep, seed):
    """Each prompt is the chat so far and its next message; answers are those without any cache."""
    model, store, system = tiny_model(GPTlite_KVCache), PrefixStore(10**9), random_tokens(1, 4, seed)
    messages = random_tokens(n_chats, n_turns * 2, seed + 1).unflatten(1, (n_turns, 2))
    history = [system] * n_chats
    turns = chats_in_turns(model, store, system, messages, n_tokens, CONTEXT, keep)
    for number, (tokens, n_hit, prompt) in enumerate(turns):
        turn, i = divmod(number, n_chats)
        assert torch.equal(prompt, torch.cat([history[i], messages[i : i + 1, turn]], dim=1))
        history[i] = generate(tiny_model(GPTlite), prompt, n_tokens, CONTEXT)
        assert torch.equal(tokens, history[i]) and (keep or n_hit == 0)
    assert number + 1 == n_chats * n_turns and bool(store.entries) == keep


def test_what_exceeds_the_context_and_an_empty_prompt_are_refused():
    model = tiny_model(GPTlite_KVCache)
    with pytest.raises(ValueError, match="more than the context of 16"):
        generate_with_store(model, PrefixStore(10**6), random_tokens(1, 12), 5, CONTEXT)
    with pytest.raises(ValueError, match="empty"):
        generate_with_store(model, PrefixStore(10**6), random_tokens(1, 5)[:, :0], 4, CONTEXT)


@pytest.mark.slow
def test_script(distilled_checkpoint):
    options = ["--quick", "--repeats", "2", "--json", "-"]
    run = run_script("more/prefix_cache_chat.py", *options, checkpoint=distilled_checkpoint)
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
    for row in rows.values():  # two runs of each, in alternation: a median and a spread
        low, high = row["tokens_per_s_spread"]
        assert low <= row["tokens_per_s"] <= high and row["ttft_ms_spread"]


@pytest.mark.slow
def test_one_turn_and_too_many_turns(distilled_checkpoint):
    script, options = "more/prefix_cache_chat.py", ["--quick", "--json", "-", "--n-turns"]
    run = run_script(script, *options, "1", "--n-chats", "1", checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr
    run = run_script(script, *options, "40", checkpoint=distilled_checkpoint)
    assert run.status == 2 and "more than the context of 256" in run.stderr and run.stdout == ""
