"""Prompt lookup: drafts without a model, copied from where the last tokens stood before.

If the last n tokens already occur in the prompt or in the answer so far, what followed them there is
proposed as what follows now, and verified like any other draft. Finding it costs nothing against a forward:
a table from each n-gram to the last place where it stood grows with the text. Where nothing is found, the
round is a plain step.

Exact, as every draft is: a wrong guess costs the rows that verify it. Wins where the output repeats the
input or itself (summaries with quotations, code that is edited, records, a greedy small model that goes
round in circles). Loses where text is new: few rounds propose, and what they propose is seldom right. A
measurement on looping text flatters it, so the report tells tokens a round for each third of the answers.

Run: python more/speculative_lookup.py            (--peers adds transformers' own lookup)

Source: Saxena, Prompt Lookup Decoding, 2023 (a repository); He et al., REST: Retrieval-Based Speculative
Decoding, 2023 (the same from a large store of texts).
"""

import torch

import _root  # noqa: F401 (the files above become importable)
from main_speculative_decoding import generate_speculative


def look_up(ids, longest, shortest, n):
    """What followed the last tokens when they stood there before, by definition: a search from the end.

    Args: ids: list of tokens; longest, shortest: of the n-grams, the longer first; n: tokens to propose.
    Returns: at most n tokens; none where there is no earlier place, or the text is no longer than the n-gram.
    """
    for m in range(longest, shortest - 1, -1):
        for start in range(len(ids) - m - 1, -1, -1):  # never the last m tokens themselves
            if ids[start : start + m] == ids[len(ids) - m :]:
                return ids[start + m : start + m + n]
    return []


class LookupDraft:
    """The same from a table that grows with the text: a look-up takes the same time in any text."""

    def __init__(self, longest=3, shortest=2, device="cpu"):
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams of {shortest} to {longest} tokens: at least 1, and the shorter first")
        self.sizes, self.device = range(longest, shortest - 1, -1), device
        self.reset()

    def reset(self):
        self.places, self.n_read = {}, 0  # n-gram: where the token behind it stands

    def find(self, ids, n):
        """At most n tokens, as look_up finds them; ids goes on with those of the call before."""
        for end in range(self.n_read, len(ids)):  # n-grams behind which a token stands
            for m in self.sizes:
                if end >= m:
                    self.places[tuple(ids[end - m : end])] = end
        self.n_read = len(ids)
        for m in self.sizes:
            place = self.places.get(tuple(ids[len(ids) - m :])) if len(ids) >= m else None
            if place is not None:
                return ids[place : place + n]
        return []

    def propose(self, ids, n, temperature=0.0, generators=None):
        """Drafts [1, up to n], which are certain: no distribution comes with them."""
        return torch.tensor([self.find(ids, n)], dtype=torch.int64, device=self.device), None


if __name__ == "__main__":
    import inference_report as harness
    import inference_speculation as study
    import inference_words as words
    from gptlite_kvcache import GPTlite_StaticKVCache
    from main_kvcache import generate_static

    quick = {"n_requests": 1, "prompt_len": 24, "n_tokens": 16, "longest_ngrams": [3]}
    parser = harness.options(__doc__, 2, quick=quick, n_requests=4, prompt_len=64, n_tokens=190)
    add, number = parser.add_argument, harness.positive_int
    add("--longest-ngrams", type=number, nargs="+", default=[2, 3, 5], help="tokens that are looked up")
    add("--draft-len", type=number, default=4, help="drafts of a round at most")
    add("--peers", action="store_true", help="add rows of transformers' generate")
    with harness.script(parser) as args:
        text, T, N, n = harness.load_text(args), args.prompt_len, args.n_tokens, args.draft_len
        (target,), sizes = harness.load_models(args, GPTlite_StaticKVCache), sorted({*args.longest_ngrams})
        study.check_request(target, torch.zeros(1, T), N, n)
        prompts = {"plays": text.prompts(args.n_requests, T)}  # [n, T]
        # a passage, and its beginning again: what an answer that quotes looks like
        half = (T - 1) // 3 if T > 3 else 1
        prompts["quotation"] = torch.cat([prompts["plays"], prompts["plays"][:, :half]], dim=1)[:, -T:]
        columns = harness.COLUMNS | study.COLUMNS
        report = harness.Report(args, "prompt lookup", target, columns, study.HIDE, text)
        test, tables, rounds = study.Study(target), {}, {}
        times = study.RowTimes(args, target, T + N // 2, range(2, n + 2))
        for kind, given in prompts.items():
            methods = [test.baseline(generate_static)]
            for m in sizes:
                draft = LookupDraft(m, min(m, 2), args.device)
                methods.append(test.method(f"up to {m}", generate_speculative, draft, n, test.cache))
            if args.peers:
                options = {"prompt_lookup_num_tokens": n, "max_matching_ngram_size": sizes[-1]}
                methods += study.peers(args, {"transformers, lookup": options})
            tables[kind] = report.compare(given, N, *methods, label=kind)
            for m in sizes:
                key = f"up to {m}"
                rounds[kind, m] = drawn = test.rounds[key]
                cost = sum(times.of(drafted + 1) for drafted, _ in drawn) / len(drawn) if drawn else None
                row = tables[kind][key]
                test.add(row, cost, row_tokens := study.round_figures(drawn)["tokens_per_round"], key)
                row["proposing"] = row_tokens and sum(d > 0 for d, _ in drawn) / len(drawn)
        middle, lines = sizes[len(sizes) // 2], []
        parts = {kind: study.by_part(rounds[kind, middle], N) for kind in prompts}
        names = ("first third", "second third", "last third")
        for i, part in enumerate(names):
            line = {"part of the answer": part}
            for kind in prompts:
                line |= {
                    f"tokens a round, {kind}": parts[kind][i][0],
                    f"rounds that propose, {kind}": parts[kind][i][1],
                }
            lines.append(line)
        report.sweep(f"Tokens a round, n-grams up to {middle}", lines)
        times.sweep(report, f"A forward behind {T + N // 2} tokens")
        for kind in prompts:
            row = tables[kind][f"up to {middle}"]
            report.why(words.compare(row, tables[kind]["static"], "tokens_per_s") + words.rounds(row))
        report.why(words.flattered(lines[0]["tokens a round, plays"], lines[-1]["tokens a round, plays"]))
        drawn = {kind: (names, [part[0] for part in parts[kind]]) for kind in prompts}
        report.plot_lines(drawn, "", "tokens a round")
        report.finish()
