"""Reads the labelled pairs of questions in query_pairs.tsv, and makes streams of questions of them.

Each line is a topic, 1 if both questions have the same answer or 0, the kind of pair, and the two questions.
About half of the pairs are traps on purpose: an opposite, a negation, another number, name or object. Every
other topic is for choosing what a cache needs (tuning), the rest for judging it (test).
"""

from collections import namedtuple
from pathlib import Path

import numpy as np

PAIRS_PATH = Path(__file__).resolve().parent / "query_pairs.tsv"

Pair = namedtuple("Pair", "topic same kind query other")


def load_pairs(path=PAIRS_PATH):
    """Reads labelled pairs of questions: topic, 1 for the same answer or 0, kind, query, other, by tabs.

    Returns: pairs of every other topic, for tuning, and those of the rest, for testing. Raises ValueError
        with the line where a file is damaged.
    """
    lines = Path(path).read_text("utf-8").splitlines()
    if not lines or lines[0].split("\t") != list(Pair._fields):
        raise ValueError(f"{path}: the first line must name the columns {', '.join(Pair._fields)}")
    pairs = []
    for number, line in enumerate(lines[1:], 2):
        fields = line.split("\t")
        if len(fields) != len(Pair._fields) or fields[1] not in ("0", "1"):
            raise ValueError(f"{path}, line {number}: five columns by tabs, the second 0 or 1")
        pairs.append(Pair(fields[0], fields[1] == "1", *fields[2:]))
    topics = list(dict.fromkeys(pair.topic for pair in pairs))
    return tuple([p for p in pairs if topics.index(p.topic) % 2 == half] for half in (0, 1))


def meanings(pairs):
    """{question: the question that stands for all with its answer}, from the pairs with the same answer."""
    meaning = {text: text for pair in pairs for text in (pair.query, pair.other)}
    for pair in pairs:
        if pair.same:
            one, other = meaning[pair.query], meaning[pair.other]
            meaning.update({text: one for text, group in meaning.items() if group == other})
    return meaning


def zipf_stream(meaning, n_queries, seed):
    """Questions as users ask them: the r-th most wanted answer comes with weight 1/r, in any wording."""
    random = np.random.default_rng(seed)
    wordings = {}
    for text, group in meaning.items():
        wordings.setdefault(group, []).append(text)
    groups = random.permutation(sorted(wordings))
    weights = 1 / np.arange(1, len(groups) + 1)
    drawn = random.choice(groups, n_queries, p=weights / weights.sum())
    return [wordings[group][random.integers(len(wordings[group]))] for group in drawn]
