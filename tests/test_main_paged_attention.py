"""PagedAttention: on-demand blocks, admission and preemption give what each request gets alone."""

import random
import runpy
import sys

import pytest
import torch
from helpers import ROOT, RecordingModel, random_tokens, run_script
from hypothesis import given
from hypothesis import strategies as st
from test_gptlite_paged import PAGED, alone, assert_clean, poisoned_pool

from gptlite_paged import BlockPool, Sequence
from inference_serving import PagedScheduler, serve, swap_in, swap_out


def make_requests(draw, n_requests, seqlen=16):
    lengths = [draw.randint(1, seqlen) for _ in range(n_requests)]
    prompts = [random_tokens(1, T, draw.randint(0, 10**6))[0] for T in lengths]
    return [(prompt, draw.randint(0, seqlen + 1 - len(prompt))) for prompt in prompts]


@given(st.integers(0, 10**6), st.integers(1, 16), st.booleans(), st.sampled_from([0.0, 1.0]))
def test_every_request_gets_what_it_gets_alone(seed, block_size, swap, temperature):
    draw = random.Random(seed)
    smallest = -(-16 // block_size)
    pool = poisoned_pool(draw.randint(smallest, 2 * smallest), block_size)
    how = {"swap": swap, "max_running": draw.randint(1, 6), "watermark": draw.choice([0.0, 0.01, 0.3])}
    scheduler = PagedScheduler(PAGED, pool, temperature=temperature, **how)
    requests = make_requests(draw, 6)
    for i, output in enumerate(serve(scheduler, requests)):
        prompt, n_tokens = requests[i]
        assert output.tolist() == alone(prompt.tolist(), n_tokens, i, temperature)
    assert not scheduler.swapped
    assert_clean(pool)


@pytest.mark.parametrize("reserve", [lambda s: 16, lambda s: s.end - 1])
def test_reservation_never_preempts(reserve):
    pool = poisoned_pool(8, 4)
    scheduler = PagedScheduler(PAGED, pool, reserve=reserve)
    requests = make_requests(random.Random(1), 8)
    outputs = serve(scheduler, requests)
    assert [o.tolist() for o in outputs] == [alone(q.tolist(), n, i) for i, (q, n) in enumerate(requests)]
    assert scheduler.n_preempted == 0
    assert_clean(pool)


@pytest.mark.parametrize("swap", [False, True])
def test_preempted_twice(swap):
    """CB-2: a pool for 1.5 of two requests; the newest is preempted again and again, nothing is lost."""
    pool = poisoned_pool(6, 4)  # one request takes 4 blocks
    prompts = random_tokens(2, 6).tolist()
    scheduler = PagedScheduler(PAGED, pool, swap=swap)
    sequences = [Sequence(i, list(prompt), 16) for i, prompt in enumerate(prompts)]
    for sequence in sequences:
        scheduler.add(sequence)
    finished = []
    while scheduler.running or scheduler.waiting:
        finished += scheduler.step()
        assert sum(ref > 0 for ref in pool.ref) + len(pool.free) == pool.n_blocks
        for sequence in scheduler.running:
            assert len(sequence.table) == -(-sequence.done // 4)
        if len(scheduler.running) == 2 and scheduler.n_preempted == 0:
            scheduler.preempt()  # once more than the pool asks for
    assert finished == sequences
    assert scheduler.n_preempted >= 2
    assert (scheduler.n_bytes_swapped > 0) == swap
    assert [s.ids for s in sequences] == [alone(q, 10, i) for i, q in enumerate(prompts)]
    assert_clean(pool)


def test_schedule_of_preemption_by_a_fake_model():
    """The newest makes room, is first in the queue, is computed again with what it had generated."""
    model = RecordingModel(PAGED)
    pool = BlockPool(model, 4, 2)
    requests = [(torch.tensor([first, first]), 4) for first in (0, 4, 8)]
    outputs = serve(PagedScheduler(model, pool, watermark=0.0), requests)
    assert [output.tolist() for output in outputs] == [[i, i, i + 1, i + 2, i + 3, i + 4] for i in (0, 4, 8)]
    assert model.calls == [
        [(0, 0, 2), (1, 0, 2), (2, 0, 2)],
        [(0, 2, 1), (1, 2, 1)],  # 2 had to go: its block was the last that 1 could get
        [(0, 3, 1), (1, 3, 1)],
        [(0, 4, 1)],  # the third block of 0 is one of 1's
        [(1, 0, 5)],
        [(2, 0, 3)],
        [(2, 3, 1)],
        [(2, 4, 1)],
    ]
    assert_clean(pool)


def test_requests_that_cannot_run_are_refused_alone():
    """SB-3 and the whole-pool deadlock: the others finish."""
    pool = poisoned_pool(3, 4)
    good, empty = torch.tensor([1, 2, 3]), torch.tensor([], dtype=torch.int64)
    outputs = serve(PagedScheduler(PAGED, pool), [(empty, 3), (good, 4), (good, 11), (good, 10), (good, 0)])
    assert [isinstance(output, ValueError) for output in outputs] == [True, False, True, False, False]
    assert outputs[1].tolist() == alone([1, 2, 3], 4)
    assert outputs[3].tolist() == alone([1, 2, 3], 10)  # the whole pool: 12 cached tokens
    assert outputs[4].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="do not fit"):
        PagedScheduler(PAGED, pool).add(Sequence(0, [1] * 6, 14))
    assert_clean(pool)


def test_swap_is_bitwise_and_may_land_elsewhere():
    pool = BlockPool(PAGED, 8, 4)
    sequence = Sequence(0, random_tokens(1, 7)[0].tolist(), 16)
    pool.grow(sequence, 12)  # a block more than is filled
    PAGED.step(pool, [(sequence, 7)])
    before, table = pool.kv[:, sequence.table[:2]], sequence.table
    data = swap_out(pool, sequence)
    assert data.shape[1] == 2
    assert_clean(pool)
    pool.kv.fill_(float("nan"))
    swap_in(pool, sequence, data)
    assert sequence.table != table
    assert torch.equal(pool.kv[:, sequence.table], before)


def test_script(checkpoint):
    run = run_script("main_paged_attention.py", "--quick", "--json", "-", checkpoint=checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    assert all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    shares = [rows[name]["held_share"] for name in rows if name != "contiguous slots"]
    assert shares[0] < shares[1] < shares[3]
    assert shares[2] < shares[3]
    assert rows["paged"]["at_a_time"] > rows["reserve a power of 2"]["at_a_time"]
    assert rows["paged"]["n_steps"] < rows["contiguous slots"]["n_steps"]
    (preemption,) = run.json["sweeps"].values()
    assert all(row["preempted"] > 0 for row in preemption)
    assert preemption[0]["tokens computed again"] > preemption[1]["tokens computed again"] == 0
    assert preemption[1]["MB swapped out"] > preemption[0]["MB swapped out"] == 0


def refusal(script, options, monkeypatch, capsys):
    """What a script says when it refuses options; it runs in this process, where torch is there already."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, options)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert end.value.code == 2
    return capsys.readouterr().err


def test_bad_input(checkpoint, monkeypatch, capsys):
    options = ["--longest", 300, "--checkpoint", checkpoint]
    assert "--longest 300" in refusal("main_paged_attention.py", options, monkeypatch, capsys)
