"""Sums over text by hooks, and decoding with models of any shape."""

import pytest
import torch
from helpers import assert_close, random_tokens, tiny_model

import inference_utils as utils
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from gptlite_pruned import sum_over_text, with_kv_cache
from inference_cost import forward_cost, step_cost
from main_pruning import compute_importance, prune

CONTEXT = 16
DATA = random_tokens(1, 400)[0]


def pruned_model():
    model = tiny_model(GPTlite, n_heads=4, d_head=8)
    return prune(model, torch.rand(2, 4), torch.rand(2, 128), 2, 9)


def test_with_kv_cache():
    model = pruned_model()
    cached, tokens = with_kv_cache(model), random_tokens(2, CONTEXT)
    assert isinstance(cached, GPTlite_KVCache) and type(model) is GPTlite
    assert_close(cached(tokens)[0], model(tokens))
    assert_close(utils.cached_logits(cached, tokens, 5)[0], model(tokens))
    assert cached.fc_out.weight is not model.fc_out.weight


def n_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("training", [True, False])
def test_hooks_are_removed_and_the_mode_restored(training):
    """Dropout is off meanwhile; an error in the middle leaves nothing behind either."""
    model = tiny_model(GPTlite, dropout_p=0.5).train(training)
    torch.manual_seed(0)
    found = compute_importance(model, DATA, 2, 3, CONTEXT)
    torch.manual_seed(0)
    assert_close(found, compute_importance(tiny_model(GPTlite), DATA, 2, 3, CONTEXT))
    assert n_hooks(model) == 0 and model.training is training
    with pytest.raises(ValueError, match="does not fit the context"):
        compute_importance(model, DATA, 2, 3, CONTEXT + 1)
    assert n_hooks(model) == 0 and model.training is training


@pytest.mark.parametrize("model_class", [GPTlite, GPTlite_KVCache])
def test_a_block_with_a_cache_is_summed_by_its_first_output(model_class):
    model, tokens = tiny_model(model_class), random_tokens(4, CONTEXT)
    measure = lambda x, out: (out - x).abs().sum(dim=(0, 1))  # noqa: E731
    (found,) = sum_over_text(model, [(model.blocks[0], measure)], tokens.split(3))
    x = model.token_embedding(tokens) + model.position_embedding(torch.arange(CONTEXT))  # [B, T, E]
    assert_close(found, (utils.first_of(model.blocks[0](x)) - x).abs().sum(dim=(0, 1)))


def test_cost_of_a_step_of_any_shape():
    """Of a whole model as forward_cost has it, but for the operations of biases and norms; less if cut."""
    p = utils.get_gptlite_model_parameters()
    with torch.device("meta"):
        whole = GPTlite(96, p.d_model, p.n_heads, p.d_head, p.n_layers, 0.0, p.seqlen)
    expected, found = forward_cost(p, 96, 1, 1, 99, torch.float32), step_cost(whole, 100)
    assert found.n_bytes == expected.n_bytes and found.flops == pytest.approx(expected.flops, rel=0.01)
    assert (
        step_cost(pruned_model(), 10).n_bytes
        < step_cost(tiny_model(GPTlite, n_heads=4, d_head=8), 10).n_bytes
    )
