"""Rotations: an orthogonal matrix spreads what sticks out of a row of activations over all channels.

A product does not change if its inputs and its weights are rotated alike: (x R)(W R)^T = x W^T. A Hadamard
matrix with random signs makes every rotated channel a sum of all channels, so that one large one is shared by
all, and 4 bits for a whole row of activations suffice. The weights are rotated once, before they are rounded;
the inputs while the model runs, which for a Hadamard matrix takes two small products instead of a large one.

Approximate; without rounding a rotation changes nothing. Wins for activations, where channels stick out (put
in here exactly, as more/sparsity_outliers.py does). Loses for weights alone where channels stick out: small
weights that meet a large input are then rounded as coarsely as all others. Behind a ReLU most inputs are zero
and none is below it: a grid that begins at zero beats the rotation, which would fill in the zeros.

Run: python more/quantization_rotation.py

Source: Ashkboos et al., QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs, 2024; Liu et al., SpinQuant,
2025. QuaRot rotates the residual stream and folds that into the weights as well; here layer norms stay, so
that each layer's input is rotated while the model runs.
"""

import copy
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

import _root  # noqa: F401 (the files above become importable)
from main_quantization import nearest


def paley():
    """A Hadamard matrix of size 12: from which differences are squares modulo 11 (Paley, 1933)."""
    squares = {i * i % 11 for i in range(1, 11)}
    matrix = torch.eye(12)
    matrix[0, 1:], matrix[1:, 0] = 1, -1
    for i in range(11):
        for j in range(11):
            if i != j:
                matrix[i + 1, j + 1] = 1 if (i - j) % 11 in squares else -1
    return matrix


def sylvester(n):
    """A Hadamard matrix of a size that is a power of two: twice as large from [[H, H], [H, -H]]."""
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


@functools.cache
def hadamard_factors(n):
    """Two Hadamard matrices whose Kronecker product has size n: n is a power of two, or 12 times one.

    Raises ValueError for other sizes.
    """
    small = paley() if n % 3 == 0 else torch.ones(1, 1)
    power = n // len(small)
    if n < 1 or len(small) * power != n or power & (power - 1):
        raise ValueError(f"a rotation of {n} channels: only powers of two and 12 times powers of two")
    return small, sylvester(power)


def random_signs(n, seed=0):
    """n signs, +1 or -1, the same for a seed."""
    return torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0


def rotation_matrix(signs):
    """Random signs [n], then a Hadamard matrix, over sqrt(n): an orthogonal matrix [n, n]."""
    return signs[:, None] * torch.kron(*hadamard_factors(len(signs))).to(signs) / math.sqrt(len(signs))


def rotate_naive(x, signs):
    """x [..., n] times the rotation as one matrix."""
    return x @ rotation_matrix(signs.to(x))


def rotate(x, signs):
    """The same by two small products, with a Hadamard matrix of 12 and one of a power of two."""
    small, large = (H.to(x) for H in hadamard_factors(len(signs)))  # [m, m], [n / m, n / m]
    blocks = (x * signs.to(x)).unflatten(-1, (len(small), -1))  # [..., m, n / m]
    return (small.T @ blocks @ large).flatten(-2) / math.sqrt(len(signs))


def round_rows(x, n_bits, unsigned=False):
    """Inputs [..., I] at the points of a grid for each row; unsigned: no input is below 0, and no point."""
    top = 2**n_bits - 1 if unsigned else 2 ** (n_bits - 1) - 1
    scale = (x.abs().amax(dim=-1, keepdim=True) / top).clamp(min=1e-12)  # behind a ReLU rows may be zero
    return (x / scale).round() * scale


class LinearLowBits(nn.Module):
    """nn.Linear with weights and inputs of few bits, as they would be read: rounded, but kept as they are.

    Args: layer: nn.Linear; weight_bits: by row; input_bits: by row of inputs, None for unrounded ones; signs:
        of the rotation [I], None for none; unsigned: no input is below 0.
    """

    def __init__(self, layer, weight_bits=None, input_bits=None, signs=None, unsigned=False):
        super().__init__()
        weight, self.bias = layer.weight.detach(), layer.bias  # [O, I]
        self.input_bits, self.unsigned = input_bits, unsigned
        self.register_buffer("signs", signs)
        if signs is not None:
            weight = rotate(weight, signs)
        self.weight = nn.Parameter(
            nearest(weight, weight_bits) if weight_bits else weight, requires_grad=False
        )

    def forward(self, x):
        if self.signs is not None:
            x = rotate(x, self.signs)  # [..., I]
        if self.input_bits:
            x = round_rows(x, self.input_bits, self.unsigned)
        return F.linear(x, self.weight, self.bias)  # [..., O]


