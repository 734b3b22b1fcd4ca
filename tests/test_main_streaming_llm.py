"""Streams past the context: what is held, at which positions, and each short cut against its long form."""

from functools import partial

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_bounded import GPTlite_Bounded, RollingCache
from gptlite_kvcache import GPTlite_KVCache
from main_kvcache import generate
from main_streaming_llm import (
    GPTlite_Stream,
    RotarySinkCache,
    WatchingCache,
    generate_reencode,
    kept_part,
    recomputed_logits,
    reencoded_logits,
    rotate,
)


def draw(B, H, T, D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, T, D, generator=generator, dtype=torch.float64) for _ in range(3)]


def stream(window, n_sinks, cyclic=False, **kwargs):
    make = partial(RollingCache, window, n_sinks)
    return tiny_model(GPTlite_Stream, make_cache=make, cyclic=cyclic, **kwargs)


# ---- The paper's form ----


def test_rotary_scores_depend_on_the_distance_alone():
    q, k, _ = draw(1, 1, 1, 8)
    at = lambda i, j: rotate(q, torch.tensor([i])) @ rotate(k, torch.tensor([j])).mT  # noqa: E731
    assert_close(at(7, 4), at(103, 100))
    assert_close(rotate(q, torch.tensor([0])), q)
    assert abs(at(7, 4) - at(7, 5)).item() > 1e-3
    assert_close(rotate(q, torch.tensor([9])).norm(), q.norm())


def test_positions_are_places_in_the_cache():
    """2 sinks, window 3, tokens 0 to 9: 0 1 7 8 9 at 0 1 2 3 4, the newest at 4; never more than 5 held."""
    Q, K, V = draw(1, 1, 10, 4)
    cache = RotarySinkCache(3, 2)
    for t in range(10):
        cache.attend(*(x[:, :, t : t + 1] for x in (Q, K, V)))
        n = min(t + 1, 5)
        place = {int(cache.token_of[row]): int(cache.places()[row]) for row in range(n)}
        assert sorted(place) == [*range(min(t + 1, 2)), *range(max(2, t - 2), t + 1)]
        assert [place[token] for token in sorted(place)] == [*range(n)]
    assert sorted(place) == [0, 1, 7, 8, 9] and place[9] == 4


@given(T=st.integers(1, 14), window=st.integers(1, 6), n_sinks=st.integers(0, 3), pieces=st.integers(1, 5))
def test_rotary_cache_equals_the_kept_tokens_read_anew(T, window, n_sinks, pieces):
    """By definition: at each step the kept keys in their order at positions 0, 1, ..., the query last."""
    Q, K, V = draw(2, 2, T, 4)
    cache = RotarySinkCache(window, n_sinks)
    parts = zip(*(x.split(pieces, dim=2) for x in (Q, K, V)), strict=True)
    out = torch.cat([cache.attend(*part) for part in parts], dim=2)
    for t in range(T):
        kept = [j for j in range(t + 1) if j < n_sinks or j > t - window]
        place = torch.arange(len(kept))
        scores = rotate(Q[:, :, t : t + 1], place[-1:]) @ rotate(K[:, :, kept], place).mT / 2
        assert_close(out[:, :, t : t + 1], scores.softmax(dim=-1) @ V[:, :, kept])


# ---- Learned positions ----


@pytest.mark.parametrize("cyclic", [False, True])
@pytest.mark.parametrize("n_sinks", [0, 2])
def test_streams_within_the_context_are_the_model_unchanged(cyclic, n_sinks):
    tokens, model = random_tokens(2, 16), stream(16 - n_sinks, n_sinks, cyclic)
    assert_close(model(tokens)[0], tiny_model(GPTlite)(tokens))


def test_the_last_position_is_what_the_cached_model_does():
    tokens, model = random_tokens(2, 30), stream(16, 0)
    assert_close(model(tokens)[0], tiny_model(GPTlite_KVCache)(tokens)[0])


