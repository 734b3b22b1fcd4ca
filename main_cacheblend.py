"""CacheBlend: stored pieces of a prompt are put together, and only the tokens that suffer are recomputed.

Idea: retrieved passages (chunks) come back in many prompts, but seldom at the very beginning, where a prefix
cache would find them. So each chunk's keys and values are stored as if it stood alone. What they miss,
attention to the chunks before them, is repaired: one layer tells which tokens' keys have changed most, and
from there on only these tokens and those behind the chunks run through the model.

Exact if all is recomputed, and for a first chunk, which is a prefix; else approximate. GPTlite's positions
are learned and added to the input, so a chunk is stored for its place; where positions are rotations, stored
keys are turned instead. Wins time to the first token: behind the check most tokens skip all layers, with six
layers four and a part of the fifth. Loses quality the more chunks depend on each other, memory for what is
stored, and time where a prompt is so short that its pass takes as long as reading the weights.

Run: python main_cacheblend.py            (--ratio 0.3: share of the stored tokens that is recomputed)

Source: Yao et al., CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion, 2025
(whose choice narrows from layer to layer: here one layer makes it); chunk starts: Hu et al., EPIC, 2025.
"""

import torch
import torch.nn.functional as F

from gptlite_blocks import weights_of
from gptlite_kvcache import cache_bytes, cache_length, scaled_dot_product_attention_kv_cache
from gptlite_positions import GPTlite_Positions, join_caches
from main_kvcache import generate_kvcache

CHECK_LAYER = 1  # keys of layer 0 follow from token and position alone: here the context shows first


@torch.no_grad()
def encode_alone(model, chunk, start):
    """Keys and values of a chunk [1, T] that sees only itself, at positions start, start + 1, ...

    Returns: one (k, v) a layer, [1, H, T, D] each. Raises ValueError for positions outside the context.
    """
    if not 0 <= start < start + chunk.shape[1] <= model.seqlen:
        raise ValueError(f"{chunk.shape[1]} tokens at {start} do not fit the context of {model.seqlen}")
    positions = torch.arange(start, start + chunk.shape[1], device=chunk.device)  # [T]
    return model(chunk, positions=positions)[1]


class ChunkStore:
    """Keys and values of chunks by place and tokens: a chunk elsewhere is another entry.

    With other weights of the model everything is forgotten. n_computed: tokens that were not there.
    """

    def __init__(self, model):
        self.model, self.weights, self.entries, self.n_computed = model, [], {}, 0

    def get(self, chunk, start):
        """What encode_alone(model, chunk, start) gives, computed once; not to be modified."""
        weights = weights_of(self.model)
        if [w[1:] for w in weights] != [w[1:] for w in self.weights]:
            self.weights, self.entries = weights, {}
        key = start, tuple(chunk[0].tolist())
        if key not in self.entries:
            self.entries[key] = encode_alone(self.model, chunk, start)
            self.n_computed += chunk.shape[1]
        return self.entries[key]


@torch.no_grad()
def blend_naively(model, tokens, stored, chosen):
    """The blend as it is defined: all tokens run through all layers, stored keys and values replace theirs.

    Args: tokens [1, T]; stored: one (k, v) a layer of the first n of them, [1, H, n, D] each; chosen: those
        of the n that keep their own. Returns: logits of the tokens behind the n, [1, T - n, V].
    """
    n, T = cache_length(stored), tokens.shape[1]
    reused = torch.tensor([i for i in range(n) if i not in set(chosen)], dtype=torch.int64)
    x = model.token_embedding(tokens) + model.position_embedding.weight[:T]  # [1, T, E]
    for block, (k, v) in zip(model.blocks, stored, strict=True):
        mha, normed = block.mha, block.ln1(x)
        projections = mha.query_proj, mha.key_proj, mha.value_proj
        Q, K, V = (mha.split_heads(project(normed)) for project in projections)  # [1, H, T, D]
        K[:, :, reused], V[:, :, reused] = k[:, :, reused], v[:, :, reused]
        out = scaled_dot_product_attention_kv_cache(Q, K, V)  # [1, H, T, D]
        x = x + mha.out_proj(mha.merge_heads(out))  # [1, T, E]
        x = x + block.ffwd(block.ln2(x))  # [1, T, E]
    return model.fc_out(model.ln(x[:, n:]))  # [1, T - n, V]


def most_changed(change, n_chosen):
    """CacheBlend's choice, from how much the keys of each stored token change [n]: indices [n_chosen]."""
    return change.topk(n_chosen).indices


def chunk_starts(change, n_chosen, chunk_len):
    """EPIC's choice: the first tokens of every chunk, whatever their keys."""
    return (torch.arange(len(change), device=change.device) % chunk_len).argsort(stable=True)[:n_chosen]


def at_random(change, n_chosen, generator):
    """What a choice must beat."""
    return torch.randperm(len(change), generator=generator)[:n_chosen].to(change.device)


