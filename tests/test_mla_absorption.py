"""When to absorb: operations counted one by one, the break-even they give, and the script itself."""

import math

import pytest
from helpers import run_script
from hypothesis import given
from hypothesis import strategies as st

from mla_absorption import attention_operations, break_even


def test_operations():
    assert attention_operations(1, 100, 6, 64) == 4 * 6 * 64 * 100
    assert attention_operations(1, 100, 6, 64, 96, True) == 4 * 6 * 96 * 100 + 2 * 2 * 6 * 64 * 96
    assert attention_operations(3, 100, 6, 64, 96, False) == 4 * 6 * 64 * 100 * 3 + 2 * 2 * 6 * 64 * 96 * 100


@given(st.integers(1, 4096), st.integers(1, 128), st.integers(1, 512))
def test_break_even_is_the_last_number_that_pays(Sk, d_head, d_latent):
    def pays(Sq):
        costs = (attention_operations(Sq, Sk, 6, d_head, d_latent, absorb) for absorb in (True, False))
        return next(costs) <= next(costs)

    n = break_even(Sk, d_head, d_latent)
    if n == math.inf:
        assert pays(1) and pays(10**9)
    else:
        assert (n == 0 or pays(n)) and not pays(n + 1)


def test_break_even_for_a_given_number_of_keys():
    """59, 69 and 109 queries over the model's context; 76, 96 and 192 hold for an endless past only."""
    assert [break_even(256, 64, C) for C in (384, 192, 96, 64)] == [59, 69, 109, 256]
    assert [break_even(10**9, 64, C) for C in (384, 192, 96)] == [76, 95, 191]
    assert break_even(256, 64, 48) == math.inf


@pytest.mark.slow
def test_script():
    run = run_script("more/mla_absorption.py", "--quick", "--json", "-")
    assert run.status == 0, run.stderr + run.stdout
    assert len(run.json["checks"]) == 12 and all(run.json["checks"].values())
    *tables, (title, limits) = run.json["sweeps"].items()
    assert "Queries" in title and limits[0] == {
        "keys": 256,
        "d_latent 384": 59,
        "d_latent 192": 69,
        "d_latent 96": 109,
        "d_latent 48": "all",
    }
    for title, table in tables:
        rows = {row["method"]: row for row in table}
        assert rows["MLA 384, absorbed"]["cache MB"] * 2 == pytest.approx(rows["MHA"]["cache MB"])
        for r in (384, 192, 96, 48):
            absorbed, explicit = (rows[f"MLA {r}, {form}"]["GFLOP"] for form in ("absorbed", "explicit"))
            assert (absorbed < explicit) == (title.startswith("Decode") or r < 64)
    assert "3.00 times higher" in run.json["why"][0]  # operations of a prefill


@pytest.mark.slow
def test_script_with_other_sizes():
    options = ("--d-latent", "32", "--contexts", "100", "--batch-size", "2", "--dtype", "bfloat16")
    run = run_script("more/mla_absorption.py", "--quick", "--json", "-", *options)
    assert run.status == 0, run.stderr + run.stdout
    assert list(run.json["sweeps"])[1] == "Decode step, 1 on 100 tokens, 2 sequences, one layer"
