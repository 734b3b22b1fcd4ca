"""Second and third level of a prefix cache: what the radix tree evicts goes to host memory, then to files.

Evicting throws away keys and values that were paid for. Here they are copied out first, in pages of 16 tokens
under the hash of all text up to their end; host memory keeps the most recent ones and hands the others on to
files. A new request takes what the tree has, then page after page from the levels below, and computes the
rest. Exact: a page comes back bit for bit, or not at all (a file is checked when it is read).

Run: python main_radix_offload.py            (--batch-size 4 serves four at a time)

Source: Liu et al., LMCache, 2025; Qin et al., Mooncake, 2025; Zheng et al., SGLang, 2024.
Left out: copying while the model computes (here a step waits), and layer by layer.
"""

import hashlib
import re
from collections import OrderedDict
from pathlib import Path

import torch

import inference_utils as utils
from gptlite_paged import BlockPool, GPTlite_Paged, Sequence
from main_block_cache import block_keys
from main_radix_cache import RadixCache, RadixScheduler


def fingerprint(model):
    """32 bytes that differ for other weights, heads or types: pages of another model are never found."""
    mha = model.blocks[0].mha
    digest = hashlib.sha256(f"{type(model).__name__} {mha.n_heads} {mha.d_head}".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(to_bytes(tensor))
    return digest.digest()


def to_bytes(tensor):
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class PageStore:
    """Pages under their keys: the most recently used in host memory, others in files.

    Args: n_host: pages in host memory at most; folder: where files go, None for no files; n_files: files
        at most. The least recently used page leaves a level first. Files that are there already are used.
    """

    def __init__(self, n_host, folder=None, n_files=10**6):
        self.n_host, self.n_files, self.folder = n_host, n_files, folder and Path(folder)
        self.host = OrderedDict()  # key -> page [L, P, 2, H, D], the least recently used first
        found = sorted(self.folder.glob("*.kv")) if folder else []
        found = [
            path.stem for path in found if re.fullmatch("([0-9a-f]{2})+", path.stem)
        ]  # others are not ours
        self.files = OrderedDict.fromkeys(map(bytes.fromhex, found))
        self.n_damaged = self.bytes_written = self.bytes_read = 0  # of files

    def path(self, key):
        return self.folder / f"{key.hex()}.kv"

    def __contains__(self, key):
        return key in self.host or key in self.files

    def touch(self, keys):
        """Makes the pages of a text the most recently used, the first one last: the others need it."""
        for level in (self.host, self.files):
            for key in reversed(keys):
                if key in level:
                    level.move_to_end(key)

    def put(self, key, page):
        """Keeps a page in host memory; the least recently used ones there go to files."""
        self.host[key] = page
        while len(self.host) > self.n_host:
            oldest, page = self.host.popitem(last=False)
            if self.folder and oldest not in self.files:
                self.write(oldest, page)

    def write(self, key, page):
        """A file is the hash of key and data, then the data; it is there as a whole or not at all."""
        data = to_bytes(page)
        check = hashlib.sha256(key + data).digest()
        utils.write_atomically(self.path(key), lambda path: path.write_bytes(check + data))
        self.files[key] = None
        self.bytes_written += len(data)
        while len(self.files) > self.n_files:
            self.path(self.files.popitem(last=False)[0]).unlink(missing_ok=True)

    def read(self, key, like):
        """The page of a file, or None if the file is gone or not what was written; then it is forgotten."""
        try:
            content = self.path(key).read_bytes()
        except OSError:
            content = b""
        check, data = content[:32], content[32:]
        if check != hashlib.sha256(key + data).digest() or len(data) != like.numel() * like.element_size():
            del self.files[key]
            self.path(key).unlink(missing_ok=True)
            self.n_damaged += 1
            return None
        self.bytes_read += len(data)
        return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape)  # [L, P, 2, H, D]

    def get(self, key, like):
        """(page, "host" or "file"), or (None, None). like: a tensor of a page's shape and type."""
        if key in self.host:
            return self.host[key], "host"
        page = self.read(key, like) if key in self.files else None
        if page is None:
            return None, None
        self.put(key, page)
        return page, "file"


