"""MoBA: keys fall into blocks, and each query attends to its own block and to the few that a gate picks.

The gate of a block is the product of the query with the mean of the block's keys, so it has no parameters,
and a model can turn from full to sparse attention and back. A query always sees its own block up to itself;
the best of the blocks before it fill up to `top_k` blocks. With as many as there are it is full attention.

Approximate below that. Wins time on long texts, for a prompt as well as for a step: the work grows with top_k
blocks instead of all. Loses where a block's mean says little about its best key: small blocks are judged
better, and more of them have to be judged. Loses in GPTlite's context, where judging and gathering cost more
than they save. Weights that were not trained for it lose quality, which training on for a few steps can bring
back; how much is measured against a control, the model unchanged after the same steps.

Run: python main_moba.py            (--uptrain-steps 0 does not train on)

Source: Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs, 2025. There the last layers stay
dense, and a decode step may; here all layers choose.
"""

import math

import torch

from gptlite_gqa import grouped_attention
from gptlite_sparse import causal, for_heads, gather_rows, in_blocks, sum_of_group, top_mask


def check_blocks(block_size, top_k):
    """Raises ValueError for blocks without a key, or no block to see."""
    if block_size < 1 or top_k < 1:
        raise ValueError(f"{top_k} blocks of {block_size} keys: a query sees at least 1 block of 1 key")


def block_means(K, block_size):
    """The mean key of each full block, in float32: K [B, G, Sk, D] -> [B, G, Sk // block_size, D]."""
    wide = torch.promote_types(K.dtype, torch.float32)
    n = K.shape[-2] // block_size
    return in_blocks(K[:, :, : n * block_size], block_size).mean(dim=-2, dtype=wide)


def gates(Q, means):
    """The score of each block for each query: Q [B, H, Sq, D], means [B, G, n, D] -> [B, G, Sq, n].

    Heads that share keys choose together, by the sum of their scores.
    """
    return sum_of_group(Q.to(means.dtype) @ for_heads(means, Q.shape[1]).mT, means.shape[1])


def choose_past_blocks(Q, K, block_size, top_k):
    """The top_k - 1 best blocks in front of each query's own: bool [B, G, Sq, Sk // block_size].

    They are full, so no gate knows a key that comes after its query.
    """
    check_blocks(block_size, top_k)
    Sq, Sk, means = Q.shape[-2], K.shape[-2], block_means(K, block_size)  # [B, G, n, D]
    own_block = torch.arange(Sk - Sq, Sk, device=Q.device)[:, None] // block_size  # [Sq, 1]
    past = torch.arange(means.shape[2], device=Q.device) < own_block  # [Sq, n]
    scores = gates(Q, means)  # [B, G, Sq, n]
    return top_mask(scores, top_k - 1, past) if top_k > 1 and past.any() else scores.isnan() & past


