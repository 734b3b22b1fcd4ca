"""Grammars with a stack: the same texts as an enumeration of the rules and as Python's json."""

import itertools
import json
import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from data.shakespeare import VOCABULARY
from inference_automaton import build_automaton
from inference_grammar import Grammar
from more.structured_grammar import JSON

NAMES = ["s", "t", "u"]


def texts_of(rules, longest):
    """All texts of the first rule up to a length: what is known of each rule grows until nothing is new."""
    every = ["".join(t) for n in range(longest + 1) for t in itertools.product("ab", repeat=n)]
    known, before = {name: set() for name in rules}, None
    while known != before:
        before = known
        parts = {
            f"<{name}>": f"({'|'.join(sorted(texts)) if texts else '[^ab]'})"
            for name, texts in before.items()
        }
        known = {}
        for name, expression in rules.items():
            for call, part in parts.items():
                expression = expression.replace(call, part)
            known[name] = {text for text in every if re.fullmatch(expression, text)}
    return known[next(iter(rules))]


def rules():
    """Three rules over a and b that call each other behind a character, now and then with repetition."""
    atoms = st.sampled_from(["a", "b", "[ab]", "", *(f"<{name}>" for name in NAMES)])
    parts = st.tuples(atoms, st.sampled_from(["", "", "?", "*"])).map(lambda pair: f"({pair[0]}){pair[1]}")
    calling = st.tuples(st.sampled_from("ab"), st.lists(parts, max_size=3).map("".join)).map("".join)
    bodies = st.tuples(st.sampled_from(["a", "b", "", "ab", "<t>b"]), calling).map("|".join)
    return st.fixed_dictionaries(dict.fromkeys(NAMES, bodies))


def grammar_or_none(these, vocabulary="ab"):
    try:
        return Grammar(these, vocabulary)
    except ValueError:
        return None


@given(rules())
def test_texts_are_those_of_the_rules(these):
    grammar = grammar_or_none(these)
    assume(grammar is not None)
    texts = texts_of(these, 4)
    for n in range(5):
        for text in map("".join, itertools.product("ab", repeat=n)):
            stacks = grammar.read(text)
            assert grammar.may_end(stacks) == (text in texts)
            longer = [len(other) - n for other in texts if other.startswith(text)]
            if longer:  # else the shortest end may lie beyond the enumeration
                assert grammar.characters_left(stacks) == min(longer)
            else:
                assert grammar.characters_left(stacks) > 4 - n


LEAVES = st.integers(-99, 99) | st.booleans() | st.none() | st.text("ab ,:[]{}0", max_size=4)


def containers(inner):
    return st.lists(inner, max_size=3) | st.dictionaries(st.text("ab}", max_size=2), inner, max_size=3)


@given(st.recursive(LEAVES, containers, max_leaves=6), st.data())
def test_json_is_read_as_json_reads_it(value, data):
    grammar, text = Grammar(JSON, VOCABULARY), json.dumps(value)
    assert grammar.may_end(grammar.read(text))
    place = data.draw(st.integers(0, len(text)))
    changed = (
        text[:place]
        + data.draw(st.sampled_from(["", *'a"[]{},:0 -']))
        + text[place + data.draw(st.integers(0, 1)) :]
    )
    if grammar.may_end(grammar.read(changed)):
        json.loads(changed)  # raises where it is none
    else:
        try:
            other = json.loads(changed)
        except ValueError:
            return
        assert json.dumps(other) != changed  # blanks at other places, or numbers written otherwise


def test_a_rule_without_calls_is_its_expression():
    expression = "(a|bb)*a?"
    grammar, (moves, ends) = Grammar({"s": expression}, "ab"), build_automaton(expression, "ab")
    assert grammar.moves[:-1] == moves and grammar.ends == ends and not any(grammar.calls)


def test_a_call_stands_for_itself_alone():
    grammar = Grammar({"s": r"[^a]<t>.", "t": "a"}, "ab")
    assert [
        t for t in map("".join, itertools.product("ab", repeat=3)) if grammar.may_end(grammar.read(t))
    ] == [
        "baa",
        "bab",
    ]


@pytest.mark.parametrize(
    ("these", "message"),
    [
        ({"s": "a<t>"}, "calls t, which is no rule"),
        ({"s": "a<s>"}, "no text of the rule s comes to an end"),
        ({"s": "a|b<t>", "t": "a<t>"}, "no text of the rule t comes to an end"),
        ({"s": "<s>a|b"}, "left recursion"),
        ({"s": "<t>a", "t": "b|<s>b"}, "left recursion"),
        ({"s": "<t><s>a|b", "t": "a?"}, "left recursion"),  # behind a text without characters
        ({"s": "a("}, "the expression"),
    ],
)
def test_rules_that_cannot_be_read(these, message):
    with pytest.raises(ValueError, match=message):
        Grammar(these, "ab")


def test_deep_texts():
    grammar = Grammar({"s": r"\(<s>?\)"}, "()")
    stacks = grammar.read("(" * 500)
    assert grammar.characters_left(stacks) == 501 - 1 and not grammar.may_end(stacks)
    assert grammar.may_end(grammar.read(")" * 500, stacks)) and not grammar.read(")" * 501, stacks)
    assert grammar.characters_left(set()) == math.inf
