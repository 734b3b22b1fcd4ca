"""Unstructured sparsity: half of the weights and more set to zero, in one shot and without retraining.

Which weights go? Magnitude removes the smallest; Wanda the smallest times the norm of the input they meet;
SparseGPT also weighs what the remaining weights can make up for, and changes them so that they do. They are
compared at 30 to 80% zeros and at 2:4 (two of every four), each output's row or the whole layer at a time.

Approximate, all three. Wins nothing yet: zeros are stored and multiplied like other numbers, and from where
on that can change is more/sparsity_speed.py. Loses little up to about half; beyond it the loss grows fast,
slowest with SparseGPT, which costs the most time to prune. Wanda is for models with channels much larger
than the others: more/sparsity_outliers.py. Trained on, a sparse model is sparse no more without keep_zeros.

Run: python main_sparsity.py

Source: Frantar and Alistarh, SparseGPT, 2023; Sun et al., Wanda (A Simple and Effective Pruning Approach
for Large Language Models), 2023; Mishra et al., Accelerating Sparse Deep Neural Networks (2:4), 2021.
"""

import torch

from inference_calibration import input_products, input_squares, linear_layers, relative_error, sum_inputs


def removed(scores, sparsity, by, n_before=0):
    """Which weights of a matrix go: those of the smallest scores, any of a tie.

    Taking so many keeps the count exact; "all below a threshold" takes too many where scores are equal.
    Args: scores [out, in]; sparsity: the share that goes, 0 to 1, or "2:4" for the two lowest of every
        four neighbours along the inputs; by: "row" removes that share of each output's row, "layer" of the
        whole matrix; n_before: how many columns of the same matrix were decided before these, so that
        rounding does not add up: of two pieces of five columns, 30% remove two columns and then one.
    Returns: bool [out, in]. Raises ValueError for another sparsity or by, or inputs not in fours.
    """
    if by not in ("row", "layer"):
        raise ValueError(f"weights are compared by row or by layer, not by {by}")
    if sparsity == "2:4":
        if scores.shape[1] % 4:
            raise ValueError(f"2:4 takes inputs by fours, which {scores.shape[1]} are not")
        groups, count = scores.reshape(-1, 4), 2  # [R, N]
    elif isinstance(sparsity, str) or not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity is a share from 0 to 1 or '2:4', not {sparsity}")
    else:
        groups = scores if by == "row" else scores.reshape(1, -1)  # [R, N]
        size = 1 if by == "row" else len(scores)  # weights of a group in each column
        count = round(sparsity * (size * (n_before + scores.shape[1]))) - round(sparsity * (size * n_before))
    lowest = groups.topk(count, dim=1, largest=False, sorted=False).indices  # [R, count]
    gone = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, lowest, True)  # [R, N]
    return gone.view(scores.shape)  # [out, in]


def prune_magnitude(weight, _, sparsity, by="layer"):
    """weight [out, in] with its smallest numbers zeroed; needs no calibration."""
    return weight.masked_fill(removed(weight.abs(), sparsity, by), 0.0)  # [out, in]


def prune_wanda(weight, squares, sparsity, by="row"):
    """weight [out, in] without the numbers that are smallest times the norm of their input.

    Args: squares: sum of squares of each input over the calibration tokens [in]. Inputs that were always
        zero go first, the smallest weights among them before the others.
    """
    norms = squares.sqrt().clamp(min=1e-20)  # [in]: not 0, so that dead inputs are ranked too
    return weight.masked_fill(removed(weight.abs() * norms, sparsity, by), 0.0)  # [out, in]


