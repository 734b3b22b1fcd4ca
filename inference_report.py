"""The harness of every script: loading by the options, methods side by side, and the report.

A script begins with options() and runs inside script(), which turns bad input into one line and exit
status 2 (inference_options.py). load_text() and load_models() load what the options name; Report.compare()
does the same work with several methods and adds a row and a check for each; Report.time_sweep() times
functions over a size. The cost model is in inference_cost.py, the words of an explanation in
inference_words.py. A script finds all of it here.
"""

import ast
import contextlib
import hashlib
import json
import math
import platform
import sys
from functools import partial
from pathlib import Path
from textwrap import fill

import torch

import inference_words as words
from data.shakespeare import check_length, get_shakespeare_data
from inference_cost import (  # noqa: F401 (a script finds the cost model here as well)
    Ceilings,
    Cost,
    forward_cost,
    limit_of,
    lower_bound_ms,
    measure_ceilings,
    share_of,
    step_cost,
)
from inference_options import (  # noqa: F401
    SIZES,
    check_writable,
    count,
    options,
    parse,
    positive,
    positive_int,
    script,
    share,
)
from inference_plot import draw_dots, draw_lines, draw_points, new_figure, save_figure
from inference_utils import (
    ROOT,
    TOLERANCE,
    TimedMethod,
    alternating_ms,
    cache_tensors,
    check_room,
    first_difference,
    first_of,
    first_wrong_choice,
    largest_difference,
    load_checkpoint,
    loss_difference,
    measure,
    model_from,
    n_parameters,
    peak_memory_mb,
    sample_prompts,
    tie_margin,
    window_losses,
    write_atomically,
)
from linear_packed import pack_linears

# ---- Loading ----


class Text:
    """The text by the options: vocab_size, train and valid token ids [N], encode(), decode()."""

    def __init__(self, path, device):
        self.vocab_size, self.train, self.valid, self.encode, self.decode = get_shakespeare_data(path)
        self.device = device

    def prompts(self, n_prompts, prompt_len, part="valid"):
        """Prompts cut at even distances, the same at every call: [n_prompts, prompt_len] on the device.

        Raises ValueError where so many could not be run in the memory that is free.
        """
        check_room(n_prompts * prompt_len, self.device)
        return sample_prompts(getattr(self, part), n_prompts, prompt_len).to(self.device)

    def prompt(self, text):
        """A text as one prompt [1, T] on the device. Raises ValueError for an empty or unknown one."""
        if not text:
            raise ValueError("the prompt is empty: it needs at least one character")
        return torch.tensor([self.encode(text)], dtype=torch.int64, device=self.device)


def load_text(args):
    """The text that --data names, else the plays."""
    return Text(args.data, args.device)


def build(args, state, model_class, packed=True, source=None, **kwargs):
    """A model with these weights, by --device and --dtype, ready to be measured.

    Args: state: a state dictionary, of the full or the distilled size; packed: False keeps ordinary linear
        layers, which training and compiling need; kwargs: further arguments of the constructor.
    Raises ValueError for weights that do not fit.
    """
    model = model_from(state, model_class, 96, source or str(args.checkpoint), **kwargs)
    model = model.to(args.device, args.dtype)
    return pack_linears(model) if packed else model


def load_models(args, *model_classes, packed=True):
    """The trained weights as each of the classes, by --checkpoint, --device and --dtype (see build)."""
    state = load_checkpoint(args.checkpoint)
    return [build(args, state, model_class, packed) for model_class in model_classes]


class Method:
    """One way to do a table's work: function(model, prompts, n_tokens, *more) -> prompt and new tokens.

    Args: name: of its row; model: what the function runs; more: its further arguments (by default the
        model's context), caches among them count as memory; exact: False labels it approximate instead of
        comparing tokens; steps: modules whose forward calls are the steps (by default the model);
        loss: False where the model has no loss of its own; figures: further columns of the row.
    """

    def __init__(self, name, function, model, *more, exact=True, steps=None, loss=True, **figures):
        self.name, self.function, self.model, self.more = name, function, model, more or (model.seqlen,)
        self.exact, self.steps, self.loss, self.figures = exact, steps or [model], loss, figures
        self.buffers = cache_tensors([part for part in self.more if not isinstance(part, int)])

    def run(self, prompts, n_tokens):
        return self.function(self.model, prompts, n_tokens, *self.more)


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
    "loss_difference": ("difference", "{:+.4f}"),
    "loss_difference_se": ("+-", "{:.4f}"),
    "n_parameters": ("parameters", "{:,}"),
    "same_output": ("same output", "{}"),
}
OUTPUTS = ("json", "plot")  # options that change no figure
ALWAYS = [key for key in COLUMNS if key != "speedup"]
TIMED = ["ttft_ms", "tpot_ms", "tpot_p99_ms", "tokens_per_s"]
TIMED += ["ttft_ms_spread", "tpot_ms_spread", "tokens_per_s_spread"]


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _format_table(headings, rows):
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


