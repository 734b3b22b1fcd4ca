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
from functools import partial
from itertools import cycle
from statistics import median

import torch

import inference_utils as utils
from gptlite_paged import BlockPool, Sequence
from inference_utils import served_as_alone
from main_paged_attention import PagedScheduler


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
        for key, block in zip(
            block_keys(sequence.ids[: sequence.done + n], self.block_size), sequence.table, strict=False
        ):
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


# ---- Workloads, also those of main_radix_cache.py ----


def make_workloads(data, n_requests, n_new=28, generator=None):
    """Ways in which prompts share their beginnings, within a context of 256.

    Args: data: token ids [N]; n_requests: of each workload (chats: conversations of 4 turns, half as many);
        n_new: at most 28 tokens of an answer in a chat; elsewhere at most 8.
    Returns: {name: (chats, n_new)}: chats is a list of conversations, each a list of messages (lists of
        token ids); n_new is the length of every answer. Shared lengths are no multiples of 16 on purpose.
    """

    def texts(n, length):
        starts = torch.randint(len(data) - length, (n,), generator=generator).tolist()
        return [data[start : start + length].tolist() for start in starts]

    (system,), (chat_system,), tasks = texts(1, 120), texts(1, 44), texts(2, 150)
    documents, n_chats = texts(max(n_requests // 4, 1), 180), max(n_requests // 2, 1)
    few_shot = [[tasks[i % 2] + question] for i, question in enumerate(texts(n_requests, 24))]
    about = [[documents[i % len(documents)] + question] for i, question in enumerate(texts(n_requests, 24))]
    chats = [[chat_system + texts(1, 20)[0], *texts(3, 20)] for _ in range(n_chats)]
    return {
        "system prompt": ([[system + question] for question in texts(n_requests, 50)], min(n_new, 8)),
        "few-shot": (few_shot, min(n_new, 8)),
        "documents": (about, min(n_new, 8)),
        "chats": (chats, n_new),
        "no sharing": ([[text] for text in texts(n_requests, 170)], min(n_new, 8)),
    }


def serve_chats(scheduler, chats, n_new):
    """Serves conversations at the same time: a prompt is all that was said so far and the next message.

    A conversation's next turn joins the end of the queue when its answer is there.
    Returns: (sequences, first_steps): all turns by request number, turn * len(chats) + chat; and for each
        the number of the step that gave its first token. Raises ValueError for answers without tokens.
    """
    if n_new < 1:
        raise ValueError(f"answers of {n_new} tokens: a conversation needs at least 1")
    sequences, first_steps, n_steps = {}, {}, 0

    def ask(request, history):
        ids = history + chats[request % len(chats)][request // len(chats)]
        sequences[request] = Sequence(request, ids, len(ids) + n_new)
        scheduler.add(sequences[request])

    for request in range(len(chats)):
        ask(request, [])
    while scheduler.waiting or scheduler.running:
        finished = scheduler.step()
        for sequence in [*scheduler.running, *finished]:
            first_steps.setdefault(sequence.request, n_steps)
        n_steps += 1
        for sequence in finished:
            request = sequence.request + len(chats)
            if request // len(chats) < len(chats[request % len(chats)]):
                ask(request, list(sequence.ids))
    order = sorted(sequences)
    return [sequences[request] for request in order], [first_steps[request] for request in order]


def working_set(sequences, block_size):
    """Tokens of the different full blocks in these texts: with as much room nothing has to be evicted."""
    keys = {key for sequence in sequences for key in block_keys(sequence.ids[:-1], block_size)}
    return len(keys) * block_size


def each_as_alone(model, sequences, margin=0.0):
    """served_as_alone for sequences. model: GPTlite, without any cache."""
    device = model.fc_out.weight.device
    texts = [torch.tensor(sequence.ids, device=device) for sequence in sequences]
    requests = [(t[: s.n_prompt], len(t) - s.n_prompt) for t, s in zip(texts, sequences, strict=True)]
    return served_as_alone(model, texts, requests, margin)


def serving_figures(scheduler, sequences, first_steps, clocks):
    """What runs of serve_chats show, as a report's row. clocks: for each run its total_ms and steps_ms.

    A request is a hit if at least half of its prompt was found; its time is that of the step that computed
    the rest of its prompt, whatever else was in it.
    """
    found, hits, misses = {}, [], []
    for request, _, n in getattr(scheduler, "found", []):
        found.setdefault(request, n)  # the first admission counts, not one after a preemption
    for sequence, step in zip(sequences, first_steps, strict=True):
        times = hits if found.get(sequence.request, 0) >= sequence.n_prompt / 2 else misses
        times += [clock.steps_ms[step] for clock in clocks]
    later = set(range(clocks[0].n_steps)) - set(first_steps)  # steps without newcomers
    n_generated = sum(len(sequence.ids) - sequence.n_prompt for sequence in sequences)
    return {
        "ttft_ms": median(hits + misses),
        "hit_ms": median(hits) if hits else None,
        "miss_ms": median(misses) if misses else None,
        "tpot_ms": median(clock.steps_ms[i] for clock in clocks for i in later) if later else None,
        "tokens_per_s": median(1000 * n_generated / clock.total_ms for clock in clocks),
        "forward_tokens": clocks[-1].forward_tokens,
        "n_found": sum(found.values()),
        "found_share": sum(found.values()) / sum(sequence.n_prompt for sequence in sequences),
        "n_evicted": getattr(scheduler.pool, "n_evicted", 0) * scheduler.pool.block_size,
        "n_preempted": scheduler.n_preempted,
    }


def compare(model, schedulers, chats, n_new, repeats):
    """Serves one workload in several ways, in alternation.

    Args: model: whose forwards are timed; schedulers: {way: function that makes a new scheduler}.
    Returns: {way: (scheduler and sequences of the last run, serving_figures of all runs)}.
    """
    runs = {way: [] for way in schedulers}
    for _ in range(repeats):
        for way, make in schedulers.items():
            scheduler = make()
            with utils.StepClock(model) as clock:
                sequences, first_steps = serve_chats(scheduler, chats, n_new)
            runs[way].append((scheduler, sequences, first_steps, clock))
    return {
        way: (*of_way[-1][:2], serving_figures(*of_way[-1][:3], [run[-1] for run in of_way]))
        for way, of_way in runs.items()
    }


def prompt_alone(model, schedulers, texts, repeats):
    """One prompt at a time, as long as each text; its first n tokens are found, with another text behind.

    Args: schedulers: {n: function that makes a scheduler, always over the same pool, with room for one}.
    Returns: {n: Measurement}; its output is scheduler.found.
    """

    def method(n, make):
        others = cycle(texts[1:])

        def run():
            scheduler, other = make(), next(others)
            scheduler.add(Sequence(0, texts[0][:n] + other[: len(other) - n], len(other) + 1))
            scheduler.step()
            return scheduler.found

        return utils.Method(n, run, [model])

    return utils.measure([method(n, make) for n, make in schedulers.items()], 1, repeats)


FIGURES = {  # columns of these figures, for a report
    "hit_ms": ("hit TTFT", "{:.1f}"),
    "miss_ms": ("miss TTFT", "{:.1f}"),
    "n_found": ("found tokens", "{}"),
    "found_share": ("share found", "{:.0%}"),
    "n_evicted": ("evicted tokens", "{}"),
}


if __name__ == "__main__":
    import inference_report as rep
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from gptlite_paged import GPTlite_Paged

    parser = rep.options(__doc__, repeats=2)
    parser.add_argument("--batch-size", type=rep.positive_int, default=1, help="texts served at a time")
    parser.add_argument("--block-size", type=rep.positive_int, default=16, help="tokens of a block")
    parser.add_argument("--n-requests", type=rep.positive_int, help="requests of a workload (default: 12)")
    with rep.script(parser) as args:
        p, dev, quick, size = get_gptlite_model_parameters(), args.device, args.quick, args.block_size
        n_requests = args.n_requests or (4 if quick else 12)
        margin = max(1e-3, 2 * utils.TOLERANCE[args.dtype])  # two best logits that are closer are a tie
        vocab_size, _, valid_data, _, _ = get_shakespeare_data(args.data)
        utils.check_length(valid_data, p.seqlen)
        model, paged = (
            utils.load_model(c, vocab_size, args.checkpoint).to(dev, args.dtype)
            for c in (GPTlite, GPTlite_Paged)
        )
        generator = torch.Generator().manual_seed(args.seed)
        workloads = make_workloads(valid_data, n_requests, 4 if quick else 28, generator)
        config = {"batch_size": args.batch_size, "block_size": size, "n_requests": n_requests}
        report = rep.Report(args, "block-hash prefix cache", paged, FIGURES, **config)
        clean = True

        def scheduler_over(n_blocks, cache=True):
            kind, pool = (BlockCacheScheduler, BlockCache) if cache else (PagedScheduler, BlockPool)
            return kind(paged, pool(paged, n_blocks, size), max_running=args.batch_size)

        shares = {}  # of the prompts' tokens that were found
        for name, (chats, n_new) in workloads.items():
            enough = -(-p.seqlen // size)  # blocks of the longest text
            sequences, _ = serve_chats(scheduler_over(args.batch_size * enough, False), chats, n_new)
            reference, kept = [s.ids for s in sequences], working_set(sequences, size) // size
            room = {"no cache": args.batch_size * enough, "pool 2x": 2 * kept + enough}
            room["pool 0.5x"] = max(kept // 2, enough)
            ways = {method: partial(scheduler_over, n, method != "no cache") for method, n in room.items()}
            results = compare(paged, ways, chats, n_new, args.repeats)
            for method, (scheduler, sequences, figures) in results.items():
                same = method != "no cache" and [s.ids for s in sequences] == reference
                same = same or each_as_alone(model, sequences, margin)  # where two logits tie
                report.check(f"{name}, {method}: each request gets the tokens it gets alone", same)
                shares[name, method] = figures["found_share"]
                report.row(
                    f"{name}: {method}",
                    baseline=method == "no cache",
                    same_output=same,
                    pool_blocks=room[method],
                    working_set_blocks=kept,
                    **figures,
                )
                pool, n_decoded = scheduler.pool, sum(len(s.ids) - s.n_prompt for s in sequences)
                clean &= len(pool.free) == pool.n_blocks and not any(pool.ref)
                if method != "no cache":
                    computed = sum(n - n_found - 1 for _, n, n_found in scheduler.found) + n_decoded
                    counted = figures["forward_tokens"] == computed
                    report.check(
                        f"{name}, {method}: every token that was found is one computed less", counted
                    )
            more = shares[name, "pool 2x"] >= shares[name, "pool 0.5x"]
            report.check(f"{name}: a larger pool finds no less", more)
        report.check("at the end all blocks are free and all reference counts zero, in every pool", clean)

        # One prompt alone, with more and more of it in the cache
        T, n_blocks = 200, 199 // size
        lengths = sorted({k * n_blocks // 4 * size for k in range(5)})
        texts = [text.tolist() for text in utils.sample_prompts(valid_data, 16, T)]
        pools = {n: BlockCache(paged, -(-T // size), size) for n in lengths}  # room for one
        ways = {n: partial(BlockCacheScheduler, paged, pool) for n, pool in pools.items()}
        results = prompt_alone(paged, ways, texts, 2 if quick else max(args.repeats, 10))
        ttft = {n: m.ttft_ms for n, m in results.items()}
        as_planned = all(m.output == [(0, T, n)] for n, m in results.items())
        report.check(f"of {T} tokens {', '.join(map(str, lengths))} are found", as_planned)
        limits = rep.measure_ceilings(dev, args.dtype)
        cost = {n: rep.forward_cost(p, vocab_size, 1, T - n, n, args.dtype) for n in lengths}
        least = {n: rep.lower_bound_ms(cost[n], limits) for n in lengths}
        names = ("found", "computed", "TTFT ms", "at least ms", "times faster", "GFLOP")
        lines = [(n, T - n, ttft[n], least[n], ttft[0] / ttft[n], cost[n].flops / 1e9) for n in lengths]
        title = f"A prompt of {T} tokens alone"
        report.sweep(title, [dict(zip(names, line, strict=True)) for line in lines])
        most, longest = lengths[-1], pools[lengths[-1]]
        lookup_ms = utils.median_ms(lambda: longest.match(texts[0]), 20)
        per_token = max(ttft[0] - ttft[most], 1e-9) / max(most, 1)

        report.why(
            f"With {most} of {T} tokens found a prompt needs {cost[0].flops / cost[most].flops:.0f} times "
            f"fewer operations, and its TTFT is {ttft[0] / ttft[most]:.1f} times lower. This machine's "
            f"{limits.flops_per_s / 1e9:.0f} GFLOP/s and {limits.bytes_per_s / 1e9:.0f} GB/s allow "
            f"{least[0]:.1f} and {least[most]:.1f} ms: share reached {rep.share_of(least[0], ttft[0])} and "
            f"{rep.share_of(least[most], ttft[most])}."
        )
        report.why(
            f"A found token saves {per_token:.2f} ms, so {ttft[most] / per_token:.0f} of them save as much "
            "as the rest of the step costs. Where that is more than the context (GPUs), a prompt alone gains "
            "nothing, only full batches do."
        )
        speeds = {row["method"]: row["tokens_per_s"] or 0 for row in report.data["rows"]}
        report.why(
            f"Looking up {T} tokens takes {lookup_ms:.3f} ms ({T // size} hashes), {lookup_ms / ttft[0]:.2%} "
            "of computing them: all that requests without a shared beginning pay. Measured there: "
            f"{speeds['no sharing: pool 2x']:.0f} tokens/s, without a cache "
            f"{speeds['no sharing: no cache']:.0f}."
        )
        found = (f"{n} {shares[n, 'pool 2x']:.0%}, {shares[n, 'pool 0.5x']:.0%}" for n in workloads)
        report.why(
            f"Share found with room for all, and for half: {'; '.join(found)}. Only full blocks count: of "
            f"120 shared tokens {120 // size * size}, of 150 {150 // size * size}; on average half a block, "
            f"{size / 2:g} tokens, is lost in each prompt."
        )
        report.why(
            "A text that all share is used all the time and stays, also with half the room. Where documents "
            "or chats come in turns, the least recently used one is the one that comes next: there a pool "
            "that is a little too small loses most."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for i, way in enumerate(("pool 2x", "pool 0.5x")):
                heights = [100 * shares[name, way] for name in workloads]
                axes.bar([x + 0.4 * i - 0.2 for x in range(len(heights))], heights, 0.4, label=way)
            axes.set_xticks(range(len(workloads)), list(workloads))
            axes.set(ylabel="share of the prompts found (%)", title=f"Prefix cache, blocks of {size} tokens")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
