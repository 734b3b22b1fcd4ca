"""A stored prefix against prompts computed in full, and what its reuse must never do."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, cache_length, common_length, cut_cache, expand_cache
from inference_utils import StepClock
from main_kvcache import generate, generate_kvcache
from main_prefix_cache import (
    compute_prefix_cache,
    generate_requests,
    generate_reusing,
    generate_with_prefix,
    match_prefix,
    wrong_reuse,
)

CONTEXT = 16


@pytest.fixture(autouse=True, scope="module")
def no_gradients():
    with torch.no_grad():
        yield


def tensors(kv_cache):
    return [t for kv in kv_cache for t in kv]


# One prefix for many requests


def test_as_the_post_calls_it():
    """_, prefix_cache = model(prefix), then each request behind it: what prefix and request give together."""
    model, prefix, requests = tiny_model(GPTlite_KVCache), random_tokens(1, 6), random_tokens(3, 4, seed=1)
    _, prefix_cache = model(prefix)
    copies = [t.clone() for t in tensors(prefix_cache)]
    outputs = generate_requests(model, prefix, requests, 5, CONTEXT)
    for request, output in zip(requests, outputs, strict=True):
        alone = generate_kvcache(model, request[None], 5, CONTEXT, kv_cache=prefix_cache)
        whole = generate(tiny_model(GPTlite), torch.cat([prefix, request[None]], dim=1), 5, CONTEXT)
        assert torch.equal(alone, output) and torch.equal(torch.cat([prefix, alone], dim=1), whole)
    assert all(map(torch.equal, tensors(prefix_cache), copies))


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


def test_empty_prefix_and_empty_request():
    model, request = tiny_model(GPTlite_KVCache), random_tokens(1, 5)
    assert compute_prefix_cache(model, request[:, :0]) is None
    assert torch.equal(
        generate_with_prefix(model, None, request, 4, CONTEXT), generate_kvcache(model, request, 4, CONTEXT)
    )
    stored = compute_prefix_cache(model, request)
    with pytest.raises(ValueError, match="empty"):
        generate_with_prefix(model, stored, request[:, :0], 4, CONTEXT)


# What may be reused


def test_common_length_and_cut():
    assert [common_length(a, b) for a, b in [([], [1]), ([1, 2], [1, 2, 3]), ([1, 2, 4], [1, 3, 4])]] == [
        0,
        2,
        1,
    ]
    kv_cache = compute_prefix_cache(tiny_model(GPTlite_KVCache), random_tokens(1, 5))
    assert cut_cache(kv_cache, 0) is None
    assert cache_length(cut_cache(kv_cache, 3)) == 3


@given(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_match_is_the_longest_common_beginning(stored, tokens):
    """And never the whole prompt: one token at least is computed."""
    model = tiny_model(GPTlite_KVCache)
    stored_cache = compute_prefix_cache(model, torch.tensor([stored], dtype=torch.int64))
    n, kv_cache = match_prefix(tokens, stored, stored_cache)
    assert n == max(k for k in range(len(tokens)) if stored[:k] == tokens[:k])
    assert cache_length(kv_cache) == n
    logits = model(torch.tensor([tokens[n:]]), kv_cache)[0][:, -1]
    assert_close(logits, model(torch.tensor([tokens]))[0][:, -1])


@given(st.integers(0, 9), st.integers(1, 12), st.integers(1, 3), st.integers(0, 99))
def test_reusing_what_is_common_changes_nothing(n_stored, prompt_len, batch_size, seed):
    """Whatever was stored, related or not: only what all prompts have in common with it is reused."""
    model, prompts = tiny_model(GPTlite_KVCache), random_tokens(batch_size, prompt_len, seed, vocab_size=2)
    stored = random_tokens(1, n_stored, seed + 1, vocab_size=2)
    kv_cache = compute_prefix_cache(model, stored)
    with StepClock(model) as clock:
        tokens = generate_reusing(model, prompts, 4, CONTEXT, stored[0].tolist(), kv_cache)
    assert torch.equal(tokens, generate(tiny_model(GPTlite), prompts, 4, CONTEXT))
    common = min(common_length(stored[0].tolist(), prompt[:-1]) for prompt in prompts.tolist())
    assert clock.forward_tokens == batch_size * (prompt_len - common + 3)


def test_wrong_reuse_changes_the_logits():
    """What the comparison of all token ids prevents: one early token differs, the rest is equal."""
    model, tokens = tiny_model(GPTlite_KVCache), random_tokens(1, 12)
    changed = tokens.clone()
    changed[0, 1] = (tokens[0, 1] + 1) % 16
    wrong = model(changed[:, 8:], compute_prefix_cache(model, tokens[:, :8]))[0][:, -1]
    right = model(changed)[0][:, -1]
    assert (wrong - right).abs().max() > 1e-3
    stored = compute_prefix_cache(model, tokens[:, :8])
    n, kv_cache = match_prefix(changed[0].tolist(), tokens[0, :8].tolist(), stored)
    assert n == 1
    assert_close(model(changed[:, n:], kv_cache)[0][:, -1], right)


def test_wrong_reuse_by_hand():
    """KL over the positions behind the prefix, and none where the prefix is the right one."""
    model, prompts = tiny_model(GPTlite_KVCache), random_tokens(3, 12)
    prompts[:, :8] = prompts[0, :8].clone()
    stored = compute_prefix_cache(model, prompts[:1, :8])
    kl, changed = wrong_reuse(model, prompts, stored)
    assert abs(kl) < 1e-5 and changed == 0
    asked = prompts.clone()
    asked[:, 1] = (prompts[:, 1] + 1) % 16
    kl, changed = wrong_reuse(model, asked, stored)
    right = F.softmax(model(asked)[0][:, 8:], dim=-1)  # [3, 4, V]
    guess = F.softmax(model(prompts)[0][:, 8:], dim=-1)
    by_hand = (right * (right / guess).log()).sum(dim=-1).mean().item()
    assert kl == pytest.approx(by_hand, rel=1e-4) and kl > 0
    assert changed == pytest.approx((right.argmax(-1) != guess.argmax(-1)).double().mean().item())


def test_wrong_reuse_of_a_model_that_rules_tokens_out():
    """A logit of minus infinity is a probability of 0 on both sides: it adds nothing, and no NaN."""
    models = [tiny_model(GPTlite_KVCache, dtype=torch.float32) for _ in range(2)]
    models[0].fc_out.bias[3] = -torch.inf
    models[1].fc_out.bias[3] = -1e4  # the same distribution, all in finite numbers
    prompts, other = random_tokens(2, 12), random_tokens(1, 8, seed=5)
    ruled_out, finite = (wrong_reuse(m, prompts, compute_prefix_cache(m, other)) for m in models)
    assert_close(ruled_out, finite)
    assert ruled_out[0] > 0


# The script


def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "ttft.png"
    options = ["--quick", "--json", "-", "--plot", figure]
    run = run_script("main_prefix_cache.py", *options, checkpoint=distilled_checkpoint)
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
        assert reused["stored_mb"] == pytest.approx(180 * 4608 / 1e6)
        assert reused["kv_bytes_per_token"] == without["kv_bytes_per_token"] == 4608  # it is copied
        assert (
            without["valid_loss"] > 0 and reused["valid_loss"] is None
        )  # measured for the row that shows it
    wrong = next(lines for title, lines in run.json["sweeps"].items() if "differs" in title)
    assert all(line["KL (nats)"] > 0 for line in wrong) and wrong[0]["reusable"] == 8
    assert 1 <= len(run.json["why"]) <= 4


@pytest.mark.parametrize(
    "options, P",
    [
        (["--shared", "0"], 0),
        (["--prompt-len", "1", "--batch-size", "1"], 0),
        pytest.param(
            ["--prompt-len", "2", "--shared", "0.5", "--batch-size", "1"], 1, marks=pytest.mark.slow
        ),
        pytest.param(["--shared", "0.05"], 10, marks=pytest.mark.slow),
    ],
)
def test_script_with_little_or_nothing_stored(distilled_checkpoint, options, P):
    """Nothing stored, nothing to save, little to save."""
    run = run_script(
        "main_prefix_cache.py", "--quick", "--json", "-", *options, checkpoint=distilled_checkpoint
    )
    assert run.status == 0, run.stderr
    assert run.json["config"]["n_shared"] == P and all(run.json["checks"].values())


def test_script_refuses_what_does_not_fit(distilled_checkpoint):
    for options, words in (
        (["--prompt-len", "240", "--n-tokens", "30"], ("240", "30", "270", "256")),
        (["--shared", "1.5"], ("1.5",)),
    ):
        run = run_script("main_prefix_cache.py", "--quick", *options, checkpoint=distilled_checkpoint)
        assert run.status == 2 and run.stdout == ""
        assert len(run.stderr.strip().splitlines()) == 1 and all(word in run.stderr for word in words)
