"""The cost model against PyTorch's counter and real bytes; ceilings on a clock of their own."""

from types import SimpleNamespace

import pytest
import torch
from helpers import random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import inference_cost
import inference_utils as utils
from gptlite import GPTlite, get_gptlite_distilled_model_parameters, get_gptlite_model_parameters
from gptlite_kvcache import GPTlite_KVCache
from inference_cost import (
    Ceilings,
    Cost,
    best_seconds,
    disk_bytes_per_s,
    forward_cost,
    last_level_cache_bytes,
    limit_of,
    lower_bound_ms,
    measure_ceilings,
    share_of,
    step_cost,
)

CPU = torch.device("cpu")


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
    cost = forward_cost(sizes_of(model), 16, batch_size, n_new, n_past, torch.float64)
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
    cost = forward_cost(sizes_of(model), 16, B, T, 0, torch.float64)
    assert cost.flops == counter.get_total_flops() - hidden


@pytest.mark.parametrize("get", [get_gptlite_model_parameters, get_gptlite_distilled_model_parameters])
def test_forward_cost_at_full_size(get):
    p = get()
    model = utils.make_model(GPTlite, 96, get is get_gptlite_distilled_model_parameters)
    tables = utils.weight_bytes(model.token_embedding, model.position_embedding)
    in_float32 = forward_cost(p, 96, 1, 1, 99, torch.float32)
    kv_bytes = 2 * p.n_layers * p.d_model * 4 * 100
    assert in_float32.n_bytes == utils.weight_bytes(model) - tables + kv_bytes
    assert forward_cost(p, 96, 1, 1, 99, torch.bfloat16).n_bytes * 2 == in_float32.n_bytes
    assert forward_cost(p, 96, 1, 1, 99, torch.float32, weights=False).n_bytes == kv_bytes
    batch = forward_cost(p, 96, 8, 1, 99, torch.float32)
    assert batch.flops == 8 * in_float32.flops
    assert batch.n_bytes == in_float32.n_bytes + 7 * kv_bytes  # the weights once


def test_step_cost_is_the_forward_cost_of_one_token():
    """The bytes are the same; operations differ by biases and layer norms, which forward_cost leaves out."""
    model = tiny_model(GPTlite_KVCache)
    whole, step = forward_cost(sizes_of(model), 16, 1, 1, 9, torch.float64), step_cost(model, 10)
    assert step.n_bytes == whole.n_bytes
    small = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 1)
    assert step.flops == whole.flops + 2 * small


def test_bounds():
    cost, ceilings = Cost(flops=2e9, n_bytes=4e7), Ceilings(1e11, 1e10)
    assert lower_bound_ms(cost, ceilings) == pytest.approx(20)  # computing: 20 ms, reading: 4
    assert lower_bound_ms(Cost(1e7, 4e7), ceilings) == pytest.approx(4)
    assert limit_of(cost, ceilings) == "computing" and limit_of(Cost(1e7, 4e7), ceilings) == "reading"
    assert share_of(4, 10) == "40%" and share_of(4, None) == share_of(4, 0) == "-"


# Ceilings


class FakeDevice:
    """A device that works behind its caller: a call only starts work, and a synchronisation waits for it."""

    def __init__(self, launch=5e-6, wait=50e-6):
        self.now, self.busy_until, self.launch, self.wait = 100.0, 0.0, launch, wait
        self.n_waits = self.n_calls = 0

    def start(self, seconds):
        self.n_calls += 1
        self.now += self.launch
        self.busy_until = max(self.busy_until, self.now) + seconds

    def synchronize(self, _device):
        self.n_waits += 1
        self.now = max(self.now, self.busy_until) + self.wait


