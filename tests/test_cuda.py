"""What runs on CUDA: the shared clock's events, peak memory, and every script; on a CPU with stand-ins.

The stand-ins are a device with a time of its own: a call puts work on a stream, an event notes when the
stream gets there, and nothing waits but a synchronisation. Recorded steps: tests/test_kvcache_graph.py.
"""

from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, random_tokens, run_script, tiny_model
from torch import nn

import inference_utils as utils
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_StaticKVCache, StaticKVCache
from main_kvcache import generate, generate_static

CUDA = torch.device("cuda")
SCRIPTS = sorted(ROOT.glob("main_*.py")) + sorted(ROOT.glob("more/[!_]*.py"))


class FakeGPU:
    """Seconds of a caller and of a stream that works behind it, and bytes that are allocated."""

    def __init__(self):
        self.now, self.stream, self.n_waits = 100.0, 100.0, 0
        self.held = self.peak = 0

    def work(self, seconds, launch=5e-6):
        self.now += launch
        self.stream = max(self.stream, self.now) + seconds

    def synchronize(self, _device=None):
        self.n_waits += 1
        self.now = self.stream = max(self.now, self.stream)

    def allocate(self, n_bytes):
        self.held += n_bytes
        self.peak = max(self.peak, self.held)

    def reset_peak(self, _device=None):
        self.peak = self.held


@pytest.fixture
def gpu(monkeypatch):
    """Stands in for CUDA: events, synchronisation and the allocator's counts."""
    gpu = FakeGPU()

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            self.at = max(gpu.stream, gpu.now)

        def elapsed_time(self, later):
            assert gpu.now >= later.at, "read before the device got there"
            return 1000 * (later.at - self.at)

    fakes = {"Event": Event, "synchronize": gpu.synchronize, "reset_peak_memory_stats": gpu.reset_peak}
    fakes["memory_allocated"] = lambda _device=None: gpu.held
    fakes["max_memory_allocated"] = lambda _device=None: gpu.peak
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(utils, "time", SimpleNamespace(perf_counter=lambda: gpu.now))
    return gpu


class FakeModel(nn.Module):
    """A model whose forward is work of so many ms each on the fake device."""

    def __init__(self, gpu, durations):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.gpu, self.durations = gpu, iter(durations)

    def forward(self, tokens):
        self.gpu.work(next(self.durations) / 1000)


@pytest.fixture
def on_cuda(monkeypatch):
    """Makes the clock take its models for models on CUDA."""

    class Clock(utils.StepClock):
        def __init__(self, *models):
            super().__init__(*models)
            self.device = CUDA

    monkeypatch.setattr(utils, "StepClock", Clock)


def test_events_take_the_device_time_of_every_step(gpu, on_cuda):
    model = FakeModel(gpu, [5, 1, 2])
    with utils.StepClock(model) as clock:
        for n_tokens in (7, 1, 2):
            model(random_tokens(2, n_tokens))
        assert gpu.n_waits == 1  # the run itself waits for nothing
    assert gpu.n_waits == 2 and clock.n_steps == 3 and clock.forward_tokens == 20
    assert clock.steps_ms == pytest.approx([5, 1, 2], abs=0.02)
    assert clock.total_ms == pytest.approx(8, abs=0.02)


def test_work_from_before_the_clock_does_not_count(gpu, on_cuda):
    model = FakeModel(gpu, [1])
    gpu.work(0.5)
    with utils.StepClock(model) as clock:
        model(random_tokens(1, 1))
    assert clock.total_ms == pytest.approx(1, abs=0.02)


def test_measure_with_events(gpu, on_cuda):
    """Medians over the repeats of what the events say, the warm-up left out."""
    model = FakeModel(gpu, [900, 900] + [30, 4] + [10, 1] + [20, 2])

    def run():
        for n_tokens in (6, 1):
            model(random_tokens(1, n_tokens))

    result = utils.measure([utils.TimedMethod("a", run, [model])], n_generated=2, repeats=3)["a"]
    assert result.ttft_ms == pytest.approx(20, abs=0.1) and result.tpot_ms == pytest.approx(2, abs=0.1)
    assert result.tokens_per_s == pytest.approx(2000 / 22, rel=0.01)


def test_alternating_loops_are_long_against_a_launch(gpu):
    """Between two synchronisations: calls of 20 and 40 us whose launches take 5."""
    functions = {"a": lambda: gpu.work(20e-6), "b": lambda: gpu.work(40e-6)}
    ms = utils.alternating_ms(functions, 3, CUDA)
    assert ms["a"] == pytest.approx(0.020, rel=0.02) and ms["b"] == pytest.approx(0.040, rel=0.02)
    assert utils.calls_per_ms(functions["a"], CUDA, 10.0) >= 500


