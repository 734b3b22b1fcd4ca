"""Pruning: what removed neurons and heads did is taken over by those that stay, in one regression.

Idea: what a removed neuron contributed can be predicted, as far as neurons overlap, from the activations of
those that stay. The weights of that prediction, by least squares on some text, are added to the output
weights of those that stay, and its constant to the bias: a repair in seconds, without any training.

Exact: with nothing removed the model is unchanged. Approximate: everything else; the regression sees each
layer's inputs in the whole model, not in the pruned one, and learns too little text by heart.

Run: python main_pruning_refit.py

Source: Hassibi and Stork, Optimal Brain Surgeon, 1993 (the others' weights change with a removal; here for
whole groups and in one solution).
"""

import copy

import torch

from main_pruning import choose, mean_over_text, prune


def structures(model, kind):
    """Where a model's "neurons" or "heads" are: for each layer the linear layers that feed the units, the
    one that reads them, and how many numbers a unit has.
    """
    if kind == "neurons":
        return [([block.ffwd.net[0]], block.ffwd.net[2], 1) for block in model.blocks]
    mhas = [block.mha for block in model.blocks]
    return [([m.query_proj, m.key_proj, m.value_proj], m.out_proj, m.d_head) for m in mhas]


def input_moments(model, linears, windows, batch_size=8):
    """Mean and second moment of what enters some linear layers of a model, over all tokens of the windows.

    Args: linears: layers of the model; windows: token ids [n, T].
    Returns: for every layer (mean [in], E[x x'] [in, in]), float64 on the CPU.
    """

    def first(x, _out):
        return x.sum(dim=(0, 1))  # [in]

    def second(x, _out):
        return x.flatten(0, 1).T @ x.flatten(0, 1)  # [in, in]

    measures = [(linear, moment) for linear in linears for moment in (first, second)]
    means = mean_over_text(model, measures, windows, batch_size)
    return list(zip(means[::2], means[1::2], strict=True))


def contribution(output, size, second_moment):
    """Root mean square of what a unit adds to the residual stream, E|W_u a_u|^2: [units].

    For a neuron this is the size of its activation times the length of its output column.
    """
    W = output.weight.detach().cpu().double().unflatten(1, (-1, size))  # [E, units, size]
    moments = second_moment.unflatten(1, (-1, size)).unflatten(0, (-1, size))  # [units, size, units, size]
    own = moments.diagonal(dim1=0, dim2=2)  # [size, size, units]
    return (torch.einsum("eus,stu->eut", W, own) * W).sum(dim=(0, 2)).clamp(min=0).sqrt()


