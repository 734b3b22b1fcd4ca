"""GPTlite with DeepSeek sparse attention (DSA): an indexer scores tokens, attention reads the best of them.

An indexer beside the attention has a few narrow query heads and one narrow key a token. Its score of a token
is a weighted sum of ReLU(query . key) over its heads; the top_k tokens with the highest scores are chosen,
once for all heads. The weights are GPTlite's and those of the indexers, which have to be trained
(main_dsa.py). A cache holds the index keys beside keys and values.

Source: DeepSeek-AI, DeepSeek-V3.2, 2025.

Letters: as in gptlite_sparse.py.
"""

import functools

import torch
import torch.nn as nn
import torch.nn.functional as F

from gptlite_gqa import grouped_attention, grouped_weights
from gptlite_kvcache import Block_KVCache, MultiHeadAttention_KVCache
from gptlite_sparse import GPTlite_Sparse, attend_to, causal, gather_rows, top_mask


class Indexer(nn.Module):
    """Scores tokens for a query: n_index_heads queries and one key of d_index numbers each."""

    def __init__(self, d_model, n_index_heads, d_index):
        super().__init__()
        if n_index_heads < 1 or d_index < 1:
            raise ValueError(f"an indexer of {n_index_heads} heads of {d_index}: both must be at least 1")
        self.d_index = d_index
        self.query_proj = nn.Linear(d_model, n_index_heads * d_index, bias=False)
        self.key_proj = nn.Linear(d_model, d_index, bias=False)
        self.key_norm = nn.LayerNorm(d_index)
        self.weight_proj = nn.Linear(d_model, n_index_heads, bias=False)

    def keys(self, x):
        """[B, S, E] -> [B, 1, S, d_index], which a cache keeps."""
        return self.key_norm(self.key_proj(x)).unsqueeze(1)

    def queries(self, x):
        """[B, Sq, E] -> queries [B, n, Sq, d_index] and the weight of each [B, n, Sq, 1], n index heads."""
        q = self.query_proj(x).unflatten(-1, (-1, self.d_index)).transpose(1, 2)  # [B, n, Sq, d_index]
        w = self.weight_proj(x).transpose(1, 2).unsqueeze(-1)  # [B, n, Sq, 1]
        return q, w * (q.shape[1] * self.d_index) ** -0.5

    def forward(self, x):
        """Scores of a whole text: [B, T, E] -> [B, T, T]; later tokens are scored as well, and not chosen."""
        return index_scores(*self.queries(x), self.keys(x))


def index_scores(q, w, keys):
    """Weighted ReLU of queries [B, n, Sq, d] times keys [B, 1, Sk, d], w [B, n, Sq, 1] -> [B, Sq, Sk]."""
    return (w * (q @ keys.mT).relu()).sum(dim=1)


def choose_tokens(scores, top_k):
    """The min(top_k, visible) best tokens of each query: scores [B, Sq, Sk] -> bool [B, 1, Sq, Sk].

    Of equal scores, as of all that ReLU cuts off, the earlier tokens win. ValueError for top_k below 1.
    """
    return top_mask(scores, top_k, causal(*scores.shape[-2:], scores.device)).unsqueeze(1)


def dsa_attention(Q, K, V, scores, top_k, dropout=None):
    """DSA by definition: Q [B, H, Sq, D], K, V [B, G, Sk, D], scores [B, Sq, Sk] -> [B, H, Sq, D]."""
    return attend_to(Q, K, V, choose_tokens(scores, top_k), dropout)


def dsa_step(q, K, V, scores, top_k):
    """The same for one query [B, H, 1, D], which reads the chosen keys and values alone."""
    B, G = K.shape[:2]
    chosen = choose_tokens(scores, top_k)[:, 0, 0]  # [B, Sk], the same number in each row
    index = chosen.nonzero()[:, 1].view(B, 1, -1).expand(B, G, -1)  # [B, G, k]
    return grouped_attention(q, gather_rows(K, index), gather_rows(V, index), causal_mask=False)


def indexer_loss(scores, weights, visible):
    """KL divergence from where the attention goes to where the indexer looks, mean over queries, in nats.

    Args: scores [B, Sq, Sk]; weights: the mean of all heads' [B, Sq, Sk], zero but for visible keys;
        visible: bool that broadcasts to them.
    """
    log_q = F.log_softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)  # [B, Sq, Sk]
    log_q = log_q.masked_fill(~visible, 0.0)  # 0 * -inf would be NaN
    return (torch.xlogy(weights, weights) - weights * log_q).sum(dim=-1).mean()


# ---- The model ----


class MultiHeadAttention_DSA(MultiHeadAttention_KVCache):
    """Attention to the top_k tokens of an indexer. Its cache is (keys, values, index keys [B, 1, S, d])."""

    index_loss = None  # of the last forward in training mode

    def __init__(self, d_model, n_heads, d_head, dropout_p, top_k, n_index_heads, d_index):
        super().__init__(d_model, n_heads, d_head, dropout_p)
        self.top_k, self.indexer = top_k, Indexer(d_model, n_index_heads, d_index)

    def forward(self, x, kv_cache=None, causal_mask=True, max_seqlen=None):
        Q = self.split_heads(self.query_proj(x))  # [B, H, Sq, D]
        new = self.split_heads(self.key_proj(x)), self.split_heads(self.value_proj(x))  # [B, H, Sq, D] each
        new += (self.indexer.keys(x.detach()),)  # detached: what the text trains is the model
        if kv_cache is not None:
            new = tuple(torch.cat(pair, dim=2) for pair in zip(kv_cache, new, strict=True))
        K, V, index_keys = new  # [B, H, Sk, D], [B, 1, Sk, d]
        scores = index_scores(*self.indexer.queries(x.detach()), index_keys)  # [B, Sq, Sk]
        if x.shape[1] == 1:
            out = dsa_step(Q, K, V, scores, self.top_k)  # [B, H, 1, D]
        else:
            out = dsa_attention(Q, K, V, scores, self.top_k, self.dropout)  # [B, H, Sq, D]
        if self.training:
            visible = choose_tokens(scores, self.top_k)  # [B, 1, Sq, Sk]
            with torch.no_grad():  # the attention is the target, not what learns here
                weights = grouped_weights(Q, K, visible).float().mean(dim=1)  # [B, Sq, Sk]
            self.index_loss = indexer_loss(scores, weights, visible[:, 0])
        return self.dropout(self.out_proj(self.merge_heads(out))), new  # [B, Sq, E]


class Block_DSA(Block_KVCache):
    def __init__(self, *args, **kwargs):
        self.mha_class = functools.partial(MultiHeadAttention_DSA, **kwargs)
        super().__init__(*args)


class GPTlite_DSA(GPTlite_Sparse):
    """GPTlite with an indexer in each layer. Further arguments: top_k, n_index_heads, d_index."""

    def __init__(self, *args, top_k=32, n_index_heads=4, d_index=32, **kwargs):
        sizes = {"top_k": top_k, "n_index_heads": n_index_heads, "d_index": d_index}
        self.block_class = functools.partial(Block_DSA, **sizes)
        super().__init__(*args, **kwargs)


def convert_mha_to_dsa(state_dict, n_index_heads=4, d_index=32):
    """Weights of GPTlite -> weights of GPTlite_DSA: indexers with random weights are added."""
    state = dict(state_dict)
    for name, weight in state_dict.items():
        if name.endswith("key_proj.weight"):
            indexer = Indexer(weight.shape[1], n_index_heads, d_index).to(weight)
            state |= {
                name.replace("key_proj.weight", f"indexer.{n}"): t for n, t in indexer.state_dict().items()
            }
    return state
