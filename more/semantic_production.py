"""Semantic cache for a service: exact match in front, tenants, expiry, eviction, a file that survives.

Idea: the class of main_semantic_cache.py plus the difference. A question asked in the same words is found by
its hash, without the encoder. Each tenant, model, set of sampling parameters and conversation has an index of
its own, so that no answer crosses. Entries expire, the least recently used leave when it is full, and all of
it is in a SQLite file, from which the indexes are rebuilt.

The exact layer is exact for greedy decoding (with sampling it repeats one sample); the semantic layer never
is. Wins where many ask the same; loses the work of writing each answer to a file, and where the room is
small it forgets first what is rarely asked. GPTlite stands in, by its time, for a model that can answer.

Run: python more/semantic_production.py            (--n-queries 5000: a longer stream)

Source: Bang, GPTCache, 2023; Schroeder et al., vCache, 2025; Douze et al., The Faiss library, 2024.
"""

import contextlib
import hashlib
import json
import sqlite3
import time

import faiss
import numpy as np

import _root  # noqa: F401 (the files above become importable)
from main_semantic_cache import SemanticCache, TextTooLong, is_empty
from semantic_confirmation import same_details

SCHEMA = """
PRAGMA journal_mode = WAL;     -- a killed process loses nothing it committed,
PRAGMA synchronous = NORMAL;   -- a power cut at most the last entries
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given twice, so an id in an index means one entry
    scope TEXT NOT NULL, key TEXT NOT NULL UNIQUE, query TEXT NOT NULL, answer TEXT NOT NULL,
    vector BLOB,  -- float32 [dim]; NULL where the encoder would cut the text
    expires REAL NOT NULL, used INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_expiry ON entries (expires);
CREATE INDEX IF NOT EXISTS by_use ON entries (used);"""
OF_EMBEDDER = "vector IS NOT NULL AND json_extract(scope, '$[0]') = ?"
LEAST_USED = "id IN (SELECT id FROM entries ORDER BY used DESC LIMIT -1 OFFSET ?)"  # beyond so many
USED_NOW = "UPDATE entries SET used = (SELECT MAX(used) + 1 FROM entries) WHERE id = ?"


def digest(value):
    """A name of anything that JSON can hold; None stays None."""
    text = json.dumps(value, sort_keys=True)
    return None if value is None else hashlib.sha256(text.encode()).hexdigest()


