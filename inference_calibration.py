"""What the linear layers of a model read: sums over calibration texts, and errors of outputs on such inputs.

Pruning and other changes of weights after training ask which inputs a layer really gets. They are observed
by a hook in front of each layer, so that the code of a model needs to know nothing of it.
"""

import torch
from torch import nn


def linear_layers(module):
    """The linear layers in a module, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}


def input_squares(x):
    """The sum of squares of each input over N tokens."""
    return x.square().sum(dim=0)  # [N, in] -> [in]


def input_products(x):
    """X^T X: what products of any two inputs add up to over N tokens."""
    return x.T @ x  # [N, in] -> [in, in]


@torch.no_grad()
def sum_inputs(layers, statistic, run):
    """Sums statistic(inputs [N, in]) over all that each layer reads while run() runs, in float32 at least."""
    sums = dict.fromkeys(layers, 0.0)

    def observe(name):
        def hook(_layer, args):
            x = args[0].flatten(0, -2)  # [N, in]
            sums[name] = sums[name] + statistic(x.to(torch.promote_types(x.dtype, torch.float32)))

        return hook

    hooks = [layer.register_forward_pre_hook(observe(name)) for name, layer in layers.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return sums


@torch.no_grad()
def change_blocks(model, tokens, statistic, change, batch_size=8):
    """Changes the blocks of a model in place one after the other, each by what it reads behind the last one.

    Args: model: GPTlite in evaluation mode; tokens: calibration texts [B, T]; statistic: of what each linear
        layer reads (see sum_inputs); change: function of (block, {name of a linear layer: sum}).
    Returns the model.
    """
    x = model.token_embedding(tokens) + model.position_embedding.weight[: tokens.shape[1]]  # [B, T, E]
    for block in model.blocks:
        layers, pieces = linear_layers(block), x.split(batch_size)
        change(block, sum_inputs(layers, statistic, lambda: [block(piece) for piece in pieces]))  # noqa: B023
        x = torch.cat([block(piece) for piece in pieces])  # [B, T, E]
    return model


@torch.no_grad()
def relative_error(W, pruned, H):
    """Norm of the error of a layer's outputs over the norm of the outputs, for inputs with X^T X = H."""

    def energy(M):
        M = M.to(H)  # [out, in]
        return ((M @ H) * M).sum().clamp(min=0.0)

    return (energy(W - pruned) / energy(W).clamp(min=1e-30)).sqrt().item()
