"""Pruning: the heads and neurons that matter least are cut out of a trained model, which then learns to cope.

Idea: run the model over some text and add up how strongly each head and each neuron responds, keep the
strongest of every block, and slice the others out of the weight matrices. What the cut broke, a distillation
from the whole model repairs in a fraction of the steps that the same shape needs from random weights. All at
once, or in rounds of a cut and some distillation each?

Exact: slicing computes what the whole model computes with those parts set to zero. Approximate: leaving
parts out, and what the distillation makes of the rest. Wins on every machine and without a special kernel:
the matrices are smaller and dense, and a head takes its cache along. Loses quality, of heads sooner than of
neurons, and a step's fixed costs stay, as there are as many matrices as before. Which parts matter:
more/pruning_importance.py; channels and blocks: more/pruning_parts.py, more/pruning_depth.py.

Run: python main_pruning.py            (--steps 500 for the long run)

Source: Muralidharan et al., Compact Language Models via Pruning and Knowledge Distillation (Minitron), 2024
(here sums over all tokens, where the paper takes norms over the batch); Michel et al., Are Sixteen
Heads Really Better than One?, 2019; LeCun et al., Optimal Brain Damage, 1989.
"""

import copy
from functools import partial

import torch
import torch.nn as nn

from data.shakespeare import get_batch
from gptlite_pruned import sum_over_text


def compute_importance(model, data, n_batches, batch_size, seqlen):
    """How strongly the heads and neurons of a model respond to text.

    Args: model: GPTlite or a variant that takes token ids [B, T]; data: token ids [N], of which get_batch
        draws n_batches times batch_size windows of seqlen tokens.
    Returns: heads and neurons, lists of a tensor a block: sums over all tokens of the length of each head's
        output [H], and of the size of each neuron's activation behind the ReLU [n_neurons].
    """
    if n_batches < 1 or batch_size < 1:
        raise ValueError(f"importance needs text: {n_batches} batches of {batch_size} are no windows")
    return sum_responses(model, [get_batch(data, batch_size, seqlen)[0] for _ in range(n_batches)])


def prune(model, heads, neurons, n_heads, n_neurons):
    """Keeps the most important heads and neurons of every block and slices the others out, in place.

    Args: heads, neurons: importances, [H] and [n_neurons] a block; n_heads, n_neurons: how many stay in each.
    Returns: the same model, smaller. Raises ValueError as units_to_keep does, and for an attention without
        projections of its own for keys and values (MLA), with the model untouched.
    """
    if not all(hasattr(block.mha, "key_proj") for block in model.blocks):
        raise ValueError("this attention shares latents between heads: its heads cannot be cut out alone")
    kept = units_to_keep(model, heads, neurons, n_heads, n_neurons)
    for block, (kept_heads, kept_neurons) in zip(model.blocks, kept, strict=True):
        prune_heads(block.mha, kept_heads)
        block.ffwd.net[0] = prune_linear(block.ffwd.net[0], rows=kept_neurons)
        block.ffwd.net[2] = prune_linear(block.ffwd.net[2], columns=kept_neurons)
    return model


def sum_responses(model, batches):
    """compute_importance over given batches, token ids [B, T] each."""

    def lengths(x, _output, size):  # of units of `size` numbers side by side
        return x.unflatten(-1, (-1, size)).norm(dim=-1).sum(dim=(0, 1))  # [units]

    heads = [(block.mha.out_proj, partial(lengths, size=block.mha.d_head)) for block in model.blocks]
    neurons = [(block.ffwd.net[2], partial(lengths, size=1)) for block in model.blocks]
    sums = sum_over_text(model, heads + neurons, batches)
    return sums[: len(heads)], sums[len(heads) :]


