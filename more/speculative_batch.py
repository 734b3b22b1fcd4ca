"""Speculative decoding of a batch: every row accepts as many drafts as it can, so lengths become ragged.

All rows draft n tokens together and are verified together, n + 1 rows each. What is accepted differs: one
row goes on by a token, another by n + 1. So each row has a length of its own; keys are written and hidden
by it, and what was rejected is forgotten by setting it back. A round of a draft begins with the last two
tokens of a row, so that its cache may lack the last one without a case of its own.

Exact: every row gets the tokens that it gets alone, up to rounding. Wins over rows that wait for the worst
of them, which keep the form of a rectangle and lose what the others had right. Loses against steps without
drafts as soon as the rows of a verification, B (n + 1) of them, cost as much as that many steps of one:
where the arithmetic is no longer idle. Rows that are done are computed to the end here; engines give their
place away.

Run: python more/speculative_batch.py            (--draft-len 5 for longer drafts)

Source: Qian et al., BASS: Batched Attention-optimized Speculative Sampling, 2024.
"""

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite import GPTlite
from gptlite_kvcache import scaled_dot_product_attention_kv_cache
from inference_speculation import check_request


class RaggedCache:
    """Keys and values [L, B, H, W + spare, D] of sequences that have lengths of their own, int64 [B].

    Args: spare: rows behind the context for drafts that lie beyond it, which are never accepted.
    """

    def __init__(self, model, batch_size, spare=0):
        weight, mha = model.position_embedding.weight, model.blocks[0].mha
        shape = (len(model.blocks), batch_size, mha.n_heads, model.seqlen + spare, mha.d_head)
        self.k = torch.zeros(shape, dtype=weight.dtype, device=weight.device)  # [L, B, H, W + spare, D]
        self.v = torch.zeros_like(self.k)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=weight.device)  # [B]

    def write(self, layer, positions, K, V):
        """Puts keys and values [B, H, R, D] at the positions [B, R] of each sequence."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]  # [B, 1]
        self.k[layer][rows, :, positions] = K.transpose(1, 2)  # [B, R, H, D]
        self.v[layer][rows, :, positions] = V.transpose(1, 2)


class GPTlite_Ragged(GPTlite):
    """GPTlite over a RaggedCache; the weights are GPTlite's. For inference only."""

    @torch.no_grad()
    def forward(self, x, cache=None):
        """New tokens [B, R] behind those of each row -> (logits [B, R, V], the cache, every row R longer)."""
        cache = RaggedCache(self, len(x)) if cache is None else cache
        R, n = x.shape[1], int(cache.lengths.max()) + x.shape[1]  # keys of the longest row
        positions = cache.lengths[:, None] + torch.arange(R, device=x.device)  # [B, R]
        visible = torch.arange(n, device=x.device) <= positions[:, None, :, None]  # [B, 1, R, n]
        x = self.token_embedding(x) + self.position_embedding(positions.clamp(max=self.seqlen - 1))
        for layer, block in enumerate(self.blocks):
            mha, h = block.mha, block.ln1(x)  # [B, R, E]
            Q, K, V = (mha.split_heads(f(h)) for f in (mha.query_proj, mha.key_proj, mha.value_proj))
            cache.write(layer, positions, K, V)
            k, v = cache.k[layer, :, :, :n], cache.v[layer, :, :, :n]  # [B, H, n, D]
            out = scaled_dot_product_attention_kv_cache(Q, k, v, visible)  # [B, H, R, D]
            x = x + mha.out_proj(mha.merge_heads(out))  # [B, R, E]
            x = x + block.ffwd(block.ln2(x))  # [B, R, E]
        cache.lengths += R
        return self.fc_out(self.ln(x)), cache  # [B, R, V]


@torch.no_grad()
def generate_speculative_batch(model, prompts, n_tokens, draft, draft_len, wait=False, rounds=None):
    """Greedy decoding of a batch in rounds of draft_len drafts and one verification.

    Args: model, draft: GPTlite_Ragged; prompts [B, T]; wait: every row accepts as many as the worst of them;
        rounds: a list that gets (drafted, accepted) of every row that was not done, round by round.
    Returns: prompts and new tokens [B, T + n_tokens]. Raises ValueError as check_request does.
    """
    B, T = prompts.shape
    check_request(model, prompts, n_tokens, draft_len, B)
    stop, n = T + n_tokens, draft_len
    cache, drafts = (RaggedCache(one, B, n + 2) for one in (model, draft))
    tokens = torch.cat([prompts, prompts.new_zeros(B, n_tokens + n + 2)], dim=1)  # [B, stop + n + 2]
    rows, places = torch.arange(B, device=prompts.device)[:, None], torch.arange(n + 1, device=prompts.device)
    logits, _ = model(prompts, cache)  # [B, T, V]
    tokens[:, T] = logits[:, -1].argmax(dim=-1)
    lengths = torch.full_like(cache.lengths, min(T + 1, stop))  # [B]: tokens of each row
    if n_tokens > 1:
        draft(prompts, drafts)
    while (lengths < stop).any():
        last = lengths[:, None] - 2 + torch.arange(2, device=prompts.device)  # [B, 2]
        new, guesses = tokens[rows, last], []  # [B, 2]
        drafts.lengths = lengths - 2
        for _ in range(n):
            logits, _ = draft(new, drafts)  # [B, S, V]
            new = logits[:, -1].argmax(dim=-1, keepdim=True)  # [B, 1]
            guesses.append(new)
        guesses = torch.cat(guesses, dim=1)  # [B, n]
        cache.lengths = lengths - 1
        logits, _ = model(torch.cat([tokens[rows, last[:, 1:]], guesses], dim=1), cache)  # [B, n + 1, V]
        best = logits.argmax(dim=-1)  # [B, n + 1]
        room = stop - lengths - 1  # [B]: of drafts beside the token on top, -1 where a row is done
        accepted = (guesses == best[:, :-1]).cumprod(dim=1).sum(dim=1)  # [B]
        if wait:
            accepted = accepted.masked_fill(room < 0, n).amin().expand(B)  # [B]
        accepted = torch.minimum(accepted, room)  # [B]
        if rounds is not None:
            drafted = zip(room.clamp(max=n).tolist(), accepted.tolist(), strict=True)
            rounds += [pair for pair in drafted if pair[0] >= 0]
        # best equals the drafts as far as they were accepted; what stands behind is overwritten later
        tokens[rows, lengths[:, None] + places] = torch.where(
            (room < 0)[:, None], tokens[rows, lengths[:, None] + places], best
        )
        lengths = lengths + accepted + 1  # a row that is done: -1 + 1
    return tokens[:, :stop]


