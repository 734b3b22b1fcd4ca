"""Decoding by a grammar: each text is one of it, an expression gives the same tokens, masks are right."""

import json
import re

import pytest
import torch
from helpers import quick_report, random_tokens, run_script, tiny_model
from hypothesis import assume, given
from hypothesis import strategies as st
from test_inference_grammar import grammar_or_none, rules
from test_main_structured_decoding import Characters, FixedModel

from data.shakespeare import VOCABULARY
from gptlite_kvcache import GPTlite_KVCache
from inference_grammar import Grammar
from main_structured_decoding import Guide, generate_structured
from more.structured_grammar import (
    JSON,
    RULES,
    TokenMasks,
    frequent_pieces,
    generate_by_grammar,
    is_json,
    mask_by_trying,
    mask_on_stacks,
    states_of,
    unrolled,
)

LETTERS = "ab$"  # and the end
MODEL = tiny_model(GPTlite_KVCache, vocab_size=3, seqlen=24)
NESTED = {"s": "a<s>?b|ab*"}


@pytest.mark.parametrize("expression", ["(a|bb)*a?", "a{2,5}b|ba*", "(ab|ba){1,6}"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_a_rule_without_calls_decodes_as_its_expression(expression, temperature):
    guide, grammar = Guide(expression, LETTERS, "$"), Grammar({"s": expression}, "ab")
    prompts = random_tokens(3, 7, vocab_size=3)
    expected = generate_structured(MODEL, prompts, 14, guide, temperature, request=5)
    for i, prompt in enumerate(prompts.split(1)):
        answer = generate_by_grammar(MODEL, prompt, 14, grammar, LETTERS, 2, temperature, request=5 + i)
        assert answer == expected[i]


@given(st.integers(0, 999), st.integers(1, 20))
def test_each_text_is_one_and_ends_within_the_budget(request_number, n_tokens):
    grammar, prompt = Grammar(NESTED, "ab"), random_tokens(1, 4, vocab_size=3)
    if n_tokens < 2:
        with pytest.raises(ValueError, match="a text takes 2 at least"):
            generate_by_grammar(MODEL, prompt, n_tokens, grammar, LETTERS, 2)
        return
    answer = generate_by_grammar(MODEL, prompt, n_tokens, grammar, LETTERS, 2, 2.0, request_number)
    assert len(answer) <= n_tokens and answer[-1] == 2 and 2 not in answer[:-1]
    text = "".join(LETTERS[token] for token in answer[:-1])
    while (shorter := re.sub("aab*b", "ab", text, count=1)) != text and not re.fullmatch("ab*", text):
        text = shorter  # an inner text is replaced by the shortest
    assert re.fullmatch("ab*", text)


def test_lengths_are_those_of_the_distribution():
    """a* with logits that do not tell: an answer goes on with probability 1/2, so half of them are empty."""
    model, grammar = FixedModel(0.0, 0.0, 0.0), Grammar({"s": "a*"}, "ab")
    prompt, n = torch.zeros(1, 1, dtype=torch.int64), 400
    lengths = [
        len(generate_by_grammar(model, prompt, 60, grammar, LETTERS, 2, 1.0, request)) - 1
        for request in range(n)
    ]
    for length, share in ((0, 0.5), (1, 0.25), (2, 0.125)):
        assert abs(lengths.count(length) / n - share) < 5 * (share * (1 - share) / n) ** 0.5
    assert abs(sum(lengths) / n - 1) < 5 * (2 / n) ** 0.5  # mean 1, variance 2


def test_the_model_is_asked_only_where_there_is_a_choice():
    model, grammar = FixedModel(0.0, 0.0, 0.0), Grammar({"s": "aab<t>", "t": "a|b"}, "ab")
    prompt = torch.zeros(1, 5, dtype=torch.int64)
    answer = generate_by_grammar(model, prompt, 9, grammar, LETTERS, 2)
    assert answer == [0, 0, 1, 0, 2] and model.calls == [8]  # the prompt and aab in one piece


def test_bad_input():
    prompt = torch.zeros(1, 20, dtype=torch.int64)
    with pytest.raises(ValueError, match="and 5 fit the context"):
        generate_by_grammar(MODEL, prompt, 6, Grammar(NESTED, "ab"), LETTERS, 2)
    with pytest.raises(ValueError, match="use the character 'b', which is the end"):
        generate_by_grammar(MODEL, prompt, 5, Grammar(NESTED, "ab"), LETTERS, 1)


@given(
    rules(),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=8),
    st.text("ab", max_size=5),
)
def test_masks_of_longer_tokens(these, vocabulary, text):
    grammar = grammar_or_none(these)
    assume(grammar is not None)
    split, stacks = TokenMasks(grammar, vocabulary), grammar.read(text)
    assume(stacks)
    given_ = (grammar, text, stacks, vocabulary)
    expected = mask_by_trying(*given_)
    assert mask_on_stacks(*given_).equal(expected) and split.mask(*given_).equal(expected)


def test_what_the_top_of_the_stack_decides():
    """A token within its rule is decided, one that closes a bracket and goes on is left to the stack."""
    vocabulary = ["a", "aa", "a)", "))", "b"]
    grammar = Grammar({"s": r"\((<s>|a*)\)"}, "ab()")
    split = TokenMasks(grammar, vocabulary)
    (state, below), *_ = grammar.read("((a")
    assert split.sure[state].tolist() == [True, True, True, False, False] and split.unsure[state] == [3]
    assert split.mask(grammar, "((a", {(state, below)}, vocabulary).tolist() == [
        True,
        True,
        True,
        True,
        False,
    ]
    assert split.mask(grammar, "(a", grammar.read("(a"), vocabulary).tolist()[3] is False


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_unrolled_rules_are_read_by_the_grammar(depth):
    """Texts of the expression, drawn at random, are texts of the grammar; deeper ones are not of it."""
    grammar = Grammar(RULES, VOCABULARY)
    guide = Guide(unrolled(RULES, "scene", depth), VOCABULARY, "\n")
    model = FixedModel(*[0.0] * len(VOCABULARY))
    for answer in generate_structured(model, torch.zeros(3, 1, dtype=torch.int64), 63, guide, 1.0):
        text = "".join(VOCABULARY[token] for token in answer[:-1])
        assert grammar.may_end(grammar.read(text)) and text.count("{") >= 1
    deeper = (
        '{"speaker": "NURSE", "says": "Ay.", "answers": [' * depth + '{"speaker": "NURSE", "says": "Ay."}'
    )
    deeper += "]}" * depth
    assert grammar.may_end(grammar.read(deeper)) and is_json(deeper)
    assert len(guide.states([VOCABULARY.index(c) for c in deeper])) <= len(deeper)


def test_masks_against_another_engine():
    """Behind each place of nested texts, llguidance allows the same characters."""
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Characters()))
    lark = r"""
        start: value
        value: object | list | string | number | "true" | "false" | "null"
        object: "{" (string ": " value (", " string ": " value)*)? "}"
        list: "[" (value (", " value)*)? "]"
        string: /"[^"\\\n]*"/
        number: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/
    """
    grammar = Grammar(JSON, VOCABULARY)
    for value in ([{"a": [1, -2.5]}, "x"], {"k": {"l": [None, True, [[]]]}}, -10.25, {}):
        text = json.dumps(value)
        matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(lark))
        for place in range(len(text) + 1):
            bits = matcher.compute_bitmask()
            allowed = {c for t, c in enumerate(VOCABULARY) if bits[t // 8] >> t % 8 & 1}
            stacks = grammar.read(text[:place])
            assert allowed == set(grammar.following(stacks))
            end = len(VOCABULARY)
            assert grammar.may_end(stacks) == bool(bits[end // 8] >> end % 8 & 1)
            if place < len(text):
                matcher.consume_token(VOCABULARY.index(text[place]))


def test_states_of_an_expression():
    assert states_of("ab", "ab") == 3 and states_of("(a|b)*a(a|b){30}", "ab") is None


def test_frequent_pieces():
    assert frequent_pieces("abababab", 2) == ["ab", "ba"]
    assert set(frequent_pieces("abc", 10)) == {"ab", "bc", "abc"}


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("more/structured_grammar.py", tmp_path, distilled_checkpoint)
    assert len(report["checks"]) == 3 and all(report["checks"].values())
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["stacks"]["match"] == 1 and rows["no mask"]["match"] == 0
    assert rows["stacks"]["n_steps"] < rows["stacks"]["forward_tokens"]  # names of fields are forced
    unrolled_states, split, times = report["sweeps"].values()
    assert unrolled_states[0]["unrolled"] < unrolled_states[1]["unrolled"]
    assert unrolled_states[0]["with a stack"] == unrolled_states[1]["with a stack"]
    assert all(0 < line["left to the stack"] < 1 for line in split)
    assert [line["tokens"] for line in times] == [110, 150] and len(report["why"]) == 3


def test_bad_options(distilled_checkpoint):
    run = run_script(
        "more/structured_grammar.py", "--quick", "--n-tokens", "20", checkpoint=distilled_checkpoint
    )
    assert run.status == 2 and "a text takes 35 at least" in run.stderr
