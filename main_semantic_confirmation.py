"""Confirming a semantic hit: the stored question must agree in numbers, names, negations and opposites.

Sentence vectors hardly move when "on" becomes "off", "Act 1" becomes "Act 2" or two names change places, so
no threshold on their cosine tells such questions apart. A look at the words does, at the price of some hits.
It is a filter and no proof: what differs in any other word (an egg for butter) passes, and the cosine has to
refuse it. Counted here on labelled pairs, without any encoder, so before a threshold comes in.

Run: python main_semantic_confirmation.py

Source: Bang, GPTCache, 2023 (the check after the search); Ribeiro et al., CheckList, 2020 (such pairs).
"""

import re

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
    import torch

    import inference_report as rep
    import inference_utils as utils
    from data.query_pairs import load_pairs
    from data.shakespeare import get_shakespeare_data
    from gptlite import get_gptlite_model_parameters
    from gptlite_kvcache import GPTlite_KVCache
    from main_kvcache import generate_kvcache

    parser = rep.options(__doc__, plot=False, data=False)
    parser.add_argument("--n-tokens", type=rep.positive_int, default=64, help="tokens of an answer")
    with rep.script(parser) as args:
        p, dev, n_tokens = get_gptlite_model_parameters(), args.device, 8 if args.quick else args.n_tokens
        vocab_size, _, _, encode, _ = get_shakespeare_data()
        model = utils.load_model(GPTlite_KVCache, vocab_size, args.checkpoint).to(dev, args.dtype)
        halves = dict(zip(("tuning half", "test half"), load_pairs(), strict=True))
        columns = {
            "traps_refused": ("traps refused", "{:.1%}"),
            "paraphrases_refused": ("paraphrases refused", "{:.1%}"),
            "pair_us": ("us a pair", "{:.0f}"),
        }
        question = halves["tuning half"][0].query
        prompt, T = torch.tensor([encode(question + "\n")], device=dev), len(question) + 1  # [1, T]
        answer_ms = utils.median_ms(
            lambda: generate_kvcache(model, prompt, n_tokens, p.seqlen), args.repeats, dev
        )
        sizes = {"batch_size": 1, "prompt_len": T, "n_tokens": n_tokens}
        report = rep.Report(args, "confirmation of semantic hits", model, columns, **sizes)
        report.row("no confirmation", baseline=True, traps_refused=0.0, paraphrases_refused=0.0)

        refused, lines = {}, []
        for half, pairs in halves.items():
            ms = utils.median_ms(
                lambda pairs=pairs: [same_details(*pair[3:]) for pair in pairs], args.repeats
            )
            refused[half] = [not same_details(pair.query, pair.other) for pair in pairs]
            by_kind = {}  # kind -> whether each of its pairs is refused
            for pair, no in zip(pairs, refused[half], strict=True):
                by_kind.setdefault(pair.kind, []).append(no)
            traps = [
                no for kind, row in by_kind.items() if kind not in ("paraphrase", "unrelated") for no in row
            ]
            report.row(
                f"same_details, {half}",
                same_output="approximate",
                traps_refused=sum(traps) / len(traps),
                paraphrases_refused=sum(by_kind["paraphrase"]) / len(by_kind["paraphrase"]),
                pair_us=1000 * ms / len(pairs),
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

        row = report.data["rows"][1]
        limits = rep.measure_ceilings(dev, args.dtype)
        steps = [(T, 0), *((1, n_past) for n_past in range(T, T + n_tokens - 1))]
        costs = [rep.forward_cost(p, vocab_size, 1, *step, args.dtype) for step in steps]
        least = sum(rep.lower_bound_ms(cost, limits) for cost in costs)
        report.why(
            f"A look takes {row['pair_us']:.0f} us, and at most 5 candidates are looked at; an answer of "
            f"{n_tokens} tokens takes GPTlite {answer_ms:.0f} ms (at least {least:.0f} ms here, share "
            f"reached {rep.share_of(least, answer_ms)}). So it costs no time, it costs the hits it refuses."
        )
        price = refused["test half"], [pair.same for pair in halves["test half"]]
        good = sum(no and same for no, same in zip(*price, strict=True))
        report.why(
            f"On the test half it refuses {good} of {sum(price[1])} paraphrases, each of which costs an "
            f"answer once more, and {sum(price[0]) - good} of {len(price[0]) - sum(price[1])} wrong pairs, "
            "each of which is a wrong answer where the cosine lets it through. It pays where a wrong answer "
            "costs more than a late one."
        )
        blind = [line["kind"] for line in lines if line["half"] == "tuning half" and not line["refused"]]
        report.why(
            f"Blind to: {', '.join(blind) or 'no kind'} (tuning half). A word list sees what it lists; a "
            "model that reads both questions (a cross-encoder) sees more and costs a pass."
        )
        report.finish()
