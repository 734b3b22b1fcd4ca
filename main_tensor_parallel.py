"""Tensor parallelism: every rank holds a part of each weight matrix, and all of them compute each token.

Idea: of two matrices in a row the first is split by its outputs and the second by its inputs, so that a rank
computes its part of the inner vector and a partial sum of the result, and one all-reduce adds the sums. In
the MLP a rank has some of the neurons, in attention some of the heads and their KV cache. That makes two
all-reduces of a token's E numbers in each layer; embeddings and layer norms are whole on every rank.

Exact up to the rounding of sums that are split. Wins memory: weights and cache of a rank shrink with the
number of ranks, so larger models fit. Wins time where a layer takes longer than its two all-reduces, which is
a matter of width and of the link. Loses where layers are narrow, as GPTlite's are. With fewer heads of keys
and values than ranks (GQA) these are copied, and the cache shrinks no further. A token that is drawn at
random must be drawn on one rank and sent to the others. PyTorch's DTensor makes the same split from a plan
of names, and sends the same, but decides anew in every operation what to send: that takes time as well.

Run: python main_tensor_parallel.py              (or: torchrun --nproc-per-node 2 main_tensor_parallel.py)

Source: Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism, 2019; Pope et al., Efficiently Scaling Transformer Inference, 2022.
"""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from inference_distributed import n_held, part_of
from linear_packed import pack_linears


