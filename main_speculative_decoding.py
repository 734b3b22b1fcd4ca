"""Speculative decoding: a small model drafts some tokens, the large one verifies all of them in one forward.

A forward of a few rows takes hardly longer than one of a single row, since both read the same weights. So a
draft model guesses the next n tokens, one step each, and the target reads them at once: at every place it
gives its own choice. Drafts are accepted up to the first that the target would not have taken, and what the
target says there comes on top, so that a round gives at least one token and at most n + 1.

Exact. Greedy: the same tokens, up to rounding (several rows are summed in another order than one). Sampled:
the same distribution, not the same tokens: a draft x, drawn from q, is kept with probability min(1,
p(x)/q(x)), else max(p - q, 0), rescaled, is drawn from. Wins where a step waits for memory or launches, and
the draft is cheap and often right. Loses where rows cost as much as steps (large batches,
more/speculative_batch.py), where a draft step is not far cheaper than the target's, and at long drafts,
whose end is seldom reached; memory for a second model and its cache. Compiled steps:
more/speculative_compiled.py. Drafts without a second model: more/speculative_lookup.py,
more/speculative_early_exit.py, main_multi_token_prediction.py.

Run: python main_speculative_decoding.py            (--draft-lens 5 for one length, --peers adds transformers)

Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2022; Chen et al.,
Accelerating Large Language Model Decoding with Speculative Sampling, 2023.
"""

from functools import partial

import torch
import torch.nn.functional as F

from gptlite_kvcache import StaticKVCache, common_length
from inference_speculation import check_request

DRAFT, ACCEPT, CORRECT = range(3)  # what random numbers are for


def distribution(logits, temperature):
    """What is drawn from: [..., V] -> [..., V], float64 on the CPU; at temperature 0 the best has all."""
    if temperature > 0:
        return (logits.cpu().double() / temperature).softmax(dim=-1)
    return F.one_hot(logits.cpu().argmax(dim=-1), logits.shape[-1]).double()


def acceptance_probability(p, q):
    """With what probability a draft of each token is kept: target's p, draft's q [..., V] -> [..., V]."""
    return torch.where(q > 0, (p / q.clamp(min=1e-300)).clamp(max=1.0), 1.0)


def residual(p, q):
    """What a rejected draft is replaced from: the part of p that q does not cover, rescaled, [..., V]."""
    rest = (p - q).clamp(min=0)  # [..., V]
    total = rest.sum(dim=-1, keepdim=True)  # [..., 1], 0 where p = q
    return torch.where(total > 0, rest / total.clamp(min=1e-300), p)


def generator_of(request, position, purpose):
    """Random numbers that depend on the request, the position in its text and the purpose alone."""
    return torch.Generator().manual_seed(((request * 4096 + position) * 4 + purpose) % 2**63)


def draw(p, generator):
    """A token from p [V]: the one whose exponential waiting time ends first."""
    return (p / torch.empty_like(p).exponential_(generator=generator)).argmax().item()


def accept_greedy(drafted, logits):
    """The tokens of a round: drafts k that are the target's choices, then its own; logits [k+1, V]."""
    best = logits.argmax(dim=-1).tolist()
    n = common_length(drafted, best)
    return drafted[:n] + [best[n]]


def accept_sampled(drafted, p, q, generators):
    """The tokens of a round, distributed as if each had been drawn from p.

    Args: drafted: k tokens, drawn from q [k, V], None if certain; p [k+1, V]; generators: (place, purpose) ->
        random numbers.
    """
    if q is None:
        q = F.one_hot(torch.tensor(drafted, dtype=torch.int64), p.shape[-1]).double()  # [k, V]
    for i, token in enumerate(drafted):
        u = torch.rand((), dtype=torch.float64, generator=generators(i, ACCEPT))
        if u * q[i, token] >= p[i, token]:
            return [*drafted[:i], draw(residual(p[i], q[i]), generators(i, CORRECT))]
    return [*drafted, draw(p[-1], generators(len(drafted), CORRECT))]


