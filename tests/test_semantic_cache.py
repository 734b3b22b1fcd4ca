"""The semantic caches with a small made-up embedder; the encoder, the pairs and the scripts at the end."""

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

from main_semantic_cache import (
    PAIRS_PATH,
    SemanticCache,
    TextTooLong,
    choose_threshold,
    judge,
    load_pairs,
    same_details,
    sentence_transformer_embedder,
    unit_vectors,
    wilson_lower_bound,
)
from main_semantic_cache_production import ProductionSemanticCache, meanings, zipf_stream


def embed(text):
    """Direction by the angle in degrees that the text ends in: "a 20" -> (cos 20, sin 20), any length."""
    if len(text) > 100:
        raise TextTooLong("more than 100 characters")
    angle = math.radians(float(text.split()[-1]))
    return 3.0 * np.array([math.cos(angle), math.sin(angle)])


def cosine(degrees):
    return math.cos(math.radians(degrees))


class Model:
    """generate_fn that counts: the answer to the n-th question is "n: question"."""

    def __init__(self):
        self.asked = []

    def __call__(self, query):
        self.asked.append(query)
        return f"{len(self.asked)}: {query}"


def never(query):
    raise AssertionError(f"the model was asked {query!r}")


# The first class


def test_hit_and_miss():
    cache, model = SemanticCache(embed, cosine(15)), Model()
    assert cache("a 0", model) == ("1: a 0", 0.0, False)  # an empty index never answers
    answer, similarity, hit = cache("b 10", model)
    assert (answer, hit) == ("1: a 0", True) and similarity == pytest.approx(cosine(10), abs=1e-6)
    answer, similarity, hit = cache("c 20", model)
    assert (answer, hit) == ("2: c 20", False) and similarity == pytest.approx(cosine(20), abs=1e-6)
    assert cache("d 12", model)[0] == "2: c 20"  # now that is the nearest
    assert model.asked == ["a 0", "c 20"]
    assert isinstance(cache.index, faiss.IndexFlatIP) and cache.index.ntotal == 2


@pytest.mark.parametrize("threshold", [-1.0, 0.0, 1.0])
def test_empty_index_never_answers(threshold):
    assert SemanticCache(embed, threshold)("a 0", str.upper) == ("A 0", 0.0, False)


@given(st.integers(0, 10**6))
def test_identical_text_hits_at_threshold_one(seed):
    """Case SC-3: the product of a unit vector with itself is 1 only up to rounding."""
    vector = np.random.default_rng(seed).normal(size=384)
    cache = SemanticCache(lambda text: vector, 1.0)
    assert [cache("text", str.upper)[2] for _ in range(2)] == [False, True]


def test_nearest_by_angle_and_not_by_length():
    """Case SC-3: (3, 3) has the larger raw product with (1, 0)."""
    vectors = {"one": (1.0, 0.0), "long": (3.0, 3.0), "asked": (2.0, 0.0)}
    cache = SemanticCache(vectors.get, 0.99)
    for text in ("long", "one"):
        cache(text, str.upper)
    assert cache("asked", never) == ("ONE", pytest.approx(1.0), True)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_unit_vectors_are_what_faiss_takes(dtype):
    vectors = (np.arange(12).reshape(4, 3) + 1).astype(dtype).T  # [3, 4], not contiguous
    before = vectors.copy()
    unit = unit_vectors(vectors)
    assert unit.dtype == np.float32 and unit.flags.c_contiguous and unit.shape == (3, 4)
    assert np.abs(np.linalg.norm(unit, axis=1) - 1).max() < 1e-6
    assert np.array_equal(vectors, before)
    assert unit_vectors(vectors[0]).shape == (1, 4)
    faiss.IndexFlatIP(4).add(unit)


