"""Sequence parallelism: every rank has some of a text's tokens, and attention is what brings them together.

Embeddings, layer norms and linear layers work on each token alone, so W ranks compute a W-th of a prompt
each. Ulysses: before attention an all-to-all gives each rank all tokens of some heads, and behind it the
tokens come back. Ring attention: queries stay, keys and values go around the ring, and partial attentions are
joined by their log-sum-exp. The cache stays split, and a decode step joins the parts of all ranks.

Exact up to rounding. Wins memory: a rank holds a W-th of the cache. Wins time for long prompts: attention
grows with the square of the length, what is exchanged with the length. Loses in decoding: one token cannot be
split, and each layer adds a gather. Ulysses needs heads that W divides. In the ring a causal mask gives the
last rank most of the work; in a zigzag rank i has the chunks i and 2W - 1 - i, and all have as much to do.
Lengths that do not divide are padded at the end, where causality hides the padding from every real token.

Run: python main_sequence_parallel.py     (or: torchrun --nproc-per-node 2 main_sequence_parallel.py)

Source: Jacobs et al., DeepSpeed Ulysses, 2023; Liu et al., Ring Attention with Blockwise Transformers, 2023.
"""

from copy import deepcopy
from functools import partial

import torch

from gptlite import Block, GPTlite, MultiHeadAttention
from gptlite_merging import fused_attend, merge_attention, merge_parts
from linear_packed import pack_linears


def chunks_of(rank, world_size, zigzag):
    """Which chunks of the text a rank has: of W chunks one, or of 2W the first and last that are left."""
    return [rank, 2 * world_size - 1 - rank] if zigzag else [rank]


def positions_of(rank, world_size, T, zigzag):
    """Positions of a rank's tokens, int64 [t], as many on each rank; those from T on are padding."""
    chunks = chunks_of(rank, world_size, zigzag)
    size = -(-T // (world_size * len(chunks)))  # tokens of a chunk
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in chunks])


# ---- Attention over tokens of all ranks: q, k, v [B, H, t, D] of this rank's tokens -> [B, H, t, D] ----


def visible_pairs(rank, source, world_size, zigzag):
    """Pairs (i, j, whether it is the diagonal): my i-th chunk sees the j-th chunk of another rank."""
    mine, others = (chunks_of(r, world_size, zigzag) for r in (rank, source))
    return [(i, j, a == b) for i, a in enumerate(mine) for j, b in enumerate(others) if b <= a]


def ring_attention(team, q, k, v, zigzag=True, attend=fused_attend):
    """Causal attention; keys and values go from rank to rank, W - 1 times, while those at hand are used."""
    n_chunks, W = 2 if zigzag else 1, team.world_size
    queries = q.chunk(n_chunks, dim=2)  # [B, H, c, D] each
    joined, kv = [None] * n_chunks, torch.stack([k, v])  # [2, B, H, t, D]
    for step in range(W):
        if step < W - 1:
            (arriving,), finish = team.shift(kv)  # before computing, so that it goes on beside it
        keys, values = kv[0].chunk(n_chunks, dim=2), kv[1].chunk(n_chunks, dim=2)
        for i, j, diagonal in visible_pairs(team.rank, (team.rank - step) % W, W, zigzag):
            part = attend(queries[i], keys[j], values[j], diagonal)  # [B, H, c, D], [B, H, c]
            joined[i] = part if joined[i] is None else merge_attention(*joined[i], *part)
        if step < W - 1:
            finish()
            kv = arriving
    return torch.cat([out for out, _ in joined], dim=2)


def ulysses_attention(team, q, k, v, attend=fused_attend):
    """Causal attention; tokens are exchanged for heads, and back. Raises ValueError unless W divides H."""
    W, (B, H, t, D) = team.world_size, q.shape
    if H % W:
        raise ValueError(f"Ulysses splits heads: {H} cannot be split over {W} ranks evenly")
    parts = torch.stack([q, k, v], dim=1).view(B, 3, W, H // W, t, D).movedim(2, 0)  # by rank that gets them
    parts = team.all_to_all(parts)  # [W, B, 3, H/W, t, D], by rank that has the tokens
    q, k, v = parts.movedim(0, 3).flatten(3, 4).unbind(1)  # [B, H/W, T, D] each
    out, _ = attend(q, k, v, True)  # [B, H/W, T, D]
    out = team.all_to_all(out.unflatten(2, (W, t)).movedim(2, 0))  # [W, B, H/W, t, D], by heads
    return out.movedim(0, 1).flatten(1, 2)  # [B, H, t, D]


FORMS = {  # name: (attention, whether chunks lie in a zigzag)
    "Ulysses": (ulysses_attention, False),
    "ring": (partial(ring_attention, zigzag=False), False),
    "zigzag ring": (ring_attention, True),
}


class MultiHeadAttention_Sequence(MultiHeadAttention):
    """Attention that is given from outside: attend(q, k, v), [B, H, t, D] each -> [B, H, t, D]."""

    def forward(self, x, attend):
        q, k, v = (self.split_heads(f(x)) for f in (self.query_proj, self.key_proj, self.value_proj))
        return self.out_proj(self.merge_heads(attend(q, k, v)))  # [B, t, E]


class Block_Sequence(Block):
    mha_class = MultiHeadAttention_Sequence

    def forward(self, x, attend):
        x = x + self.mha(self.ln1(x), attend)  # [B, t, E]
        return x + self.ffwd(self.ln2(x))  # [B, t, E]


class GPTlite_Sequence(GPTlite):
    """GPTlite on some of a text's tokens; the weights are GPTlite's. For inference only."""

    block_class = Block_Sequence

    def forward(self, tokens, positions, attends):
        """Token ids [B, t], their positions [t], an attention for each layer -> logits [B, t, V]."""
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # [B, t, E]
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, attend)  # [B, t, E]
        return self.fc_out(self.ln(x))  # [B, t, V]


