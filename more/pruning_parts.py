"""Pruning: the width of a transformer: neurons, heads, and channels of the residual stream.

Idea: besides neurons and heads (main_pruning.py), channels of the residual stream can go: a column of every
matrix that reads it, a row of every one that writes it. They need care, since layer norm averages over them:
cut plainly it divides by the channels that are left; keeping the whole model's divisor makes the cut exact.

Exact: neurons, heads, and channels with the whole model's divisor equal the whole model with these parts set
to zero. Approximate: leaving them out, and layer norm over the channels that are left. Channels make every
matrix narrower and leave the cache as it is; heads take their cache along; neurons touch two matrices of a
block. Every block reads and writes every channel, so one that is missing is missing everywhere. No cut makes
a step shorter by more than the bytes that it saves: there are as many operations as before.

Run: python more/pruning_parts.py

Source: Muralidharan et al., Compact Language Models via Pruning and Knowledge Distillation (Minitron), 2024.
"""

import copy

import torch
import torch.nn as nn

import _root  # noqa: F401 (the files above become importable)
from gptlite_pruned import sum_over_text
from inference_utils import sample_prompts
from main_pruning import keep_largest, prune_linear


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
    sums = sum_over_text(model, [(norm, sizes) for norm in norms], windows.split(8))  # [E] each
    return torch.stack(sums).sum(dim=0) / windows.numel()


if __name__ == "__main__":
    import inference_report as harness
    import inference_utils as utils
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_pruned import with_kv_cache
    from linear_packed import pack_linears
    from main_kvcache import generate_kvcache
    from main_pruning import compute_importance, mask, prune

    parser = harness.options(__doc__, repeats=3, quick={"n_tokens": 16}, prompt_len=64, n_tokens=128)
    with harness.script(parser) as args:
        text = harness.load_text(args)
        (model,) = harness.load_models(args, GPTlite, packed=False)
        p, n_whole = utils.parameters_of(model), utils.n_parameters(model)
        sizes = p.n_heads, 4 * p.d_model, p.d_model
        heads, neurons = compute_importance(model, text.train, 4, 8, p.seqlen)
        channels = channel_importance(model, text.train, 32, p.seqlen)
        report = harness.Report(args, "what can be narrower", model, hide=["forward_tokens"], text=text)

        def cut(part, share, masked=False):
            """The model without a share of one kind of part, sliced out or set to zero."""
            student = copy.deepcopy(model)
            n_heads, n_neurons, n_channels = (round(n * (1 - share)) for n in sizes)
            if part.startswith("channels"):
                if masked:
                    return mask_channels(student, channels, n_channels)
                return prune_channels(student, channels, n_channels, exact=part == "channels (exact)")
            n_heads, n_neurons = (n_heads, sizes[1]) if part == "heads" else (sizes[0], n_neurons)
            return (mask if masked else prune)(student, heads, neurons, n_heads, n_neurons)

        shares, third = [1 / 3] if args.quick else [1 / 6, 1 / 3, 1 / 2], "1/3 of the "
        parts = ("neurons", "heads", "channels (exact)", "channels (plain)")
        students = {"whole": model} | {third + part: cut(part, 1 / 3) for part in parts}
        tokens, methods = text.prompts(2, p.seqlen), []  # [B, T]
        for name, student in students.items():
            fast = pack_linears(with_kv_cache(student))
            methods.append(harness.Method(name, generate_kvcache, fast, exact=student is model))
        with torch.no_grad():
            for part in parts[:3]:
                sliced, masked = students[third + part](tokens), cut(part, 1 / 3, masked=True)(tokens)
                report.check_close(f"{part}: logits of sliced and of masked", sliced, masked)  # [B, T, V]
        rows = report.compare(text.prompts(1, args.prompt_len), args.n_tokens, *methods, label="")
        whole, *losses = (report.loss_of(one.model) for one in methods)  # [n_windows] each
        left = rows["whole"]["kv_bytes_per_token"] * round(p.n_heads * 2 / 3) // p.n_heads
        report.check("the cache shrinks as the heads do", rows[third + "heads"]["kv_bytes_per_token"] == left)
        title, sweep, lines = "Parts removed of every block, not trained", [], {}
        for part in parts:
            points = [(n_whole, 0.0)]
            for share in shares:
                student = cut(part, share)
                row = utils.loss_figures(utils.window_losses(student, text.valid, args.n_windows), whole)
                points.append((utils.n_parameters(student), row["loss_difference"]))
                row = {"rise of the loss": row["loss_difference"], "+-": row["loss_difference_se"]}
                sweep.append({"part": part, "removed": f"{share:.0%}", "parameters": points[-1][0]} | row)
            lines[part] = tuple(zip(*points, strict=True))
        report.sweep(title, sweep)
        report.plot_lines(lines, "parameters", "rise of the validation loss (nats)", title)

        n_past, shown = args.prompt_len + args.n_tokens // 2, methods[:3] + methods[4:]  # half of the tokens
        report.why_step({one.name: harness.step_cost(one.model, n_past) for one in shown}, rows)
        difference = utils.loss_difference(losses[3], losses[2])
        report.why(words.loss_between(third + parts[3], third + parts[2], *difference))
        cost = {}  # of a million parameters that go: nats, and their standard error
        for part in parts:
            row = rows[third + part]
            gone = (n_whole - row["n_parameters"]) / 1e6
            cost[part] = [row[key] / gone for key in ("loss_difference", "loss_difference_se")]
        for part in ("heads", "channels (plain)"):
            (one, one_se), (other, other_se) = cost[part], cost["neurons"]
            pair = f"that of the neurons ({one:.3f} nats a million parameters against {other:.3f})"
            report.why(
                words.choose(
                    (one - other) / max(one_se + other_se, 1e-9),
                    (2, f"For what it saves, the cut of the {part} costs more than {pair}."),
                    (-2, f"For what it saves, the cut of the {part} costs as much as {pair}."),
                    f"For what it saves, the cut of the {part} costs less than {pair}.",
                )
            )
        report.finish()