class OffloadingCache(RadixCache):
    """A RadixCache that saves what it evicts, and brings it back when a sequence is admitted.

    Args: store: PageStore; page_size: tokens of a page; root: see block_keys, the model's fingerprint.
    """

    def __init__(self, model, n_slots, store, page_size=16, root=b""):
        super().__init__(model, n_slots)
        self.store, self.page_size, self.root_key = store, page_size, root
        self.n_loaded = {"host": 0, "file": 0}  # tokens

    def text(self, node):
        """Token ids and slots of all tokens up to the end of a node."""
        ids, slots = [], []
        while node is not None:
            ids, slots, node = node.key + ids, node.slots + slots, node.parent
        return ids, slots

    def forget(self, leaf, n):
        """As RadixCache, after saving every full page that loses a token; the last one first."""
        (ids, slots), size = self.text(leaf), self.page_size
        keys = list(block_keys(ids, size, self.root_key))
        for j in reversed(range((len(ids) - n) // size, len(keys))):
            if keys[j] not in self.store:
                page = self.kv[:, slots[j * size : (j + 1) * size], 0]  # [L, P, 2, H, D]
                self.store.put(keys[j], page.cpu())
        super().forget(leaf, n)

    def fetch(self, ids, n):
        """Pages that follow the first n tokens of ids without a gap: list of (place in the text, page)."""
        size, (n_layers, _, _, *rest) = self.page_size, self.kv.shape
        like = self.kv.new_empty((n_layers, size, *rest), device="cpu")  # [L, P, 2, H, D]
        keys, pages = list(block_keys(ids, size, self.root_key)), []
        for j in range(n // size, len(keys)):
            page, level = self.store.get(keys[j], like)
            if page is None:
                break
            self.n_loaded[level] += (j + 1) * size - max(j * size, n)
            pages.append((j * size, page))
        self.store.touch(keys)
        return pages

    def grow(self, sequence, n):
        """As BlockPool, for a sequence that starts behind what the tree has of it; loads what follows."""
        pages = self.fetch(sequence.ids[:-1], sequence.done)  # held before growing evicts anything
        super().grow(sequence, n)
        for start, page in pages:
            first, stop = sequence.done, start + self.page_size
            self.kv[:, sequence.table[first:stop], 0] = page[:, first - start :].to(self.kv.device)
            sequence.done = stop


def from_each_level(paged, ids, n, page_size, folder, n_runs):
    """Times one prompt whose first n tokens are nowhere, or in files, host memory or the tree.

    Returns: what is found, kv [L, n, 2, H, D], and {level: Measurement}; its output is the pool.
    """
    T, other = len(ids), (ids[n] + 1) % paged.fc_out.out_features

    def new_pool(store):
        return OffloadingCache(paged, T, store, page_size)

    def ask(pool, ids):
        scheduler = RadixScheduler(paged, pool)
        scheduler.add(Sequence(0, list(ids), T + 1))
        scheduler.step()
        return pool

    saved = ask(new_pool(PageStore(10**6)), ids)
    data = saved.kv[:, saved.match(ids)[:n], 0]  # [L, n, 2, H, D]
    saved.evict(T)
    in_files = PageStore(0, folder)
    for key, page in saved.store.host.items():
        in_files.put(key, page)
    stores = {"nowhere": PageStore(0), "files": in_files, "host": saved.store, "tree": PageStore(0)}
    pools = {level: [new_pool(stores[level]) for _ in range(n_runs + 1)] for level in stores}  # one a run
    for pool in pools["tree"]:
        pool.insert(ids[:n], slots := pool.allocate(n))
        pool.kv[:, slots, 0] = data
        pool.release(slots)
    asked = [*ids[:n], other, *ids[n + 1 :]]

    def method(level):
        waiting = iter(pools[level])
        return utils.Method(level, lambda: ask(next(waiting), asked), [paged])

    return data, utils.measure([method(level) for level in stores], 1, n_runs)


if __name__ == "__main__":
    from tempfile import TemporaryDirectory, mkdtemp

    import inference_report as rep
    from data.shakespeare import get_shakespeare_data
    from data.workloads import make_workloads
    from gptlite import GPTlite, get_gptlite_model_parameters
    from inference_serving import PagedScheduler, each_as_alone, serve_chats, serve_workload

    parser = rep.options(__doc__, repeats=2)
    parser.add_argument("--batch-size", type=rep.positive_int, default=1, help="texts served at a time")
    parser.add_argument("--n-requests", type=rep.positive_int, help="requests of a workload (default: 12)")
    with rep.script(parser) as args, TemporaryDirectory() as folder:
        p, B, size = get_gptlite_model_parameters(), args.batch_size, 16  # size: tokens of a page
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        n_requests = args.n_requests or (8 if args.quick else 12)
        if n_requests < 8:
            raise ValueError(
                f"--n-requests {n_requests}: from 8 on the workloads outgrow the tree and the host"
            )
        generator = torch.Generator().manual_seed(args.seed)
        workloads = make_workloads(valid_data, n_requests, 4 if args.quick else 28, generator)
        model, paged = (
            utils.load_model(c, vocab_size, args.checkpoint).to(args.device, args.dtype)
            for c in (GPTlite, GPTlite_Paged)
        )
        columns = {"n_found": ("from tree", "{}"), "n_host": ("from host", "{}")}
        columns |= {"n_file": ("from files", "{}"), "mb_written": ("MB to files", "{:.0f}")}
        config = {"batch_size": B, "page_size": size, "n_requests": n_requests}
        report = rep.Report(args, "offloaded prefix cache", paged, columns, **config)
        root = fingerprint(paged)

        def new_store(n_host, files=True):
            return PageStore(n_host, mkdtemp(dir=folder) if files else None)

        def no_cache():
            return PagedScheduler(paged, BlockPool(paged, B * p.seqlen // size, size), max_running=B)

        def in_order(pool):  # longest first would answer all questions to a document while it is in the tree
            return RadixScheduler(paged, pool, longest_first=False, max_running=B)

        def offloading(kept, store):
            return in_order(OffloadingCache(paged, room(kept), store, size, root))

        def room(kept):  # slots: a quarter of what is used
            return max(kept * size // 4, p.seqlen)

        def ways(kept):
            return {
                "tree": lambda: in_order(RadixCache(paged, room(kept))),
                "tree, host": lambda: offloading(kept, new_store(kept // 2, files=False)),
                "tree, host, files": lambda: offloading(kept, new_store(kept // 4)),
            }

        def loads(pool):
            if not isinstance(pool, OffloadingCache):
                return {}
            loaded, written = pool.n_loaded, pool.store.bytes_written / 1e6
            return {"n_host": loaded["host"], "n_file": loaded["file"], "mb_written": written}

        rows = {}  # figures by workload and method
        for name in ("documents", "chats"):
            workload = name, workloads[name]
            results = serve_workload(report, model, paged, workload, size, no_cache, ways, loads)
            rows |= {(name, method): figures for method, (_, _, figures) in results.items()}
            computed = [figures["forward_tokens"] for _, _, figures in results.values()]
            falling = computed == sorted(computed, reverse=True)
            report.check(f"{name}: no level makes more tokens be computed", falling)

            # Another process with the same folder; then one whose files were damaged
            reference, kept = (
                [s.ids for s in results["no cache"][1]],
                rows[name, "tree"]["working_set_blocks"],
            )
            left = results["tree, host, files"][0].pool.store
            for damaged in (False, True):
                for path in sorted(left.folder.glob("*.kv"))[::2] if damaged else ():
                    content = bytearray(path.read_bytes())
                    content[-1] ^= 1
                    path.write_bytes(content)
                scheduler = offloading(kept, PageStore(kept // 4, left.folder))
                sequences, _ = serve_chats(scheduler, *workloads[name])
                same = [s.ids for s in sequences] == reference or each_as_alone(model, sequences, args.dtype)
                n_file, n_damaged = scheduler.pool.n_loaded["file"], scheduler.pool.store.n_damaged
                title = f"{name}, files of an earlier run{', every second damaged' if damaged else ''}"
                seen = (n_damaged > 0) == damaged and n_file > 0
                report.check(f"{title}: {n_file} tokens, {n_damaged} refused, the same text", same and seen)
        clean = all(row["all_free"] for row in rows.values())
        report.check("at the end all slots are free and all reference counts zero, in every pool", clean)

        # One prompt alone, 192 of its 200 tokens from each level
        T, n = 200, 192
        ids = utils.sample_prompts(valid_data, 2, T)[1].tolist()
        n_runs = 3 if args.quick else max(args.repeats, 10)
        data, results = from_each_level(paged, ids, n, size, mkdtemp(dir=folder), n_runs)
        bits = {level: m.output.kv[:, m.output.match(ids)[:n], 0] for level, m in results.items()}
        same = all(torch.equal(bits[level], data) for level in ("files", "host", "tree"))
        report.check("keys and values come back bit for bit from every level", same)
        ttft = {level: m.ttft_ms for level, m in results.items()}
        each = {level: max(ms - ttft["tree"], 0) / n for level, ms in ttft.items()}
        lines = [
            {
                "found in": level,
                "computed": m.forward_tokens,
                "MB loaded": data.nbytes / 1e6 if level in ("files", "host") else 0,
                "TTFT ms": ttft[level],
                "ms a found token": each[level],
                "times faster": ttft["nowhere"] / ttft[level],
            }
            for level, m in results.items()
        ]
        right = [line["computed"] for line in lines] == [T, T - n, T - n, T - n]
        report.check(f"{n} of {T} tokens are found at each level", right)
        report.sweep(f"A prompt of {T} tokens alone, {n} of them found", lines)

        flops = rep.forward_cost(p, vocab_size, 1, T, 0, args.dtype).flops / T  # of a token
        token_bytes, limits = data.nbytes / n, rep.measure_ceilings(args.device, args.dtype)
        least = 1000 * flops / limits.flops_per_s
        report.why(
            f"A token costs {flops / 1e6:.0f} MFLOP to compute and {token_bytes / 1e3:.1f} kB to load: "
            f"{each['nowhere']:.3f} ms computed (at least {least:.3f}, "
            f"{rep.share_of(least, each['nowhere'])} reached), {each['host']:.3f} ms from host memory, "
            f"{each['files']:.3f} ms from files, which are read, hashed and copied."
        )
        report.why(
            "Loading pays from a level that gives more than "
            f"{token_bytes / max(each['nowhere'], 1e-9) / 1e6:.3f} GB/s. Where 50 TFLOP/s are computed, on a "
            f"busy GPU, that is {token_bytes * 50e12 / flops / 1e9:.0f} GB/s, more than most links give: a "
            "model this small computes anew there. Larger ones compute more for each byte, and gain."
        )
        for name in ("documents", "chats"):
            row, less = rows[name, "tree, host, files"], rows[name, "tree"]
            report.why(
                f"{name}, a pool of a quarter of what is used: {row['n_found']} prompt tokens found in the "
                f"tree, {row['n_host']} in host memory, {row['n_file']} in files; "
                f"{row['forward_tokens']} tokens computed, with the tree alone {less['forward_tokens']}."
            )
        if args.plot:
            figure, axes = rep.new_figure()
            axes.bar(list(ttft), list(ttft.values()))
            axes.set(xlabel=f"{n} of {T} tokens found in", ylabel="TTFT (ms)")
            axes.set_title(f"Where a prefix comes back from, {report.data['config']['device_name']}")
            rep.save_figure(figure, args.plot)
        report.finish()
