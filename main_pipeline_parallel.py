"""Pipeline parallelism: every rank holds some of the layers, and groups of sequences pass through in a row.

Idea: the first rank computes its layers and sends the result, E numbers a token, to the next. While that one
works on the first group of sequences, the first rank takes the second group, so that all ranks have work. A
token needs the one before it, so decoding must keep as many groups on the way as there are ranks; with S
stages and M groups a pass leaves (S-1)/(M+S-1) of the ranks' time idle, the bubble.

Exact: the same layers in the same order. Wins memory (weights and cache of a rank are those of its layers)
and the throughput of batches, with little to send: E numbers a token between neighbours, where tensor
parallelism hands over 2 E in every layer. Never wins the time of a single sequence, which has to pass all the
layers one after the other. Loses where a step takes as long for the whole batch as for a group, as it does
for small batches: cutting the batch into groups then costs more than the further ranks bring.

Run: python main_pipeline_parallel.py            (or: torchrun --nproc-per-node 2 main_pipeline_parallel.py)

Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019;
Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021.
"""

import copy

import torch

from gptlite_stages import Stage
from linear_packed import pack_linears


def check_groups(n_groups, batch_size):
    """Raises ValueError unless each group gets a sequence."""
    if not 1 <= n_groups <= batch_size:
        raise ValueError(f"{batch_size} sequences cannot be divided into {n_groups} groups")


class Neighbours:
    """What a rank receives from the stage before it and sends to the one behind it.

    Sending only begins, so that the next group can be computed meanwhile; the last `n_open` stay open.
    """

    def __init__(self, team, stage, n_open):
        self.team, self.stage, self.n_open, self.open = team, stage, n_open, []

    def receive(self, source, *shape, dtype=None):
        x = torch.empty(shape, dtype=dtype or self.stage.dtype, device=self.team.device)
        return self.team.receive(x, source)

    def send(self, x, to):
        self.open.append(self.team.start_send(x.contiguous(), to))
        if len(self.open) > self.n_open:
            self.open.pop(0).wait()

    def finish(self):
        for sending in self.open:
            sending.wait()


@torch.no_grad()
def forward_pipeline(team, name, tokens, n_groups=4):
    """One pass of a batch through the pipeline, in groups; every rank calls it.

    Args: name: of the Stage in team.kept; tokens: ids [B, T], on every rank, for the shapes.
    Returns: on rank 0 the logits [B, T, V], elsewhere None; and this rank's caches, one for each group.
    """
    stage, last, tokens = getattr(team.kept, name), team.world_size - 1, tokens.to(team.device)
    groups = tokens.tensor_split(min(n_groups, len(tokens)))  # [b, T] each
    neighbours, caches, logits = Neighbours(team, stage, len(groups)), [], []
    for x in groups:
        shape = x.shape
        if team.rank > 0:
            x = neighbours.receive(team.rank - 1, *shape, stage.d_model)  # [b, T, E]
        x, cache = stage(x)
        caches.append(cache)
        if team.rank < last:
            neighbours.send(x, team.rank + 1)
        elif last > 0:
            neighbours.send(x, 0)
        logits.append(x)  # [b, T, V] on the last rank
    if team.rank == 0 < last:
        logits = [neighbours.receive(last, *x.shape, stage.vocab_size) for x in groups]
    neighbours.finish()
    return torch.cat(logits) if team.rank == 0 else None, caches


