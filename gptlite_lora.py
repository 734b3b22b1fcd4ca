"""GPTlite with LoRA adapters: products of low rank beside its linear layers, a set of them for each row.

An adapter of rank r adds (x A) B to x W + b, A [E_in, r] and B [r, E_out]; merged, the weight is W + A B.
The usual factor alpha / r is part of B. How the products of a batch with many adapters are computed is the
technique of main_multi_lora.py.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
"""

import copy
import hashlib
from dataclasses import dataclass

import torch
from torch import nn

from gptlite_paged import GPTlite_Paged, Sequence

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


def in_type(adapter, dtype):
    """A copy in another type: bfloat16 halves the bytes and rounds the weights."""
    return [(A.to(dtype), B.to(dtype)) for A, B in adapter]


def adapter_key(adapter):
    """SHA-256 of an adapter's shapes, types and weights: what it is, whatever its name is now or becomes."""
    digest = hashlib.sha256()
    for part in (part for pair in adapter for part in pair):
        digest.update(f"{part.dtype} {[*part.shape]}".encode())
        digest.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def random_adapter(model, rank, seed=0):
    """An adapter that does something although nobody has trained it: both parts are random."""
    generator, adapter = torch.Generator().manual_seed(seed), []
    for A, B in new_adapter(model, rank, seed):
        adapter.append((A, 0.1 * torch.randn(B.shape, generator=generator).to(B)))
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


# ---- Adapters in the blocks of a paged cache (more/lora_pool.py) ----


class Adapter:
    """A copy of an adapter in host memory, as rows of E = d_model numbers; it never changes.

    Args: model: GPTlite; pairs: (A [E_in, r], B [r, E_out]) by layer, as new_adapter() makes them.
    rows [L, n, E]: of each block of the model A transposed and B of one linear layer after the other; rank;
    key: what its weights are. Raises ValueError for ranks that differ between layers.
    """

    def __init__(self, model, pairs):
        E, ranks = model.token_embedding.embedding_dim, {A.shape[1] for A, _ in pairs}
        if len(ranks) != 1:
            raise ValueError(f"an adapter of ranks {sorted(ranks)}: all of its layers need the same")
        (self.rank,), self.key = ranks, adapter_key(pairs)
        rows = torch.cat([part.reshape(-1, E) for A, B in pairs for part in (A.T, B)])  # [L * n, E]
        self.rows = rows.view(len(model.blocks), -1, E).cpu()


@dataclass(eq=False)
class AdapterSequence(Sequence):
    """A Sequence that is computed with an Adapter, or with none; prefixes are found by its weights."""

    adapter: Adapter | None = None

    def __post_init__(self):
        super().__post_init__()
        self.salt = self.adapter.key if self.adapter else b""


class Reading:
    """Whose weights a step reads, the same in all layers.

    owners: the Adapter of each of the N tokens, or None; groups: (Adapter, its tokens); slots: of their rows.
    """

    def use(self, pool, work):
        """work: as GPTlite_Paged.step() takes it; single tokens come before pieces of prompts there."""
        order, groups = sorted(work, key=lambda item: item[1] > 1), {}
        self.rows, self.owners = pool.rows, [sequence.adapter for sequence, n in order for _ in range(n)]
        for i, adapter in enumerate(self.owners):
            if adapter is not None:
                groups.setdefault(adapter.key, (adapter, []))[1].append(i)
        self.groups = [(a, torch.tensor(tokens, device=pool.rows.device)) for a, tokens in groups.values()]
        self.slots = {adapter.key: pool.row_slots(adapter) for adapter, _ in self.groups}


class LinearFromPool(nn.Module):
    """A linear layer, and beside it the adapters that are in the pool: [N, E_in] -> [N, E_out].

    Args: first: of an adapter's rows in this layer of the model, those of this linear, divided by the rank.
    """

    def __init__(self, linear, reading, layer, first, widths, add):
        super().__init__()
        self.linear, self.reading, self.layer, self.add = linear, reading, layer, add
        self.bounds = first, first + widths[0], first + sum(widths)

    def weights(self, adapter):
        """A [E_in, r] and B [r, E_out], gathered from the pool."""
        start, middle, stop = (adapter.rank * bound for bound in self.bounds)
        slots, rows = self.reading.slots[adapter.key], self.reading.rows[self.layer]  # [n], [rows, E]
        A, B = (rows[part].view(adapter.rank, -1) for part in (slots[start:middle], slots[middle:stop]))
        return A.T, B

    def forward(self, x):
        return self.add(self.linear(x), x, self.weights, self.reading)


class GPTlite_PagedLoRA(GPTlite_Paged):
    """GPTlite_Paged for AdapterSequences over an AdapterPool; the weights are GPTlite's."""

    def read_adapters(self, add):
        """Puts a LinearFromPool around each linear layer, in place, once the weights are there.

        add: function (out [N, E_out], x [N, E_in], weights, reading) -> out with (x A) B added to each token.
        """
        E, self.reading, first = self.token_embedding.embedding_dim, Reading(), 0
        for i, (module, name) in enumerate(target_layers(self)):
            layer, place = divmod(i, len(target_layers(self)) // len(self.blocks))
            linear, first = getattr(module, name), first if place > 0 else 0
            widths = linear.in_features // E, linear.out_features // E
            setattr(module, name, LinearFromPool(linear, self.reading, layer, first, widths, add))
            first += sum(widths)
        return self

    def step(self, pool, work):
        self.reading.use(pool.adapters, work)
        stepped = super().step(pool, work)
        self.reading.rows = None  # nothing of a pool outlives its step
        return stepped


class MergedCopies(nn.Module):
    """The baseline: a model for each adapter, its weights merged; a step runs each that has texts in it.

    Args: model: GPTlite_Paged; adapters: {Adapter, or None for the model itself: its pairs}.
    """

    def __init__(self, model, adapters):
        super().__init__()
        merged = (merge(copy.deepcopy(model), pairs) if pairs else model for pairs in adapters.values())
        self.models = nn.ModuleList(merged)
        self.seqlen, self.blocks = model.seqlen, self.models[0].blocks  # for pools and schedulers
        self.token_embedding = self.models[0].token_embedding
        self.place = {adapter.key if adapter else b"": i for i, adapter in enumerate(adapters)}

    def forward(self, tokens, step, kv, salt):
        return self.models[self.place[salt]](tokens, step, kv)

    @torch.no_grad()
    def step(self, pool, work):
        """As GPTlite_Paged.step(), for work that leaves nothing pending."""
        logits = {}
        for salt in dict.fromkeys(sequence.salt for sequence, _ in work):
            part = [(sequence, n) for sequence, n in work if sequence.salt == salt]
            tokens, step = self.models[self.place[salt]].plan(pool, part)
            logits |= zip([s for s, _ in part], self(tokens, step, pool.kv, salt), strict=True)
        for sequence, n in work:
            sequence.done += n
        return [sequence for sequence, _ in work], torch.stack([logits[sequence] for sequence, _ in work])
