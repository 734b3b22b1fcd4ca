"""Early exit: a token leaves the model after the first block whose prediction is confident enough.

The head can read every block's output, so each block has a prediction of its own. Where its best token is
clearly ahead of the second, the later blocks are skipped for this token (CALM). Later tokens need its keys
and values in all blocks all the same: the skipped blocks compute them, and nothing else, from the state with
which it left (state copying). A static cut, the same block for all tokens, stands in the same table.

Approximate; a threshold that no confidence reaches gives the model unchanged. Wins time in decode steps of a
single sequence whose tokens leave early, and where the later blocks do change little. Loses the head after
each block, and in a batch most of the gain, since a step lasts until its last row has left. A static cut
skips keys, values and heads as well and needs no test: a token's own exit has to beat that, not the whole
model. The paper calibrates its threshold for a bound on the risk; here thresholds are compared.

Run: python main_early_exit.py            (--thresholds 0.9 for one)

Source: Schuster et al., Confident Adaptive Language Modeling (CALM), 2022.
"""

import torch

from gptlite_kvcache import GPTlite_KVCache, checked_window


def confidence(model, x):
    """How far the best token is ahead of the second, as probabilities: states [B, Sq, E] -> [B, Sq]."""
    best = model.fc_out(model.ln(x)).float().softmax(dim=-1).topk(2, dim=-1).values  # [B, Sq, 2]
    return best[..., 0] - best[..., 1]


def copy_state(block, x, kv_cache, max_seqlen):
    """What a skipped block does: keys and values of tokens that have left, from the state they left with.

    Args: x [B, Sq, E]; kv_cache: (k, v) of the block, [B, H, S, D] each, or None; max_seqlen: its window.
    Returns: the longer cache.
    """
    x, mha = block.ln1(x), block.mha
    kv = [mha.split_heads(project(x)) for project in (mha.key_proj, mha.value_proj)]  # [B, H, Sq, D] each
    if kv_cache is not None:
        kv = [torch.cat(pair, dim=-2) for pair in zip(kv_cache, kv, strict=True)]  # [B, H, Sk, D]
    return tuple(t[..., -max_seqlen:, :] for t in kv)


class GPTlite_EarlyExit(GPTlite_KVCache):
    """GPTlite_KVCache whose tokens leave when they are confident; the weights are GPTlite's.

    Args: first: blocks that every token passes; threshold: a token leaves if its confidence is above it, so
        nobody does from 1 on, and below 0 everybody after `first` blocks. While `depths` is a list, each call
        adds how many blocks its tokens passed [B, Sq]. Raises ValueError for a first block below 1.
    """

    def __init__(self, *args, first=1, threshold=0.9, **kwargs):
        super().__init__(*args, **kwargs)
        if not 1 <= first <= len(self.blocks):
            raise ValueError(f"a token passes 1 to {len(self.blocks)} blocks before it leaves, not {first}")
        self.first, self.threshold, self.depths = first, threshold, None

    def forward(self, x, kv_cache=None, max_seqlen=None):
        """As GPTlite_KVCache; tokens at once leave where they would one by one, each by its own state."""
        window = checked_window(self, max_seqlen)
        if x.shape[1] == 0:
            raise ValueError("no tokens: an empty prompt has nothing to continue")
        kv_cache = [None] * len(self.blocks) if kv_cache is None else kv_cache
        n_past = 0 if kv_cache[0] is None else kv_cache[0][0].shape[-2]
        positions = torch.arange(n_past, n_past + x.shape[1], device=x.device)  # [Sq]
        x = self.token_embedding(x) + self.position_embedding(positions.clamp(max=window - 1))  # [B, Sq, E]
        inside = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)  # [B, Sq]: has not left
        depths, new_cache = torch.zeros_like(inside, dtype=torch.int64), []
        for i, (block, layer_cache) in enumerate(zip(self.blocks, kv_cache, strict=True)):
            if i >= self.first:
                inside = inside & ~(confidence(self, x) > self.threshold)  # a NaN is not confident
            if inside.any():  # the block runs for all rows, and those that have left keep their state
                out, layer_cache = block(x, layer_cache, window)  # [B, Sq, E]
                x = torch.where(inside.unsqueeze(-1), out, x)  # [B, Sq, E]
            else:
                layer_cache = copy_state(block, x, layer_cache, window)
            depths += inside
            new_cache.append(layer_cache)
        if self.depths is not None:
            self.depths.append(depths)
        return self.fc_out(self.ln(x)), new_cache  # [B, Sq, V]


@torch.no_grad()
def depths_of(model, tokens):
    """How many blocks each token passes in a GPTlite_EarlyExit: token ids [B, T] -> int64 [B, T]."""
    model.depths = []
    model(tokens)
    (depths,), model.depths = model.depths, None
    return depths


def static_cut(model, n_blocks):
    """Leaves a GPTlite its first n_blocks blocks, in place. ValueError for more than there are."""
    if not 1 <= n_blocks <= len(model.blocks):
        raise ValueError(f"{n_blocks} blocks: the model has {len(model.blocks)}")
    model.blocks = model.blocks[:n_blocks]
    return model


