"""Static batching: padding and neighbours change nothing, and its steps can be counted beforehand."""

import inspect
import itertools

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite import GPTlite, scaled_dot_product_attention
from inference_utils import served_as_alone
from main_kvcache import generate
from main_static_batching import (
    expected_longest,
    latencies,
    make_requests,
    next_tokens,
    refusals,
    static_batching,
    step_shapes,
)

CONTEXT = 16


class Recorder:
    """A stand-in for a model: the next token is the last one plus 1 (of 8); remembers the shapes it saw."""

    def __init__(self):
        self.shapes = []

    def __call__(self, tokens):
        self.shapes.append(tuple(tokens.shape))
        return torch.nn.functional.one_hot((tokens + 1) % 8, 8).double()  # [B, T, 8]


def requests_of(sizes, seed=0):
    """Requests with prompts of the given lengths: sizes is a list of (length, n_tokens)."""
    return [(random_tokens(1, T, seed + i)[0], n_tokens) for i, (T, n_tokens) in enumerate(sizes)]


def alone(model, requests):
    return [generate(model, prompt[None], n_tokens, CONTEXT)[0] for prompt, n_tokens in requests]


sizes = st.lists(
    st.tuples(st.integers(1, CONTEXT + 4), st.integers(0, 6)), max_size=7
)  # also past the window


@settings(max_examples=15)
@given(sizes, st.integers(1, 5), st.integers(0, 99))
def test_every_request_gets_what_it_gets_alone(sizes, batch_size, seed):
    model, requests = tiny_model(GPTlite, seed=seed % 3), requests_of(sizes, seed)
    prompts = [prompt.clone() for prompt, _ in requests]
    outputs, n_steps = static_batching(model, requests, batch_size, CONTEXT)
    for output, expected in zip(outputs, alone(model, requests), strict=True):
        assert output.tolist() == expected.tolist()
    groups = [requests[i : i + batch_size] for i in range(0, len(requests), batch_size)]
    assert n_steps == sum(max(n for _, n in group) for group in groups)
    for prompt, (kept, _) in zip(prompts, requests, strict=True):
        assert torch.equal(prompt, kept)  # a request is not changed by being served


@settings(max_examples=15)
@given(st.lists(st.integers(1, CONTEXT + 4), min_size=1, max_size=5), st.integers(0, 15))
def test_next_tokens_for_any_padding(lengths, pad_id):
    model = tiny_model(GPTlite)
    sequences = [random_tokens(1, T, i)[0] for i, T in enumerate(lengths)]
    tokens = next_tokens(model, sequences, CONTEXT, pad_id)
    assert tokens.shape == (len(lengths),)
    for token, sequence in zip(tokens, sequences, strict=True):
        assert token == model(sequence[None, -CONTEXT:])[0, -1].argmax()


def test_padding_is_on_the_right_and_never_longer_than_needed():
    model = Recorder()
    tokens = next_tokens(model, [torch.tensor([1, 2, 3]), torch.tensor([4])], 16)
    assert model.shapes == [(2, 3)] and tokens.tolist() == [4, 5]
    next_tokens(model, [torch.arange(8).repeat(3)], 16)
    assert model.shapes[-1] == (1, 16)


def test_the_lowest_of_tied_tokens_is_taken():
    """Case SB-4: whatever the batch."""
    tied = torch.tensor([1.0, 3.0, 3.0, 3.0])
    for rows in (1, 4):
        model = lambda x: tied.expand(*x.shape, 4)  # noqa: E731
        assert next_tokens(model, [torch.tensor([0])] * rows, 8).tolist() == [1] * rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_alone_and_in_a_batch_of_copies(dtype):
    """Case SB-4: another batch size may take other kernels; the logits agree to rounding."""
    model, prompt = tiny_model(GPTlite, dtype=dtype), random_tokens(1, 9)
    with torch.no_grad():
        assert_close(model(prompt.expand(4, -1)), model(prompt).expand(4, -1, -1))


def test_a_row_without_keys_is_zero_with_finite_gradients():
    """Case SB-2, on the hand-written attention."""
    Q, K, V = (torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    out = scaled_dot_product_attention(Q, K, V, mask)
    assert (out[0, 0, 1] == 0).all() and out.isfinite().all()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (Q, K, V))


@pytest.mark.parametrize("empty", [torch.tensor([]), torch.tensor([], dtype=torch.int64)])
def test_an_empty_prompt_is_refused_alone(empty):
    """Case SB-3: encode("") is an empty list, which becomes a float tensor."""
    model = tiny_model(GPTlite)
    good = requests_of([(3, 4), (5, 2)])
    outputs, _ = static_batching(model, [good[0], (empty, 3), good[1]], 2, CONTEXT)
    assert isinstance(outputs[1], ValueError) and "empty" in str(outputs[1])
    for output, expected in zip((outputs[0], outputs[2]), alone(model, good), strict=True):
        assert output.tolist() == expected.tolist()


def test_refusals():
    requests = [*requests_of([(4, 3), (4, 4), (4, -1)]), (torch.tensor([]), 1)]
    accepted, too_long, negative, empty = refusals(requests, 1, max_tokens=7)
    assert accepted is None and "4 and 4" in str(too_long) and "negative" in str(negative)
    assert "empty" in str(empty) and refusals(requests[:2], 1) == [None, None]
    with pytest.raises(ValueError, match="at least one slot"):
        static_batching(tiny_model(GPTlite), requests, 0, CONTEXT)


