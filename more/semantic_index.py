"""Indexes of a semantic cache: the nearest stored question without comparing all, and what that loses.

Idea: a flat index compares a question with every stored one, so its time grows with the cache. IVF sorts the
vectors into cells and searches a few of them; HNSW walks a graph of neighbours; PQ (product quantisation)
stores each part of a vector as the number of its nearest pattern, one byte instead of some floats.

Approximate but for the flat one: a nearest neighbour that is missed is a hit that is lost. PQ's cosines are
estimates too, so its candidates are scored again with the stored vectors, which may lie on disk. Wins time
from some thousand vectors on, PQ memory. Loses the time to build, recall, and simplicity: IVF and PQ must be
trained, HNSW cannot remove. Beside the encoder a flat search is short for long.

Run: python more/semantic_index.py            (--n-vectors 50000: more lines of the plays, encoded first)

Source: Douze et al., The Faiss Library, 2024; Malkov and Yashunin, Hierarchical Navigable Small World Graphs,
2018; Jegou et al., Product Quantization for Nearest Neighbor Search, 2011.
"""

import faiss
import numpy as np

import _root  # noqa: F401 (the files above become importable)
from main_semantic_cache import ROUNDING, unit_vectors


class FlatIndex:
    """Vectors by ids of one's own, all compared. Raises ValueError for an id added twice, or not there."""

    def __init__(self, dim):
        self.known, self.index = set(), self.make(dim)

    def make(self, dim):
        return faiss.IndexIDMap2(faiss.IndexFlatIP(dim))

    def train(self, vectors):
        """What an index must know of typical vectors [n, dim] before it can take any; n at least 256."""
        self.index.train(unit_vectors(vectors))

    def add(self, ids, vectors):
        """ids: list of n integers; vectors [n, dim]."""
        if len(set(ids)) < len(ids) or self.known & set(ids):
            raise ValueError("an id is there already: remove it first")
        self.place(np.array(ids, dtype=np.int64), unit_vectors(vectors))
        self.known |= set(ids)

    def place(self, ids, vectors):
        self.index.add_with_ids(vectors, ids)

    def remove(self, ids):
        """Takes vectors out; none of them is found again."""
        if not set(ids) <= self.known:
            raise ValueError(f"no vector has the id {min(set(ids) - self.known)}")
        self.known -= set(ids)
        self.forget(np.array(ids, dtype=np.int64))

    def forget(self, ids):
        self.index.remove_ids(ids)

    def search(self, queries, k):
        """The k nearest of each query [n, dim]: cosines [n, k] and ids [n, k], -1 where there are fewer."""
        return self.index.search(unit_vectors(queries), k)

    @property
    def n_bytes(self):
        """What the index holds, as it would be written to a file."""
        return faiss.serialize_index(self.index).nbytes


class IVFIndex(FlatIndex):
    """Vectors sorted into cells around centres, of which the n_probes nearest are searched."""

    n_probes = 8

    def __init__(self, dim, n_cells):
        self.n_cells = n_cells
        super().__init__(dim)

    def make(self, dim):
        self.centres = faiss.IndexFlatIP(dim)  # kept here: faiss holds no reference of its own
        index = faiss.IndexIVFFlat(self.centres, dim, self.n_cells, faiss.METRIC_INNER_PRODUCT)
        index.nprobe, index.cp.min_points_per_centroid = self.n_probes, 1  # fewer are no reason to warn
        return index


class PQIndex(FlatIndex):
    """Each vector as n_parts bytes, each the number of one of 256 patterns; cosines are estimates."""

    n_parts = 48  # divides the length of the vectors

    def make(self, dim):
        index = faiss.IndexPQ(dim, self.n_parts, 8, faiss.METRIC_INNER_PRODUCT)
        index.pq.cp.min_points_per_centroid = 1
        return faiss.IndexIDMap2(index)


