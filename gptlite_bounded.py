"""GPTlite over caches that hold less than the text: sliding windows, sinks, eviction.

What a query may see is the business of the cache, not of the model. Each layer has a cache of its own, which
takes the new queries, keys and values, keeps what its rule keeps, and returns what the queries attend to. So
a technique is one small class with attend(Q, K, V), and the model below stays the same for all of them.

Source: Vaswani et al., Attention Is All You Need, 2017; for the rules see main_sliding_window.py,
main_streaming_llm.py and main_kv_eviction.py.

Letters: as in gptlite.py; G groups, as many as heads unless keys and values are shared.
"""

import functools
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from gptlite import Block, GPTlite
from gptlite_gqa import MultiHeadAttention_GQA, grouped_attention, grouped_weights


class BoundedCache:
    """The caches of all layers and the number of tokens read so far; n_read counts those that came before.

    Args: layers: one for each layer, with attend(Q [B, H, Sq, D], K, V [B, G, Sq, D]) -> [B, H, Sq, D],
        the tensors k and v that it holds (None at first), and keys_total, how many keys of a head all
        queries so far have read together.
    """

    def __init__(self, layers):
        self.layers, self.n_read = layers, 0

    @property
    def k(self):
        return [layer.k for layer in self.layers]

    @property
    def v(self):
        return [layer.v for layer in self.layers]

    @property
    def keys_read(self):
        """How many keys a query has read, on average over all queries so far, heads and layers."""
        return sum(layer.keys_total for layer in self.layers) / (len(self.layers) * self.n_read)


def cache_bytes(cache):
    """Bytes of the keys and values that a cache holds: a BoundedCache, or a list of (k, v), one a layer."""
    pairs = cache if isinstance(cache, list) else zip(cache.k, cache.v, strict=True)
    return sum(t.numel() * t.element_size() for pair in pairs for t in pair)


class MultiHeadAttention_Bounded(MultiHeadAttention_GQA):
    """MultiHeadAttention that leaves attending to a layer's cache. For inference: dropout is not applied."""

    def forward(self, x, cache):
        """[B, Sq, E] -> [B, Sq, E]; the cache is changed."""
        Q = self.split_heads(self.query_proj(x))  # [B, H, Sq, D]
        K = self.split_heads(self.key_proj(x))  # [B, G, Sq, D]
        V = self.split_heads(self.value_proj(x))  # [B, G, Sq, D]
        return self.out_proj(self.merge_heads(cache.attend(Q, K, V)))  # [B, Sq, E]


class Block_Bounded(Block):
    def __init__(self, d_model, n_heads, d_head, dropout_p, n_groups=None):
        self.mha_class = functools.partial(MultiHeadAttention_Bounded, n_groups=n_groups or n_heads)
        super().__init__(d_model, n_heads, d_head, dropout_p)

    def forward(self, x, cache):
        x = x + self.mha(self.ln1(x), cache)  # [B, Sq, E]
        return x + self.ffwd(self.ln2(x))  # [B, Sq, E]


class GPTlite_Bounded(GPTlite):
    """GPTlite whose layers attend through caches of any rule; the weights are GPTlite's (or GPTlite_GQA's).

    Args: as GPTlite; make_cache: function without arguments that makes the empty cache of a layer;
        n_groups: heads of keys and values, by default as many as heads.
    """

    def __init__(self, *args, make_cache, n_groups=None, **kwargs):
        self.block_class = functools.partial(Block_Bounded, n_groups=n_groups)
        super().__init__(*args, **kwargs)
        self.make_cache = make_cache

    def position_of(self, t):
        """Positions [Sq] of tokens number t [Sq]. Raises ValueError for tokens that there is none for."""
        if t[-1] >= self.seqlen:
            raise ValueError(f"token {int(t[-1])} has no position: the context is {self.seqlen}")
        return t

    def embed(self, x, t):
        """What goes into the first layer, for tokens number t [Sq]: [B, Sq, E]."""
        return self.token_embedding(x) + self.position_embedding(self.position_of(t))

    @torch.no_grad()
    def forward(self, x, kv_cache=None, max_seqlen=None):
        """New tokens [B, Sq] -> (logits [B, Sq, V], the cache, which is changed in place).

        Args: kv_cache: what an earlier call returned, None for a new text; max_seqlen: is not read, since
            the cache's own rule says what is kept.
        Raises ValueError for no tokens, or tokens past the context.
        """
        if x.shape[1] == 0:
            raise ValueError("no tokens: an empty prompt has nothing to continue")
        if kv_cache is None:
            kv_cache = BoundedCache([self.make_cache() for _ in self.blocks])
        t = torch.arange(kv_cache.n_read, kv_cache.n_read + x.shape[1], device=x.device)  # [Sq]
        x = self.embed(x, t)  # [B, Sq, E]
        for block, layer in zip(self.blocks, kv_cache.layers, strict=True):
            x = block(x, layer)  # [B, Sq, E]
        kv_cache.n_read += len(t)
        return self.fc_out(self.ln(x[:, -len(t) :])), kv_cache  # [B, Sq, V]


