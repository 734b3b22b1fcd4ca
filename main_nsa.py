"""Native sparse attention (NSA): each query sees summaries of all blocks, a few whole blocks, and a window.

Three branches run side by side. Compression attends to the mean keys and values of blocks. Selection reads
every token of the few blocks that the compression gave most weight, always with the first block and the own.
The window reads the newest tokens. A gate of each head, a sigmoid of the layer's input, weighs the three
outputs. The choice itself has no gradient; what is chosen learns through the weights of the compression.

Approximate. Wins time on long texts: a step reads a summary for many tokens, and a fixed number of tokens
besides. Loses in a context as short as GPTlite's, where summaries and two sets of tokens are much of a text.
It is meant to be trained from the start; converted weights lose first, since their attention is no sum of
three. How much a few steps bring back is measured, beside a window that is trained on in the same way and a
control, the model unchanged after the same steps.

Run: python main_nsa.py            (--uptrain-steps 0 does not train on)

Source: Yuan et al., Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention, 2025.
There each branch has keys and values of its own and the summary is a small network; here the branches share
those of the trained weights and the summary is the mean.
"""

from collections import namedtuple
from functools import partial

import torch
import torch.nn as nn

from gptlite_gqa import grouped_attention, grouped_weights
from gptlite_kvcache import Block_KVCache, MultiHeadAttention_KVCache, window_mask
from gptlite_sparse import GPTlite_Sparse, attend_to, causal, for_heads, gather_rows, sum_of_group, top_mask

# block: tokens of a summary; stride: from one summary's first token to the next's; selection: tokens of a
# block that can be selected, n_selected of them; window: tokens
Sizes = namedtuple("Sizes", "block stride selection n_selected window")


def check_sizes(sizes):
    """Raises ValueError unless blocks are whole strides and the first and the own block can be selected."""
    block, stride, selection, n_selected, window = sizes
    if stride < 1 or window < 1 or block < 1 or selection < 1 or block % stride or selection % stride:
        raise ValueError(f"{sizes}: blocks must be multiples of the stride, and all sizes at least 1")
    if n_selected < 2:
        raise ValueError(f"{n_selected} selected blocks: the first and the own one are always among them")


def compress(x, sizes):
    """The mean of each complete block: keys or values [B, G, S, D] -> [B, G, n, D], n may be 0."""
    if x.shape[2] < sizes.block:
        return x[:, :, :0]
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.unfold(2, sizes.block, sizes.stride).mean(dim=-1, dtype=wide).to(x.dtype)


