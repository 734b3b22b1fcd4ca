"""Drafts for hybrids: plain decoding's tokens, and behind a rejected draft the accepted text's state."""

import pytest
import torch
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite_kvcache import GPTlite_KVCache, cut_cache
from gptlite_linear import GPTlite_Linear, state_bytes
from linear_drafts import (
    WAYS,
    flat,
    generate_drafted,
    inputs_of_linear_layers,
    kept_bytes,
    look_up,
    read_draft,
)
from main_kvcache import generate_kvcache

every_way = pytest.mark.parametrize("way", WAYS)


def hybrid(full=(1,), **kwargs):
    return tiny_model(GPTlite_Linear, full_layers=full, **kwargs)


def spoiled(model, prompt, n_draft, n_right):
    """A pending token and a draft of which n_right tokens are what the model would say, [1 + n_draft]."""
    own = generate_kvcache(model, prompt, n_draft + 2, 16)[0, prompt.shape[1] :]
    draft = own[: n_draft + 1].clone()
    draft[n_right + 1 :] = (draft[n_right + 1 :] + 1) % 16
    return draft[None], own


@every_way
@given(
    full=st.sampled_from([(), (0,), (1,), (0, 1)]),
    prompt_len=st.integers(1, 8),
    n_draft=st.integers(0, 4),
    n_right=st.integers(0, 4),
    seed=st.integers(0, 9),
)
def test_the_state_is_that_of_the_accepted_text(way, full, prompt_len, n_draft, n_right, seed):
    """Rejected at 0, 1, 2, ... and not at all; the state in front of the draft stays what it was."""
    model, prompt = hybrid(full, seed=seed), random_tokens(1, prompt_len, seed)
    tokens, own = spoiled(model, prompt, n_draft, n_right)
    _, before = model(prompt)
    first = flat(before).clone()
    new, after = read_draft(model, before, tokens, WAYS[way])
    n = min(n_draft, n_right)
    assert new == own[1 : n + 2].tolist()
    expected = before
    for token in own[: n + 1]:
        _, expected = model(token.view(1, 1), expected)
    assert after.n_tokens == expected.n_tokens == prompt_len + n + 1
    assert_close(flat(after), flat(expected), 1e-6)
    assert torch.equal(flat(before), first)
    assert_close(model(own[None, :1], after)[0], model(own[None, :1], expected)[0], 1e-6)


@every_way
@given(full=st.sampled_from([(), (1,), (0, 1)]), n_draft=st.integers(1, 5), seed=st.integers(0, 9))
def test_generates_what_plain_decoding_does(way, full, n_draft, seed):
    model, prompt = hybrid(full, seed=seed), random_tokens(1, 5, seed, 3) % 3
    for n_tokens in (0, 1, 11):
        expected = generate_kvcache(model, prompt, n_tokens, 16)
        assert torch.equal(generate_drafted(model, prompt, n_tokens, 16, WAYS[way], n_draft), expected)


def test_keys_and_values_are_cut_by_length():
    """Nothing is kept or computed for it: the same as cutting GPTlite's own cache."""
    model, prompt = hybrid((0, 1)), random_tokens(1, 6)
    plain = tiny_model(GPTlite_KVCache)
    tokens, _ = spoiled(model, prompt, 3, 1)
    _, after = read_draft(model, model(prompt)[1], tokens, WAYS["repeat"])
    _, cache = plain(torch.cat([prompt, tokens], dim=1))
    assert_close([t for layer in after.layers for t in layer], [t for kv in cut_cache(cache, 8) for t in kv])


@pytest.mark.parametrize("n", [1, 3, 7])
def test_bytes_of_the_ways(n):
    """Inputs of n + 1 tokens, or n + 1 states with their tails, in the linear layer."""
    model, tokens = hybrid(), random_tokens(1, n + 1)
    _, before = model(random_tokens(1, 5))
    with inputs_of_linear_layers(model) as inputs:
        model(tokens, before)
    sizes = {way: kept_bytes(how.keep(model, before, inputs)) for way, how in WAYS.items()}
    one_state = state_bytes(before) - 8 * 2 * 2 * 16 * 5
    assert sizes == {"again": 0, "repeat": 8 * 32 * (n + 1), "snapshots": (n + 1) * one_state}


def test_hooks_are_gone():
    model = hybrid()
    read_draft(model, model(random_tokens(1, 3))[1], random_tokens(1, 3), WAYS["repeat"])
    assert not any(block.mha._forward_pre_hooks for block in model.blocks)


def test_drafts_are_looked_up():
    assert look_up([1, 2, 3, 4, 5, 1, 2, 3], 2) == [4, 5]
    assert look_up([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1) == [8]  # where it last stood
    assert look_up([1, 2, 3, 4, 1, 2, 3], 9) == [4, 1, 2, 3]  # up to the end of the text
    assert look_up([5, 5, 5, 5], 2) == [5]  # it may overlap itself
    for nothing in ([1, 2, 3, 4], [1, 2], []):
        assert look_up(nothing, 3) == []
    assert look_up([1, 2, 3, 4, 1, 2, 3], 0) == []


def test_what_does_not_fit_is_refused():
    model = hybrid()
    for prompt, n in ((random_tokens(2, 3), 2), (random_tokens(1, 10), 8)):
        with pytest.raises(ValueError, match="one prompt"):
            generate_drafted(model, prompt, n, 16, WAYS["again"])


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("more/linear_drafts.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["softmax"]["baseline"] and rows["2:1"]["baseline"] and len(report["why"]) == 4
    again, repeat, snapshots = (rows[f"2:1, {way}"] for way in WAYS)
    assert all(row["same_output"] for row in (again, repeat, snapshots))
    assert again["kept_bytes"] == rows["softmax, cut"]["kept_bytes"] == 0
    assert 0 < repeat["kept_bytes"] < snapshots["kept_bytes"]
    assert repeat["n_steps"] == snapshots["n_steps"] <= again["n_steps"]
    (kept,) = report["sweeps"].values()
    assert [line["tokens"] for line in kept] == [1, 4, 8]


def test_script_refuses_impossible_sizes(distilled_checkpoint):
    run = run_script("more/linear_drafts.py", "--prompt-len", "240", checkpoint=distilled_checkpoint)
    assert run.status == 2 and "--prompt-len 240" in run.stderr and "Traceback" not in run.stderr
