"""Multi-head latent attention (MLA): better conversions of a trained model, from a few texts.

The plain SVD (main_mla.py) keeps what is large in the weights. What matters is what is large in the result:
the weighted SVD minimises the error of keys and values on real inputs, the two-sided one also weighs it by
what queries and the output projection make of it. Both are closed forms: seconds, and no training.

Exact: a latent as wide as the model. Approximate below. Wins where the latent is narrow, because inputs of
attention are far from round and the plain SVD spends rank on directions that never occur; at wide latents
all three lose nearly nothing. Costs a few texts read once; what a model uses beyond the rank is lost in
all. Beside them stands GQA with aligned heads, at the same bytes.

Run: python more/mla_conversion.py

Source: Wang et al., SVD-LLM, 2024 (weighting by the inputs; here centred, with the mean of the values'
error repaired in a bias); Meng et al., TransMLA, 2025 (balance of keys and values). The left weights go
beyond both.
"""

import torch
import torch.nn.functional as F

import _root  # noqa: F401 (the files above become importable)
from inference_training import check_same_shape
from main_mla import low_rank, replace_projections


def convert_mha_to_mla_calibrated(
    state_dict, n_heads, d_head, d_latent, inputs, two_sided=True, key_weight=8.0
):
    """Weights of GPTlite -> weights of GPTlite_MLA, by an SVD weighted with what the model really computes.

    Args: inputs: attention_inputs on training text, L tensors [N, E]; two_sided: False weighs
        by the inputs only; key_weight: see output_weights, 8 was the best of 2, 4, 8, 16 on training text.
    Returns: a state dictionary. Raises ValueError as convert_mha_to_mla does.
    """
    state = dict(state_dict)
    for layer, x in enumerate(inputs):
        prefix = f"blocks.{layer}.mha."
        (W_q, b_q), (W_k, _), (W_v, _), (W_o, _) = (
            [state[f"{prefix}{name}_proj.{kind}"].to(x.device).double() for kind in ("weight", "bias")]
            for name in ("query", "key", "value", "out")
        )
        if len(W_k) != n_heads * d_head:
            raise ValueError(f"{prefix}key_proj does not project to {n_heads} heads of {d_head}")
        mean = x.double().mean(dim=0)  # [E]
        C = torch.cov(x.double().T, correction=0)  # [E, E]: softmax ignores a constant in all keys
        S, S_inverse = square_root(C)  # [E, E]
        M = torch.cat([W_k, W_v])  # [2*H*D, E]
        if two_sided:
            L, L_inverse = output_weights(W_q, b_q, W_o, mean, C, n_heads, key_weight)  # [2*H*D, 2*H*D]
        else:
            L = L_inverse = torch.eye(len(M)).to(M)  # [2*H*D, 2*H*D]
        up, down = low_rank(L @ M @ S, d_latent)  # [2*H*D, C], [C, E]
        up, down = L_inverse @ up, down @ S_inverse
        lost = (M - up @ down)[len(W_k) :] @ mean  # [H*D]: the values' mean error
        replace_projections(state, prefix, up, down)
        bias = state[f"{prefix}value_up_proj.bias"]  # [H*D]
        state[f"{prefix}value_up_proj.bias"] = (bias.to(lost) + lost).to(bias)
    return state


def square_root(C, floor=1e-6):
    """Symmetric square roots of positive semi-definite matrices [..., n, n], and their inverses.

    Eigenvalues below floor times the largest count as that, so what never occurs stays invertible.
    """
    values, vectors = torch.linalg.eigh(C)  # [..., n] in rising order, [..., n, n]
    values = values.clamp(min=1e-30).clamp(min=floor * values[..., -1:]).sqrt().unsqueeze(-2)  # [..., 1, n]
    return vectors * values @ vectors.mT, vectors / values @ vectors.mT


def output_weights(W_q, b_q, W_o, mean, C, n_heads, key_weight):
    """What an error in a key or value costs in scores and output: a matrix [2*H*D, 2*H*D], and its inverse.

    A key that is off by e moves the score of query q by q.e / sqrt(D), squared on average by
    e' E[q q'] e / D; a value that is off by e moves the output by W_o e. Args: W_q [H*D, E], b_q [H*D],
    W_o [E, H*D]; mean [E] and covariance C [E, E] of the attention's inputs; key_weight: how much more the
    scores count than the output.
    """
    d_head = len(W_q) // n_heads
    q_mean = (W_q @ mean + b_q).view(n_heads, d_head, 1)  # [H, D, 1]
    W_q = W_q.view(n_heads, d_head, -1)  # [H, D, E]
    W_o = W_o.T.view(n_heads, d_head, -1)  # [H, D, E]
    L_k = square_root((W_q @ C @ W_q.mT + q_mean @ q_mean.mT) * key_weight**2 / d_head)  # 2 of [H, D, D]
    L_v = square_root(W_o @ W_o.mT)  # 2 of [H, D, D]
    return [torch.block_diag(*k, *v) for k, v in zip(L_k, L_v, strict=True)]