class GPTlite_CacheBlend(GPTlite_Positions):
    """GPTlite_Positions that also takes keys and values computed without the tokens before them."""

    def forward(
        self,
        x,
        kv_cache=None,
        max_seqlen=None,
        positions=None,
        stored=None,
        ratio=0.15,
        choose=most_changed,
    ):
        """As GPTlite_Positions; with `stored` the pass over one text whose chunks are stored.

        Args: x: token ids [1, T], the chunks and what is new behind them; kv_cache: exact cache of a prefix
            before x; stored: one (k, v) a layer of the first n tokens of x, [1, H, n, D] each; ratio: share
            of these n that is recomputed; choose: as most_changed.
        Returns: logits of what is new [1, T - n, V], and the cache of prefix and x. Raises ValueError for a
            batch, a ratio that is no share, nothing stored, nothing new, or more than the context.
        """
        if stored is None:
            return super().forward(x, kv_cache, max_seqlen, positions)
        n_past, n, T = cache_length(kv_cache), cache_length(stored), x.shape[1]
        if len(x) != 1 or not 0 <= ratio <= 1 or not 0 < n < T or n_past + T > self.seqlen:
            sizes = f"{len(x)} texts of {T} tokens behind {n_past}, {n} stored, {ratio} recomputed"
            raise ValueError(f"{sizes}: a blend is of 1 text with new tokens, within {self.seqlen}")
        old = join_caches(kv_cache, stored)
        if (n_chosen := round(ratio * n)) == 0:
            return super().forward(x[:, n:], old, max_seqlen)
        positions = torch.arange(n_past, n_past + T, device=x.device)  # [T]
        x, new_cache = self.token_embedding(x) + self.position_embedding(positions), []  # [1, T, E]
        for layer, block in enumerate(self.blocks):
            if layer == CHECK_LAYER:
                K = block.mha.split_heads(block.mha.key_proj(block.ln1(x[:, :n])))  # [1, H, n, D]
                change = (K - stored[layer][0]).float().square().sum(dim=(0, 1, 3))  # [n]
                chosen = choose(change, n_chosen).sort().values  # [n_chosen]
                rows = torch.cat([chosen, torch.arange(n, T, device=x.device)])  # of x: prefix not counted
                x, positions = x[:, rows], positions[rows]  # [1, Sq, E], [Sq]
            x, layer_cache = blend_layer(block, x, positions, old[layer], n_past + T)
            new_cache.append(layer_cache)
        return self.fc_out(self.ln(x[:, n - T :])), new_cache  # [1, T - n, V]


def blend_layer(block, x, positions, stored, Sk):
    """One block over Sq tokens of a text, whose keys and values take the place of those stored.

    Args: x [1, Sq, E]; positions: theirs [Sq]; stored: (k, v) of the text's beginning [1, H, S, D]; Sk: its
        length. Returns: x [1, Sq, E] and (k, v) of the whole text, [1, H, Sk, D] each.
    """
    mha, normed, visible = block.mha, block.ln1(x), torch.arange(Sk, device=x.device) <= positions[:, None]
    Q, *fresh = (mha.split_heads(p(normed)) for p in (mha.query_proj, mha.key_proj, mha.value_proj))
    room = (0, 0, 0, Sk - stored[0].shape[2])
    K, V = (F.pad(old, room).index_copy(2, positions, new) for old, new in zip(stored, fresh, strict=True))
    out = scaled_dot_product_attention_kv_cache(Q, K, V, visible)  # [1, H, Sq, D] of K, V [1, H, Sk, D]
    x = x + mha.out_proj(mha.merge_heads(out))  # [1, Sq, E]
    return x + block.ffwd(block.ln2(x)), (K, V)


def generate_blended(model, prompt, n_tokens, seqlen, prefix, stored, ratio):
    """Greedy decoding behind a blended prompt [1, T]: prompt and new tokens, [1, T + n_tokens].

    Args: model: GPTlite_CacheBlend; prefix, stored, ratio: kv_cache, stored and ratio of its forward.
    """
    with torch.no_grad():
        logits, kv_cache = model(prompt[:, cache_length(prefix) :], prefix, stored=stored, ratio=ratio)
    first = logits[:, -1].argmax(dim=-1, keepdim=True)  # [1, 1]
    return torch.cat([prompt, generate_kvcache(model, first, n_tokens - 1, seqlen, kv_cache)], dim=1)