@torch.no_grad()
def generate_pipeline(team, name, prompt, n_tokens, seqlen, n_groups):
    """Greedy decoding with a KV cache, n_groups groups of sequences on their way through the stages.

    Each stage keeps the caches of its own layers, one for each group. The last stage chooses the tokens and
    sends them to the first, which needs them when the group's turn comes again: only then does it wait.

    Args: prompt: token ids [B, T], cut to the last seqlen.
    Returns: on rank 0 prompt and new tokens [B, T + n_tokens]. Raises ValueError for empty groups.
    """
    check_groups(n_groups, len(prompt))
    stage, rank, last = getattr(team.kept, name), team.rank, team.world_size - 1
    groups = list(prompt.to(team.device).tensor_split(n_groups))  # [b, T] each
    neighbours, caches, chosen = Neighbours(team, stage, n_groups), [None] * n_groups, [None] * n_groups

    def take_chosen(g):
        """The group's newest token, on rank 0 [b, 1]."""
        if last > 0:
            chosen[g] = neighbours.receive(last, len(groups[g]), 1, dtype=torch.int64)
        groups[g] = torch.cat([groups[g], chosen[g]], dim=1)  # [b, T + 1]
        return chosen[g]

    for step in range(n_tokens):
        for g in range(n_groups):
            x = groups[g][:, -seqlen:]  # the prompt [b, Sq]
            if rank == 0 and step > 0:
                x = take_chosen(g)  # [b, 1]
            elif rank > 0:
                n_new = x.shape[1] if step == 0 else 1
                x = neighbours.receive(rank - 1, len(x), n_new, stage.d_model)  # [b, Sq, E]
            x, caches[g] = stage(x, caches[g], seqlen)
            if rank < last:
                neighbours.send(x, rank + 1)
                continue
            chosen[g] = x[:, -1].argmax(dim=-1, keepdim=True)  # [b, 1]
            if last > 0:
                neighbours.send(chosen[g], 0)
    if rank == 0 and n_tokens > 0:
        for g in range(n_groups):
            take_chosen(g)
    neighbours.finish()
    return torch.cat(groups) if rank == 0 else None


def idle_share(stage_ms, n_groups, n_steps=1):
    """The share of the stages' time that a schedule leaves idle, from what a group takes in each stage.

    Args: stage_ms: of each stage; n_steps: passes; a group begins its next when it has left the last stage.
    Returns: 0 to 1; (S - 1) / (M + S - 1) for one pass of M groups through S equal stages.
    """
    free, left = [0.0] * len(stage_ms), [0.0] * n_groups  # when a stage is free, when a group has left
    for _ in range(n_steps):
        for g in range(n_groups):
            for s, ms in enumerate(stage_ms):
                free[s] = left[g] = max(free[s], left[g]) + ms
    return 1 - n_steps * n_groups * sum(stage_ms) / (len(stage_ms) * max(free))


def keep_stage(team, name, model):
    """Keeps this rank's stage of a model as team.kept.name; returns how many parameters it has."""
    stage = Stage(copy.deepcopy(model), team.rank, team.world_size).to(team.device).eval()
    setattr(team.kept, name, pack_linears(stage))
    return sum(p.numel() for p in stage.parameters())


