"""Expert parallelism: the experts of a mixture live on different ranks, and tokens travel to theirs and back.

Idea: a mixture of experts replaces each MLP by several, of which a router picks a few for every token
(gptlite_moe.py). The experts are divided over the ranks, and so are the sequences. In every layer each rank
sends its tokens to the ranks that have their experts (all-to-all), these compute what came and send it back.

Exact without a capacity limit; with one, tokens beyond it skip the layer. The mixture here is made of copies
of the trained MLP, so that it equals the dense model; training would make the experts differ. Wins memory: an
expert is on one rank. Wins time where the products of many tokens outweigh the exchanges of every layer.
Loses in decoding small batches, and where the router prefers some experts: all wait for their rank.

Run: python main_expert_parallel.py            (or: torchrun --nproc-per-node 2 main_expert_parallel.py)

Source: Lepikhin et al., GShard, 2021; Fedus et al., Switch Transformers, 2022; Komatsuzaki et al., Sparse
Upcycling, 2023 (the copies).
"""

import copy

import torch

from gptlite_moe import Experts, MixtureOfExperts
from inference_distributed import part_of
from linear_packed import pack_linears
from main_kvcache import generate_kvcache


class ExpertParallel(MixtureOfExperts):
    """The same over all ranks: this one has some of the experts, and tokens of its own."""

    def __init__(self, team, mixture):
        n_experts = mixture.router.out_features
        own = part_of(n_experts, team.rank, team.world_size)
        weights = (w[own.start : own.stop].clone() for w in mixture.experts.parameters())
        super().__init__(mixture.router, Experts(*weights), mixture.top_k, mixture.capacity)
        self.team = team
        self.n_held = [len(part_of(n_experts, r, team.world_size)) for r in range(team.world_size)]

    def compute(self, rows, sizes):
        team, n_own = self.team, self.n_held[self.team.rank]
        # how many rows come from each rank for each of this rank's experts
        coming = team.all_to_all(sizes, self.n_held, [n_own] * team.world_size)  # [W * own]
        coming = coming.view(team.world_size, n_own)  # [W, own]
        leave = [part.sum().item() for part in sizes.split(self.n_held)]
        arrive = coming.sum(dim=1).tolist()
        rows = team.all_to_all(rows, leave, arrive)  # by source, and there by expert
        expert = torch.arange(n_own, device=rows.device).repeat(team.world_size)  # [W * own]
        order = torch.repeat_interleave(expert, coming.flatten()).argsort(stable=True)  # by expert
        computed = torch.empty_like(rows)
        computed[order] = self.experts(rows[order], coming.sum(dim=0))
        return team.all_to_all(computed, arrive, leave)


def keep_experts(team, name, model):
    """Keeps a mixture with this rank's experts as team.kept.name; returns how many parameters it has."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.ffwd = ExpertParallel(team, block.ffwd)
    setattr(team.kept, name, pack_linears(model.to(team.device)))
    return sum(p.numel() for p in model.parameters())


def collect(team, x, n_rows):
    """The rows of all ranks' tensors, in the order of the ranks; parts of tensor_split: [n_rows, ...]."""
    sizes = [len(part_of(n_rows, r, team.world_size)) for r in range(team.world_size)]
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x
    parts = team.all_gather(padded)
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])


@torch.no_grad()
def forward_experts(team, name, tokens):
    """One pass, each rank over its part of the sequences: tokens [B, T] -> logits [B, T, V], own cache."""
    own = tokens.to(team.device).tensor_split(team.world_size)[team.rank]  # [b, T], b may be 0
    logits, cache = getattr(team.kept, name)(own)  # [b, T, V]
    return collect(team, logits, len(tokens)), cache


def generate_experts(team, name, prompts, n_tokens, seqlen):
    """generate_kvcache over all ranks, each with its part of the sequences: [B, T] -> [B, T + n_tokens].

    All ranks take every step, also one without a sequence of its own: others need its experts.
    """
    own = prompts.to(team.device).tensor_split(team.world_size)[team.rank]  # [b, T]
    return collect(team, generate_kvcache(getattr(team.kept, name), own, n_tokens, seqlen), len(prompts))


def load_of(team, name, tokens):
    """How many rows this rank's experts compute in a pass of tokens [B, T], over all layers."""
    seen, blocks = [], getattr(team.kept, name).blocks
    hooks = [
        b.ffwd.experts.register_forward_pre_hook(lambda _, args: seen.append(len(args[0]))) for b in blocks
    ]
    forward_experts(team, name, tokens)
    for hook in hooks:
        hook.remove()
    return sum(seen)


