"""Eviction: each rule against lists that a reader can follow, and all of them against all keys."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_bounded import EvictingCache, GPTlite_Bounded, RollingCache, by_group, kept_tokens, mix
from gptlite_gqa import expanded_attention, grouped_attention
from gptlite_kvcache import GPTlite_KVCache
from main_kv_eviction import (
    RULES,
    H2OCache,
    OracleCache,
    RandomCache,
    SnapKVCache,
    TOVACache,
    WindowCache,
    attention_steps,
    streaming_cache,
)

EVICTING = {name: make for name, make in RULES.items() if name not in ("oracle", "window, sinks")}
every_rule = pytest.mark.parametrize("name", EVICTING)


def draw(B, H, T, D, G=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    heads = H, G or H, G or H
    return [3 * torch.randn(B, n, T, D, generator=generator, dtype=torch.float64) for n in heads]


def bounded(make, *sizes, **kwargs):
    return tiny_model(GPTlite_Bounded, make_cache=partial(make, *sizes), **({"seqlen": 64} | kwargs))


def by_lists(Q, K, V, budget, worth, n_recent):
    """One head of one text [T, D]: a list of tokens, from which the least worth goes before a new one comes.

    worth(token, held, rows): rows: for each earlier query, what it gave to each token, as a dictionary.
    """
    held, rows, out = [], [], []
    for t in range(len(Q)):
        if len(held) == budget:
            old = [j for j in held if j <= t - n_recent]
            held.remove(min(old, key=lambda j: worth(j, held, rows)))
        held.append(t)
        weights = torch.softmax(K[held] @ Q[t] / Q.shape[1] ** 0.5, dim=0)
        rows.append(dict(zip(held, weights.tolist(), strict=True)))
        out.append(weights @ V[held])
    return torch.stack(out), held, rows


def h2o(j, held, rows):
    return sum(row.get(j, 0.0) for row in rows) / (len(rows) - j)


LISTS = {  # rule: (worth, tokens that stay in any case, of a budget)
    "window": (lambda j, held, rows: j, lambda budget: 1),
    "TOVA": (lambda j, held, rows: rows[-1][j], lambda budget: 1),
    "H2O": (h2o, lambda budget: max(budget // 2, 1)),
    "H2O, raw sums": (lambda j, held, rows: h2o(j, held, rows) * (len(rows) - j), lambda b: max(b // 2, 1)),
}


@given(
    name=st.sampled_from([*LISTS]),
    T=st.integers(1, 24),
    budget=st.integers(1, 12),
    pieces=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_rules_by_lists(name, T, budget, pieces, seed):
    """Each head of each text has its own list; how the tokens come in pieces changes nothing."""
    Q, K, V = draw(2, 2, T, 4, seed=seed)
    worth, n_recent = LISTS[name]
    cache = RULES[name](budget)
    parts = zip(*(x.split(pieces, dim=2) for x in (Q, K, V)), strict=True)
    out = torch.cat([cache.attend(*part) for part in parts], dim=2)
    for b in range(2):
        for h in range(2):
            expected, held, _ = by_lists(Q[b, h], K[b, h], V[b, h], budget, worth, n_recent(budget))
            assert_close(out[b, h], expected)
            assert sorted(cache.token[b, h, : cache.n_held].tolist()) == held
    assert cache.k.shape[2] == budget and cache.n_held == min(T, budget)
    assert cache.keys_total == sum(min(t + 1, budget) for t in range(T))


def test_snapkv_by_definition():
    """At every step: what the last 2 queries give to the keys held, each key only to queries behind it."""
    Q, K, V = draw(1, 1, 14, 4)
    cache = SnapKVCache(6, n_window=2)
    held = []
    for t in range(14):
        if len(held) == 6:
            worth = dict.fromkeys(held, 0.0)
            for i in (t - 2, t - 1):
                seen = [j for j in held if j <= i]
                weights = torch.softmax(K[0, 0, seen] @ Q[0, 0, i] / 2, dim=0).tolist()
                for j, weight in zip(seen, weights, strict=True):
                    worth[j] += weight
            held.remove(min((j for j in held if j <= t - 2), key=worth.get))
        held.append(t)
        cache.attend(*(x[:, :, t : t + 1] for x in (Q, K, V)))
        assert sorted(cache.token[0, 0, : cache.n_held].tolist()) == held


def test_sums_of_h2o():
    """5 tokens give 5 in all; each further one adds 1; an eviction takes away what its key had received."""
    Q, K, V = draw(1, 2, 9, 4)
    cache = H2OCache(5)
    cache.attend(*(x[:, :, :5] for x in (Q, K, V)))
    assert_close(cache.received.sum(dim=-1), torch.full((1, 2), 5.0, dtype=torch.float64))
    for t in range(5, 9):
        before, tokens = cache.received.clone(), cache.token.clone()
        cache.attend(*(x[:, :, t : t + 1] for x in (Q, K, V)))
        gone = (before * (tokens != cache.token)).sum(dim=-1)
        assert_close(cache.received.sum(dim=-1), before.sum(dim=-1) - gone + 1)


def test_new_tokens_are_not_evicted_at_once():
    """Budget 6, half of it recent, a prompt of 6 and 20 steps: the 3 newest are always there, 6 are held."""
    Q, K, V = draw(2, 2, 26, 4)
    for cache in (H2OCache(6), RandomCache(6), H2OCache(6, 6)):
        cache.attend(*(x[:, :, :6] for x in (Q, K, V)))
        seen = set()
        for t in range(6, 26):
            cache.attend(*(x[:, :, t : t + 1] for x in (Q, K, V)))
            assert cache.n_held == 6
            for held in cache.token.flatten(0, 1).tolist():
                assert {t, t - 1, t - 2} <= {*held} and len({*held}) == 6
                seen |= {*held}
        assert len(seen) > 15  # what is held does not freeze to the prompt


@every_rule
def test_a_budget_of_the_text_is_attention_to_all_keys(name):
    tokens, plain = random_tokens(2, 13), tiny_model(GPTlite, seqlen=64)
    for sizes in ((13,), (20,), (13, 13)):
        model = bounded(EVICTING[name], *sizes)
        assert_close(model(tokens)[0], plain(tokens))
        assert_close(utils.cached_logits(model, tokens, 4)[0], plain(tokens))
    assert_close(bounded(OracleCache, 13)(tokens)[0], plain(tokens))


@given(
    name=st.sampled_from([*RULES]),
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    budget=st.integers(2, 9),
    seed=st.integers(0, 99),
)
def test_any_split_of_a_stream_equals_one_pass(name, pieces, budget, seed):
    tokens, model = random_tokens(2, sum(pieces), seed), bounded(RULES[name], budget)
    logits, cache = [], None
    for piece in tokens.split(pieces, dim=1):
        out, cache = model(piece, cache)
        logits.append(out)
    assert_close(torch.cat(logits, dim=1), model(tokens)[0])


@pytest.mark.parametrize("name", RULES)
def test_the_last_token_changes_nothing_before_it(name):
    tokens, model = random_tokens(2, 30), bounded(RULES[name], 6)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 16
    assert_close(model(tokens)[0][:, :-1], model(changed)[0][:, :-1])
    assert utils.largest_difference(model(tokens)[0][:, -1], model(changed)[0][:, -1]) > 1e-3


@given(T=st.integers(1, 30), budget=st.integers(1, 10))
def test_evicting_the_oldest_is_the_ring(T, budget):
    tokens = random_tokens(2, T)
    assert_close(bounded(WindowCache, budget)(tokens)[0], bounded(RollingCache, budget)(tokens)[0])


def test_streaming_keeps_the_first_and_the_newest():
    Q, K, V = draw(1, 2, 20, 4)
    for budget, n_sinks in ((9, 4), (5, 2), (2, 1)):
        token = torch.arange(20)
        seen = (token > token[:, None] - (budget - n_sinks)) | (token < n_sinks)
        expected = F.scaled_dot_product_attention(Q, K, V, attn_mask=seen & (token <= token[:, None]))
        assert_close(streaming_cache(budget).attend(Q, K, V), expected)


def test_the_oracle_reads_the_best_keys():
    Q, K, V = draw(1, 2, 12, 4)
    cache = OracleCache(3)
    out = cache.attend(Q, K, V)
    for h in range(2):
        for t in range(12):
            scores = K[0, h, : t + 1] @ Q[0, h, t] / 2
            best = scores.topk(min(3, t + 1)).indices
            assert_close(out[0, h, t], torch.softmax(scores[best], dim=0) @ V[0, h, best])
    assert cache.keys_total == 1 + 2 + 3 * 10 and cache.k.shape[2] == 12  # it reads less and keeps all


# ---- A prompt that is read whole ----


@every_rule
@pytest.mark.parametrize("T", [1, 2, 3, 6, 7, 12])
def test_the_prompt_itself_sees_all_its_keys(name, T):
    """Cut after its own queries: only later steps see 6 keys. Prompts within the budget are untouched."""
    tokens = random_tokens(2, T + 4)
    model, full = bounded(EVICTING[name], 6, 6), tiny_model(GPTlite_KVCache, seqlen=64)
    logits, cache = model(tokens[:, :T])
    assert_close(logits, full(tokens[:, :T])[0])
    layer = cache.layers[0]
    assert layer.n_held == min(T, 6) and layer.k.shape[2] == 6
    kept = layer.token[..., : layer.n_held]
    assert torch.equal(kept, kept.sort(dim=-1).values)  # in the order of the text
    _, full_cache = full(tokens[:, :T])
    rows = kept.unsqueeze(-1).expand(*kept.shape, 16)
    assert_close(layer.k[..., : layer.n_held, :], full_cache[0][0].gather(2, rows))
    for t in range(T, T + 4):
        _, cache = model(tokens[:, t : t + 1], cache)
        assert cache.layers[1].n_held == min(t + 1, 6)


def test_snapkv_cuts_a_prompt_by_its_last_queries():
    """Prompt of 12, 6 kept, of which the window of 3; pooled over 5 neighbours; nothing goes afterwards."""
    Q, K, V = draw(1, 1, 15, 4)
    cache = SnapKVCache(20, 6, 3)
    cache.attend(*(x[:, :, :12] for x in (Q, K, V)))
    scores = (Q[0, 0, 9:12] @ K[0, 0, :12].T / 2).masked_fill(torch.ones(3, 12).triu(10).bool(), -torch.inf)
    given = torch.softmax(scores, dim=-1).mean(dim=0)
    pooled = torch.stack([given[max(j - 2, 0) : j + 3].mean() for j in range(12)])
    best = pooled[:9].topk(3).indices.tolist()
    assert cache.token[0, 0, :6].tolist() == sorted(best) + [9, 10, 11]
    for t in range(12, 15):
        cache.attend(*(x[:, :, t : t + 1] for x in (Q, K, V)))
    assert cache.token[0, 0, : cache.n_held].tolist() == sorted(best) + [9, 10, 11, 12, 13, 14]


def test_h2o_cuts_a_prompt_by_all_its_queries():
    Q, K, V = draw(1, 1, 12, 4)
    cache = H2OCache(6, 6)
    cache.attend(Q, K, V)
    weights = torch.softmax((Q @ K.mT / 2).masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf), dim=-1)
    worth = weights[0, 0].sum(dim=0) / torch.arange(12, 0, -1)
    assert cache.token[0, 0].tolist() == sorted(worth[:9].topk(3).indices.tolist()) + [9, 10, 11]


# ---- Grouped heads, types, pictures ----


def test_one_choice_for_the_heads_that_share_keys():
    """H 4, G 2, 6 of 12 kept: the cache has 2 L G 6 D numbers, and grouped equals copied-out heads."""
    for name, make in EVICTING.items():
        model = bounded(make, 6, 6, n_heads=4, d_head=8, n_groups=2)
        _, cache = model(random_tokens(1, 12))
        assert sum(t.numel() for t in (*cache.k, *cache.v)) == 2 * 2 * 2 * 6 * 8, name
    Q, K, V = draw(2, 4, 10, 4, G=2)
    wide = [x.repeat_interleave(2, dim=1) for x in (K, V)]
    for name in ("window", "oracle"):
        assert_close(RULES[name](4).attend(Q, K, V)[:, ::2], RULES[name](4).attend(Q, K, V)[:, ::2])
    assert_close(WindowCache(4).attend(Q, K, V), WindowCache(4).attend(Q, *wide))
    weights = torch.softmax(Q @ wide[0].mT, dim=-1)
    assert_close(mix(weights, V), weights @ wide[1])
    assert_close(by_group(weights, 2)[:, 1], weights[:, 2] + weights[:, 3])
    assert_close(grouped_attention(Q, K, V), expanded_attention(Q, K, V))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype):
    """Sums of attention are kept in 32 bits, in which a thousand small shares still add up."""
    Q, K, V = (x.to(dtype) for x in draw(1, 2, 12, 4))
    for name, make in EVICTING.items():
        cache = make(5)
        out = cache.attend(Q, K, V)
        assert out.dtype == cache.k.dtype == dtype and cache.received.dtype == torch.float32, name
        assert out.isfinite().all()


def test_by_layer_all_heads_hold_the_same():
    Q, K, V = draw(1, 3, 20, 4)
    cache = TOVACache(6, by_layer=True)
    cache.attend(Q, K, V)
    assert (cache.token == cache.token[:, :1]).all()
    single = TOVACache(6)
    single.attend(Q, K, V)
    assert (single.token != single.token[:, :1]).any()


def test_picture_of_what_is_held():
    steps, held = kept_tokens(bounded(WindowCache, 3), random_tokens(1, 5))
    pairs = [*zip(steps, held, strict=True)]
    assert {j for t, j in pairs if t == 4} == {2, 3, 4} and len(pairs) == 1 + 2 + 3 + 3 + 3


def test_forms_of_a_step():
    runs = attention_steps(2, 4, torch.empty(0, dtype=torch.float64), 40, held=8)
    assert [*runs] == ["all keys", "window", "TOVA", "H2O", "SnapKV's rule"]
    assert all(run().shape == (1, 2, 1, 4) and run().isfinite().all() for run in runs.values())


def test_budgets_that_cannot_be():
    for make, sizes in (
        (WindowCache, (0,)),
        (H2OCache, (4, 1)),
        (TOVACache, (4, 5)),
        (SnapKVCache, (4, 4, 5)),
    ):
        with pytest.raises(ValueError, match="no room"):
            make(*sizes)
    with pytest.raises(TypeError, match="abstract"):  # a rule says what keys are worth
        EvictingCache(2)


# ---- The script ----


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != utils.GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("the order of losses needs trained weights, and there are none")
    run = run_script("main_kv_eviction.py", "--quick", "--json", "-", "--plot", "a.png", cwd=tmp_path)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert all(report["checks"].values()) and (tmp_path / "a.png").is_file()
    (stream,) = (rows for title, rows in report["sweeps"].items() if title.startswith("Loss against budget"))
    losses = {row["rule"]: row["difference"] for row in stream}
    assert [*losses] == [*RULES] and all(row["+-"] is not None for row in stream)
    assert losses["oracle"] < losses["TOVA"] < losses["window"] < 1
    held = {row["rule"]: row["cache bytes"] for row in stream}
    assert held["window"] == held["H2O"] == 2 * 3 * 3 * 64 * 32 * 4 == held["oracle"] / 8
    assert all(row["keys read"] == (32 * 33 / 2 + 224 * 32) / 256 for row in stream)
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["all keys"]["baseline"] and rows["all keys"]["cache_bytes"] == held["oracle"]
    assert rows["SnapKV"]["cache_bytes"] == 2 * held["window"]  # it keeps all of an answer of 32


def test_script_refuses_a_budget_beyond_the_prompt(distilled_checkpoint):
    run = run_script("main_kv_eviction.py", "--quick", "--budgets", "230", checkpoint=distilled_checkpoint)
    assert run.status == 2 and "--budgets" in run.stderr and "Traceback" not in run.stderr
