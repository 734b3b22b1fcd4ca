"""Attentions of the same queries over separate sets of keys, joined into that over all of them.

The softmax of a set of keys is known from its weighted average of the values and the log-sum-exp of its
scores, so attention may be computed in parts: over splits of a long cache (main_flash_decoding.py), over keys
that other processes hold (main_sequence_parallel.py). Exact up to rounding, in any order.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

import math

import torch


def attend(q, k, v, causal):
    """Attention over one chunk of keys, by definition.

    Args: q [B, H, Sq, D]; k, v [B, H, Sk, D]; causal: True for the queries' own chunk, Sq = Sk.
    Returns: output [B, H, Sq, D] and log-sum-exp of the scores [B, H, Sq], in float32 at least.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-2, -1) / math.sqrt(q.shape[-1])  # [B, H, Sq, Sk]
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)  # [Sq, Sk]
        scores = scores.masked_fill(later, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)  # [B, H, Sq], -inf without keys
    return torch.exp(scores - lse.unsqueeze(-1)).to(v.dtype) @ v, lse


def fused_attend(q, k, v, causal):
    """The same by a fused kernel of PyTorch that tells the log-sum-exp."""
    if q.device.type == "cpu" and k.shape[-2] > 0:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if q.device.type == "cuda" and k.shape[-2] > 0 and q.shape[-1] % 8 == 0 and q.dtype != torch.float64:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse, *_ = kernel(q, k, v, None, True, 0.0, causal)
        return out, lse[..., : q.shape[-2]]  # it pads the queries
    return attend(q, k, v, causal)


def merge_parts(out, lse):
    """Joins n attentions of the same query over separate sets of keys into that over all the keys.

    Args: out: outputs [..., n, D], each a softmax average over its own keys; lse: log-sum-exp of the scores
        [..., n], -inf for a part without keys (its output must be finite).
    Returns: output [..., D] and log-sum-exp [...]; zeros and -inf, with finite gradients, without any key.
    """
    empty = (lse == float("-inf")).all(dim=-1)  # [...]
    # -inf - -inf would be NaN, in a gradient even where its result is not used: 0 stands in for it
    whole = torch.logsumexp(lse.masked_fill(empty.unsqueeze(-1), 0.0), dim=-1)  # [...]
    weights = torch.exp(lse - whole.unsqueeze(-1)).unsqueeze(-1)  # a part's share of the sum, [..., n, 1]
    return (weights * out).sum(dim=-2).to(out.dtype), whole.masked_fill(empty, float("-inf"))


def merge_attention(out_a, lse_a, out_b, lse_b):
    """merge_parts of two, [B, H, Sq, D] and [B, H, Sq] each. Any order of merges gives the same."""
    return merge_parts(torch.stack([out_a, out_b], dim=-2), torch.stack([lse_a, lse_b], dim=-1))
