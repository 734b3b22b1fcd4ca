"""Continuous batching: any queue gives every request what it gets alone, in as few steps as slots allow."""

import heapq
import inspect

import pytest
import torch
from helpers import run_script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_main_static_batching import CONTEXT, Recorder, alone, requests_of

from gptlite import GPTlite
from gptlite_slots import GPTlite_Slots
from inference_queue import expected_longest
from main_continuous_batching import continuous_batching, continuous_batching_kvcache
from main_static_batching import static_batching

anywhere = st.lists(st.tuples(st.integers(1, CONTEXT + 4), st.integers(0, 6)), max_size=8)
fits = st.integers(1, CONTEXT).flatmap(lambda T: st.tuples(st.just(T), st.integers(0, CONTEXT + 1 - T)))


def steps_needed(lengths, batch_size):
    """Steps until all are done, if a slot that becomes free takes the next in the queue."""
    free_at, end = [0] * batch_size, 0
    for n_tokens in filter(None, lengths):
        begin = heapq.heappop(free_at)
        heapq.heappush(free_at, begin + n_tokens)
        end = max(end, begin + n_tokens)
    return end


def check_outputs(outputs, requests):
    for output, expected in zip(outputs, alone(tiny_model(GPTlite), requests), strict=True):
        assert output.tolist() == expected.tolist()


# ---- Without a cache ----


@settings(max_examples=15)
@given(anywhere, st.integers(1, 5), st.integers(0, 99))
def test_every_request_gets_what_it_gets_alone(sizes, batch_size, seed):
    model, requests = tiny_model(GPTlite), requests_of(sizes, seed)
    outputs, n_steps = continuous_batching(model, requests, batch_size, CONTEXT)
    check_outputs(outputs, requests)
    assert n_steps == steps_needed([n for _, n in requests], batch_size)
    assert n_steps <= static_batching(model, requests, batch_size, CONTEXT)[1]


def test_slots_are_refilled_at_once_and_in_order():
    model = Recorder()
    budgets = [1, 4, 2, 3]
    requests = [(torch.tensor([0] * (i + 1)), n) for i, n in enumerate(budgets)]
    outputs, n_steps = continuous_batching(model, requests, 2, CONTEXT)
    # slot A: request 0, then 2, then 3; slot B: request 1, and nothing after it
    assert model.shapes == [(2, 2), (2, 3), (2, 4), (2, 5), (1, 5), (1, 6)]
    assert n_steps == 6 and [len(out) for out in outputs] == [2, 6, 5, 7]


@pytest.mark.parametrize("serve", [continuous_batching, continuous_batching_kvcache, static_batching])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 9])
def test_budgets_and_duplicates(serve, batch_size):
    model = tiny_model(GPTlite_Slots if serve is continuous_batching_kvcache else GPTlite)
    requests = requests_of([(3, 0), (3, 1), (2, 2), (4, 5), (1, 5), (1, 0)])
    requests += [requests[3], requests[3], requests[0]]
    outputs, _ = serve(model, requests, batch_size, CONTEXT)
    assert [len(out) - len(q) for out, (q, _) in zip(outputs, requests, strict=True)] == [
        n for _, n in requests
    ]
    check_outputs(outputs, requests)


@settings(max_examples=10)
@given(st.permutations(range(6)), st.integers(1, 4))
def test_the_order_of_arrival_changes_no_output(order, batch_size):
    requests = requests_of([(3, 4), (5, 1), (1, 7), (6, 2), (2, 6), (9, 3)])
    model, slots = tiny_model(GPTlite), tiny_model(GPTlite_Slots)
    shuffled = [requests[i] for i in order]
    check_outputs(continuous_batching(model, shuffled, batch_size, CONTEXT)[0], shuffled)
    check_outputs(continuous_batching_kvcache(slots, shuffled, batch_size, CONTEXT)[0], shuffled)


