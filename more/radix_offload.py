"""Second and third level of a prefix cache: what the radix tree evicts goes to host memory, then to files.

Evicting throws away keys and values that were paid for. Here they are copied out first, in pages of 16 tokens
under the hash of all text up to their end; host memory keeps the most recent ones and hands the others on to
files. A new request takes what the tree has, then page after page from the levels below, and computes the
rest. Exact: a page comes back bit for bit, or not at all (a file is checked when it is read). Keys know the
weights, and an error of files costs what they would have saved, never a request.

Wins where loading a token takes less time than computing it, which on a CPU any memory and disk does. Loses
where a link is slow against the processor: a GPU of 50 TFLOP/s computes this model's tokens faster than they
come over a link of 25 GB/s. Every eviction pays for the copy, also of what never comes back.

Run: python more/radix_offload.py            (--batch-size 4 serves four at a time)

Source: Liu et al., LMCache, 2025; Qin et al., Mooncake, 2025; Zheng et al., SGLang, 2024.
Left out: copying while the model computes (here a step waits), and layer by layer.
"""

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_blocks import block_keys
from inference_pages import PageStore, fingerprint
from main_radix_cache import RadixCache


class OffloadingCache(RadixCache):
    """A RadixCache that saves what it evicts, and brings it back when a sequence is admitted.

    Args: store: PageStore, which several caches and models may share; page_size: tokens of its pages.
    """

    def __init__(self, model, n_slots, store, page_size=16):
        super().__init__(model, n_slots)
        self.store, self.stored_size, self.root_key = store, page_size, fingerprint(model)
        self.n_loaded = {"host": 0, "file": 0}  # tokens

    def use(self, model):
        """As PrefixCache; pages of the new weights are found from now on, and no others."""
        n_before = self.n_weights
        super().use(model)
        if self.n_weights > n_before:
            self.root_key = fingerprint(model)

    def forget(self, leaf, n):
        """As RadixCache, after saving every full page that loses a token; the last one first."""
        ids, slots, node, size = [], [], leaf, self.stored_size
        while node.parent is not None:  # all tokens up to the end of the leaf
            ids, slots, node = node.key + ids, node.slots + slots, node.parent
        keys = list(block_keys(ids, size, self.root_key + node.salt))
        lost = range((len(ids) - n) // size, len(keys))
        for j in reversed(lost):
            if keys[j] not in self.store:
                page = self.kv[:, slots[j * size : (j + 1) * size], 0]  # [L, P, 2, H, D]
                self.store.put(keys[j], page.cpu())
        self.store.touch([keys[j] for j in lost])  # also those that were there: they were used till now
        super().forget(leaf, n)

    def fetch(self, ids, n, salt=b""):
        """Pages that follow the first n tokens of ids without a gap: list of (place in the text, page)."""
        size, (n_layers, _, _, *rest) = self.stored_size, self.kv.shape
        like = self.kv.new_empty((n_layers, size, *rest), device="cpu")  # [L, P, 2, H, D]
        keys, pages = list(block_keys(ids, size, self.root_key + salt)), []
        for j in range(n // size, len(keys)):
            page, level = self.store.get(keys[j], like)
            if page is None:
                break
            self.n_loaded[level] += (j + 1) * size - max(j * size, n)
            pages.append((j * size, page))
        self.store.touch(keys)
        return pages

    def start(self, sequence, slots, n_tokens):
        """As BlockPool, and loads the pages that follow what the tree has."""
        pages = self.fetch(
            sequence.ids[:-1], len(slots), sequence.salt
        )  # held before growing evicts anything
        super().start(sequence, slots, n_tokens)
        for start, page in pages:
            first, stop = sequence.done, start + self.stored_size
            self.kv[:, sequence.table[first:stop], 0] = page[:, first - start :].to(self.kv.device)
            sequence.done = stop
        if pages:
            self.keep(sequence)


if __name__ == "__main__":
    from functools import partial
    from tempfile import TemporaryDirectory, mkdtemp

    import inference_report as harness
    import inference_serving as serving
    import inference_words as words
    from data.workloads import make_workloads
    from gptlite import GPTlite
    from gptlite_paged import BlockPool, GPTlite_Paged

    quick = {"n_requests": 8, "n_tokens": 4}
    parser = harness.options(__doc__, repeats=2, quick=quick, batch_size=1, n_tokens=28)
    parser.add_argument("--n-requests", type=harness.positive_int, default=12, help="of a workload")
    with harness.script(parser) as args, TemporaryDirectory() as folder:
        if args.n_requests < 8:
            raise ValueError(f"--n-requests {args.n_requests}: from 8 on workloads outgrow tree and host")
        text, B, size, T, n = harness.load_text(args), args.batch_size, 16, 200, 192  # size: of a page
        plain, paged = harness.load_models(args, GPTlite, GPTlite_Paged)
        workloads = make_workloads(text.valid, args.n_requests, args.n_tokens, args.seed)
        workloads = {name: workloads[name] for name in ("documents", "chats")}
        columns = serving.COLUMNS | {"n_host": ("from host", "{}"), "n_file": ("from files", "{}")}
        report = harness.Report(args, "offloaded prefix cache", paged, columns, page_size=size)

        def scheduler_over(pool):
            return serving.PagedScheduler(paged, pool, max_running=B)

        def offloading(n_slots, n_host, place=None):
            return scheduler_over(OffloadingCache(paged, n_slots, PageStore(n_host, place), size))

        def no_cache():
            return scheduler_over(BlockPool(paged, B * paged.seqlen // size, size))

        def ways(kept):
            room = max(kept * size // 4, paged.seqlen)  # slots: a quarter of what is used
            return {
                "tree": lambda: scheduler_over(RadixCache(paged, room)),
                "tree, host": lambda: offloading(room, kept // 2),
                "tree, host, files": lambda: offloading(room, kept // 4, mkdtemp(dir=folder)),
            }

        rows, last = serving.serve_workloads(report, plain, workloads, size, no_cache, ways)
        methods = ["no cache", *ways(1)]
        for name, chats in workloads.items():
            work = [rows[name, method]["forward_tokens"] for method in methods]
            report.check(f"{name}: no level makes more tokens be computed", work == sorted(work)[::-1])
            pool = last[name, methods[-1]][0].pool
            other = offloading(pool.n_blocks, pool.store.n_host, pool.store.folder)  # of another process
            same = serving.each_as_alone(plain, serving.serve_chats(other, *chats), args.dtype)
            used = other.pool.n_loaded["file"] > 0
            report.check(f"{name}: files of an earlier run are used, the same text", same and used)

        # One prompt alone, 192 of its 200 tokens from each level: what is not in the tree was evicted before
        stores = {"no level": PageStore(0), "files": PageStore(0, mkdtemp(dir=folder))}
        stores |= {"host memory": PageStore(10**6), "the tree": PageStore(0)}
        pools = {level: OffloadingCache(paged, T, store, size) for level, store in stores.items()}
        texts, seen = serving.distinct_texts(text.valid, 16, T), {level: [] for level in pools}

        def scheduler_at(level):
            pool = pools[level]
            seen[level].append(pool.kv[:, pool.match(texts[0])[:n], 0].clone())  # [L, n, 2, H, D]
            pool.evict(0 if level == "the tree" else T)
            return scheduler_over(pool)

        makers = {x: (0 if x == "no level" else n, partial(scheduler_at, x)) for x in pools}
        alone = serving.prompts_alone(report, paged, texts, makers, "found in", "a prompt found in {}")
        same = all(torch.equal(kv, seen[x][1]) for x in ("files", "host memory") for kv in seen[x][2:])
        report.check("keys and values come back bit for bit from every level", same)

        nowhere, files, host, tree = alone.values()
        report.why(words.compare(host, nowhere, "ttft_ms") + words.compare(files, host, "ttft_ms"))
        load_ms, compute_ms = (max(x["ttft_ms"] - tree["ttft_ms"], 0) / n for x in (files, nowhere))
        figures = f"{load_ms:.3f} ms a token, computing it takes {compute_ms:.3f}."
        saves, costs = (f"Loading a token from files {word}: {figures}" for word in ("pays", "does not pay"))
        report.why(words.choose(compute_ms - load_ms, (0.0, saves), costs))
        for name in workloads:
            report.why(words.compare(rows[name, methods[-1]], rows[name, methods[1]], "tokens_per_s"))
        lines = {x: (methods, [rows[x, m]["forward_tokens"] for m in methods]) for x in workloads}
        report.plot_lines(lines, "", "computed tokens", "What each level saves")
        report.finish()