@torch.no_grad()
def with_low_bits(model, weight_bits, input_bits=None, rotated=False, behind_relu="rotated"):
    """A copy of a model whose blocks' linear layers have few bits; head and embeddings stay.

    Args: weight_bits, input_bits: None to leave them unrounded; rotated: inputs and weights; behind_relu:
        "rotated" as the others, or "unsigned", not rotated, with a grid from 0 on.
    """
    model = copy.deepcopy(model)
    for block in model.blocks:
        relu_reader = block.ffwd.net[2]
        for module in (block.mha, block.ffwd.net):
            for name, layer in list(module.named_children()):
                if isinstance(layer, nn.Linear):
                    unsigned = layer is relu_reader and behind_relu == "unsigned"
                    signs = (
                        random_signs(layer.in_features).to(layer.weight) if rotated and not unsigned else None
                    )
                    setattr(module, name, LinearLowBits(layer, weight_bits, input_bits, signs, unsigned))
    return model


if __name__ == "__main__":
    import inference_agreement as study
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from linear_packed import pack_linears
    from sparsity_outliers import rescale_channels

    quick = {"rows": [64]}
    parser = harness.options(__doc__, 3, dtype=False, quick=quick)
    add, number = parser.add_argument, harness.positive_int
    add("--weight-bits", type=number, default=4, help="bits of a weight")
    add("--input-bits", type=number, default=4, help="bits of an activation")
    add("--n-channels", type=number, default=6, help="channels of each layer norm that become outliers")
    add("--factor", type=number, default=16, help="how much larger they become; a power of two is exact")
    add("--rows", type=number, nargs="+", default=[1, 64, 1024], help="rows to rotate")
    with harness.script(parser) as args:
        text, (dense,) = harness.load_text(args), harness.load_models(args, GPTlite, packed=False)
        tokens = text.prompts(2 if args.quick else 16, dense.seqlen)  # [N, T]
        base = pack_linears(copy.deepcopy(dense))
        outliers = rescale_channels(copy.deepcopy(dense), args.n_channels, args.factor)
        nearest(dense.fc_out.weight, args.weight_bits)  # refuses bits that there are not
        sizes = {"n_channels": args.n_channels, "factor": args.factor}
        report = harness.Report(args, "rotations", dense, study.COLUMNS, ("n_parameters",), text, **sizes)
        report.row("float32", baseline=True, **report.loss_figures(base, base))
        with torch.no_grad():
            expected = dense(tokens[:1])  # [1, T, V]
            report.check_close("outliers put in change nothing", outliers(tokens[:1]), expected)
            unrounded = with_low_bits(outliers, None, rotated=True)
            report.check_close("rotations alone change nothing", unrounded(tokens[:1]), expected)
            for n in sorted({layer.in_features for layer in dense.modules() if isinstance(layer, nn.Linear)}):
                x, signs, H = torch.randn(3, n), random_signs(n), torch.kron(*hadamard_factors(n))
                report.check_close(
                    f"two small products as one of {n}", rotate(x, signs), rotate_naive(x, signs)
                )
                report.check(f"a Hadamard matrix of {n}", torch.equal(H @ H.T, n * torch.eye(n)))
        W, A = args.weight_bits, args.input_bits
        ways = {
            f"W{W}": (W,),
            f"W{W}, rotated": (W, None, True),
            f"W{W}A{A}": (W, A),
            f"W{W}A{A}, rotated": (W, A, True),
            f"W{W}A{A}, unsigned": (W, A, False, "unsigned"),
            f"W{W}A{A}, rotated, unsigned": (W, A, True, "unsigned"),
        }
        rows = {}
        for label, model in (("as trained", dense), ("outliers", outliers)):
            for name, how in ways.items():
                small = with_low_bits(model, *how)
                found = report.loss_figures(small, base) | study.agreement(small, base, tokens)
                rows[name, label] = report.row(f"{name}, {label}", same_output="approximate", **found)
        plain, turned, both, both_turned, _, mixed = ways

        def rotations(n):
            layer = base.blocks[0].ffwd.net[2]
            x = torch.randn(n, layer.in_features, device=args.device)  # [n, I]
            signs = random_signs(layer.in_features).to(x)  # [I]
            forms = {
                "one large product": lambda: rotate_naive(x, signs),
                "two small": lambda: rotate(x, signs),
            }
            return forms | {"the layer": lambda: layer(x)}

        title = "Rotating the inputs of the second MLP layer, and its own product, ms"
        with torch.no_grad():
            times = report.time_sweep(title, "rows", args.rows, rotations)
        report.why(study.closer(rows[both_turned, "outliers"], rows[both, "outliers"]))
        report.why(
            study.closer(rows[both_turned, "as trained"], rows[both, "as trained"])
            + study.closer(rows[mixed, "as trained"], rows[both_turned, "as trained"])
        )
        report.why(
            study.closer(rows[turned, "as trained"], rows[plain, "as trained"])
            + study.closer(rows[turned, "outliers"], rows[plain, "outliers"])
        )
        report.why(
            words.at_size(times[-1], "rows", "two small", "the layer", "time in ms")
            + words.loss(rows[mixed, "outliers"])
        )
        report.plot_sweep(title)
        report.finish()
