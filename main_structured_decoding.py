"""Structured decoding: a regular expression says which characters the model may choose from at each step.

The expression becomes an automaton over the vocabulary. A table tells for each of its states and each token
how many tokens a text then needs to its end: tokens after which there is no end, or none within the budget,
get a logit of -inf. Where one token alone is left, it is taken without asking the model (jump-forward), and a
run of such tokens is computed in one step, together with the next choice.

Each text matches. The table and jump-forward are exact: they change no token of masked decoding. Wins where
programs read the texts, and steps where much of a text is forced (the form of a record, the rest of a name).
Loses the model's distribution: its probabilities are cut and rescaled at each step, so a beginning is chosen
that only forbidden texts made likely (more/structured_distribution.py). In the plays braces and digits hardly
occur: a record's form is right, its content is what the model makes of characters it hardly saw.

Run: python main_structured_decoding.py            (--pattern "(To|Not to) be[.!]" for an expression of yours)

Source: Willard and Louf, Efficient Guided Generation for Large Language Models, 2023; Zheng et al., SGLang,
2024 (jump-forward); Park et al., Grammar-Aligned Decoding, 2024 (what masking does to the distribution).
"""

import torch

from gptlite_paged import Sequence, choose_tokens
from inference_automaton import build_automaton, distances

NEVER = 2**31 - 1  # tokens to the end where there is none


class Guide:
    """Which tokens may come next, for each state of an expression's automaton.

    Args: pattern: the expression; vocabulary: its V characters, by token; end: the character that says that
        a text is over; device: of the table. Raises ValueError as build_automaton does, and where a text
        that may end could go on with the end's character.
    A text begins in state 0. moves: for each state {token: next state}; over: the state behind the end, in
    which the end may only be repeated; needed [n_states, V]: tokens of a text that goes on with this one,
    this one and the end included; forced: for each state the only token there is, or None.
    """

    def __init__(self, pattern, vocabulary, end, device="cpu"):
        moves, ends = build_automaton(pattern, vocabulary)
        tokens = {character: token for token, character in enumerate(vocabulary)}
        self.end, self.over = tokens[end], len(moves)
        for state in ends:
            if end in moves[state]:
                raise ValueError(f"{pattern!r}: a text that may end may go on with {end!r}, which is the end")
            moves[state][end] = self.over
        moves.append({end: self.over})
        self.moves = [{tokens[c]: state for c, state in edges.items()} for edges in moves]
        self.left = distances(self.moves, {self.over})  # tokens from each state to the end
        self.forced = [next(iter(edges)) if len(edges) == 1 else None for edges in self.moves]
        rows = [[NEVER] * len(vocabulary) for _ in self.moves]
        for row, edges in zip(rows, self.moves, strict=True):
            for token, state in edges.items():
                row[token] = 1 + self.left[state]
        self.needed = torch.tensor(rows, device=device)  # [n_states, V]

    def states(self, tokens):
        """The states in front of each token and behind the last; up to the first that may not come."""
        states = [0]
        for token in tokens:
            if token not in self.moves[states[-1]]:
                break
            states.append(self.moves[states[-1]][token])
        return states


def check_budget(model, prompts, n_tokens, guide):
    """Raises ValueError for a budget in which no text ends, or that leaves the context."""
    if n_tokens < guide.left[0]:
        raise ValueError(f"{n_tokens} new tokens: the shortest text takes {guide.left[0]} with its end")
    if prompts.shape[1] < 1 or prompts.shape[1] + n_tokens > model.seqlen + 1:
        raise ValueError(
            f"prompts of {prompts.shape[1]} and {n_tokens} new tokens: 1 at least, and {model.seqlen + 1} "
            "at most together"
        )


def masks_by_trying(guide, answers, states, remaining):
    """Which tokens may come next, by definition: each is tried behind its answer, from the beginning.

    Args: answers: lists of tokens; states: where each is now; remaining: tokens left for each, the end
        included. Returns: bool [B, V].
    """
    V = guide.needed.shape[1]

    def fits(tokens):
        states = guide.states(tokens)
        return len(states) == len(tokens) + 1 and guide.left[states[-1]] < remaining

    tried = [[fits([*answer, token]) for token in range(V)] for answer in answers]
    return torch.tensor(tried, device=guide.needed.device)  # [B, V]


