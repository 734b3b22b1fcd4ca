"""The labelled pairs of questions and the streams made of them."""

import numpy as np
import pytest

from data.query_pairs import load_pairs, meanings, zipf_stream


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