if __name__ == "__main__":
    from functools import partial

    import inference_distributed as distributed
    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import GPTlite_KVCache, cache_bytes
    from gptlite_stages import layers_of
    from inference_links import add_break_even
    from inference_report import Method
    from inference_utils import alternating_ms
    from main_kvcache import generate_kvcache

    quick = {"batch_size": 4, "n_tokens": 4, "n_windows": 2}
    parser = harness.options(__doc__, repeats=3, batch_size=16, prompt_len=64, n_tokens=32, quick=quick)
    distributed.add_world_size(parser)
    columns = {"idle": ("idle", "{:.0%}"), "expected": ("computed idle", "{:.0%}")}
    with harness.script(parser) as args:
        S, B, n_new = args.world_size, args.batch_size, args.n_tokens
        args.device = distributed.ranks_device(args)
        text = harness.load_text(args)
        whole, loose = (harness.load_models(args, GPTlite_KVCache, packed=way)[0] for way in (True, False))
        L, seqlen, size = len(whole.blocks), whole.seqlen, whole.ln.weight.nbytes  # bytes of a token
        n_layers, T = [len(layers_of(r, S, L)) for r in range(S)], min(args.prompt_len, seqlen)
        one, alone, ranks = "one process", "a rank alone", distributed.named(S, "stage")
        names = {M: f"{ranks}, {M} group{'s' * (M > 1)}" for M in (1, 2, 4, 8) if M <= B}
        known = [*distributed.SAME_LOSS, "forward_tokens", "n_parameters"]  # a check or a table has them
        report = harness.Report(args, "pipeline parallelism", whole, columns, known, text, world_size=S)
        with distributed.Ranks(S, args.device) as team, torch.no_grad():
            sizes, prompts = team.gather(keep_stage, "stage", loose), text.prompts(B, T)
            spread = distributed.OnAllRanks(team, "stage", forward_pipeline)
            decode = lambda _, *work: team.run(generate_pipeline, "stage", *work)  # noqa: E731
            methods = [Method(one, generate_kvcache, whole)]
            methods.append(Method(alone, partial(team.alone, generate_kvcache), whole))
            for M, name in names.items():
                methods.append(Method(name, decode, spread, seqlen, M, steps=[spread.shard]))
            rows = report.compare(prompts, n_new, *methods, label="")
            held, passes, n_read = [], [], B * (T + n_new - 1)  # tokens that pass through
            for M, name in names.items():
                work = generate_pipeline, "stage", prompts, n_new, seqlen, M
                rows[name] |= distributed.group_figures(report.measured[name].runs_ms, M)
                rows[name] |= {"idle": distributed.idle_of(team, "stage", *work)}
                rows[name] |= {"expected": idle_share(n_layers, M, n_new)}
            runs = team.gather(distributed.counted, *work)
            outputs = team.gather(forward_pipeline, "stage", prompts[:1], 1)  # logits, caches
            for r, (run, (_, caches)) in enumerate(zip(runs, outputs, strict=True)):
                sent, chosen = run.sent_bytes.get("send", 0), 8 * B * n_new * (S > 1)  # token ids
                held.append({"stage": r, "layers": n_layers[r], "parameters": sizes[r]})
                held[r] |= {"KV B/token": cache_bytes(caches[0]) // T, "sent B/token": sent / n_read}
                what = f"{size} bytes a token" if r < S - 1 else "chosen tokens"
                right = sent == (size * n_read if r < S - 1 else chosen)
                report.check(f"stage {r} sends {what}", right)
            whole_cache = rows[one]["kv_bytes_per_token"] == sum(line["KV B/token"] for line in held)
            report.check("the stages hold the whole cache, each a part", whole_cache)
            report.sweep("What a stage holds and sends", held)
            title = f"One pass of {B} prompts of {T} tokens: time (ms)"
            for M, name in names.items():
                line = alternating_ms({one: partial(whole, prompts)}, args.repeats, args.device)
                work = forward_pipeline, "stage", prompts, M
                line[ranks] = distributed.function_ms(team, args.repeats, *work)
                line["idle share"] = distributed.idle_of(team, "stage", *work)
                line["computed idle share"] = idle_share(n_layers, M)
                passes.append({"groups": M} | line)
                report.check_close(f"logits of {name} and of {one}", team.run(*work)[0], whole(prompts)[0])
            report.sweep(title, passes)

            sizes = [n * S for n in ((1, 8) if args.quick else (1, 4, 16, 64))]
            steps = distributed.steps_by_batch(report, team, whole, text, T, sizes)
            add_break_even(
                report, steps, "sequences", one, "its sends", [(S, "send", size / S)], S, "a group"
            )

        best = max((rows[name] for name in names.values()), key=lambda row: row["tokens_per_s"] or 0)
        for other in (rows[one], rows[alone]):
            report.why(words.compare(best, other, "tokens_per_s") + words.compare(best, other))
        a_pass = words.about("a pass", words.crossover(passes, "groups", ranks, one))
        report.why(a_pass + words.idle(best, "idle", "expected"))
        report.why(words.split_pays(steps, "sequences", one, "its sends", S, "a group"))
        report.plot_sweep(title, log="x", names=[one, ranks])
        report.finish()