def masks_from_table(guide, answers, states, remaining):
    """The same from the table: a row for each state."""
    return guide.needed[states] <= remaining  # [B, V]


def masks_without_budget(guide, answers, states, remaining):
    """All tokens that lead to some end, however far: texts match if the budget does not cut them."""
    return guide.needed[states] < NEVER  # [B, V]


@torch.no_grad()
def generate_structured(model, prompts, n_tokens, guide, temperature=0.0, request=0, masks=masks_from_table):
    """Decoding with a KV cache in which every token is one that the guide allows.

    Args: model: GPTlite_KVCache; prompts [B, T]; n_tokens: most tokens of an answer, its end included;
        temperature: as in choose_tokens, whose noise depends on request and position alone; request: number
        of the first prompt's; masks: as above.
    Returns: B answers, lists of tokens, the end included. Raises ValueError as check_budget does.
    """
    check_budget(model, prompts, n_tokens, guide)
    sequences = [Sequence(request + i, ids, len(ids) + n_tokens) for i, ids in enumerate(prompts.tolist())]
    answers, states, kv_cache, new_tokens = [[] for _ in sequences], [0] * len(sequences), None, prompts
    for remaining in range(n_tokens, 0, -1):
        logits, kv_cache = model(new_tokens, kv_cache)  # [B, S, V]
        allowed = masks(guide, answers, states, remaining)  # [B, V]
        chosen = choose_tokens(logits[:, -1].masked_fill(~allowed, float("-inf")), sequences, temperature)
        for i, token in enumerate(chosen):
            sequences[i].ids.append(token)
            if states[i] != guide.over:  # the others are filled up with ends
                answers[i].append(token)
                states[i] = guide.moves[states[i]][token]
        if all(state == guide.over for state in states):
            break
        new_tokens = prompts.new_tensor(chosen)[:, None]  # [B, 1]
    return answers


@torch.no_grad()
def generate_jump_forward(model, prompt, n_tokens, guide, temperature=0.0, request=0):
    """The same for one prompt [1, T] in fewer steps: the model is not asked for what is forced.

    What was chosen last and all that is forced behind it go through the model as one piece.
    """
    check_budget(model, prompt, n_tokens, guide)
    sequence = Sequence(request, prompt[0].tolist(), prompt.shape[1] + n_tokens)
    state, n_read, T, kv_cache = 0, 0, prompt.shape[1], None
    while True:
        while state != guide.over and guide.forced[state] is not None:
            sequence.ids.append(guide.forced[state])
            state = guide.moves[state][sequence.ids[-1]]
        if state == guide.over:
            return [sequence.ids[T:]]
        piece = prompt.new_tensor([sequence.ids[n_read:]])  # [1, S]
        logits, kv_cache = model(piece, kv_cache)  # [1, S, V]
        n_read, remaining = len(sequence.ids), T + n_tokens - len(sequence.ids)
        allowed = masks_from_table(guide, [], [state], remaining)  # [1, V]
        sequence.ids += choose_tokens(
            logits[:, -1].masked_fill(~allowed, float("-inf")), [sequence], temperature
        )
        state = guide.moves[state][sequence.ids[-1]]


FORMS = {  # what the report decodes
    "speech": r"(ROMEO|JULIET|HAMLET|OPHELIA|KING LEAR|LADY MACBETH):\n([A-Z][A-Za-z',;: ]*[.?!]\n){1,3}",
    "record": r'\{"name": "[A-Z][a-z]{1,9}", "house": "(Montague|Capulet)", "age": [1-9][0-9]?\}',
}


