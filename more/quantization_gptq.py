"""GPTQ: weights are rounded one input after the other, and the inputs behind make up for each error.

Rounding to the nearest takes every weight on its own. What counts is the error of the outputs on the inputs
that a layer reads, ||X (W - W')^T||^2, and there the error of one weight can be undone in part by the weights
not yet rounded: the inverse of X^T X tells how. The naive form computes that inverse for the inputs that are
left, again at every input; one Cholesky factor holds them all, and changes are passed on in blocks.

Approximate. Wins most where grids are coarse, from 3 bits down. There the order matters as well: inputs of
large activations first (act-order), while most others can still make up for them. Loses the passes over
calibration texts and the time to solve. Scales and zeros are those of the original weights ("static groups"),
so that the order of rounding does not move a weight to another group. The head and the embeddings stay as
they are; each block is calibrated on what it reads behind the rounded ones.

Run: python more/quantization_gptq.py

Source: Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers,
2023; Frantar and Alistarh, Optimal Brain Compression, 2022 (the greedy form).
"""

import torch

import _root  # noqa: F401 (the files above become importable)
from inference_calibration import linear_layers
from main_quantization import Grid, dequantize, grid_of, round_to


def round_nearest(weight, _, n_bits, group=None):
    """Codes int8 [O, I] and Grid of the nearest points; needs no calibration."""
    grid = grid_of(weight, n_bits, group, symmetric=False)
    return round_to(weight, grid, n_bits), grid


def rounded_column(column, grid, index, n_bits):
    """Codes [O] and numbers [O] of a column [O] by the grid of one group."""
    grid = Grid(grid.scale[:, index, None], grid.zero[:, index, None])
    codes = round_to(column[:, None], grid, n_bits)  # [O, 1]
    return codes[:, 0], dequantize(codes, grid)[:, 0].to(column)


def damped(products, damping):
    """X^T X [I, I] with a share of its mean diagonal added, float64: inputs that are always zero need it."""
    mean = products.diagonal().mean().double()
    eye = torch.eye(len(products), dtype=torch.float64, device=products.device)  # [I, I]
    return products.double() + (damping * mean if mean > 0 else 1.0) * eye


def order_of(products, act_order):
    """The order in which inputs are rounded: those of the largest activations first, or as they come."""
    diagonal = products.diagonal()  # [I]
    return diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(len(diagonal))


