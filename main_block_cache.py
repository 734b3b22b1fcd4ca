"""Block-hash prefix cache: a full block of the paged KV cache is found again by its text.

The key of a full block is the hash of its tokens and of the key of the block before it, so equal keys mean
equal text from position 0 on. A new request walks along the keys of its prompt and shares every block that it
finds; a block that nobody uses stays until its memory is needed, the least recently used goes first. Exact,
token for token; only full blocks are found, and at least one token of a prompt is always computed.

Run: python main_block_cache.py            (--block-size 64 finds less, --batch-size 4 serves four at a time)

Source: vLLM, Automatic Prefix Caching, 2024; Kwon et al., PagedAttention, 2023.
Differs from vLLM: what nobody could find again (half-filled blocks, second copies) is handed out first.
"""

import hashlib
from array import array

from gptlite_paged import BlockPool
from inference_serving import PagedScheduler


def block_keys(ids, block_size, root=b""):
    """Keys of the full blocks of a text, one by one: SHA-256 of the block's tokens and of the key before it.

    root: what keys and values depend on apart from the text (an adapter, a tenant); it is in every key.
    """
    key = root
    for end in range(block_size, len(ids) + 1, block_size):
        tokens = array("q", ids[end - block_size : end]).tobytes()  # 8 bytes a token
        key = hashlib.sha256(key + tokens).digest()
        yield key


class BlockCache(BlockPool):
    """A BlockPool whose full blocks can be found by their text, also after their sequence has ended.

    The free list of the pool is the cache: blocks without users, the least recently used first. A block is
    forgotten when allocate() hands it out, so one that is in use is never evicted.
    """

    def __init__(self, model, n_blocks, block_size=16):
        super().__init__(model, n_blocks, block_size)
        self.block_of, self.key_of = {}, {}  # key -> block, and back; a second copy of a text is in neither
        self.n_evicted = 0  # blocks

    def match(self, ids):
        """The blocks that hold the beginning of ids, up to the first that is not there.

        At least one token is left over: its logits have to be computed, they are not stored.
        """
        blocks = []
        for key in block_keys(ids[:-1], self.block_size):
            if key not in self.block_of:
                break
            blocks.append(self.block_of[key])
        return blocks

    def register(self, sequence, n=0):
        """Makes those blocks of a sequence findable that are full when n more tokens are computed.

        With n > 0 a block is found before it is written. That is right for sequences of the same step only:
        a step writes all keys and values of a layer before it reads any.
        """
        keys = block_keys(sequence.ids[: sequence.done + n], self.block_size)
        for key, block in zip(keys, sequence.table, strict=False):
            if key not in self.block_of:
                self.block_of[key], self.key_of[block] = block, key

    def allocate(self, n):
        """As BlockPool; what was in the blocks can no longer be found."""
        blocks = super().allocate(n)
        for block in blocks:
            if block in self.key_of:
                del self.block_of[self.key_of.pop(block)]
                self.n_evicted += 1
        return blocks

    def release(self, blocks):
        """As BlockPool; what nobody can find is the first to be handed out."""
        super().release(blocks)
        for block in blocks:
            if self.ref[block] == 0 and block not in self.key_of:
                self.free.move_to_end(block, last=False)

    def drop(self, sequence):
        """As BlockPool, for a sequence that has ended or makes room; its full blocks stay findable."""
        self.register(sequence)
        super().drop(sequence)


class BlockCacheScheduler(PagedScheduler):
    """PagedScheduler over a BlockCache: a sequence starts behind the blocks that are found of it."""

    def __init__(self, model, pool, max_running=256, temperature=0.0):
        super().__init__(model, pool, max_running=max_running, temperature=temperature)
        self.found = []  # for each admission (request, tokens that it has, tokens that were found)

    def admit(self):
        """Admits waiting sequences, in order, while what was not found of them fits the free blocks."""
        for sequence in self.running:
            self.pool.register(sequence, sequence.pending)
        while self.waiting and len(self.running) < self.max_running:
            sequence, spare = self.waiting[0], self.spare if self.running else 0
            blocks = self.pool.match(sequence.ids)
            n_revived = sum(self.pool.ref[block] == 0 for block in blocks)  # they are in the free list
            n_new = self.pool.blocks_for(len(sequence.ids)) - len(blocks)
            if n_new + n_revived + spare > len(self.pool.free):
                break
            self.running.append(self.waiting.popleft())
            self.pool.share(blocks)  # first: growing might hand them out
            sequence.table, sequence.done = blocks, len(blocks) * self.pool.block_size
            self.found.append((sequence.request, len(sequence.ids), sequence.done))
            self.pool.grow(sequence, sequence.pending)
            self.pool.register(sequence, sequence.pending)


