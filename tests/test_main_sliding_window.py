"""Windows, Longformer and BigBird: every fast form against the mask it stands for."""

import inspect
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_bounded import GPTlite_Bounded, RollingCache
from gptlite_kvcache import GPTlite_KVCache, window_mask
from main_kvcache import generate, generate_kvcache
from main_sliding_window import (
    PatternCache,
    bigbird_layout,
    bigbird_pattern,
    flex_mask,
    mask_of,
    masked_attention,
    plain_flex,
    sparse_attention,
    sparse_plan,
    window_forms,
    window_pattern,
)


def draw(B, H, T, D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, T, D, generator=generator, dtype=torch.float64) for _ in range(3)]


def mask(pattern, T, n_heads=1):
    return mask_of(pattern, n_heads, torch.arange(T), torch.arange(T))


def bounded(make_cache, **kwargs):
    return tiny_model(GPTlite_Bounded, make_cache=make_cache, **kwargs)


# ---- Patterns ----


@given(T=st.integers(1, 30), window=st.integers(1, 35))
def test_window_is_the_banded_mask(T, window):
    one = mask(window_pattern(window), T)[0]
    assert torch.equal(one, window_mask(T, T, window))
    n = min(window, T)
    assert one.sum() == T * n - n * (n - 1) // 2