def prefill(team, model, tokens, form):
    """A rank's part of a prompt [B, T]: logits [B, t, V], positions [t], the cache, which has no padding."""
    attention, zigzag = FORMS[form]
    T, cache = tokens.shape[1], []
    positions = positions_of(team.rank, team.world_size, T, zigzag).to(tokens.device)  # [t]
    real, held = positions < T, positions.clamp(max=T - 1)  # [t]

    def keep_and_attend(q, k, v):
        cache.append((k[:, :, real], v[:, :, real]))
        return attention(team, q, k, v)

    return model(tokens[:, held], held, [keep_and_attend] * len(model.blocks)), positions, cache


def decode_layer(team, cache, layer, owner, q, k, v):
    """Attention of a new token [B, H, 1, D] over the cache of all ranks; its owner keeps keys and values."""
    if team.rank == owner:
        cache[layer] = tuple(torch.cat(pair, dim=2) for pair in zip(cache[layer], (k, v), strict=True))
    out, lse = fused_attend(q, *cache[layer], False)  # [B, H, 1, D], [B, H, 1]
    parts = team.all_gather(torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], dim=-1))  # W of [B, H, 1, D+1]
    parts = torch.stack(parts, dim=-2)  # [B, H, 1, W, D+1]
    return merge_parts(parts[..., :-1], parts[..., -1])[0].to(q.dtype)  # [B, H, 1, D]


