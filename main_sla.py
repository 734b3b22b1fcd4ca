"""Sparse-linear attention (SLA): exact attention to few blocks of keys, linear attention to most others.

In long attention without a causal mask, as diffusion models have it, few weights are large and most small,
but the small ones together still count. SLA sorts the blocks of keys for each block of queries by the score
of their means: critical blocks get exact attention, negligible ones nothing, and all marginal ones together
linear attention, whose cost does not depend on how many they are. A learned projection joins the two.

Approximate; with all blocks critical it is exact. Wins time where a text has thousands of tokens: exact work
falls to the critical share. Loses it below, since sorting, gathering and the linear part come on top. Wins
errors only where the means of blocks tell which blocks matter, that is, where neighbours are alike: on
independent tokens it fails. The exact part is normalised over its own keys alone, so it is too large by what
the others would have got, which an added projection cannot take back; scaling it as well can (SLA2). The
paper trains a video model on; here attention is computed on synthetic fields, and the projection is fitted by
least squares in place of training, on some texts for others.

Run: python main_sla.py            (--critical 0.1 for more exact blocks)

Source: Zhang et al., SLA: Beyond Sparsity in Diffusion Transformers via Fine-Tunable Sparse-Linear Attention,
2025; SLA2, 2026 (a learned ratio of the two parts).
"""

import math

import torch
import torch.nn.functional as F

from gptlite_sparse import gather_rows, in_blocks


def sort_blocks(Q, K, block, critical, negligible):
    """Which blocks of keys each block of queries treats how, by the scores of their means.

    Args: Q, K [B, H, T, D], T whole blocks; critical, negligible: shares of the blocks, one critical or more.
    Returns: numbers of the critical blocks, the best first [B, H, n, n_critical], and bool [B, H, n, n], True
        where a block of keys is marginal. Raises ValueError for a T of no whole blocks, or shares beyond 1.
    """
    T = Q.shape[-2]
    if T % block or not 0 <= negligible <= 1 or not 0 <= critical <= 1:
        raise ValueError(f"{T} tokens in blocks of {block}, shares {critical} and {negligible}: do not fit")
    q, k = (in_blocks(t, block).mean(dim=-2) for t in (Q, K))  # [B, H, n, D]
    n = T // block
    n_critical = min(max(round(critical * n), 1), n)
    n_marginal = max(n - n_critical - round(negligible * n), 0)
    order = (q @ k.mT).argsort(dim=-1, descending=True)  # [B, H, n, n]: a softmax would not change it
    marginal = torch.zeros_like(order, dtype=torch.bool)
    marginal.scatter_(-1, order[..., n_critical : n_critical + n_marginal], True)
    return order[..., :n_critical], marginal


def masked_part(Q, K, V, critical, block):
    """The exact part, naive twin of the next: all scores, and a mask. [B, H, T, D] -> [B, H, T, D]."""
    n = K.shape[-2] // block
    seen = torch.zeros(*critical.shape[:-1], n, dtype=torch.bool, device=Q.device)
    seen.scatter_(-1, critical, True)  # [B, H, n, n]
    mask = seen.repeat_interleave(block, dim=-2).repeat_interleave(block, dim=-1)  # [B, H, T, T]
    return F.scaled_dot_product_attention(Q, K, V, mask)


def sparse_part(Q, K, V, critical, block):
    """Exact attention of each block of queries to its critical blocks of keys, which are gathered.

    Args: critical [B, H, n, n_critical]. Returns: [B, H, T, D], normalised over the critical keys alone.
    """
    q = in_blocks(Q, block)  # [B, H, n, block, D]
    k, v = (gather_rows(in_blocks(t, block), critical.flatten(2)) for t in (K, V))  # as many as chosen
    k, v = (t.unflatten(2, critical.shape[2:]).flatten(3, 4) for t in (k, v))  # [B, H, n, chosen * block, D]
    out = F.scaled_dot_product_attention(*(t.flatten(0, 1) for t in (q, k, v)))  # [B * H, n, block, D]
    return out.view(Q.shape)


