"""The semantic cache for a service: against the first class, against a list searched by hand, killed."""

import math
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap

import faiss
import numpy as np
import pytest
from helpers import ROOT, run_script
from hypothesis import given
from hypothesis import strategies as st
from test_main_semantic_cache import Model, cosine, embed, never

from inference_report import sha256_of
from main_semantic_cache import SemanticCache, unit_vectors
from semantic_production import ProductionSemanticCache


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def make(tmp_path):
    """make(**kwargs): a production cache on one file, closed at the end; the clock is make.clock."""
    opened = []

    def open_cache(**kwargs):
        defaults = {"confirm": None, "clock": open_cache.clock, "ttl_seconds": 100}
        cache = ProductionSemanticCache(embed, cosine(15), tmp_path / "cache.sqlite", **(defaults | kwargs))
        opened.append(cache)
        return cache

    open_cache.clock, open_cache.path = Clock(), tmp_path / "cache.sqlite"
    yield open_cache
    for cache in opened:
        cache.db.close()


def assert_consistent(cache):
    """The file and the indexes hold the same ids."""
    in_file = cache.db.execute("SELECT id FROM entries WHERE vector IS NOT NULL").fetchall()
    in_indexes = [faiss.vector_to_array(index.id_map).tolist() for index in cache.indexes.values()]
    assert sorted(i for ids in in_indexes for i in ids) == sorted(i for (i,) in in_file)


def test_production_serves_as_the_first_class_does(make):
    queries = [f"{letter} {angle}" for letter in "ab" for angle in (0, 10, 40, 20, 180, 44, 0)]
    first, second = SemanticCache(embed, cosine(15)), make()
    for query in queries:
        answer, similarity, hit = first(query, str.upper)
        found = second(query, str.upper)
        assert (found[0], found[2]) == (answer, hit)
        assert found[1] == pytest.approx(similarity, abs=1e-6)
        assert_consistent(second)


def test_exact_layer_needs_no_encoder(make):
    calls = []

    def counting(texts):
        calls.extend(texts)
        return embed(texts)

    cache = make()
    cache.embed_fn = counting
    cache("a 0", str.upper)
    assert cache("a 0", never) == ("A 0", 1.0, True) and calls == ["a 0"]
    assert cache("b 1", never)[2] and calls == ["a 0", "b 1"]
    assert cache.counts == {"exact": 1, "semantic": 1, "miss": 1, "trouble": 0}


def test_nothing_crosses_the_scope(make):
    cache = make()
    scopes = [
        {},
        {"tenant": "A"},
        {"tenant": "B"},
        {"model": "m"},
        {"sampling": {"temperature": 0.5, "top_k": 3}},
        {"context": "Who was Darwin?"},
        {"context": ["Who was Newton?", "An English physicist."]},
    ]
    for i, scope in enumerate(scopes):
        for query in ("a 0", "b 3"):  # neither by its hash nor by its meaning
            answer, _, hit = cache(query, lambda query, i=i: f"answer of {i}", **scope)
            assert (answer, hit) == (f"answer of {i}", query == "b 3")
    assert cache("a 0", never, sampling={"top_k": 3, "temperature": 0.5})[0] == "answer of 4"
    other = make(embedder="another encoder")
    assert other("a 0", lambda query: "new") == ("new", 0.0, False)


def test_new_weights_under_an_old_name_serve_nothing_old(make, tmp_path):
    """Case LO-2: the file of the weights is overwritten; its contents are the model's name."""
    cache, checkpoint = make(), tmp_path / "model.pth"
    for weights, hit in ((b"A", False), (b"A", True), (b"B", False), (b"A", True), (b"B", True)):
        checkpoint.write_bytes(weights)
        answer = cache("a 0", lambda query, w=weights: f"of {w}", model=sha256_of(checkpoint))
        assert (answer[0], answer[2]) == (f"of {weights}", hit)
        assert cache("b 3", never, model=sha256_of(checkpoint))[0] == f"of {weights}"


