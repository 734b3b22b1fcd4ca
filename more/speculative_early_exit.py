"""Self-speculation: the first blocks of a model draft, all of its blocks verify.

A draft need not be another model. The hidden state behind block e, through the last norm and the head, is a
guess already. Its keys and values are the target's own, so one cache serves both, and a verification begins
where the draft ended: it runs only the blocks behind e, over the states that the draft kept. Instead of the
first blocks any others may draft (layer skip); what they write into the cache is overwritten by the
verification.

Exact, like every draft. Wins without a second model, without training and without a byte of memory, where
the last blocks change little: models trained with layer dropout or with losses at early exits. Loses where
every block is needed for a token, as in models trained without that; and a draft of half the blocks costs
half a step, where a small model that was distilled costs less.

Run: python more/speculative_early_exit.py            (--draft-len 2 for shorter drafts)

Source: Elhoushi et al., LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding, 2024; Zhang
et al., Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding, 2023."""

from itertools import combinations

import torch
from torch import nn

import _root  # noqa: F401 (the files above become importable)
from main_speculative_decoding import generate_speculative


def embed(model, x, cache):
    """Tokens [1, S] behind what is cached -> [1, S, E]."""
    positions = torch.arange(cache.length, cache.length + x.shape[1], device=x.device)  # [S]
    return model.token_embedding(x) + model.position_embedding(positions)


class EarlyExit(nn.Module):
    """Target and draft in one, for generate_speculative: blocks 1 to n_early draft, the others verify.

    Args: model: GPTlite_StaticKVCache; n_early: from 1 to all of its blocks; cache: the one StaticKVCache.
    """

    def __init__(self, model, n_early, cache):
        super().__init__()
        if not 1 <= n_early <= len(model.blocks):
            raise ValueError(f"an exit behind block {n_early}: the model has blocks 1 to {len(model.blocks)}")
        self.model, self.n_early, self.cache, self.seqlen = model, n_early, cache, model.seqlen
        self.kept = None  # states behind the early blocks of tokens to be verified [1, S, E]

    def reset(self):
        self.kept = None

    def early(self, x):
        """The first blocks over tokens [1, S] behind what is cached, which counts them then: [1, S, E]."""
        h = embed(self.model, x, self.cache)  # [1, S, E]
        for layer, block in enumerate(self.model.blocks[: self.n_early]):
            h = block(h, self.cache, layer)  # [1, S, E]
        self.cache.advance(x.shape[1])
        return h

    @torch.no_grad()
    def propose(self, ids, n, temperature=0.0, generators=None):
        """n greedy drafts [1, n]; what the early blocks made of the tokens before them is kept."""
        new, kept, drafted = torch.tensor([ids[-1:]], device=self.cache.k.device), [], []  # [1, 1]
        for _ in range(n):
            kept.append(self.early(new))  # [1, 1, E]
            new = self.model.fc_out(self.model.ln(kept[-1]))[:, -1:].argmax(dim=-1)  # [1, 1]
            drafted.append(new)
        self.cache.advance(-n)
        self.kept = torch.cat(kept, dim=1)  # [1, n, E]
        return torch.cat(drafted, dim=1), None

    @torch.no_grad()
    def forward(self, x, kv_cache):
        """New tokens [1, S] -> (logits [1, S, V], the cache): the early blocks only where nothing is kept."""
        n_kept = 0 if self.kept is None else self.kept.shape[1]
        self.cache.advance(n_kept)
        h = self.early(x[:, n_kept:])  # [1, S - n_kept, E]: a prompt, or the last draft
        self.cache.advance(-x.shape[1])
        if n_kept:
            h = torch.cat([self.kept, h], dim=1)  # [1, S, E]
        for layer in range(self.n_early, len(self.model.blocks)):
            h = self.model.blocks[layer](h, self.cache, layer)  # [1, S, E]
        self.cache.advance(x.shape[1])
        self.kept = None
        return self.model.fc_out(self.model.ln(h)), kv_cache


class LayerSkip:
    """Drafts by some of the model's blocks (layers), over its own cache; the model itself verifies."""

    def __init__(self, model, layers, cache):
        self.model, self.layers, self.cache = model, layers, cache

    def reset(self):
        pass

    def step(self, x, cache):
        """Tokens [1, S] -> (logits [1, S, V], the cache, in which only these layers' rows are written)."""
        h = embed(self.model, x, cache)  # [1, S, E]
        for layer in self.layers:
            h = self.model.blocks[layer](h, cache, layer)  # [1, S, E]
        cache.advance(x.shape[1])
        return self.model.fc_out(self.model.ln(h)), cache

    @torch.no_grad()
    def propose(self, ids, n, temperature=0.0, generators=None):
        """n greedy drafts [1, n]; what they write is overwritten by the verification."""
        new, drafted = torch.tensor([ids[-1:]], device=self.cache.k.device), []  # [1, 1]
        for _ in range(n):
            new = self.step(new, self.cache)[0][:, -1:].argmax(dim=-1)  # [1, 1]
            drafted.append(new)
        self.cache.advance(-n)
        return torch.cat(drafted, dim=1), None


