"""Semantic cache for a service: exact match in front, tenants, expiry, eviction, a file that survives.

The first class plus the difference. A question asked in the same words is found by its hash, without the
encoder. Each tenant, model and set of sampling parameters has an index of its own, so that no answer crosses.
Entries expire, the least recently used leave when it is full, and everything is in a SQLite file, from which
the indexes are rebuilt. The exact layer is exact for greedy decoding (with sampling it repeats one sample);
the semantic layer never is. GPTlite stands in, by its time, for a model that can answer.

Run: python main_semantic_cache_production.py            (--n-queries 5000: a longer stream)

Source: Bang, GPTCache, 2023; Schroeder et al., vCache, 2025; Douze et al., The Faiss library, 2024.
"""

import hashlib
import json
import sqlite3
import time
from collections import Counter
from pathlib import Path

import faiss
import numpy as np

from main_semantic_cache import ROUNDING, SemanticCache, TextTooLong, check_width, unit_vectors
from main_semantic_confirmation import same_details

SCHEMA = """
PRAGMA journal_mode = WAL;     -- a killed process loses nothing it committed,
PRAGMA synchronous = NORMAL;   -- a power cut at most the last entries
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given twice, so an id in an index means one entry
    scope TEXT NOT NULL, key TEXT NOT NULL UNIQUE, query TEXT NOT NULL, answer TEXT NOT NULL,
    vector BLOB,  -- float32 [d]; NULL where the encoder would cut the text
    expires REAL NOT NULL, used INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_expiry ON entries (expires);
CREATE INDEX IF NOT EXISTS by_use ON entries (used);
"""


def weights_name(checkpoint):
    """The sha256 of a file of weights: a name for a model that changes when its weights do."""
    return hashlib.sha256(Path(checkpoint).read_bytes()).hexdigest()


