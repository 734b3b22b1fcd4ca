"""Precision, recall and the choice of a threshold, by hand and by search; the script."""

import numpy as np
import pytest
from helpers import run_script
from hypothesis import given
from hypothesis import strategies as st

from data.query_pairs import PAIRS_PATH, Pair, load_pairs
from inference_calls import THRESHOLD
from semantic_threshold import (
    choose_threshold,
    count_hits,
    embed_once,
    judge,
    judge_left_out,
    score_pairs,
    trade_off,
    wilson_lower_bound,
)


def test_wilson_lower_bound():
    """Against values of the published formula, and the rule of three for no error in n."""
    assert wilson_lower_bound(0, 0) == 0.0
    assert wilson_lower_bound(0, 10) == pytest.approx(0.0)
    assert wilson_lower_bound(8, 10) == pytest.approx(0.4902, abs=1e-4)
    assert wilson_lower_bound(10, 10) == pytest.approx(10 / (10 + 1.96**2))
    assert wilson_lower_bound(73, 73) >= 0.95 > wilson_lower_bound(72, 72)


def test_judge_and_choose():
    similarities = np.array([0.95, 0.9, 0.8, 0.7, 0.6, 0.5], dtype=np.float32)
    same = np.array([False, True, True, True, False, True])
    result = judge(similarities, same, 0.7)
    assert (result["hits"], result["right"]) == (4, 3)
    assert result["precision"] == result["recall"] == 0.75
    assert judge(similarities, same, 0.99)["precision"] is None
    assert choose_threshold(similarities, same, 0.8) is None
    assert choose_threshold(similarities, same, 0.75) == pytest.approx(0.7)
    confirmed = np.array([False, True, True, True, True, True])
    assert choose_threshold(similarities, same, 1.0, confirmed) == pytest.approx(0.7)


@given(
    st.lists(st.tuples(st.floats(-1, 1, width=32), st.booleans(), st.booleans()), min_size=1),
    st.floats(0.1, 1),
)
def test_chosen_threshold_is_the_smallest_that_reaches_the_target(rows, target):
    similarities, same, confirmed = (np.array(column) for column in zip(*rows, strict=True))
    chosen = choose_threshold(similarities, same, target, confirmed)
    for threshold in similarities.tolist():
        reached = (judge(similarities, same, threshold, confirmed)["precision"] or 0.0) >= target
        assert not reached or chosen <= threshold
    if chosen is not None:
        assert judge(similarities, same, chosen, confirmed)["precision"] >= target


def test_left_out_topics_are_judged_by_the_others():
    """Topic a needs 0.9 and b only 0.6: a is judged at 0.6, with a wrong hit, and b at 0.9, without any."""
    topics = np.array(["a", "a", "b", "b"])
    similarities = np.array([0.9, 0.8, 0.6, 0.5])
    same, confirmed = np.array([True, False, True, False]), np.ones(4, dtype=bool)
    assert judge_left_out(similarities, same, topics, 1.0, confirmed) == (2, 1)
    confirmed[1] = False  # the wrong pair of a is refused
    assert judge_left_out(similarities, same, topics, 1.0, confirmed) == (1, 1)
    assert judge_left_out(similarities, np.zeros(4, dtype=bool), topics, 1.0, confirmed) == (0, 0)


def test_pairs_are_scored_and_hit_as_a_cache_hits_them():
    """Made-up vectors; each text is embedded once, in one batch, whatever asks for it later."""
    calls = []

    def embed_fn(texts):
        calls.append(texts)
        angles = np.radians([float(text) if text != "probe" else 0.0 for text in texts])
        return 2 * np.stack([np.cos(angles), np.sin(angles)], axis=1)

    rows = [("0", "20", True), ("0", "50", False), ("90", "80", True), ("90", "85", False)]
    pairs = [Pair("t", same, "kind", query, other) for query, other, same in rows]
    look_up = embed_once(embed_fn, [text for pair in pairs for text in pair[3:]])
    similarities, same, confirmed = score_pairs(pairs, look_up, lambda query, other: other != "85")
    assert similarities == pytest.approx(np.cos(np.radians([20, 50, 10, 5])), abs=1e-6)
    assert same.tolist() == [True, False, True, False] and confirmed.tolist() == [True, True, True, False]
    for threshold in (0.6, 0.9, 0.99, 0.9999):
        hits = count_hits(pairs, look_up, threshold, None)
        assert hits == judge(similarities, same, threshold)["hits"]
        hits = count_hits(pairs, look_up, threshold, lambda query, stored: query != "85")
        assert hits == judge(similarities, same, threshold, confirmed)["hits"]
    recall, precision = trade_off(similarities, same, confirmed)
    assert recall == [1, 1, 0.5] and precision == pytest.approx([2 / 3, 1, 1])
    assert len(calls) == 1 and len(calls[0]) == len(set(calls[0]))


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "curve.png"
    options = ["--quick", "--json", "-", "--plot", figure]
    run = run_script("more/semantic_threshold.py", *options, checkpoint=distilled_checkpoint, fresh=True)
    assert run.status == 0, run.stderr
    assert figure.stat().st_size > 1000 and "Loading" not in run.stderr
    assert run.json["checks"] and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    plain, confirmed = rows["cosine, test half"], rows["cosine, confirmed, test half"]
    assert plain["approximate"] and confirmed["approximate"]
    assert confirmed["precision"] > plain["precision"] and confirmed["at least"] < confirmed["precision"]
    assert plain["recall"] >= confirmed["recall"] > 0
    counted = [name for name in run.json["checks"] if "as counted" in name]
    assert [int(name.split("hits ")[1].split()[0]) for name in counted] == [plain["hits"], confirmed["hits"]]
    threshold = run.json["config"]["threshold"]
    tables = [lines for title, lines in run.json["sweeps"].items() if "confirmed; threshold" in title]
    chosen = [line for line in tables[0] if line["threshold"] == threshold]
    assert chosen[0]["precision"] >= 0.95
    recalls = [line["recall"] for line in tables[0]]
    assert recalls == sorted(recalls, reverse=True)
    assert sum(
        line["pairs"] for lines in run.json["sweeps"].values() for line in lines if "pairs" in line
    ) == len(load_pairs(PAIRS_PATH)[1])
    assert -1e-5 < threshold - THRESHOLD < 5e-4, "the default of the caches is not what is chosen here"
    assert "missed" in run.json["why"][1]


@pytest.mark.slow
def test_the_words_follow_the_target(distilled_checkpoint):
    options = ["--quick", "--json", "-", "--target", "0.4", "--threshold", "0.9"]
    run = run_script("more/semantic_threshold.py", *options, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr
    why = run.json["why"]
    assert "enough for the target" in why[0] and "target is met" in why[1] and "as the target asks" in why[2]


@pytest.mark.parametrize("option, value", [("--target", "1.5"), ("--threshold", "2")])
def test_bad_options_are_one_line(option, value):
    run = run_script("more/semantic_threshold.py", "--quick", option, value)
    assert run.status == 2 and run.stdout == ""
    assert len(run.stderr.strip().splitlines()) == 1 and value in run.stderr
