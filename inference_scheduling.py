"""Schedulers: which requests run, and what each step computes, over blocks or over contiguous slots.

refusals() says which requests cannot be served, serve() serves a queue. PagedScheduler is continuous batching
over any BlockPool (gptlite_blocks.py), prefix caches included; SlotScheduler is its counterpart over slots
that each reserve a longest text (gptlite_slots.py). inference_serving.py takes their times.
"""

from collections import deque

from gptlite_paged import Sequence, choose_tokens
from gptlite_slots import SlotBatch


def refusals(requests, batch_size, max_tokens=None, model=None):
    """For each request a ValueError that says why it cannot be served, or None. The others are served.

    Args: requests: list of (prompt [T], n_tokens); max_tokens: most tokens of prompt and answer together;
        model: whose vocabulary the prompts are in.
    Raises: ValueError for a batch without slots.
    """
    if batch_size < 1:
        raise ValueError(f"a batch of {batch_size}: it needs at least one slot")
    reasons = []
    for prompt, n_tokens in requests:
        T, reason = len(prompt), None
        if T == 0:
            reason = "the prompt is empty: it needs at least one character"
        elif n_tokens < 0:
            reason = f"{n_tokens} new tokens: their number cannot be negative"
        elif max_tokens is not None and T + n_tokens > max_tokens:
            reason = f"a prompt of {T} and {n_tokens} new tokens do not fit: at most {max_tokens} together"
        elif model is not None and (unknown := unknown_token(model, prompt.tolist())) is not None:
            reason = f"token {unknown} is not in the model's vocabulary"
        reasons.append(reason and ValueError(reason))
    return reasons


def unknown_token(model, ids):
    """The first of these token ids that the model does not have, None where it has them all."""
    n = model.token_embedding.num_embeddings if hasattr(model, "token_embedding") else None  # of a stand-in
    return next((token for token in ids if token < 0 or n is not None and token >= n), None)


def swap_out(pool, sequence):
    """Moves a sequence's keys and values to host memory; returns them [L, blocks, block_size, 2, H, D]."""
    filled = sequence.table[: pool.blocks_for(sequence.done)]
    data = pool.kv[:, filled].cpu()  # a copy: what is indexed by a list is never a view
    pool.release(sequence.table)
    sequence.table = []
    return data


def swap_in(pool, sequence, data):
    """Brings them back, into any free blocks."""
    sequence.table = pool.allocate(data.shape[1])
    pool.kv[:, sequence.table] = data.to(pool.kv.device)


class PagedScheduler:
    """Continuous batching over a BlockPool, first come, first served.

    A sequence starts behind what the pool finds of its text: nothing in a plain pool, see PrefixCache.

    Args: model: GPTlite_Paged; swap: what becomes of the newest sequence when a running one finds no free
        block: False drops its blocks and computes its tokens anew, True copies them to host memory and back;
        reserve: None takes blocks when they are needed; a function sequence -> n_tokens takes room for so
        many at admission, which is what a contiguous cache does; max_running: sequences at a time at most;
        watermark: share of the pool that admission leaves free, so that those who run can grow;
        temperature: as in choose_tokens. Raises ValueError for swap with a pool that cannot.
    """

    def __init__(
        self, model, pool, swap=False, reserve=None, max_running=256, watermark=0.01, temperature=0.0
    ):
        if swap and not pool.can_swap:
            raise ValueError(
                f"{type(pool).__name__}: texts cannot be copied out of this pool; use swap=False"
            )
        self.model, self.pool, self.swap, self.reserve = model, pool, swap, reserve
        self.max_running, self.temperature = max_running, temperature
        self.spare = 0 if reserve else int(watermark * pool.n_blocks)  # blocks
        self.waiting, self.running, self.swapped = deque(), [], {}
        self.n_preempted = self.n_bytes_swapped = 0
        self.found = []  # for each admission (request, tokens that it has, those of them that were found)

    @property
    def max_tokens(self):
        """The longest text that can be served: its last token is never in the cache."""
        return min(self.model.seqlen, self.pool.n_blocks * self.pool.block_size) + 1

    def room(self, sequence):
        """For how many tokens in all the sequence needs room at admission."""
        return max(len(sequence.ids), self.reserve(sequence) if self.reserve else 0)

    def add(self, sequence):
        """Puts a sequence at the end of the queue. Raises ValueError for one that could never run."""
        n_tokens = max(sequence.end - 1, self.room(sequence))  # the last token is never in the cache
        too_long = n_tokens > self.model.seqlen or not self.pool.fits(sequence, n_tokens)
        if too_long or not sequence.ids:
            raise ValueError(
                f"request {sequence.request}: {n_tokens} tokens do not fit the pool or the context"
            )
        if (unknown := unknown_token(self.model, sequence.ids)) is not None:  # it would stop all others
            raise ValueError(f"request {sequence.request}: token {unknown} is not in the model's vocabulary")
        if not sequence.finished:
            self.waiting.append(sequence)

    def preempt(self):
        """The newest sequence gives all its blocks back, and is the next to be admitted. Nothing is lost."""
        sequence = self.running.pop()
        if self.swap:
            self.swapped[sequence] = swap_out(self.pool, sequence)
            self.n_bytes_swapped += self.swapped[sequence].nbytes
        else:
            self.pool.drop(sequence)
        self.waiting.appendleft(sequence)
        self.n_preempted += 1

    def choose(self):
        """The waiting sequence that is to be admitted next."""
        return self.waiting[0]

    def admit(self):
        """Admits waiting sequences while what is not found of them fits and the watermark is kept."""
        if self.waiting and len(self.running) < self.max_running:
            self.pool.use(self.model)
        while self.waiting and len(self.running) < self.max_running:
            sequence, spare = self.choose(), self.spare if self.running else 0
            found = [] if sequence in self.swapped else self.pool.match(sequence.ids, sequence.salt)
            if self.pool.n_taken(sequence, found, self.room(sequence)) + spare > len(self.pool.free):
                break
            if sequence in self.swapped:
                swap_in(self.pool, sequence, self.swapped.pop(sequence))
                self.pool.grow(sequence, self.room(sequence) - sequence.done)
            else:
                self.pool.start(sequence, found, self.room(sequence))
                self.found.append((sequence.request, len(sequence.ids), sequence.done))
            self.waiting.remove(sequence)
            self.running.append(sequence)

    def choose_work(self):
        """What a step computes, [(sequence, n tokens), ...]: all that is pending."""
        return [(sequence, sequence.pending) for sequence in self.running]

    def step(self):
        """One forward over the chosen work; returns the sequences that are finished and leave."""
        n_before = self.n_preempted
        for sequence in list(self.running):  # the oldest first: it always gets on, so all are finished once
            while sequence in self.running and self.pool.n_missing(sequence, 1) > len(self.pool.free):
                self.preempt()
            if sequence in self.running:
                self.pool.grow(sequence, 1)
        if self.n_preempted == n_before:  # else what was just made free would be taken at once
            self.admit()
        work = self.choose_work()
        complete, logits = self.model.step(self.pool, work)
        for sequence, n in work:  # a forward that raises leaves nothing findable that was not computed
            self.pool.computed(sequence, n)
        for sequence, token in zip(complete, choose_tokens(logits, complete, self.temperature), strict=True):
            sequence.ids.append(token)
        done = [sequence for sequence in self.running if sequence.finished]
        for sequence in done:
            self.running.remove(sequence)
            self.pool.drop(sequence)
        return done


