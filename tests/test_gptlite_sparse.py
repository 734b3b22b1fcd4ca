"""What the techniques of sparse attention share: choosing the best, blocks of keys, the model, figures."""

import pytest
import torch
from helpers import assert_close, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import gptlite_sparse as sparse
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, window_mask
from inference_utils import cached_logits


def draw(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 99), st.booleans())
def test_the_best_of_the_candidates(n, k, seed, ties):
    """By definition: a stable sort of the candidates; never a key that is none, never one twice."""
    scores, chance = draw((3, n), (3, n), seed=seed)
    scores = scores.round() if ties else scores
    chosen = sparse.top_mask(scores, k, chance > 0)
    for row, picked, allowed in zip(scores.tolist(), chosen.tolist(), (chance > 0).tolist(), strict=True):
        places = sorted((i for i in range(n) if allowed[i]), key=lambda i: (-row[i], i))[:k]
        assert [i for i in range(n) if picked[i]] == sorted(places)


def test_equal_scores_are_chosen_in_order():
    chosen = sparse.top_mask(torch.zeros(4, 4), 2, sparse.causal(4, 4))
    assert chosen.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    with pytest.raises(ValueError, match="at least 1 choice"):
        sparse.top_mask(torch.zeros(4), 0, torch.ones(4, dtype=torch.bool))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 6))
def test_gathered_rows(B, G, n, k):
    x = draw((B, G, n, 5))[0]
    index = torch.randint(n, (B, G, k))
    assert torch.equal(sparse.gather_rows(x, index), x.gather(2, index[..., None].expand(B, G, k, 5)))


def test_blocks():
    blocks = sparse.in_blocks(draw((1, 2, 7, 3))[0], 4)
    assert blocks.shape == (1, 2, 2, 4, 3) and (blocks[:, :, 1, 3] == 0).all()
    with pytest.raises(ValueError, match="at least 1 key"):
        sparse.in_blocks(blocks, 0)


RULES = {"window": sparse.choose_window, "oracle": sparse.choose_oracle}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_chooses_once_for_a_group_and_never_the_future(rule):
    Q, K = draw((2, 4, 9, 8), (2, 2, 9, 8))
    visible = RULES[rule](Q, K, 3).expand(2, 4, 9, 9)
    assert torch.equal(visible[:, ::2], visible[:, 1::2])  # the two heads of a group
    assert not (visible & ~sparse.causal(9, 9)).any()
    assert visible.sum(-1).tolist() == [[[1, 2, 3, 3, 3, 3, 3, 3, 3]] * 4] * 2
    assert_close(RULES[rule](Q[:, :, 5:], K, 3).expand(2, 4, 4, 9), visible[:, :, 5:])


@pytest.mark.parametrize("rule", RULES)
def test_every_split_of_a_text_gives_one_pass(rule):
    model = sparse.use_choice(tiny_model(sparse.GPTlite_Sparse), lambda Q, K: RULES[rule](Q, K, 5))
    tokens = random_tokens(2, 16)
    whole = model(tokens)[0]
    for n in (1, 4, 9, 16):
        assert_close(cached_logits(model, tokens, n)[0], whole)


def test_a_rule_in_some_layers():
    tokens, window = random_tokens(2, 16), lambda Q, K: sparse.choose_window(Q, K, 4)
    dense = tiny_model(GPTlite)(tokens)
    model = tiny_model(sparse.GPTlite_Sparse)
    assert_close(model(tokens)[0], dense)
    assert_close(sparse.use_choice(model, window, 2)(tokens)[0], dense)
    assert (sparse.use_choice(model, window, 1)(tokens)[0] - dense).abs().max() > 1e-3
    plain = tiny_model(GPTlite_KVCache)
    assert_close(sparse.use_choice(model, window)(tokens[:, :4])[0], plain(tokens[:, :4])[0])


@given(st.integers(1, 9), st.integers(0, 9))
def test_attention_to_what_is_visible(Sq, seed):
    """With and without gradients, shared heads copied out or not."""
    Q, K, V, chance = draw((2, 4, Sq, 8), (2, 2, 9, 8), (2, 2, 9, 8), (2, 4, Sq, 9), seed=seed)
    visible = (chance > 0) | (torch.arange(9) == 4)
    expected = torch.softmax((Q @ sparse.for_heads(K, 4).mT / 8**0.5).masked_fill(~visible, -torch.inf), -1)
    expected = expected @ sparse.for_heads(V, 4)
    assert_close(sparse.attend_to(Q, K, V, visible), expected)
    with torch.no_grad():
        assert_close(sparse.attend_to(Q, K, V, visible), expected)


def test_the_context_is_the_end():
    model = tiny_model(sparse.GPTlite_Sparse)
    _, cache = model(random_tokens(1, 16))
    with pytest.raises(ValueError, match="17 tokens"):
        model(random_tokens(1, 1), cache)


def test_attention_inputs():
    """They are what the layers compute: with the model's own values they give its attention."""
    model, tokens, seen = tiny_model(GPTlite), random_tokens(2, 9), []
    hooks = [
        b.mha.register_forward_hook(lambda mha, args, out: seen.append((mha, out))) for b in model.blocks
    ]
    inputs = sparse.attention_inputs(model, tokens)
    for hook in hooks:
        hook.remove()
    for (mha, out), (x, Q, K) in zip(seen, inputs, strict=True):
        V = mha.split_heads(mha.value_proj(x))
        attended = sparse.expanded_attention(Q, K, V, window_mask(9, 9, 9))
        assert_close(mha.out_proj(mha.merge_heads(attended)), out)
    assert not any(block.mha._forward_pre_hooks for block in model.blocks)


def test_figures_of_a_choice():
    Q, K = draw((2, 3, 12, 8), (2, 3, 12, 8))
    whole = sparse.choice_figures(Q, K, sparse.causal(12, 12))
    assert whole == {"keys_read": 6.5, "mass": 1.0, "recall": 1.0, "best_missed": 0.0}
    oracle = sparse.choice_figures(Q, K, sparse.choose_oracle(Q, K, 4))
    window = sparse.choice_figures(Q, K, sparse.choose_window(Q, K, 4))
    assert oracle["keys_read"] == window["keys_read"] == (1 + 2 + 3 + 9 * 4) / 12
    assert oracle["recall"] == 1 and oracle["best_missed"] == 0
    assert window["mass"] < oracle["mass"] < 1 and window["recall"] < 1 and window["best_missed"] > 0
    own = torch.eye(12, dtype=torch.bool)  # by hand: the mean weight of a token's own key
    weights = torch.softmax((Q @ K.mT / 8**0.5).masked_fill(~sparse.causal(12, 12), -torch.inf), -1)
    expected = weights.diagonal(dim1=-2, dim2=-1)[..., 1:].mean().item()
    assert sparse.choice_figures(Q, K, own)["mass"] == pytest.approx(expected)
