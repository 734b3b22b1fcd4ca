"""NF4: sixteen points where a normal distribution has its numbers, and scales that are quantised themselves.

Weights of a trained layer are spread about like a normal distribution: many near zero, few far out. Points at
equal distances waste codes on the few. NF4 has its points at quantiles of the normal distribution instead, so
that each code is used about as often, with one of them at exactly zero. A block of 64 weights is divided by
its largest absolute value, which is stored; these scales are quantised again, to 8 bits in blocks of 256.

Approximate. Wins accuracy against as many points at equal distances where weights are spread like a normal
distribution; loses where they are spread evenly. Double quantisation wins 0.4 bits a weight against scales of
32 bits, for a second table to look into. Loses time: a code must be looked up before it can be multiplied, so
that there is no product of its integers.

Run: python more/quantization_nf4.py

Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023. There the scales get 8-bit
floats; here 8-bit integers around their mean.
"""

from collections import namedtuple

import torch

import _root  # noqa: F401 (the files above become importable)
from inference_calibration import linear_layers
from linear_quantized import pack_int4, unpack_int4

Codes = namedtuple("Codes", "packed scale")  # two codes in a byte, uint8; float32, or DoubleScale
DoubleScale = namedtuple(
    "DoubleScale", "codes scale mean n"
)  # int8 [m, block]; float32 [m, 1]; float; how many


def nf4_points():
    """The 16 points from -1 to 1, float32: quantiles of a normal distribution, 7 below zero and 8 above it.

    The outermost is the quantile of 0.9677: the mean of 1 - 1/30 and 1 - 1/32, since that of 1 is infinite.
    """
    offset = (1 - 1 / 30 + 1 - 1 / 32) / 2

    def quantiles(n):
        return torch.special.ndtri(torch.linspace(offset, 0.5, n + 1, dtype=torch.float64)[:-1])  # [n]

    points = (
        torch.cat([-quantiles(7), torch.zeros(1, dtype=torch.float64), quantiles(8)]).sort().values
    )  # [16]
    return (points / points.max()).float()


def nearest_point_naive(x, points):
    """The index of the nearest of the points for each number, by all distances."""
    return (x.unsqueeze(-1) - points).abs().argmin(dim=-1)


def nearest_point(x, points):
    """The same by where a number lies between the midpoints of neighbours."""
    return torch.bucketize(x, (points[1:] + points[:-1]) / 2)


def quantize_scales(scale, block=256):
    """Scales [n] as 8-bit integers around their mean, with a scale for each block of them: DoubleScale."""
    mean = scale.mean()
    rest = torch.nn.functional.pad(scale - mean, (0, -len(scale) % block)).view(-1, block)  # [m, block]
    step = (rest.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-12)  # [m, 1]
    return DoubleScale((rest / step).round().to(torch.int8), step, mean, len(scale))


def dequantize_scales(double):
    """The scales that are left, float32 [n]."""
    return (double.codes * double.scale + double.mean).flatten()[: double.n]


def quantize_nf4(weight, block=64, double=True):
    """A weight as codes of points and scales of blocks.

    Args: weight [O, I]; block: neighbours of the flattened weight that share a scale, a divisor of its size;
        double: whether scales are quantised as well. Returns Codes. Raises ValueError for other blocks.
    """
    if weight.numel() % block or block % 2:
        raise ValueError(f"blocks of {block} of {weight.numel()} weights: whole blocks of an even size")
    blocks = weight.float().reshape(-1, block)  # [n, block]
    scale = blocks.abs().amax(dim=-1).clamp(min=1e-12)  # [n]
    scale = quantize_scales(scale) if double else scale
    known = dequantize_scales(scale).clamp(min=1e-12) if double else scale  # what reading will divide by
    codes = nearest_point(blocks / known[:, None], nf4_points().to(weight.device))  # [n, block], 0 to 15
    return Codes(pack_int4((codes - 8).to(torch.int8)), scale)


def dequantize_nf4(quantised, shape):
    """The weight that is left, float32 of this shape."""
    codes = torch.cat(unpack_int4(quantised.packed), dim=-1).long() + 8  # [n, block]
    double = isinstance(quantised.scale, DoubleScale)
    scale = dequantize_scales(quantised.scale).clamp(min=1e-12) if double else quantised.scale  # [n]
    return (nf4_points().to(codes.device)[codes] * scale[:, None]).reshape(shape)