def test_steps_as_predicted():
    """E[longest of B] / E[length], counted on a queue so long that its end does not matter."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 25, (320,), generator=generator).tolist()
    requests = [(torch.tensor([0]), n) for n in lengths]
    steps = [serve(Recorder(), requests, 4, CONTEXT)[1] for serve in (static_batching, continuous_batching)]
    predicted = expected_longest(lengths, 4) / (sum(lengths) / len(lengths))
    assert steps[0] / steps[1] == pytest.approx(predicted, rel=0.1)
    equal = [(torch.tensor([0]), 5)] * 12
    assert static_batching(Recorder(), equal, 4, CONTEXT)[1] == 15
    assert continuous_batching(Recorder(), equal, 4, CONTEXT)[1] == 15


# ---- With a cache in every slot ----


@settings(max_examples=15)
@given(st.lists(fits, max_size=8), st.integers(1, 5), st.booleans(), st.integers(0, 99))
def test_slots_give_what_a_request_gets_alone(sizes, n_slots, refill, seed):
    model, requests = tiny_model(GPTlite_Slots), requests_of(sizes, seed)
    work = []
    model.register_forward_pre_hook(lambda _, args: work.append(len(args[0])))
    outputs, n_steps = continuous_batching_kvcache(model, requests, n_slots, CONTEXT, refill)
    check_outputs(outputs, requests)
    lengths = [n for _, n in requests]
    if refill:
        assert n_steps == steps_needed(lengths, n_slots) == len(work)
        # no padding and nothing twice: each token but the last is computed once
        assert sum(work) == sum(len(prompt) + n - 1 for prompt, n in requests if n > 0)
    else:
        busy = list(filter(None, lengths))
        groups = [busy[i : i + n_slots] for i in range(0, len(busy), n_slots)]
        assert n_steps == sum(max(group) for group in groups) == len(work)


@pytest.mark.parametrize("window", [CONTEXT, 7])
def test_what_does_not_fit_is_refused_alone(window):
    model = tiny_model(GPTlite_Slots)
    sizes = [(window, 1), (window, 2), (3, 2), (window + 1, 0), (window - 3, 4), (1, window + 1), (1, window)]
    requests = [*requests_of(sizes), (torch.tensor([]), 3), *requests_of([(2, -1), (2, 2)], 50)]
    outputs, _ = continuous_batching_kvcache(model, requests, 2, window)
    refused = [i for i, output in enumerate(outputs) if isinstance(output, ValueError)]
    assert refused == [1, 5, 7, 8]
    assert f"{window} and 2" in str(outputs[1]) and f"at most {window + 1}" in str(outputs[1])
    kept = [i for i in range(len(requests)) if i not in refused]
    check_outputs([outputs[i] for i in kept], [requests[i] for i in kept])


@pytest.mark.parametrize("n_slots", [0, -1])
def test_a_batch_without_slots_is_refused(n_slots):
    requests = requests_of([(2, 2)])
    with pytest.raises(ValueError, match="at least one slot"):
        continuous_batching(tiny_model(GPTlite), requests, n_slots, CONTEXT)
    with pytest.raises(ValueError, match="at least one slot"):
        continuous_batching_kvcache(tiny_model(GPTlite_Slots), requests, n_slots, CONTEXT)


def test_names_and_contracts_of_the_post():
    """As the post calls it, with the outputs of static batching."""
    for function in (continuous_batching, continuous_batching_kvcache):
        parameters = inspect.signature(function).parameters
        assert list(parameters)[:4] == ["model", "requests", "batch_size", "seqlen"]
        assert all(p.default is not p.empty for p in list(parameters.values())[4:])
    model, requests = tiny_model(GPTlite), requests_of([(3, 4), (5, 2), (1, 6)])
    outputs, n_steps = continuous_batching(model, requests, 2, CONTEXT)
    assert isinstance(n_steps, int) and n_steps == 8
    for output, same in zip(outputs, static_batching(model, requests, 2, CONTEXT)[0], strict=True):
        assert torch.equal(output, same)


def run_quick(checkpoint, *options):
    run = run_script("main_continuous_batching.py", "--quick", *options, "--json", "-", checkpoint=checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    return run.json


def test_script_with_a_single_step(distilled_checkpoint):
    """One answer of one token each: there is no second step to time."""
    report = run_quick(distilled_checkpoint, "--longest", "2", "--n-requests", "4")
    assert all(report["checks"].values()) and "None" not in " ".join(report["why"])
    assert report["rows"][-1]["tpot_ms"] is None


def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "slots.png"
    report = run_quick(distilled_checkpoint, "--plot", figure)
    assert all(report["checks"].values()) and len(report["why"]) == 4
    assert any("predicted" in name for name in report["checks"])
    rows = {row["method"]: row for row in report["rows"]}
    static, ours = rows["static, KV cache"], rows["continuous, KV cache"]
    single, no_cache = rows["one at a time"], rows["continuous"]
    assert static["n_steps"] > ours["n_steps"] and static["slot_utilisation"] < ours["slot_utilisation"]
    assert static["forward_tokens"] > ours["forward_tokens"]
    assert static["kv_bytes_per_token"] == ours["kv_bytes_per_token"] == 2 * 3 * 192 * 4
    assert single["baseline"] and single["slot_utilisation"] == 1
    assert no_cache["n_steps"] == ours["n_steps"] and single["kv_bytes_per_token"] is None
    assert no_cache["forward_tokens"] > ours["forward_tokens"]
    # the same requests in every row: all KV forms that do not hold finished texts compute the same tokens
    assert rows["one at a time, KV cache"]["forward_tokens"] == ours["forward_tokens"]
    assert all(row["ttft_ms"] > 0 and row["peak_memory_mb"] > 5 for row in rows.values())
    assert figure.stat().st_size > 1000
