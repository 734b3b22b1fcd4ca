"""Pruning: the heads and neurons that matter least are cut out of a trained model, which then learns to cope.

Idea: run the model over some text and note how strongly each head and each neuron responds, keep the
strongest half of every layer, and slice the others out of the weight matrices: a smaller dense model, faster
on any machine. What the cut broke, a distillation from the whole model repairs in a fraction of the steps
that the same architecture needs from random weights. All at once or by 10% with distillation in between?

Exact: slicing computes what the whole model computes with those parts set to zero. Approximate: leaving
parts out, and what the distillation makes of the rest.

Run: python main_pruning.py            (--steps 500 for the long run)

Source: Muralidharan et al., Compact Language Models via Pruning and Knowledge Distillation (Minitron), 2024
(here the mean over all tokens, where the paper takes norms over the batch); Michel et al., Are Sixteen
Heads Really Better than One?, 2019; LeCun et al., Optimal Brain Damage, 1989.
"""

import copy
from functools import partial

import torch
import torch.nn as nn

from gptlite_kvcache import (
    Block_KVCache,
    GPTlite_KVCache,
    MultiHeadAttention_KVCache,
)
from inference_utils import sample_prompts
from main_distillation import distill


@torch.no_grad()
def mean_over_text(model, measures, windows, batch_size=8):
    """Means over the tokens of some text of what goes through some modules of a model.

    Args: measures: pairs (module, measure), where measure(input [B, T, in], output [B, T, out]) gives a sum
        over tokens [...]; windows: token ids [n, T], read batch_size at a time, in evaluation mode.
    Returns: for every pair the mean [...], float64 on the CPU.
    """
    totals = [0] * len(measures)

    def add(i, measure, _module, args, out):
        totals[i] = totals[i] + measure(args[0], out).cpu().double()  # [...]

    was_training, hooks = model.training, []
    try:
        model.eval()
        for i, (module, measure) in enumerate(measures):
            hooks.append(module.register_forward_hook(partial(add, i, measure)))
        for batch in windows.to(next(model.parameters()).device).split(batch_size):
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    return [total / windows.numel() for total in totals]


def compute_importance(model, data, n_batches, batch_size, seqlen):
    """How strongly the heads and neurons of a model respond to text.

    Args: model: GPTlite or a variant that takes token ids [B, T]; data: token ids [N], of which n_batches *
        batch_size windows of seqlen tokens are read, spread evenly, so that the split does not matter.
    Returns: heads [L, H], the mean over tokens of the length of a head's output, and neurons [L, F], that of
        the size of an activation. Raises ValueError for no windows, or a text shorter than one.
    """
    if n_batches < 1 or batch_size < 1:
        raise ValueError(f"importance needs text: {n_batches} batches of {batch_size} are no windows")
    windows = sample_prompts(data, n_batches * batch_size, seqlen)  # [n, T]

    def lengths(x, _out, size):
        """Of units of `size` numbers side by side, summed over the tokens: [units]."""
        units = x.unflatten(-1, (-1, size))  # [B, T, units, size]
        return units.to(torch.promote_types(x.dtype, torch.float32)).norm(dim=-1).sum(dim=(0, 1))

    heads = [(block.mha.out_proj, partial(lengths, size=block.mha.d_head)) for block in model.blocks]
    neurons = [(block.ffwd.net[2], partial(lengths, size=1)) for block in model.blocks]
    means = mean_over_text(model, heads + neurons, windows, batch_size)
    return torch.stack(means[: len(heads)]), torch.stack(means[len(heads) :])  # [L, H], [L, F]


def prune_linear(linear, rows=None, columns=None):
    """A new linear layer with some rows (outputs, and their biases) and columns (inputs) of another.

    Args: rows, columns: indices to keep, in this order, or boolean masks; None keeps all.
    Raises: ValueError where nothing would be left.
    """
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if rows is not None:
        weight, bias = weight[rows], None if bias is None else bias[rows]  # [rows, in], [rows]
    if columns is not None:
        weight = weight[:, columns]  # [rows, columns]
    if 0 in weight.shape:
        raise ValueError(f"a linear layer needs rows and columns: {list(weight.shape)} would be left")
    n_out, n_in = weight.shape
    pruned = nn.Linear(n_in, n_out, bias is not None, device="meta")  # no random numbers are drawn
    pruned.weight = nn.Parameter(weight.clone(), linear.weight.requires_grad)
    if bias is not None:
        pruned.bias = nn.Parameter(bias.clone(), linear.bias.requires_grad)
    return pruned.train(linear.training)


