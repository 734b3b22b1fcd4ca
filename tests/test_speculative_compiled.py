"""Compiled steps under speculation: the verification that writes nothing, and drafts token by token."""

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from kvcache_compiled import CompiledStep
from main_kvcache import generate_kvcache
from main_speculative_decoding import generate_speculative
from speculative_compiled import CompiledDraft, CompiledTarget, verification

TARGET = tiny_model(GPTlite_StaticKVCache)
DRAFT = tiny_model(GPTlite_StaticKVCache, n_layers=1, seed=1)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 99))
def test_verification_equals_the_model_and_writes_nothing(n_past, R, seed):
    """Behind any past, with NaN in the rows that no token was written to."""
    tokens, cache = random_tokens(1, n_past + R, seed), StaticKVCache(TARGET, 1)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    TARGET(tokens[:, :n_past], cache)
    before = cache.k.clone(), cache.v.clone()
    with torch.no_grad():
        position = torch.tensor([n_past])
        logits, K, V = verification(TARGET, tokens[0, n_past:], cache.k, cache.v, position)
    assert_close(logits, tiny_model(GPTlite)(tokens)[0, n_past:])
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, (cache.k, cache.v), strict=True)
    )
    _, whole = TARGET(tokens)
    assert_close((K, V), tuple(t[:, 0, :, n_past : n_past + R] for t in (whole.k, whole.v)))


@given(st.integers(1, 15), st.integers(1, 5), st.integers(0, 99))
def test_tokens_equal_plain_decoding(T, draft_len, seed):
    """Draft and verification in the compiled form, not compiled; the target's own forward does the rest."""
    prompt, n_tokens, cache = random_tokens(1, T, seed), 17 - T, StaticKVCache(TARGET, 1)
    target = CompiledTarget(TARGET, TARGET, draft_len + 1, backend=None)
    draft = CompiledDraft(DRAFT, CompiledStep(DRAFT, 1, bucket=16, backend=None))
    out = generate_speculative(target, prompt, n_tokens, draft, draft_len, cache)
    expected = generate_kvcache(tiny_model(GPTlite_KVCache), prompt, n_tokens, 16)
    assert torch.equal(out, expected) and cache.length == 16


def test_a_cache_that_does_not_fit_is_refused():
    target = CompiledTarget(TARGET, TARGET, 3, backend=None)
    cache = StaticKVCache(DRAFT, 1)
    cache.advance(2)
    with pytest.raises(ValueError, match="does not fit"):
        target(random_tokens(1, 3), cache)


@pytest.mark.slow
def test_compiled_verification_equals_the_one_as_written():
    target = tiny_model(GPTlite_StaticKVCache, dtype=torch.float32)
    tokens, outputs = random_tokens(1, 8), []
    for backend in (None, "inductor"):
        cache = StaticKVCache(target, 1)
        target(tokens[:, :5], cache)
        outputs.append(CompiledTarget(target, target, 3, backend)(tokens[:, 5:], cache)[0])
    assert_close(*outputs)


@pytest.mark.slow
def test_script(distilled_checkpoint):
    run = run_script(
        "more/speculative_compiled.py", "--quick", "--json", "-", checkpoint=distilled_checkpoint
    )
    assert run.status == 0, run.stderr + run.stdout
    rows = {row["method"]: row for row in run.json["rows"]}
    assert {"static", "compiled step", "eager", "compiled draft", "both compiled"} <= {*rows}
    assert all(row["same_output"] for row in rows.values()) and all(run.json["checks"].values())
    fed = {rows[name]["forward_tokens"] for name in ("eager", "compiled draft", "both compiled")}
    assert len(fed) == 1  # the same work in every form: all drafts are accepted
    assert rows["eager"]["tokens_per_round"] > 1 and len(run.json["why"]) == 4
