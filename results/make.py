"""Makes everything in this folder again: reports as JSON, figures, and the tables of the README.

Run: python results/make.py [NAME...]      (all that is missing or older than its script or the weights)
     python results/make.py --render       (only the README's tables, from the reports that are there)
     python results/make.py --quick DIR    (tiny runs into another folder, and a README rendered from them)

A run that was interrupted goes on where it stopped: a report that its script, its options and the weights
still have as they were is not made again, unless its NAME is given. At the end it names what changed by more
than the spread of the runs, and reports that are older than their script.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "results"))

from tables import TABLE, cells  # noqa: E402

from inference_plot import draw_lines, new_figure, save_figure  # noqa: E402
from inference_report import code_sha256, sha256_of  # noqa: E402

SMALL_FIGURE = "![Small models: loss against speed, by how they were made](results/figures/small_models.png)"
RUNS = {  # what differs from a script without options; a name of its own where a script runs twice
    "kvcache": ["main_kvcache.py", "--peers"],
    "kvcache_compiled": ["more/kvcache_compiled.py", "--peers"],
    "continuous_batching": ["main_continuous_batching.py", "--peers"],
    "benchmark": ["main_benchmark.py", "--peers"],
    "quest": ["main_quest.py", "--budgets", "16", "32", "64"],
    "speculative_lookup": ["more/speculative_lookup.py", "--peers"],
    "speculative_decoding": ["main_speculative_decoding.py", "--peers"],
    "distillation_long": ["main_distillation.py", "--steps", "8000", "--alpha", "0"],
    "pruning_long": ["main_pruning.py", "--steps", "500"],
}
LONG = {"distillation_long", "pruning_long"}  # hours: made only when they are named
NOT_HERE = {"training", "kvcache_graph", "flash_attention_triton"}  # hours of training, or for CUDA
SMALL = re.compile(
    r"distillation|pruning(_long|_search|_learned_masks)?$"
)  # reports that end in small models


def all_runs():
    """{name: [script, options...]} of every script, in the order of the table."""
    runs = {}
    for script in [*sorted(ROOT.glob("main_*.py")), *sorted(ROOT.glob("more/[a-z]*.py"))]:
        name = script.stem.removeprefix("main_")
        runs[name] = [script.relative_to(ROOT).as_posix()]
    return runs | RUNS


def machine_of(config):
    """The folder of a machine's reports, from what a report says of it."""
    words = config["device_name"] + ("" if config["device"] == "cuda" else f" {config['threads']} threads")
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def is_fresh(report, command):
    """Whether a report was made by the script as it is, with these options, on the weights as they are."""
    config = report["config"]
    checkpoint = ROOT / "checkpoints" / config["checkpoint"]
    weights = config["weights_sha256"] in (None, sha256_of(checkpoint))
    return (
        weights and config["code_sha256"] == code_sha256(ROOT / command[0]) and report["command"] == command
    )


def run(name, command, folder, figures, extra=()):
    """Runs a script; its report with the command in it, or None where it failed or does not run here."""
    scratch = folder / f"{name}.part.json"
    page = subprocess.run(
        [sys.executable, ROOT / command[0], "--help"], capture_output=True, text=True
    ).stdout
    words = [sys.executable, str(ROOT / command[0]), *command[1:], *extra, "--json", str(scratch)]
    words += ["--plot", str(figures / f"{name}.png")] if "--plot" in page else []
    started = time.monotonic()
    result = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    seconds = time.monotonic() - started
    print(f"{name}: {seconds:.0f} s, status {result.returncode}", flush=True)
    if result.returncode != 0 or not scratch.is_file():
        print("  " + (result.stderr.strip().splitlines() or ["a check is false"])[-1], flush=True)
        print("\n".join(f"  {line}" for line in result.stdout.splitlines() if "FAILED" in line), flush=True)
        scratch.unlink(missing_ok=True)
        return None
    report = json.loads(scratch.read_text()) | {"command": [*command, *extra], "seconds": round(seconds)}
    scratch.unlink()
    return report, result.stdout


def write(report, name, results):
    """Writes a report to its machine's folder; the report that was there before, or None."""
    path = results / machine_of(report["config"]) / f"{name}.json"
    before = json.loads(path.read_text()) if path.is_file() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(temporary, path)
    return before