def test_timer_waits_at_both_ends(gpu):
    gpu.work(0.5)
    with utils.Timer(CUDA) as timer:
        gpu.work(0.003)
    assert timer.ms == pytest.approx(3, abs=0.02) and gpu.n_waits == 2


def stand_in(n_bytes):
    """What peak_memory_mb asks of a tensor on CUDA."""
    return SimpleNamespace(device=CUDA, numel=lambda: n_bytes, element_size=lambda: 1)


def test_peak_memory_from_a_reset(gpu):
    """Inputs once, what the run adds at its peak; neither what ran before nor other models."""
    gpu.allocate(7_000_000)  # a model that is loaded as well
    gpu.allocate(90_000_000)
    gpu.allocate(-90_000_000)  # what ran before
    gpu.allocate(2_000_000)  # the inputs

    def run():
        gpu.allocate(5_000_000)
        gpu.allocate(-4_000_000)
        gpu.allocate(3_000_000)
        gpu.allocate(-4_000_000)

    for _ in range(2):
        assert utils.peak_memory_mb(run, inputs=[stand_in(2_000_000)]) == pytest.approx(2 + 5)
    pool = nn.Identity()
    pool.workspace_bytes = 11_000_000  # of a recorded graph
    assert utils.peak_memory_mb(run, pool, inputs=[stand_in(2_000_000)]) == pytest.approx(2 + 5 + 11)


# On CUDA


@pytest.mark.cuda
def test_clock_agrees_with_the_wall():
    """Events say what a wall clock says that waits, and every forward is a step."""
    model = utils.make_model(GPTlite, 96, distilled=True).to(CUDA)
    prompt = random_tokens(2, 16, vocab_size=96).to(CUDA)
    generate(model, prompt, 20, model.seqlen)
    with utils.Timer(CUDA) as timer, utils.StepClock(model) as clock:
        generate(model, prompt, 20, model.seqlen)
    assert clock.n_steps == 20 and clock.forward_tokens == 2 * sum(range(16, 36))
    assert all(ms > 0 for ms in clock.steps_ms)
    assert clock.total_ms == pytest.approx(timer.ms, rel=0.2)


@pytest.mark.cuda
def test_peak_memory_of_known_tensors():
    kept = torch.zeros(1_000_000, device=CUDA)
    before = [torch.zeros(3_000_000, dtype=torch.int8, device=CUDA)]

    def run():
        a = torch.empty(4_000_000, dtype=torch.int8, device=CUDA)
        b = torch.empty(2_000_000, dtype=torch.int8, device=CUDA)
        del a, b
        return torch.empty(1_000_000, dtype=torch.int8, device=CUDA)

    for _ in range(2):
        assert utils.peak_memory_mb(run, inputs=before) == pytest.approx(9, abs=0.01)
    del kept


@pytest.mark.cuda
def test_static_cache_on_cuda():
    model, plain = (tiny_model(m).to(CUDA) for m in (GPTlite_StaticKVCache, GPTlite))
    prompt = random_tokens(2, 5).to(CUDA)
    expected = generate(plain, prompt, 11, 16)
    assert torch.equal(generate_static(model, prompt, 11, StaticKVCache(model, 2)), expected)


@pytest.mark.cuda
def test_ceilings_on_cuda():
    """A roof is above what is under it: a copy and a product reach no more than they say."""
    from inference_cost import measure_ceilings

    roof = measure_ceilings(CUDA, torch.bfloat16)
    a = torch.randn(4096, 4096, device=CUDA).bfloat16()
    ms = utils.median_ms(lambda: a @ a, 5, CUDA)
    assert 2 * 4096**3 / (ms / 1000) < 1.1 * roof.flops_per_s
    x = torch.ones(2**28, dtype=torch.int32, device=CUDA)
    ms = utils.median_ms(lambda: x.clone(), 5, CUDA)
    assert 2 * x.numel() * 4 / (ms / 1000) < 1.2 * roof.bytes_per_s


@pytest.mark.cuda
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_on_cuda(path, tmp_path):
    options = ["--device", "cuda", "--quick", "--json", "-"]
    if path.stem == "main_export":
        options.append(tmp_path / "model")
    if path.stem == "main_training":
        options += ["--checkpoint", tmp_path / "trained.pth"]
    run = run_script(path.relative_to(ROOT), *options, cwd=tmp_path)
    assert run.status == 0, run.stderr + run.stdout
    assert run.json["config"]["device"] == "cuda" and run.json["checks"]
    assert all(run.json["checks"].values())


def test_every_script_is_listed():
    assert len(SCRIPTS) >= 38 and not any(path.stem.startswith("_") for path in SCRIPTS)
    assert {"main_kvcache", "flash_attention_backward"} <= {path.stem for path in SCRIPTS}
