"""Sentences of a report that measured figures choose: other figures, other words.

A report's `why:` takes only what these functions return, so no sentence is printed whatever was measured.
What is true on every machine stands in a script's docstring instead.
"""

import math

from inference_links import spared_ms


class Reason(str):
    """A sentence whose words were chosen by figures of this run; it begins with a capital letter."""

    def __new__(cls, text):
        return super().__new__(cls, text[:1].upper() + text[1:])

    def __add__(self, other):
        """Two reasons side by side are one."""
        if not isinstance(other, Reason):
            raise TypeError("a reason is joined with a reason only: words follow from figures")
        return Reason(f"{self} {other}")


def choose(figure, *cases):
    """The first text whose limit the figure reaches: choose(x, (1.05, "faster"), (0.95, "equal"), "slower").

    Args: cases: (limit, text) from the highest limit down, last the text for everything below (None as well
        as NaN take it). Raises ValueError for fewer than two different texts, or limits that rise.
    """
    *limited, otherwise = cases
    texts, limits = [text for _, text in limited] + [otherwise], [limit for limit, _ in limited]
    if len({str(text) for text in texts}) < 2:
        raise ValueError("the figure must choose between different words")
    if any(high < low for high, low in zip(limits, limits[1:], strict=False)):
        raise ValueError(f"no figure reaches some of these texts: the limits {limits} rise")
    for limit, text in limited:
        if figure is not None and figure >= limit:
            return Reason(text)
    return Reason(otherwise)


LOWER_IS_BETTER = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "tpot_p99_ms": "p99 TPOT",
    "peak_memory_mb": "peak memory",
    "step_ms": "time of a step",
    "latency_ms": "latency",
    "attention_ms": "time of attention",
    "kv_bytes_per_token": "cache of a token",
    "forward_tokens": "work in tokens",
    "own_text_loss": "the teacher's loss on what it wrote",
}
HIGHER_IS_BETTER = {"tokens_per_s": "tokens/s", "tokens_per_round": "yield in tokens a round"}


def known(*values):
    """Whether all of these are numbers: a figure that was not measured, or is NaN, is none."""
    return all(value is not None and math.isfinite(value) for value in values)


def spread_of(row, key):
    """Lowest and highest of the runs, where the row tells, else the figure itself twice."""
    return row.get(f"{key}_spread") or (row[key], row[key])


def overlap(one, other, key):
    """Whether the runs of two rows spread so far that this figure does not tell them apart."""
    (low_a, high_a), (low_b, high_b) = spread_of(one, key), spread_of(other, key)
    return low_a <= high_b and low_b <= high_a


def compare(row, other, key="tpot_ms"):
    """How a figure of one row stands to that of another row: better, worse, or equal within their spread.

    A key that is in neither table above is called lower or higher, without a verdict.
    """
    name = LOWER_IS_BETTER.get(key) or HIGHER_IS_BETTER.get(key) or key
    a, b, one, two = row.get(key), other.get(key), row["method"], other["method"]
    if not known(a, b):
        absent = two if known(a) else one
        return Reason(f"{absent} has no {name} to compare.")
    runs = "" if row.get(f"{key}_spread") is None or len({*spread_of(row, key)}) > 1 else ", one run"
    numbers = f"({number(a)} against {number(b)}{runs})"
    if a == b or overlap(row, other, key):
        return Reason(f"{name} of {one} equals that of {two} within the spread of the runs {numbers}.")
    word = "lower" if a < b else "higher"
    factor = f"{max(a, b) / min(a, b):.2f} times {word}" if min(a, b) > 0 else word
    loses = key in LOWER_IS_BETTER and a > b or key in HIGHER_IS_BETTER and a < b
    judged = ": it loses here" if loses else ""
    return Reason(f"{name} of {one} is {factor} than that of {two} {numbers}{judged}.")


def number(value):
    """A figure in three to four digits."""
    if isinstance(value, int) or math.isfinite(value) and abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def loss(row):
    """What a row's loss is against the baseline's, in standard errors of the pairs of windows."""
    difference, se = row.get("loss_difference"), row.get("loss_difference_se")
    if not known(difference):
        return Reason(f"The loss of {row['method']} was not measured against the baseline's.")
    if not known(se):
        return Reason(
            f"The loss of {row['method']} differs by {difference:+.4f} nats from the baseline's, "
            "over too few windows to tell whether that is chance."
        )
    figures = f"{difference:+.4f} +- {se:.4f} nats"
    if abs(difference) <= 2 * se or abs(difference) < 5e-5:
        return Reason(f"{row['method']} has the baseline's loss as far as these windows tell ({figures}).")
    word = "loses" if difference > 0 else "gains"
    return Reason(f"{row['method']} {word} against the baseline: {figures}.")