if __name__ == "__main__":
    from functools import partial

    import inference_distributed as distributed
    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import GPTlite_KVCache
    from gptlite_moe import GroupedExperts, route, upcycle
    from inference_links import add_break_even
    from inference_report import Method
    from inference_utils import alternating_ms

    sizes = {"batch_size": 16, "prompt_len": 64, "n_tokens": 32}
    quick = {"batch_size": 3, "n_tokens": 4, "n_windows": 2}
    parser = harness.options(__doc__, repeats=3, quick=quick, **sizes)
    distributed.add_world_size(parser)
    add = parser.add_argument
    add("--n-experts", type=harness.positive_int, default=4, help="experts of a layer")
    add("--top-k", type=harness.positive_int, default=2, help="experts of a token")
    add(
        "--capacity",
        type=harness.positive,
        help="most tokens of an expert, in even shares (default: no limit)",
    )
    with harness.script(parser) as args:
        W, B, n_new = args.world_size, args.batch_size, args.n_tokens
        args.device = distributed.ranks_device(args)
        text, n, k = harness.load_text(args), args.n_experts, args.top_k
        route(torch.zeros(1, n), k)  # refused before any process is started
        dense, loose = (harness.load_models(args, GPTlite_KVCache, packed=way)[0] for way in (True, False))
        L, E, T = len(loose.blocks), loose.ln.weight.shape[0], min(args.prompt_len, loose.seqlen)
        noisy = upcycle(loose, n, k, noise=0.1)  # whose experts differ
        looped = pack_linears(upcycle(loose, n, k))
        grouped = pack_linears(upcycle(loose, n, k, experts_class=GroupedExperts))
        one, ranks = "mixture, one process", f"mixture, {distributed.named(W)}"
        known = distributed.SAME_LOSS if args.capacity is None else ()  # a check has them
        report = harness.Report(args, "expert parallelism", dense, None, known, text, world_size=W)
        with distributed.Ranks(W, args.device) as team, torch.no_grad():
            held = team.gather(keep_experts, "experts", upcycle(loose, n, k, args.capacity))
            team.run(keep_experts, "noisy", noisy)
            spread, prompts = distributed.OnAllRanks(team, "experts", forward_experts), text.prompts(B, T)
            generate = lambda _, *work: team.run(generate_experts, "experts", *work)  # noqa: E731
            limit, shard, exact = loose.seqlen, [spread.shard], args.capacity is None
            methods = [Method("dense", generate_kvcache, dense), Method(one, generate_kvcache, looped)]
            methods.append(Method(ranks, generate, spread, limit, steps=shard, exact=exact))
            rows = report.compare(prompts, n_new, *methods, label="")
            logits = team.run(forward_experts, "noisy", prompts)[0]
            report.check_close(f"{ranks}: logits of different experts", logits, noisy(prompts)[0])
            loads, lines = team.gather(load_of, "experts", prompts), []
            n_rows, limited = k * B * T * L, "" if exact else "at most "  # beyond the capacity none does
            right = sum(loads) == n_rows if exact else sum(loads) <= n_rows
            report.check(f"{limited}{k} experts compute each token", right)
            for r, run in enumerate(team.gather(distributed.counted, forward_experts, "experts", prompts)):
                line = {"rank": r, "experts": len(part_of(n, r, W)), "parameters": held[r], "rows": loads[r]}
                sent = run.sent_bytes.get("all_to_all", 0)
                lines.append(line | {"exchanges": run.calls.get("all_to_all", 0), "sent MB": sent / 1e6})
            report.sweep(f"What a rank holds, computes and sends in a pass of {B} x {T} tokens", lines)
            by_tokens, title = [], "One pass of 4 or more sequences: time (ms)"
            for N in (4, 64) if args.quick else (4, 16, 64, 256, 1024):
                x = text.prompts(max(N // 64, 4), min(N // 4, 64))  # N tokens
                calls = {"dense": partial(dense, x), one: partial(looped, x)}
                if args.device.type == "cpu" and args.dtype == torch.float32:
                    calls["grouped product"] = partial(grouped, x)
                line = {"tokens": N, **alternating_ms(calls, args.repeats, args.device)}
                line[ranks] = distributed.function_ms(team, args.repeats, forward_experts, "experts", x)
                exchange = partial(team.run, distributed.collective_ms, "all_to_all")
                cost = 2 * exchange(k * N * E // W, 20) + exchange(n, 20)  # there, back, and how many
                by_tokens.append(line | {"its exchanges": L * cost * (W > 1)})
            report.sweep(title, by_tokens)
            row = k * E * args.dtype.itemsize / W  # bytes of a token's rows, of which each rank has its part
            exchanges = [(2 * L, "all_to_all", row), (L, "all_to_all", 0)]  # rows, and how many: a few bytes
            add_break_even(report, by_tokens, "tokens", one, "its exchanges", exchanges, W)

        report.why(words.compare(rows[ranks], rows[one], "tokens_per_s"))
        report.why(words.load(loads, "the router"))
        report.why(words.about("a pass", words.crossover(by_tokens, "tokens", ranks, one)))
        report.why(words.split_pays(by_tokens, "tokens", one, "its exchanges", W))
        report.plot_sweep(title)
        report.finish()
