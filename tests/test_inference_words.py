"""Every sentence of an explanation on made-up measurements: opposite figures give other words."""

import inspect
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import inference_words as words
from inference_cost import Ceilings, Cost

NAN = math.nan
NO_SENTENCES = {"known", "number", "overlap", "spread_of"}  # functions that return no sentence


def row(method="fast", **figures):
    return {"method": method, "tpot_ms": None} | figures


def spread(middle, low, high, method="fast", key="tpot_ms"):
    return row(method, **{key: middle, f"{key}_spread": (low, high)})


def sweep(*pairs):
    """Rows with the times of "new" and "old" at the sizes 1, 2, 4, ..."""
    return [{"size": 2**i, "new": new, "old": old} for i, (new, old) in enumerate(pairs)]


def loss_row(difference, se):
    return row(loss_difference=difference, loss_difference_se=se)


def trained(before, after, se=0.01):
    figures = {"uptrained_loss_difference": after, "uptrained_loss_difference_se": se}
    return row(loss_difference=before, **figures)


CEILINGS = Ceilings(1e9, 1e9)
SLOW = row("slow", tpot_ms=4.0)
# {function: [arguments of one outcome, of another, ...]}: no two of them may give the same words
OUTCOMES = {
    "about": [("decoding", words.choose(x, (1, "It is faster."), "It is slower.")) for x in (1, 0)],
    "choose": [(x, (1.05, "faster"), (0.95, "equal"), "slower") for x in (2.0, 1.0, 0.5)],
    "compare": [
        (row(tpot_ms=2.0), SLOW),
        (row(tpot_ms=8.0), SLOW),
        (row(tpot_ms=4.0), SLOW),
        (row(tpot_ms=0.0), SLOW),
        (row(), SLOW),
        (row(tpot_ms=2.0), row("slow")),
        (spread(2.0, 2.0, 2.0), spread(4.0, 4.0, 4.0, "slow")),
        (spread(8.0, 8.0, 8.0), spread(4.0, 4.0, 4.0, "slow")),
        (row(tokens_per_s=2.0), row("slow", tokens_per_s=4.0), "tokens_per_s"),
        (row(tokens_per_s=8.0), row("slow", tokens_per_s=4.0), "tokens_per_s"),
    ],
    "loss": [(loss_row(d, se),) for d, se in ((0.5, 0.1), (-0.5, 0.1), (0.1, 0.1), (0.5, NAN), (None, None))],
    "loss_between": [("new", "old", d, se) for d, se in ((0.5, 0.1), (-0.5, 0.1), (0.1, 0.1), (0.5, NAN))],
    "crossover": [
        (sweep(*pairs), "size", "new", "old")
        for pairs in (
            [(2, 1), (2, 2), (1, 2)],  # wins at the end
            [(1, 2), (2, 2), (2, 1)],  # at the beginning
            [(2, 1), (1, 2), (2, 1)],  # in the middle
            [(1, 2), (1, 3), (1, 4)],  # everywhere
            [(2, 1), (3, 1), (1, 1.02)],  # nowhere
            [(None, 1), (NAN, 1), (1, None)],  # unknown
        )
    ],
    "stops_costing": [
        (sweep(*pairs), "size", "new", "old")
        for pairs in ([(3, 1), (1, 1)], [(1, 1), (1, 2)], [(1, 1), (2, 1)], [(None, 1), (NAN, 1)])
    ],
    "hidden": [
        ({"size": 1, "hidden": a}, {"size": 2, "hidden": b}, "size")
        for a, b in ((0.9, 1.0), (0.5, 0.9), (0.0, 0.9), (0.0, 0.1), (None, 0.5))
    ],
    "pays_back": [(6.0, 2.0, "ms"), (6.0, 0.0, "ms"), (6.0, NAN, "ms")],
    "bounds": [
        ({"step": 10.0}, {"step": Cost(2e6, 1e6)}, CEILINGS),
        ({"step": 10.0}, {"step": Cost(1e6, 2e6)}, CEILINGS),
        ({"step": None}, {"step": Cost(1e6, 2e6)}, CEILINGS),
    ],
    "batching": [
        *((row(tpot_ms=1.0), row(tpot_ms=ms), 8) for ms in (1.0, 3.0, 8.0, 12.0, None)),
        (row(tpot_ms=1.0), row(tpot_ms=1.0), 1),
    ],
    "split_pays": [
        ([{"width": i, "one": a, "added": b} for i, (a, b) in enumerate(pairs)], "width", "one", "added", n)
        for n, pairs in (
            (2, [(1, 2), (9, 2)]),  # pays at the end
            (2, [(9, 2), (1, 2), (9, 2)]),  # in between it does not
            (2, [(9, 2), (9, 2)]),  # everywhere
            (2, [(1, 2), (1, 2)]),  # nowhere
            (1, [(9, 0)]),  # nothing is split
        )
    ],
    "idle": [
        (row(is_idle=a, says=b), "is_idle", "says")
        for a, b in ((0.6, 0.1), (0.15, 0.1), (0.1, 0.5), (None, 0.1))
    ],
    "load": [([9, 1], "the router"), ([5, 5], "the router"), ([7], "the router")],
    "part": [("attention", ms, 10.0, "step") for ms in (8.0, 2.0, None)],
    "at_size": [
        ({"pairs": 8, "new": new, "old": 2.0}, "pairs", "new", "old", "error")
        for new in (1.0, 3.0, 2.0, None)
    ],
    "growth": [
        ([{"tokens": 1, "x": 1.0}, {"tokens": 4, "x": x}][:n], "tokens", ["x"])
        for x, n in ((16.0, 2), (4.0, 2), (2.0, 2), (1.0, 2), (NAN, 2), (None, 2), (1.0, 1))
    ],
    "state_size": [("a state", 3200, 100, 256), ("a state", 3200, 100, 32), ("a state", None, 100, 256)],
    "rounds": [(row(tokens_per_round=x, round_steps=2.0),) for x in (4.0, 2.0, 1.0, None)],
    "best_length": [
        ([{"drafts": n, "measured": a, "predicted": b} for n, (a, b) in enumerate(pairs, 1)],)
        for pairs in (
            [(1.0, 1.0), (1.5, 1.5)],
            [(1.0, 1.0), (1.5, 2.5)],
            [(0.8, 1.5), (0.9, 1.6)],
            [(1.5, 1.5), (None, 2.0)],
        )
    ],
    "flattered": [(1.5, 2.0), (1.5, 1.5), (2.0, 1.5), (None, 1.5)],
    "drift": [
        ([{"depth": 1, "a": 0.9, "b": b}, {"depth": 2, "a": a, "b": b}][:n], "a", "b")
        for a, b, n in (
            (0.5, 0.1, 2),
            (0.9, 0.1, 2),
            (0.9, 0.9, 2),
            (0.9, 0.1, 1),
            (0.9, 0.9, 1),
            (None, 0.1, 2),
        )
    ],
    "kept": [(0.9, 0.6), (0.6, 0.9), (0.9, 0.9), (None, 0.9)],
    "recovery": [
        (trained(*figures), 100) for figures in ((1.0, 0.0), (1.0, 0.5), (1.0, 1.2), (0.0, 0.0), (1.0, None))
    ],
}
EQUAL_WORDS = {
    "batching": 1,
    "growth": 1,
}  # a batch that takes 8 and one that takes 12 times as long both save nothing


