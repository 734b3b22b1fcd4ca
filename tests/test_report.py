"""Options and exit statuses, the cost model against an independent count, the report and its JSON."""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import inference_report as rep
import inference_utils as utils
from gptlite import GPTlite, get_gptlite_distilled_model_parameters, get_gptlite_model_parameters
from gptlite_kvcache import GPTlite_KVCache

CPU = ["--device", "cpu"]


@pytest.fixture
def run(monkeypatch, capsys):
    """run(body, *options): body(args) as a script's main block; status, standard output and error."""

    def run(body, *argv):
        monkeypatch.setattr(sys, "argv", ["/anywhere/main_tiny.py", *map(str, argv)])
        status = 0
        try:
            with rep.script(rep.options("Tiny.\n\nRun: python main_tiny.py", repeats=3)) as args:
                body(args)
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return SimpleNamespace(status=status, stdout=out, stderr=err)

    return run


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
    for parse in (rep.positive_int, rep.count):
        if parse is rep.positive_int or number >= 2**43:
            with pytest.raises(argparse.ArgumentTypeError, match="is too large: at most"):
                parse(str(number))
    assert rep.positive_int(str(2**31 - 1)) == 2**31 - 1 and rep.count(str(2**43 - 1)) == 2**43 - 1
    torch.manual_seed(rep.LARGEST_COUNT * 1_000_003 + rep.LARGEST_INT)  # the largest seed of a step


def test_help_tells_defaults_where_there_are_any():
    parser = rep.options("Tiny.")
    parser.add_argument("--n-tokens", type=rep.positive_int, help="new tokens (default: up to the context)")
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
    parser = rep.options("Tiny.", repeats=None, plot=False, dtype=False, data=False, weights=False)
    args = parser.parse_args([])
    assert args.plot is args.data is None and args.dtype == "float32" and args.repeats == 1
    assert args.checkpoint == utils.GPTLITE_CKPT_PATH
    for option in ("--plot x.png", "--dtype float16", "--repeats 2", "--data x.txt", "--checkpoint x.pth"):
        option = option.split()
        with pytest.raises(SystemExit) as end:
            parser.parse_args(option)
        assert end.value.code == 2 and f"unrecognized arguments: {option[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(ROOT.glob("main_*.py")), ids=lambda path: path.stem)
def test_plot_is_an_option_of_the_scripts_with_a_figure(path):
    source = path.read_text()
    has_figure = "args.plot" in source
    assert has_figure == ("save_figure(" in source or "plot_lines(" in source)
    assert has_figure != ("plot=False" in source)


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
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport inference_report as rep\n"
        "with rep.script(rep.options('Tiny.')):\n"
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


def test_report_is_written_although_its_reader_has_gone(tmp_path):
    """script --json r.json | head -1, and with standard output or error closed."""
    script = tmp_path / "main_tiny.py"
    script.write_text(
        f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import inference_report as rep\nfrom gptlite import GPTlite\nfrom helpers import tiny_model\n"
        "with rep.script(rep.options('Tiny.')) as args:\n"
        "    report = rep.Report(args, 'tiny technique', tiny_model(GPTlite))\n"
        "    print('on its way', file=sys.stderr)\n"
        "    report.why('word ' * 100_000)\n"
        "    report.finish()\n"
    )
    for number, (end, status, stderr) in enumerate(
        [("| true", 1, "on its way\n"), (">&-", 0, "on its way\n"), (">&- 2>&-", 0, "")]
    ):
        path = tmp_path / f"{number}.json"
        line = (
            f'"$0" "$@" {end}'
            if end != "| true"
            else '{ "$0" "$@"; echo $? >status; } | true; exit $(cat status)'
        )
        command = ["sh", "-c", line, sys.executable, script, "--device", "cpu", "--json", path]
        run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert (run.returncode, run.stdout, run.stderr) == (status, "", stderr)
        assert json.loads(path.read_text())["technique"] == "tiny technique"


# Cost model


def sizes_of(model):
    return SimpleNamespace(n_layers=len(model.blocks), d_model=model.fc_out.in_features)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 12), st.integers(1, 4))
