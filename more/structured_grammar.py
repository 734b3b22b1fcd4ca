"""A grammar with a stack: texts whose parts lie in parts of their own kind, as in nested JSON.

A rule is an expression that may call rules; the state behind a call waits on a stack until the rule that
was called is over. With a vocabulary of longer tokens masks are made in two parts (XGrammar's split): what a
token does within its rule depends on the top of the stack alone and is decided once for each state. Only
tokens that run past the end of their rule are tried at run time, on the real stack.

Exact: masks are those by definition, and where one character alone may come the model is not asked. Wins over
a regular expression in what it can say: an expression counts no brackets. The split wins where the vocabulary
is large; with GPTlite's 96 characters there is hardly anything to save. Loses the model's distribution, as
every mask does (structured_distribution.py).

Run: python more/structured_grammar.py            (--n-tokens 190 leaves room for deeper texts)

Source: Dong et al., XGrammar, 2024 (stacks that share their bottoms, context-independent tokens).
"""

import json
import re
from collections import Counter

import torch

import _root  # noqa: F401 (the files above become importable)
from gptlite_paged import Sequence, choose_tokens
from inference_automaton import build_automaton
from inference_grammar import Grammar


@torch.no_grad()
def generate_by_grammar(model, prompt, n_tokens, grammar, vocabulary, end, temperature=0.0, request=0):
    """Decoding of one text that the grammar allows, with a KV cache.

    Args: model: GPTlite_KVCache; prompt [1, T]; n_tokens: most tokens of the answer, its end included;
        vocabulary: characters by token; end: the token that says that a text is over, whose character the
        grammar does not use; temperature, request: as in choose_tokens.
    Returns: the answer as a list of tokens, the end included. Raises ValueError for a budget in which no text
        ends or that leaves the context, and for rules that use the end's character.
    """
    T, tokens = prompt.shape[1], {character: token for token, character in enumerate(vocabulary)}
    least, most = grammar.characters_left(grammar.start) + 1, model.seqlen + 1 - T
    if not least <= n_tokens <= most:
        raise ValueError(f"{n_tokens} new tokens: a text takes {least} at least, and {most} fit the context")
    if any(vocabulary[end] in edges for edges in grammar.moves):
        raise ValueError(f"the rules use the character {vocabulary[end]!r}, which is the end")
    sequence, stacks = Sequence(request, prompt[0].tolist(), T + n_tokens), grammar.start
    n_read, kv_cache = 0, None
    while True:
        remaining = T + n_tokens - len(sequence.ids) - 1  # behind the next one
        following = grammar.following(stacks)
        allowed = {
            tokens[c]: behind
            for c, behind in following.items()
            if grammar.characters_left(behind) < remaining
        }
        if grammar.may_end(stacks):
            allowed[end] = None
        if len(allowed) > 1:  # else the model need not be asked
            piece = prompt.new_tensor([sequence.ids[n_read:]])  # [1, S]
            logits, kv_cache = model(piece, kv_cache)  # [1, S, V]
            n_read, mask = len(sequence.ids), torch.ones_like(logits[:, -1], dtype=torch.bool)  # [1, V]
            mask[:, [*allowed]] = False
            (token,) = choose_tokens(logits[:, -1].masked_fill(mask, float("-inf")), [sequence], temperature)
        else:
            (token,) = allowed
        sequence.ids.append(token)
        if token == end:
            return sequence.ids[T:]
        stacks = allowed[token]


def mask_by_trying(grammar, text, stacks, vocabulary):
    """Which tokens of one or more characters may come behind a text, by definition: bool [V]."""
    return torch.tensor([bool(grammar.read(text + token)) for token in vocabulary])


def mask_on_stacks(grammar, text, stacks, vocabulary):
    """The same from the stacks behind the text."""
    return torch.tensor([bool(grammar.read(token, stacks)) for token in vocabulary])


