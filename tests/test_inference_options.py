"""Options and exit statuses: defaults, quick runs, and what goes wrong as one line on standard error."""

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT

import inference_options as options
import inference_utils as utils


@pytest.fixture
def run(monkeypatch, capsys):
    """run(body, *options): body(args) as a script's main block; status, standard output and error."""

    def run(body, *argv):
        monkeypatch.setattr(sys, "argv", ["/anywhere/main_tiny.py", *map(str, argv)])
        status = 0
        try:
            with options.script(tiny_parser()) as args:
                body(args)
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return SimpleNamespace(status=status, stdout=out, stderr=err)

    return run


def tiny_parser(**more):
    return options.options("Tiny.\n\nRun: python main_tiny.py", repeats=3, **more)


def never(args):
    pytest.fail("work began before the options were checked")


# Options


def test_defaults(run):
    seen = {}
    assert run(lambda args: seen.update(vars(args))).status == 0
    assert seen["device"] == utils.pick_device() and seen["dtype"] == torch.float32
    assert seen["seed"] == 42 and seen["repeats"] == 3 and not seen["quick"]
    assert seen["checkpoint"] == utils.GPTLITE_CKPT_PATH
    assert seen["json"] is seen["plot"] is seen["data"] is None


def test_help_shows_every_option_and_default(run):
    page = run(never, "--help")
    assert page.status == 0
    names = "device dtype seed checkpoint data json plot quick repeats".split()
    assert all(f"--{name}" in page.stdout for name in names)
    assert "Run: python main_tiny.py" in page.stdout
    for default in ("auto", "float32", 42, 3):
        assert f"(default: {default})" in page.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ["--repeats", "0"],
        ["--repeats", "-3"],
        ["--repeats", "two"],
        ["--seed", "-1"],
        ["--seed", str(2**43)],  # of which training makes a number for every step
        ["--repeats", str(10**20)],
        ["--dtype", "int8"],
        ["--device", "tpu"],
        ["--unknown"],
        ["surplus"],
    ],
)
def test_bad_values(run, argv):
    result = run(never, *argv)
    assert result.status == 2 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("main_tiny.py: error: ")


@pytest.mark.parametrize("number", [2**31, 10**15, 10**20, 10**400])
def test_huge_numbers_are_refused_with_the_limit(number):
    for parse in (options.positive_int, options.count):
        if parse is options.positive_int or number >= 2**43:
            with pytest.raises(argparse.ArgumentTypeError, match="is too large: at most"):
                parse(str(number))
    assert options.positive_int(str(2**31 - 1)) == 2**31 - 1 and options.count(str(2**43 - 1)) == 2**43 - 1
    torch.manual_seed(options.LARGEST_COUNT * 1_000_003 + options.LARGEST_INT)  # the largest seed of a step


def test_help_tells_defaults_where_there_are_any():
    parser = options.options("Tiny.")
    parser.add_argument(
        "--n-tokens", type=options.positive_int, help="new tokens (default: up to the context)"
    )
    parser.add_argument("--share", type=float, default=0.0, help="share")
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 4], help="widths")
    parser.add_argument("--name", default="100%", help="name")
    page = " ".join(parser.format_help().split())
    assert "--n-tokens N new tokens (default: up to the context) --share" in page
    assert "--share N share (default: 0.0)" in page and "widths (default: 8 4)" in page
    assert "--name NAME name (default: 100%)" in page and "--seed N " in page
    assert "(default: checkpoints/gptlite.pth)" in page and str(ROOT) not in page
    for absent in ("None", "False", "WIDTHS", "REPEATS"):
        assert absent not in page


def test_options_that_a_script_leaves_out_are_refused(capsys):
    parser = options.options("Tiny.", repeats=None, plot=False, dtype=False, data=False, weights=False)
    args = parser.parse_args([])
    assert args.plot is args.data is None and args.dtype == "float32" and args.repeats == 1
    assert args.checkpoint == utils.GPTLITE_CKPT_PATH
    for option in ("--plot x.png", "--dtype float16", "--repeats 2", "--data x.txt", "--checkpoint x.pth"):
        option = option.split()
        with pytest.raises(SystemExit) as end:
            parser.parse_args(option)
        assert end.value.code == 2 and f"unrecognized arguments: {option[0]}" in capsys.readouterr().err


def test_seed_is_set(run):
    drawn = []
    for seed in (7, 7, 8):
        assert run(lambda _: drawn.append(torch.rand(3)), "--seed", seed).status == 0
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


# What goes wrong, as one line


