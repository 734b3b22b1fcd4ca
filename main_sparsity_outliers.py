"""What Wanda is for: a model with outlier channels is pruned wrongly by the size of its weights.

Large language models have a few channels whose activations are many times larger than the others, read by
weights that magnitude pruning takes for unimportant. GPTlite has mild ones; this makes some large without
changing what it computes: channels behind the layer norms become larger and the weights that read them
smaller, by a power of two, which is exact. Magnitude then loses them; Wanda's product of weight and input
norm does not change at all, SparseGPT changes only by its damping. All pruning is approximate.

Run: python main_sparsity_outliers.py

Source: Dettmers et al., LLM.int8(), 2022 (outlier features); Sun et al., Wanda, 2023.
"""

import torch


@torch.no_grad()
def rescale_channels(model, n_channels, factor):
    """Makes n_channels channels behind every block's layer norms `factor` times as large; returns the model.

    The weights that read them become as much smaller, so the function stays: bit for bit for a power of two
    (but for float16's smallest numbers).
    Those of the largest scale are taken, which are large already.
    """
    for block in model.blocks:
        mha = block.mha
        attention = (mha.query_proj, mha.key_proj, mha.value_proj)
        for norm, readers in ((block.ln1, attention), (block.ln2, block.ffwd.net[:1])):
            channels = norm.weight.abs().topk(n_channels).indices  # [n_channels]
            norm.weight[channels] *= factor
            norm.bias[channels] *= factor
            for layer in readers:
                layer.weight[:, channels] /= factor
    return model


if __name__ == "__main__":
    import copy

    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from main_sparsity import input_squares, linear_layers, prune_model, sum_inputs

    parser = rep.options(__doc__, repeats=1)
    parser.add_argument("--n-channels", type=rep.positive_int, default=8, help="channels of each layer norm")
    with rep.script(parser) as args:
        p, dev, quick = get_gptlite_model_parameters(), args.device, args.quick
        if args.n_channels > p.d_model:
            raise ValueError(f"--n-channels {args.n_channels}: the model has {p.d_model}")
        factors, sparsity = [1, 32] if quick else [1, 2, 4, 8, 32, 128], 0.5
        n_texts, n_windows = (4, 6) if quick else (16, 24)
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        dense = utils.load_model(GPTlite, vocab_size, args.checkpoint).to(dev, args.dtype)
        texts = utils.sample_prompts(train_data, n_texts, p.seqlen).to(dev)  # [B, T]
        base, tolerance = utils.validation_loss(dense, valid_data, n_windows), utils.TOLERANCE[args.dtype]
        unseen = utils.sample_prompts(valid_data, n_texts, p.seqlen).to(dev)  # [B, T]
        squares = sum_inputs(linear_layers(dense.blocks), input_squares, lambda: dense(unseen))
        norms = torch.stack([s.sqrt() for n, s in squares.items() if n.endswith("net.0")])  # [L, E]
        spread = (norms.quantile(0.99, dim=-1) / norms.median(dim=-1).values).max()
        fired = torch.stack([s for n, s in squares.items() if n.endswith("net.2")]) > 0  # [L, 4E]
        columns = {"loss_rise": ("rise", "{:+.4f}"), "largest_norm": ("largest norm / median", "{:.1f}")}
        report = rep.Report(args, "pruning with outlier channels", dense, columns, n_texts=n_texts)
        report.columns.pop("same_output")
        rise, largest, worst = {}, {}, 0.0
        for factor in factors:
            model = rescale_channels(copy.deepcopy(dense), args.n_channels, factor)
            loss = utils.validation_loss(model, valid_data, n_windows)
            worst = max(worst, abs(loss - base))
            readers = {n: layer for n, layer in linear_layers(model.blocks).items() if n.endswith("net.0")}
            squares = sum_inputs(readers, input_squares, lambda model=model: model(texts))
            norms = torch.stack([s.sqrt() for s in squares.values()])  # [L, E]
            largest[factor] = (norms.amax(dim=-1) / norms.median(dim=-1).values).median().item()
            figures = {"loss_rise": loss - base, "largest_norm": largest[factor], "n_parameters": None}
            report.row(f"dense, x{factor}", baseline=factor == 1, valid_loss=loss, **figures)
            for method, by in (("magnitude", "layer"), ("Wanda", "row"), ("SparseGPT", "layer")):
                pruned = prune_model(copy.deepcopy(model), texts, method, by, sparsity)
                loss = utils.validation_loss(pruned, valid_data, n_windows)
                rise[method, factor] = loss - base
                figures = {"loss_rise": loss - base, "same_output": "approximate"}
                report.row(f"{method} by {by}, x{factor}", valid_loss=loss, **figures)
        last = factors[-1]
        report.check(f"larger channels leave the loss as it was (differs by {worst:.0e})", worst <= tolerance)
        off = max(abs(rise["Wanda", f] - rise["Wanda", 1]) for f in factors)
        report.check(f"larger channels change nothing for Wanda (differs by {off:.0e})", off <= tolerance)
        report.check("larger channels cost magnitude more", rise["magnitude", last] > rise["magnitude", 1])
        report.check("with them magnitude loses to Wanda", rise["magnitude", last] > rise["Wanda", last])

        lead = {f: rise["magnitude", f] - rise["Wanda", f] for f in factors}
        report.why(
            f"As trained, the largest input of an MLP is {largest[1]:.1f} times the median one (median of "
            f"the blocks), and at {sparsity:.0%} magnitude by layer costs {rise['magnitude', 1]:.4f} nats, "
            f"Wanda by row {rise['Wanda', 1]:.4f}: {lead[1]:.4f} between them. 99% of the channels are "
            f"at most {spread:.1f} times the median one. {(~fired).sum()} of {fired.numel()} MLP neurons "
            f"never fire on {unseen.numel()} unseen tokens, which their norms tell Wanda as well."
        )
        report.why(
            f"With {args.n_channels} of {p.d_model} channels {last} times as large, the weights that read "
            f"them are {last} times smaller and magnitude takes them first: {rise['magnitude', last]:.4f}. "
            f"Wanda sees weight times norm, the same number as before: {rise['Wanda', last]:.4f}, now "
            f"{lead[last]:.4f} better."
        )
        if rise["SparseGPT", last] != rise["SparseGPT", 1]:
            report.why(
                "SparseGPT is the same but for the damping, a share of the mean of all inputs' squares, "
                f"which the large ones raise: {rise['SparseGPT', 1]:+.4f} becomes "
                f"{rise['SparseGPT', last]:+.4f}."
            )
        if args.plot:
            figure, axes = rep.new_figure()
            for method in ("magnitude", "Wanda", "SparseGPT"):
                axes.plot(factors, [rise[method, f] for f in factors], marker="o", label=method)
            axes.set(xlabel=f"factor of {args.n_channels} of {p.d_model} channels", xscale="log")
            axes.set(ylabel="rise of the loss (nats)", title=f"{sparsity:.0%} zeros, the same function")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
