"""Speculative decoding with compiled steps: what is left to gain once a step is fast.

Speculation sells arithmetic that a slow step leaves idle. A compiled step of one row is several times
faster than an eager one, the draft's as well as the target's, so the ratio that decides changes: the draft
may be compiled, the target's plain steps, which are what it must beat, and the verification of several
rows, which is a graph of its own.

Exact up to rounding, whatever the form of the draft: a draft in int8 only guesses a little worse, and what
is emitted is what the verification chooses. It is the verification that decides the text. Compiled for
several rows it is another kernel than the compiled step of one, so the two are two targets that agree up to
ties, not bit for bit. Wins where the draft's steps are mostly calls, which compiling takes away. Loses
where the target's own step compiles as well as the draft's, since rows then cost as much as steps; and the
time to compile, once for each graph.

Run: python more/speculative_compiled.py            (--draft-len 3 for shorter drafts)

Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2022; Ansel et al.,
PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation,
2024."""

import math

import torch
from torch import nn

import _root  # noqa: F401 (the files above become importable)
from gptlite_compiled import CompiledStep, compiled, packed_in_graph
from main_speculative_decoding import DraftModel, generate_speculative


class CompiledDraft(DraftModel):
    """DraftModel whose steps are a CompiledStep of one sequence; the prompt is read by the model itself."""

    def __init__(self, model, step):
        super().__init__(model)
        self.step = step

    def read(self, new):
        if self.cache.length == 0:
            return super().read(new)
        for token in new.split(1, dim=1):  # two after a round of which all was accepted
            logits, _ = self.step(token, self.cache)  # [1, 1, V]
        return logits[0, -1]


def verification(model, x, k, v, position):
    """R tokens of one sequence over a past that is only read.

    Args: x: token ids [R]; k, v: of a StaticKVCache [L, 1, H, W, D]; position: tokens read before, int64 [1].
    Returns: logits [R, V]; keys and values of the new tokens [L, H, R, D].
    """
    R, W = len(x), k.shape[3]
    places = torch.arange(R, device=x.device)  # [R]
    past = torch.arange(W, device=x.device) < position  # [W]
    later = places[None, :] > places[:, None]  # [R, R]
    x = model.token_embedding(x) + model.position_embedding((position + places).clamp(max=W - 1))  # [R, E]
    keys, values = [], []
    for layer, block in enumerate(model.blocks):
        mha, h = block.mha, block.ln1(x)  # [R, E]
        shape = (R, mha.n_heads, mha.d_head)
        Q, K, V = (f(h).view(shape).transpose(0, 1) for f in (mha.query_proj, mha.key_proj, mha.value_proj))
        seen = v[layer, 0].masked_fill(~past[:, None], 0.0)  # [H, W, D]: a row without a token may hold NaN
        before = (Q @ k[layer, 0].mT).masked_fill(~past, float("-inf"))  # [H, R, W]
        own = (Q @ K.mT).masked_fill(later, float("-inf"))  # [H, R, R]
        weights = (torch.cat([before, own], dim=-1) / math.sqrt(mha.d_head)).softmax(dim=-1)  # [H, R, W + R]
        out = weights[..., :W] @ seen + weights[..., W:] @ V  # [H, R, D]
        x = x + mha.out_proj(out.transpose(0, 1).flatten(1))  # [R, E]
        x = x + block.ffwd(block.ln2(x))  # [R, E]
        keys.append(K)
        values.append(V)
    return model.fc_out(model.ln(x)), torch.stack(keys), torch.stack(values)


class CompiledTarget(nn.Module):
    """A target whose forwards of n_rows tokens are a compiled graph, all others the model's own.

    Args: model: GPTlite_StaticKVCache, reads prompts and what is left of a text; ordinary: the same with
        ordinary linear layers, to be compiled; backend: of torch.compile, None runs it as it is written.
    """

    def __init__(self, model, ordinary, n_rows, backend="inductor"):
        super().__init__()
        ordinary = packed_in_graph(ordinary)
        self.model, self.ordinary, self.n_rows, self.seqlen = model, ordinary, n_rows, model.seqlen
        self.graph = compiled(verification, backend)

    @torch.no_grad()
    def forward(self, x, kv_cache):
        """New tokens [1, S] -> (logits [1, S, V], the cache, now longer)."""
        if x.shape[1] != self.n_rows or kv_cache.length == 0:
            return self.model(x, kv_cache)
        kv_cache.check_fits(self.model, 1)
        position = torch.tensor([kv_cache.length], device=x.device)  # [1]
        logits, K, V = self.graph(self.ordinary, x[0].contiguous(), kv_cache.k, kv_cache.v, position)
        stop = kv_cache.length + self.n_rows
        kv_cache.k[:, 0, :, kv_cache.length : stop], kv_cache.v[:, 0, :, kv_cache.length : stop] = K, V
        kv_cache.advance(self.n_rows)
        return logits[None], kv_cache


