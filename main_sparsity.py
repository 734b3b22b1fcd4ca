"""Unstructured sparsity: half of the weights and more set to zero, in one shot and without retraining.

Which weights go? Magnitude removes the smallest; Wanda the smallest times the norm of the input they meet;
SparseGPT also weighs what the remaining weights can make up for, and changes them so that they do. All are
approximate: the script measures the loss and the error of each layer's output at 30 to 80% zeros and at
2:4 (two of every four), compared by row or by layer. What Wanda is for: main_sparsity_outliers.py; why
zeros alone save no time: main_sparsity_speed.py.

Run: python main_sparsity.py

Source: Frantar and Alistarh, SparseGPT, 2023; Sun et al., Wanda (A Simple and Effective Pruning Approach
for Large Language Models), 2023; Mishra et al., Accelerating Sparse Deep Neural Networks (2:4), 2021.
"""

import torch
import torch.nn as nn


def removed(scores, sparsity, by, n_before=0):
    """Which weights of a matrix go: those of the smallest scores, any of a tie.

    Taking so many keeps the count exact; "all below a threshold" takes too many where scores are equal.
    Args: scores [out, in]; sparsity: the share that goes, 0 to 1, or "2:4" for the two lowest of every
        four neighbours along the inputs; by: "row" removes that share of each output's row, "layer" of the
        whole matrix; n_before: columns decided before these: of 0.3 x 10 in pieces of 5 go 2 and 1,
        not twice 2, as rounding must not add up.
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
        size = len(scores) // len(groups)  # weights of a group in each column
        count = round(sparsity * (size * (n_before + scores.shape[1]))) - round(sparsity * (size * n_before))
    lowest = groups.topk(count, dim=1, largest=False, sorted=False).indices  # [R, count]
    gone = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, lowest, True)  # [R, N]
    return gone.view(scores.shape)  # [out, in]


def prune_magnitude(W, _, sparsity, by="layer"):
    """W [out, in] with its smallest weights zeroed; needs no calibration."""
    return W.masked_fill(removed(W.abs(), sparsity, by), 0.0)  # [out, in]


def prune_wanda(W, squares, sparsity, by="row"):
    """W [out, in] without the weights that are smallest times the norm of their input.

    Args: squares: sum of squares of each input over the calibration tokens [in]. Inputs that were always
        zero go first, the smallest weights among them before the others.
    """
    norms = squares.sqrt().clamp(min=1e-20)  # [in]: not 0, so that dead inputs are ranked too
    return W.masked_fill(removed(W.abs() * norms, sparsity, by), 0.0)  # [out, in]


def prune_sparsegpt(W, H, sparsity, by="layer", block_size=128, damping=0.01):
    """W [out, in] pruned column by column; the columns behind make up for the error of each.

    Removing weight w_j costs w_j^2 / [H_j^-1]_jj if the weights not yet decided are then chosen best, where
    H_j is the part of H that belongs to them (Hassibi and Stork, Optimal Brain Surgeon, 1993). One Cholesky
    factor U holds that for every j: U_jj^2 = [H_j^-1]_jj.

    Args: H: X^T X of the calibration inputs [in, in]; by: weights are compared within block_size columns,
        in each row or over all rows ("layer": elsewhere the whole matrix); block_size: a multiple of four
        for 2:4; damping: added to H's diagonal, as a share of its mean.
    Returns: [out, in]. The paper zeroes all weights of an input that was always zero; here they go first,
        so that the share stays exact, and without any input this is magnitude pruning.
    """
    n_in, mean = W.shape[1], H.diagonal().mean()
    alive = torch.where(H.diagonal() > 0, 1.0, 1e-20)[:, None].to(H)  # [in, 1]: dead inputs go first
    H = H + (damping * mean if mean > 0 else 1.0) * torch.eye(n_in).to(H)  # [in, in]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(H))  # [in, in]
    # row j of U: the first row of the inverse of H[j:, j:], over the root of its first entry
    U = torch.linalg.cholesky(inverse, upper=True)  # [in, in]
    W = W.T.clone(memory_format=torch.contiguous_format)  # [in, out]: each column in one piece
    gone = torch.zeros_like(W, dtype=torch.bool)  # [in, out]
    for start in range(0, n_in, block_size):
        end = min(start + block_size, n_in)
        block, go = W[start:end], gone[start:end]  # [block, out]: parts of the whole, not copies
        scale = U.diagonal()[start:end, None]  # [block, 1]
        lost = torch.zeros_like(block)  # [block, out]
        if sparsity != "2:4":
            go |= removed((block / scale).abs().mul(alive[start:end]).T, sparsity, by, start).T
        for j in range(end - start):
            if sparsity == "2:4" and j % 4 == 0:  # decided late: with what the columns before changed
                scores = (block[j : j + 4] / scale[j : j + 4]).abs() * alive[start + j : start + j + 4]
                go[j : j + 4] = removed(scores.T, "2:4", by).T  # [4, out]
            lost[j] = block[j] * go[j] / scale[j]  # [out]
            # the columns behind take over; column j itself becomes 0 where it goes
            block[j:].addr_(U[start + j, start + j : end], lost[j], alpha=-1)
        W[end:] -= U[start:end, end:].T @ lost  # [in - end, out]
    return W.masked_fill(gone, 0.0).T.contiguous()  # [out, in]


# ---- All layers of a model ----


def input_squares(x):
    return x.square().sum(dim=0)  # [N, in] -> [in]


def input_products(x):
    return x.T @ x  # [N, in] -> [in, in]


METHODS = {  # name: (what prunes a matrix, what it knows about its inputs)
    "magnitude": (prune_magnitude, None),
    "Wanda": (prune_wanda, input_squares),
    "SparseGPT": (prune_sparsegpt, input_products),
}


def linear_layers(module):
    """The linear layers in a module, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}


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
            W = layer.weight.to(torch.promote_types(layer.weight.dtype, torch.float32))  # [out, in]
            layer.weight.copy_(prune(W, known[name], sparsity, by))
        if statistic is not None:
            x = torch.cat([block(piece) for piece in pieces])  # [B, T, E]
    return model


