"""AWQ: inputs that are large get a finer grid, by scaling their weights up before rounding and down after.

A rounding error does harm in proportion to the input that it meets. Weights of large inputs are multiplied by
a scale s before they are rounded, so that their error after division by s is smaller, while the grid of their
group hardly grows. s is a power of the mean of each input's absolute values; the power is searched, for the
least error of the outputs. Dividing by s costs nothing: it is folded into what makes the input (a layer norm,
the values, or the layer in front of a ReLU, which a positive scale passes through).

Approximate; without rounding it changes nothing. Wins where a few channels are much larger than the others,
as in large models; GPTlite has none, so they are put in here, exactly (more/sparsity_outliers.py). Where
channels are alike it finds next to nothing to win. Loses the passes over calibration texts. It avoids errors
where more/quantization_gptq.py makes up for them: the two can be combined.

Run: python more/quantization_awq.py

Source: Lin et al., AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration, 2024.
"""

import torch

import _root  # noqa: F401 (the files above become importable)
from inference_calibration import input_products, linear_layers, relative_error
from main_quantization import nearest


def magnitudes_and_products(x):
    """Sums of absolute values [I], and X^T X [I, I] below them, of inputs [N, I]: [1 + I, I]."""
    return torch.cat([x.abs().sum(dim=0, keepdim=True), input_products(x)])


def scale_of(magnitudes, power):
    """What weights are multiplied with before rounding: [I] -> [I], around 1; power 0 is plain rounding.

    magnitudes: mean (or sum) of the absolute values of each input; one that was always zero counts as tiny.
    """
    scale = (magnitudes / magnitudes.max().clamp(min=1e-12)).clamp(min=1e-4) ** power  # [I]
    return scale / (scale.max() * scale.min()).sqrt()


def awq_naive(weight, scale, n_bits, group=None):
    """The weight [O, I] as it acts: rounded while it is multiplied with the scale [I]."""
    return nearest(weight * scale, n_bits, group, symmetric=False) / scale


def errors_by_power(weights, magnitudes, products, n_bits, group=None, n_steps=20):
    """Mean error of the outputs of layers that read the same inputs, for powers 0, 1 / n_steps and so on."""
    errors = {}
    for power in (step / n_steps for step in range(n_steps)):
        scale = scale_of(magnitudes, power)  # [I]
        parts = [relative_error(W, awq_naive(W, scale, n_bits, group), products) for W in weights]
        errors[power] = sum(parts) / len(parts)
    return errors


def pairs_of(block):
    """{name of a first reader: (what makes its inputs, all that read them)}: scales can move between them."""
    mha, net = block.mha, block.ffwd.net
    return {
        "mha.query_proj": (block.ln1, (mha.query_proj, mha.key_proj, mha.value_proj)),
        "mha.out_proj": (mha.value_proj, (mha.out_proj,)),
        "ffwd.net.0": (block.ln2, (net[0],)),
        "ffwd.net.2": (net[0], (net[2],)),  # the ReLU between them lets positive scales through
    }


@torch.no_grad()
def move_scale(maker, readers, scale):
    """Divides what makes an input by a scale [I], multiplies what reads it, in place: the same function."""
    maker.weight.div_(scale if maker.weight.ndim == 1 else scale[:, None])
    maker.bias.div_(scale)
    for layer in readers:
        layer.weight.mul_(scale)


@torch.no_grad()
def scale_block(block, known, n_bits, group=None):
    """Moves the best scales into the weights of a block in place; nothing is rounded yet.

    Args: known: {name of a linear layer: its magnitudes_and_products}. Returns {name: power}.
    """
    powers = {}
    for name, (maker, readers) in pairs_of(block).items():
        magnitudes, products = known[name][0], known[name][1:]  # [I], [I, I]
        weights = [layer.weight for layer in readers]
        errors = errors_by_power(weights, magnitudes, products, n_bits, group)
        powers[name] = min(errors, key=errors.get)
        move_scale(maker, readers, scale_of(magnitudes, powers[name]).to(maker.weight))
    return powers


@torch.no_grad()
def round_block(block, n_bits, group=None):
    """Rounds the linear layers of a block to the nearest, in place."""
    for layer in linear_layers(block).values():
        layer.weight.copy_(nearest(layer.weight, n_bits, group, symmetric=False))


