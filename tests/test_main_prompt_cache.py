"""Stored modules against one pass under the mask "own module only", and when they equal the plain prompt."""

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_positions import GPTlite_Positions
from gptlite_schema import Parameter, Schema, equal_modules
from main_kvcache import generate
from main_prompt_cache import PromptCache, generate_modular, prefill_in_modules, whole_pass

CONTEXT = 16


@pytest.fixture(autouse=True, scope="module")
def no_gradients():
    with torch.no_grad():
        yield


def schema_of_three():
    """a 0-2, union of b 3-4 and c 3-6, d 7-11 with a parameter at 8-9."""
    schema = Schema(CONTEXT)
    schema.add("a", [1, 2, 3])
    schema.add("b", [4, 5], union="u")
    schema.add("c", [6, 7, 8, 9], union="u")
    schema.add("d", [10], Parameter("who", 2), [11, 12])
    return schema


@given(
    st.sets(st.sampled_from("abd")), st.integers(0, 2), st.integers(1, 4), st.booleans(), st.integers(0, 99)
)
def test_prompts_equal_one_pass_under_their_mask(names, n_argument, n_text, other, seed):
    """Gaps where a module is absent or an alternative is short, parameters filled in part, any text."""
    model, schema = tiny_model(GPTlite_Positions), schema_of_three()
    names = ["c" if name == "b" and other else name for name in sorted(names)]
    new = random_tokens(1, 6, seed)[0].tolist()
    arguments = {"who": new[4 : 4 + n_argument]} if "d" in names else {}
    asked = schema.prompt(names, new[:n_text], **arguments)
    logits, kv_cache, keys = PromptCache(model, schema).prefill(asked)
    assert_close(logits, whole_pass(model, schema, asked))
    assert len(keys) == len(set(keys.tolist())) == kv_cache[0][0].shape[2]


def test_the_order_in_which_modules_are_named_changes_nothing():
    model, schema = tiny_model(GPTlite_Positions), schema_of_three()
    cache = PromptCache(model, schema)
    one, other = (schema.prompt(names, [3, 1], who=[2]) for names in (["a", "c", "d"], ["d", "a", "c"]))
    assert_close(cache.prefill(one)[0], cache.prefill(other)[0])
    assert cache.n_computed == 3 + 4 + 3


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 99))
def test_modules_computed_together_equal_the_plain_prompt(n_modules, n_behind, seed):
    model = tiny_model(GPTlite_Positions)
    tokens = random_tokens(1, 4 * n_modules + n_behind, seed)
    expected = tiny_model(GPTlite)(tokens)[:, 4 * n_modules :]
    together = prefill_in_modules(model, tokens, 4 * n_modules, n_modules, together=n_modules)
    assert_close(together, expected)
    alone = prefill_in_modules(model, tokens, 4 * n_modules, n_modules)
    if n_modules == 1:  # a prefix
        assert_close(alone, expected)
    else:
        assert (alone - expected).abs().max() > 1e-3
        schema, asked = equal_modules(tokens[0].tolist(), 4 * n_modules, n_modules, CONTEXT)
        assert_close(alone, whole_pass(model, schema, asked))


def test_some_modules_together():
    """The last two see each other but not the first: as one module of both."""
    model, tokens = tiny_model(GPTlite_Positions), random_tokens(1, 15)
    schema = Schema(CONTEXT)
    schema.add("one", tokens[0, :4].tolist())
    schema.add("both", tokens[0, 4:12].tolist())
    asked = schema.prompt(["one", "both"], tokens[0, 12:].tolist())
    expected = PromptCache(model, schema).prefill(asked)[0]
    assert_close(prefill_in_modules(model, tokens, 12, 3, together=2), expected)


def test_a_gap_moves_what_stands_behind_it():
    """Together but with empty positions: the model at these positions, no longer the plain prompt."""
    model, tokens = tiny_model(GPTlite_Positions), random_tokens(1, 8)
    logits = prefill_in_modules(model, tokens, 4, 2, room=5, together=2)
    places = torch.tensor([0, 1, 5, 6, 7, 8, 9, 10])
    assert_close(logits, model(tokens, positions=places)[0][:, 4:])
    assert (logits - model(tokens)[0][:, 4:]).abs().max() > 1e-3


