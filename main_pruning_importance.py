"""Pruning: five ways to decide which neurons and heads matter, and a repair of what is lost.

Idea: a score for every neuron and head, from the weights alone, from what it does on text, from what the
loss would lose by it, or at random; the lowest are cut, 10 to 70% of each layer, and the loss is measured
before and after a short distillation. The repair is a linear regression: what the removed ones contributed
is, as far as it can be, predicted from those that stay, and their output weights take it over.

Exact: with nothing removed all are the model unchanged. Approximate: everything else; the regression sees
each layer's inputs in the whole model, not in the pruned one.

Run: python main_pruning_importance.py

Source: Muralidharan et al., Minitron, 2024 (activations); Molchanov et al., Importance Estimation for Neural
Network Pruning, 2019, and Ma et al., LLM-Pruner, 2023 (Taylor); Hassibi and Stork, Optimal Brain Surgeon,
1993 (the others' weights change with a removal, here for whole groups and in one solution).
"""

import copy

import torch
import torch.nn.functional as F

from inference_utils import sample_prompts
from main_pruning import choose, compute_importance, prune


def structures(model, kind):
    """Where a model's "neurons" or "heads" are: for each layer the linear layers that feed the units, the
    one that reads them, and how many numbers a unit has.
    """
    if kind == "neurons":
        return [([block.ffwd.net[0]], block.ffwd.net[2], 1) for block in model.blocks]
    mhas = [block.mha for block in model.blocks]
    return [([m.query_proj, m.key_proj, m.value_proj], m.out_proj, m.d_head) for m in mhas]


@torch.no_grad()
def input_moments(model, linears, windows, batch_size=8):
    """Mean and second moment of what enters some linear layers of a model, over all tokens of the windows.

    Args: linears: layers of the model; windows: token ids [n, T].
    Returns: for every layer (mean [in], E[x x'] [in, in]), float64 on the CPU.
    """
    sums = [[0, 0] for _ in linears]

    def watch(linear, total):
        def hook(_module, args):
            x = args[0].flatten(0, -2)  # [N, in]
            total[0] = total[0] + x.sum(dim=0).cpu().double()  # [in]
            total[1] = total[1] + (x.T @ x).cpu().double()  # [in, in]

        return linear.register_forward_pre_hook(hook)

    hooks = []
    try:
        hooks = [watch(linear, total) for linear, total in zip(linears, sums, strict=True)]
        for batch in windows.split(batch_size):
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return [(first / windows.numel(), second / windows.numel()) for first, second in sums]


def magnitude(inputs, output, size):
    """Length of the weights into a unit times the length of those out of it: [units]."""
    squares = [w for linear in inputs for w in (linear.weight, linear.bias[:, None])]  # [units*size, ...]
    into = sum(w.detach().square().sum(dim=1).view(-1, size).sum(dim=1) for w in squares)  # [units]
    out = output.weight.detach().square().sum(dim=0).view(-1, size).sum(dim=1)  # [units]
    return (into * out).sqrt()


def contribution(output, size, second_moment):
    """Root mean square of what a unit adds to the residual stream, E|W_u a_u|^2: [units].

    For a neuron this is the size of its activation times the length of its output column.
    """
    W = output.weight.detach().cpu().double().unflatten(1, (-1, size))  # [E, units, size]
    moments = second_moment.unflatten(1, (-1, size)).unflatten(0, (-1, size))  # [units, size, units, size]
    own = moments.diagonal(dim1=0, dim2=2)  # [size, size, units]
    return (torch.einsum("eus,stu->eut", W, own) * W).sum(dim=(0, 2)).clamp(min=0).sqrt()


def taylor(inputs, output, size):
    """What the loss would change if a unit's weights went to zero, to first order: sum of |w dL/dw|, [units].

    The gradients have to be there (loss.backward()).
    """
    parts = [w for linear in inputs for w in (linear.weight, linear.bias)]
    into = sum((w * w.grad).detach().abs().view(-1, size, w[0].numel()).sum(dim=(1, 2)) for w in parts)
    out = (output.weight * output.weight.grad).detach().abs().sum(dim=0).view(-1, size).sum(dim=1)
    return into + out  # [units]


