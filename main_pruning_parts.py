"""Pruning: the width of a transformer: neurons, heads, and channels of the residual stream.

Idea: besides neurons and heads (main_pruning.py), channels of the residual stream can go: a column of every
matrix that reads it, a row of every one that writes it. They need care, since layer norm averages over them:
cut plainly it divides by the channels that are left; keeping the whole model's divisor makes the cut exact.

Exact: neurons, heads, and channels with the whole model's divisor equal the whole model with these parts set
to zero. Approximate: leaving them out, and layer norm over the channels that are left.

Run: python main_pruning_parts.py

Source: Muralidharan et al., Compact Language Models via Pruning and Knowledge Distillation (Minitron), 2024.
"""

import copy

import torch
import torch.nn as nn

from inference_utils import sample_prompts
from main_pruning import keep_largest, mean_over_text, prune_linear


class LayerNorm_Pruned(nn.LayerNorm):
    """Layer norm over n_full channels of which only some are stored: the others are zero, and counted.

    [..., channels that stay] -> the same; equal to what the layer norm of all channels gives these.
    """

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # the squares are too large for float16
        mean = wide.sum(dim=-1, keepdim=True) / self.n_full  # [..., 1]
        zeros = self.n_full - x.shape[-1]  # each lies mean away from the mean
        squares = (wide - mean).square().sum(dim=-1, keepdim=True) + zeros * mean.square()  # [..., 1]
        normalised = (wide - mean) * torch.rsqrt(squares / self.n_full + self.eps)  # [..., channels]
        return normalised.to(x) * self.weight + self.bias


def prune_layer_norm(norm, channels, exact=True):
    """A layer norm of some channels: with the divisor of all of them (exact), or of those that are left."""
    pruned = (LayerNorm_Pruned if exact else nn.LayerNorm)(len(channels), eps=norm.eps)
    if exact:  # part of the state, so that no model without it takes the weights
        n_full = getattr(norm, "n_full", norm.weight.numel())
        pruned.register_buffer("n_full", torch.as_tensor(n_full, device=norm.weight.device))
    pruned.weight = nn.Parameter(norm.weight.detach()[channels].clone())
    pruned.bias = nn.Parameter(norm.bias.detach()[channels].clone())
    return pruned.train(norm.training)


def prune_embedding(embedding, channels):
    """An embedding with some of its columns."""
    return nn.Embedding.from_pretrained(embedding.weight.detach()[:, channels].clone(), freeze=False)


def prune_channels(model, importance, n_channels, exact=True):
    """Keeps the n_channels most important channels of the residual stream, in place.

    Args: importance [E]; exact: layer norms keep dividing by all channels, so that the result equals the
        whole model's with these channels set to zero; False makes them plain layer norms. Heads and
        neurons stay as many as they were.
    Returns: the same model, smaller. Raises ValueError for a number out of range, or importances of another
        number of channels.
    """
    if len(importance) != model.ln.weight.numel():
        raise ValueError(f"{len(importance)} channels were weighed, the model has {model.ln.weight.numel()}")
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


def channel_importance(model, data, n_windows, seqlen):
    """Mean size of what each channel gives its readers, summed over the layer norms: [E].

    Args: data: token ids [N], of which n_windows windows of seqlen tokens are read.
    """

    def sizes(_x, out):
        return out.abs().sum(dim=(0, 1))  # [E]

    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    windows = sample_prompts(data, n_windows, seqlen)  # [n, T]
    return torch.stack(mean_over_text(model, [(norm, sizes) for norm in norms], windows)).sum(dim=0)