class ProductionSemanticCache(SemanticCache):
    """SemanticCache plus what a service needs; used by one thread.

    cache(query, generate_fn, tenant, model, sampling, context) -> (answer, similarity, hit). Answers are
    text: what is none (None of a model that failed, a text of blanks) is handed back and not stored.

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
        self.counts = {"exact": 0, "semantic": 0, "miss": 0, "trouble": 0}
        self.indexes = {}  # scope -> IndexIDMap2: removing a vector leaves the ids of the others alone
        try:
            self.db = sqlite3.connect(path, timeout=1.0)  # seconds to wait for other processes
            self.db.executescript(SCHEMA)
            self.remove("expires <= ?", self.clock())
            self.remove(LEAST_USED, capacity)
            stored = f"SELECT id, scope, vector FROM entries WHERE {OF_EMBEDDER}"
            for entry, scope, vector in self.db.execute(stored, (embedder,)):
                vector = np.frombuffer(vector, np.float32)[None]  # [1, dim]
                if vector.shape[1] != self.index.d or not abs(np.linalg.norm(vector) - 1) < 1e-3:
                    raise ValueError(f"the vector of entry {entry} is damaged, or from another encoder")
                self.add_to_index(entry, scope, vector)
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot serve as the cache's database: {error}") from error

    def __call__(self, query, generate_fn, tenant="", model="", sampling=None, context=None):
        """tenant: any name; sampling: the parameters of decoding, as JSON can hold them; context: what the
        query needs to be understood, such as a conversation, None for one that stands alone; model: a name of
        the very weights, such as their sha256: under a product's name old answers would be served on."""
        scope = json.dumps([self.embedder, tenant, model, sampling, digest(context)], sort_keys=True)
        key, vector, similarity = digest([scope, query]), None, 0.0
        with self.trouble_counted():
            self.remove("expires <= ?", self.clock())
            exact = self.db.execute("SELECT id, answer FROM entries WHERE key = ?", (key,)).fetchone()
            if exact:
                return self.hit("exact", *exact, 1.0)
            with contextlib.suppress(TextTooLong):  # the exact layer may still serve it
                vector = self.embed(query)  # [1, dim]
                near, similarity = self.find(query, vector, self.indexes.get(scope))
                found = "SELECT id, answer FROM entries WHERE id = ?"
                if near and (entry := self.db.execute(found, (near,)).fetchone()):
                    return self.hit("semantic", *entry, similarity)
        answer = generate_fn(query)
        if isinstance(answer, str) and not is_empty(answer):
            with self.trouble_counted():
                self.store(scope, key, query, answer, vector)
        self.counts["miss"] += 1
        return answer, similarity, False

    @contextlib.contextmanager
    def trouble_counted(self):
        try:
            yield
        except sqlite3.Error:  # a file that is full, locked or gone costs hits, never an answer
            self.counts["trouble"] += 1

    def hit(self, layer, entry, answer, similarity):
        with self.trouble_counted(), self.db:
            self.db.execute(USED_NOW, (entry,))
        self.counts[layer] += 1
        return answer, similarity, True

    def may_serve(self, query, row):
        """False as well where another process has removed the entry: the file knows better than the index."""
        stored = self.db.execute("SELECT query FROM entries WHERE id = ?", (row,)).fetchone()
        for index in [] if stored else self.indexes.values():  # its vector must not stand in others' way
            index.remove_ids(np.array([row], dtype=np.int64))
        return stored is not None and (self.confirm is None or self.confirm(query, *stored))

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
        self.remove(LEAST_USED, self.capacity)

    def add_to_index(self, entry, scope, vector):
        if scope not in self.indexes:
            self.indexes[scope] = faiss.IndexIDMap2(faiss.IndexFlatIP(self.index.d))
        self.indexes[scope].add_with_ids(vector, np.array([entry], dtype=np.int64))

    def remove(self, condition, value):
        """Removes entries from the file and from the indexes."""
        rows = self.db.execute(f"SELECT id, scope FROM entries WHERE {condition}", (value,)).fetchall()
        if rows:
            with self.db:
                self.db.executemany("DELETE FROM entries WHERE id = ?", [(entry,) for entry, _ in rows])
        for entry, scope in rows:
            if scope in self.indexes:
                self.indexes[scope].remove_ids(np.array([entry], dtype=np.int64))
        empty = [scope for scope, index in self.indexes.items() if index.ntotal == 0]
        for scope in empty:  # conversations end, and their indexes must not stay
            del self.indexes[scope]

    def __len__(self):
        return self.db.execute("SELECT COUNT(*) FROM entries").fetchone()[0]