def bits_per_weight(quantised, n_weights):
    """All bytes of codes and scales, in bits a weight."""
    parts = quantised.scale if isinstance(quantised.scale, DoubleScale) else (quantised.scale,)
    parts = [quantised.packed, *(part for part in parts if isinstance(part, torch.Tensor))]
    return 8 * sum(part.numel() * part.element_size() for part in parts) / n_weights


if __name__ == "__main__":
    import copy

    import inference_agreement as study
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from linear_packed import pack_linears
    from main_quantization import dequantize, grid_of, round_to

    parser = harness.options(__doc__, repeats=None, dtype=False)
    parser.add_argument("--block", type=harness.positive_int, default=64, help="weights that share a scale")
    columns = {"bits": ("bits a weight", "{:.3f}"), **study.COLUMNS, "used": ("bits of its codes", "{:.3f}")}
    with harness.script(parser) as args:
        text, (dense,) = harness.load_text(args), harness.load_models(args, GPTlite, packed=False)
        tokens, block = text.prompts(2 if args.quick else 16, dense.seqlen), args.block  # [N, T]
        base = pack_linears(copy.deepcopy(dense))
        report = harness.Report(args, "NF4", dense, columns, ("n_parameters",), text, block=block)
        report.row("float32", baseline=True, **report.loss_figures(base, base))

        def even(weight, symmetric):
            """Codes of equal distances, what is left, and bits a weight."""
            grid = grid_of(weight, 4, block, symmetric)
            codes = round_to(weight, grid, 4)
            n_bytes = grid.scale.nbytes + (0 if symmetric else grid.zero.nbytes)
            return codes, dequantize(codes, grid), 4 + 8 * n_bytes / weight.numel()

        def normal(weight, double):
            made = quantize_nf4(weight, block, double)
            codes = torch.cat(unpack_int4(made.packed), dim=-1)
            return codes, dequantize_nf4(made, weight.shape), bits_per_weight(made, weight.numel())

        ways = {
            "int4, equal distances": lambda W: even(W, True),
            "int4, with a zero": lambda W: even(W, False),
            "NF4, scales of 32 bits": lambda W: normal(W, False),
            "NF4, scales quantised": lambda W: normal(W, True),
        }
        rows = {}
        for name, quantise in ways.items():
            model, used, bits, n = copy.deepcopy(dense), torch.zeros(16), 0.0, 0
            with torch.no_grad():
                for layer in linear_layers(model.blocks).values():
                    codes, weight, per_weight = quantise(layer.weight)
                    layer.weight.copy_(weight)
                    used += torch.bincount(codes.flatten().long() + 8, minlength=16).cpu()
                    bits, n = bits + per_weight * weight.numel(), n + weight.numel()
            shares = used[used > 0] / used.sum()
            found = {"bits": bits / n, "used": -(shares * shares.log2()).sum().item()}
            found |= report.loss_figures(pack_linears(model), base) | study.agreement(model, base, tokens)
            rows[name] = report.row(name, same_output="approximate", **found)

        x = torch.randn(2**18, device=args.device)
        drawn = {"normal": x, "even": 12**0.5 * (torch.rand_like(x) - 0.5), "cubes of normal": x**3 / 15**0.5}
        table = []
        for kind, x in drawn.items():  # all with a mean square of 1
            errors = {
                name: (quantise(x[None])[1] - x).square().mean().item() for name, quantise in ways.items()
            }
            table.append({"numbers": kind, **errors})
        report.sweep("Mean squared error on random numbers", table)
        x = drawn["normal"][:4096] / 3
        points = nf4_points().to(args.device)
        same = torch.equal(nearest_point(x, points), nearest_point_naive(x, points))
        report.check("nearest points by midpoints as by all distances", same)
        codes = torch.cat(unpack_int4(pack_int4((nearest_point(x, points) - 8).to(torch.int8))))
        report.check("codes come back from their bytes", torch.equal(codes + 8, nearest_point(x, points)))
        even_row, _, plain, double = (rows[name] for name in ways)
        report.why(study.closer(plain, even_row) + words.loss(double))
        report.why(words.compare(double, plain, "bits") + study.closer(double, plain))
        for line in table[:2]:
            pair = [{"method": name, "error": line[name]} for name in ("NF4, scales of 32 bits", [*ways][0])]
            report.why(words.about(f"{line['numbers']} numbers", words.compare(*pair, "error")))
        points = {name: (row["bits"], row["kl"]) for name, row in rows.items()}
        report.plot_points(points, "bits a weight", "KL divergence (nats)")
        report.finish()