def blocks_of_a_step(depths, batch_size):
    """How many blocks a step of batch_size sequences runs, on average: the deepest row's.

    Args: depths [N, T]: of the tokens of N sequences, N at least batch_size.
    """
    n = depths.shape[0] // batch_size * batch_size
    groups = depths[:n].unflatten(0, (-1, batch_size))  # [n / batch_size, batch_size, T]
    return groups.amax(dim=1).double().mean().item()


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from inference_agreement import COLUMNS, agreement, closer
    from inference_report import Method
    from inference_utils import loss_difference, parameters_of
    from main_kvcache import generate_kvcache

    quick = {"thresholds": [0.7], "n_tokens": 16, "batch_size": 2}
    parser = harness.options(__doc__, 3, quick=quick, batch_size=8, prompt_len=64, n_tokens=96)
    add, default = parser.add_argument, [0.3, 0.5, 0.7, 0.9]
    add("--thresholds", type=harness.share, nargs="+", default=default, help="of confidence, to leave")
    columns = COLUMNS | {"n_blocks": ("blocks a token", "{:.2f}")}
    hide = ("tpot_p99_ms", "peak_memory_mb", "forward_tokens", "n_parameters", "same_output")
    with harness.script(parser) as args:
        text, (full,) = harness.load_text(args), harness.load_models(args, GPTlite_KVCache)
        L, W = parameters_of(full).n_layers, full.seqlen
        report = harness.Report(args, "early exit", full, columns, hide, text)
        texts = text.prompts(8 if args.quick else 16, W)  # [N, W]
        firsts, some = sorted({1, L // 2}), sorted(set(args.thresholds))
        middle = some[len(some) // 2]

        def leaving(first, threshold):
            kind = partial(GPTlite_EarlyExit, first=first, threshold=threshold)
            return harness.load_models(args, kind)[0]

        # Exits by token and static cuts: all of them by loss, two by time
        models = {f"from block {f}, {t}": leaving(f, t) for f in firsts for t in some}
        for n in range(1, L):
            models[f"cut to {n}"] = static_cut(*harness.load_models(args, GPTlite_KVCache), n)
        figures, depths = {}, {}
        for name, model in models.items():
            figures[name] = agreement(model, full, texts) | {"n_blocks": float(len(model.blocks))}
            if isinstance(model, GPTlite_EarlyExit):
                depths[name] = depths_of(model, texts)  # [N, W]
                figures[name]["n_blocks"] = depths[name].double().mean().item()
        name = f"from block {firsts[0]}, {middle}"
        n_cut = min(max(int(figures[name]["n_blocks"]), 1), L - 1)  # as many blocks or fewer
        cut = f"cut to {n_cut}"
        base, tables = Method("all blocks", generate_kvcache, full, n_blocks=float(L)), {}
        for prompts in (text.prompts(B, args.prompt_len) for B in sorted({1, args.batch_size})):
            methods = [Method(n, generate_kvcache, models[n], exact=False, **figures[n]) for n in (name, cut)]
            tables[len(prompts)] = report.compare(prompts, args.n_tokens, base, *methods)
        rows = {n: tables[1][n] for n in (name, cut)}
        for other in [n for n in models if n not in rows]:
            losses = report.loss_figures(models[other], full)
            rows[other] = report.row(other, same_output="approximate", **losses, **figures[other])

        nobody, everybody = leaving(1, 1.0), leaving(n_cut, -1.0)
        with torch.no_grad():
            same = [model(texts[:2])[0] for model in (nobody, full, everybody, models[cut])]  # [2, W, V] each
        report.check_close("if nobody leaves, the model unchanged", *same[:2])
        report.check_close(f"if everybody leaves after {n_cut}, the static cut", *same[2:])
        batches = [B for B in (1, 2, 4, 8, 16) if B <= len(texts)]
        steps = [{"batch": B} | {n: blocks_of_a_step(d, B) for n, d in depths.items()} for B in batches]
        report.sweep(title := "Blocks that a step runs, by the deepest of its rows", steps)

        pair = [report.loss_of(models[n]) for n in (name, cut)]
        report.why(words.loss(rows[name]) + words.loss_between(name, cut, *loss_difference(*pair)))
        report.why(closer(rows[name], rows[cut]) + words.compare(rows[name], rows[cut]))
        for B, table in tables.items():
            report.why(words.about(f"batch {B}", words.compare(table[name], table["all blocks"])))
        lines = {"static cut": [n for n in rows if n.startswith("cut")]}
        lines |= {f"from block {f}": [n for n in rows if n.startswith(f"from block {f},")] for f in firsts}
        for key, names in lines.items():
            points = sorted((rows[n]["n_blocks"], rows[n]["valid_loss"]) for n in names)
            lines[key] = tuple(zip(*points, strict=True))
        report.plot_lines(lines, "blocks a token", "valid loss (nats)")
        report.plot_sweep(title, "blocks", "x")
        report.finish()