@torch.no_grad()
def choices_of(model, tokens, layers):
    """What these blocks of a GPTlite alone would choose behind every token: [B, T] -> [B, T]."""
    h = model.token_embedding(tokens) + model.position_embedding.weight[: tokens.shape[1]]  # [B, T, E]
    for layer in layers:
        h = model.blocks[layer](h)  # [B, T, E]
    return model.fc_out(model.ln(h)).argmax(dim=-1)


if __name__ == "__main__":
    import inference_report as harness
    import inference_speculation as study
    import inference_words as words
    from gptlite import GPTlite
    from gptlite_kvcache import GPTlite_StaticKVCache
    from main_kvcache import generate_static

    quick = {"n_requests": 1, "prompt_len": 16, "n_tokens": 12, "draft_len": 2}
    parser = harness.options(__doc__, 3, quick=quick, n_requests=4, prompt_len=64, n_tokens=96)
    parser.add_argument("--draft-len", type=harness.positive_int, default=4, help="drafts of a round")
    with harness.script(parser) as args:
        text, T, N, n = harness.load_text(args), args.prompt_len, args.n_tokens, args.draft_len
        target, whole = harness.load_models(args, GPTlite_StaticKVCache, GPTlite)
        study.check_request(target, torch.zeros(1, T), N, n)
        prompts, L = text.prompts(args.n_requests, T), len(target.blocks)  # [n, T]
        columns = harness.COLUMNS | study.COLUMNS | {"agreement": ("agree", "{:.3f}")}
        report = harness.Report(args, "self-speculation", target, columns, study.HIDE, text)

        tokens, agree = text.prompts(2 if args.quick else 8, whole.seqlen), {}  # [B, T] of real text
        best = choices_of(whole, tokens, range(L))  # [B, T]
        for k in range(1, L + 1):
            for layers in combinations(range(L), k):
                agree[layers] = (choices_of(whole, tokens, layers) == best).float().mean().item()
        subsets = {k: max((s for s in agree if len(s) == k), key=agree.get) for k in range(1, L + 1)}
        shown = [{"blocks": k, "the first": agree[tuple(range(k))]} for k in subsets]
        for line, layers in zip(shown, subsets.values(), strict=True):
            line |= {"the best": agree[layers], "which": " ".join(str(layer + 1) for layer in layers)}
        report.sweep("Greedy agreement of some blocks with all, on real text", shown)

        test, steps, forms = study.Study(target), {}, {}
        methods = [test.baseline(generate_static)]
        n_past = T + N // 2
        for e in range(1, L + 1):
            form, name = EarlyExit(target, e, test.cache), f"exit {e}"
            methods.append(test.method(name, generate_speculative, form, n, test.cache, verifier=form))
            forms[name] = e, tuple(range(e))
        other = next((k for k in range(L // 2, 0, -1) if subsets[k] != tuple(range(k))), L // 2)
        skip = LayerSkip(target, subsets[other], test.cache)
        name = f"skip to {other}"
        methods.append(test.method(name, generate_speculative, skip, n, test.cache))
        forms[name] = other, subsets[other]
        rows = report.compare(prompts, N, *methods, label="")
        for name, (_, layers) in forms.items():
            steps[name] = study.forward_behind(target, n_past, step=LayerSkip(target, layers, None).step)
        times = study.RowTimes(args, target, n_past, [n + 1], steps)
        for name, (e, layers) in forms.items():
            shared = name.startswith("exit")  # whose verification begins behind block e, with a token to go
            late = 1 - e / L if shared else 1.0
            cost = (n + shared) * times.of(name) + late * times.of(n + 1)
            alpha = study.acceptance(test.rounds[name])
            test.add(rows[name], cost, study.expected_tokens(alpha, n))
            rows[name]["agreement"] = agree[layers]
        share = rows[f"exit {L}"]["accepted"]
        report.check("an exit behind the last block accepts all, up to ties", share is None or share > 0.8)
        exits = [rows[f"exit {e}"] for e in range(1, L + 1)]
        title, keys = "Speed-up by the exit", {"measured": "speedup", "predicted": "predicted"}
        lines = [{"block": e} | {k: row.get(v) for k, v in keys.items()} for e, row in enumerate(exits, 1)]
        report.sweep(title, lines)
        fastest = max(exits, key=lambda row: row["tokens_per_s"] or 0)
        report.why(words.compare(fastest, rows["static"], "tokens_per_s") + words.rounds(fastest))
        report.why(words.rounds(exits[0]) + words.rounds(exits[-1]))
        report.why(words.compare(rows[f"skip to {other}"], rows[f"exit {other}"], "agreement"))
        report.plot_sweep(title, "speed-up", "")
        report.finish()
