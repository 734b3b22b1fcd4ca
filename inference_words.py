"""Sentences of a report that measured figures choose: other figures, other words.

A report's `why:` takes only what these functions return, so no sentence is printed whatever was measured.
What is true on every machine stands in a script's docstring instead.
"""


class Reason(str):
    """A sentence whose words were chosen by figures of this run."""

    def __add__(self, other):
        """Two reasons side by side are one."""
        if not isinstance(other, Reason):
            raise TypeError("a reason is joined with a reason only: words follow from figures")
        return Reason(f"{self} {other}")


def choose(figure, *cases):
    """The first text whose limit the figure reaches: choose(x, (1.05, "faster"), (0.95, "equal"), "slower").

    Args: cases: (limit, text) from the highest limit down, last the text for everything below (None as well
        as NaN take it). Raises ValueError for fewer than two different texts.
    """
    *limited, otherwise = cases
    texts = [text for _, text in limited] + [otherwise]
    if len({str(text) for text in texts}) < 2:
        raise ValueError("the figure must choose between different words")
    for limit, text in limited:
        if figure is not None and figure >= limit:
            return Reason(text)
    return Reason(otherwise)


LOWER_IS_BETTER = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "tpot_p99_ms": "p99 TPOT",
    "peak_memory_mb": "peak memory",
}
LOWER_IS_BETTER |= {"kv_bytes_per_token": "cache of a token", "forward_tokens": "work in tokens"}
HIGHER_IS_BETTER = {"tokens_per_s": "tokens/s"}


def spread_of(row, key):
    """Lowest and highest of the runs, where the row tells, else the figure itself twice."""
    return row.get(f"{key}_spread") or (row[key], row[key])


def overlap(one, other, key):
    """Whether the runs of two rows spread so far that this figure does not tell them apart."""
    (low_a, high_a), (low_b, high_b) = spread_of(one, key), spread_of(other, key)
    return low_a <= high_b and low_b <= high_a


def compare(row, other, key="tpot_ms"):
    """How a figure of one row stands to that of another row: better, worse, or equal within their spread."""
    name = LOWER_IS_BETTER.get(key) or HIGHER_IS_BETTER.get(key) or key
    a, b, one, two = row.get(key), other.get(key), row["method"], other["method"]
    if a is None or b is None:
        absent = one if a is None else two
        return Reason(f"{absent} has no {name} to compare.")
    runs = "" if row.get(f"{key}_spread") is None or len({*spread_of(row, key)}) > 1 else ", one run"
    numbers = f"({number(a)} against {number(b)}{runs})"
    if a == b or overlap(row, other, key):
        return Reason(f"{name} of {one} equals that of {two} within the spread of the runs {numbers}.")
    factor = f"{max(a, b) / min(a, b):.2f} times" if min(a, b) > 0 else "infinitely"
    word = "lower" if a < b else "higher"
    judged = {True: "", False: ": it loses here"}[(a < b) == (key not in HIGHER_IS_BETTER)]
    return Reason(f"{name} of {one} is {factor} {word} than that of {two} {numbers}{judged}.")


def number(value):
    """A figure in three to four digits."""
    if isinstance(value, int) or value == int(value) and abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def loss(row, n_windows=None):
    """What a row's loss is against the baseline's, in standard errors of the pairs of windows."""
    difference, se = row.get("loss_difference"), row.get("loss_difference_se")
    if difference is None:
        return Reason(f"The loss of {row['method']} was not measured.")
    figures = f"{difference:+.4f} +- {se:.4f} nats"
    if abs(difference) <= 2 * se or abs(difference) < 5e-5:
        return Reason(f"{row['method']} has the baseline's loss as far as these windows tell ({figures}).")
    word = "loses" if difference > 0 else "gains"
    return Reason(f"{row['method']} {word} against the baseline: {figures}.")


def crossover(rows, size, one, other):
    """From which size on `one` takes less time than `other`, in the rows of a sweep (times in ms).

    Sizes at which the two are within 3% count as equal, for neither.
    """
    ratios = [(row[size], row[other] / row[one]) for row in rows if row.get(one) and row.get(other)]
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
            f"{one} is faster than {other} at every {size} from {first} to {last}: "
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


def pays_back(once, saved, unit, what="uses"):
    """After how many uses something that costs `once` and saves `saved` each time has paid (same unit)."""
    if saved <= 0:
        return Reason(f"It costs {number(once)} {unit} once and saves nothing: it never pays.")
    n = max(-(-once // saved), 1)
    return Reason(
        f"It costs {number(once)} {unit} once and saves {number(saved)} each time: {n:.0f} {what} pay it."
    )


def bounds(measured, costs, ceilings):
    """What each method needs at least on this machine, what limits it, and the share that it reaches.

    Args: measured: {name: ms}; costs: {name: Cost of the same step}; ceilings: Ceilings.
    """
    parts = []
    for name, cost in costs.items():
        reading, computing = cost.n_bytes / ceilings.bytes_per_s, cost.flops / ceilings.flops_per_s
        least = 1000 * max(reading, computing)
        what = "computing" if computing > reading else "reading"
        reached = f", {100 * least / measured[name]:.0f}% reached" if measured.get(name) else ""
        parts.append(
            f"{name} {number(cost.flops / 1e9)} GFLOP and {number(cost.n_bytes / 1e6)} MB, "
            f"at least {number(least)} ms of {what}{reached}"
        )
    machine = f"{ceilings.flops_per_s / 1e9:.0f} GFLOP/s and {ceilings.bytes_per_s / 1e9:.0f} GB/s"
    return Reason(f"At this machine's {machine} a step needs: {'; '.join(parts)}.")


def batching(one, many, n_sequences, key="tpot_ms"):
    """What a step of n_sequences sequences takes against a step of one, from the rows of the two batches."""
    a, b = one.get(key), many.get(key)
    if n_sequences == 1 or a is None or b is None:
        return Reason("There is one batch size in this run: it does not tell what a larger batch costs.")
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
