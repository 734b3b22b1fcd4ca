"""Pruning: several shapes of a smaller model are cut from one, each is tried, and the best trains on.

Idea: one reading of some text weighs heads, neurons, channels and blocks at once. For each size models are
cut in several shapes, narrower or shallower. A cut model's loss does not yet tell what training repairs, so
each trains for a few steps on the whole model's stored answers, and the best trains on; the same shape from
random weights, on the same answers and on the text alone, shows what the cut is worth.

Exact: with nothing cut the model is unchanged. Approximate: everything else. Wins over training each size
anew: what was learned before is kept, and the answers are stored once for all. Loses the steps of shapes that
were not chosen; a short trial favours what repairs fastest, which need not be what ends best.

Run: python more/pruning_search.py

Source: Muralidharan et al., Compact Language Models via Pruning and Knowledge Distillation (Minitron), 2024.
"""

import copy
from collections import namedtuple
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

import _root  # noqa: F401 (the files above become importable)
from gptlite_pruned import sum_over_text
from inference_training import (
    learning_rate,
    train_side_by_side,
    use_training_attention,
    windows_of_step,
)
from inference_utils import n_parameters
from main_distillation import store_soft_labels, student_loss
from main_pruning import keep_largest, prune
from pruning_depth import remove_blocks
from pruning_parts import prune_channels

Importance = namedtuple("Importance", "blocks heads neurons channels")  # [L], [L, H], [L, n], [E]
Shape = namedtuple("Shape", "n_blocks n_heads n_neurons n_channels")


