"""Ranks: what they compute together, what is counted, and that every way to lose one ends the run cleanly."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from threaded_ranks import run_threads

import inference_distributed as distributed
from inference_distributed import Ranks, collective_ms, collective_sweep, pick_ranks_device

SCRIPT = '''
"""A script that is run in processes of its own."""

import os, signal, sys, time
import torch
import inference_report as harness
from inference_distributed import Ranks, add_world_size, pick_ranks_device


def together(team, how):
    team.all_reduce(torch.ones(2))
    if team.rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if team.rank == 1 and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "refuse" or team.rank == 1 and how == "fail":
        raise ValueError("4 heads on 3 ranks")
    if how == "long":
        print("waiting", flush=True)
        time.sleep(60)
    return team.all_reduce(torch.full((2,), float(team.rank))).tolist()


if __name__ == "__main__":
    parser = harness.options("A script.", data=False, weights=False, plot=False)
    add_world_size(parser)
    parser.add_argument("--how")
    with harness.script(parser) as args, Ranks(args.world_size, timeout_s=4) as team:
        if args.how == "idle":
            team.run(together, "")
            print("waiting", flush=True)
            time.sleep(60)
        print("sum", team.run(together, args.how), flush=True)
'''
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are told by /proc")


def left_behind(mark):
    """Processes, zombies aside, that have this mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def none_left(mark, seconds=8):
    deadline = time.monotonic() + seconds
    while left_behind(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left_behind(mark) == []


@pytest.fixture
def start(tmp_path):
    """start(*options, launcher=...): a run of the script, its mark in .mark; all is ended after the test."""
    (tmp_path / "main_x.py").write_text(SCRIPT)
    runs = []

    def start(*options, launcher=()):
        mark = f"MARK={uuid.uuid4()}"
        temporary = tmp_path / "temporary"
        temporary.mkdir(exist_ok=True)
        env = os.environ | {"PYTHONPATH": str(ROOT), "MARK": mark[5:], "OMP_NUM_THREADS": "1"}
        env |= {"TMPDIR": str(temporary)}
        run = subprocess.Popen(
            [sys.executable, *launcher, str(tmp_path / "main_x.py"), *options],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        run.mark, run.temporary = mark, temporary
        runs.append(run)
        return run

    yield start
    for run in runs:
        for process in left_behind(run.mark):
            os.kill(process, signal.SIGKILL)
        run.communicate()


# ---- What ranks compute ----


def everything(team, offset):
    """One call of each collective, on numbers that tell the ranks apart."""
    r, W = team.rank, team.world_size
    team.reset_counts()
    found = {"reduced": team.all_reduce(torch.full((3,), float(r + 1), dtype=torch.float64)).tolist()}
    found["gathered"] = [int(part) for part in team.all_gather(torch.tensor([r + offset]))]
    found["given"] = int(team.broadcast(torch.tensor([r + 7]), 1))
    found["equal parts"] = team.all_to_all(torch.arange(2.0 * W) + 100 * r).tolist()
    # rank r sends i rows to rank i, so it receives r rows from each
    rows = torch.full((sum(range(W)), 2), float(r))
    found["uneven"] = team.all_to_all(rows, range(W), [r] * W)[:, 0].tolist()
    arriving, finish = team.shift(torch.tensor([r]), torch.tensor([10.0 * r]))
    finish()
    found["shifted"] = [part.item() for part in arriving]
    if r == 0:
        team.send(torch.arange(4.0), W - 1)
    if r == W - 1:
        found["sent"] = team.receive(torch.empty(4), 0).tolist()
    if r == 1:
        team.start_send(torch.arange(3), 0, tag=5).wait()
    if r == 0:
        x = torch.empty(3, dtype=torch.int64)
        team.start_receive(x, 1, tag=5).wait()
        found["started"] = x.tolist()
    team.barrier()
    return found, dict(team.calls), dict(team.sent_bytes)


def keep(team, x):
    team.kept.x = x + team.rank


def kept(team):
    return team.kept.x, torch.get_num_threads()


def refused(team, sizes):
    with pytest.raises(ValueError, match="rows"):
        team.all_to_all(torch.zeros(7, 2), sizes, sizes)
    return True


def check_everything(results):
    W = len(results)
    for r, (found, calls, sent) in enumerate(results):
        assert found["reduced"] == [W * (W + 1) / 2] * 3
        assert found["gathered"] == [4 + i for i in range(W)] and found["given"] == 8
        assert found["equal parts"] == [100.0 * i + 2 * r + j for i in range(W) for j in range(2)]
        assert found["uneven"] == [float(i) for i in range(W) for _ in range(r)]
        assert found["shifted"] == [(r - 1) % W, 10.0 * ((r - 1) % W)]
        assert (
            calls["all_reduce"] == calls["all_gather"] == calls["broadcast"] == 1 and calls["all_to_all"] == 2
        )
        assert sent["all_reduce"] == 24 and sent["all_gather"] == 8 and sent["shift"] == 12
        assert sent["broadcast"] == (8 if r == 1 else 0)
        uneven = 8 * sum(i for i in range(W) if i != r)  # rows of 2 numbers to other ranks
        assert sent["all_to_all"] == 4 * 2 * (W - 1) + uneven
        assert sent.get("send", 0) == (r == 0) * 16 + (r == 1) * 24
    assert results[-1][0]["sent"] == [0.0, 1.0, 2.0, 3.0] and results[0][0]["started"] == [0, 1, 2]


@pytest.mark.parametrize("W", [2, 3])
def test_collectives(W):
    with Ranks(W) as team:
        results = team.gather(everything, 4)
        team.run(keep, 10)
        values = team.gather(kept)
        assert all(team.gather(refused, None)) and all(team.gather(refused, [1] * (W - 1) + [9]))
        row = collective_sweep(team, "all_reduce", [8], n_calls=3)[0]
        times = [team.run(collective_ms, kind, 5, 3) for kind in ("all_to_all", "all_gather", "broadcast")]
        times.append(team.run(collective_ms, "send", 5, 3))
        calls = dict(team.calls)
    assert row["KB"] == 0.032 and row["ms"] > 0 and min(times) > 0
    assert calls == results[0][1], "measuring is not counted"
    assert values == [(10 + r, 1) for r in range(W)], "what a function keeps is there for the next"
    check_everything(results)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("W", [2, 3, 5])
def test_threads_that_stand_in_for_ranks_do_the_same(W):
    check_everything(run_threads(W, everything, 4))
    assert all(run_threads(W, refused, None))
    with pytest.raises(ValueError, match="rank 1 has enough"):
        run_threads(W, one_leaves)


def one_leaves(team):
    if team.rank == 1:
        raise ValueError("rank 1 has enough")
    team.all_reduce(torch.ones(1))


def test_one_rank_needs_no_other():
    with Ranks(1) as team:
        assert team.run(kept_alone) == [1.0] and team.gather(kept_alone) == [[1.0]]
    assert not torch.distributed.is_initialized()


def kept_alone(team):
    x = team.all_to_all(team.all_gather(team.broadcast(team.all_reduce(torch.ones(1))))[0])
    team.barrier()
    assert not team.calls, "nothing leaves a single rank"
    return x.tolist()


# ---- Devices, torchrun's environment ----


def test_device(monkeypatch):
    cpu, cuda, mps = map(torch.device, ("cpu", "cuda", "mps"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_ranks_device(4, cpu) == cpu and pick_ranks_device(2, cuda) == cuda
    assert pick_ranks_device(3, cuda) == cpu and pick_ranks_device(2, mps) == cpu
    with pytest.raises(ValueError, match="3 ranks need 3 GPUs, here are 2"):
        pick_ranks_device(3, cuda, given=True)
    with pytest.raises(ValueError, match="here are 0"):
        pick_ranks_device(2, mps, given=True)


def test_another_world_size_than_torchruns(monkeypatch):
    for name in distributed.UNDER_TORCHRUN:
        monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match="torchrun started 2"):
        Ranks(3)


# ---- Ends ----


@needs_proc
@pytest.mark.parametrize(
    "how, line",
    [
        ("kill", r"main_x.py: rank 1 ended before its work was done \(killed by signal SIGKILL\)"),
        pytest.param("stop", r"main_x.py: a rank did not answer within 4 s", marks=pytest.mark.slow),
        pytest.param(
            "fail", r"main_x.py: rank 1 failed: ValueError: 4 heads on 3 ranks", marks=pytest.mark.slow
        ),
        pytest.param("refuse", r"main_x.py: 4 heads on 3 ranks", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_ends_the_run(how, line, start):
    run = start("--how", how)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 2 and "sum" not in out, (out, err)
    lines = [text for text in err.splitlines() if text.strip()]
    assert len(lines) == 1 and re.fullmatch(line, lines[0]), err
    assert none_left(run.mark) and list(run.temporary.iterdir()) == []


@needs_proc
@pytest.mark.parametrize(
    "how, number",
    [
        ("idle", signal.SIGKILL),
        pytest.param("long", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("idle", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("long", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_the_first_rank_ends(how, number, start):
    """Whatever the others do: wait for what to do, or work."""
    run = start("--how", how)
    assert run.stdout.readline().startswith("waiting")  # two ranks may write at once
    assert len(left_behind(run.mark)) >= 2
    run.send_signal(number)
    _, err = run.communicate(timeout=30)
    assert run.returncode == {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130}[number], err
    assert none_left(run.mark) and list(run.temporary.iterdir()) == []


@needs_proc
@pytest.mark.slow
def test_a_rank_dies_while_the_first_is_busy(start):
    run = start("--how", "idle")
    assert run.stdout.readline().startswith("waiting")  # two ranks may write at once
    ranks = [p for p in left_behind(run.mark) if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGKILL)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 2 and err.startswith("main_x.py: rank 1 ended"), err
    assert len(err.splitlines()) == 1 and none_left(run.mark)


@needs_proc
@pytest.mark.parametrize("how", ["", pytest.param("kill", marks=pytest.mark.slow)])
def test_torchrun(how, start):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = start("--how", how, launcher=launcher)
    out, err = run.communicate(timeout=60)
    assert none_left(run.mark)
    if how == "":
        assert run.returncode == 0 and out == "sum [1.0, 1.0]\n", err
    else:
        assert run.returncode != 0 and "sum" not in out
