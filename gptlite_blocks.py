"""Blocks of a paged KV cache: who uses which, which are free, and what can be found again.

A contiguous cache reserves room for the longest text that a sequence might become. Here memory is cut into
blocks: block j of a sequence may lie anywhere in one pool, is taken when token j * block_size is about to be
written, and can be shared. The parts: Sequence (a text and the table of its blocks), BlockPool (memory,
reference counts, free list), PrefixCache (what caches have in common that find blocks by their text). The
model that reads the blocks is in gptlite_paged.py, schedulers are in inference_scheduling.py.

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.
"""

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)  # two requests with equal tokens are still two sequences
class Sequence:
    """A text in progress. Its tokens 0 to done - 1 have keys and values in the blocks of its table.

    Token t lies in block table[t // block_size], row t % block_size. The newest token is never in the cache:
    it is computed by the step that chooses its successor, so a sequence that runs has one pending token.
    """

    request: int  # number of the request: sampling depends on it and the position alone
    ids: list  # token ids, prompt and answer so far
    end: int  # how many tokens they will be
    n_prompt: int = 0  # set from ids
    done: int = 0  # tokens that are in the cache
    table: list = field(default_factory=list)  # block numbers; with block_size 1 they are slots of tokens
    weights: int = 0  # which of the weights that its cache has seen computed it (see PrefixCache)
    salt: bytes = b""  # what its keys and values depend on but text and model: an adapter's adapter_key()

    def __post_init__(self):
        self.n_prompt = self.n_prompt or len(self.ids)

    @property
    def pending(self):
        """How many tokens still have to be computed before the next can be chosen."""
        return len(self.ids) - self.done

    @property
    def finished(self):
        return len(self.ids) >= self.end