class ProductionSemanticCache(SemanticCache):
    """SemanticCache plus what a service needs; used by one thread.

    cache(query, generate_fn, tenant, model, sampling) -> (answer, similarity, hit). Answers are text: what
    is none (None of a model that failed) is handed back and not stored.

    Args: path: the SQLite file, made if it is missing; embedder: name of embed_fn, another one does not find
        this one's entries; capacity: entries of all tenants; ttl_seconds: life of an entry; clock: seconds.
    Raises ValueError where the file is no such database, or a vector in it is damaged.
    """

    def __init__(
        self,
        embed_fn,
        threshold,
        path,
        confirm=same_details,
        embedder="all-MiniLM-L6-v2",
        capacity=10_000,
        ttl_seconds=86_400.0,
        clock=time.time,
    ):
        super().__init__(embed_fn, threshold, confirm)
        if capacity < 1 or not ttl_seconds > 0:
            raise ValueError(f"capacity {capacity} and ttl_seconds {ttl_seconds} must be positive")
        self.embedder, self.capacity, self.ttl_seconds, self.clock = embedder, capacity, ttl_seconds, clock
        self.counts = Counter()  # exact, semantic, miss
        self.indexes = {}  # scope -> IndexIDMap2: removing a vector leaves the ids of the others alone
        try:
            self.db = sqlite3.connect(path)
            self.db.executescript(SCHEMA)
            self.remove("expires <= ?", self.clock())
            self.evict()
            stored = "SELECT id, scope, vector FROM entries WHERE vector IS NOT NULL"
            for entry, scope, vector in self.db.execute(stored):
                vector = np.frombuffer(vector, np.float32)[None]  # [1, d]
                if not abs(np.linalg.norm(vector) - 1) < 1e-3:  # cut, or not finite
                    raise ValueError(f"the vector of entry {entry} is damaged")
                self.add_to_index(entry, scope, vector)
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot serve as the cache's database: {error}") from error

    def __call__(self, query, generate_fn, tenant="", model="", sampling=None):
        """tenant: any name; sampling: the parameters of decoding, anything that JSON can hold.

        model: a name of the very weights (see weights_name). Under a name that stays when the weights are
        replaced, such as that of a product or a file, the old model's answers go on being served.
        """
        self.remove("expires <= ?", self.clock())
        scope = json.dumps([self.embedder, tenant, model, sampling], sort_keys=True)
        key = hashlib.sha256(json.dumps([scope, query]).encode()).hexdigest()
        exact = self.db.execute("SELECT id, answer FROM entries WHERE key = ?", (key,)).fetchone()
        if exact:
            return self.hit("exact", *exact, 1.0)
        try:
            vector = unit_vectors(self.embed_fn(query))  # [1, d]
            near, similarity = self.find(query, vector, scope)
        except TextTooLong:
            vector, near, similarity = None, None, 0.0  # the exact layer may still serve it
        if near:
            return self.hit("semantic", *near, similarity)
        answer = generate_fn(query)
        if isinstance(answer, str):
            self.store(scope, key, query, answer, vector)
        self.counts["miss"] += 1
        return answer, similarity, False

    def hit(self, layer, entry, answer, similarity):
        with self.db:
            self.db.execute(
                "UPDATE entries SET used = (SELECT MAX(used) + 1 FROM entries) WHERE id = ?", (entry,)
            )
        self.counts[layer] += 1
        return answer, similarity, True

    def find(self, query, vector, scope):
        """As in the first class, in the index of the scope: (id, answer) or None, and the cosine."""
        index = self.indexes.get(scope)
        if index is None or index.ntotal == 0:
            return None, 0.0
        check_width(vector, index)
        found = index.search(vector, min(self.n_candidates, index.ntotal))
        similarities, ids = (x[0].tolist() for x in found)  # [k] each, best first
        for entry, similarity in zip(ids, similarities, strict=True):
            if similarity < self.threshold - ROUNDING:
                break
            row = self.db.execute("SELECT query, answer FROM entries WHERE id = ?", (entry,)).fetchone()
            # no row: another process has removed the entry, the file knows better than the index
            if row and (self.confirm is None or self.confirm(query, row[0])):
                return (entry, row[1]), similarity
        return None, similarities[0]

    def store(self, scope, key, query, answer, vector):
        """In the file first, then in the index; at last what exceeds the capacity leaves."""
        self.remove("key = ?", key)  # generate_fn, or another process, may have stored it meanwhile
        blob = None if vector is None else vector.tobytes()
        with self.db:
            entry = self.db.execute(
                "INSERT INTO entries (scope, key, query, answer, vector, expires, used)"
                " VALUES (?, ?, ?, ?, ?, ?, (SELECT COALESCE(MAX(used), 0) + 1 FROM entries))",
                (scope, key, query, answer, blob, self.clock() + self.ttl_seconds),
            ).lastrowid
        if vector is not None:
            self.add_to_index(entry, scope, vector)
        self.evict()

    def add_to_index(self, entry, scope, vector):
        if scope not in self.indexes:
            self.indexes[scope] = faiss.IndexIDMap2(faiss.IndexFlatIP(vector.shape[1]))
        check_width(vector, self.indexes[scope])
        self.indexes[scope].add_with_ids(vector, np.array([entry], dtype=np.int64))

    def evict(self):
        """The least recently used entries leave until the capacity holds."""
        if len(self) > self.capacity:
            oldest = "id IN (SELECT id FROM entries ORDER BY used LIMIT ?)"
            self.remove(oldest, len(self) - self.capacity)

    def remove(self, condition, value):
        """Removes entries from the file and from the indexes."""
        rows = self.db.execute(f"SELECT id, scope FROM entries WHERE {condition}", (value,)).fetchall()
        if rows:
            with self.db:
                self.db.executemany("DELETE FROM entries WHERE id = ?", [(entry,) for entry, _ in rows])
        for entry, scope in rows:
            if scope in self.indexes:
                self.indexes[scope].remove_ids(np.array([entry], dtype=np.int64))

    def __len__(self):
        return self.db.execute("SELECT COUNT(*) FROM entries").fetchone()[0]

    def close(self):
        self.db.close()