def test_vectors_of_another_width_are_refused_before_the_model_is_asked(make):
    cache = make()
    cache("a 0", str.upper)
    wide = make()
    wide.embed_fn = lambda texts: [[1.0, 0.0, 0.0]]
    with pytest.raises(ValueError, match="another encoder"):
        wide("b 0", never)
    assert cache("a 0", never)[0] == wide("a 0", never)[0] == "A 0" and len(cache) == 1
    assert_consistent(cache)


def test_a_question_that_needs_its_conversation(make):
    """ "How old is he?" is served within its own conversation, and its index goes when its entries do."""
    cache = make()
    for about, hit in (("Newton", False), ("Darwin", False), ("Newton", True)):
        answer = cache("how old is he? 0", lambda query, about=about: f"as old as {about}", context=[about])
        assert (answer[0], answer[2]) == (f"as old as {about}", hit)
        assert cache("and his age? 3", never, context=[about])[0] == f"as old as {about}"
    assert cache("how old is he? 0", lambda query: None) == (None, 0.0, False)
    assert len(cache.indexes) == 2 and "Newton" not in "".join(cache.indexes)
    make.clock.now = 100
    assert cache("a 0", str.upper)[0] == "A 0" and len(cache.indexes) == 1
    assert_consistent(cache)


@pytest.mark.parametrize("answer", [None, 5, b"bytes", ["list"], "", " \n\t"])
def test_an_answer_that_is_no_text_is_handed_back_and_not_stored(make, answer):
    cache = make()
    for _ in range(2):
        assert cache("a 0", lambda query: answer) == (answer, 0.0, False)
    assert len(cache) == 0 and cache.counts["miss"] == 2
    assert cache("a 0", str.upper)[0] == "A 0" and cache("a 0", never)[0] == "A 0"


@pytest.mark.parametrize(
    "damaged",
    [b"abc", b"", "text", b"\x00" * 8, np.float32([np.nan, 1]).tobytes(), np.float32([0.6]).tobytes()]
    + [np.float32([1, 0, 0]).tobytes()],
)
def test_damaged_vectors_are_refused_with_the_path(make, damaged):
    cache = make()
    for text in ("a 0", "b 90"):
        cache(text, str.upper)
    with cache.db:
        cache.db.execute("UPDATE entries SET vector = ? WHERE query = 'b 90'", (damaged,))
    with pytest.raises(ValueError, match="cache.sqlite cannot serve"):
        make()
    make(embedder="another encoder")  # whose entries these are not


def test_entries_expire(make):
    cache = make()
    cache("a 0", str.upper)
    make.clock.now = 60
    cache("c 90", str.upper)
    make.clock.now = 99.9
    assert cache("a 0", never)[2] and cache("b 5", never)[2]  # a hit does not prolong the life
    make.clock.now = 100
    assert not cache("b 5", Model())[2] and len(cache) == 2
    assert cache("c 91", never)[2]
    assert_consistent(cache)
    make.clock.now = 1000
    assert len(make()) == 0  # what expired while nobody looked


def test_ids_do_not_shift(make):
    """Case SC-4: three entries, the first leaves, the third still gets its own answer."""
    cache, model = make(capacity=2), Model()
    for text in ("a 0", "b 60", "c 120"):
        cache(text, model)
    assert cache("c 121", never)[0] == "3: c 120"
    assert cache("b 61", never)[0] == "2: b 60"
    assert len(cache) == 2
    assert not cache("a 1", model)[2]
    assert_consistent(cache)


def test_least_recently_used_leaves(make):
    cache = make(capacity=2)
    cache("a 0", str.upper)
    cache("b 60", str.upper)
    cache("a 1", never)  # a semantic hit is a use
    cache("c 120", str.upper)
    assert cache("a 0", never)[2] and not cache("b 60", str.upper)[2]
    assert not cache("c 120", str.upper)[2]  # an exact hit of a was the later use
    assert_consistent(cache)


