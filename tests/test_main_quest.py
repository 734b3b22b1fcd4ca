"""Quest: bounds never below the truth, pages gathered equal pages masked, all pages equal dense attention."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, large_scores, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_gqa import grouped_attention
from gptlite_sparse import causal, choice_figures, in_blocks
from main_quest import (
    GPTlite_Quest,
    PageCache,
    bound_by_definition,
    choose_pages,
    page_bound,
    quest_attention,
    running_bounds,
)


def draw(B, H, G, Sq, Sk, D=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, Sq, D), (B, G, Sk, D), (B, G, Sk, D)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def page_cache(K, V, page_size):
    """K, V [B, G, S, D] as whole pages and their bounds, as quest_attention takes them."""
    bounds = []
    for f, empty in ((torch.amin, torch.inf), (torch.amax, -torch.inf)):
        padded = F.pad(K, (0, 0, 0, -K.shape[2] % page_size), value=empty)
        bounds.append(f(padded.unflatten(2, (-1, page_size)), dim=3))
    return [in_blocks(t, page_size).flatten(2, 3) for t in (K, V)], bounds


@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 99))
def test_a_bound_is_never_below_a_score(Sk, page_size, seed):
    """Of every page and every page in progress; by two products as by definition."""
    Q, K, _ = draw(2, 4, 2, Sk, Sk, seed=seed)
    lowest, highest = running_bounds(K, page_size)
    bounds = page_bound(Q, lowest, highest)  # [B, H, Sq, Sk]: up to each key of a page
    lowest, highest, keys = (t.repeat_interleave(2, dim=1) for t in (lowest, highest, K))
    assert_close(bounds, bound_by_definition(Q, lowest, highest))
    scores = Q @ keys.mT
    for end in range(Sk):
        start = end // page_size * page_size
        assert (bounds[..., end] >= scores[..., start : end + 1].amax(-1) - 1e-12).all()


def test_the_page_with_the_best_key_can_be_missed():
    """Extremes in different channels: a bound of 20 over a truth of 10 hides a page of 12."""
    K = torch.zeros(1, 1, 32, 2)
    K[0, 0, 0, 0], K[0, 0, 1, 1], K[0, 0, 16:] = 10.0, 10.0, 6.0
    q = torch.ones(1, 1, 1, 2)
    _, bounds = page_cache(K, K, 16)
    assert page_bound(q, *bounds).flatten().tolist() == [20.0, 12.0]
    visible = choose_pages(q, K, 16, 16)
    assert visible[..., :16].all() and not visible[..., 16:].any()
    figures = choice_figures(torch.ones(1, 1, 32, 2), K, choose_pages(torch.ones(1, 1, 32, 2), K, 16, 16))
    assert figures["best_missed"] > 0.9  # of the queries that see both pages
    out = quest_attention(q, K, K, *bounds, 32, 16)
    assert_close(out, F.scaled_dot_product_attention(q, K[:, :, :16], K[:, :, :16]))


@given(st.data())
def test_gathered_pages_equal_masked_pages(data):
    G, group = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 3)]))
    Sk, page_size = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 7))
    budget = data.draw(st.integers(page_size, 40))
    q, K, V = draw(2, G * group, G, 1, Sk, seed=data.draw(st.integers(0, 99)))
    expected = grouped_attention(q, K, V, choose_pages(q, K, budget, page_size))
    (k, v), bounds = page_cache(K, V, page_size)
    assert_close(quest_attention(q, k, v, *bounds, Sk, budget), expected)
    if budget >= -(-Sk // page_size) * page_size:  # all pages
        assert_close(expected, grouped_attention(q, K, V))


@pytest.mark.parametrize("page_size, budget", [(1, 3), (4, 4), (4, 11), (16, 16)])
def test_what_a_query_sees(page_size, budget):
    """Whole pages, at most the budget, never the future; a group chooses once; one by one as at once."""
    Q, K, _ = draw(2, 4, 2, 21, 21)
    visible = choose_pages(Q, K, budget, page_size)
    assert visible.any(-1).all() and visible.sum(-1).max() <= budget
    assert not (visible & ~causal(21, 21)).any()
    assert torch.equal(visible[:, ::2], visible[:, 1::2])
    for t in range(21):
        assert torch.equal(
            choose_pages(Q[:, :, t : t + 1], K[:, :, : t + 1], budget, page_size)[:, :, 0],
            visible[:, :, t, : t + 1],
        )
        pages = in_blocks((visible[:, :, t] | (torch.arange(21) > t)).unsqueeze(-1), page_size)
        shown = in_blocks(visible[:, :, t].unsqueeze(-1), page_size).any(3)
        assert (pages.all(3) | ~shown | (torch.arange(pages.shape[2])[:, None] == 20 // page_size)).all()


def test_a_later_key_changes_no_earlier_choice():
    Q, K, _ = draw(1, 2, 2, 11, 11)
    before = choose_pages(Q, K, 4, 4)
    K[:, :, 10] = 100.0
    assert torch.equal(choose_pages(Q, K, 4, 4)[:, :, :10], before[:, :, :10])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_larger_than_16_bits_hold(dtype):
    for Q, K, V, expected in large_scores(dtype):
        (k, v), bounds = page_cache(K, V, 2)
        assert_close(quest_attention(Q[:, :, 1:], k, v, *bounds, 2, 2), expected[:, :, 1:])


def test_bad_arguments():
    q, K, V = draw(1, 2, 2, 1, 8)
    (k, v), bounds = page_cache(K, V, 4)
    with pytest.raises(ValueError, match="no page of 4"):
        choose_pages(q, K, 3, 4)
    with pytest.raises(ValueError, match="no page of 4"):
        quest_attention(q, k, v, *bounds, 8, 3)
    with pytest.raises(ValueError, match="2 pages and 7 tokens do not fit 7 rows"):
        quest_attention(q, k[:, :, :7], v[:, :, :7], *bounds, 7, 8)
    with pytest.raises(ValueError, match="9 tokens do not fit"):
        quest_attention(q, k, v, *bounds, 9, 8)
    with pytest.raises(ValueError, match="do not fill the context"):
        PageCache(tiny_model(GPTlite_Quest, budget=5, page_size=5), 1)
    with pytest.raises(ValueError, match="no page of 8"):
        tiny_model(GPTlite_Quest, budget=5, page_size=8)


# In the model


def test_all_pages_are_the_model_unchanged():
    tokens = random_tokens(2, 16)
    model = tiny_model(GPTlite_Quest, budget=16, page_size=4)
    for n in (1, 5, 16):
        assert_close(utils.cached_logits(model, tokens, n)[0], tiny_model(GPTlite)(tokens))


@given(st.integers(1, 15), st.sampled_from([(4, 4), (8, 4), (4, 2), (3, 1)]), st.integers(0, 20))
def test_every_split_of_a_text_gives_one_pass(n, sizes, seed):
    """Pieces of any length, also such that begin and end within a page."""
    budget, page_size = sizes
    model, tokens = tiny_model(GPTlite_Quest, budget=budget, page_size=page_size), random_tokens(2, 16, seed)
    whole, cache = model(tokens)
    assert_close(utils.cached_logits(model, tokens, n)[0], whole)
    first, again = model(tokens[:, :n])
    second, again = model(tokens[:, n:], again)
    assert_close(torch.cat([first, second], dim=1), whole)
    assert_close((again.k, again.bounds), (cache.k, cache.bounds))


def test_a_cache_is_used_again():
    model = tiny_model(GPTlite_Quest, budget=4, page_size=4)
    cache, tokens = PageCache(model, 1), random_tokens(1, 10)
    first = model(tokens, cache)[0]
    cache.reset()
    model(random_tokens(1, 16, seed=1), cache)
    cache.reset()
    assert torch.equal(model(tokens, cache)[0], first)


def test_the_context_is_the_end():
    model = tiny_model(GPTlite_Quest)
    _, cache = model(random_tokens(1, 16))
    with pytest.raises(ValueError, match="17 tokens"):
        model(random_tokens(1, 1), cache)


# The script


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("main_quest.py", tmp_path, distilled_checkpoint)  # --quick
    assert all(report["checks"].values()) and len(report["checks"]) == 4 and len(report["why"]) == 4
    rows = {row["method"]: row for row in report["rows"]}
    dense, quest, oracle, window = (rows[n] for n in ("dense", "Quest 32", "oracle 32", "window 32"))
    assert dense["baseline"] and dense["keys_read"] == 128.5
    assert quest["keys_read"] <= oracle["keys_read"] == window["keys_read"] < 32.1
    assert quest["mass"] < oracle["mass"] and oracle["recall"] == 1 and oracle["best_missed"] == 0
    assert 0 < quest["best_missed"] < 1 and quest["approximate"] and quest["tpot_ms"] > 0
    assert quest["kv_bytes_per_token"] == 1.25 * dense["kv_bytes_per_token"]  # two vectors more for eight
    by_size, losses, times = report["sweeps"].values()
    assert [(line["rule"], line["budget"]) for line in losses] == [
        (n, 32) for n in ("Quest", "oracle", "window")
    ]
    assert losses[0]["difference"] == pytest.approx(quest["loss_difference"])  # all windows of a quick run
    assert [line["page"] for line in by_size] == [1, 2, 4, 8, 16]
    assert all(a["mass"] > b["mass"] for a, b in zip(by_size, by_size[1:], strict=False))
    assert [line["keys"] for line in times] == [1024, 4096]


def test_script_refuses_a_budget_below_a_page(distilled_checkpoint):
    run = run_script("main_quest.py", "--quick", "--page-size", "64", checkpoint=distilled_checkpoint)
    assert run.status == 2 and run.stderr == "main_quest.py: a budget of 32 keys is no page of 64\n"