def prune_sparsegpt(weight, products, sparsity, by="layer", block_size=128, damping=0.01):
    """weight [out, in] pruned column by column; the columns behind make up for the error of each.

    With P = X^T X of the inputs, removing weight w_j costs w_j^2 / [P_j^-1]_jj if the weights not yet decided
    are then chosen best, where P_j is the part of P that belongs to them (Hassibi and Stork, Optimal Brain
    Surgeon, 1993). One Cholesky factor U holds that for every j: U_jj^2 = [P_j^-1]_jj.

    Args: products: X^T X of the calibration inputs [in, in]; by: weights are compared within block_size
        columns, in each row or over all rows ("layer": elsewhere the whole matrix); block_size: a multiple
        of four for 2:4; damping: added to the diagonal, as a share of its mean.
    Returns: [out, in]. The paper zeroes all weights of an input that was always zero; here they go first,
        so that the share stays exact, and without any input this is magnitude pruning.
    """
    if sparsity == "2:4" and block_size % 4:
        raise ValueError(f"blocks of {block_size} columns cut groups of four apart")
    n_in, mean = weight.shape[1], products.diagonal().mean()
    alive = torch.where(products.diagonal() > 0, 1.0, 1e-20)[:, None].to(products)  # [in, 1]: the dead first
    damped = products + (damping * mean if mean > 0 else 1.0) * torch.eye(n_in).to(products)  # [in, in]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))  # [in, in]
    # row j of the factor: the first row of the inverse of P[j:, j:], over the root of its first entry
    factor = torch.linalg.cholesky(inverse, upper=True)  # [in, in]
    columns = weight.T.clone(memory_format=torch.contiguous_format)  # [in, out]: each column in one piece
    gone = torch.zeros_like(columns, dtype=torch.bool)  # [in, out]
    for start in range(0, n_in, block_size):
        end = min(start + block_size, n_in)
        block, go = columns[start:end], gone[start:end]  # [block, out]: parts of the whole, not copies
        scale = factor.diagonal()[start:end, None]  # [block, 1]
        lost = torch.zeros_like(block)  # [block, out]
        if sparsity != "2:4":
            go |= removed((block / scale).abs().mul(alive[start:end]).T, sparsity, by, start).T
        for j in range(end - start):
            if sparsity == "2:4" and j % 4 == 0:  # decided late: with what the columns before changed
                scores = (block[j : j + 4] / scale[j : j + 4]).abs() * alive[start + j : start + j + 4]
                go[j : j + 4] = removed(scores.T, "2:4", by).T  # [4, out]
            lost[j] = block[j] * go[j] / scale[j]  # [out]
            # the columns behind take over; column j itself becomes 0 where it goes
            block[j:].addr_(factor[start + j, start + j : end], lost[j], alpha=-1)
        columns[end:] -= factor[start:end, end:].T @ lost  # [in - end, out]
    return columns.masked_fill(gone, 0.0).T.contiguous()  # [out, in]


# ---- All layers of a model ----


METHODS = {  # name: (what prunes a matrix, what it knows about its inputs)
    "magnitude": (prune_magnitude, None),
    "Wanda": (prune_wanda, input_squares),
    "SparseGPT": (prune_sparsegpt, input_products),
}


@torch.no_grad()
def prune_model(model, tokens, method, by, sparsity, batch_size=8):
    """Prunes the linear layers of all blocks in place; embeddings, norms, biases and the head stay.

    Block by block: each is calibrated on what it reads behind the pruned blocks before it.
    Args: model: GPTlite in evaluation mode; tokens: calibration texts [B, T]; method: a name in METHODS;
        by, sparsity: see removed. Returns the model.
    """
    prune, statistic = METHODS[method]
    x = model.token_embedding(tokens) + model.position_embedding.weight[: tokens.shape[1]]  # [B, T, E]
    for block in model.blocks:
        layers, pieces = linear_layers(block), x.split(batch_size)
        known = dict.fromkeys(layers)
        if statistic is not None:
            known = sum_inputs(layers, statistic, lambda: [block(piece) for piece in pieces])  # noqa: B023
        for name, layer in layers.items():
            weight = layer.weight.to(torch.promote_types(layer.weight.dtype, torch.float32))  # [out, in]
            layer.weight.copy_(prune(weight, known[name], sparsity, by))
        if statistic is not None:
            x = torch.cat([block(piece) for piece in pieces])  # [B, T, E]
    return model


def keep_zeros(module):
    """Training leaves at zero what is zero now in the linear layers of this module (not of its copies).

    It takes the gradients of these weights away, so an optimiser must be made afterwards: the momentum of
    earlier steps would move them. Returns handles, whose remove() ends it.
    """
    handles = []
    for layer in linear_layers(module).values():
        zero = layer.weight.detach() == 0  # [out, in]
        handles.append(layer.weight.register_hook(lambda grad, zero=zero: grad.masked_fill(zero, 0.0)))
    return handles


def zeros_as_asked(weight, sparsity, by):
    """Whether weight [out, in], which had no zeros, has exactly as many as were asked for, in every group."""
    share = 0.5 if sparsity == "2:4" else sparsity
    size = 4 if sparsity == "2:4" else weight.shape[1] if by == "row" else weight.numel()
    zeros = (weight.reshape(-1, max(size, 1)) == 0).sum(dim=1)  # [R]
    return bool((zeros == round(share * size)).all())


