"""Zeros behind the ReLU: a token needs only those columns of the second product whose neurons fired.

Idea: a neuron whose ReLU gives zero adds nothing, whatever its weights are. So the second product of an MLP
can gather the weights of the neurons that fired and add these rows alone: a decode step then reads a share of
the matrix. How large a share is a matter of the model; it is counted here by layer. Neurons that never fired
in all of the calibration texts can be cut for good.

Gathering is exact up to the order of the sum; cutting is approximate, as another text may need a neuron. Wins
where a row of the batch uses few neurons and the matrix is large against the bookkeeping of finding them.
Loses with every row that joins the batch, since other rows use other neurons, and cannot stand in a graph of
fixed shapes.
Models with smooth activations (GELU, SwiGLU) have no zeros to skip. Knowing before the first product which
neurons will fire needs a predictor, which is left out here.

Run: python more/relu_sparsity.py

Source: Liu et al., Deja Vu: Contextual Sparsity for Efficient LLMs at Inference Time, 2023; Mirzadeh et al.,
ReLU Strikes Back, 2023.
"""

import torch
import torch.nn.functional as F
from torch import nn

import _root  # noqa: F401 (the files above become importable)


def gather_by_token(h, rows, bias):
    """The naive twin: h [N, F] behind the ReLU, rows [F, E] of the transposed weight, bias [E] -> [N, E]."""
    return torch.stack([one[one != 0] @ rows[one != 0] + bias for one in h])


def gather_rows(h, rows, bias):
    """The same in one call: the rows of the neurons that fired, each times what its neuron gives, are added.

    Args: h [N, F]: behind the ReLU; rows [F, E]: weights of the second product, one row a neuron; bias [E].
    Returns: [N, E]. A token without any neuron gets the bias; a NaN counts as fired.
    """
    token, neuron = h.nonzero(as_tuple=True)  # of each that fired, in the order of the tokens
    start = torch.searchsorted(token, torch.arange(len(h), device=h.device))  # [N]: where a token's begin
    return F.embedding_bag(neuron, rows, start, mode="sum", per_sample_weights=h[token, neuron]) + bias


class GatheredLinear(nn.Module):
    """A linear layer behind a ReLU that reads the weights of neurons that fired: [..., F] -> [..., E]."""

    def __init__(self, linear):
        super().__init__()
        self.rows = nn.Parameter(linear.weight.detach().t().contiguous(), requires_grad=False)  # [F, E]
        self.bias = linear.bias

    def forward(self, h):
        return gather_rows(h.flatten(0, -2), self.rows, self.bias).view(*h.shape[:-1], -1)


def use_gathered(model):
    """Makes the MLPs of a GPTlite gather, in place, before linear layers are packed; returns the model."""
    for block in model.blocks:
        block.ffwd.net[2] = GatheredLinear(block.ffwd.net[2])
    return model


@torch.no_grad()
def fired(model, tokens, batch_size=8):
    """Which neurons fire: token ids [N, T] -> bool [L, N, T, F]."""
    kept = [[] for _ in model.blocks]
    hooks = [
        block.ffwd.net[1].register_forward_hook(lambda _module, _args, h, kept=kept[i]: kept.append(h != 0))
        for i, block in enumerate(model.blocks)
    ]
    for batch in tokens.split(batch_size):
        model(batch)
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.cat(layer) for layer in kept])


