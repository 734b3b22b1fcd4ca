"""Structured decoding: every text matches, masks are those by definition, jump-forward changes no token."""

import itertools
import json
import math
import re
from collections import Counter

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import assume, given
from hypothesis import strategies as st
from test_inference_automaton import AB, expressions

from data.shakespeare import VOCABULARY
from gptlite_kvcache import GPTlite_KVCache
from main_kvcache import generate_kvcache
from main_structured_decoding import (
    FORMS,
    NEVER,
    Guide,
    generate_jump_forward,
    generate_structured,
    masks_by_trying,
    masks_from_table,
    masks_without_budget,
)

LETTERS = AB + "$"  # and the end
MODEL = tiny_model(GPTlite_KVCache, vocab_size=len(LETTERS), seqlen=24)


class FixedModel:
    """Stands in for GPTlite_KVCache: the same logits at every position; records what goes through it."""

    seqlen = 64

    def __init__(self, *logits):
        self.logits, self.calls = torch.tensor(logits, dtype=torch.float64), []

    def __call__(self, tokens, kv_cache=None):
        self.calls.append(tokens.shape[1])
        return self.logits.expand(*tokens.shape, -1), kv_cache


def guide_or_none(pattern, vocabulary=LETTERS):
    """The guide of an expression that some text of a, b and newline matches, else None."""
    try:
        return Guide(pattern, vocabulary, "$")
    except ValueError:
        return None


def text_of(answer, vocabulary=LETTERS):
    return "".join(vocabulary[token] for token in answer)


# Masks


@given(expressions(), st.integers(1, 5))
def test_masks_are_those_of_all_texts_within_the_budget(pattern, budget):
    """Against an enumeration by Python's re: a token may come if some text of that length goes on so."""
    guide = guide_or_none(pattern)
    assume(guide is not None)
    texts = ["".join(t) + "$" for n in range(budget) for t in itertools.product(LETTERS, repeat=n)]
    texts = [text for text in texts if re.fullmatch(pattern, text[:-1])]
    for prefix in {text[:n] for text in texts for n in range(len(text))}:
        expected = {text[len(prefix)] for text in texts if text.startswith(prefix)}
        answer = [LETTERS.index(c) for c in prefix]
        state, left = guide.states(answer)[-1], budget - len(prefix)
        for masks in (masks_from_table, masks_by_trying):
            (mask,) = masks(guide, [answer], [state], left)
            assert {LETTERS[token] for token in mask.nonzero()[:, 0].tolist()} == expected
    if not texts:
        assert guide.left[0] > budget


def test_the_end_is_allowed_exactly_where_a_text_may_end():
    guide = Guide("a*b|ab", LETTERS, "$")
    for prefix, ends in (("", False), ("a", False), ("b", True), ("ab", True), ("aab", True)):
        state = guide.states([LETTERS.index(c) for c in prefix])[-1]
        assert (guide.needed[state, LETTERS.index("$")] == 1) == ends


def test_an_accepting_state_is_not_the_end():
    """a*, three tokens, all equally likely: lengths are geometric, and there is no other character."""
    guide = Guide("a*", "ab$", "$")
    model, n = FixedModel(0.0, 0.0, 0.0), 2000
    answers = generate_structured(model, torch.zeros(n, 1, dtype=torch.int64), 60, guide, 1.0)
    assert all(re.fullmatch(r"a*\$", text_of(answer, "ab$")) for answer in answers)
    lengths = Counter(len(answer) - 1 for answer in answers)
    for k, p in ((0, 0.5), (1, 0.25), (2, 0.125)):
        assert abs(lengths[k] / n - p) < 5 * math.sqrt(p * (1 - p) / n)
    assert abs(sum(k * count for k, count in lengths.items()) / n - 1) < 5 * math.sqrt(2 / n)


def test_behind_the_end_nothing_is_asked_and_nothing_breaks():
    """A draft abEab of a speculative decoder: each position's mask follows its own prefix, up to the end."""
    guide = Guide("ab", "abE", "E")
    states = guide.states([0, 1, 2, 0, 1])
    assert states[-1] == guide.over and len(states) == 4  # in front of a, b and E, and behind it
    masks = guide.needed[states] <= torch.tensor([[3], [2], [1], [1]])
    assert masks.tolist() == [[True, False, False], [False, True, False], [False, False, True]] + [
        [False, False, True]  # rows of a batch that are ready are filled with ends
    ]
    assert guide.states([0, 0, 1]) == states[:2]  # up to the token that is refused