def shared_pieces(n, n_blocks, sizes, device=None):
    """How many pieces of one stride each of n summaries has in each block: float32 [n, n_blocks]."""
    first = torch.arange(n, device=device)[:, None]  # [n, 1]: the first piece of a summary
    begin = torch.arange(n_blocks, device=device) * (sizes.selection // sizes.stride)  # [n_blocks]
    end = (begin + sizes.selection // sizes.stride).minimum(first + sizes.block // sizes.stride)
    return (end - begin.maximum(first)).clamp(min=0).float()


@torch.no_grad()
def select_blocks(weights, n_groups, Sk, sizes):
    """The blocks that each query reads: those to whose summaries the heads of a group give most.

    Args: weights: of the compression [B, H, Sq, n], the last query belongs to key Sk - 1. The first and the
        own block are always read. Returns: bool [B, G, Sq, n_blocks].
    """
    Sq, n = weights.shape[-2:]
    blocks = torch.arange(-(-Sk // sizes.selection), device=weights.device)  # [n_blocks]
    own = torch.arange(Sk - Sq, Sk, device=weights.device)[:, None] // sizes.selection  # [Sq, 1]
    pieces = shared_pieces(n, len(blocks), sizes, weights.device).to(weights)
    importance = sum_of_group(weights, n_groups) @ pieces  # [B, G, Sq, n_blocks]
    importance = importance.masked_fill((blocks == 0) | (blocks == own), float("inf"))
    return top_mask(importance, sizes.n_selected, blocks <= own)


def branches(Q, K, V, sizes, dropout=None):
    """The outputs of the three branches by definition, under masks, and what the last two see.

    Args: Q [B, H, Sq, D]; K, V [B, G, Sk, D], the last query belongs to the last key.
    Returns: outputs [3, B, H, Sq, D], the first zero where no block is complete yet; weights of the
        compression [B, H, Sq, n]; bool [B, H, Sq, Sk] of the selection; bool [Sq, Sk] of the window.
    """
    check_sizes(sizes)
    (Sq, Sk), device = (Q.shape[2], K.shape[2]), Q.device
    means = compress(K, sizes), for_heads(compress(V, sizes), Q.shape[1])  # [B, G, n, D], [B, H, n, D]
    ends = torch.arange(means[0].shape[2], device=device) * sizes.stride + sizes.block - 1  # [n]
    complete = ends <= torch.arange(Sk - Sq, Sk, device=device)[:, None]  # [Sq, n]: no summary of the future
    weights = grouped_weights(Q, means[0], complete)  # [B, H, Sq, n]
    selected = select_blocks(weights, K.shape[1], Sk, sizes).repeat_interleave(sizes.selection, dim=-1)
    selected = for_heads(selected[..., :Sk] & causal(Sq, Sk, device), Q.shape[1])  # [B, H, Sq, Sk]
    window = window_mask(Sq, Sk, sizes.window, device)  # [Sq, Sk]
    outputs = [weights.to(V.dtype) @ means[1].to(V.dtype)]  # [B, H, Sq, D] each
    outputs += [attend_to(Q, K, V, visible, dropout) for visible in (selected, window)]
    return torch.stack(outputs), weights, selected, window


def nsa_attention(Q, K, V, gates, sizes, dropout=None):
    """NSA by definition: Q [B, H, Sq, D], K, V [B, G, Sk, D], gates [3, B, H, Sq, 1] -> [B, H, Sq, D]."""
    return (gates * branches(Q, K, V, sizes, dropout)[0]).sum(dim=0)


def nsa_step(q, K, V, means, gates, sizes):
    """The same for one query [B, H, 1, D], which reads summaries, selected blocks and window alone.

    Args: means: compress of K and of V [B, G, n, D], kept from step to step. Returns: [B, H, 1, D].
    """
    check_sizes(sizes)
    Sk, size = K.shape[2], sizes.selection
    weights = grouped_weights(q, means[0], causal_mask=False)  # [B, H, 1, n]; no row without any, n = 0 is 0
    out = weights.to(V.dtype) @ for_heads(means[1], q.shape[1])  # [B, H, 1, D]
    past = (Sk - 1) // size  # blocks in front of the own one
    chosen = select_blocks(weights, K.shape[1], Sk, sizes)[:, :, 0, :past]  # [B, G, past]
    index = chosen.nonzero()[:, 2].view(*chosen.shape[:2], -1)  # [B, G, k]: as many in each row
    selected = []
    for t in (K, V):
        blocks = t[:, :, : past * size].unflatten(2, (past, size))  # [B, G, past, size, D]
        selected.append(torch.cat([gather_rows(blocks, index).flatten(2, 3), t[:, :, past * size :]], dim=2))
    newest = K[:, :, -sizes.window :], V[:, :, -sizes.window :]
    outputs = [out, *(grouped_attention(q, *pair, causal_mask=False) for pair in (selected, newest))]
    return (gates * torch.stack(outputs)).sum(dim=0)


# ---- The model ----


class MultiHeadAttention_NSA(MultiHeadAttention_KVCache):
    """MultiHeadAttention_KVCache with NSA: the same keys and values for all branches, and gates."""

    def __init__(self, d_model, n_heads, d_head, dropout_p, sizes):
        check_sizes(sizes)
        super().__init__(d_model, n_heads, d_head, dropout_p)
        self.sizes, self.gate_proj = sizes, nn.Linear(d_model, 3 * n_heads)

    def forward(self, x, kv_cache=None, causal_mask=True, max_seqlen=None):
        Q, K, V = (self.split_heads(f(x)) for f in (self.query_proj, self.key_proj, self.value_proj))
        if kv_cache is not None:
            K, V = (torch.cat(pair, dim=2) for pair in zip(kv_cache, (K, V), strict=True))  # [B, H, Sk, D]
        gates = self.gate_proj(x).sigmoid().unflatten(-1, (3, -1)).permute(2, 0, 3, 1)  # [3, B, H, Sq]
        out = nsa_attention(Q, K, V, gates.unsqueeze(-1), self.sizes, self.dropout)  # [B, H, Sq, D]
        return self.dropout(self.out_proj(self.merge_heads(out))), (K, V)  # [B, Sq, E]


class Block_NSA(Block_KVCache):
    def __init__(self, *args, sizes):
        self.mha_class = partial(MultiHeadAttention_NSA, sizes=sizes)
        super().__init__(*args)


class GPTlite_NSA(GPTlite_Sparse):
    """GPTlite with NSA in all layers; its further weights are the gates'. Ends at the context."""

    def __init__(self, *args, sizes, **kwargs):
        self.block_class = partial(Block_NSA, sizes=sizes)
        super().__init__(*args, **kwargs)


def convert_mha_to_nsa(state_dict, d_head, gates=(0.1, 0.5, 0.5)):
    """Weights of GPTlite -> weights of GPTlite_NSA, whose gates are these for every input.

    Args: gates: of compression, selection and window, 0 to 1. Returns: a state dictionary.
    """
    state = dict(state_dict)
    for name, weight in state_dict.items():
        if name.endswith("key_proj.weight"):
            n_heads, prefix = weight.shape[0] // d_head, name.replace("key_proj.weight", "gate_proj.")
            state[prefix + "weight"] = weight.new_zeros(3 * n_heads, weight.shape[1])
            state[prefix + "bias"] = torch.logit(torch.tensor(gates).to(weight)).repeat_interleave(n_heads)
    return state


if __name__ == "__main__":
    import gptlite_sparse as sparse
    import inference_report as harness
    import inference_sparse as study
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_kvcache import GPTlite_KVCache
    from inference_report import Method
    from inference_training import UPTRAIN_LR, UPTRAINED_COLUMNS, uptrained, uptrained_figures
    from inference_utils import load_checkpoint, parameters_of
    from linear_packed import pack_linears
    from main_kvcache import generate_kvcache

    PAPER, SMALL = Sizes(32, 16, 64, 16, 512), Sizes(8, 8, 8, 3, 16)  # attention alone; GPTlite
    quick = {"n_tokens": 8, "uptrain_steps": 1}
    parser = harness.options(__doc__, 3, quick=quick, prompt_len=192, n_tokens=32)
    add, number = parser.add_argument, harness.positive_int
    add("--sizes", type=number, nargs=5, default=[*SMALL], help=f"{' '.join(Sizes._fields)}, in GPTlite")
    add("--uptrain-steps", type=harness.count, default=20, help="steps of 8 x 256 tokens")
    with harness.script(parser) as args:
        text, sizes = harness.load_text(args), Sizes(*args.sizes)
        check_sizes(sizes)
        (mha,) = harness.load_models(args, GPTlite_KVCache)
        p, T = parameters_of(mha), max(min(args.prompt_len, mha.seqlen - args.n_tokens), 1)
        prompts, columns = text.prompts(1, T), study.COLUMNS | UPTRAINED_COLUMNS
        report = harness.Report(args, "NSA", mha, columns, study.HIDE, text)
        choices, weights = study.Choices(args, report, mha, text), load_checkpoint(args.checkpoint)

        def figures_of(Q, K, sizes):  # of what selection and window see together; a key in both is read twice
            _, given, selected, window = branches(Q, K, K, sizes)
            n_read = sum(one.sum(dim=-1).double().mean().item() for one in (given > 0, selected, window))
            return sparse.choice_figures(Q, K, selected | window) | {"keys_read": n_read}

        def nsa(gates, sizes, packed=False):
            state = convert_mha_to_nsa(weights, p.d_head, gates)
            return harness.build(args, state, partial(GPTlite_NSA, sizes=sizes), packed)

        plain, windowed = harness.load_models(args, GPTlite, sparse.GPTlite_Sparse, packed=False)
        training = text.train, args.uptrain_steps, UPTRAIN_LR, 8, p.seqlen
        figures = study.mean_figures([figures_of(Q, K, sizes) for _, Q, K in choices.inputs])
        rule = partial(sparse.choose_window, budget=(budget := round(figures["keys_read"])))
        models = plain, nsa((0.1, 0.5, 0.5), sizes), sparse.use_choice(windowed, rule)
        control, trained, trained_window = (pack_linears(uptrained(one, *training)) for one in models)
        figures |= uptrained_figures(report, trained, control) | {"budget": budget}
        dense = Method("dense", generate_kvcache, mha, keys_read=(p.seqlen + 1) / 2)
        model, name = pack_linears(models[1]), f"NSA {budget}"
        branched = Method(name, generate_kvcache, model, exact=False, **figures)
        rows = report.compare(prompts, args.n_tokens, dense, branched, label="")
        row = choices.add(name, model, rows[name])
        last = choices.row("window", budget, rule)
        last |= uptrained_figures(report, trained_window, control)
        choices.add_trained(name, row, trained, control)
        choices.add_trained(last["method"], last, trained_window, control)
        after = report.row("dense, trained on", **report.loss_figures(control, mha))

        whole = nsa((0.0, 1.0, 0.0), sizes._replace(n_selected=p.seqlen), packed=True)
        study.check_model(report, prompts, model, whole, mha)
        q, K, V = study.decode_step(args, p.n_heads, p.d_head, 1021, 1021)  # which no block divides
        gates = torch.rand(3, 1, p.n_heads, 1021, 1, device=args.device).to(args.dtype)
        expected = nsa_attention(q, K, V, gates, PAPER)[:, :, -1:]

        def attention(q, K, V):
            means = compress(K, PAPER), compress(V, PAPER)
            return partial(nsa_step, q, K, V, means, gates[:, :, :, -1:], PAPER)

        report.check_close("a step gathered as masked", attention(q[:, :, -1:], K, V)(), expected)
        choices.plot_losses()
        sweep = study.decode_sweep(args, report, p, "NSA", "the paper's sizes", attention)
        report.why(words.loss(row) + words.recovery(row, args.uptrain_steps))
        report.why(words.recovery(last, args.uptrain_steps) + words.loss(after))
        study.explain(report, row, rows["dense"], sweep, "NSA")
        report.finish()
