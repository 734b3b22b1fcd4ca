"""The rules that hold for all files: where a script stands, its length, who imports whom, what it says."""

import ast
import re

import pytest
from helpers import ROOT

SCRIPTS = sorted(ROOT.glob("main_*.py")) + sorted(ROOT.glob("more/[a-z]*.py"))
FILES = [*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("more/[a-z]*.py")), *sorted(ROOT.glob("data/*.py"))]
every_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)

LINES_BELOW = 80  # from `if __name__` to the end
LINES = 250
POSTS_FILES = (  # the post names them
    "gptlite gptlite_kvcache gptlite_gqa inference_utils main_kvcache main_prefix_cache main_semantic_cache "
    "main_static_batching main_continuous_batching main_flash_attention main_gqa main_mla main_distillation "
    "main_pruning"
).split()
REUSED = re.compile(r"generate|next_tokens$|distillation_loss$")  # what the post takes from its scripts
ALL_METHODS = "main_benchmark"  # which runs every technique, so it may import from all scripts


def imports(path):
    """{module of the collection: names that are taken from it} of a file."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.setdefault(node.module.removeprefix("more."), []).extend(a.name for a in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name.removeprefix("more."), []).append("*")
    known = {file.stem for file in FILES}
    return {module: names for module, names in found.items() if module.rpartition(".")[2] in known}


def main_part(path):
    """The lines from `if __name__ == "__main__":` on, and the file's."""
    lines = path.read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('if __name__ == "__main__":')]
    assert len(starts) == 1, "a script has one main part"
    return lines[starts[0] + 1 :], lines


@every_script
def test_the_technique_is_what_a_script_shows(path):
    below, lines = main_part(path)
    assert len(below) <= LINES_BELOW, f"{len(below)} lines below the technique"
    assert len(lines) <= LINES, f"{len(lines)} lines"


@every_script
def test_the_technique_has_no_clock_print_or_option(path):
    below, lines = main_part(path)
    above = "\n".join(lines[: len(lines) - len(below) - 1])
    tree = ast.parse(above)
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls}
    assert not names & {"print", "perf_counter", "add_argument", "Report"}
    if path.stem != ALL_METHODS:  # whose technique is to compare
        assert not re.search(r"^(import|from) inference_(report|options|words|plot)", above, re.M)


def test_no_circles():
    graph = {file.stem: {m.rpartition(".")[2] for m in imports(file)} - {file.stem} for file in FILES}

    def walk(name, path):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(graph.get(name, ())):
                walk(other, [*path, name])
            done.add(name)

    done = set()
    lazily = {
        ("inference_utils", "inference_training")
    }  # the post's `from inference_utils import train_steps`
    for a, b in lazily:
        graph[a].discard(b)
    for name in graph:
        walk(name, [])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports_point_one_way(path):
    """scripts -> inference_* -> gptlite*, linear_packed, data; from scripts only what the post reuses."""
    names = imports(path)
    for module, taken in names.items():
        module = module.rpartition(".")[2]
        if path.stem.startswith("gptlite") or path.stem == "linear_packed":
            assert module.startswith(("gptlite", "linear_packed")), module
        elif path.parent.name == "data":
            assert module in {file.stem for file in ROOT.glob("data/*.py")}, module
        elif path.stem.startswith("inference_"):
            assert not module.startswith("main_") and not (ROOT / "more" / f"{module}.py").is_file(), module
        elif path.stem == ALL_METHODS or path.parent.name == "more":
            continue
        elif module.startswith("main_"):
            assert all(REUSED.match(name) for name in taken), (module, taken)
        else:
            assert not (ROOT / "more" / f"{module}.py").is_file(), f"{path.name} takes from more/{module}"


@every_script
def test_every_option_is_read(path):
    """An option of the script's own is read as args.NAME or named where the harness reads it."""
    below = "\n".join(main_part(path)[0])
    dests = {name.replace("-", "_") for name in re.findall(r'\badd\w*\(\s*"--([a-z-]+)"', below)}
    for name in dests:
        elsewhere = re.sub(rf'"--{name.replace("_", "-")}"', "", below)
        assert re.search(rf"args\.{name}\b", below) or re.search(rf'"{name}"', elsewhere), name
    if "plot=False" not in below and '"plot": False' not in below:
        assert ".plot_" in below or "args.plot" in below or ".panels" in below, "--plot draws nothing"


@every_script
def test_explanations_are_chosen_by_figures(path):
    """report.why takes a call, never a text of its own (inference_words.py makes the sentences)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "why":
            assert not isinstance(node.args[0], ast.Constant | ast.JoinedStr), ast.unparse(node)[:80]


def test_the_posts_files_are_there():
    assert all((ROOT / f"{name}.py").is_file() for name in POSTS_FILES)
    assert {path.parent.name for path in SCRIPTS} == {ROOT.name, "more"}


def test_every_script_stands_in_the_readme_or_behind_one_that_does():
    readme = (ROOT / "README.md").read_text() + (ROOT / "results" / "README.md").read_text()
    for path in SCRIPTS:
        assert path.relative_to(ROOT).as_posix() in readme, path.name


@every_script
def test_every_script_has_a_test_of_its_name(path):
    test = ROOT / "tests" / f"test_{path.stem}.py"
    assert test.is_file() and "--quick" in test.read_text(), test.name


def test_letters_and_paths():
    """No path of a machine, no word of the tools it was made with."""
    for path in [*FILES, *ROOT.glob("tests/*.py"), *ROOT.glob("results/*.py"), *ROOT.glob("*.md")]:
        text = path.read_text()
        assert not any(f"/{folder}/" in text for folder in ("root", "work")), path.name