def _cell(value, form="{}"):
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and form == SIGNIFICANT:
        return str(value)
    return value if isinstance(value, str) else form.format(value)


def _without_nan(value):
    """The same value for JSON, which knows neither NaN nor infinity: they become None."""
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value):
    """An option's value for JSON: files by their names, without the folders of this machine."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.name if isinstance(value, Path) else value


def sha256_of(path):
    """The hash of a file, None where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if Path(path).is_file() else None


def sources(path):
    """The files that a script's figures follow from: it and what it imports, but for the harness."""
    found, left = set(), [Path(path).resolve()]
    while left:
        file = left.pop()
        if file in found or not file.is_file() or not file.is_relative_to(ROOT):
            continue
        found.add(file)
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if not name.startswith("inference_"):
                    left += [folder / (name.replace(".", "/") + ".py") for folder in (ROOT, ROOT / "more")]
    return sorted(found)


def code_sha256(path):
    """The hash of sources(path), by which a report made by older code is told.

    Comments, docstrings and layout do not count: no figure follows from them.
    """
    digest = hashlib.sha256()
    for file in sources(path):
        tree = ast.parse(file.read_text("utf-8"))
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                and ast.get_docstring(node) is not None
            ):
                node.body = node.body[1:]
        digest.update(f"{file.relative_to(ROOT).as_posix()}\n{ast.dump(tree)}\n".encode())
    return digest.hexdigest()


def _weights_of(method):
    """The modules whose weights a method's run holds: its model, and what else its steps are."""
    return [method.model, *(module for module in method.steps if module is not method.model)]


@torch.no_grad()
def kv_bytes_per_token(model, prompts):
    """Bytes of cache that one token of one sequence adds, over all layers; None for a model without a cache.

    Counted from the tensors that the model returns beside the logits for prompts [B, T].
    """
    tokens = prompts[:1, -getattr(model, "seqlen", prompts.shape[1]) :]  # [1, T]
    output = model(tokens)
    if not isinstance(output, tuple):
        return None
    room = getattr(output[1], "window", tokens.shape[1])  # tokens that these tensors hold
    return sum(t.numel() * t.element_size() for t in cache_tensors(output[1])) / room


