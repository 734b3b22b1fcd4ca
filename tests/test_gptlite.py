"""GPTlite against transformers' OPT and PyTorch's attention, its names, its limits."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, large_scores, random_tokens, randomize, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import gptlite
import gptlite_kvcache
import inference_training as training
import inference_utils as utils
import main_kvcache
from data import shakespeare
from gptlite import GPTlite, scaled_dot_product_attention
from gptlite_opt import fold_output_bias, opt_from_gptlite

# Names and signatures that the post uses

SIGNATURES = {
    scaled_dot_product_attention: "Q K V causal_mask=True dropout=None",
    gptlite.MultiHeadAttention: "d_model n_heads d_head dropout_p",
    gptlite.MultiHeadAttention.forward: "self x causal_mask=True",
    gptlite.Block: "d_model n_heads d_head dropout_p",
    gptlite.FeedForward: "d_model dropout_p",
    GPTlite: "vocab_size d_model n_heads d_head n_layers dropout_p seqlen",
    gptlite.get_gptlite_model_parameters: "",
    gptlite.get_gptlite_distilled_model_parameters: "",
    gptlite_kvcache.scaled_dot_product_attention_kv_cache: "Q K V causal_mask=True dropout=None",
    gptlite_kvcache.MultiHeadAttention_KVCache.forward: (
        "self x kv_cache=None causal_mask=True max_seqlen=None"
    ),
    gptlite_kvcache.Block_KVCache: "d_model n_heads d_head dropout_p",
    gptlite_kvcache.GPTlite_KVCache: "vocab_size d_model n_heads d_head n_layers dropout_p seqlen",
    gptlite_kvcache.GPTlite_KVCache.forward: "self x kv_cache=None max_seqlen=None",
    main_kvcache.generate: "model prompt n_tokens seqlen",
    main_kvcache.generate_kvcache: "model prompt n_tokens seqlen kv_cache=None",
    utils.load_model: f"model_class vocab_size ckpt_path={utils.GPTLITE_CKPT_PATH} distilled=False kwargs",
    utils.model_size_mb: "model",
    utils.sample_prompts: "data n_prompts prompt_len",
    shakespeare.get_shakespeare_data: "path=None",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature(function):
    parameters = inspect.signature(function).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert " ".join(shown) == SIGNATURES[function]


def test_functions_with_more_arguments_begin_as_the_post_has_them():
    begins = {
        utils.validation_loss: ["model", "data"],
        training.train_steps: ["model", "train_data", "iters", "lr", "batch_size", "seqlen"],
        shakespeare.get_batch: ["data", "batch_size", "seqlen"],
    }
    for function, names in begins.items():
        assert list(inspect.signature(function).parameters)[: len(names)] == names


def test_names_of_weights():
    block = "mha.query_proj mha.key_proj mha.value_proj mha.out_proj ln1 ffwd.net.0 ffwd.net.2 ln2".split()
    names = {f"blocks.{layer}.{name}.{kind}" for layer in (0, 1) for name in block for kind in KINDS}
    names |= {f"{name}.{kind}" for name in ("ln", "fc_out") for kind in KINDS}
    names |= {"token_embedding.weight", "position_embedding.weight"}
    assert set(tiny_model(GPTlite).state_dict()) == names


KINDS = ("weight", "bias")


@pytest.mark.parametrize(
    "parameters, sizes, millions",
    [
        (gptlite.get_gptlite_model_parameters(), (6, 384, 6, 64), 10.8),
        (gptlite.get_gptlite_distilled_model_parameters(), (3, 192, 3, 64), 1.4),
    ],
)
def test_parameters(parameters, sizes, millions):
    n_layers, d_model, n_heads, d_head, batch_size, lr, seqlen, dropout_p = parameters
    assert (n_layers, d_model, n_heads, d_head) == sizes and n_heads * d_head == d_model
    assert seqlen == parameters.seqlen == 256 and dropout_p == 0.1 and batch_size >= 1 and 0 < lr < 1
    model = GPTlite(96, d_model, n_heads, d_head, n_layers, dropout_p, seqlen)
    assert utils.n_parameters(model) / 1e6 == pytest.approx(millions, abs=0.05)


# Against code that is not ours


@pytest.mark.parametrize("n_tokens", [1, 2, 13, 16])
@pytest.mark.parametrize("sizes", [{}, {"n_layers": 3, "n_heads": 4, "d_head": 8}, {"vocab_size": 31}])
def test_equals_opt(n_tokens, sizes):
    pytest.importorskip("transformers")
    model = tiny_model(GPTlite, **sizes)
    tokens = random_tokens(3, n_tokens, vocab_size=16)
    with torch.no_grad():
        assert_close(model(tokens), opt_from_gptlite(model)(tokens).logits, 1e-10)


def test_equals_opt_in_float32_at_full_size():
    pytest.importorskip("transformers")
    model = randomize(utils.make_model(GPTlite, 96), std=0.04)
    tokens = random_tokens(2, 256, vocab_size=96)
    with torch.no_grad():
        logits = model(tokens)
        assert logits.std() > 0.5
        assert_close(logits, opt_from_gptlite(model)(tokens).logits, 1e-4)


def test_split_heads_of_any_batch_and_of_fewer_heads():
    """A batch of none as well, and the keys of grouped queries, which are fewer."""
    mha = gptlite.MultiHeadAttention(32, 2, 16, 0.0)
    for B, T, heads in ((0, 3, 2), (2, 0, 2), (2, 3, 2), (2, 3, 1)):
        x = torch.randn(B, T, heads * 16)
        assert_close(mha.split_heads(x), torch.stack(x.split(16, dim=-1), dim=1))
    assert tiny_model(GPTlite)(random_tokens(0, 5)).shape == (0, 5, 16)


def test_output_bias_that_cannot_be_folded():
    with pytest.raises(ValueError, match=r"no layer norm bias .* head \[5, 3\]"):
        fold_output_bias(torch.randn(5, 3), torch.randn(5), torch.randn(3))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_attention_equals_pytorch(B, H, T, D, seed):
    torch.manual_seed(seed)
    Q, K, V = (3 * torch.randn(B, H, T, D, dtype=torch.float64) for _ in range(3))
    sdpa = F.scaled_dot_product_attention
    assert_close(scaled_dot_product_attention(Q, K, V), sdpa(Q, K, V, is_causal=True))
    assert_close(scaled_dot_product_attention(Q, K, V, False), sdpa(Q, K, V))
    for shape in ([T, T], [B, 1, T, T], [B, H, T, T]):
        mask = torch.rand(shape) < 0.6
        # rows without a key are SB-2: PyTorch has zeros there as well
        assert_close(scaled_dot_product_attention(Q, K, V, mask), sdpa(Q, K, V, attn_mask=mask))


@pytest.mark.parametrize(
    "attention",
    [scaled_dot_product_attention, gptlite_kvcache.scaled_dot_product_attention_kv_cache],
)
def test_row_without_a_key_is_zero_with_finite_gradients(attention):
    """SB-2"""
    Q, K, V = (torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[2] = False
    out = attention(Q, K, V, mask)
    assert (out[:, :, 2] == 0).all() and out[:, :, [0, 1, 3]].abs().min() > 0
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (Q, K, V))
    assert (Q.grad[:, :, 2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_larger_than_16_bits_hold(dtype):
    """Twice 40 in 64 channels is 102,400 before the division by 8, more than float16 has."""
    for Q, K, V, expected in large_scores(dtype):
        Q, K, V = (t.requires_grad_() for t in (Q, K, V))
        mask = torch.ones(2, 2, dtype=torch.bool).tril()
        for out in (scaled_dot_product_attention(Q, K, V), scaled_dot_product_attention(Q, K, V, mask)):
            assert out.dtype == dtype
            assert_close(out, expected)
            assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), (Q, K, V)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [1, 7, 33])
def test_every_type_at_odd_lengths(dtype, T):
    Q, K, V = (torch.randn(2, 3, T, 5).to(dtype) for _ in range(3))
    exact = F.scaled_dot_product_attention(Q.double(), K.double(), V.double(), is_causal=True)
    assert_close(scaled_dot_product_attention(Q, K, V).double(), exact, 8 * torch.finfo(dtype).eps)


def test_masked_softmax_of_rows_that_see_nothing():
    """Zeros with a gradient of zero, whatever their scores; the others as if they stood alone."""
    scores = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    visible = torch.rand(4, 5) < 0.5
    visible[1], visible[2] = False, True
    weights = gptlite.masked_softmax(scores, visible)
    (grad,) = torch.autograd.grad(weights.square().sum(), scores)
    assert (weights[:, :, 1] == 0).all() and (grad[:, :, 1] == 0).all() and grad.isfinite().all()
    assert_close(weights[:, :, 2], F.softmax(scores[:, :, 2], dim=-1))
    seen = visible.any(dim=-1)
    assert_close(weights.sum(-1), seen.double().expand(2, 3, 4))
    assert not weights[..., ~visible].any()


def test_textbook_attention_holds_two_score_matrices():
    """No more than the operation needs: what reads one writes another, for a causal mask as well."""
    Q, K, V = torch.randn(3, 1, 1, 256, 4)
    mb = utils.peak_memory_mb(lambda: scaled_dot_product_attention(Q, K, V))
    assert mb < 2.4 * 256 * 256 * 4 / 1e6


def test_dropout_acts_on_the_attention_weights():
    Q, K = torch.randn(2, 1, 1, 3, 4)
    dropped = scaled_dot_product_attention(Q, K, torch.eye(3)[None, None], True, lambda w: 2 * w)
    assert_close(dropped.sum(-1), torch.full((1, 1, 3), 2.0))


# The model's limits


def test_dropout_only_while_training():
    model = tiny_model(GPTlite, dropout_p=0.5)
    tokens = random_tokens(2, 8)
    assert torch.equal(model(tokens), model(tokens))
    assert torch.equal(model(tokens), tiny_model(GPTlite)(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


@given(st.integers(1, 16), st.data())
def test_later_tokens_change_nothing_before_them(n_tokens, data):
    model = tiny_model(GPTlite)
    tokens = random_tokens(1, n_tokens)
    place = data.draw(st.integers(0, n_tokens - 1))
    changed = tokens.clone()
    changed[0, place] = (changed[0, place] + 1) % 16
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))  # [T]
    assert (difference[:place] < 1e-12).all()
    assert (difference[place:] > 1e-6).all()


@pytest.mark.parametrize("n_tokens", [0, 17, 40])
def test_sequence_that_does_not_fit(n_tokens):
    with pytest.raises(
        ValueError, match=f"sequence of {n_tokens} tokens does not fit the context of 1 to 16"
    ):
        tiny_model(GPTlite)(random_tokens(1, n_tokens))


def test_first_loss_is_that_of_guessing():
    torch.manual_seed(0)
    model = utils.make_model(GPTlite, 96, distilled=True)
    tokens = random_tokens(4, 65, vocab_size=96)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(96), abs=0.1)


def test_initial_weights_are_smaller_where_a_block_adds_to_its_input():
    model = GPTlite(96, 64, 4, 16, 8, 0.0, 32)
    block = model.blocks[3]
    assert block.mha.query_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    for linear in (block.mha.out_proj, block.ffwd.net[2]):
        assert linear.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)  # sqrt(2 * 8 layers)
        assert (linear.bias == 0).all()
    assert (model.ln.weight == 1).all() and (model.fc_out.bias == 0).all()