if __name__ == "__main__":
    import os

    os.environ.setdefault("TQDM_DISABLE", "1")  # the encoder shows a bar when it loads
    import tempfile
    from functools import cache as remember
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from data.query_pairs import load_pairs, meanings, zipf_stream
    from gptlite_kvcache import GPTlite_KVCache
    from inference_calls import STREAM_COLUMNS, THRESHOLD, no_cache, replay
    from inference_utils import Timer, median_ms
    from main_kvcache import generate_kvcache
    from main_semantic_cache import check_threshold, sentence_transformer_embedder

    quick = {"n_queries": 40, "n_tokens": 8}
    parser = harness.options(__doc__, repeats=3, plot=False, data=False, quick=quick, n_tokens=64)
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="least cosine of a hit")
    parser.add_argument("--n-queries", type=harness.positive_int, default=1000, help="length of the stream")
    with harness.script(parser) as args, tempfile.TemporaryDirectory() as folder:
        check_threshold(args.threshold)  # before anything is loaded
        (model,), n_queries = harness.load_models(args, GPTlite_KVCache), args.n_queries
        embed = sentence_transformer_embedder(device=args.device)
        meaning = meanings(load_pairs()[1])  # other topics than those the threshold was chosen on
        stream = zipf_stream(meaning, n_queries, args.seed)
        prompt = harness.load_text(args).prompt(stream[0])  # [1, T]
        report = harness.Report(args, "semantic service", model, STREAM_COLUMNS, threshold=args.threshold)
        answer = partial(generate_kvcache, model, prompt, args.n_tokens, model.seqlen)
        answer_ms = median_ms(answer, args.repeats, args.device)
        opened, weights, now = [], harness.sha256_of(args.checkpoint), [time.time()]

        def production(embed_fn=embed, **options):
            path = f"{folder}/{len(opened)}.sqlite"
            opened.append(ProductionSemanticCache(embed_fn, args.threshold, path, **options))
            return partial(opened[-1], model=weights)

        # The stream; a miss costs the model's time for an answer
        caches = {"no cache": no_cache, "semantic": partial(SemanticCache, embed, args.threshold)}
        caches["semantic, confirmed"] = partial(caches["semantic"], confirm=same_details)
        caches["production"] = production
        figures = replay(caches, stream, meaning, answer_ms, args.repeats)
        served, path = opened[-1], f"{folder}/{len(opened) - 1}.sqlite"
        n_stored, n_vectors = len(served), sum(index.ntotal for index in served.indexes.values())
        served.db.close()  # the file is whole now
        n_bytes = os.path.getsize(path) / n_stored
        report.check(f"{n_stored} entries of {n_bytes:.0f} bytes, as many vectors", n_stored == n_vectors)
        figures["production"]["exact_rate"] = served.counts["exact"] / n_queries
        same = dict.fromkeys(caches, "approximate") | {"no cache": True}
        rows = [report.row(n, baseline=same[n] is True, same_output=same[n], **figures[n]) for n in caches]
        none, _, confirmed, last = rows
        report.check("it hits as often as the class confirmed", last["hit_rate"] == confirmed["hit_rate"])

        # What a service relies on
        with Timer() as timer:
            again = ProductionSemanticCache(embed, args.threshold, path, clock=lambda: now[0])
        stored = again.db.execute("SELECT query, answer FROM entries").fetchall()
        same = [again(query, str, "", weights) == (answer, 1.0, True) for query, answer in stored]
        report.check("after a restart every stored answer is found", all(same) and len(same) == n_stored)
        scopes = [("", weights), ("tenant B", weights), ("", "other"), ("", weights, {"temperature": 0.7})]
        found = [again(stream[0], str, *scope)[2] for scope in [*scopes, ("", weights, None, "a chat")]]
        report.check("no answer crosses tenants, models, sampling or chats", found == [True] + 4 * [False])
        now[0] += 2 * again.ttl_seconds
        report.check("nothing is served after it has expired", not again(stream[0], str, "", weights)[2])
        left = len(again), sum(index.ntotal for index in again.indexes.values())
        report.check("what has expired is gone from the file and the indexes", left == (1, 1))
        vector = remember(lambda text: embed([text]))
        rooms = sorted({max(n_stored // 2**k, 1) for k in range(5)})
        small = {n: partial(production, lambda texts: vector(*texts), capacity=n) for n in rooms}
        hits = [row["hit_rate"] for row in replay(small, stream, meaning, answer_ms).values()]
        lines = zip(rooms, map(len, opened[-len(rooms) :]), hits, strict=True)
        lines = [{"capacity": room, "entries": n, "hit rate": rate} for room, n, rate in lines]
        report.sweep("Hit rate over the capacity, least recently used out", lines)
        report.check("no cache exceeds its capacity", all(x["entries"] <= x["capacity"] for x in lines))
        report.why(words.compare(last, confirmed, "latency_ms") + words.compare(last, none, "latency_ms"))
        report.why(words.pays_back(timer.ms, answer_ms, "ms", "answers found again"))
        report.finish()
