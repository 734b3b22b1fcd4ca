"""Grouped-query attention: heads that are rotated into a common basis before they are averaged.

The mean of a group's heads (main_gqa.py) cancels much of what they know, because each head was trained in a
basis of its own. Nothing in the model fixes that basis: queries and keys of a head may be rotated together,
and its values too if the output projection turns them back. So the heads of a group are first rotated as
near to one another as rotations can bring them (generalised Procrustes, on what they compute for a few
texts), and then averaged. That takes seconds and no training.

Exact: the rotation alone. Approximate: the mean that follows. Wins before any training; training on lets
the plain mean catch up in part. Speed and cache are those of the plain mean, which main_gqa.py times. It
does not apply as it stands to rotary positions, which allow a rotation only within each pair of channels.

Run: python more/gqa_alignment.py            (--n-groups 1 for one number of groups)

Source: Jin et al., Align Attention Heads Before Merging Them, 2024 (they also choose which heads form a
group, here it is always neighbours); Ainslie et al., GQA, 2023 (the mean).
"""

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_gqa import check_groups


def align_heads(state_dict, n_heads, d_head, n_groups, inputs):
    """Rotates heads so that averaging a group loses less; the model computes the same as before.

    Queries and keys of a head may be rotated together, q.k stays; so may its values, if the output
    projection turns them back. Heads of a group then agree as far as rotations can make them.

    Args: state_dict: weights of GPTlite; inputs: attention_inputs on training text, L tensors [N, E].
    Returns: weights of GPTlite, for convert_mha_to_gqa. Raises ValueError for groups of unequal size.
    """
    check_groups(n_heads, n_groups)
    state = {name: tensor.clone() for name, tensor in state_dict.items()}
    for layer, x in enumerate(inputs):
        name = f"blocks.{layer}.mha.{{}}_proj.{{}}".format
        x = x.double() - x.double().mean(dim=0)  # a constant in all keys is invisible to softmax
        x = torch.linalg.qr(x).R  # [E, E]: fewer rows, same inner products
        for source, rotated in (("key", ["query", "key"]), ("value", ["value"])):
            A = x @ state[name(source, "weight")].to(x).T  # [N, H*D]
            A = A.view(len(A), n_groups, -1, d_head).permute(1, 2, 0, 3)  # [G, H/G, N, D]
            R = procrustes_rotations(A).view(n_heads, d_head, d_head)  # [H, D, D]
            for projection in rotated:
                for kind in ("weight", "bias"):
                    tensor = state[name(projection, kind)]  # [H*D, E], a bias [H*D]
                    turned = R.mT @ tensor.to(R).view(n_heads, d_head, -1)  # [H, D, E], a bias [H, D, 1]
                    tensor.copy_(turned.reshape(tensor.shape))
        out = state[name("out", "weight")]  # [E, H*D]
        turned = out.to(R).view(-1, n_heads, 1, d_head) @ R  # [E, H, 1, D], R of the values
        out.copy_(turned.flatten(1))
    return state


def procrustes_rotations(A, n_iterations=4):
    """Rotations that bring the heads of each group closest to their mean (generalised Procrustes).

    Args: A: what each head computes for N tokens, [G, H/G, N, D].
    Returns: R, orthogonal, [G, H/G, D, D], such that the A @ R of a group are near to one another.
    """
    rotated = A[:, :1]  # the first head of a group sets the basis
    for _ in range(n_iterations):
        reference = rotated.mean(dim=1, keepdim=True)  # [G, 1, N, D]
        U, _, Vh = torch.linalg.svd(A.mT @ reference)  # [G, H/G, D, D] both
        R = U @ Vh  # the orthogonal matrix that brings A nearest to the reference
        rotated = A @ R  # [G, H/G, N, D]
    return R


@torch.no_grad()
def attention_inputs(model, tokens, batch_size=16):
    """What the attention of every layer reads when the model reads tokens [B, T].

    Returns: L tensors [B*T, E] on the CPU, where float64 exists on every machine.
    """
    inputs = [[] for _ in model.blocks]
    hooks = [
        block.mha.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].flatten(0, 1)))
        for block, seen in zip(model.blocks, inputs, strict=True)
    ]
    try:
        for batch in tokens.split(batch_size):
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(seen).cpu() for seen in inputs]  # [N, E] each


