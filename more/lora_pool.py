"""Unified paging: adapters and the KV cache share one pool of blocks, and each takes what the other leaves.

Many adapters stay in host memory; those of the running requests must be on the device, beside keys and
values. How much either needs changes with the requests, so memory that is cut into two parts is too small on
one side and idle on the other. Here both are rows of d_model numbers in the blocks of one pool: an adapter of
rank r takes 18 r rows a layer, a token two. Adapters that no running request needs stay until their blocks
are handed out, the least recently used first; who is admitted has room for its adapter and its prompt.

Exact: the tokens are those of merged weights; what is found of a prompt was computed with the same adapter,
which is known by its weights, not by its name. Wins requests at a time over two fixed halves wherever the
halves do not fit the need, and the memory of a model for each adapter. Loses gathering: a step copies the
weights of its adapters out of their blocks (S-LoRA's kernels read them in place); and texts push adapters
out, which are loaded again. Left out: loading ahead, and swapping texts out (PagedScheduler's swap).

Run: python more/lora_pool.py            (--n-adapters 30: more of them, --n-blocks 128: a larger pool)

Source: Sheng et al., S-LoRA: Serving Thousands of Concurrent LoRA Adapters, 2023.
"""

import math
import random

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_blocks import BlockPool
from gptlite_lora import AdapterSequence
from main_block_cache import BlockCache


def add_naively(out, x, weights, reading):
    """out [N, E_out] += (x A) B, one token of x [N, E_in] after the other, its weights gathered by table."""
    for i, adapter in enumerate(reading.owners):
        if adapter is not None:
            A, B = weights(adapter)
            out[i] += x[i] @ A @ B
    return out


def add_grouped(out, x, weights, reading):
    """The same, gathered once an adapter, and one product for all of its tokens."""
    for adapter, tokens in reading.groups:
        A, B = weights(adapter)  # [E_in, r], [r, E_out]
        out.index_add_(0, tokens, x[tokens] @ A @ B)
    return out