@pytest.mark.parametrize(
    "error, line",
    [
        (ValueError("the text is\n  too short"), "the text is too short"),
        (FileNotFoundError(2, "No such file", "a.txt"), "[Errno 2] No such file: 'a.txt'"),
        (ModuleNotFoundError("No module named 'x'"), "No module named 'x'"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (ValueError(), "ValueError"),
        (MemoryError(), "out of memory, try smaller sizes or --device cpu (MemoryError)"),
    ],
)
def test_error_is_one_line_and_status_2(run, error, line):
    def body(args):
        raise error

    result = run(body)
    assert (result.status, result.stdout, result.stderr) == (2, "", f"main_tiny.py: {line}\n")


def test_too_little_memory(run):
    result = run(lambda _: torch.empty(10**15))
    assert result.status == 2 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("main_tiny.py: out of memory, try smaller sizes")


@pytest.mark.parametrize("shape", [(2**31 - 1, 2**31 - 1), (2**31 - 1, 2**31 - 1, 2**31 - 1)])
def test_sizes_whose_product_overflows(run, shape):
    result = run(lambda _: torch.empty(shape))
    assert result.status == 2 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("main_tiny.py: out of memory, try smaller sizes")


def test_figure_without_matplotlib_is_found_before_the_work(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert importlib.util.find_spec("matplotlib") is None
    result = run(never, "--plot", tmp_path / "figure.png")
    assert result.status == 2 and len(result.stderr.splitlines()) == 1
    assert "--plot needs matplotlib: python -m pip install matplotlib" in result.stderr
    assert run(lambda _: None).status == 0


def test_fault_of_the_program_is_not_hidden(run):
    with pytest.raises(ZeroDivisionError):
        run(lambda _: 1 / 0)
    with pytest.raises(RuntimeError, match="must match"):
        run(lambda _: torch.zeros(2) + torch.zeros(3))


def test_interrupt_is_one_line_and_status_130(run):
    def body(args):
        raise KeyboardInterrupt

    result = run(body)
    assert result.status == 130 and result.stderr.split("\n") == ["", "main_tiny.py: stopped", ""]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--json", "absent/report.json"], "there is no folder"),
        (["--json", "."], "is a folder"),
        (["--json", ""], "is a folder"),
        (["--json", "pipe"], "is a folder or a device"),
        (["--plot", "absent/figure.png"], "there is no folder"),
        (["--plot", "figure.jpeg"], "the name must end in .png or .pdf or .svg"),
        (["--plot", "figure"], "the name must end in .png"),
        (["--json", "/proc/report.json"], "[Errno"),
    ],
)
def test_file_that_cannot_be_written_is_found_before_the_work(run, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    result = run(never, *argv)
    assert result.status == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
    assert os.listdir(tmp_path) == ["pipe"]


def test_file_that_is_there_stays_until_the_end(run, tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    others = {f"report.json{end}" for end in (".probe", ".part", f".{os.getpid()}.probe")}
    for name in others:
        (tmp_path / name).write_text("of somebody else")
    assert run(lambda _: None, "--json", path, "--plot", tmp_path / "figure.PNG").status == 0
    assert path.read_text() == "old" and {*os.listdir(tmp_path)} == {"report.json", *others}
    assert all((tmp_path / name).read_text() == "of somebody else" for name in others)


def test_reader_that_goes_away_and_a_locale_without_unicode(tmp_path):
    script = tmp_path / "main_tiny.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport inference_options as options\n"
        "with options.script(options.options('Tiny.')):\n"
        "    print('caf\\u00e9 \\u2764')\n"
        "    for i in range(100_000):\n"
        "        print('line', i)\n"
    )
    env = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=tmp_path
    )
    first = process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) in (0, 1)
    assert first == b"caf\\xe9 \\u2764\n"


# Options that are given, quick runs


def parsed(*argv, **more):
    parser = tiny_parser(batch_size=8, n_tokens=192, **more)
    parser.add_argument("words", nargs="*", default=["none"], help="words")
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 4], help="widths")
    parser.add_argument("--check", action="store_true", help="check")
    return options.parse(parser, list(argv)), parser


def test_given_are_the_options_of_the_command_line():
    assert parsed()[0].given == {}
    argv = ["a", "--seed=42", "--batch", "8", "--widths", "8", "4", "--check", "--checkpoint", "x.pth"]
    args, parser = parsed(*argv)
    given = {"words": ["a"], "seed": 42, "batch_size": 8, "widths": [8, 4], "check": True}
    assert args.given == given | {"checkpoint": Path("x.pth")}
    assert parser.get_default("widths") == [8, 4] and parser.parse_args([]).repeats == 3


@pytest.mark.parametrize("kind", [Path, int, str])
def test_a_positional_argument_that_is_absent_is_not_given(kind):
    parser = tiny_parser()
    parser.add_argument("folder", nargs="?", type=kind, help="folder")
    assert options.parse(parser, []).given == {} and options.parse(parser, []).folder is None
    assert options.parse(parser, ["7"]).given == {"folder": kind("7")}


def test_quick_defaults():
    quick = {"n_tokens": 8, "n_steps": 2}
    args, _ = parsed("--quick", quick=quick)
    assert (args.n_tokens, args.n_steps, args.repeats, args.n_windows) == (8, 2, 1, 4)
    assert args.checkpoint == utils.GPTLITE_DISTILLED_CKPT_PATH and args.batch_size == 8
    args, _ = parsed(quick=quick)
    assert (args.n_tokens, args.repeats, args.n_windows) == (192, 3, 128)
    assert args.checkpoint == utils.GPTLITE_CKPT_PATH and not hasattr(args, "n_steps")


def test_quick_leaves_what_was_given():
    """Also a value that happens to be the default of a whole run."""
    argv = ["--quick", "--repeats", "3", "--n-tokens", "192", "--checkpoint", str(utils.GPTLITE_CKPT_PATH)]
    args, _ = parsed(*argv, quick={"n_tokens": 8})
    assert (args.n_tokens, args.repeats, args.checkpoint) == (192, 3, utils.GPTLITE_CKPT_PATH)


def test_quick_of_a_script_with_a_checkpoint_of_its_own():
    args, _ = parsed("--quick", checkpoint=Path("own.pth"), quick={"repeats": 2, "n_windows": 8})
    assert (args.checkpoint, args.repeats, args.n_windows) == (Path("own.pth"), 2, 8)


def test_types_of_numbers():
    for text, parse, value in (("0.5", options.share, 0.5), ("1e3", options.positive, 1000.0)):
        assert parse(text) == value
    for text in ("nan", "inf", "-1", "1e400"):
        for parse in (options.share, options.positive):
            with pytest.raises(argparse.ArgumentTypeError):
                parse(text)
    with pytest.raises(argparse.ArgumentTypeError):
        options.positive("0")
    assert options.share("0") == 0 and options.share("1") == 1