def choose_blocks(Q, K, block_size, top_k):
    """The keys that each query sees, as a mask: by definition, for any number of queries.

    Args: Q [B, H, Sq, D]; K [B, G, Sk, D], the last query belongs to the last key.
    Returns: bool [B, H, Sq, Sk]: of the own block what lies up to the query, and the chosen ones in front of
        it. Raises ValueError for sizes below 1.
    """
    Sq, Sk = Q.shape[-2], K.shape[-2]
    chosen = choose_past_blocks(Q, K, block_size, top_k)  # [B, G, Sq, n]
    visible = chosen.repeat_interleave(block_size, dim=-1)  # [B, G, Sq, n * block]
    visible = torch.cat([visible, visible.new_zeros(*visible.shape[:3], Sk - visible.shape[-1])], dim=-1)
    own_key, key = torch.arange(Sk - Sq, Sk, device=Q.device)[:, None], torch.arange(Sk, device=Q.device)
    visible |= (key // block_size == own_key // block_size) & causal(Sq, Sk, Q.device)  # [B, G, Sq, Sk]
    return for_heads(visible, Q.shape[1])


def moba_attention(Q, K, V, block_size, top_k):
    """MoBA by definition: Q [B, H, Sq, D], K, V [B, G, Sk, D] -> [B, H, Sq, D]."""
    return grouped_attention(Q, K, V, choose_blocks(Q, K, block_size, top_k))


def moba_step(q, K, V, means, block_size, top_k):
    """The same for one query, which reads the means, its own block and the chosen blocks alone.

    Args: q [B, H, 1, D]; K, V [B, G, Sk, D]; means: block_means of K, kept from step to step.
    Returns: [B, H, 1, D]. Raises ValueError for sizes below 1, or means that are not those of so many keys.
    """
    check_blocks(block_size, top_k)
    Sk, n_past = K.shape[-2], (K.shape[-2] - 1) // block_size
    if means.shape[2] != Sk // block_size:
        raise ValueError(f"{means.shape[2]} means are not those of {Sk} keys in blocks of {block_size}")
    scores = gates(q, means[:, :, :n_past])[:, :, 0]  # [B, G, n_past]
    chosen = scores.topk(min(top_k - 1, n_past), dim=-1).indices  # [B, G, k]
    parts, start = [], n_past * block_size
    for t in (K, V):
        past = gather_rows(t[:, :, :start].unflatten(2, (n_past, block_size)), chosen).flatten(2, 3)
        parts.append(torch.cat([past, t[:, :, start:]], dim=2))  # [B, G, k * block + own block, D]
    return grouped_attention(q, *parts, causal_mask=False)


def moba_prefill(Q, K, V, block_size, top_k):
    """The same for a whole prompt: each block of keys serves those queries that chose it.

    Args: Q [B, H, T, D]; K, V [B, G, T, D]. A query's parts are joined by their log-sum-exp, so that no
    matrix of scores is larger than T x block_size. Returns: [B, H, T, D].
    """
    (B, H, T, D), G = Q.shape, K.shape[1]
    chosen = choose_past_blocks(Q, K, block_size, top_k)  # [B, G, T, n]
    K, V = (for_heads(t, H) for t in (K, V))  # [B, H, T, D]
    out, wide = torch.empty_like(Q), torch.promote_types(Q.dtype, torch.float32)
    for b, h in ((b, h) for b in range(B) for h in range(H)):
        q, k, v = Q[b, h].to(wide) / math.sqrt(D), K[b, h].to(wide), V[b, h].to(wide)  # [T, D]
        acc, lse = torch.zeros_like(q), torch.full_like(q[:, :1], float("-inf"))  # [T, D], [T, 1]
        for j, start in enumerate(range(0, T, block_size)):
            own = torch.arange(start, min(start + block_size, T), device=Q.device)  # [block]
            rows = own  # queries of the block itself, then those behind it that chose it
            if j < chosen.shape[-1]:
                rows = torch.cat([own, chosen[b, h * G // H, :, j].nonzero()[:, 0]])  # [N]
            scores = q[rows] @ k[own].T  # [N, block]
            scores[: len(own)].masked_fill_(~causal(len(own), len(own), Q.device), float("-inf"))
            part = torch.logsumexp(scores, dim=-1, keepdim=True)  # [N, 1]
            whole = torch.logaddexp(lse[rows], part)  # [N, 1]
            acc[rows] = acc[rows] * (lse[rows] - whole).exp() + (scores - whole).exp() @ v[own]
            lse[rows] = whole
        out[b, h] = acc.to(out.dtype)
    return out


if __name__ == "__main__":
    from functools import partial

    import torch.nn.functional as F

    import gptlite_sparse as sparse
    import inference_report as harness
    import inference_sparse as study
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_kvcache import GPTlite_KVCache
    from inference_report import Method
    from inference_training import UPTRAIN_LR, UPTRAINED_COLUMNS, uptrained, uptrained_figures
    from inference_utils import parameters_of
    from linear_packed import pack_linears
    from main_kvcache import generate_kvcache

    SIZE, TOP_K = 256, 4  # of attention alone
    quick = {"n_tokens": 8, "uptrain_steps": 1}
    parser = harness.options(__doc__, 3, quick=quick, prompt_len=192, n_tokens=32)
    add, number = parser.add_argument, harness.positive_int
    add("--block-size", type=number, default=8, help="keys of a block, in GPTlite")
    add("--top-k", type=number, default=4, help="blocks that a query sees, in GPTlite")
    add("--uptrain-steps", type=harness.count, default=20, help="steps of 8 x 256 tokens")
    with harness.script(parser) as args:
        text, size, B = harness.load_text(args), args.block_size, args.block_size * args.top_k
        (mha,) = harness.load_models(args, GPTlite_KVCache)
        p, T = parameters_of(mha), max(min(args.prompt_len, mha.seqlen - args.n_tokens), 1)
        H, D, prompts, columns = p.n_heads, p.d_head, text.prompts(1, T), study.COLUMNS | UPTRAINED_COLUMNS
        report = harness.Report(args, "MoBA", mha, columns, study.HIDE, text)
        choices, rule = study.Choices(args, report, mha, text), partial(choose_blocks, block_size=size)
        name, choose = f"MoBA {B}", partial(rule, top_k=args.top_k)
        training = text.train, args.uptrain_steps, UPTRAIN_LR, 8, p.seqlen
        plain, model = harness.load_models(args, GPTlite, sparse.GPTlite_Sparse, packed=False)
        both = (uptrained(one, *training) for one in (plain, sparse.use_choice(model, choose)))
        control, trained = map(pack_linears, both)
        model, figures = choices.model(choose), choices.figures(choose) | {"budget": B}
        figures |= uptrained_figures(report, trained, control)
        dense = Method("dense", generate_kvcache, mha, keys_read=(p.seqlen + 1) / 2)
        masked = Method(name, generate_kvcache, model, exact=False, **figures)
        rows = report.compare(prompts, args.n_tokens, dense, masked, label="")
        row = choices.add(name, model, rows[name])
        choices.add_trained(name, row, trained, control)
        choices.row("MoBA", 2 * B, partial(rule, top_k=2 * args.top_k))
        choices.row("window", B, partial(sparse.choose_window, budget=B))
        after = report.row("dense, trained on", **report.loss_figures(control, mha))

        whole = choices.model(partial(rule, top_k=p.seqlen))
        study.check_model(report, prompts, model, whole, mha)
        q, K, V = study.decode_step(args, H, D, 1021, 1021)  # which no block divides
        by_definition = moba_attention(q, K, V, 64, TOP_K)
        report.check_close("a prompt gathered as masked", moba_prefill(q, K, V, 64, TOP_K), by_definition)
        step = moba_step(q[:, :, -1:], K, V, block_means(K, 64), 64, TOP_K)
        report.check_close("a step gathered as masked", step, by_definition[:, :, -1:])

        def attention(q, K, V):
            return partial(moba_step, q, K, V, block_means(K, SIZE), SIZE, TOP_K)

        def prompt_of(n):  # one head of it
            sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
            forms = {"SDPA": sdpa, "MoBA": partial(moba_prefill, block_size=SIZE, top_k=TOP_K)}
            return {form: partial(f, *study.decode_step(args, 1, D, n, n)) for form, f in forms.items()}

        choices.plot_losses()
        what, lengths = f"{TOP_K} blocks of {SIZE}", (1024, 4096, 16384)
        sweep = study.decode_sweep(args, report, p, "MoBA", what, attention)
        title = f"Attention of a prompt, one head (ms), {what}"
        prompts = report.time_sweep(title, "tokens", lengths[: 2 if args.quick else 3], prompt_of)
        report.plot_sweep(title)
        report.why(words.loss(row) + choices.between(name, f"window {B}"))
        report.why(words.recovery(row, args.uptrain_steps) + words.loss(after))
        report.why(words.compare(row, rows["dense"]))
        step = words.about("a step of attention", words.crossover(sweep, "keys", "MoBA", "dense"))
        report.why(step + words.about("a prompt", words.crossover(prompts, "tokens", "MoBA", "SDPA")))
        report.finish()