@given(
    st.lists(st.tuples(st.integers(0, 11), st.sampled_from("AB"), st.integers(0, 40)), max_size=30),
    st.integers(1, 5),
)
def test_against_a_list_that_is_searched_by_hand(requests, capacity):
    """Random questions, tenants and waits: capacity, expiry and scope together, and the file reopened."""
    clock = Clock()
    cache = ProductionSemanticCache(
        embed, cosine(15), ":memory:", None, capacity=capacity, ttl_seconds=100, clock=clock
    )
    entries = []  # [angle, tenant, answer, expires], least recently used first
    for i, (step, tenant, wait) in enumerate(requests):
        clock.now += wait
        angle = 25 * step
        entries = [entry for entry in entries if entry[3] > clock.now]
        found = next(
            (e for e in entries if e[1] == tenant and e[0] == angle), None
        )  # others: 25 degrees away
        answer, _, hit = cache(f"q {angle}", lambda query, i=i: str(i), tenant)
        assert hit == (found is not None) and answer == (found[2] if found else str(i))
        if found:
            entries.remove(found)
        entries.append(found or [angle, tenant, str(i), clock.now + 100])
        entries = entries[-capacity:]
        assert len(cache) == len(entries)
        assert_consistent(cache)
    cache.db.close()


def test_what_the_encoder_would_cut_is_found_by_its_hash_alone(make):
    """Case SC-5."""
    long_text, model = 40 * "the same beginning " + "1", Model()
    other = long_text[:-1] + "2"
    first = SemanticCache(embed, 0.5)
    assert [first(text, model)[2] for text in (long_text, other, long_text)] == [False] * 3
    assert first.index.ntotal == 0
    cache = make()
    assert [cache(text, model)[2] for text in (long_text, other, long_text)] == [False, False, True]
    assert make()(long_text, never)[2] and len(cache) == 2
    assert_consistent(cache)


def test_reopened_file(make):
    cache, model = make(), Model()
    for text in ("a 0", "b 60", "c 120"):
        cache(text, model, "tenant")
    cache.db.close()
    cache = make(capacity=2)  # a smaller room now
    assert len(cache) == 2 and not cache("a 1", model, "tenant")[2]
    assert cache("c 121", never, "tenant")[0] == "3: c 120"
    assert_consistent(cache)


def test_two_processes_on_one_file(make):
    """Each has its own indexes; what the other removed is no answer, what it stored is found by its hash."""
    one, two = make(), make()
    one("a 0", str.upper)
    assert two("a 0", never)[2] and not two("b 5", str.upper)[2]
    one.remove("query = ?", "a 0")
    assert one("b 5", never)[2]
    two.add_to_index(
        10**6, next(iter(two.indexes)), unit_vectors(embed(["z 90"]))
    )  # as if one had removed it
    assert two("z 90", str.upper) == ("Z 90", pytest.approx(1.0), False)


def test_answer_stored_by_the_model_itself(make):
    cache = make()
    answer, _, hit = cache("a 0", lambda query: cache(query, str.upper)[0] + "!")
    assert (answer, hit) == ("A 0!", False)
    assert cache("a 0", never)[0] == "A 0!" and len(cache) == 1
    assert_consistent(cache)


@pytest.mark.parametrize("damage", ["text", "folder", "schema"])
def test_file_that_is_no_database_is_refused(tmp_path, damage):
    path = tmp_path / "cache.sqlite"
    if damage == "text":
        path.write_text("no database " * 100)
    elif damage == "folder":
        path.mkdir()
    else:
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE entries (something TEXT)")
        db.close()
    with pytest.raises(ValueError, match="cannot serve"):
        ProductionSemanticCache(embed, 0.9, path)


@pytest.mark.parametrize("kwargs", [{"capacity": 0}, {"ttl_seconds": 0}, {"ttl_seconds": math.nan}])
def test_sizes_must_be_positive(make, kwargs):
    with pytest.raises(ValueError, match="positive"):
        make(**kwargs)


