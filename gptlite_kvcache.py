"""GPTlite with a KV cache: keys and values of earlier tokens are kept, so a step computes only the new.

Without a cache, generating token t runs the model over all t tokens again. Keys and values of a token
do not depend on later tokens, so they can be stored: a step then runs the model over one token, and
attention reads the stored keys and values. Exact while the text fits the context. Two forms: a dynamic
cache that grows by concatenation, and a static one, preallocated and written in place.

Past the context both keep the last `seqlen` keys and values and give each new token the last position.
That is a rule, not an equality: the model without cache re-encodes the last tokens at new positions.

Source: Vaswani et al., 2017 (decoding by steps); Shazeer, Fast Transformer Decoding, 2019 (its cost).
"""

import math

import torch
import torch.nn.functional as F

from gptlite import Block, GPTlite, MultiHeadAttention, masked_softmax


def scaled_dot_product_attention_kv_cache(Q, K, V, causal_mask=True, dropout=None):
    """Attention of Sq new queries over Sk keys; the last query belongs to the last key.

    Args: Q [B, H, Sq, D]; K, V [B, H, Sk, D]; causal_mask: True hides later positions (query i sees the
        keys up to Sk - Sq + i), False hides nothing, a boolean tensor that broadcasts to
        [B, H, Sq, Sk] is True where a key may be seen; dropout: module for the weights, or None.
    Returns: [B, H, Sq, D]. A query that may see no key gets zeros.
    """
    wide = torch.promote_types(Q.dtype, torch.float32)  # scores of 16 bits overflow before they are scaled
    scores = Q.to(wide) @ K.to(wide).transpose(-2, -1) / math.sqrt(Q.shape[-1])  # [B, H, Sq, Sk]
    Sq, Sk = scores.shape[-2:]
    if causal_mask is True and Sq > Sk:  # the first Sq - Sk queries see no key
        causal_mask = torch.ones(Sq, Sk, dtype=torch.bool, device=Q.device).tril(Sk - Sq)  # [Sq, Sk]
    if isinstance(causal_mask, torch.Tensor):
        weights = masked_softmax(scores, causal_mask)  # [B, H, Sq, Sk]
    else:
        if causal_mask and Sq > 1:  # a single query is the newest token: it sees every key
            later = torch.ones(Sq, Sk, dtype=torch.bool, device=Q.device).triu(Sk - Sq + 1)  # [Sq, Sk]
            scores = scores.masked_fill(later, float("-inf"))
        weights = F.softmax(scores, dim=-1)  # [B, H, Sq, Sk]
    if dropout is not None:
        weights = dropout(weights)  # [B, H, Sq, Sk]
    return weights.to(V.dtype) @ V  # [B, H, Sq, D]


def window_mask(Sq, Sk, window, device=None):
    """Causal mask that also hides what has left the window: bool [Sq, Sk], True where visible.

    Query i sees the `window` keys that end with its own, key Sk - Sq + i. Feeding Sq tokens at once
    needs it as soon as they cross the window: the first of them still see keys that the last do not.
    """
    own_key = torch.arange(Sk - Sq, Sk, device=device)[:, None]  # [Sq, 1]
    keys = torch.arange(Sk, device=device)[None, :]  # [1, Sk]
    return (keys <= own_key) & (keys > own_key - window)  # [Sq, Sk]


def checked_window(model, max_seqlen):
    """The window, by default the model's context. Raises ValueError for one it has no positions for."""
    window = model.seqlen if max_seqlen is None else max_seqlen
    if not 1 <= window <= model.seqlen:
        raise ValueError(f"max_seqlen is {window}; this model has positions for 1 to {model.seqlen}")
    return window


class MultiHeadAttention_KVCache(MultiHeadAttention):
    """MultiHeadAttention that takes the keys and values of earlier tokens and returns all of them."""

    attend = staticmethod(scaled_dot_product_attention_kv_cache)  # a variant replaces the attention here

    def forward(self, x, kv_cache=None, causal_mask=True, max_seqlen=None):
        """[B, Sq, E] and a cache (k, v), [B, H, S, D] each, -> [B, Sq, E] and the longer cache.

        max_seqlen: how many keys a query sees and the new cache keeps at most, None for all. The cache
        that is given is not modified.
        """
        Q = self.split_heads(self.query_proj(x))  # [B, H, Sq, D]
        K = self.split_heads(self.key_proj(x))  # [B, H, Sq, D]
        V = self.split_heads(self.value_proj(x))  # [B, H, Sq, D]
        if kv_cache is not None:
            K = torch.cat([kv_cache[0], K], dim=-2)  # [B, H, Sk, D]
            V = torch.cat([kv_cache[1], V], dim=-2)  # [B, H, Sk, D]
        Sq, Sk = Q.shape[-2], K.shape[-2]
        beyond = max_seqlen is not None and Sk > max_seqlen
        if beyond and Sq > 1 and causal_mask is True:
            causal_mask = window_mask(Sq, Sk, max_seqlen, x.device)  # [Sq, Sk]
        elif beyond and Sq == 1:
            K, V = K[..., -max_seqlen:, :], V[..., -max_seqlen:, :]  # [B, H, max_seqlen, D]
        out = self.attend(Q, K, V, causal_mask, self.dropout)  # [B, H, Sq, D]
        out = self.dropout(self.out_proj(self.merge_heads(out)))  # [B, Sq, E]
        if beyond:
            K, V = K[..., -max_seqlen:, :], V[..., -max_seqlen:, :]  # [B, H, max_seqlen, D]
        return out, (K, V)