@given(st.integers(0, 10**6))
def test_rows_that_end_early_do_not_change_others(seed):
    guide = Guide("(ab?){1,6}", LETTERS, "$")
    prompts = random_tokens(5, 4, seed, len(LETTERS))
    together = generate_structured(MODEL, prompts, 13, guide, 1.0, request=seed)
    alone = [generate_structured(MODEL, p[None], 13, guide, 1.0, seed + i)[0] for i, p in enumerate(prompts)]
    assert together == alone
    assert all(re.fullmatch(r"(ab?){1,6}\$", text_of(answer)) for answer in together)


# Decoding


@given(expressions(), st.integers(0, 10**6), st.sampled_from([0.0, 1.0]), st.integers(0, 6))
def test_texts_match_and_jump_forward_changes_nothing(pattern, seed, temperature, more):
    guide = guide_or_none(pattern)
    assume(guide is not None and guide.left[0] + more <= 12)
    prompt, budget = random_tokens(1, 1 + seed % 9, seed, len(LETTERS)), guide.left[0] + more
    (answer,) = generate_structured(MODEL, prompt, budget, guide, temperature, seed)
    assert len(answer) <= budget and text_of(answer).endswith("$")
    assert re.fullmatch(pattern, text_of(answer)[:-1])
    assert generate_jump_forward(MODEL, prompt, budget, guide, temperature, seed) == [answer]
    tried = generate_structured(MODEL, prompt, budget, guide, temperature, seed, masks_by_trying)
    assert tried == [answer]


def test_jump_forward_asks_only_where_there_is_a_choice():
    """abba(a|b)bb: everything but one character is forced, also the beginning and the end."""
    guide, model = Guide("abba(a|b)bb", LETTERS, "$"), FixedModel(0.0, 1.0, 2.0, 3.0)
    prompt = torch.zeros(1, 3, dtype=torch.int64)
    (answer,) = generate_jump_forward(model, prompt, 20, guide)
    assert text_of(answer) == "abbabbb$" and model.calls == [7]  # the prompt and abba at once
    (answer,) = generate_structured(model, prompt, 20, guide)
    assert text_of(answer) == "abbabbb$" and model.calls[1:] == [3] + 7 * [1]
    assert generate_jump_forward(model, prompt, 20, Guide("ab", LETTERS, "$")) == [[0, 1, 3]]
    assert len(model.calls) == 9  # nothing to choose: the model was not asked


def test_anything_at_all_is_free_decoding():
    model = tiny_model(GPTlite_KVCache, vocab_size=len(LETTERS), seqlen=24)
    model.fc_out.bias.data[LETTERS.index("$")] = -1e4  # so that it does not end
    guide, prompts = Guide(r"[^$]*", LETTERS, "$"), random_tokens(3, 5, 0, len(LETTERS))
    answers = generate_structured(model, prompts, 16, guide, masks=masks_without_budget)
    assert_close(torch.tensor(answers), generate_kvcache(model, prompts, 16, 24)[:, 5:])


def test_a_budget_that_is_tight_is_kept():
    """Without it the model goes on; the shortest text is found at its very length."""
    guide, model = Guide("(a|ba{3})+b", LETTERS, "$"), FixedModel(1.0, 0.0, 0.0, -9.0)
    prompt = torch.zeros(1, 1, dtype=torch.int64)
    (loose,) = generate_structured(model, prompt, 12, guide, masks=masks_without_budget)
    assert text_of(loose) == "a" * 12
    for budget in range(3, 12):
        (answer,) = generate_structured(model, prompt, budget, guide)
        assert text_of(answer) == "a" * (budget - 2) + "b$"


def test_masking_at_each_step_is_not_the_models_distribution():
    """Of free texts that match, b comes in 3 of 5: it is shorter. Masked, it comes in one of two."""
    guide, model, n = Guide("aa|ab|b", "ab$", "$"), FixedModel(0.0, 0.0, 0.0), 4000
    answers = generate_structured(model, torch.zeros(n, 1, dtype=torch.int64), 3, guide, 1.0)
    found = Counter(text_of(answer, "ab$") for answer in answers)
    for text, q in (("aa$", 0.25), ("ab$", 0.25), ("b$", 0.5)):
        assert abs(found[text] / n - q) < 5 * math.sqrt(q * (1 - q) / n)