class TokenMasks:
    """Masks over a vocabulary of longer tokens, of which all that the top of a stack decides is made once.

    sure [n_states, V]: tokens that go on within the rule of a state; unsure: for each state the tokens that
    run past the end of its rule, and of which the stack decides.
    """

    def __init__(self, grammar, vocabulary):
        n_states, self.vocabulary = len(grammar.moves), vocabulary
        self.sure = torch.zeros(n_states, len(vocabulary), dtype=torch.bool)
        self.unsure = [[] for _ in range(n_states)]
        prefixes = {}  # tokens share beginnings: {character: ([numbers of tokens that end here], prefixes)}
        for number, token in enumerate(vocabulary):
            below = prefixes
            for character in token:
                numbers, below = below.setdefault(character, ([], {}))
            numbers.append(number)
        for state in range(n_states):
            self._classify(grammar, state, {(state, (grammar.caller, None))}, prefixes, False)

    def _classify(self, grammar, state, stacks, prefixes, past):
        """Decides which tokens of these prefixes go on; past: the rule of the state may have been over."""
        past = past or (grammar.caller, None) in grammar.around(stacks)
        following = grammar.following(stacks)
        for character, (numbers, below) in prefixes.items():
            if behind := following.get(character, set()):
                self.sure[state, numbers] = True
            elif past:
                self.unsure[state] += numbers
            if behind or past:
                self._classify(grammar, state, behind, below, past)

    def mask(self, grammar, text, stacks, vocabulary):
        """The same mask [V] as mask_on_stacks."""
        tops = {state for state, _ in stacks}
        mask = self.sure[[*tops]].any(dim=0)  # [V]
        for token in {token for state in tops for token in self.unsure[state]}:
            mask[token] |= bool(grammar.read(self.vocabulary[token], stacks))
        return mask


RULES = {  # what the report decodes: a scene as JSON, whose answers are scenes
    "scene": r'\{"speaker": <name>, "says": <string>(, "answers": \[<scene>(, <scene>)*\])?\}',
    "name": '"(ROMEO|JULIET|MERCUTIO|NURSE)"',
    "string": """"[A-Z][a-z ',;]{0,40}[.!?]\"""",
}
JSON = {  # any JSON text without escapes, a blank behind each comma and colon
    "value": "<object>|<list>|<string>|<number>|true|false|null",
    "object": r"\{(<string>: <value>(, <string>: <value>)*)?\}",
    "list": r"\[(<value>(, <value>)*)?\]",
    "string": r'"[^"\\\n]*"',
    "number": r"-?(0|[1-9]\d*)(\.\d+)?",
}


NOTHING = r"[^\s\S]"  # an expression that no text matches


def unrolled(rules, name, depth):
    """A rule as one expression in which calls are nested at most so deep: deeper ones match nothing."""

    def inner(call):
        return f"({unrolled(rules, call[1], depth - 1)})" if depth else NOTHING

    return re.sub(r"<(\w+)>", inner, rules[name])


def states_of(expression, vocabulary):
    """How many states the automaton of an expression has, None where they are too many to build."""
    try:
        return len(build_automaton(expression, vocabulary)[0])
    except ValueError:
        return None


def is_json(text):
    """Whether Python's json reads something in a text."""
    try:
        return json.loads(text) is not None
    except ValueError:
        return False


def frequent_pieces(text, n):
    """The n most frequent pieces of two to five characters of a text."""
    counts = Counter(text[i : i + size] for size in (2, 3, 4, 5) for i in range(len(text) - size + 1))
    return [piece for piece, _ in counts.most_common(n)]


