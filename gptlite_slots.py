"""GPTlite on the tokens of several sequences at once, each with its own KV cache in a slot.

A batch [B, T] must pad sequences to one length. But only attention looks across the tokens of a sequence;
embeddings, layer norms and linear layers work on any list of tokens. So all tokens of a step go through them
side by side, [N, E], and attention is computed for each sequence over its own slot. Exact: the padding that
is left out was never seen. A running sequence brings one token, a newcomer its whole prompt.

Source: Yu et al., Orca: A Distributed Serving System for Transformer-Based Generative Models, 2022
(selective batching).
"""

from collections import namedtuple

import torch
import torch.nn.functional as F

from gptlite import Block, GPTlite, MultiHeadAttention

# What a forward must know about its N tokens, which belong to B sequences: first one token of each running
# sequence, then the prompts of the newcomers. positions, slots [N]: place of each token in its text and in
# the cache; last [B]: the row of each sequence's newest token; prompts: the rows of each newcomer, as slices;
# n_running: tokens before the prompts; n_keys: the longest running text
SlotStep = namedtuple("SlotStep", "positions slots last prompts n_running n_keys")


class MultiHeadAttention_Slots(MultiHeadAttention):
    """Attention of tokens of several sequences, side by side without padding, each over its own slot."""

    def forward(self, x, k, v, step, hidden):
        """[N, E] -> [N, E]; writes into this layer's cache k, v [slots, H, S, D].

        hidden: -inf where a running sequence has no key yet, else 0 [n_running, 1, 1, n_keys].
        """
        shape = (-1, self.n_heads, self.d_head)
        Q, K, V = (project(x).view(shape) for project in (self.query_proj, self.key_proj, self.value_proj))
        k[step.slots, :, step.positions] = K  # [N, H, D]
        v[step.slots, :, step.positions] = V  # [N, H, D]
        n, n_keys, out = step.n_running, step.n_keys, []
        if n > 0:  # running sequences sit in the first slots, so that their keys are a view, not a copy
            keys, values = k[:n, :, :n_keys], v[:n, :, :n_keys]  # [n, H, n_keys, D]
            seen = F.scaled_dot_product_attention(Q[:n, :, None], keys, values, hidden)  # [n, H, 1, D]
            out.append(seen.flatten(1))  # [n, H*D]
        for rows in step.prompts:
            q, keys, values = (t[None, rows].transpose(1, 2) for t in (Q, K, V))  # [1, H, T, D]
            seen = F.scaled_dot_product_attention(q, keys, values, is_causal=True)  # [1, H, T, D]
            out.append(self.merge_heads(seen)[0])  # [T, H*D]
        return self.out_proj(torch.cat(out))  # [N, E]


class Block_Slots(Block):
    """A block that passes the cache and the step on to its attention."""

    mha_class = MultiHeadAttention_Slots

    def forward(self, x, k, v, step, hidden):
        x = x + self.mha(self.ln1(x), k, v, step, hidden)  # [N, E]
        return x + self.ffwd(self.ln2(x))  # [N, E]


class GPTlite_Slots(GPTlite):
    """GPTlite on the tokens of several sequences; the weights are GPTlite's. For inference only."""

    block_class = Block_Slots

    def forward(self, tokens, step, k, v):
        """Token ids [N] and the cache k, v [L, slots, H, S, D], written in place -> logits [B, V]."""
        x = self.token_embedding(tokens) + self.position_embedding(step.positions)  # [N, E]
        keys = torch.arange(step.n_keys, device=x.device)  # [n_keys]
        unseen = keys > step.positions[: step.n_running, None]  # [n_running, n_keys]
        hidden = torch.zeros_like(unseen, dtype=x.dtype).masked_fill_(unseen, float("-inf"))
        for layer, block in enumerate(self.blocks):
            x = block(x, k[layer], v[layer], step, hidden[:, None, None])  # [N, E]
        return self.fc_out(self.ln(x[step.last]))  # [B, V]


