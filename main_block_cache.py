"""Block-hash prefix cache: a full block of the paged KV cache is found again by its text.

The key of a full block is the hash of its tokens and of the key of the block before it, so equal keys mean
equal text from position 0 on. A new request walks along the keys of its prompt and shares every block that it
finds; a block that nobody uses stays until its memory is needed, the least recently used goes first. Exact,
token for token; only full blocks are found, only computed ones, and one token of a prompt is always computed.

Wins where prompts begin alike: what is found is not computed. Loses half a block a prompt on average, the
hashing where nothing is shared, and all where the pool is a little too small and texts come in turns, since
the least recently used one is the next to be asked for. On a GPU, where a step of one prompt costs the same
with or without most of its tokens, a single request gains little: batches of prompts do.

Run: python main_block_cache.py            (--block-size 64 finds less, --batch-size 4 serves four at a time)

Source: vLLM, Automatic Prefix Caching, 2024; Kwon et al., PagedAttention, 2023.
Differs from vLLM: blocks are findable only once they are computed, so equal prompts of one step do not share;
what nobody could find again (half-filled blocks, second copies) is handed out first.
"""

from gptlite_blocks import PrefixCache, block_keys


class BlockCache(PrefixCache):
    """A BlockPool whose full blocks can be found by their text, also after their sequence has ended.

    The free list of the pool is the cache: blocks without users, the least recently used first. A block is
    forgotten when allocate() hands it out, so one that is in use is never evicted. PagedScheduler runs over
    it as over any pool: a sequence starts behind the blocks that match() finds.
    """

    def __init__(self, model, n_blocks, block_size=16):
        super().__init__(model, n_blocks, block_size)
        self.block_of, self.key_of = {}, {}  # key -> block, and back; a second copy of a text is in neither

    def match(self, ids, salt=b""):
        """The blocks that hold the beginning of ids, up to the first that is not there.

        At least one token is left over: its logits have to be computed, they are not stored. salt: blocks
        that were computed under another one, with another adapter, are not found.
        """
        blocks = []
        for key in block_keys(ids[:-1], self.block_size, salt):
            if key not in self.block_of:
                break
            blocks.append(self.block_of[key])
        return blocks

    def keep(self, sequence):
        """Makes the full blocks of a sequence findable, as far as they have been computed."""
        keys = block_keys(sequence.ids[: sequence.done], self.block_size, sequence.salt)
        for key, block in zip(keys, sequence.table, strict=False):
            if key not in self.block_of:
                self.block_of[key], self.key_of[block] = block, key

    def forget_all(self):
        self.block_of, self.key_of = {}, {}

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


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from data.workloads import make_workloads
    from gptlite import GPTlite
    from gptlite_paged import BlockPool, GPTlite_Paged
    from inference_serving import COLUMNS, PagedScheduler, distinct_texts, prompts_alone, serve_workloads

    quick = {"n_requests": 4, "n_tokens": 4}
    parser = harness.options(__doc__, repeats=2, quick=quick, batch_size=1, n_tokens=28)
    parser.add_argument("--block-size", type=harness.positive_int, default=16, help="tokens of a block")
    parser.add_argument("--n-requests", type=harness.positive_int, default=12, help="of a workload")
    with harness.script(parser) as args:
        text, B, size = harness.load_text(args), args.batch_size, args.block_size
        plain, paged = harness.load_models(args, GPTlite, GPTlite_Paged)
        workloads = make_workloads(text.valid, args.n_requests, args.n_tokens, args.seed)
        config = {"block_size": size, "n_requests": args.n_requests}
        report = harness.Report(args, "block-hash prefix cache", paged, COLUMNS, **config)
        longest = -(-paged.seqlen // size)  # blocks of the longest text

        def no_cache():
            return PagedScheduler(paged, BlockPool(paged, B * longest, size), max_running=B)

        def cached(n_blocks):
            return PagedScheduler(paged, BlockCache(paged, n_blocks, size), max_running=B)

        def ways(kept):
            rooms = {"pool 2x": 2 * kept + longest, "pool 0.5x": max(kept // 2, longest)}
            return {name: partial(cached, n_blocks) for name, n_blocks in rooms.items()}

        rows, _ = serve_workloads(report, plain, workloads, size, no_cache, ways)
        found = {
            name: [rows[name, way]["found_share"] for way in ("pool 2x", "pool 0.5x")] for name in workloads
        }
        more = all(roomy >= tight for roomy, tight in found.values())
        report.check("a larger pool finds no less", more)

        # One prompt alone, with more and more of it in the cache
        T, n_blocks = 200, 199 // size
        texts = distinct_texts(text.valid, 16, T)
        lengths = sorted({k * n_blocks // 4 * size for k in range(5)})
        pools = {n: BlockCache(paged, -(-T // size), size) for n in lengths}  # room for one
        makers = {n: (n, partial(PagedScheduler, paged, pools[n])) for n in lengths}
        alone = prompts_alone(report, paged, texts, makers)
        lookup = {"": partial(pools[lengths[-1]].match, texts[0])}
        lookup_ms = harness.alternating_ms(lookup, args.repeats, args.device)[""]

        first, last = (alone[lengths[i]] for i in (0, -1))
        rows_alone = {row["method"]: row for row in (first, last)}
        report.why_step({name: row["cost"] for name, row in rows_alone.items()}, rows_alone, "ttft_ms")
        share = lookup_ms / first["ttft_ms"]
        figures = f"{T} tokens takes {lookup_ms:.3f} ms, {share:.2%} of the time of computing them"
        cheap, dear = (f"The look-up of {figures}: it is {word}." for word in ("cheap", "dear"))
        report.why(words.compare(last, first, "ttft_ms") + words.choose(share, (0.05, dear), cheap))
        without, roomy = (rows["no sharing", way] for way in ("no cache", "pool 2x"))
        report.why(words.compare(roomy, without, "tokens_per_s"))
        shares = "; ".join(f"{name} {a:.0%}, {b:.0%}" for name, (a, b) in found.items())
        lost = [name for name, (roomy, tight) in found.items() if tight < roomy / 2]
        figures = f"shares found with room for all, and for half: {shares}"
        report.why(
            words.choose(
                len(lost),
                (1, f"With half the room most is lost in {' and '.join(lost)} ({figures})."),
                f"Half the room loses less than half of what is found in every workload ({figures}).",
            )
        )
        lines = {
            way: (list(found), [share[i] for share in found.values()])
            for i, way in enumerate(("room for all", "room for half"))
        }
        report.plot_lines(lines, "", "share of the prompts found", f"Blocks of {size} tokens")
        report.plot_sweep(f"A prompt of {T} tokens alone", "TTFT (ms)", "", ["TTFT ms", "at least ms"])
        report.finish()
