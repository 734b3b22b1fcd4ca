"""Every script of the collection, from the outside: its page, its options, and what bad input gets.

The scripts run inside this process (runpy), which saves the imports; none of these runs reaches the work.
"""

import ast
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, tiny_model

import data.shakespeare as shakespeare
import inference_report as harness
import inference_training as training
import inference_utils as utils
from gptlite import GPTlite

SCRIPTS = sorted(ROOT.glob("main_*.py")) + sorted(ROOT.glob("more/[a-z]*.py"))
every_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)


class WorkBegan(Exception):
    """A script went on after input that it should have refused."""


class Parsed(Exception):
    """Holds the parser of a script."""


@pytest.fixture(scope="module")
def plays():
    """The plays, read once for all scripts."""
    return shakespeare.get_shakespeare_data()


@pytest.fixture
def run(monkeypatch, capsys, plays, tmp_path):
    """run(path, *options): status, standard output and error of a script that must end before its work."""

    def began(*args, **kwargs):
        raise WorkBegan

    def read(path=None, *args, **kwargs):
        return plays if path is None else original(path, *args, **kwargs)

    original = shakespeare.get_shakespeare_data
    for module in (shakespeare, harness):
        monkeypatch.setattr(module, "get_shakespeare_data", read)
    for module in (utils, harness):
        for name in ("measure", "alternating_ms", "median_ms", "peak_memory_mb", "measure_ceilings"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, began)
    monkeypatch.setattr(training, "optimizer_step", began)
    monkeypatch.setattr(harness.Report, "finish", began)
    monkeypatch.chdir(tmp_path)  # run from another folder
    monkeypatch.setattr(sys, "path", [*sys.path])

    def script(path, *argv):
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, argv)])
        status = 0
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            status = end.code
        except WorkBegan:
            pytest.fail(f"{path.name} {' '.join(map(str, argv))}: not refused")
        out, err = capsys.readouterr()
        return SimpleNamespace(status=status, stdout=out, stderr=err)

    return script


def parser_of(path, monkeypatch):
    def stop(parser):
        raise Parsed(parser)

    with monkeypatch.context() as patch:
        patch.setattr(harness, "script", stop)
        with pytest.raises(Parsed) as parsed:
            runpy.run_path(str(path), run_name="__main__")
    return parsed.value.args[0]


def is_one_line(result, path, *words):
    assert result.status == 2, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{path.name}: "), result.stderr
    assert "checks:" not in result.stdout and len(result.stdout.splitlines()) <= 5  # at most what runs
    for word in words:
        assert word in lines[0]


@every_script
def test_page(path, run):
    """The docstring is the page of --help: the idea first, then the command and the source."""
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert path.read_text().startswith('"""') and len(doc.splitlines()[0]) > 40
    assert f"Run: python {path.relative_to(ROOT)}" in doc and "Source: " in doc
    result = run(path, "--help")
    assert result.status == 0 and doc.splitlines()[0] in result.stdout
    assert str(ROOT) not in result.stdout and "None" not in result.stdout


@every_script
def test_every_option_says_what_it_does(path, monkeypatch):
    parser = parser_of(path, monkeypatch)
    actions = [action for action in parser._actions if action.dest != "help"]
    assert all(action.help and len(action.help) >= 5 for action in actions)
    names = {name for action in actions for name in action.option_strings}
    assert names >= {"--device", "--seed", "--json", "--quick"}


@every_script
def test_bad_options(path, run, monkeypatch):
    for argv in (["--no-such-option"], ["surplus", "words"], ["--seed", "-1"], ["--device", "tpu"]):
        result = run(path, *argv)
        assert result.status == 2 and result.stdout == ""
        assert result.stderr.splitlines()[-1].startswith(f"{path.name}: error: ")
    for action in parser_of(path, monkeypatch)._actions:
        if action.dest == "seed" or not action.option_strings or action.type in (None, str):
            continue
        try:
            number = action.type("7") == 7
        except Exception:
            continue
        if number:  # every number of every script
            n = action.nargs if isinstance(action.nargs, int) else 1
            for value in ("nan", "1e400", "-1e400") if "threshold" in action.dest else ("nan", "1e400", "-1"):
                result = run(path, "--quick", action.option_strings[0], *([value] * n))
                assert result.status == 2 and result.stdout == "", (action.option_strings, value)
                assert result.stderr.splitlines()[-1].startswith(f"{path.name}: "), result.stderr


@every_script
def test_no_cuda(path, run):
    if not torch.cuda.is_available():
        is_one_line(run(path, "--device", "cuda"), path, "--device auto or cpu")


@every_script
def test_files_that_cannot_be_written_are_found_before_the_work(path, run, tmp_path):
    is_one_line(run(path, "--json", tmp_path / "absent" / "report.json"), path, "there is no folder")
    if "plot=False" not in path.read_text() and '"plot": False' not in path.read_text():
        is_one_line(run(path, "--plot", tmp_path / "figure.xyz"), path, "must end in")
        is_one_line(run(path, "--plot", tmp_path / "absent" / "figure.png"), path, "there is no folder")
    assert list(tmp_path.iterdir()) == []


@every_script
def test_interrupt(path, run, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    for module in (shakespeare, harness):
        monkeypatch.setattr(module, "get_shakespeare_data", interrupt)
    for module in (utils, harness):  # for those that read no text
        for name in ("measure_ceilings", "alternating_ms", "load_checkpoint"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, interrupt)
    result = run(path, "--quick")
    assert result.status == 130
    assert result.stderr.split("\n") == ["", f"{path.name}: stopped", ""]


@pytest.fixture(scope="module")
def bad_checkpoints(tmp_path_factory):
    """{what it is: (file, a word of the message)}, in a folder with spaces in its name."""
    folder = tmp_path_factory.mktemp("bad weights")
    sizes = {"vocab_size": 96, "d_model": 32, "seqlen": 256}
    files = {"missing": (folder / "absent.pth", "main_training.py")}
    for name, vocab_size in (("shape", 96), ("vocabulary", 50)):
        state = tiny_model(GPTlite, **sizes | {"vocab_size": vocab_size}, dtype=torch.float32).state_dict()
        torch.save(state, folder / f"{name}.pth")
        files[name] = (folder / f"{name}.pth", "does not fit")
    whole = (folder / "shape.pth").read_bytes()
    (folder / "truncated.pth").write_bytes(whole[: len(whole) // 2])
    files["truncated"] = (folder / "truncated.pth", "truncated or no checkpoint")
    return files


@every_script
@pytest.mark.parametrize("fault", ["missing", "truncated", "shape", "vocabulary"])
def test_bad_checkpoint(path, fault, run, bad_checkpoints):
    if path.stem == "main_training" or "weights=False" in path.read_text():
        pytest.skip("this script makes the checkpoint, or needs none")
    file, word = bad_checkpoints[fault]
    is_one_line(run(path, "--quick", "--checkpoint", file), path, word)


@every_script
def test_bad_text(path, run, tmp_path):
    if "data=False" in path.read_text():
        pytest.skip("this script reads no text")
    (tmp_path / "one.txt").write_text("a")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "emoji.txt").write_text("to be or not \N{GRINNING FACE}\n" * 400, encoding="utf-8")
    for name in ("absent.txt", "one.txt", "empty.txt", "binary.txt", "emoji.txt", "."):
        is_one_line(run(path, "--quick", "--data", tmp_path / name), path)
