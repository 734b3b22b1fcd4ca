"""The semantic cache with a small made-up embedder; the real encoder and the script at the end."""

import math

import faiss
import numpy as np
import pytest
from helpers import run_script
from hypothesis import given
from hypothesis import strategies as st

from main_semantic_cache import SemanticCache, TextTooLong, sentence_transformer_embedder, unit_vectors
from semantic_confirmation import same_details


def embed(texts):
    """Direction by the angle in degrees that a text ends in: "a 20" -> (cos 20, sin 20), any length.

    A list only, as the contract says; a text without an angle, such as the probe, has 0 degrees.
    """
    assert isinstance(texts, list) and all(isinstance(text, str) for text in texts), texts
    if any(len(text) > 100 for text in texts):
        raise TextTooLong("more than 100 characters")
    last = [text.split()[-1] for text in texts]
    angles = [math.radians(float(word) if word.lstrip("-")[0].isdigit() else 0.0) for word in last]
    return 3.0 * np.array([[math.cos(angle), math.sin(angle)] for angle in angles])


def by_table(vectors):
    """embed_fn that looks texts up; an unknown one, such as the probe, gets the first vector."""
    return lambda texts: [vectors.get(text, next(iter(vectors.values()))) for text in texts]


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


# As the post calls it


def test_as_the_post_calls_it():
    """A list of strings goes in, unit vectors [n, dim] come out; the index is there from the start."""
    calls = []

    def embed_fn(texts):
        assert isinstance(texts, list)
        calls.append(texts)
        angles = np.radians([10.0 * len(text) for text in texts])
        return np.stack([np.cos(angles), np.sin(angles), 0 * angles], axis=1).astype(np.float32)

    cache = SemanticCache(embed_fn, 0.99)
    assert isinstance(cache.index, faiss.IndexFlatIP) and cache.index.d == 3 and cache.index.ntotal == 0
    assert len(calls) == 1 and len(calls[0]) == 1  # one probe
    asked = []
    answers = [
        cache(query, lambda query: asked.append(query) or f"answer to {query}")
        for query in ("one", "two", "three")
    ]
    assert [hit for _, _, hit in answers] == [False, True, False] and asked == ["one", "three"]
    assert answers[1] == ("answer to one", pytest.approx(1.0), True)
    assert calls[1:] == [["one"], ["two"], ["three"]] and cache.index.ntotal == 2


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 1, 3), ()])
def test_an_embedder_that_does_not_give_a_vector_a_text_is_refused(shape):
    with pytest.raises(ValueError, match="list of one text"):
        SemanticCache(lambda texts: np.ones(shape, np.float32), 0.5)
    cache = SemanticCache(lambda texts: np.ones((1, 3), np.float32), 0.5)
    cache.embed_fn = lambda texts: np.ones(shape, np.float32)
    with pytest.raises(ValueError, match="for one text"):
        cache("question", never)
    assert cache.index.ntotal == 0


@pytest.mark.parametrize("empty", [None, "", "  ", "\n\t", b"", [], ()])
def test_an_empty_answer_is_handed_back_and_not_stored(empty):
    """A model that fails once must not be silent for good, for the question nor for what resembles it."""
    cache = SemanticCache(embed, cosine(15))
    for query in ("a 0", "a 0", "b 5"):
        assert cache(query, lambda query: empty) == (empty, 0.0, False)
    assert cache.index.ntotal == len(cache.answers) == len(cache.queries) == 0
    assert cache("a 0", str.upper)[0] == "A 0" and cache("b 5", never)[0] == "A 0"


@pytest.mark.parametrize("answer", [0, False, "0", ["x"], b"x"])
def test_an_answer_that_says_something_is_stored(answer):
    cache = SemanticCache(embed, cosine(15))
    assert [cache("a 0", lambda query: answer)[2] for _ in range(2)] == [False, True]


