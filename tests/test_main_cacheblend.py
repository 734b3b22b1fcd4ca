"""Blended chunks against the full pass and against the naive twin, and what a store must keep apart."""

from functools import partial

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, cache_length
from gptlite_positions import join_caches
from inference_reuse import computed_share
from main_cacheblend import (
    ChunkStore,
    GPTlite_CacheBlend,
    at_random,
    blend_naively,
    chunk_starts,
    encode_alone,
    generate_blended,
    most_changed,
)
from main_kvcache import generate

CONTEXT = 16


@pytest.fixture(autouse=True, scope="module")
def no_gradients():
    with torch.no_grad():
        yield


def stored_alone(model, tokens, ends, start=0):
    """Chunks of tokens [1, T] that end at these positions, each computed alone, behind one another."""
    return join_caches(
        *(encode_alone(model, tokens[:, a:b], a) for a, b in zip([start, *ends], ends, strict=False))
    )


def record(choose, chosen):
    def recorded(change, n):
        chosen.append(choose(change, n))
        return chosen[-1]

    return recorded


@given(
    st.integers(0, 4),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.floats(0, 1),
    st.integers(0, 99),
)
def test_blend_equals_the_naive_twin(n_prefix, lengths, ratio, seed):
    """For any prefix, chunks and share: the same logits as with every token run through every layer."""
    model, tokens = tiny_model(GPTlite_CacheBlend, n_layers=3), random_tokens(1, CONTEXT, seed)
    ends = [n_prefix + sum(lengths[: i + 1]) for i in range(len(lengths))]
    n = min(ends[-1], CONTEXT - 1)
    ends = sorted({min(end, n) for end in ends})
    prefix = model(tokens[:, :n_prefix])[1] if n_prefix else None
    stored, chosen = stored_alone(model, tokens, ends, n_prefix), []
    logits, cache = model(
        tokens[:, n_prefix:], prefix, stored=stored, ratio=ratio, choose=record(most_changed, chosen)
    )
    kept = [i + n_prefix for i in chosen[0].tolist()] if chosen else []
    assert len(kept) == round(ratio * (n - n_prefix))
    expected = blend_naively(model, tokens, join_caches(prefix, stored), kept)
    assert_close(logits, expected)
    assert cache_length(cache) == CONTEXT and logits.shape[1] == CONTEXT - n


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_all_recomputed_is_the_full_pass(n_first, n_second, seed):
    model, tokens = tiny_model(GPTlite_CacheBlend), random_tokens(1, CONTEXT, seed)
    n = n_first + n_second
    stored = stored_alone(model, tokens, [n_first, n])
    logits, cache = model(tokens, stored=stored, ratio=1.0)
    full, full_cache = model(tokens)
    assert_close(logits, full[:, n:])
    for layer, expected in zip(cache, full_cache, strict=True):
        assert_close(layer, expected)
    assert_close(full, tiny_model(GPTlite)(tokens))


def test_a_first_chunk_is_a_prefix_and_exact():
    model, tokens = tiny_model(GPTlite_CacheBlend), random_tokens(1, CONTEXT)
    full = model(tokens)[0][:, 9:]
    first = stored_alone(model, tokens, [9])
    for ratio in (0.0, 0.5, 1.0):
        assert_close(model(tokens, stored=first, ratio=ratio)[0], full)
    assert (model(tokens, stored=stored_alone(model, tokens, [4, 9]), ratio=0.0)[0] - full).abs().max() > 1e-3


def test_keys_of_the_first_layer_need_no_context():
    model, tokens = tiny_model(GPTlite_CacheBlend), random_tokens(1, 12)
    alone, full = encode_alone(model, tokens[:, 5:], 5), model(tokens)[1]
    assert_close(alone[0], [t[:, :, 5:] for t in full[0]])
    assert (alone[1][0] - full[1][0][:, :, 5:]).abs().max() > 1e-3


def test_chunks_in_another_order_and_nothing_new():
    """Chunks A B C stored alone, asked as A C B with A as exact prefix, then as C B A.

    Their places change with the order, so nothing that was stored elsewhere is taken for them.
    """
    model, text = tiny_model(GPTlite_CacheBlend, n_layers=3), random_tokens(1, CONTEXT)
    a, b, c, new = text[:, :4], text[:, 4:8], text[:, 8:12], text[:, 12:]
    store = ChunkStore(model)
    for i, chunk in enumerate((a, b, c)):
        store.get(chunk, 4 * i)
    assert store.n_computed == 12
    for order, n_computed in (((a, c, b), 20), ((c, b, a), 28)):  # c at 4, b at 8; c at 0, b is there, a at 8
        tokens = torch.cat([*order, new], dim=1)
        first, *others = (store.get(chunk, 4 * i) for i, chunk in enumerate(order))
        assert store.n_computed == n_computed
        full = model(tokens)[0][:, 12:]
        errors = [
            (model(tokens[:, 4:], first, stored=join_caches(*others), ratio=r)[0] - full)
            .square()
            .mean()
            .item()
            for r in (0.0, 0.25, 0.5, 1.0)
        ]
        assert errors[0] > 1e-6 and errors[3] < 1e-20 and min(errors[:3]) > errors[3]
    with pytest.raises(ValueError, match="new tokens"):  # the last token has to be computed
        model(text[:, :12], stored=stored_alone(model, text, [4, 8, 12]))
    logits, _ = model(text[:, :12], stored=stored_alone(model, text, [4, 8, 11]), ratio=0.5)
    assert logits.shape[1] == 1


