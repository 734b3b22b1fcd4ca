"""GPTlite cut into stages of consecutive layers, which pass a token's E numbers on to each other.

Run one after the other the stages compute what the whole model does; run by different processes at the same
time they are a pipeline (main_pipeline_parallel.py). Each stage keeps the KV cache of its own layers only.

Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019.
"""

import torch
from torch import nn


def layers_of(rank, n_stages, n_layers):
    """The layers of a stage, as a range; the first stages may have one more.

    Raises: ValueError for more stages than layers.
    """
    if not 1 <= n_stages <= n_layers:
        raise ValueError(f"{n_layers} layers cannot fill {n_stages} stages")
    size, longer = divmod(n_layers, n_stages)
    first = rank * size + min(rank, longer)
    return range(first, first + size + (rank < longer))


class Stage(nn.Module):
    """Some layers of a GPTlite_KVCache; the first stage has the embeddings as well, the last one the head."""

    def __init__(self, model, rank, n_stages):
        super().__init__()
        layers = layers_of(rank, n_stages, len(model.blocks))
        self.is_first, self.is_last = rank == 0, rank == n_stages - 1
        self.seqlen, self.vocab_size = model.seqlen, model.fc_out.out_features
        self.dtype, self.d_model = model.ln.weight.dtype, model.ln.weight.shape[0]
        self.blocks = model.blocks[layers.start : layers.stop]
        if self.is_first:
            self.token_embedding, self.position_embedding = model.token_embedding, model.position_embedding
        if self.is_last:
            self.ln, self.fc_out = model.ln, model.fc_out

    def forward(self, x, kv_cache=None, max_seqlen=None):
        """Token ids [B, Sq], or what the stage before gives [B, Sq, E] -> [B, Sq, E] or logits [B, Sq, V].

        kv_cache: one (k, v) for each layer of this stage, None for an empty one; returned, now longer.
        """
        window = max_seqlen or self.seqlen
        kv_cache = [None] * len(self.blocks) if kv_cache is None else kv_cache
        if self.is_first:
            n_past = 0 if kv_cache[0] is None else kv_cache[0][0].shape[-2]
            positions = torch.arange(n_past, n_past + x.shape[1], device=x.device)  # [Sq]
            positions = positions.clamp(max=window - 1)
            x = self.token_embedding(x) + self.position_embedding(positions)  # [B, Sq, E]
        new_cache = []
        for block, layer_cache in zip(self.blocks, kv_cache, strict=True):
            x, layer_cache = block(x, layer_cache, window)  # [B, Sq, E]
            new_cache.append(layer_cache)
        return (self.fc_out(self.ln(x)) if self.is_last else x), new_cache


def forward_stages(stages, tokens):
    """What the stages compute, one after the other in one process: [B, T] -> [B, T, V]. The naive twin."""
    x = tokens
    for stage in stages:
        x, _ = stage(x)
    return x