@given(st.integers(0, 4), st.integers(0, 99))
def test_generated_tokens_equal_those_without_any_cache(n_tokens, seed):
    """One module at the beginning: the plain model's tokens. Several: choices of one masked pass."""
    model, tokens = tiny_model(GPTlite_Positions), random_tokens(1, 11, seed)
    schema, asked = equal_modules(tokens[0].tolist(), 8, 1, CONTEXT)
    out = generate_modular(model, tokens, n_tokens, CONTEXT, PromptCache(model, schema), asked)
    assert torch.equal(out, generate(tiny_model(GPTlite), tokens, n_tokens, CONTEXT))
    schema, asked = equal_modules(tokens[0].tolist(), 6, 2, CONTEXT, room=4)  # positions 0-2, 4-6, 7-11
    out = generate_modular(model, tokens, n_tokens, CONTEXT, PromptCache(model, schema), asked)
    for i in range(n_tokens):
        asked = schema.prompt(["module 0", "module 1"], out[0, 6 : 11 + i].tolist())
        assert out[0, 11 + i] == whole_pass(model, schema, asked)[0, -1].argmax()


def test_new_tokens_stay_within_the_context():
    model, tokens = tiny_model(GPTlite_Positions), random_tokens(1, 8)
    schema, asked = equal_modules(tokens[0].tolist(), 4, 2, CONTEXT, room=6)  # the text ends at 11
    cache = PromptCache(model, schema)
    assert generate_modular(model, tokens, 5, CONTEXT, cache, asked).shape[1] == 13
    with pytest.raises(ValueError, match="6 new tokens behind position 11: context 16"):
        generate_modular(model, tokens, 6, CONTEXT, cache, asked)


def test_stored_modules_are_not_changed_by_their_users():
    model, schema = tiny_model(GPTlite_Positions), schema_of_three()
    cache = PromptCache(model, schema)

    def ask(text, who):
        asked = schema.prompt(["a", "d"], text, who=who)
        return generate_modular(model, torch.tensor([text]), 2, CONTEXT, cache, asked)

    first = ask([3, 1], [5])
    ask([7], [2, 2])
    assert torch.equal(ask([3, 1], [5]), first)
    assert cache.n_computed == 6 and [kv[0][0].shape[2] for kv in cache.kv] == [3, 3]


def test_a_cache_forgets_with_other_weights():
    model, schema = tiny_model(GPTlite_Positions), schema_of_three()
    cache, asked = PromptCache(model, schema), schema.prompt(["a", "c"], [1, 2])
    old = cache.prefill(asked)[0]
    model.load_state_dict(tiny_model(GPTlite_Positions, seed=1).state_dict())
    new = cache.prefill(asked)[0]
    assert (new - old).abs().max() > 1e-3
    assert_close(new, whole_pass(model, schema, asked))


def test_float32():
    model, schema = tiny_model(GPTlite_Positions, dtype=torch.float32), schema_of_three()
    asked = schema.prompt(["a", "b", "d"], [1, 2], who=[3])
    assert_close(PromptCache(model, schema).prefill(asked)[0], whole_pass(model, schema, asked))


def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "kl.png"
    options = ["--quick", "--json", "-", "--plot", figure]
    run = run_script("main_prompt_cache.py", *options, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr
    assert figure.stat().st_size > 1000 and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    assert rows["prefix cache"]["same_output"] and rows["3 of 3 together"]["same_output"]
    modular = rows["prompt cache"]
    assert modular["approximate"] and modular["kl"] > 1e-5 > abs(rows["3 of 3 together"]["kl"])
    work = [rows[name]["forward_tokens"] for name in ("whole prompt", "prefix cache", "prompt cache")]
    assert work == [224 + 3, 160 + 3, 32 + 3]
    assert modular["stored_mb"] == pytest.approx(192 * 4608 / 1e6)
    (counted,) = next(lines for title, lines in run.json["sweeps"].items() if "computed for" in title)
    assert counted["no reuse"] > counted["prefix cache"] > counted["prompt cache"]
    quality = next(lines for title, lines in run.json["sweeps"].items() if "behind modules" in title)
    kl = {(line["modules"], line["positions each"], line["together"]): line["KL (nats)"] for line in quality}
    assert kl[12, 16, 0] > kl[2, 96, 0] and kl[3, 64, 0] > kl[3, 32, 3] > -1e-5
    assert kl[3, 64, 3] == pytest.approx(0, abs=1e-5) or kl[3, 64, 3] > 0


@pytest.mark.parametrize(
    "options", [["--n-modules", "1"], ["--module-len", "80"], ["--prompt-len", "253"]], ids=str
)
def test_script_refuses_what_does_not_fit(distilled_checkpoint, options):
    run = run_script("main_prompt_cache.py", "--quick", *options, checkpoint=distilled_checkpoint)
    assert run.status == 2 and run.stdout == "" and "modules" in run.stderr