def linear_part(Q, K, V, marginal, block):
    """Linear attention of each block of queries to its marginal blocks of keys.

    Its feature is a softmax over channels. Args: marginal: bool [B, H, n, n]. Returns: [B, H, T, D], zeros
    where no block is marginal.
    """
    q, k, v = (in_blocks(t, block) for t in (Q.softmax(dim=-1), K.softmax(dim=-1), V))  # [B, H, n, block, D]
    states, sums = k.mT @ v, k.sum(dim=-2)  # of each block of keys: [B, H, n, D, D], [B, H, n, D]
    chosen = marginal.to(Q.dtype)
    states = (chosen @ states.flatten(3)).view(states.shape)  # of each block of queries
    sums = (chosen @ sums).unsqueeze(-1)  # [B, H, n, D, 1]
    return (q @ states / (q @ sums).clamp(min=torch.finfo(Q.dtype).tiny)).flatten(2, 3)


def sla_parts(Q, K, V, block=64, critical=0.05, negligible=0.1):
    """The exact and the linear part of sparse-linear attention, [B, H, T, D] each."""
    chosen, marginal = sort_blocks(Q, K, block, critical, negligible)
    return sparse_part(Q, K, V, chosen, block), linear_part(Q, K, V, marginal, block)


def sla_attention(Q, K, V, projection, block=64, critical=0.05, negligible=0.1):
    """Sparse-linear attention without a causal mask.

    Args: Q, K, V [B, H, T, D]; projection: what the linear part adds to the exact one, [D, D], or what both
        add to it, [2 D, D]; zeros, with which training starts, leave the exact part alone.
    Returns: [B, H, T, D]. Raises ValueError as sort_blocks does.
    """
    parts = sla_parts(Q, K, V, block, critical, negligible)
    n_parts = projection.shape[0] // Q.shape[-1]
    return parts[0] + torch.cat(parts[-n_parts:], dim=-1) @ projection


def fit_projection(parts, wanted, ridge=1e-2):
    """The matrix [E, D] that brings parts [..., E] nearest to what is wanted [..., D], by ridge regression.

    ridge: weight of the matrix's own size, relative to the mean square of the parts.
    """
    X, Y = (t.flatten(0, -2).double() for t in (parts, wanted))  # [N, E], [N, D]
    products = X.T @ X
    scale = ridge * products.diagonal().mean().clamp(min=1e-30)
    damped = products + scale * torch.eye(len(products)).to(products)
    return torch.linalg.solve(damped, X.T @ Y).to(parts.dtype)


