"""Pruning: whole blocks are taken out, and the depth of a model is weighed against its width.

Idea: a block adds to the residual stream, so the model still works without it. Two ways tell which block
matters least: the loss without it, or how far it turns the residual stream, from one reading of some text. A
shallower model has fewer operations in a row, a narrower one smaller ones: at equal parameters, which is
faster, and which learns to cope better in a short distillation?

Exact: a model without a block computes what the whole one does with that block adding zero. Approximate:
leaving it out, and what the distillation makes of the rest. GPTlite was trained with stochastic depth, which
skips late blocks at random: they matter less here than in a model trained without it.

Run: python main_pruning_depth.py

Source: Men et al., ShortGPT, 2024 (block influence); Muralidharan et al., Minitron, 2024 (depth and width).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from inference_utils import sample_prompts
from main_pruning import mean_over_text


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


def block_influence(model, data, n_windows, seqlen):
    """1 - cosine similarity of what enters and what leaves each block, mean over tokens: [L].

    A block that hardly turns the residual stream hardly matters, says ShortGPT.
    Args: data: token ids [N], of which n_windows windows of seqlen tokens are read.
    """

    def turn(x, out):
        out = out[0] if isinstance(out, tuple) else out  # [B, T, E]
        return (1 - F.cosine_similarity(x, out, dim=-1)).sum()

    windows = sample_prompts(data, n_windows, seqlen)  # [n, T]
    return torch.stack(mean_over_text(model, [(block, turn) for block in model.blocks], windows))


if __name__ == "__main__":
    import copy

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from main_distillation import distill
    from main_pruning import compute_importance, prune
    from main_pruning_parts import channel_importance, prune_channels
    from pruning_report import DECODE_COLUMNS, decode_rows

    parser = rep.options(__doc__, repeats=3)
    parser.add_argument(
        "--steps", type=rep.positive_int, default=120, help="distillation steps of each model"
    )
    parser.add_argument("--blocks", type=int, default=2, help="blocks to remove, or as many parameters")
    with rep.script(parser) as args:
        p, dev, quick = get_gptlite_model_parameters(), args.device, args.quick
        W, L, E, n_blocks = p.seqlen, p.n_layers, p.d_model, args.blocks
        if not 1 <= n_blocks < L:
            raise ValueError(f"--blocks is 1 to {L - 1}, not {n_blocks}")
        n_steps = min(args.steps, 2) if quick else args.steps
        batch_size, seqlen, n_windows, n_texts, n_tokens = (2, 64, 4, 8, 16) if quick else (8, W, 32, 32, 128)
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        model = utils.load_model(GPTlite, vocab_size, args.checkpoint, dropout_p=0.0).to(dev)
        columns = {"valid_loss": ("pruned loss", "{:.4f}"), "distilled_loss": ("distilled loss", "{:.4f}")}
        config = {"batch_size": 1, "prompt_len": 64, "n_tokens": n_tokens, "steps": n_steps}
        config |= {"train_batch_size": batch_size, "train_seqlen": seqlen, "n_texts": n_texts}
        report = rep.Report(args, "depth", model, DECODE_COLUMNS | columns, **config)
        for key in ("tpot_p99_ms", "forward_tokens", "same_output"):  # no news here: left out of the table
            report.columns.pop(key)

        # One block at a time on two texts: the choice is made on training text
        base_train, base = (
            utils.validation_loss(model, data, n_windows) for data in (train_data, valid_data)
        )
        turns, ranks = block_influence(model, train_data, n_texts, W), []  # [L]
        for layer in range(L):
            student = remove_blocks(copy.deepcopy(model), [layer])
            rise = utils.validation_loss(student, train_data, n_windows) - base_train
            row = {"block": layer, "1 - cosine of input and output": turns[layer].item()}
            row |= {"rise of the training loss": rise}
            rise = utils.validation_loss(student, valid_data, n_windows) - base
            ranks.append(row | {"rise of the validation loss": rise})
        report.sweep("Blocks, removed one at a time", ranks)
        without = [row["rise of the training loss"] for row in ranks]
        by_loss = sorted(range(L), key=lambda layer: without[layer])
        together = []
        for n in [n_blocks] if quick else range(1, L):
            student = remove_blocks(copy.deepcopy(model), by_loss[:n])
            row = {"blocks": ", ".join(map(str, sorted(by_loss[:n])))}
            row |= {"parameters": utils.n_parameters(student)}
            rise = utils.validation_loss(student, valid_data, n_windows) - base
            together.append(row | {"rise of the validation loss": rise})
        report.sweep("Blocks removed together, in the order of the training loss, not trained", together)

        # Depth against width: the same number of parameters, the same batches
        shallow = remove_blocks(copy.deepcopy(model), by_loss[:n_blocks])
        masked = mask_blocks(copy.deepcopy(model), by_loss[:n_blocks])
        tokens = utils.sample_prompts(valid_data, 2, W).to(dev)  # [B, T]
        with torch.no_grad():
            off = utils.largest_difference(shallow(tokens), masked(tokens))
        report.check(f"blocks: removed is masked, logits differ by {off:.0e}, at most 1e-04", off <= 1e-4)
        n_heads, n_neurons = (round(n * (1 - n_blocks / L)) for n in (p.n_heads, 4 * E))
        heads, neurons = compute_importance(model, train_data, n_texts // 8, 8, W)
        channels = channel_importance(model, train_data, n_texts, W)  # [E]
        # parameters are linear in the channels; embeddings shrink as well, so more than 1 - n_blocks / L stay
        one_less = prune_channels(copy.deepcopy(model), channels, E - 1, exact=False)
        n_whole, n_less, n_wanted = (utils.n_parameters(m) for m in (model, one_less, shallow))
        n_channels = round(E - (n_whole - n_wanted) / (n_whole - n_less))
        students = {
            "blocks": shallow,
            "heads and neurons": prune(copy.deepcopy(model), heads, neurons, n_heads, n_neurons),
            "channels": prune_channels(copy.deepcopy(model), channels, n_channels, exact=False),
        }
        counts = [utils.n_parameters(student) for student in students.values()]
        name = f"{', '.join(students)}: parameters within 1% of each other"
        report.check(name, max(counts) <= 1.01 * min(counts))
        pruned, distilled = {"whole": base}, {}
        for name, student in students.items():
            pruned[name] = utils.validation_loss(student, valid_data, n_windows)
            torch.manual_seed(args.seed)
            distill(student, model, train_data, n_steps, p.lr / 2, batch_size, seqlen)
            distilled[name] = utils.validation_loss(student, valid_data, n_windows)
        prompt = utils.sample_prompts(valid_data, 1, 64).to(dev)  # [1, T]
        timed = decode_rows({"whole": model, **students}, prompt, n_tokens, args.repeats, args.dtype)
        for name, student in {"whole": model, **students}.items():
            report.row(
                name if student is model else f"{n_blocks}/{L} of {name}",
                baseline=student is model,
                n_parameters=utils.n_parameters(student),
                valid_loss=pruned[name],
                distilled_loss=distilled.get(name),
                **timed[name],
            )

        report.why(
            f"On training text block {by_loss[0]} costs least ({without[by_loss[0]]:+.3f} nats) and block "
            f"{by_loss[-1]} most ({without[by_loss[-1]]:+.3f}). From the least to the most important: "
            f"{by_loss} by loss, {turns.argsort().tolist()} by cosine. The loss needs {L} evaluations, the "
            "cosine one pass."
        )
        falls = {row["block"]: row["rise of the validation loss"] for row in ranks}
        falls = {layer: f"{rise:+.3f}" for layer, rise in falls.items() if rise < 0}
        if falls:
            report.why(
                f"Without one of the blocks {', '.join(map(str, falls))} the validation loss even falls "
                f"({', '.join(falls.values())} nats, on {n_windows} windows): this model hardly needs them. "
                "Training with stochastic depth (main_training.py) skips late blocks at random and so learns "
                "to do without; blocks look cheaper here than in a model trained otherwise."
            )
        steps = [
            f"{name} {row['step_mb']:.1f} MB ({row['of_limit']:.0%} of the limit)"
            for name, row in timed.items()
        ]
        report.why(
            f"A step reads, with 2 operations for every number of {args.dtype.itemsize} bytes: "
            f"{'; '.join(steps)}. Fewer blocks are also fewer operations in a row, {L - n_blocks} of {L}; a "
            "narrower model has as many, each on smaller matrices."
        )
        ends = [
            f"{name} {pruned[name] - base:+.3f} and {loss - base:+.3f}" for name, loss in distilled.items()
        ]
        report.why(
            f"At equal parameters, nats above the whole model before and after {n_steps} steps of "
            f"{batch_size} x {seqlen} tokens: {'; '.join(ends)}."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            axes.plot(timed["whole"]["measurement"].tpot_ms, base, "k*", label="whole")
            for name, loss in distilled.items():
                tpot = timed[name]["measurement"].tpot_ms
                axes.plot([tpot, tpot], [pruned[name], loss], marker="o", markevery=[1], label=name)
            axes.set(xlabel="TPOT (ms)", ylabel="validation loss (nats)")
            axes.set_title(f"{n_blocks}/{L} removed, then {n_steps} steps of distillation (dot: after)")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