@torch.no_grad()
def refit(output, size, kept, mean, second_moment, ridge=1e-3):
    """Lets the units that stay take over, by least squares, what the others contributed; in place.

    Args: output: the linear layer that reads the units; kept: indices of those that stay; mean [in],
        second_moment [in, in]: of its inputs; ridge: weight decay of the regression, in units of their
        mean variance (dead units have none, and few windows would be learned by heart).
    Returns: the variance of what the removed units contributed, and how much of it is left unexplained.
    """
    stays = torch.zeros(output.in_features // size, dtype=torch.bool)  # [units]
    stays[kept] = True
    stays = stays.repeat_interleave(size)  # [in]
    C = second_moment - mean[:, None] * mean  # [in, in]: around the mean, which goes into the bias
    A, B, C = C[stays][:, stays], C[stays][:, ~stays], C[~stays][:, ~stays]  # [k, k], [k, r], [r, r]
    decay = max(ridge * A.diagonal().mean().item(), 1e-12)
    W = output.weight.cpu().double()[:, ~stays]  # [E, r]
    taken = W @ torch.linalg.solve(A + decay * torch.eye(len(A), dtype=A.dtype), B).T  # [E, k]
    shift = W @ mean[~stays] - taken @ mean[stays]  # [E]
    output.weight[:, stays] += taken.to(output.weight)
    output.bias += shift.to(output.bias)
    total = ((W @ C) * W).sum()
    left = total - 2 * ((taken @ B) * W).sum() + ((taken @ A) * taken).sum()
    return total.item(), left.item()


def prune_units(model, kind, importance, n, moments=None):
    """Keeps the n most important "neurons" or "heads" [L, units] of every layer, all of the other; in place.

    Args: moments: for every layer what input_moments gives for the layer that reads the units, for the
        repair by refit; None for none.
    Returns: the model, and the share of the lost variance, over all layers, that refit could explain (None
        without it). Raises ValueError as prune does, with the model untouched.
    """
    L, H, F = len(model.blocks), model.blocks[0].mha.n_heads, model.blocks[0].ffwd.net[0].out_features
    whole = torch.zeros(L, H), torch.zeros(L, F)
    how = (importance, whole[1], n, F) if kind == "heads" else (whole[0], importance, H, n)
    explained = None
    if moments is not None:
        kept = [heads if kind == "heads" else neurons for heads, neurons in choose(model, *how)]
        layers = zip(structures(model, kind), kept, moments, strict=True)
        parts = [refit(out, size, units, *m) for (_, out, size), units, m in layers]
        total, left = (sum(column) for column in zip(*parts, strict=True))
        explained = 1 - left / total if total > 0 else 1.0
    return prune(model, *how), explained


if __name__ == "__main__":
    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters

    parser = rep.options(__doc__, plot=False, dtype=False, repeats=None)
    with rep.script(parser) as args:
        p, dev, quick = get_gptlite_model_parameters(), args.device, args.quick
        W, F = p.seqlen, 4 * p.d_model
        n_windows, n_texts = (4, 16) if quick else (32, 32)
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        model = utils.load_model(GPTlite, vocab_size, args.checkpoint, dropout_p=0.0).to(dev)
        texts = utils.sample_prompts(train_data, n_texts, W).to(dev)  # [n, T]
        outputs = {kind: [out for _, out, _ in structures(model, kind)] for kind in ("neurons", "heads")}
        with utils.Timer(dev) as reading:
            moments = {kind: input_moments(model, linears, texts) for kind, linears in outputs.items()}
        importance = {}
        for kind, layers in moments.items():
            size = 1 if kind == "neurons" else p.d_head
            pairs = zip(outputs[kind], layers, strict=True)
            importance[kind] = torch.stack([contribution(out, size, second) for out, (_, second) in pairs])

        def cut(kind, n, layer_moments=None):
            return prune_units(copy.deepcopy(model), kind, importance[kind], n, layer_moments)

        columns = {"valid_loss": ("pruned", "{:.4f}"), "refitted_loss": ("refitted", "{:.4f}")}
        columns |= {"explained": ("explained", "{:.0%}")}
        config = {"n_texts": n_texts, "n_windows": n_windows}
        report = rep.Report(args, "pruning repaired by least squares", model, columns, **config)
        report.columns.pop("same_output")
        tokens = utils.sample_prompts(valid_data, 2, W).to(dev)  # [B, T]
        base = utils.validation_loss(model, valid_data, n_windows)
        report.row("nothing removed", baseline=True, valid_loss=base, n_parameters=utils.n_parameters(model))
        rise = {}
        for kind, n_all, removed in (("neurons", F, (F // 4, F // 2)), ("heads", p.n_heads, (1, 2, 3))):
            with torch.no_grad():
                off = utils.largest_difference(cut(kind, n_all, moments[kind])[0](tokens), model(tokens))
            name = f"no {kind} removed: refitted is the model (logits differ by {off:.0e})"
            report.check(name, off <= 1e-4)
            for n in removed[-1:] if quick else removed:
                student, (repaired, explained) = cut(kind, n_all - n)[0], cut(kind, n_all - n, moments[kind])
                pruned = utils.validation_loss(student, valid_data, n_windows)
                refitted = utils.validation_loss(repaired, valid_data, n_windows)
                report.row(
                    f"{n} of {n_all} {kind} of a layer",
                    n_parameters=utils.n_parameters(student),
                    valid_loss=pruned,
                    refitted_loss=refitted,
                    explained=explained,
                )
                rise[kind] = (pruned - base, refitted - base, explained)
        # A regression with as many unknowns as neurons that stay needs text
        sweep = []
        for n in (4, n_texts) if quick else (4, 8, 16, n_texts):
            some = utils.sample_prompts(train_data, n, W).to(dev)  # [n, T]
            student, share = cut("neurons", F // 2, input_moments(model, outputs["neurons"], some))
            loss = utils.validation_loss(student, valid_data, n_windows)
            sweep.append({"texts": n, "tokens": some.numel(), "explained on them": share, "loss": loss})
        report.sweep("Half of the neurons removed, refitted on so much text", sweep)

        few, many = sweep[0], sweep[-1]
        for kind, (before, after, explained) in rise.items():
            report.why(
                f"Half of the {kind} cost {before:+.3f} nats, refitted {after:+.3f}: those that stay explain "
                f"{explained:.0%} of the variance that the removed ones contributed to the residual stream."
            )
        report.why(
            f"{F // 2} neurons that stay are as many unknowns for every output. Refitted on {few['tokens']} "
            f"tokens they explain {few['explained on them']:.0%} of the variance there and end "
            f"{few['loss'] - base:+.3f} nats from the model, on {many['tokens']} tokens "
            f"{many['loss'] - base:+.3f}: too little text is learned by heart."
        )
        with utils.Timer(dev) as solving:
            cut("neurons", F // 2, moments["neurons"])
        gflop = 2 * texts.numel() * p.n_layers * (F**2 + p.d_model**2) / 1e9
        report.why(
            f"The moments of {texts.numel()} tokens took {reading.seconds:.1f} s ({gflop:.0f} GFLOP beside "
            f"the forward passes), the {p.n_layers} regressions in float64 {solving.seconds:.1f} s. The "
            "shape is the same with and without, so decoding takes the same time."
        )
        report.finish()
