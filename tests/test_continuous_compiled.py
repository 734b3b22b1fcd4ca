"""Steps over all slots as one graph: the same tokens as slots, and as each request alone."""

import pytest
import torch
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from continuous_compiled import CompiledSlots
from gptlite_kvcache import GPTlite_KVCache
from gptlite_paged import Sequence
from gptlite_slots import GPTlite_Slots, SlotBatch
from main_continuous_batching import continuous_batching_kvcache
from main_kvcache import generate_kvcache

CONTEXT = 16


@pytest.fixture(autouse=True, scope="module")
def no_gradients():
    with torch.no_grad():
        yield


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 9)), min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(1, CONTEXT),
    st.booleans(),
)
def test_each_request_gets_its_tokens(sizes, n_slots, bucket, refill):
    """Any prompts, answers, slots and views, against each request alone with a dynamic cache, in float64."""
    model = CompiledSlots(tiny_model(GPTlite_Slots), bucket, backend=None)
    requests = [(random_tokens(1, T, seed)[0], n) for seed, (T, n) in enumerate(sizes)]
    outputs, _ = continuous_batching_kvcache(model, requests, n_slots, CONTEXT, refill)
    alone = tiny_model(GPTlite_KVCache)
    for output, (prompt, n) in zip(outputs, requests, strict=True):
        assert output.equal(generate_kvcache(alone, prompt[None], n, CONTEXT)[0])


def test_nothing_of_empty_slots_or_of_rows_behind_a_text_is_read():
    """NaN there changes nothing, in float32 with packed layers where there are such."""
    batches = []
    for model in (tiny_model(GPTlite_Slots, dtype=torch.float32),) * 2:
        batch = SlotBatch(CompiledSlots(model, 4, backend=None), 4, CONTEXT)
        sequences = [Sequence(i, random_tokens(1, T, i)[0].tolist(), 14) for i, T in enumerate((3, 6))]
        batch.step(sequences)
        batches.append(batch)
    clean, dirty = batches
    for cache in (dirty.k, dirty.v):
        cache[:, 2:] = float("nan")
        for slot, sequence in enumerate(dirty.running):
            cache[:, slot, :, len(sequence.ids) - 1 :] = float("nan")
    for _ in range(3):
        assert_close(dirty.forward(), clean.forward())
        clean.step(), dirty.step()
    assert [s.ids for s in clean.running] == [s.ids for s in dirty.running]


def test_one_graph_for_each_view(monkeypatch):
    """Traced here, not translated to machine code."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    model = CompiledSlots(tiny_model(GPTlite_Slots), 8, backend=keep)
    requests = [(random_tokens(1, T, T)[0], n) for T, n in ((2, 4), (3, 11), (1, 2), (5, 9), (2, 6))]
    outputs, _ = continuous_batching_kvcache(model, requests, 2, CONTEXT)
    assert len(graphs) == 2  # views of 8 and of 16 rows, whatever the slots hold
    expected, _ = continuous_batching_kvcache(tiny_model(GPTlite_Slots), requests, 2, CONTEXT)
    assert all(one.equal(other) for one, other in zip(outputs, expected, strict=True))


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("more/continuous_compiled.py", tmp_path, distilled_checkpoint)
    alone, eager, ours = report["rows"]
    assert ours["n_steps"] == eager["n_steps"] < alone["n_steps"] and ours["same_output"] is True
    assert ours["compile_s"] >= 0 and len(report["why"]) == 4


def test_bad_options(distilled_checkpoint):
    run = run_script(
        "more/continuous_compiled.py", "--quick", "--longest", "300", checkpoint=distilled_checkpoint
    )
    assert run.status == 2 and "the context holds 256 tokens" in run.stderr