def test_every_answer_given_before_a_kill_is_there_after_it(make):
    """The process is killed while it stores one entry after the other."""
    program = textwrap.dedent(
        """
        import sys
        from semantic_production import ProductionSemanticCache
        from test_main_semantic_cache import embed
        cache = ProductionSemanticCache(embed, 1.0, sys.argv[1], clock=lambda: 0.0)
        for i in range(10**6):
            print(cache(f"q{i} {i % 3600 / 10}", str.upper, "tenant")[0], flush=True)
        """
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "more", ROOT / "tests")))}
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(make.path)], stdout=subprocess.PIPE, text=True, env=env
    )
    answers = [child.stdout.readline().strip() for _ in range(20)]
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    cache = make(clock=lambda: 0.0)
    assert cache.db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert all(answers) and len(cache) >= 20
    for answer in answers:
        assert cache(answer.lower(), never, "tenant") == (answer, 1.0, True)
    assert_consistent(cache)


@pytest.mark.slow
def test_script(distilled_checkpoint):
    run = run_script("more/semantic_production.py", "--quick", "--json", "-", checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr
    assert run.json["checks"] and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    assert list(rows) == ["no cache", "semantic", "semantic, confirmed", "production"]
    assert rows["no cache"]["hit_rate"] == rows["no cache"]["wrong_per_thousand"] == 0
    assert rows["semantic"]["hit_rate"] >= rows["semantic, confirmed"]["hit_rate"]
    assert rows["semantic"]["wrong_per_thousand"] >= rows["semantic, confirmed"]["wrong_per_thousand"]
    for key in ("hit_rate", "wrong_per_thousand", "recall"):
        assert rows["production"][key] == rows["semantic, confirmed"][key]
    assert 0 < rows["production"]["exact_rate"] <= rows["production"]["hit_rate"]
    assert all(rows[name]["approximate"] for name in list(rows)[1:])
    hit_rates = [line["hit rate"] for line in next(iter(run.json["sweeps"].values()))]
    assert hit_rates == sorted(hit_rates)


def test_bad_option_is_one_line():
    run = run_script("more/semantic_production.py", "--quick", "--threshold", "nan")
    assert run.status == 2 and run.stdout == ""
    assert len(run.stderr.strip().splitlines()) == 1 and "nan" in run.stderr


def test_a_file_in_trouble_costs_hits_and_no_answer(make):
    """Full, locked by another process, or without its table: questions are answered all the same."""
    cache = make()
    assert cache("a 0", lambda query: "first")[0] == "first"
    n_pages = cache.db.execute("PRAGMA page_count").fetchone()[0]
    cache.db.execute(f"PRAGMA max_page_count={n_pages}")  # a full disk
    for i in range(40):  # conversations of their own
        assert cache("a 0", lambda query: "x" * 500, context=i) == ("x" * 500, 0.0, False)
    assert cache.counts["trouble"] > 0 and cache("a 0", never)[0] == "first"
    assert_consistent(cache)
    cache.db.execute("PRAGMA max_page_count=1000000")
    other = sqlite3.connect(make.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    before = cache.counts["trouble"]
    assert cache("a 0", never) == ("first", 1.0, True)  # only that it was used is not noted
    assert cache("b 90", lambda query: "new")[0] == "new" and cache.counts["trouble"] == before + 2
    other.execute("ROLLBACK")
    assert cache("b 90", lambda query: "stored")[2] is False and cache("b 90", never)[0] == "stored"
    other.execute("DROP TABLE entries")
    assert cache("a 0", lambda query: "again") == ("again", 0.0, False)
    other.close()


def test_what_another_process_removed_leaves_the_index(make):
    """Its vector would stand among the candidates for good, before entries that are still there."""
    cache, other = make(), make()
    cache("a 0", lambda query: "gone")
    other.remove("query = ?", "a 0")
    assert cache("a 1", lambda query: "new")[2] is False
    assert cache("a 2", never)[0] == "new"
    assert_consistent(cache)
