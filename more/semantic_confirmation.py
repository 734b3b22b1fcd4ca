"""Confirming a semantic hit: the stored question must agree in numbers, names, negations and opposites.

Idea: sentence vectors hardly move when "on" becomes "off", "Act 1" becomes "Act 2" or two names change
places, so no threshold on their cosine tells such questions apart. A look at the words does.

Approximate: a filter and no proof. Wins where a wrong answer costs more than a late one: it takes
microseconds and refuses most traps. Loses the paraphrases that it refuses, each of which costs an answer once
more, and what differs in any other word (an egg for butter) passes: a word list sees what it lists, the
cosine has to refuse the rest. Counted here on labelled pairs, without any encoder, before a threshold comes
in.

Run: python more/semantic_confirmation.py

Source: Bang, GPTCache, 2023 (the check after the search); Ribeiro et al., CheckList, 2020 (such pairs).
"""

import re

import _root  # noqa: F401 (the files above become importable)

VALUES = {"minus": "-"}  # word -> the digits that mean the same
for values, words in (
    (range(13), "zero one two three four five six seven eight nine ten eleven twelve"),
    (range(13), "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"),
    (range(13, 20), "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"),
    (range(13, 20), "thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth"),
    (range(20, 100, 10), "twenty thirty forty fifty sixty seventy eighty ninety"),
    (range(20, 100, 10), "twentieth thirtieth fortieth fiftieth sixtieth seventieth eightieth ninetieth"),
    ((100, 10**3, 10**6, 10**9, 10**12), "hundred thousand million billion trillion"),
    ((100, 10**3, 10**6, 10**9, 12), "hundredth thousandth millionth billionth dozen"),
    ((1, 2, 3, 2, 3, "1/2", "1/4"), "once twice thrice double triple half quarter"),
):
    VALUES |= {word: str(value) for value, word in zip(values, words.split(), strict=True)}
TOKEN = re.compile(
    r"(?<!\w)-(?=[$\u20ac\u00a3]?\.?\d)"  # a minus sign, and no hyphen as in 3-5
    r"|(?:(?<![\w.])\.)?\d+(?:[./]\d+)*"  # 7, 3.11, .5, 1/2
    r"|[^\W\d_]+(?:'t)?"  # a word
)
ONE_FORM = str.maketrans("\u2019\u2212\u2013", "'--")  # apostrophe, minus and dash as typed on a keyboard
NEGATIONS = set("no not non none never nobody nothing nowhere neither nor without cannot".split())
OPPOSITES = {  # both ways; block and unblock, legal and illegal are found by form
    tuple(pair.split("/"))
    for pair in (
        "on/off open/close start/stop start/end begin/end first/last before/after up/down in/out left/right "
        "push/pull upload/download import/export increase/decrease raise/lower high/low hot/cold fast/slow "
        "fast/slowly larger/smaller bigger/smaller largest/smallest more/less most/least maximum/minimum "
        "enable/disable approve/deny approve/reject accept/deny accept/reject allow/deny add/remove "
        "create/delete encrypt/decrypt encode/decode ascending/descending send/receive buy/sell show/hide "
        "positive/negative"
    ).split()
}
PREFIXES = ("un", "dis", "de", "in", "im", "il", "ir", "non")
NOT_NAMES = set(  # words that begin a question in English, and the pronoun
    "i a an the what which who whom whose when where why how is are was were do does did can could should "
    "would will may must has have in on at by of for to from if my please explain list show tell give find "
    "describe name summarise summarize compare define enable".split()
)


def split_words(text):
    """Words, numbers and minus signs of a text; a sign such as a superscript or a half is one of its own."""
    text = "".join(f" {c} " if c.isnumeric() and not c.isdecimal() else c for c in text)
    return TOKEN.findall(text.translate(ONE_FORM))


def same_details(query, stored):
    """False if two questions differ in a number, a name, a negation, a word and its opposite, or in order.

    Numbers are digits with sign, point or fraction bar, signs such as superscripts, and the words of VALUES:
    twelve is 12, but twenty-one and 21 are refused. Names are words with a capital letter; opposites are
    those listed and those formed by PREFIXES. A name that both write in small letters is not seen, nor are
    symbols (C++), and the two may differ in any other word: what this lets through is no proof.
    """
    texts = [split_words(text) for text in (query, stored)]
    capital = {word.lower() for words in texts for word in words if word != word.lower()}
    names = {word for word in capital - NOT_NAMES if not word.endswith("n't")}
    a, b = ([word.lower() for word in words] for words in texts)

    def details(words):
        numeric = [word for word in words if word in VALUES or word.isnumeric() or not word[0].isalpha()]
        numbers = [VALUES.get(word, word) for word in numeric]
        negations = sum(word in NEGATIONS or word.endswith("n't") for word in words)
        return numbers, negations, [word for word in words if word in names]  # "from Rome to Paris"

    opposed = any(
        {(x, y), (y, x)} & OPPOSITES or x in (p + y for p in PREFIXES) or y in (p + x for p in PREFIXES)
        for x in set(a) - set(b)
        for y in set(b) - set(a)
    )
    reordered = a != b and sorted(a) == sorted(b)  # "a string to a number", "a number to a string"
    return details(a) == details(b) and not opposed and not reordered