@given(
    T=st.integers(1, 24),
    window=st.integers(1, 6),
    n_global=st.integers(0, 5),
    dilations=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_longformer_by_definition(T, window, n_global, dilations):
    H = len(dilations)
    seen = mask(window_pattern(window, n_global, dilations), T, H)
    for h in range(H):
        for i in range(T):
            near = {i - step * dilations[h] for step in range(window)}
            expected = [j for j in range(i + 1) if j < n_global or j in near]
            assert seen[h, i].nonzero()[:, 0].tolist() == expected


def test_non_zeros_grow_with_the_length_not_its_square():
    for pattern in (window_pattern(16, 4), bigbird_pattern(1024, 8, 2, 1, 2)):
        sums = [int(mask(pattern, T).sum()) for T in (256, 512, 1024)]
        assert sums[1] / sums[0] < 2.2 and sums[2] / sums[1] < 2.1
    dense = mask(window_pattern(1024), 1024).sum()
    assert dense == 1024 * 1025 // 2


def test_random_blocks_are_any_of_the_past_equally_often():
    """T = 64, block 4, 2 random blocks: over 200 seeds each block outside window and global, none twice."""
    n, counts = 16, Counter()
    for seed in range(200):
        layout = bigbird_layout(n, 2, 1, 2, seed)
        assert torch.equal(layout, bigbird_layout(n, 2, 1, 2, seed))
        assert not layout.triu(1).any()
        assert layout.sum(dim=1).tolist() == [min(i + 1, 5) for i in range(n)]
        counts.update(layout[15].nonzero()[:, 0].tolist())
    assert counts[0] == counts[14] == counts[15] == 200
    others = [counts[j] for j in range(1, 14)]  # 13 blocks share 400 draws: 31 each
    assert min(others) > 10 and max(others) < 60 and sum(others) == 400


def test_a_longer_text_has_the_same_rows():
    """A plan that depended on the length would change what was computed before."""
    for seed in (0, 7):
        assert torch.equal(bigbird_layout(9, 1, 1, 2, seed), bigbird_layout(30, 1, 1, 2, seed)[:9, :9])
    assert not torch.equal(bigbird_layout(30, 1, 1, 2, 0), bigbird_layout(30, 1, 1, 2, 7))


def test_patterns_that_cannot_be():
    for arguments in ((0,), (4, -1), (4, 0, (1, 0))):
        with pytest.raises(ValueError, match="too small"):
            window_pattern(*arguments)
    for arguments in ((16, 0), (16, 4, 0), (16, 4, 1, -1), (16, 4, 1, 1, -1)):
        with pytest.raises(ValueError, match="at least 1"):
            bigbird_pattern(*arguments)
    with pytest.raises(ValueError, match="window of 0"):
        RollingCache(0)


# ---- Attention ----

PATTERNS = {
    "window": window_pattern(5),
    "globals": window_pattern(3, 2),
    "dilated": window_pattern(3, 1, (1, 3)),
    "BigBird": bigbird_pattern(64, 4, 1, 1, 1, seed=3),
}
every_pattern = pytest.mark.parametrize("name", PATTERNS)


@every_pattern
@pytest.mark.parametrize("T", [1, 2, 7, 16, 33])
def test_blocks_equal_the_mask(name, T):
    Q, K, V = draw(2, 2, T, 4)
    naive = masked_attention(Q, K, V, PATTERNS[name])
    assert_close(naive, F.scaled_dot_product_attention(Q, K, V, mask(PATTERNS[name], T, 2)))
    for block in (1, 4, 5, 64):
        assert_close(sparse_attention(Q, K, V, sparse_plan(PATTERNS[name], 2, T, block)), naive)


@given(
    T=st.integers(1, 40),
    window=st.integers(1, 45),
    n_global=st.integers(0, 4),
    block=st.integers(1, 17),
    seed=st.integers(0, 99),
)
def test_blocks_equal_the_mask_at_any_size(T, window, n_global, block, seed):
    pattern = window_pattern(window, n_global, (1, 2))
    Q, K, V = draw(1, 2, T, 3, seed)
    out = sparse_attention(Q, K, V, sparse_plan(pattern, 2, T, block))
    assert_close(out, masked_attention(Q, K, V, pattern))
    if window >= T:
        whole = masked_attention(Q, K, V, window_pattern(window))
        assert_close(whole, F.scaled_dot_product_attention(Q, K, V, is_causal=True))


def test_a_plan_leaves_out_what_nobody_sees():
    plan = sparse_plan(window_pattern(4), 2, 64, block=4)
    assert [start for start, _, _ in plan] == list(range(0, 64, 4))
    assert [keys.tolist() for _, keys, _ in plan[:3]] == [[0, 1, 2, 3], [*range(8)], [*range(4, 12)]]
    assert all(visible.shape == (2, 4, len(keys)) for _, keys, visible in plan)


@every_pattern
def test_flex_attention_equals_the_mask(name):
    Q, K, V = (x.float() for x in draw(1, 2, 33, 16))
    out = plain_flex(Q, K, V, block_mask=flex_mask(PATTERNS[name], 2, 33))
    assert_close(out, masked_attention(Q, K, V, PATTERNS[name]), 1e-5)


def test_forms_of_a_window_agree():
    Q, K, V = (x.float() for x in draw(1, 2, 40, 16))
    plan = sparse_plan(window_pattern(8), 2, 40)
    runs = {name: run() for name, run in window_forms(Q, K, V, 8, plan, ("flex", plain_flex)).items()}
    expected = masked_attention(Q, K, V, window_pattern(8))
    for name in ("masked", "in blocks", "flex"):
        assert_close(runs[name], expected, 1e-5)
    assert_close(runs["step, window"], expected[:, :, -1:], 1e-5)
    whole = F.scaled_dot_product_attention(Q, K, V, is_causal=True)
    assert_close(runs["all keys"], whole, 1e-5)
    assert_close(runs["step"], whole[:, :, -1:], 1e-5)


# ---- In the model ----

CACHES = {
    "ring": (partial(RollingCache, 5), window_pattern(5)),
    "ring with globals": (partial(RollingCache, 3, 2), window_pattern(3, 2)),
    "dilated": (partial(PatternCache, PATTERNS["dilated"]), PATTERNS["dilated"]),
    "BigBird": (partial(PatternCache, PATTERNS["BigBird"]), PATTERNS["BigBird"]),
}
every_cache = pytest.mark.parametrize("name", CACHES)


@given(
    name=st.sampled_from([*CACHES]),
    B=st.integers(1, 3),
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_any_split_equals_one_pass_with_the_mask(name, B, pieces, seed):
    make, pattern = CACHES[name]
    tokens = random_tokens(B, sum(pieces), seed)
    model, masked = bounded(make, seqlen=64), bounded(partial(PatternCache, pattern), seqlen=64)
    logits, cache = [], None
    for piece in tokens.split(pieces, dim=1):
        out, cache = model(piece, cache)
        logits.append(out)
    assert_close(torch.cat(logits, dim=1), masked(tokens)[0])
    assert_close(model(tokens)[0], masked(tokens)[0])


@pytest.mark.parametrize("T", range(1, 21))
def test_bigbird_token_by_token_at_short_and_odd_lengths(T):
    """Blocks of 4: texts below the window equal all keys, and no length needs padding."""
    tokens, model = random_tokens(2, T), bounded(CACHES["BigBird"][0], seqlen=64)
    logits = utils.cached_logits(model, tokens, 1)[0]
    assert_close(logits, model(tokens)[0])
    if T <= 12:  # window, global and random blocks are all there are
        assert_close(logits, tiny_model(GPTlite, seqlen=64)(tokens))


@every_cache
def test_the_last_token_changes_nothing_before_it(name):
    tokens = random_tokens(2, 30)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 16
    model = bounded(CACHES[name][0], seqlen=64)
    assert torch.equal(model(tokens)[0][:, :-1], model(changed)[0][:, :-1])
    assert utils.largest_difference(model(tokens)[0][:, -1], model(changed)[0][:, -1]) > 1e-3


def test_a_window_of_the_context_is_the_model_unchanged():
    tokens = random_tokens(3, 16)
    model, plain = bounded(partial(RollingCache, 16)), tiny_model(GPTlite)
    assert_close(model(tokens)[0], plain(tokens))
    for T, n in ((1, 15), (5, 11), (16, 1)):
        assert torch.equal(
            generate_kvcache(model, tokens[:, :T], n, 16), generate(plain, tokens[:, :T], n, 16)
        )


def test_what_lies_behind_the_receptive_field_does_not_matter():
    """After 2 layers with a window of 4 the newest token depends on 7 tokens, the first of them included."""
    model, tokens = bounded(partial(RollingCache, 4), n_layers=2), random_tokens(1, 16)
    logits = model(tokens)[0][:, -1]
    for place, matters in ((8, False), (9, True)):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 16
        assert (utils.largest_difference(model(changed)[0][:, -1], logits) > 1e-9) == matters


def test_the_ring_at_the_moment_it_is_full():
    """Window 4, tokens 012 at once, then 3, 4, 5: it holds 012, 0123, 1234, 2345; a new text starts empty."""
    model, tokens = bounded(partial(RollingCache, 4)), random_tokens(1, 6)
    _, cache = model(tokens[:, :3])
    held = lambda: sorted(cache.layers[0].token_of[: min(cache.n_read, 4)].tolist())  # noqa: E731
    assert held() == [0, 1, 2]
    for newest, expected in ((3, [0, 1, 2, 3]), (4, [1, 2, 3, 4]), (5, [2, 3, 4, 5])):
        _, cache = model(tokens[:, newest : newest + 1], cache)
        assert held() == expected
    assert cache.keys_read == (1 + 2 + 3 + 4 + 4 + 4) / 6
    assert cache.layers[0].token_of.tolist() == [4, 5, 2, 3]  # row t mod 4
    assert torch.equal(model(tokens[:, :3])[0], model(tokens[:, :3])[0])


def test_prompt_longer_than_the_ring_is_read_whole():
    _, cache = bounded(partial(RollingCache, 4, 1))(random_tokens(1, 11))
    assert cache.layers[0].token_of[0] == 0 and sorted(cache.layers[0].token_of.tolist()) == [0, 7, 8, 9, 10]
    assert all(k.shape == (1, 2, 5, 16) for k in cache.k)
    assert cache.keys_read == (1 + 2 + 3 + 4 + 7 * 5) / 11


def test_grouped_heads_hold_groups():
    kwargs = {"n_heads": 4, "d_head": 8, "n_groups": 2}
    tokens, ring = random_tokens(2, 13), bounded(partial(RollingCache, 3, 1), **kwargs)
    masked = bounded(partial(PatternCache, window_pattern(3, 1)), **kwargs)
    logits, cache = utils.cached_logits(ring, tokens, 5)
    assert_close(logits, masked(tokens)[0])
    assert all(k.shape == (2, 2, 4, 8) for k in cache.k)


def test_names_and_what_is_refused():
    model = bounded(partial(RollingCache, 4))
    same = inspect.signature(GPTlite_KVCache.forward).parameters
    assert [*inspect.signature(GPTlite_Bounded.forward).parameters] == [*same]
    with pytest.raises(ValueError, match="no tokens"):
        model(random_tokens(1, 0))
    with pytest.raises(ValueError, match="token 16 has no position"):
        model(random_tokens(1, 17))
    _, cache = model(random_tokens(1, 16))
    with pytest.raises(ValueError, match="no position"):
        model(random_tokens(1, 1), cache)


# ---- The script ----


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != utils.GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("the order of losses needs trained weights, and there are none")
    run = run_script("main_sliding_window.py", "--quick", "--json", "-", "--plot", "a.png", cwd=tmp_path)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert all(report["checks"].values()) and (tmp_path / "a.png").is_file()
    rows = {row["method"]: row for row in report["rows"]}
    full, whole, window = rows["all keys"], rows["window 256"], rows["window 64"]
    assert full["baseline"] and whole["same_output"] is True and abs(whole["loss_difference"]) < 1e-4
    assert full["cache_bytes"] == 2 * 3 * 3 * 64 * 256 * 4 == 4 * window["cache_bytes"]
    equal = ("window 64", "window and globals", "dilated in some heads", "BigBird")
    assert window["keys_read"] == (64 * 65 / 2 + 192 * 64) / 256
    assert all(48 < rows[name]["keys_read"] <= 56.2 and rows[name]["loss_difference"] > 0 for name in equal)
    assert rows["BigBird"]["cache_bytes"] == full["cache_bytes"]  # it reads less and keeps all
    counts = next(rows for title, rows in report["sweeps"].items() if title.startswith("Scores"))
    assert all(row["window"] <= row["window in blocks"] <= row["all keys"] for row in counts[1:])


def test_script_refuses_a_window_beyond_the_context(distilled_checkpoint):
    options = ("--quick", "--windows", "64", "300")
    run = run_script("main_sliding_window.py", *options, checkpoint=distilled_checkpoint)
    assert run.status == 2 and "context of 256" in run.stderr and "Traceback" not in run.stderr
