"""Pruning: everything that can be cut out of a transformer, and whether to make it narrower or shallower.

Idea: besides neurons and heads (main_pruning.py), channels of the residual stream and whole blocks can go.
Each is exact in one sense: the small model computes what the whole one does with the removed part set to
zero. Channels need care, since layer norm averages over them: cut plainly it divides by the channels that
are left; keeping the whole model's divisor makes it exact. Blocks are ranked by the loss without each, and
by how much each turns the direction of the residual stream. Then depth against width at equal parameters.

Run: python main_pruning_parts.py

Source: Muralidharan et al., Compact Language Models via Pruning and Knowledge Distillation (Minitron), 2024
(channels, depth against width); Men et al., ShortGPT, 2024 (block influence).
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

from inference_utils import sample_prompts
from main_pruning import compute_importance, keep_largest, mask, prune, prune_linear, with_kv_cache


class LayerNorm_Pruned(nn.LayerNorm):
    """Layer norm over n_full channels of which only some are stored: the others are zero, and counted.

    [..., channels that stay] -> the same; equal to what the layer norm of all channels gives these.
    """

    n_full = None  # number of channels before any was removed

    def forward(self, x):
        mean = x.sum(dim=-1, keepdim=True) / self.n_full  # [..., 1]
        zeros = self.n_full - x.shape[-1]  # each lies mean away from the mean
        squares = (x - mean).square().sum(dim=-1, keepdim=True) + zeros * mean.square()  # [..., 1]
        return (x - mean) * torch.rsqrt(squares / self.n_full + self.eps) * self.weight + self.bias


def prune_layer_norm(norm, channels, exact=True):
    """A layer norm of some channels: with the divisor of all of them (exact), or of those that are left."""
    pruned = (LayerNorm_Pruned if exact else nn.LayerNorm)(len(channels), eps=norm.eps)
    pruned.n_full = getattr(norm, "n_full", norm.weight.numel())
    pruned.weight = nn.Parameter(norm.weight.detach()[channels].clone())
    pruned.bias = nn.Parameter(norm.bias.detach()[channels].clone())
    return pruned.train(norm.training)


def prune_embedding(embedding, channels):
    """An embedding with some of its columns."""
    return nn.Embedding.from_pretrained(embedding.weight.detach()[:, channels].clone(), freeze=False)


def prune_channels(model, importance, n_channels, exact=True):
    """Keeps the n_channels most important channels of the residual stream, in place.

    Args: importance [E]; exact: layer norms keep dividing by all channels, so that the result equals the
        whole model's with these channels set to zero; False makes it a plain GPTlite of d_model n_channels.
    Returns: the same model, smaller. Raises ValueError for a number out of range.
    """
    kept = keep_largest(importance, n_channels)  # [n_channels]
    model.token_embedding = prune_embedding(model.token_embedding, kept)
    model.position_embedding = prune_embedding(model.position_embedding, kept)
    for block in model.blocks:
        block.ln1, block.ln2 = (prune_layer_norm(norm, kept, exact) for norm in (block.ln1, block.ln2))
        for name in ("query_proj", "key_proj", "value_proj"):
            setattr(block.mha, name, prune_linear(getattr(block.mha, name), columns=kept))
        block.mha.out_proj = prune_linear(block.mha.out_proj, rows=kept)
        block.ffwd.net[0] = prune_linear(block.ffwd.net[0], columns=kept)
        block.ffwd.net[2] = prune_linear(block.ffwd.net[2], rows=kept)
    model.ln = prune_layer_norm(model.ln, kept, exact)
    model.fc_out = prune_linear(model.fc_out, columns=kept)
    return model


@torch.no_grad()
def mask_channels(model, importance, n_channels):
    """prune_channels' naive twin: the channels stay and are zero from the embeddings to the head."""
    gone = torch.ones(len(importance), dtype=torch.bool)  # [E]
    gone[keep_largest(importance, n_channels)] = False
    for embedding in (model.token_embedding, model.position_embedding):
        embedding.weight[:, gone] = 0
    for block in model.blocks:
        for layer in (block.mha.out_proj, block.ffwd.net[2]):  # what writes to the residual stream
            layer.weight[gone], layer.bias[gone] = 0, 0
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):  # what reads it: the mean would shift the zeros
            module.weight[gone], module.bias[gone] = 0, 0
    return model


