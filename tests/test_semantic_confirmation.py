"""What confirmation refuses and accepts, and its script."""

import pytest
from helpers import run_script
from hypothesis import given
from hypothesis import strategies as st

from data.query_pairs import load_pairs
from main_semantic_confirmation import same_details


@pytest.mark.parametrize(
    "query, stored",
    [
        ("How do I turn dark mode on?", "How do I turn dark mode off?"),
        ("What is the capital of France?", "What is the capital of Spain?"),
        ("what is the capital of spain", "What is the capital of France?"),
        ("What happens in Act 1?", "What happens in Act 2?"),
        ("What happens in act one?", "What happens in act two?"),
        ("What is new in Python 3.1?", "What is new in Python 3.11?"),
        ("Which plants are safe?", "Which plants are not safe?"),
        ("Does it work?", "Doesn't it work?"),
        ("Does it work?", "Doesn\u2019t it work?"),
        ("How do I approve a request?", "How do I deny a request?"),
        ("How do I lock the door?", "How do I unlock the door?"),
        ("Who follows Helena, Demetrius?", "Who follows Demetrius, Helena?"),
        ("from a string to a number", "from a number to a string"),
    ],
)
def test_confirmation_refuses(query, stored):
    """Case SC-1."""
    assert not same_details(query, stored) and not same_details(stored, query)


@pytest.mark.parametrize(
    "query, stored",
    [
        ("How do I turn dark mode on?", "How can I switch the dark mode on?"),
        ("What happens in Act 1 of Hamlet?", "Describe the first act of Hamlet"),
        ("Who is Desdemona's father?", "What is the name of the father of Desdemona?"),
        ("Is it not safe?", "Isn't it safe?"),
        ("", ""),
        ("?!", "..."),
        ("\u00bfD\u00f3nde est\u00e1?", "\u00bfD\u00f3nde est\u00e1?"),
    ],
)
def test_confirmation_accepts(query, stored):
    assert same_details(query, stored) and same_details(stored, query)


@given(st.text(max_size=40))
def test_confirmation_accepts_the_text_itself(text):
    assert same_details(text, text)


def test_script(checkpoint):
    options = ["--quick", "--repeats", "1", "--json", "-"]
    run = run_script("main_semantic_confirmation.py", *options, checkpoint=checkpoint)
    assert run.status == 0, run.stderr
    assert run.json["checks"] and all(run.json["checks"].values())
    baseline, *halves = run.json["rows"]
    assert baseline["traps_refused"] == baseline["paraphrases_refused"] == 0 and baseline["baseline"]
    assert len(halves) == 2
    for row in halves:
        assert row["approximate"] and row["traps_refused"] > 0.5 > 0.2 > row["paraphrases_refused"]
    lines = run.json["sweeps"]["By kind of pair: all but the paraphrases should be refused"]
    assert sum(line["pairs"] for line in lines) == sum(map(len, load_pairs()))
    assert all(line["refused"] <= line["pairs"] for line in lines)
    for line in lines:
        if line["half"] == "tuning half" and line["kind"] in ("number", "name", "negation"):
            assert line["refused"] == line["pairs"]
