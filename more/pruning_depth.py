"""Pruning: whole blocks are taken out, and the depth of a model is weighed against its width.

Idea: a block adds to the residual stream, so the model still works without it. Two ways tell which block
matters least: the loss without it, or how far it turns the residual stream, from one reading of some text. A
shallower model has fewer operations in a row, a narrower one smaller ones: at equal parameters, which is
faster, and which learns to cope better in a short distillation?

Exact: a model without a block computes what the whole one does with that block adding zero. Approximate:
leaving it out, and what the distillation makes of the rest. Fewer blocks are fewer operations in a row, where
a narrower model has as many smaller ones: depth wins time wherever starting an operation costs, most of all
at batch 1. It loses quality where every block has learned something; after training with stochastic depth,
which skips late blocks at random, the late ones look cheaper than they are in other models. Judging blocks by
the loss takes an evaluation for each, by the cosine one pass.

Run: python more/pruning_depth.py

Source: Men et al., ShortGPT, 2024 (block influence); Muralidharan et al., Minitron, 2024 (depth and width).
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

import _root  # noqa: F401 (the files above become importable)
from gptlite_pruned import sum_over_text
from inference_utils import n_parameters, sample_prompts
from main_pruning import compute_importance, prune
from pruning_parts import channel_importance, prune_channels


def remove_blocks(model, layers):
    """Takes whole blocks out, in place; those that stay move up.

    Args: layers: numbers of the blocks. Returns: the same model. Raises ValueError for a number that no block
        has, or for all blocks, with the model untouched.
    """
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
        return (1 - F.cosine_similarity(x, out, dim=-1)).sum()

    windows = sample_prompts(data, n_windows, seqlen)  # [n, T]
    sums = sum_over_text(model, [(block, turn) for block in model.blocks], windows.split(8))
    return torch.stack(sums) / windows.numel()  # [L]


def narrow_to(model, n_wanted, heads, neurons, channels):
    """Narrower copies of a model, of about n_wanted parameters, to compare with fewer blocks.

    Args: heads, neurons, channels: importances, as compute_importance and channel_importance give them.
    Returns: a copy with fewer heads and neurons, and one with fewer channels. The embeddings shrink with the
        channels, so that of these a larger share stays.
    """
    H, n_neurons, E = model.blocks[0].mha.n_heads, model.blocks[0].ffwd.net[0].out_features, len(channels)
    n_gone = n_parameters(model) - n_wanted
    share = 1 - n_gone / n_parameters(model.blocks)
    fewer = prune(copy.deepcopy(model), heads, neurons, round(H * share), round(n_neurons * share))
    one_less = prune_channels(copy.deepcopy(model), channels, E - 1, exact=False)
    n_of_one = n_parameters(model) - n_parameters(one_less)  # parameters are linear in the channels
    return fewer, prune_channels(copy.deepcopy(model), channels, round(E - n_gone / n_of_one), exact=False)


if __name__ == "__main__":
    import inference_report as harness
    import inference_utils as utils
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_pruned import with_kv_cache
    from inference_training import distill
    from linear_packed import pack_linears
    from main_kvcache import generate_kvcache

    quick = {"blocks": 1, "steps": 2, "n_tokens": 16}
    parser = harness.options(__doc__, repeats=3, dtype=False, quick=quick, prompt_len=64, n_tokens=128)
    parser.add_argument("--steps", type=harness.positive_int, default=120, help="distillation steps of each")
    parser.add_argument("--blocks", type=int, default=2, help="blocks to remove, or as many parameters")
    with harness.script(parser) as args:
        text, state = harness.load_text(args), utils.load_checkpoint(args.checkpoint)
        model = harness.build(args, state, GPTlite, packed=False, dropout_p=0.0)
        p, n_blocks, L = utils.parameters_of(model), args.blocks, len(model.blocks)
        if not 1 <= n_blocks < L:
            raise ValueError(f"--blocks is 1 to {L - 1}, not {n_blocks}")
        batch_size, seqlen, n_batches = (2, 64, 1) if args.quick else (8, p.seqlen, 4)
        report = harness.Report(args, "depth", model, hide=["forward_tokens"], text=text, steps=args.steps)

        def losses_of(model, data=text.valid):
            return utils.window_losses(model, data, args.n_windows)  # [n_windows]

        def rise_without(layers):
            rise = utils.loss_difference(losses_of(remove_blocks(copy.deepcopy(model), layers)), base)
            return dict(zip(("rise of the validation loss", "+-"), rise, strict=True))

        # The choice is made on training text, the validation text judges it
        base, base_train, alone = losses_of(model), losses_of(model, text.train).mean(), []
        for layer, turn in enumerate(block_influence(model, text.train, 8 * n_batches, p.seqlen).tolist()):
            losses = losses_of(remove_blocks(copy.deepcopy(model), [layer]), text.train)  # [n_windows]
            row = {"block": layer, "1 - cosine": turn, "training loss": (losses.mean() - base_train).item()}
            alone.append(row | rise_without([layer]))
        report.sweep("Blocks removed one at a time: rise of the loss", alone)
        by_loss = sorted(range(L), key=lambda layer: alone[layer]["training loss"])
        by_cosine = sorted(range(L), key=lambda layer: alone[layer]["1 - cosine"])
        several = [by_loss[:n] for n in ([n_blocks] if args.quick else range(1, L))]
        together = [{"blocks": ", ".join(map(str, sorted(gone)))} | rise_without(gone) for gone in several]
        report.sweep("Blocks removed together, in the order of the training loss, not trained", together)

        # Depth against width: the same number of parameters, the same batches
        ways = remove_blocks, mask_blocks
        shallow, masked = (way(copy.deepcopy(model), by_loss[:n_blocks]) for way in ways)
        tokens = text.prompts(2, p.seqlen)  # [B, T]
        with torch.no_grad():
            report.check_close("blocks: logits of removed and of masked", shallow(tokens), masked(tokens))
        heads, neurons = compute_importance(model, text.train, n_batches, 8, p.seqlen)
        channels = channel_importance(model, text.train, 8 * n_batches, p.seqlen)  # [E]
        fewer, narrower = narrow_to(model, n_parameters(shallow), heads, neurons, channels)
        depth, others = f"{n_blocks} of {L} blocks cut", ("heads and neurons cut", "channels cut")
        students = {depth: shallow, others[0]: fewer, others[1]: narrower}
        counts = [n_parameters(student) for student in students.values()]
        report.check("parameters within 1% of each other", max(counts) <= 1.01 * min(counts))
        before = {name: losses_of(student) for name, student in students.items()}
        methods = [harness.Method("whole", generate_kvcache, pack_linears(with_kv_cache(model)))]
        for name, student in students.items():
            torch.manual_seed(args.seed)
            distill(student, model, text.train, args.steps, p.lr / 2, batch_size, seqlen)
            fast = pack_linears(with_kv_cache(student))
            methods.append(harness.Method(name, generate_kvcache, fast, exact=False))
        rows = report.compare(text.prompts(1, args.prompt_len), args.n_tokens, *methods, label="")
        for name, losses in before.items():
            figures = utils.loss_figures(losses, base) | {"n_parameters": rows[name]["n_parameters"]}
            report.row(f"{name}, not distilled", **figures)

        n_past = args.prompt_len + args.n_tokens // 2  # cached tokens in the middle of the run
        report.why_step({one.name: harness.step_cost(one.model, n_past) for one in methods}, rows)
        same = f"Loss and cosine agree on the order of the blocks, least important first: {by_loss}."
        differ = f"Least important first, the blocks are {by_loss} by loss and {by_cosine} by cosine."
        report.why(words.choose(by_loss == by_cosine, (True, same), differ))
        ends = {one.name: report.loss_of(one.model) for one in methods}  # [n_windows] each
        for other in others:
            rise = utils.loss_difference(ends[depth], ends[other])
            report.why(words.compare(rows[depth], rows[other]) + words.loss_between(depth, other, *rise))
        points = {name: (row["tpot_ms"], row["valid_loss"]) for name, row in rows.items() if row["tpot_ms"]}
        report.plot_points(points, "TPOT (ms)", "validation loss (nats)", "After the distillation")
        report.finish()