if __name__ == "__main__":
    import copy
    from collections import defaultdict
    from functools import partial
    from statistics import fmean

    import inference_report as harness
    import inference_utils as utils
    import inference_words as words
    from gptlite import GPTlite
    from inference_training import train_steps
    from linear_packed import pack_linears

    parser = harness.options(__doc__, 3, n_windows=32, quick={"sparsities": [0.5], "n_texts": 4})
    parser.add_argument("--n-texts", type=harness.positive_int, default=16, help="texts that calibrate")
    shares = [0.3, 0.5, 0.6, 0.7, 0.8]
    parser.add_argument("--sparsities", type=harness.share, nargs="+", default=shares, help="shares of zeros")
    columns = {"layer_error": ("mean layer error", "{:.4f}")}
    with harness.script(parser) as args:
        text, (dense,) = harness.load_text(args), harness.load_models(args, GPTlite, packed=False)
        texts = text.prompts(args.n_texts, dense.seqlen, "train")  # [B, T]
        unseen = text.prompts(args.n_texts, dense.seqlen)  # [B, T]
        title = f"unstructured sparsity, losses over {args.n_windows} windows"
        report = harness.Report(args, title, dense, columns, text=text, n_texts=args.n_texts)
        layers, shown = linear_layers(dense.blocks), min(args.sparsities, key=lambda share: abs(share - 0.5))
        products = sum_inputs(layers, input_products, lambda: dense(unseen))
        windows = (text.valid, args.n_windows)
        base = utils.window_losses(pack_linears(copy.deepcopy(dense)), *windows)
        report.row("dense", baseline=True, **utils.loss_figures(base))
        names = {f"{method} by {by}": (method, by) for method in METHODS for by in ("layer", "row")}
        label = {share: f"{share:.0%}" for share in args.sparsities} | {"2:4": "2:4"}
        losses, rows, found, exact = {}, {}, defaultdict(dict), True
        for sparsity, name in [(s, name) for s in label for name in names]:
            method, by = names[name]
            if (by, sparsity) == ("layer", "2:4"):
                continue
            pruned = prune_model(copy.deepcopy(dense), texts, method, by, sparsity)
            weights = {n: layer.weight for n, layer in linear_layers(pruned.blocks).items()}
            exact &= all(zeros_as_asked(weight, sparsity, by) for weight in weights.values())
            errors = [relative_error(layers[n].weight, weight, products[n]) for n, weight in weights.items()]
            now = losses[name, sparsity] = utils.window_losses(pack_linears(pruned), *windows)
            found[name, sparsity] = utils.loss_figures(now, base) | {"layer_error": fmean(errors)}
            if sparsity in (shown, "2:4"):
                figures = {"same_output": "approximate", **found[name, sparsity]}
                rows[name, sparsity] = report.row(f"{name}, {label[sparsity]}", **figures)
        report.check("as many zeros as asked for, in every row, layer or group of four", exact)
        titles = [f"{what}, without retraining" for what in ("Rise of the loss", "Mean error of a layer")]
        for title, figure in zip(titles, ("loss_difference", "layer_error"), strict=True):
            table = [{"zeros": label[s], **{n: found[n, s].get(figure) for n in names}} for s in label]
            report.sweep(title, table)
        order = ("SparseGPT", "Wanda", "magnitude")
        for by in ("layer", "row"):
            errors = [found[f"{m} by {by}", shown]["layer_error"] for m in order]
            report.check(f"error of layers pruned by {by}: {' < '.join(order)}", errors == sorted(errors))

        def prunings(name):
            known = {"Wanda": products[name].diagonal(), "SparseGPT": products[name]}
            weight = layers[name].weight.detach().float()
            return {m: partial(METHODS[m][0], weight, known.get(m), shown) for m in METHODS}

        kinds = ["0.ffwd.net.0", "0.ffwd.net.2"]
        *_, ms = report.time_sweep("Time to prune a layer (ms)", "layer", kinds, prunings)
        trained = prune_model(copy.deepcopy(dense).float(), texts, "magnitude", "row", shown)
        keep_zeros(trained.blocks)
        train_steps(trained, text.train, 2, 1e-3, 2, dense.seqlen)
        kept = [zeros_as_asked(x.weight, shown, "row") for x in linear_layers(trained.blocks).values()]
        report.check("zeros stay zeros when the model is trained on", all(kept))
        gpt, wanda, magnitude = ("SparseGPT by layer", "Wanda by row", "magnitude by layer")  # as published
        report.why(words.loss(rows[gpt, shown]) + words.loss(rows[magnitude, shown]))
        for one, other in ((gpt, wanda), (wanda, magnitude)):
            pair = utils.loss_difference(losses[one, shown], losses[other, shown])
            report.why(words.loss_between(f"{one}, {label[shown]},", other, *pair))
        slower = ms["SparseGPT"] / ms["Wanda"]
        figures = f"{ms['SparseGPT']:.1f} ms against Wanda's {ms['Wanda']:.1f} for the layer with most inputs"
        cases = (1.05, f"SparseGPT takes longer: {figures}."), f"SparseGPT takes no longer: {figures}."
        report.why(words.choose(slower, *cases))
        report.plot_sweep(titles[0], "rise of the validation loss (nats)", log="")
        report.finish()
