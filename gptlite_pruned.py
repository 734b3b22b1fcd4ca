"""What scripts on pruning share: sums of what passes through a model, and caches for any shape of it."""

import copy
from functools import partial

import torch

from gptlite_kvcache import Block_KVCache, GPTlite_KVCache, MultiHeadAttention_KVCache


def wide(x):
    """A module's input or output, the first part of a tuple, in at least 32 bits: its sums are large."""
    x = x[0] if isinstance(x, tuple) else x
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def sum_over_text(model, measures, batches):
    """Sums over some text of what passes through modules of a model, by hooks that are removed again.

    Args: measures: pairs (module, measure), where measure(input [B, T, in], output [B, T, out]) gives a sum
        over tokens [...]; batches: token ids [B, T] each, read in evaluation mode.
    Returns: a sum [...] for every pair, float64 on the CPU.
    """
    sums = [0] * len(measures)

    def add(i, measure, _module, inputs, output):
        sums[i] = sums[i] + measure(wide(inputs), wide(output)).cpu().double()  # [...]

    device, was_training, hooks = next(model.parameters()).device, model.training, []
    try:
        model.eval()
        for i, (module, measure) in enumerate(measures):
            hooks.append(module.register_forward_hook(partial(add, i, measure)))
        for batch in batches:
            model(batch.to(device))
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    return sums


def with_kv_cache(model):
    """A copy of a GPTlite of any shape that decodes with a KV cache: same weights, other forward passes."""
    model = copy.deepcopy(model)
    model.__class__ = GPTlite_KVCache
    for block in model.blocks:
        block.__class__, block.mha.__class__ = Block_KVCache, MultiHeadAttention_KVCache
    return model
