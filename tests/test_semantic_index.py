"""Indexes of vectors against comparing all: what is found, what removal leaves, and what must be refused."""

import numpy as np
import pytest
from helpers import run_script
from hypothesis import given, settings
from hypothesis import strategies as st

from main_semantic_cache import unit_vectors
from semantic_index import FlatIndex, HNSWIndex, IVFIndex, PQIndex, Rescored, agreement, make_indexes

DIM = 48


def draw_vectors(n, seed=0):
    """Unit vectors [n, DIM] in clusters, as texts are."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((12, DIM))
    return unit_vectors(centres[random.integers(12, size=n)] + 0.7 * random.standard_normal((n, DIM)))


VECTORS, QUERIES = draw_vectors(600), draw_vectors(40, seed=1) * 3  # their length must not matter


def filled(kind, n=600):
    index = make_indexes(DIM, n, VECTORS.__getitem__)[kind]
    index.train(VECTORS)
    index.add(list(range(n)), VECTORS[:n])
    return index


KINDS = ("flat", "IVF", "HNSW", "PQ", "PQ, re-scored")


def nearest(queries, ids, k):
    """By comparing all: cosines and ids [n, k], the nearest first."""
    cosines = unit_vectors(queries) @ VECTORS[ids].T
    order = np.argsort(-cosines, axis=1)[:, :k]
    return np.take_along_axis(cosines, order, axis=1), np.array(ids)[order]


def test_flat_finds_what_comparing_all_finds():
    cosines, ids = filled("flat").search(QUERIES, 5)
    expected, rows = nearest(QUERIES, list(range(600)), 5)
    assert np.allclose(cosines, expected, atol=1e-5) and (ids == rows).all()


@pytest.mark.parametrize("kind", ["IVF", "HNSW", "PQ, re-scored"])
def test_the_others_find_most_of_it_and_true_cosines(kind):
    index, exact = filled(kind), filled("flat").search(QUERIES, 1)
    found = index.search(QUERIES, 1)
    assert agreement(found, exact, 0.5)[0] > 0.8
    own = (unit_vectors(QUERIES) * VECTORS[found[1][:, 0]]).sum(axis=1)
    assert np.allclose(found[0][:, 0], own, atol=1e-5)


def test_as_wide_as_can_be_they_find_all():
    exact = filled("flat").search(QUERIES, 1)
    cells, graph = filled("IVF"), filled("HNSW")
    cells.index.nprobe, graph.width = cells.n_cells, 600
    codes = Rescored(filled("PQ"), VECTORS.__getitem__, n_candidates=600)
    for index in (cells, graph, codes):
        assert agreement(index.search(QUERIES, 1), exact, 0.5) == (1.0, 1.0)


def test_patterns_estimate_cosines_and_scoring_again_corrects_them():
    exact = filled("flat").search(QUERIES, 1)[0]
    estimated, corrected = (filled(kind).search(QUERIES, 1)[0] for kind in ("PQ", "PQ, re-scored"))
    assert np.abs(estimated - exact).max() > 1e-3
    assert (corrected <= exact + 1e-5).all() and np.abs(corrected - exact).mean() < np.abs(
        estimated - exact
    ).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_removed_vectors_are_not_found_and_the_others_keep_their_ids(kind):
    """The first and many more go; what is left answers under its own id, put back ones are found again."""
    index, gone = filled(kind), [0, 1, *range(10, 100)]
    index.remove(gone)
    left = [i for i in range(600) if i not in set(gone)]
    found = index.search(VECTORS, 3)[1]
    assert not np.isin(found, gone).any() and len(index.known) == len(left)
    own = index.search(VECTORS[left], 1)[1][:, 0]
    assert (own == left).mean() > 0.9 if kind != "PQ" else (own == left).mean() > 0.3
    index.add(gone, VECTORS[gone])
    assert (index.search(VECTORS[gone], 1)[1][:, 0] == gone).mean() > (0.3 if kind == "PQ" else 0.9)
    assert len(index.known) == 600


@settings(max_examples=15)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=25))
def test_a_graph_after_any_additions_and_removals(steps):
    """Against the flat index, hidden nodes and rebuilt graphs included: searched as widely as it is large."""
    flat, graph = FlatIndex(DIM), HNSWIndex(DIM)
    graph.width = 100
    for add, number in steps:
        for index in (flat, graph):
            if add and number not in index.known:
                index.add([number], VECTORS[[number]])
            elif not add and number in index.known:
                index.remove([number])
    assert graph.known == flat.known == set(graph.rows)
    assert len(graph.hidden) <= max(graph.most_hidden * len(graph.ids), 0)
    (a, ids), (b, others) = (index.search(QUERIES[:5], 2) for index in (flat, graph))
    n = min(len(flat.known), 2)
    assert np.allclose(a[:, :n], b[:, :n], atol=1e-5) and (ids[:, :n] == others[:, :n]).all()
    assert (others[:, n:] == -1).all() and (ids[:, n:] == -1).all()


def test_an_empty_index_finds_nothing():
    for index in (FlatIndex(DIM), HNSWIndex(DIM)):
        assert (index.search(QUERIES, 2)[1] == -1).all()
    empty = Rescored(FlatIndex(DIM), VECTORS.__getitem__)
    assert (empty.search(QUERIES, 2)[1] == -1).all()


def test_direction_counts_not_length_nor_type():
    index = FlatIndex(2)
    index.add([7, 9], np.array([[1.0, 0.0], [3.0, 3.0]]))  # float64; raw products would rank 9 first
    cosines, ids = index.search(np.array([[1.0, 0.0]]), 2)
    assert ids.tolist() == [[7, 9]] and np.allclose(cosines, [[1.0, 0.7071]], atol=1e-4)
    index.add([11], np.array([[0.0, 0.0], [0.0, 5.0]]).T[:, 1:].T)  # not in C order
    assert index.search(np.array([[0.0, 1.0]]), 1)[1].tolist() == [[11]]
    same = filled("flat").search(VECTORS, 1)
    assert (same[0][:, 0] >= 1 - 1e-5).all() and (same[1][:, 0] == np.arange(600)).all()


@pytest.mark.parametrize("kind", ["flat", "HNSW"])
def test_ids_that_cannot_be(kind):
    index = filled(kind, 300)
    for ids in ([3], [700, 700]):
        with pytest.raises(ValueError, match="is there already"):
            index.add(ids, VECTORS[: len(ids)])
    with pytest.raises(ValueError, match="no vector has the id 900"):
        index.remove([5, 900])
    assert 5 in index.known and len(index.known) == 300
    with pytest.raises(ValueError, match="zero or not finite"):
        index.search(np.zeros((1, DIM)), 1)


def test_bytes_are_counted():
    sizes = {kind: filled(kind).n_bytes / 600 for kind in KINDS}
    assert 4 * DIM <= sizes["flat"] < 4 * DIM + 40
    assert sizes["HNSW"] > sizes["flat"] + 2 * 16 * 4  # links: twice as many in the lowest layer
    patterns = 256 * DIM * 4 / 600
    assert sizes["PQ"] - patterns < DIM + 40 and sizes["PQ, re-scored"] == sizes["PQ"]


def test_agreement_by_hand():
    exact = np.array([[0.9], [0.9], [0.5], [0.95]]), np.array([[1], [2], [3], [4]])
    found = np.array([[0.9], [0.9], [0.4], [0.7]]), np.array([[1], [8], [9], [7]])  # 8: an equal text
    assert agreement(found, exact, 0.8) == (0.5, pytest.approx(2 / 3))
    assert agreement(found, exact, 0.99) == (0.5, None)


def test_cells_and_codes_alone():
    """Each with what it is given by hand: cells as many as asked, a byte for each part."""
    cells, codes = IVFIndex(DIM, 5), PQIndex(DIM)
    for index in (cells, codes):
        index.train(VECTORS)
        index.add([4], VECTORS[:1])
        assert index.search(VECTORS[:1], 1)[1].tolist() == [[4]]
    assert cells.index.nlist == 5 and codes.index.index.sa_code_size() == 48


@pytest.mark.slow
def test_script(distilled_checkpoint):
    run = run_script("more/semantic_index.py", "--quick", "--json", "-", checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr
    assert all(run.json["checks"].values()) and "WARNING" not in run.stderr
    rows = {row["method"]: row for row in run.json["rows"]}
    assert rows["flat"]["recall"] == 1.0 and rows["flat"]["baseline"]
    assert (
        rows["PQ"]["bytes_per_vector"] < rows["flat"]["bytes_per_vector"] < rows["HNSW"]["bytes_per_vector"]
    )
    assert rows["HNSW"]["recall"] > 0.8 and rows["PQ, re-scored"]["recall"] >= rows["PQ"]["recall"]


@pytest.mark.parametrize("n", ["511", "99999999"])
def test_script_refuses_what_cannot_be_stored(distilled_checkpoint, n):
    run = run_script("more/semantic_index.py", "--quick", "--n-vectors", n, checkpoint=distilled_checkpoint)
    assert run.status == 2 and run.stdout == "" and f"--n-vectors {n}" in run.stderr