# ---- The cache of a window: what the others are compared with ----


class RollingCache:
    """A layer's cache of the first n_global tokens and of the last `window` others, written in place.

    Token t lies in row t of the first, then in a ring, row n_global + (t - n_global) % window: nothing moves
    when it is full. Raises ValueError for a window below 1. k, v [B, G, n_global + window, D].
    """

    def __init__(self, window, n_global=0):
        if window < 1 or n_global < 0:
            raise ValueError(f"a window of {window} behind {n_global} first tokens: the newest must fit")
        self.window, self.n_global, self.k, self.v = window, n_global, None, None
        self.n_read = self.keys_total = 0

    def attend(self, Q, K, V):
        (B, G, Sq, D), n_rows, n_past = K.shape, self.n_global + self.window, self.n_read
        if self.k is None:
            self.k, self.v = K.new_zeros(B, G, n_rows, D), V.new_zeros(B, G, n_rows, D)
            self.token_of = torch.empty(n_rows, dtype=torch.int64, device=K.device)  # which token a row holds
        new = torch.arange(n_past, n_past + Sq, device=K.device)  # [Sq]
        held = min(n_past, n_rows)  # rows that hold a token
        self.n_read += Sq
        if Sq == 1:  # the new token takes the place of the oldest; order does not matter to a sum
            self.write(new, K, V)
            n = min(self.n_read, n_rows)
            self.keys_total += n
            return self.read(Q, self.k[..., :n, :], self.v[..., :n, :])  # [B, H, 1, D]
        # the first queries of a piece need keys that its last tokens overwrite: attend first, then write
        seen = torch.cat([self.token_of[:held], new])  # [Sk]
        k = torch.cat([self.k[..., :held, :], K], dim=-2)  # [B, G, Sk, D]
        v = torch.cat([self.v[..., :held, :], V], dim=-2)  # [B, G, Sk, D]
        distance = new[:, None] - seen  # [Sq, Sk]
        visible = (distance >= 0) & ((distance < self.window) | (seen < self.n_global))  # [Sq, Sk]
        self.keys_total += visible.sum().item()
        out = grouped_attention(Q, k, v, visible)  # [B, H, Sq, D]
        kept = (new < self.n_global) | (new >= n_past + Sq - self.window)  # [Sq]: no row is written twice
        self.write(new[kept], K[..., kept, :], V[..., kept, :])
        return out

    def read(self, q, k, v):
        """Attention of the newest token [B, H, 1, D] to the rows that hold one [B, G, n, D]."""
        return grouped_attention(q, k, v)

    def write(self, tokens, K, V):
        """Puts tokens number `tokens` [n] into their rows: globals in front, then the ring."""
        ring = self.n_global + (tokens - self.n_global) % self.window
        rows = torch.where(tokens < self.n_global, tokens, ring)  # [n]
        self.k[..., rows, :], self.v[..., rows, :], self.token_of[rows] = K, V, tokens


# ---- Caches that evict by a rule ----


def by_group(weights, n_groups):
    """Attention weights [B, H, Sq, S] -> what the heads of each group give together [B, G, Sq, S]."""
    return weights.unflatten(1, (n_groups, -1)).sum(dim=2)


def mix(weights, V):
    """Attention weights [B, H, Sq, S] and values [B, G, S, D] -> [B, H, Sq, D]."""
    out = weights.to(V.dtype).reshape(*V.shape[:2], -1, V.shape[2]) @ V  # [B, G, H/G * Sq, D]
    return out.reshape(*weights.shape[:3], V.shape[3])


