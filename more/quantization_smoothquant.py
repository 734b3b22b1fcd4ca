"""8-bit activations: products of integers, and three ways to live with activations that stick out.

Where inputs have 8 bits as well as weights (W8A8), a product is one of integers with exact sums, and the two
scales come out of it: one for each output, one for each row of inputs (taken from the row itself, or fixed in
advance for all). One channel that is a hundred times larger than the others then leaves them a few points of
the grid. SmoothQuant moves its size into the weights, half way; LLM.int8() multiplies such channels apart,
unrounded. Both are shown on outliers that are put in exactly (more/sparsity_outliers.py).

Approximate; smoothing alone changes nothing. Wins time where many rows (a prompt, a large batch) make a
product wait for computing, on processors with units for 8-bit products; with few rows rounding the inputs
costs more than it saves, and 8 bits of the weights alone are better. Loses accuracy on inputs larger than all
that calibrated a scale fixed in advance. LLM.int8() finds its channels while it runs; here they are found on
the calibration texts, for layers behind a norm.

Run: python more/quantization_smoothquant.py

Source: Xiao et al., SmoothQuant, 2023; Dettmers et al., LLM.int8(), 2022.
"""

import torch
import torch.nn.functional as F
from torch import nn

import _root  # noqa: F401 (the files above become importable)
from inference_calibration import linear_layers, sum_inputs
from main_quantization import LinearInt8
from quantization_awq import move_scale, pairs_of


def int8_product_naive(a, b):
    """Exact integers of a [R, I] and b [O, I], int8 -> int32 [R, O]; float64 holds every such sum."""
    return (a.double() @ b.double().T).to(torch.int32)


def int8_product(a, b):
    """The same in integers, by the processor's units for them where torch has a product for these sizes."""
    fits = a.is_cpu or a.is_cuda and len(a) > 16 and a.shape[1] % 8 == 0 and len(b) % 8 == 0
    return torch._int_mm(a, b.T) if fits and len(a) > 0 else int8_product_naive(a, b)


def round_rows(x, scale=None):
    """Codes int8 [R, I] of inputs [R, I], and their scale: the given one, or one for each row [R, 1]."""
    if scale is None:
        scale = (x.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-12)  # behind a ReLU rows may be zero
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


class LinearW8A8(nn.Module):
    """nn.Linear with weights and inputs in 8 bits.

    Args: layer: nn.Linear; largest: of all inputs, for one scale in advance; None for a scale of each row;
        outliers: bool [I], inputs that are multiplied apart with weights of 16 bits, None for none.
    """

    product = staticmethod(int8_product)

    def __init__(self, layer, largest=None, outliers=None):
        super().__init__()
        self.apart = None if outliers is None or not outliers.any() else outliers.nonzero()[:, 0]  # [n]
        self.scale = None if largest is None else max(float(largest) / 127, 1e-12)
        weight = layer.weight.detach().clone()  # [O, I]
        if self.apart is not None:
            self.weight16 = nn.Parameter(weight[:, self.apart].bfloat16(), requires_grad=False)  # [O, n]
            weight[:, self.apart] = 0  # they must not decide a row's scale either
        layer8 = nn.Linear(weight.shape[1], len(weight))
        layer8.weight.data, layer8.bias = weight, layer.bias
        self.weight8 = LinearInt8(layer8)

    def forward(self, x):
        """[..., I] -> [..., O]"""
        rows = x.flatten(0, -2)  # [R, I]
        rest = rows if self.apart is None else rows.index_fill(1, self.apart, 0.0)  # [R, I]
        codes, scale = round_rows(rest, self.scale)
        out = self.product(codes, self.weight8.weight) * (scale * self.weight8.scale.to(x.dtype).T)  # [R, O]
        if self.apart is not None:
            out = out + F.linear(rows[:, self.apart], self.weight16.to(x.dtype))  # [R, O]
        return out.view(*x.shape[:-1], -1) + self.weight8.bias


def largest_inputs(layers, run):
    """The largest absolute value of each input [I] of each layer; run() is one forward pass, so one sum."""
    return sum_inputs(layers, lambda x: x.abs().amax(dim=0), run)


def smoothing_scale(largest, weights, alpha=0.5):
    """What inputs are divided by [I], and weights multiplied with: largest input^a over largest weight^(1-a).

    Args: largest: absolute values of the inputs [I]; weights: of all layers that read them [O, I].
    """
    biggest = torch.stack([W.abs().amax(dim=0) for W in weights]).amax(dim=0).clamp(min=1e-5)  # [I]
    scale = largest.clamp(min=1e-5) ** alpha / biggest ** (1 - alpha)  # [I]
    return torch.where(largest > 1e-5, scale, 1.0)  # an input that is always zero stays as it is


@torch.no_grad()
def smooth(model, texts, alpha=0.5):
    """Moves the size of large channels behind the norms into the weights, in place. Returns the model."""
    largest = largest_inputs(linear_layers(model.blocks), lambda: model(texts))
    for i, block in enumerate(model.blocks):
        for name, (maker, readers) in pairs_of(block).items():
            if isinstance(maker, nn.LayerNorm):  # as published: attention's output and the ReLU's stay
                weights = [layer.weight for layer in readers]
                move_scale(maker, readers, smoothing_scale(largest[f"{i}.{name}"], weights, alpha))
    return model


