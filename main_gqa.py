"""Grouped-query attention (GQA): a smaller KV cache, converted from the trained model, and its price.

Keys and values of several query heads become one head: 3, 2 or 1 (MQA) instead of 6, so the cache and
the bytes that a decode step reads shrink as groups/heads. The trained weights are converted by averaging
the heads of a group (the post's way), or after rotating them into a common basis, and then trained on for
a few steps. Approximate: the loss rises, and how far it comes back is measured, beside a control that was
trained on without conversion. Exact: the rotation itself, and grouped against expanded attention.

Run: python main_gqa.py            (--plot gqa.png; losses in float32 whatever --dtype says)

Source: Shazeer, 2019 (MQA); Ainslie et al., GQA, 2023; Jin et al., Align Attention Heads Before Merging
Them, 2024 (the rotation; they also choose which heads form a group, here it is always neighbours).
"""

import torch

from gptlite_gqa import check_groups


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
    for batch in tokens.split(batch_size):
        model(batch)
    for hook in hooks:
        hook.remove()
    return [torch.cat(seen).cpu() for seen in inputs]  # [N, E] each


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


if __name__ == "__main__":
    import inference_report as rep
    import inference_training as training
    import inference_utils as utils
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters
    from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa, expanded_attention, grouped_attention
    from gptlite_kvcache import GPTlite_KVCache, scaled_dot_product_attention_kv_cache
    from main_kvcache import generate_kvcache

    parser = rep.options(__doc__, repeats=3)
    parser.add_argument("--batch-size", type=rep.positive_int, default=8, help="sequences of the batch")
    parser.add_argument("--prompt-len", type=rep.positive_int, default=128, help="tokens of the prompts")
    parser.add_argument("--n-tokens", type=rep.positive_int, default=32, help="new tokens")
    parser.add_argument("--n-groups", type=int, nargs="+", default=[3, 2, 1], help="key-value heads")
    parser.add_argument("--uptrain-steps", type=rep.count, default=80, help="steps of 8 x 256 tokens")
    with rep.script(parser) as args:
        p, dev, quick = get_gptlite_model_parameters(), args.device, args.quick
        W, H, D, tolerance, B = p.seqlen, p.n_heads, p.d_head, 1e-4, 2 if quick else args.batch_size
        n_tokens, n_steps = (8, min(args.uptrain_steps, 6)) if quick else (args.n_tokens, args.uptrain_steps)
        train_batch, train_len, n_windows, n_texts = (2, 128, 4, 4) if quick else (8, W, 64, 32)
        groups = sorted(set(args.n_groups), reverse=True)
        most, least = groups[0], groups[-1]
        for G in groups:
            check_groups(H, G)
        vocab_size, train_data, valid_data, _, _ = get_shakespeare_data(args.data)
        mha_state = utils.load_checkpoint(args.checkpoint)

        def make(state, model_class=GPTlite_GQA, **kwargs):
            model = utils.make_model(model_class, vocab_size, **kwargs)
            return utils.load_weights(model, state, str(args.checkpoint)).to(dev)

        def measure_loss(state, label, **kwargs):
            """Loss of these weights, and after training on, with the same batches for all."""
            how = (n_windows, n_steps, p.lr / 5, train_batch, train_len, args.seed, label)
            loss = training.uptrained_losses(make(state, **kwargs), train_data, valid_data, *how)
            return loss["valid_loss"], loss.get("uptrained_loss")

        # Conversion: what must be equal, and the losses
        mha = make(mha_state, GPTlite_KVCache)
        sizes = {"batch_size": B, "prompt_len": min(args.prompt_len, W), "n_tokens": n_tokens}
        columns = {"valid_loss": ("loss", "{:.4f}"), "uptrained_loss": ("up-trained", "{:.4f}")}
        report = rep.Report(args, "GQA", mha, columns, **sizes, uptrain_steps=n_steps)
        for key in ("tpot_p99_ms", "forward_tokens", "same_output"):  # no news here: left out of the table
            report.columns.pop(key)
        prompts = utils.sample_prompts(valid_data, B, sizes["prompt_len"]).to(dev)  # [B, T]
        inputs = attention_inputs(mha, utils.sample_prompts(train_data, n_texts, W).to(dev))
        models, converted = {"MHA": mha}, {H: convert_mha_to_gqa(mha_state, H, D, H)}
        losses = {"MHA": measure_loss(mha_state, "control", model_class=GPTlite_KVCache)}
        with torch.no_grad():
            logits = mha(prompts)[0]  # [B, T, V]
            same = utils.largest_difference(make(converted[H], n_groups=H)(prompts)[0], logits)
        report.check(f"n_groups {H} is the model unchanged (logits differ by {same:.0e})", same <= tolerance)
        for G in groups:
            aligned = align_heads(mha_state, H, D, G, inputs)
            with torch.no_grad():
                same = utils.largest_difference(make(aligned, GPTlite_KVCache)(prompts)[0], logits)
            name = f"n_groups {G}: rotating without merging changes nothing (logits differ by {same:.0e})"
            report.check(name, same <= tolerance)
            for how, weights in (("mean", mha_state), ("aligned", aligned)):
                converted[G] = convert_mha_to_gqa(weights, H, D, G)
                losses[how, G] = start, after = measure_loss(converted[G], f"{how} {G}", n_groups=G)
                if n_steps >= 20 or (n_steps and how == "mean" and G == least < H):
                    report.check(f"n_groups {G}, {how}: training on lowers the loss", after < start or G == H)
            models[G] = make(converted[G], n_groups=G)
            if G < H:
                lower = losses["aligned", G][0] < losses["mean", G][0]
                report.check(f"n_groups {G}: aligned heads start lower than the mean", lower)
        for more, fewer in [(most, least)] if quick else zip(groups, groups[1:], strict=False):
            rises = losses["mean", fewer][0] > losses["mean", more][0] or more == fewer
            report.check(f"n_groups {fewer} loses more than {more}, averaged", rises)
            if n_steps >= 20:  # aligned heads need not start in this order, but end in it
                rises = losses["aligned", fewer][1] > losses["aligned", more][1] or more == fewer
                report.check(f"n_groups {fewer} loses more than {more}, aligned and trained on", rises)

        # Generation: the same steps over smaller caches
        models["expanded"] = make(converted[most], n_groups=most)
        for block in models["expanded"].blocks:
            block.mha.expanded = True
        methods = []
        for key, model in models.items():
            model.to(args.dtype)
            run = lambda model=model: generate_kvcache(model, prompts, n_tokens, W)  # noqa: E731
            methods.append(utils.Method(key, run, [model]))
        results = utils.measure(methods, B * n_tokens, args.repeats)
        group_bytes = 2 * p.n_layers * D * args.dtype.itemsize  # of a token, for each group

        def add_row(name, method, G, start=None, after=None):
            with torch.no_grad():
                _, cache = method.models[0](prompts)
            kv_bytes = utils.cache_bytes_per_token([t for kv in cache for t in kv], prompts.shape[1], B)
            report.check(f"{name}: the cache takes {G}/{H} of MHA's bytes", kv_bytes == group_bytes * G)
            figures = {
                "kv_bytes_per_token": kv_bytes,
                "peak_memory_mb": utils.peak_memory_mb(method.run, *method.models, inputs=[prompts]),
                "n_parameters": utils.n_parameters(method.models[0]),
                "same_output": "approximate" if G < H else None,
            }
            is_first = method is methods[0]
            report.row(
                name, results[method.name], is_first, valid_loss=start, uptrained_loss=after, **figures
            )

        add_row("MHA", methods[0], H, losses["MHA"][0])
        report.row("MHA, control", **dict(zip(("valid_loss", "uptrained_loss"), losses["MHA"], strict=True)))
        for method in methods[1:-1]:
            G, family = method.name, "GQA" if method.name > 1 else "MQA"
            add_row(f"{family} {G}, aligned", method, G, *losses["aligned", G])
            start, after = losses["mean", G]
            kv_bytes = group_bytes * G
            report.row(
                f"{family} {G}, mean", kv_bytes_per_token=kv_bytes, valid_loss=start, uptrained_loss=after
            )
        add_row(f"GQA {most}, expanded", methods[-1], most)

        # Attention of a decode step alone, where the context can be long
        contexts = (256, 2048) if quick else (1024, 4096, 16384)
        sweep, apart, limits = [], 0.0, rep.measure_ceilings(dev, args.dtype)
        for batch, context in ((b, n) for b in (1, 8) for n in contexts):
            times = {"batch": batch, "context": context}
            for G in [H, *(G for G in groups if G < H)]:
                Q, K, V = (
                    torch.randn(batch, heads, n, D, device=dev).to(args.dtype)
                    for heads, n in ((H, 1), (G, context), (G, context))
                )
                forms = {"MHA": scaled_dot_product_attention_kv_cache}
                if G < H:
                    forms = {f"{G} grouped": grouped_attention, f"{G} expanded": expanded_attention}
                    apart = max(apart, utils.largest_difference(*(form(Q, K, V) for form in forms.values())))
                for name, form in forms.items():
                    times[name] = utils.median_ms(lambda form=form: form(Q, K, V), args.repeats, dev)  # noqa: B023
            sweep.append(times)
        report.sweep(f"Attention of one layer in a decode step (ms), {H} query heads of {D}", sweep)

        name = f"grouped and expanded attention differ by {apart:.0e} at most"
        report.check(name, apart <= utils.TOLERANCE[args.dtype])

        n = prompts.shape[1] + n_tokens // 2
        step = rep.forward_cost(p, vocab_size, B, 1, n - 1, args.dtype)
        cache = group_bytes * H * B * n
        weights = step.n_bytes - cache
        pair = [methods[0], next(method for method in methods if method.name == least)]
        n_whole, n_least = (utils.n_parameters(method.models[0]) for method in pair)
        tpot = [results[method.name].tpot_ms for method in pair]
        report.why(
            f"A step of {B} sequences at {n} tokens reads {weights / 1e6:.0f} MB of weights and "
            f"{cache / 1e6:.1f} MB of cache: n_groups {least} of {H} saves at most "
            f"{100 * (1 - least / H) * cache / step.n_bytes:.0f}% of these bytes in the cache, and "
            f"{100 * (1 - n_least / n_whole):.0f}% of the weights; TPOT is {tpot[0] / tpot[1]:.2f} times "
            "lower. Cache and weights weigh the same at batch x context = "
            f"{weights / group_bytes / H:.0f}; far below that, GQA buys memory rather than time."
        )
        n_bytes = 2 * H * D * batch * context * args.dtype.itemsize
        bound = rep.lower_bound_ms(rep.Cost(4 * H * D * batch * context, n_bytes), limits)
        grouped = [
            f"n_groups {G} {times['MHA'] / times[f'{G} grouped']:.1f} times (bytes: {H / G:.1f})"
            for G in groups
            if G < H
        ]
        report.why(
            f"Attention alone at {batch} x {context}: MHA reads {n_bytes / 1e6:.0f} MB of keys and values, "
            f"at {limits.bytes_per_s / 1e9:.0f} GB/s at least {bound:.1f} ms, measured {times['MHA']:.1f} ms "
            f"({rep.share_of(bound, times['MHA'])}). Faster than MHA: {', '.join(grouped)}. With few groups "
            "the softmax and the products themselves, which do not shrink, are what is left."
        )
        if most < H:
            report.why(
                f"The expanded form reads {most} heads, writes {H} copies into new memory and reads them "
                f"again: {(most + 2 * H) / H:.1f} times the bytes of MHA, "
                f"{times[f'{most} expanded'] / times['MHA']:.1f} times its time. The smaller cache is "
                "kept, the speed is not."
            )
        start = {how: losses[how, least][0] - losses["MHA"][0] for how in ("mean", "aligned")}
        line = (
            f"n_groups {least} starts at {start['mean']:+.3f} nats (mean), {start['aligned']:+.3f} (aligned)"
        )
        if n_steps:
            after = [losses[how, least][1] - losses["MHA"][1] for how in ("mean", "aligned")]
            line += f"; {n_steps} steps of {train_batch} x {train_len} tokens leave {after[0]:+.3f} and "
            line += f"{after[1]:+.3f} against the control, whose own loss they moved by "
            line += f"{losses['MHA'][1] - losses['MHA'][0]:+.3f}"
        report.why(f"{line}. Averaging heads that live in different bases cancels what they know.")
        if args.plot:
            figure, _ = rep.new_figure(10.0)
            figure.clear()
            left, right = figure.subplots(1, 2)
            for how, color in (("mean", "C1"), ("aligned", "C0")):
                for when, style in enumerate(("--", "-")[: 1 + bool(n_steps)]):
                    points = [losses["MHA"][when], *(losses[how, G][when] for G in groups)]
                    bytes_of = [group_bytes * G for G in (H, *groups)]
                    label = f"{how}, {('converted', 'trained on')[when]}"
                    left.plot(bytes_of, points, style, color=color, marker="o", label=label)
            left.set(xlabel="KV bytes per token", ylabel="validation loss (nats)", title="Quality")
            for i, name in enumerate(list(sweep[0])[2:]):
                for batch, style in ((1, "--"), (8, "-")):
                    points = [row[name] for row in sweep if row["batch"] == batch]
                    label = name if batch == 8 else None
                    right.plot(contexts, points, style, color=f"C{i}", marker=".", label=label)
            right.set(xlabel="context", ylabel="time of one layer (ms)", xscale="log", yscale="log")
            right.set_title("Decode attention, batch 8 (dashed: 1)")
            for axes in (left, right):
                axes.grid(alpha=0.3)
                axes.legend(fontsize=8)
            rep.save_figure(figure, args.plot)
        report.finish()
