"""Radix prefix cache: a tree over token ids holds the KV cache of every text, shared up to the exact token.

A node is a run of tokens and the places of their keys and values; texts that begin alike share the path to
the token where they part, and there a node is split. A new request walks down the tree and shares what it
passes; leaves that nobody uses are evicted, the least recently used first. Because the tree knows what a
request would find, the one that finds most can be served first, while it is still there. Exact, token for
token; only computed tokens are found, and at least one token of a prompt is always computed.

Wins over blocks where shared beginnings end anywhere: half a block a prompt on average, and by its order
where something is evicted and more requests wait than run. Loses the walk down the tree, for each request
that waits, and tables of tokens that are as many times longer as a block has tokens. A second level for what
is evicted: more/radix_offload.py.

Run: python main_radix_cache.py            (--batch-size 4 serves four at a time)

Source: Zheng et al., SGLang: Efficient Execution of Structured Language Model Programs, 2024.
Differs from SGLang: locks are the pool's reference counts, and a leaf is evicted from its end and only as far
as needed.
"""

import heapq
from itertools import islice

from gptlite_blocks import PrefixCache
from gptlite_kvcache import common_length


class Node:
    """A run of tokens that continues the text of its parents; slots: where the pool has them, as many.

    salt: of a root, the Sequence.salt of all texts below it.
    """

    def __init__(self, key, slots, parent, salt=b""):
        self.key, self.slots, self.parent, self.salt = key, slots, parent, salt
        self.children = {}  # by the first token of their keys
        self.last_used = 0


