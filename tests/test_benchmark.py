"""All methods in one table: what is exact is checked, what fails is a row, and the frontier is one."""

import pytest
from helpers import run_script
from hypothesis import given
from hypothesis import strategies as st

from main_benchmark import frontier

POINTS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8)


@given(POINTS)
def test_frontier_is_what_nothing_beats(pairs):
    points = [(i, speed, loss) for i, (speed, loss) in enumerate(pairs)]
    found = frontier(points)
    assert found
    for i, speed, loss in points:
        beaten = any((s > speed and x <= loss) or (s >= speed and x < loss) for j, s, x in points if j != i)
        assert (i in found) == (not beaten)


def test_script(checkpoint):
    args = ("--quick", "--json", "-", "--repeats", "1", "--skip", "distilled")
    run = run_script("main_benchmark.py", *args, checkpoint=checkpoint)
    assert run.status == 0, run.stdout + run.stderr
    rows = {row["method"]: row for row in run.json["rows"]}
    assert all(run.json["checks"].values())
    for size in (1, 2):
        exact = [f"{name}, batch {size}" for name in ("KV cache", "static KV cache", "paged KV cache")]
        assert all(rows[name]["same_output"] for name in exact)
        base = rows[f"no cache, batch {size}"]
        assert base["baseline"]
        assert all(rows[name]["forward_tokens"] < base["forward_tokens"] for name in exact)
        bytes_of = [
            rows[f"{name}, batch {size}"]["kv_bytes_per_token"] for name in ("KV cache", "MQA (converted)")
        ]
        assert bytes_of[0] == 6 * bytes_of[1]
        assert rows[f"pruned by 1/6, batch {size}"]["n_parameters"] < base["n_parameters"]


def test_a_method_that_fails_is_a_row_and_the_others_finish(checkpoint, tmp_path):
    student = tmp_path / "missing.pth"
    args = ("--quick", "--json", "-", "--repeats", "1", "--only", "distilled,KV cache", "--student", student)
    run = run_script("main_benchmark.py", *args, checkpoint=checkpoint)
    assert run.status == 1
    rows = {row["method"]: row for row in run.json["rows"]}
    assert "missing.pth" in rows["distilled, batch 1"]["error"]
    assert rows["distilled, batch 1"]["tokens_per_s"] is None
    assert rows["KV cache, batch 2"]["tokens_per_s"] > 0


@pytest.mark.parametrize(
    "args, word", [(("--only", "magic"), "magic"), (("--prompt-len", "250", "--n-tokens", "20"), "250")]
)
def test_bad_options_are_one_line(args, word, checkpoint):
    run = run_script("main_benchmark.py", *args, checkpoint=checkpoint)
    assert run.status == 2
    assert run.stderr.count("\n") == 1
    assert word in run.stderr
