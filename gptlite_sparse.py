"""Sparse attention: what its techniques share. Each query sees only the keys that a rule chooses for it.

A rule gives a boolean mask, True where a query may see a key: the form that teaches, and that every fast form
is tested against. Such a fast form gathers the chosen keys, so that a decode step reads no others. Two rules
bound what a choice of k keys can reach: the last k keys (window) and the k keys with the largest attention
weights (oracle, which must read every key to know them).

GPTlite_Sparse is GPTlite with such a rule in its blocks; the weights are GPTlite's.

Source: the oracle and the window are the usual bounds, as in Tang et al., Quest, 2024; the techniques stand
in main_quest.py, main_moba.py, main_dsa.py and main_nsa.py.

Letters: as in gptlite.py; G groups (heads of keys and values).
"""

import torch
import torch.nn.functional as F

from gptlite_gqa import expanded_attention, grouped_weights
from gptlite_kvcache import Block_KVCache, GPTlite_KVCache, MultiHeadAttention_KVCache, window_mask

# ---- Choosing ----


def causal(Sq, Sk, device=None):
    """bool [Sq, Sk]: the last query belongs to the last key, and no query sees a later key."""
    return window_mask(Sq, Sk, Sk, device)


def top_mask(scores, k, candidates):
    """The k best of each row, True where chosen; fewer where there are fewer candidates.

    Args: scores [..., n]; candidates: bool that broadcasts to it. Of equal scores the earlier ones win, so
        a row's choice depends on that row alone.
    Returns: bool [..., n]. Raises ValueError for k below 1.
    """
    if k < 1:
        raise ValueError(f"a query needs at least 1 choice, not {k}")
    scores = scores.masked_fill(~candidates, float("-inf"))  # [..., n]
    lowest = scores.topk(min(k, scores.shape[-1]), dim=-1).values[..., -1:]  # [..., 1]: the k-th best
    chosen = (scores >= lowest) & candidates  # [..., n]
    if chosen.sum(dim=-1).amax() <= k:
        return chosen
    better, equal = scores > lowest, scores == lowest  # [..., n]
    left = k - better.sum(dim=-1, keepdim=True)  # [..., 1]: places that the equal ones share
    return (better | equal & (equal.cumsum(dim=-1) <= left)) & candidates


def sum_of_group(scores, n_groups):
    """[B, H, Sq, n] -> [B, G, Sq, n]: the heads that share keys and values choose together."""
    return scores.unflatten(1, (n_groups, -1)).sum(dim=2)