@torch.no_grad()
def cut_neurons(model, used):
    """Leaves the MLPs of a GPTlite the neurons that are used, in place; returns the model.

    Args: used: bool [L, F], at least one a layer. The rest of the model stays as it is.
    """
    for block, keep in zip(model.blocks, used, strict=True):
        first, second = block.ffwd.net[0], block.ffwd.net[2]
        first.weight, first.bias = nn.Parameter(first.weight[keep]), nn.Parameter(first.bias[keep])
        second.weight = nn.Parameter(second.weight[:, keep])
        first.out_features = second.in_features = int(keep.sum())
    return model


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import GPTlite_KVCache
    from inference_agreement import COLUMNS, agreement
    from inference_report import Method
    from linear_packed import pack_linears
    from main_kvcache import generate_kvcache

    widths = [384 * 2**i for i in range(5)]
    quick = {"n_texts": 4, "n_tokens": 8, "max_width": 768, "batch_size": 2}
    parser = harness.options(__doc__, 3, quick=quick, batch_size=8, prompt_len=64, n_tokens=64)
    add = parser.add_argument
    add("--n-texts", type=harness.positive_int, default=32, help="texts that neurons are counted on")
    add("--max-width", type=int, choices=widths[1:], default=widths[3], help="widest MLP that is timed alone")
    with harness.script(parser) as args:
        text, device = harness.load_text(args), args.device
        load = partial(harness.load_models, args, GPTlite_KVCache)
        (dense,), (gathering,), (cut,) = load(), load(packed=False), load(packed=False)
        W = dense.seqlen
        hide = ("tpot_p99_ms", "kv_bytes_per_token", "forward_tokens")
        report = harness.Report(args, "zeros behind the ReLU", dense, COLUMNS, hide, text)
        seen, group = fired(dense, text.prompts(args.n_texts, W, "train")), args.batch_size  # [L, N, T, F]
        used = seen.flatten(1, 2).any(dim=1)  # [L, F]

        # Which neurons a token needs, by layer
        layers, n = [], seen.shape[-1]
        groups = seen[:, : args.n_texts // group * group].unflatten(1, (-1, group))
        for i in range(len(seen)):
            active = seen[i].sum(dim=-1).flatten().double()  # [N * T]
            line = {"layer": i, "zeros (%)": 100 * (1 - active.mean().item() / n)}
            line |= {"neurons of a token": active.mean().item(), "of 95%": active.quantile(0.95).item()}
            if groups.numel():
                line[f"of {group} rows (%)"] = 100 * groups[i].any(dim=1).float().mean().item()
            layers.append(line | {"never fired": int((~used[i]).sum())})
        report.sweep(f"Neurons that fire, of {n}, over {seen[0, :, :, 0].numel()} tokens", layers)

        # In GPTlite, all other linear layers packed alike
        gathering = pack_linears(use_gathered(gathering))
        cut = pack_linears(cut_neurons(cut, used | (used.sum(dim=1, keepdim=True) == 0)))
        texts, tables = text.prompts(2 if args.quick else 16, W), {}
        figures = agreement(cut, dense, texts)
        for B in sorted({1, args.batch_size}):
            tables[B] = report.compare(
                text.prompts(B, args.prompt_len),
                args.n_tokens,
                Method("dense", generate_kvcache, dense),
                Method("gathered", generate_kvcache, gathering),
                Method("never fired: cut", generate_kvcache, cut, exact=False, **figures),
            )
        tokens = texts[:1]
        with torch.no_grad():
            report.check_close("gathered and dense logits", gathering(tokens)[0], dense(tokens)[0])

        # The second product alone, one row, with this model's share of zeros
        share = (seen.sum() / seen.numel()).item()

        def products(width):
            second = nn.Linear(4 * width, width).to(device, args.dtype).requires_grad_(False)
            h = torch.rand(1, 4 * width, device=device).to(args.dtype)
            h[:, torch.randperm(4 * width, device=device)[int(share * 4 * width) :]] = 0.0
            return {"dense": partial(second, h), "gathered": partial(GatheredLinear(second), h)}

        title = f"Second product of an MLP for one row, {share:.1%} of the neurons fire (ms)"
        times = report.time_sweep(title, "width", widths[: widths.index(args.max_width) + 1], products)
        for B, table in tables.items():
            report.why(words.about(f"batch {B}", words.compare(table["gathered"], table["dense"])))
        report.why(words.crossover(times, "width", "gathered", "dense"))
        report.why(words.loss(tables[1]["never fired: cut"]))
        report.plot_sweep(title)
        names = ("neurons of a token", "of 95%")
        counts = {name: (range(len(layers)), [line[name] for line in layers]) for name in names}
        report.plot_lines(counts, "layer", "neurons that fire")
        report.finish()
