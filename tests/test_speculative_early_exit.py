"""Self-speculation: exits behind every block and any subset give the tokens of all blocks."""

from itertools import combinations

import pytest
import torch
from helpers import assert_close, quick_report, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from main_kvcache import generate_kvcache
from main_speculative_decoding import generate_speculative
from speculative_early_exit import EarlyExit, LayerSkip, choices_of

TARGET = tiny_model(GPTlite_StaticKVCache, n_layers=3)
PLAIN = tiny_model(GPTlite_KVCache, n_layers=3)
WHOLE = tiny_model(GPTlite, n_layers=3)
SUBSETS = [layers for k in (1, 2, 3) for layers in combinations(range(3), k)]


def fresh_cache():
    cache = StaticKVCache(TARGET, 1)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


@given(st.integers(1, 16), st.integers(1, 3), st.integers(1, 6), st.integers(0, 99))
def test_tokens_equal_plain_decoding(T, n_early, draft_len, seed):
    """Any exit, prompt and draft length; the cache holds what the whole model writes."""
    prompt, n_tokens, cache = random_tokens(1, T, seed), 17 - T, fresh_cache()
    form, rounds = EarlyExit(TARGET, n_early, cache), []
    out = generate_speculative(form, prompt, n_tokens, form, draft_len, cache, rounds=rounds)
    assert torch.equal(out, generate_kvcache(PLAIN, prompt, n_tokens, 16)) and cache.length == 16
    _, expected = TARGET(out[:, :16])
    assert_close((cache.k, cache.v), (expected.k, expected.v))
    assert all(a == d for d, a in rounds) or n_early < 3


@given(st.sampled_from(SUBSETS), st.integers(1, 15), st.integers(1, 6), st.integers(0, 99))
def test_any_blocks_may_draft(layers, T, draft_len, seed):
    prompt, n_tokens, cache = random_tokens(1, T, seed), 17 - T, fresh_cache()
    draft, rounds = LayerSkip(TARGET, layers, cache), []
    cache.k.zero_()
    cache.v.zero_()  # a skipped layer's rows are read by no one
    out = generate_speculative(TARGET, prompt, n_tokens, draft, draft_len, cache, rounds=rounds)
    assert torch.equal(out, generate_kvcache(PLAIN, prompt, n_tokens, 16))
    assert all(a == d for d, a in rounds) or len(layers) < 3


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 99))
def test_an_exit_drafts_what_its_blocks_alone_choose(n_early, n, seed):
    """By definition: the blocks over the whole text, without a cache; and nothing is left in the counts."""
    ids, cache = random_tokens(1, 6, seed), fresh_cache()
    form = EarlyExit(TARGET, n_early, cache)
    form(ids[:, :-1], cache)
    drafted, q = form.propose(ids[0].tolist(), n)
    text = ids
    for _ in range(n):
        text = torch.cat([text, choices_of(WHOLE, text, range(n_early))[:, -1:]], dim=1)
    assert torch.equal(drafted, text[:, 6:]) and q is None and cache.length == 5
    logits, _ = form(text[:, 5:], cache)  # the verification that follows
    assert_close(logits, WHOLE(text)[:, 5:])


def test_choices_of_all_blocks_are_the_models():
    tokens = random_tokens(2, 9)
    assert torch.equal(choices_of(WHOLE, tokens, range(3)), WHOLE(tokens).argmax(-1))


def test_exits_that_are_not_there_are_refused():
    for n_early in (0, 4):
        with pytest.raises(ValueError, match="blocks 1 to 3"):
            EarlyExit(TARGET, n_early, StaticKVCache(TARGET, 1))


def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("more/speculative_early_exit.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    assert {"static", "exit 1", "exit 2", "exit 3"} <= {*rows} and len(rows) == 5
    assert all(row["same_output"] for row in rows.values())
    assert rows["exit 3"]["agreement"] == 1 and rows["exit 3"]["accepted"] > 0.8
    for row in rows.values():  # neither weights nor cache besides
        assert row["kv_bytes_per_token"] == rows["static"]["kv_bytes_per_token"]
        assert row["peak_memory_mb"] < 1.1 * rows["static"]["peak_memory_mb"]
    (agreement,) = (v for k, v in report["sweeps"].items() if k.startswith("Greedy agreement"))
    assert all(line["the best"] >= line["the first"] for line in agreement) and len(agreement) == 3