def test_the_class_says_that_a_question_must_stand_alone():
    assert "stand alone" in SemanticCache.__doc__


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
    cache = SemanticCache(lambda texts: [vector], 1.0)
    assert [cache("text", str.upper)[2] for _ in range(2)] == [False, True]


def test_nearest_by_angle_and_not_by_length():
    """Case SC-3: (3, 3) has the larger raw product with (1, 0)."""
    vectors = {"one": (1.0, 0.0), "long": (3.0, 3.0), "asked": (2.0, 0.0)}
    cache = SemanticCache(by_table(vectors), 0.99)
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
    assert unit_vectors(vectors[:1]).shape == (1, 4)
    faiss.IndexFlatIP(4).add(unit)


@pytest.mark.parametrize("bad", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_embeddings_without_direction_are_refused(bad):
    with pytest.raises(ValueError, match="no direction"):
        SemanticCache(lambda texts: np.array([bad]), 0.5)("text", never)


@pytest.mark.parametrize("threshold", [1.01, -2, math.nan])
def test_threshold_is_a_cosine(threshold):
    with pytest.raises(ValueError, match="between -1 and 1"):
        SemanticCache(embed, threshold)


def test_vectors_of_another_width_are_refused_before_the_model_is_asked():
    vectors = {"a": [1.0, 0.0], "b": [1.0, 0.0, 0.0], "c": [1.0]}
    cache = SemanticCache(by_table(vectors), 0.5)
    cache("a", str.upper)
    for text in "bc":
        with pytest.raises(ValueError, match="another encoder"):
            cache(text, never)
    assert cache("a", never) == ("A", pytest.approx(1.0), True)


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
    one, two = encoder(["Who kills Duncan?"]), encoder(["Who kills Duncan?", "Sort a list"])
    assert one.shape == (1, 384) and two.shape == (2, 384) and one.dtype == two.dtype == np.float32
    assert np.abs(one[0] - two[0]).max() < 1e-5
    assert np.linalg.norm(two, axis=1) == pytest.approx([1.0, 1.0], abs=1e-5)


def test_encoder_refuses_what_it_would_cut(encoder):
    """Case SC-5: one preamble of 300 words, two questions."""
    preamble = 300 * "once "
    with pytest.raises(TextTooLong, match="256"):
        encoder([preamble + "Who kills Duncan?"])
    assert encoder([254 * "once "]).shape == (1, 384)  # 256 with the two marks around it
    with pytest.raises(TypeError, match="list"):
        encoder("Who kills Duncan?")
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
        assert SemanticCache(encoder, threshold).find(on, unit_vectors(encoder([on]))) == (None, 0.0)
        assert confirmed(paraphrase, str.upper)[2] == (threshold < 0.65)


# The script


def test_script(distilled_checkpoint):
    options = {
        "checkpoint": distilled_checkpoint,
        "fresh": True,
    }  # a bar is switched off before it is imported
    run = run_script("main_semantic_cache.py", "--quick", "--json", "-", **options)
    assert run.status == 0, run.stderr
    assert "Loading" not in run.stderr
    assert run.json["checks"] and all(run.json["checks"].values())
    rows = {row["method"]: row for row in run.json["rows"]}
    assert list(rows) == ["no cache", "exact match", "semantic"]
    assert rows["no cache"]["baseline"] and rows["no cache"]["hit_rate"] == 0
    assert rows["exact match"]["wrong_per_thousand"] == rows["no cache"]["wrong_per_thousand"] == 0
    assert rows["semantic"]["hit_rate"] >= rows["exact match"]["hit_rate"]
    assert rows["semantic"]["recall"] >= rows["exact match"]["recall"] and rows["semantic"]["precision"] <= 1
    assert rows["semantic"]["approximate"] and rows["exact match"]["same_output"]


def test_bad_option_is_one_line():
    run = run_script("main_semantic_cache.py", "--quick", "--threshold", "2", fresh=True)
    assert run.status == 2 and run.stdout == ""
    assert len(run.stderr.strip().splitlines()) == 1 and "2" in run.stderr