if __name__ == "__main__":
    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from main_pruning import compute_importance, mask, prune
    from pruning_report import DECODE_COLUMNS, decode_rows

    parser = rep.options(__doc__, repeats=3)
    with rep.script(parser) as args:
        p, dev, quick = get_gptlite_model_parameters(), args.device, args.quick
        W, H, E, F = p.seqlen, p.n_heads, p.d_model, 4 * p.d_model
        n_windows, n_texts, n_tokens = (4, 8, 16) if quick else (32, 32, 128)
        shares = [2 / H] if quick else [1 / H, 2 / H, 3 / H]  # removed of every layer, in whole heads
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        model = utils.load_model(GPTlite, vocab_size, args.checkpoint, dropout_p=0.0).to(dev)
        heads, neurons = compute_importance(model, train_data, n_texts // 8, 8, W)
        channels = channel_importance(model, train_data, n_texts, W)

        def cut(what, share, masked=False):
            """The model without a share of one kind of part, sliced out or set to zero."""
            student = copy.deepcopy(model)
            n_heads, n_neurons, n_channels = (round(n * (1 - share)) for n in (H, F, E))
            if what == "heads":
                return (mask if masked else prune)(student, heads, neurons, n_heads, F)
            if what == "neurons":
                return (mask if masked else prune)(student, heads, neurons, H, n_neurons)
            if masked:
                return mask_channels(student, channels, n_channels)
            return prune_channels(student, channels, n_channels, exact=what == "channels, exact")

        config = {"batch_size": 1, "prompt_len": 64, "n_tokens": n_tokens, "n_texts": n_texts}
        report = rep.Report(args, "what can be narrower", model, DECODE_COLUMNS, **config)
        for key in ("tpot_p99_ms", "forward_tokens", "same_output"):  # no news here: left out of the table
            report.columns.pop(key)

        # Sliced is masked, and what each kind of part costs without training
        tokens = utils.sample_prompts(valid_data, 2, W).to(dev)  # [B, T]
        base = utils.validation_loss(model, valid_data, n_windows)
        students, sweep, off = {"whole": model}, [], {}
        for what in ("neurons", "heads", "channels, exact", "channels, plain"):
            for share in shares:
                student = cut(what, share)
                row = {"part": what, "removed": f"{share:.0%}", "parameters": utils.n_parameters(student)}
                loss = utils.validation_loss(student, valid_data, n_windows)
                sweep.append(row | {"rise of the loss": loss - base})
            students[what] = cut(what, 2 / H)
            with torch.no_grad():
                masked = cut(what, 2 / H, masked=True)(tokens)  # [B, T, V]
                off[what] = utils.largest_difference(students[what](tokens), masked)
            if what != "channels, plain":
                name = f"{what}: sliced is masked, logits differ by {off[what]:.0e}, at most 1e-04"
                report.check(name, off[what] <= 1e-4)
        report.sweep("Parts removed of every layer, not trained", sweep)
        prompt = utils.sample_prompts(valid_data, 1, 64).to(dev)  # [1, T]
        timed, rise = decode_rows(students, prompt, n_tokens, args.repeats, args.dtype), {}
        for name, student in students.items():
            loss = utils.validation_loss(student, valid_data, n_windows)
            rise[name] = loss - base
            report.row(
                name if student is model else f"{2 / H:.0%} of the {name}",
                baseline=student is model,
                n_parameters=utils.n_parameters(student),
                valid_loss=loss,
                **timed[name],
            )

        left = round(E * (1 - 2 / H))
        report.why(
            f"Layer norm over {left} stored channels instead of {E} with {E - left} zeros divides by other "
            f"means and variances: logits move by up to {off['channels, plain']:.2f}, the loss rises by "
            f"{rise['channels, plain']:+.3f} instead of {rise['channels, exact']:+.3f} nats, untrained. "
            "Every block reads and writes every channel, so one that is missing is missing everywhere."
        )
        costs = []
        for name in ("neurons", "heads", "channels, plain"):
            millions = (utils.n_parameters(model) - utils.n_parameters(students[name])) / 1e6
            costs.append(f"{name} {rise[name] / millions:.3f} ({millions:.2f} M for {rise[name]:+.3f})")
        report.why(f"Nats for a million parameters that go, untrained: {'; '.join(costs)}.")
        steps = [
            f"{name} {row['step_mb']:.1f} MB ({row['of_limit']:.0%} of the limit)"
            for name, row in timed.items()
        ]
        report.why(
            f"A step reads, with 2 operations for every number of {args.dtype.itemsize} bytes: "
            f"{'; '.join(steps)}. Channels make every matrix narrower and leave the cache; heads take their "
            "cache along; neurons touch two matrices of a block alone."
        )
        if args.plot:
            figure, axes = rep.new_figure()
            for what in list(students)[1:]:
                points = [
                    (row["parameters"], row["rise of the loss"]) for row in sweep if row["part"] == what
                ]
                x, y = zip((utils.n_parameters(model), 0.0), *points, strict=True)
                axes.plot([n / 1e6 for n in x], y, marker=".", label=what)
            axes.set(xlabel="parameters (millions)", ylabel="rise of the validation loss (nats)")
            axes.set_title("What can be narrower, and what it costs untrained")
            axes.legend()
            rep.save_figure(figure, args.plot)
        report.finish()
