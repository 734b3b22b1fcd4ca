"""Multi-LoRA serving: many fine-tuned models at once, as small adapters beside the weights of one.

An adapter of rank r adds (x A) B to a linear layer, r numbers wide in between: 3% of the weights at rank 8.
Merged into the weights it costs nothing in a step, but a model then serves one adapter. Kept apart, each row
of a batch takes its own: the base product is shared, and the small products are gathered by row (Punica's
BGMV) or grouped by adapter (SGMV), for which the batch is sorted once a step. Where adapters and the KV cache
share their memory: more/lora_pool.py.

Exact: the tokens are those of merged weights. Wins as soon as a few adapters are in use at a time, since a
step reads the base weights once for all of them; and memory always: a further model costs its adapter only.
Loses with one adapter, where the small products come on top of every layer; on a GPU they add launches, so
that a few more adapters are needed.

Run: python main_multi_lora.py            (--steps 300 trains the adapters for longer)

Source: Hu et al., LoRA, 2021; Chen et al., Punica, 2023; Sheng et al., S-LoRA, 2023.
"""

import copy

import torch
from torch import nn

from gptlite_lora import adapter_bytes, in_type, merge, new_adapter, target_layers, with_adapters
from inference_training import train_steps, use_training_attention
from inference_utils import loss_difference, window_losses
from main_kvcache import generate_kvcache

# Products of a layer: x [B, T, E_in] with the A [n + 1, E_in, R] and B [n + 1, R, E_out] of adapters of these
# ranks, filled up with zeros to R; rows says which adapter each row has -> [B, T, E_out]


def naive_product(x, A, B, ranks, rows):
    """One row after the other: (x A) B with the A and B of its own adapter."""
    return torch.stack([row @ A[a] @ B[a] for row, a in zip(x, rows.which.tolist(), strict=True)])


def gathered_product(x, A, B, ranks, rows):
    """The same at once: each row gets a copy of its A and B, filled up to the largest rank (BGMV)."""
    return (x @ A[rows.which]) @ B[rows.which]  # [B, T, E_in] @ [B, E_in, R] @ [B, R, E_out]


def grouped_product(x, A, B, ranks, rows):
    """The same, one product for all rows of an adapter, of its own rank; no copies (SGMV)."""
    out = x.new_zeros(*x.shape[:-1], B.shape[-1])  # [B, T, E_out]
    for a, start, stop in rows.groups:
        if a > 0:
            out[start:stop] = x[start:stop] @ A[a, :, : ranks[a]] @ B[a, : ranks[a]]
    return out


def train_adapter(model, rank, train_data, iters, lr, batch_size, seqlen, seed=42):
    """An adapter of this rank, trained in float32 on token ids [N]; the model itself stays as it is."""
    learner = copy.deepcopy(model).float()
    learner = use_training_attention(
        with_adapters(learner, [new_adapter(learner, rank, seed)], grouped_product)
    )
    for name, p in learner.named_parameters():
        p.requires_grad_(name.endswith((".A", ".B")))
    learner.rows.use(torch.ones(batch_size, dtype=torch.int64))
    train_steps(learner, train_data, iters, lr, batch_size, seqlen, seed, label=f"adapter of rank {rank}")
    layers = [getattr(module, name) for module, name in target_layers(learner)]
    return [(layer.A[1].detach().clone(), layer.B[1].detach().clone()) for layer in layers]


class MergedModels(nn.Module):
    """A model for each adapter, its weights merged: what many adapters beside one model replace.

    Args: model: the base; adapters: list of adapters 1, 2, ...; which [B]: the adapter of each row.
    """

    def __init__(self, model, adapters, which):
        super().__init__()
        self.models = nn.ModuleList(merge(copy.deepcopy(model), adapter) for adapter in adapters)
        self.which, self.seqlen = which, model.seqlen

    def forward(self, x):
        """Token ids [B, T] -> logits [B, T, V], each row by its own model."""
        rows = zip(self.which.tolist(), x.split(1), strict=True)
        return torch.cat([self.models[a - 1](row)[0] for a, row in rows])


def each_adapter(prompts, n_tokens, which, run):
    """One adapter after the other: run(adapter, its prompts) -> tokens, in the order of the batch again."""
    out = prompts.new_empty(prompts.shape[0], prompts.shape[1] + n_tokens)  # [B, T + n]
    for adapter in which.unique().tolist():
        rows = which == adapter  # [B]
        out[rows] = run(adapter, prompts[rows])
    return out


