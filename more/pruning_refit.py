"""Pruning: what removed neurons and heads did is taken over by those that stay, in one regression.

Idea: what a removed neuron contributed can be predicted, as far as neurons overlap, from the activations of
those that stay. The weights of that prediction, by least squares on some text, are added to the output
weights of those that stay, and its constant to the bias: a repair in seconds, without any training. Neurons
that never fire need no repair: behind a ReLU they give zero, so they are cut for nothing.

Exact: with nothing removed the model is unchanged; so it is on text on which no neuron that was cut fires.
Approximate: everything else; the regression sees each layer's inputs in the whole model. Wins where neurons
overlap, at the price of one reading of some text; the shape, and with it the time of a step, is the same with
and without. Loses on little text, which it learns by heart: for every output there are as many unknowns as
neurons that stay.

Run: python more/pruning_refit.py

Source: Hassibi and Stork, Optimal Brain Surgeon, 1993 (the others' weights change with a removal; here for
whole groups and in one solution).
"""

import copy

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_pruned import sum_over_text
from main_pruning import prune, prune_linear, units_to_keep


def structures(model, kind):
    """Where a model's "neurons" or "heads" are.

    Returns: for each block the linear layers that feed the units, the one that reads them, and how many
        numbers a unit has.
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
    means = [total / windows.numel() for total in sum_over_text(model, measures, windows.split(batch_size))]
    return list(zip(means[::2], means[1::2], strict=True))


def contribution(output, size, second_moment):
    """Root mean square of what a unit adds to the residual stream, E|W_u a_u|^2: [units].

    For a neuron this is the size of its activation times the length of its output column.
    """
    weight = output.weight.detach().cpu().double().unflatten(1, (-1, size))  # [E, units, size]
    moments = second_moment.unflatten(1, (-1, size)).unflatten(0, (-1, size))  # [units, size, units, size]
    own = moments.diagonal(dim1=0, dim2=2)  # [size, size, units]
    return (torch.einsum("eus,stu->eut", weight, own) * weight).sum(dim=(0, 2)).clamp(min=0).sqrt()


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
    covariance = second_moment - mean[:, None] * mean  # [in, in]: the mean goes into the bias
    among = covariance[stays][:, stays]  # [k, k]: of inputs that stay
    across = covariance[stays][:, ~stays]  # [k, r]: of those with inputs that go
    decay = max(ridge * among.diagonal().mean().item(), 1e-12) * torch.eye(len(among), dtype=among.dtype)
    lost = output.weight.cpu().double()[:, ~stays]  # [E, r]
    taken = lost @ torch.linalg.solve(among + decay, across).T  # [E, k]
    shift = lost @ mean[~stays] - taken @ mean[stays]  # [E]
    output.weight[:, stays] += taken.to(output.weight)
    output.bias += shift.to(output.bias)
    total = ((lost @ covariance[~stays][:, ~stays]) * lost).sum()
    left = total - 2 * ((taken @ across) * lost).sum() + ((taken @ among) * taken).sum()
    return total.item(), left.item()


def prune_silent(model, moments):
    """Cuts, in place, the neurons whose mean activation over some text is zero: they never fired.

    Args: moments: of the neurons, for every layer what input_moments gives. One stays where none fires, and
        blocks keep numbers of their own. Returns: the model, and how many neurons went.
    """
    n_gone = 0
    for block, (mean, _) in zip(model.blocks, moments, strict=True):
        fires = mean > 0  # [n_neurons]
        fires[mean.argmax()] = True
        n_gone += int((~fires).sum())
        block.ffwd.net[0] = prune_linear(block.ffwd.net[0], rows=fires)
        block.ffwd.net[2] = prune_linear(block.ffwd.net[2], columns=fires)
    return model, n_gone


def prune_units(model, kind, importance, n, moments=None):
    """Keeps the n most important "neurons" or "heads" [L, units] of every layer, all of the other; in place.

    Args: moments: for every layer what input_moments gives for the layer that reads the units, for the
        repair by refit; None for none.
    Returns: the model, and the share of the lost variance, over all layers, that refit could explain (None
        without it). Raises ValueError as prune does, with the model untouched.
    """
    L, n_heads = len(model.blocks), model.blocks[0].mha.n_heads
    n_neurons, explained = model.blocks[0].ffwd.net[0].out_features, None
    if kind == "heads":
        sizes = importance, torch.zeros(L, n_neurons), n, n_neurons
    else:
        sizes = torch.zeros(L, n_heads), importance, n_heads, n
    if moments is not None:
        kept = [heads if kind == "heads" else neurons for heads, neurons in units_to_keep(model, *sizes)]
        layers = zip(structures(model, kind), kept, moments, strict=True)
        parts = [refit(out, size, units, *m) for (_, out, size), units, m in layers]
        total, left = (sum(column) for column in zip(*parts, strict=True))
        explained = 1 - left / total if total > 0 else 1.0
    return prune(model, *sizes), explained


if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from inference_utils import Timer, loss_difference, loss_figures, n_parameters, window_losses
    from main_distillation import compare_with_teacher

    parser = harness.options(__doc__, plot=False, dtype=False, repeats=None)
    with harness.script(parser) as args:
        text = harness.load_text(args)
        (model,) = harness.load_models(args, GPTlite, packed=False)
        n_texts, seqlen = 16 if args.quick else 32, model.seqlen
        columns = {"explained": ("explained", "{:.0%}"), "kl_to_teacher": ("KL to whole", "{:.5f}")}
        report = harness.Report(args, "pruning repaired by least squares", model, columns, n_texts=n_texts)
        texts, importance = text.prompts(n_texts, seqlen, "train"), {}  # [n, T]
        places = {kind: structures(model, kind) for kind in ("neurons", "heads")}
        outputs = {kind: [output for _, output, _ in blocks] for kind, blocks in places.items()}
        with Timer(args.device) as reading:
            moments = {kind: input_moments(model, outputs[kind], texts) for kind in places}
        for kind, blocks in places.items():
            pairs = zip(blocks, moments[kind], strict=True)
            importance[kind] = torch.stack(
                [contribution(out, n, second) for (_, out, n), (_, second) in pairs]
            )

        def cut(kind, n, block_moments=None):
            return prune_units(copy.deepcopy(model), kind, importance[kind], n, block_moments)

        def losses_of(model):
            return window_losses(model, text.valid, args.n_windows)  # [n_windows]

        base, gains = losses_of(model), {}
        report.row("nothing removed", baseline=True, n_parameters=n_parameters(model), **loss_figures(base))
        silent, n_silent = prune_silent(copy.deepcopy(model), moments["neurons"])
        with torch.no_grad():
            report.check_close("silent neurons removed: logits on the text", silent(texts), model(texts))
        figures = compare_with_teacher(silent, model, text.prompts(args.n_windows, seqlen))
        figures |= loss_figures(losses_of(silent), base) | {"n_parameters": n_parameters(silent)}
        free = report.row(f"{n_silent} neurons of the model that never fired", **figures)
        for kind, amounts in (("neurons", (1 / 4, 1 / 2)), ("heads", (1 / 6, 1 / 3, 1 / 2))):
            n_all = importance[kind].shape[1]
            with torch.no_grad():
                same = cut(kind, n_all, moments[kind])[0](texts[:2])  # [B, T, V]
                report.check_close(f"no {kind} removed and refitted: logits", same, model(texts[:2]))
            for n in sorted({max(round(n_all * share), 1) for share in amounts[-1 if args.quick else 0 :]}):
                pruned, (repaired, explained) = cut(kind, n_all - n)[0], cut(kind, n_all - n, moments[kind])
                before, after = losses_of(pruned), losses_of(repaired)
                name, size = f"{n} of {n_all} {kind} of a block", n_parameters(pruned)
                report.row(name, n_parameters=size, **loss_figures(before, base))
                figures = loss_figures(after, base) | {"explained": explained}
                report.row(f"{name}, refitted", n_parameters=size, **figures)
                gains[kind] = name, *loss_difference(after, before), explained
        sweep, ends, n_half = [], [], importance["neurons"].shape[1] // 2
        for n in (4, n_texts) if args.quick else (4, 8, 16, n_texts):
            some = text.prompts(n, seqlen, "train")  # [n, T]
            known = input_moments(model, outputs["neurons"], some)
            with Timer(args.device) as solving:
                student, share = cut("neurons", n_half, known)
            ends.append(losses_of(student))
            row = {"texts": n, "tokens": some.numel(), "explained on them": share}
            sweep.append(row | {"loss": ends[-1].mean().item()})
        report.sweep("Half of the neurons removed, refitted on so much text", sweep)

        for name, difference, se, explained in gains.values():
            one = f"{name}, refitted ({explained:.0%} of what they did explained)"
            report.why(words.loss_between(f"a cut of {one}", "the cut alone", difference, se))
        few, many = (f"a refit on {row['tokens']} tokens" for row in (sweep[0], sweep[-1]))
        report.why(words.loss(free) + words.loss_between(few, many, *loss_difference(ends[0], ends[-1])))
        seconds = f"({reading.seconds:.2f} s of reading, {solving.seconds:.2f} s of solving)"
        report.why(
            words.choose(
                reading.seconds / solving.seconds,
                (1, f"Reading the text takes longer than the regressions of the neurons {seconds}."),
                f"The regressions of the neurons take longer than reading the text {seconds}.",
            )
        )
        report.finish()