def texts_of(name):
    return [getattr(words, name)(*arguments) for arguments in OUTCOMES[name]]


def without_numbers(text):
    return re.sub(r"[-+]?\d[\d.,]*\d|[-+]?\d", "#", text).replace("# times", "#")


def public_functions():
    functions = inspect.getmembers(words, inspect.isfunction)
    return {name for name, f in functions if f.__module__ == words.__name__ and not name.startswith("_")}


def test_every_public_function_is_tried():
    """Whoever adds a sentence adds its outcomes here."""
    assert public_functions() == OUTCOMES.keys() | NO_SENTENCES


@pytest.mark.parametrize("name", sorted(OUTCOMES))
def test_other_figures_give_other_words(name):
    texts = texts_of(name)
    assert all(isinstance(text, words.Reason) for text in texts)
    different = {without_numbers(text) for text in texts}
    n_expected = len(texts) - EQUAL_WORDS.get(name, 0)
    assert len(different) == n_expected, sorted(different)


@pytest.mark.parametrize("name", sorted(OUTCOMES))
def test_sentences_are_whole(name):
    for text in texts_of(name):
        assert text[-1] == "." or name == "choose"
        assert "nan" not in text.split() and "None" not in text and "  " not in text


def test_a_reason_is_joined_with_a_reason_only():
    one = words.choose(1, (0, "First."), "Second.")
    both = one + words.choose(-1, (0, "First."), "Second.")
    assert both == "First. Second." and isinstance(both, words.Reason)
    for other in ("written by hand", None, 3):
        with pytest.raises(TypeError, match="words follow from figures"):
            one + other
    assert not isinstance("written by hand " + str(one), words.Reason)


def test_choose_takes_the_first_limit_that_is_reached():
    def text(figure):
        return words.choose(figure, (2, "much"), (1, "more"), "less")

    assert [text(x) for x in (3, 2, 1.5, 1, 0.5, -math.inf)] == "Much Much More More Less Less".split()
    assert text(None) == text(NAN) == "Less" and text(math.inf) == "Much"


