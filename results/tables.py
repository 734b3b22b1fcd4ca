"""The README's table of techniques: what is known of each without measuring, and the cells that reports fill.

gain and cost take the report of the technique's script and return at most 80 characters, all figures from it.
"""


def row(report, method):
    """The row of a method, by its whole name or its beginning."""
    rows = report["rows"]
    exact = [r for r in rows if r["method"] == method]
    return (exact or [r for r in rows if r["method"].startswith(method)])[0]


def sweep(report, title):
    """The rows of a further table, by the beginning of its title."""
    return next(rows for name, rows in report["sweeps"].items() if name.startswith(title))


def times(report, one, other, key="tpot_ms"):
    """How many times lower a figure of `one` is than that of `other`, or higher for tokens/s."""
    a, b = row(report, one)[key], row(report, other)[key]
    return a / b if key == "tokens_per_s" else b / a


def cells(entry, reports):
    """(gain, cost) of an entry from its report, "-" where there is none yet."""
    report = reports.get(entry["script"].rpartition("/")[2].removesuffix(".py").removeprefix("main_"))
    if report is None:
        return "-", "-"
    found = tuple(entry[key](report) for key in ("gain", "cost"))
    if too_long := [cell for cell in found if len(cell) > 80]:
        raise ValueError(f"{entry['technique']}: a cell has {len(too_long[0])} characters: {too_long[0]}")
    return found


TABLE = [
    {
        "technique": "KV cache",
        "script": "main_kvcache.py",
        "deeper": ["more/kvcache_compiled.py", "more/kvcache_graph.py", "more/kvcache_past_window.py"],
        "exact": "exact",
        "training": "no",
        "reduces": "work of a step",
        "gain": lambda r: (
            f"TPOT {times(r, 'dynamic, batch 1', 'no cache, batch 1'):.1f} times lower, "
            f"batch 8 {times(r, 'dynamic, batch 8', 'no cache, batch 8'):.1f}"
        ),
        "cost": lambda r: f"{row(r, 'dynamic')['kv_bytes_per_token']:,.0f} bytes a token of every sequence",
    },
]