class HNSWIndex(FlatIndex):
    """A graph in which a search goes from neighbour to neighbour, so its nodes cannot be removed.

    They are hidden instead, and when too many are, the graph is built anew from what is left.
    """

    width, n_links, most_hidden = 64, 16, 0.25  # candidates of a search, neighbours of a node, share

    def __init__(self, dim):
        self.dim, self.ids, self.rows, self.hidden = dim, np.empty(0, dtype=np.int64), {}, []
        super().__init__(dim)  # ids: of rows; rows: of ids; hidden: rows

    def make(self, dim):
        return faiss.IndexHNSWFlat(dim, self.n_links, faiss.METRIC_INNER_PRODUCT)

    def place(self, ids, vectors):
        self.rows |= {number: len(self.ids) + i for i, number in enumerate(ids.tolist())}
        self.ids = np.append(self.ids, ids)
        self.index.add(vectors)

    def forget(self, ids):
        self.hidden += [self.rows.pop(number) for number in ids.tolist()]
        if len(self.hidden) > self.most_hidden * len(self.ids):
            kept = np.delete(np.arange(len(self.ids)), self.hidden)
            vectors, ids = self.index.reconstruct_n(0, len(self.ids))[kept], self.ids[kept].tolist()
            self.__init__(self.dim)
            self.add(ids, vectors)

    def search(self, queries, k):
        hidden = faiss.IDSelectorBatch(np.array(self.hidden, dtype=np.int64))
        shown = {"sel": faiss.IDSelectorNot(hidden)} if self.hidden else {}
        parameters = faiss.SearchParametersHNSW(efSearch=max(self.width, k), **shown)
        cosines, rows = self.index.search(unit_vectors(queries), k, params=parameters)
        return cosines, np.where(rows >= 0, self.ids[rows] if len(self.ids) else -1, -1)


class Rescored:
    """Another index's candidates by their true cosines. fetch: list of ids -> stored vectors [n, dim]."""

    def __init__(self, index, fetch, n_candidates=32):
        self.index, self.fetch, self.n_candidates = index, fetch, n_candidates

    def __getattr__(self, name):
        return getattr(self.index, name)

    def search(self, queries, k):
        queries = unit_vectors(queries)  # [n, dim]
        _, found = self.index.search(queries, max(self.n_candidates, k))  # [n, c]
        cosines, ids = np.full((len(queries), k), -2.0), np.full((len(queries), k), -1)
        for i, candidates in enumerate(row[row >= 0] for row in found):
            if len(candidates):
                scores = unit_vectors(self.fetch(candidates.tolist())) @ queries[i]  # [c]
                best = scores.argsort()[::-1][:k]
                cosines[i, : len(best)], ids[i, : len(best)] = scores[best], candidates[best]
        return cosines, ids


