"""GPTlite: a small GPT-2-like, character-level language model.

The textbook form of the decoder-only transformer: learned positions, pre-layer-norm blocks of
multi-head attention and a ReLU feed-forward network, a linear head. Nothing here is fast on purpose;
every other file of the collection is measured against this one and changes as little of it as it can.
The architecture equals OPT's (pre-layer-norm, ReLU), so the same weights run in other engines.

Source: Vaswani et al., Attention Is All You Need, 2017; Radford et al., Language Models are
Unsupervised Multitask Learners (GPT-2), 2019; Zhang et al., OPT, 2022.

Letters in shape comments: B batch, T sequence (Sq queries, Sk keys), H heads, D head size,
E d_model, V vocabulary.
"""

import math
from collections import namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F

GPTliteParameters = namedtuple(
    "GPTliteParameters",
    "n_layers d_model n_heads d_head batch_size lr seqlen dropout_p",
)


def get_gptlite_model_parameters():
    """Returns the parameters of GPTlite: about 10.8 million weights, a context of 256 characters."""
    return GPTliteParameters(
        n_layers=6,  # blocks
        d_model=384,  # width of the residual stream
        n_heads=6,
        d_head=64,  # n_heads * d_head = d_model
        batch_size=16,  # sequences in a training step
        lr=2e-3,  # peak learning rate of AdamW
        seqlen=256,  # context: the longest sequence the model can read
        dropout_p=0.1,
    )


def get_gptlite_distilled_model_parameters():
    """Returns the parameters of the small GPTlite, about 1.4 million weights, same context."""
    return GPTliteParameters(
        n_layers=3,
        d_model=192,
        n_heads=3,
        d_head=64,
        batch_size=16,
        lr=2e-3,
        seqlen=256,
        dropout_p=0.1,
    )


class FeedForward(nn.Module):
    """Two linear layers, four times as wide in between, with a ReLU: [B, T, E] -> [B, T, E]."""

    def __init__(self, d_model, dropout_p):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(d_model, 4 * d_model),
            nn.ReLU(),
            nn.Linear(4 * d_model, d_model),
            nn.Dropout(dropout_p),
        )

    def forward(self, x):
        return self.net(x)


def masked_softmax(scores, visible):
    """Softmax over the keys that a query may see; a query that may see none gets zeros, not 0/0.

    Args: scores [B, H, Sq, Sk]; visible: bool that broadcasts to it, True where a key may be seen.
    Returns: [B, H, Sq, Sk]; its gradients are finite in rows without any key as well.
    """
    sees_none = ~visible.any(dim=-1, keepdim=True)  # [..., Sq, 1]
    # such a row keeps its scores, whose softmax is finite, and its weights are zeroed afterwards
    weights = F.softmax(scores.masked_fill(~(visible | sees_none), float("-inf")), dim=-1)  # [B, H, Sq, Sk]
    return weights.masked_fill(sees_none, 0.0)  # [B, H, Sq, Sk]


def scaled_dot_product_attention(Q, K, V, causal_mask=True, dropout=None):
    """Textbook attention: softmax(Q K^T / sqrt(D)) V, with the whole score matrix in memory.

    Args: Q, K, V: queries, keys and values [B, H, T, D]; causal_mask: True hides later positions,
        False hides nothing, a boolean tensor that broadcasts to [B, H, T, T] is True where a key may be
        seen; dropout: a module applied to the attention weights, or None.
    Returns: [B, H, T, D]. A query that may see no key gets zeros.
    """
    wide = torch.promote_types(Q.dtype, torch.float32)  # scores of 16 bits overflow before they are scaled
    scores = Q.to(wide) @ K.to(wide).transpose(-2, -1) / math.sqrt(Q.shape[-1])  # [B, H, T, T]
    if isinstance(causal_mask, torch.Tensor):
        weights = masked_softmax(scores, causal_mask)  # [B, H, T, T]
    else:
        if causal_mask:
            T = Q.shape[-2]
            later = torch.ones(T, T, dtype=torch.bool, device=Q.device).triu(1)  # [T, T]
            scores = scores.masked_fill(later, float("-inf"))  # every query sees its own key at least
        weights = F.softmax(scores, dim=-1)  # [B, H, T, T]
    if dropout is not None:
        weights = dropout(weights)  # [B, H, T, T]
    return weights.to(V.dtype) @ V  # [B, H, T, D]