def for_heads(chosen, n_heads):
    """What each group has [B, G, Sq, n], or all share [B, 1, Sq, n], for each of its heads [B, H, Sq, n]."""
    return chosen.repeat_interleave(n_heads // chosen.shape[1], dim=1)


def choose_window(Q, K, budget):
    """The last `budget` keys of each query: Q [B, H, Sq, D], K [B, G, Sk, D] -> bool [1, 1, Sq, Sk]."""
    return window_mask(Q.shape[-2], K.shape[-2], budget, Q.device)[None, None]


def choose_oracle(Q, K, budget, n_choices=None):
    """The keys that get the most attention from each group of heads -> bool [B, H, Sq, Sk].

    n_choices: 1 for one choice for all heads, by default one for each head of keys.
    """
    weights = sum_of_group(grouped_weights(Q, K), n_choices or K.shape[1])  # [B, G, Sq, Sk]
    chosen = top_mask(weights, budget, causal(Q.shape[-2], K.shape[-2], Q.device))  # [B, G, Sq, Sk]
    return for_heads(chosen, Q.shape[1])


# ---- Blocks of consecutive keys, and reading chosen ones ----


def in_blocks(x, size):
    """[B, G, S, D] -> [B, G, n_blocks, size, D]; the last block is filled up with zeros."""
    if size < 1:
        raise ValueError(f"a block needs at least 1 key, not {size}")
    missing = -x.shape[-2] % size
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(-2, (-1, size))


def gather_rows(x, index):
    """What index [B, G, k] names in x [B, G, n, ...] -> [B, G, k, ...]; of a view only these are read."""
    B, G = index.shape[:2]
    batch, head = (torch.arange(size, device=x.device) for size in (B, G))
    return x[batch.view(B, 1, 1), head.view(1, G, 1), index]


# ---- The model ----


def attend_to(Q, K, V, visible, dropout=None):
    """Attention to the keys that a mask leaves: Q [B, H, Sq, D], K, V [B, G, Sk, D] -> [B, H, Sq, D].

    Args: visible: bool that broadcasts to [B, H, Sq, Sk], or True (causal). Each query sees a key at least.
    """
    if torch.is_grad_enabled() or visible is True:  # the textbook form: the fused one trains slowly on a CPU
        return expanded_attention(Q, K, V, visible, dropout)
    K, V = (for_heads(t, Q.shape[1]) for t in (K, V))  # [B, H, Sk, D]
    return F.scaled_dot_product_attention(Q, K, V, visible)


class MultiHeadAttention_Sparse(MultiHeadAttention_KVCache):
    """MultiHeadAttention_KVCache whose queries see the keys that `choose` gives them, None for all."""

    choose = None  # (Q [B, H, Sq, D], K [B, G, Sk, D]) -> bool that broadcasts to [B, H, Sq, Sk], causal

    def attend(self, Q, K, V, causal_mask=True, dropout=None):
        if self.choose is not None:
            with torch.no_grad():  # a choice has no gradient
                causal_mask = self.choose(Q, K)  # [B, H, Sq, Sk]
        return attend_to(Q, K, V, causal_mask, dropout)  # [B, H, Sq, D]


class Block_Sparse(Block_KVCache):
    mha_class = MultiHeadAttention_Sparse


class GPTlite_Sparse(GPTlite_KVCache):
    """GPTlite_KVCache with a choice of keys in its blocks (see use_choice), all keys before that.

    Raises ValueError for a text beyond the context: blocks are counted from its first token.
    """

    block_class = Block_Sparse

    def forward(self, x, kv_cache=None, max_seqlen=None):
        check_context(self, (kv_cache[0][0].shape[-2] if kv_cache else 0) + x.shape[1])
        return super().forward(x, kv_cache)


def check_context(model, n_tokens):
    """Raises ValueError for more tokens than the model has positions for."""
    if n_tokens > model.seqlen:
        raise ValueError(f"{n_tokens} tokens: sparse attention ends at the context of {model.seqlen}")


def use_choice(model, choose, n_dense_layers=0):
    """Makes all blocks but the first n_dense_layers see what `choose` gives. Returns the model."""
    for layer, block in enumerate(model.blocks):
        block.mha.choose = choose if layer >= n_dense_layers else None
    return model


# ---- What a choice is worth ----


@torch.no_grad()
def attention_inputs(model, tokens):
    """What the attention of each layer works on, in a dense model: a list of (x, Q, K).

    Args: model: a GPTlite; tokens [B, T]. x [B, T, E]: input of the attention; Q, K [B, H, T, D].
    """
    inputs, hooks = [], []
    for block in model.blocks:
        hooks.append(block.mha.register_forward_pre_hook(lambda mha, args: inputs.append((mha, args[0]))))
    model(tokens)
    for hook in hooks:
        hook.remove()
    return [(x, mha.split_heads(mha.query_proj(x)), mha.split_heads(mha.key_proj(x))) for mha, x in inputs]


@torch.no_grad()
def choice_figures(Q, K, visible):
    """What a choice of keys is worth, measured on the attention of a dense model.

    Args: Q [B, H, T, D]; K [B, G, T, D]; visible: bool that broadcasts to [B, H, T, T], causal.
    Returns: {"keys_read": mean number of keys that a query sees; of the queries that leave keys out:
        "mass": share of their attention that the choice holds, "recall": share of the choice that an oracle
        would choose as well (as many keys with the largest weights), "best_missed": share of those whose
        single best key was not chosen}. A choice of all keys gives 1, 1, 0.
    """
    weights = grouped_weights(Q, K)  # [B, H, T, T]
    visible = visible.expand_as(weights)  # [B, H, T, T]
    n_chosen = visible.sum(dim=-1)  # [B, H, T]
    partial = n_chosen < torch.arange(1, Q.shape[-2] + 1, device=Q.device)  # [B, H, T]
    figures = {"keys_read": n_chosen.double().mean().item()}
    if not partial.any():
        return figures | {"mass": 1.0, "recall": 1.0, "best_missed": 0.0}
    weights, visible, n_chosen = weights[partial], visible[partial], n_chosen[partial]  # [N, T], [N]
    ordered = weights.sort(dim=-1, descending=True).values  # [N, T]
    lowest = ordered.gather(-1, (n_chosen - 1).clamp(min=0).unsqueeze(-1))  # [N, 1]: of the oracle's
    found = (visible & (weights >= lowest)).sum(dim=-1) / n_chosen.clamp(min=1)  # [N]
    best = visible.gather(-1, weights.argmax(dim=-1, keepdim=True))  # [N, 1]
    return figures | {
        "mass": (weights * visible).sum(dim=-1).mean().item(),
        "recall": found.clamp(max=1).mean().item(),
        "best_missed": 1 - best.float().mean().item(),
    }
