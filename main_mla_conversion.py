"""Multi-head latent attention (MLA): better conversions of a trained model, from a few texts.

The plain SVD (main_mla.py) keeps what is large in the weights. What matters is what is large in the
result: the weighted SVD minimises the error of keys and values on real inputs, the two-sided one also
weighs it by what queries and the output projection make of it. Both are closed forms: seconds, and no
training. All are exact at a latent as wide as the model and approximate below; compared here by the loss
they start from, by how often the most likely token stays, and by the divergence from the model.

Run: python main_mla_conversion.py

Source: Wang et al., SVD-LLM, 2024 (weighting by the inputs; here centred, with the mean of the values'
error repaired in a bias); Meng et al., TransMLA, 2025 (balance of keys and values). The left weights go
beyond both.
"""

import torch
import torch.nn.functional as F

from main_mla import low_rank, replace_projections


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


def convert_mha_to_mla_calibrated(
    state_dict, n_heads, d_head, d_latent, inputs, two_sided=True, key_weight=8.0
):
    """Weights of GPTlite -> weights of GPTlite_MLA, by an SVD weighted with what the model really computes.

    Args: inputs: main_gqa.attention_inputs on training text, L tensors [N, E]; two_sided: False weighs
        by the inputs only; key_weight: see output_weights, 8 was the best of 2, 4, 8, 16 on training text.
    Returns: a state dictionary. Raises ValueError as convert_mha_to_mla does.
    """
    state = dict(state_dict)
    for layer, x in enumerate(inputs):
        prefix = f"blocks.{layer}.mha."
        (W_q, b_q), (W_k, _), (W_v, b_v), (W_o, _) = (
            [state[f"{prefix}{name}_proj.{kind}"].to(x.device).double() for kind in ("weight", "bias")]
            for name in ("query", "key", "value", "out")
        )
        if len(W_k) != n_heads * d_head:
            raise ValueError(f"{prefix}key_proj does not project to {n_heads} heads of {d_head}")
        mean = x.double().mean(dim=0)  # [E]
        C = torch.cov(
            x.double().T, correction=0
        )  # [E, E]: around the mean, as softmax ignores a constant in keys
        S, S_inverse = square_root(C)  # [E, E]
        M = torch.cat([W_k, W_v])  # [2*H*D, E]
        if two_sided:
            L, L_inverse = output_weights(W_q, b_q, W_o, mean, C, n_heads, key_weight)  # [2*H*D, 2*H*D]
        else:
            L = L_inverse = torch.eye(len(M)).to(M)  # [2*H*D, 2*H*D]
        up, down = low_rank(L @ M @ S, d_latent)  # [2*H*D, C], [C, E]
        up, down = L_inverse @ up, down @ S_inverse
        lost = (M - up @ down)[len(W_k) :] @ mean  # [H*D]: the values' mean error
        replace_projections(state, prefix, up, down, b_v + lost)
    return state