class SlotBatch:
    """The sequences that are being generated; sequence i keeps its keys and values in slot i.

    A sequence is that of gptlite_paged.py, of which slots use the ids, their end, and no table of blocks.

    Args: model: GPTlite_Slots; n_slots: sequences at most; seqlen: tokens that a slot holds; refill: False
        holds finished sequences until all are finished, which makes it static batching.
    """

    def __init__(self, model, n_slots, seqlen, refill=True):
        if not 1 <= seqlen <= model.seqlen:
            raise ValueError(f"slots of {seqlen} tokens; this model has positions for 1 to {model.seqlen}")
        mha, weight = model.blocks[0].mha, model.position_embedding.weight
        self.model, self.n_slots, self.seqlen, self.refill = model, n_slots, seqlen, refill
        shape = (len(model.blocks), n_slots, mha.n_heads, seqlen, mha.d_head)
        self.k = torch.zeros(shape, dtype=weight.dtype, device=weight.device)  # [L, slots, H, S, D]
        self.v = torch.zeros_like(self.k)
        self.running = []

    def n_free(self):
        """How many sequences the next step may add."""
        return self.n_slots - len(self.running) if self.refill or not self.running else 0

    @torch.no_grad()
    def forward(self, newcomers=()):
        """Adds newcomers, computes what is not in the cache; returns each sequence's next logits [B, V].

        Raises ValueError for more newcomers than n_free(), and for one that a slot cannot hold; after that,
        as after any other error, the batch is as it was before.
        """
        n, seqlen = len(self.running), self.seqlen
        if len(newcomers) > self.n_free():
            raise ValueError(f"{len(newcomers)} newcomers for {self.n_free()} free slots")
        for sequence in newcomers:
            T, end = len(sequence.ids), sequence.end
            if not 1 <= T <= seqlen or end > seqlen + 1:
                raise ValueError(
                    f"{T} tokens that become {end}: a slot holds 1 to {seqlen}, one more is not read"
                )
        tokens = [sequence.ids[-1] for sequence in self.running]
        # held sequences may already be one token longer than a slot
        positions = [min(len(sequence.ids), seqlen) - 1 for sequence in self.running]
        slots, prompts, n_keys = list(range(n)), [], max(positions, default=-1) + 1
        for slot, sequence in enumerate(newcomers, start=n):
            T = len(sequence.ids)
            prompts.append(slice(len(tokens), len(tokens) + T))
            tokens += sequence.ids
            positions += range(T)
            slots += [slot] * T
        # nothing of a slot's last occupant may stay: masked keys weigh 0, but 0 * NaN would be NaN
        self.k[:, n : n + len(prompts)] = 0
        self.v[:, n : n + len(prompts)] = 0
        tokens, positions, slots = torch.tensor([tokens, positions, slots], device=self.k.device)  # [N]
        last = [*range(n), *(rows.stop - 1 for rows in prompts)]
        step = SlotStep(positions, slots, torch.tensor(last, device=self.k.device), prompts, n, n_keys)
        logits = self.model(tokens, step, self.k, self.v)  # [B, V]
        self.running += newcomers
        return logits

    def step(self, newcomers=()):
        """One token for every sequence, newcomers included; returns those that are finished and leave."""
        chosen = self.forward(newcomers).argmax(dim=-1).tolist()  # [B], the lowest id of tied ones
        for sequence, token in zip(self.running, chosen, strict=True):
            if not sequence.finished:
                sequence.ids.append(token)
        done = [slot for slot, sequence in enumerate(self.running) if sequence.finished]
        if not self.refill and len(done) < len(self.running):
            return []
        return [self.remove(slot) for slot in reversed(done)]

    def remove(self, slot):
        """Takes a sequence out; the last one moves into its slot, so that those in use stay together.

        A sequence removed before its end goes on when it is added again: its tokens are computed anew.
        """
        sequence, last = self.running[slot], len(self.running) - 1
        if slot < last:
            self.k[:, slot], self.v[:, slot] = self.k[:, last], self.v[:, last]
            self.running[slot] = self.running[last]
        self.running.pop()
        return sequence
