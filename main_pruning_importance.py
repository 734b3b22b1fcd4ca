"""Pruning: five ways to decide which neurons and heads matter, alone and with a repair by regression.

Idea: a score for every neuron and head, from the weights alone, from what it does on text, from what the
loss would lose by it, or at random; the lowest are cut, 10 to 70% of each layer, and the loss is measured
before and after a short distillation, with the same batches for all. Two ways are repaired as well: those
that stay take over what the others did (main_pruning_refit.py).

Exact: with nothing removed all are the model unchanged. Approximate: everything else.

Run: python main_pruning_importance.py

Source: Muralidharan et al., Minitron, 2024 (activations); Molchanov et al., Importance Estimation for Neural
Network Pruning, 2019, and Ma et al., LLM-Pruner, 2023 (Taylor).
"""

import torch
import torch.nn.functional as F

from inference_utils import sample_prompts
from main_pruning import compute_importance
from main_pruning_refit import contribution, input_moments, structures


def magnitude(inputs, output, size):
    """Length of the weights into a unit times the length of those out of it: [units]."""
    squares = [w for linear in inputs for w in (linear.weight, linear.bias[:, None])]  # [units*size, ...]
    into = sum(w.detach().square().sum(dim=1).view(-1, size).sum(dim=1) for w in squares)  # [units]
    out = output.weight.detach().square().sum(dim=0).view(-1, size).sum(dim=1)  # [units]
    return (into * out).sqrt()


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
        layers read, as input_moments gives them. The model is left as it was, without gradients.
    """
    windows = sample_prompts(data, n_windows, seqlen + 1).to(next(model.parameters()).device)  # [n, T+1]
    places = {kind: structures(model, kind) for kind in ("heads", "neurons")}
    outputs = [output for layers in places.values() for _, output, _ in layers]
    seen = input_moments(model, outputs, windows[:, :-1], batch_size)
    moments = {"heads": seen[: len(model.blocks)], "neurons": seen[len(model.blocks) :]}
    strengths = compute_importance(model, data, n_windows // batch_size, batch_size, seqlen)
    was_training = model.training
    model.eval()  # dropout would be part of the gradients
    model.zero_grad()
    for batch in windows.split(batch_size):
        logits = model(batch[:, :-1])  # [B, T, V]
        logits = logits[0] if isinstance(logits, tuple) else logits
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
    model.train(was_training)
    return scores, moments


if __name__ == "__main__":
    import copy

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from main_distillation import distill
    from main_pruning_refit import prune_units

    parser = rep.options(__doc__, dtype=False, repeats=None)
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
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        model = utils.load_model(GPTlite, vocab_size, args.checkpoint, dropout_p=0.0).to(dev)
        with utils.Timer(dev) as reading:
            scores, moments = score_units(model, train_data, n_texts, W, batch_size=4, seed=args.seed)
        ways = {name: (name, False) for name in scores["neurons"]}  # what is scored, whether it is repaired
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
                off = utils.largest_difference(cut(kind, "Taylor + refit", n)[0](tokens), model(tokens))
                name = f"no {kind} removed: pruned and refitted is the model (logits differ by {off:.0e})"
                report.check(name, off <= 1e-4)

        base = utils.validation_loss(model, valid_data, n_windows)
        mid = min(removed, key=lambda percent: abs(percent - 50))
        report.row("nothing removed", baseline=True, valid_loss=base, n_parameters=utils.n_parameters(model))
        pruned, distilled, heads, explained = {}, {}, {}, {}  # (way, removed): loss
        for way in ways:
            for percent in removed:
                n = round(units["neurons"] * (1 - percent / 100))
                student, explained[way, percent] = cut("neurons", way, n)
                pruned[way, percent] = utils.validation_loss(student, valid_data, n_windows)
                torch.manual_seed(args.seed)
                with utils.Timer(dev) as training:
                    distill(student, model, train_data, n_steps, p.lr / 5, batch_size, seqlen)
                distilled[way, percent] = utils.validation_loss(student, valid_data, n_windows)
                if percent == mid:
                    report.row(
                        f"{way}, {mid}%",
                        n_parameters=utils.n_parameters(student),
                        valid_loss=pruned[way, mid],
                        distilled_loss=distilled[way, mid],
                        explained=explained[way, mid],
                    )
            for n in [3] if quick else [1, 2, 3]:
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
        for percent in (percent for percent in removed if percent >= 10):  # below, chance decides
            best = min(ways, key=lambda way: pruned[way, percent])
            report.check(f"{percent}% of the neurons: best before distillation with a refit", ways[best][1])
            lower = pruned["activation x column", percent] < pruned["random", percent]
            report.check(f"{percent}% of the neurons: activation x column starts below random", lower)

        rise = {way: pruned[way, mid] - base for way in ways}
        order = scores["neurons"]["magnitude"][0].argsort()  # [F], rising: what goes first
        active = scores["neurons"]["activation"][0][order].chunk(4)  # a quarter of the neurons each
        report.why(
            f"{mid}% of the neurons by magnitude cost {rise['magnitude']:+.3f} nats, at random "
            f"{rise['random']:+.3f}. A weight does not tell what a neuron does on text: in block 0 the "
            f"quarter with the smallest weights, which goes first, has a mean activation of "
            f"{active[0].mean():.3f}, the quarter with the largest {active[-1].mean():.3f}."
        )
        strengths = scores["neurons"]["activation x column"]  # [L, F]
        silent = (strengths < 0.01 * strengths.amax(dim=1, keepdim=True)).double().mean(dim=1)  # [L]
        report.why(
            "Neurons that add less than 1% of what their block's strongest does, by block: "
            f"{', '.join(f'{share:.0%}' for share in silent.tolist())}. The same share is cut in every block "
            "here, silent neurons or not."
        )
        best = "activation x column"
        report.why(
            "What a neuron adds to the residual stream is its activation times its output column: by that "
            f"the cut costs {rise[best]:+.3f}, by activations {rise['activation']:+.3f}, by Taylor "
            f"{rise['Taylor']:+.3f}. The refit leaves {rise[best + ' + refit']:+.3f}: neurons overlap, those "
            f"that stay explain {explained[best + ' + refit', mid]:.0%} of the variance of the removed ones."
        )
        spread = [max(t[w, mid] for w in ways) - min(t[w, mid] for w in ways) for t in (pruned, distilled)]
        n_gone = 2 * round(units["neurons"] * mid / 100) * p.n_layers * p.d_model  # a row and a column each
        report.why(
            f"{n_steps} steps of distillation take {training.seconds:.1f} s at the smallest size (all scores "
            f"and moments {reading.seconds:.1f} s) and bring the distance between the best and the worst way "
            f"from {spread[0]:.3f} to {spread[1]:.3f} nats. Time and memory do not depend on the way: {mid}% "
            f"is {4 * n_gone / 1e6:.0f} MB of weights and {2 * n_gone / 1e6:.0f} MFLOP a token less."
        )
        if args.plot:
            figure, _ = rep.new_figure(10.0)
            figure.clear()
            panels = {"Pruned": pruned, f"After {n_steps} steps of distillation": distilled}
            both = figure.subplots(1, 2, sharey=True)
            for axes, (title, losses) in zip(both, panels.items(), strict=True):
                for way in ways:
                    style = "--" if way == "random" else "-"
                    axes.plot(removed, [losses[way, x] for x in removed], style, marker=".", label=way)
                axes.axhline(base, color="gray", lw=0.8)
                axes.set(xlabel="neurons removed (%)", ylabel="validation loss (nats)", title=title)
                axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
            rep.save_figure(figure, args.plot)
        report.finish()
