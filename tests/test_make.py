"""results/make.py: which reports are made, when one is old, and that the README shows nothing else."""

import copy
import itertools
import json
import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "results"))

import make
import tables

REPORTS = sorted(path for path in ROOT.glob("results/*/*.json"))


def test_every_script_has_a_report_to_make():
    scripts = {path.relative_to(ROOT).as_posix() for path in make.ROOT.glob("main_*.py")}
    scripts |= {path.relative_to(ROOT).as_posix() for path in make.ROOT.glob("more/[a-z]*.py")}
    assert {command[0] for command in make.all_runs().values()} == scripts


def test_the_readme_holds_what_the_reports_say():
    """No number stands in its tables that make.py did not put there."""
    readme, results = (ROOT / "README.md").read_text(), ROOT / "results"
    machines = make.machines_of(results)
    reports, samples = make.load(results, machines), make.samples_of(results / machines[0])
    assert make.render(readme, reports, samples) == readme


def test_rendering_takes_every_figure_from_the_reports():
    """Other figures in the reports, other cells in the table."""
    reports = make.load(ROOT / "results", make.machines_of(ROOT / "results"))
    factors = itertools.cycle((1.37, 0.71, 1.13, 0.83, 1.21))  # another for each: ratios change as well

    def scaled(value, key=""):
        if isinstance(value, dict):
            return {k: scaled(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [scaled(v) for v in value]
        return value * next(factors) + 0.013 if isinstance(value, float) else value

    other = {
        name: {**r, "rows": scaled(r["rows"]), "sweeps": scaled(r["sweeps"])} for name, r in reports.items()
    }
    for entry in tables.TABLE:
        before, after = tables.cells(entry, reports), tables.cells(entry, other)
        assert before == after == ("-", "-") or before != after, entry["technique"]


def test_the_table_of_techniques():
    for entry in tables.TABLE:
        for script in [entry["script"], *entry["deeper"]]:
            assert (ROOT / script).is_file(), script
        for key in ("technique", "exact", "training", "reduces"):
            assert 0 < len(entry[key]) <= 80 and "|" not in entry[key]
    shown = [script for entry in tables.TABLE for script in [entry["script"], *entry["deeper"]]]
    assert len(shown) == len(set(shown))
    every = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("main_*.py")}
    every |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob("more/[a-z]*.py")}
    assert every - set(shown) <= {"main_training.py"}  # the README names it in the text


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_reports_are_of_scripts_that_are_there(path):
    report = json.loads(path.read_text())
    assert report["command"][0] in {command[0] for command in make.all_runs().values()}
    assert all(report["checks"].values()) and not report["config"]["quick"]
    assert path.parent.name == make.machine_of(report["config"])
    assert len(report["why"]) <= 4


REPORT = {
    "command": ["main_kvcache.py"],
    "config": {
        "quick": False,
        "device": "cpu",
        "device_name": "Some CPU (R) 9000",
        "threads": 2,
        "dtype": "float32",
        "checkpoint": "gptlite.pth",
        "weights_sha256": make.sha256_of(ROOT / "checkpoints" / "gptlite.pth"),
        "code_sha256": make.code_sha256(ROOT / "main_kvcache.py"),
    },
    "rows": [
        {"method": "no cache, batch 1", "tpot_ms": 20.0, "tpot_ms_spread": [19.0, 21.0], "ttft_ms": 20.0},
        {
            "method": "dynamic, batch 1",
            "tpot_ms": 5.0,
            "ttft_ms": 22.0,
            "kv_bytes_per_token": 18432.0,
            "valid_loss": 1.4,
        },
        {"method": "no cache, batch 8", "tpot_ms": 80.0},
        {"method": "dynamic, batch 8", "tpot_ms": 8.0},
    ],
    "sweeps": {},
}


def test_fresh_and_old_reports():
    assert make.is_fresh(REPORT, ["main_kvcache.py"])
    assert not make.is_fresh(REPORT, ["main_kvcache.py", "--peers"])
    for key in ("weights_sha256", "code_sha256"):
        old = copy.deepcopy(REPORT)
        old["config"][key] = "0" * 64
        assert not make.is_fresh(old, ["main_kvcache.py"])