if __name__ == "__main__":
    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa
    from inference_training import UPTRAIN_LR, UPTRAINED_COLUMNS, uptrained, uptrained_figures
    from inference_utils import load_checkpoint, loss_difference, model_from, parameters_of, sample_prompts
    from linear_packed import pack_linears

    parser = harness.options(__doc__, repeats=None, quick={"n_texts": 8, "uptrain_steps": 1})
    parser.add_argument("--n-groups", type=int, nargs="+", help="key-value heads (default: all that fit)")
    parser.add_argument("--n-texts", type=harness.positive_int, default=32, help="texts to align heads on")
    parser.add_argument("--uptrain-steps", type=harness.count, default=80, help="steps of 8 x 256 tokens")
    with harness.script(parser) as args:
        text, state = harness.load_text(args), load_checkpoint(args.checkpoint)
        (mha,) = harness.load_models(args, GPTlite)
        p = parameters_of(mha)
        H, D = p.n_heads, p.d_head
        groups = args.n_groups or [G for G in range(H - 1, 0, -1) if H % G == 0]
        for G in (groups := sorted(set(groups), reverse=True)):
            check_groups(H, G)
        report = harness.Report(args, "GQA, heads aligned", mha, UPTRAINED_COLUMNS, text=text)
        training = text.train, args.uptrain_steps, UPTRAIN_LR, 8, p.seqlen
        control = pack_linears(uptrained(*harness.load_models(args, GPTlite, packed=False), *training))
        report.row("MHA", baseline=True, **report.loss_figures(mha, mha))
        after = report.row("MHA, trained on", **report.loss_figures(control, mha))

        reader = model_from(state, GPTlite, text.vocab_size).to(args.device)
        samples = sample_prompts(text.train, args.n_texts, p.seqlen).to(args.device)  # [n, T]
        inputs = attention_inputs(reader, samples)  # L tensors [N, E]
        rows, losses = {}, {}
        for G in groups:
            aligned = align_heads(state, H, D, G, inputs)
            rotated = model_from(aligned, GPTlite, text.vocab_size).to(args.device)
            with torch.no_grad():
                logits = rotated(samples[:2]), reader(samples[:2])  # [2, T, V] each
            report.check_close(f"n_groups {G}: rotating without merging changes nothing", *logits)
            for form, weights in (("mean", state), ("aligned", aligned)):
                name, converted = f"GQA {G}, {form}", convert_mha_to_gqa(weights, H, D, G)
                gqa = harness.build(args, converted, GPTlite_GQA, packed=False, n_groups=G)
                trained = pack_linears(uptrained(gqa, *training, label=name))
                figures = report.loss_figures(pack_linears(gqa), mha)
                figures |= uptrained_figures(report, trained, control)
                kv_bytes = harness.kv_bytes_per_token(gqa, samples[:1])
                rows[name] = report.row(name, kv_bytes_per_token=kv_bytes, **figures)
                losses[name] = report.loss_of(gqa), report.loss_of(trained)

        pairs = [(f"GQA {G}, aligned", f"GQA {G}, mean") for G in groups]
        for one, other in pairs[-3:]:
            start, end = (loss_difference(*pair) for pair in zip(losses[one], losses[other], strict=True))
            report.why(
                words.loss_between(one, other, *start)
                + words.loss_between(f"{one} and trained on", f"{other} and trained on", *end)
            )
        report.why(words.loss(after))
        lines = {}
        for form in ("mean", "aligned"):
            of_form = [rows[f"GQA {G}, {form}"] for G in groups]
            n_bytes = [row["kv_bytes_per_token"] for row in of_form]
            lines[form] = n_bytes, [row["valid_loss"] for row in of_form]
            lines[f"{form}, trained on"] = n_bytes, [row["uptrained_loss"] for row in of_form]
        report.plot_lines(lines, "KV bytes per token", "validation loss (nats)", "Converted weights")
        report.finish()