def test_nothing_to_do():
    model = Recorder()
    assert static_batching(model, [], 4, CONTEXT) == ([], 0)
    outputs, n_steps = static_batching(model, requests_of([(3, 0), (2, 0)]), 4, CONTEXT)
    assert [len(output) for output in outputs] == [3, 2] and n_steps == 0 and not model.shapes


def test_requests_fit_and_repeat():
    data = torch.arange(1000) % 16
    draw = [make_requests(data, 200, 64, torch.Generator().manual_seed(3)) for _ in range(2)]
    for (prompt, n_tokens), (again, n_again) in zip(*draw, strict=True):
        assert torch.equal(prompt, again) and n_tokens == n_again
        assert 4 <= len(prompt) <= 16 and 4 <= n_tokens <= 48
        assert (prompt.diff() % 16 == 1).all()  # cut from the data in one piece
    assert {n for _, n in draw[0]} >= {4, 48} or len({n for _, n in draw[0]}) > 35
    for seqlen in range(2, 20):
        drawn = make_requests(data, 40, seqlen)
        assert all(len(q) >= 1 and n >= 1 and len(q) + n <= seqlen for q, n in drawn)
    for seqlen in (1, 0, -3):
        with pytest.raises(ValueError, match="at least 2"):
            make_requests(data, 3, seqlen)
    assert len(make_requests(data[:16], 3, 64)) == 3
    with pytest.raises(ValueError, match="too short"):
        make_requests(data[:15], 3, 64)


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=9),
    st.integers(1, 4),
)
def test_shapes_and_latencies_are_known_beforehand(sizes, batch_size):
    model, requests = Recorder(), requests_of(sizes)
    _, n_steps = static_batching(model, requests, batch_size, CONTEXT)
    assert step_shapes(requests, batch_size) == model.shapes and len(model.shapes) == n_steps
    done = latencies(requests, batch_size, [1] * n_steps)  # a step takes 1: the number of steps until then
    for i, when in enumerate(done):
        ends = [max(n for _, n in sizes[g : g + batch_size]) for g in range(0, len(sizes), batch_size)]
        assert when == sum(ends[: i // batch_size + 1])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 7))
def test_expected_longest_against_all_draws(lengths, n_drawn):
    draws = list(itertools.combinations(lengths, min(n_drawn, len(lengths))))
    assert expected_longest(lengths, n_drawn) == pytest.approx(sum(map(max, draws)) / len(draws))


def test_expected_longest_of_uniform_lengths():
    """a + (b - a) B / (B + 1) of a uniform distribution on a to b."""
    assert expected_longest(range(16, 193), 8) == pytest.approx(16 + 176 * 8 / 9, rel=0.01)


def test_served_as_alone_sees_a_wrong_token():
    model, requests = tiny_model(GPTlite), requests_of([(3, 5), (2, 0), (4, 1)])
    outputs = alone(model, requests)
    assert served_as_alone(model, outputs, requests)
    for i, position in ((0, 0), (0, 5), (0, 7), (1, 1), (2, 4)):
        wrong = [output.clone() for output in outputs]
        wrong[i][position] = (wrong[i][position] + 1) % 16
        assert not served_as_alone(model, wrong, requests)
    assert not served_as_alone(model, [outputs[0][:-1], *outputs[1:]], requests)
    assert not served_as_alone(lambda x: model(x) * float("nan"), outputs, requests)


def test_names_and_signatures_of_the_post():
    for function, names in (
        (next_tokens, ["model", "sequences", "seqlen"]),
        (make_requests, ["data", "n_requests", "seqlen"]),
        (static_batching, ["model", "requests", "batch_size", "seqlen"]),
    ):
        parameters = inspect.signature(function).parameters
        assert list(parameters)[: len(names)] == names
        assert all(p.default is not p.empty for p in list(parameters.values())[len(names) :])


def test_script(checkpoint, tmp_path):
    figure = tmp_path / "batches.png"
    options = ("--quick", "--repeats", "1", "--json", "-", "--plot", figure)
    run = run_script("main_static_batching.py", *options, checkpoint=checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert report["checks"] and all(report["checks"].values()) and len(report["why"]) >= 3
    single, *batches = report["rows"]
    assert single["baseline"] and single["slot_utilisation"] == 1 and len(batches) >= 2
    for fewer, more in itertools.pairwise(report["rows"]):
        assert fewer["n_steps"] > more["n_steps"] and fewer["forward_tokens"] <= more["forward_tokens"]
        assert fewer["slot_utilisation"] >= more["slot_utilisation"] > 0
        assert fewer["peak_memory_mb"] < more["peak_memory_mb"]
        assert more["latency_p50_ms"] <= more["latency_p99_ms"]
    assert figure.stat().st_size > 1000


@pytest.mark.parametrize(
    "script", ["main_static_batching.py", "main_continuous_batching.py", "main_serving.py"]
)
def test_scripts_refuse_requests_of_one_token(checkpoint, script):
    run = run_script(script, "--quick", "--longest", "1", "--n-requests", "4", checkpoint=checkpoint)
    assert run.status == 2 and "checks:" not in run.stdout
    assert len(run.stderr.splitlines()) == 1 and "at least 2" in run.stderr


def test_script_refuses_requests_past_the_context(checkpoint):
    run = run_script("main_static_batching.py", "--quick", "--longest", "500", checkpoint=checkpoint)
    assert run.status == 2 and len(run.stderr.splitlines()) == 1 and "256" in run.stderr