# Refusals


def test_refused():
    guide = Guide("a{5}", LETTERS, "$")
    prompt = torch.zeros(1, 4, dtype=torch.int64)
    for function in (generate_structured, generate_jump_forward):
        with pytest.raises(ValueError, match="shortest text takes 6"):
            function(MODEL, prompt, 5, guide)
        with pytest.raises(ValueError, match="at most together"):
            function(MODEL, prompt, 22, guide)
        with pytest.raises(ValueError, match="at most together"):
            function(MODEL, prompt[:, :0], 6, guide)
    with pytest.raises(ValueError, match="which is the end"):
        Guide("a*", LETTERS, "a")
    with pytest.raises(ValueError, match="no text"):
        Guide(r"\{", LETTERS, "$")


def test_table_is_as_large_as_states_and_vocabulary():
    for pattern in FORMS.values():
        guide = Guide(pattern, VOCABULARY, "\n")
        assert guide.needed.shape == (len(guide.moves), len(VOCABULARY))
        assert (guide.needed.min(dim=1).values < NEVER).all()  # no state is a dead end
    assert json.loads('{"name": "Ab", "house": "Montague", "age": 7}')["age"] == 7
    assert re.fullmatch(FORMS["record"], '{"name": "Ab", "house": "Montague", "age": 7}')


class Characters:
    """The vocabulary as llguidance takes it: a token is a character, and one more is the end."""

    eos_token_id, bos_token_id, special_token_ids = len(VOCABULARY), None, [len(VOCABULARY)]
    tokens = [*(c.encode() for c in VOCABULARY), b"<end>"]

    def __call__(self, text):
        return [VOCABULARY.index(c) for c in (text.decode() if isinstance(text, bytes) else text)]


@pytest.mark.parametrize("pattern", [*FORMS.values(), r"(a|b)*c{2,4}|[d-f]{1,5}x", "(To|Not to) be[.!]"])
def test_masks_against_another_engine(pattern):
    """Behind each prefix of a sampled text, llguidance allows the same tokens of the same vocabulary."""
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Characters()))
    guide, n = Guide(pattern, VOCABULARY + "\0", "\0"), len(VOCABULARY) + 1
    prompts = torch.zeros(4, 1, dtype=torch.int64)
    for answer in generate_structured(FixedModel(*[0.0] * n), prompts, 60, guide, 1.0):
        matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex(pattern))
        for token, state in zip(answer, guide.states(answer), strict=False):
            bits = matcher.compute_bitmask()
            allowed = {t for t in range(n) if bits[t // 8] >> t % 8 & 1}
            assert allowed == set((guide.needed[state] < NEVER).nonzero()[:, 0].tolist())
            matcher.consume_token(token)


# The script


def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "shares.png"
    options = ["--quick", "--json", "-", "--plot", figure]
    run = run_script("main_structured_decoding.py", *options, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stdout + run.stderr
    assert figure.stat().st_size > 1000
    assert run.json["checks"] and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    for name in FORMS:
        free, tried, table, jump = (
            rows[f"{name}, {way}"] for way in ("no mask", "by trying", "table", "jump-forward")
        )
        assert free["baseline"] and free["match"] <= tried["match"] == table["match"] == jump["match"] == 1
        assert table["n_steps"] == tried["n_steps"] == free["n_steps"] >= jump["n_steps"]
        assert tried["same_output"] and table["same_output"] and jump["same_output"]
    record = rows["record, jump-forward"]  # only name, house and age are chosen
    assert record["n_steps"] <= 10 + 1 + 2 and 3 * record["n_steps"] < rows["record, table"]["n_steps"]
    (lines,) = (lines for title, lines in run.json["sweeps"].items() if title.startswith("Share"))
    assert all(line["within the budget"] == 1 for line in lines)


@pytest.mark.slow
def test_script_with_an_expression_of_ones_own(distilled_checkpoint):
    options = ["--quick", "--n-tokens", "12", "--pattern"]
    run = run_script(
        "main_structured_decoding.py", *options, "(To|Not to) be[.!]", checkpoint=distilled_checkpoint
    )
    assert run.status == 0, run.stdout + run.stderr
    assert re.search(r"^(To|Not to) be[.!]$", run.stdout, re.M)