if __name__ == "__main__":
    import inference_report as harness
    import inference_speculation as study
    import inference_words as words
    from gptlite_kvcache import GPTlite_StaticKVCache
    from inference_report import Method
    from inference_utils import GPTLITE_DISTILLED_CKPT_PATH, Timer, load_checkpoint
    from main_kvcache import generate_static

    quick = {"n_requests": 1, "prompt_len": 16, "n_tokens": 12, "draft_len": 2}
    sizes = {"n_requests": 4, "prompt_len": 64, "n_tokens": 96}
    parser = harness.options(__doc__, 3, plot=False, quick=quick, **sizes)
    parser.add_argument("--draft-len", type=harness.positive_int, default=5, help="drafts of a round")
    columns = harness.COLUMNS | study.COLUMNS | {"compile_s": ("compile s", "{:.0f}")}
    with harness.script(parser) as args:
        text, T, N, n = harness.load_text(args), args.prompt_len, args.n_tokens, args.draft_len
        (target,) = harness.load_models(args, GPTlite_StaticKVCache)
        (ordinary,) = harness.load_models(args, GPTlite_StaticKVCache, packed=False)
        small = load_checkpoint(GPTLITE_DISTILLED_CKPT_PATH)
        draft, loose = (harness.build(args, small, GPTlite_StaticKVCache, packed) for packed in (True, False))
        prompts = text.prompts(args.n_requests, T)  # [n, T]
        study.check_request(target, prompts[:1], N, n)
        report = harness.Report(args, "speculation on fast steps", target, columns, study.HIDE, text)
        test, backend = study.Study(target), None if args.quick else "inductor"  # compiling takes longer
        whole, plain = target.seqlen, study.one_at_a_time(generate_static)  # one view of the cache: one graph

        step = CompiledStep(ordinary, 1, bucket=whole, backend=backend)
        verifier = CompiledTarget(target, ordinary, n + 1, backend)
        drafts = {"compiled draft": CompiledStep(loose, 1, torch.float32, whole, backend)}
        if args.device.type == "cpu" and args.dtype == torch.float32:
            drafts["int8 draft"] = CompiledStep(loose, 1, torch.int8, whole, backend)
        methods = [Method("static", plain, target, test.cache)]
        methods.append(Method("compiled step", plain, target, test.cache, step, steps=[target, step]))
        forms = {"eager": (DraftModel(draft), [draft], None)}
        forms |= {name: (CompiledDraft(draft, one), [draft, one], None) for name, one in drafts.items()}
        fastest = [*drafts][-1]
        forms["both compiled"] = (*forms[fastest][:2], verifier)
        for name, (one, models, other) in forms.items():
            more = {"caches": [one.cache], "models": models, "verifier": other}
            methods.append(test.method(name, generate_speculative, one, n, test.cache, **more))
        seconds = {}
        for method in methods:  # before the times
            with Timer(args.device) as timer:
                method.run(prompts[:1], N)
            seconds[method.name] = timer.seconds
        rows = report.compare(prompts, N, *methods, label="")

        n_past = T + N // 2
        timed = {"compiled step": study.forward_behind(target, n_past, step=step)}
        timed["eager draft"] = study.forward_behind(draft, n_past)
        timed |= {name: study.forward_behind(draft, n_past, step=one) for name, one in drafts.items()}
        timed["compiled verification"] = study.forward_behind(target, n_past, n + 1, step=verifier)
        times = study.RowTimes(args, target, n_past, [n + 1], timed)
        times.sweep(report, f"A forward behind {n_past} tokens (rows: the eager target)")
        costs = {"eager": n * times.of("eager draft") + times.of(n + 1)}
        costs |= {name: n * times.of(name) + times.of(n + 1) for name in drafts}
        costs["both compiled"] = n * times.of(fastest) + times.of("compiled verification")
        for name, cost in costs.items():
            alpha = study.acceptance(test.rounds[name])
            test.add(rows[name], cost, study.expected_tokens(alpha, n))
        for name in rows:
            rows[name]["compile_s"] = seconds[name]

        both, best = rows["both compiled"], rows[fastest]
        in_steps = both | {"round_steps": both["round_steps"] / times.of("compiled step")}
        report.why(words.compare(rows["eager"], rows["static"], "tokens_per_s") + words.rounds(rows["eager"]))
        report.why(words.compare(best, rows["eager"], "tokens_per_s") + words.rounds(best))
        against = words.compare(both, rows["compiled step"], "tokens_per_s")
        report.why(words.about("against compiled steps", against + words.rounds(in_steps)))
        speeds = (rows["static"]["tokens_per_s"], best["tokens_per_s"])
        gain = 1000 / speeds[0] - 1000 / speeds[1] if all(speeds) else None
        report.why(words.pays_back(1000 * best["compile_s"], gain, "ms", "tokens"))
        report.finish()