@pytest.mark.parametrize("bad", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_embeddings_without_direction_are_refused(bad):
    with pytest.raises(ValueError, match="no direction"):
        SemanticCache(lambda text: np.array(bad), 0.5)("text", never)


@pytest.mark.parametrize("threshold", [1.01, -2, math.nan])
def test_threshold_is_a_cosine(threshold):
    with pytest.raises(ValueError, match="between -1 and 1"):
        SemanticCache(embed, threshold)


def test_failed_answer_is_not_stored():
    cache = SemanticCache(embed, 0.9)
    with pytest.raises(RuntimeError):
        cache("a 0", lambda query: (_ for _ in ()).throw(RuntimeError("model is down")))
    assert cache("a 0", str.upper) == ("A 0", 0.0, False)


def test_confirmation_takes_the_nearest_that_it_accepts():
    cache = SemanticCache(embed, cosine(30), confirm=lambda query, stored: query[0] == stored[0])
    for text in ("a 0", "b 5"):
        cache(text, str.upper)
    answer, similarity, hit = cache("a 6", never)
    assert (answer, hit) == ("A 0", True) and similarity == pytest.approx(cosine(6), abs=1e-6)
    answer, similarity, hit = cache("c 6", str.upper)
    assert (answer, hit) == ("C 6", False) and similarity == pytest.approx(cosine(1), abs=1e-6)


# Confirmation


@pytest.mark.parametrize(
    "query, stored",
    [
        ("How do I turn dark mode on?", "How do I turn dark mode off?"),
        ("What is the capital of France?", "What is the capital of Spain?"),
        ("what is the capital of spain", "What is the capital of France?"),
        ("What happens in Act 1?", "What happens in Act 2?"),
        ("What happens in act one?", "What happens in act two?"),
        ("What is new in Python 3.1?", "What is new in Python 3.11?"),
        ("Which plants are safe?", "Which plants are not safe?"),
        ("Does it work?", "Doesn't it work?"),
        ("Does it work?", "Doesn\u2019t it work?"),
        ("How do I approve a request?", "How do I deny a request?"),
        ("How do I lock the door?", "How do I unlock the door?"),
        ("Who follows Helena, Demetrius?", "Who follows Demetrius, Helena?"),
        ("from a string to a number", "from a number to a string"),
    ],
)
def test_confirmation_refuses(query, stored):
    """Case SC-1."""
    assert not same_details(query, stored) and not same_details(stored, query)


@pytest.mark.parametrize(
    "query, stored",
    [
        ("How do I turn dark mode on?", "How can I switch the dark mode on?"),
        ("What happens in Act 1 of Hamlet?", "Describe the first act of Hamlet"),
        ("Who is Desdemona's father?", "What is the name of the father of Desdemona?"),
        ("Is it not safe?", "Isn't it safe?"),
        ("", ""),
        ("?!", "..."),
        ("\u00bfD\u00f3nde est\u00e1?", "\u00bfD\u00f3nde est\u00e1?"),
    ],
)
def test_confirmation_accepts(query, stored):
    assert same_details(query, stored) and same_details(stored, query)


@given(st.text(max_size=40))
def test_confirmation_accepts_the_text_itself(text):
    assert same_details(text, text)


# The threshold


def test_wilson_lower_bound():
    """Against values of the published formula, and the rule of three for no error in n."""
    assert wilson_lower_bound(0, 0) == 0.0
    assert wilson_lower_bound(0, 10) == pytest.approx(0.0)
    assert wilson_lower_bound(8, 10) == pytest.approx(0.4902, abs=1e-4)
    assert wilson_lower_bound(10, 10) == pytest.approx(10 / (10 + 1.96**2))
    assert wilson_lower_bound(73, 73) >= 0.95 > wilson_lower_bound(72, 72)


def test_judge_and_choose():
    similarities = np.array([0.95, 0.9, 0.8, 0.7, 0.6, 0.5], dtype=np.float32)
    same = np.array([False, True, True, True, False, True])
    result = judge(similarities, same, 0.7)
    assert (result["hits"], result["right"]) == (4, 3)
    assert result["precision"] == result["recall"] == 0.75
    assert judge(similarities, same, 0.99)["precision"] is None
    assert choose_threshold(similarities, same, 0.8) is None
    assert choose_threshold(similarities, same, 0.75) == pytest.approx(0.7)
    confirmed = np.array([False, True, True, True, True, True])
    assert choose_threshold(similarities, same, 1.0, confirmed) == pytest.approx(0.7)


@given(
    st.lists(st.tuples(st.floats(-1, 1, width=32), st.booleans(), st.booleans()), min_size=1),
    st.floats(0.1, 1),
)
def test_chosen_threshold_is_the_smallest_that_reaches_the_target(rows, target):
    similarities, same, confirmed = (np.array(column) for column in zip(*rows, strict=True))
    chosen = choose_threshold(similarities, same, target, confirmed)
    for threshold in similarities.tolist():
        reached = (judge(similarities, same, threshold, confirmed)["precision"] or 0.0) >= target
        assert not reached or chosen <= threshold
    if chosen is not None:
        assert judge(similarities, same, chosen, confirmed)["precision"] >= target


# The pairs


def test_pairs():
    tuning, test = load_pairs()
    assert not {p.topic for p in tuning} & {p.topic for p in test}
    pairs = [*tuning, *test]
    hard = [p for p in pairs if not p.same and p.kind != "unrelated"]
    assert len(pairs) >= 200 and len(hard) >= 60
    assert {"number", "name", "negation", "opposite", "object"} <= {p.kind for p in hard}
    assert len({frozenset(p[3:]) for p in pairs}) == len(pairs), "a pair stands there twice"
    assert all(p.same == (p.kind == "paraphrase") and p.query != p.other for p in pairs)
    for half in (tuning, test):
        assert sum(p.same for p in half) >= 50 and sum(not p.same for p in half) >= 50
    meaning = meanings(pairs)
    for p in pairs:  # no chain of paraphrases joins what is labelled as different
        assert (meaning[p.query] == meaning[p.other]) == p.same, p


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "first line"),
        ("a\tb\n", "first line"),
        ("topic\tsame\tkind\tquery\tother\nx\tyes\tk\tq\to\n", "line 2"),
        ("topic\tsame\tkind\tquery\tother\nx\t1\tk\tq\to\nx\t1\tk\tq\n", "line 3"),
    ],
)
def test_damaged_pairs_are_refused(tmp_path, text, words):
    path = tmp_path / "pairs.tsv"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_pairs(path)


