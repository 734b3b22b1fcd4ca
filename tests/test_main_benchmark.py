"""All methods in one table: what is exact is checked, a failure is a failure, and the frontier is one."""

import pytest
import torch
from helpers import run_script
from hypothesis import given
from hypothesis import strategies as st

import main_benchmark
from main_benchmark import frontier

POINTS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8)


@given(POINTS)
def test_frontier_is_what_nothing_beats(pairs):
    """Of equal ones one stays; a row without a loss or a speed is none."""
    rows = [{"method": i, "tokens_per_s": s, "valid_loss": float(x)} for i, (s, x) in enumerate(pairs)]
    unknown = [{"method": -1, "tokens_per_s": 99, "valid_loss": None}]
    unknown += [{"method": -2, "tokens_per_s": None, "valid_loss": 0.0}]
    found = {(row["tokens_per_s"], row["valid_loss"]) for row in frontier(rows + unknown)}
    points = {(row["tokens_per_s"], row["valid_loss"]) for row in rows}
    for speed, loss in points:
        beaten = any((s >= speed and x <= loss) and (s, x) != (speed, loss) for s, x in points)
        assert ((speed, loss) in found) == (not beaten)
    assert len(frontier(rows)) == len(found)


def test_a_loss_that_differs_by_rounding_beats_nothing():
    rows = [{"tokens_per_s": 2.0, "valid_loss": 1.00001}, {"tokens_per_s": 1.0, "valid_loss": 1.0}]
    assert frontier(rows) == rows[:1]


@pytest.fixture(scope="module")
def quick_run():
    return run_script("main_benchmark.py", "--quick", "--json", "-", "--peers")


def test_script(quick_run):
    assert quick_run.status == 0, quick_run.stdout + quick_run.stderr
    rows = {row["method"]: row for row in quick_run.json["rows"]}
    checks = quick_run.json["checks"]
    assert all(checks.values()) and len(checks) == 9 + 5 + 1 + 9 + 3 + 1
    for size in (1, 2):
        names = ("KV cache", "static KV cache", "paged KV cache", "compiled step", "prefix cache")
        exact = [rows[f"{name}, batch {size}"] for name in names]
        base = rows[f"no cache, batch {size}"]
        assert base["baseline"] and all(row["same_output"] is True for row in exact)
        assert all(row["forward_tokens"] < base["forward_tokens"] for row in exact)
        cached, behind = rows[f"KV cache, batch {size}"], rows[f"prefix cache, batch {size}"]
        # every sequence holds a copy of the prefix: its bytes are those of its own cache
        assert cached["kv_bytes_per_token"] == behind["kv_bytes_per_token"] == 2 * 3 * 192 * 4
        assert rows[f"MQA, aligned, batch {size}"]["kv_bytes_per_token"] * 3 == cached["kv_bytes_per_token"]
        assert rows[f"pruned by a head, batch {size}"]["n_parameters"] < base["n_parameters"]
        assert behind["forward_tokens"] == cached["forward_tokens"] - 48 * size
        engine = rows[f"CTranslate2, batch {size}"]  # whose memory PyTorch does not see
        assert engine["same_output"] is True and engine["peak_memory_mb"] is None


def test_a_figure_that_was_not_measured_is_absent(quick_run):
    """Losses belong to the model of the row; a round of a draft is no step."""
    rows = {row["method"]: row for row in quick_run.json["rows"]}
    for name in ("transformers", "continuous batching", "paged KV cache"):
        assert rows[f"{name}, batch 1"]["valid_loss"] is None
    assert rows["transformers, assisted, batch 1"]["tpot_ms"] is None
    assert rows["transformers, assisted, batch 1"]["tokens_per_s"] > 0
    assert rows["MQA, aligned, batch 1"]["loss_difference"] > 0
    assert rows["MQA, aligned, batch 1"]["same_output"] is None


def test_a_peer_that_fails_is_a_failure(monkeypatch, capsys):
    import runpy
    import sys

    import gptlite_opt

    def broken(*_, **__):
        raise RuntimeError("this version of the peer is broken")

    monkeypatch.setattr(gptlite_opt, "generate_opt", broken)
    argv = [main_benchmark.__file__, "--quick", "--peers", "--only", "KV cache,transformers"]
    monkeypatch.setattr(sys, "argv", argv)
    with torch.random.fork_rng(devices=[]), pytest.raises(RuntimeError, match="is broken"):
        runpy.run_path(main_benchmark.__file__, run_name="__main__")


@pytest.mark.parametrize(
    "args, word",
    [
        (("--only", "magic"), "magic"),
        (("--prompt-len", "250", "--n-tokens", "20"), "257 at most"),
        (("--shared", "64"), "--shared"),
    ],
)
def test_bad_options_are_one_line(args, word):
    run = run_script("main_benchmark.py", "--quick", *args)
    assert run.status == 2
    assert run.stderr.count("\n") == 1
    assert word in run.stderr
