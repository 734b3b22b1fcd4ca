"""Grouped-query attention (GQA): a smaller KV cache, converted from the trained model, and its price.

Keys and values of several query heads become one head: 3, 2 or 1 (MQA) instead of 6, so the cache, and
the bytes of it that a decode step reads, shrink as groups/heads; the weights lose only the projections that
went. The trained weights are converted by averaging the heads of a group, as the paper does, and then trained
on for a few steps ("up-training").

Approximate: the mean of heads that were not trained to agree loses much, and a few steps bring back a part
of it. How much is measured beside a control, the unconverted model after the same steps. Heads that are
rotated into a common basis before they are averaged start with a far lower loss: more/gqa_alignment.py.
Grouped and expanded attention give equal results. Wins memory always, and time where a step reads more cache
than weights (large batches, long texts); loses quality.

Run: python main_gqa.py            (--n-groups 1 --uptrain-steps 0 for one conversion, not trained on)

Source: Shazeer, 2019 (MQA); Ainslie et al., GQA, 2023.
"""

import copy
from functools import partial

from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa, expanded_attention, grouped_attention
from gptlite_kvcache import scaled_dot_product_attention_kv_cache
from inference_training import train_steps


def convert_and_uptrain(state_dict, model, train_data, uptrain_iters, lr, batch_size, seqlen):
    """Weights of GPTlite in a model with fewer heads of keys and values, and what a few steps make of it.

    Args: state_dict: of GPTlite; model: GPTlite_GQA of the same size, whose weights are replaced in place;
        train_data: token ids [N]; the others as in train_steps.
    Returns: the model as converted, by the mean of each group's heads, and a copy that was trained on.
    """
    mha = model.blocks[0].mha
    model.load_state_dict(convert_mha_to_gqa(state_dict, mha.n_heads, mha.d_head, mha.n_groups))
    trained = copy.deepcopy(model)
    train_steps(trained, train_data, uptrain_iters, lr, batch_size, seqlen)
    return model, trained


def decode_attention(Q, K, V, groups):
    """Functions that attend with one query [B, H, 1, D] to keys and values [B, H, Sk, D], or G heads of them.

    Returns: {name: function}: multi-head attention, and the grouped and the expanded form for each G.
    """
    forms = {"MHA": partial(scaled_dot_product_attention_kv_cache, Q, K, V)}
    for G in groups:
        # any G of the heads will do: what is compared here is time, and one form with the other
        k, v = K[:, :G].contiguous(), V[:, :G].contiguous()  # [B, G, Sk, D]
        forms[f"{G} grouped"] = partial(grouped_attention, Q, k, v)
        forms[f"{G} expanded"] = partial(expanded_attention, Q, k, v)
    return forms


