"""Lookahead decoding: a model guesses for itself, in rows that a step would leave idle.

Jacobi's way: guess a block of tokens, let the model say what comes behind each, replace all guesses by
that, and accept from the front what did not change. Few guesses settle that way. Lookahead keeps what the
iterations pass through: a window of guesses W wide and N - 1 deep gives W new n-grams a step, which a pool
collects by their first token, and those that begin with the last token are verified in the same forward, as
branches of one tree.

Exact: what is accepted is the model's own choice. Wins without any draft, training or text to copy from,
where dozens of rows cost little more than one: a GPU at small batch. Loses where they do not, since most of
the rows are spent on guesses that are never used: steps are traded for operations.

Run: python more/speculative_lookahead.py            (--levels 4 for longer n-grams)

Source: Fu et al., Break the Sequential Dependency of LLM Inference Using Lookahead Decoding, 2024; Santilli
et al., Accelerating Transformer Inference for Translation via Parallel Decoding, 2023 (Jacobi)."""

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_kvcache import common_length
from gptlite_tree import GPTlite_Tree, Tree, accepted_path, keep_path
from inference_speculation import check_request


class NgramPool:
    """n-grams by their first token: at most n_kept for each, the oldest goes out."""

    def __init__(self, n_kept):
        self.n_kept, self.rest = n_kept, {}

    def add(self, ngram):
        """ngram: a tuple; one that is there already becomes the newest."""
        rest = self.rest.setdefault(ngram[0], [])
        if ngram[1:] in rest:
            rest.remove(ngram[1:])
        rest.append(ngram[1:])
        del rest[: -self.n_kept]

    def behind(self, token):
        """What followed a token, tuples, the oldest first."""
        return self.rest.get(token, [])


def lookahead_tree(width, n_levels, candidates, device="cpu"):
    """The nodes of a step: the root, the window level by level, then the candidates, chains from the root.

    The first level is a chain that begins behind the root; column i of the others goes on from its i-th node.
    """
    parents = [0, *range(width)]  # root, then level 0
    for level in range(1, n_levels):
        parents += [1 + (level - 1) * width + i for i in range(width)]
    for candidate in candidates:
        first = len(parents)
        parents += [0] + [first + i for i in range(len(candidate) - 1)]
    return Tree(parents, device)


@torch.no_grad()
def generate_lookahead(model, prompt, n_tokens, width, n, n_kept, kv_cache, rounds=None):
    """Greedy decoding in rounds of one forward over a window of guesses and the n-grams that fit.

    Args: model: GPTlite_Tree; prompt [1, T]; width: columns of the window; n: tokens of an n-gram, 2 or more;
        n_kept: candidates at most; kv_cache: StaticKVCache, emptied first; rounds: a list that gets
        (rows besides the root, accepted) of each round.
    Returns: prompt and new tokens [1, T + n_tokens]. Raises ValueError as check_request does, and for n < 2.
    """
    check_request(model, prompt, n_tokens)
    if n < 2 or width < 1 or n_kept < 1:
        raise ValueError(f"n-grams of {n} in {width} columns, {n_kept} kept: 2, 1 and 1 at least")
    kv_cache.reset()
    ids, stop, levels = prompt[0].tolist(), prompt.shape[1] + n_tokens, n - 1
    generator, pool = torch.Generator().manual_seed(0), NgramPool(n_kept)
    draws = torch.randint(len(ids), (levels, width), generator=generator).tolist()
    window = [[ids[i] for i in level] for level in draws]  # begins as tokens of the text
    if n_tokens > 0:
        logits, _ = model(prompt, kv_cache)  # [1, T, V]
        ids.append(logits[0, -1].argmax().item())
    while len(ids) < stop:
        candidates = pool.behind(ids[-1])
        tree = lookahead_tree(width, levels, candidates, prompt.device)
        tokens = [ids[-1], *sum(window, []), *(token for one in candidates for token in one)]  # N
        logits, kept = model(prompt.new_tensor([tokens]), kv_cache, tree)  # [1, N, V]
        best = logits[0].argmax(dim=-1).tolist()
        path = accepted_path(tokens, tree, best, stop - len(ids) - 1)
        ids += [tokens[i] for i in path[1:]] + [best[path[-1]]]
        keep_path(kv_cache, kept, path)
        new = best[1 + (levels - 1) * width : 1 + levels * width]  # behind the last level
        for column in zip(*window, new, strict=True):
            pool.add(column)
        window = [*window[1:], new]
        if rounds is not None:
            rounds.append((len(tokens) - 1, len(path) - 1))
    return prompt.new_tensor([ids])