@pytest.fixture
def fake(monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(utils, "time", SimpleNamespace(perf_counter=lambda: device.now))
    monkeypatch.setattr(utils, "synchronize", device.synchronize)
    return device


@pytest.mark.parametrize("us", [8, 100, 20_000])
def test_loops_are_long_against_a_launch(fake, us):
    """A call of 8 us takes 63 with launch and waiting: measured alone it would look 8 times slower."""
    seconds = best_seconds(lambda: fake.start(us / 1e6), CPU, 0.3)
    assert us / 1e6 <= seconds < 1.02 * us / 1e6
    assert fake.n_calls >= 10  # as many as fill the time, two loops at least


def test_the_fastest_loop_counts(fake):
    """Other work on the machine makes loops slower, never faster than the device is."""
    slow = [1.0]

    def call():
        slow[0] = 1.0 if fake.n_calls % 3000 > 1000 else 7.0  # other work, for a while
        fake.start(20e-6 * slow[0])

    assert 20e-6 <= best_seconds(call, CPU, 0.5) < 21e-6


def test_a_call_that_takes_long_is_not_repeated_for_long(fake):
    """As a product of 16-bit numbers does on a CPU without kernels for it."""
    best_seconds(lambda: fake.start(2.0), CPU, 0.3)
    assert fake.n_calls == 3  # warm-up, the length of a loop, one loop


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ceilings_are_those_of_the_device(fake, monkeypatch, dtype):
    """A device of 1 TFLOP/s, 0.5 for small products, and 100 GB/s."""
    sizes = []

    def multiply(a, b):
        assert a.dtype == b.dtype == dtype
        flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
        fake.start(flops / (1e12 if flops > 1e9 else 5e11))
        return a

    def largest(tensor):
        n_bytes = tensor.numel() * tensor.element_size()
        sizes.append(n_bytes)
        fake.start(n_bytes / 1e11)

    monkeypatch.setattr(torch.Tensor, "__matmul__", multiply)
    monkeypatch.setattr(torch.Tensor, "max", largest)
    monkeypatch.setattr(inference_cost, "last_level_cache_bytes", lambda _: 50_000_000)
    ceilings = measure_ceilings(CPU, dtype)
    assert ceilings.flops_per_s == pytest.approx(1e12, rel=0.02) and ceilings.flops_per_s <= 1e12
    assert ceilings.bytes_per_s == pytest.approx(1e11, rel=0.02) and ceilings.bytes_per_s <= 1e11
    assert set(sizes) == {200_000_000}  # four times what the cache holds


def test_buffers_on_a_gpu_are_longer_than_a_launch(fake, monkeypatch):
    """Made on the CPU in this test: what counts is which sizes are asked for."""
    made = []

    def make(*shape, dtype=None, device=None):
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        made.append((tuple(shape), dtype, device.type))
        return SimpleNamespace(
            to=lambda _: SimpleNamespace(__matmul__=None), max=lambda: fake.start(1e-3), shape=shape
        )

    class Product:
        def __init__(self, *_):
            pass

        def to(self, _):
            return self

        def __matmul__(self, _):
            fake.start(1e-3)

    def factors(shape, device=None):
        made.append((tuple(shape), None, device.type))
        return Product()

    monkeypatch.setattr(torch, "randn", factors)
    monkeypatch.setattr(torch, "ones", make)
    monkeypatch.setattr(inference_cost, "last_level_cache_bytes", lambda _: 60_000_000)
    measure_ceilings(torch.device("cuda"))
    largest_product = max(shape[0] * shape[1] for shape, dtype, _ in made if dtype is None)
    assert largest_product >= 8192**2 and {kind for _, _, kind in made} == {"cuda"}
    ((n_words,), dtype, _) = made[-1]
    assert dtype == torch.int32 and 4 * n_words >= 1_000_000_000


def test_ceilings_of_this_machine():
    ceilings = measure_ceilings(CPU, seconds=0.01)
    assert ceilings.flops_per_s > 1e8 and ceilings.bytes_per_s > 1e7
    assert last_level_cache_bytes(CPU) >= 1_000_000


def test_a_file_is_read_from_the_disk(monkeypatch):
    """On the disk and forgotten before the clock starts; nothing where the system does not forget."""
    if not hasattr(inference_cost.os, "posix_fadvise"):
        pytest.skip("this system keeps what it has read")
    calls = []

    class Clock(utils.Timer):
        def __enter__(self):
            calls.append("clock")
            return super().__enter__()

    monkeypatch.setattr(inference_cost, "Timer", Clock)
    for name in ("fsync", "posix_fadvise"):
        real = getattr(inference_cost.os, name)
        spy = lambda *args, real=real, name=name: (calls.append(name), real(*args))  # noqa: E731
        monkeypatch.setattr(inference_cost.os, name, spy)
    assert 1e5 < disk_bytes_per_s(100_000, repeats=2) < 1e12
    assert calls == ["fsync", "posix_fadvise", "clock"] * 2
    monkeypatch.delattr(inference_cost.os, "posix_fadvise")
    assert disk_bytes_per_s(100_000) is None
