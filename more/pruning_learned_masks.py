"""Pruning: which heads, neurons, channels and blocks stay is learned, together with the weights.

Idea: every part gets a random mask between 0 and 1, and how likely it is open is a parameter. The loss and
the expected number of parameters can be differentiated by it, so training decides what stays, under a price
of size that rises until the model is small enough. Then masks become 0 or 1, what is closed is sliced out.

Exact: with all masks open nothing changes; what is sliced equals what masks of 0 and 1 leave. Approximate:
leaving parts out. Wins where parts matter together, which a score of each alone does not see, and chooses
the shape as well: blocks may differ in width. Loses steps to the search, in which the whole model runs, with
noise in it, while a model that was cut by scores trains already.

Run: python more/pruning_learned_masks.py

Source: Louizos, Welling and Kingma, Learning Sparse Neural Networks through L0 Regularization, 2018 (the
distribution); Xia et al., CoFi, 2022 (one target for all parts); Xia et al., Sheared LLaMA, 2023.
"""

from contextlib import contextmanager

import torch
import torch.nn.functional as F
from tqdm import tqdm

import _root  # noqa: F401 (the files above become importable)
from data.shakespeare import get_batch
from inference_training import autocast, learning_rate, make_optimizer, optimizer_step
from inference_utils import first_of, n_parameters
from main_distillation import distillation_loss
from main_pruning import prune_heads, prune_linear
from pruning_depth import remove_blocks
from pruning_parts import prune_channels

BETA, LOW, HIGH = 2 / 3, -0.1, 1.1  # temperature of the distribution, and what it is stretched to


def hard_concrete(log_alpha, uniform):
    """A mask from a uniform random number in [0, 1): a stretched sigmoid, cut off at 0 and 1. All [...]."""
    s = torch.sigmoid((uniform.log() - (-uniform).log1p() + log_alpha) / BETA)  # in [0, 1]
    return (s * (HIGH - LOW) + LOW).clamp(0, 1)


def open_probability(log_alpha):
    """P(mask != 0), in closed form."""
    return torch.sigmoid(log_alpha - BETA * torch.tensor(-LOW / HIGH).log())


def mask_shapes(model):
    """{axis: shape of its masks}: a head, neuron, channel or block each."""
    block, L = model.blocks[0], len(model.blocks)
    units = {"heads": [L, block.mha.n_heads], "neurons": [L, block.ffwd.net[0].out_features]}
    return units | {"channels": [model.ln.weight.numel()], "blocks": [L]}


def size_of(model, masks):
    """How many parameters a GPTlite has after slice_out(model, masks); a scalar.

    Of the masks' probabilities of being open: how many on average, since they are drawn independently.
    """
    V, D = model.fc_out.out_features, model.blocks[0].mha.d_head
    heads, neurons, channels = (masks[axis].sum(dim=-1) for axis in ("heads", "neurons", "channels"))
    attention = heads * D * (4 * channels + 3)  # [L]: four matrices, three biases
    feed_forward = neurons * (2 * channels + 1)  # [L]
    blocks = masks["blocks"] * (attention + feed_forward + 6 * channels)  # [L]: two norms, two biases of E
    return channels * (2 * V + model.seqlen + 2) + V + blocks.sum()