def weigh_all_parts(model, windows, batch_size=8):
    """The importance of all parts of a model from one pass over windows of token ids [n, T]: Importance.

    Heads and neurons by the size of what they give (main_pruning.py), channels by that of what layer norms
    give their readers (pruning_parts.py), blocks by how far they turn the residual stream (pruning_depth.py).
    """

    def lengths(x, _out, size):
        return x.unflatten(-1, (-1, size)).norm(dim=-1).sum(dim=(0, 1))  # [units]

    def sizes(_x, out):
        return out.abs().sum(dim=(0, 1))  # [E]

    def turn(x, out):
        return (1 - F.cosine_similarity(x, out, dim=-1)).sum()  # []

    blocks, norms = model.blocks, [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    measures = [(block, turn) for block in blocks]
    measures += [(block.mha.out_proj, partial(lengths, size=block.mha.d_head)) for block in blocks]
    measures += [(block.ffwd.net[2], partial(lengths, size=1)) for block in blocks]
    measures += [(norm, sizes) for norm in norms]
    sums, L = sum_over_text(model, measures, windows.split(batch_size)), len(blocks)
    return Importance(*(torch.stack(sums[i * L : (i + 1) * L]) for i in range(3)), sum(sums[3 * L :]))


def shape_of(model):
    """The Shape of a GPTlite whose blocks are all alike."""
    block = model.blocks[0]
    sizes = block.mha.n_heads, block.ffwd.net[0].out_features, model.ln.weight.numel()
    return Shape(len(model.blocks), *sizes)


def n_parameters_in(model, shape):
    """How many parameters the model has when it is cut to a Shape."""
    L, H, n_neurons, E = shape
    V, D = model.fc_out.out_features, model.blocks[0].mha.d_head
    block = H * D * (4 * E + 3) + n_neurons * (2 * E + 1) + 6 * E  # 6: two norms, two output biases
    return E * (2 * V + model.seqlen + 2) + V + L * block


def candidates(model, n_wanted):
    """Shapes of n_wanted parameters: with fewer blocks, heads and neurons, channels, or parts of every width.

    Neurons, the smallest parts, fill up to the size. Returns: {name: Shape}, without those that cannot be.
    Raises ValueError where none can.
    """
    whole = shape_of(model)
    L, H, n_all, E = whole
    share = n_wanted / n_parameters(model)

    def least(axis, n):  # as many of these as can hold the size with all neurons
        sizes = [n_parameters_in(model, whole._replace(**{axis: i})) for i in range(1, n)]
        return 1 + sum(size < n_wanted for size in sizes)

    widths = {"n_heads": max(round(H * share**0.5), 1), "n_channels": round(E * share**0.5)}
    some = {
        "depth": whole._replace(n_blocks=least("n_blocks", L)),
        "heads and neurons": whole._replace(n_heads=max(round(H * share), 1)),
        "channels": whole._replace(n_channels=least("n_channels", E)),
        "all widths": whole._replace(**widths),
    }
    for name, shape in some.items():
        none, one = (n_parameters_in(model, shape._replace(n_neurons=n)) for n in (0, 1))
        some[name] = shape._replace(n_neurons=round((n_wanted - none) / (one - none)))
    some = {name: shape for name, shape in some.items() if 1 <= shape.n_neurons <= n_all}
    if not some:
        raise ValueError(f"no shape of this model has {n_wanted} parameters")
    return some


def cut(model, importance, shape):
    """A copy of a model with the most important parts of each kind, in as many as the Shape says."""
    layers = keep_largest(importance.blocks, shape.n_blocks)  # those that stay
    gone = set(range(len(model.blocks))) - set(layers.tolist())
    model = remove_blocks(copy.deepcopy(model), gone)
    scores = importance.heads[layers], importance.neurons[layers]
    prune(model, *scores, shape.n_heads, shape.n_neurons)
    return prune_channels(model, importance.channels, shape.n_channels, exact=False)


def try_shapes(model, importance, shapes, train, loss_of):
    """Cuts a model to each of {name: Shape}, and trains all for a trial, train({name: model}).

    Returns: {name: model}, and the losses {name: loss_of(model)} as cut and after the trial.
    """
    models = {name: cut(model, importance, shape) for name, shape in shapes.items()}
    before = {name: loss_of(student) for name, student in models.items()}
    train(models)
    return models, before, {name: loss_of(student) for name, student in models.items()}


def train_on_answers(models, windows, answers, steps, lr, batch_size, seed, valid_data, alpha=0.0):
    """Trains {name: model} side by side on what a teacher has said of windows, or (alpha 1) on the windows.

    Args: windows [N, T+1]; answers: as store_soft_labels gives them [N, T, V]; steps: range of steps: the
        same steps see the same windows; valid_data: for the progress bar.
    """
    device = next(next(iter(models.values())).parameters()).device

    def batch_of(step):
        rows = windows_of_step(len(windows), batch_size, seed, steps[step])  # [B]
        return windows[rows, :-1].to(device), windows[rows, 1:].to(device), answers[rows].to(device)

    def loss_of(_, logits, batch):
        return student_loss(logits, *batch[1:], 1.0, alpha)

    settings = {"steps": len(steps), "lr": lr, "batch_size": batch_size, "seqlen": windows.shape[1] - 1}
    schedule = partial(learning_rate, warmup=0.1, floor=0.1)
    how = {"schedule": schedule, "n_evaluations": 1}
    train_side_by_side(models, batch_of, loss_of, settings, valid_data, 2, **how)


if __name__ == "__main__":
    import inference_report as harness
    import inference_utils as utils
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_pruned import with_kv_cache
    from linear_packed import pack_linears
    from main_kvcache import generate_kvcache

    quick = {"steps": 3, "keep": [0.5], "n_tokens": 8}
    parser = harness.options(__doc__, repeats=3, dtype=False, quick=quick, prompt_len=64, n_tokens=64)
    add, shares = parser.add_argument, [0.75, 0.5, 0.25]
    add("--keep", type=harness.share, nargs="+", default=shares, help="shares of the parameters to keep")
    add("--steps", type=harness.positive_int, default=90, help="training steps; a trial has a sixth of them")
    with harness.script(parser) as args:
        text, state, dev = harness.load_text(args), utils.load_checkpoint(args.checkpoint), args.device
        whole = harness.build(args, state, GPTlite, packed=False, dropout_p=0.0)
        p, n_trial = utils.parameters_of(whole), args.steps // 6 + 1
        columns, hidden = {"training_steps": ("steps", "{}")}, ("forward_tokens", "same_output")
        B, T, n_judged = (2, 64, 4) if args.quick else (8, p.seqlen, 32)
        report = harness.Report(args, "search for a shape", whole, columns, hidden, text, steps=args.steps)
        plans = {keep: candidates(whole, round(keep * n_parameters(whole))) for keep in sorted(args.keep)}
        importance = weigh_all_parts(whole, text.prompts(32, T, "train"))
        tokens, windows = text.prompts(2, T), utils.sample_prompts(text.train, args.steps * B, T + 1)
        with torch.no_grad():
            same = cut(use_training_attention(whole), importance, shape_of(whole))(tokens)  # [B, T, V]
            report.check_close("nothing cut: logits", same, whole(tokens))
        answers = store_soft_labels(whole, windows[:, :-1], 1.0)  # [N, T, V]

        def train(steps, models, lr=p.lr / 2, alpha=0.0):
            train_on_answers(models, windows, answers, steps, lr, B, args.seed, text.valid, alpha)

        def loss_of(model):  # on training text: the validation text only judges
            return utils.validation_loss(model, text.train, n_judged)

        trial = partial(train, range(n_trial))
        trials, made, best, changed, off = [], {"whole": (whole, 0)}, {}, 0, 0.0
        for keep, shapes in plans.items():
            models, before, after = try_shapes(whole, importance, shapes, trial, loss_of)
            for name, shape in shapes.items():
                losses = {"as cut": before[name], f"{n_trial} steps": after[name]}
                trials.append({"parameters": f"{keep:.0%}", "cut": name} | shape._asdict() | losses)
                made[f"{keep:.0%} {name}"] = models[name], n_trial
                off = max(off, abs(n_parameters(models[name]) / n_parameters(whole) / keep - 1))
            name = min(after, key=after.get)
            changed += before[name] > min(before.values())
            best[keep] = f"{keep:.0%} {name}"
            train(range(n_trial, args.steps), {name: models[name]})
            made[best[keep]] = models[name], args.steps
            for kind, alpha in (("soft labels", 0.0), ("text alone", 1.0)):
                torch.manual_seed(args.seed)
                fresh = utils.make_model(GPTlite, text.vocab_size, utils.is_distilled(state), dropout_p=0.0)
                fresh = cut(use_training_attention(fresh.to(dev)), importance, shapes[name])
                train(range(args.steps), {kind: fresh}, p.lr, alpha)  # it has nothing to lose: the whole rate
                made[f"{keep:.0%} random, {kind}"] = fresh, args.steps
        report.sweep("Loss on training text of all shapes", trials)
        report.check(f"sizes as wanted (off by {off:.2%}, at most 1%)", off <= 0.01)

        methods = []
        for name, (model, n_steps) in made.items():
            fast, exact = pack_linears(with_kv_cache(model)), model is whole
            methods.append(harness.Method(name, generate_kvcache, fast, exact=exact, training_steps=n_steps))
        rows = report.compare(text.prompts(1, args.prompt_len), args.n_tokens, *methods, label="")
        mid = min(plans, key=lambda keep: abs(keep - 0.5))
        for kind in ("soft labels", "text alone"):
            pair = best[mid], f"{mid:.0%} random, {kind}"
            losses = [report.loss_of(one.model) for name in pair for one in methods if one.name == name]
            rise = utils.loss_difference(*losses)
            report.why(words.loss_between(*pair, *rise))
        shown = ", ".join(best.values())
        other = f"At {changed} of {len(best)} sizes the trial changes which shape is best ({shown})."
        same = f"The shapes that are best as cut are best after the trial ({shown})."
        report.why(words.choose(changed, (1, other), same))
        report.why(words.compare(rows[best[min(best)]], rows["whole"]) + words.loss(rows[best[min(best)]]))
        lines = {}
        for name, row in rows.items():
            way = "best, trained on" if name in best.values() else name.partition(" ")[2] or name
            lines.setdefault(way, []).append((row["tokens_per_s"], row["valid_loss"]))
        lines = {way: zip(*points, strict=True) for way, points in lines.items()}
        report.plot_lines(lines, "tokens/s", "validation loss (nats)", "How small models were made")
        report.finish()
