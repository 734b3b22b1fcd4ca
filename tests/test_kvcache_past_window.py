"""Refilling against encoding anew by hand, the losses of each rule by its own steps, and the script."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from inference_utils import StepClock
from kvcache_past_window import generate_refill, loss_last_position, loss_recomputed, loss_refilled
from main_kvcache import generate

CONTEXT = 16


@pytest.fixture(autouse=True, scope="module")
def no_gradients():
    with torch.no_grad():
        yield


# Refilling


def generate_by_hand(model, tokens, n_tokens, window, refill):
    """The rule without any cache: what is read starts anew with the last `refill` tokens when full."""
    start = max(tokens.shape[1] - window, 0)
    for i in range(n_tokens):
        if i > 0 and tokens.shape[1] - start > window:
            start = tokens.shape[1] - refill
        next_token = model(tokens[:, start:])[:, -1].argmax(dim=-1, keepdim=True)
        tokens = torch.cat([tokens, next_token], dim=1)
    return tokens


@given(st.integers(2, CONTEXT), st.integers(1, 24), st.integers(0, 40), st.data())
def test_refilling_equals_encoding_anew(window, prompt_len, n_tokens, data):
    refill = data.draw(st.integers(1, window - 1))
    prompt = random_tokens(2, prompt_len, data.draw(st.integers(0, 999)))
    output = generate_refill(tiny_model(GPTlite_KVCache), prompt, n_tokens, window, refill)
    assert torch.equal(output, generate_by_hand(tiny_model(GPTlite), prompt, n_tokens, window, refill))


def test_work_of_refilling():
    """W tokens are read for W - refill + 1 new ones, which is what the script's table says."""
    cached = tiny_model(GPTlite_KVCache)
    with StepClock(cached) as clock:
        generate_refill(cached, random_tokens(1, 4), 5 * 13, CONTEXT, 4)
    assert clock.forward_tokens == 5 * CONTEXT


@pytest.mark.parametrize("refill", [-1, 0, 16, 17])
def test_refill_out_of_range(refill):
    with pytest.raises(ValueError, match=f"a refill keeps 1 to 15 tokens, not {refill}"):
        generate_refill(tiny_model(GPTlite_KVCache), random_tokens(1, 3), 1, CONTEXT, refill)


@given(st.integers(2, CONTEXT), st.integers(1, 12), st.integers(0, 99))
def test_refilling_changes_nothing_inside_the_context(window, prompt_len, seed):
    prompt = random_tokens(2, min(prompt_len, window), seed)
    n_tokens = window - prompt.shape[1] + 1
    expected = generate(tiny_model(GPTlite), prompt, n_tokens, window)
    for n_kept in {1, window // 2, window - 1}:
        cached = tiny_model(GPTlite_KVCache)
        assert torch.equal(generate_refill(cached, prompt, n_tokens, window, n_kept), expected)


# Loss past the window


def loss_by_hand(streams, window, rule, stride):
    """Each rule by its own steps: the text is given, each token is predicted from what the rule keeps."""
    model, cached = tiny_model(GPTlite), tiny_model(GPTlite_KVCache)
    cache, start, losses = None, 0, []
    for t in range(1, streams.shape[1]):  # predicts token t
        if rule == "recompute":
            logits = model(streams[:, max(t - window, 0) : t])
        elif rule == "last position":
            logits, cache = cached(streams[:, t - 1 : t], cache, max_seqlen=window)
        else:
            start = t - rule if t - start > window else start
            logits = model(streams[:, start:t])
        if t >= window and (t - window) % stride == 0:
            losses.append(F.cross_entropy(logits[:, -1].float(), streams[:, t]))
    return sum(losses).item() / len(losses)


@given(
    st.integers(2, CONTEXT),
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from(["recompute", "last position", "refill"]),
    st.data(),
)
def test_loss_past_the_window(window, n_past, stride, rule, data):
    rule = data.draw(st.integers(1, window - 1)) if rule == "refill" else rule
    streams = random_tokens(data.draw(st.integers(1, 3)), window + n_past, data.draw(st.integers(0, 99)))
    targets = torch.arange(window, window + n_past, stride)
    how = tiny_model(GPTlite_KVCache), streams, window, targets
    if rule == "recompute":
        losses = loss_recomputed(*how)
    else:
        losses = loss_last_position(*how) if rule == "last position" else loss_refilled(*how, rule)
    assert len(losses) == len(streams)
    assert_close(losses.mean().item(), loss_by_hand(streams, window, rule, stride), 1e-5)


@pytest.mark.slow
def test_script():
    run = run_script("more/kvcache_past_window.py", "--quick", "--json", "-")
    assert run.status == 0 and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    (past,) = run.json["sweeps"].values()
    past = {row["rule"]: row for row in past}
    assert list(past) == list(rows) == ["no cache", "last position", "refill 192", "refill 128", "refill 64"]
    work = [row["tokens computed a new token"] for row in past.values()]
    assert work == pytest.approx([256, 1, 256 / 65, 256 / 129, 256 / 193])
    for name in list(past)[2:]:
        loss = "loss past the context"
        assert past["no cache"][loss] - 0.05 < past[name][loss] < past["last position"][loss]
        assert rows[name]["forward_tokens"] < rows["no cache"]["forward_tokens"]
    assert run_script("more/kvcache_past_window.py", "--quick", "--kept", "256").status == 2