@torch.no_grad()
def relative_error(W, pruned, H):
    """Norm of the error of a layer's outputs over the norm of the outputs, for inputs with X^T X = H."""

    def energy(M):
        M = M.to(H)  # [out, in]
        return ((M @ H) * M).sum().clamp(min=0.0)

    return (energy(W - pruned) / energy(W).clamp(min=1e-30)).sqrt().item()


def zeros_as_asked(W, sparsity, by):
    """Whether W [out, in], which had none, holds exactly as many zeros as were asked for, in every group."""
    share, size = (0.5, 4) if sparsity == "2:4" else (sparsity, W.shape[1] if by == "row" else W.numel())
    zeros = (W.reshape(-1, size) == 0).sum(dim=1)  # [R]
    return bool((zeros == round(share * size)).all())


if __name__ == "__main__":
    import copy

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters

    parser = rep.options(__doc__, repeats=1)
    with rep.script(parser) as args:
        p, dev, quick = get_gptlite_model_parameters(), args.device, args.quick
        shares = [0.5] if quick else [0.3, 0.5, 0.6, 0.7, 0.8]
        label = {share: f"{share:.0%}" for share in shares} | {"2:4": "2:4"}
        n_texts, n_windows = (4, 8) if quick else (16, 16)
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        dense = utils.load_model(GPTlite, vocab_size, args.checkpoint).to(dev, args.dtype)
        texts = utils.sample_prompts(train_data, n_texts, p.seqlen).to(dev)  # [B, T]
        unseen = utils.sample_prompts(valid_data, n_texts, p.seqlen).to(dev)  # [B, T]
        layers = linear_layers(dense.blocks)
        products = sum_inputs(layers, input_products, lambda: dense(unseen))

        columns = {"loss_rise": ("rise", "{:+.4f}"), "layer_error": ("mean layer error", "{:.4f}")}
        columns |= {"seconds": ("seconds to prune", "{:.2f}")}
        report = rep.Report(args, "unstructured sparsity", dense, columns, n_texts=n_texts)
        report.columns.pop("same_output")
        base = utils.validation_loss(dense, valid_data, n_windows)
        report.row("dense", baseline=True, valid_loss=base)
        methods = [(method, by) for method in METHODS for by in ("layer", "row")]
        rise, error, seconds, by_layer, exact = {}, {}, {}, {}, True
        for key in ((*m, s) for s in label for m in methods if (m[1], s) != ("layer", "2:4")):
            method, by, sparsity = key
            pruned = copy.deepcopy(dense)
            with utils.Timer(dev) as timer:
                prune_model(pruned, texts, *key)
            loss = utils.validation_loss(pruned, valid_data, n_windows)
            after = {name: layer.weight for name, layer in linear_layers(pruned.blocks).items()}
            exact &= all(zeros_as_asked(W, sparsity, by) for W in after.values())
            errors = {n: relative_error(layers[n].weight, W, products[n]) for n, W in after.items()}
            by_layer[key], error[key] = errors, sum(errors.values()) / len(errors)
            rise[key], seconds[key] = loss - base, timer.seconds
            if key == ("magnitude", "layer", 0.5):
                zeros = torch.cat([(W == 0).float().mean(dim=1) for W in after.values()])  # [rows of all]
            if sparsity in (0.5, "2:4"):
                name = f"{method} 2:4" if sparsity == "2:4" else f"{method} by {by}, 50%"
                shown = {"loss_rise": rise[key], "layer_error": error[key], "seconds": seconds[key]}
                report.row(name, valid_loss=loss, same_output="approximate", **shown)
        report.check("as many zeros as asked for, in every row, layer or group of four", exact)
        tables = {"Rise of the validation loss": rise, "Mean relative error of layers": error}
        for title, figures in tables.items():
            table = [
                {"method": f"{m} by {by}"} | {label[s]: figures.get((m, by, s)) for s in label}
                for m, by in methods
            ]
            report.sweep(f"{title}, without retraining", table)
        table = []
        for kind in (name.removeprefix("0.") for name in layers if name.startswith("0.")):
            table.append({"layer": kind})
            for m in METHODS:
                found = [e for n, e in by_layer[m, "row", 0.5].items() if n.endswith(kind)]
                table[-1][m] = f"{min(found):.3f} - {max(found):.3f}"
        report.sweep("Relative error of each layer at 50% by row, lowest and highest of the blocks", table)

        # The order that the papers promise, as far as it shows
        for by, s in dict.fromkeys((by, s) for _, by, s in rise):
            first, second, third = (error[m, by, s] for m in ("SparseGPT", "Wanda", "magnitude"))
            if rise["Wanda", by, s] < 1:
                name = f"{label[s]} by {by}: layer error SparseGPT < Wanda < magnitude"
                report.check(name, first < second < third)
            elif second >= third:
                report.why(
                    f"At {label[s]} by {by} Wanda's layers are off by {second:.3f}, magnitude's by "
                    f"{third:.3f}: Wanda was calibrated behind blocks that no longer work "
                    f"(loss {rise['Wanda', by, s]:+.2f}), and the errors are for the dense model's inputs."
                )
        for s in label:
            losses = {key: value for key, value in rise.items() if key[2] == s}
            if max(losses.values()) > 0.02:  # below that, a few windows cannot tell
                lowest = min(losses, key=losses.get)[0]
                report.check(f"{label[s]}: SparseGPT has the lowest loss", lowest == "SparseGPT")

        mag, wanda, gpt = ("magnitude", "layer", 0.5), ("Wanda", "row", 0.5), ("SparseGPT", "layer", 0.5)
        moments = torch.stack([products[n] for n in layers if n.endswith("net.0")])  # [L, E, E]
        values = torch.linalg.eigvalsh(moments.double().cpu()).flip(-1)  # [L, E], largest first
        n_needed = (values.cumsum(-1) < 0.9 * values.sum(-1, keepdim=True)).sum(-1) + 1  # [L]
        report.why(
            f"At 50% outputs are off by {error[mag]:.3f} (magnitude by layer), {error[wanda]:.3f} (Wanda by "
            f"row) and {error[gpt]:.3f} (SparseGPT by layer), on texts that none of them saw. SparseGPT "
            f"changes what it keeps: 90% of what the MLPs read lies in {n_needed.min()} to {n_needed.max()} "
            f"of {p.d_model} directions, so weights that stay can stand in for those that go."
        )
        s = max(s for s in shares if s <= 0.7)
        low, high = 100 * zeros.quantile(0.01), 100 * zeros.quantile(0.99)
        gain = rise["Wanda", "layer", s] - rise["Wanda", "row", s]
        verdict = "equal shares, which spare those rows, are better" if gain > 0 else "equal shares are worse"
        costs = {m: f"{rise[m, 'layer', s]:.4f} by layer and {rise[m, 'row', s]:.4f} by row" for m in METHODS}
        report.why(
            f"By layer, magnitude at 50% takes {low:.0f}% of some rows and {high:.0f}% of others (1st and "
            f"99th percentile). At {label[s]} it costs {costs['magnitude']}, Wanda {costs['Wanda']}: "
            f"{verdict if abs(gain) > 0.05 else 'too close to tell'}. What inputs Wanda needs to win: "
            "main_sparsity_outliers.py."
        )
        forward = rep.forward_cost(p, vocab_size, n_texts, p.seqlen, 0, args.dtype).flops
        n_sums = 2 * texts.numel() * sum(len(H) ** 2 for H in products.values())
        least = (2 * forward + n_sums) / rep.measure_ceilings(dev, args.dtype).flops_per_s
        report.why(
            f"Magnitude takes {seconds[mag]:.1f} s, Wanda {seconds[wanda]:.1f} s (two passes over "
            f"{texts.numel()} tokens, {2 * forward / 1e9:.0f} GFLOP), SparseGPT {seconds[gpt]:.1f} s: "
            f"{n_sums / 1e9:.0f} GFLOP more for X^T X, together {least:.1f} s at this machine's best, and "
            f"{sum(map(len, products.values())):,} columns one after the other."
        )
        reach = []
        for m, by in methods:
            fine = [s for s in shares if rise[m, by, s] <= 0.05]
            reach.append(f"{m} by {by} {label[max(fine)] if fine else 'none'}")
        report.why(
            f"Most zeros, of those tried, that cost at most 0.05 nats: {', '.join(reach)}. They make the "
            "model neither smaller nor faster as it stands: zeros are stored and multiplied as others are."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for i, (m, by) in enumerate(methods):
                losses = [base + rise[m, by, s] for s in shares]
                style = {"color": f"C{i // 2}", "linestyle": "-" if by == "layer" else "--", "marker": "o"}
                axes.plot([100 * s for s in shares], losses, label=f"{m} by {by}", **style)
            axes.axhline(base, color="0.5", linewidth=1, label="dense")
            axes.set(xlabel="zeros (%)", ylabel="validation loss (nats)", title="Loss without retraining")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
