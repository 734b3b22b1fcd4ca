"""What the scripts share about asking and telling: options, the cost model, the report.

A script begins with options() and runs inside script(), which turns bad input into one line and exit
status 2. The cost model counts the operations and bytes of a step and measures what this machine can
do at most, so that a report can say why a figure is what it is.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections import namedtuple
from pathlib import Path
from textwrap import fill

import torch

from inference_utils import (
    GPTLITE_CKPT_PATH,
    ROOT,
    TOLERANCE,
    Timer,
    first_difference,
    first_wrong_choice,
    n_parameters,
    peak_memory_mb,
    pick_device,
    write_atomically,
)

# ---- Options ----


LARGEST_INT = 2**31 - 1  # of sizes and steps: beyond it their products overflow
LARGEST_COUNT = 2**43 - 1  # of seeds as well: seed * 1_000_003 + step stays below 2**63


def positive_int(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a number from 1 up")
    if value > LARGEST_INT:
        raise argparse.ArgumentTypeError(f"{value} is too large: at most {LARGEST_INT}")
    return value


def count(text):
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    if value > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{value} is too large: at most {LARGEST_COUNT}")
    return value


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default to an option's help where there is one to tell, and calls a number N."""

    def _get_help_string(self, action):
        default = action.default
        if default is None or default is False or default is argparse.SUPPRESS or "default" in action.help:
            return action.help
        if isinstance(default, Path) and default.is_relative_to(ROOT):
            default = default.relative_to(ROOT)
        if isinstance(default, list):
            default = " ".join(map(str, default)) or "none"
        return f"{action.help} (default: {str(default).replace('%', '%%')})"

    def _get_default_metavar_for_optional(self, action):
        is_text = action.type in (None, str, Path)
        return super()._get_default_metavar_for_optional(action) if is_text else "N"