def changes(name, before, after):
    """Lines on figures of the same rows that moved by more than the spread of both runs."""
    lines, old = [], {row["method"]: row for row in before["rows"]}
    for row in after["rows"]:
        was = old.get(row["method"], {})
        for key in ("ttft_ms", "tpot_ms", "tokens_per_s", "valid_loss"):
            a, b = was.get(key), row.get(key)
            if a is None or b is None:
                continue
            low, high = row.get(f"{key}_spread") or (b, b)
            low_before, high_before = was.get(f"{key}_spread") or (a, a)
            if (low > high_before or high < low_before) and abs(a - b) > 1e-4:
                lines.append(f"{name}, {row['method']}: {key} {a:.4g} -> {b:.4g}")
    return lines


def machines_of(results):
    """The folders of machines, the one with most reports first: the README shows its figures."""
    folders = {path.parent for path in results.glob("*/*.json")}
    return sorted(
        (f.name for f in folders), key=lambda name: (-len([*(results / name).glob("*.json")]), name)
    )


def load(results, machines):
    """{name: report}: of the first machine, and of the next ones what those before them do not have."""
    reports = {}
    for machine in machines:
        for path in sorted((results / machine).glob("*.json")):
            reports.setdefault(path.stem, json.loads(path.read_text()))
    return reports


def small_models(reports):
    """{report: [(method, speed-up, loss), ...]} of all models with fewer parameters than the whole one.

    Speeds compare only within a report, so each is a multiple of the whole model's in the same run. Models
    with as many parameters have one shape, and so the median of their speeds, or are left out without any.
    """
    chosen = {name: report for name, report in reports.items() if SMALL.match(name)}
    speeds, found = {}, {}
    for row in (row for report in chosen.values() for row in report["rows"]):
        if row.get("speedup"):
            speeds.setdefault(row["n_parameters"], []).append(row["speedup"])
    for name, report in chosen.items():
        for row in report["rows"]:
            size, loss = row["n_parameters"], row["valid_loss"]
            if size in speeds and size < report["config"]["n_parameters"] and loss:
                found.setdefault(name, []).append((row["method"], median(speeds[size]), loss))
    return found


