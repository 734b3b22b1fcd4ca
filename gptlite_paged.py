"""GPTlite over a paged KV cache: each sequence attends over its own blocks, which lie anywhere in one pool.

A table tells where the blocks of a sequence are (gptlite_blocks.py). Exact: attention is a sum over keys,
wherever they lie. First the naive form, one sequence at a time; then the one that the model uses, in which a
step computes one flat batch of tokens, [N, E]: one token of each running sequence, and prompts or pieces of
prompts. All keys and values of a step are written before any attention reads.

What to compute, share, free or evict is decided on top of it: main_paged_attention.py, main_block_cache.py,
main_radix_cache.py, main_chunked_prefill.py.

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.
"""

from collections import namedtuple

import torch
import torch.nn.functional as F

from gptlite import Block, GPTlite, MultiHeadAttention
from gptlite_blocks import BlockPool, Sequence  # noqa: F401 (who uses the model finds its pool here as well)


def paged_attention(Q, kv, tables, lengths):
    """One new query a sequence over blocks that lie anywhere: gather by table, then attend.

    Args: Q [B, H, D]; kv: one layer of the pool [blocks, block_size, 2, H, D]; tables: the block numbers of
        each sequence; lengths: how many tokens each has.
    Returns: [B, H, D].
    """
    out = []
    for q, table, n in zip(Q, tables, lengths, strict=True):
        K, V = kv[table].flatten(0, 1)[:n].permute(1, 2, 0, 3)  # [H, n, D] each
        out.append(F.scaled_dot_product_attention(q[:, None], K, V)[:, 0])  # [H, D]
    return torch.stack(out)  # [B, H, D]


def padded_paged_attention(Q, kv, slots, hidden):
    """paged_attention of all sequences in one call, padded to the longest.

    Args: Q [B, H, D]; kv: one layer of the pool, by slots [blocks * block_size, 2, H, D]; slots: places of
        the keys [B, S]; hidden: what is added to the scores, -inf behind a text's end, else 0 [B, 1, 1, S].
    Returns: [B, H, D].
    """
    gathered = kv.index_select(0, slots.flatten()).view(*slots.shape, *kv.shape[1:])  # [B, S, 2, H, D]
    K, V = gathered.permute(2, 0, 3, 1, 4)  # [B, H, S, D] each
    return F.scaled_dot_product_attention(Q[:, :, None], K, V, hidden)[:, :, 0]  # [B, H, D]


def chunk_attention(Q, kv, slots, visible):
    """Attention of several successive tokens of one sequence.

    Args: Q [Sq, H, D]; kv as above; slots: places of the keys [Sk]; visible: True where a query may see a
        key [Sq, Sk].
    Returns: [Sq, H, D].
    """
    K, V = kv.index_select(0, slots).permute(1, 2, 0, 3)[:, None]  # [1, H, Sk, D] each
    out = F.scaled_dot_product_attention(Q[None].transpose(1, 2), K, V, visible)  # [1, H, Sq, D]
    return out[0].transpose(0, 1)  # [Sq, H, D]


# What a forward must know about its N tokens: first n single tokens, then the chunks, one after the other.
# positions, slots [N]: place of each token in its text and in the pool; last [B]: rows that need logits;
# keys [n, S]: slots of all keys of the single tokens' sequences; hidden [n, 1, 1, S]: -inf behind a text's
# end, else 0; chunks: for each (rows as a slice, slots of its keys [Sk], visible [Sq, Sk])
Step = namedtuple("Step", "positions slots last keys hidden chunks")


class MultiHeadAttention_Paged(MultiHeadAttention):
    """Attention of the tokens of a step, side by side, each sequence over its own blocks of the pool."""

    def forward(self, x, kv, step):
        """[N, E] -> [N, E]; writes keys and values into this layer's kv [slots, 2, H, D]."""
        shape, n, out = (len(x), self.n_heads, self.d_head), len(step.keys), []
        Q, K, V = (project(x).view(shape) for project in (self.query_proj, self.key_proj, self.value_proj))
        kv[step.slots] = torch.stack([K, V], dim=1)  # [N, 2, H, D]
        if n > 0:
            out.append(padded_paged_attention(Q[:n], kv, step.keys, step.hidden))  # [n, H, D]
        for rows, slots, visible in step.chunks:
            out.append(chunk_attention(Q[rows], kv, slots, visible))  # [Sq, H, D]
        return self.out_proj(torch.cat(out).flatten(1))  # [N, E]


class Block_Paged(Block):
    """A block that passes the pool's memory and the step on to its attention."""

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
