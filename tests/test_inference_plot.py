"""Figures: written in the format of their name, lines and points as given, labels beside their dots."""

import os

import pytest

pytest.importorskip("matplotlib")

import inference_plot as plot


@pytest.mark.parametrize("name", ["figure.png", "figure.svg", "FIGURE.PDF"])
def test_figure_in_the_format_of_its_name(tmp_path, name):
    figure, axes = plot.new_figure()
    axes.plot([1, 2], [3, 4])
    plot.save_figure(figure, tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    start = (tmp_path / name).read_bytes()[:100]
    assert {"png": b"PNG", "svg": b"<?xml", "pdf": b"%PDF"}[name[-3:].lower()] in start


def test_columns():
    _, one = plot.new_figure()
    _, three = plot.new_figure(n_columns=3)
    assert one.get_subplotspec().get_geometry()[:2] == (1, 1) and len(three) == 3


def test_lines():
    _, axes = plot.new_figure()
    lines = {"first": ([1, 2, 4], [1.0, None, 3.0]), "second": ([1, 2], [3.0, 4.0]), "none": ([1], [None])}
    plot.draw_lines(axes, lines, "tokens", "time (ms)", "Title", log="xy")
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert drawn == {"first": [[1, 1], [4, 3]], "second": [[1, 3], [2, 4]]}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["first", "second"]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("tokens", "time (ms)", "Title")
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_one_line_needs_no_legend():
    _, axes = plot.new_figure()
    plot.draw_lines(axes, {"only": ([1, 2], [3, 4])}, "x", "y")
    assert axes.get_legend() is None and axes.get_xscale() == axes.get_yscale() == "linear"


def test_dots():
    _, axes = plot.new_figure()
    plot.draw_dots(axes, {"kept": ([1, 1, 2], [0, 1, 1])}, "step", "token", "Title")
    (dots,) = axes.lines
    assert dots.get_xydata().tolist() == [[1, 0], [1, 1], [2, 1]] and dots.get_linestyle() == "None"
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("step", "token", "Title")


def boxes(axes):
    axes.figure.canvas.draw()
    return [text.get_window_extent() for text in axes.texts]


@pytest.mark.parametrize(
    "points",
    [
        {"a first method": (1.0, 1.0), "a second method": (1.02, 1.01), "a third one": (0.99, 0.99)},
        {f"method {i}": (i % 3, i // 3) for i in range(9)},
        {"the longest name of all the methods": (5.0, 1.0), "next": (5.0, 1.0), "far": (0.0, 0.0)},
    ],
)
def test_labels_are_beside_dots_and_not_over_each_other(points):
    _, axes = plot.new_figure()
    plot.draw_points(axes, points, "speed", "memory")
    labels = boxes(axes)
    dots = [line.get_window_extent().padded(2) for line in axes.lines]
    assert sorted(text.get_text() for text in axes.texts) == sorted(points)
    for i, box in enumerate(labels):
        assert not any(box.overlaps(other) for other in labels[i + 1 :])
        assert not any(box.overlaps(dot) for dot in dots)
    for text, point in zip(axes.texts, axes.lines, strict=True):  # each at its own dot
        assert list(text.xy) == point.get_xydata()[0].tolist()


def test_a_point_without_a_figure_is_left_out():
    _, axes = plot.new_figure()
    plot.draw_points(axes, {"a": (1.0, None), "b": (None, 2.0), "c": (1.0, 2.0)}, "x", "y")
    assert [text.get_text() for text in axes.texts] == ["c"] and len(axes.lines) == 1


def test_crowded_points_all_keep_a_label():
    _, axes = plot.new_figure()
    plot.draw_points(axes, {f"method number {i}": (1.0, 1.0) for i in range(30)}, "x", "y")
    assert len(axes.texts) == 30