@given(
    cyclic=st.booleans(),
    n_sinks=st.integers(0, 3),
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_any_split_of_a_stream_equals_one_pass(cyclic, n_sinks, pieces):
    """2 sinks and a window of 5 are never more than 7 keys, also while an answer grows."""
    model, tokens = stream(5, n_sinks, cyclic), random_tokens(2, sum(pieces))
    logits, cache = [], None
    for piece in tokens.split(pieces, dim=1):
        out, cache = model(piece, cache)
        logits.append(out)
        assert all(k.shape[2] == 5 + n_sinks for k in cache.k)
    assert_close(torch.cat(logits, dim=1), model(tokens)[0])


def test_cyclic_positions_begin_again():
    t = torch.arange(14, 19)
    assert stream(5, 0, True).position_of(t).tolist() == [14, 15, 0, 1, 2]
    assert stream(5, 0, False).position_of(t).tolist() == [14, 15, 15, 15, 15]


def test_what_is_kept():
    tokens = torch.arange(9)[None]
    assert kept_part(tokens, 4, 0).tolist() == [[5, 6, 7, 8]]
    assert kept_part(tokens, 4, 2).tolist() == [[0, 1, 7, 8]]
    for n_kept, n_sinks in ((2, 2), (0, 0), (3, -1)):
        with pytest.raises(ValueError, match="are kept"):
            kept_part(tokens, n_kept, n_sinks)


@given(N=st.integers(1, 60), n_kept=st.integers(1, 15), sinks=st.integers(0, 3), seed=st.integers(0, 9))
def test_a_filling_at_a_time_equals_token_by_token(N, n_kept, sinks, seed):
    """The definition: a cache that is emptied when it is full, fed one token at a time."""
    n_sinks = min(sinks, n_kept - 1)
    texts, plain, cached = random_tokens(2, N, seed), tiny_model(GPTlite), tiny_model(GPTlite_KVCache)
    logits, n_encoded = reencoded_logits(plain, texts, n_kept, n_sinks)
    rows, cache, encoded = [], None, 0
    for t in range(N):
        new = texts[:, t : t + 1]
        if cache is not None and cache[0][0].shape[2] == 16:
            new, cache = kept_part(texts[:, : t + 1], n_kept, n_sinks), None
        out, cache = cached(new, cache)
        rows.append(out[:, -1])
        encoded += new.shape[1]
    assert_close(logits, torch.stack(rows, dim=1))
    assert n_encoded == encoded


@pytest.mark.parametrize("n_kept, n_sinks", [(1, 0), (8, 0), (8, 3), (15, 0)])
def test_generating_follows_the_same_rule(n_kept, n_sinks):
    cached, plain, prompt = tiny_model(GPTlite_KVCache), tiny_model(GPTlite), random_tokens(2, 11)
    tokens = generate_reencode(cached, prompt, 30, 16, n_kept, n_sinks)
    logits, _ = reencoded_logits(plain, tokens[:, :-1], n_kept, n_sinks)
    assert torch.equal(tokens[:, 11:], logits[:, 10:].argmax(dim=-1))
    assert torch.equal(tokens[:, :17], generate(plain, prompt, 6, 16))  # within the context nothing changes


def test_keeping_all_but_one_is_encoding_anew_for_each_token():
    texts, plain = random_tokens(2, 40), tiny_model(GPTlite)
    places = torch.arange(40)
    expected = recomputed_logits(plain, texts, places)
    for t in (3, 15, 20, 39):
        assert_close(expected[:, t], plain(texts[:, max(t - 15, 0) : t + 1])[:, -1])
    logits, n_encoded = reencoded_logits(plain, texts, 15)
    # a filling of 16 with 15 kept has room for one more: every second token is the last of 15 read
    assert_close(logits[:, :16], expected[:, :16])
    assert_close(logits[:, 17::2], expected[:, 17::2])
    assert n_encoded > 16 * 12


def test_the_last_token_changes_nothing_before_it():
    texts = random_tokens(2, 37)
    changed = texts.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 16
    one, other = (reencoded_logits(tiny_model(GPTlite), x, 6, 2)[0] for x in (texts, changed))
    assert_close(one[:, :-1], other[:, :-1])
    for model in (stream(5, 2), stream(5, 0, True)):
        assert_close(model(texts)[0][:, :-1], model(changed)[0][:, :-1])


def test_bad_input():
    cached = tiny_model(GPTlite_KVCache)
    for prompt_len, n_kept in ((0, 4), (5, 16)):
        with pytest.raises(ValueError, match="no room, or no text"):
            generate_reencode(cached, random_tokens(1, prompt_len), 3, 16, n_kept)
    with pytest.raises(ValueError, match="no tokens"):
        stream(4, 1)(random_tokens(1, 0))


# ---- Attention on the first tokens ----


def test_watching_counts_shares():
    model = tiny_model(GPTlite_Bounded, make_cache=partial(WatchingCache, 2, 3))
    tokens = random_tokens(2, 12)
    logits, cache = model(tokens)
    assert_close(logits, tiny_model(GPTlite)(tokens))
    Q, K, V = draw(1, 1, 8, 4)
    one = WatchingCache(2, 3)
    one.attend(Q, K, V)
    weights = (Q @ K.mT / 2).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf).softmax(dim=-1)[0, 0]
    assert_close(one.first, weights[4:, :2].sum(dim=1).mean().item())
    assert_close(one.last, sum(weights[i, i - 2 : i + 1].sum() for i in range(4, 8)).item() / 4)
    assert_close(one.even, sum(2 / (i + 1) for i in range(4, 8)) / 4, 1e-6)
    one.attend(0 * Q, K, V)
    assert_close(one.first, one.even, 1e-6)  # without preference all keys get the same


# ---- The script ----


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != utils.GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("the order of losses needs trained weights, and there are none")
    run = run_script("main_streaming_llm.py", "--quick", "--json", "-", "--plot", "a.png", cwd=tmp_path)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert all(report["checks"].values()) and (tmp_path / "a.png").is_file()
    rows = {row["method"]: row for row in report["rows"]}
    anew = rows["recomputed"]
    assert anew["baseline"] and anew["encoded"] == 256
    for name in ("re-encode 64", "re-encode 128"):
        assert abs(rows[name]["stream_difference"]) < 0.15  # a few dozen tokens are judged here
        assert rows[name]["forward_tokens"] < anew["forward_tokens"] / 10
        assert rows["last position"]["stream_loss"] - rows[name]["stream_loss"] > 0.5
        assert rows["cyclic"]["stream_loss"] - rows[name]["stream_loss"] > 0.5
    assert rows["last position"]["encoded"] == 1 < rows["re-encode 64"]["encoded"] < 2
    (mass,) = report["sweeps"].values()
    assert all(row["first 4"] + row["last 16"] <= 1 for row in mass)