def test_scattered_queries_see_the_keys_up_to_their_own():
    """What stands behind a recomputed token changes neither its keys nor its values."""
    model, tokens = tiny_model(GPTlite_CacheBlend, n_layers=3), random_tokens(1, 14)
    stored = stored_alone(model, tokens, [4, 8])
    choose = lambda change, n: torch.tensor([2, 5])  # noqa: E731
    _, cache = model(tokens, stored=stored, ratio=0.25, choose=choose)
    changed = tokens.clone()
    changed[:, 10:] = (tokens[:, 10:] + 1) % 16
    _, other = model(changed, stored=stored, ratio=0.25, choose=choose)
    for (k, v), (k2, v2) in zip(cache, other, strict=True):
        assert torch.equal(k[:, :, :10], k2[:, :, :10]) and torch.equal(v[:, :, :10], v2[:, :, :10])
    assert (cache[2][0][:, :, 10:] - other[2][0][:, :, 10:]).abs().max() > 1e-3
    for layer in (1, 2):  # stored keys stay but for the chosen
        same = (cache[layer][0][:, :, :8] == stored[layer][0]).all(dim=-1).all(dim=1)[0]
        assert same.tolist() == [i not in (2, 5) for i in range(8)]


def test_a_chunk_belongs_to_its_place():
    """Learned positions: a chunk at 0 and at 5 has other keys, and nothing turns one into the other."""
    model, chunk = tiny_model(GPTlite_CacheBlend), random_tokens(1, 4)
    store = ChunkStore(model)
    at_0, at_5 = store.get(chunk, 0), store.get(chunk, 5)
    assert store.n_computed == 8 and (at_0[0][0] - at_5[0][0]).abs().max() > 1e-3
    assert store.get(chunk, 5) is at_5 and store.n_computed == 8
    padded = torch.cat([random_tokens(1, 5, seed=3), chunk], dim=1)
    assert_close(at_5[0][0], model(padded)[1][0][0][:, :, 5:])
    assert_close(at_0, model(chunk)[1])


def test_a_store_forgets_with_other_weights():
    model, chunk = tiny_model(GPTlite_CacheBlend), random_tokens(1, 4)
    store = ChunkStore(model)
    old = store.get(chunk, 3)
    model.load_state_dict(tiny_model(GPTlite_CacheBlend, seed=1).state_dict())
    new = store.get(chunk, 3)
    assert (new[1][0] - old[1][0]).abs().max() > 1e-3
    assert_close(new, encode_alone(model, chunk, 3))


def test_stored_chunks_are_not_changed_by_their_users():
    model, text = tiny_model(GPTlite_CacheBlend), random_tokens(1, 12)
    store = ChunkStore(model)

    def ask(new, ratio):
        stored = join_caches(store.get(text[:, :4], 0), store.get(text[:, 4:8], 4))
        prompt = torch.cat([text[:, :8], new], dim=1)
        return generate_blended(model, prompt, 4, CONTEXT, None, stored, ratio)

    for ratio in (0.0, 0.5):
        first = ask(text[:, 8:10], ratio)
        ask(text[:, 9:12], ratio)
        assert torch.equal(ask(text[:, 8:10], ratio), first)
    assert store.n_computed == 8 and cache_length(store.get(text[:, :4], 0)) == 4


@given(st.integers(1, 5), st.integers(0, 99))
def test_generating_behind_a_blend(n_tokens, seed):
    """All recomputed: the tokens of the model without cache. Some: each follows from the blended cache."""
    model, prompt = tiny_model(GPTlite_CacheBlend), random_tokens(1, 11, seed)
    stored = join_caches(encode_alone(model, prompt[:, 3:6], 3), encode_alone(model, prompt[:, 6:9], 6))
    prefix = model(prompt[:, :3])[1]
    out = generate_blended(model, prompt, n_tokens, CONTEXT, prefix, stored, 1.0)
    assert torch.equal(out, generate(tiny_model(GPTlite), prompt, n_tokens, CONTEXT))
    out = generate_blended(model, prompt, n_tokens, CONTEXT, prefix, stored, 0.5)
    logits, cache = model(prompt[:, 3:], prefix, stored=stored, ratio=0.5)
    for i in range(n_tokens):
        assert out[0, 11 + i] == logits[0, -1].argmax()
        logits, cache = model(out[:, 11 + i : 12 + i], cache)


