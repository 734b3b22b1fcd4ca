"""Pruning: five ways to decide which neurons and heads matter, alone and with a repair by regression.

Idea: a score for every neuron and head, from the weights alone, from what it does on text, from what the
loss would lose by it, or at random; the lowest are cut, 10 to 70% of each block, and the loss is measured
before and after a short distillation, with the same batches for all. Two ways are repaired as well: those
that stay take over what the others did (more/pruning_refit.py).

Exact: with nothing removed all are the model unchanged. Approximate: everything else. What decides costs one
reading of some text (Taylor also its gradients, a score from the weights nothing) and never shows in the time
of a step. A score wins that sees the text and what a unit writes; weights alone do not tell how often a
neuron fires. All blocks lose the same share here, which is a loss where some have more idle neurons.

Run: python more/pruning_importance.py

Source: Muralidharan et al., Minitron, 2024 (activations); Molchanov et al., Importance Estimation for Neural
Network Pruning, 2019, and Ma et al., LLM-Pruner, 2023 (Taylor).
"""

import copy

import torch
import torch.nn.functional as F

import _root  # noqa: F401 (the files above become importable)
from inference_utils import first_of, sample_prompts
from main_pruning import sum_responses
from pruning_refit import contribution, input_moments, prune_units, structures


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

    Args: data: token ids [N], of which n_windows of seqlen tokens are read, batch_size at a time.
    Returns: for "neurons" and "heads" {name: importance [L, units]}, and the moments of what their output
        layers read, as input_moments gives them. The model is left as it was, without gradients.
    """
    windows = sample_prompts(data, n_windows, seqlen + 1).to(next(model.parameters()).device)  # [n, T+1]
    places = {kind: structures(model, kind) for kind in ("heads", "neurons")}
    outputs = [output for layers in places.values() for _, output, _ in layers]
    seen = input_moments(model, outputs, windows[:, :-1], batch_size)
    moments = {"heads": seen[: len(model.blocks)], "neurons": seen[len(model.blocks) :]}
    strengths = sum_responses(model, windows[:, :-1].split(batch_size))
    was_training = model.training
    model.eval()  # dropout would be part of the gradients
    model.zero_grad()
    for batch in windows.split(batch_size):
        logits = first_of(model(batch[:, :-1]))  # [B, T, V]
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
            "random choice": [
                torch.rand(len(one), generator=generator, dtype=torch.float64) for one in strength
            ],
        }
        scores[kind] = {
            name: torch.stack([layer.cpu().double() for layer in rows]) for name, rows in by_name.items()
        }
    model.zero_grad()
    model.train(was_training)
    return scores, moments


if __name__ == "__main__":
    import inference_report as harness
    import inference_utils as utils
    import inference_words as words
    from gptlite import GPTlite
    from inference_training import distill

    quick = {"removed": [30], "steps": 2}
    parser = harness.options(__doc__, dtype=False, repeats=None, n_windows=32, quick=quick)
    add, percents = parser.add_argument, [10, 30, 50, 70]
    add("--removed", type=int, nargs="+", default=percents, help="percent of the neurons of a block")
    add("--steps", type=harness.count, default=20, help="steps of the distillation afterwards")
    with harness.script(parser) as args:
        removed = sorted(set(args.removed))
        if not 0 <= removed[0] <= removed[-1] < 100:
            raise ValueError(f"--removed takes 0 to 99 percent, not {removed[0]} to {removed[-1]}")
        text, state = harness.load_text(args), utils.load_checkpoint(args.checkpoint)
        model = harness.build(args, state, GPTlite, packed=False, dropout_p=0.0)
        p, mid = utils.parameters_of(model), min(removed, key=lambda percent: abs(percent - 50))
        batch_size, seqlen, n_texts = (2, 64, 16) if args.quick else (4, p.seqlen, 32)
        columns, config = {"explained": ("explained", "{:.0%}")}, {"steps": args.steps, "removed": removed}
        name = f"what to prune, all losses over {args.n_windows} windows"
        report = harness.Report(args, name, model, columns, n_texts=n_texts, **config)
        scores, moments = score_units(model, text.train, n_texts, p.seqlen, batch_size=4, seed=args.seed)
        ways = {name: (name, False) for name in scores["neurons"]}  # what is scored, whether it is repaired
        ways |= {f"{name} + refit": (name, True) for name in ("activation x column", "Taylor")}

        def cut(kind, way, n):
            name, repaired = ways[way]
            refitted = moments[kind] if repaired else None
            return prune_units(copy.deepcopy(model), kind, scores[kind][name], n, refitted)

        def losses_of(model):
            return utils.window_losses(model, text.valid, args.n_windows)  # [n_windows]

        def add_row(name, model, losses, **figures):
            figures |= utils.loss_figures(losses, None if losses is base else base)
            report.row(name, baseline=losses is base, n_parameters=utils.n_parameters(model), **figures)

        tokens, n_neurons = text.prompts(2, p.seqlen), 4 * p.d_model  # [B, T]
        with torch.no_grad():
            for kind, n in (("neurons", n_neurons), ("heads", p.n_heads)):
                same = cut(kind, "Taylor + refit", n)[0](tokens)  # [B, T, V]
                report.check_close(f"no {kind} removed and refitted: logits", same, model(tokens))
        base, pruned, distilled, heads = losses_of(model), {}, {}, {}  # (way, amount): [n_windows]
        add_row("nothing removed", model, base)
        for way in ways:
            for percent in removed:
                student, explained = cut("neurons", way, round(n_neurons * (1 - percent / 100)))
                pruned[way, percent] = losses_of(student)
                torch.manual_seed(args.seed)
                distill(student, model, text.train, args.steps, p.lr / 5, batch_size, seqlen)
                distilled[way, percent] = losses_of(student)
                if percent == mid:
                    add_row(f"{way}, {mid}%", student, pruned[way, mid], explained=explained)
                    add_row(f"{way}, {mid}%, distilled", student, distilled[way, mid])
            for n in range(1, p.n_heads // 2 + 1):
                heads[way, n] = losses_of(cut("heads", way, p.n_heads - n)[0])
        for what, losses in (
            ("Neurons removed in every block (%)", pruned),
            (f"Neurons removed (%), then {args.steps} steps of {batch_size} x {seqlen}", distilled),
            (f"Heads removed of {p.n_heads} in every block", heads),
        ):
            means = {key: one.mean().item() for key, one in losses.items()}
            amounts = sorted({amount for _, amount in losses})
            rows = [{"decided by": way} | {str(n): means[way, n] for n in amounts} for way in ways]
            report.sweep(f"{what}: loss over {args.n_windows} windows", rows)
            lines = {way: (amounts, [means[way, n] for n in amounts]) for way in ways}
            report.plot_lines(lines, what, "validation loss (nats)")
        refitted = "activation x column + refit"
        for one, other, losses in (
            ("magnitude", "random choice", pruned),
            ("activation x column", "activation", pruned),
            (refitted, "activation x column", pruned),
            (refitted, "random choice", distilled),
        ):
            named = [f"a {mid}% cut by {way}{', distilled' * (losses is distilled)}" for way in (one, other)]
            difference = utils.loss_difference(losses[one, mid], losses[other, mid])
            report.why(words.loss_between(*named, *difference))
        report.finish()