def gptq_naive(weight, products, n_bits, group=None, act_order=False, damping=0.01):
    """The greedy form: after each input, the best change of all weights that are left (see gptq)."""
    n_in, grid = weight.shape[1], grid_of(weight, n_bits, group, symmetric=False)
    W, H, codes = (
        weight.double().clone(),
        damped(products, damping),
        torch.zeros_like(weight, dtype=torch.int8),
    )
    order = order_of(products, act_order)
    for i, j in enumerate(order.tolist()):
        left = order[i:]  # [n]: input j first
        inverse = torch.linalg.inv(H[left][:, left])  # [n, n]
        codes[:, j], numbers = rounded_column(W[:, j], grid, j // (group or n_in), n_bits)
        error = (W[:, j] - numbers) / inverse[0, 0]  # [O]
        W[:, left] -= torch.outer(error, inverse[0])  # column j becomes its rounded numbers
    return codes, grid


def gptq(weight, products, n_bits, group=None, act_order=False, damping=0.01, block_size=128):
    """Rounds a weight so that the error of the outputs stays small.

    Args: weight [O, I]; products: X^T X of the calibration inputs [I, I]; n_bits, group: see grid_of;
        act_order: inputs of large activations first; damping: added to the diagonal, as a share of its mean;
        block_size: inputs whose changes are passed on together, which changes no result.
    Returns: codes int8 [O, I], in the order of the weight, and Grid. Inputs that were always zero are rounded
        to the nearest; the paper makes their weights 0.
    """
    n_in, grid = weight.shape[1], grid_of(weight, n_bits, group, symmetric=False)
    order, codes = order_of(products, act_order), torch.zeros_like(weight, dtype=torch.int8)
    H = damped(products, damping)[order][:, order]  # [I, I]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(H))  # [I, I]
    # row j of the factor: the first row of the inverse of H[j:, j:], over the root of its first entry
    factor = torch.linalg.cholesky(inverse, upper=True)  # [I, I]
    columns = weight.double().T[order]  # [I, O], a copy, each column in one piece
    for start in range(0, n_in, block_size):
        end = min(start + block_size, n_in)
        lost = columns.new_zeros(end - start, len(weight))  # [block, O]
        for i in range(start, end):
            j = order[i].item()  # its place in the weight, which decides the group
            codes[:, j], numbers = rounded_column(columns[i], grid, j // (group or n_in), n_bits)
            lost[i - start] = (columns[i] - numbers) / factor[i, i]  # [O]
            columns[i:end].addr_(factor[i, i:end], lost[i - start], alpha=-1)
        columns[end:] -= factor[start:end, end:].T @ lost  # [I - end, O]
    return codes, grid


def gptq_act_order(weight, products, n_bits, group=None):
    return gptq(weight, products, n_bits, group, act_order=True)


METHODS = {"rounding": round_nearest, "GPTQ": gptq, "GPTQ, act-order": gptq_act_order}


def quantize_block(block, known, method, n_bits, group):
    """Rounds the linear layers of a block in place, by METHODS[method] and X^T X of each of them."""
    for name, layer in linear_layers(block).items():
        codes, grid = METHODS[method](layer.weight, known[name], n_bits, group)
        layer.weight.copy_(dequantize(codes, grid))


if __name__ == "__main__":
    import copy
    from functools import partial
    from statistics import fmean

    import inference_agreement as study
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from inference_calibration import change_blocks, input_products, relative_error, sum_inputs
    from inference_utils import Timer
    from linear_packed import pack_linears

    quick = {"bits": [3, 2], "n_texts": 4}
    parser = harness.options(__doc__, repeats=None, dtype=False, quick=quick)
    add, number = parser.add_argument, harness.positive_int
    add("--bits", type=number, nargs="+", default=[4, 3, 2], help="bits of a code")
    add("--group", type=number, default=64, help="inputs that share a grid")
    add("--n-texts", type=number, default=16, help="texts that calibrate")
    columns = {"bits": ("bits a weight", "{:.2f}"), "layer_error": ("mean layer error", "{:.4f}")}
    columns |= {**study.COLUMNS, "seconds": ("quantised in s", "{:.1f}")}
    with harness.script(parser) as args:
        text, (dense,) = harness.load_text(args), harness.load_models(args, GPTlite, packed=False)
        layers = linear_layers(dense.blocks)
        first = next(iter(layers.values())).weight
        for n_bits in args.bits:
            grid = grid_of(first, n_bits, args.group, symmetric=False)  # refuses sizes that do not fit
        texts = text.prompts(args.n_texts, dense.seqlen, "train")  # [B, T]
        tokens = text.prompts(2 if args.quick else 16, dense.seqlen)  # [N, T]
        base = pack_linears(copy.deepcopy(dense))
        report = harness.Report(args, "GPTQ", dense, columns, ("n_parameters",), text, n_texts=args.n_texts)
        report.row("float32", baseline=True, **report.loss_figures(base, base))
        seen, unseen = (sum_inputs(layers, input_products, lambda t=t: dense(t)) for t in (texts, tokens))
        per_weight = 8 * (grid.scale.nbytes + grid.zero.nbytes) / first.numel()  # of scales and zeros
        rows = {}
        for n_bits, method in ((n_bits, method) for n_bits in args.bits for method in METHODS):
            change = partial(quantize_block, method=method, n_bits=n_bits, group=args.group)
            with Timer(args.device) as timer:
                model = change_blocks(copy.deepcopy(dense), texts, input_products, change)
            weights = {name: layer.weight for name, layer in linear_layers(model.blocks).items()}
            errors = [relative_error(layers[n].weight, w, unseen[n]) for n, w in weights.items()]
            figures = report.loss_figures(pack_linears(model), base) | study.agreement(model, base, tokens)
            figures |= {"layer_error": fmean(errors), "bits": n_bits + per_weight, "seconds": timer.seconds}
            name = f"int{n_bits} g{args.group}, {method}"
            rows[n_bits, method] = report.row(name, same_output="approximate", **figures)

        corner = args.group * (48 // args.group or 1)  # a corner of a layer: the naive form is slow
        layer, best = next(iter(layers)), max(args.bits)
        W, P = layers[layer].weight[:64, :corner], seen[layer][:corner, :corner]
        for act_order in (False, True):
            one, two = (f(W, P, best, args.group, act_order)[0] for f in (gptq, gptq_naive))
            label = "act-order" if act_order else "inputs as they come"
            report.check(f"in blocks as with an inverse for each input, {label}", torch.equal(one, two))
        same = torch.equal(gptq(W, torch.eye(corner), best)[0], round_nearest(W, None, best)[0])
        report.check("with inputs that have nothing in common it is rounding to the nearest", same)
        for n_bits in args.bits:
            how, better = (n_bits, args.group), []
            for name, products in [*seen.items()][:6]:  # of the first block
                W = layers[name].weight
                made = (dequantize(*f(W, products, *how)) for f in (gptq, round_nearest))
                better.append(
                    relative_error(W, next(made), products) <= relative_error(W, next(made), products)
                )
            report.check(f"int{n_bits}: on what calibrates it no layer is worse than rounded", all(better))
        many, few = max(args.bits), min(args.bits)
        for n_bits in dict.fromkeys((many, few)):
            report.why(study.closer(rows[n_bits, "GPTQ, act-order"], rows[n_bits, "rounding"]))
        report.why(
            study.closer(rows[few, "GPTQ, act-order"], rows[few, "GPTQ"])
            + words.loss(rows[few, "GPTQ, act-order"])
        )
        if many - 1 in args.bits:
            report.why(study.closer(rows[many - 1, "GPTQ, act-order"], rows[many, "rounding"]))
        bits = sorted(args.bits)
        lines = {method: (bits, [rows[n, method]["kl"] for n in bits]) for method in METHODS}
        report.plot_lines(lines, "bits", "KL divergence (nats)", log="y")
        report.finish()