class BlockPool:
    """All blocks of the cache: their memory, how many sequences use each, and which are free.

    The free list is ordered, least recently freed first, and freeing does not erase: a cache may remember
    what is in a free block, and share() takes it back until allocate() has handed it out. A scheduler calls
    use(), match(), start(), grow(), computed() and drop(), so that each runs over each kind of pool.

    Args: model: a GPTlite, for shapes, dtype and device; n_blocks; block_size: tokens in a block.
    """

    can_swap = True  # whether blocks alone are what a sequence takes, so that a scheduler may copy them out

    def __init__(self, model, n_blocks, block_size=16):
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {n_blocks} blocks of {block_size} tokens: both must be at least 1")
        block = model.blocks[0]
        shape = (len(model.blocks), n_blocks, block_size, 2, block.mha.n_heads, block.mha.d_head)
        dtype, device = block.ln1.weight.dtype, block.ln1.weight.device
        self.kv = torch.zeros(shape, dtype=dtype, device=device)  # [L, blocks, block_size, 2, H, D]
        self.n_blocks, self.block_size = n_blocks, block_size
        self.ref = [0] * n_blocks  # users of each block
        self.free = OrderedDict.fromkeys(range(n_blocks))  # keys: the blocks with ref 0, the oldest first

    def blocks_for(self, n_tokens):
        """How many blocks n_tokens of a sequence take."""
        return -(-n_tokens // self.block_size)

    def n_missing(self, sequence, n):
        """How many blocks the sequence lacks to compute n more tokens."""
        return max(self.blocks_for(sequence.done + n) - len(sequence.table), 0)

    def allocate(self, n):
        """Takes n free blocks, those freed longest ago, for one user; ValueError if there are fewer."""
        if n > len(self.free):
            raise ValueError(f"{n} blocks wanted, {len(self.free)} of {self.n_blocks} are free")
        blocks = [self.free.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            self.ref[block] = 1
        return blocks

    def share(self, blocks):
        """One more user for each of these blocks; a free one leaves the free list, contents untouched."""
        for block in blocks:
            self.free.pop(block, None)
            self.ref[block] += 1

    def release(self, blocks):
        """One user less for each of these blocks; those without users become free.

        The last block of a text comes first in the free list: the start of a text is worth most to others.
        Raises ValueError for a block that has no user.
        """
        for block in reversed(blocks):
            if self.ref[block] < 1:
                raise ValueError(f"block {block} is released more often than it was taken")
            self.ref[block] -= 1
            if self.ref[block] == 0:
                self.free[block] = None

    def grow(self, sequence, n):
        """Extends the sequence's table so that n more tokens can be computed; ValueError as allocate()."""
        sequence.table += self.allocate(self.n_missing(sequence, n))

    def drop(self, sequence):
        """Releases all blocks of the sequence; it can start again from its tokens."""
        self.release(sequence.table)
        sequence.table, sequence.done = [], 0

    def slots(self, table, start, stop):
        """Places of tokens start to stop - 1 in the pool, block * block_size + row, as a list."""
        size = self.block_size
        return [table[t // size] * size + t % size for t in range(start, stop)]

    # What a scheduler tells and asks; a plain pool finds nothing again

    def use(self, model):
        """Says which model computes what is written from now on."""

    def match(self, ids, salt=b""):
        """Blocks with the beginning of ids, computed under this salt; a token at least is left over."""
        return []

    def n_found(self, ids, salt=b""):
        """How many tokens match(ids, salt) would find."""
        return len(self.match(ids, salt)) * self.block_size

    def fits(self, sequence, n_tokens):
        """Whether the whole pool has room for n_tokens of a sequence."""
        return self.blocks_for(n_tokens) <= self.n_blocks

    def n_taken(self, sequence, blocks, n_tokens):
        """How many blocks leave the free list at start(), those found that nobody uses among them."""
        n_revived = sum(self.ref[block] == 0 for block in blocks)
        return self.blocks_for(n_tokens) - len(blocks) + n_revived

    def start(self, sequence, blocks, n_tokens):
        """Gives a sequence that has no blocks those that match() found, and room for n_tokens in all."""
        sequence.table, sequence.done = list(blocks), len(blocks) * self.block_size
        self.share(blocks)  # first: growing might hand them out
        self.grow(sequence, n_tokens - sequence.done)

    def computed(self, sequence, n):
        """Says that the last n of the sequence's `done` tokens have been computed: now, not before."""


def block_keys(ids, block_size, root=b""):
    """Keys of the full blocks of a text, one by one: SHA-256 of the block's tokens and of the key before it.

    root: what keys and values depend on apart from the text (weights, an adapter); it is in every key.
    """
    key = root
    for end in range(block_size, len(ids) + 1, block_size):
        tokens = array("q", ids[end - block_size : end]).tobytes()  # 8 bytes a token
        key = hashlib.sha256(key + tokens).digest()
        yield key


def weights_of(model):
    """What differs once a model has other weights: [(tensor, its address, its version)].

    Seen are new tensors and changes in place (load_state_dict, an optimizer), but not those through .data,
    which PyTorch does not count. The tensors are part of it, so that no other gets their memory.
    """
    seen = []
    for p in model.parameters():
        held = p if p.is_mkldnn else p.detach()  # a packed weight has no address; it is replaced as a whole
        seen.append((held, id(p) if p.is_mkldnn else held.data_ptr(), p._version))
    return seen


class PrefixCache(BlockPool):
    """What pools have in common in which the beginning of a text is found again.

    They hold what one model computed. With other weights everything is forgotten; a sequence that began
    before goes on, but nothing of it becomes findable. Subclasses have match(), keep() and forget_all().
    """

    def __init__(self, model, n_blocks, block_size=16):
        super().__init__(model, n_blocks, block_size)
        self.weights, self.n_weights = weights_of(model), 0
        self.n_evicted = 0  # blocks

    def use(self, model):
        """As BlockPool; forgets everything if it was computed with other weights."""
        weights = weights_of(model)
        if [w[1:] for w in weights] != [w[1:] for w in self.weights]:
            self.n_weights += 1
            self.forget_all()
        self.weights = weights

    def start(self, sequence, blocks, n_tokens):
        sequence.weights = self.n_weights
        super().start(sequence, blocks, n_tokens)

    def computed(self, sequence, n):
        """As BlockPool; what is computed becomes findable."""
        if sequence.weights == self.n_weights:
            self.keep(sequence)

    def drop(self, sequence):
        """As BlockPool, for one that has ended or makes room; what is computed of it stays findable."""
        if sequence.weights == self.n_weights:
            self.keep(sequence)
        super().drop(sequence)