@contextmanager
def masked(model, masks):
    """with masked(model, masks): each part's output is multiplied by its mask; slice_out's naive twin."""

    def scale_output(mask):
        return lambda _module, _inputs, out: out * mask.to(out)

    def scale_input(mask):
        return lambda _module, inputs: (inputs[0] * mask.to(inputs[0]),)

    channels, hooks = masks["channels"], []  # [E]
    for module in (model.token_embedding, model.position_embedding, model.ln):
        hooks.append(module.register_forward_hook(scale_output(channels)))
    for layer, block in enumerate(model.blocks):
        heads = masks["heads"][layer].repeat_interleave(block.mha.d_head)  # [H*D]
        for norm, linear, units in (
            (block.ln1, block.mha.out_proj, heads),
            (block.ln2, block.ffwd.net[2], masks["neurons"][layer]),
        ):
            written = channels * masks["blocks"][layer]  # [E]
            hooks.append(norm.register_forward_hook(scale_output(channels)))
            hooks.append(linear.register_forward_pre_hook(scale_input(units)))
            hooks.append(linear.register_forward_hook(scale_output(written)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def learn_masks(
    model, teacher, train_data, n_wanted, iters, lr, batch_size, seqlen, mask_lr=0.2, price_lr=(5.0, 100.0)
):
    """Trains a mask for every part together with the weights, until the expected size is n_wanted.

    Minimises KL(teacher || masked model) + p1 * d + p2 * d^2 over masks and weights and maximises it over the
    prices p1 and p2, where d is the share of the model that is too much. What is wanted falls from the whole
    size to n_wanted in the first half of the steps.
    Args: model: is changed; the others as in distill; mask_lr: Adam's, of log alpha; price_lr: of p1 and p2.
    Returns: {axis: log alpha}, and of every step (wanted size, expected size).
    """
    device, n_whole, curve = next(model.parameters()).device, n_parameters(model), []
    log_alpha = {axis: torch.full(shape, 3.0, device=device) for axis, shape in mask_shapes(model).items()}
    weights = make_optimizer(model, lr)
    gates = torch.optim.Adam([log.requires_grad_() for log in log_alpha.values()], mask_lr)
    prices, price_lr = torch.zeros(2, device=device), torch.tensor(price_lr, device=device)
    generator = torch.Generator().manual_seed(torch.randint(2**62, ()).item())
    teacher.eval()
    model.train()
    for step in (bar := tqdm(range(iters), desc="masks", leave=False, disable=None)):
        x = get_batch(train_data, batch_size, seqlen, generator)[0].to(device)  # [B, T]
        uniform = {axis: torch.rand(log.shape, generator=generator) for axis, log in log_alpha.items()}
        masks = {axis: hard_concrete(log, uniform[axis].to(device)) for axis, log in log_alpha.items()}
        with autocast(device):
            with torch.no_grad():
                target = first_of(teacher(x))  # [B, T, V]
            with masked(model, masks):
                logits = first_of(model(x))  # [B, T, V]
        loss = distillation_loss(logits.float(), target.float(), 1)
        expected = size_of(model, {axis: open_probability(log) for axis, log in log_alpha.items()})
        wanted = n_whole + (n_wanted - n_whole) * min(2 * (step + 1) / iters, 1)
        paid = torch.stack([d := (expected - wanted) / n_whole, d.square()])  # [2]: the prices' gradient too
        gates.zero_grad()
        now = learning_rate((step + 1) / iters, lr, min(20 / iters, 0.5), floor=0.1)
        optimizer_step(model, weights, loss + (prices * paid).sum(), now)
        gates.step()
        prices += price_lr * paid.detach()  # ascent
        curve.append((wanted, expected.item()))
        bar.set_postfix_str(f"loss {loss.item():.3f}, {expected.item() / 1e6:.2f} M parameters")
    model.eval()
    return {axis: log.detach() for axis, log in log_alpha.items()}, curve


def harden(model, log_alpha, n_wanted):
    """Masks of 0 and 1: the parts that are likeliest open, as many as fit into n_wanted parameters.

    At least a block and a channel stay, and a head and a neuron of each block that stays. Returns: {axis:
    float64 [...]} on the CPU. Raises ValueError where not even these fit.
    """
    scores = {axis: log.detach().cpu().double() for axis, log in log_alpha.items()}
    masks = {axis: F.one_hot(one.argmax(-1), one.shape[-1]).double() for axis, one in scores.items()}
    if size_of(model, masks) > n_wanted:
        raise ValueError(f"{n_wanted} parameters are less than one part of each kind has")

    def open_if_it_fits(axis, i):
        flat, before = masks[axis].view(-1), masks[axis].view(-1)[i].item()
        flat[i] = 1.0
        if size_of(model, masks) > n_wanted:
            flat[i] = before

    for layer in scores.pop("blocks").argsort(descending=True).tolist():
        most = {axis: torch.ones_like(mask) for axis, mask in masks.items()} | {"blocks": masks["blocks"]}
        if open_probability(log_alpha["blocks"][layer]) > 0.5 or size_of(model, most) < n_wanted:
            open_if_it_fits("blocks", layer)
    parts = [(x, axis, i) for axis, score in scores.items() for i, x in enumerate(score.flatten().tolist())]
    for _, axis, i in sorted(parts, reverse=True):
        open_if_it_fits(axis, i)
    return masks | {axis: masks[axis] * masks["blocks"][:, None] for axis in ("heads", "neurons")}


def slice_out(model, masks):
    """Slices out, in place, what masks of 0 and 1 close; equal to masked(model, masks). Returns the model."""
    for layer in masks["blocks"].nonzero()[:, 0].tolist():
        block, neurons = model.blocks[layer], masks["neurons"][layer].bool()
        prune_heads(block.mha, masks["heads"][layer].nonzero()[:, 0])
        block.ffwd.net[0] = prune_linear(block.ffwd.net[0], rows=neurons)
        block.ffwd.net[2] = prune_linear(block.ffwd.net[2], columns=neurons)
    remove_blocks(model, (masks["blocks"] == 0).nonzero()[:, 0].tolist())
    return prune_channels(model, masks["channels"], int(masks["channels"].sum()))


if __name__ == "__main__":
    import copy

    import inference_report as harness
    import inference_utils as utils
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_pruned import with_kv_cache
    from inference_training import distill, use_training_attention
    from linear_packed import pack_linears
    from main_kvcache import generate_kvcache
    from main_pruning import compute_importance, prune

    quick = {"steps": 4, "n_tokens": 16}
    parser = harness.options(__doc__, repeats=3, dtype=False, quick=quick, prompt_len=64, n_tokens=128)
    parser.add_argument("--steps", type=harness.positive_int, default=240, help="training steps of each way")
    parser.add_argument("--keep", type=harness.share, default=0.5, help="share of the parameters to keep")
    with harness.script(parser) as args:
        text, state = harness.load_text(args), utils.load_checkpoint(args.checkpoint)
        teacher = harness.build(args, state, GPTlite, packed=False, dropout_p=0.0)
        p, n_whole = utils.parameters_of(teacher), n_parameters(use_training_attention(teacher))
        n_wanted, n_masked = round(args.keep * n_whole), max(args.steps // 2, 1)  # steps with masks
        batch, tokens = (2, 64) if args.quick else (8, p.seqlen), text.prompts(2, p.seqlen)  # [B, T]
        report = harness.Report(args, "learned masks", teacher, {}, ["same_output"], text, steps=args.steps)
        ones = {axis: torch.ones(shape, device=args.device) for axis, shape in mask_shapes(teacher).items()}
        n_heads = max(round(args.keep * p.n_heads), 1)  # of the other way: as many in all blocks
        some = ones | {"heads": ones["heads"][:, :n_heads], "neurons": ones["neurons"][:, :1]}
        n_neurons = 1 + round((n_wanted - size_of(teacher, some).item()) / p.n_layers / (2 * p.d_model + 1))
        torch.manual_seed(args.seed)
        scores = compute_importance(teacher, text.train, 4, 8, p.seqlen)
        by_score = prune(copy.deepcopy(teacher), *scores, n_heads, n_neurons)

        torch.manual_seed(args.seed)
        model = copy.deepcopy(teacher)
        log_alpha, curve = learn_masks(model, teacher, text.train, n_wanted, n_masked, p.lr / 2, *batch)
        masks = harden(model, log_alpha, n_wanted)
        with torch.no_grad():
            plain = teacher(tokens)  # [B, T, V]
            with masked(teacher, ones):
                same = torch.equal(teacher(tokens), plain)
            with masked(model, masks):
                logits = model(tokens)  # [B, T, V]
            report.check("all masks open: the model unchanged, bit for bit", same)
            report.check_close("logits of sliced and of masked", slice_out(model, masks)(tokens), logits)
        off = max(abs(n_parameters(student) / n_wanted - 1) for student in (model, by_score))
        report.check(f"sizes as wanted (off by {off:.2%}, at most 1%)", off <= 0.01)

        whole, names = pack_linears(with_kv_cache(teacher)), ("learned masks", "activation")
        methods, cuts = [harness.Method("whole", generate_kvcache, whole)], {}
        for name, student in zip(names, (model, by_score), strict=True):
            n_steps = args.steps - (n_masked if student is model else 0)
            cuts[name] = copy.deepcopy(student)
            torch.manual_seed(args.seed + 1)
            distill(student, teacher, text.train, n_steps, p.lr / 2, *batch, temperature=1)
            fast = pack_linears(with_kv_cache(student))
            methods.append(harness.Method(name, generate_kvcache, fast, exact=False))
        rows = report.compare(text.prompts(1, args.prompt_len), args.n_tokens, *methods, label="")
        for name, cut in cuts.items():
            report.row(f"{name}, as cut", n_parameters=n_parameters(cut), **report.loss_figures(cut, whole))
        counts = [masks[axis].sum(dim=-1).int().tolist() for axis in ("heads", "neurons")]  # [L] each
        kept = [{"block": i, "heads": h, "neurons": n} for i, (h, n) in enumerate(zip(*counts, strict=True))]
        report.sweep(f"What learned masks keep, in {masks['channels'].sum():.0f} channels", kept)

        n_past = args.prompt_len + args.n_tokens // 2  # cached tokens in the middle of the run
        report.why_step({one.name: harness.step_cost(one.model, n_past) for one in methods}, rows)
        report.why(words.compare(*(rows[name] for name in names)))
        for when, models in (("", [one.model for one in methods[1:]]), (", as cut", cuts.values())):
            rise = utils.loss_difference(*(report.loss_of(one) for one in models))
            report.why(words.loss_between(*(f"{name}{when}" for name in names), *rise))
        sizes = zip(("wanted", "expected"), zip(*curve, strict=True), strict=True)
        lines = {name: (range(1, n_masked + 1), values) for name, values in sizes}
        report.plot_lines(lines, "step with masks", "parameters", "The size while masks are learned")
        report.finish()
