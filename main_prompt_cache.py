"""Prompt Cache: parts of prompts have reserved positions, so each is computed once for all prompts.

Idea: a prefix cache finds nothing behind the first token that differs. A schema says which modules prompts
consist of and gives each its own positions. A module is computed alone at these, its keys and values are
stored, and a prompt joins those of the modules that it names: only arguments and the text behind are new.

Approximate, since modules do not see each other: it is the model under the mask "own module only". Equal to
the plain prompt for a single module at the beginning, and for modules computed together (a scaffold) without
gaps between them. Wins time to the first token where prompts choose among parts and the choice comes early.
Loses quality, the more the shorter the modules are, positions that stay empty, and memory for all modules.

Run: python main_prompt_cache.py            (--n-modules 6 --module-len 32: more and shorter modules)

Source: Gim et al., Prompt Cache: Modular Attention Reuse for Low-Latency Inference, 2024.
Differs from it: a new token sees what stands at lower positions, not all that is stored.
"""

import torch

from gptlite_blocks import weights_of
from gptlite_positions import join_caches
from gptlite_schema import equal_modules


def tensors_of(parts, device=None):
    """Token ids and positions of modules or prompts, one behind the other: [T] each."""
    return [
        torch.tensor([n for p in parts for n in getattr(p, key)], device=device)
        for key in ("ids", "positions")
    ]


def whole_pass(model, schema, prompt):
    """The naive twin: one pass over all tokens, those of a module see their own module alone: [1, N, V]."""
    parts, device = [schema.modules[name] for name in prompt.modules] + [prompt], model.fc_out.weight.device
    ids, positions = tensors_of(parts, device)  # [T]
    owner = torch.tensor([i for i, part in enumerate(parts) for _ in part.ids], device=device)  # [T]
    is_new = owner == len(parts) - 1  # [T]
    visible = (owner == owner[:, None]) | is_new[:, None]  # [T, T]
    visible &= positions <= positions[:, None]
    return model(ids[None], positions=positions, visible=visible)[0][:, is_new]


class PromptCache:
    """Keys and values of a schema's modules, computed when a prompt first asks for them.

    With other weights of the model everything is forgotten. n_computed: tokens of modules computed so far.
    """

    def __init__(self, model, schema):
        self.model, self.schema, self.weights, self.entries, self.n_computed = model, schema, [], {}, 0

    @property
    def kv(self):
        """All that is stored, a list of one (k, v) a layer."""
        return [kv_cache for kv_cache, _ in self.entries.values()]

    def encode(self, names):
        """Modules that see each other alone: one (k, v) a layer [1, H, S, D], and their positions [S]."""
        if names not in self.entries:
            modules = [self.schema.modules[name] for name in names]
            ids, positions = tensors_of(modules, self.model.fc_out.weight.device)  # [S]
            self.entries[names] = self.model(ids[None], positions=positions)[1], positions
            self.n_computed += len(ids)
        return self.entries[names]

    @torch.no_grad()
    def prefill(self, prompt, scaffold=()):
        """Computes what is new in a Prompt behind its modules. scaffold: those that are computed together.

        Returns: logits of the new tokens [1, N, V], the cache, and the positions of its keys [S + N].
        """
        weights = weights_of(self.model)
        if [w[1:] for w in weights] != [w[1:] for w in self.weights]:
            self.weights, self.entries = weights, {}
        groups = [tuple(scaffold)] * bool(scaffold) + [(n,) for n in prompt.modules if n not in scaffold]
        caches, places = zip(*map(self.encode, groups), strict=True) if groups else ((), ())
        ids, positions = tensors_of([prompt], self.model.fc_out.weight.device)  # [N]
        keys = torch.cat([*places, positions[:0]])  # [S]
        stored = join_caches(*caches) or None
        logits, kv_cache = self.model(ids[None], stored, positions=positions, key_positions=keys)
        return logits, kv_cache, torch.cat([keys, positions])


@torch.no_grad()
def generate_modular(model, prompt, n_tokens, seqlen, cache, asked, scaffold=()):
    """Greedy decoding behind modules. prompt: all its token ids [1, T], to which new ones [1, n] are added.

    Args: cache: PromptCache; asked: the Prompt. Raises ValueError where the new tokens leave the context.
    """
    if asked.positions[-1] + n_tokens > seqlen:
        raise ValueError(f"{n_tokens} new tokens behind position {asked.positions[-1]}: context {seqlen}")
    logits, kv_cache, keys = cache.prefill(asked, scaffold)
    for i in range(n_tokens):
        new = logits[:, -1].argmax(dim=-1, keepdim=True)  # [1, 1]
        prompt, place = torch.cat([prompt, new], dim=1), keys[-1:] + 1  # [1, T + 1], [1]
        if i + 1 < n_tokens:
            logits, kv_cache = model(new, kv_cache, positions=place, key_positions=keys)
            keys = torch.cat([keys, place])  # [S + 1]
    return prompt