class Block_KVCache(Block):
    """Block that hands the cache of its attention through."""

    mha_class = MultiHeadAttention_KVCache

    def forward(self, x, kv_cache=None, max_seqlen=None):
        attention, kv_cache = self.mha(self.ln1(x), kv_cache, max_seqlen=max_seqlen)
        x = x + attention  # [B, Sq, E]
        x = x + self.ffwd(self.ln2(x))  # [B, Sq, E]
        return x, kv_cache


class GPTlite_KVCache(GPTlite):
    """GPTlite with a cache; the weights are GPTlite's, unchanged."""

    block_class = Block_KVCache

    def forward(self, x, kv_cache=None, max_seqlen=None):
        """New tokens [B, Sq] and the caches of the earlier ones -> (logits [B, Sq, V], caches).

        Args: kv_cache: a list with one (k, v) a layer, [B, H, S, D] each, or None for a new text; it
            is not modified; max_seqlen: the window, at most (and by default) the model's context.
        Tokens past the window all get its last position. Feeding S tokens at once equals feeding them
        one by one. Raises ValueError for no tokens, or a window that the model has no positions for.
        """
        window = checked_window(self, max_seqlen)
        if x.shape[1] == 0:
            raise ValueError("no tokens: an empty prompt has nothing to continue")
        kv_cache = [None] * len(self.blocks) if kv_cache is None else kv_cache
        n_past = 0 if kv_cache[0] is None else kv_cache[0][0].shape[-2]
        positions = torch.arange(n_past, n_past + x.shape[1], device=x.device)  # [Sq]
        positions = positions.clamp(max=window - 1)
        x = self.token_embedding(x) + self.position_embedding(positions)  # [B, Sq, E]
        new_cache = []
        for block, layer_cache in zip(self.blocks, kv_cache, strict=True):
            x, layer_cache = block(x, layer_cache, window)  # [B, Sq, E]
            new_cache.append(layer_cache)
        return self.fc_out(self.ln(x)), new_cache  # [B, Sq, V]


# ---- A dynamic cache as a whole: one (k, v) a layer, [B, H, S, D] each; None holds no token ----


def cache_length(kv_cache):
    """Number of tokens in a cache."""
    return kv_cache[0][0].shape[-2] if kv_cache else 0


def cache_bytes(kv_cache):
    return sum(t.numel() * t.element_size() for kv in kv_cache or [] for t in kv)


def cut_cache(kv_cache, n):
    """The first n tokens of a cache, as views; None for n = 0. Right because a token sees no later one."""
    return [(k[..., :n, :], v[..., :n, :]) for k, v in kv_cache] if n else None  # [B, H, n, D]


def expand_cache(kv_cache, batch_size):
    """The cache of one sequence for a whole batch: every row reads the same memory, as views."""
    return kv_cache and [
        (k.expand(batch_size, -1, -1, -1), v.expand(batch_size, -1, -1, -1)) for k, v in kv_cache
    ]


def common_length(a, b):
    """How many tokens two sequences have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ---- The static form ----


class StaticKVCache:
    """Buffers for the keys and values of a whole window, [L, B, H, W, D] each, written in place.

    The window is a ring: token number t lies in row t % W, so nothing moves when the window is full.
    `length` counts all tokens since reset(). Rows that no token was written to are never read.
    """

    def __init__(self, model, batch_size, max_seqlen=None):
        weight = model.position_embedding.weight
        mha = model.blocks[0].mha
        self.window = checked_window(model, max_seqlen)
        shape = (len(model.blocks), batch_size, mha.n_heads, self.window, mha.d_head)
        self.k = torch.zeros(shape, dtype=weight.dtype, device=weight.device)  # [L, B, H, W, D]
        self.v = torch.zeros_like(self.k)
        self.length = 0

    def reset(self):
        """Makes the cache ready for another prompt; the buffers stay where they are."""
        self.advance(-self.length)

    def advance(self, n_tokens):
        """Counts tokens that were written; below 0 forgets the last ones, before the ring has rolled."""
        self.length += n_tokens

    def check_fits(self, model, batch_size):
        """Raises ValueError for another model's shape or batch size, which would be broadcast over."""
        mha, found = model.blocks[0].mha, list(self.k.shape)
        wanted = [len(model.blocks), batch_size, mha.n_heads, self.window, mha.d_head]
        if found != wanted:
            raise ValueError(f"a cache {found} does not fit: this model and batch need {wanted}")

    def rows(self):
        """Rows of the tokens in the window, oldest first, as an index tensor."""
        oldest = max(self.length - self.window, 0)
        return torch.arange(oldest, self.length, device=self.k.device) % self.window

    def state_dict(self):
        """The tokens in the window, oldest first, and their number; the empty tail is left out."""
        rows = self.rows()
        return {"k": self.k[..., rows, :], "v": self.v[..., rows, :], "length": self.length}

    def load_state_dict(self, state):
        n_kept = min(state["length"], self.window)  # less was kept where a smaller window has rolled
        if state["k"].shape != (*self.k.shape[:3], n_kept, self.k.shape[4]):
            raise ValueError(f"a cache {list(state['k'].shape)} does not fit buffers {list(self.k.shape)}")
        self.reset()
        self.advance(state["length"])
        rows = self.rows()
        self.k[..., rows, :], self.v[..., rows, :] = state["k"].to(self.k), state["v"].to(self.v)