class RadixCache(PrefixCache):
    """A pool of single tokens (slots) and a tree of the texts that are in it.

    Slots of the tree that no sequence uses are in the pool's free list, behind those that hold nothing: free
    is what can be had, and allocate() evicts as far as needed. A sequence uses the whole path of what is in
    the tree of its text, so a node that nobody uses has no child that somebody uses.

    Args: page_size: only whole pages of so many tokens are found, as with blocks; 1 finds to the token.
    """

    def __init__(self, model, n_slots, page_size=1):
        super().__init__(model, n_slots, block_size=1)
        self.page_size, self.clock = page_size, 0
        self.forget_all()

    def forget_all(self):
        self.roots, self.cached = {}, set()  # roots: of a tree for each salt; cached: slots of all trees

    def walk(self, ids, salt=b""):
        """The nodes that ids follow from the root, as a list of (node, how many of its tokens agree)."""
        node, n, path = self.roots.get(salt) or Node([], [], None), 0, []
        while n < len(ids) and ids[n] in node.children:
            node = node.children[ids[n]]
            path.append((node, common_length(node.key, ids[n:])))
            n += path[-1][1]
            if path[-1][1] < len(node.key):
                break
        return path

    def split(self, node, n):
        """Cuts a node behind its first n tokens; returns the upper part, which its parent now leads to."""
        upper = Node(node.key[:n], node.slots[:n], node.parent)
        upper.last_used, upper.children[node.key[n]] = node.last_used, node
        node.parent.children[node.key[0]] = upper
        node.key, node.slots, node.parent = node.key[n:], node.slots[n:], upper
        return upper

    def descend(self, ids, salt=b""):
        """The nodes whose keys make up the longest beginning of ids in the tree; they are now used last."""
        path = self.walk(ids, salt)
        nodes = [node for node, _ in path]
        if path and path[-1][1] < len(path[-1][0].key):  # the text leaves inside of a node
            nodes[-1] = self.split(*path[-1])
        self.clock += 1
        for node in nodes:
            node.last_used = self.clock
        return nodes

    def n_found(self, ids, salt=b""):
        """How many tokens match(ids, salt) finds; nothing is changed."""
        return sum(n for _, n in self.walk(ids[:-1], salt)) // self.page_size * self.page_size

    def match(self, ids, salt=b""):
        """Slots of the longest beginning of ids in the tree; one token at least is left to be computed."""
        nodes = self.descend(ids[: self.n_found(ids, salt)], salt)
        return [slot for node in nodes for slot in node.slots]

    def insert(self, ids, slots, salt=b""):
        """Adds a text, whose tokens are in these slots, and returns the slots that the tree has it in.

        For what the tree had already these are its own; slots of the rest belong to the tree from now on.
        """
        nodes = self.descend(ids, salt)
        kept = [slot for node in nodes for slot in node.slots]
        parent = nodes[-1] if nodes else self.roots.setdefault(salt, Node([], [], None, salt))
        if (n := len(kept)) < len(ids):
            leaf = parent.children[ids[n]] = Node(list(ids[n:]), list(slots[n:]), parent)
            leaf.last_used = self.clock
            self.cached.update(leaf.slots)
        return kept + list(slots[n:])

    def keep(self, sequence):
        """Puts what is computed of a sequence into the tree, which it uses from now on instead of copies."""
        own = sequence.table[: sequence.done]
        slots = self.insert(sequence.ids[: sequence.done], own, sequence.salt)
        twice = [(mine, kept) for mine, kept in zip(own, slots, strict=True) if mine != kept]
        sequence.table[: sequence.done] = slots
        self.share([kept for _, kept in twice])
        self.release([mine for mine, _ in twice])

    def computed(self, sequence, n):
        """As PrefixCache, for prompts and their pieces; an answer comes into the tree as a whole."""
        if n > 1:
            super().computed(sequence, n)

    def nodes(self):
        """All nodes but the roots."""
        found = [node for root in self.roots.values() for node in root.children.values()]
        for node in found:  # grows while it is read
            found += node.children.values()
        return found

    def evictable(self, node):
        return node.parent is not None and not node.children and self.ref[node.slots[0]] == 0

    def evict(self, n):
        """Takes n tokens out of the tree, ends of the least recently used leaves; their slots are free.

        Returns: how many it took, fewer where the rest is in use.
        """
        leaves = [(leaf.last_used, leaf.slots[0], leaf) for leaf in self.nodes() if self.evictable(leaf)]
        heapq.heapify(leaves)
        left = n
        while left > 0 and leaves:
            leaf = heapq.heappop(leaves)[-1]
            n_cut = min(left, len(leaf.slots))
            self.forget(leaf, n_cut)
            left -= n_cut
            parent = leaf.parent
            if not leaf.slots and self.evictable(parent):
                heapq.heappush(leaves, (parent.last_used, parent.slots[0], parent))
        return n - left

    def forget(self, leaf, n):
        """Takes the last n tokens of an unused leaf out of the tree, and the leaf itself if these are all."""
        for slot in leaf.slots[-n:]:
            self.cached.discard(slot)
            self.free.move_to_end(slot, last=False)  # it holds nothing: the first to be handed out
        if n == len(leaf.key):
            del leaf.parent.children[leaf.key[0]]
            if leaf.parent.parent is None and not leaf.parent.children:
                del self.roots[leaf.parent.salt]
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


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_serving as serving
    import inference_words as words
    from data.workloads import make_workloads
    from gptlite import GPTlite
    from gptlite_paged import BlockPool, GPTlite_Paged

    quick = {"n_requests": 4, "n_tokens": 4}
    parser = harness.options(__doc__, repeats=2, quick=quick, batch_size=1, n_tokens=28)
    parser.add_argument("--n-requests", type=harness.positive_int, default=12, help="of a workload")
    with harness.script(parser) as args:
        text, B, size, T = harness.load_text(args), args.batch_size, 16, 200  # size: of pages and blocks
        plain, paged = harness.load_models(args, GPTlite, GPTlite_Paged)
        workloads = make_workloads(text.valid, args.n_requests, args.n_tokens, args.seed)
        hidden = ["found_share"]
        report = harness.Report(args, "radix prefix cache", paged, serving.COLUMNS, hidden, page_size=size)
        kinds = {f"pages of {size}": (serving.PagedScheduler, size), "in order": (serving.PagedScheduler, 1)}
        kinds["longest first"] = serving.LongestFirstScheduler, 1

        def no_cache():
            pool = BlockPool(paged, B * paged.seqlen // size, size)
            return serving.PagedScheduler(paged, pool, max_running=B)

        def cached(kind, n_slots):
            scheduler, page_size = kinds[kind]
            return scheduler(paged, RadixCache(paged, n_slots, page_size), max_running=B)

        def ways(kept):
            rooms = {"2x": 2 * kept * size + paged.seqlen, "0.5x": max(kept * size // 2, paged.seqlen)}
            return {f"{kind}, {x}": partial(cached, kind, n) for x, n in rooms.items() for kind in kinds}

        rows, last = serving.serve_workloads(report, plain, workloads, size, no_cache, ways)
        trees = [run.pool for run, _ in last.values() if isinstance(run.pool, RadixCache)]
        slots = [[slot for node in tree.nodes() for slot in node.slots] for tree in trees]
        once = all(sorted(held) == sorted(tree.cached) for held, tree in zip(slots, trees, strict=True))
        report.check("each slot is in the tree once or not at all", once)
        found = [
            {"workload": name} | {way: rows[name, way]["found_share"] for way in ways(0)}
            for name in workloads
        ]
        report.sweep("Share of the prompts that is found, with twice and with half the room needed", found)
        pages, tree = f"pages of {size}, 2x", "in order, 2x"
        more = all(line[tree] >= line[pages] for line in found)
        report.check("to the token no less is found than in pages", more)

        texts = serving.distinct_texts(text.valid, 16, T)
        pools = {n: RadixCache(paged, T) for n in (0, 100, 192, T - 1)}  # room for one
        makers = {n: (n, partial(serving.PagedScheduler, paged, pool)) for n, pool in pools.items()}
        alone = serving.prompts_alone(report, paged, texts, makers)

        mean = {way: sum(line[way] for line in found) / len(found) for way in ways(0)}
        mean = {way: {"method": way, "Mean share found": share} for way, share in mean.items()}
        first_come, longest = mean["in order, 0.5x"], mean["longest first, 0.5x"]
        report.why(words.compare(mean[tree], mean[pages], "Mean share found"))
        report.why(words.compare(longest, first_come, "Mean share found"))
        report.why(
            words.compare(alone[192], alone[0], "ttft_ms")
            + words.compare(alone[T - 1], alone[192], "ttft_ms")
        )
        without = rows["no sharing", "no cache"]
        report.why(words.compare(rows["no sharing", tree], without, "tokens_per_s"))
        lines = {k: (list(workloads), [line[f"{k}, 0.5x"] for line in found]) for k in kinds}
        report.plot_lines(lines, "", "share of the prompts found", "With half the room needed")
        report.plot_sweep(f"A prompt of {T} tokens alone", "TTFT (ms)", "", ["TTFT ms", "at least ms"])
        report.finish()