def test_stream_repeats_by_rank():
    meaning = {f"question {i}.{j}": f"question {i}.0" for i in range(20) for j in range(2)}
    stream = zipf_stream(meaning, 4000, seed=1)
    assert stream == zipf_stream(meaning, 4000, seed=1) != zipf_stream(meaning, 4000, seed=2)
    assert set(stream) == set(meaning)
    counts = sorted(np.unique([meaning[text] for text in stream], return_counts=True)[1].tolist())
    assert 1.5 < counts[-1] / counts[-2] < 2.6  # 1 to 1/2


# The production class


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
        cache.close()


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

    def counting(text):
        calls.append(text)
        return embed(text)

    cache = make()
    cache.embed_fn = counting
    cache("a 0", str.upper)
    assert cache("a 0", never) == ("A 0", 1.0, True) and calls == ["a 0"]
    assert cache("b 1", never)[2] and calls == ["a 0", "b 1"]
    assert cache.counts == {"miss": 1, "exact": 1, "semantic": 1}


def test_nothing_crosses_the_scope(make):
    cache = make()
    scopes = [
        {},
        {"tenant": "A"},
        {"tenant": "B"},
        {"model": "m"},
        {"sampling": {"temperature": 0.5, "top_k": 3}},
    ]
    for i, scope in enumerate(scopes):
        for query in ("a 0", "b 3"):  # neither by its hash nor by its meaning
            answer, _, hit = cache(query, lambda query, i=i: f"answer of {i}", **scope)
            assert (answer, hit) == (f"answer of {i}", query == "b 3")
    assert cache("a 0", never, sampling={"top_k": 3, "temperature": 0.5})[0] == "answer of 4"
    other = make(embedder="another encoder")
    assert other("a 0", lambda query: "new") == ("new", 0.0, False)


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
    cache.close()


def test_what_the_encoder_would_cut_is_found_by_its_hash_alone(make):
    """Case SC-5."""
    long_text, model = 40 * "the same beginning " + "1", Model()
    other = long_text[:-1] + "2"
    first = SemanticCache(embed, 0.5)
    assert [first(text, model)[2] for text in (long_text, other, long_text)] == [False] * 3
    assert first.index is None
    cache = make()
    assert [cache(text, model)[2] for text in (long_text, other, long_text)] == [False, False, True]
    assert make()(long_text, never)[2] and len(cache) == 2
    assert_consistent(cache)


