"""GPTlite over a paged KV cache: memory is cut into blocks, and each sequence has a table of its blocks.

A contiguous cache reserves room for the longest text a sequence might become. Here block j of a sequence
may lie anywhere in one pool, and is taken when token j * block_size is about to be written; sequences can
share blocks. A step computes one flat batch of tokens, [N, E]: one token of each running sequence, and
prompts or pieces of prompts. All keys and values of a step are written before any attention reads, and each
sequence attends over its own blocks, gathered. Exact: attention is a sum over keys, wherever they lie.

The parts: Sequence, BlockPool (memory, reference counts, free list), GPTlite_Paged (the model),
choose_tokens. What to compute, share, free or evict is decided by the schedulers and caches on top of it:
main_paged_attention.py, main_block_cache.py, main_radix_cache.py, main_chunked_prefill.py.

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.
"""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from gptlite import Block, GPTlite, MultiHeadAttention


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
    what is in a free block, and share() takes it back until allocate() has handed it out. A subclass may
    override allocate(), to forget what was in the blocks or to evict first: grow() calls it.

    Args: model: a GPTlite, for shapes, dtype and device; n_blocks; block_size: tokens in a block.
    """

    def __init__(self, model, n_blocks, block_size=16):
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {n_blocks} blocks of {block_size} tokens: both must be at least 1")
        mha, weight = model.blocks[0].mha, model.position_embedding.weight
        shape = (len(model.blocks), n_blocks, block_size, 2, mha.n_heads, mha.d_head)
        self.kv = torch.zeros(
            shape, dtype=weight.dtype, device=weight.device
        )  # [L, blocks, block_size, 2, H, D]
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


# What a forward must know about its N tokens: first n single tokens, then the chunks, one after the other.
# positions, slots [N]: place of each token in its text and in the pool; last [B]: rows that need logits;
# keys [n, S]: slots of all keys of the single tokens' sequences; hidden [n, 1, 1, S]: -inf behind a text's
# end, else 0; chunks: for each (rows as a slice, slots of its keys [Sk], visible [Sq, Sk])
Step = namedtuple("Step", "positions slots last keys hidden chunks")


class MultiHeadAttention_Paged(MultiHeadAttention):
    """Attention of the tokens of a step, side by side, each sequence over its own blocks of the pool."""

    def forward(self, x, kv, step):
        """[N, E] -> [N, E]; writes keys and values into this layer's kv [slots, 2, H, D]."""
        N, n, out = len(x), len(step.keys), []
        Q, K, V = (
            project(x).view(N, self.n_heads, self.d_head)
            for project in (self.query_proj, self.key_proj, self.value_proj)
        )
        kv[step.slots] = torch.stack([K, V], dim=1)  # [N, 2, H, D]
        if n > 0:  # the running sequences in one call, padded to the longest
            gathered = kv.index_select(0, step.keys.flatten()).view(n, -1, *kv.shape[1:])  # [n, S, 2, H, D]
            keys, values = gathered.permute(2, 0, 3, 1, 4)  # [n, H, S, D]
            seen = F.scaled_dot_product_attention(Q[:n, :, None], keys, values, step.hidden)  # [n, H, 1, D]
            out.append(seen.flatten(1))  # [n, H*D]
        for rows, slots, visible in step.chunks:
            keys, values = kv.index_select(0, slots).permute(1, 2, 0, 3)[:, None]  # [1, H, Sk, D]
            q = Q[None, rows].transpose(1, 2)  # [1, H, Sq, D]
            seen = F.scaled_dot_product_attention(q, keys, values, visible)  # [1, H, Sq, D]
            out.append(self.merge_heads(seen)[0])  # [Sq, H*D]
        return self.out_proj(torch.cat(out))  # [N, E]


class Block_Paged(Block):
    """Block that hands pool and step through."""

    mha_class = MultiHeadAttention_Paged

    def forward(self, x, kv, step):
        x = x + self.mha(self.ln1(x), kv, step)  # [N, E]
        return x + self.ffwd(self.ln2(x))  # [N, E]