if __name__ == "__main__":
    from functools import partial

    import torch

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from data.workloads import make_workloads
    from gptlite import GPTlite, get_gptlite_model_parameters
    from gptlite_paged import GPTlite_Paged
    from inference_serving import FIGURES, prompt_alone, serve_workload

    parser = rep.options(__doc__, repeats=2)
    parser.add_argument("--batch-size", type=rep.positive_int, default=1, help="texts served at a time")
    parser.add_argument("--block-size", type=rep.positive_int, default=16, help="tokens of a block")
    parser.add_argument("--n-requests", type=rep.positive_int, help="requests of a workload (default: 12)")
    with rep.script(parser) as args:
        p, B, size = get_gptlite_model_parameters(), args.batch_size, args.block_size
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        n_requests = args.n_requests or (4 if args.quick else 12)
        generator = torch.Generator().manual_seed(args.seed)
        workloads = make_workloads(valid_data, n_requests, 4 if args.quick else 28, generator)
        model, paged = (
            utils.load_model(c, vocab_size, args.checkpoint).to(args.device, args.dtype)
            for c in (GPTlite, GPTlite_Paged)
        )
        config = {"batch_size": B, "block_size": size, "n_requests": n_requests}
        report = rep.Report(args, "block-hash prefix cache", paged, FIGURES, **config)
        longest = -(-p.seqlen // size)  # blocks of the longest text

        def no_cache():
            return PagedScheduler(paged, BlockPool(paged, B * longest, size), max_running=B)

        def cached(n_blocks):
            return BlockCacheScheduler(paged, BlockCache(paged, n_blocks, size), max_running=B)

        def ways(kept):
            rooms = {"pool 2x": 2 * kept + longest, "pool 0.5x": max(kept // 2, longest)}
            return {pool: partial(cached, n_blocks) for pool, n_blocks in rooms.items()}

        rows = {}  # figures by workload and method
        for name, workload in workloads.items():
            results = serve_workload(report, model, paged, (name, workload), size, no_cache, ways)
            for method, (scheduler, sequences, figures) in results.items():
                rows[name, method] = figures
                if method != "no cache":
                    computed = sum(n - n_found - 1 for _, n, n_found in scheduler.found)
                    computed += sum(len(s.ids) - s.n_prompt for s in sequences)
                    title = f"{name}, {method}: every token that was found is one computed less"
                    report.check(title, figures["forward_tokens"] == computed)
            more = rows[name, "pool 2x"]["n_found"] >= rows[name, "pool 0.5x"]["n_found"]
            report.check(f"{name}: a larger pool finds no less", more)
        clean = all(row["all_free"] for row in rows.values())
        report.check("at the end all blocks are free and all reference counts zero, in every pool", clean)

        # One prompt alone, with more and more of it in the cache
        T, n_blocks = 200, 199 // size
        lengths = sorted({k * n_blocks // 4 * size for k in range(5)})
        texts = [text.tolist() for text in utils.sample_prompts(valid_data, 16, T)]
        pools = {n: BlockCache(paged, -(-T // size), size) for n in lengths}  # room for one
        schedulers = {n: partial(BlockCacheScheduler, paged, pool) for n, pool in pools.items()}
        ttft, least, cost, limits = prompt_alone(report, paged, p, schedulers, texts)
        most = lengths[-1]
        lookup_ms = utils.median_ms(lambda: pools[most].match(texts[0]), 20)
        per_token = max(ttft[0] - ttft[most], 1e-9) / max(most, 1)

        report.why(
            f"With {most} of {T} tokens found a prompt needs {cost[0].flops / cost[most].flops:.0f} times "
            f"fewer operations; its TTFT is {ttft[0] / ttft[most]:.1f} times lower. This machine's "
            f"{limits.flops_per_s / 1e9:.0f} GFLOP/s and {limits.bytes_per_s / 1e9:.0f} GB/s allow "
            f"{least[0]:.1f} and {least[most]:.1f} ms: share reached {rep.share_of(least[0], ttft[0])} and "
            f"{rep.share_of(least[most], ttft[most])}."
        )
        report.why(
            f"A found token saves {per_token:.2f} ms, so {ttft[most] / per_token:.0f} of them save as much "
            "as the rest of the step costs. Where that is more than the context (GPUs), only batches gain."
        )
        speeds = [rows["no sharing", method]["tokens_per_s"] for method in ("pool 2x", "no cache")]
        report.why(
            f"Looking up {T} tokens takes {lookup_ms:.3f} ms ({T // size} hashes), {lookup_ms / ttft[0]:.2%} "
            "of computing them: all that requests without a shared beginning pay. Measured there: "
            f"{speeds[0]:.0f} tokens/s, without a cache {speeds[1]:.0f}."
        )
        methods = ("pool 2x", "pool 0.5x")
        shares = {name: [rows[name, method]["found_share"] for method in methods] for name in workloads}
        found = (f"{name} {roomy:.0%}, {tight:.0%}" for name, (roomy, tight) in shares.items())
        report.why(
            f"Share found with room for all, and for half: {'; '.join(found)}. Only full blocks count: of "
            f"120 shared tokens {120 // size * size}, of 150 {150 // size * size}; on average half a block a "
            "prompt is lost. A text that all share stays. Where documents or chats come in turns, the least "
            "recently used one comes next: there a pool that is a little too small loses most."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for i, method in enumerate(methods):
                heights = [100 * share[i] for share in shares.values()]
                axes.bar([x + 0.4 * i - 0.2 for x in range(len(heights))], heights, 0.4, label=method)
            axes.set_xticks(range(len(shares)), list(shares))
            axes.set(ylabel="share of the prompts found (%)", title=f"Prefix cache, blocks of {size} tokens")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