def test_reopened_file(make):
    cache, model = make(), Model()
    for text in ("a 0", "b 60", "c 120"):
        cache(text, model, "tenant")
    cache.close()
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
    two.add_to_index(10**6, next(iter(two.indexes)), unit_vectors(embed("z 90")))  # as if one had removed it
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
        from test_semantic_cache import ProductionSemanticCache, embed
        cache = ProductionSemanticCache(embed, 1.0, sys.argv[1], clock=lambda: 0.0)
        for i in range(10**6):
            print(cache(f"q{i} {i % 3600 / 10}", str.upper, "tenant")[0], flush=True)
        """
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
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


# The encoder


@pytest.fixture(scope="module")
def encoder():
    """The real encoder, in a process where opening a connection fails."""
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError(f"a connection was tried: {args}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(socket.socket, "connect", refuse)
        yield sentence_transformer_embedder()


def test_encoder_gives_unit_vectors(encoder):
    one, two = encoder("Who kills Duncan?"), encoder(["Who kills Duncan?", "Sort a list"])
    assert one.shape == (384,) and two.shape == (2, 384) and one.dtype == np.float32
    assert np.abs(one - two[0]).max() < 1e-5
    assert np.linalg.norm(two, axis=1) == pytest.approx([1.0, 1.0], abs=1e-5)


def test_encoder_refuses_what_it_would_cut(encoder):
    """Case SC-5: one preamble of 300 words, two questions."""
    preamble = 300 * "once "
    with pytest.raises(TextTooLong, match="256"):
        encoder(preamble + "Who kills Duncan?")
    assert encoder(254 * "once ").shape == (384,)  # 256 with the two marks around it
    with pytest.raises(TextTooLong):
        encoder(["short", 255 * "once "])
    cache, model = SemanticCache(encoder, 0.5), Model()
    for question in ("Who kills Duncan?", "How do I sort a list?"):
        assert not cache(preamble + question, model)[2]
    assert len(model.asked) == 2


def test_raising_the_threshold_loses_the_paraphrase_first(encoder):
    """Case SC-1: what confirmation is for."""
    on, off = "How do I turn dark mode on?", "How do I turn dark mode off?"
    paraphrase = "How can I switch my phone to the dark theme?"
    for threshold in (0.6, 0.9):
        plain, confirmed = SemanticCache(encoder, threshold), SemanticCache(encoder, threshold, same_details)
        for cache in (plain, confirmed):
            cache(on, str.upper)
        assert plain(off, str.upper)[2] and not confirmed(off, str.upper)[2]
        assert SemanticCache(encoder, threshold).find(on, unit_vectors(encoder(on))) == (None, 0.0)
        assert confirmed(paraphrase, str.upper)[2] == (threshold < 0.65)


# The scripts


def test_script(checkpoint, tmp_path):
    figure = tmp_path / "curve.png"
    options = ["--quick", "--repeats", "1", "--json", "-", "--plot", figure]
    run = run_script("main_semantic_cache.py", *options, checkpoint=checkpoint)
    assert run.status == 0, run.stderr
    assert figure.stat().st_size > 1000 and "Loading" not in run.stderr
    assert run.json["checks"] and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    plain, confirmed = rows["cosine, test half"], rows["cosine, confirmed, test half"]
    assert plain["approximate"] and confirmed["approximate"]
    assert confirmed["precision"] > plain["precision"] and confirmed["at least"] < confirmed["precision"]
    assert plain["recall"] >= confirmed["recall"] > 0
    threshold = run.json["config"]["threshold"]
    tables = [lines for title, lines in run.json["sweeps"].items() if "confirmed; threshold" in title]
    chosen = [line for line in tables[0] if line["threshold"] == threshold]
    assert chosen[0]["precision"] >= 0.95
    recalls = [line["recall"] for line in tables[0]]
    assert recalls == sorted(recalls, reverse=True)
    assert sum(
        line["pairs"] for lines in run.json["sweeps"].values() for line in lines if "pairs" in line
    ) == len(load_pairs(PAIRS_PATH)[1])


def test_production_script(checkpoint):
    options = ["--quick", "--repeats", "1", "--json", "-"]
    run = run_script("main_semantic_cache_production.py", *options, checkpoint=checkpoint)
    assert run.status == 0, run.stderr
    assert run.json["checks"] and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    assert list(rows) == ["no cache", "exact match", "semantic", "semantic, confirmed", "production"]
    assert rows["no cache"]["hit_rate"] == 0
    assert rows["exact match"]["wrong_per_thousand"] == rows["no cache"]["wrong_per_thousand"] == 0
    assert (
        rows["semantic"]["hit_rate"]
        >= rows["semantic, confirmed"]["hit_rate"]
        >= rows["exact match"]["hit_rate"]
    )
    assert rows["semantic"]["wrong_per_thousand"] >= rows["semantic, confirmed"]["wrong_per_thousand"]
    assert rows["production"]["hit_rate"] == rows["semantic, confirmed"]["hit_rate"]
    assert 0 < rows["production"]["exact_rate"] <= rows["production"]["hit_rate"]
    assert all(rows[name]["approximate"] for name in ("semantic", "semantic, confirmed", "production"))
    hit_rates = [line["hit rate"] for line in next(iter(run.json["sweeps"].values()))]
    assert hit_rates == sorted(hit_rates)


@pytest.mark.parametrize(
    "script, option, value",
    [
        ("main_semantic_cache.py", "--target", "1.5"),
        ("main_semantic_cache.py", "--threshold", "2"),
        ("main_semantic_cache_production.py", "--threshold", "nan"),
    ],
)
def test_bad_options_are_one_line(script, option, value):
    run = run_script(script, "--quick", option, value)
    assert run.status == 2 and run.stdout == ""
    assert len(run.stderr.strip().splitlines()) == 1 and value in run.stderr