def score_units(model, data, n_windows, seqlen, batch_size=8, seed=0):
    """Every way to decide, from one reading of some text.

    Args: data: token ids [N], of which n_windows of seqlen tokens, a multiple of batch_size, are read.
    Returns: for "neurons" and "heads" {name: importance [L, units]}, and the moments of what their output
        layers read, as input_moments gives them. The model is left as it was.
    """
    windows = sample_prompts(data, n_windows, seqlen + 1).to(next(model.parameters()).device)  # [n, T+1]
    places = {kind: structures(model, kind) for kind in ("heads", "neurons")}
    outputs = [output for layers in places.values() for _, output, _ in layers]
    seen = input_moments(model, outputs, windows[:, :-1], batch_size)
    moments = {"heads": seen[: len(model.blocks)], "neurons": seen[len(model.blocks) :]}
    strengths = compute_importance(model, data, n_windows // batch_size, batch_size, seqlen)
    model.zero_grad()
    for batch in windows.split(batch_size):
        logits = model(batch[:, :-1])  # [B, T, V]
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        (loss / windows[:, 1:].numel()).backward()
    scores, generator = {}, torch.Generator().manual_seed(seed)
    for (kind, layers), strength in zip(places.items(), strengths, strict=True):
        pairs = zip(layers, moments[kind], strict=True)
        by_name = {
            "magnitude": [magnitude(*place) for place in layers],
            "activation": strength,
            "activation x column": [contribution(output, size, m) for (_, output, size), (_, m) in pairs],
            "Taylor": [taylor(*place) for place in layers],
            "random": torch.rand(strength.shape, generator=generator, dtype=torch.float64),
        }
        scores[kind] = {
            name: torch.stack([layer.cpu().double() for layer in rows]) for name, rows in by_name.items()
        }
    model.zero_grad()
    return scores, moments


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

    Args: moments: of score_units, for the repair by refit; None for none.
    Returns: the model, and the share of the lost variance, over all layers, that refit could explain (None
        without it).
    """
    others = structures(model, "heads" if kind == "neurons" else "neurons")
    n_others = others[0][1].in_features // others[0][2]
    pairs = [(importance, n), (torch.zeros(len(others), n_others), n_others)]
    (heads, n_heads), (neurons, n_neurons) = pairs if kind == "heads" else pairs[::-1]
    explained = None
    if moments is not None:
        kept = choose(model, heads, neurons, n_heads, n_neurons)
        variances = [
            refit(output, size, units[kind == "neurons"], *layer_moments)
            for (_, output, size), units, layer_moments in zip(
                structures(model, kind), kept, moments, strict=True
            )
        ]
        total, left = (sum(column) for column in zip(*variances, strict=True))
        explained = 1 - left / total if total > 0 else 1.0
    return prune(model, heads, neurons, n_heads, n_neurons), explained


if __name__ == "__main__":
    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from main_distillation import distill

    parser = rep.options(__doc__, repeats=1)
    parser.add_argument(
        "--removed", type=int, nargs="+", default=[10, 30, 50, 70], help="percent of the neurons of a layer"
    )
    parser.add_argument("--steps", type=rep.count, default=20, help="steps of the distillation afterwards")
    with rep.script(parser) as args:
        p, dev, quick = get_gptlite_model_parameters(), args.device, args.quick
        W, n_steps = p.seqlen, min(args.steps, 2) if quick else args.steps
        removed = sorted(set(args.removed))
        if not 0 <= removed[0] <= removed[-1] < 100:
            raise ValueError(f"--removed takes 0 to 99 percent, not {removed[0]} to {removed[-1]}")
        removed = removed[1:2] or removed if quick else removed
        batch_size, seqlen, n_windows, n_texts = (2, 64, 4, 16) if quick else (4, W, 32, 32)
        units = {"neurons": 4 * p.d_model, "heads": p.n_heads}
        lost_heads = [3] if quick else [1, 2, 3]
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        model = utils.load_model(GPTlite, vocab_size, args.checkpoint, dropout_p=0.0).to(dev)
        with utils.Timer(dev) as reading:
            scores, moments = score_units(model, train_data, n_texts, W, batch_size=4, seed=args.seed)
        ways = {name: (name, False) for name in scores["neurons"]}
        ways |= {f"{name} + refit": (name, True) for name in ("activation x column", "Taylor")}

        def cut(kind, way, n):
            name, repaired = ways[way]
            refitted = moments[kind] if repaired else None
            return prune_units(copy.deepcopy(model), kind, scores[kind][name], n, refitted)

        columns = {"valid_loss": ("pruned", "{:.4f}"), "distilled_loss": ("distilled", "{:.4f}")}
        columns |= {"explained": ("explained", "{:.0%}")}
        config = {"steps": n_steps, "n_texts": n_texts, "n_windows": n_windows, "removed": removed}
        report = rep.Report(args, "what to prune", model, columns, **config)
        report.columns.pop("same_output")
        tokens = utils.sample_prompts(valid_data, 2, W).to(dev)  # [B, T]
        with torch.no_grad():
            for kind, n in units.items():
                whole, _ = cut(kind, "Taylor + refit", n)
                off = utils.largest_difference(whole(tokens), model(tokens))
                name = f"no {kind} removed: pruned and refitted is the model (logits differ by {off:.0e})"
                report.check(name, off <= 1e-4)

        # Neurons: before and after a distillation with the same batches for all
        pruned, distilled, explained, size = {}, {}, {}, {}
        for percent in removed:
            n = round(units["neurons"] * (1 - percent / 100))
            for way in ways:
                student, explained[way, percent] = cut("neurons", way, n)
                pruned[way, percent] = utils.validation_loss(student, valid_data, n_windows)
                torch.manual_seed(args.seed)
                with utils.Timer(dev) as training:
                    distill(student, model, train_data, n_steps, p.lr / 5, batch_size, seqlen)
                distilled[way, percent] = utils.validation_loss(student, valid_data, n_windows)
                size[percent] = utils.n_parameters(student)
        base = utils.validation_loss(model, valid_data, n_windows)
        mid = min(removed, key=lambda percent: abs(percent - 50))
        report.row("nothing removed", baseline=True, valid_loss=base, n_parameters=utils.n_parameters(model))
        for way in ways:
            report.row(
                f"{way}, {mid}%",
                n_parameters=size[mid],
                valid_loss=pruned[way, mid],
                distilled_loss=distilled[way, mid],
                explained=explained[way, mid],
            )
        heads = {}
        for n in lost_heads:
            for way in ways:
                student, _ = cut("heads", way, units["heads"] - n)
                heads[way, n] = utils.validation_loss(student, valid_data, n_windows)
        for title, losses, unit in (
            ("Neurons removed in every layer: loss", pruned, "%"),
            (f"Neurons removed, then {n_steps} steps of {batch_size} x {seqlen}: loss", distilled, "%"),
            (f"Heads removed of {units['heads']} in every layer: loss", heads, ""),
        ):
            amounts = sorted({amount for _, amount in losses})
            rows = [{"decided by": way} | {f"{n}{unit}": losses[way, n] for n in amounts} for way in ways]
            report.sweep(title, rows)
        # The refit is a regression with as many unknowns as neurons that stay: it needs text
        name, sweep = "activation x column", []
        linears = [output for _, output, _ in structures(model, "neurons")]
        n_kept = round(units["neurons"] * (1 - mid / 100))
        for n in (4, n_texts) if quick else (4, 8, 16, n_texts):
            texts = sample_prompts(train_data, n, W).to(dev)  # [n, T]
            fewer = input_moments(model, linears, texts, batch_size=4)
            student, share = prune_units(
                copy.deepcopy(model), "neurons", scores["neurons"][name], n_kept, fewer
            )
            loss = utils.validation_loss(student, valid_data, n_windows)
            sweep.append({"texts": n, "tokens": texts.numel(), "explained on them": share, "loss": loss})
        report.sweep(f"{mid}% of the neurons removed by {name}, refitted on so much text", sweep)
        for percent in removed:
            if not 10 <= percent < 100:  # below, the order is left to chance
                continue
            best = min(ways, key=lambda way: pruned[way, percent])
            report.check(f"{percent}% of the neurons: best before distillation with a refit", ways[best][1])
            lower = pruned["activation x column", percent] < pruned["random", percent]
            report.check(f"{percent}% of the neurons: activation x column starts below random", lower)

        rise = {way: pruned[way, mid] - base for way in ways}
        order = scores["neurons"]["magnitude"][0].argsort()  # [F], rising: what goes first
        active, added = (scores["neurons"][way][0][order] for way in ("activation", "activation x column"))
        quarter = units["neurons"] // 4
        means = [
            f"{x[part].mean():.3f}"
            for part in (slice(quarter), slice(-quarter, None))
            for x in (active, added)
        ]
        report.why(
            f"{mid}% of the neurons by magnitude cost {rise['magnitude']:+.3f} nats, at random "
            f"{rise['random']:+.3f}: large weights do not tell what a neuron does on text. In block 0 the "
            f"quarter with the smallest weights, which goes first, has a mean activation of {means[0]} and "
            f"adds {means[1]} (root mean square), the quarter with the largest {means[2]} and {means[3]}."
        )
        strengths = scores["neurons"]["activation x column"]  # [L, F]
        silent = (strengths < 0.01 * strengths.amax(dim=1, keepdim=True)).double().mean(dim=1)  # [L]
        report.why(
            "Neurons that add less than 1% of what their block's strongest does, by block: "
            f"{', '.join(f'{share:.0%}' for share in silent.tolist())}. The same share is cut in every block "
            "here, silent neurons or not."
        )
        name = "activation x column"
        report.why(
            "What a neuron adds to the residual stream is its activation times its output column: by that "
            f"the cut costs {rise[name]:+.3f}, by activations {rise['activation']:+.3f}, by Taylor "
            f"{rise['Taylor']:+.3f}. The refit leaves {rise[name + ' + refit']:+.3f}: neurons overlap, so "
            f"that those that stay explain {explained[name + ' + refit', mid]:.0%} of the variance that the "
            "removed ones contributed."
        )
        report.why(
            f"{n_kept} neurons that stay are as many unknowns for every output. Refitted on "
            f"{sweep[0]['tokens']} tokens they explain {sweep[0]['explained on them']:.0%} of the variance "
            f"there and end {sweep[0]['loss'] - base:+.3f} nats from the model, on {sweep[-1]['tokens']} "
            f"tokens {sweep[-1]['loss'] - base:+.3f}: too little text is learned by heart."
        )
        spread = [max(t[w, mid] for w in ways) - min(t[w, mid] for w in ways) for t in (pruned, distilled)]
        report.why(
            f"{n_steps} steps of distillation narrow the distance between the best and the worst way from "
            f"{spread[0]:.3f} to {spread[1]:.3f} nats. They took {training.seconds:.1f} s at the smallest "
            f"size, reading {n_texts} texts for all scores and the refit {reading.seconds:.1f} s."
        )
        if args.plot:
            figure, _ = rep.new_figure(10.0)
            figure.clear()
            for axes, losses, title in zip(
                figure.subplots(1, 2, sharey=True),
                (pruned, distilled),
                ("Pruned", f"After {n_steps} steps of distillation"),
                strict=True,
            ):
                for way in ways:
                    style = "--" if way == "random" else "-"
                    axes.plot(removed, [losses[way, x] for x in removed], style, marker=".", label=way)
                axes.axhline(base, color="gray", lw=0.8)
                axes.set(xlabel="neurons removed (%)", ylabel="validation loss (nats)", title=title)
                axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
            rep.save_figure(figure, args.plot)
        report.finish()