def test_forward_cost_of_new_tokens_behind_a_cache(n_layers, batch_size, n_past, n_new):
    """Against PyTorch's counter, token by token (it counts what a mask hides as well), and real bytes."""
    model = tiny_model(GPTlite_KVCache, n_layers=n_layers)
    tokens = random_tokens(batch_size, n_past + n_new)
    flops = 0
    with torch.no_grad():
        cache = model(tokens[:, :n_past])[1] if n_past else None
        for token in tokens[:, n_past:].split(1, dim=1):
            with FlopCounterMode(display=False) as counter:
                _, cache = model(token, cache)
            flops += counter.get_total_flops()
    cost = rep.forward_cost(sizes_of(model), 16, batch_size, n_new, n_past, torch.float64)
    assert cost.flops == flops
    tables = utils.weight_bytes(model.token_embedding, model.position_embedding)  # a row a token: left out
    cache_bytes = sum(t.numel() * t.element_size() for kv in cache for t in kv)
    assert cost.n_bytes == utils.weight_bytes(model) - tables + cache_bytes


def test_forward_cost_of_a_prompt():
    """Against PyTorch's counter less the half of the scores that the mask hides."""
    model, B, T = tiny_model(GPTlite), 3, 16
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(random_tokens(B, T))
    hidden = 2 * 4 * 32 * B * (T * T - T * (T + 1) // 2)  # 2 layers, 4 d a pair
    assert rep.forward_cost(sizes_of(model), 16, B, T, 0, torch.float64).flops == (
        counter.get_total_flops() - hidden
    )


@pytest.mark.parametrize("get", [get_gptlite_model_parameters, get_gptlite_distilled_model_parameters])
def test_forward_cost_at_full_size(get):
    p = get()
    model = utils.make_model(GPTlite, 96, get is get_gptlite_distilled_model_parameters)
    tables = utils.weight_bytes(model.token_embedding, model.position_embedding)
    in_float32 = rep.forward_cost(p, 96, 1, 1, 99, torch.float32)
    kv_bytes = 2 * p.n_layers * p.d_model * 4 * 100
    assert in_float32.n_bytes == utils.weight_bytes(model) - tables + kv_bytes
    assert rep.forward_cost(p, 96, 1, 1, 99, torch.bfloat16).n_bytes * 2 == in_float32.n_bytes
    assert rep.forward_cost(p, 96, 1, 1, 99, torch.float32, weights=False).n_bytes == kv_bytes
    batch = rep.forward_cost(p, 96, 8, 1, 99, torch.float32)
    assert batch.flops == 8 * in_float32.flops
    assert batch.n_bytes == in_float32.n_bytes + 7 * kv_bytes  # the weights once


def test_lower_bound_and_share():
    cost, ceilings = rep.Cost(flops=2e9, n_bytes=4e7), rep.Ceilings(1e11, 1e10)
    assert rep.lower_bound_ms(cost, ceilings) == pytest.approx(20)  # computing: 20 ms, reading: 4
    assert rep.lower_bound_ms(rep.Cost(1e7, 4e7), ceilings) == pytest.approx(4)
    assert rep.share_of(4, 10) == "40%"
    for unknown in (rep.Ceilings(None, 1e10), rep.Ceilings(1e11, None)):
        assert rep.lower_bound_ms(cost, unknown) is None
    assert rep.share_of(None, 10) == rep.share_of(4, None) == "-"


def test_ceilings_are_positive():
    ceilings = rep.measure_ceilings(torch.device("cpu"), working_set=100_000, seconds=0.01)
    assert ceilings.flops_per_s > 1e8 and ceilings.bytes_per_s > 1e7


# The report

MEASUREMENT = utils.Measurement(
    output=None,
    ttft_ms=12345.6,
    tpot_ms=1234.56,
    tpot_p99_ms=2345.67,
    tokens_per_s=12345.6,
    tokens_per_s_spread=(12000.0, 13000.0),
    forward_tokens=1_234_567,
    n_steps=192,
    steps_ms=[1.0],
)
ROW = {
    "peak_memory_mb": 1234.5,
    "kv_bytes_per_token": 18432.0,
    "valid_loss": 1.2345,
    "n_parameters": 10_813_536,
    "same_output": True,
}


def full_report(args, passed=True):
    report = rep.Report(args, "tiny technique", tiny_model(GPTlite), batch_size=2, prompt_len=3, n_tokens=4)
    report.row("no cache, batch 8", MEASUREMENT, baseline=True, **ROW)
    faster = MEASUREMENT._replace(tokens_per_s=2 * MEASUREMENT.tokens_per_s)
    report.row("dynamic, batch 8", faster, **ROW | {"n_parameters": 5_000_000}, hit_rate=0.5)
    report.row("memory only", peak_memory_mb=3.0)
    report.sweep("Past the context", [{"rule": "recompute", "loss": 1.23456}, {"rule": "none", "loss": None}])
    report.check("the same tokens", passed)
    report.why("word " * 100)
    report.finish()


def test_json_on_the_last_line(run):
    result = run(full_report, *CPU, "--json", "-", "--quick")
    assert result.status == 0 and result.stderr == ""
    data = json.loads(result.stdout.splitlines()[-1])
    assert set(data) >= {"script", "technique", "config", "rows", "checks", "why"}
    assert data["script"] == "main_tiny.py" and data["technique"] == "tiny technique"
    config = {
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "batch_size": 2,
        "prompt_len": 3,
        "n_tokens": 4,
        "seed": 42,
        "repeats": 3,
        "quick": True,
        "n_parameters": utils.n_parameters(tiny_model(GPTlite)),
        "checkpoint": "gptlite.pth",
    }
    assert config.items() <= data["config"].items()
    assert data["config"]["device_name"] and data["config"]["versions"]["torch"] == torch.__version__
    assert data["checks"] == {"the same tokens": True}
    assert data["why"] == ["word " * 100]
    keys = "method baseline ttft_ms tpot_ms tpot_p99_ms tokens_per_s peak_memory_mb kv_bytes_per_token"
    keys = {*keys.split(), "forward_tokens", "valid_loss", "n_parameters", "same_output"}
    first, second, third = data["rows"]
    for row in data["rows"]:
        assert set(row) >= keys
    assert first["baseline"] is True and second["baseline"] is third["baseline"] is False
    assert first["ttft_ms"] == 12345.6 and first["forward_tokens"] == 1_234_567
    assert first["same_output"] is True and second["hit_rate"] == 0.5
    assert second["speedup"] == 2
    figures = keys - {"method", "baseline", "peak_memory_mb"}
    assert all(third[key] is None for key in figures) and third["peak_memory_mb"] == 3.0


def test_json_in_a_file(run, tmp_path):
    path = tmp_path / "report.json"
    result = run(full_report, *CPU, "--json", path)
    assert json.loads(path.read_text())["technique"] == "tiny technique"
    assert os.listdir(tmp_path) == ["report.json"] and "{" not in result.stdout


def test_json_knows_no_nan(run, tmp_path):
    """As JSON has it, null; a reader other than Python's would refuse the rest of the file."""

    def body(args):
        report = rep.Report(args, "broken", tiny_model(GPTlite), share=math.inf)
        report.row("nan", valid_loss=math.nan, spread=(1.0, -math.inf))
        report.sweep("of losses", [{"loss": math.nan, "n": 3}])
        report.finish()

    def refuse(constant):
        pytest.fail(f"{constant} is not JSON")

    path = tmp_path / "report.json"
    assert run(body, *CPU, "--json", path).status == 0
    data = json.loads(path.read_text(), parse_constant=refuse)
    assert data["config"]["share"] is data["rows"][0]["valid_loss"] is None
    assert data["rows"][0]["spread"] == [1.0, None]
    assert data["sweeps"]["of losses"] == [{"loss": None, "n": 3}]


def test_page(run):
    lines = run(full_report, *CPU).stdout.splitlines()
    assert lines[0] == "main_tiny.py: tiny technique"
    assert all(len(line) <= 120 for line in lines), max(lines, key=len)
    rule = next(i for i, line in enumerate(lines) if set(line) == {"-"})
    first, second, third = lines[rule + 1 : rule + 4]
    assert first.startswith("no cache, batch 8 ") and first.endswith(" yes")
    assert " 1.00x " in first and " 2.00x " in second and "10,813,536" in first
    assert third.split() == "memory only - - - - - 3.0 - - - - -".split()
    order = [lines.index("Past the context"), lines.index("checks:"), lines.index("why:")]
    assert rule < order[0] and order == sorted(order)
    assert "  ok     the same tokens" in lines
    assert any(line.split() == ["none", "-"] for line in lines)


def test_false_check_ends_with_status_1_after_the_report(run, tmp_path):
    path = tmp_path / "report.json"
    result = run(lambda args: full_report(args, passed=False), *CPU, "--json", path)
    assert result.status == 1 and result.stderr == ""
    assert "  FAILED the same tokens" in result.stdout and "why:" in result.stdout
    assert json.loads(path.read_text())["checks"] == {"the same tokens": False}
    result = run(lambda args: full_report(args, passed=False), *CPU, "--json", "-")
    assert result.status == 1 and json.loads(result.stdout.splitlines()[-1])["why"]


def test_no_speed_for_another_output(run):
    def body(args):
        report = rep.Report(args, "wrong technique", tiny_model(GPTlite))
        report.row("baseline", MEASUREMENT, baseline=True, **ROW)
        report.row("wrong", MEASUREMENT, **ROW | {"same_output": False}, first_difference=7)
        report.row("near", MEASUREMENT, **ROW | {"same_output": "approximate"})
        report.finish()

    result = run(body, *CPU, "--json", "-")
    *page, last = result.stdout.splitlines()
    _, wrong, near = json.loads(last)["rows"]
    for key in ("ttft_ms", "tpot_ms", "tpot_p99_ms", "tokens_per_s", "tokens_per_s_spread", "speedup"):
        assert wrong.get(key) is None and near[key] is not None
    assert wrong["same_output"] is False and wrong["peak_memory_mb"] == 1234.5
    assert near["same_output"] is None and near["approximate"] is True
    assert any(line.startswith("wrong ") and line.endswith("no, from token 7") for line in page)
    assert any(line.startswith("near ") and line.endswith("approximate") for line in page)


def test_rows_of_methods(run):
    """Compared with the first, the prompt cut off, as far as equality is promised; speed only if equal."""
    prompt = random_tokens(2, 3)
    reference = torch.cat([prompt, torch.tensor([[5, 6, 7], [8, 9, 1]])], dim=1)
    wrong = reference.clone()
    wrong[1, 4] = 0
    late = reference.clone()
    late[:, 5] = 0  # behind what is promised
    logits = torch.zeros(2, 2, 16)
    logits[..., 3] = 1.0
    model, buffers = tiny_model(GPTlite), [torch.zeros(1000)]
    outputs = {"base": reference, "same": reference.clone(), "wrong": wrong, "late": late}
    methods = [utils.Method(name, lambda: None, [model]) for name in outputs]
    methods[1] = methods[1]._replace(buffers=buffers)
    results = {name: MEASUREMENT._replace(output=output) for name, output in outputs.items()}

    def body(args):
        report = rep.Report(args, "rows", model)
        report.method_rows(methods, results, prompt, logits, ", batch 2", {"same": {"valid_loss": 1.5}})
        report.finish()

    result = run(body, *CPU, "--json", "-")
    data = json.loads(result.stdout.splitlines()[-1])
    base, same, wrong, late = data["rows"]
    assert [row["method"] for row in data["rows"]] == [f"{name}, batch 2" for name in outputs]
    assert base["baseline"] and not same["baseline"]
    # two of the three tokens are compared: the third is nowhere called equal
    assert [row["same_output"] for row in data["rows"]] == [True, None, False, None]
    assert same["approximate"] and late["approximate"] and "approximate" not in base
    assert wrong["first_difference"] == 1 and wrong["tpot_ms"] is None
    assert late["speedup"] == 1 and same["valid_loss"] == 1.5 and base["valid_loss"] is None
    weights = utils.model_size_mb(model) + prompt.numel() * 8 / 1e6
    assert base["peak_memory_mb"] == pytest.approx(weights)
    assert same["peak_memory_mb"] == pytest.approx(weights + 4000 / 1e6)
    assert result.status == 1
    assert [name for name, passed in data["checks"].items() if not passed] == [
        "wrong, batch 2: same first 2 of 3 tokens as base"
    ]


@pytest.mark.parametrize("n_compared, name", [(3, "same tokens as base"), (4, "same tokens as base")])
def test_rows_of_methods_compared_to_the_end(run, n_compared, name):
    """More logits than tokens compare no more than there is."""
    prompt, model = random_tokens(2, 3), tiny_model(GPTlite)
    output = torch.cat([prompt, random_tokens(2, 3, seed=1)], dim=1)
    methods = [utils.Method(name, lambda: None, [model]) for name in ("base", "other")]
    results = {method.name: MEASUREMENT._replace(output=output) for method in methods}
    seen = {}

    def body(args):
        report = rep.Report(args, "rows", model)
        report.method_rows(methods, results, prompt, torch.zeros(2, n_compared, 16))
        seen.update(report.data)

    assert run(body).status == 0
    assert seen["checks"] == {f"other: {name}": True}
    assert [row["same_output"] for row in seen["rows"]] == [True, True]


@pytest.mark.parametrize("model_class", [GPTlite, GPTlite_KVCache])
def test_behind_a_tie_the_model_still_decides(run, model_class):
    """A method may part from the baseline at a tie; then it must go on as the model does from there."""
    model, prompt = tiny_model(model_class), random_tokens(2, 4)

    def logits_of(tokens):
        return tiny_model(GPTlite)(tokens).detach()  # [B, T, V]

    def go_on(tokens, n):
        for _ in range(n):
            tokens = torch.cat([tokens, logits_of(tokens)[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
        return tokens

    reference = go_on(prompt, 6)  # [2, 10]
    logits = logits_of(reference[:, :-1])[:, 3:].clone()  # [2, 6, V]
    second = logits[0, 1].topk(2).indices[1]
    logits[0, 1, second] = logits[0, 1].max()  # a tie at the second token of the first row
    other = reference[:, :6].clone()
    other[0, 5] = second
    right = go_on(other, 4)  # another text from there, and the model's own
    wrong = right.clone()
    wrong[0, 8] = logits_of(wrong[:, :8])[0, -1].argmin()
    outputs = {"base": reference, "right": right, "wrong": wrong}
    methods = [utils.Method(name, lambda: None, [model]) for name in outputs]
    results = {name: MEASUREMENT._replace(output=output) for name, output in outputs.items()}
    rows = []

    def body(args):
        report = rep.Report(args, "ties", model)
        report.method_rows(methods, results, prompt, logits)
        rows.extend(report.data["rows"])

    assert run(body).status == 0
    assert [row["same_output"] for row in rows] == [True, True, False]
    assert rows[2]["first_difference"] == 4


@pytest.mark.parametrize("dtype, same", [(torch.float32, False), (torch.bfloat16, True)])
def test_a_choice_within_the_rounding_of_16_bits_is_a_tie(run, dtype, same):
    """The two best logits are one step of bfloat16 apart: rounding decides there, not in float32."""
    prompt, model = random_tokens(1, 2), tiny_model(GPTlite)
    logits = torch.tensor([[[8.0, 8.0625, 1.0]]], dtype=dtype)
    methods = [utils.Method(name, lambda: None, [model]) for name in ("base", "other")]
    outputs = [torch.cat([prompt, torch.tensor([[token]])], dim=1) for token in (1, 0)]
    results = {m.name: MEASUREMENT._replace(output=o) for m, o in zip(methods, outputs, strict=True)}
    seen = []

    def body(args):
        report = rep.Report(args, "ties", model)
        report.method_rows(methods, results, prompt, logits)
        seen.extend(row["same_output"] for row in report.data["rows"])

    assert run(body).status == 0 and seen == [True, same]


def test_narrow_table_keeps_its_headings_in_one_line():
    table = rep.format_table(["method", "peak MB"], [["a", "1.0"], ["longer", "-"]])
    assert table == "method  peak MB\n---------------\na           1.0\nlonger        -"


@pytest.mark.parametrize("name", ["figure.png", "figure.svg"])
def test_figure(tmp_path, name):
    pytest.importorskip("matplotlib")
    figure, axes = rep.new_figure()
    axes.plot([1, 2], [3, 4])
    rep.save_figure(figure, tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    start = (tmp_path / name).read_bytes()[:100]
    assert b"PNG" in start if name.endswith("png") else b"<?xml" in start


def test_plot_lines(tmp_path):
    pytest.importorskip("matplotlib")
    lines = {"first": [1.0, 20.0], "second": [3.0, 400.0]}
    rep.plot_lines(tmp_path / "lines.svg", (256, 1024), lines, "tokens", "time (ms)", "Title")
    text = (tmp_path / "lines.svg").read_text()
    assert all(f"<!-- {word} -->" in text for word in ("first", "second", "256", "1024", "tokens", "Title"))


def test_a_disk_that_is_full_at_the_end_leaves_the_page(run, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rep, "write_atomically", full)
    result = run(full_report, *CPU, "--json", tmp_path / "report.json")
    assert result.status == 2 and "No space left" in result.stderr
    assert "the same tokens" in result.stdout and "why:" in result.stdout