def prune_heads(mha, heads):
    """Cuts an attention down to some heads, indices in rising order (whole groups where heads share keys)."""
    size, d = heads_per_group(mha), torch.arange(mha.d_head)
    queries = (heads[:, None] * mha.d_head + d).flatten()  # [n*D]: rows of the heads that stay
    keys = (heads[::size, None] // size * mha.d_head + d).flatten()  # [n/size*D]
    mha.query_proj = prune_linear(mha.query_proj, rows=queries)
    mha.key_proj = prune_linear(mha.key_proj, rows=keys)
    mha.value_proj = prune_linear(mha.value_proj, rows=keys)
    mha.out_proj = prune_linear(mha.out_proj, columns=queries)
    mha.n_heads = len(heads)  # d_head stays, and with it the scale 1/sqrt(d_head)
    if hasattr(mha, "n_groups"):
        mha.n_groups = len(heads) // size


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


def units_to_keep(model, heads, neurons, n_heads, n_neurons):
    """What prune keeps: for every block indices of heads [n_heads] and of neurons [n_neurons].

    Raises: ValueError for numbers out of range, importances of other blocks than the model's, and in
        grouped-query attention for heads that are no whole groups (the others' keys would shift).
    """
    kept = []
    for block, head_scores, neuron_scores in zip(model.blocks, heads, neurons, strict=True):
        mha, size = block.mha, heads_per_group(block.mha)
        if (len(head_scores), len(neuron_scores)) != (mha.n_heads, block.ffwd.net[0].out_features):
            raise ValueError(
                f"{len(head_scores)} heads and {len(neuron_scores)} neurons were weighed, a block has "
                f"{mha.n_heads} and {block.ffwd.net[0].out_features}"
            )
        if n_heads % size:
            raise ValueError(f"{size} query heads share keys and values: {n_heads} heads are no whole groups")
        groups = keep_largest(head_scores.reshape(-1, size).mean(dim=1), n_heads // size)  # [n groups]
        kept_heads = (groups[:, None] * size + torch.arange(size)).flatten()  # [n_heads]
        kept.append((kept_heads, keep_largest(neuron_scores, n_neurons)))
    return kept


@torch.no_grad()
def mask(model, heads, neurons, n_heads, n_neurons):
    """prune's naive twin: multiplies what prune slices out by zero. The same function, nothing saved."""
    kept = units_to_keep(model, heads, neurons, n_heads, n_neurons)
    for block, (kept_heads, kept_neurons) in zip(model.blocks, kept, strict=True):
        for linear, units, size in (
            (block.mha.out_proj, kept_heads, block.mha.d_head),
            (block.ffwd.net[2], kept_neurons, 1),
        ):
            stays = torch.zeros(linear.in_features // size, dtype=torch.bool)  # [units]
            stays[units] = True
            linear.weight.mul_(stays.repeat_interleave(size).to(linear.weight))  # [E, in]
    return model


if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_pruned import with_kv_cache
    from inference_training import distill
    from inference_utils import is_distilled, load_checkpoint, loss_difference, make_model, parameters_of
    from linear_packed import pack_linears
    from main_distillation import distillation_loss
    from main_kvcache import generate_kvcache

    quick = {"steps": 8, "keep_ratios": [0.75, 0.5], "n_tokens": 16}
    parser = harness.options(__doc__, repeats=3, dtype=False, quick=quick, prompt_len=64, n_tokens=128)
    add, ratios = parser.add_argument, [0.9, 0.8, 0.7, 0.6, 0.5]
    add("--steps", type=harness.positive_int, default=300, help="distillation steps of each model")
    add("--keep-ratios", type=float, nargs="+", default=ratios, help="shares that are left after each round")
    with harness.script(parser) as args:
        keep_ratios = args.keep_ratios
        if not all(0 < ratio <= 1 for ratio in keep_ratios) or keep_ratios != sorted(keep_ratios)[::-1]:
            raise ValueError(f"--keep-ratios are falling shares above 0 and at most 1, not {keep_ratios}")
        distill_iters = len(keep_ratios) * max(args.steps // len(keep_ratios), 1)  # as many in each round
        text, state = harness.load_text(args), load_checkpoint(args.checkpoint)
        teacher = harness.build(args, state, GPTlite, packed=False, dropout_p=0.0)  # too short to overfit
        untouched = copy.deepcopy(teacher.state_dict())
        p, train_data, lr = parameters_of(teacher), text.train, parameters_of(teacher).lr / 2
        batch_size, seqlen = (2, 64) if args.quick else (8, p.seqlen)
        columns = {"divergence": ("KL to teacher", "{:.4f}"), "same_best_token": ("same best", "{:.1%}")}
        hidden = ("tpot_p99_ms", "forward_tokens", "same_output")
        config = {"steps": distill_iters, "train_batch_size": batch_size, "train_seqlen": seqlen}
        report = harness.Report(args, "pruning", teacher, columns, hidden, text, **config)

        def importance(model):
            return compute_importance(model, train_data, 4, 8, seqlen)

        def target_size(ratio):
            return round(p.n_heads * ratio), round(4 * p.d_model * ratio)

        torch.manual_seed(args.seed)
        masked = mask(copy.deepcopy(teacher), *importance(teacher), *target_size(keep_ratios[-1]))
        torch.manual_seed(args.seed)  # all at once
        model = prune(copy.deepcopy(teacher), *importance(teacher), *target_size(keep_ratios[-1]))
        models = {"teacher": teacher, "cut, not trained": copy.deepcopy(model), "one shot": model}
        losses = {"one shot": distill(model, teacher, train_data, distill_iters, lr, batch_size, seqlen)}
        torch.manual_seed(args.seed)  # in rounds, as many steps together
        model, n_steps, losses["rounds"] = copy.deepcopy(teacher), distill_iters // len(keep_ratios), []
        for ratio in keep_ratios:
            prune(model, *importance(model), *target_size(ratio))
            losses["rounds"] += distill(model, teacher, train_data, n_steps, lr, batch_size, seqlen)
        models["rounds"] = model
        model = make_model(GPTlite, text.vocab_size, is_distilled(state), dropout_p=0.0).to(args.device)
        torch.manual_seed(args.seed)  # the same shape, but nothing learned before
        model = prune(model, *importance(model), *target_size(keep_ratios[-1]))
        losses["random weights"] = distill(model, teacher, train_data, distill_iters, lr, batch_size, seqlen)
        models["random weights"] = model

        tokens, methods = text.prompts(4 if args.quick else 16, p.seqlen), {}  # [B, T]
        with torch.no_grad():
            logits = {name: model(tokens) for name, model in models.items()}  # [B, T, V] each
            report.check_close("logits of sliced and of masked", logits["cut, not trained"], masked(tokens))
        for name, model in models.items():
            figures = {"divergence": distillation_loss(logits[name], logits["teacher"], 1).item()}
            same = logits[name].argmax(-1) == logits["teacher"].argmax(-1)  # [B, T]
            figures["same_best_token"] = same.float().mean().item()
            fast = pack_linears(with_kv_cache(model))
            methods[name] = harness.Method(name, generate_kvcache, fast, exact=model is teacher, **figures)
        rows = report.compare(text.prompts(1, args.prompt_len), args.n_tokens, *methods.values(), label="")
        same = all(torch.equal(tensor, untouched[name]) for name, tensor in teacher.state_dict().items())
        report.check("the teacher is unchanged, bit for bit", same)
        n_past = args.prompt_len + args.n_tokens // 2  # cached tokens in the middle of the run
        costs = {name: harness.step_cost(methods[name].model, n_past) for name in ("teacher", "one shot")}
        report.why_step(costs, rows)
        report.why(words.compare(rows["one shot"], rows["teacher"]))
        report.why(words.loss(rows["cut, not trained"]) + words.loss(rows["one shot"]))
        end = {name: report.loss_of(methods[name].model) for name in losses}  # [n_windows] each
        others = [(name, *loss_difference(end["one shot"], end[name])) for name in end if name != "one shot"]
        report.why(words.loss_between("one shot", *others[0]) + words.loss_between("one shot", *others[1]))
        lines = {name: (range(1, len(values) + 1), values) for name, values in losses.items()}
        report.plot_lines(lines, "step", "loss (nats)", "Distillation after the cut", "y")
        report.finish()
