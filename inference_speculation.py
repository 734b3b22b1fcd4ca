"""What the scripts on speculation share: what a request must be, and what rounds of drafts are worth.

A round drafts n tokens and verifies them in one forward of n + 1 rows. Of its drafts the first ones are
accepted, up to the first that is not, and the verification itself gives one token more.
"""

import torch

from gptlite_kvcache import StaticKVCache
from inference_utils import alternating_ms, cache_tensors

COLUMNS = {  # key of a row: (heading, format)
    "tokens_per_round": ("tokens/ round", "{:.2f}"),
    "accepted": ("drafts accepted", "{:.0%}"),
    "round_steps": ("round/ step", "{:.2f}"),
    "predicted": ("speed-up predicted", "{:.2f}x"),
}
HIDE = ("tpot_p99_ms", "loss_difference", "loss_difference_se", "n_parameters")
NO_STEPS = {"tpot_ms": None, "tpot_p99_ms": None}  # of rounds: several tokens come at a time


def check_request(model, prompt, n_tokens, draft_len=1, batch_size=1):
    """Raises ValueError for a prompt [B, T] that is empty or of another batch, or leaves the context.

    The last token is never read, so one more than the context fits.
    """
    B, T = prompt.shape
    if T == 0:
        raise ValueError("the prompt is empty: it needs at least one character")
    if B != batch_size:
        raise ValueError(f"{B} prompts: this takes {batch_size} at a time")
    if n_tokens < 0 or draft_len < 1:
        raise ValueError(f"{n_tokens} new tokens in drafts of {draft_len}: 0 and 1 at least")
    if T + n_tokens > model.seqlen + 1:
        raise ValueError(
            f"a prompt of {T} and {n_tokens} new tokens leave the context, {model.seqlen + 1} at most: once "
            "the window rolls, drafts cannot be taken back"
        )


def one_at_a_time(function, **options):
    """function(model, prompt [1, T], n_tokens, *more, **options), for the rows of prompts [B, T] in turn."""

    def run(model, prompts, n_tokens, *more):
        return torch.cat([function(model, row, n_tokens, *more, **options) for row in prompts.split(1)])

    return run


# ---- Rounds: a list of (drafted, accepted) ----


def acceptance(rounds):
    """The share of drafts that were accepted among those whose predecessors all were; None without drafts."""
    judged = sum(accepted + (accepted < drafted) for drafted, accepted in rounds)
    return sum(accepted for _, accepted in rounds) / judged if judged else None


def accepted_by_place(rounds):
    """For each place of a draft the share of the rounds that drafted so far in which it was accepted."""
    places = range(1, max((drafted for drafted, _ in rounds), default=0) + 1)
    return [
        sum(accepted >= i for _, accepted in rounds) / sum(drafted >= i for drafted, _ in rounds)
        for i in places
    ]


def round_figures(rounds):
    """Columns of a row from its rounds: tokens a round, the share of all drafts that was accepted."""
    if not rounds:
        return {"tokens_per_round": None, "accepted": None}
    drafted = sum(drafted for drafted, _ in rounds)
    accepted = sum(accepted for _, accepted in rounds)
    return {
        "tokens_per_round": 1 + accepted / len(rounds),
        "accepted": accepted / drafted if drafted else None,
    }