class GPTlite_Paged(GPTlite):
    """GPTlite over a BlockPool; the weights are GPTlite's. For inference only (no dropout)."""

    block_class = Block_Paged

    def forward(self, tokens, step, kv):
        """Token ids [N] and the pool's kv [L, blocks, block_size, 2, H, D], written -> logits [B, V]."""
        x = self.token_embedding(tokens) + self.position_embedding(step.positions)  # [N, E]
        for block, layer in zip(self.blocks, kv.flatten(1, 2), strict=True):  # layer [slots, 2, H, D]
            x = block(x, layer, step)  # [N, E]
        return self.fc_out(self.ln(x[step.last]))  # [B, V]

    @torch.no_grad()
    def step(self, pool, work):
        """Computes the next n tokens of each sequence, all in one forward.

        Args: work: list of (sequence, n), 1 <= n <= sequence.pending, each sequence once, in any order; its
            table must have room for done + n tokens, in blocks that nobody else writes.
        Returns: (complete, logits): the sequences that have no token pending now, in the order of work, and
            the logits of their next token [B, V]. Raises ValueError for work that cannot be computed.
        """
        tokens, step = self.plan(pool, work)
        logits = self(tokens, step, pool.kv)  # [B, V]
        for sequence, n in work:
            sequence.done += n
        return [sequence for sequence, _ in work if sequence.pending == 0], logits

    def plan(self, pool, work):
        """Token ids [N] and the Step of this work; nothing is computed or changed."""
        if not work or len({id(sequence) for sequence, _ in work}) < len(work):
            raise ValueError("a step needs work, and each sequence at most once")
        device, ids, positions, slots, chunks, newest = pool.kv.device, [], [], [], [], {}
        for sequence, n in sorted(work, key=lambda item: item[1] > 1):  # stable: single tokens first
            row, start, stop = len(ids), sequence.done, sequence.done + n
            if not 1 <= n <= sequence.pending or stop > self.seqlen or pool.n_missing(sequence, n):
                raise ValueError(
                    f"request {sequence.request} cannot compute {n} of its {sequence.pending} tokens after "
                    f"{start}: it has {len(sequence.table)} blocks, and a context of {self.seqlen}"
                )
            if n > 1:  # row i of the chunk is token start + i, and sees the keys up to its own
                visible = torch.ones(n, stop, dtype=torch.bool, device=device).tril(start)  # [Sq, Sk]
                of_keys = torch.tensor(pool.slots(sequence.table, 0, stop), device=device)  # [Sk]
                chunks.append((slice(row, row + n), of_keys, visible))
            ids += sequence.ids[start:stop]
            positions += range(start, stop)
            slots += pool.slots(sequence.table, start, stop)
            newest[id(sequence)] = row + n - 1
        ids, positions, slots = torch.tensor([ids, positions, slots], device=device)  # [N]
        last = [newest[id(sequence)] for sequence, n in work if n == sequence.pending]
        last = torch.tensor(last, dtype=torch.int64, device=device)  # [B]
        singles = [sequence for sequence, n in work if n == 1]
        keys, hidden = self.padded_keys(pool, singles, positions[: len(singles)])
        return ids, Step(positions, slots, last, keys, hidden, chunks)

    def padded_keys(self, pool, sequences, positions):
        """Slots of the keys up to each position [n, S], and what to add to the scores [n, 1, 1, S].

        Behind a text's end its first key is repeated: what others left in a block is not even read, as the
        weight of a hidden key is 0, but 0 * NaN would be NaN.
        """
        n_keys = max((sequence.done + 1 for sequence in sequences), default=0)
        n_blocks, size, device = pool.blocks_for(n_keys), pool.block_size, positions.device
        tables = [(s.table + [0] * n_blocks)[:n_blocks] for s in sequences]  # the 0 is never read
        tables = torch.tensor(tables, dtype=torch.int64, device=device).view(len(sequences), n_blocks, 1)
        keys = (tables * size + torch.arange(size, device=device)).flatten(1)[:, :n_keys]  # [n, S]
        visible = torch.arange(n_keys, device=device) <= positions[:, None]  # [n, S]
        hidden = torch.zeros_like(visible, dtype=pool.kv.dtype).masked_fill_(~visible, float("-inf"))
        return torch.where(visible, keys, keys[:, :1]), hidden[:, None, None]


def choose_tokens(logits, sequences, temperature=0.0, seed=0):
    """The next token of each sequence, as a list: greedy, or sampled with the Gumbel-max trick.

    The noise depends on the request and the position alone, so the tokens of a request do not change with
    what else is in the batch, nor when it is computed. argmax(logits / temperature + Gumbel noise) is a draw
    from softmax(logits / temperature). Args: logits [B, V]; sequences: B of them, to be appended to.
    """
    if temperature > 0:
        noise = torch.empty(logits.shape, dtype=torch.float64)  # [B, V]
        for row, sequence in zip(noise, sequences, strict=True):
            number = (seed * 1_000_003 + sequence.request) * 4096 + len(sequence.ids)
            generator = torch.Generator().manual_seed(number % 2**63)
            row.exponential_(generator=generator).log_().neg_()
        logits = (logits / temperature).cpu() + noise  # [B, V], on the CPU: mps has no float64
    return logits.argmax(dim=-1).tolist()