@torch.no_grad()
def to_w8a8(model, texts, in_advance=False, threshold=None):
    """Replaces the linear layers of all blocks, in place, by what they read of calibration texts [B, T].

    Args: in_advance: one scale for all inputs of a layer, the largest; else each row has its own; threshold:
        inputs of layers behind a norm that exceed it go apart, None for none. Returns the model.
    """
    largest = largest_inputs(linear_layers(model.blocks), lambda: model(texts))
    for i, block in enumerate(model.blocks):
        for name, (maker, readers) in pairs_of(block).items():
            inputs = largest[f"{i}.{name}"]  # [I]
            apart = None
            if threshold is not None and isinstance(maker, nn.LayerNorm):
                apart = inputs > threshold  # [I]
                inputs = inputs.masked_fill(apart, 0.0)
            new = {
                id(layer): LinearW8A8(layer, inputs.max() if in_advance else None, apart) for layer in readers
            }
            for module in (block.mha, block.ffwd.net):
                for child, layer in list(module.named_children()):
                    if id(layer) in new:
                        setattr(module, child, new[id(layer)])
    return model


if __name__ == "__main__":
    import copy

    import inference_agreement as study
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from linear_packed import pack_linears
    from linear_quantized import LinearInt8Fast
    from sparsity_outliers import rescale_channels

    quick = {"n_texts": 2, "rows": [1, 64]}
    parser = harness.options(__doc__, 3, dtype=False, quick=quick)
    add, number = parser.add_argument, harness.positive_int
    add("--n-texts", type=number, default=16, help="texts that calibrate")
    add("--n-channels", type=number, default=6, help="channels of each layer norm that become outliers")
    add("--factor", type=number, default=16, help="how much larger they become; a power of two is exact")
    add(
        "--alpha", type=harness.share, default=0.5, help="share of a channel's size that moves to the weights"
    )
    add("--threshold", type=harness.positive, default=6.0, help="inputs above it are multiplied apart")
    add("--rows", type=number, nargs="+", default=[1, 8, 32, 64, 256, 1024], help="rows of a product")
    columns = {**study.COLUMNS, "apart": ("apart", "{:.1%}")}
    with harness.script(parser) as args:
        text, (dense,) = harness.load_text(args), harness.load_models(args, GPTlite, packed=False)
        texts = text.prompts(args.n_texts, dense.seqlen, "train")  # [B, T]
        tokens = text.prompts(2 if args.quick else 16, dense.seqlen)  # [N, T]
        base = pack_linears(copy.deepcopy(dense))
        outliers = rescale_channels(copy.deepcopy(dense), args.n_channels, args.factor)
        sizes = {"n_texts": args.n_texts, "n_channels": args.n_channels, "factor": args.factor}
        report = harness.Report(args, "8-bit activations", dense, columns, ("n_parameters",), text, **sizes)
        report.row("float32", baseline=True, **report.loss_figures(base, base))
        with torch.no_grad():
            expected, rows = dense(tokens[:1]), {}  # [1, T, V]
            report.check_close("outliers put in change nothing", outliers(tokens[:1]), expected)
            smoothed = smooth(copy.deepcopy(outliers), texts, args.alpha)
            report.check_close("smoothing alone changes nothing", smoothed(tokens[:1]), expected)
        for label, model in (("as trained", dense), ("outliers", outliers)):
            smoothed = smooth(copy.deepcopy(model), texts, args.alpha)
            ways = {
                "a scale a row": (model, {}),
                "a scale in advance": (model, {"in_advance": True}),
                "SmoothQuant, in advance": (smoothed, {"in_advance": True}),
                "LLM.int8()": (model, {"threshold": args.threshold}),
            }
            for method, (start, how) in ways.items():
                small = to_w8a8(copy.deepcopy(start), texts, **how)
                layers = [module for module in small.modules() if isinstance(module, LinearW8A8)]
                n_apart = sum(0 if layer.apart is None else len(layer.apart) for layer in layers)
                found = {"apart": n_apart / sum(layer.weight8.weight.shape[1] for layer in layers)}
                found |= report.loss_figures(small, base) | study.agreement(small, base, tokens)
                rows[method, label] = report.row(f"{method}, {label}", same_output="approximate", **found)
        same = []
        for W in (layer.weight8.weight for layer in layers):  # [O, I]
            codes = torch.randint(-127, 128, (33, W.shape[1]), dtype=torch.int8, device=args.device)
            same.append(torch.equal(int8_product(codes, W), int8_product_naive(codes, W)))
        report.check("integer products are exact", all(same))
        layer = dense.blocks[0].ffwd.net[0]
        both, weights = LinearW8A8(layer), LinearInt8Fast(LinearInt8(layer))
        packed = base.blocks[0].ffwd.net[0]

        def products(n):
            x = torch.randn(n, layer.in_features, device=args.device)
            codes = round_rows(x)[0]
            forms = {"float32": lambda: packed(x), "weights in 8 bits": lambda: weights(x)}
            alone = {"integers alone": lambda: int8_product(codes, both.weight8.weight)}
            return forms | {"W8A8": lambda: both(x)} | alone

        title = "A product of the first MLP layer, ms"
        with torch.no_grad():
            times = report.time_sweep(title, "rows", args.rows, products)
        row, advance, smoothquant, apart = (rows[method, "outliers"] for method in ways)
        report.why(study.closer(smoothquant, advance) + study.closer(apart, row))
        report.why(study.closer(row, rows["a scale a row", "as trained"]) + words.loss(advance))
        for other in ("weights in 8 bits", "float32"):
            report.why(words.crossover(times, "rows", "W8A8", other))
        report.plot_sweep(title)
        report.finish()
