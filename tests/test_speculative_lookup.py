"""Prompt lookup: what is proposed, on hand-made texts, and that the tokens stay those of plain decoding."""

import pytest
import torch
from helpers import quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from main_kvcache import generate_kvcache
from main_speculative_decoding import generate_speculative
from speculative_lookup import LookupDraft, look_up

TARGET, PLAIN = tiny_model(GPTlite_StaticKVCache), tiny_model(GPTlite_KVCache)


@pytest.mark.parametrize(
    "ids, longest, shortest, n, expected",
    [
        ([5, 6, 7, 8, 9, 10, 11, 7, 8], 2, 2, 3, [9, 10, 11]),
        ([5, 6, 7, 8, 9, 10, 11, 7, 8], 2, 2, 9, [9, 10, 11, 7, 8]),  # no more than there is
        ([1, 1, 1], 2, 2, 3, [1]),  # not the last two themselves
        ([1, 1, 1], 1, 1, 3, [1]),
        ([1, 2], 3, 3, 3, []),  # shorter than the n-gram
        ([1, 2, 3], 3, 3, 3, []),  # nothing but itself
        ([4], 1, 1, 2, []),
        ([1, 2, 3, 9, 2, 3, 8, 2, 3], 2, 2, 1, [8]),  # the newest place
        ([1, 2, 3, 7, 9, 3, 5, 2, 3], 3, 1, 1, [7]),  # the longer n-gram first
        ([1, 2, 3, 4], 2, 1, 3, []),
    ],
)
def test_proposals_by_hand(ids, longest, shortest, n, expected):
    assert look_up(ids, longest, shortest, n) == expected
    assert LookupDraft(longest, shortest).find(ids, n) == expected


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 4), st.data())
def test_the_table_finds_what_the_search_finds(ids, longest, data):
    """While the text grows by any steps, and again after a reset."""
    shortest, n = data.draw(st.integers(1, longest)), data.draw(st.integers(1, 5))
    draft, stop = LookupDraft(longest, shortest), 0
    while stop < len(ids):
        stop = data.draw(st.integers(stop + 1, len(ids)))
        assert draft.find(ids[:stop], n) == look_up(ids[:stop], longest, shortest, n)
    draft.reset()
    assert draft.find(ids[::-1], n) == look_up(ids[::-1], longest, shortest, n)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), st.integers(0, 99))
def test_tokens_equal_plain_decoding(T, n, longest, seed):
    """Also where prompts repeat themselves, and where nothing is proposed: that is a plain step."""
    prompt, n_tokens, rounds = random_tokens(1, T, seed) % 3, 17 - T, []
    draft, cache = LookupDraft(longest, 1), StaticKVCache(TARGET, 1)
    out = generate_speculative(TARGET, prompt, n_tokens, draft, n, cache, rounds=rounds)
    assert torch.equal(out, generate_kvcache(PLAIN, prompt, n_tokens, 16)) and cache.length == 16
    assert all(accepted <= drafted <= n for drafted, accepted in rounds)


def test_a_copy_is_found():
    """The model's own text as the prompt, and its beginning again, as far as it goes on alike."""
    target = tiny_model(GPTlite_StaticKVCache, seqlen=64)

    class Copying(torch.nn.Module):
        """Chooses what stood 8 tokens before."""

        seqlen = 64

        def forward(self, x, cache):
            self.seen = torch.cat([self.seen[:, : cache.length], x], dim=1)
            cache.advance(x.shape[1])
            places = torch.arange(self.seen.shape[1] - x.shape[1], self.seen.shape[1]) - 7
            chosen = self.seen[0, places.clamp(min=0)]
            return torch.nn.functional.one_hot(chosen, 16)[None].double(), cache

    model, rounds = Copying(), []
    model.seen = torch.zeros(1, 0, dtype=torch.int64)
    prompt = torch.arange(10)[None] % 8
    cache = StaticKVCache(target, 1)
    out = generate_speculative(model, prompt, 41, LookupDraft(3, 3), 4, cache, rounds=rounds)
    assert out[0].tolist() == [i % 8 for i in range(51)]
    assert rounds == [(4, 4)] * 8


def test_sampled_copies_are_judged_as_certain():
    """The same text for a request, within the vocabulary, whatever is proposed."""
    cache, prompt = StaticKVCache(TARGET, 1), torch.tensor([[1, 2, 3, 1, 2, 3, 1]])
    texts = [generate_speculative(TARGET, prompt, 9, LookupDraft(2, 1), 3, cache, 1.0, r) for r in (0, 0, 1)]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


def test_bad_arguments():
    for longest, shortest in ((2, 3), (1, 0)):
        with pytest.raises(ValueError, match="the shorter first"):
            LookupDraft(longest, shortest)


def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("more/speculative_lookup.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    assert [*rows] == ["static, plays", "up to 3, plays", "static, quotation", "up to 3, quotation"]
    for kind in ("plays", "quotation"):
        row, static = rows[f"up to 3, {kind}"], rows[f"static, {kind}"]
        assert row["same_output"] and row["tokens_per_round"] >= 1 and 0 <= row["proposing"] <= 1
        assert row["kv_bytes_per_token"] == static["kv_bytes_per_token"]
        assert row["peak_memory_mb"] < 1.1 * static["peak_memory_mb"]  # no second model
    assert len(report["sweeps"]["Tokens a round, n-grams up to 3"]) == 3 and len(report["why"]) == 3


@pytest.mark.slow
def test_script_with_peers(distilled_checkpoint):
    more = "--quick", "--peers", "--json", "-"
    run = run_script("more/speculative_lookup.py", *more, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    rows = {row["method"]: row for row in run.json["rows"]}
    assert rows["transformers, lookup, quotation"]["same_output"]