def awq_block(block, known, n_bits, group=None):
    """Scales, then rounds the linear layers of a block, in place."""
    scale_block(block, known, n_bits, group)
    round_block(block, n_bits, group)


if __name__ == "__main__":
    import copy
    from functools import partial

    import inference_agreement as study
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from inference_calibration import change_blocks, sum_inputs
    from linear_packed import pack_linears
    from sparsity_outliers import rescale_channels

    quick = {"bits": [4], "n_texts": 2}
    parser = harness.options(__doc__, repeats=None, dtype=False, quick=quick)
    add, number = parser.add_argument, harness.positive_int
    add("--bits", type=number, nargs="+", default=[4, 3], help="bits of a code")
    add("--group", type=number, default=64, help="inputs that share a grid")
    add("--n-texts", type=number, default=16, help="texts that calibrate")
    add("--n-channels", type=number, default=6, help="channels of each layer norm that become outliers")
    add("--factor", type=number, default=16, help="how much larger they become; a power of two is exact")
    columns = {"bits": ("bits a weight", "{:.2f}"), **study.COLUMNS}
    with harness.script(parser) as args:
        text, (dense,) = harness.load_text(args), harness.load_models(args, GPTlite, packed=False)
        texts = text.prompts(args.n_texts, dense.seqlen, "train")  # [B, T]
        tokens = text.prompts(2 if args.quick else 16, dense.seqlen)  # [N, T]
        base, extra = pack_linears(copy.deepcopy(dense)), 32 / args.group  # bits of scales and zeros
        nearest(
            next(iter(linear_layers(dense.blocks).values())).weight, max(args.bits), args.group
        )  # they fit
        outliers = rescale_channels(copy.deepcopy(dense), args.n_channels, args.factor)
        sizes = {"n_texts": args.n_texts, "n_channels": args.n_channels, "factor": args.factor}
        report = harness.Report(args, "AWQ", dense, columns, ("n_parameters",), text, **sizes)
        report.row("float32", baseline=True, **report.loss_figures(base, base))
        with torch.no_grad():
            expected = dense(tokens[:1])  # [1, T, V]
            report.check_close("outliers put in change nothing", outliers(tokens[:1]), expected)
        rows, table = {}, []
        for label, model in (("as trained", dense), ("outliers", outliers)):
            name, how = "ffwd.net.0", {"n_bits": max(args.bits), "group": args.group}
            layers = linear_layers(model.blocks[0])
            found = sum_inputs(layers, magnitudes_and_products, lambda m=model: m(texts))[name]
            errors = errors_by_power([layers[name].weight.detach()], found[0], found[1:], **how)
            report.check(
                f"no scale's error is above rounding's, {label}", min(errors.values()) <= errors[0.0]
            )
            table.append(errors)
            calibrated = texts, magnitudes_and_products
            scaled = change_blocks(copy.deepcopy(model), *calibrated, partial(scale_block, **how))
            with torch.no_grad():
                report.check_close(f"scales alone change nothing, {label}", scaled(tokens[:1]), expected)
            for n_bits in args.bits:
                how["n_bits"], rounded = n_bits, copy.deepcopy(model)
                for block in rounded.blocks:
                    round_block(block, **how)
                awq = change_blocks(copy.deepcopy(model), *calibrated, partial(awq_block, **how))
                for method, small in (("rounding", rounded), ("AWQ", awq)):
                    figures = report.loss_figures(pack_linears(small), base)
                    figures |= study.agreement(small, base, tokens) | {"bits": n_bits + extra}
                    title = f"int{n_bits} g{args.group}, {method}, {label}"
                    rows[method, label, n_bits] = report.row(title, same_output="approximate", **figures)
        title = "Mean error of the outputs of the first MLP layer, by the power of the scale"
        lines = [{"power": p, "as trained": table[0][p], "outliers": table[1][p]} for p in table[0]]
        report.sweep(title, lines)
        many = max(args.bits)
        for label in ("outliers", "as trained"):
            line = study.closer(rows["AWQ", label, many], rows["rounding", label, many])
            report.why(line + words.loss(rows["AWQ", label, many]))
        report.why(study.closer(rows["rounding", "outliers", many], rows["rounding", "as trained", many]))
        report.plot_sweep(title, "relative error", "")
        report.finish()
