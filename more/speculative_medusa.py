"""Medusa: heads on a frozen model guess the next tokens side by side, a tree of guesses is verified at once.

Head k reads the model's last hidden state and guesses the token k places behind the next one. Their best
guesses, combined, are not one draft but a tree of drafts, which one forward verifies: each node sees its
ancestors alone. Which nodes the tree has is decided once, by how often a head's first, second, .. guess is
right.

Exact here: a path is accepted where every token is the model's own choice (the paper's "typical acceptance"
is another rule, which is not). Wins without a second model and its cache, where rows are cheap: wide trees
make up for weak heads. Loses where rows cost, and on characters: head k cannot see the tokens between, so
it guesses an average over all of them, and a letter two places on depends on the next letter more than a
word on the next word. A good draft wants depth, weak heads want width.

Run: python more/speculative_medusa.py            (--train-steps 1000 for better heads)

Source: Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, 2024.
"""

import heapq

import torch
import torch.nn.functional as F
from torch import nn

import _root  # noqa: F401 (the files above become importable)
from gptlite_tree import GPTlite_Tree, Tree, accepted_path, keep_path
from inference_speculation import check_request
from inference_training import train_heads
from main_multi_token_prediction import states_of


class MedusaHeads(nn.Module):
    """n_heads times h + SiLU(W h) and a head of its own, which begins as the model's: states -> logits."""

    def __init__(self, trunk, n_heads):
        super().__init__()
        V, E = trunk.fc_out.weight.shape
        self.inner = nn.ModuleList(nn.Linear(E, E) for _ in range(n_heads))
        self.outer = nn.ModuleList(nn.Linear(E, V) for _ in range(n_heads))
        self.to(trunk.position_embedding.weight)
        with torch.no_grad():
            for inner, outer in zip(self.inner, self.outer, strict=True):
                inner.weight.zero_()
                inner.bias.zero_()
                outer.load_state_dict(trunk.fc_out.state_dict())

    def forward(self, h):
        """States behind the last norm [..., E] -> logits [n_heads, ..., V]."""
        return torch.stack([o(h + F.silu(i(h))) for i, o in zip(self.inner, self.outer, strict=True)])


def medusa_loss(heads, trunk, tokens):
    """How far each head is from what the trunk itself says k tokens on: tokens [B, T] -> mean over heads."""
    with torch.no_grad():
        h = trunk.ln(states_of(trunk, tokens))  # [B, T, E]
        target = trunk.fc_out(h).float().softmax(dim=-1)  # [B, T, V]
    losses = []
    for k, logits in enumerate(heads(h).float(), 1):
        losses.append(F.cross_entropy(logits[:, :-k].flatten(0, 1), target[:, k:].flatten(0, 1)))
    return torch.stack(losses).mean()


@torch.no_grad()
def hit_rates(heads, trunk, tokens, n_ranks):
    """How often each head's first, second, .. guess is the trunk's choice k tokens on: [n_heads, n_ranks]."""
    h = trunk.ln(states_of(trunk, tokens))  # [B, T, E]
    best, rates = trunk.fc_out(h).argmax(dim=-1), []  # [B, T]
    for k, logits in enumerate(heads(h), 1):
        guesses = logits[:, :-k].topk(n_ranks, dim=-1).indices  # [B, T - k, n_ranks]
        rates.append((guesses == best[:, k:, None]).float().mean(dim=(0, 1)))  # [n_ranks]
    return torch.stack(rates)


class GuessTree(Tree):
    """The tree of the n_nodes guesses that are right most often, as far as heads err independently.

    Args: rates [n_heads, n_ranks]. level, rank: which head's which guess each node is (the root: none).
    """

    def __init__(self, rates, n_nodes, device="cpu"):
        rates, found = rates.tolist(), []
        waiting = [(-rate, (rank,)) for rank, rate in enumerate(rates[0])]  # ways by ranks, the best first
        heapq.heapify(waiting)
        while waiting and len(found) < n_nodes:
            gain, way = heapq.heappop(waiting)  # its parent is better and was found before it
            found.append(way)
            if len(way) < len(rates):
                for rank, rate in enumerate(rates[len(way)]):
                    heapq.heappush(waiting, (gain * rate, (*way, rank)))
        number = {way: i for i, way in enumerate([(), *found])}
        super().__init__([0, *(number[way[:-1]] for way in found)], device)
        self.level = torch.tensor([len(way) - 1 for way in found], device=device)  # [N - 1]
        self.rank = torch.tensor([way[-1] for way in found], device=device)  # [N - 1]

    def tokens(self, last, logits):
        """The last token and the guesses of heads' logits [n_heads, V], as tokens of the nodes [1, N]."""
        guesses = logits.topk(int(self.rank.max()) + 1, dim=-1).indices  # [n_heads, n_ranks]
        return torch.cat([guesses.new_tensor([last]), guesses[self.level, self.rank]])[None]