def loss_between(one, other, difference, se):
    """How the loss of one stands to that of another, by what loss_difference gives for the two."""
    if not known(difference, se):
        return Reason(f"Too few windows tell whether the losses of {one} and {other} differ.")
    figures = f"({difference:+.4f} +- {se:.4f} nats)"
    return choose(
        0.0 if abs(difference) < 5e-5 else difference / max(se, 1e-9),
        (2, f"The loss of {one} is higher than that of {other} {figures}."),
        (-2, f"The losses of {one} and {other} are equal as far as these windows tell {figures}."),
        f"The loss of {one} is lower than that of {other} {figures}.",
    )


def crossover(rows, size, one, other):
    """From which size on `one` takes less time than `other`, in the rows of a sweep (times in ms).

    Sizes at which the two are within 3% count as equal, for neither.
    """
    both = [row for row in rows if known(row.get(one), row.get(other)) and row[one] > 0]
    ratios = [(row[size], row[other] / row[one]) for row in both]
    if not ratios:
        return Reason(f"{one} and {other} were not both measured at any {size}.")
    first, last = ratios[0][0], ratios[-1][0]
    wins = [n for n, ratio in ratios if ratio > 1.03]
    best_n, best = max(ratios, key=lambda pair: pair[1])
    if not wins:
        return Reason(
            f"{one} is nowhere faster than {other} from {size} {first} to {last}; "
            f"at best {best:.2f} times its speed, at {best_n}."
        )
    if len(wins) == len(ratios):
        return Reason(
            f"{one} is faster than {other} for all {size} from {first} to {last}: "
            f"{min(r for _, r in ratios):.2f} to {best:.2f} times."
        )
    tail = [n for n, _ in ratios][-len(wins) :]
    if wins == tail:
        return Reason(
            f"{one} is faster than {other} from {size} {wins[0]} on (up to {best:.2f} times at {best_n}), "
            f"not below (down to {min(r for _, r in ratios):.2f})."
        )
    head = [n for n, _ in ratios][: len(wins)]
    if wins == head:
        return Reason(
            f"{one} is faster than {other} up to {size} {wins[-1]} (up to {best:.2f} times at {best_n}), "
            f"not beyond (down to {min(r for _, r in ratios):.2f})."
        )
    return Reason(f"{one} is faster than {other} at {size} {', '.join(map(str, wins))}, not at the others.")


def stops_costing(rows, size, one, other, most=1.1):
    """From which size on `one` takes at most `most` times as long as `other`, in the rows of a sweep."""
    both = [row for row in rows if known(row.get(one), row.get(other)) and row[other] > 0]
    ratios = [(row[size], row[one] / row[other]) for row in both]
    if not ratios:
        return Reason(f"{one} and {other} were not both measured at any {size}.")
    free = ratios[max((i + 1 for i, (_, ratio) in enumerate(ratios) if ratio > most), default=0) :]
    least, last = min(ratio for _, ratio in ratios), ratios[-1]
    figures = f"{ratios[0][1]:.2f} times at {ratios[0][0]}, {last[1]:.2f} at {last[0]}"
    if not free:
        return Reason(
            f"The time of {one} is more than {most} times that of {other} up to {size} {last[0]} ({figures}, "
            f"at least {least:.2f})."
        )
    if len(free) == len(ratios):
        return Reason(
            f"The time of {one} is at most {most} times that of {other} at every {size} ({figures})."
        )
    start = f"from {size} {free[0][0]} on"
    return Reason(f"The time of {one} is at most {most} times that of {other} {start} ({figures}).")


def hidden(few, many, size):
    """How much of two things that run at once is hidden, from the rows of two sizes with a share "hidden"."""
    a, b = few.get("hidden"), many.get("hidden")
    if not known(a, b):
        return Reason("How much is hidden was not measured.")
    figures = (
        f"{100 * a:.0f}% of the shorter of the two at {size} {few[size]}, {100 * b:.0f}% at {many[size]}"
    )
    return choose(
        min(a, b),
        (0.8, f"Copying and computing hide each other well ({figures})."),
        (0.2, f"Copying and computing hide each other in part ({figures})."),
        choose(
            max(a, b),
            (0.2, f"Copying and computing hide each other only at one of the sizes ({figures})."),
            f"Copying and computing take nearly as long at once as one after the other ({figures}).",
        ),
    )