def smooth_field(H, T, D, width, n_spikes=0):
    """Queries, keys and values of tokens on a line whose neighbours are alike: three [1, H, T, D].

    width: tokens over which a random field is averaged, 1 for independent tokens; n_spikes: tokens that are
    like no neighbour.
    """
    field, values = torch.randn(2, H, D, T + width - 1).unfold(-1, width, 1).mean(dim=-1) * math.sqrt(width)
    at = torch.randperm(T)[:n_spikes]
    field[..., at], values[..., at] = 2 * torch.randn(H, D, n_spikes), 2 * torch.randn(H, D, n_spikes)
    field, values = field.mT[None], values.mT[None]  # [1, H, T, D]
    return [field + 0.3 * torch.randn(field.shape), field + 0.3 * torch.randn(field.shape), values]


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from inference_utils import parameters_of

    lengths = [1024 * 2**i for i in range(5)]
    quick = {"n_tokens": 1024, "max_tokens": 2048, "n_texts": 4}
    parser = harness.options(__doc__, 3, quick=quick, data=False)
    add = parser.add_argument
    add("--n-tokens", type=harness.positive_int, default=4096, help="tokens of the texts that errors are of")
    add("--max-tokens", type=int, choices=lengths[1:], default=lengths[-1], help="longest text that is timed")
    add("--block", type=harness.positive_int, default=64, help="tokens of a block")
    add("--critical", type=harness.share, default=0.05, help="share of the blocks that is exact")
    add("--negligible", type=harness.share, default=0.1, help="share of the blocks that is left out")
    add("--n-texts", type=harness.positive_int, default=8, help="texts that projections are fitted on")
    columns = {"error": ("error", "{:.3f}"), "error on other texts": ("on others", "{:.3f}")}
    with harness.script(parser) as args:
        (model,) = harness.load_models(args, GPTlite)  # only its shape matters here
        T, block, N, (_, _, H, D, *_) = args.n_tokens, args.block, args.n_texts, parameters_of(model)
        kinds = {"smooth": (64, 0), "with spikes": (64, T // 50), "independent": (1, 0)}  # width, spikes
        settings = {"block": block, "critical": args.critical, "negligible": args.negligible}
        report = harness.Report(args, "sparse-linear attention", model, columns, n_tokens=T, **settings)

        def draw(T, n_texts=1, width=64, n_spikes=0):
            texts = [smooth_field(H, T, D, width, n_spikes) for _ in range(n_texts)]
            return [torch.cat(t).to(args.device, args.dtype) for t in zip(*texts, strict=True)]

        def fitted(QKV, full, settings):
            """{method: (error on the first N texts, which its projection is fitted on, and on the others)}"""
            exact, linear = sla_parts(*QKV, **settings)
            nothing, both, errors = torch.zeros_like(full), torch.cat([exact, linear], dim=-1), {}
            ways = {"exact part alone": (exact, nothing), "linear part alone": (nothing, linear)}
            ways |= {"SLA": (exact, linear), "both parts fitted": (exact, both)}
            for name, (start, part) in ways.items():
                wrong = start + part @ fit_projection(part[:N], (full - start)[:N]) - full
                errors[name] = [(wrong[t].norm() / full[t].norm()).item() for t in (slice(N), slice(N, None))]
            return errors

        texts = {kind: draw(T, N + max(N // 2, 1), *sizes) for kind, sizes in kinds.items()}
        wanted = {kind: F.scaled_dot_product_attention(*QKV) for kind, QKV in texts.items()}
        table = {kind: fitted(QKV, wanted[kind], settings) for kind, QKV in texts.items()}
        report.row("full attention", baseline=True, error=0.0)
        names, rows = [*table["smooth"]], {}
        for name, pair in table["smooth"].items():
            figures = dict(zip(columns, pair, strict=True))
            rows[name] = report.row(name, same_output="approximate", **figures)
        by_kind = [{"tokens": kind} | {n: errors[n][1] for n in names} for kind, errors in table.items()]
        report.sweep("Error on other texts than those of the fit, as a share of the output", by_kind)
        shares = (0.02, 0.05, 0.1, 0.2, 0.5)
        smooth = texts["smooth"], wanted["smooth"]
        found = [fitted(*smooth, settings | {"critical": share}) for share in shares]
        lines = {n: (shares, [errors[n][1] for errors in found]) for n in names}
        report.plot_lines(lines, "share of critical blocks", "error on other texts", "Smooth", "xy")

        QKV = [t[:1] for t in texts["with spikes"]]  # [1, H, T, D] each
        chosen, marginal = sort_blocks(*QKV[:2], **settings)
        exact = sparse_part(*QKV, chosen, block)
        report.check_close("blocks gathered as masked", exact, masked_part(*QKV, chosen, block))
        eye = torch.eye(D).to(QKV[0])
        report.check_close("zeros add nothing", sla_attention(*QKV, 0 * eye, **settings), exact)
        whole = sla_attention(*QKV, eye, **settings | {"critical": 1.0})
        report.check_close("all critical: full attention", whole, F.scaled_dot_product_attention(*QKV))
        fits = [rows[n]["error"] for n in ("both parts fitted", "SLA", "exact part alone")]
        report.check("fitted with more, no worse on its text", fits[0] - 0.001 <= fits[1] <= fits[2] + 1e-6)

        def attentions(n):
            QKV = draw(n)
            full = partial(F.scaled_dot_product_attention, *QKV)
            return {"full attention": full, "SLA": partial(sla_attention, *QKV, eye, **settings)}

        lengths = [n for n in lengths if n <= args.max_tokens and n % block == 0]
        times = report.time_sweep(title := "Attention without a mask (ms)", "tokens", lengths, attentions)
        report.why(words.compare(rows["SLA"], rows["exact part alone"], "error on other texts"))
        report.why(words.compare(rows["both parts fitted"], rows["SLA"], "error on other texts"))
        report.why(words.crossover(times, "tokens", "SLA", "full attention"))
        report.why(words.growth(times, "tokens", ["SLA", "full attention"]))
        report.plot_sweep(title)
        report.finish()
