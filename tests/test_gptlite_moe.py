"""A mixture of experts in one process: the router, the copies, the grouped product, the capacity."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from gptlite_moe import GroupedExperts, MixtureOfExperts, route, upcycle


def test_weights_are_those_of_a_softmax_over_the_chosen():
    weights, chosen = route(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), 2)
    assert chosen.tolist() == [[0, 1]]
    assert_close(weights, torch.tensor([[0.7311, 0.2689]]), 1e-4)
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"cannot have {k} of 4 experts"):
            route(torch.zeros(1, 4), k)


def dense_mixture(mixture, x):
    """Every expert computes every token; those that were not chosen weigh nothing. The definition."""
    logits = mixture.router(x)  # [B, T, experts]
    chosen = logits.topk(mixture.top_k, dim=-1).indices
    kept = torch.full_like(logits, float("-inf")).scatter(-1, chosen, logits.gather(-1, chosen))
    weights, e = torch.softmax(kept, dim=-1), mixture.experts
    outputs = [torch.relu(x @ e.w1[i] + e.b1[i]) @ e.w2[i] + e.b2[i] for i in range(len(e.w1))]
    return sum(weights[..., i : i + 1] * output for i, output in enumerate(outputs))


def mixture_of(n, k, seed=0, noise=1.0, **kwargs):
    model = tiny_model(GPTlite, n_layers=1, seed=seed)
    return upcycle(model, n, k, seed=seed, noise=noise, **kwargs).blocks[0].ffwd


@given(
    n=st.integers(1, 6), k=st.integers(1, 6), B=st.integers(1, 3), T=st.integers(1, 9), seed=st.integers(0, 9)
)
def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts(n, k, B, T, seed):
    if k > n:
        return
    mixture = mixture_of(n, k, seed)
    x = torch.randn(B, T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert_close(mixture(x), dense_mixture(mixture, x), 1e-12)


@pytest.mark.parametrize("n, k", [(1, 1), (4, 1), (4, 2), (4, 4), (6, 2)])
def test_copies_equal_the_dense_model_whatever_the_router_says(n, k):
    model, tokens = tiny_model(GPTlite_KVCache), random_tokens(2, 9)
    expected, before = model(tokens)[0], copy.deepcopy(model.state_dict())
    for seed in range(3):
        mixture = upcycle(model, n, k, seed=seed)
        assert_close(mixture(tokens)[0], expected, 1e-12)
        first, cache = mixture(tokens[:, :4])
        assert_close(torch.cat([first, mixture(tokens[:, 4:], cache)[0]], dim=1), expected, 1e-12)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_noise_makes_the_experts_differ():
    model, tokens = tiny_model(GPTlite), random_tokens(2, 9)
    assert (upcycle(model, 4, 2, noise=0.5)(tokens) - model(tokens)).abs().max() > 0.01


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no grouped product")
@pytest.mark.parametrize("n, k, T", [(4, 2, 1), (4, 2, 37), (6, 1, 3), (3, 3, 8)])
def test_the_grouped_product_equals_the_loop(n, k, T):
    """Also where experts get no token at all."""
    loop = mixture_of(n, k).float()
    grouped = mixture_of(n, k, experts_class=GroupedExperts).float()
    x = torch.randn(1, T, 32, generator=torch.Generator().manual_seed(1))
    assert_close(grouped(x), loop(x))
    assert grouped(x[:, :0]).shape == (1, 0, 32)


def test_capacity():
    """Tokens beyond it get nothing from that expert; those before it all they had."""
    mixture = mixture_of(4, 1)
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.router.weight[2] = 1.0  # positive tokens all choose expert 2
    x = torch.rand(1, 8, 32, dtype=torch.float64)
    free = mixture(x)
    limited = MixtureOfExperts(mixture.router, mixture.experts, 1, capacity=1.5)(x)  # ceil(1.5 * 8 / 4)
    assert_close(limited[:, :3], free[:, :3], 1e-12)
    assert not limited[:, 3:].any()
    roomy = MixtureOfExperts(mixture.router, mixture.experts, 1, capacity=4.0)(x)
    assert torch.equal(roomy, free)