def test_choose_refuses_what_no_figure_chooses():
    for cases in (["always"], [(1, "always"), "always"], [(2, "same"), (1, "same"), "same"]):
        with pytest.raises(ValueError, match="different words"):
            words.choose(1.0, *cases)
    with pytest.raises(ValueError, match="limits .* rise"):
        words.choose(1.0, (1, "more"), (2, "much"), "less")


def test_a_label_does_not_make_a_reason():
    with pytest.raises(TypeError, match="only a reason gets a label"):
        words.about("decoding", "It is faster.")


# compare


def test_compare_names_both_figures_and_their_ratio():
    text = words.compare(row(tpot_ms=2.0), SLOW)
    assert text == "TPOT of fast is 2.00 times lower than that of slow (2 against 4)."
    assert words.compare(row(tpot_ms=5.0), SLOW).endswith(
        "1.25 times higher than that of slow (5 against 4): it loses here."
    )


def test_equal_within_the_spread_is_no_result():
    """Also if the medians are apart: the runs reach into each other."""
    fast, slow = spread(2.0, 1.5, 3.1), spread(4.0, 3.0, 5.0, "slow")
    assert "equals that of slow within the spread of the runs (2 against 4)" in words.compare(fast, slow)
    apart = spread(2.0, 1.5, 2.9)
    assert "2.00 times lower" in words.compare(apart, slow)
    assert words.overlap(fast, slow, "tpot_ms") and not words.overlap(apart, slow, "tpot_ms")


def test_a_single_run_says_so():
    one, other = spread(2.0, 2.0, 2.0), spread(4.0, 4.0, 4.0, "slow")
    assert "(2 against 4, one run)" in words.compare(one, other)
    assert "one run" not in words.compare(spread(2.0, 1.9, 2.1), other)


@pytest.mark.parametrize("key", [*words.LOWER_IS_BETTER, *words.HIGHER_IS_BETTER])
@pytest.mark.parametrize("a, b", [(1.0, 2.0), (2.0, 1.0)])
def test_the_verdict_follows_the_direction_of_the_figure(key, a, b):
    text = words.compare(row(**{key: a}), row("slow", **{key: b}), key)
    assert ("lower" in text) == (a < b) and ("higher" in text) == (a > b)
    assert ("it loses here" in text) == ((a > b) == (key in words.LOWER_IS_BETTER))


def test_a_figure_of_unknown_direction_gets_no_verdict():
    for rate in (0.2, 0.8):
        assert "loses" not in words.compare(row(hit_rate=rate), row("slow", hit_rate=0.5), "hit_rate")


@pytest.mark.parametrize(
    "a, b, absent", [(None, 1.0, "Fast"), (NAN, 1.0, "Fast"), (1.0, NAN, "Slow"), (1.0, None, "Slow")]
)
def test_a_figure_that_is_missing_is_not_compared(a, b, absent):
    assert words.compare(row(tpot_ms=a), row("slow", tpot_ms=b)) == f"{absent} has no TPOT to compare."


# numbers


def test_number():
    numbers = [3, 1234567, 0.123456, 99.95, 999.4, 1234.6, 123456.7, 2.0, 0.0]
    assert [words.number(x) for x in numbers] == [
        "3", "1,234,567", "0.1235", "99.95", "999.4", "1,235", "123,457", "2", "0"
    ]  # fmt: skip
    assert [words.number(x) for x in (NAN, math.inf)] == ["nan", "inf"]


@given(st.floats(1e-3, 1e6))
def test_number_is_right_to_three_digits(value):
    assert float(words.number(value).replace(",", "")) == pytest.approx(value, rel=1e-3)


# the others


def test_loss_is_judged_by_its_standard_error():
    assert "loses against the baseline: +0.3000 +- 0.1000 nats" in words.loss(loss_row(0.3, 0.1))
    assert "gains" in words.loss(loss_row(-0.3, 0.1))
    assert "has the baseline's loss" in words.loss(loss_row(0.19, 0.1))
    assert "has the baseline's loss" in words.loss(loss_row(1e-6, 0.0))  # rounding
    assert "not measured" in words.loss(row()) == words.loss(loss_row(NAN, 0.1))


def test_loss_over_one_window_is_no_verdict():
    text = words.loss(loss_row(0.3, NAN))
    assert "too few windows" in text and "loses" not in text


def test_crossover_names_the_sizes():
    text = words.crossover(sweep((2, 1), (1, 2), (1, 4)), "size", "new", "old")
    assert "faster than old from size 2 on (up to 4.00 times at 4), not below (down to 0.50)" in text
    text = words.crossover(sweep((1, 2), (1, 1.01), (2, 1)), "size", "new", "old")
    assert "faster than old up to size 1 (up to 2.00 times at 1), not beyond" in text
    text = words.crossover(sweep((1, 1.02)), "size", "new", "old")  # 3% is no result
    assert "nowhere faster" in text and "1.02 times its speed" in text


