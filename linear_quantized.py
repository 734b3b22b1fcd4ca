"""Linear layers of 8- and 4-bit weights, which they unpack while they read; naive: main_quantization.py.

Whoever writes an unpacked copy first and multiplies then moves more bytes than without quantisation. So the
unpacking belongs into the product: torch has kernels for that on a CPU, and what is written as products and a
sum, the compiler of a whole step fuses (gptlite_compiled.py). Which is best depends on the number of rows.

A layer here is made from its naive twin, whose tensors it shares: weight, scale, bias, for 4 bits also zero.
"""

import torch
import torch.nn.functional as F
from torch import nn


def pack_int4(codes):
    """Two codes from -8 to 7 in a byte: int8 [..., N] -> uint8 [..., ceil(N / 2)].

    The first half of the codes lies in the low bits, the second in the high ones, so that each unpacks to
    neighbours; an odd one is padded.
    """
    low, high = F.pad(codes, (0, codes.shape[-1] % 2)).add(8).to(torch.uint8).chunk(2, dim=-1)  # 0 to 15
    return low | high << 4


def unpack_int4(packed):
    """Both halves of what was packed, two of int8 [..., ceil(N / 2)]."""
    return (packed & 15).to(torch.int8) - 8, (packed >> 4).to(torch.int8) - 8


def constant(tensor):
    """A parameter without gradients: it counts as a weight and moves with its module."""
    return nn.Parameter(tensor, requires_grad=False)


class LinearInt8Fast(nn.Module):
    """int8 by torch's kernel on a CPU, with bfloat16 inputs; else, for a row, a sum that a compiler fuses.

    Args: layer: LinearInt8, which takes what is left.
    """

    def __init__(self, layer):
        super().__init__()
        self.naive, self.weight = layer, layer.weight  # [O, I]

    def forward(self, x):
        """[..., I] -> [..., O]"""
        (n_out, n_in), scale, bias = self.weight.shape, self.naive.scale[:, 0], self.naive.bias  # [O] each
        # with other widths the kernel returns NaN or ends the process, and with float32 inputs it crawls
        if x.is_cpu and n_in % 16 == 0 and hasattr(torch, "_weight_int8pack_mm"):
            rows = x.reshape(-1, n_in).bfloat16()  # [R, I]
            out = torch._weight_int8pack_mm(rows, self.weight, scale.bfloat16())  # [R, O]
        elif x.numel() == n_in:  # one row
            out = (self.weight.to(x.dtype) * x.reshape(1, n_in)).sum(dim=-1) * scale.to(x.dtype)  # [O]
        else:
            return self.naive(x)
        return out.view(*x.shape[:-1], n_out).to(x.dtype) + bias


class LinearInt4Fast(nn.Module):
    """int4 for a row: a sum over each group, which a compiler fuses with unpacking. Else the naive form."""

    def __init__(self, layer):
        super().__init__()
        self.naive, self.weight = layer, layer.weight  # [O, n, group / 2], two codes in a byte

    def forward(self, x):
        """[..., I] -> [..., O]"""
        n_out, n_groups, half = self.weight.shape
        if x.numel() != 2 * n_groups * half:
            return self.naive(x)
        rows, scale = x.reshape(n_groups, 2 * half), self.naive.scale.to(x.dtype)  # [n, group], [O, n]
        x_low, x_high = rows.chunk(2, dim=-1)  # [n, group / 2]
        codes = self.weight.int()  # a byte's own arithmetic is slow in compiled code
        sums = ((codes & 15).to(x.dtype) * x_low + (codes >> 4).to(x.dtype) * x_high).sum(dim=-1)  # [O, n]
        zero = self.naive.zero.to(x.dtype) - 8 * scale  # [O, n]: 8 was added to the codes
        out = (sums * scale + rows.sum(dim=-1) * zero).sum(dim=-1)  # [O]
        return out.view(*x.shape[:-1], n_out) + self.naive.bias


class LinearInt4Kernel(nn.Module):
    """int4 by torch's kernel, which has an order of its own for the codes; inputs of bfloat16."""

    def __init__(self, layer):
        super().__init__()
        self.weight = constant(torch._convert_weight_to_int4pack_for_cpu(layer.codes().int() + 8, 1))
        self.grid = constant(torch.stack([layer.scale.T, layer.zero.T], dim=-1).contiguous())  # [n, O, 2]
        self.group, self.bias = layer.group, layer.bias

    @staticmethod
    def takes(layer):
        """Whether there is a kernel for this layer: others end in an error, or an endless product."""
        shapes = layer.group in (32, 64, 128, 256) and len(layer.weight) % 16 == 0
        return shapes and layer.weight.is_cpu and hasattr(torch, "_weight_int4pack_mm_for_cpu")

    def forward(self, x):
        """[..., I] -> [..., O]"""
        rows = x.flatten(0, -2).bfloat16()  # [R, I]
        out = torch._weight_int4pack_mm_for_cpu(rows, self.weight, self.group, self.grid.bfloat16())  # [R, O]
        return out.view(*x.shape[:-1], -1).to(x.dtype) + self.bias


def fast_form(layer, n_rows):
    """The fast layer for so many rows, of a LinearInt8 or LinearInt4."""
    if layer.weight.dtype == torch.int8:
        return LinearInt8Fast(layer)
    return LinearInt4Kernel(layer) if n_rows > 1 and LinearInt4Kernel.takes(layer) else LinearInt4Fast(layer)
