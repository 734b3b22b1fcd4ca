"""Links: what a ring of messages takes, against one that is played, and from which size splitting pays."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_links import LINKS, START_US, Link, add_break_even, collective_link_ms, pays_from, spared_ms

KINDS = ["all_reduce", "all_gather", "all_to_all", "send"]
every_link = pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)


def rounds_of(kind, W):
    """Rounds of a ring that is played: in each a rank passes one thing on, until all have everything."""
    if (
        kind == "all_reduce"
    ):  # sets of ranks whose numbers a chunk has in it, then what is complete goes round
        chunks = [[{r} for _ in range(W)] for r in range(W)]
        for n in range(1, 3 * W):
            passed = [(r, (r - n + 1) % W, chunks[r][(r - n + 1) % W]) for r in range(W)]
            for r, c, ranks in passed:
                chunks[(r + 1) % W][c] = chunks[(r + 1) % W][c] | ranks
            if all(len(ranks) == W for rank in chunks for ranks in rank):
                return n
    held = [{r} for r in range(W)]
    for n in range(1, 3 * W):
        passed = [(r, (r - n + 1) % W) for r in range(W)]
        for r, one in passed:
            held[(r + 1) % W].add(one)
        if all(len(one) == W for one in held):
            return n


@every_link
@pytest.mark.parametrize("W", [2, 3, 6])
def test_a_collective_takes_the_rounds_of_its_ring(link, W):
    n_bytes = 6e6
    chunk_us = link.latency_us + n_bytes / W / (link.gb_per_s * 1e3)
    whole_us = link.latency_us + n_bytes / (link.gb_per_s * 1e3)
    expected = {
        "all_reduce": rounds_of("all_reduce", W) * chunk_us,  # of the W chunks of a tensor
        "all_gather": rounds_of("all_gather", W) * whole_us,
        "all_to_all": (W - 1) * chunk_us,  # a part to each other rank
        "send": whole_us,
    }
    for kind in KINDS:
        found = 1000 * collective_link_ms(link, kind, n_bytes, W)
        assert math.isclose(found, START_US + expected[kind], rel_tol=1e-9)


def test_the_limits():
    free, slow = Link(math.inf, 0.0), Link(1.0, 1000.0)
    for kind in KINDS:
        assert math.isclose(collective_link_ms(free, kind, 1e9, 4), START_US / 1000)
        assert collective_link_ms(slow, kind, 0, 4) >= 1.0
    assert [collective_link_ms(slow, kind, 1e9, 1) for kind in KINDS[:3]] == [0.0] * 3, "nobody to talk to"
    with pytest.raises(KeyError):
        collective_link_ms(slow, "gossip", 1, 2)
    for faster, slower in zip(LINKS.values(), list(LINKS.values())[1:], strict=False):
        assert all(
            collective_link_ms(faster, kind, n, 2) < collective_link_ms(slower, kind, n, 2)
            for kind in KINDS
            for n in (1, 1e6)
        )


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=6))
def test_it_pays_from_the_first_size_behind_which_it_always_does(pairs):
    gains = [(2**i, spared, added) for i, (spared, added) in enumerate(pairs)]
    able = [n for n, *_ in gains if all(spared > added for m, spared, added in gains if m >= n)]
    assert pays_from(gains) == min(able, default=None)


def table(rows, **options):
    """{link: row} of the table that is added, and its title."""
    added = []
    report = SimpleNamespace(sweep=lambda title, lines: added.append((title, lines)))
    options = {"exchanges": [(2, "all_reduce", 4)], "parts": 2} | options
    add_break_even(report, rows, "width", "one", "cost", options.pop("exchanges"), **options)
    ((title, lines),) = added or [("", [])]
    return title, {line["link"]: line for line in lines}


ROWS = [{"width": n, "one": ms, "cost": 1.0, "part": 0.25 * ms} for n, ms in ((100, 0.1), (1000, 4.0))]


def test_a_table_says_that_it_is_computed_and_from_what():
    title, lines = table(ROWS)
    assert title.startswith("Computed ") and "as fast as this one" in title and "up to 1000" in title
    assert [*lines] == ["this machine, measured", *LINKS]
    measured = lines.pop("this machine, measured")
    assert measured["adds ms at 1000"] == 1.0 and measured["pays from width"] == 1000
    assert measured["GB/s"] is measured["latency us"] is None
    for name, line in lines.items():
        ms = 2 * collective_link_ms(LINKS[name], "all_reduce", 4000, 2)
        assert line["adds ms at 1000"] == ms and line["spares ms at 1000"] == 2.0
        assert line["GB/s"] == LINKS[name].gb_per_s
    assert lines["NVLink 4"]["pays from width"] == 100
    assert lines["Ethernet, 10 Gb/s"]["pays from width"] == 1000


def test_a_table_of_opposite_figures():
    _, lines = table([row | {"cost": 0.01} for row in ROWS])
    assert lines["this machine, measured"]["pays from width"] == 100
    _, lines = table([row | {"one": row["one"] / 1e6} for row in ROWS])
    assert all(line["pays from width"] is None for line in lines.values())
    assert table(ROWS, parts=1) == ("", {}), "nothing is split"


def test_what_is_spared():
    assert spared_ms(ROWS[1], "one", 4) == 3.0 and spared_ms(ROWS[1], "one", 2, "part") == 3.0
    assert table(ROWS, part="part")[1]["NVLink 4"]["spares ms at 1000"] == 3.0