class DraftModel:
    """Drafts of a GPTlite_StaticKVCache, which has a cache of its own."""

    def __init__(self, model):
        self.model, self.cache = model, StaticKVCache(model, 1)

    def reset(self):
        self.cache.reset()

    def read(self, new):
        """Logits behind tokens [1, S], which go into the cache: [V]."""
        return self.model(new, self.cache)[0][0, -1]

    def propose(self, ids, n, temperature=0.0, generators=None):
        """n drafts that go on with a text, tokens [1, n], and the distributions [n, V] they were drawn from.

        Args: ids: the text, a list that goes on with an earlier call's but for what was rejected;
            generators: as in accept_sampled. Greedy drafts come with None: they are certain.
        """
        self.cache.advance(min(self.cache.length, len(ids) - 1) - self.cache.length)  # forgets the rejected
        # the last token; two after a round of which all was accepted, as its last draft was never read
        new = torch.tensor([ids[self.cache.length :]], device=self.cache.k.device)  # [1, S]
        drafted, q = [], []
        for i in range(n):
            logits = self.read(new)  # [V]
            if temperature > 0:
                q.append(distribution(logits, temperature))  # [V]
                new = torch.tensor([[draw(q[-1], generators(i, DRAFT))]], device=new.device)  # [1, 1]
            else:
                new = logits.argmax().view(1, 1)  # [1, 1], stays on the device
            drafted.append(new)
        return torch.cat(drafted, dim=1), torch.stack(q) if q else None


@torch.no_grad()
def generate_speculative(
    model, prompt, n_tokens, draft, draft_len, kv_cache, temperature=0.0, request=0, end=None, rounds=None
):
    """Decoding in rounds of up to draft_len drafts and one verification.

    Args: model: the target, GPTlite_StaticKVCache; prompt [1, T]; draft: with reset() and propose() as
        DraftModel has them, it may propose fewer tokens or none; kv_cache: StaticKVCache of the target,
        emptied first; request: with the position the seed of all that is drawn; end: a token that ends the
        text; rounds: a list that gets (drafted, accepted) of each round.
    Returns: prompt and new tokens [1, T + n_tokens], fewer where the end came. Behind every round the cache
        holds all tokens but the last. Raises ValueError as check_request does.
    """
    check_request(model, prompt, n_tokens, draft_len)
    kv_cache.reset()
    draft.reset()
    ids, stop = prompt[0].tolist(), prompt.shape[1] + n_tokens
    while len(ids) < stop:
        k, drafted, q = min(draft_len, stop - len(ids) - 1, kv_cache.window - len(ids)), prompt[:, :0], None
        generators = partial(lambda start, i, use: generator_of(request, start + i, use), len(ids))
        if k > 0 and kv_cache.length > 0:  # the first token does not wait for drafts
            drafted, q = draft.propose(ids, k, temperature, generators)  # [1, k]
        new = prompt.new_tensor([ids[kv_cache.length :]])  # [1, 1], at first the prompt
        logits = model(torch.cat([new, drafted], dim=1), kv_cache)[0][0, new.shape[1] - 1 :]  # [k+1, V]
        drafted = drafted[0].tolist()
        if temperature > 0:
            emitted = accept_sampled(drafted, distribution(logits, temperature), q, generators)
        else:
            emitted = accept_greedy(drafted, logits)
        if rounds is not None and len(ids) > prompt.shape[1]:
            rounds.append((len(drafted), len(emitted) - 1))
        if end in emitted:
            emitted = emitted[: emitted.index(end) + 1]
            stop = len(ids) + len(emitted)
        ids += emitted
        kv_cache.advance(len(ids) - 1 - kv_cache.length)  # forgets the rejected
    return prompt.new_tensor([ids])  # [1, T + n]