class LongestFirstScheduler(PagedScheduler):
    """PagedScheduler that admits the waiting sequence of which most is found, not the one that came first.

    Args: oldest_every: the one that came first has its turn at every so many admissions, so that none
        starves; the others as in PagedScheduler.
    """

    def __init__(self, model, pool, oldest_every=16, **options):
        super().__init__(model, pool, **options)
        self.oldest_every = oldest_every

    def choose(self):
        """The waiting sequence that is next; of those that find as much the first."""
        if len(self.found) % self.oldest_every == self.oldest_every - 1:
            return self.waiting[0]
        return max(self.waiting, key=lambda sequence: self.pool.n_found(sequence.ids, sequence.salt))


class SlotScheduler:
    """Continuous batching over contiguous slots, each with room for a longest text; used like the above."""

    def __init__(self, model, n_slots, seqlen):
        self.model, self.batch, self.waiting = model, SlotBatch(model, n_slots, seqlen), deque()
        self.max_tokens = seqlen + 1  # the last one is never in the cache

    @property
    def running(self):
        return self.batch.running

    def add(self, sequence):
        """Puts a sequence at the end of the queue. Raises ValueError for one that could never run."""
        unknown = unknown_token(self.model, sequence.ids)
        if not sequence.ids or sequence.end > self.max_tokens or unknown is not None:
            what = f"token {unknown}" if unknown is not None else f"{sequence.end} tokens"
            raise ValueError(f"request {sequence.request}: {what} cannot be read by this model and its slots")
        if not sequence.finished:
            self.waiting.append(sequence)

    def step(self):
        """One token for every sequence that has a slot; returns those that are finished and leave."""
        n_new = min(self.batch.n_free(), len(self.waiting))
        return self.batch.step([self.waiting.popleft() for _ in range(n_new)])


def serve(scheduler, requests):
    """Serves requests that are all there from the start.

    Args: requests: list of (prompt [T], n_tokens).
    Returns: for each its prompt and answer [T + n_tokens], or a ValueError that says why it was refused.
    """
    outputs = refusals(requests, 1, scheduler.max_tokens, scheduler.model)
    for i, (prompt, n_tokens) in enumerate(requests):
        if outputs[i] is None:
            outputs[i] = prompt
            scheduler.add(Sequence(i, prompt.tolist(), len(prompt) + n_tokens))
    while scheduler.waiting or scheduler.running:
        for sequence in scheduler.step():
            outputs[sequence.request] = outputs[sequence.request].new_tensor(sequence.ids)  # [T + n]
    return outputs