def generate_merged(merged, prompts, n_tokens, which):
    """With MergedModels, each model over the rows of its adapter."""
    run = lambda a, rows: generate_kvcache(merged.models[a - 1], rows, n_tokens, merged.seqlen)  # noqa: E731
    return each_adapter(prompts, n_tokens, which, run)


def generate_switching(model, prompts, n_tokens, which, adapters):
    """With one model, into which the adapter that is needed is merged, and out of it again."""

    def run(a, rows):
        tokens = generate_kvcache(merge(model, adapters[a - 1]), rows, n_tokens, model.seqlen)
        merge(model, adapters[a - 1], -1)
        return tokens

    return each_adapter(prompts, n_tokens, which, run)


def generate_in_turn(model, prompts, n_tokens, which):
    """With adapters beside the weights, one adapter at a time."""

    def run(a, rows):
        model.rows.use(which.new_full((len(rows),), a))
        tokens = generate_kvcache(model, rows, n_tokens, model.seqlen)
        model.rows.which = None  # nothing of a batch outlives it
        return tokens

    return each_adapter(prompts, n_tokens, which, run)


def generate_together(model, prompts, n_tokens, which):
    """With adapters beside the weights, all rows [B] in one batch, sorted by adapter once."""
    order = which.argsort(stable=True)  # [B]
    model.rows.use(which[order])
    tokens = generate_kvcache(model, prompts[order], n_tokens, model.seqlen)  # [B, T + n]
    model.rows.which = None
    return tokens[order.argsort()]


def losses_by_text(models, texts, n_windows):
    """Loss of each model on each text; where both have one name, its difference to the first model's.

    Args: models: {name: model}; texts: {name: token ids [N]}. Returns: a line {heading: figure} a model, the
        difference with its standard error.
    """
    lines, first = [], {}
    for adapter, model in models.items():
        line = {"adapter": adapter} | dict.fromkeys((*texts, "own, to base", "+-"))
        for name, tokens in texts.items():
            losses = window_losses(model, tokens, n_windows)  # [n_windows]
            first.setdefault(name, losses)
            line[name] = losses.mean().item()
            if name == adapter:
                line["own, to base"], line["+-"] = loss_difference(losses, first[name])
        lines.append(line)
    return lines


