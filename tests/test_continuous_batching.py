"""Continuous batching: any queue gives every request what it gets alone, in as few steps as slots allow."""

import heapq
import inspect

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_static_batching import CONTEXT, Recorder, alone, requests_of

from gptlite import GPTlite
from gptlite_slots import GPTlite_Slots, Sequence, SlotBatch
from main_continuous_batching import continuous_batching, continuous_batching_kvcache
from main_static_batching import expected_longest, static_batching

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


@pytest.mark.parametrize("seqlen", [0, CONTEXT + 1])
def test_slots_that_the_model_has_no_positions_for(seqlen):
    with pytest.raises(ValueError, match="positions for 1 to 16"):
        SlotBatch(tiny_model(GPTlite_Slots), 2, seqlen)


def staggered(batch, texts, starts, prompt_lens):
    """Feeds given texts, text i from step starts[i] on; yields (tokens so far, logits) of every sequence."""
    for step in range(max(starts) + CONTEXT):
        newcomers = [
            Sequence(i, texts[i][: prompt_lens[i]], CONTEXT)
            for i, start in enumerate(starts)
            if start == step
        ]
        if not batch.running and not newcomers:
            continue
        logits = batch.forward(newcomers)
        for row, sequence in zip(logits, batch.running, strict=True):
            yield list(sequence.tokens), row
        for slot in reversed(range(len(batch.running))):
            sequence = batch.running[slot]
            sequence.tokens.append(texts[sequence.request][len(sequence.tokens)])
            if sequence.finished:
                batch.remove(slot)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_of_slots_and_of_the_plain_model(dtype):
    """Every step of sequences that join at different times, by logits; the buffers begin as NaN."""
    model = tiny_model(GPTlite, dtype=dtype)
    batch = SlotBatch(tiny_model(GPTlite_Slots, dtype=dtype), 4, CONTEXT)
    batch.k.fill_(float("nan"))
    batch.v.fill_(float("nan"))
    texts = random_tokens(5, CONTEXT + 1, 7).tolist()
    seen = 0
    with torch.no_grad():
        for tokens, logits in staggered(batch, texts, [0, 0, 2, 5, 14], [3, 9, 1, 6, 4]):
            assert_close(logits, model(torch.tensor([tokens]))[0, -1])
            seen += 1
    assert seen == sum(CONTEXT - T for T in (3, 9, 1, 6, 4)) and not batch.running


def test_a_slot_does_not_see_its_last_occupant():
    """Not even a NaN of it, which masking alone would let through (0 * NaN)."""
    model = tiny_model(GPTlite_Slots)
    (long, short) = requests_of([(9, 6), (2, 5)])
    batch = SlotBatch(model, 1, CONTEXT)
    batch.step([Sequence(0, long[0].tolist(), 15)])
    batch.remove(0)
    batch.k.fill_(float("nan"))
    batch.v.fill_(float("nan"))
    newcomer, finished = [Sequence(1, short[0].tolist(), 7)], []
    while not finished:
        finished = batch.step(newcomer)
        newcomer = []
    check_outputs([torch.tensor(finished[0].tokens)], [short])


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=3))
def test_a_preempted_request_goes_on_where_it_was(preemptions):
    """Case CB-2: the prompt and all that was generated are computed anew, nothing is lost or doubled."""
    model, work = tiny_model(GPTlite_Slots), []
    model.register_forward_pre_hook(lambda _, args: work.append(len(args[0])))
    requests = requests_of([(6, 10), (6, 10), (3, 4)])
    batch = SlotBatch(model, 2, CONTEXT)
    waiting = [Sequence(i, prompt.tolist(), len(prompt) + n) for i, (prompt, n) in enumerate(requests)]
    outputs, step, again = {}, 0, 0
    while waiting or batch.running:
        newcomers = [waiting.pop(0) for _ in range(min(batch.n_free(), len(waiting)))]
        expected = len(batch.running) + sum(len(sequence.tokens) for sequence in newcomers)
        for sequence in batch.step(newcomers):
            assert sequence.request not in outputs
            outputs[sequence.request] = torch.tensor(sequence.tokens)
        assert work[-1] == expected
        step += 1
        for when, slot in preemptions:
            if when == step and slot < len(batch.running):
                waiting.insert(0, batch.remove(slot))
                again += len(waiting[0].tokens) - 1  # these were in the cache
    check_outputs([outputs[i] for i in range(3)], requests)
    assert sum(work) == sum(len(prompt) + n - 1 for prompt, n in requests) + again
    assert batch.n_free() == 2


@pytest.mark.parametrize("n_rows", [1, 4])
def test_slots_take_the_lowest_of_tied_tokens(n_rows):
    """Case SB-4: in the step of the prompts and in those after it, whatever the batch."""
    model = tiny_model(GPTlite_Slots)
    with torch.no_grad():
        model.fc_out.weight.zero_()
        model.fc_out.bias.copy_(torch.tensor([1.0, 3.0, 3.0, 3.0] * 4))
    batch = SlotBatch(model, n_rows, CONTEXT)
    done = batch.step([Sequence(i, [5] * (i + 1), i + 4) for i in range(n_rows)])
    while batch.running:
        done += batch.step()
    assert [sequence.tokens[-3:] for sequence in done] == [[1, 1, 1]] * n_rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_of_slots_alone_and_beside_copies(dtype):
    """Case SB-4: another number of slots may take other kernels; the logits agree to rounding."""
    model, tokens = tiny_model(GPTlite_Slots, dtype=dtype), random_tokens(1, 9)[0].tolist()
    alone, four = (SlotBatch(model, n_rows, CONTEXT) for n_rows in (1, 4))
    for new in (True, False):
        one = alone.forward([Sequence(0, list(tokens), 12)] if new else [])
        copies = four.forward([Sequence(i, list(tokens), 12) for i in range(4)] if new else [])
        assert_close(copies, one.expand(4, -1))
        for sequence in (*alone.running, *four.running):
            sequence.tokens.append(one.argmax().item())


