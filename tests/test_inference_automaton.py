"""Expressions as automata: the same texts as Python's re, on random expressions and on each kind of piece."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_automaton import build_automaton, distances

AB = "ab\n"
TEXTS = ["".join(text) for n in range(6) for text in itertools.product(AB, repeat=n)]


def accepts(automaton, text):
    """Whether an automaton ends in one of its ends behind a text."""
    moves, ends = automaton
    state = 0
    for character in text:
        if character not in moves[state]:
            return False
        state = moves[state][character]
    return state in ends


def expressions():
    """Expressions over a, b and newline, as texts."""
    atoms = st.sampled_from(
        ["a", "b", ".", "[ab]", "[^a]", r"\n", r"[\n-b]", r"\w", r"\S", "(?:)", "()", r"\D"]
    )
    signs = st.sampled_from(["", "*", "+", "?", "{2}", "{1,2}", "{0,1}", "{2,}", "{,2}", "{0}", "{,}"])

    def combine(inner):
        grouped = st.tuples(inner, signs).map(lambda pair: f"({pair[0]}){pair[1]}")
        several = st.lists(inner, min_size=2, max_size=3)
        return grouped | several.map("".join) | several.map("|".join)

    return st.recursive(st.tuples(atoms, signs).map("".join), combine, max_leaves=6)


@given(expressions())
def test_random_expressions_match_what_re_matches(pattern):
    expected = {text for text in TEXTS if re.fullmatch(pattern, text)}
    try:
        automaton = build_automaton(pattern, AB)
    except ValueError as error:
        assert "no text" in str(error) and not expected
        return
    assert {text for text in TEXTS if accepts(automaton, text)} == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "(a*)*b",
        "(a|b)*a(a|b){3}",
        "(a?){3}a{3}",
        "((a|)b)*",
        "a{2}|a{3}|(ab)+",
        "(a+b?){2,3}",
        "[]a]b",
        "[^]a]+",
        r"[a\]]*",
        r"a\.b|a.b",
        "a{b",
        "a{}",
        "a{1,b}",
        "{",
        "}a]",
        r"\{a\}",
        r"[.]a[*]",
        r"[a\-b]-",
        "a-b",
        r"[-a][a-]",
        ".*",
        "",
        "|a",
        "(|a)b",
    ],
)
def test_what_is_read_otherwise_than_it_looks(pattern):
    vocabulary = "ab{}[],.1*-\\"
    automaton = build_automaton(pattern, vocabulary)
    texts = ["".join(text) for n in range(4) for text in itertools.product(vocabulary, repeat=n)]
    texts += ["aaaa", "aaab", "abab", "aabab", "aaa", "aaaaaa", "a{1,b}", "a{}", "a{b", "aabbaa"]
    assert {t for t in texts if accepts(automaton, t)} == {t for t in texts if re.fullmatch(pattern, t)}


def test_a_point_is_no_newline():
    assert not accepts(build_automaton(".*", AB), "a\nb")
    assert accepts(build_automaton(r"(.|\n)*", AB), "a\nb")


@pytest.mark.parametrize(
    "pattern",
    [
        *["(", ")", "[a", "*a", "a**", "a{3,2}", "\\", r"\8"],  # re refuses them as well
        *[
            "^a",
            "a$",
            r"\ba",
            r"a\Z",
            r"\Aa",
            r"(a)\1",
            "(?=a)a",
            "(?!a)b",
            "(?i)a",
            "(?P<x>a)",
            "a*?",
            "a{2}?",
        ],
        *[r"\x61", "a*+"],
        "(" * 3000 + "a" + ")" * 3000,
    ],
)
def test_refused(pattern):
    with pytest.raises(ValueError, match="expression"):
        build_automaton(pattern, AB)


@pytest.mark.parametrize("pattern", ["a{100000}", "(a|b)*a(a|b){30}"])
def test_too_large_is_refused(pattern):
    with pytest.raises(ValueError, match="states"):
        build_automaton(pattern, AB)


def test_what_the_vocabulary_cannot_write():
    """Dead ends are those of the vocabulary: behind a brace that it lacks there is nothing."""
    with pytest.raises(ValueError, match="no text"):
        build_automaton(r"a\{b", AB)
    moves, ends = build_automaton(r"ab|b\{a|ac", AB)
    assert moves[0].keys() == {"a"}  # not b, which no text begins with
    assert accepts((moves, ends), "ab") and not accepts((moves, ends), "b")


def test_distances_lead_to_an_end():
    moves, ends = build_automaton("a{2,4}b|b{5}", AB)
    distance = distances(moves, ends)
    assert distance[0] == 3
    for state, edges in enumerate(moves):
        if state in distance and state not in ends:
            assert distance[state] == 1 + min(distance[s] for s in edges.values())