if __name__ == "__main__":
    from functools import partial

    import inference_report as harness
    import inference_words as words
    from data.query_pairs import load_pairs
    from gptlite_kvcache import GPTlite_KVCache
    from inference_utils import alternating_ms
    from main_kvcache import generate_kvcache

    parser = harness.options(__doc__, plot=False, data=False, quick={"n_tokens": 8}, n_tokens=64)
    with harness.script(parser) as args:
        (model,), text = harness.load_models(args, GPTlite_KVCache), harness.load_text(args)
        halves = dict(zip(("tuning half", "test half"), load_pairs(), strict=True))
        columns = {
            "traps_refused": ("traps refused", "{:.1%}"),
            "paraphrases_refused": ("paraphrases refused", "{:.1%}"),
            "pair_us": ("us a pair", "{:.0f}"),
        }
        prompt = text.prompt(halves["tuning half"][0].query + "\n")  # [1, T]
        report = harness.Report(args, "confirmation of semantic hits", model, columns)
        times = {"answer": partial(generate_kvcache, model, prompt, args.n_tokens, model.seqlen)}
        for half, pairs in halves.items():
            times[half] = lambda pairs=pairs: [same_details(*pair[3:]) for pair in pairs]
        times = alternating_ms(times, args.repeats, args.device)
        report.row("no confirmation", baseline=True, traps_refused=0.0, paraphrases_refused=0.0)
        refused, lines = {}, []
        for half, pairs in halves.items():
            refused[half] = [not same_details(pair.query, pair.other) for pair in pairs]
            by_kind = {}  # kind -> whether each of its pairs is refused
            for pair, no in zip(pairs, refused[half], strict=True):
                by_kind.setdefault(pair.kind, []).append(no)
            traps = sum((row for kind, row in by_kind.items() if kind not in ("paraphrase", "unrelated")), [])
            report.row(
                f"same_details, {half}",
                same_output="approximate",
                traps_refused=sum(traps) / len(traps),
                paraphrases_refused=sum(by_kind["paraphrase"]) / len(by_kind["paraphrase"]),
                pair_us=1000 * times[half] / len(pairs),
            )
            lines += [
                {"half": half, "kind": kind, "pairs": len(row), "refused": sum(row)}
                for kind, row in by_kind.items()
            ]
        report.sweep("By kind of pair: all but the paraphrases should be refused", lines)
        passed = [
            {"stored": pair.query, "asked": pair.other}
            for pair, no in zip(halves["tuning half"], refused["tuning half"], strict=True)
            if not no and pair.kind not in ("paraphrase", "unrelated")
        ]
        report.sweep("Traps of the tuning half that it lets through", passed[:8])

        pairs = [pair for half in halves.values() for pair in half]
        turned = [not same_details(pair.other, pair.query) for pair in pairs]
        report.check("which of the two was stored does not matter", turned == sum(refused.values(), []))
        itself = all(same_details(text, text) for pair in pairs for text in pair[3:])
        report.check("every question confirms itself", itself)

        test = list(zip(halves["test half"], refused["test half"], strict=True))
        good, wrong = ([no for pair, no in test if pair.same is same] for same in (True, False))
        found = f"On the test half it refuses {sum(good)} of {len(good)} paraphrases and {sum(wrong)} of "
        found += f"{len(wrong)} wrong pairs"
        gain = sum(wrong) / len(wrong) - sum(good) / len(good)  # of the shares that are refused
        texts = f"{found}: it tells them apart.", f"{found}: it refuses blindly."
        report.why(words.choose(gain, (0.1, texts[0]), texts[1]))
        blind = [line["kind"] for line in lines if line["half"] == "tuning half" and not line["refused"]]
        texts = (
            f"No pair is refused of the kinds {', '.join(blind)} (tuning half).",
            "It refuses some of each kind.",
        )
        report.why(words.choose(len(blind), (1, texts[0]), texts[1]))
        look_ms = 5 * times["test half"] / len(halves["test half"])  # at most 5 candidates are looked at
        found = f"Five looks take {1000 * look_ms:.0f} us, an answer of GPTlite {times['answer']:.0f} ms"
        texts = f"{found}: time is no matter.", f"{found}: the looks cost time that is seen."
        report.why(words.choose(times["answer"] / look_ms, (20, texts[0]), texts[1]))
        report.finish()