def keep_largest(importance, n):
    """Indices of the n largest of [units], in rising order; of equal ones the first. Raises ValueError."""
    if not 1 <= n <= len(importance):
        raise ValueError(f"cannot keep {n} of {len(importance)}: at least 1 and at most all")
    return torch.sort(importance, descending=True, stable=True).indices[:n].sort().values.cpu()  # [n]


def heads_per_group(mha):
    """Query heads that share a head of keys and values: 1, or more in grouped-query attention."""
    return mha.n_heads // getattr(mha, "n_groups", mha.n_heads)


def choose(model, heads, neurons, n_heads, n_neurons):
    """What prune keeps: for every layer indices of heads [n_heads] and of neurons [n_neurons].

    Raises: ValueError for numbers out of range, importances of other layers than the model's, and in
        grouped-query attention for heads that are no whole groups (the others' keys would shift).
    """
    kept = []
    for block, head_scores, neuron_scores in zip(model.blocks, heads, neurons, strict=True):
        mha, size = block.mha, heads_per_group(block.mha)
        if (len(head_scores), len(neuron_scores)) != (mha.n_heads, block.ffwd.net[0].out_features):
            raise ValueError(
                f"{len(head_scores)} heads and {len(neuron_scores)} neurons were weighed, a layer has "
                f"{mha.n_heads} and {block.ffwd.net[0].out_features}"
            )
        if n_heads % size:
            raise ValueError(f"{size} query heads share keys and values: {n_heads} heads are no whole groups")
        groups = keep_largest(head_scores.reshape(-1, size).mean(dim=1), n_heads // size)  # [n groups]
        kept_heads = (groups[:, None] * size + torch.arange(size)).flatten()  # [n_heads]
        kept.append((kept_heads, keep_largest(neuron_scores, n_neurons)))
    return kept


def prune_heads(mha, heads):
    """Cuts an attention down to some heads, indices in rising order (whole groups where heads share keys)."""
    size, D = heads_per_group(mha), torch.arange(mha.d_head)
    queries = (heads[:, None] * mha.d_head + D).flatten()  # [n*D]: rows of the heads that stay
    keys = (heads[::size, None] // size * mha.d_head + D).flatten()  # [n/size*D]
    mha.query_proj = prune_linear(mha.query_proj, rows=queries)
    mha.key_proj = prune_linear(mha.key_proj, rows=keys)
    mha.value_proj = prune_linear(mha.value_proj, rows=keys)
    mha.out_proj = prune_linear(mha.out_proj, columns=queries)
    mha.n_heads = len(heads)  # d_head stays, and with it the scale 1/sqrt(d_head)
    if hasattr(mha, "n_groups"):
        mha.n_groups = len(heads) // size


def prune(model, heads, neurons, n_heads, n_neurons):
    """Keeps the most important heads and neurons of every layer and slices the others out, in place.

    Args: heads [L, H], neurons [L, F]: importances; n_heads, n_neurons: how many stay in every layer.
    Returns: the same model, smaller. Raises ValueError as choose does, with the model untouched.
    """
    kept = choose(model, heads, neurons, n_heads, n_neurons)
    for block, (kept_heads, kept_neurons) in zip(model.blocks, kept, strict=True):
        prune_heads(block.mha, kept_heads)
        block.ffwd.net[0] = prune_linear(block.ffwd.net[0], rows=kept_neurons)
        block.ffwd.net[2] = prune_linear(block.ffwd.net[2], columns=kept_neurons)
    return model


@torch.no_grad()
def mask(model, heads, neurons, n_heads, n_neurons):
    """prune's naive twin: multiplies what prune slices out by zero. The same function, nothing saved."""
    kept = choose(model, heads, neurons, n_heads, n_neurons)
    for block, (kept_heads, kept_neurons) in zip(model.blocks, kept, strict=True):
        for output, units, size in (
            (block.mha.out_proj, kept_heads, block.mha.d_head),
            (block.ffwd.net[2], kept_neurons, 1),
        ):
            stays = torch.zeros(output.in_features // size, dtype=torch.bool)  # [units]
            stays[units] = True
            output.weight.mul_(stays.repeat_interleave(size).to(output.weight))  # [E, in]
    return model


def prune_and_distill(
    student, teacher, data, n_heads, n_neurons, n_rounds, n_steps, lr, batch_size, seqlen, n_batches=4
):
    """Prunes the student to n_heads and n_neurons a layer in n_rounds equal cuts, a distillation after each.

    Args: student: the whole model, changed in place; n_steps: of all rounds together; n_batches: batches of
        text that importance is taken from, anew in every round; the others as in distill.
    Returns: the distillation loss of every step. One round is the cut in one shot.
    """
    H, F = student.blocks[0].mha.n_heads, student.blocks[0].ffwd.net[0].out_features
    losses = []
    for i in range(1, n_rounds + 1):
        heads, neurons = compute_importance(student, data, n_batches, batch_size, seqlen)
        share = i / n_rounds  # of the way
        prune(student, heads, neurons, round(H + (n_heads - H) * share), round(F + (n_neurons - F) * share))
        n_now = n_steps * i // n_rounds - len(losses)
        losses += distill(student, teacher, data, n_now, lr, batch_size, seqlen)
    return losses


def with_kv_cache(model):
    """A copy of a GPTlite of any shape that decodes with a KV cache: same weights, other forward passes."""
    model = copy.deepcopy(model)
    model.__class__ = GPTlite_KVCache
    for block in model.blocks:
        block.__class__, block.mha.__class__ = Block_KVCache, MultiHeadAttention_KVCache
    return model


if __name__ == "__main__":
    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from main_distillation import distillation_loss
    from pruning_report import DECODE_COLUMNS, decode_rows

    parser = rep.options(__doc__, repeats=3)
    parser.add_argument(
        "--steps", type=rep.positive_int, default=300, help="distillation steps of each model"
    )
    parser.add_argument("--keep", type=float, default=0.5, help="share of heads and neurons that stays")
    with rep.script(parser) as args:
        if not 0 < args.keep <= 1:
            raise ValueError(f"--keep is a share above 0 and at most 1, not {args.keep}")
        p, dev, quick = get_gptlite_model_parameters(), args.device, args.quick
        W, H, F, n_steps = p.seqlen, p.n_heads, 4 * p.d_model, min(args.steps, 10) if quick else args.steps
        batch_size, seqlen, n_windows, n_tokens = (2, 64, 8, 16) if quick else (8, W, 128, 128)
        n_heads, n_neurons = round(H * args.keep), round(F * args.keep)
        n_rounds = 2 if quick else max(round((1 - args.keep) / 0.1), 1)  # cuts of 10% of the whole model
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        # dropout 0: a few hundred steps cannot overfit, and its random numbers cost time
        teacher = utils.load_model(GPTlite, vocab_size, args.checkpoint, dropout_p=0.0).to(dev)
        before = copy.deepcopy(teacher.state_dict())
        columns = {"divergence": ("KL to teacher", "{:.4f}"), "same_best_token": ("same best", "{:.1%}")}
        config = {"batch_size": 1, "prompt_len": 64, "n_tokens": n_tokens, "steps": n_steps}
        config |= {"train_batch_size": batch_size, "train_seqlen": seqlen, "n_rounds": n_rounds}
        config |= {"n_heads": n_heads, "n_neurons": n_neurons}
        report = rep.Report(args, "pruning", teacher, DECODE_COLUMNS | columns, **config)
        for key in ("tpot_p99_ms", "forward_tokens", "same_output"):  # no news here: left out of the table
            report.columns.pop(key)

        # The cut is exact
        importance = compute_importance(teacher, train_data, 4, 8, W)
        tokens = utils.sample_prompts(valid_data, 4 if quick else 16, W).to(dev)  # [B, T]
        cut = prune(copy.deepcopy(teacher), *importance, n_heads, n_neurons)
        masked = mask(copy.deepcopy(teacher), *importance, n_heads, n_neurons)
        with torch.no_grad():
            target = teacher(tokens)  # [B, T, V]
            off = utils.largest_difference(cut(tokens), masked(tokens))
        report.check(f"sliced is masked: logits differ by {off:.0e}, at most 1e-04", off <= 1e-4)

        # Three models of one shape: the same number of steps, size of batches and learning rate
        several = f"{n_rounds} rounds"
        blank = utils.make_model(GPTlite, vocab_size, dropout_p=0.0).to(dev)  # cut, it is as random
        rounds = {"one shot": 1, several: n_rounds, "random weights": 1}
        students, losses = {}, {}
        for name, n in rounds.items():
            torch.manual_seed(args.seed)
            students[name] = blank if name == "random weights" else copy.deepcopy(teacher)
            how = (n_heads, n_neurons, n, n_steps, p.lr / 2, batch_size, seqlen)
            losses[name] = prune_and_distill(students[name], teacher, train_data, *how)
        unchanged = all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
        report.check("the teacher is unchanged, bit for bit", unchanged)

        # Times of the two shapes, quality of all models
        prompt = utils.sample_prompts(valid_data, 1, 64).to(dev)  # [1, T]
        two = {"teacher": teacher, "one shot": students["one shot"]}
        timed, loss = decode_rows(two, prompt, n_tokens, args.repeats, args.dtype), {}
        for name, model in {"teacher": teacher, "cut, not trained": cut, **students}.items():
            with torch.no_grad():
                logits = model(tokens)  # [B, T, V]
            loss[name] = utils.validation_loss(model, valid_data, n_windows)
            report.row(
                name,
                baseline=model is teacher,
                valid_loss=loss[name],
                n_parameters=utils.n_parameters(model),
                divergence=distillation_loss(logits, target, 1).item(),
                same_best_token=(logits.argmax(-1) == target.argmax(-1)).float().mean().item(),
                **timed.get(name, {}),
            )
        for name in ("one shot", several):
            report.check(f"{name} ends below random weights", loss[name] < loss["random weights"])
        width, curve = max(n_steps // 20, 1), []
        for step in range(width, n_steps + 1, width):
            means = {name: sum(values[step - width : step]) / width for name, values in losses.items()}
            curve.append({"step": step} | means)
        report.sweep(f"Distillation loss, mean of {width} steps (nats, temperature 2)", curve)

        share = timed["one shot"]["measurement"].tpot_ms / timed["teacher"]["measurement"].tpot_ms
        steps = [f"{row['step_mb']:.1f} MB ({row['of_limit']:.0%} of the limit)" for row in timed.values()]
        report.why(
            f"A step reads {steps[0]} whole and {steps[1]} cut, with 2 operations for every number of "
            f"{args.dtype.itemsize} bytes. TPOT is {share:.2f} of the whole model's: the matrices stay dense "
            "and need no special kernel, but there are as many of them, and what a step does besides stays."
        )
        rise = {name: value - loss["teacher"] for name, value in loss.items()}
        report.why(
            f"The cut costs {rise['cut, not trained']:+.3f} nats; {n_steps} steps of {batch_size} x {seqlen} "
            f"tokens leave {rise['one shot']:+.3f}, from random weights {rise['random weights']:+.3f}: what "
            "the kept heads and neurons know need not be learned again."
        )
        report.why(
            f"{several} end {rise[several] - rise['one shot']:+.3f} nats from one shot at the same total of "
            "steps. Rounds weigh anew what is left after each cut, and leave the final shape only "
            f"{n_steps - n_steps * (n_rounds - 1) // n_rounds} steps of its own."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for name in losses:
                x, y = zip(*((row["step"], row[name]) for row in curve), strict=True)
                axes.plot(x, y, marker=".", label=f"{name}: valid loss {loss[name]:.3f}")
            axes.set(xlabel="step", ylabel="distillation loss (nats)", yscale="log")
            axes.set_title(f"{n_heads} of {H} heads, {n_neurons} of {F} neurons a layer")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