class MultiHeadAttention(nn.Module):
    """n_heads attentions of size d_head side by side: [B, T, E] -> [B, T, E]."""

    def __init__(self, d_model, n_heads, d_head, dropout_p):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_head
        self.query_proj = nn.Linear(d_model, n_heads * d_head)
        self.key_proj = nn.Linear(d_model, n_heads * d_head)
        self.value_proj = nn.Linear(d_model, n_heads * d_head)
        self.out_proj = nn.Linear(n_heads * d_head, d_model)
        self.dropout = nn.Dropout(dropout_p)

    def split_heads(self, x):
        """[B, T, H*D] -> [B, H, T, D]"""
        B, T, width = x.shape
        return x.view(B, T, width // self.d_head, self.d_head).transpose(1, 2)

    def merge_heads(self, x):
        """[B, H, T, D] -> [B, T, H*D]"""
        return x.transpose(1, 2).flatten(2)

    def forward(self, x, causal_mask=True):
        Q = self.split_heads(self.query_proj(x))  # [B, H, T, D]
        K = self.split_heads(self.key_proj(x))  # [B, H, T, D]
        V = self.split_heads(self.value_proj(x))  # [B, H, T, D]
        out = scaled_dot_product_attention(Q, K, V, causal_mask, self.dropout)  # [B, H, T, D]
        return self.dropout(self.out_proj(self.merge_heads(out)))  # [B, T, E]


class Block(nn.Module):
    """A transformer block, layer norm before each sub-layer: [B, T, E] -> [B, T, E]."""

    mha_class = MultiHeadAttention  # a variant replaces the attention here

    def __init__(self, d_model, n_heads, d_head, dropout_p):
        super().__init__()
        self.mha = self.mha_class(d_model, n_heads, d_head, dropout_p)
        self.ln1 = nn.LayerNorm(d_model)
        self.ffwd = FeedForward(d_model, dropout_p)
        self.ln2 = nn.LayerNorm(d_model)

    def forward(self, x):
        x = x + self.mha(self.ln1(x))  # [B, T, E]
        x = x + self.ffwd(self.ln2(x))  # [B, T, E]
        return x


class GPTlite(nn.Module):
    """The model: token ids [B, T] -> logits of the next token at every position [B, T, V].

    Raises ValueError for a sequence that is empty or longer than `seqlen`.
    """

    block_class = Block  # a variant replaces the blocks here

    def __init__(self, vocab_size, d_model, n_heads, d_head, n_layers, dropout_p, seqlen):
        super().__init__()
        self.seqlen = seqlen
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        self.position_embedding = nn.Embedding(seqlen, d_model)
        self.blocks = nn.ModuleList(
            self.block_class(d_model, n_heads, d_head, dropout_p) for _ in range(n_layers)
        )
        self.ln = nn.LayerNorm(d_model)
        self.fc_out = nn.Linear(d_model, vocab_size)
        self.init_weights()

    def init_weights(self):
        """GPT-2's initial weights: normal with std 0.02, smaller where a block adds to its input."""
        for name, p in self.named_parameters():
            if name.endswith(("out_proj.weight", "net.2.weight")):
                # each block adds twice to the residual stream: its variance must not grow with depth
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * len(self.blocks)))
            elif p.ndim == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x):
        T = x.shape[1]
        if not 1 <= T <= self.seqlen:
            raise ValueError(f"a sequence of {T} tokens does not fit the context of 1 to {self.seqlen}")
        positions = torch.arange(T, device=x.device)  # [T]
        x = self.token_embedding(x) + self.position_embedding(positions)  # [B, T, E]
        for block in self.blocks:
            x = block(x)  # [B, T, E]
        return self.fc_out(self.ln(x))  # [B, T, V]
