"""The recorded step: with stand-ins for streams and graphs on a CPU, and as it is on CUDA."""

import pytest
import torch
from helpers import random_tokens, run_script, tiny_model

from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from kvcache_graph import CudaGraphStep
from main_kvcache import generate_kvcache, generate_static

CONTEXT = 16


class FakeGraph:
    """Stands in for a CUDA graph: a replay runs the step again and writes where the recording wrote."""

    def replay(self):
        self.step.logits.copy_(self.step.run())


class Context:
    """A context that does nothing."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    def wait_stream(self, _):
        pass


@pytest.fixture
def record(monkeypatch):
    """record(model, cache): a CudaGraphStep whose graph is a stand-in, its pool 40 bytes."""
    fakes = {"Stream": Context, "stream": Context, "graph": Context, "CUDAGraph": FakeGraph}
    fakes |= {"current_stream": Context, "memory_allocated": lambda: 2, "max_memory_allocated": lambda: 42}
    for name, fake in (fakes | {"reset_peak_memory_stats": lambda: None}).items():
        monkeypatch.setattr(torch.cuda, name, fake)

    def make(model, cache):
        step = CudaGraphStep(model, cache)
        step.graph.step = step
        return step

    return make


def test_tokens_and_logits_of_a_recorded_step(record):
    """Twice, past the window; what it hands out stays what it was when the next step has run."""
    static = tiny_model(GPTlite_StaticKVCache)
    buffers = StaticKVCache(static, 2)
    step, seen = record(static, buffers), []

    def keep(x, cache):
        logits, cache = step(x, cache)
        seen.append((logits, logits.clone()))
        return logits, cache

    for seed in (0, 1):
        prompt = random_tokens(2, 10, seed)
        expected = generate_kvcache(tiny_model(GPTlite_KVCache), prompt, 20, CONTEXT)
        assert torch.equal(generate_static(static, prompt, 20, buffers, keep), expected)
    assert all(torch.equal(logits, then) for logits, then in seen)
    assert len({logits.data_ptr() for logits, _ in seen}) == len(seen)
    assert step.workspace_bytes == 40


def test_what_it_was_not_recorded_for_is_refused(record):
    static = tiny_model(GPTlite_StaticKVCache)
    buffers = StaticKVCache(static, 2)
    step = record(static, buffers)
    for x, cache in ((random_tokens(1, 1), buffers), (random_tokens(2, 2), buffers)):
        with pytest.raises(ValueError, match="recorded for 2 sequences"):
            step(x, cache)
    with pytest.raises(ValueError, match="recorded for 2 sequences"):
        step(random_tokens(2, 1), StaticKVCache(static, 2))
    assert buffers.length == 0


def test_the_pool_of_a_graph_counts_as_memory():
    from inference_utils import peak_memory_mb

    module = torch.nn.Linear(1, 1)
    module.workspace_bytes = 5_000_000
    assert peak_memory_mb(lambda: None, module) == pytest.approx(5.0, abs=0.01)


@pytest.mark.cuda
def test_cuda_graph():
    static = tiny_model(GPTlite_StaticKVCache).cuda()
    buffers = StaticKVCache(static, 2)
    step = CudaGraphStep(static, buffers)
    for seed in (0, 1):
        prompt = random_tokens(2, 10, seed)
        expected = generate_kvcache(tiny_model(GPTlite_KVCache), prompt, 20, CONTEXT)
        assert torch.equal(generate_static(static, prompt.cuda(), 20, buffers, step).cpu(), expected)


def test_script_without_cuda():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    run = run_script("more/kvcache_graph.py", "--quick")
    assert run.status == 2 and len(run.stderr.splitlines()) == 1 and "needs CUDA" in run.stderr


@pytest.mark.cuda
def test_script():
    run = run_script("more/kvcache_graph.py", "--quick", "--json", "-")
    assert run.status == 0 and all(run.json["checks"].values())