def make_indexes(dim, n, fetch):
    """One of each kind for n vectors, at least 256. fetch: as in Rescored."""
    made = {"flat": FlatIndex(dim), "IVF": IVFIndex(dim, n // 64), "HNSW": HNSWIndex(dim)}
    return made | {"PQ": PQIndex(dim), "PQ, re-scored": Rescored(PQIndex(dim), fetch)}


def agreement(found, exact, threshold):
    """(recall, hits kept) of what was found against the flat index's, each (cosines [n, 1], ids [n, 1]).

    recall: share of the queries with the nearest, or one as near; hits kept: share of those above the
    threshold that stay above it, None where there is none.
    """
    near, nearest = found[0][:, 0], exact[0][:, 0]  # [n]
    same = (found[1][:, 0] == exact[1][:, 0]) | (np.abs(near - nearest) <= ROUNDING)  # equal texts
    kept = (near >= threshold - ROUNDING)[nearest >= threshold - ROUNDING]
    return same.mean().item(), kept.mean().item() if len(kept) else None


if __name__ == "__main__":
    import os

    os.environ.setdefault("TQDM_DISABLE", "1")  # the encoder shows a bar when it loads
    from functools import partial
    from itertools import cycle

    import inference_report as harness
    import inference_words as words
    from data.query_pairs import load_pairs
    from gptlite_kvcache import GPTlite_KVCache
    from inference_calls import THRESHOLD
    from inference_utils import Timer, alternating_ms
    from main_semantic_cache import sentence_transformer_embedder

    columns = {"latency_ms": ("search ms", "{:.3f}"), "recall": ("recall", "{:.1%}")}
    columns |= {"hits_kept": ("hits kept", "{:.1%}"), "bytes_per_vector": ("bytes each", "{:.0f}")}
    columns |= {"build_s": ("build s", "{:.2f}"), "remove_ms": ("remove 1% ms", "{:.2f}")}
    parser = harness.options(__doc__, 3, data=False, quick={"n_vectors": 1000})
    parser.add_argument("--n-vectors", type=harness.positive_int, default=20_000, help="questions and lines")
    with harness.script(parser) as args:
        text, n = harness.load_text(args), args.n_vectors
        (model,) = harness.load_models(args, GPTlite_KVCache)
        pairs = [pair for half in load_pairs() for pair in half]
        stored, asked = ([*dict.fromkeys(pair[column] for pair in pairs)] for column in (3, 4))
        plays = dict.fromkeys(text.decode(text.train).splitlines())
        plays = [line for line in plays if len(line.split()) > 2 and not line.endswith(":")]
        if not 512 <= n <= len(stored) + len(plays):
            raise ValueError(f"--n-vectors {n}: 512 to {len(stored) + len(plays)} texts can be stored")
        report = harness.Report(args, "indexes of a semantic cache", model, columns, n_vectors=n)
        embed = sentence_transformer_embedder(device=args.device)
        step = max(len(plays) // max(n - len(stored), 1), 1)
        vectors = embed([*stored, *plays[::step]][:n])  # [n, dim], unit length
        queries, dim, built, build_s = embed(asked), vectors.shape[1], {}, {}  # [m, dim]

        # Time over the number of vectors: each call asks the next question
        def searches(size):
            built.update(make_indexes(dim, size, vectors.__getitem__))
            for name, index in built.items():
                with Timer() as timer:
                    index.train(vectors[:size])
                    index.add(list(range(size)), vectors[:size])
                build_s[name] = timer.seconds
            turn = cycle(queries)
            ask = lambda index: index.search(next(turn)[None], 1)  # noqa: E731
            return {name: partial(ask, index) for name, index in built.items()}

        sizes = (512,) if args.quick else (512, 1000, 2000, 5000, 10_000)
        title = "Time of one search (ms) by stored vectors"
        lines = report.time_sweep(title, "vectors", [*(size for size in sizes if size < n), n], searches)

        # What is found, with all vectors, and after some were removed and put back
        exact, rows, gone = built["flat"].search(queries, 1), {}, list(range(0, n, 100))
        brute = (queries @ vectors.T).max(axis=1)  # [m]
        report.check("flat finds the nearest", np.allclose(exact[0][:, 0], brute, atol=ROUNDING))
        for name, index in built.items():
            recall, kept = agreement(index.search(queries, 1), exact, THRESHOLD)
            figures = {"latency_ms": lines[-1][name], "recall": recall, "hits_kept": kept}
            figures |= {"build_s": build_s[name], "bytes_per_vector": index.n_bytes / n}
            with Timer() as timer:
                index.remove(gone)
            found = index.search(vectors[gone], 3)[1]
            report.check(f"{name}: what was removed is not found", not np.isin(found, gone).any())
            index.add(gone, vectors[gone])
            figures |= {"remove_ms": timer.ms, "same_output": name == "flat" or "approximate"}
            rows[name] = report.row(name, baseline=name == "flat", **figures)
        again = np.allclose(built["flat"].search(queries, 1)[0], exact[0])
        report.check("flat: what was put back is found as before", again)

        faster = [words.crossover(lines, "vectors", name, "flat") for name in ("HNSW", "IVF")]
        report.why(faster[0] + faster[1])
        one = alternating_ms({"encoder": partial(embed, asked[:1])}, args.repeats, args.device)["encoder"]
        flat = rows["flat"]["latency_ms"]
        report.why(words.part("the flat search", flat, flat + one, f"look-up among {n} vectors"))
        found = ", ".join(f"{name} {row['recall']:.1%}" for name, row in rows.items())
        texts = f"All find the nearest question ({found}).", f"Some miss the nearest question ({found})."
        report.why(words.choose(min(row["recall"] for row in rows.values()), (0.9995, texts[0]), texts[1]))
        report.plot_sweep(title, "ms")
        report.finish()
