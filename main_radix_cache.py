"""Radix prefix cache: a tree over token ids holds the KV cache of every text, shared up to the exact token.

A node is a run of tokens and the places of their keys and values; texts that begin alike share the path to
the token where they part, and there a node is split. A new request walks down the tree and shares what it
passes; leaves that nobody uses are evicted, the least recently used first. Because the tree knows what a
request would find, the one that finds most can be served first, while it is still there. Exact, token for
token; at least one token of a prompt is always computed.

Run: python main_radix_cache.py            (--batch-size 4 serves four at a time)

Source: Zheng et al., SGLang: Efficient Execution of Structured Language Model Programs, 2024.
Differs from SGLang: locks are the pool's reference counts, a leaf is evicted from its end and only as far as
needed, and a prompt is in the tree from the step on that computes it. A second level for what is evicted:
main_radix_offload.py.
"""

import heapq
from itertools import islice

from gptlite_paged import BlockPool
from inference_serving import PagedScheduler
from main_prefix_cache import common_length


class Node:
    """A run of tokens that continues the text of its parents; slots: where the pool has them, as many."""

    def __init__(self, key, slots, parent):
        self.key, self.slots, self.parent = key, slots, parent
        self.children = {}  # by the first token of their keys
        self.last_used = 0


class RadixCache(BlockPool):
    """A BlockPool of single tokens (slots) and a tree of the texts that are in it.

    Slots of the tree that no sequence uses are in the pool's free list, behind those that hold nothing: free
    is what can be had, and allocate() evicts as far as needed. A sequence uses the whole path of its prompt,
    so a node that nobody uses has no child that somebody uses.
    """

    def __init__(self, model, n_slots):
        super().__init__(model, n_slots, block_size=1)
        self.root, self.clock = Node([], [], None), 0
        self.cached = set()  # slots of the tree
        self.n_evicted = 0  # tokens

    def walk(self, ids):
        """The nodes that ids follow from the root, as a list of (node, how many of its tokens agree)."""
        node, n, path = self.root, 0, []
        while n < len(ids) and ids[n] in node.children:
            node = node.children[ids[n]]
            path.append((node, common_length(node.key, ids[n:])))
            n += path[-1][1]
            if path[-1][1] < len(node.key):
                break
        return path

    def n_found(self, ids):
        """How many tokens match(ids) would find; nothing is changed."""
        return sum(n for _, n in self.walk(ids[:-1]))

    def split(self, node, n):
        """Cuts a node behind its first n tokens; returns the upper part, which its parent now leads to."""
        upper = Node(node.key[:n], node.slots[:n], node.parent)
        upper.last_used, upper.children[node.key[n]] = node.last_used, node
        node.parent.children[node.key[0]] = upper
        node.key, node.slots, node.parent = node.key[n:], node.slots[n:], upper
        return upper

    def descend(self, ids):
        """The nodes whose keys make up the longest beginning of ids in the tree; they are now used last."""
        path = self.walk(ids)
        nodes = [node for node, _ in path]
        if path and path[-1][1] < len(path[-1][0].key):  # the text leaves inside of a node
            nodes[-1] = self.split(*path[-1])
        self.clock += 1
        for node in nodes:
            node.last_used = self.clock
        return nodes

    def match(self, ids):
        """Slots of the longest beginning of ids in the tree; one token at least is left to be computed."""
        return [slot for node in self.descend(ids[:-1]) for slot in node.slots]

    def insert(self, ids, slots):
        """Adds a text, whose tokens are in these slots, and returns how much of it the tree already had.

        The tree keeps its own slots for that part. Slots of the rest belong to the tree from now on.
        """
        nodes = self.descend(ids)
        n, parent = sum(len(node.key) for node in nodes), nodes[-1] if nodes else self.root
        if n < len(ids):
            leaf = parent.children[ids[n]] = Node(list(ids[n:]), list(slots[n:]), parent)
            leaf.last_used = self.clock
            self.cached.update(leaf.slots)
        return n

    def nodes(self):
        """All nodes but the root."""
        found = list(self.root.children.values())
        for node in found:  # grows while it is read
            found += node.children.values()
        return found

    def evictable(self, node):
        return node is not self.root and not node.children and self.ref[node.slots[0]] == 0

    def evict(self, n):
        """Takes n tokens out of the tree, ends of the least recently used leaves; their slots are free."""
        leaves = [(leaf.last_used, leaf.slots[0], leaf) for leaf in self.nodes() if self.evictable(leaf)]
        heapq.heapify(leaves)
        while n > 0:
            leaf = heapq.heappop(leaves)[-1]
            n_cut = min(n, len(leaf.slots))
            self.forget(leaf, n_cut)
            n -= n_cut
            parent = leaf.parent
            if not leaf.slots and self.evictable(parent):
                heapq.heappush(leaves, (parent.last_used, parent.slots[0], parent))

    def forget(self, leaf, n):
        """Takes the last n tokens of an unused leaf out of the tree, and the leaf itself if these are all."""
        for slot in leaf.slots[-n:]:
            self.cached.discard(slot)
            self.free.move_to_end(slot, last=False)  # it holds nothing: the first to be handed out
        if n == len(leaf.key):
            del leaf.parent.children[leaf.key[0]]
        del leaf.key[-n:], leaf.slots[-n:]
        self.n_evicted += n

    def allocate(self, n):
        """As BlockPool; evicts from the tree if fewer slots hold nothing."""
        n_missing = sum(slot in self.cached for slot in islice(self.free, n))
        if 0 < n_missing and n <= len(self.free):
            self.evict(n_missing)
        return super().allocate(n)

    def release(self, slots):
        """As BlockPool; slots outside the tree are the first to be handed out."""
        super().release(slots)
        for slot in slots:
            if self.ref[slot] == 0 and slot not in self.cached:
                self.free.move_to_end(slot, last=False)

    def drop(self, sequence):
        """As BlockPool, for a sequence that has ended or makes room; its text stays in the tree.

        Where another sequence has put the same text there meanwhile, this one's copy holds nothing now.
        """
        self.insert(sequence.ids[: sequence.done], sequence.table[: sequence.done])
        super().drop(sequence)