def draw_small_models(models, path):
    """The figure of small_models: a colour for each script, names for models that no other one beats."""
    figure, axes = new_figure()
    for name, points in models.items():
        axes.plot([speed for _, speed, _ in points], [loss for *_, loss in points], "o", label=name)
    every = [point for points in models.values() for point in points]
    for method, speed, loss in every:
        if not any(a >= speed and b <= loss and (a, b) != (speed, loss) for _, a, b in every):
            axes.annotate(method, (speed, loss), (4, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel="tokens/s, times the whole model's in the same run", ylabel="validation loss (nats)")
    axes.legend(fontsize=7)
    save_figure(figure, path)


def link(script):
    return f"[{Path(script).stem.removeprefix('main_')}]({script})"


def render(text, reports, samples):
    """The README with its tables and samples as the reports have them, between the markers."""
    lines = [
        "| technique | exact | training | reduces | gain here | cost here |",
        "|---|---|---|---|---|---|",
    ]
    names = machine_names(reports)
    for entry in TABLE:
        scripts = f"[{entry['technique']}]({entry['script']})"
        deeper = ", ".join(link(script) for script in entry["deeper"])
        gain, cost = cells(entry, reports)
        report = reports.get(Path(entry["script"]).stem.removeprefix("main_"))
        gain += " " + "*" * names.index(name_of(report)) if report and name_of(report) != names[0] else ""
        row = [scripts + (f"<br>{deeper}" if deeper else ""), entry["exact"], entry["training"]]
        lines.append("| " + " | ".join([*row, entry["reduces"], gain, cost]) + " |")
    parts = {"techniques": "\n".join(lines), "machine": machine_line(reports), **samples}
    parts["small_models"] = SMALL_FIGURE if small_models(reports) else "No small model is measured yet."
    for name, part in parts.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text = re.sub(pattern, lambda m, part=part: f"{m[1]}{part}\n{m[2]}", text, flags=re.S)
    return text


def name_of(report):
    """A machine as the README calls it."""
    config = report["config"]
    threads = "" if config["device"] == "cuda" else f", {config['threads']} threads"
    return f"{config['device_name']}{threads}, {config['dtype']}"


def machine_names(reports):
    """Names of the machines that reports were made on, the one with most of them first."""
    count = Counter(map(name_of, reports.values()))
    return sorted(count, key=lambda name: (-count[name], name))


def machine_line(reports):
    names = machine_names(reports)
    others = "".join(f"; rows with {'*' * i}: {name}" for i, name in enumerate(names[1:], 1))
    gpu = any(report["config"]["device"] == "cuda" for report in reports.values())
    line = f"Measured on: {names[0] if names else 'no machine yet'}{others}."
    return line if gpu else f"{line} No figure here was made on a GPU."


FAMILY = ("kv_eviction", "quest", "moba", "dsa", "nsa")  # reports with a table of loss against budget


def family_lines(reports):
    """{rule: (keys read, rise of the loss)} of all rules of sparse attention, from reports that are there.

    Only of reports on the same weights and as many windows, which are the same then: the largest such group.
    A rule that several reports have is the first one's.
    """
    tables = []  # (what must be the same, rows)
    for report in (reports[name] for name in FAMILY if name in reports):
        for title, rows in report["sweeps"].items():
            if title.startswith("Loss against budget: "):
                tables.append(((report["config"]["weights_sha256"], title.split()[3]), rows))
    lines = {}
    if tables:
        same = Counter(key for key, _ in tables).most_common(1)[0][0]
        for rows in (rows for key, rows in tables if key == same):
            new = {}
            for row in rows:
                new.setdefault(row["rule"], []).append((row["keys read"], row["difference"]))
            lines = new | lines
    return {rule: tuple(zip(*sorted(points), strict=True)) for rule, points in lines.items()}


def draw_family(reports, path):
    """Draws loss against keys read for all rules of sparse attention; nothing where no report has it."""
    if not (lines := family_lines(reports)):
        return
    figure, axes = new_figure(8.0, 5.0)
    what = "mean number of keys that a query reads", "rise of the loss (nats)", "Sparse attention, one model"
    draw_lines(axes, lines, *what, log="x")
    axes.set_ylim(top=min(axes.get_ylim()[1], 0.5))  # beyond it a model is of no use, and hides the others
    axes.legend(fontsize=7, ncols=2)
    save_figure(figure, path)


def samples_of(folder):
    """What the README shows of real output: {marker: fenced text}, from the pages that runs printed."""
    samples = {}
    for path in sorted(folder.glob("*.txt")):
        samples[path.stem] = f"```\n{path.read_text().rstrip()}\n```"
    return samples


def keep_samples(page, folder, extra):
    """Keeps what the README shows of the first command's page, and a text of the model."""
    (folder / "output.txt").write_text(page.strip().partition("\n\nchecks:")[0] + "\n")
    command = [sys.executable, str(ROOT / "main_kvcache.py"), "--prompt", "ROMEO:\n", "--batch-size", "1"]
    command += ["--n-tokens", "220", "--repeats", "1", *extra]
    written = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    lines = written.partition("---- dynamic ----\n")[2].splitlines()
    table = next((i for i, line in enumerate(lines) if "TTFT" in line), len(lines))
    (folder / "text.txt").write_text("\n".join(lines[:table]).strip() + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="reports to make again in any case")
    parser.add_argument("--render", action="store_true", help="run nothing, only render the README")
    parser.add_argument("--quick", metavar="DIR", type=Path, help="tiny runs into this folder")
    args = parser.parse_args()
    runs, results = all_runs(), args.quick or ROOT / "results"
    if unknown := [name for name in args.names if name not in runs]:
        parser.error(f"no report {unknown[0]}; there are {', '.join(runs)}")
    results.mkdir(parents=True, exist_ok=True)
    figures, moved, failed = results / "figures", [], []
    figures.mkdir(exist_ok=True)
    there = {path.stem: path for path in results.glob("*/*.json")}
    wanted = {name: runs[name] for name in args.names} if args.names else runs
    for name, command in {} if args.render else wanted.items():
        extra = ["--quick"] if args.quick else []
        if name not in args.names:
            known = json.loads(there[name].read_text()) if name in there else None
            if (
                name in LONG | NOT_HERE
                or known
                and "command" in known
                and is_fresh(known, [*command, *extra])
            ):
                continue
        made = run(name, command, results, figures, extra)
        if made is None:
            failed.append(name)
            continue
        report, page = made
        before = write(report, name, results)
        moved += changes(name, before, report) if before else []
        if name == "kvcache":
            keep_samples(page, results / machine_of(report["config"]), extra)
    readme = ROOT / "README.md"
    if machines := machines_of(results):
        reports = load(results, machines)
        draw_family(reports, figures / "sparse_attention.png")
        target = results / "README.md" if args.quick else readme
        if models := small_models(reports):
            draw_small_models(models, figures / "small_models.png")
        target.write_text(render(readme.read_text(), reports, samples_of(results / machines[0])))
        old = [n for n, r in reports.items() if n in runs and not is_fresh(r, r.get("command", runs[n]))]
        if old and not args.quick:
            print(f"older than their script, options or weights: {', '.join(old)}")
    if moved:
        print("changed by more than the spread:\n  " + "\n  ".join(moved))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
