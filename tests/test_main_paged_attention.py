"""PagedAttention: decoding over blocks, ways to reserve room, and the script."""

import random
import runpy
import sys

import pytest
import torch
from helpers import ROOT, random_tokens, run_script
from hypothesis import given
from hypothesis import strategies as st
from test_gptlite_paged import PAGED, alone, assert_clean, poisoned_pool

from gptlite_paged import BlockPool, Sequence
from main_paged_attention import generate_paged, reservations


@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 7), st.integers(1, 16), st.integers(0, 99))
def test_generate_paged(batch_size, prompt_len, n_tokens, block_size, seed):
    prompt = random_tokens(batch_size, prompt_len, seed)
    pool = poisoned_pool(batch_size * -(-16 // block_size), block_size)
    random.Random(seed).shuffle(order := list(pool.free))
    for block in order:  # in any order
        pool.free.move_to_end(block)
    output = generate_paged(PAGED, prompt, n_tokens, pool)
    assert output.tolist() == [alone(row, n_tokens) for row in prompt.tolist()]
    assert_clean(pool)


def test_generate_paged_refuses_what_does_not_fit():
    for prompt, n_tokens, pool in (
        (torch.zeros(1, 0, dtype=torch.int64), 2, BlockPool(PAGED, 4, 4)),
        (random_tokens(2, 8), 4, BlockPool(PAGED, 4, 4)),
        (random_tokens(1, 12), 6, BlockPool(PAGED, 9, 4)),
    ):
        with pytest.raises(ValueError):
            generate_paged(PAGED, prompt, n_tokens, pool)
        assert_clean(pool)


def test_reservations():
    ways = reservations(40)
    rooms = {name: way and way(Sequence(0, [0] * 10, 29)) for name, way in ways.items()}
    assert list(rooms.values()) == [40, 40, 28, None]
    assert ways["reserve a power of 2"](Sequence(0, [0] * 10, 23)) == 26


def test_script(checkpoint):
    run = run_script("main_paged_attention.py", "--quick", "--json", "-", checkpoint=checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    assert all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    shares = [rows[name]["held_share"] for name in rows if name != "contiguous slots"]
    assert shares[0] < shares[1] < shares[3]
    assert shares[2] < shares[3]
    assert all(row["same_output"] for row in rows.values())
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
