"""Options of the scripts, and the frame in which a script runs: bad input becomes one line and status 2."""

import argparse
import contextlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import torch

from inference_utils import GPTLITE_CKPT_PATH, GPTLITE_DISTILLED_CKPT_PATH, ROOT, pick_device

LARGEST_INT = 2**31 - 1  # of sizes and steps: beyond it their products overflow
LARGEST_COUNT = 2**43 - 1  # of seeds as well: seed * 1_000_003 + step stays below 2**63


def positive_int(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a number from 1 up")
    if value > LARGEST_INT:
        raise argparse.ArgumentTypeError(f"{value} is too large: at most {LARGEST_INT}")
    return value


def new_tokens(text):
    """A number of tokens to generate: what would run for days is a slip of the keyboard."""
    if positive_int(text) > 1_000_000:
        raise argparse.ArgumentTypeError(f"{text} is too large: at most a million")
    return int(text)


def count(text):
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    if value > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{value} is too large: at most {LARGEST_COUNT}")
    return value


def positive(text):
    value = float(text)
    if not 0 < value <= 1e9:  # its square is still a number
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0, of at most a billion")
    return value


def share(text):
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
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


SIZES = {  # sizes that many scripts have: their help
    "batch_size": "sequences of the batch",
    "prompt_len": "tokens of the prompts",
    "n_tokens": "new tokens",
    "n_requests": "requests to serve",
    "longest": "most tokens of a request, prompt and answer",
}


def options(
    doc,
    repeats=5,
    checkpoint=GPTLITE_CKPT_PATH,
    checkpoint_help="trained weights",
    plot=True,
    dtype=True,
    data=True,
    weights=True,
    n_windows=128,
    quick=None,
    **sizes,
):
    """An argument parser with the options that every script has.

    Args: doc: the script's docstring, which becomes its help page; repeats, checkpoint: defaults;
        plot=False leaves out --plot in a script without a figure, dtype=False leaves out --dtype in one
        that does not change the type of the weights, repeats=None leaves out --repeats in one that times
        nothing twice, data=False leaves out --data in one that reads no text, weights=False --checkpoint in
        one without trained weights: such an option is refused then, and args has its default all the same;
        n_windows: windows of the validation loss; sizes: defaults of batch_size, prompt_len, n_tokens,
        which become options; quick: {option: value} with --quick, for options that the user does not give.
        A quick run takes the distilled weights, one repeat and 4 windows unless quick says otherwise.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=HelpFormatter)
    parser.set_defaults(dtype="float32", plot=None, repeats=1, data=None, checkpoint=checkpoint)
    parser.set_defaults(n_windows=n_windows, quick=False)
    parser.quick_defaults = {"n_windows": 4, "repeats": 1}
    if checkpoint == GPTLITE_CKPT_PATH:
        parser.quick_defaults["checkpoint"] = GPTLITE_DISTILLED_CKPT_PATH
    parser.quick_defaults |= quick or {}
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
    for name, default in sizes.items():
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=new_tokens if name == "n_tokens" else positive_int,
            default=default,
            help=SIZES[name],
        )
    return parser


def given_options(parser, argv=None):
    """{name: value} of the options that argv gives itself: parsed once more, without any default."""
    defaults = parser._defaults, [action.default for action in parser._actions]
    try:
        parser._defaults = {}
        for action in parser._actions:
            # the default of a positional argument is converted like a given one: None stays what it is
            action.default = argparse.SUPPRESS if action.option_strings else None
        return {key: value for key, value in vars(parser.parse_args(argv)).items() if value not in (None, [])}
    finally:
        parser._defaults = defaults[0]
        for action, default in zip(parser._actions, defaults[1], strict=True):
            action.default = default


def parse(parser, argv=None):
    """The options: those given, else with --quick those of a quick run, else the defaults.

    args.given has the names and values of the options that were given, those that repeat a default as well.
    """
    args = parser.parse_args(argv)
    args.given = given_options(parser, argv)
    if args.quick:
        for key, value in getattr(parser, "quick_defaults", {}).items():
            if key not in args.given:
                setattr(args, key, value)
    return args


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
    args = parse(parser)
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
