"""GPTlite over slots: what a step computes, whatever was in its slots before and beside it in the batch."""

import pytest
import torch
from helpers import assert_close, random_tokens, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_main_continuous_batching import check_outputs
from test_main_static_batching import CONTEXT, requests_of

from gptlite import GPTlite
from gptlite_paged import Sequence
from gptlite_slots import GPTlite_Slots, MultiHeadAttention_Slots, SlotBatch, SlotStep
from main_continuous_batching import continuous_batching_kvcache


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
            yield list(sequence.ids), row
        for slot in reversed(range(len(batch.running))):
            sequence = batch.running[slot]
            sequence.ids.append(texts[sequence.request][len(sequence.ids)])
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
    check_outputs([torch.tensor(finished[0].ids)], [short])


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
        expected = len(batch.running) + sum(len(sequence.ids) for sequence in newcomers)
        for sequence in batch.step(newcomers):
            assert sequence.request not in outputs
            outputs[sequence.request] = torch.tensor(sequence.ids)
        assert work[-1] == expected
        step += 1
        for when, slot in preemptions:
            if when == step and slot < len(batch.running):
                waiting.insert(0, batch.remove(slot))
                again += len(waiting[0].ids) - 1  # these were in the cache
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
    assert [sequence.ids[-3:] for sequence in done] == [[1, 1, 1]] * n_rows


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
            sequence.ids.append(one.argmax().item())


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
    before = [(sequence.request, list(sequence.ids)) for sequence in batch.running]
    with pytest.raises((ValueError, IndexError)):
        batch.step(bad)
    assert [(sequence.request, sequence.ids) for sequence in batch.running] == before
    outputs = {}
    while batch.running:
        outputs |= {sequence.request: torch.tensor(sequence.ids) for sequence in batch.step()}
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


@pytest.mark.parametrize("n_slots", [1, 3])
def test_half_precision_scores_do_not_overflow(n_slots):
    """All of q and k are 40, d = 64: a score is 102,400 before it is scaled, too much for 16 bits."""
    mha = MultiHeadAttention_Slots(64, 1, 64, 0.0).half()
    with torch.no_grad():
        for linear in (mha.query_proj, mha.key_proj, mha.out_proj, mha.value_proj):
            linear.weight.zero_()
            linear.bias.fill_(40.0 if linear in (mha.query_proj, mha.key_proj) else 0.0)
        mha.value_proj.weight.copy_(torch.eye(64))
        mha.out_proj.weight.copy_(torch.eye(64))
        k, v = torch.zeros(2, n_slots + 1, 1, 4, 64, dtype=torch.float16)  # [slots, H, S, D]
        k[:, :, 0], v[:, :, 0] = 40.0, 1.0  # each running text has one key with values 1
        positions = torch.tensor([1] * n_slots + [0, 1])
        slots = torch.tensor([*range(n_slots), n_slots, n_slots])
        step = SlotStep(positions, slots, None, [slice(n_slots, n_slots + 2)], n_slots, 2)
        x = torch.full((n_slots + 2, 64), 3.0).half()  # and gets a second one with values 3
        x[n_slots] = 1.0
        out = mha(x, k, v, step, torch.zeros(n_slots, 1, 1, 2).half())
    assert_close(out, torch.tensor([2.0] * n_slots + [1.0, 2.0])[:, None].expand(-1, 64).half())


@pytest.mark.cuda
def test_slots_on_cuda():
    model = tiny_model(GPTlite_Slots).to("cuda")
    requests = requests_of([(6, 10), (3, 4), (1, 9), (16, 1)])
    outputs, _ = continuous_batching_kvcache(model, [(q.to("cuda"), n) for q, n in requests], 2, CONTEXT)
    check_outputs([output.cpu() for output in outputs], requests)