def divergence(logits, reference):
    """Mean KL divergence in nats from the distributions of reference to those of logits, [..., V] both.

    A token that the reference gives no probability adds nothing, whatever the other gives it (0 log 0 = 0).
    Raises ValueError for logits of different shapes.
    """
    check_same_shape(logits, reference)
    log_p, log_q = (F.log_softmax(x.float(), dim=-1) for x in (reference, logits))  # [..., V]
    terms = torch.where(log_p == float("-inf"), 0.0, log_p.exp() * (log_p - log_q))  # [..., V]
    return terms.sum(dim=-1).mean().clamp(min=0.0)  # rounding may fall below


if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa
    from gptlite_kvcache import GPTlite_KVCache
    from gqa_alignment import align_heads, attention_inputs
    from inference_utils import load_checkpoint, loss_difference, model_from, parameters_of, sample_prompts
    from main_mla import GPTlite_MLA, check_latent, convert_mha_to_mla

    parser = harness.options(__doc__, repeats=None, quick={"n_texts": 8, "d_latent": [192, 48]})
    widths = {"type": int, "nargs": "+", "help": "latent widths (default: 1 to 1/8 of d_model)"}
    parser.add_argument("--d-latent", **widths)
    parser.add_argument("--n-texts", type=harness.positive_int, default=32, help="texts to weigh errors by")
    with harness.script(parser) as args, torch.no_grad():
        text, state = harness.load_text(args), load_checkpoint(args.checkpoint)
        (mha,) = harness.load_models(args, GPTlite_KVCache)
        L, E, H, D, *_ = p = parameters_of(mha)
        for r in (latents := sorted(set(args.d_latent or [E // n for n in (1, 2, 3, 4, 8)]), reverse=True)):
            check_latent(E, r)
        columns = {"same_best_token": ("same best token", "{:.1%}"), "divergence": ("KL", "{:.4f}")}
        report = harness.Report(args, "conversions to MLA", mha, columns, ["same_output"], text)
        reader = model_from(state, GPTlite_KVCache, text.vocab_size).to(args.device)
        samples = sample_prompts(text.train, args.n_texts, p.seqlen).to(args.device)  # [n, T]
        inputs = attention_inputs(reader, samples)  # L tensors [N, E]
        tokens = text.prompts(4, p.seqlen)  # [B, T]
        reference, rows, models = mha(tokens)[0], {}, {}  # [B, T, V]

        def add(name, model):
            logits, _ = model(tokens)  # [B, T, V]
            models[name] = model
            rows[name] = report.row(
                name,
                baseline=model is mha,
                kv_bytes_per_token=harness.kv_bytes_per_token(model, tokens),
                same_best_token=(logits.argmax(-1) == reference.argmax(-1)).float().mean().item(),
                divergence=divergence(logits, reference).item(),
                **report.loss_figures(model, mha),
            )
            return logits

        add("MHA", mha)
        for r in latents:
            conversions = {
                "SVD": convert_mha_to_mla(state, H, D, r),
                "weighted": convert_mha_to_mla_calibrated(state, H, D, r, inputs, two_sided=False),
                "two-sided": convert_mha_to_mla_calibrated(state, H, D, r, inputs),
            }
            for name, weights in conversions.items():
                logits = add(f"{name} {r}", harness.build(args, weights, GPTlite_MLA, d_latent=r))
                if r == E:
                    report.check_close(f"{name} {r}: the model is unchanged", logits, reference)
            n_bytes = rows[f"SVD {r}"]["kv_bytes_per_token"]
            report.check(f"d_latent {r}: a token takes {r} numbers", n_bytes == L * r * args.dtype.itemsize)
        for G in (G for G in range(H - 1, 0, -1) if H % G == 0):
            weights = convert_mha_to_gqa(align_heads(state, H, D, G, inputs), H, D, G)
            add(f"GQA {G}, aligned", harness.build(args, weights, GPTlite_GQA, n_groups=G))

        def between(one, other):
            losses = (report.loss_of(models[name]) for name in (one, other))
            return words.loss_between(one, other, *loss_difference(*losses))

        report.why(between(f"weighted {r}", f"SVD {r}") + between(f"two-sided {r}", f"weighted {r}"))
        report.why(between(f"two-sided {r}", f"GQA {G}, aligned") + words.loss(rows[f"two-sided {r}"]))
        shares = []
        for x in inputs:
            variances = torch.linalg.eigvalsh(torch.cov(x.double().T)).flip(0)  # [E], largest first
            shares.append((variances[:r].sum() / variances.sum()).item())
        held = f"{r} of {E} hold {min(shares):.0%} to {max(shares):.0%} of their variance, by layer"
        few = 2.0, f"The inputs of attention lie mostly in few directions: {held}."
        many = f"The inputs of attention spread over many directions: {held}."
        report.why(words.choose(min(shares) * E / r, few, many))
        lines = {}
        for name in conversions:
            of_form = [rows[f"{name} {r}"] for r in latents]
            n_bytes = [row["kv_bytes_per_token"] for row in of_form]
            lines[name] = n_bytes, [row["valid_loss"] for row in of_form]
        report.plot_lines(lines, "KV bytes per token", "validation loss (nats)", "Converted, not trained on")
        report.finish()