if __name__ == "__main__":
    import inference_report as harness
    import inference_speculation as study
    import inference_words as words
    from gptlite_kvcache import GPTlite_StaticKVCache, StaticKVCache
    from inference_report import Method
    from inference_utils import GPTLITE_DISTILLED_CKPT_PATH, load_checkpoint
    from main_kvcache import generate_static

    quick = {"prompt_len": 16, "n_tokens": 10, "batch_sizes": [1, 3], "draft_len": 2}
    parser = harness.options(__doc__, 3, quick=quick, prompt_len=64, n_tokens=64)
    add, number = parser.add_argument, harness.positive_int
    add("--batch-sizes", type=number, nargs="+", default=[1, 2, 4, 8, 16], help="sequences at a time")
    add("--draft-len", type=number, default=3, help="drafts of a round")
    with harness.script(parser) as args:
        text, T, N, n = harness.load_text(args), args.prompt_len, args.n_tokens, args.draft_len
        static, target = harness.load_models(args, GPTlite_StaticKVCache, GPTlite_Ragged)
        small = load_checkpoint(GPTLITE_DISTILLED_CKPT_PATH)
        draft, static_draft = (harness.build(args, small, c) for c in (GPTlite_Ragged, GPTlite_StaticKVCache))
        sizes = sorted({*args.batch_sizes})
        prompts = text.prompts(sizes[-1], T)  # [B, T]
        check_request(target, prompts[:1], N, n)
        columns = harness.COLUMNS | study.COLUMNS
        report = harness.Report(args, "speculative decoding of a batch", static, columns, study.HIDE, text)
        bytes_per_token = study.bytes_per_token([StaticKVCache(model, 1) for model in (static, static_draft)])
        figures, speed, tables = {"kv_bytes_per_token": bytes_per_token} | study.NO_STEPS, [], {}
        for B in sizes:
            ragged, worst = [], []

            def speculative(name, rounds, wait):
                def run(model, prompts, n_tokens, *_):
                    return generate_speculative_batch(model, prompts, n_tokens, draft, n, wait, rounds)

                return Method(name, run, target, steps=[target, draft], **figures)

            rows = report.compare(
                prompts[:B],
                N,
                Method("static", generate_static, static, StaticKVCache(static, B)),
                speculative("ragged", ragged, False),
                speculative("waiting", worst, True),
            )
            n_past = T + N // 2
            steps = {"draft": study.forward_behind(static_draft, n_past, 1, B)}
            times = study.RowTimes(args, static, n_past, [n + 1], steps, B)
            cost = n * times.of("draft") + times.of(n + 1)
            for name, rounds in (("ragged", ragged), ("waiting", worst)):
                rows[name].update(study.round_figures(rounds), round_steps=cost)
            alpha = study.acceptance(ragged)
            for name, share in (("ragged", alpha), ("waiting", alpha and alpha**B)):
                tokens = study.expected_tokens(share, n)
                rows[name]["predicted"] = None if tokens is None else tokens / cost
            ms = {name: row["tokens_per_s"] and 1000 / row["tokens_per_s"] for name, row in rows.items()}
            speed.append({"batch": B, "rows": B * (n + 1), "round/step": cost} | ms)
            tables[B] = rows
        title = "Time of a token by the batch (ms)"
        report.sweep(title, speed)
        report.check(
            "ragged rows accept no less than rows that wait",
            all(
                (t["ragged"]["tokens_per_round"] or 1) >= (t["waiting"]["tokens_per_round"] or 1) - 1e-9
                for t in tables.values()
            ),
        )
        many = tables[sizes[-1]]
        report.why(words.crossover(speed, "batch", "ragged", "static"))
        report.why(words.rounds(tables[sizes[0]]["ragged"]) + words.rounds(many["ragged"]))
        report.why(words.compare(many["ragged"], many["waiting"], "tokens_per_s"))
        report.why(words.batching(tables[sizes[0]]["static"], many["static"], sizes[-1] // sizes[0]))
        report.plot_sweep(title, names=["static", "ragged", "waiting"])
        report.finish()