def kept_in(dtype, model, adapter, model_bytes, tokens, n_windows):
    """What it takes and costs to keep an adapter in a type: a line {heading: figure}.

    Args: model: GPTlite; model_bytes: of its weights; tokens [N]: whose loss tells what rounding costs.
    """
    n_bytes = adapter_bytes(in_type(adapter, dtype))
    rounded = in_type(in_type(adapter, dtype), adapter[0][0].dtype)  # it is computed with in its first type
    losses = [window_losses(merge(copy.deepcopy(model), a), tokens, n_windows) for a in (rounded, adapter)]
    rise, se = loss_difference(*losses)
    line = {"rank": adapter[0][0].shape[1], "type": str(dtype).removeprefix("torch."), "KB": n_bytes / 1e3}
    line |= {"share of the model": n_bytes / model_bytes, "in the place of a copy": model_bytes // n_bytes}
    line["MB of 100 and the model"] = (model_bytes + 100 * n_bytes) / 1e6
    return line | {"MB of two models": 2 * model_bytes / 1e6, "rise of loss": rise, "+-": se}


if __name__ == "__main__":
    from functools import partial
    from itertools import product

    import inference_report as harness
    import inference_words as words
    from data.shakespeare import check_length, validation_plays
    from gptlite import GPTlite
    from gptlite_kvcache import GPTlite_KVCache
    from inference_report import Method
    from inference_utils import weight_bytes

    quick = {"batch_size": 3, "prompt_len": 16, "n_tokens": 6, "steps": 2}
    parser = harness.options(__doc__, repeats=2, quick=quick, batch_size=8, prompt_len=32, n_tokens=32)
    parser.add_argument("--steps", type=harness.positive_int, default=60, help="training steps of an adapter")
    with harness.script(parser) as args:
        text, B, lr, n_windows = harness.load_text(args), args.batch_size, 3e-3, min(args.n_windows, 32)
        plain, base = harness.load_models(args, GPTlite, GPTlite_KVCache, packed=False)  # to be trained
        prompts, which = text.prompts(B, args.prompt_len), torch.arange(1, B + 1, device=args.device)  # [B]
        if args.prompt_len + args.n_tokens > plain.seqlen + 1:
            raise ValueError(f"--prompt-len and --n-tokens: at most {plain.seqlen + 1} together")
        plays = validation_plays(text.valid, args.data is not None)  # {name: token ids [N]}
        cuts = {name: ids.split(len(ids) * 4 // 5 + 1) for name, ids in plays.items()}
        seen, unseen = ({name: cut[i] for name, cut in cuts.items()} for i in (0, -1))
        for ids in unseen.values():  # now, and not after the training
            check_length(ids, plain.seqlen)
        report = harness.Report(args, "multi-LoRA", base, hide=("ttft_ms", "tpot_ms", "tpot_p99_ms"))

        # Adapters of three ranks, each trained on most of a play that the model never saw
        adapters, ranks, n_rows = {}, (4, 8, 16), 2 if args.quick else 8
        for rank, (name, ids) in zip(ranks, seen.items(), strict=True):
            adapters[name] = train_adapter(plain, rank, ids, args.steps, lr, n_rows, plain.seqlen, args.seed)
        models = {"base": plain} | {n: merge(copy.deepcopy(plain), a) for n, a in adapters.items()}
        lines = losses_by_text(models, unseen, n_windows)
        report.sweep(f"Loss on the unseen fifth of each play, {n_windows} windows", lines)

        # A batch in which each row has an adapter of its own
        many, merged = [[*adapters.values()][i % 3] for i in range(B)], "merged copies"
        copies, switched = MergedModels(base, many, which), copy.deepcopy(base)
        products = {"gathered": gathered_product, "grouped": grouped_product}
        apart = {name: with_adapters(base, many, product) for name, product in products.items()}
        methods = [
            Method(merged, generate_merged, copies, which, steps=[*copies.models], loss=False),
            Method("merged in turn", generate_switching, switched, which, many, loss=False),
            Method("apart, in turn", generate_in_turn, apart["grouped"], which, loss=False),
            *(Method(name, generate_together, model, which, loss=False) for name, model in apart.items()),
        ]
        rows = report.compare(prompts, args.n_tokens, *methods)
        with torch.no_grad():
            for name, model in apart.items():
                model.rows.use(0 * which)  # no adapter: bit for bit
                report.check_close(f"{name}: logits of the base", model(prompts)[0], base(prompts)[0], 0.0)
                model.rows.use(which)
                report.check_close(f"{name}: logits of merged weights", model(prompts)[0], copies(prompts))

        def ways(k):  # n tokens for each of k rows with k adapters
            runs = {merged: partial(generate_merged, copies)}
            runs |= {name: partial(generate_together, model) for name, model in apart.items()}
            return {name: partial(run, prompts[:k], n, which[:k]) for name, run in runs.items()}

        n = max(args.n_tokens // 4, 2)
        title = f"{n} tokens for each adapter's request (ms)"
        times = report.time_sweep(title, "adapters", sorted({1, min(2, B), min(4, B), B}), ways)
        kept = {}
        for dtype, (name, a) in product((torch.float32, torch.bfloat16), adapters.items()):
            kept[dtype, name] = kept_in(dtype, plain, a, weight_bytes(base), unseen[name], n_windows)
        report.sweep("Memory of an adapter", [*kept.values()])
        first = sum(min(lines[1:], key=lambda line: line[name])["adapter"] == name for name in plays)
        gains = ", ".join(f"{line['own, to base']:+.3f} +- {line['+-']:.3f}" for line in lines[1:])
        figures = f"of {len(plays)} plays; to the base on its own play {gains} nats."
        best, some = (f"{x} adapter is best on its own play: {first} {figures}" for x in ("Each", "Not each"))
        report.why(words.choose(first, (len(plays), best), some))
        ours, other, small = rows["gathered"], rows[merged], kept[torch.bfloat16, next(iter(plays))]
        grouped = words.compare(rows["grouped"], ours, "tokens_per_s")
        report.why(words.crossover(times, "adapters", "grouped", merged) + grouped)
        sizes = {x: {"method": x, "memory": small[f"MB of {x}"]} for x in ("100 and the model", "two models")}
        lost = words.loss_between("bfloat16", "float32", small["rise of loss"], small["+-"])
        report.why(words.about("adapters of rank 4", words.compare(*sizes.values(), "memory") + lost))
        report.why(words.compare(ours, other, "tokens_per_s") + words.compare(ours, other, "peak_memory_mb"))
        report.plot_sweep(title)
        report.finish()