def by_part(rounds, n_tokens, n_parts=3):
    """For each part of answers of n_tokens: (tokens a round, share of rounds that drafted), None without any.

    A round belongs to the part in which it begins; the first token of an answer comes before its rounds.
    """
    parts, place = [[] for _ in range(n_parts)], 1
    for drafted, accepted in rounds:
        parts[min(place * n_parts // n_tokens, n_parts - 1)].append((drafted, accepted))
        place = place + accepted + 1
        place = 1 if place >= n_tokens else place  # the next answer
    figures = []
    for part in parts:
        drafting = sum(drafted > 0 for drafted, _ in part) / len(part) if part else None
        figures.append((round_figures(part)["tokens_per_round"], drafting))
    return figures


def expected_tokens(alpha, n):
    """Tokens of a round of n drafts, each accepted with probability alpha: 1 + alpha + ... + alpha^n.

    Over its cost in steps that is the speed-up (Leviathan et al., 2022). None where alpha is not known.
    """
    return None if alpha is None else sum(alpha**i for i in range(n + 1))


# ---- What a round costs ----


class RowTimes:
    """Times of forwards behind n_past cached tokens, in ms, measured in alternation.

    ms: {rows: of a forward of so many tokens a sequence, name: of a draft step}; of(key): the same in steps
    of one token. Args: rows: to be measured besides 1; draft_steps: {name: function() that runs one}.
    """

    def __init__(self, args, model, n_past, rows, draft_steps=None, batch_size=1):
        timed = {n: forward_behind(model, n_past, n, batch_size) for n in sorted({1, *rows})}
        self.ms = alternating_ms(timed | (draft_steps or {}), args.repeats, args.device)

    def of(self, key):
        return self.ms[key] / self.ms[1]

    def sweep(self, report, title):
        """The times as a further table."""
        return report.sweep(title, [{"rows": n, "ms": ms, "steps": self.of(n)} for n, ms in self.ms.items()])


def forward_behind(model, n_past, n_rows=1, batch_size=1, step=None):
    """function() that reads n_rows tokens a sequence behind n_past, in a cache of its own, and forgets them.

    step: what reads them, (token ids [B, n_rows], cache) -> (logits, cache), by default the model.
    """
    cache = StaticKVCache(model, batch_size)
    n_rows, step = min(n_rows, cache.window - 1), step or model
    tokens = torch.zeros(batch_size, cache.window, dtype=torch.int64, device=cache.k.device)  # [B, W]
    model(tokens[:, : max(min(n_past, cache.window - n_rows), 1)], cache)

    def run():
        step(tokens[:, :n_rows], cache)
        cache.advance(-n_rows)

    return run


def bytes_per_token(caches):
    """Bytes of these StaticKVCaches that one token of one sequence takes."""
    return sum(t.nbytes / (t.shape[1] * t.shape[3]) for t in cache_tensors(list(caches)))


# ---- In a report ----


class Study:
    """The methods of a report that speculate, one sequence at a time, and what their rounds say.

    cache: a StaticKVCache of the target that all of them use; rounds: {name: (drafted, accepted) of each}.
    """

    def __init__(self, target):
        self.target, self.cache, self.rounds = target, StaticKVCache(target, 1), {}

    def method(self, name, function, *more, caches=(), models=(), weights=(), verifier=None):
        """A Method of function(target, prompt, n_tokens, *more, rounds=).

        Args: caches, models: those of the drafts, where they have any; weights: modules that read no tokens;
            verifier: what takes the target's place in the function, with its weights.
        """
        from inference_report import Method

        self.rounds[name], verifier = [], verifier or self.target
        each = one_at_a_time(function, rounds=self.rounds[name])

        def run(_, prompts, n_tokens, *more):
            output = each(verifier, prompts, n_tokens, *more)
            self.forget(more)
            return output

        figures = {"kv_bytes_per_token": bytes_per_token([self.cache, *caches]), **NO_STEPS}
        method = Method(name, run, self.target, *more, steps=[verifier, *models], **figures)
        method.buffers += cache_tensors(list(caches))
        method.buffers += [p for module in weights for p in module.parameters()]
        return method

    def baseline(self, function):
        """The Method "static" of function(target, prompt, n_tokens, cache): plain decoding."""
        from inference_report import Method

        def run(model, prompts, n_tokens, cache):
            output = one_at_a_time(function)(model, prompts, n_tokens, cache)
            self.forget()
            return output

        return Method("static", run, self.target, self.cache)

    def forget(self, parts=()):
        """Drops what the target and drafts keep of a text: it is no memory of the next run."""
        for part in parts:
            getattr(part, "reset", int)()
        if hasattr(self.target, "hidden"):
            self.target.hidden = None

    def add(self, row, round_steps=None, tokens=None, name=None):
        """Adds to a row what its rounds say, their cost in steps, and the speed-up if they gave `tokens`.

        name: of the method, where the row's has a label behind it.
        """
        row.update(round_figures(self.rounds[name or row["method"]]), round_steps=round_steps)
        row["predicted"] = None if None in (round_steps, tokens) else tokens / round_steps
        return row


def peers(args, *rounds, draft=None):
    """Methods of transformers on the weights of --checkpoint: plain, and {name: options} of each of rounds.

    draft: a state dictionary of a draft model, an option of the name "assistant_model" is replaced by it.
    """
    from gptlite import GPTlite
    from gptlite_opt import generate_opt, opt_from_gptlite
    from inference_report import Method, build
    from inference_utils import load_checkpoint
    from linear_packed import pack_linears

    def opt_of(state):
        return pack_linears(opt_from_gptlite(build(args, state, GPTlite, packed=False)))

    opt, run = opt_of(load_checkpoint(args.checkpoint)), one_at_a_time(generate_opt)
    methods = [Method("transformers", run, opt, None, loss=False, **NO_STEPS)]
    for name, options in (pair for one in rounds for pair in one.items()):
        if draft is not None:
            options = options | {"assistant_model": opt_of(draft)}
        methods.append(Method(name, run, opt, options, loss=False, **NO_STEPS))
    return methods