if __name__ == "__main__":
    import inference_report as rep
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import GPTlite, get_gptlite_model_parameters
    from main_gqa import attention_inputs
    from main_mla import GPTlite_MLA, convert_mha_to_mla

    parser = rep.options(__doc__, repeats=1, plot=False)
    parser.add_argument(
        "--d-latent",
        type=rep.positive_int,
        nargs="+",
        default=[384, 192, 128, 96, 48],
        help="numbers a token and layer",
    )
    with rep.script(parser) as args:
        p, quick = get_gptlite_model_parameters(), args.quick
        H, D, E = p.n_heads, p.d_head, p.d_model
        latents = [E, 96, 48] if quick else sorted(set(args.d_latent), reverse=True)
        n_windows, n_texts = (8, 8) if quick else (64, 32)
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        model = utils.load_model(GPTlite, vocab_size, args.checkpoint).to(args.device)
        state = utils.load_checkpoint(args.checkpoint)
        inputs = attention_inputs(model, utils.sample_prompts(train_data, n_texts, p.seqlen).to(args.device))
        tokens = utils.sample_prompts(valid_data, 8, p.seqlen).to(args.device)  # [B, T]
        with torch.no_grad():
            reference = model(tokens).log_softmax(dim=-1)  # [B, T, V]
        base = utils.validation_loss(model, valid_data, n_windows)

        columns = {
            "valid_loss": ("loss", "{:.4f}"),
            "loss_rise": ("rise", "{:+.4f}"),
            "same_best_token": ("same best token", "{:.1%}"),
            "divergence": ("KL to the model", "{:.4f}"),
            "same_output": ("same", "{}"),
        }
        report = rep.Report(args, "conversions to MLA", model, columns, n_texts=n_texts)
        report.columns.pop("same_output")
        bytes_of = p.n_layers * args.dtype.itemsize
        report.row("MHA", baseline=True, kv_bytes_per_token=2 * H * D * bytes_of, valid_loss=base)
        rise = {}
        conversions = {
            "SVD": convert_mha_to_mla,
            "weighted": lambda *sizes: convert_mha_to_mla_calibrated(*sizes, inputs, two_sided=False),
            "two-sided": lambda *sizes: convert_mha_to_mla_calibrated(*sizes, inputs),
        }
        for r in latents:
            for name, convert in conversions.items():
                mla = utils.make_model(GPTlite_MLA, vocab_size, d_latent=r).to(args.device)
                utils.load_weights(mla, convert(state, H, D, r))
                with torch.no_grad():
                    logits, cache = mla(tokens)  # [B, T, V]
                loss = utils.validation_loss(mla, valid_data, n_windows)
                rise[name, r] = loss - base
                kl = F.kl_div(logits.log_softmax(-1), reference, log_target=True, reduction="none").sum(-1)
                report.row(
                    f"{name} {r}",
                    kv_bytes_per_token=r * bytes_of,
                    valid_loss=loss,
                    loss_rise=loss - base,
                    same_best_token=(logits.argmax(-1) == reference.argmax(-1)).float().mean().item(),
                    divergence=kl.mean().item(),
                    same_output=None if r == E else "approximate",
                )
                if r == E:
                    off = abs(loss - base)
                    report.check(f"{name} {r}: the loss of MHA (differs by {off:.0e})", off <= 1e-4)
            if rise["SVD", r] > 0.005:  # below that, the order is left to chance
                # the two weighted forms lie closer together than the few texts of a quick run can tell
                pairs = (("weighted", "SVD"), ("two-sided", "weighted"))
                for better, worse in pairs[: 1 if quick else 2]:
                    lower = rise[better, r] < rise[worse, r]
                    report.check(f"d_latent {r}: {better} starts lower than {worse}", lower)

        least = latents[-1]
        report.why(
            f"Keys and values are {2 * H * D} numbers that depend linearly on {E}: a latent of {E} holds all "
            "of them, so every conversion is exact there, for half of the cache."
        )
        shares = []
        for x in inputs:
            variances = torch.linalg.eigvalsh(torch.cov(x.double().T)).flip(0)  # [E], largest first
            shares.append(100 * (variances[:least].sum() / variances.sum()).item())
        report.why(
            f"The inputs of attention are far from round: {least} of {E} directions hold {min(shares):.0f}% "
            f"to {max(shares):.0f}% of their variance, by layer. The plain SVD spends rank on directions "
            f"that never occur: it starts {rise['SVD', least]:+.4f} nats from the model at d_latent {least}, "
            f"the weighted one {rise['weighted', least]:+.4f}."
        )
        report.why(
            "Not every error in a key or value counts: weighing queries and the output projection as well "
            f"leaves {rise['two-sided', least]:+.4f}. The price is {n_texts} texts of {p.seqlen} tokens read "
            "once and decompositions that take seconds; what the model uses beyond the rank is lost in all."
        )
        report.finish()
