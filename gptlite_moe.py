"""GPTlite with a mixture of experts: several MLPs in a layer, of which a router picks a few for each token.

More weights, but no more work a token than that of the few. Upcycled: every expert begins as a copy of the
trained MLP, and the weights of a token's experts add up to one, so the mixture equals the dense model
whatever its router says, until training makes the experts differ.

Source: Shazeer et al., Outrageously Large Neural Networks, 2017; Fedus et al., Switch Transformers, 2022 (the
capacity); Komatsuzaki et al., Sparse Upcycling, 2023.

Letters: as in gptlite.py; N tokens, k experts of a token.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


def route(logits, top_k):
    """The top_k experts of each token and their weights, which add up to one.

    Args: logits [N, experts]. Returns: weights and experts [N, top_k]. The softmax over all experts, cut to
        the chosen and divided by their sum: the same as a softmax over the chosen alone.
    Raises: ValueError for more experts than there are.
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(f"a token cannot have {top_k} of {logits.shape[-1]} experts")
    weights, chosen = torch.softmax(logits, dim=-1).topk(top_k, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), chosen


class Experts(nn.Module):
    """Several MLPs of one shape, for rows that are sorted by expert."""

    def __init__(self, w1, b1, w2, b2):
        """w1 [experts, E, 4E], b1 [experts, 4E], w2 [experts, 4E, E], b2 [experts, E]"""
        super().__init__()
        self.w1, self.b1, self.w2, self.b2 = (nn.Parameter(w, requires_grad=False) for w in (w1, b1, w2, b2))

    def forward(self, x, sizes):
        """Rows [N, E] -> [N, E]; sizes: how many rows each expert has, in order [experts]. By definition."""
        out = []
        for i, rows in enumerate(x.split(sizes.tolist())):  # [n, E]
            hidden = torch.relu(rows @ self.w1[i] + self.b1[i])  # [n, 4E]
            out.append(hidden @ self.w2[i] + self.b2[i])  # [n, E]
        return torch.cat(out) if out else x  # a rank may have no expert


class GroupedExperts(Experts):
    """The same with all experts in one call of a grouped product (not for float64)."""

    def forward(self, x, sizes):
        if len(x) == 0:
            return x
        ends = sizes.cumsum(0).to(torch.int32)  # [experts]: where the rows of each end
        expert = torch.repeat_interleave(torch.arange(len(sizes), device=x.device), sizes)  # [N]
        hidden = torch.relu(F.grouped_mm(x, self.w1, offs=ends) + self.b1[expert])  # [N, 4E]
        return F.grouped_mm(hidden, self.w2, offs=ends) + self.b2[expert]  # [N, E]


class MixtureOfExperts(nn.Module):
    """Takes the place of a FeedForward in one process: [B, T, E] -> [B, T, E].

    Args: router: nn.Linear from E to the number of experts; experts: Experts; top_k: experts of a token;
        capacity: the most tokens of an expert as a multiple of an even share; None for no limit.
    """

    def __init__(self, router, experts, top_k, capacity=None):
        super().__init__()
        self.router, self.experts, self.top_k, self.capacity = router, experts, top_k, capacity

    def compute(self, rows, sizes):
        """Rows [n, E] that are sorted by expert, sizes [experts] of each -> what the experts give [n, E]."""
        return self.experts(rows, sizes)

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])  # [N, E]
        logits = self.router(tokens)  # [N, experts]
        weights, chosen = route(logits, self.top_k)  # [N, k]
        n_experts, chosen = logits.shape[-1], chosen.flatten()  # [N * k]
        order = chosen.argsort(stable=True)  # [N * k]: places in `chosen`, sorted by expert
        sizes = torch.bincount(chosen, minlength=n_experts)  # [experts]
        if self.capacity is not None:
            most = math.ceil(self.capacity * len(chosen) / n_experts)
            first = sizes.cumsum(0) - sizes  # [experts]
            place = (
                torch.arange(len(order), device=x.device) - first[chosen[order]]
            )  # among its expert's rows
            order, sizes = order[place < most], sizes.clamp(max=most)
        rows = self.compute(tokens[order // self.top_k], sizes)  # [n, E]
        given = torch.zeros(len(chosen), x.shape[-1], dtype=x.dtype, device=x.device)  # [N * k, E]
        given[order] = rows
        given = given.view(len(tokens), self.top_k, x.shape[-1]) * weights[..., None].to(x.dtype)  # [N, k, E]
        return given.sum(dim=1).view(x.shape)


def upcycle(model, n_experts, top_k, capacity=None, seed=0, noise=0.0, experts_class=Experts):
    """Makes every FeedForward of a copy of a model a mixture of copies of it, with a router drawn at random.

    Args: noise: by how much the experts differ, relative to the spread of the weights.
    """
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, like):
        return torch.randn(shape, generator=generator).to(like)

    for block in model.blocks:
        first, second = block.ffwd.net[0], block.ffwd.net[2]
        router = nn.Linear(first.in_features, n_experts, bias=False).to(first.weight)
        with torch.no_grad():
            router.weight.copy_(
                normal(*router.weight.shape, like=first.weight) / math.sqrt(first.in_features)
            )
            copies = []
            for w in (first.weight.T, first.bias, second.weight.T, second.bias):
                w = w.detach().expand(n_experts, *w.shape)
                copies.append((w + noise * w.std() * normal(*w.shape, like=w)).contiguous())
        block.ffwd = MixtureOfExperts(router, experts_class(*copies), top_k, capacity)
    return model