def remove_blocks(model, layers):
    """Takes whole blocks out, in place; those that stay move up. Raises ValueError for an unknown or all."""
    L, layers = len(model.blocks), set(layers)
    if not layers <= set(range(L)) or len(layers) == L:
        raise ValueError(f"cannot remove blocks {sorted(layers)} of 0 to {L - 1}: at least one has to stay")
    model.blocks = nn.ModuleList(block for layer, block in enumerate(model.blocks) if layer not in layers)
    return model


@torch.no_grad()
def mask_blocks(model, layers):
    """remove_blocks' naive twin: these blocks add zero to the residual stream."""
    for layer in layers:
        for linear in (model.blocks[layer].mha.out_proj, model.blocks[layer].ffwd.net[2]):
            linear.weight.zero_()
            linear.bias.zero_()
    return model


@torch.no_grad()
def watch_modules(model, modules, measure, data, n_windows, seqlen, batch_size=8):
    """Mean over the tokens of some text of measure(input [B, T, E], output [B, T, E]) of each module.

    Args: measure: gives [B, T] or [B, T, channels]; data: token ids [N], n_windows of seqlen are read.
    Returns: [modules] or [modules, channels], float64.
    """
    windows = sample_prompts(data, n_windows, seqlen).to(next(model.parameters()).device)  # [n, T]
    totals = [0] * len(modules)

    def watch(i):
        def hook(_module, args, out):
            out = out[0] if isinstance(out, tuple) else out
            totals[i] = totals[i] + measure(args[0], out).sum(dim=(0, 1)).cpu().double()

        return modules[i].register_forward_hook(hook)

    hooks = []
    try:
        hooks = [watch(i) for i in range(len(modules))]
        for batch in windows.split(batch_size):
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(totals) / windows.numel()


def channel_importance(model, data, n_windows, seqlen):
    """Mean size of what each channel gives its readers, summed over the layer norms: [E]."""
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    return watch_modules(model, norms, lambda x, out: out.abs(), data, n_windows, seqlen).sum(dim=0)


def block_influence(model, data, n_windows, seqlen):
    """1 - cosine similarity of what enters and what leaves each block, mean over tokens: [L].

    A block that hardly turns the residual stream hardly matters, says ShortGPT.
    """

    def turn(x, out):
        return 1 - F.cosine_similarity(x, out, dim=-1)  # [B, T]

    return watch_modules(model, list(model.blocks), turn, data, n_windows, seqlen)


