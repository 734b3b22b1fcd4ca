"""GPTlite with a KV cache whose tokens stand where one says: attention goes by position, not by order.

A token's keys and values depend on its position, since positions are learned and added to the input. So what
is stored must be used at the position it was computed for, but pieces may be computed apart from each other,
with gaps between them, and joined in any order, as long as each query is told which keys it sees.

Source: Gim et al., Prompt Cache, 2024 (positions with gaps); Vaswani et al., 2017 (attention knows no order).
"""

import torch

from gptlite_kvcache import GPTlite_KVCache


class GPTlite_Positions(GPTlite_KVCache):
    """GPTlite_KVCache that also takes positions; the weights are GPTlite's."""

    def forward(self, x, kv_cache=None, max_seqlen=None, positions=None, key_positions=None, visible=None):
        """As GPTlite_KVCache; with positions [Sq], those of x [B, Sq], and key_positions [S], the cache's.

        Args: visible: which keys, those of the cache first, each query sees, bool [Sq, S + Sq]; by default
            those at its own and at lower positions.
        Returns: logits [B, Sq, V] and the longer cache. A position beyond the context raises IndexError.
        """
        if positions is None:
            return super().forward(x, kv_cache, max_seqlen)
        if visible is None:
            keys = positions if key_positions is None else torch.cat([key_positions, positions])  # [S + Sq]
            visible = keys <= positions[:, None]  # [Sq, S + Sq]
        x, new_cache = self.token_embedding(x) + self.position_embedding(positions), []  # [B, Sq, E]
        for block, layer_cache in zip(self.blocks, kv_cache or [None] * len(self.blocks), strict=True):
            attention, layer_cache = block.mha(block.ln1(x), layer_cache, causal_mask=visible)
            x = x + attention  # [B, Sq, E]
            x = x + block.ffwd(block.ln2(x))  # [B, Sq, E]
            new_cache.append(layer_cache)
        return self.fc_out(self.ln(x)), new_cache  # [B, Sq, V]


def join_caches(*caches):
    """Caches one behind the other: one (k, v) a layer, [B, H, S, D] each; None holds no token."""
    layers = zip(*(cache for cache in caches if cache), strict=True)
    return [tuple(torch.cat(parts, dim=2) for parts in zip(*layer, strict=True)) for layer in layers]