def test_machines():
    assert make.machine_of(REPORT["config"]) == "some-cpu-r-9000-2-threads"
    assert make.machine_of({"device": "cuda", "device_name": "NVIDIA H200"}) == "nvidia-h200"


def test_rows_of_another_machine_are_marked():
    """The machine with most reports comes first; what only another one has stands with a star."""
    other = copy.deepcopy(REPORT)
    other["config"] |= {"device": "cuda", "device_name": "NVIDIA H200"}
    reports = {"kvcache": other, "one": REPORT, "two": REPORT}
    text = "<!-- machine -->\n<!-- /machine -->\n<!-- techniques -->\n<!-- /techniques -->\n"
    page = make.render(text, reports, {})
    assert "Some CPU (R) 9000, 2 threads, float32; rows with *: NVIDIA H200, float32." in page
    assert "batch 8 10.0 * |" in page and "GPU" not in page.replace("NVIDIA", "")
    page = make.render(text, {"kvcache": REPORT}, {})
    assert "batch 8 10.0 |" in page and "No figure here was made on a GPU" in page


def test_changes_beyond_the_spread():
    after = copy.deepcopy(REPORT)
    after["rows"][0] |= {"tpot_ms": 20.9, "tpot_ms_spread": [20.5, 22.0]}  # overlaps
    after["rows"][1] |= {"tpot_ms": 6.0, "valid_loss": 1.45}
    lines = make.changes("kvcache", REPORT, after)
    assert lines == [
        "kvcache, dynamic, batch 1: tpot_ms 5 -> 6",
        "kvcache, dynamic, batch 1: valid_loss 1.4 -> 1.45",
    ]
    assert make.changes("kvcache", REPORT, REPORT) == []


def test_rendering():
    text = "a\n<!-- techniques -->\nold\n<!-- /techniques -->\nb\n<!-- output -->\n<!-- /output -->\n"
    page = make.render(text, {"kvcache": REPORT}, {"output": "```\npage\n```"})
    assert page.startswith("a\n<!-- techniques -->\n| technique |") and "\nold\n" not in page
    assert "TPOT 4.0 times lower, batch 8 10.0" in page and "TTFT 1.10 of no cache's" in page
    assert "18,432 bytes a token of every sequence" in page
    assert "```\npage\n```\n<!-- /output -->" in page
    assert make.render(page, {"kvcache": REPORT}, {"output": "```\npage\n```"}) == page


def with_table(weights, title, *rows):
    """A report with a table of (rule, keys read, rise of the loss)."""
    rows = [dict(zip(("rule", "keys read", "difference"), row, strict=True)) for row in rows]
    return {"config": {"weights_sha256": weights}, "sweeps": {"Other": [], title: rows}}