if __name__ == "__main__":
    import re
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from data.shakespeare import VOCABULARY
    from gptlite_kvcache import GPTlite_KVCache
    from inference_utils import TimedMethod, measure, peak_memory_mb

    quick = {"n_requests": 1, "prompt_len": 16, "n_tokens": 48}
    parser = harness.options(__doc__, repeats=2, quick=quick, prompt_len=64, n_tokens=120)
    parser.add_argument("--n-requests", type=harness.positive_int, default=4, help="prompts, one at a time")
    parser.add_argument("--pattern", metavar="REGEX", help="decode by this expression and print the texts")
    columns = {"n_steps": ("steps", "{}"), "match": ("match", "{:.0%}")}
    with harness.script(parser) as args:
        text, N, n_new = harness.load_text(args), args.n_requests, args.n_tokens
        (cached,) = harness.load_models(args, GPTlite_KVCache)
        forms = FORMS if args.pattern is None else {"yours": args.pattern}
        guides = {name: Guide(pattern, VOCABULARY, "\n", args.device) for name, pattern in forms.items()}
        free = Guide("[^~]*", VOCABULARY, "~", args.device)  # whatever comes; the plays have no ~
        prompts = text.prompts(N, args.prompt_len)  # [N, T]
        prompts[:, -2:] = text.encode("\n")[0]  # a speech is over
        for guide in guides.values():
            check_budget(cached, prompts, n_new, guide)
        report = harness.Report(args, "structured decoding", cached, columns)

        def each(budgets, guide, function=generate_structured, **options):  # one prompt at a time, sampled
            numbers = range(args.seed * N, args.seed * N + N)
            given = zip(prompts.split(1), budgets, numbers, strict=True)
            return [function(cached, p, n, guide, 1.0, number, **options)[0] for p, n, number in given]

        def share(name, answers, match=re.fullmatch):  # that match, by Python's re, their end included
            return sum(bool(match(f"(?:{forms[name]})\n", text.decode(a))) for a in answers) / len(answers)

        rows, made = {}, {}
        for name, guide in guides.items():
            made[name] = each([n_new] * N, guide)
            same_work, budgets = [len(answer) for answer in made[name]], [n_new] * N
            runs = {"no mask": partial(each, same_work, free, masks=masks_without_budget)}
            runs["by trying"] = partial(each, budgets, guide, masks=masks_by_trying)
            runs["table"] = partial(each, budgets, guide)
            runs["jump-forward"] = partial(each, budgets, guide, generate_jump_forward)
            timed = [TimedMethod(way, run, [cached]) for way, run in runs.items()]
            for way, result in measure(timed, sum(same_work), args.repeats).items():
                base, figures = way == "no mask", dict.fromkeys(("ttft_ms", "tpot_ms", "tpot_p99_ms"))
                figures["match"] = share(name, result.output, re.match if base else re.fullmatch)
                figures["peak_memory_mb"] = peak_memory_mb(runs[way], cached)
                if not base:
                    report.check(f"{name}, {way}: Python's re matches each text", figures["match"] == 1)
                    same = figures["same_output"] = result.output == made[name]
                    report.check(f"{name}, {way}: the same texts as from the table", same)
                rows[name, way] = report.row(f"{name}, {way}", result, base, **figures)
            fewer = rows[name, "jump-forward"]["n_steps"] <= rows[name, "table"]["n_steps"]
            report.check(f"{name}: jump-forward takes no more steps", fewer)

        name, guide = next(iter(guides.items()))
        a, kinds = made[name][0], {"by trying": masks_by_trying, "table": masks_from_table}
        behind = lambda n: (guide, [a[:n]], [guide.states(a)[n]], n_new - n)  # noqa: E731
        times = lambda n: {way: partial(f, *behind(n)) for way, f in kinds.items()}  # noqa: E731
        ends = sorted({1, len(a) // 2, len(a) - 1})
        masks = report.time_sweep("Making the mask of a step (ms)", "tokens so far", ends, times)
        budgets, many = sorted({min(guide.left[0] * k, n_new) for k in (1, 2, 4, 8)}), prompts.repeat(4, 1)
        lines, sample = [], partial(generate_structured, cached, many, temperature=1.0)
        loose = [sample(n_tokens=n_new, guide=g, masks=masks_without_budget) for g in (free, guide)]
        for n in budgets:
            lines.append({"budget": n, "no mask": share(name, [a[:n] for a in loose[0]], re.match)})
            lines[-1]["no dead ends"] = share(name, [a[:n] for a in loose[1]])
            lines[-1]["within the budget"] = share(name, sample(n_tokens=n, guide=guide))
        title = f"Share of {len(many)} texts that match, {name}"
        report.sweep(title, lines)

        for name in guides:
            report.why(words.compare(rows[name, "jump-forward"], rows[name, "table"], "tokens_per_s"))
        for way in kinds:
            step_ms = 1000 / rows[name, way]["tokens_per_s"]
            report.why(words.part(f"making masks, {way},", masks[-1][way], step_ms, "step"))
        if args.pattern is not None:
            print("\n".join(text.decode(answer) for answer in made[name]))
        report.plot_sweep(title, "share that match", "", [*lines[0]][1:])
        report.finish()