@torch.no_grad()
def generate_jacobi(model, prompt, n_tokens, n_guesses, kv_cache, rounds=None):
    """Greedy decoding by fixed points: each forward replaces all guesses, what did not change is accepted.

    Args and returns as in generate_lookahead; n_guesses: in a block, 1 or more.
    """
    check_request(model, prompt, n_tokens, n_guesses)
    kv_cache.reset()
    ids, stop, guesses = prompt[0].tolist(), prompt.shape[1] + n_tokens, []
    while len(ids) < stop:
        room = min(stop - len(ids), kv_cache.window - len(ids) + 1) - 1 if kv_cache.length else 0
        guesses = (guesses + [ids[-1]] * n_guesses)[: min(n_guesses, room)]  # new ones: the last token again
        new = ids[kv_cache.length :]
        logits, _ = model(prompt.new_tensor([new + guesses]), kv_cache)  # [1, S, V]
        best = logits[0, len(new) - 1 :].argmax(dim=-1).tolist()
        accepted = common_length(guesses, best)
        if rounds is not None and len(ids) > prompt.shape[1]:
            rounds.append((len(guesses), accepted))
        ids += best[: accepted + 1]
        guesses = best[accepted + 1 :]
        kv_cache.advance(len(ids) - 1 - kv_cache.length)  # forgets what changed
    return prompt.new_tensor([ids])


if __name__ == "__main__":
    import inference_report as harness
    import inference_speculation as study
    import inference_words as words
    from main_kvcache import generate_static

    quick = {"n_requests": 1, "prompt_len": 16, "n_tokens": 12, "widths": [3], "levels": 3}
    parser = harness.options(__doc__, 2, quick=quick, n_requests=4, prompt_len=64, n_tokens=96)
    add, number = parser.add_argument, harness.positive_int
    add("--widths", type=number, nargs="+", default=[2, 5, 10, 15], help="columns of the window")
    add("--levels", type=number, default=4, help="tokens of an n-gram, 2 or more")
    add("--jacobi", type=number, default=8, help="guesses of a block of Jacobi's way")
    with harness.script(parser) as args:
        text, T, N, n = harness.load_text(args), args.prompt_len, args.n_tokens, args.levels
        (target,), widths = harness.load_models(args, GPTlite_Tree), sorted({*args.widths})
        check_request(target, torch.zeros(1, T), N)
        if n < 2:
            raise ValueError(f"--levels {n}: an n-gram has 2 tokens or more")
        prompts = text.prompts(args.n_requests, T)  # [n, T]
        columns = harness.COLUMNS | study.COLUMNS
        report = harness.Report(args, "lookahead", target, columns, study.HIDE, text)
        test, jacobi, forms = study.Study(target), f"Jacobi, {args.jacobi} guesses", {}
        methods = [test.baseline(generate_static)]
        methods.append(test.method(jacobi, generate_jacobi, args.jacobi, test.cache))
        for W in widths:
            forms[W] = f"lookahead, width {W}"
            methods.append(test.method(forms[W], generate_lookahead, W, n, W, test.cache))
        rows = report.compare(prompts, N, *methods, label="")
        drawn, by_rows = test.rounds, {}
        for name in (jacobi, *forms.values()):  # of each round what it reads on average, besides the root
            by_rows[name] = 1 + round(sum(d for d, _ in drawn[name]) / len(drawn[name])) if drawn[name] else 1
        n_past = T + N // 2
        times = study.RowTimes(args, target, n_past, by_rows.values())
        times.sweep(report, f"A forward behind {n_past} tokens")
        lines = []
        for name, n_rows in by_rows.items():
            given = study.round_figures(drawn[name])["tokens_per_round"]
            row = test.add(rows[name], times.of(n_rows), given)
            shown = {
                "tokens a call": given,
                "calls a token": given and 1 / given,
                "round/step": times.of(n_rows),
            }
            lines.append({"form": name, "rows": n_rows} | shown | {"speed-up": row.get("speedup")})
        report.sweep("Steps traded for rows", lines)
        all_forms = [rows[name] for name in forms.values()]
        best = max(all_forms, key=lambda row: row["tokens_per_s"] or 0)
        report.why(words.compare(best, rows["static"], "tokens_per_s") + words.rounds(best))
        report.why(words.rounds(rows[jacobi]))
        wider = words.compare(all_forms[-1], rows[jacobi], "tokens_per_round")
        report.why(wider + words.rounds(all_forms[-1]))
        shown = {
            key: (widths, [row.get(key) for row in all_forms]) for key in ("tokens_per_round", "round_steps")
        }
        report.plot_lines(shown, "columns of the window", "")
        report.finish()