if __name__ == "__main__":
    import torch

    import inference_report as harness
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_gqa import check_groups, use_expanded
    from gptlite_kvcache import GPTlite_KVCache
    from inference_report import Method
    from inference_training import UPTRAIN_LR, UPTRAINED_COLUMNS, uptrained, uptrained_figures
    from inference_utils import is_distilled, load_checkpoint, make_model, n_parameters, parameters_of
    from linear_packed import pack_linears
    from main_kvcache import generate_kvcache

    quick = {"batch_size": 2, "prompt_len": 64, "n_tokens": 8, "uptrain_steps": 1}
    parser = harness.options(__doc__, repeats=3, quick=quick, batch_size=8, prompt_len=128, n_tokens=32)
    parser.add_argument("--n-groups", type=int, nargs="+", help="key-value heads (default: all that fit)")
    parser.add_argument("--uptrain-steps", type=harness.count, default=80, help="steps of 8 x 256 tokens")
    with harness.script(parser) as args:
        text, state = harness.load_text(args), load_checkpoint(args.checkpoint)
        (mha,) = harness.load_models(args, GPTlite_KVCache)
        p, H = parameters_of(mha), parameters_of(mha).n_heads
        groups = sorted(set(args.n_groups or [G for G in range(1, H) if H % G == 0]), reverse=True)
        for G in groups:
            check_groups(H, G)
        prompts = text.prompts(args.batch_size, args.prompt_len)  # [B, T]
        hide = ("tpot_p99_ms", "speedup", "forward_tokens", "n_parameters", "same_output")
        report = harness.Report(args, "GQA", mha, UPTRAINED_COLUMNS, hide, text)

        training = text.train, args.uptrain_steps, UPTRAIN_LR, 8, p.seqlen
        (plain,) = harness.load_models(args, GPTlite, packed=False)  # training needs ordinary layers
        control, by_groups = pack_linears(uptrained(plain, *training)), {}
        for G in groups:
            gqa = make_model(GPTlite_GQA, text.vocab_size, is_distilled(state), n_groups=G).to(args.device)
            both = convert_and_uptrain(state, gqa, *training)
            gqa, trained = (pack_linears(model.to(args.dtype)) for model in both)
            figures = uptrained_figures(report, trained, control)  # beside the times, which do not change
            by_groups[G] = Method(f"GQA {G}, mean", generate_kvcache, gqa, exact=False, **figures)
        expanded = use_expanded(copy.deepcopy(by_groups[groups[0]].model))
        by_groups["expanded"] = Method(f"GQA {groups[0]}, expanded", generate_kvcache, expanded, exact=False)
        methods = [Method("MHA", generate_kvcache, mha), *by_groups.values()]
        rows = report.compare(prompts, args.n_tokens, *methods, label="")
        after = report.row("MHA, trained on", **report.loss_figures(control, mha))
        group_bytes = 2 * p.n_layers * p.d_head * args.dtype.itemsize  # of a token, for each group
        for G in groups:
            kv_bytes = rows[f"GQA {G}, mean"]["kv_bytes_per_token"]
            report.check(f"n_groups {G}: the cache takes {G}/{H} of MHA's bytes", kv_bytes == group_bytes * G)
        whole = harness.build(args, convert_mha_to_gqa(state, H, p.d_head, H), GPTlite_GQA, n_groups=H)
        with torch.no_grad():
            report.check_close(f"n_groups {H} is the model unchanged", whole(prompts)[0], mha(prompts)[0])

        def forms(context, batch):  # attention of one layer alone, where the context can be long
            Q, K, V = (torch.randn(batch, H, n, p.d_head, device=args.device) for n in (1, context, context))
            return decode_attention(*(t.to(args.dtype) for t in (Q, K, V)), groups)

        contexts = (256, 1024) if args.quick else (1024, 4096, 16384)
        for batch in (1, 8):  # the larger one is explained and drawn
            title = f"Attention of one layer in a decode step (ms), batch {batch}"
            sweep = report.time_sweep(title, "context", contexts, partial(forms, batch=batch))
        outputs = {name: form() for name, form in forms(300, 2).items()}
        for G in groups:
            pair = [outputs[f"{G} {form}"] for form in ("grouped", "expanded")]
            report.check_close(f"{G} grouped equals {G} expanded", *pair)

        least = rows[by_groups[groups[-1]].name]
        n = prompts.shape[1] + args.n_tokens // 2  # tokens in mid-answer, the step's own the last of them
        step = harness.forward_cost(p, text.vocab_size, len(prompts), 1, n - 1, args.dtype)
        fewer_weights = n_parameters(mha) - least["n_parameters"]
        cache_bytes = group_bytes * (H - groups[-1]) * len(prompts) * n
        n_bytes = step.n_bytes - fewer_weights * args.dtype.itemsize - cache_bytes
        less = harness.Cost(step.flops - 2 * fewer_weights * len(prompts), n_bytes)
        report.why_step({"MHA": step, least["method"]: less}, rows)
        report.why(words.compare(least, rows["MHA"]) + words.compare(least, rows["MHA"], "peak_memory_mb"))
        pairs = (f"{groups[-1]} grouped", "MHA"), (f"{groups[0]} grouped", f"{groups[0]} expanded")
        one, other = (words.crossover(sweep, "context", *pair) for pair in pairs)
        report.why(one + other)
        report.why(words.loss(after) + words.recovery(least, args.uptrain_steps))
        points = {name: (row["kv_bytes_per_token"], row["valid_loss"]) for name, row in rows.items()}
        report.plot_points(points, "KV bytes per token", "valid loss (nats)", "Before training on")
        report.plot_sweep(title)
        report.finish()
