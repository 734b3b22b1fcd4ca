"""A decode step that can be compiled: one token a sequence, nothing written inside, products as sums.

What makes such a step fast on a CPU, and what it costs, is told and measured in more/kvcache_compiled.py. A
model whose linear layers hold smaller weights (main_quantization.py) is compiled as it is: its layers unpack
what they read.

Source: Ansel et al., PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and
Graph Compilation, 2024; Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

import copy
import math

import torch
from torch import nn

from linear_packed import LinearInGraph, can_pack


class LinearAsSum(nn.Module):
    """A linear layer as products and a sum, [B, E_in] -> [B, E_out]: for one row, compiled.

    The weight is kept in dtype: float32, bfloat16, or int8 with a scale for each output. Compiled, it is cast
    while it is read, so half or a quarter of the bytes are read; the sum is in float32.
    """

    def __init__(self, linear, dtype=torch.float32):
        super().__init__()
        weight, self.bias = linear.weight.detach(), linear.bias  # [E_out, E_in]
        self.scale = None
        if dtype == torch.int8:
            self.scale = weight.abs().amax(dim=1).clamp(min=1e-12) / 127  # [E_out]
            weight = (weight / self.scale[:, None]).round()
        self.weight = nn.Parameter(weight.to(dtype), requires_grad=False)  # [E_out, E_in]

    def forward(self, x):
        out = (self.weight.float() * x[:, None]).sum(dim=-1)  # [B, E_out]
        return (out if self.scale is None else out * self.scale) + self.bias

    def as_linear(self):
        """nn.Linear with the weights as they are read, for texts of many tokens."""
        linear = nn.Linear(self.weight.shape[1], self.weight.shape[0])
        weight = self.weight.detach().float()  # [E_out, E_in]
        linear.weight.data = weight if self.scale is None else weight * self.scale[:, None]
        linear.bias.data = self.bias.detach()
        return linear


def replace_linears(model, make, kind=nn.Linear):
    """A copy of the model with make(layer) in the place of every linear layer of this kind."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, kind):
                setattr(module, name, make(child))
    return model


def decode_step(model, x, k, v, position, window):
    """One token a sequence, over a past that it only reads.

    Args: x: token ids [B]; k, v: the first n rows of a StaticKVCache [L, B, H, n, D], n at least the tokens
        that are cached, or all; position: how many tokens were read before, int64 [1] for all sequences
        alike, or [B]; window: rows in all.
    Returns: logits [B, V]; keys and values of the new tokens [L, B, H, D].
    """
    B, n = len(x), k.shape[3]
    rows = torch.arange(n, device=x.device)  # [n]
    position = position[:, None]  # [1 or B, 1]
    visible = (rows < position) & (rows != position % window)  # the new token takes the place of the oldest
    x = model.token_embedding(x) + model.position_embedding(position[:, 0].clamp(max=window - 1))  # [B, E]
    keys, values = [], []
    for layer, block in enumerate(model.blocks):
        mha, h = block.mha, block.ln1(x)  # [B, E]
        shape = (B, mha.n_heads, mha.d_head)
        Q, K, V = (proj(h).view(shape) for proj in (mha.query_proj, mha.key_proj, mha.value_proj))
        past = (k[layer] * Q[:, :, None]).sum(dim=-1) / math.sqrt(mha.d_head)  # [B, H, n]
        own = (K * Q).sum(dim=-1, keepdim=True) / math.sqrt(mha.d_head)  # [B, H, 1]
        past = past.masked_fill(~visible[:, None], float("-inf"))  # [B, H, n]
        largest = torch.maximum(past.amax(dim=-1, keepdim=True), own)  # [B, H, 1]
        past, own = torch.exp(past - largest), torch.exp(own - largest)  # [B, H, n], [B, H, 1]
        seen = v[layer].masked_fill(~visible[:, None, :, None], 0.0)  # a row without a token may hold NaN
        out = (past[..., None] * seen).sum(dim=-2) + own * V  # [B, H, D]
        out = out / (past.sum(dim=-1, keepdim=True) + own)  # [B, H, D]
        x = x + mha.out_proj(out.flatten(1))  # [B, E]
        x = x + block.ffwd(block.ln2(x))  # [B, E]
        keys.append(K)
        values.append(V)
    return model.fc_out(model.ln(x)), torch.stack(keys), torch.stack(values)


def compiled(function, backend):
    """The function compiled whole, one graph for each shape of its tensors; with backend None as it is."""
    if not backend:
        return function
    torch._dynamo.config.recompile_limit = 64  # a graph for each view of the cache and each form
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)


def packed_in_graph(model):
    """A copy whose linear layers are packed and can stand in a graph; the model itself where none can be."""
    return replace_linears(model, LinearInGraph) if can_pack(model.fc_out.weight) else model


def rows_to_read(n_keys, bucket, window):
    """How many rows of a cache a graph reads for n_keys of them: a multiple of the bucket, or all."""
    return min(-(-max(n_keys, 1) // bucket) * bucket, window)


class CompiledStep(nn.Module):
    """The decode step compiled, for a StaticKVCache: (token ids [B, 1], cache) -> (logits [B, 1, V], cache).

    Args: model: GPTlite_StaticKVCache with ordinary linear layers; batch_size: decides the form of its
        products; dtype: of the weights (with one row); bucket: the past that is read is a multiple of it;
        backend: of torch.compile; None runs the step as it is written.
    """

    def __init__(self, model, batch_size, dtype=torch.float32, bucket=64, backend="inductor"):
        super().__init__()
        weight = model.fc_out.weight
        if batch_size > 1:
            model = packed_in_graph(model)
        elif weight.is_cpu and weight.dtype == torch.float32:
            model = replace_linears(model, lambda linear: LinearAsSum(linear, dtype))
        self.model, self.batch_size, self.bucket = model, batch_size, bucket
        self.step = compiled(decode_step, backend)

    @torch.no_grad()
    def forward(self, x, kv_cache):
        kv_cache.check_fits(self.model, self.batch_size)
        if x.shape != (self.batch_size, 1):  # others would be cut off, or broadcast over the cache
            raise ValueError(f"made for {self.batch_size} sequences and one token, not {list(x.shape)}")
        length, window = kv_cache.length, kv_cache.window
        n = rows_to_read(length, self.bucket, window)
        position = torch.tensor([length], device=x.device)  # [1]
        k, v = kv_cache.k[:, :, :, :n], kv_cache.v[:, :, :, :n]  # [L, B, H, n, D]
        logits, K, V = self.step(self.model, x[:, 0].contiguous(), k, v, position, window)
        kv_cache.k[:, :, :, length % window], kv_cache.v[:, :, :, length % window] = K, V
        kv_cache.advance(1)
        return logits[:, None], kv_cache  # [B, 1, V]