if __name__ == "__main__":
    from functools import partial
    from itertools import product

    import inference_report as harness
    import inference_reuse as reuse
    import inference_words as words
    from inference_report import Method
    from inference_utils import sample_prompts
    from main_prefix_cache import generate_reusing

    parser = harness.options(__doc__, 3, quick={"n_tokens": 4}, prompt_len=224, n_tokens=32)
    parser.add_argument("--n-chunks", type=harness.positive_int, default=6, help="chunks of the prompt")
    parser.add_argument("--chunk-len", type=harness.positive_int, default=32, help="tokens of a chunk")
    parser.add_argument("--ratio", type=harness.share, default=0.15, help="share that is recomputed")
    with harness.script(parser) as args, torch.no_grad():
        text, (model,) = harness.load_text(args), harness.load_models(args, GPTlite_CacheBlend)
        W, C, n, T = model.seqlen, args.chunk_len, args.n_chunks * args.chunk_len, args.prompt_len
        if args.n_chunks < 2 or not n < T <= W - args.n_tokens:
            sizes = f"{args.n_chunks} chunks of {C} in a prompt of {T}, {args.n_tokens} new tokens"
            raise ValueError(f"{sizes}: at least 2 chunks, shorter than the prompt, all within {W}")
        prompt, hide = text.prompts(1, T), ("forward_tokens", "tpot_p99_ms", "valid_loss", "speedup")
        windows = sample_prompts(text.valid, args.n_windows, W + 1).to(args.device)  # [N, W + 1]
        config = {"batch_size": 1, "n_chunks": args.n_chunks, "chunk_len": C, "ratio": args.ratio}
        report = harness.Report(args, "CacheBlend", model, reuse.COLUMNS, hide, **config)

        def chunks(encode, tokens, size):  # of the first, which is a prefix, and of the others
            first, *others = (encode(tokens[:, i : i + C], i) for i in range(0, size, C))
            return first, join_caches(*others)

        # Quality: the tokens behind the chunks, in the windows of every report
        choices = {"most changed": most_changed, "chunk starts": partial(chunk_starts, chunk_len=C)}
        choices["at random"] = partial(at_random, generator=torch.Generator().manual_seed(args.seed))
        between = sorted(({args.ratio, 0.6} | (set() if args.quick else {0.05, 0.3})) - {0.0, 1.0})
        keys = [("most changed", 0.0), *product(choices, between), ("most changed", 1.0)]

        def ways(tokens):
            prefix, stored = chunks(partial(encode_alone, model), tokens, n)
            blend = partial(model, tokens[:, C:], prefix, stored=stored)
            return {key: partial(blend, ratio=key[1], choose=choices[key[0]]) for key in keys}

        found, full = reuse.measure_quality(model, windows, n, ways)
        lines = [{"chosen": c, "recomputed": r} | reuse.quality_line(found[c, r], full) for c, r in keys]
        report.sweep(f"The {W - n} tokens behind {args.n_chunks} chunks of {C}", lines)

        # Speed of a prompt, then of prompts with fewer chunks
        store = ChunkStore(model)
        prefix, stored = chunks(store.get, prompt, n)
        report.check("each chunk is computed once, for its place", store.n_computed == n)
        shared = {"loss": False, "kv_bytes_per_token": harness.kv_bytes_per_token(model, prompt)}
        one, every = ({"stored_mb": cache_bytes(kv) / 1e6} for kv in (prefix, prefix + stored))
        reused = W, prompt[0, :C].tolist(), prefix
        methods = [Method("full prefill", generate_kvcache, model, **shared | reuse.quality_figures(full))]
        methods.append(Method("prefix cache", generate_reusing, model, *reused, **one, **shared))
        for r in sorted({0.0, args.ratio, 1.0}):
            figures = reuse.quality_figures(found["most changed", r], full) | every | shared
            blend = generate_blended, model, W, prefix, stored, r
            methods.append(Method(f"recompute {100 * r:g}%", *blend, exact=r == 1, **figures))
        for method in methods:
            method.figures["computed"] = reuse.computed_share(model, partial(method.run, prompt, 1), T)
        rows = report.compare(prompt, args.n_tokens, *methods, label="")
        name, full_row = f"recompute {100 * args.ratio:g}%", rows["full prefill"]

        def prefills(size):
            one = prompt[:, : size + T - n], 1, W
            blend = partial(generate_blended, model, *one, *chunks(store.get, prompt, size))
            ways = {"full prefill": partial(generate_kvcache, model, *one), name: partial(blend, args.ratio)}
            return ways | {"recompute 0%": partial(blend, 0.0)}

        sizes = range(2 * C, n + 1, max(n - 2 * C, C) if args.quick else C)
        title = f"TTFT (ms) by stored tokens, {T - n} behind them"
        lines = report.time_sweep(title, "stored tokens", sizes, prefills)

        against = words.compare(rows[name], rows["prefix cache"], "ttft_ms")
        report.why(words.compare(rows[name], full_row, "ttft_ms") + against)
        report.why(words.loss(rows["recompute 0%"]) + words.loss(rows[name]))
        report.why(reuse.lower_at(found, "most changed", "at random", between))
        report.why(words.crossover(lines, "stored tokens", name, "full prefill"))
        curves = {c: (between, [reuse.quality_figures(found[c, r])["kl"] for r in between]) for c in choices}
        report.plot_lines(curves, "share recomputed", "KL (nats)", "Divergence behind the chunks")
        report.finish()
