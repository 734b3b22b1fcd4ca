"""What confirmation refuses and accepts, and its script."""

import itertools

import pytest
from helpers import run_script
from hypothesis import given
from hypothesis import strategies as st

from data.query_pairs import load_pairs
from semantic_confirmation import same_details


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
        ("Is it safe at -5 degrees?", "Is it safe at 5 degrees?"),
        ("Is it safe at \u221240 degrees?", "Is it safe at 40 degrees?"),
        ("Is it safe at minus five degrees?", "Is it safe at five degrees?"),
        ("a balance of -$5", "a balance of $5"),
        ("add .5 grams", "add 5 grams"),
        ("add \u00bd a cup", "add \u00bc a cup"),
        ("add 1\u00bd cups", "add 1 cup"),
        ("add 1/2 cup", "add 1/3 cup"),
        ("add half a cup", "add a quarter cup"),
        ("the integral of x\u00b2", "the integral of x\u00b3"),
        ("what is 10\u00b2", "what is 102"),
        ("a square m\u00b2", "a square m"),
        ("Is it legal to park here?", "Is it illegal to park here?"),
        ("Is it possible?", "Is it impossible?"),
        ("a regular verb", "an irregular verb"),
        ("a correct answer", "an incorrect answer"),
        ("a fiction book", "a non-fiction book"),
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


def test_every_number_word_differs_from_every_other_value():
    """Case SC-1: thirteen and fourteen, twenty and thirty, hundred and thousand, once and twice."""
    words = (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
        "sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred "
        "thousand million billion trillion half quarter"
    ).split()
    ordinals = "third twelfth thirteenth twentieth fiftieth hundredth thousandth".split()
    for group in (words, ordinals, ["once", "twice", "thrice"], ["double", "triple"]):
        for a, b in itertools.permutations(group, 2):
            assert not same_details(f"what after {a} days", f"what after {b} days"), (a, b)
    assert same_details("the twentieth century", "the 20th century")
    assert same_details("the chapter thirteen", "chapter 13") and same_details("at \u22125", "at -5")
    assert same_details("minus 5 degrees", "-5 degrees") and same_details("a half", "1/2")


@given(st.decimals(-2000, 2000, places=2), st.decimals(-2000, 2000, places=2))
def test_any_two_numbers(a, b):
    texts = [f"Is it safe at {number.normalize():f} degrees?" for number in (a, b, -a)]
    for text in texts[1:]:
        assert same_details(texts[0], text) == (texts[0] == text)


@pytest.mark.parametrize("text", ["pages 3-5", "years 1939\u20131945", "Covid-19", "a 3-D film", "...5 -"])
def test_a_hyphen_is_no_sign(text):
    spaced = text.replace("-", " ").replace("\u2013", " ")
    assert same_details(text, spaced)


@given(st.text(max_size=40))
def test_confirmation_accepts_the_text_itself(text):
    assert same_details(text, text)


def test_script(distilled_checkpoint):
    options = ["--quick", "--json", "-"]
    run = run_script("more/semantic_confirmation.py", *options, checkpoint=distilled_checkpoint)
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
