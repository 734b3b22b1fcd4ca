"""GPTlite with LoRA adapters: products of low rank beside its linear layers, a set of them for each row.

An adapter of rank r adds (x A) B to x W + b, A [E_in, r] and B [r, E_out]; merged, the weight is W + A B.
The usual factor alpha / r is part of B. How the products of a batch with many adapters are computed is the
technique of main_multi_lora.py.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
"""

import copy

import torch
from torch import nn

# An adapter: a list of (A [E_in, r], B [r, E_out]), one for each layer that target_layers() gives


def target_layers(model):
    """[(module, name)] of the linear layers that get adapters: all of attention and of the MLP, by block."""
    layers = []
    for block in model.blocks:
        layers += [(block.mha, f"{name}_proj") for name in ("query", "key", "value", "out")]
        layers += [(block.ffwd.net, name) for name in ("0", "2")]
    return layers


def new_adapter(model, rank, seed=0):
    """An adapter that adds nothing yet: A is random, B zero. Raises ValueError for a rank below 1."""
    if rank < 1:
        raise ValueError(f"an adapter of rank {rank}: it needs at least 1")
    generator, adapter = torch.Generator().manual_seed(seed), []
    for module, name in target_layers(model):
        linear = getattr(module, name)
        A = torch.randn(linear.in_features, rank, generator=generator) / linear.in_features**0.5  # [E_in, r]
        adapter.append((A.to(linear.weight), torch.zeros(rank, linear.out_features).to(linear.weight)))
    return adapter


def adapter_bytes(adapter):
    return sum(part.nbytes for pair in adapter for part in pair)


class Rows:
    """Which adapter each row of the batch has, 0 for none: the same for all layers of a step.

    which [B]; groups: (adapter, first row, row behind the last) of rows side by side, if the batch is sorted.
    """

    def use(self, which):
        self.which, self.groups = which, []
        adapters, counts = which.unique_consecutive(return_counts=True)
        start = 0
        for adapter, count in zip(adapters.tolist(), counts.tolist(), strict=True):
            self.groups.append((adapter, start, start + count))
            start += count


class LinearWithAdapters(nn.Module):
    """A linear layer, and adapters beside it: x W + b + (x A_a) B_a, a the adapter of each row.

    Args: linear: the layer; pairs: (A [E_in, r], B [r, E_out]) of each adapter, of any ranks; rows: Rows;
        product: function (x [B, T, E_in], A, B, ranks, rows) -> [B, T, E_out] of the stacked adapters A
        [n + 1, E_in, R] and B [n + 1, R, E_out], R the largest of their ranks. Adapter 0 is zeros.
    """

    def __init__(self, linear, pairs, rows, product):
        super().__init__()
        self.linear, self.rows, self.product = linear, rows, product
        self.ranks = [0, *(A.shape[1] for A, _ in pairs)]
        R, weight = max(self.ranks), linear.weight
        A = torch.zeros(len(pairs) + 1, linear.in_features, R, dtype=weight.dtype, device=weight.device)
        B = torch.zeros(len(pairs) + 1, R, linear.out_features, dtype=weight.dtype, device=weight.device)
        for i, (a, b) in enumerate(pairs, 1):  # zeros beyond an adapter's rank add nothing
            A[i, :, : a.shape[1]], B[i, : b.shape[0]] = a, b
        self.A, self.B = nn.Parameter(A), nn.Parameter(B)

    def forward(self, x):
        """[B, T, E_in] -> [B, T, E_out]"""
        return self.linear(x) + self.product(x, self.A, self.B, self.ranks, self.rows)


def with_adapters(model, adapters, product):
    """The model with adapters 1, 2, ... beside its layers; it shares the weights of the one that is given.

    model.rows.use(which) says which row has which, before a step.
    """
    shared = {id(p): p for p in model.parameters()}
    model = copy.deepcopy(model, shared)
    model.rows = Rows()
    for i, (module, name) in enumerate(target_layers(model)):
        pairs = [adapter[i] for adapter in adapters]
        setattr(module, name, LinearWithAdapters(getattr(module, name), pairs, model.rows, product))
    return model


def merge(model, adapter, sign=1):
    """Adds an adapter to the weights in place, W + A B; sign -1 takes it out again, up to rounding."""
    with torch.no_grad():
        for (module, name), (A, B) in zip(target_layers(model), adapter, strict=True):
            getattr(module, name).weight.add_((A @ B).T, alpha=sign)  # [E_out, E_in]
    return model