def test_pays_back():
    assert "saves 2 each time: 4 uses pay it" in words.pays_back(7.0, 2.0, "ms")
    assert "1 requests pay it" in words.pays_back(0.5, 2.0, "ms", "requests")
    for saved in (0.0, -1.0):
        assert "never pays" in words.pays_back(7.0, saved, "ms")


def test_bounds_tell_what_limits_and_the_share():
    text = words.bounds({"step": 4.0}, {"step": Cost(1e6, 2e6)}, CEILINGS)
    assert "at least 2 ms of reading, 50% reached" in text and "1 GFLOP/s and 1 GB/s" in text
    assert "of computing" in words.bounds({}, {"step": Cost(2e6, 1e6)}, CEILINGS)


def test_batching():
    def text(ms, n=8):
        return words.batching(row(tpot_ms=1.0), row(tpot_ms=ms), n)

    assert "as long for the batch as for one" in text(1.1) and "ride along" not in text(2.0)
    assert "each costs 0.25 of a step alone" in text(2.0)
    assert "saves nothing" in text(7.9) and "saves nothing" in text(20.0)


def test_split_pays_is_computed_from_what_it_spares_and_adds():
    def text(*pairs, parts=2):
        rows = [{"width": 10 * i, "one": a, "added": b} for i, (a, b) in enumerate(pairs, 1)]
        return words.split_pays(rows, "width", "one", "added", parts)

    from_20 = text((1.0, 0.6), (2.0, 0.6), (4.0, 0.6))
    assert "pay from width 20 on: at 20 it spares 1 ms and adds 0.6, at 10 it spares 0.5 ms" in from_20
    assert "pay at no width from 10 to 20: at 20 it spares 0.5 ms and adds 9" in text((1.0, 9.0), (1.0, 9.0))
    assert "pay at all width from 10 to 20: at 10 it spares 2 ms" in text((3.0, 1.0), (9.0, 1.0), parts=3)
    assert "pay at width 10, not at the others" in text((4.0, 1.0), (1.0, 1.0))
    for nothing in (text((1.0, 0.0), parts=1), text(), text((NAN, 1.0), (1.0, None))):
        assert "does not tell" in nothing and "pay at" not in nothing
    rows = [{"width": 10, "one": 4.0, "mine": 3.5, "added": 1.0}]
    assert "spares 2 ms" in words.split_pays(rows, "width", "one", "added", 2)
    mine = words.split_pays(rows, "width", "one", "added", 2, "mine")
    assert "pay at no width" in mine and "spares 0.5 ms and adds 1" in mine, "a part may not be an even share"


def test_growth():
    def rows(a, b):
        return [{"tokens": 1024, "x": a}, {"tokens": 4096, "x": b}]

    outcomes = {16.0: "grows quadratically (power 2.00)", 4.0: "grows linearly (power 1.00)"}
    outcomes |= {2.0: "grows more slowly than", 1.0: "does not grow (power 0.00)"}
    for factor, expected in outcomes.items():
        sentence = words.growth(rows(3.0, 3.0 * factor), "tokens", ["x"])
        assert f"the time of x {expected}" in sentence and sentence.startswith("From tokens 1,024 to 4,096")
    assert "x was not measured" in words.growth(rows(None, 3.0), "tokens", ["x"])
    assert "x was not measured" in words.growth(rows(3.0, float("nan")), "tokens", ["x"])
    assert "does not tell" in words.growth(rows(1.0, 2.0)[:1], "tokens", ["x"])


def test_state_size():
    assert "keys and values of 32 tokens: 8.0 times less" in words.state_size("a state", 3200, 100, 256)
    assert "saves nothing" in words.state_size("a state", 3200, 100, 32)
    assert "saves nothing" in words.state_size("a state", 3200, 100, 8)
    assert "not counted" in words.state_size("a state", None, 100, 256)
    assert "not counted" in words.state_size("a state", 3200, 0, 256)


def test_rounds_and_the_best_length():
    assert "gives 4.00 tokens and costs 2.00 steps: it pays, 2.00 times" in words.rounds(
        row(tokens_per_round=4.0, round_steps=2.0)
    )
    lengths = [
        {"drafts": 1, "measured": 1.1, "predicted": 1.2},
        {"drafts": 5, "measured": 1.6, "predicted": 1.1},
    ]
    text = words.best_length(lengths)
    assert (
        "5 drafts a round are best, 1.60 times" in text and "say 1, 1.20 times" in text and "off by" in text
    )
    lost = words.best_length([line | {"measured": 0.9} for line in lengths])
    assert "No length of drafts wins" in lost and "0.90 times" in lost