@pytest.mark.parametrize(
    "bad",
    [
        [Sequence(7, [1, 2], 5), Sequence(8, [1, 2], 5)],  # one slot is free
        [Sequence(7, [], 5)],
        [Sequence(7, [1] * (CONTEXT + 1), CONTEXT + 2)],
        [Sequence(7, [1, 2], CONTEXT + 2)],
        [Sequence(7, [1, 99], 5)],  # the model has no such token
    ],
    ids=["too many", "empty", "too long", "becomes too long", "no such token"],
)
def test_a_refused_step_leaves_the_batch_as_it_was(bad):
    model, requests = tiny_model(GPTlite_Slots), requests_of([(6, 10), (3, 4)])
    batch = SlotBatch(model, 3, CONTEXT)
    batch.step([Sequence(i, prompt.tolist(), len(prompt) + n) for i, (prompt, n) in enumerate(requests)])
    before = [(sequence.request, list(sequence.tokens)) for sequence in batch.running]
    with pytest.raises((ValueError, IndexError)):
        batch.step(bad)
    assert [(sequence.request, sequence.tokens) for sequence in batch.running] == before
    outputs = {}
    while batch.running:
        outputs |= {sequence.request: torch.tensor(sequence.tokens) for sequence in batch.step()}
    check_outputs([outputs[0], outputs[1]], requests)
    held = SlotBatch(model, 3, CONTEXT, refill=False)
    held.step([Sequence(0, [1, 2], 5)])
    with pytest.raises(ValueError, match="1 newcomers for 0"):
        held.step([Sequence(1, [1, 2], 5)])


def test_slots_in_use_stay_together():
    batch = SlotBatch(tiny_model(GPTlite_Slots), 4, CONTEXT)
    sequences = [Sequence(i, [i, i + 1, i + 2], 9) for i in range(4)]
    batch.step(sequences)
    before = batch.k[:, 3].clone()
    assert batch.n_free() == 0 and batch.remove(1) is sequences[1]
    assert [sequence.request for sequence in batch.running] == [0, 3, 2] and batch.n_free() == 1
    assert torch.equal(batch.k[:, 1], before)
    assert batch.remove(2) is sequences[2] and batch.remove(0) is sequences[0]
    assert [sequence.request for sequence in batch.running] == [3]
    held = SlotBatch(tiny_model(GPTlite_Slots), 4, CONTEXT, refill=False)
    assert held.step([Sequence(0, [1, 2], 3), Sequence(1, [1, 2], 4)]) == [] and held.n_free() == 0
    assert {sequence.request for sequence in held.step()} == {0, 1} and held.n_free() == 4


def test_names_and_signatures_of_the_post():
    for function in (continuous_batching, continuous_batching_kvcache):
        parameters = inspect.signature(function).parameters
        assert list(parameters)[:4] == ["model", "requests", "batch_size", "seqlen"]
        assert all(p.default is not p.empty for p in list(parameters.values())[4:])


@pytest.mark.cuda
def test_slots_on_cuda():
    model = tiny_model(GPTlite_Slots).to("cuda")
    requests = requests_of([(6, 10), (3, 4), (1, 9), (16, 1)])
    outputs, _ = continuous_batching_kvcache(model, [(q.to("cuda"), n) for q, n in requests], 2, CONTEXT)
    check_outputs([output.cpu() for output in outputs], requests)


def test_script_with_a_single_step(checkpoint):
    """One answer of one token each: there is no second step to time."""
    options = ("--quick", "--repeats", "1", "--longest", "2", "--n-requests", "4", "--json", "-")
    run = run_script("main_continuous_batching.py", *options, checkpoint=checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    assert all(run.json["checks"].values()) and "None" not in " ".join(run.json["why"])


def test_script(checkpoint, tmp_path):
    figure = tmp_path / "slots.png"
    options = ("--quick", "--repeats", "1", "--json", "-", "--plot", figure)
    run = run_script("main_continuous_batching.py", *options, checkpoint=checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert report["checks"] and all(report["checks"].values()) and len(report["why"]) >= 3
    assert any("predicted" in name for name in report["checks"])
    rows = {row["method"]: row for row in report["rows"]}
    for label in ("short", "long"):
        static, ours = rows[f"static, KV cache, {label}"], rows[f"continuous, KV cache, {label}"]
        assert static["n_steps"] > ours["n_steps"] and static["slot_utilisation"] < ours["slot_utilisation"]
        assert static["forward_tokens"] > ours["forward_tokens"]
        assert static["kv_bytes_per_token"] == ours["kv_bytes_per_token"] == 2 * 6 * 384 * 4
    short = {name.removesuffix(", short"): row for name, row in rows.items() if name.endswith(", short")}
    assert short["one at a time"]["baseline"] and short["one at a time"]["slot_utilisation"] == 1
    assert short["static"]["n_steps"] == short["static, KV cache"]["n_steps"]
    assert short["continuous"]["n_steps"] == short["continuous, KV cache"]["n_steps"]
    assert short["continuous"]["forward_tokens"] > short["continuous, KV cache"]["forward_tokens"]
    assert figure.stat().st_size > 1000