class Report:
    """Prints what runs, measures, collects, prints one page of text, and writes it as JSON.

    compare() for methods that do the same work, time_sweep() for a size, check() for every equality,
    why() for the explanation, plot_*() for the figure, then finish().
    """

    def __init__(self, args, technique, model, columns=None, hide=(), text=None, **config):
        """columns: {key of a row: (heading, format)} of this technique; hide: keys of columns without news
        here; text: whose validation part the losses are measured on; config: further parameters to show."""
        self.args, self.valid = args, None if text is None else text.valid
        self.columns = {k: v for k, v in (COLUMNS | (columns or {})).items() if k not in hide}
        self.losses, self.measured, self.panels, self._ceilings = {}, {}, [], None
        if text is not None:  # now, and not after the timing
            check_length(text.valid, model.seqlen)
        sizes = {key: getattr(args, key) for key in SIZES if getattr(args, key, None) is not None}
        config = sizes | config
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
                "n_windows": args.n_windows,
                "n_parameters": n_parameters(model),
                "checkpoint": args.checkpoint.name,
                "weights_sha256": sha256_of(args.checkpoint),
                "options": {k: _plain(v) for k, v in getattr(args, "given", {}).items() if k not in OUTPUTS},
                "versions": {"python": platform.python_version(), "torch": torch.__version__},
                **{key: _plain(value) for key, value in config.items()},
            },
            "rows": [],
            "sweeps": {},
            "checks": {},
            "why": [],
        }
        with contextlib.suppress(BrokenPipeError):  # a reader that goes away ends the run, but at its end
            print(self._header(), flush=True)  # now: the measuring may take minutes

    # ---- Measuring ----

    def compare(self, prompts, n_tokens, *methods, label=None):
        """Does the same work with each Method, the baseline first: times in alternation, memory, losses.

        Adds a row and a check for each. Args: prompts [B, T]; label: what is added to the names of the rows,
        by default the batch. Returns: {name: row}; self.measured[row's name] is its Measurement.
        """
        B, T = prompts.shape
        suffix = f", {f'batch {B}' if label is None else label}" if label != "" else ""
        timed = [TimedMethod(m.name, partial(m.run, prompts, n_tokens), m.steps, m.buffers) for m in methods]
        results = measure(timed, B * n_tokens, self.args.repeats)
        baseline, rows = methods[0], {}
        seqlen = baseline.model.seqlen
        first_read = max(T - seqlen, 0)  # of a prompt beyond the context its end is read
        tokens = results[baseline.name].output[:, first_read:][:, :seqlen]  # [B, S]: as far as is promised
        with torch.no_grad():
            logits = first_of(baseline.model(tokens))[:, T - 1 - first_read :]  # [B, n, V]
        for method, one in zip(methods, timed, strict=True):
            result = results[method.name]
            figures = self.loss_figures(method.model, baseline.model) if method.loss else {}
            if method.loss and "kv_bytes_per_token" not in method.figures:
                figures["kv_bytes_per_token"] = kv_bytes_per_token(method.model, prompts)
            same, first = "approximate", None
            if method.exact:
                same, first = self._same_tokens(method, results, baseline, prompts, logits, suffix)
            if "peak_memory_mb" not in method.figures:  # another program's memory is not seen
                inputs = [prompts, *one.buffers]
                figures["peak_memory_mb"] = peak_memory_mb(one.run, *_weights_of(method), inputs=inputs)
            figures |= {"n_parameters": n_parameters(method.model), "first_difference": first}
            rows[method.name] = self.row(
                method.name + suffix,
                result,
                baseline=method is baseline,
                same_output=same,
                **figures | method.figures,
            )
            self.measured[method.name + suffix] = result
        gaps = [rows[m.name]["loss_difference"] for m in methods if m.exact and m.loss]
        gaps = [abs(gap) for gap in gaps if gap is not None]
        if gaps:  # a NaN is no success
            tolerance, worst = TOLERANCE[logits.dtype], max(gaps, key=lambda gap: (gap != gap, gap))
            self.check(f"the baseline's loss{suffix} (differ by {worst:.0e})", worst <= tolerance)
        return rows

    def _same_tokens(self, method, results, baseline, prompts, logits, suffix):
        """Adds a check that a method chose the baseline's tokens; (True, False or "approximate", where not).

        Args: logits [B, n, V]: those that chose the baseline's tokens, as far as equality is promised: where
            that is not the end, the name of the check says so. Two best logits that rounding may swap are a
            tie; behind one each token must be what the baseline's model chooses after these very tokens.
        """
        T = prompts.shape[1]
        n_generated = results[baseline.name].output.shape[1] - T
        n = min(logits.shape[1], n_generated)  # tokens that are compared
        compared = "same tokens" if n == n_generated else f"same first {n} of {n_generated} tokens"
        margin = tie_margin(logits.dtype)
        reference = results[baseline.name].output[:, T : T + n]  # [B, n]
        output = results[method.name].output[:, : T + n]  # [B, T + n]
        generated = output[:, T:]  # [B, n]
        first = first_difference(generated, reference, logits[:, :n], margin)
        if first is None:
            same = (generated == reference).cumprod(dim=1).sum(dim=1)  # [B]: tokens before the tie
            if (same + 1 < n).any():
                first = first_wrong_choice(baseline.model, output, same + 1, T, margin)
        if method is not baseline:
            self.check(f"{method.name}{suffix}: {compared} as {baseline.name}", first is None)
        return (
            "approximate" if first is None and n < n_generated and method is not baseline else first is None
        ), first

    def loss_of(self, model, batch_size=16):
        """Losses of a model on the windows of every report, float64 [n_windows], measured once a model.

        batch_size: windows at once; more than 16 for a model that reads token by token.
        """
        if self.valid is None:
            raise ValueError("losses need a text: Report(..., text=text), or loss=False in a Method")
        if id(model) not in self.losses:
            self.losses[id(model)] = (
                model,
                window_losses(model, self.valid, self.args.n_windows, batch_size=batch_size),
            )
        return self.losses[id(model)][1]

    def loss_figures(self, model, baseline, batch_size=16):
        """Loss of a model, its difference to the baseline's, and that one's standard error by pairs."""
        losses = self.loss_of(model, batch_size)
        figures = {"valid_loss": losses.mean().item()}
        if model is not baseline:
            difference, se = loss_difference(losses, self.loss_of(baseline))
            figures |= {"loss_difference": difference, "loss_difference_se": se}
        return figures

    def time_sweep(self, title, size, values, functions):
        """Times functions(value), {name: function}, in alternation at each of the values, as a further table.

        Args: size: what the values are. Returns: the rows, {size: value, name: ms, ...}.
        """
        rows = []
        for value in values:
            times = alternating_ms(functions(value), self.args.repeats, self.args.device)
            rows.append({size: value, **times})
        return self.sweep(title, rows)

    def memory_sweep(self, title, size, values, functions):
        """Peak memory of functions(value), {name: functools.partial over the tensors it reads}, over a size.

        Returns: the rows, {size: value, name: MB, ...}; None where the device has no count of its memory.
        """
        rows = []
        for value in values:
            runs = functions(value)
            inputs = {n: [t for t in run.args if isinstance(t, torch.Tensor)] for n, run in runs.items()}
            rows.append({size: value} | {n: peak_memory_mb(run, inputs=inputs[n]) for n, run in runs.items()})
        return self.sweep(title, rows)

    def ceilings(self):
        """Ceilings of this machine, measured once a report."""
        if self._ceilings is None:
            seconds = 0.02 if self.args.quick else 0.3
            self._ceilings = measure_ceilings(self.args.device, self.args.dtype, seconds)
        return self._ceilings

    # ---- Collecting ----

    def row(self, method, measurement=None, baseline=False, **figures):
        """One row of the table: the figures of a Measurement and others by name; absent ones are None.

        The speed-up is that of tokens/s over the last baseline row before it.
        """
        row = {"method": method, "baseline": baseline} | dict.fromkeys(ALWAYS)
        if measurement is not None:
            row |= {key: getattr(measurement, key) for key in (*TIMED, "forward_tokens", "n_steps")}
        row |= figures
        if row["same_output"] == "approximate":
            row |= {"same_output": None, "approximate": True}
        if row["same_output"] is False:  # no speed for what did not match
            row |= dict.fromkeys(TIMED)
        nearest = next((r for r in reversed([*self.data["rows"], row]) if r["baseline"]), None)
        if nearest and nearest["tokens_per_s"] and row["tokens_per_s"]:
            row["speedup"] = row["tokens_per_s"] / nearest["tokens_per_s"]
            row["speedup_is_noise"] = row is not nearest and words.overlap(row, nearest, "tokens_per_s")
        self.data["rows"].append(row)
        return row

    def sweep(self, title, rows):
        """A further table: rows are dictionaries with the same keys, the headings. Returns them."""
        self.data["sweeps"][title] = rows
        return rows

    def check(self, name, passed):
        self.data["checks"][name] = bool(passed)
        return bool(passed)

    def check_close(self, name, actual, expected, tolerance=None):
        """Checks that two tensors agree within the rounding of their type, and tells by how much."""
        tolerance = TOLERANCE[expected.dtype] if tolerance is None else tolerance
        difference = largest_difference(actual, expected)
        return self.check(
            f"{name} (differ by {difference:.0e}, at most {tolerance:.0e})", difference <= tolerance
        )

    def why(self, reason):
        """Adds a sentence of inference_words, at most four. Raises TypeError for one that no figure chose."""
        if not isinstance(reason, words.Reason):
            raise TypeError(f"no figure chose these words: {reason}")
        if len(self.data["why"]) >= 4:
            raise ValueError("a report explains in at most four lines")
        self.data["why"].append(str(reason))

    def why_step(self, costs, rows, key="tpot_ms"):
        """Explains a step by what it needs at least. Args: costs: {method: Cost}; rows: of compare()."""
        measured = {name: rows[name].get(key) for name in costs}
        self.why(words.bounds(measured, costs, self.ceilings()))

    def plot_lines(self, lines, xlabel, ylabel, title="", log=""):
        """Adds a panel to the figure: {label: (x values, y values)}; log: logarithmic axes, as in "xy"."""
        self.panels.append(
            partial(draw_lines, lines=lines, xlabel=xlabel, ylabel=ylabel, title=title, log=log)
        )

    def plot_dots(self, dots, xlabel, ylabel, title=""):
        """Adds a panel with a cloud of dots without lines: {label: (x values, y values)}."""
        self.panels.append(partial(draw_dots, dots=dots, xlabel=xlabel, ylabel=ylabel, title=title))

    def plot_points(self, points, xlabel, ylabel, title=""):
        """Adds a panel with labelled points: {label: (x, y)}."""
        self.panels.append(partial(draw_points, points=points, xlabel=xlabel, ylabel=ylabel, title=title))

    def plot_sweep(self, title, ylabel="time (ms)", log="xy", names=None):
        """Adds a panel with the lines of a sweep: its first column along, a line for each of the others."""
        rows = self.data["sweeps"][title]
        x, *others = rows[0]
        lines = {n: ([row[x] for row in rows], [row.get(n) for row in rows]) for n in names or others}
        self.plot_lines(lines, x, ylabel, title, log)

    def plot_steps(self, names):
        """Adds a panel with the time of every step of these rows, in the order of the tokens."""
        lines = {}
        for name in names:
            steps = self.measured[name].steps_ms[1:]
            lines[name] = range(2, 2 + len(steps)), steps
        self.plot_lines(lines, "generated token", "time (ms)", "Time per token", "y")

    def _header(self):
        config = self.data["config"]
        parts = [f"{self.data['script']}: {self.data['technique']}"]
        parts.append(f"GPTlite {config['n_parameters'] / 1e6:.1f} M parameters, {config['checkpoint']}")
        parts.append(f"{config['device_name']} ({config['device']}, {config['threads']} threads)")
        shown = {"dtype": "", "batch_size": "batch ", "prompt_len": "prompt ", "n_tokens": "new tokens "}
        shown |= {"n_requests": "requests ", "longest": "tokens of a request at most "}
        parts.append(", ".join(f"{label}{config[key]}" for key, label in shown.items() if key in config))
        parts.append(", ".join(f"{name} {version}" for name, version in config["versions"].items()))
        return "\n".join(parts)

    def _table_cell(self, row, key):
        if key == "speedup" and row.get("speedup_is_noise"):
            return "equal"
        if key == "same_output" and row.get("approximate"):
            return "approximate"
        if key == "same_output" and row[key] is False and row.get("first_difference") is not None:
            return f"no, from token {row['first_difference']}"
        return _cell(row.get(key), self.columns[key][1])

    def _page(self):
        blocks, rows = [], self.data["rows"]
        if rows:
            keys = [key for key in self.columns if any(self._table_cell(row, key) != "-" for row in rows)]
            if len({row["n_parameters"] for row in rows}) == 1 and "n_parameters" in keys:
                keys.remove("n_parameters")  # the header has it
            body = [[row["method"], *(self._table_cell(row, key) for key in keys)] for row in rows]
            blocks.append(_format_table(["method", *(self.columns[key][0] for key in keys)], body))
        for title, sweep in self.data["sweeps"].items():
            body = [[_cell(value, SIGNIFICANT) for value in row.values()] for row in sweep]
            blocks.append(f"{title}\n{_format_table([str(key) for key in sweep[0]], body)}")
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
        """Writes figure and JSON, prints the report; status 1 if a check is false."""
        self.data["config"]["code_sha256"] = code_sha256(sys.argv[0])
        if self.args.plot and self.panels:
            n = len(self.panels)
            figure, axes = new_figure(7.0 if n == 1 else 5.5 * n, n_columns=n)
            for draw, one in zip(self.panels, [axes] if n == 1 else axes, strict=True):
                draw(one)
            save_figure(figure, self.args.plot)
        line, full = json.dumps(_without_nan(self.data), allow_nan=False), None
        if self.args.json not in (None, "-"):  # first: whoever reads the page may stop reading (head)
            try:
                write_atomically(self.args.json, lambda path: path.write_text(line + "\n"))
            except OSError as error:  # a full disk must not take the page as well
                full = error
        print(self._page(), flush=True)
        if full:
            raise full
        if self.args.json == "-":
            print(line)
        if not all(self.data["checks"].values()):
            sys.stdout.flush()
            sys.exit(1)
