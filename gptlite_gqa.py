"""GPTlite with grouped-query attention (GQA): several query heads share one head of keys and values.

A decode step reads every key and value of the text. With n_groups heads of them instead of n_heads the
cache holds, and a step reads, n_groups / n_heads of the bytes; one group is multi-query attention (MQA),
as many groups as heads is the model unchanged. The query heads of a group are consecutive. Trained weights
are converted by the mean of each group's heads, which loses what the heads differ in.

Where it wins: memory at once, time where a step reads more cache than weights (large batches, long texts),
and only if nothing copies the shared head out for every query head. The expanded form below, which most
tutorials show, does that; the grouped form folds the queries of a group into the rows of one product.

Source: Shazeer, Fast Transformer Decoding: One Write-Head is All You Need (MQA), 2019; Ainslie et al.,
GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints, 2023.

Letters: as in gptlite.py; G groups.
"""

import functools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from gptlite import masked_softmax
from gptlite_kvcache import (
    Block_KVCache,
    GPTlite_KVCache,
    MultiHeadAttention_KVCache,
    scaled_dot_product_attention_kv_cache,
)


class MultiHeadAttention_GQA(MultiHeadAttention_KVCache):
    """MultiHeadAttention_KVCache with n_groups heads of keys and values; the cache holds those only."""

    def __init__(self, d_model, n_heads, d_head, dropout_p, n_groups):
        check_groups(n_heads, n_groups)
        super().__init__(d_model, n_heads, d_head, dropout_p)
        self.n_groups = n_groups  # queries keep H heads; keys and values get G in their place
        self.key_proj = nn.Linear(d_model, n_groups * d_head)
        self.value_proj = nn.Linear(d_model, n_groups * d_head)

    def attend(self, Q, K, V, causal_mask=True, dropout=None):
        """Q [B, H, Sq, D]; K, V [B, G, Sk, D] -> [B, H, Sq, D]; expanded_attention computes the same."""
        return grouped_attention(Q, K, V, causal_mask, dropout)


def convert_mha_to_gqa(state_dict, n_heads, d_head, n_groups):
    """Weights of GPTlite -> weights of GPTlite_GQA: keys and values of a group are averaged.

    Args: state_dict: names to tensors, of the model or of its attention alone; it is not modified.
    Returns: a state dictionary; with n_groups = n_heads the same numbers. Further training ("up-training")
        has to repair what the mean loses. Raises ValueError for groups of unequal size, or projections
        that do not have n_heads heads of d_head.
    """
    check_groups(n_heads, n_groups)
    converted = dict(state_dict)
    for name, tensor in state_dict.items():
        if name.split(".")[-2:-1] not in (["key_proj"], ["value_proj"]):
            continue
        if tensor.shape[0] != n_heads * d_head:
            raise ValueError(f"{name} is {list(tensor.shape)}: no projection to {n_heads} heads of {d_head}")
        by_group = tensor.view(n_groups, n_heads // n_groups, d_head, *tensor.shape[1:])  # [G, H/G, D, ...]
        converted[name] = by_group.mean(dim=1).flatten(0, 1)  # [G*D, E], a bias [G*D]
    return converted


def check_groups(n_heads, n_groups):
    """Raises ValueError unless the heads fall into n_groups groups of equal size."""
    if n_groups < 1 or n_heads % n_groups:
        raise ValueError(f"{n_heads} heads cannot share {n_groups} groups of keys and values evenly")


def expanded_attention(Q, K, V, causal_mask=True, dropout=None):
    """Attention of H query heads over G heads of keys and values, which are copied out for all the heads.

    Args: Q [B, H, Sq, D]; K, V [B, G, Sk, D], G divides H; causal_mask, dropout: as in
        scaled_dot_product_attention_kv_cache.
    Returns: [B, H, Sq, D]. The naive twin of grouped_attention: easy to read, and no faster than H heads
        of their own, since it writes and reads H heads of copies.
    """
    heads_per_group = Q.shape[1] // K.shape[1]
    K = K.repeat_interleave(heads_per_group, dim=1)  # [B, H, Sk, D]
    V = V.repeat_interleave(heads_per_group, dim=1)  # [B, H, Sk, D]
    return scaled_dot_product_attention_kv_cache(Q, K, V, causal_mask, dropout)  # [B, H, Sq, D]


def grouped_attention(Q, K, V, causal_mask=True, dropout=None):
    """The same, but each head of keys and values is read once for all the query heads of its group.

    Args: as above; V may be of another width, [B, G, Sk, Dv].
    Returns: [B, H, Sq, Dv]. A query that may see no key gets zeros.
    """
    B, H, Sq, _ = Q.shape
    G, Sk = K.shape[1:3]
    weights = grouped_weights(Q, K, causal_mask)  # [B, H, Sq, Sk]
    if dropout is not None:
        weights = dropout(weights)  # [B, H, Sq, Sk]
    out = weights.to(V.dtype).reshape(B, G, H // G * Sq, Sk) @ V  # [B, G, H/G*Sq, Dv]
    return out.reshape(B, H, Sq, V.shape[-1])  # [B, H, Sq, Dv]


def grouped_weights(Q, K, causal_mask=True, scale=None):
    """What each query gives to each key: Q [B, H, Sq, D], K [B, G, Sk, D] -> [B, H, Sq, Sk].

    Args: scale: factor of the scores, by default 1/sqrt(D). Rows sum to one, or are zero without any key.
    """
    B, H, Sq, D = Q.shape
    G, Sk = K.shape[1:3]
    wide = torch.promote_types(Q.dtype, torch.float32)  # scores of 16 bits overflow before they are scaled
    # heads of a group are consecutive, so their queries are already the rows of one matrix
    Q = Q.to(wide).reshape(B, G, H // G * Sq, D)  # [B, G, H/G*Sq, D]
    Q = Q * (1 / math.sqrt(D) if scale is None else scale)  # fewer numbers to scale than scores
    scores = Q @ K.to(wide).transpose(-2, -1)  # [B, G, H/G*Sq, Sk]
    scores = scores.reshape(B, H, Sq, Sk)  # the same numbers by head, where masks and softmax apply
    if causal_mask is True and Sq == 1 <= Sk:
        causal_mask = False  # a single query is the newest token: it sees every key
    if causal_mask is True:
        causal_mask = torch.ones(Sq, Sk, dtype=torch.bool, device=Q.device).tril(Sk - Sq)  # [Sq, Sk]
    return F.softmax(scores, dim=-1) if causal_mask is False else masked_softmax(scores, causal_mask)


# ---- The model ----


class Block_GQA(Block_KVCache):
    def __init__(self, d_model, n_heads, d_head, dropout_p, n_groups):
        self.mha_class = functools.partial(MultiHeadAttention_GQA, n_groups=n_groups)
        super().__init__(d_model, n_heads, d_head, dropout_p)


class GPTlite_GQA(GPTlite_KVCache):
    """GPTlite_KVCache with grouped-query attention: same calls, caches with n_groups heads."""

    def __init__(self, vocab_size, d_model, n_heads, d_head, n_layers, dropout_p, seqlen, n_groups):
        self.block_class = functools.partial(Block_GQA, n_groups=n_groups)
        super().__init__(vocab_size, d_model, n_heads, d_head, n_layers, dropout_p, seqlen)


def use_expanded(model):
    """Makes a GPTlite_GQA attend in the expanded form, and returns it."""
    for block in model.blocks:
        block.mha.attend = expanded_attention
    return model
