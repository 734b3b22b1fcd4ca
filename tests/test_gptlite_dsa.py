"""DSA in the model: the indexer by definition, gathered tokens equal masked ones, all tokens equal dense."""

import pytest
import torch
from helpers import assert_close, large_scores, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_dsa import (
    GPTlite_DSA,
    Indexer,
    choose_tokens,
    convert_mha_to_dsa,
    dsa_attention,
    dsa_step,
    index_scores,
    indexer_loss,
)
from gptlite_gqa import grouped_attention
from gptlite_sparse import causal


def draw(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def dsa_model(top_k=4, seed=0, **kwargs):
    """A tiny model of GPTlite's tiny weights, with random indexers that disagree with the attention."""
    model = tiny_model(GPTlite_DSA, top_k=top_k, n_index_heads=2, d_index=8, **kwargs)
    state = {name: t for name, t in model.state_dict().items() if ".indexer." in name}
    base = tiny_model(GPTlite, seed=seed, **kwargs).state_dict()
    model.load_state_dict(base | state)
    return model


def test_scores_by_definition():
    q, w, keys = draw((2, 3, 5, 4), (2, 3, 5, 1), (2, 1, 7, 4))
    scores = index_scores(q, w, keys)
    for b, t, s in ((0, 0, 0), (1, 4, 6), (0, 2, 3)):
        expected = sum(w[b, j, t, 0] * max(q[b, j, t] @ keys[b, 0, s], 0) for j in range(3))
        assert_close(scores[b, t, s], expected)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        indexer, x = Indexer(16, 3, 4).double(), draw((2, 6, 16))[0]
        queries, weights = indexer.queries(x)
    assert queries.shape == (2, 3, 6, 4) and weights.shape == (2, 3, 6, 1)
    assert_close(indexer(x), index_scores(queries, weights, indexer.keys(x)))
    assert_close(weights[..., 0], indexer.weight_proj(x).transpose(1, 2) / 12**0.5)
    with pytest.raises(ValueError, match="at least 1"):
        Indexer(16, 0, 4)


def test_a_query_sees_as_many_as_there_are():
    """Scores that rise with the position would spend the choice on the future."""
    rising = torch.arange(8.0).expand(1, 8, 8)
    assert choose_tokens(rising, 3).sum(-1).flatten().tolist() == [1, 2, 3, 3, 3, 3, 3, 3]
    assert not (choose_tokens(rising, 3) & ~causal(8, 8)).any()
    ties = choose_tokens(torch.zeros(1, 4, 4), 2)[0, 0].int().tolist()  # all that ReLU cut off
    assert ties == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    with pytest.raises(ValueError, match="at least 1 choice"):
        choose_tokens(rising, 0)


@given(st.data())
def test_gathered_tokens_equal_masked_ones(data):
    G, group = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 3)]))
    T, top_k = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 25))
    H, seed = G * group, data.draw(st.integers(0, 99))
    Q, K, V, scores = draw((2, H, T, 8), (2, G, T, 8), (2, G, T, 8), (2, T, T), seed=seed)
    scores = scores.relu()  # with ties
    expected = dsa_attention(Q, K, V, scores, top_k)
    for t in range(T):
        one = dsa_step(
            Q[:, :, t : t + 1], K[:, :, : t + 1], V[:, :, : t + 1], scores[:, t : t + 1, : t + 1], top_k
        )
        assert_close(one, expected[:, :, t : t + 1])
    if top_k >= T:
        assert_close(expected, grouped_attention(Q, K, V))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_larger_than_16_bits_hold(dtype):
    for Q, K, V, expected in large_scores(dtype):
        assert_close(dsa_attention(Q, K, V, torch.zeros(1, 2, 2), 2), expected)
        assert_close(dsa_step(Q[:, :, 1:], K, V, torch.zeros(1, 1, 2), 2), expected[:, :, 1:])


def test_loss_is_zero_where_the_indexer_is_right():
    scores = draw((2, 5, 5))[0]
    visible = causal(5, 5)
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    assert_close(indexer_loss(scores + 3.0, weights, visible), 0.0)
    other = draw((2, 5, 5), seed=1)[0].requires_grad_()
    loss = indexer_loss(other, weights, visible)
    log_q = torch.log_softmax(other.masked_fill(~visible, -torch.inf), dim=-1)
    kl = [weights[b, t, s] * (weights[b, t, s].log() - log_q[b, t, s])
          for b in range(2) for t in range(5) for s in range(t + 1)]  # fmt: skip
    assert_close(loss, torch.stack(kl).sum() / 10)
    loss.backward()
    assert other.grad.isfinite().all() and (other.grad[:, ~visible] == 0).all()


def test_all_tokens_are_the_model_unchanged():
    tokens = random_tokens(2, 16)
    dense = tiny_model(GPTlite)(tokens)
    assert_close(dsa_model(16)(tokens)[0], dense)
    assert_close(dsa_model(99)(tokens)[0], dense)
    assert (dsa_model(4)(tokens)[0] - dense).abs().max() > 1e-3


@given(st.integers(1, 16), st.integers(1, 8), st.integers(0, 20))
def test_every_split_of_a_text_gives_one_pass(n, top_k, seed):
    model, tokens = dsa_model(top_k), random_tokens(2, 16, seed)
    whole, cache = model(tokens)
    assert [t.shape for t in cache[0]] == [(2, 2, 16, 16), (2, 2, 16, 16), (2, 1, 16, 8)]
    assert_close(utils.cached_logits(model, tokens, n)[0], whole)
    if n < 16:
        first, past = model(tokens[:, :n])
        assert_close(torch.cat([first, model(tokens[:, n:], past)[0]], dim=1), whole)
        changed = tokens.clone()
        changed[:, n:] = (changed[:, n:] + 1) % 16
        assert_close(model(changed)[0][:, :n], whole[:, :n])


def test_the_context_is_the_end():
    model = dsa_model()
    _, cache = model(random_tokens(1, 16))
    with pytest.raises(ValueError, match="17 tokens"):
        model(random_tokens(1, 1), cache)


def test_the_text_trains_the_model_and_the_attention_the_indexer():
    model = dsa_model(dtype=torch.float32).train()
    logits = model(random_tokens(2, 16))[0]
    logits.logsumexp(-1).sum().backward(retain_graph=True)
    assert all((p.grad is None) == (".indexer." in name) for name, p in model.named_parameters())
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    sum(block.mha.index_loss for block in model.blocks).backward()
    for name, p in model.named_parameters():
        if ".indexer." in name:
            assert p.grad.isfinite().all() and p.grad.abs().max() > 0, name
        else:
            assert torch.equal(p.grad, before[name]), name


def test_conversion_keeps_the_weights():
    state = tiny_model(GPTlite).state_dict()
    converted = convert_mha_to_dsa(state, 2, 8)
    model = tiny_model(GPTlite_DSA, top_k=16, n_index_heads=2, d_index=8)
    model.load_state_dict(converted)
    assert all(torch.equal(converted[name], state[name]) for name in state)
    tokens = random_tokens(1, 12)
    assert_close(model(tokens)[0], tiny_model(GPTlite)(tokens))