if __name__ == "__main__":
    import os

    os.environ.setdefault("TQDM_DISABLE", "1")  # the encoder shows a bar when it loads
    import tempfile
    from functools import partial

    import torch

    import inference_report as rep
    import inference_utils as utils
    from data.query_pairs import load_pairs, meanings, zipf_stream
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters
    from gptlite_kvcache import GPTlite_KVCache
    from main_kvcache import generate_kvcache
    from main_semantic_cache import STREAM_COLUMNS, THRESHOLD, replay, sentence_transformer_embedder

    parser = rep.options(__doc__, plot=False, data=False)
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="least cosine of a hit")
    parser.add_argument("--n-queries", type=rep.positive_int, default=1000, help="length of the stream")
    parser.add_argument("--n-tokens", type=rep.positive_int, default=64, help="tokens of an answer")
    with rep.script(parser) as args, tempfile.TemporaryDirectory() as folder:
        p, dev, quick, threshold = get_gptlite_model_parameters(), args.device, args.quick, args.threshold
        SemanticCache(None, threshold)  # refuses what is no cosine before anything is loaded
        n_queries, n_tokens = (min(args.n_queries, 150), 8) if quick else (args.n_queries, args.n_tokens)
        vocab_size, _, _, encode, _ = get_shakespeare_data()
        model = utils.load_model(GPTlite_KVCache, vocab_size, args.checkpoint).to(dev, args.dtype)
        embed = sentence_transformer_embedder(device=dev)
        meaning = meanings(load_pairs()[1])  # other topics than those the threshold was chosen on
        stream = zipf_stream(meaning, n_queries, args.seed)
        prompt, T = torch.tensor([encode(stream[0])], device=dev), len(stream[0])  # [1, T]
        run = (model, prompt, n_tokens, p.seqlen)
        answer_ms = utils.median_ms(lambda: generate_kvcache(*run), args.repeats, dev)
        sizes = {"batch_size": 1, "prompt_len": T, "n_tokens": n_tokens, "threshold": threshold}
        sizes["n_queries"] = n_queries
        report = rep.Report(args, "semantic cache, production", model, STREAM_COLUMNS, **sizes)

        # The stream; a miss costs the model's time for an answer
        path, weights = os.path.join(folder, "cache.sqlite"), weights_name(args.checkpoint)
        production = ProductionSemanticCache(embed, threshold, path)
        caches = {
            "no cache": lambda query, generate_fn: (generate_fn(query), 0.0, False),
            "semantic, confirmed": SemanticCache(embed, threshold, same_details),
            "production": partial(production, model=weights),
        }
        embed(stream[0])  # warm-up
        rows = {name: replay(cache, stream, meaning, answer_ms) for name, cache in caches.items()}
        rows["production"]["exact_rate"] = production.counts["exact"] / n_queries
        for name, row in rows.items():
            same = True if name == "no cache" else "approximate"
            report.row(name, baseline=same is True, same_output=same, **row)
        row, first = rows["production"], rows["semantic, confirmed"]
        report.check("it hits as often as the first class, confirmed", row["hit_rate"] == first["hit_rate"])

        # What a service relies on
        n_stored, n_vectors = len(production), sum(index.ntotal for index in production.indexes.values())
        report.check(f"{n_stored} entries and as many vectors", n_stored == n_vectors)
        production.close()
        n_bytes = os.path.getsize(path) / n_stored
        now = [time.time()]
        with utils.Timer() as timer:
            reopened = ProductionSemanticCache(embed, threshold, path, clock=lambda: now[0])
        stored = reopened.db.execute("SELECT query, answer FROM entries").fetchall()
        same = [reopened(query, str, "", weights) == (answer, 1.0, True) for query, answer in stored]
        report.check("after a restart every stored answer is found", all(same) and len(same) == n_stored)
        scopes = [("", weights), ("tenant B", weights), ("", "other"), ("", weights, {"temperature": 0.7})]
        found = [reopened(stream[0], str, *scope)[2] for scope in scopes]
        report.check("no answer crosses tenants, models or sampling", found == [True] + 3 * [False])
        now[0] += reopened.ttl_seconds + 1
        report.check("nothing is served after it has expired", not reopened(stream[0], str, "", weights)[2])
        left = len(reopened), sum(index.ntotal for index in reopened.indexes.values())
        report.check("what has expired is gone from the file and the indexes", left == (1, 1))
        reopened.close()
        vectors, lines = {text: unit_vectors(embed(text)) for text in set(stream)}, []
        for capacity in sorted({max(n_stored // 2**k, 1) for k in range(5)}):
            small = ProductionSemanticCache(vectors.get, threshold, ":memory:", capacity=capacity)
            n_hits = sum(small(query, meaning.get)[2] for query in stream)
            lines.append({"capacity": capacity, "entries": len(small), "hit rate": n_hits / n_queries})
            small.close()
        report.check("no cache exceeds its capacity", all(x["entries"] <= x["capacity"] for x in lines))
        report.sweep("Hit rate over the capacity, least recently used out", lines)

        limits = rep.measure_ceilings(dev, args.dtype)
        steps = [(T, 0), *((1, n_past) for n_past in range(T, T + n_tokens - 1))]
        costs = [rep.forward_cost(p, vocab_size, 1, *step, args.dtype) for step in steps]
        least = sum(rep.lower_bound_ms(cost, limits) for cost in costs)
        cache_ms = row["latency_ms"] - answer_ms * (1 - row["hit_rate"])
        report.why(
            f"An answer takes the stand-in {answer_ms:.0f} ms (at least {least:.0f} ms here, share reached "
            f"{rep.share_of(least, answer_ms)}), the cache {cache_ms:.1f} ms a question: it pays above "
            f"{cache_ms / answer_ms:.1%} hits. Every miss is charged the model's time."
        )
        report.why(
            f"The hash in front serves {row['exact_rate']:.0%} without the encoder. An entry takes "
            f"{n_bytes:.0f} bytes on disk, {vectors[stream[0]].nbytes} of them the vector; opening "
            f"{n_stored} took {timer.ms:.0f} ms. With less room less is found, what repeats rarely least."
        )
        report.finish()
