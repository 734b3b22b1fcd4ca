"""The harness: methods side by side on a clock of its own, the report's page and JSON, exit statuses."""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, assert_close, random_tokens, tiny_model

import inference_report as harness
import inference_utils as utils
import inference_words as words
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from inference_report import Method
from main_kvcache import generate, generate_kvcache, generate_static

CPU = ["--device", "cpu"]
TEXT = SimpleNamespace(valid=random_tokens(1, 400, seed=5)[0])
KV_BYTES = 2 * 2 * 2 * 16 * 8  # of a token: keys and values, 2 layers, 2 heads of 16, float64


@pytest.fixture
def run(monkeypatch, capsys):
    """run(body, *options): body(args) as a script's main block; status, output, JSON (with --json -)."""

    def run(body, *argv):
        monkeypatch.setattr(sys, "argv", ["/anywhere/main_tiny.py", *CPU, *map(str, argv)])
        status = 0
        try:
            with harness.script(harness.options("Tiny.", repeats=3, n_windows=6)) as args:
                body(args)
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        lines = out.splitlines()
        data = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
        return SimpleNamespace(status=status, stdout=out, stderr=err, json=data)

    return run


@pytest.fixture
def now(monkeypatch):
    """Seconds on the clock that the measuring code reads; only models of `timed` move it."""
    seconds = [100.0]
    monkeypatch.setattr(utils, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    return seconds


def timed(model, now, durations):
    """The model, every forward of which takes the next of `durations` ms (the last one again and again)."""
    left = list(durations)

    def take(*_):
        now[0] += (left.pop(0) if len(left) > 1 else left[0]) / 1000

    model.register_forward_hook(take)
    return model


def compare(run, prompts, n_tokens, *methods, argv=(), label=None, text=TEXT):
    """Report.compare in a run of its own: its result, with the rows that it returned as .rows."""
    seen = {}

    def body(args):
        report = harness.Report(args, "tiny", methods[0].model, text=text)
        seen["rows"] = report.compare(prompts, n_tokens, *methods, label=label)
        seen["report"] = report
        report.finish()

    result = run(body, "--json", "-", *argv)
    return SimpleNamespace(**vars(result), rows=seen.get("rows"), report=seen.get("report"))


# Methods side by side


def test_compare_measures_everything(run, now):
    prompts = random_tokens(2, 5)
    plain, cached, static = (tiny_model(c) for c in (GPTlite, GPTlite_KVCache, GPTlite_StaticKVCache))
    methods = [
        Method("no cache", generate, timed(plain, now, [10])),
        Method("dynamic", generate_kvcache, timed(cached, now, [2])),
        Method("static", generate_static, timed(static, now, [1]), StaticKVCache(static, 2), steps_saved=7),
    ]
    result = compare(run, prompts, 6, *methods)
    assert result.status == 0, result.stdout
    base, dynamic, fixed = result.json["rows"]
    assert [row["method"] for row in result.json["rows"]] == [f"{m.name}, batch 2" for m in methods]
    assert list(result.rows) == ["no cache", "dynamic", "static"] and base["baseline"]
    assert not dynamic["baseline"]
    for row, ms in ((base, 10), (dynamic, 2), (fixed, 1)):
        times = [row["ttft_ms"], row["tpot_ms"], row["tpot_p99_ms"], *row["tpot_ms_spread"]]
        assert times == pytest.approx([ms] * 5)
        assert row["tokens_per_s"] == pytest.approx(2 * 6 / (6 * ms / 1000))
        assert row["speedup"] == pytest.approx(10 / ms) and not row["speedup_is_noise"]
        assert row["same_output"] is True and row["n_steps"] == 6
        assert row["n_parameters"] == utils.n_parameters(plain)
    assert base["forward_tokens"] == 2 * sum(range(5, 11)) and dynamic["forward_tokens"] == 2 * 10
    assert base["kv_bytes_per_token"] is None and fixed["steps_saved"] == 7
    assert dynamic["kv_bytes_per_token"] == fixed["kv_bytes_per_token"] == KV_BYTES
    losses = utils.window_losses(tiny_model(GPTlite), TEXT.valid, 6)
    assert_close(base["valid_loss"], losses.mean().item(), 1e-12)
    assert base["loss_difference"] is None and dynamic["loss_difference"] == pytest.approx(0, abs=1e-9)
    assert all(result.json["checks"].values())
    assert {"dynamic, batch 2: same tokens as no cache", "static, batch 2: same tokens as no cache"} <= set(
        result.json["checks"]
    )
    measured = result.report.measured["dynamic, batch 2"]
    assert len(measured.steps_ms) == 6 and measured.output.shape == (2, 11)


def test_peak_memory_counts_weights_once_and_the_buffers(run):
    model = tiny_model(GPTlite_StaticKVCache)
    cache = StaticKVCache(model, 1)
    method = Method("static", generate_static, model, cache)
    row = compare(run, random_tokens(1, 3), 2, method).rows["static"]
    held = utils.weight_bytes(model) + 3 * 8 + cache.k.nbytes + cache.v.nbytes
    assert held < 1e6 * row["peak_memory_mb"] < held + 100_000
    two = Method("static", generate_static, model, cache, steps=[model, torch.nn.Identity()])
    assert compare(run, random_tokens(1, 3), 2, two).rows["static"]["peak_memory_mb"] == pytest.approx(
        row["peak_memory_mb"], abs=1e-3
    )


def test_methods_alternate_after_a_warm_up(run):
    order = []

    def noted(name):
        def generate_noted(model, prompts, n_tokens, seqlen):
            order.append(name)
            return generate(model, prompts, n_tokens, seqlen)

        return Method(name, generate_noted, tiny_model(GPTlite))

    compare(run, random_tokens(1, 3), 2, noted("a"), noted("b"), argv=["--repeats", "2"])
    assert order[:6] == ["a", "b"] * 3 and sorted(order[6:]) == ["a", "b"]  # and one run each for memory


def test_names_of_rows(run):
    method = Method("m", generate, tiny_model(GPTlite))
    for label, name in ((None, "m, batch 1"), ("", "m"), ("prompt 3", "m, prompt 3")):
        assert compare(run, random_tokens(1, 3), 1, method, label=label).json["rows"][0]["method"] == name


def test_two_methods_of_one_name_are_refused(run):
    methods = [Method("m", generate, tiny_model(GPTlite)) for _ in range(2)]
    result = compare(run, random_tokens(1, 3), 1, *methods)
    assert result.status == 2 and "two methods have one name" in result.stderr


@pytest.mark.parametrize(
    "error", [RuntimeError("a peer's own fault"), IndexError("out of range"), KeyError("x")]
)
def test_an_error_of_a_method_is_a_failure(run, error):
    """No row says 'does not apply' because other people's code failed."""

    def fail(model, prompts, n_tokens, seqlen):
        raise error

    methods = [Method("ours", generate, tiny_model(GPTlite)), Method("peer", fail, tiny_model(GPTlite))]
    with pytest.raises(type(error)):
        compare(run, random_tokens(1, 3), 2, *methods)


# The same output


def wrong_from(position):
    def generate_wrong(model, prompts, n_tokens, seqlen):
        output = generate(model, prompts, n_tokens, seqlen)
        output[-1, prompts.shape[1] + position :] = (output[-1, prompts.shape[1] + position :] + 1) % 16
        return output

    return generate_wrong


def test_another_output_fails_and_has_no_speed(run):
    methods = [
        Method("base", generate, tiny_model(GPTlite)),
        Method("wrong", wrong_from(2), tiny_model(GPTlite)),
        Method("right", generate, tiny_model(GPTlite)),
    ]
    result = compare(run, random_tokens(2, 3), 5, *methods)
    assert result.status == 1
    _, wrong, right = result.json["rows"]
    assert wrong["same_output"] is False and wrong["first_difference"] == 2
    assert all(wrong.get(key) is None for key in [*harness.TIMED, "speedup"]) and wrong["peak_memory_mb"]
    assert right["same_output"] is True and right["speedup"]
    failed = [name for name, passed in result.json["checks"].items() if not passed]
    assert failed == ["wrong, batch 2: same tokens as base"]
    assert "  FAILED wrong, batch 2" in result.stdout and "no, from token 2" in result.stdout


def test_an_approximate_method_is_not_compared(run):
    methods = [
        Method("base", generate, tiny_model(GPTlite)),
        Method("near", wrong_from(0), tiny_model(GPTlite, seed=1), exact=False),
    ]
    result = compare(run, random_tokens(2, 3), 4, *methods)
    base, near = result.json["rows"]
    assert result.status == 0 and result.json["checks"] == {}
    assert near["same_output"] is None and near["approximate"] is True and near["speedup"]
    assert result.stdout.count("approximate") == 2  # in the table and in the JSON
    ours, theirs = (utils.window_losses(tiny_model(GPTlite, seed=s), TEXT.valid, 6) for s in (0, 1))
    pairs = theirs - ours  # [6]
    assert_close(near["valid_loss"], theirs.mean().item(), 1e-9)
    assert_close(near["loss_difference"], pairs.mean().item(), 1e-9)
    assert_close(near["loss_difference_se"], pairs.std().item() / math.sqrt(6), 1e-9)


@pytest.mark.parametrize("T, n_tokens, n_compared", [(10, 12, 7), (16, 4, 1), (20, 3, 1)])
def test_equality_is_promised_within_the_context(run, T, n_tokens, n_compared):
    """The model reads 16 tokens: what it chose after those is compared, and the rest called approximate."""

    def method(function, name):
        return Method(name, function, tiny_model(GPTlite))

    methods = [
        method(generate, "base"),
        method(wrong_from(n_compared), "late"),
        method(wrong_from(n_compared - 1), "wrong"),
    ]
    result = compare(run, random_tokens(1, T), n_tokens, *methods)
    base, late, wrong = result.json["rows"]
    assert base["same_output"] is True and "approximate" not in base
    assert late["same_output"] is None and late["approximate"]
    assert wrong["same_output"] is False and wrong["first_difference"] == n_compared - 1
    assert result.json["checks"] == {
        f"{name}, batch 1: same first {n_compared} of {n_tokens} tokens as base": passed
        for name, passed in (("late", True), ("wrong", False))
    } | {key: True for key in result.json["checks"] if "loss" in key}


def test_a_prompt_beyond_the_context_has_the_same_cache(run):
    model = tiny_model(GPTlite_KVCache)
    row = compare(run, random_tokens(2, 20), 2, Method("m", generate_kvcache, model)).rows["m"]
    assert row["kv_bytes_per_token"] == KV_BYTES


class Tied(GPTlite):
    """A model whose logits for 3 and 5 differ by less than rounding may change, at every position."""

    gap = 1e-4

    def forward(self, x):
        logits = super().forward(x) * 0.01  # far below what follows
        logits[..., 3] = 9.0
        logits[..., 5] = 9.0 - self.gap
        return logits


@pytest.mark.parametrize("gap, same", [(1e-4, True), (1e-2, False)])
def test_a_tie_may_be_decided_either_way(run, gap, same):
    def other_choice(model, prompts, n_tokens, seqlen):
        return torch.cat([prompts, prompts.new_tensor([[3, 5, 5, 3]] * len(prompts))], dim=1)

    model = tiny_model(Tied)
    model.gap = gap
    methods = [Method("base", generate, model), Method("other", other_choice, tiny_model(GPTlite))]
    result = compare(run, random_tokens(2, 3), 4, *methods)
    assert result.json["rows"][1]["same_output"] is same
    assert result.json["rows"][1]["first_difference"] == (None if same else 1)


def test_behind_a_tie_the_model_still_decides(run):
    def wrong_behind_a_tie(model, prompts, n_tokens, seqlen):
        return torch.cat([prompts, prompts.new_tensor([[3, 5, 3, 7]] * len(prompts))], dim=1)

    methods = [
        Method("base", generate, tiny_model(Tied)),
        Method("other", wrong_behind_a_tie, tiny_model(Tied)),
    ]
    result = compare(run, random_tokens(2, 3), 4, *methods)
    assert result.json["rows"][1]["first_difference"] == 3 and result.status == 1


def test_a_choice_within_the_rounding_of_16_bits_is_a_tie(run):
    """8.0 and 8.0625 are one step of bfloat16 apart: rounding decides there, and not in float32."""

    def other_choice(model, prompts, n_tokens, seqlen):
        return torch.cat([prompts, prompts.new_tensor([[5] * n_tokens] * len(prompts))], dim=1)

    for dtype, same in ((torch.bfloat16, True), (torch.float32, False)):
        model = tiny_model(Tied, dtype=dtype)
        model.gap = 0.0625
        methods = [Method("base", generate, model), Method("other", other_choice, model)]
        row = compare(run, random_tokens(1, 3), 3, *methods).json["rows"][1]
        assert row["same_output"] is same


# Losses


def test_a_model_without_a_loss_of_its_own(run):
    methods = [
        Method("base", generate, tiny_model(GPTlite)),
        Method("peer", generate, tiny_model(GPTlite), loss=False),
    ]
    result = compare(run, random_tokens(1, 3), 2, *methods)
    base, peer = result.json["rows"]
    assert base["valid_loss"] > 0 and peer["valid_loss"] is peer["loss_difference"] is None


def test_losses_need_a_text(run):
    result = compare(run, random_tokens(1, 3), 2, Method("m", generate, tiny_model(GPTlite)), text=None)
    assert result.status == 2 and "text=text" in result.stderr
    methods = [Method("m", generate, tiny_model(GPTlite), loss=False)]
    assert compare(run, random_tokens(1, 3), 2, *methods, text=None).status == 0


def test_losses_are_measured_once_a_model(run, monkeypatch):
    calls, original = [], harness.window_losses
    monkeypatch.setattr(
        harness, "window_losses", lambda *args, **sizes: calls.append(args[0]) or original(*args, **sizes)
    )
    one, two = tiny_model(GPTlite), tiny_model(GPTlite, seed=1)
    methods = [
        Method("a", generate, one),
        Method("b", generate, one),
        Method("c", generate, two, exact=False),
    ]
    compare(run, random_tokens(1, 3), 2, *methods)
    assert [id(model) for model in calls] == [id(one), id(two)]


def test_an_exact_method_with_another_loss_fails(run):
    """Tokens may agree by chance where the model has changed; NaN is no success either."""
    for spoil, shown in ((0.05, True), (math.nan, False)):
        other = tiny_model(GPTlite)
        with torch.no_grad():
            other.fc_out.bias[7] += spoil

        def same_tokens(model, prompts, n_tokens, seqlen):
            return generate(tiny_model(GPTlite), prompts, n_tokens, seqlen)

        methods = [Method("base", generate, tiny_model(GPTlite)), Method("other", same_tokens, other)]
        result = compare(run, random_tokens(1, 3), 2, *methods)
        assert result.status == 1
        failed = [name for name, passed in result.json["checks"].items() if not passed]
        assert len(failed) == 1 and "the baseline's loss" in failed[0]
        assert (result.json["rows"][1]["loss_difference"] is not None) == shown


# Spread


def test_a_speed_within_the_spread_is_printed_as_equal(run, now):
    base = timed(tiny_model(GPTlite), now, [10, 10, 10, 20, 10, 10])
    other = timed(tiny_model(GPTlite), now, [10, 10, 10, 10, 10, 30, 10])
    methods = [Method("base", generate, base, loss=False), Method("other", generate, other, loss=False)]
    result = compare(run, random_tokens(1, 3), 1, *methods)
    assert result.json["rows"][1]["speedup_is_noise"] is True
    line = next(line for line in result.stdout.splitlines() if line.startswith("other, batch 1"))
    assert " equal " in line and "x" not in line


def test_a_single_run_and_a_single_token(run, now):
    methods = [Method("m", generate, timed(tiny_model(GPTlite), now, [10]), loss=False)]
    row = compare(run, random_tokens(1, 3), 1, *methods, argv=["--repeats", "1"]).json["rows"][0]
    assert row["ttft_ms_spread"] == [row["ttft_ms"]] * 2
    assert row["tpot_ms"] is row["tpot_p99_ms"] is row["tpot_ms_spread"] is None


def test_99th_percentile_over_the_steps_of_all_runs(run, now):
    """A slow step of one run is seen: medians over the runs would have lost it."""
    model = timed(tiny_model(GPTlite), now, [1] * 22 + [50] + [1])
    methods = [Method("m", generate, model, loss=False)]
    row = compare(run, random_tokens(1, 3), 10, *methods).json["rows"][0]
    assert row["tpot_ms"] == pytest.approx(1) and row["tpot_p99_ms"] == pytest.approx(50)


# Explanations


def test_why_takes_sentences_that_figures_chose(run):
    def body(args):
        report = harness.Report(args, "tiny", tiny_model(GPTlite))
        for text in ("written by hand", "", None, str(words.choose(1, (0, "a"), "b"))):
            with pytest.raises(TypeError, match="no figure chose these words"):
                report.why(text)
        for _ in range(4):
            report.why(words.choose(1, (0, "It is more."), "It is less."))
        with pytest.raises(ValueError, match="at most four lines"):
            report.why(words.choose(1, (0, "It is more."), "It is less."))
        report.finish()

    assert run(body, "--json", "-").json["why"] == ["It is more."] * 4


def test_why_step(run, monkeypatch):
    monkeypatch.setattr(harness, "measure_ceilings", lambda *_: harness.Ceilings(1e9, 1e9))

    def body(args):
        report = harness.Report(args, "tiny", tiny_model(GPTlite))
        costs = {"a": harness.Cost(1e6, 2e6), "b": harness.Cost(3e6, 1e6), "c": harness.Cost(1e6, 1e6)}
        report.why_step(costs, {"a": {"tpot_ms": 4.0}, "b": {"tpot_ms": 6.0}, "c": {"tpot_ms": None}})
        report.finish()

    (line,) = run(body, "--json", "-").json["why"]
    assert "at least 2 ms of reading, 50% reached; b" in line
    assert "at least 3 ms of computing, 50% reached; c" in line and line.count("reached") == 2


# Rows, checks, sweeps

MEASUREMENT = utils.Measurement(
    output=None,
    ttft_ms=12345.6,
    tpot_ms=1234.56,
    tpot_p99_ms=2345.67,
    tokens_per_s=12345.6,
    ttft_ms_spread=(12000.0, 13000.0),
    tpot_ms_spread=(1200.0, 1300.0),
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
FASTER = MEASUREMENT._replace(tokens_per_s=24691.2, tokens_per_s_spread=(24000.0, 25000.0))


def full_report(args, passed=True):
    report = harness.Report(
        args, "tiny technique", tiny_model(GPTlite), batch_size=2, prompt_len=3, n_tokens=4
    )
    report.row("no cache, batch 8", MEASUREMENT, baseline=True, **ROW)
    report.row("dynamic, batch 8", FASTER, **ROW | {"n_parameters": 5_000_000}, hit_rate=0.5)
    report.row("memory only", peak_memory_mb=3.0)
    report.sweep("Past the context", [{"rule": "recompute", "loss": 1.23456}, {"rule": "none", "loss": None}])
    report.check("the same tokens", passed)
    report.why(words.choose(1, (0, "word " * 100 + "end."), "no words."))
    report.finish()


def test_json_has_the_form_of_every_report(run):
    result = run(full_report, "--json", "-", "--quick")
    data = result.json
    assert result.status == 0 and result.stderr == ""
    assert list(data) == ["script", "technique", "config", "rows", "sweeps", "checks", "why"]
    assert data["script"] == "main_tiny.py" and data["technique"] == "tiny technique"
    config = {
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "batch_size": 2,
        "prompt_len": 3,
        "n_tokens": 4,
        "seed": 42,
        "repeats": 1,
        "quick": True,
        "n_windows": 4,
        "n_parameters": utils.n_parameters(tiny_model(GPTlite)),
        "checkpoint": "gptlite_distilled.pth",
        "weights_sha256": harness.sha256_of(utils.GPTLITE_DISTILLED_CKPT_PATH),
        "options": {"device": "cpu", "quick": True},
    }
    assert config.items() <= data["config"].items()
    assert data["config"]["device_name"] and data["config"]["versions"]["torch"] == torch.__version__
    assert data["checks"] == {"the same tokens": True} and data["why"] == ["Word " + "word " * 99 + "end."]
    keys = "method baseline ttft_ms tpot_ms tpot_p99_ms tokens_per_s peak_memory_mb kv_bytes_per_token"
    keys += " forward_tokens valid_loss loss_difference loss_difference_se n_parameters same_output"
    first, second, third = data["rows"]
    for row in data["rows"]:
        assert set(row) >= {*keys.split()}
    assert first["baseline"] is True and second["baseline"] is third["baseline"] is False
    assert first["ttft_ms"] == 12345.6 and first["forward_tokens"] == 1_234_567
    assert first["same_output"] is True and second["hit_rate"] == 0.5 and second["speedup"] == 2
    figures = {*keys.split()} - {"method", "baseline", "peak_memory_mb"}
    assert all(third[key] is None for key in figures) and third["peak_memory_mb"] == 3.0


def test_options_in_the_json_hold_no_folder_of_this_machine(run, tmp_path):
    def body(args):
        args.given |= {"prompt": "to be/or not", "files": [tmp_path / "a.pth", tmp_path / "b.pth"]}
        harness.Report(args, "tiny", tiny_model(GPTlite)).finish()

    path = tmp_path / "report.json"
    run(body, "--json", path, "--repeats", "3", "--data", tmp_path / "own.txt", "--plot", tmp_path / "f.png")
    text = path.read_text()
    assert str(tmp_path) not in text
    options = {"device": "cpu", "repeats": 3, "data": "own.txt", "prompt": "to be/or not"}
    assert json.loads(text)["config"]["options"] == options | {"files": ["a.pth", "b.pth"]}


def test_json_in_a_file(run, tmp_path):
    path = tmp_path / "report.json"
    result = run(full_report, "--json", path)
    assert json.loads(path.read_text())["technique"] == "tiny technique"
    assert os.listdir(tmp_path) == ["report.json"] and "{" not in result.stdout


def test_json_knows_no_nan(run, tmp_path):
    """As JSON has it, null; a reader other than Python's would refuse the rest of the file."""

    def body(args):
        report = harness.Report(args, "broken", tiny_model(GPTlite), share=math.inf)
        report.row("nan", valid_loss=math.nan, spread=(1.0, -math.inf))
        report.sweep("of losses", [{"loss": math.nan, "n": 3}])
        report.finish()

    def refuse(constant):
        pytest.fail(f"{constant} is not JSON")

    path = tmp_path / "report.json"
    assert run(body, "--json", path).status == 0
    data = json.loads(path.read_text(), parse_constant=refuse)
    assert data["config"]["share"] is data["rows"][0]["valid_loss"] is None
    assert data["rows"][0]["spread"] == [1.0, None]
    assert data["sweeps"]["of losses"] == [{"loss": None, "n": 3}]


def test_page(run):
    lines = run(full_report).stdout.splitlines()
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


def test_columns_that_a_report_adds_and_hides(run):
    def body(args):
        columns = {"hit_rate": ("hits", "{:.0%}")}
        report = harness.Report(args, "tiny", tiny_model(GPTlite), columns=columns, hide=("tpot_p99_ms",))
        report.row("m", MEASUREMENT, baseline=True, hit_rate=0.5, **ROW)
        report.finish()

    page = run(body).stdout
    assert " hits" in page and " 50%" in page and "p99" not in page
    assert "parameters" not in page.partition("\n\n")[2]  # one size only: the header has it


def test_what_runs_is_printed_before_the_work(run, capsys):
    def body(args):
        harness.Report(args, "tiny technique", tiny_model(GPTlite), batch_size=2, prompt_len=3)
        assert capsys.readouterr().out.startswith("main_tiny.py: tiny technique\n")

    assert run(body).status == 0


def test_false_check_ends_with_status_1_after_the_report(run, tmp_path):
    path = tmp_path / "report.json"
    result = run(lambda args: full_report(args, passed=False), "--json", path)
    assert result.status == 1 and result.stderr == ""
    assert "  FAILED the same tokens" in result.stdout and "why:" in result.stdout
    assert json.loads(path.read_text())["checks"] == {"the same tokens": False}
    result = run(lambda args: full_report(args, passed=False), "--json", "-")
    assert result.status == 1 and result.json["why"]


def test_check_close(run):
    ones = torch.ones(3)

    def body(args):
        report = harness.Report(args, "tiny", tiny_model(GPTlite))
        assert report.check_close("near", ones + 5e-5, ones)
        assert not report.check_close("far", ones + 5e-4, ones)
        assert report.check_close("far enough", ones + 5e-4, ones, tolerance=1e-3)
        assert not report.check_close("nan", ones * math.nan, ones)
        assert not report.check_close("shape", ones[:2], ones)
        report.finish()

    result = run(body, "--json", "-")
    assert result.status == 1
    assert list(result.json["checks"].values()) == [True, False, True, False, False]
    assert "near (differ by 5e-05, at most 1e-04)" in result.json["checks"]


def test_speed_up_is_that_over_the_baseline_before_it(run):
    def body(args):
        report = harness.Report(args, "tiny", tiny_model(GPTlite))
        for name, measurement in (("first", MEASUREMENT), ("second", FASTER)):
            report.row(name, measurement, baseline=True)
            report.row(f"after {name}", FASTER)
        report.finish()

    rows = run(body, "--json", "-").json["rows"]
    assert [row["speedup"] for row in rows] == [1, 2, 1, 1]
    assert [row["speedup_is_noise"] for row in rows] == [False, False, False, True]


def test_time_sweep(run, now):
    asked = []

    def functions(n):
        asked.append(n)
        return {
            "fast": lambda: now.__setitem__(0, now[0] + n / 1000),
            "slow": lambda: now.__setitem__(0, now[0] + 3 * n / 1000),
        }

    def body(args):
        report = harness.Report(args, "tiny", tiny_model(GPTlite))
        report.time_sweep("By size", "tokens", (4, 8), functions)
        report.finish()

    rows = run(body, "--json", "-").json["sweeps"]["By size"]
    assert asked == [4, 8] and [row["tokens"] for row in rows] == [4, 8]
    assert [row["slow"] / row["fast"] for row in rows] == pytest.approx([3, 3])
    assert rows[1]["fast"] == pytest.approx(8)


def test_figure_of_a_run(run, tmp_path):
    pytest.importorskip("matplotlib")

    def body(args):
        model = tiny_model(GPTlite)
        report = harness.Report(args, "tiny", model)
        report.compare(random_tokens(1, 3), 4, Method("base", generate, model, loss=False))
        report.sweep("By size", [{"n": 1, "a": 2.0, "b": None}, {"n": 2, "a": 4.0, "b": 3.0}])
        report.plot_steps(["base, batch 1"])
        report.plot_sweep("By size")
        report.plot_points({"one": (1.0, 2.0), "none": (1.0, None)}, "speed", "memory")
        report.plot_dots({"held": ([1, 2], [1, 1])}, "step", "token held")
        report.finish()

    path = tmp_path / "figure.svg"
    assert run(body, "--plot", path).status == 0
    text = path.read_text()
    for word in ("Time per token", "By size", "generated token", "speed", "memory", "one", "token held"):
        assert f"<!-- {word} -->" in text
    assert "<!-- none -->" not in text


def test_no_figure_unless_asked(run, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "new_figure", lambda *_, **__: pytest.fail("not asked for"))

    def body(args):
        report = harness.Report(args, "tiny", tiny_model(GPTlite))
        report.plot_lines({"a": ([1], [2])}, "x", "y")
        report.finish()

    assert run(body).status == 0


# Loading


def arguments(**more):
    return SimpleNamespace(
        device=torch.device("cpu"), dtype=torch.float32, data=None, checkpoint=None, **more
    )


def test_text_of_ones_own(tmp_path):
    (tmp_path / "own.txt").write_text("0123456\n" * 50)
    args = arguments()
    args.data = tmp_path / "own.txt"
    text = harness.load_text(args)
    assert text.vocab_size == 96 and len(text.train) == 360 and len(text.valid) == 40
    assert text.prompts(3, 8).shape == (3, 8) and text.prompts(2, 8, "train").dtype == torch.int64
    assert torch.equal(text.prompts(3, 8), text.prompts(3, 8))
    assert text.decode(text.prompt("0123")[0]) == "0123" and text.prompt("01").shape == (1, 2)
    for wrong, message in (("", "empty"), ("caf\u00e9", "unknown character")):
        with pytest.raises(ValueError, match=message):
            text.prompt(wrong)


def test_prompts_that_cannot_fit_are_refused_before_work(tmp_path):
    (tmp_path / "own.txt").write_text("0123456\n" * 50)
    args = arguments()
    args.data = tmp_path / "own.txt"
    with pytest.raises(ValueError, match="tokens at once need about .* GB.*try a smaller batch"):
        harness.load_text(args).prompts(99_999_999, 30)


@pytest.mark.parametrize("packed", [True, False])
def test_build(distilled_checkpoint, packed):
    state = utils.load_checkpoint(distilled_checkpoint)
    model = harness.build(arguments(), state, GPTlite_KVCache, packed)
    assert isinstance(model, GPTlite_KVCache) and not model.training and len(model.blocks) == 3
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    args = arguments()
    args.dtype = torch.bfloat16
    assert {p.dtype for p in harness.build(args, state, GPTlite, packed).parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="does not fit"):
        harness.build(args, {"x": torch.zeros(1)}, GPTlite)


def test_load_models_have_equal_weights(distilled_checkpoint):
    args = arguments()
    args.checkpoint = distilled_checkpoint
    one, two = harness.load_models(args, GPTlite, GPTlite_KVCache)
    assert type(one) is GPTlite and type(two) is GPTlite_KVCache
    with torch.no_grad():
        assert_close(one(random_tokens(1, 9, vocab_size=96)), two(random_tokens(1, 9, vocab_size=96))[0])


def test_code_of_a_script_is_what_it_imports_without_the_harness(tmp_path):
    names = [path.relative_to(ROOT).as_posix() for path in harness.sources(ROOT / "main_kvcache.py")]
    assert {"main_kvcache.py", "gptlite.py", "gptlite_kvcache.py"} <= set(names)
    assert not any(name.startswith("inference_") for name in names)
    assert harness.sources(tmp_path / "absent.py") == []
    assert harness.code_sha256(ROOT / "main_kvcache.py") != harness.code_sha256(ROOT / "gptlite.py")


# Readers and disks


def test_report_is_written_although_its_reader_has_gone(tmp_path):
    """script --json r.json | head -1, and with standard output or error closed."""
    script = tmp_path / "main_tiny.py"
    script.write_text(
        f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import inference_report as harness\nfrom gptlite import GPTlite\nfrom helpers import tiny_model\n"
        "with harness.script(harness.options('Tiny.')) as args:\n"
        "    report = harness.Report(args, 'tiny technique', tiny_model(GPTlite))\n"
        "    print('on its way', file=sys.stderr)\n"
        "    report.why(harness.words.choose(1, (0, 'word ' * 100_000), ''))\n"
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
        command = ["sh", "-c", line, sys.executable, script, *CPU, "--json", path]
        run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert (run.returncode, run.stdout, run.stderr) == (status, "", stderr)
        assert json.loads(path.read_text())["technique"] == "tiny technique"


def test_a_disk_that_is_full_at_the_end_leaves_the_page(run, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(harness, "write_atomically", full)
    result = run(full_report, "--json", tmp_path / "report.json")
    assert result.status == 2 and "No space left" in result.stderr
    assert "the same tokens" in result.stdout and "why:" in result.stdout