def test_the_figure_of_sparse_attention(tmp_path):
    """One line for each rule over all reports; other weights and other windows stay out of it."""
    title = "Loss against budget: 32 windows"
    reports = {
        "quest": with_table("a", title, ("Quest", 31.5, 0.02), ("window", 31.0, 9.0), ("Quest", 15.5, 0.04)),
        "kv_eviction": with_table(
            "a", f"{title}, evicted from their first tokens on", ("window", 30.0, 0.07)
        ),
        "moba": with_table("b", title, ("MoBA", 30.0, 0.1)),
        "dsa": with_table("a", "Loss against budget: 4 windows", ("DSA", 30.0, 0.1)),
        "kvcache": REPORT,
    }
    lines = make.family_lines(reports)
    assert lines == {"window": ((30.0,), (0.07,)), "Quest": ((15.5, 31.5), (0.04, 0.02))}
    make.draw_family(reports, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    for absent in ({}, {"kvcache": REPORT}, {"quest": REPORT}):
        assert make.family_lines(absent) == {}
        make.draw_family(absent, tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


def test_the_familys_reports_are_of_scripts():
    assert set(make.FAMILY) <= set(make.all_runs())


def a_row(method, n, speedup=None, loss=None, **figures):
    return {"method": method, "n_parameters": n, "valid_loss": loss, "speedup": speedup} | figures


def test_small_models_of_the_reports_that_are_there(tmp_path):
    """As multiples of their own run's whole model; equal sizes have one speed, measured or not."""
    config = {"n_parameters": 100}
    rows = [a_row("teacher", 100, 1.0, 1.4), a_row("student", 20, 3.0, 1.6), a_row("no loss", 40, 2.0)]
    distillation = {"config": config, "rows": rows}
    arms = [a_row("soft labels", 20, None, 1.7), a_row("another size", 30, None, 1.8)]
    features = {"config": config, "rows": arms}
    cut = {"config": config, "rows": [a_row("50%", 50, 1.5, 1.5), a_row("random", 50, 1.4, 2.55)]}
    depth = {"config": config, "rows": [a_row("2 blocks", 50, 1.5, 1.5)]}
    reports = {"distillation": distillation, "distillation_features": features, "kvcache": distillation}
    reports |= {"pruning_search": cut, "pruning_depth": depth}
    models = make.small_models(reports)
    assert models == {
        "distillation": [("student", 3.0, 1.6)],
        "distillation_features": [("soft labels", 3.0, 1.7)],
        "pruning_search": [("50%", 1.45, 1.5), ("random", 1.45, 2.55)],
    }
    make.draw_small_models(models, tmp_path / "small_models.png")
    assert (tmp_path / "small_models.png").stat().st_size > 1000
    assert make.small_models({"distillation_features": features}) == {}
    assert make.small_models({}) == make.small_models({"kvcache": REPORT}) == {}


def test_the_readme_shows_small_models_once_there_are_some():
    text = "<!-- small_models -->\n<!-- /small_models -->\n"
    assert "No small model is measured yet." in make.render(text, {"kvcache": REPORT}, {})
    rows = [a_row("teacher", 100, 1.0, 1.4), a_row("student", 20, 3.0, 1.6)]
    made = copy.deepcopy(REPORT) | {"rows": rows}
    made["config"]["n_parameters"] = 100
    assert "results/figures/small_models.png" in make.render(text, {"pruning_search": made}, {})


def test_cells_are_short():
    entry = next(entry for entry in tables.TABLE if entry["technique"] == "KV cache")
    entry = entry | {"gain": lambda r: "x" * 81}
    with pytest.raises(ValueError, match="has 81 characters"):
        tables.cells(entry, {"kvcache": REPORT})


def test_a_run_that_fails_keeps_the_old_report(tmp_path, monkeypatch, capsys):
    made = make.run("kvcache", ["main_kvcache.py", "--n-tokens", "nonsense"], tmp_path, tmp_path)
    assert made is None and not list(tmp_path.glob("*.json"))
    assert "status 2" in capsys.readouterr().out


def test_cells_of_tiny_runs():
    """Sizes differ there: any row of a method will do, and what is missing is a dash; else it is an error."""
    entry = next(entry for entry in tables.TABLE if entry["technique"] == "KV cache")
    report = copy.deepcopy(REPORT)
    report["config"]["quick"] = True
    for row in report["rows"]:
        row["method"] = row["method"].replace("batch 8", "batch 2")
    assert tables.cells(entry, {"kvcache": report})[0] == "TPOT 4.0 times lower, batch 8 4.0"
    report["rows"] = report["rows"][:1]
    assert tables.cells(entry, {"kvcache": report}) == ("-", "-")
    report["config"]["quick"] = False
    with pytest.raises(LookupError):
        tables.cells(entry, {"kvcache": report})


@pytest.mark.slow
def test_quick(tmp_path, monkeypatch):
    """Tiny runs of two scripts into another folder, and a README rendered from them."""
    readme = (ROOT / "README.md").read_text()
    monkeypatch.setattr(sys, "argv", ["make.py", "--quick", str(tmp_path), "kvcache", "kvcache_past_window"])
    make.main()
    (folder,) = {path.parent for path in tmp_path.glob("*/*.json")}
    report = json.loads((folder / "kvcache.json").read_text())
    assert report["config"]["quick"] and (tmp_path / "figures" / "kvcache.png").is_file()
    assert "times lower" in (tmp_path / "README.md").read_text()
    assert (folder / "text.txt").read_text().startswith("ROMEO:")
    assert (ROOT / "README.md").read_text() == readme