def options(
    doc,
    repeats=5,
    checkpoint=GPTLITE_CKPT_PATH,
    checkpoint_help="trained weights",
    plot=True,
    dtype=True,
    data=True,
    weights=True,
):
    """An argument parser with the options that every script has.

    Args: doc: the script's docstring, which becomes its help page; repeats, checkpoint: defaults;
        plot=False leaves out --plot in a script without a figure, dtype=False leaves out --dtype in one
        that does not change the type of the weights, repeats=None leaves out --repeats in one that times
        nothing twice, data=False leaves out --data in one that reads no text, weights=False --checkpoint in
        one without trained weights: such an option is refused then, and args has its default all the same.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=HelpFormatter)
    parser.set_defaults(dtype="float32", plot=None, repeats=1, data=None, checkpoint=checkpoint)
    add = parser.add_argument_group("common options").add_argument
    add("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="where to run")
    if dtype:
        types = ["float32", "bfloat16", "float16"]
        add("--dtype", choices=types, default="float32", help="type of the weights")
    add("--seed", type=count, default=42, help="seed of everything that is drawn")
    if weights:
        add("--checkpoint", metavar="FILE", type=Path, default=checkpoint, help=checkpoint_help)
    if data:
        add(
            "--data",
            metavar="FILE",
            type=Path,
            help="own text (UTF-8: newline, printable ASCII), not the plays",
        )
    add("--json", metavar="FILE", help="write the report as JSON; - for the last line of the output")
    if plot:
        add("--plot", metavar="FILE.png", type=Path, help="write the figure")
    add("--quick", action="store_true", help="smallest run that still exercises and checks everything")
    if repeats is not None:
        add("--repeats", type=positive_int, default=repeats, help="timed runs of each method")
    return parser


def check_writable(path, suffixes=()):
    """Raises ValueError or OSError now, before any work, if a file at path could not be written."""
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{path}: the name must end in {' or '.join(suffixes)}")
    if path.exists() and not path.is_file():  # a device would be replaced by a file
        raise ValueError(f"{path} is a folder or a device; a file is needed")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.absolute().parent}")
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name + ".", suffix=".probe"):
        pass  # a new name: no file that is there is touched


OUT_OF_MEMORY = ("can't allocate memory", "Storage size calculation overflowed", "multiplication overflow")


@contextlib.contextmanager
def script(parser):
    """with script(parser) as args: the whole run of a script.

    Parses and checks the options, seeds, and gives args.device and args.dtype as torch objects. Inside,
    bad input (ValueError, OSError, a missing package, too little memory) becomes one line on standard
    error and exit status 2, Ctrl-C one line and 130; a reader that goes away (head) ends the run quietly.
    """
    name = Path(sys.argv[0]).name
    for stream in ("stdout", "stderr"):  # None where the shell has closed it: >&-
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w"))
    if hasattr(sys.stdout, "reconfigure"):  # a locale without UTF-8 must not stop a report
        sys.stdout.reconfigure(errors="backslashreplace")
    args = parser.parse_args()
    try:
        args.device = pick_device(args.device)
        args.dtype = getattr(torch, args.dtype)
        if args.json is not None and args.json != "-":
            check_writable(args.json)
        if args.plot is not None:
            check_writable(args.plot, (".png", ".pdf", ".svg"))
            if importlib.util.find_spec("matplotlib") is None:  # now, and not after the work
                raise ModuleNotFoundError("--plot needs matplotlib: python -m pip install matplotlib")
        torch.manual_seed(args.seed)
        yield args
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"\n{name}: stopped", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, ModuleNotFoundError, MemoryError, torch.OutOfMemoryError) as error:
        line = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            line = f"out of memory, try smaller sizes or --device cpu ({line[:120]})"
        print(f"{name}: {line}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:  # the CPU's allocator has no exception class of its own
        if not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        print(f"{name}: out of memory, try smaller sizes", file=sys.stderr)
        sys.exit(2)


# ---- Cost model ----

Cost = namedtuple("Cost", "flops n_bytes")
Ceilings = namedtuple("Ceilings", "flops_per_s bytes_per_s")  # None where not known


def forward_cost(p, vocab_size, batch_size, n_new, n_past, dtype, weights=True):
    """Operations and bytes of one forward pass over n_new tokens a sequence behind n_past cached ones.

    Args: p: parameters of the model (n_layers, d_model); dtype: of weights and cache.
    Returns: Cost. Per token and layer 8 d^2 for the projections, 16 d^2 for the MLP, 4 n d for attention
        over n keys, and 2 d V for the head; the weights are read once, each sequence's keys and values
        once (read if they were cached, written if they are new). Activations are left out.
    """
    d, L = p.d_model, p.n_layers
    size = torch.finfo(dtype).bits // 8
    tokens = batch_size * n_new
    keys_seen = batch_size * sum(range(n_past + 1, n_past + n_new + 1))  # over all queries
    flops = L * (24 * d * d * tokens + 4 * d * keys_seen) + 2 * d * vocab_size * tokens
    n_weights = L * (12 * d * d + 13 * d) + d * vocab_size + vocab_size + 2 * d
    cache = 2 * L * d * batch_size * (n_past + n_new)
    return Cost(flops, size * (n_weights * weights + cache))


def measure_ceilings(device, dtype=torch.float32, working_set=50_000_000, seconds=0.3):
    """What this machine reaches at best: a matrix product, and reading working_set bytes.

    Returns: Ceilings(operations per second, bytes per second), the best of several runs and, for the
        product, of a large one and one of the model's size (which of them is faster differs by machine).
    """
    # as int32 words: the largest of integers is limited by reading on every processor
    buffer = torch.ones(working_set // 4, dtype=torch.int32, device=device)

    def best_seconds(function):
        function()
        stop, fastest = time.perf_counter() + seconds, float("inf")
        while time.perf_counter() < stop:
            with Timer(device) as timer:
                function()
            fastest = min(fastest, timer.seconds)
        return fastest

    flops_per_s = 0
    for n, k, m in ((1024, 1536, 1536), (256, 384, 1536)):
        a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((n, k), (k, m)))
        flops_per_s = max(flops_per_s, 2 * n * k * m / best_seconds(lambda a=a, b=b: a @ b))
    return Ceilings(flops_per_s, buffer.numel() * 4 / best_seconds(lambda: buffer.max()))


def lower_bound_ms(cost, ceilings):
    """The time below which no program can be: the slower of computing and reading. None if unknown."""
    if None in ceilings:
        return None
    return 1000 * max(cost.flops / ceilings.flops_per_s, cost.n_bytes / ceilings.bytes_per_s)


def share_of(bound_ms, measured_ms):
    """'45%': the bound as a share of what was measured; '-' where the bound is not known."""
    return "-" if bound_ms is None or not measured_ms else f"{100 * bound_ms / measured_ms:.0f}%"


# ---- Report ----

WIDTH = 118  # columns of a page of text
SIGNIFICANT = "{:.4g}"  # numbers of a further table

COLUMNS = {  # key of a row: (heading, format)
    "ttft_ms": ("TTFT ms", "{:.1f}"),
    "tpot_ms": ("TPOT ms", "{:.2f}"),
    "tpot_p99_ms": ("p99 ms", "{:.2f}"),
    "tokens_per_s": ("tokens/s", "{:.0f}"),
    "speedup": ("speed-up", "{:.2f}x"),
    "peak_memory_mb": ("peak MB", "{:.1f}"),
    "kv_bytes_per_token": ("KV B/token", "{:.0f}"),
    "forward_tokens": ("fwd tokens", "{}"),
    "valid_loss": ("valid loss", "{:.4f}"),
    "n_parameters": ("parameters", "{:,}"),
    "same_output": ("same output", "{}"),
}
ALWAYS = [key for key in COLUMNS if key != "speedup"]


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def format_table(headings, rows):
    """Plain text: the first column flush left, the others flush right; headings in two lines if need be."""

    def column_widths(head):
        return [max(len(row[i]) for row in [*head, *rows]) for i in range(len(headings))]

    head = [headings]
    if sum(column_widths(head)) + 2 * len(headings) - 2 > WIDTH:
        head = [[heading.rpartition(" ")[part] for heading in headings] for part in (0, 2)]
    widths = column_widths(head)
    lines = []
    for row in [*head, *rows]:
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *rest]).rstrip())
    lines.insert(len(head), "-" * max(len(line) for line in lines))
    return "\n".join(lines)


def cell(value, form="{}"):
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and form == SIGNIFICANT:
        return str(value)
    return value if isinstance(value, str) else form.format(value)


def without_nan(value):
    """The same value for JSON, which knows neither NaN nor infinity: they become None."""
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Report:
    """Prints what runs, collects what it measured, prints that as one page of text, and writes it as JSON.

    report.row(...) per method (baseline first), report.sweep(...) for a further table, report.check(...)
    for every equality, report.why(...) for the explanation, then report.finish().
    """

    def __init__(self, args, technique, model, extra_columns=None, **config):
        """extra_columns: {key of a row: (heading, format)} of this technique; config: what ran."""
        self.args = args
        self.columns = COLUMNS | (extra_columns or {})
        self.data = {
            "script": Path(sys.argv[0]).name,
            "technique": technique,
            "config": {
                "device": args.device.type,
                "device_name": device_name(args.device),
                "threads": torch.get_num_threads(),
                "dtype": str(args.dtype).removeprefix("torch."),
                "seed": args.seed,
                "repeats": args.repeats,
                "quick": args.quick,
                "n_parameters": n_parameters(model),
                "checkpoint": args.checkpoint.name,
                "versions": {"python": platform.python_version(), "torch": torch.__version__},
                **config,
            },
            "rows": [],
            "sweeps": {},
            "checks": {},
            "why": [],
        }
        with contextlib.suppress(BrokenPipeError):  # a reader that goes away ends the run, but at its end
            print(self.header(), flush=True)  # now: the measuring may take minutes

    def row(self, method, measurement=None, baseline=False, **figures):
        """One row of the table: the figures of a Measurement and others by name; absent ones are None.

        The speed-up is that of tokens/s over the last baseline row before it.
        """
        row = {"method": method, "baseline": baseline} | dict.fromkeys(ALWAYS)
        if measurement is not None:
            keys = ("ttft_ms", "tpot_ms", "tpot_p99_ms", "tokens_per_s", "tokens_per_s_spread")
            row |= {key: getattr(measurement, key) for key in (*keys, "forward_tokens", "n_steps")}
        row |= figures
        if row["same_output"] == "approximate":
            row |= {"same_output": None, "approximate": True}
        if row["same_output"] is False:  # no speed for what did not match
            timed = ("ttft_ms", "tpot_ms", "tpot_p99_ms", "tokens_per_s", "tokens_per_s_spread")
            row |= dict.fromkeys(timed)
        nearest = next((r for r in reversed([*self.data["rows"], row]) if r["baseline"]), None)
        if nearest and nearest["tokens_per_s"] and row["tokens_per_s"]:
            row["speedup"] = row["tokens_per_s"] / nearest["tokens_per_s"]
        self.data["rows"].append(row)

    def method_rows(self, methods, results, prompt, logits, suffix="", figures=None):
        """A row and a check for each of several methods that must generate the same tokens.

        Args: methods, results: what measure() took and gave, the baseline first; outputs are prompt and
            generated tokens [B, T + n]; prompt [B, T]; logits [B, n, V]: those that chose the baseline's
            tokens, as far as equality is promised: where that is not the end, the names of the checks
            say so and the output is called approximate; suffix: added to the names; figures: {method:
            {key: figure}} that come from elsewhere. Two best logits that rounding may swap are a tie;
            behind one each token must be what the baseline's model would choose after these very tokens.
        """
        prompt_len, baseline = prompt.shape[1], methods[0]
        n_generated = results[baseline.name].output.shape[1] - prompt_len
        n = min(logits.shape[1], n_generated)  # tokens that are compared
        compared = "same tokens" if n == n_generated else f"same first {n} of {n_generated} tokens"
        margin = max(1e-3, 2 * TOLERANCE[logits.dtype])  # closer logits are a tie to this type
        reference = results[baseline.name].output[:, prompt_len : prompt_len + n]  # [B, n]
        for method in methods:
            output = results[method.name].output[:, : prompt_len + n]  # [B, T + n]
            generated = output[:, prompt_len:]  # [B, n]
            first = first_difference(generated, reference, logits[:, :n], margin)
            if first is None:
                same = (generated == reference).cumprod(dim=1).sum(dim=1)  # [B]: tokens before the tie
                if (same + 1 < n).any():
                    first = first_wrong_choice(baseline.models[0], output, same + 1, prompt_len, margin)
            same_output = first is None
            if same_output and n < n_generated and method is not baseline:
                same_output = "approximate"
            self.row(
                method.name + suffix,
                results[method.name],
                baseline=method is baseline,
                peak_memory_mb=peak_memory_mb(method.run, *method.models, inputs=[prompt, *method.buffers]),
                n_parameters=n_parameters(method.models[0]),
                same_output=same_output,
                first_difference=first,
                **(figures or {}).get(method.name, {}),
            )
            if method is not baseline:
                self.check(f"{method.name}{suffix}: {compared} as {baseline.name}", first is None)

    def sweep(self, title, rows):
        """A further table: rows are dictionaries with the same keys, which become the headings."""
        self.data["sweeps"][title] = rows

    def check(self, name, passed):
        self.data["checks"][name] = bool(passed)
        return bool(passed)

    def why(self, line):
        self.data["why"].append(line)

    def header(self):
        config = self.data["config"]
        parts = [f"{self.data['script']}: {self.data['technique']}"]
        parts.append(f"GPTlite {config['n_parameters'] / 1e6:.1f} M parameters, {config['checkpoint']}")
        parts.append(f"{config['device_name']} ({config['device']}, {config['threads']} threads)")
        shown = {"dtype": "", "batch_size": "batch ", "prompt_len": "prompt ", "n_tokens": "new tokens "}
        parts.append(", ".join(f"{label}{config[key]}" for key, label in shown.items() if key in config))
        parts.append(", ".join(f"{name} {version}" for name, version in config["versions"].items()))
        return "\n".join(parts)

    def table_cell(self, row, key):
        if key == "same_output" and row.get("approximate"):
            return "approximate"
        if key == "same_output" and row[key] is False and row.get("first_difference") is not None:
            return f"no, from token {row['first_difference']}"
        return cell(row.get(key), self.columns[key][1])

    def text(self):
        blocks, rows = [], self.data["rows"]
        if rows:
            keys = [key for key in self.columns if any(self.table_cell(row, key) != "-" for row in rows)]
            if len({row["n_parameters"] for row in rows}) == 1 and "n_parameters" in keys:
                keys.remove("n_parameters")  # the header has it
            body = [[row["method"], *(self.table_cell(row, key) for key in keys)] for row in rows]
            blocks.append(format_table(["method", *(self.columns[key][0] for key in keys)], body))
        for title, sweep in self.data["sweeps"].items():
            body = [[cell(value, SIGNIFICANT) for value in row.values()] for row in sweep]
            blocks.append(f"{title}\n{format_table([str(key) for key in sweep[0]], body)}")
        if self.data["checks"]:
            lines = [
                f"  {'ok    ' if passed else 'FAILED'} {name}" for name, passed in self.data["checks"].items()
            ]
            blocks.append("\n".join(["checks:", *lines]))
        if self.data["why"]:
            lines = [
                fill(line, WIDTH, initial_indent="- ", subsequent_indent="  ") for line in self.data["why"]
            ]
            blocks.append("\n".join(["why:", *lines]))
        return "\n" + "\n\n".join(blocks)  # an empty line behind the header

    def finish(self):
        """Writes the JSON, prints the report, and ends the script with status 1 if a check is false."""
        line, full = json.dumps(without_nan(self.data), allow_nan=False), None
        if self.args.json not in (None, "-"):  # first: whoever reads the page may stop reading (head)
            try:
                write_atomically(self.args.json, lambda path: path.write_text(line + "\n"))
            except OSError as error:  # a full disk must not take the page as well
                full = error
        print(self.text(), flush=True)
        if full:
            raise full
        if self.args.json == "-":
            print(line)
        if not all(self.data["checks"].values()):
            sys.stdout.flush()
            sys.exit(1)


def new_figure(width=7.0, height=4.2):
    """A matplotlib figure and its axes, in the collection's style, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure, path):
    """Writes the figure atomically in the format that its name ends in."""
    form = Path(path).suffix.lstrip(".")
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150, format=form))


def plot_lines(path, x, lines, xlabel, ylabel, title=""):
    """Writes a figure with both axes logarithmic: a line for each of {label: values}, ticks at every x."""
    figure, axes = new_figure()
    for label, y in lines.items():
        axes.plot(x, y, marker="o", label=label)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title, xscale="log", yscale="log")
    axes.set_xticks(x, x, minor=False)
    axes.tick_params(axis="x", which="minor", labelbottom=False)
    axes.legend()
    save_figure(figure, path)