def test_choices():
    change = torch.tensor([0.1, 5.0, 0.2, 3.0, 0.0, 1.0])
    assert most_changed(change, 3).tolist() == [1, 3, 5]
    assert chunk_starts(change, 3, 3).tolist() == [0, 3, 1]
    drawn = at_random(change, 4, torch.Generator().manual_seed(0)).tolist()
    assert len(set(drawn)) == 4 and set(drawn) <= set(range(6))
    counts = torch.zeros(6)
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        counts[at_random(change, 2, generator)] += 1
    assert counts.min() > 60 and counts.max() < 140  # 100 each


def test_what_is_computed_falls_with_the_share():
    """Layer 0 whole, then the chosen and the new tokens: counted at the blocks."""
    model, tokens = tiny_model(GPTlite_CacheBlend, n_layers=4), random_tokens(1, CONTEXT)
    stored = stored_alone(model, tokens, [6, 12])
    for ratio, expected in ((0.0, 4 / 16), (0.25, (16 + 3 * 7) / 64), (1.0, 1.0)):
        run = partial(model, tokens, stored=stored, ratio=ratio)
        assert computed_share(model, run, 16) == pytest.approx(expected)


def test_without_stored_chunks_it_is_the_model_with_a_cache():
    tokens = random_tokens(2, 9)
    assert torch.equal(tiny_model(GPTlite_CacheBlend)(tokens)[0], tiny_model(GPTlite_KVCache)(tokens)[0])


def test_bad_arguments():
    model, tokens = tiny_model(GPTlite_CacheBlend), random_tokens(1, CONTEXT)
    stored = stored_alone(model, tokens, [4, 8])
    for call in (
        partial(model, tokens.expand(2, -1), stored=stored),
        partial(model, tokens, stored=stored, ratio=1.5),
        partial(model, tokens, stored=stored, ratio=float("nan")),
        partial(model, tokens[:, :8], stored=stored),
        partial(model, tokens, model(tokens[:, :1])[1], stored=stored),  # one more than the context
    ):
        with pytest.raises(ValueError, match="a blend is of 1 text"):
            call()
    for start, n in ((13, 4), (-1, 4), (0, 0), (0, 17)):
        with pytest.raises(ValueError, match="do not fit the context of 16"):
            encode_alone(model, random_tokens(1, n), start)


def test_float32_and_one_layer():
    model, tokens = tiny_model(GPTlite_CacheBlend, dtype=torch.float32), random_tokens(1, CONTEXT)
    stored = stored_alone(model, tokens, [5, 10])
    assert_close(model(tokens, stored=stored, ratio=1.0)[0], model(tokens)[0][:, 10:])
    one = tiny_model(GPTlite_CacheBlend, n_layers=1)  # its keys are exact: nothing is left to repair
    stored = stored_alone(one, tokens, [5, 10])
    for ratio in (0.0, 0.3):
        assert_close(one(tokens, stored=stored, ratio=ratio)[0], one(tokens)[0][:, 10:])


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "kl.png"
    run = run_script(
        "main_cacheblend.py", "--quick", "--json", "-", "--plot", figure, checkpoint=distilled_checkpoint
    )
    assert run.status == 0, run.stderr
    assert figure.stat().st_size > 1000 and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    assert rows["prefix cache"]["same_output"] and rows["recompute 100%"]["same_output"]
    none, some, every = (rows[f"recompute {n}%"] for n in (0, 15, 100))
    assert none["approximate"] and some["approximate"] and none["kl"] > every["kl"]
    assert abs(every["kl"]) < 1e-5 and abs(every["loss_difference"]) < 1e-4
    assert none["computed"] < some["computed"] < rows["prefix cache"]["computed"] < 1.0
    assert every["computed"] == pytest.approx(rows["prefix cache"]["computed"])
    assert none["stored_mb"] == pytest.approx(192 * 4608 / 1e6)
    quality = next(
        lines for title, lines in run.json["sweeps"].items() if "behind" in title and "ms" not in title
    )
    kl = {(line["chosen"], line["recomputed"]): line["KL (nats)"] for line in quality}
    assert kl["most changed", 0.6] < kl["most changed", 0.0]


@pytest.mark.parametrize(
    "options",
    [
        ["--n-chunks", "1"],
        ["--chunk-len", "40"],
        ["--prompt-len", "253"],
    ],
)
def test_script_refuses_what_cannot_be_blended(distilled_checkpoint, options):
    run = run_script("main_cacheblend.py", "--quick", *options, checkpoint=distilled_checkpoint)
    assert run.status == 2 and run.stdout == "" and "checks" not in run.stderr