if __name__ == "__main__":
    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from main_distillation import distill
    from main_kvcache import generate_kvcache

    parser = rep.options(__doc__, repeats=3)
    parser.add_argument(
        "--steps", type=rep.positive_int, default=120, help="distillation steps of each model"
    )
    parser.add_argument("--blocks", type=int, default=2, help="blocks to remove, or as many parameters")
    with rep.script(parser) as args:
        p, dev, quick = get_gptlite_model_parameters(), args.device, args.quick
        W, L, H, E = p.seqlen, p.n_layers, p.n_heads, p.d_model
        if not 1 <= args.blocks < L:
            raise ValueError(f"--blocks is 1 to {L - 1}, not {args.blocks}")
        n_steps = min(args.steps, 2) if quick else args.steps
        batch_size, seqlen, n_windows, n_texts, n_tokens = (2, 64, 4, 8, 16) if quick else (8, W, 32, 32, 128)
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        model = utils.load_model(GPTlite, vocab_size, args.checkpoint, dropout_p=0.0).to(dev)
        heads, neurons = compute_importance(model, train_data, n_texts // 8, 8, W)
        channels = channel_importance(model, train_data, n_texts, W)
        turns = block_influence(model, train_data, n_texts, W)

        # Blocks, one at a time; the choice is made on training text
        texts = {"training": train_data, "validation": valid_data}
        whole = {text: utils.validation_loss(model, data, n_windows) for text, data in texts.items()}
        base, ranks = whole["validation"], []
        for layer, turn in enumerate(turns.tolist()):
            row = {"block": layer, "1 - cosine of input and output": turn}
            smaller = remove_blocks(copy.deepcopy(model), [layer])
            for text, data in texts.items():
                row[f"rise of the {text} loss"] = (
                    utils.validation_loss(smaller, data, n_windows) - whole[text]
                )
            ranks.append(row)
        without = [row["rise of the training loss"] for row in ranks]
        by_loss = sorted(range(L), key=lambda layer: without[layer])
        by_turn = turns.argsort().tolist()

        def make(what, n, masked=False):
            """The model without n sixths of one kind of part, sliced or masked."""
            m, left = copy.deepcopy(model), 1 - n / L
            if what == "blocks":
                return (mask_blocks if masked else remove_blocks)(m, by_loss[:n])
            if what.startswith("channels"):
                importance, n_channels = channels, round(E * left)
                if masked:
                    return mask_channels(m, importance, n_channels)
                return prune_channels(m, importance, n_channels, exact=what == "channels, exact")
            n_heads = round(H * left) if "heads" in what else H
            n_neurons = round(4 * E * left) if "neurons" in what else 4 * E
            return (mask if masked else prune)(m, heads, neurons, n_heads, n_neurons)

        columns = {"valid_loss": ("pruned", "{:.4f}"), "distilled_loss": ("distilled", "{:.4f}")}
        sizes = {"batch_size": 1, "prompt_len": 64, "n_tokens": n_tokens, "steps": n_steps}
        report = rep.Report(args, "what can be pruned", model, columns, **sizes, n_texts=n_texts)
        for key in ("tpot_p99_ms", "forward_tokens", "same_output"):  # no news here: left out of the table
            report.columns.pop(key)
        report.sweep("Blocks, removed one at a time", ranks)

        # Every kind of part: sliced is masked, and what it costs without training
        tokens = utils.sample_prompts(valid_data, 2, W).to(dev)  # [B, T]
        amounts = [args.blocks] if quick else sorted({*range(1, L // 2 + 1), args.blocks})
        kinds, parts = ["neurons", "heads", "channels, exact", "channels, plain", "blocks"], []
        for what in kinds:
            for n in amounts:
                smaller = make(what, n)
                row = {"part": what, "removed": f"{n}/{L}", "parameters": utils.n_parameters(smaller)}
                row["rise of the loss"] = utils.validation_loss(smaller, valid_data, n_windows) - base
                parts.append(row)
            with torch.no_grad():
                sliced, masked = (make(what, args.blocks, how)(tokens) for how in (False, True))
            off = utils.largest_difference(sliced, masked)
            if what == "channels, plain":
                difference = off
            else:
                name = f"{what}: sliced is masked, logits differ by {off:.0e}, at most 1e-04"
                report.check(name, off <= 1e-4)
        report.sweep("Parts removed, not trained", parts)

        # Depth against width: the same number of parameters, the same batches
        students = {"whole": model}
        for what in ("blocks", "heads and neurons", "channels, plain"):
            students[what] = make(what, args.blocks)
        counts = [utils.n_parameters(student) for student in students.values()][1:]
        name = f"{' and '.join(list(students)[1:])}: parameters within 1% of each other"
        report.check(name, max(counts) <= 1.01 * min(counts))
        losses = {name: [utils.validation_loss(m, valid_data, n_windows)] for name, m in students.items()}
        for name, student in list(students.items())[1:]:
            torch.manual_seed(args.seed)
            distill(student, model, train_data, n_steps, p.lr / 2, batch_size, seqlen)
            losses[name].append(utils.validation_loss(student, valid_data, n_windows))
            if n_steps >= 20:
                report.check(f"{name}: distillation lowers the loss", losses[name][1] < losses[name][0])
        prompt = utils.sample_prompts(valid_data, 1, 64).to(dev)  # [1, T]
        methods = []
        for name, student in students.items():
            cached = with_kv_cache(student).to(args.dtype)
            run = lambda m=cached: generate_kvcache(m, prompt, n_tokens, W)  # noqa: E731
            methods.append(utils.Method(name, run, [cached]))
        results = utils.measure(methods, n_tokens, args.repeats)
        for name, run, (cached,), _ in methods:
            with torch.no_grad():
                kv_cache = [t for kv in cached(prompt)[1] for t in kv]
            report.row(
                name if name == "whole" else f"{args.blocks}/{L} of the {name.removesuffix(', plain')}",
                results[name],
                baseline=name == "whole",
                n_parameters=utils.n_parameters(cached),
                kv_bytes_per_token=utils.cache_bytes_per_token(kv_cache, prompt.shape[1], 1),
                peak_memory_mb=utils.peak_memory_mb(run, cached, inputs=[prompt]),
                valid_loss=losses[name][0],
                distilled_loss=losses[name][1] if len(losses[name]) > 1 else None,
            )

        report.why(
            f"On training text block {by_loss[0]} costs least ({without[by_loss[0]]:+.3f} nats) and block "
            f"{by_loss[-1]} most ({without[by_loss[-1]]:+.3f}). From the least to the most important: "
            f"{by_loss} by loss, {by_turn} by cosine. The loss needs {L} evaluations, the cosine one pass. "
            "Training that leaves out later blocks at random (main_training.py) makes them easy to remove."
        )
        left = round(E * (1 - args.blocks / L))
        same = [row for row in parts if row["removed"] == f"{args.blocks}/{L}"]
        rises = {row["part"]: row["rise of the loss"] for row in same}
        report.why(
            f"Layer norm over {left} stored channels instead of {E} with {E - left} zeros divides by other "
            f"means and variances: logits move by up to {difference:.2f}, the loss rises by "
            f"{rises['channels, plain']:+.3f} instead of {rises['channels, exact']:+.3f} nats, untrained. "
            "Every block reads and writes every channel, so one that is missing is missing everywhere."
        )
        limits, shares = rep.measure_ceilings(dev, args.dtype), []
        for name, _, (cached,), _ in methods:
            weights = utils.n_parameters(cached) - (vocab_size + W) * cached.ln.weight.numel()
            cost = rep.Cost(2 * weights, args.dtype.itemsize * weights)  # embeddings: one row a token
            bound, tpot = rep.lower_bound_ms(cost, limits), results[name].tpot_ms
            shares.append(f"{name} {cost.n_bytes / 1e6:.0f} MB, {tpot:.2f} ms ({rep.share_of(bound, tpot)})")
        report.why(
            f"A step reads: {'; '.join(shares)} of the limit. Fewer blocks are also fewer operations in a "
            f"row, {L - args.blocks} of {L}; a narrower model has as many, each on smaller matrices."
        )
        ends = {name: pair[1] - losses["whole"][0] for name, pair in losses.items() if len(pair) > 1}
        report.why(
            f"At equal parameters {n_steps} steps of {batch_size} x {seqlen} tokens end at "
            f"{', '.join(f'{name} {end:+.3f}' for name, end in ends.items())} nats from the whole model."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for i, what in enumerate(kinds):
                rows = [row for row in parts if row["part"] == what]
                points = [(utils.n_parameters(model), 0.0)]
                points += [(row["parameters"], row["rise of the loss"]) for row in rows]
                x, y = zip(*points, strict=True)
                axes.plot([v / 1e6 for v in x], y, marker=".", color=f"C{i}", label=what)
            for marker, (name, end) in zip("v^s", ends.items(), strict=True):
                size = utils.n_parameters(students[name]) / 1e6
                axes.plot(size, end, marker, color="k", label=f"{name}, {n_steps} steps")
            axes.set(xlabel="parameters (millions)", ylabel="rise of the validation loss (nats)")
            axes.set_title("What can be removed, and what it costs")
            axes.legend(fontsize=8)
            rep.save_figure(figure, args.plot)
        report.finish()