if __name__ == "__main__":
    from pathlib import Path

    import inference_report as harness
    import inference_speculation as study
    import inference_words as words
    from gptlite_kvcache import GPTlite_StaticKVCache
    from inference_utils import GPTLITE_DISTILLED_CKPT_PATH, load_checkpoint
    from main_kvcache import generate_static

    quick = {"n_requests": 1, "prompt_len": 16, "n_tokens": 12, "draft_lens": [2]}
    parser = harness.options(__doc__, 3, quick=quick, n_requests=4, prompt_len=64, n_tokens=96)
    add, number, lens = parser.add_argument, harness.positive_int, [1, 2, 3, 5, 7, 9]
    add("--draft-lens", type=number, nargs="+", default=lens, help="drafts of a round")
    small = {"metavar": "FILE", "type": Path, "default": GPTLITE_DISTILLED_CKPT_PATH}
    add("--draft-checkpoint", help="weights of the draft model", **small)
    add("--peers", action="store_true", help="add rows of transformers' generate")
    with harness.script(parser) as args:
        text, T, N, lens = harness.load_text(args), args.prompt_len, args.n_tokens, sorted({*args.draft_lens})
        (target,), small = harness.load_models(args, GPTlite_StaticKVCache), args.draft_checkpoint
        weights = load_checkpoint(small)
        draft = harness.build(args, weights, GPTlite_StaticKVCache, source=str(small))
        prompts, middle = text.prompts(args.n_requests, T), lens[len(lens) // 2]  # [n, T]
        check_request(target, prompts[:1], N)
        columns = harness.COLUMNS | study.COLUMNS
        report = harness.Report(args, "speculative decoding", target, columns, study.HIDE, text)
        drafts, itself, test = DraftModel(draft), DraftModel(target), study.Study(target)
        names, own = {n: f"{n} drafts" for n in lens}, f"{middle} of its own"
        methods = [test.baseline(generate_static)]
        for n, name in names.items():
            more = {"caches": [drafts.cache], "models": [draft]}
            methods.append(test.method(name, generate_speculative, drafts, n, test.cache, **more))
        more = itself, middle, test.cache
        methods.append(test.method(own, generate_speculative, *more, caches=[itself.cache]))
        if args.peers:
            methods += study.peers(args, {"transformers, assisted": {}}, draft=weights)
        rows = report.compare(prompts, N, *methods, label="")

        n_past, longest = T + N // 2, test.rounds[names[lens[-1]]]
        steps = {"a draft step": study.forward_behind(draft, n_past)}
        times = study.RowTimes(args, target, n_past, [n + 1 for n in lens], steps)
        times.sweep(report, f"A forward behind {n_past} tokens")
        alpha, c, speed = study.acceptance(longest), times.of("a draft step"), []
        for n, name in names.items():
            row = test.add(rows[name], n * c + times.of(n + 1), study.expected_tokens(alpha, n))
            speed.append({"drafts": n, "measured": row.get("speedup"), "predicted": row["predicted"]})
        test.add(rows[own], middle + times.of(middle + 1), middle + 1)
        title = "Speed-up by the drafts of a round"
        report.sweep(title, speed)
        by_place = enumerate(study.accepted_by_place(longest), 1)
        report.sweep("Drafts accepted by place", [{"place": i, "share": share} for i, share in by_place])

        lines, tokens = [], text.prompts(2 if args.quick else 8, 128)  # of real text
        logits = [model(tokens)[0].flatten(0, 1) for model in (target, draft)]  # [N, V]
        for t in (0.0, 0.5, 1.0):
            (p, q), certain = (distribution(one, t) for one in logits), distribution(logits[1], 0)  # [N, V]
            kept, drawn = q * acceptance_probability(p, q), []  # [N, V]
            lost = 1 - kept.sum(dim=-1, keepdim=True)  # [N, 1]
            report.check_close(f"temperature {t}: the rule emits p", kept + lost * residual(p, q), p)
            for i, prompt in enumerate(prompts.split(1), args.seed):
                generate_speculative(target, prompt, N, drafts, middle, test.cache, t, i, rounds=drawn)
            line = {
                "temperature": t,
                "own text": study.acceptance(drawn),
                "real text": 1 - lost.mean().item(),
            }
            line["real text, greedy drafts"] = (p * certain).sum(dim=-1).mean().item()
            wrong = (kept + lost * p - p).clamp(min=0).sum(dim=-1).mean().item()
            lines.append(line | {"moved if p replaced max(p - q, 0)": wrong})
        report.sweep("Drafts accepted by temperature", lines)

        best = rows[names[max(speed, key=lambda line: line["measured"] or 0)["drafts"]]]
        for row in (best, rows[own]):
            report.why(words.compare(row, rows["static"], "tokens_per_s") + words.rounds(row))
        report.why(words.best_length(speed))
        sampled = words.kept(lines[-1]["real text"], lines[-1]["real text, greedy drafts"])
        report.why(sampled + words.compare(best, rows["static"], "peak_memory_mb"))
        report.plot_sweep(title, "speed-up", "")
        report.finish()
