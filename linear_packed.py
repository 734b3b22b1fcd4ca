"""Linear layers whose weights are reordered once, so that products of few rows read them faster.

A decode step multiplies one row for each sequence with every weight, so it takes as long as reading the
weights does. How they lie in memory decides how fast that is: PyTorch's float32 product on a CPU takes the
weight row by row as nn.Linear stores it, and reaches a third to a half of what the same processor reaches
on the blocked order that its matrix kernels (oneDNN) work in. That order can be made once, when a model is
loaded, instead of being worked around in every product. Same function, another order of the sums.

Where it wins: float32 on x86 CPUs, most at 1 to 64 rows, somewhat for whole prompts. Where it does not
apply (GPUs, other types, a PyTorch without oneDNN) pack_linears leaves a model as it is. For inference only.

Source: Intel, oneDNN: memory format propagation (the blocked layouts), 2020.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

ROWS_AT_PACKING = 8  # the kernels choose an order for about so many rows; it serves 1 to 300 well


def linear_naive(x, weight, bias):
    """What a packed layer computes, from the weight as it is: [..., E_in] -> [..., E_out]."""
    return F.linear(x, weight, bias)


def can_pack(weight):
    """Whether this PyTorch can reorder this weight [E_out, E_in], and multiply with the result."""
    operations = ("_reorder_linear_weight", "_linear_pointwise")
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and all(hasattr(torch.ops.mkldnn, name) for name in operations)
    )


class PackedLinear(nn.Linear):
    """nn.Linear whose weight lies in the blocked order; made by pack_linears, without gradients.

    A state dictionary holds the ordinary weight [E_out, E_in], and loading one packs it again.
    """

    def forward(self, x):
        """[..., E_in] -> [..., E_out]"""
        if x.numel() == 0:  # the kernel divides by the number of rows
            return x.new_zeros(*x.shape[:-1], self.out_features)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def pack(self, weight):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS_AT_PACKING)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach().to_dense()

    def _load_from_state_dict(self, *args):
        nn.Linear._load_from_state_dict(
            unpack(self), *args
        )  # in place, with its messages for what does not fit
        pack_linears(self)

    def _apply(self, *args, **kwargs):
        """.to(), .double(), .half(): the ordinary weight is converted, and packed again where it can be."""
        return pack_linears(unpack(self)._apply(*args, **kwargs))

    def __deepcopy__(self, memo):
        with torch.random.fork_rng(devices=[]):  # the copy's own first weights are drawn and replaced
            twin = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        twin.load_state_dict(self.state_dict())
        memo[id(self)] = pack_linears(twin).train(self.training)
        return twin


def unpack(layer):
    """Makes an ordinary nn.Linear of a PackedLinear, in place, and returns it."""
    layer.__class__ = nn.Linear
    layer.weight = nn.Parameter(layer.weight.detach().to_dense(), requires_grad=False)
    return layer


def pack_linears(model):
    """Packs every nn.Linear of a model in place, where that is possible, and returns the model.

    A weight that other code reads itself (MLA's absorbed products, a layer of another class) stays as it is.
    """
    for module in model.modules():
        if type(module) is nn.Linear and can_pack(module.weight):
            weight = module.weight
            module.__class__ = PackedLinear
            module.pack(weight)
            if module.bias is not None:
                module.bias.requires_grad_(False)
    return model


# The compiler cannot see into a weight in oneDNN's order, so a graph holds its number.
PACKED = []


@torch.library.custom_op("gptlite::packed_linear", mutates_args=())
def packed_linear(x: torch.Tensor, bias: torch.Tensor, number: int) -> torch.Tensor:
    """[B, E_in] -> [B, E_out] by PACKED[number], as one operation of a compiled graph."""
    return torch.ops.mkldnn._linear_pointwise(x, PACKED[number], bias, "none", [], "")


@packed_linear.register_fake
def _(x, bias, number):
    return x.new_empty(*x.shape[:-1], bias.shape[0])


class LinearInGraph(nn.Module):
    """A packed layer with a bias inside a compiled graph, [B, E_in] -> [B, E_out]."""

    def __init__(self, linear):
        super().__init__()
        self.number, self.packed, self.bias = len(PACKED), pack_linears(copy.deepcopy(linear)), linear.bias
        PACKED.append(self.packed.weight)

    def forward(self, x):
        return packed_linear(x, self.bias, self.number)
