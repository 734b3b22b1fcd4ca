"""GPTlite in CTranslate2: the same tokens, on models of several shapes."""

from types import SimpleNamespace

import pytest
import torch
from helpers import SERVER, random_tokens, tiny_model

import inference_engines
from gptlite_kvcache import GPTlite_KVCache
from inference_engines import CTranslate2, engine_methods, generate_ctranslate2
from inference_utils import StepClock
from main_kvcache import generate_kvcache

ARGS = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module", params=[(2, 32, 2), (1, 48, 3), (3, 16, 1)])
def model(request):
    n_layers, d_model, n_heads = request.param
    sizes = {"n_layers": n_layers, "d_model": d_model, "n_heads": n_heads, "d_head": d_model // n_heads}
    return tiny_model(GPTlite_KVCache, dtype=torch.float32, vocab_size=13, seqlen=24, **sizes)


def check_tokens(model):
    """In a process of its own: what an engine of another language breaks shall not break the tests."""
    engine = CTranslate2(model, 1)
    for B, T, n in ((1, 1, 1), (1, 7, 9), (4, 5, 19), (3, 24, 1)):
        prompts = random_tokens(B, T, vocab_size=13)
        with StepClock(engine) as clock:
            tokens = generate_ctranslate2(engine, prompts, n)
        assert tokens.equal(generate_kvcache(model, prompts, n, 24)), (B, T, n)
        assert clock.n_steps == 1  # the whole run
    (method,) = engine_methods(ARGS, model)
    assert method.exact and method.figures["peak_memory_mb"] is method.figures["tpot_ms"] is None
    assert method.model.seqlen == 24 and method.figures["n_parameters"] > 1000


def test_same_tokens(model):
    pytest.importorskip("ctranslate2")
    process = SERVER.Process(target=check_tokens, args=(model,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_no_method_of_an_engine_that_is_not_installed(model, monkeypatch):
    monkeypatch.setattr(inference_engines, "find_spec", lambda _: None)
    assert engine_methods(ARGS, model) == []


@pytest.mark.parametrize("changed", [{"dtype": torch.bfloat16}, {"device": torch.device("meta")}])
def test_no_engine_for_other_types_and_devices(model, changed):
    assert engine_methods(SimpleNamespace(**vars(ARGS) | changed), model) == []