class RadixScheduler(PagedScheduler):
    """PagedScheduler over a RadixCache.

    Args: longest_first: admits the waiting sequence of which most is found, not the one that came first;
        oldest_every: the one that came first has its turn at every so many admissions, so that none starves.
    """

    def __init__(self, model, pool, longest_first=True, oldest_every=16, max_running=256, temperature=0.0):
        super().__init__(model, pool, max_running=max_running, temperature=temperature)
        self.longest_first, self.oldest_every = longest_first, oldest_every
        self.found = []  # for each admission (request, tokens that it has, tokens that were found)

    def choose(self):
        """The waiting sequence that is next; of those that find as much the first."""
        if not self.longest_first or len(self.found) % self.oldest_every == self.oldest_every - 1:
            return self.waiting[0]
        return max(self.waiting, key=lambda sequence: self.pool.n_found(sequence.ids))

    def admit(self):
        """Admits waiting sequences while what is not found of them fits the free slots."""
        while self.waiting and len(self.running) < self.max_running:
            sequence, spare = self.choose(), self.spare if self.running else 0
            slots = self.pool.match(sequence.ids)
            n_revived = sum(self.pool.ref[slot] == 0 for slot in slots)  # they are in the free list
            if len(sequence.ids) - len(slots) + n_revived + spare > len(self.pool.free):
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self.pool.share(slots)  # first: growing might evict them
            sequence.table, sequence.done = slots, len(slots)
            self.found.append((sequence.request, len(sequence.ids), len(slots)))
            self.pool.grow(sequence, sequence.pending)
            # all but the last token, which every sequence computes itself; to be computed in this very
            # step, which writes keys and values before it reads any
            self.pool.insert(sequence.ids[:-1], sequence.table[:-1])


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
    from main_block_cache import BlockCache, BlockCacheScheduler

    parser = rep.options(__doc__, repeats=2)
    parser.add_argument("--batch-size", type=rep.positive_int, default=1, help="texts served at a time")
    parser.add_argument("--n-requests", type=rep.positive_int, help="requests of a workload (default: 12)")
    with rep.script(parser) as args:
        p, B, size = get_gptlite_model_parameters(), args.batch_size, 16  # size: of the blocks beside it
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        n_requests = args.n_requests or (4 if args.quick else 12)
        generator = torch.Generator().manual_seed(args.seed)
        workloads = make_workloads(valid_data, n_requests, 4 if args.quick else 28, generator)
        model, paged = (
            utils.load_model(c, vocab_size, args.checkpoint).to(args.device, args.dtype)
            for c in (GPTlite, GPTlite_Paged)
        )
        config = {"batch_size": B, "block_size": size, "n_requests": n_requests}
        columns = {key: column for key, column in FIGURES.items() if key != "found_share"}
        report = rep.Report(args, "radix prefix cache", paged, columns, **config)
        longest = p.seqlen // size  # blocks of the longest text

        def no_cache():
            return PagedScheduler(paged, BlockPool(paged, B * longest, size), max_running=B)

        def blocks(n_blocks):
            return BlockCacheScheduler(paged, BlockCache(paged, n_blocks, size), max_running=B)

        def radix(n_blocks, longest_first=True):
            return RadixScheduler(paged, RadixCache(paged, n_blocks * size), longest_first, max_running=B)

        def ways(kept):
            makers = {
                "blocks": blocks,
                "radix, in order": partial(radix, longest_first=False),
                "radix": radix,
            }
            rooms = {"2x": 2 * kept + longest, "0.5x": max(kept // 2, longest)}
            return {f"{way}, {x}": partial(makers[way], n) for x, n in rooms.items() for way in makers}

        side_by_side, clean = [], True
        for name, workload in workloads.items():
            results = serve_workload(report, model, paged, (name, workload), size, no_cache, ways)
            for scheduler, _, figures in results.values():
                clean &= figures["all_free"]
                if isinstance(pool := scheduler.pool, RadixCache):
                    slots = [slot for node in pool.nodes() for slot in node.slots]
                    clean &= len(slots) == len(set(slots)) and set(slots) == pool.cached
            found = {method: figures["n_found"] for method, (_, _, figures) in results.items()}
            more, sequences = found["radix, in order, 2x"] - found["blocks, 2x"], results["no cache"][1]
            report.check(f"{name}: the tree finds no less than blocks", more >= 0)
            line = {"workload": name, "prompt tokens": sum(s.n_prompt for s in sequences)}
            line |= {"in blocks": found["blocks, 2x"], "in the tree": found["radix, in order, 2x"]}
            line |= {"more a prompt": more / len(sequences), "half the room, blocks": found["blocks, 0.5x"]}
            line |= {"half the room, in order": found["radix, in order, 0.5x"]}
            side_by_side.append(line | {"longest first": found["radix, 0.5x"]})
        title = "Prompt tokens found, with room for all; then the order, with room for half"
        report.sweep(title, side_by_side)
        report.check("at the end all slots are free, and each is in the tree once or not at all", clean)

        # One prompt alone, with more and more of it in the cache
        T, lengths = 200, (0, 100, 192, 199)
        texts = [text.tolist() for text in utils.sample_prompts(valid_data, 16, T)]
        texts = [[i, *text[1:]] for i, text in enumerate(texts)]  # no two begin alike
        schedulers = {
            n: partial(RadixScheduler, paged, RadixCache(paged, T)) for n in lengths
        }  # room for one
        ttft, least, cost, _ = prompt_alone(report, paged, p, schedulers, texts)
        full = RadixCache(paged, 8 * T)
        for text in texts[:8]:
            full.insert(text, full.allocate(T))
        walk_ms = utils.median_ms(lambda: full.n_found(texts[7]), 20)

        half = (size - 1) / 2
        more = (f"{line['workload']} {line['more a prompt']:.1f}" for line in side_by_side)
        report.why(
            f"To the token instead of to the block of {size} the tree finds more tokens of each prompt: "
            f"{'; '.join(more)}. Where a shared beginning may end anywhere in a block {half:g} are expected, "
            f"{half * cost[0].flops / T / 1e9:.2f} GFLOP."
        )
        orders = (
            f"{line['workload']} {line['half the room, in order']} and {line['longest first']}"
            for line in side_by_side
        )
        report.why(
            f"Tokens found with half the room, in order of arrival and longest first: {'; '.join(orders)}. "
            f"The order matters where something is evicted and more requests wait than run ({B} here): who "
            "comes while his text is there saves computing it again."
        )
        report.why(
            f"With 192 of {T} tokens found the TTFT is {ttft[0] / ttft[192]:.1f} times lower, with 199 "
            f"{ttft[0] / ttft[199]:.1f} times: {ttft[199]:.1f} ms is the fixed cost of a step (at least "
            f"{least[199]:.1f}, {rep.share_of(least[199], ttft[199])} reached), each token adds "
            f"{max(ttft[0] - ttft[199], 0) / 199:.2f} ms. Where the fixed cost is that of a whole context "
            "(GPUs), a prompt alone gains nothing."
        )
        rows = {row["method"]: row["tokens_per_s"] for row in report.data["rows"]}
        methods = ("no cache", "blocks, 2x", "radix, 2x")
        speeds = (f"{method} {rows[f'no sharing: {method}'] or 0:.0f}" for method in methods)
        report.why(
            f"Walking down the tree for {T} tokens takes {walk_ms:.3f} ms, {walk_ms / ttft[0]:.2%} of "
            "computing them; longest first walks for each request that waits. Where nothing is shared the "
            f"tokens/s are: {', '.join(speeds)}. Tables of tokens are {size} times as long as of blocks."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            ways = {"blocks": "half the room, blocks", "radix, in order": "half the room, in order"}
            for i, (way, key) in enumerate((ways | {"radix": "longest first"}).items()):
                heights = [100 * line[key] / line["prompt tokens"] for line in side_by_side]
                axes.bar([x + 0.27 * (i - 1) for x in range(len(heights))], heights, 0.27, label=way)
            axes.set_xticks(range(len(workloads)), list(workloads))
            axes.set(ylabel="share of the prompts found (%)", title="Prefix caches with half the room needed")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
