"""Figures in the collection's style: one axes, lines or labelled points, written atomically, no display."""

from pathlib import Path

from inference_utils import write_atomically


def new_figure(width=7.0, height=4.2, n_columns=1):
    """A matplotlib figure and its axes (a list of them for several columns)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, n_columns, figsize=(width, height), layout="constrained", squeeze=False)
    for one in axes[0]:
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes[0, 0] if n_columns == 1 else list(axes[0])


def save_figure(figure, path):
    """Writes the figure atomically in the format that its name ends in."""
    form = Path(path).suffix.lstrip(".")
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150, format=form))


def draw_lines(axes, lines, xlabel, ylabel, title="", log="", ticks=None):
    """Draws {label: (x values, y values)}; log: the axes that are logarithmic, "", "x", "y" or "xy"."""
    for label, (x, y) in lines.items():
        points = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 40 else None, label=label)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if "x" in log:
        axes.set_xscale("log", base=2)
    if "y" in log:
        axes.set_yscale("log")
    if ticks is not None:
        axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axes.tick_params(axis="x", which="minor", labelbottom=False)
    if len(lines) > 1:
        axes.legend(fontsize=8)
    return axes


def draw_points(axes, points, xlabel, ylabel, title=""):
    """Draws {label: (x, y)}, each label beside its dot and clear of the other labels where there is room."""
    taken = []
    for label, (x, y) in sorted(points.items(), key=lambda item: item[1]):
        axes.plot([x], [y], "o")
        axes.annotate(label, (x, y), xytext=(5, 3), textcoords="offset points", fontsize=8)
        taken.append((x, y))
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    return axes