@torch.no_grad()
def generate_sequence_parallel(team, form, prompt, n_tokens, seqlen):
    """Greedy decoding on all ranks at once, of the model team.kept.model; each gets the same tokens.

    Of prompt, token ids [B, T], the last seqlen are read. ValueError for an empty one, and past the context.
    """
    model, tokens = team.kept.model, prompt.to(team.device)  # [B, T]
    read, W = tokens[:, -seqlen:], team.world_size  # [B, S]
    S = read.shape[1]
    if S == 0 or S + n_tokens > seqlen + 1:
        raise ValueError(f"{S} tokens and {n_tokens} new ones: the context holds 1 to {seqlen}")
    for n in range(S, S + n_tokens):  # tokens that are there
        if n == S:
            logits, positions, cache = prefill(team, model, read, form)  # [B, t, V], [t]
            owners = [S - 1 in positions_of(rank, W, S, FORMS[form][1]).tolist() for rank in range(W)]
            last = logits[:, positions == S - 1] if owners[team.rank] else logits[:, :1]  # [B, 1, V]
            logits = team.broadcast(last.contiguous(), owners.index(True))
        else:
            attends = [partial(decode_layer, team, cache, layer, n % W) for layer in range(len(cache))]
            logits = model(tokens[:, -1:], torch.tensor([n - 1], device=tokens.device), attends)  # [B, 1, V]
        tokens = torch.cat([tokens, logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)  # [B, T+1]
    return tokens


def keep(team, model):
    """Every rank keeps the model, and by the names of the forms their prefill and their attention alone."""
    team.kept.model = model = pack_linears(deepcopy(model).to(team.device))
    for form, (attention, _) in FORMS.items():
        setattr(team.kept, f"prefill, {form}", partial(prefill, team, model, form=form))
        setattr(team.kept, f"attention, {form}", partial(attention, team))


if __name__ == "__main__":
    import inference_distributed as distributed
    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import GPTlite_KVCache, cache_bytes
    from inference_links import add_break_even
    from inference_report import Method
    from inference_utils import GPTLITE_CKPT_PATH, alternating_ms
    from main_kvcache import generate_kvcache

    quick = {"checkpoint": GPTLITE_CKPT_PATH, "prompt_len": 33, "n_tokens": 4, "n_windows": 2}
    parser = harness.options(__doc__, repeats=3, quick=quick, prompt_len=193, n_tokens=64)
    distributed.add_world_size(parser)
    with harness.script(parser) as args:
        (*_, zigzag), one, alone = FORMS, "one process", "a rank alone"
        W, T, n_calls, args.device = args.world_size, args.prompt_len, 10, distributed.ranks_device(args)
        text = harness.load_text(args)
        whole, model = harness.load_models(args, GPTlite_KVCache, GPTlite_Sequence, packed=False)
        L, H, D, seqlen = len(model.blocks), whole.blocks[0].mha.n_heads, 64, model.seqlen
        if T + args.n_tokens > seqlen + 1:
            raise ValueError(f"{T} tokens and {args.n_tokens} new ones do not fit the context of {seqlen}")
        if H % W:
            raise ValueError(f"Ulysses splits heads: {H} cannot be split over {W} ranks evenly")
        report = harness.Report(args, "sequence parallelism", whole, text=text, world_size=W)
        prompts, lines, long, pairs = text.prompts(1, T), [], [], []
        with distributed.Ranks(W, args.device) as team, torch.no_grad():
            expected = pack_linears(whole)(prompts)[0]  # [1, T, V]
            team.run(keep, model)
            methods = [Method(one, generate_kvcache, whole)]
            methods.append(Method(alone, partial(team.alone, generate_kvcache), whole))
            for form, (_, in_zigzag) in FORMS.items():
                on_ranks = team.gather(distributed.call_shard, f"prefill, {form}", prompts)
                logits, positions, caches = (list(parts) for parts in zip(*on_ranks, strict=True))
                order = torch.cat(positions).argsort()[:T]  # padding comes last
                logits = torch.cat(logits, dim=1)[:, order]  # [1, T, V]
                report.check_close(f"{form}: logits of all ranks and of {one}", logits, expected)
                run = team.run(distributed.counted, generate_sequence_parallel, form, prompts, 1, seqlen)
                n_bytes = L * len(positions[0]) * H * D * args.dtype.itemsize  # a rank's keys in all layers
                n_bytes = n_bytes * 4 * (W - 1) // W if form == "Ulysses" else n_bytes * 2 * (W - 1)
                sent = run.sent_bytes.get("all_to_all" if form == "Ulysses" else "shift", 0)
                report.check(f"{form}: for the prompt a rank sends {n_bytes:,} bytes", sent == n_bytes)
                generate = lambda _, *work, form=form: team.run(generate_sequence_parallel, form, *work)  # noqa
                kv = {"kv_bytes_per_token": max(map(cache_bytes, caches)) / T, "loss": False}
                methods.append(Method(form, generate, team.kept.model, **kv))
                n = [sum(len(visible_pairs(r, s, W, in_zigzag)) for s in range(W)) for r in range(W)]
                pairs.append({"form": form} | {f"rank {r}": n[r] for r in range(W)})
            table = report.compare(prompts, args.n_tokens, *methods, label="")
            report.sweep("Pairs of chunks, queries and keys, that a rank computes", pairs[1:])

            def timed(what, n, run, *work):
                """A line of times: run() with all threads and with a rank's, and the work of each form."""
                line = alternating_ms({one: run, alone: partial(team.alone, run)}, args.repeats, args.device)
                for form in FORMS:
                    line[form] = distributed.shards_ms(team, f"{what}, {form}", n_calls, *work)
                return {"tokens": n} | line

            for n in (32,) if args.quick else (64, 128, 256):
                tokens = text.prompts(1, n)
                lines.append(timed("prefill", n, partial(whole, tokens), tokens))
            for n in (256,) if args.quick else (512, 2048, 8192):
                qkv = torch.randn(3, 1, H, n, D, device=args.device).to(args.dtype)
                part = qkv[..., : 2 * -(-n // (2 * W)), :].contiguous()  # as many tokens as a rank has
                long.append(timed("attention", n, partial(fused_attend, *qkv, True), *part))
                size = 2 * part[0].numel()  # keys and values
                ms = team.run(distributed.collective_ms, "send", size, n_calls) if W > 1 else 0.0
                long[-1]["ring's exchanges"] = (W - 1) * ms
            report.sweep("A prompt through GPTlite: time (ms)", lines)
            report.sweep("Causal attention of one layer: time (ms)", long)
            kv = 2 * H * D * args.dtype.itemsize / W  # bytes of keys and values on a rank, for each token
            add_break_even(report, long, "tokens", one, "ring's exchanges", [(W - 1, "send", kv)], W)

        ours, base = table[zigzag], table[one]
        report.why(words.compare(ours, base) + words.compare(ours, base, "ttft_ms"))
        report.why(words.about("a prompt", words.crossover(lines, "tokens", zigzag, alone)))
        report.why(words.about("attention alone", words.crossover(long, "tokens", zigzag, one)))
        report.why(words.split_pays(long, "tokens", one, "ring's exchanges", W))
        report.plot_sweep("Causal attention of one layer: time (ms)")
        report.finish()