@torch.no_grad()
def generate_medusa(model, prompt, n_tokens, heads, tree, kv_cache, rounds=None):
    """Greedy decoding in rounds of one forward over a tree of the heads' guesses.

    Args: model: GPTlite_Tree; prompt [1, T]; tree: GuessTree; kv_cache: StaticKVCache, emptied first; rounds:
        a list that gets (nodes, accepted) of each round.
    Returns: prompt and new tokens [1, T + n_tokens]. Raises ValueError as check_request does.
    """
    check_request(model, prompt, n_tokens)
    kv_cache.reset()
    ids, stop = prompt[0].tolist(), prompt.shape[1] + n_tokens
    if n_tokens > 0:
        logits, _ = model(prompt, kv_cache)  # [1, T, V]
        ids.append(logits[0, -1].argmax().item())
    path = [-1]  # the node whose state the heads read
    while len(ids) < stop:
        tokens = tree.tokens(ids[-1], heads(model.hidden[0, path[-1]]))  # [1, N]
        logits, kept = model(tokens, kv_cache, tree)  # [1, N, V]
        tokens, best = tokens[0].tolist(), logits[0].argmax(dim=-1).tolist()
        path = accepted_path(tokens, tree, best, stop - len(ids) - 1)
        ids += [tokens[i] for i in path[1:]] + [best[path[-1]]]
        keep_path(kv_cache, kept, path)
        if rounds is not None:
            rounds.append((len(tokens) - 1, len(path) - 1))
    return prompt.new_tensor([ids])


if __name__ == "__main__":
    import inference_report as harness
    import inference_speculation as study
    import inference_words as words
    from gptlite import GPTlite
    from inference_utils import n_parameters
    from linear_packed import pack_linears
    from main_kvcache import generate_static

    quick = {"n_requests": 1, "prompt_len": 16, "n_tokens": 12, "nodes": [3], "train_steps": 2}
    parser = harness.options(__doc__, 3, quick=quick, n_requests=4, prompt_len=64, n_tokens=96)
    add, number = parser.add_argument, harness.positive_int
    add("--nodes", type=number, nargs="+", default=[2, 4, 8, 16, 32], help="guesses that are verified")
    add("--train-steps", type=harness.count, default=300, help="steps of 6 x 256 tokens")
    with harness.script(parser) as args:
        text, T, N, sizes = harness.load_text(args), args.prompt_len, args.n_tokens, sorted({*args.nodes})
        (target,), n_heads, n_ranks = harness.load_models(args, GPTlite_Tree), 4, 8
        trunk = harness.load_models(args, GPTlite, packed=False)[0].float().requires_grad_(False)
        check_request(target, torch.zeros(1, T), N)
        prompts = text.prompts(args.n_requests, T)  # [n, T]
        columns = harness.COLUMNS | study.COLUMNS
        report = harness.Report(args, "Medusa", target, columns, study.HIDE, text)
        heads = MedusaHeads(trunk, n_heads)
        training = text.train, args.train_steps, 2e-3, 2 if args.quick else 6, trunk.seqlen, args.seed
        train_heads(heads, lambda heads, x: medusa_loss(heads, trunk, x), *training)
        tokens = text.prompts(2 if args.quick else 16, trunk.seqlen, "train")  # [B, T]
        rates = hit_rates(heads, trunk, tokens, n_ranks)  # [n_heads, n_ranks]
        lines = [
            {"head": k, "first guess": r[0], "one of 8": sum(r)} for k, r in enumerate(rates.tolist(), 1)
        ]
        report.sweep("How often the heads are right, on text of the training", lines)
        heads = pack_linears(heads.to(args.dtype))

        test, chain = study.Study(target), f"chain of {n_heads}"
        trees = {chain: GuessTree(rates[:, :1], n_heads, args.device)}
        trees |= {f"tree of {n}": GuessTree(rates, n, args.device) for n in sizes}
        methods = [test.baseline(generate_static)]
        for name, tree in trees.items():
            methods.append(test.method(name, generate_medusa, heads, tree, test.cache, weights=[heads]))
        rows = report.compare(prompts, N, *methods, label="")

        way, cache = torch.arange(6, device=args.device)[None] + 10, study.StaticKVCache(target, 1)  # [1, 6]
        target(way[:, :1], cache)
        twin = Tree([0, 0, 1, 2, 1, 4], args.device)  # two ways behind the first two nodes
        logits, _ = target(way[:, [1, 2, 3, 4, 3, 5]], cache, twin)
        alone, _ = target(way[:, [0, 1, 2, 3, 5]])
        report.check_close("a path of a tree as it is alone", logits[0, [0, 1, 4, 5]], alone[0, 1:])
        h = torch.zeros(target.fc_out.in_features, device=args.device, dtype=args.dtype)  # [E]
        counts = {name: len(tree.parents) for name, tree in trees.items()}
        times = study.RowTimes(args, target, T + N // 2, counts.values(), {"heads": lambda: heads(h)})
        times.sweep(report, f"A forward behind {T + N // 2} tokens")
        for name, n in counts.items():
            row, given = rows[name], study.round_figures(test.rounds[name])["tokens_per_round"]
            test.add(row, times.of("heads") + times.of(n), given)
            row["n_parameters"] += n_parameters(heads)
        trees_only = [rows[f"tree of {n}"] for n in sizes]
        best = max(trees_only, key=lambda row: row["tokens_per_s"] or 0)
        report.why(words.compare(best, rows["static"], "tokens_per_s") + words.rounds(best))
        report.why(
            words.compare(trees_only[-1], rows[chain], "tokens_per_round") + words.rounds(trees_only[-1])
        )
        report.why(words.rounds(rows[chain]))
        lines = {k: (sizes, [row.get(k) for row in trees_only]) for k in ("tokens_per_round", "round_steps")}
        report.plot_lines(lines, "guesses that are verified", "", log="x")
        report.finish()
