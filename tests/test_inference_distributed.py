"""Ranks: what they compute together, what is counted, and that every way to lose one ends the run cleanly."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from helpers import ROOT, environment, run_script, run_together
from threaded_ranks import ForkedRanks, run_threads

import inference_distributed as distributed
from inference_distributed import Ranks, collective_ms, collective_sweep, named, pick_ranks_device

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


def listening():
    """{inode: port} of the sockets of this machine that wait for connections."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).open()]
    return {line[9]: int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A"}


def ports_of(processes):
    """The ports at which these processes listen."""
    ports, found = listening(), set()
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            try:
                found.add(ports.get(os.readlink(descriptor).removeprefix("socket:[").rstrip("]")))
            except OSError:
                continue
    return found - {None}


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


def keep_sleeper(team, seconds):
    team.kept.sleeper = lambda: time.sleep(seconds[team.rank])


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


@pytest.mark.parametrize("W", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_collectives(W):
    before = environment()
    with ForkedRanks(W) as team:
        results = team.gather(everything, 4)
        team.run(keep, 10)
        values = team.gather(kept)
        assert all(team.gather(refused, None)) and all(team.gather(refused, [1] * (W - 1) + [9]))
        row = collective_sweep(team, "all_reduce", [8], n_calls=3)[0]
        times = [team.run(collective_ms, kind, 5, 3) for kind in ("all_to_all", "all_gather", "broadcast")]
        times.append(team.run(collective_ms, "send", 5, 3))
        calls = dict(team.calls)
        for seconds in ([0.0] * (W - 1) + [0.03], [0.03] + [0.0] * (W - 1)):  # whichever rank is slow
            team.run(keep_sleeper, seconds)
            assert distributed.shards_ms(team, "sleeper", 1) >= 30
    assert row["KB"] == 0.032 and row["ms"] > 0 and min(times) > 0
    assert calls == results[0][1], "measuring is not counted"
    assert values == [(10 + r, 1) for r in range(W)], "what a function keeps is there for the next"
    check_everything(results)
    assert not torch.distributed.is_initialized() and environment() == before


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


def test_a_name_says_when_nothing_is_split():
    assert [named(1), named(3), named(1, "stage")] == [
        "1 rank (nothing split)",
        "3 ranks",
        "1 stage (nothing split)",
    ]


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
    assert len(left_behind(run.mark)) >= 2 and (ports := ports_of(left_behind(run.mark)))
    run.send_signal(number)
    _, err = run.communicate(timeout=30)
    assert run.returncode == {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130}[number], err
    assert none_left(run.mark) and list(run.temporary.iterdir()) == []
    assert not ports & {*listening().values()}


def started_ranks(run):
    return [p for p in left_behind(run.mark) if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("when", ["at the start", "while the first is busy"])
def test_a_rank_dies(when, start):
    run = start("--how", "idle")
    if when == "at the start":  # before it has met the first
        deadline = time.monotonic() + 30
        while not started_ranks(run) and time.monotonic() < deadline:
            time.sleep(0.01)
    else:
        assert run.stdout.readline().startswith("waiting")  # two ranks may write at once
    (rank,), ports = started_ranks(run), ports_of(left_behind(run.mark))
    os.kill(rank, signal.SIGKILL)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 2 and err.startswith("main_x.py: rank 1 ended"), err
    assert len(err.splitlines()) == 1 and none_left(run.mark) and list(run.temporary.iterdir()) == []
    assert ports and not ports & {*listening().values()}


# ---- Ranks that somebody else starts ----


def run_ranks(script, W, *options):
    """(status, standard output, standard error) of each of W processes, with torchrun's variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(W)}
    envs = [
        env | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(W)} for rank in range(W)
    ]
    command = [str(script), *options]
    return run_together([command] * W, ROOT, 120, envs)


@pytest.mark.parametrize("how", ["", pytest.param("kill", marks=pytest.mark.slow)])
def test_ranks_that_are_there_already(how, tmp_path):
    (tmp_path / "main_x.py").write_text(f"import sys\n\nsys.path.insert(0, {str(ROOT)!r})\n{SCRIPT}")
    (status, out, err), (other, *rest) = run_ranks(tmp_path / "main_x.py", 2, "--how", how)
    if how == "":
        assert (status, out, err) == (0, "sum [1.0, 1.0]\n", "") and (other, *rest) == (0, "", "")
    else:
        assert (status, out, other) == (2, "", -signal.SIGKILL)
        assert len(err.splitlines()) == 1 and err.startswith("main_x.py: a rank is lost ("), err


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "kill"])
def test_torchrun(how, start):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = start("--how", how, launcher=launcher)
    out, err = run.communicate(timeout=60)
    assert none_left(run.mark)
    if how == "":
        assert run.returncode == 0 and out == "sum [1.0, 1.0]\n", err
    else:  # torchrun tells of it in a page of its own, and may end rank 0 before it says a word
        assert run.returncode != 0 and "sum" not in out
        assert len([line for line in err.splitlines() if line.startswith("main_x.py:")]) <= 1, err
    assert [path for path in run.temporary.iterdir() if not path.name.startswith("torchelastic_")] == []


def check_report(report, W):
    assert report["checks"] and all(report["checks"].values()), report["checks"]
    if W == 1:
        assert any("Nothing was split" in line for line in report["why"]), report["why"]


SPLIT = ["tensor_parallel", "pipeline_parallel", "expert_parallel", "sequence_parallel", "disaggregation"]


@pytest.mark.slow
def test_a_script_under_torchrun():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(ROOT / "main_tensor_parallel.py"), "--quick", "--json", "-"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("main_tensor_parallel.py: ") == 1, "rank 0 reports, and no other"
    check_report(json.loads(run.stdout.splitlines()[-1]), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT[1:])
def test_scripts_in_processes_that_are_there_already(name):
    (status, out, err), others = run_ranks(ROOT / f"main_{name}.py", 2, "--quick", "--json", "-")
    assert status == 0 and others == (0, "", ""), (err, others)
    check_report(json.loads(out.splitlines()[-1]), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, W",
    [(name, W) for name in SPLIT for W in (1, 3, 6) if not (name == "disaggregation" and W != 3)],
)
def test_other_numbers_of_ranks(name, W, checkpoint):
    """The full model has 6 layers and 6 heads."""
    options = ["--batch-size", "6"] if name == "pipeline_parallel" else []
    run = run_script(
        f"main_{name}.py", "--quick", "--json", "-", "--world-size", W, *options, checkpoint=checkpoint
    )
    assert run.status == 0, run.stderr
    check_report(run.json, W)