class EvictingCache(ABC):
    """A layer's cache of at most `budget` keys for each head of keys: those that its rule finds worth most.

    A new token takes the slot of the key that goes, so the slots are in no order. A rule is a subclass with
    worth(), and with observe() if it goes by attention. k, v [B, G, budget, D]; token [B, G, budget].
    Args: budget: keys that a query sees at most, its own among them; n_recent: newest tokens that stay in any
        case; prompt_budget: None feeds a prompt token by token, a number reads it with all keys, as if
        there were no budget, and then cuts it to so many. Raises ValueError for a budget without room.
    """

    neighbours = 1  # keys side by side whose worth is averaged when a prompt is cut

    def __init__(self, budget, n_recent=1, prompt_budget=None):
        self.n_cut = budget if prompt_budget is None else prompt_budget
        if not 1 <= n_recent <= self.n_cut <= budget:
            raise ValueError(f"{budget} keys, {self.n_cut} of a prompt, the last {n_recent} always: no room")
        self.budget, self.n_recent, self.reads_prompt = budget, n_recent, prompt_budget is not None
        self.k = self.v = None
        self.n_read = self.n_held = self.keys_total = 0

    def attend(self, Q, K, V):
        """Q [B, H, Sq, D], K and V [B, G, Sq, D] of new tokens -> [B, H, Sq, D]."""
        if self.k is None and self.reads_prompt and Q.shape[-2] > 1:
            return self.read_prompt(Q, K, V)
        if self.k is None:
            self.allocate(K, self.budget)
        tokens = zip(*(x.split(1, dim=-2) for x in (Q, K, V)), strict=True)
        return torch.cat([self.step(*token) for token in tokens], dim=-2)  # [B, H, Sq, D]

    def allocate(self, K, n_slots):
        (B, G, _, D), wide = K.shape, torch.promote_types(K.dtype, torch.float32)
        self.k, self.v = K.new_zeros(B, G, n_slots, D), K.new_zeros(B, G, n_slots, D)
        self.token = torch.zeros(B, G, n_slots, dtype=torch.int64, device=K.device)  # which one a slot holds
        self.received = K.new_zeros(B, G, n_slots, dtype=wide)  # attention, as far as the rule counts it

    def step(self, q, k, v):
        """One token [B, H or G, 1, D]: makes room, writes it, attends."""
        slot = self.free_slot()  # [B, G, 1]
        self.k.scatter_(2, slot.unsqueeze(-1).expand_as(k), k)
        self.v.scatter_(2, slot.unsqueeze(-1).expand_as(v), v)
        self.token.scatter_(2, slot, self.n_read)
        self.received.scatter_(2, slot, 0.0)
        self.n_read += 1
        n = self.n_held
        self.keys_total += n
        weights = grouped_weights(q, self.k[..., :n, :], False)  # [B, H, 1, n]
        self.observe(by_group(weights, k.shape[1]))
        return mix(weights, self.v[..., :n, :])  # [B, H, 1, D]

    def free_slot(self):
        """The next empty slot, or in a full cache that of the key worth least: [B, G, 1]."""
        if self.n_held < self.budget:
            self.n_held += 1
            return torch.full_like(self.token[..., :1], self.n_held - 1)
        return self.guarded(self.worth(), self.n_recent - 1).argmin(dim=-1, keepdim=True)

    def guarded(self, worth, n_safe):
        """Worth [B, G, S], beyond all bounds for the n_safe newest tokens."""
        return worth.masked_fill(self.token >= self.n_read - n_safe, float("inf"))

    def read_prompt(self, Q, K, V):
        """A prompt with all its keys; then n_cut of them stay for each head, in their order."""
        P, weights = K.shape[-2], grouped_weights(Q, K)  # [B, H, P, P]
        self.allocate(K, P)
        self.k, self.v = K, V
        self.token += torch.arange(P, device=K.device)  # [B, G, P]
        self.n_read, self.n_held, self.keys_total = P, min(P, self.n_cut), P * (P + 1) // 2
        self.observe(by_group(weights, K.shape[1]))
        size = self.neighbours
        worth = F.avg_pool1d(self.worth(), size, 1, size // 2, count_include_pad=False)  # [B, G, P]
        kept = self.guarded(worth, self.n_recent).topk(self.n_held, dim=-1).indices.sort(dim=-1).values
        room = (0, self.budget - self.n_held)  # empty slots
        self.token, self.received = (F.pad(x.gather(2, kept), room) for x in (self.token, self.received))
        rows = kept.unsqueeze(-1).expand(*kept.shape, K.shape[-1])  # [B, G, n, D]
        self.k, self.v = (F.pad(x.gather(2, rows), (0, 0, *room)) for x in (K, V))  # [B, G, budget, D]
        return mix(weights, V)  # [B, H, P, D]

    def observe(self, given):  # noqa: B027 (a rule may go by place alone)
        """What new queries gave to the keys held: [B, G, Sq, n], in the order of the slots."""

    @abstractmethod
    def worth(self):
        """[B, G, S], for all slots."""


@torch.no_grad()
def kept_tokens(model, tokens, layer=0, head=0):
    """Which tokens a head holds after each of tokens [1, T], fed one by one: steps and tokens, two lists."""
    cache, steps, held = None, [], []
    for t in range(tokens.shape[1]):
        _, cache = model(tokens[:, t : t + 1], cache)
        one = cache.layers[layer]
        held += one.token[0, head, : one.n_held].tolist()
        steps += [t] * one.n_held
    return steps, held