def pays_back(once, saved, unit, what="uses"):
    """After how many uses something that costs `once` and saves `saved` each time has paid (same unit)."""
    if not known(once, saved):
        return Reason("What it costs once or saves each time was not measured.")
    if saved <= 0:
        return Reason(f"It costs {number(once)} {unit} once and saves nothing: it never pays.")
    n = max(-(-once // saved), 1)
    return Reason(
        f"It costs {number(once)} {unit} once and saves {number(saved)} each time: {n:.0f} {what} pay it."
    )


def bounds(measured_ms, costs, ceilings):
    """What each method needs at least on this machine, what limits it, and the share that it reaches.

    Args: measured_ms: {name: ms}; costs: {name: Cost of the same step}; ceilings: Ceilings.
    """
    parts = []
    for name, cost in costs.items():
        reading, computing = cost.n_bytes / ceilings.bytes_per_s, cost.flops / ceilings.flops_per_s
        least = 1000 * max(reading, computing)
        what = "computing" if computing > reading else "reading"
        ms = measured_ms.get(name)
        reached = f", {100 * least / ms:.0f}% reached" if known(ms) and ms > 0 else ""
        parts.append(
            f"{name} {number(cost.flops / 1e9)} GFLOP and {number(cost.n_bytes / 1e6)} MB, "
            f"at least {number(least)} ms of {what}{reached}"
        )
    machine = f"{ceilings.flops_per_s / 1e9:.0f} GFLOP/s and {ceilings.bytes_per_s / 1e9:.0f} GB/s"
    return Reason(f"At this machine's {machine} a step needs: {'; '.join(parts)}.")


def batching(one, many, n_sequences, key="tpot_ms"):
    """What a step of n_sequences sequences takes against a step of one, from the rows of the two batches."""
    a, b = one.get(key), many.get(key)
    if n_sequences == 1:
        return Reason("There is one batch size in this run: it does not tell what a larger batch costs.")
    if not known(a, b) or min(a, b) <= 0:
        return Reason("A step was not measured at both batch sizes.")
    ratio = b / a
    figures = f"{number(a)} ms for one sequence, {number(b)} for {n_sequences}: {ratio:.1f} times"
    return choose(
        n_sequences / ratio,
        (
            n_sequences / 1.2,
            f"A step takes as long for the batch as for one ({figures}): the others ride along free.",
        ),
        (
            1.2,
            f"Sequences share a step ({figures}), so each costs {ratio / n_sequences:.2f} of a step alone.",
        ),
        f"A batch saves nothing here ({figures} for {n_sequences} times the tokens).",
    )


def about(label, reason):
    """A reason with what it is about in front."""
    if not isinstance(reason, Reason):
        raise TypeError("words follow from figures: only a reason gets a label")
    return Reason(f"{label[:1].upper()}{label[1:]}: {reason}")


def part(name, part_ms, whole_ms, whole):
    """How much of a whole a part takes, and so what a faster part can gain at most (Amdahl's law)."""
    if not known(part_ms, whole_ms) or whole_ms <= 0:
        return Reason(f"The share of {name} in the {whole} was not measured.")
    share = min(part_ms / whole_ms, 0.99)
    gain = f"without it the {whole} would be {1 / (1 - share):.2f} times as fast"
    return choose(
        share,
        (0.5, f"{name} takes most of the {whole}, {100 * share:.0f}%: {gain}."),
        f"{name} takes the smaller part of the {whole}, {100 * share:.0f}%: {gain}, no more.",
    )


def recovery(row, n_steps):
    """What training on made of a converted model: a row with the figures of uptrained_figures as well."""
    before, after = row.get("loss_difference"), row.get("uptrained_loss_difference")
    name, se = row["method"], row.get("uptrained_loss_difference_se")
    if not known(before, after):
        return Reason(f"{name} was not trained on.")
    figures = f"({before:+.3f} nats as converted, {after:+.3f} to the control after {n_steps} steps)"
    if before < 1e-3:
        return Reason(f"{name} lost nothing that training could bring back {figures}.")
    share = 1 - after / before
    whole = 1 - 2 * se / before if known(se) else 1.0  # as far as the windows tell
    return choose(
        share,
        (max(whole, 0.05), f"Training on brings {name} all the way back {figures}."),
        (0.05, f"Training on brings {name} {100 * share:.0f}% of the way back {figures}."),
        f"Training on does not bring {name} back {figures}.",
    )


def split_pays(rows, size, whole, cost, parts, part=None):
    """From which size on it pays to split work over processors of their own, computed from measured times.

    Splitting spares all but a part of the work, and adds a cost that one process does not have.
    Args: rows of a sweep; cost: column of the ms that are added; whole, parts, part: as in spared_ms.
    """
    rows = [row for row in rows if known(row.get(whole), row.get(cost))]
    if parts < 2 or not rows:
        return Reason("Nothing was split in this run, so it does not tell when splitting pays.")
    gains = [(row[size], spared_ms(row, whole, parts, part), row[cost]) for row in rows]
    wins = [n for n, spared, added in gains if spared > added]

    def figures(n):
        spared, added = next((spared, added) for m, spared, added in gains if m == n)
        return f"at {n} it spares {number(spared)} ms and adds {number(added)}"

    head = f"With {parts} machines as fast as this one behind the same links (computed) splitting"
    first, last = gains[0][0], gains[-1][0]
    if not wins:
        return Reason(f"{head} would pay at no {size} from {first} to {last}: {figures(last)}.")
    if len(wins) == len(gains):
        return Reason(f"{head} would pay at all {size} from {first} to {last}: {figures(first)}.")
    if wins == [n for n, *_ in gains][-len(wins) :]:
        return Reason(f"{head} would pay from {size} {wins[0]} on: {figures(wins[0])}, {figures(first)}.")
    return Reason(f"{head} would pay at {size} {', '.join(map(str, wins))}, not at the others.")


def at_size(row, size, one, other, what):
    """How two columns of a sweep's row stand to each other: what they are, where lower is better."""
    rows = [{"method": name, what: row.get(name)} for name in (one, other)]
    return about(f"at {number(row[size])} {size}", compare(*rows, what))


def growth(rows, size, names):
    """How the times of a sweep grow over its last two sizes: as a power of the size, in words and figures."""
    if len(rows) < 2:
        return Reason(f"There is one {size} in this run: it does not tell how a time grows.")
    before, last = rows[-2:]
    parts = []
    for name in names:
        a, b = before.get(name), last.get(name)
        if not known(a, b) or min(a, b) <= 0:
            parts.append(f"that of {name} was not measured")
            continue
        power = math.log(b / a) / math.log(last[size] / before[size])
        how = choose(
            power,
            (1.5, "grows quadratically"),
            (0.75, "grows linearly"),
            (0.25, "grows more slowly than the size"),
            "does not grow",
        )
        parts.append(f"the time of {name} {how.lower()} (power {power:.2f})")
    return Reason(f"From {size} {number(before[size])} to {number(last[size])} {', '.join(parts)}.")


def state_size(name, state_bytes, kv_bytes_per_token, context):
    """A memory of fixed size against a cache that grows: its worth in tokens, and what it saves."""
    if not known(state_bytes, kv_bytes_per_token) or min(state_bytes, kv_bytes_per_token) <= 0:
        return Reason(f"The bytes of {name} or of a cached token were not counted.")
    n = state_bytes / kv_bytes_per_token
    holds = (
        f"{name} takes {number(state_bytes / 1e3)} kB at every length, as keys and values of {n:.0f} tokens"
    )
    return choose(
        context / n,
        (1.001, f"{holds}: {context / n:.1f} times less than the cache at {context} tokens."),
        f"{holds}: no less than the cache at {context} tokens, so it saves nothing there.",
    )


def idle(row, measured, expected):
    """Whether the ranks of a row idle for about as long as their schedule says, from two shares of it."""
    a, b = row.get(measured), row.get(expected)
    if not known(a, b):
        return Reason(f"How long the ranks of {row['method']} idle was not measured.")
    figures = f"of the time ({100 * a:.0f}% against {100 * b:.0f}% by the schedule)"
    return choose(
        a - b,
        (
            0.1,
            f"{row['method']} idles for more {figures}: sending, waking up and unequal stages are the rest.",
        ),
        (-0.1, f"{row['method']} idles as its schedule says {figures}."),
        f"{row['method']} idles for less {figures} than equal stages would.",
    )


def load(loads, who):
    """Whether ranks get equal work, from how much each of them got; the busiest makes the others wait."""
    if len(loads) < 2 or not sum(loads):
        return Reason("There is one rank, which does all the work.")
    most = max(loads) * len(loads) / sum(loads)
    figures = f"the busiest rank has {most:.2f} times its share"
    return choose(
        most,
        (1.1, f"{who} loads the ranks unevenly: {figures}, and all others wait for it."),
        f"{who} loads the ranks evenly: {figures}.",
    )


def rounds(row):
    """Whether rounds of drafts pay: tokens of a round against its cost in steps of plain decoding."""
    tokens, cost, name = row.get("tokens_per_round"), row.get("round_steps"), row["method"]
    if not known(tokens, cost) or cost <= 0:
        return Reason(f"What a round of {name} gives or costs was not measured.")
    figures = f"A round of {name} gives {tokens:.2f} tokens and costs {cost:.2f} steps"
    return choose(
        tokens / cost,
        (1.05, f"{figures}: it pays, {tokens / cost:.2f} times by these."),
        (0.95, f"{figures}: the two even out."),
        f"{figures}: it does not pay, {tokens / cost:.2f} times by these.",
    )


def best_length(rows):
    """Which length of drafts is best: rows with "drafts" and the speed-ups "measured" and "predicted"."""
    rows = [row for row in rows if known(row.get("measured"), row.get("predicted"))]
    if len(rows) < 2:
        return Reason("Too few draft lengths were measured to tell which is best.")
    best, foreseen = (max(rows, key=lambda row, key=key: row[key]) for key in ("measured", "predicted"))
    figures = f"{best['drafts']} drafts a round are best, {best['measured']:.2f} times plain decoding"
    if best["measured"] <= 1.02:
        return Reason(f"No length of drafts wins: {figures}.")
    off = sum(abs(row["measured"] / row["predicted"] - 1) for row in rows) / len(rows)
    foretold = f"acceptance and times of forwards say {foreseen['drafts']}, {foreseen['predicted']:.2f} times"
    return choose(
        off,
        (0.15, f"{figures}; {foretold}, and are off by {off:.0%} on average."),
        f"{figures}; {foretold}, and hold to {off:.0%} on average.",
    )


def kept(sampled, greedy):
    """What share of drafts a sampled target keeps: of drafts that are sampled, of drafts that are greedy."""
    if not known(sampled, greedy):
        return Reason("What a sampled target keeps of drafts was not measured.")
    figures = f"({sampled:.0%} kept of sampled drafts, {greedy:.0%} of greedy ones)"
    return choose(
        sampled - greedy,
        (0.02, f"A sampled target wants sampled drafts {figures}."),
        (-0.02, f"For a sampled target it does not matter how drafts are chosen {figures}."),
        f"A sampled target keeps more of greedy drafts {figures}.",
    )


def flattered(first, last):
    """Whether rounds give more at the end of answers than at their beginning, from tokens a round of both."""
    if not known(first, last):
        return Reason("Rounds at the beginning and at the end of answers were not both counted.")
    figures = f"({first:.2f} tokens a round in the first third of an answer, {last:.2f} in the last)"
    return choose(
        last / first,
        (1.1, f"Answers repeat themselves more the longer they get, which flatters lookup {figures}."),
        (1 / 1.1, f"Lookup finds as much at the beginning of answers as at their end {figures}."),
        f"Lookup finds less the longer answers get {figures}.",
    )


def drift(rows, trained, untrained):
    """What training gave to drafts, and what is left of that at their last depth, from rows by "depth"."""
    first, last = rows[0], rows[-1]
    a, b, control = first.get(trained), last.get(trained), first.get(untrained)
    if not known(a, b, control):
        return Reason("The agreement of drafts was not measured.")
    figures = f"at depth 1 drafts agree with the model in {a:.0%} of places, untrained in {control:.0%}"
    gained = choose(
        a - control,
        (0.02, f"Training made the drafts: {figures}."),
        f"Training made no drafts: {figures}.",
    )
    if last is first:
        return gained
    return gained + choose(
        a - b,
        (0.02, f"Fed with its own states the module drifts: {b:.0%} at depth {last['depth']}."),
        f"Fed with its own states the module does not drift: {b:.0%} at depth {last['depth']}.",
    )