def prefill_in_modules(model, tokens, n, n_modules, room=None, together=0):
    """Logits [1, T - n, V] behind the first n of tokens [1, T], cut into equal modules of so much room each.

    together: how many modules, the last ones, are computed together.
    """
    schema, asked = equal_modules(tokens[0].tolist(), n, n_modules, model.seqlen, room)
    return PromptCache(model, schema).prefill(asked, asked.modules[n_modules - together :])[0]


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_reuse as reuse
    import inference_words as words
    from gptlite_kvcache import cache_bytes, common_length
    from gptlite_positions import GPTlite_Positions
    from gptlite_schema import example_prompts, example_schema, tokens_in_order
    from inference_report import Method
    from inference_utils import median_ms, sample_prompts
    from main_kvcache import generate_kvcache
    from main_prefix_cache import generate_reusing

    parser = harness.options(__doc__, 3, quick={"n_tokens": 4}, prompt_len=224, n_tokens=32)
    parser.add_argument("--n-modules", type=harness.positive_int, default=3, help="modules of the prompt")
    parser.add_argument("--module-len", type=harness.positive_int, default=64, help="tokens of a module")
    with harness.script(parser) as args, torch.no_grad():
        text, (model,) = harness.load_text(args), harness.load_models(args, GPTlite_Positions)
        W, M, size, T = model.seqlen, args.n_modules, args.module_len, args.prompt_len
        if M < 2 or not (n := M * size) < T <= W - args.n_tokens:
            sizes = f"{M} modules of {size}, a prompt of {T}, {args.n_tokens} new tokens"
            raise ValueError(f"{sizes}: 2 modules or more, then a text, all within {W}")
        prompt, hide = text.prompts(1, T), ("tpot_p99_ms", "valid_loss", "speedup")
        windows = sample_prompts(text.valid, args.n_windows, W + 1).to(args.device)  # [N, W + 1]
        report = harness.Report(args, "Prompt Cache", model, reuse.COLUMNS, hide, batch_size=1, n_modules=M)

        # Quality in the windows of every report: how many modules, how many computed together, gaps
        def ways(specs, tokens):
            return {spec: partial(prefill_in_modules, model, tokens, *spec) for spec in specs}

        unit, found, lines = W // 8, {}, []
        counts = sorted({M, *(k for k in ((2, 12) if args.quick else (1, 2, 3, 4, 6, 12)) if n % k == 0)})
        apart = [(n, k, n // k, 0) for k in counts] + [(n, M, size, k) for k in sorted({2, M})]
        gaps = [(3 * unit, 3, unit + gap, k) for gap in (0, unit // 2, unit) for k in (0, 3)]
        for specs, end in ((apart, W), (gaps, 5 * unit)):
            tokens, n_stored = windows[:, : end + 1], specs[0][0]  # [N, T + 1]
            measured, full = reuse.measure_quality(model, tokens, n_stored, partial(ways, specs))
            for spec, pairs in measured.items():
                found[spec] = reuse.quality_figures(pairs, full)
                heads = dict(zip(("tokens", "modules", "positions each", "together"), spec, strict=True))
                lines.append(heads | {"behind": end - spec[0]} | reuse.quality_line(pairs, full))
        report.sweep("Tokens behind modules, against the plain prompt without gaps", lines)

        # Speed of one prompt
        prefix, ids = model(prompt[:, :size])[1], prompt[0, :size].tolist()
        shared = {"loss": False, "kv_bytes_per_token": harness.kv_bytes_per_token(model, prompt)}
        methods = [Method("whole prompt", generate_kvcache, model, **shared)]
        mb = shared | {"stored_mb": cache_bytes(prefix) / 1e6}
        methods.append(Method("prefix cache", generate_reusing, model, W, ids, prefix, **mb))
        for together in sorted({0, 2, M}):
            schema, asked = equal_modules(prompt[0].tolist(), n, M, W)
            cache, scaffold = PromptCache(model, schema), asked.modules[M - together :]
            cache.prefill(asked, scaffold)
            figures = found[n, M, size, together] | shared | {"exact": together == M}
            figures["stored_mb"] = sum(map(cache_bytes, cache.kv)) / 1e6
            name = f"{together} of {M} together" if together else "prompt cache"
            methods.append(Method(name, generate_modular, model, W, cache, asked, scaffold, **figures))
        rows = report.compare(prompt, args.n_tokens, *methods, label="")
        row, whole, cached = (rows[name] for name in ("prompt cache", "whole prompt", "prefix cache"))
        once = median_ms(lambda: [PromptCache(model, schema).encode((name,)) for name in asked.modules], 3)

        pieces = text.prompts(16, 56).tolist()  # of prompts that choose a scene and fill in a name or none
        cache = PromptCache(model, example := example_schema(pieces, W))
        prompts = example_prompts(example, pieces[4:], args.seed)
        pairs = [(cache.prefill(asked)[0], whole_pass(model, example, asked)) for asked in prompts]
        one, other = (torch.cat(logits, dim=1) for logits in zip(*pairs, strict=True))
        report.check_close(f"{len(prompts)} prompts of a schema, as one pass under their masks", one, other)
        texts = [tokens_in_order(example, asked) for asked in prompts]
        common = [max((common_length(t, o) for o in texts[:i]), default=0) for i, t in enumerate(texts)]
        work = {"no reuse": sum(map(len, texts)), "prefix cache": sum(map(len, texts)) - sum(common)}
        work["prompt cache"] = cache.n_computed + sum(len(asked.ids) for asked in prompts)
        report.sweep(f"Tokens computed for {len(prompts)} prompts of the example schema", [work])

        report.why(words.compare(row, whole, "ttft_ms") + words.compare(row, cached, "ttft_ms"))
        report.why(words.loss(row))
        saved = cached["ttft_ms"] - row["ttft_ms"]
        report.why(words.about("against the prefix cache", words.pays_back(once, saved, "ms", "prompts")))
        curve = {"": (counts, [found[n, k, n // k, 0]["kl"] for k in counts])}
        report.plot_lines(curve, "modules", "KL (nats)")
        report.finish()
