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


def draw_lines(axes, lines, xlabel, ylabel, title="", log=""):
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
    if len(axes.lines) > 1:
        axes.legend(fontsize=8)
    return axes


def draw_dots(axes, dots, xlabel, ylabel, title=""):
    """Draws {label: (x values, y values)} as small dots, so that thousands of them make a picture."""
    for label, (x, y) in dots.items():
        axes.plot(x, y, ".", markersize=1.5, label=label)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    return axes


# places of a label beside its dot, the best first: points to the right, points up, side of the text at them
LABEL_PLACES = [
    (6 * side, y, {1: "left", -1: "right"}[side]) for y in (0, 9, -9, 18, -18) for side in (1, -1)
]


def draw_points(axes, points, xlabel, ylabel, title=""):
    """Draws {label: (x, y)}, each label beside its dot and clear of dots and other labels if there is room.

    A point without a figure (None) is left out.
    """
    points = {label: point for label, point in points.items() if None not in point}
    dots = [axes.plot([x], [y], "o")[0] for x, y in points.values()]
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.margins(x=0.25, y=0.12)  # room for labels beside the outer dots
    axes.figure.canvas.draw()  # places are known from here on
    taken = [dot.get_window_extent().padded(3) for dot in dots]
    for label, point in points.items():
        for place in LABEL_PLACES:
            dx, dy, side = place
            text = axes.annotate(
                label, point, (dx, dy), textcoords="offset points", ha=side, va="center", fontsize=8
            )
            box = text.get_window_extent()
            if place == LABEL_PLACES[-1] or not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        taken.append(box)
    return axes