class AdapterPool(BlockCache):
    """A BlockCache whose blocks hold adapters as well. In use are those of running sequences.

    Args: adapters: the AdapterPool in which the adapters lie, by default this one.
    rows [L, blocks * 2 * block_size, E]: the pool's memory, a key or value, or a row of an adapter, in each.
    """

    can_swap = False  # a text that is copied out would keep its adapter in use

    def __init__(self, model, n_blocks, block_size=16, adapters=None):
        super().__init__(model, n_blocks, block_size)
        self.rows = self.kv.view(len(self.kv), 2 * n_blocks * block_size, -1)
        self.adapters = adapters or self
        self.tables, self.holds = {}, {}  # key of an adapter -> its blocks; block -> key
        self.n_loaded = 0

    def n_blocks_of(self, adapter):
        return 0 if adapter is None else self.blocks_for(-(-adapter.rows.shape[1] // 2))

    def row_slots(self, adapter):
        """Where the rows of an adapter that is here lie in each layer of `rows`, in their order: [n]."""
        table = torch.tensor(self.tables[adapter.key], device=self.rows.device)[:, None]  # [blocks, 1]
        n = 2 * self.block_size
        return (table * n + torch.arange(n, device=table.device)).flatten()[: adapter.rows.shape[1]]

    def take(self, adapter):
        """One more user; an adapter that is not here is loaded. ValueError as allocate()."""
        if adapter.key in self.tables:
            self.share(self.tables[adapter.key])
            return
        table = self.tables[adapter.key] = self.allocate(self.n_blocks_of(adapter))
        self.holds |= dict.fromkeys(table, adapter.key)
        self.rows[:, self.row_slots(adapter)] = adapter.rows.to(self.rows)
        self.n_loaded += 1

    def give_back(self, adapter):
        """One user less; without any it stays until its blocks are handed out."""
        BlockPool.release(self, self.tables[adapter.key])  # BlockCache's would hand out first what is no text

    def allocate(self, n):
        """As BlockCache; an adapter that loses a block is gone, and the rest of it is handed out next."""
        blocks = super().allocate(n)
        for key in {self.holds[block] for block in blocks if block in self.holds}:
            for block in self.tables.pop(key):
                del self.holds[block]
                if block in self.free:
                    self.free.move_to_end(block, last=False)
        return blocks

    # What a scheduler asks and tells

    def fits(self, sequence, n_tokens):
        n_text, n_adapter = self.blocks_for(n_tokens), self.adapters.n_blocks_of(sequence.adapter)
        if self.adapters is self:
            return n_text + n_adapter <= self.n_blocks
        return n_text <= self.n_blocks and n_adapter <= self.adapters.n_blocks

    def n_taken(self, sequence, blocks, n_tokens):
        """As BlockPool, with the adapter's blocks; infinite where the adapters' own pool has no room."""
        n_text, here = super().n_taken(sequence, blocks, n_tokens), self.adapters
        table = here.tables.get(sequence.salt)
        in_use = table is not None and here.ref[table[0]] > 0
        n_adapter = 0 if in_use else here.n_blocks_of(sequence.adapter)
        if here is self:
            return n_text + n_adapter
        return n_text if n_adapter <= len(here.free) else math.inf

    def start(self, sequence, blocks, n_tokens):
        self.share(blocks)  # first: the adapter might be loaded into them
        if sequence.adapter is not None:
            self.adapters.take(sequence.adapter)
        super().start(sequence, blocks, n_tokens)
        self.release(blocks)

    def drop(self, sequence):
        super().drop(sequence)
        if sequence.adapter is not None:
            self.adapters.give_back(sequence.adapter)


def two_halves(model, n_blocks, block_size=16):
    """The baseline: the same memory, cut into a pool for texts and one for adapters."""
    adapters = AdapterPool(model, n_blocks // 2, block_size)
    return AdapterPool(model, n_blocks - n_blocks // 2, block_size, adapters)


def serve_adapters(scheduler, requests):
    """Serves (prompt [T], n_tokens, Adapter or None) that are all there: a list of texts [T + n_tokens]."""
    sequences = [
        AdapterSequence(i, p.tolist(), len(p) + n, adapter=a) for i, (p, n, a) in enumerate(requests)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.waiting or scheduler.running:
        scheduler.step()
    return [p.new_tensor(sequence.ids) for (p, _, _), sequence in zip(requests, sequences, strict=True)]


def draw_requests(prompts, n_tokens, adapters, seed=0):
    """Requests that begin alike: one with each adapter, the rest as adapters are wanted, the i-th by 1 / i.

    Args: prompts [n + 1, T], n at least the number of adapters; seed: of draw and order.
    Returns: [(prompt [T], n_tokens, Adapter)], n of them.
    """
    draw, T, n = random.Random(seed), prompts.shape[1], len(prompts) - 1
    weights = [1 / (i + 1) for i in range(len(adapters))]
    wanted = [*adapters, *draw.choices(adapters, weights, k=n - len(adapters))]
    draw.shuffle(wanted)
    texts = [torch.cat([prompts[0, : T // 2], prompt[T // 2 :]]) for prompt in prompts[1:]]  # [T] each
    return [(prompt, n_tokens, adapter) for prompt, adapter in zip(texts, wanted, strict=True)]


def by_adapter(requests, outputs):
    """{Adapter: (its outputs, its requests (prompt [T], n_tokens))}"""
    groups = {}
    for (prompt, n_tokens, adapter), output in zip(requests, outputs, strict=True):
        group = groups.setdefault(adapter, ([], []))
        group[0].append(output)
        group[1].append((prompt, n_tokens))
    return groups


if __name__ == "__main__":
    from copy import deepcopy
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_lora import Adapter, GPTlite_PagedLoRA, MergedCopies, merge, random_adapter
    from gptlite_paged import GPTlite_Paged
    from inference_clock import clock_figures, measure_serving, pool_usage, usage_figures
    from inference_serving import COLUMNS, PagedScheduler, all_free
    from inference_utils import peak_memory_mb, served_as_alone, tie_margin, weight_bytes
    from linear_packed import pack_linears

    quick = {"n_requests": 8, "prompt_len": 40, "n_tokens": 4, "n_adapters": 4, "n_blocks": 24}
    parser = harness.options(__doc__, 2, quick=quick, n_requests=48, prompt_len=48, n_tokens=24)
    parser.add_argument("--n-adapters", type=harness.positive_int, default=12, help="of ranks 4, 8 and 16")
    parser.add_argument("--n-blocks", type=harness.positive_int, default=64, help="of 16 tokens in the pool")
    with harness.script(parser) as args:
        text, T, n, N = harness.load_text(args), args.prompt_len, args.n_tokens, args.n_blocks
        classes = GPTlite, GPTlite_Paged, GPTlite_PagedLoRA
        plain, paged, lora = harness.load_models(args, *classes, packed=False)  # to be merged
        least = 2 * max(-(-(T + n) // 16), 9)  # a half holds a text, or an adapter of rank 16
        if T + n > plain.seqlen or N < least or max(args.n_adapters, args.n_requests, N) > 10_000:
            limits = f"{plain.seqlen} tokens, {least} to 10,000 blocks, 10,000 requests and adapters"
            raise ValueError(f"texts and what serves them: {limits} at most")
        columns = COLUMNS | {"at_a_time": ("at a time", "{:.1f}"), "n_loaded": ("loads", "{}")}
        report = harness.Report(args, "unified paging", paged, columns, n_adapters=args.n_adapters)
        whole, lora = weight_bytes(paged), pack_linears(lora.read_adapters(add_grouped))
        pools, title = {"two halves": two_halves, "one pool": AdapterPool}, "Requests at a time, loads, MB"

        def serve_with(k, repeats, copied=False):  # k adapters: {way: figures of a row}, all checked
            drawn = [random_adapter(plain, (4, 8, 16)[i % 3], args.seed + i) for i in range(k)]
            pairs = {Adapter(plain, adapter): adapter for adapter in drawn}
            prompts = text.prompts(max(args.n_requests, k) + 1, T)  # [n + 1, T]
            requests = draw_requests(prompts, n, [*pairs], args.seed)
            ways = {x: (lora, make) for x, make in pools.items()}
            if copied:
                ways = {"merged copies": (pack_linears(MergedCopies(paged, pairs)), BlockCache)} | ways
            makers = {
                x: lambda m=m, make=make: PagedScheduler(m, make(m, N)) for x, (m, make) in ways.items()
            }
            run, found = partial(serve_adapters, requests=requests), {}
            peaks = {x: peak_memory_mb(lambda x=x: run(makers[x]()), ways[x][0]) for x in ways if copied}
            for x, (scheduler, outputs, clocks) in measure_serving(makers, run, repeats, pool_usage).items():
                pool, same = scheduler.pool, True
                for adapter, group in by_adapter(requests, outputs).items():
                    merged = merge(deepcopy(plain), pairs[adapter])
                    same &= served_as_alone(merged, *group, tie_margin(args.dtype))
                report.check(f"{k} adapters, {x}: the tokens of each adapter's merged weights", same)
                others = getattr(pool, "adapters", pool)
                free = all_free(pool) and all_free(others)
                report.check(f"{k} adapters, {x}: at the end all blocks are free", free)
                _, n_asked, n_found = map(sum, zip(*scheduler.found, strict=True))
                figures = {"found_share": n_found / n_asked, "n_loaded": getattr(others, "n_loaded", None)}
                figures |= {"same_output": same, "peak_memory_mb": peaks.get(x)}
                figures["host_mb"] = sum(adapter.rows.nbytes for adapter in pairs) / 1e6
                found[x] = figures | usage_figures(clocks[-1].observed) | clock_figures(clocks)
            return found

        rows = serve_with(args.n_adapters, args.repeats, copied=True)
        merged, halves, ours = (report.row(x, None, x == "merged copies", **rows[x]) for x in rows)
        lines, device = [], whole + AdapterPool(paged, N).kv.nbytes
        for k in (2, 3 * args.n_adapters) if args.quick else (4, 25, 100):
            two, one = serve_with(k, 1).values()
            line = {"adapters": k, "one pool": one["at_a_time"], "two halves": two["at_a_time"]}
            line |= {"its loads": one["n_loaded"], "their loads": two["n_loaded"]}
            line |= {"in host memory": one["host_mb"], "weights and pool": device / 1e6}
            lines.append(line | {"two merged models": 2 * whole / 1e6})
        report.sweep(title, lines)
        one, two = (
            row | {"Requests at a time": row["at_a_time"], "Loads": row["n_loaded"]} for row in (ours, halves)
        )
        report.why(words.compare(one, two, "Requests at a time") + words.compare(one, two, "Loads"))
        report.why(words.compare(one, two, "tokens_per_s") + words.compare(ours, merged, "tokens_per_s"))
        report.why(words.compare(ours, merged, "peak_memory_mb"))
        report.why(
            words.at_size(lines[-1], "adapters", "weights and pool", "two merged models", "memory in MB")
        )
        report.plot_sweep(title, "requests at a time", "x", ["one pool", "two halves"])
        report.finish()
