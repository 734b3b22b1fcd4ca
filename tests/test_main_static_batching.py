"""Static batching: padding and neighbours change nothing, and its steps can be counted beforehand."""

import inspect
import itertools
import runpy
import sys

import pytest
import torch
from helpers import ROOT, assert_close, random_tokens, run_script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlite import GPTlite, scaled_dot_product_attention
from inference_serving import refusals
from inference_utils import served_as_alone
from main_kvcache import generate
from main_static_batching import next_tokens, static_batching

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


def refusal(script, options, monkeypatch, capsys):
    """What a script says when it refuses options, without a report; run in this process, which has torch."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, options)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    out, error = capsys.readouterr()
    assert end.value.code == 2 and "checks:" not in out
    return error


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


@pytest.mark.parametrize("seqlen", [0, -3])
def test_a_context_without_tokens_is_refused(seqlen):
    """sequence[-0:] would be all tokens, not none."""
    model, requests = tiny_model(GPTlite), requests_of([(3, 2)])
    with pytest.raises(ValueError, match=f"seqlen is {seqlen}"):
        next_tokens(model, [requests[0][0]], seqlen)
    with pytest.raises(ValueError, match=f"seqlen is {seqlen}"):
        static_batching(model, requests, 1, seqlen)


def test_names_and_contracts_of_the_post():
    """As the post calls them: 1-D tensors in, [B] out; (prompt, n_tokens) in, (outputs, n_steps) out."""
    for function, names in (
        (next_tokens, ["model", "sequences", "seqlen"]),
        (static_batching, ["model", "requests", "batch_size", "seqlen"]),
    ):
        parameters = inspect.signature(function).parameters
        assert list(parameters)[: len(names)] == names
        assert all(p.default is not p.empty for p in list(parameters.values())[len(names) :])
    model, requests = tiny_model(GPTlite), requests_of([(3, 4), (5, 2), (1, 6)])
    tokens = next_tokens(model, [prompt for prompt, _ in requests], CONTEXT)
    assert tokens.shape == (3,) and tokens.dtype == torch.int64
    outputs, n_steps = static_batching(model, requests, 2, CONTEXT)
    assert isinstance(n_steps, int) and n_steps == 4 + 6
    assert [output.shape for output in outputs] == [(len(prompt) + n,) for prompt, n in requests]


def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "batches.png"
    options = ("--quick", "--json", "-", "--plot", figure)
    run = run_script("main_static_batching.py", *options, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert all(report["checks"].values()) and 3 <= len(report["why"]) <= 4
    assert any("forward tokens, as counted" in name for name in report["checks"])
    single, *batches = report["rows"]
    assert single["baseline"] and single["slot_utilisation"] == 1 and len(batches) >= 2
    for fewer, more in itertools.pairwise(report["rows"]):
        assert fewer["n_steps"] > more["n_steps"] and fewer["forward_tokens"] <= more["forward_tokens"]
        assert fewer["slot_utilisation"] >= more["slot_utilisation"] > 0
        assert fewer["predicted_useful"] > more["predicted_useful"]
        assert fewer["peak_memory_mb"] < more["peak_memory_mb"]
        assert more["answer_s"] <= more["answer_p90_s"]
    assert figure.stat().st_size > 1000


@pytest.mark.parametrize("script", ["main_static_batching.py", "main_continuous_batching.py"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--longest", "1", "--n-requests", "4"), "at least 2"),
        (("--longest", "500"), "256"),
        (("--n-requests", "99999999"), "at most a million"),
        (("--batch-size", "99999999"), "tokens at once"),
    ],
    ids=["one token", "past the context", "too many", "too large a batch"],
)
def test_scripts_refuse_requests(script, options, message, monkeypatch, capsys, distilled_checkpoint):
    options = ["--quick", "--checkpoint", distilled_checkpoint, *options]
    error = refusal(script, options, monkeypatch, capsys)
    assert len(error.splitlines()) == 1 and message in error