if __name__ == "__main__":
    import time
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from data.shakespeare import VOCABULARY
    from gptlite_kvcache import GPTlite_KVCache
    from inference_utils import TimedMethod, measure, peak_memory_mb
    from main_kvcache import generate_kvcache

    quick = {"n_requests": 1, "prompt_len": 16, "n_tokens": 70, "sizes": [110, 150], "depths": [1, 2]}
    parser = harness.options(__doc__, repeats=2, quick=quick, prompt_len=64, n_tokens=160)
    parser.add_argument("--n-requests", type=harness.positive_int, default=4, help="prompts, one at a time")
    numbers = {"type": harness.positive_int, "nargs": "+", "metavar": "N"}
    parser.add_argument("--sizes", **numbers, default=[300, 1000, 3000], help="tokens of longer vocabularies")
    parser.add_argument("--depths", **numbers, default=[1, 2, 3, 4], help="depths to unroll the rules to")
    columns = {"n_steps": ("steps", "{}"), "match": ("match", "{:.0%}"), "braces": ("braces", "{}")}
    with harness.script(parser) as args:
        text, N, n_new = harness.load_text(args), args.n_requests, args.n_tokens
        (cached,) = harness.load_models(args, GPTlite_KVCache)
        grammar, end = Grammar(RULES, VOCABULARY), VOCABULARY.index("\n")
        prompts = text.prompts(N, args.prompt_len).split(1)  # [1, T] each
        report = harness.Report(args, "a grammar with a stack", cached, columns)

        def by_grammar():  # one prompt at a time, sampled
            write = partial(generate_by_grammar, cached, n_tokens=n_new, grammar=grammar)
            write = partial(write, vocabulary=VOCABULARY, end=end, temperature=1.0)
            return [write(prompt, request=i) for i, prompt in enumerate(prompts, start=args.seed * N)]

        lengths = [len(answer) for answer in by_grammar()]
        pairs, W = [*zip(prompts, lengths, strict=True)], cached.seqlen
        free = lambda: [generate_kvcache(cached, p, n, W)[0].tolist() for p, n in pairs]  # noqa: E731
        runs, rows = {"no mask": free, "stacks": by_grammar}, {}
        timed = [TimedMethod(way, run, [cached]) for way, run in runs.items()]
        for way, result in measure(timed, sum(lengths), args.repeats).items():
            figures = dict.fromkeys(("ttft_ms", "tpot_ms", "tpot_p99_ms"))
            texts = [text.decode(answer) for answer in result.output]
            figures |= {"match": sum(map(is_json, texts)) / N, "braces": max(t.count("{") for t in texts)}
            figures["peak_memory_mb"] = peak_memory_mb(runs[way], cached)
            rows[way] = report.row(way, result, way == "no mask", **figures)
        report.check("Python's json reads each text", rows["stacks"]["match"] == 1)

        lines = []
        for depth in args.depths:
            states = states_of(unrolled(RULES, "scene", depth), VOCABULARY)
            lines.append({"depth": depth, "unrolled": states, "with a stack": len(grammar.moves) - 1})
        report.sweep("States of the rules: unrolled to a depth, and with a stack for any depth", lines)

        speeches = text.decode(text.train[:60_000]).split("\n\n")
        scenes = ", ".join(json.dumps({"speaker": s[:20], "says": [s[20:60]]}) for s in speeches)
        sample = json.dumps([{"speaker": "ROMEO", "says": ["Ay me!", {"age": -16.5, "house": None}]}])
        values, heads = Grammar(JSON, VOCABULARY), [sample[:n] for n in range(0, len(sample), 9)]
        vocabularies = {n: [*VOCABULARY, *frequent_pieces(scenes, n - len(VOCABULARY))] for n in args.sizes}
        forms, lines, same = {}, [], True
        for n, vocabulary in vocabularies.items():
            start, split = time.perf_counter(), TokenMasks(values, vocabulary)
            lines.append({"tokens": n, "made once (s)": time.perf_counter() - start})
            lines[-1]["left to the stack"] = sum(map(len, split.unsure)) / (n * len(values.left))
            forms[n] = {"on stacks": mask_on_stacks, "split": split.mask}
        report.sweep("The split: share of tokens that the top of the stack does not decide", lines)

        def masks(form, n):  # at places of the sample
            given = [(values, head, values.read(head), vocabularies[n]) for head in heads]
            return torch.stack([form(*one) for one in given])  # [places, V]

        for n, each in forms.items():
            same &= masks(each["split"], n).equal(masks(each["on stacks"], n))
        report.check("longer tokens: the same masks with the split as without", same)
        same = masks(mask_by_trying, min(forms)).equal(masks(mask_on_stacks, min(forms)))
        report.check(f"longer tokens: masks are those by definition ({min(forms)} tokens)", same)
        title = f"Making {len(heads)} masks (ms)"
        functions = lambda n: {name: partial(masks, form, n) for name, form in forms[n].items()}  # noqa: E731
        times = report.time_sweep(title, "tokens", args.sizes, functions)
        report.why(words.compare(rows["stacks"], rows["no mask"], "tokens_per_s"))
        report.why(words.crossover(times, "tokens", "split", "on stacks"))
        saved = (times[-1]["on stacks"] - times[-1]["split"]) / len(heads) / 1000
        report.why(words.pays_back(lines[-1]["made once (s)"], saved, "s", "masks"))
        report.plot_sweep(title)
        report.finish()