def heads_of(rank, world_size, n_heads, n_groups):
    """The query heads and the heads of keys and values of a rank, as two ranges.

    Raises: ValueError where the query heads do not fall into equal parts, or the G heads of keys and values
        can neither be split nor be replicated evenly: whole heads only, or a rank's cache would not match.
    """
    H, G, W = n_heads, n_groups, world_size
    if H % W:
        raise ValueError(f"{H} heads cannot be split over {W} ranks evenly")
    if G % W and W % G:
        raise ValueError(f"{G} heads of keys and values can be neither split nor copied to {W} ranks evenly")
    first = rank * G // W  # with more ranks than groups W/G ranks have the same group
    return range(rank * H // W, (rank + 1) * H // W), range(first, first + max(G // W, 1))


def rows_of_heads(heads, d_head):
    return range(heads.start * d_head, heads.stop * d_head)


def take(linear, outputs=None, inputs=None, bias=True):
    """A linear layer with some of another's outputs and inputs, given as ranges; None keeps all."""
    rows, columns = (slice(None) if r is None else slice(r.start, r.stop) for r in (outputs, inputs))
    weight = linear.weight.detach()[rows, columns]  # [E_out, E_in]
    part = nn.Linear(weight.shape[1], weight.shape[0], bias, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        part.weight.copy_(weight)
        if bias:
            part.bias.copy_(linear.bias[rows])
    return part


class RowParallelLinear(nn.Module):
    """A linear layer of whose inputs this rank has a part: [..., E_in / W] -> [..., E_out], equal on all."""

    def __init__(self, team, linear, inputs):
        super().__init__()
        self.team, self.linear, self.bias = team, take(linear, inputs=inputs, bias=False), linear.bias

    def forward(self, x):
        partial_sum = self.linear(x)  # [..., E_out]
        return self.team.all_reduce(partial_sum) + self.bias  # once, not once for each rank


class GatheredLinear(nn.Module):
    """A linear layer of whose outputs this rank computes a part: [..., E_in] -> [..., V], equal on all."""

    def __init__(self, team, linear):
        super().__init__()
        self.team, self.n_outputs = team, linear.out_features
        self.linear = take(linear, part_of(self.n_outputs, team.rank, team.world_size))

    def forward(self, x):
        size = -(-self.n_outputs // self.team.world_size)  # of the largest part
        part = self.linear(x)  # [..., V / W]
        missing = size - part.shape[-1]
        parts = self.team.all_gather(nn.functional.pad(part, (0, missing)))  # a gather needs equal shapes
        sizes = [len(part_of(self.n_outputs, r, len(parts))) for r in range(len(parts))]
        return torch.cat([p[..., :n] for p, n in zip(parts, sizes, strict=True)], dim=-1)  # [..., V]


def shard_block(team, block):
    """Cuts a block of GPTlite or one of its variants to this rank's heads and neurons, and returns it."""
    mha, net, rank, W = block.mha, block.ffwd.net, team.rank, team.world_size
    n_groups = getattr(mha, "n_groups", mha.n_heads)
    heads, groups = heads_of(rank, W, mha.n_heads, n_groups)
    neurons = part_of(net[0].out_features, rank, W)
    mha.query_proj = take(mha.query_proj, rows_of_heads(heads, mha.d_head))
    mha.key_proj = take(mha.key_proj, rows_of_heads(groups, mha.d_head))
    mha.value_proj = take(mha.value_proj, rows_of_heads(groups, mha.d_head))
    mha.out_proj = RowParallelLinear(team, mha.out_proj, rows_of_heads(heads, mha.d_head))
    mha.n_heads, mha.n_groups = len(heads), len(groups)
    net[0] = take(net[0], neurons)
    net[2] = RowParallelLinear(team, net[2], neurons)
    return block


def shard_model(team, model):
    """Cuts a model in place to this rank's part of its layers and head; its forward stays the same code."""
    for block in model.blocks:
        shard_block(team, block)
    model.fc_out = GatheredLinear(team, model.fc_out)
    return model


def shard_by_dtensor(team, model):
    """The same split by PyTorch, in place, of ordinary layers, on two ranks or more.

    For heads of queries, keys and values that W divides: a plan splits matrices and knows of no heads.
    """
    mesh = init_device_mesh(team.device.type, (team.world_size,))
    names = ("mha.query_proj", "mha.key_proj", "mha.value_proj", "ffwd.net.0")
    plan = dict.fromkeys(names, ColwiseParallel())  # by outputs
    plan |= dict.fromkeys(("mha.out_proj", "ffwd.net.2"), RowwiseParallel())  # by inputs, then all-reduce
    for block in model.blocks:
        parallelize_module(block, mesh, plan, src_data_rank=None)  # every rank has the weights already
        block.mha.n_heads //= team.world_size
        block.mha.n_groups = getattr(block.mha, "n_groups", 0) // team.world_size
    head = {"fc_out": ColwiseParallel(output_layouts=Replicate())}  # gathered, and whoever reads it waits
    parallelize_module(model, mesh, head, src_data_rank=None)
    model.fc_out.register_forward_hook(lambda _, x, out: out.wait() if hasattr(out, "wait") else out)
    return model


def keep_shard(team, name, model, shard=shard_model, packed=True):
    """Keeps this rank's part of a model as team.kept.name; returns how many parameters it has."""
    model = shard(team, copy.deepcopy(model).to(team.device))
    setattr(team.kept, name, pack_linears(model) if packed else model)
    return n_held(model)


def choose_together(team, logits, temperature=0.0):
    """The next token of each sequence, chosen on rank 0 and the same on all ranks: [B, V] -> [B, 1].

    Ranks that drew for themselves would go on with different texts, each with a part of the model.
    """
    token = logits.argmax(dim=-1, keepdim=True)  # [B, 1]
    if temperature > 0 and team.rank == 0:
        token = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1)  # [B, 1]
    return team.broadcast(token)


@torch.no_grad()
def generate_tensor_parallel(team, name, prompt, n_tokens, seqlen, temperature=0.0):
    """Decoding with a KV cache on all ranks at once; every rank calls it, and gets the same tokens.

    Args: name: of the shard in team.kept; prompt: token ids [B, T], cut to the last seqlen.
    Returns: prompt and generated tokens, [B, T + n_tokens].
    """
    model, kv_cache = getattr(team.kept, name), None
    tokens = prompt.to(team.device)  # [B, T]
    new_tokens = tokens[:, -seqlen:]
    for _ in range(n_tokens):
        logits, kv_cache = model(new_tokens, kv_cache, max_seqlen=seqlen)  # [B, S, V]
        new_tokens = choose_together(team, logits[:, -1], temperature)  # [B, 1]
        tokens = torch.cat([tokens, new_tokens], dim=1)  # [B, T+1]
    return tokens


if __name__ == "__main__":
    from functools import partial

    import inference_distributed as distributed
    import inference_report as harness
    import inference_words as words
    from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa
    from gptlite_kvcache import Block_KVCache, GPTlite_KVCache
    from inference_links import add_break_even
    from inference_report import Method
    from inference_utils import GPTLITE_CKPT_PATH, load_checkpoint, parameters_of
    from main_kvcache import generate_kvcache

    quick = {"checkpoint": GPTLITE_CKPT_PATH, "n_tokens": 4, "batch_size": 1, "n_windows": 2}
    parser = harness.options(__doc__, repeats=3, batch_size=8, prompt_len=64, n_tokens=64, quick=quick)
    distributed.add_world_size(parser)
    with harness.script(parser) as args:
        W, args.device = args.world_size, distributed.ranks_device(args)
        text, state = harness.load_text(args), load_checkpoint(args.checkpoint)
        whole = harness.build(args, state, GPTlite_KVCache)
        loose = harness.build(args, state, GPTlite_KVCache, packed=False)  # ordinary linear layers
        p, one, ranks, size = parameters_of(whole), "one process", distributed.named(W), args.dtype.itemsize
        n_new, T, n_calls = args.n_tokens, min(args.prompt_len, whole.seqlen), 3 if args.quick else 20
        heads_of(0, W, p.n_heads, p.n_heads)  # refused before any process is started
        known, sizes = distributed.SAME_LOSS, {"prompt_len": T, "world_size": W}
        report = harness.Report(args, "tensor parallelism", whole, hide=known, text=text, **sizes)
        with distributed.Ranks(W, args.device) as team, torch.no_grad():
            team.run(keep_shard, "hand", loose)
            spread, tables = distributed.OnAllRanks(team, "hand"), {}
            generate = lambda _, *work: team.run(generate_tensor_parallel, "hand", *work)  # noqa: E731
            methods = [Method(one, generate_kvcache, whole)]
            methods.append(Method("a rank alone", partial(team.alone, generate_kvcache), whole))
            methods.append(Method(ranks, generate, spread, steps=[spread.shard]))
            for B in sorted({1, args.batch_size}):
                tables[B] = report.compare(prompts := text.prompts(B, T), n_new, *methods)
            work = generate_tensor_parallel, "hand", prompts[:1], n_new, whole.seqlen
            run = team.run(distributed.counted, *work)
            n_reduced, n_read = 2 * p.n_layers * (W > 1), T + n_new - 1  # all-reduces of a step; tokens
            n_bytes = n_reduced * p.d_model * size  # that a token hands over in them
            calls, sent = (counts.get("all_reduce", 0) for counts in (run.calls, run.sent_bytes))
            right = calls == n_reduced * n_new and sent == n_bytes * n_read
            report.check(f"{n_reduced} all-reduces a step, {n_bytes} bytes a token", right)
            groups = {1, p.n_heads} | (set() if args.quick else {2, 3})  # heads of keys and values
            groups = [G for G in sorted(groups) if p.n_heads % G == 0 and (G % W == 0 or W % G == 0)]
            cases, (held, by_length, by_width) = [(G, "hand", shard_model) for G in groups], ([], [], [])
            for G, way, shard in cases + [(p.n_heads, "DTensor", shard_by_dtensor)][: W - 1]:
                grouped = convert_mha_to_gqa(state, p.n_heads, p.d_head, G)
                gqa = harness.build(args, grouped, GPTlite_GQA, packed=False, n_groups=G)
                team.run(keep_shard, "gqa", gqa, shard, False)
                name, line = f"KV heads {G}, by {way}", {"KV heads": G, "split by": way}
                line |= distributed.compare_shard(report, name, team, "gqa", gqa, prompts)
                right = line["all-reduces"] == n_reduced and line["B/token"] == n_bytes
                report.check(f"{name}: as many all-reduces and bytes, as PyTorch's profiler sees it", right)
                line["prompt ms"] = distributed.shards_ms(team, "gqa", n_calls, prompts[:1])
                line["token ms"] = distributed.shards_ms(team, "gqa", n_calls, prompts[:1, :1])
                held.append(line)
            report.sweep(
                "A rank's part of the weights and the cache, and what it sends; ordinary layers", held
            )
            for n in (1, 64) if args.quick else (1, 16, 64, 256):
                work = "hand", whole, text.prompts(1, n), n_calls, args.repeats
                times = distributed.split_ms(team, *work, "its all-reduces", n_reduced, n * p.d_model)
                by_length.append({"tokens": n} | times)
            for E in (384, 768) if args.quick else (384, 768, 1536, 2304):
                block = Block_KVCache(E, E // p.d_head, p.d_head, 0.0).to(args.device, args.dtype).eval()
                team.run(keep_shard, "block", block, shard_block)
                x = torch.randn(1, 1, E, device=args.device, dtype=args.dtype)  # [B, T, E]
                work = "block", pack_linears(block), x, n_calls, args.repeats
                by_width.append({"width": E} | distributed.split_ms(team, *work, "its all-reduces", 2, E))
            report.sweep("A forward of GPTlite: time (ms)", by_length)
            report.sweep("A decode step of one block: time (ms)", by_width)
            add_break_even(report, by_width, "width", one, "its all-reduces", [(2, "all_reduce", size)], W)

        report.why(words.compare(tables[1][ranks], tables[1][one]))
        waiting = words.part("waiting", run.seconds.get("all_reduce", 0.0), run.total_seconds, "decoding")
        report.why(words.about("all-reduces", waiting))
        report.why(words.about("a block here", words.crossover(by_width, "width", ranks, one)))
        report.why(words.split_pays(by_width, "width", one, "its all-reduces", W))
        report.plot_sweep("A decode step of one block: time (ms)")
        report.finish()
