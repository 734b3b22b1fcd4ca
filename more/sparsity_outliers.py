"""What Wanda is for: a model with outlier channels is pruned wrongly by the size of its weights.

Large language models have a few channels whose activations are many times larger than the others, read by
weights that magnitude pruning takes for unimportant. GPTlite has mild ones; this makes some large without
changing what it computes: channels behind the layer norms become larger and the weights that read them
smaller, by a power of two, which is exact. Wanda's product of weight and input norm does not change at all,
SparseGPT changes only by its damping, a share of the mean of all inputs' squares.

Approximate, as all pruning. Wanda wins where channels are outliers, since magnitude then removes the weights
that read them first; it loses the passes over calibration texts. Without outliers the two are close.

Run: python more/sparsity_outliers.py

Source: Dettmers et al., LLM.int8(), 2022 (outlier features); Sun et al., Wanda, 2023.
"""

import torch

import _root  # noqa: F401 (the files above become importable)
from inference_calibration import input_squares, linear_layers, sum_inputs
from main_sparsity import prune_model


@torch.no_grad()
def rescale_channels(model, n_channels, factor):
    """Makes n_channels channels behind every block's layer norms `factor` times as large; returns the model.

    The weights that read them become as much smaller, so the function stays: bit for bit for a power of two
    (but for float16's smallest numbers). The channels of the largest scale are taken, which are large
    already. Raises ValueError for more channels than there are.
    """
    for block in model.blocks:
        mha = block.mha
        attention = (mha.query_proj, mha.key_proj, mha.value_proj)
        for norm, readers in ((block.ln1, attention), (block.ln2, block.ffwd.net[:1])):
            if n_channels > len(norm.weight):
                raise ValueError(f"{n_channels} channels: the model has {len(norm.weight)}")
            channels = norm.weight.abs().topk(n_channels).indices  # [n_channels]
            norm.weight[channels] *= factor
            norm.bias[channels] *= factor
            for layer in readers:
                layer.weight[:, channels] /= factor
    return model


def largest_norm(model, tokens):
    """The largest norm of a channel that an MLP reads over the median one, the median over the blocks."""
    readers = {name: layer for name, layer in linear_layers(model.blocks).items() if name.endswith("net.0")}
    squares = sum_inputs(readers, input_squares, lambda: model(tokens))
    norms = torch.stack(list(squares.values())).sqrt()  # [L, E]
    return (norms.amax(dim=-1) / norms.median(dim=-1).values).median().item()


PRUNED = {"magnitude": "layer", "Wanda": "row", "SparseGPT": "layer"}  # compared as their papers do


if __name__ == "__main__":
    import copy

    import inference_report as harness
    import inference_utils as utils
    import inference_words as words
    from gptlite import GPTlite
    from linear_packed import pack_linears

    quick = {"factors": [1, 32], "n_texts": 4}
    parser = harness.options(__doc__, repeats=None, n_windows=32, quick=quick)
    parser.add_argument(
        "--n-channels", type=harness.positive_int, default=8, help="channels of each layer norm"
    )
    parser.add_argument("--n-texts", type=harness.positive_int, default=16, help="texts that calibrate")
    factors = [1, 2, 4, 8, 32, 128]
    parser.add_argument(
        "--factors", type=harness.positive_int, nargs="+", default=factors, help="how much larger"
    )
    parser.add_argument("--sparsity", type=harness.share, default=0.5, help="share of the weights that goes")
    columns = {"largest_norm": ("largest norm / median", "{:.1f}")}
    with harness.script(parser) as args:
        text, (dense,) = harness.load_text(args), harness.load_models(args, GPTlite, packed=False)
        texts = text.prompts(args.n_texts, dense.seqlen, "train")  # [B, T]
        sizes = {"n_texts": args.n_texts, "n_channels": args.n_channels, "sparsity": args.sparsity}
        title = f"pruning with outlier channels, losses over {args.n_windows} windows"
        report = harness.Report(args, title, dense, columns, text=text, **sizes)
        losses, table, first, last = {}, [], min(args.factors), max(args.factors)
        for factor in sorted({*args.factors}):
            model = rescale_channels(copy.deepcopy(dense), args.n_channels, factor)
            models = {"dense": copy.deepcopy(model)}
            for method, by in PRUNED.items():
                models[method] = prune_model(copy.deepcopy(model), texts, method, by, args.sparsity)
            table.append({"factor": factor, "largest norm / median": largest_norm(model, texts)})
            for method, pruned in models.items():
                now = utils.window_losses(pack_linears(pruned), text.valid, args.n_windows)
                losses[method, factor] = now
                is_dense = method == "dense"
                figures = utils.loss_figures(
                    now, None if is_dense and factor == first else losses["dense", first]
                )
                table[-1][method] = figures.get("loss_difference", 0.0)
                if factor in (first, last):
                    name = f"dense, x{factor}" if is_dense else f"{method} by {PRUNED[method]}, x{factor}"
                    figures |= {} if is_dense else {"same_output": "approximate"}
                    figures |= {"largest_norm": table[-1]["largest norm / median"]} if is_dense else {}
                    report.row(name, baseline=is_dense and factor == first, **figures)
        title = f"Rise of the loss at {args.sparsity:.0%} zeros"
        report.sweep(title, table)
        for method, what in (("dense", "leave the loss as it was"), ("Wanda", "change nothing for Wanda")):
            off = torch.stack([losses[method, row["factor"]] - losses[method, first] for row in table])
            report.check_close(
                f"larger channels {what}", off, torch.zeros_like(off), utils.TOLERANCE[args.dtype]
            )
        for factor in dict.fromkeys((first, last)):
            pair = utils.loss_difference(losses["magnitude", factor], losses["Wanda", factor])
            report.why(words.loss_between(f"magnitude with channels {factor} times as large", "Wanda", *pair))
        for method in ("magnitude", "SparseGPT"):
            pair = utils.loss_difference(losses[method, last], losses[method, first])
            report.why(
                words.loss_between(
                    f"{method} with channels {last} times as large", f"{method} with {first}", *pair
                )
            )
        report.plot_sweep(title, "rise of the loss (nats)", "x", list(PRUNED))
        report.finish()