class MultiHeadAttention_StaticKVCache(MultiHeadAttention):
    """MultiHeadAttention over one layer of a StaticKVCache."""

    def forward(self, x, cache, layer):
        """New tokens [B, Sq, E] -> [B, Sq, E]; writes their keys and values into the cache."""
        Q = self.split_heads(self.query_proj(x))  # [B, H, Sq, D]
        K = self.split_heads(self.key_proj(x))  # [B, H, Sq, D]
        V = self.split_heads(self.value_proj(x))  # [B, H, Sq, D]
        k, v, W = cache.k[layer], cache.v[layer], cache.window  # [B, H, W, D]
        Sq, n_past = x.shape[1], cache.length
        mask = True
        if n_past + Sq <= W:  # everything fits: write behind the last token, read up to here
            k[..., n_past : n_past + Sq, :] = K
            v[..., n_past : n_past + Sq, :] = V
            K, V = k[..., : n_past + Sq, :], v[..., : n_past + Sq, :]  # [B, H, Sk, D]
        elif Sq == 1:  # the new token takes the place of the oldest; order does not matter to a sum
            k[..., n_past % W, :] = K[..., 0, :]
            v[..., n_past % W, :] = V[..., 0, :]
            K, V = k, v  # [B, H, W, D]
        else:  # a chunk that crosses the window: its first queries need keys that its last overwrite
            rows = cache.rows()
            K = torch.cat([k[..., rows, :], K], dim=-2)  # [B, H, Sk, D]
            V = torch.cat([v[..., rows, :], V], dim=-2)  # [B, H, Sk, D]
            mask = window_mask(Sq, K.shape[-2], W, x.device)  # [Sq, Sk]
            kept = torch.arange(n_past + Sq - W, n_past + Sq, device=x.device) % W  # [W]
            k[..., kept, :], v[..., kept, :] = K[..., -W:, :], V[..., -W:, :]
        out = scaled_dot_product_attention_kv_cache(Q, K, V, mask)  # [B, H, Sq, D]
        return self.out_proj(self.merge_heads(out))  # [B, Sq, E]


class Block_StaticKVCache(Block_KVCache):
    mha_class = MultiHeadAttention_StaticKVCache

    def forward(self, x, cache, layer):
        x = x + self.mha(self.ln1(x), cache, layer)  # [B, Sq, E]
        return x + self.ffwd(self.ln2(x))  # [B, Sq, E]


class GPTlite_StaticKVCache(GPTlite_KVCache):
    """GPTlite over a StaticKVCache, which it writes in place. For inference only (no dropout, no gradients).

    Raises ValueError for a cache of another batch size or another model's shape.
    """

    block_class = Block_StaticKVCache

    @torch.no_grad()  # a graph of gradients would grow in the buffers, step by step
    def forward(self, x, kv_cache=None):
        """New tokens [B, Sq] -> (logits [B, Sq, V], the cache, now longer; a new one if none is given)."""
        if x.shape[1] == 0:
            raise ValueError("no tokens: an empty prompt has nothing to continue")
        if kv_cache is None:
            kv_cache = StaticKVCache(self, x.shape[0])
        kv_cache.check_fits(self, x.shape[0])
        positions = torch.arange(kv_cache.length, kv_cache.length + x.shape[1], device=x.device)  # [Sq]
        positions = positions.clamp(max=kv_cache.window - 1)
        x = self.token_embedding(x) + self.position_embedding(positions)  # [B, Sq, E]
        for layer, block in enumerate(self.blocks):
            x = block(x, kv_cache, layer)  # [B, Sq, E]
        kv_cache.advance(x.shape[1])
        return self.fc_out(self.ln(x)), kv_cache  # [B, Sq, V]
