"""Speculation in a batch: every row gets what it gets alone, whatever the others accept."""

import pytest
import torch
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from main_kvcache import generate_kvcache
from speculative_batch import GPTlite_Ragged, RaggedCache, generate_speculative_batch

TARGET, PLAIN = tiny_model(GPTlite_Ragged), tiny_model(GPTlite_KVCache)
OTHER = tiny_model(GPTlite_Ragged, n_layers=1, seed=1)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 99))
def test_rows_of_other_lengths_equal_each_alone(lengths, R, seed):
    """New tokens behind texts of any lengths; what lies behind a length, NaN keys too, is never seen."""
    B, tokens = len(lengths), random_tokens(len(lengths), 16, seed)
    cache = RaggedCache(TARGET, B)
    TARGET(tokens, cache)  # every row is full of keys
    cache.k += 100.0 * (torch.arange(16) >= torch.tensor(lengths)[:, None])[None, :, None, :, None]
    cache.lengths = torch.tensor(lengths)
    new = torch.stack([row[n : n + R] for row, n in zip(tokens, lengths, strict=True)])
    logits, _ = TARGET(new, cache)
    for b, n in enumerate(lengths):
        assert_close(logits[b], tiny_model(GPTlite)(tokens[b : b + 1, : n + R])[0, n:])
    assert cache.lengths.tolist() == [n + R for n in lengths]


@given(
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(0, 16),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 99),
)
def test_tokens_equal_plain_decoding(B, T, n_tokens, draft_len, wait, seed):
    """Any batch, prompt, budget and draft length, up to the last position of the context."""
    prompts, n_tokens, rounds = random_tokens(B, T, seed), min(n_tokens, 17 - T), []
    out = generate_speculative_batch(TARGET, prompts, n_tokens, OTHER, draft_len, wait, rounds)
    assert torch.equal(out, generate_kvcache(PLAIN, prompts, n_tokens, 16))
    assert sum(accepted + 1 for _, accepted in rounds) == B * max(n_tokens - 1, 0)
    assert all(0 <= accepted <= drafted <= draft_len for drafted, accepted in rounds)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 99))
def test_waiting_takes_at_least_as_many_rounds(B, draft_len, seed):
    prompts, ragged, waiting = random_tokens(B, 4, seed), [], []
    target, draft = tiny_model(GPTlite_Ragged, vocab_size=3), tiny_model(GPTlite_Ragged, 1, vocab_size=3)
    prompts %= 3
    generate_speculative_batch(target, prompts, 12, draft, draft_len, rounds=ragged)
    generate_speculative_batch(target, prompts, 12, draft, draft_len, True, waiting)
    assert len(ragged) <= len(waiting)


def test_a_batch_whose_draft_is_the_target_never_misses():
    target, rounds = tiny_model(GPTlite_Ragged, seqlen=64), []
    generate_speculative_batch(target, random_tokens(3, 5), 41, target, 3, rounds=rounds)
    assert rounds == [(3, 3)] * 30


def test_bad_requests():
    with pytest.raises(ValueError, match="prompt is empty"):
        generate_speculative_batch(TARGET, torch.zeros(2, 0, dtype=torch.int64), 3, OTHER, 2)
    with pytest.raises(ValueError, match="leave the context"):
        generate_speculative_batch(TARGET, random_tokens(2, 10), 8, OTHER, 2)


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("more/speculative_batch.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    for B in (1, 3):
        ragged, waiting = (rows[f"{name}, batch {B}"] for name in ("ragged", "waiting"))
        assert ragged["same_output"] and waiting["same_output"]
        assert 3 >= ragged["tokens_per_round"] >= waiting["tokens_per_round"] >= 1
        assert ragged["kv_bytes_per_token"] > 0 and ragged["predicted"] >= waiting["predicted"]
    assert [line["rows"] for line in report["sweeps"]["Time of a token by the batch (ms)"]] == [3, 9]


def test_script_refuses_what_leaves_the_context(distilled_checkpoint):
    run = run_script(
        "more/speculative_batch.py", "--quick", "--prompt-len", "250", checkpoint=distilled_checkpoint
    )
    assert run.status == 2 and "leave the context" in run.stderr
