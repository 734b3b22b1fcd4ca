"""GPTlite with grouped-query attention: several query heads share one head of keys and values.

A decode step reads every key and value of the text. With n_groups heads of them instead of n_heads the
cache holds, and a step reads, n_groups / n_heads of the bytes; one group is multi-query attention (MQA),
as many groups as heads is the model unchanged. The saving only comes if nothing copies the shared head
out for every query head: the grouped form below folds the queries of a group into the rows of one matrix
product; the expanded form beside it, which most tutorials show, is equal and gives the saving away.

`n_groups` is the number of key-value heads. The query heads of a group are consecutive.

Source: Shazeer, Fast Transformer Decoding: One Write-Head is All You Need (MQA), 2019; Ainslie et al.,
GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints, 2023.

Letters: as in gptlite.py; G groups.
"""

import functools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from gptlite_kvcache import (
    Block_KVCache,
    GPTlite_KVCache,
    MultiHeadAttention_KVCache,
    scaled_dot_product_attention_kv_cache,
)


def grouped_attention(Q, K, V, causal_mask=True, dropout=None, scale=None):
    """Attention of H query heads over G heads of keys and values, each of which is read once.

    Args: Q [B, H, Sq, D]; K [B, G, Sk, D] and V [B, G, Sk, Dv], Sk >= Sq, G divides H; causal_mask, dropout:
        as in scaled_dot_product_attention_kv_cache, a mask broadcasts to [B, H, Sq, Sk]; scale: factor of
        the scores, by default 1/sqrt(D).
    Returns: [B, H, Sq, Dv]. A query that may see no key gets zeros.
    """
    B, H, Sq, D = Q.shape
    G, Sk = K.shape[1:3]
    scale = 1 / math.sqrt(D) if scale is None else scale
    # heads of a group are consecutive, so their queries are already the rows of one matrix
    Q = Q.reshape(B, G, H // G * Sq, D) * scale  # [B, G, H/G*Sq, D]; fewer numbers to scale than scores
    scores = Q @ K.transpose(-2, -1)  # [B, G, H/G*Sq, Sk]
    scores = scores.reshape(B, H, Sq, Sk)  # the same numbers by head, where masks and softmax apply
    if isinstance(causal_mask, torch.Tensor):
        scores = scores.masked_fill(~causal_mask, float("-inf"))
    elif causal_mask and Sq > 1:
        visible = torch.ones(Sq, Sk, dtype=torch.bool, device=Q.device).tril(Sk - Sq)  # [Sq, Sk]
        scores = scores.masked_fill(~visible, float("-inf"))
    weights = F.softmax(scores, dim=-1)  # [B, H, Sq, Sk]
    if isinstance(causal_mask, torch.Tensor):
        weights = weights.masked_fill(~causal_mask.any(dim=-1, keepdim=True), 0.0)
    if dropout is not None:
        weights = dropout(weights)
    out = weights.reshape(B, G, H // G * Sq, Sk) @ V  # [B, G, H/G*Sq, Dv]
    return out.reshape(B, H, Sq, -1)  # [B, H, Sq, Dv]


def expanded_attention(Q, K, V, causal_mask=True, dropout=None):
    """The same by copying each group's keys and values out for all its heads; arguments as above.

    Easier to read, and no faster than H heads of their own: it writes and reads H heads of copies.
    """
    heads_per_group = Q.shape[1] // K.shape[1]
    K = K.repeat_interleave(heads_per_group, dim=1)  # [B, H, Sk, D]
    V = V.repeat_interleave(heads_per_group, dim=1)  # [B, H, Sk, D]
    return scaled_dot_product_attention_kv_cache(Q, K, V, causal_mask, dropout)  # [B, H, Sq, D]


def check_groups(n_heads, n_groups):
    """Raises ValueError unless the heads fall into n_groups groups of equal size."""
    if n_groups < 1 or n_heads % n_groups:
        raise ValueError(f"{n_heads} heads cannot share {n_groups} groups of keys and values evenly")


class MultiHeadAttention_GQA(MultiHeadAttention_KVCache):
    """MultiHeadAttention_KVCache with n_groups heads of keys and values; the cache holds those only."""

    expanded = False  # True on an object makes it use the expanded form

    def __init__(self, d_model, n_heads, d_head, dropout_p, n_groups):
        check_groups(n_heads, n_groups)
        super().__init__(d_model, n_heads, d_head, dropout_p)
        self.n_groups = n_groups
        self.key_proj = nn.Linear(d_model, n_groups * d_head)
        self.value_proj = nn.Linear(d_model, n_groups * d_head)

    def attend(self, Q, K, V, causal_mask=True, dropout=None):
        """Q [B, H, Sq, D]; K, V [B, G, Sk, D] -> [B, H, Sq, D]"""
        attention = expanded_attention if self.expanded else grouped_attention
        return attention(Q, K, V, causal_mask, dropout)


class Block_GQA(Block_KVCache):
    def __init__(self, d_model, n_heads, d_head, dropout_p, n_groups):
        self.mha_class = functools.partial(MultiHeadAttention_GQA, n_groups=n_groups)
        super().__init__(d_model, n_heads, d_head, dropout_p)


class GPTlite_GQA(GPTlite_KVCache):
    """GPTlite_KVCache with grouped-query attention: same calls, caches with n_groups heads."""

    def __init__(self, vocab_size, d_model, n_heads, d_head, n_layers, dropout_p, seqlen, n_groups):
        self.block_class = functools.partial(Block_GQA, n_groups=n_groups)
        super().__init__(vocab_size, d_model, n_heads, d_head, n_layers, dropout_p, seqlen)


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
