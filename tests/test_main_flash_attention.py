"""FlashAttention from scratch and fused: against PyTorch's attention, in value, gradient and memory."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, large_scores, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
import inference_words as words
import main_flash_attention
from gptlite import GPTlite, MultiHeadAttention, scaled_dot_product_attention
from gptlite_kvcache import GPTlite_KVCache
from main_flash_attention import (
    MultiHeadAttention_SDPA,
    flash_attention,
    score_tiles,
    tile_scores,
    use_sdpa,
)
from main_flash_decoding import merge_attention


def draw(*shapes, seed=0, dtype=torch.float64, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_(requires_grad) for s in shapes]


def causal(Sq, Sk):
    """bool [Sq, Sk]: the last query belongs to the last key."""
    return torch.ones(Sq, Sk, dtype=torch.bool).tril(Sk - Sq)


def partly_visible(Sq, Sk):
    mask = torch.rand(Sq, Sk, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[1] = False  # a query without keys
    return mask


def reference(Q, K, V, mask):
    """PyTorch's attention under a boolean mask, and the log-sum-exp by its definition."""
    scores = (Q @ K.transpose(-2, -1) / math.sqrt(Q.shape[-1])).masked_fill(~mask, -math.inf)
    return F.scaled_dot_product_attention(Q, K, V, attn_mask=mask), torch.logsumexp(scores, dim=-1)


def test_names_and_signatures():
    signatures = {
        flash_attention: "Q K V causal_mask=True tile_q=64 tile_k=64",
        use_sdpa: "model",
        MultiHeadAttention_SDPA: "d_model n_heads d_head dropout_p",
        MultiHeadAttention_SDPA.forward: "self x causal_mask=True",
    }
    for function, expected in signatures.items():
        assert " ".join(map(str, inspect.signature(function).parameters.values())) == expected
    assert issubclass(MultiHeadAttention_SDPA, MultiHeadAttention)


# From scratch: value


@given(st.data())
def test_equals_pytorch(data):
    B, H = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 3)]))
    Sk = data.draw(st.integers(1, 40))
    Sq = data.draw(st.integers(1, Sk))
    D = data.draw(st.sampled_from([1, 5, 16]))
    tile_q, tile_k = data.draw(st.integers(1, 45)), data.draw(st.integers(1, 45))
    is_causal = data.draw(st.booleans())
    Q, K, V = draw((B, H, Sq, D), (B, H, Sk, D), (B, H, Sk, D), seed=data.draw(st.integers(0, 99)))
    mask = causal(Sq, Sk) if is_causal else torch.ones(Sq, Sk, dtype=torch.bool)
    assert_close(flash_attention(Q, K, V, is_causal, tile_q, tile_k), reference(Q, K, V, mask))


@given(st.data())
def test_any_mask(data):
    """Masks of every broadcastable shape; rows without keys give zeros and -inf."""
    Sq, Sk = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    shape = data.draw(
        st.sampled_from([(2, 3, Sq, Sk), (2, 1, Sq, Sk), (3, Sq, Sk), (Sq, Sk), (Sk,), (Sq, 1)])
    )
    tile_q, tile_k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    mask = torch.rand(shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.2, 0.7]))
    Q, K, V = draw((2, 3, Sq, 4), (2, 3, Sk, 4), (2, 3, Sk, 4))
    out, lse = flash_attention(Q, K, V, mask, tile_q, tile_k)
    assert_close((out, lse), reference(Q, K, V, mask.expand(2, 3, Sq, Sk)))
    empty = ~mask.expand(2, 3, Sq, Sk).any(-1)
    assert (out[empty] == 0).all() and (lse[empty] == -math.inf).all() and lse[~empty].isfinite().all()


@pytest.mark.parametrize("n", [300, 1000])
def test_float32_is_as_exact_as_pytorch(n):
    Q, K, V = draw(*[(1, 2, n, 64)] * 3, dtype=torch.float32)
    out, lse = flash_attention(Q, K, V)
    expected, expected_lse = reference(Q.double(), K.double(), V.double(), causal(n, n))
    assert out.dtype == lse.dtype == torch.float32
    assert_close(out, expected.float(), 5e-6)
    assert_close(lse, expected_lse.float(), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_larger_than_16_bits_hold(dtype):
    for Q, K, V, expected in large_scores(dtype):
        Q, K, V = (t.requires_grad_() for t in (Q, K, V))
        for tiles in [(1, 1), (64, 64)]:
            out, lse = flash_attention(Q, K, V, True, *tiles)
            assert_close(out, expected)
            assert lse.isfinite().all()
            assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), (Q, K, V)))
        fused = F.scaled_dot_product_attention(Q, K, V, is_causal=True)
        assert_close(fused, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_precision_as_the_textbook_form(dtype):
    """Scores in float32, weights and values in 16 bits: what is compared rounds alike."""
    Q, K, V = (t.to(dtype) for t in draw(*[(1, 2, 201, 64)] * 3, dtype=torch.float32))
    exact = reference(Q.double(), K.double(), V.double(), causal(201, 201))[0]
    ours = utils.largest_difference(flash_attention(Q, K, V, True, 256, 256)[0], exact)
    textbook = utils.largest_difference(scaled_dot_product_attention(Q, K, V), exact)
    assert textbook / 3 <= ours <= 3 * textbook  # a tile rounds its product, then the output is rounded
    products = []
    bmm = torch.bmm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "bmm", lambda a, b: products.append((a.dtype, b.dtype)) or bmm(a, b))
        flash_attention(Q, K, V)
    assert set(products) == {(torch.float32, torch.float32), (dtype, dtype)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_sums_in_32(dtype):
    Q, K, V = draw(*[(1, 2, 200, 64)] * 3, dtype=torch.float32)
    Q, K, V = Q.to(dtype), K.to(dtype), V.to(dtype)
    out, lse = flash_attention(Q, K, V)
    exact, exact_lse = reference(Q.double(), K.double(), V.double(), causal(200, 200))
    fused = F.scaled_dot_product_attention(Q, K, V, is_causal=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert utils.largest_difference(out, exact) <= 2 * utils.largest_difference(fused, exact) + 1e-3
    assert_close(lse, exact_lse.float(), 1e-5)


def test_inputs_that_are_not_contiguous():
    """As the model makes them: [B, T, H, D] seen as [B, H, T, D]; they are not written to."""
    Q, K, V = (t.transpose(1, 2) for t in draw(*[(2, 7, 3, 8)] * 3))
    before = Q.clone(), K.clone(), V.clone()
    assert_close(flash_attention(Q, K, V, True, 3, 2), reference(Q, K, V, causal(7, 7)))
    assert torch.equal(Q, before[0]) and torch.equal(K, before[1]) and torch.equal(V, before[2])


def test_no_keys_and_more_queries_than_keys():
    Q, K, V = draw((1, 2, 5, 4), (1, 2, 3, 4), (1, 2, 3, 4))
    out, lse = flash_attention(Q, K[:, :, :0], V[:, :, :0])
    assert (out == 0).all() and (lse == -math.inf).all()
    out, lse = flash_attention(Q, K, V, True, 2, 2)  # the first two queries precede every key
    assert_close((out, lse), reference(Q, K, V, causal(5, 3)))
    assert (out[:, :, :2] == 0).all()


def test_tiles_above_the_diagonal_are_skipped():
    def n_run(Sq, Sk, tile_q, tile_k):
        return sum(len(keys) for _, keys in score_tiles(Sq, Sk, True, tile_q, tile_k))

    assert n_run(256, 256, 64, 64) == 10  # of 16
    assert n_run(1000, 1000, 64, 64) == 136  # of 256
    assert n_run(1, 1000, 64, 64) == 16  # a decode step sees all
    for Sq, Sk, tile_q, tile_k in [(8, 8, 3, 2), (3, 7, 2, 3), (5, 5, 9, 2), (1, 1, 1, 1)]:
        covered = torch.zeros(Sq, Sk, dtype=torch.int64)
        for queries, key_tiles in score_tiles(Sq, Sk, True, tile_q, tile_k):
            for keys in key_tiles:
                assert causal(Sq, Sk)[queries, keys].any(), "a tile that holds nothing visible"
                covered[queries, keys] += 1
        assert covered.max() == 1 and (covered[causal(Sq, Sk)] == 1).all()


def test_scores_that_tiles_compute():
    assert tile_scores(256, 256, True, 64, 64) == 10 * 64 * 64  # of 16 tiles
    for Sq, Sk in ((7, 7), (5, 9), (1, 9)):
        assert tile_scores(Sq, Sk, True, 1, 1) == int(causal(Sq, Sk).sum())  # none that is hidden
        assert tile_scores(Sq, Sk, True, 99, 99) == tile_scores(Sq, Sk, False, 2, 3) == Sq * Sk


def test_memory_is_linear():
    def peak_mb(n):
        Q, K, V = draw(*[(1, 1, n, 8)] * 3, dtype=torch.float32)
        return utils.peak_memory_mb(lambda: flash_attention(Q, K, V, True, 32, 32))

    small, large = peak_mb(512), peak_mb(1024)
    assert large < 2.2 * small
    assert large < 0.1 * 1024**2 * 4 / 1e6  # far from one score matrix


def test_bad_input():
    Q, K, V = draw(*[(1, 2, 5, 4)] * 3)
    for tiles in [(0, 4), (4, -1)]:
        with pytest.raises(ValueError, match="at least 1 query and 1 key"):
            flash_attention(Q, K, V, True, *tiles)
    with pytest.raises(ValueError, match="must be boolean"):
        flash_attention(Q, K, V, torch.zeros(5, 5))
    for wrong in [(Q, K, V[:, :, :4]), (Q, K[:, :1], V[:, :1]), (Q[..., :3], K, V)]:
        with pytest.raises(ValueError, match="Q, K, V must be"):
            flash_attention(*wrong)


# From scratch: gradient, by PyTorch's record; main_flash_attention_backward.py has the pass of its own


@pytest.mark.parametrize("mask", [True, False, "partly"])
@pytest.mark.parametrize(("Sq", "Sk", "tiles"), [(5, 5, (2, 3)), (4, 6, (64, 64))])
def test_recorded_gradients(Sq, Sk, tiles, mask):
    mask = partly_visible(Sq, Sk) if mask == "partly" else mask
    Q, K, V = draw((2, 1, Sq, 3), (2, 1, Sk, 3), (2, 1, Sk, 3), requires_grad=True)

    def function(Q, K, V):
        out, lse = flash_attention(Q, K, V, mask, *tiles)
        return out, lse[lse.isfinite()]  # gradcheck cannot subtract infinities

    assert torch.autograd.gradcheck(function, (Q, K, V))


def test_autocast():
    Q, K, V = draw(*[(1, 2, 9, 8)] * 3, dtype=torch.bfloat16, requires_grad=True)
    plain = flash_attention(Q, K, V, True, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = flash_attention(Q, K, V, True, 4, 4)
    out.float().sum().backward()
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1]) and Q.grad.isfinite().all()


# Cases: masks and running maximum, polarity, log-sum-exp


def test_masked_key_cannot_win():
    """A finite fill of -10000 would beat the real score of -30000 and give 7."""
    Q, K = torch.tensor([-30000.0]).view(1, 1, 1, 1), torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    V = torch.tensor([1.0, 7.0]).view(1, 1, 2, 1)
    for tiles in [(1, 1), (64, 64)]:
        for mask in (torch.tensor([True, False]), torch.tensor([[True, False]])):
            out, lse = flash_attention(Q, K, V, mask, *tiles)
            assert out.item() == 1.0 and lse.item() == -30000.0
        out, _ = flash_attention(Q.expand(1, 1, 2, 1), K, V, True, *tiles)
        assert out[0, 0, 0].item() == 1.0  # the same by causality


def test_leading_tiles_masked_in_full():
    Q, K, V = draw(*[(1, 1, 8, 4)] * 3)
    window = causal(8, 8) & ~causal(8, 8).tril(-2)  # each query sees its own key and the one before
    assert window.sum(dim=-1).tolist() == [1, 2, 2, 2, 2, 2, 2, 2]
    assert_close(flash_attention(Q, K, V, window, 2, 2), reference(Q, K, V, window), 1e-5)


@pytest.mark.parametrize(("Sq", "Sk"), [(5, 5), (3, 7)])
def test_lengths_that_no_tile_divides(Sq, Sk):
    Q, K, V = draw((1, 1, Sq, 4), (1, 1, Sk, 4), (1, 1, Sk, 4))
    assert_close(flash_attention(Q, K, V, True, 4, 4), reference(Q, K, V, causal(Sq, Sk)), 1e-5)


def test_large_scores_do_not_overflow():
    Q, K, V = (100 * t for t in draw(*[(1, 1, 9, 4)] * 3, dtype=torch.float32))
    out, lse = flash_attention(Q, K, V, True, 2, 2)
    assert_close((out, lse), reference(Q, K, V, causal(9, 9)))
    assert lse.abs().max() > 1000


def test_later_tokens_change_nothing_before_them():
    Q, K, V = draw(*[(1, 2, 9, 4)] * 3)
    model = use_sdpa(tiny_model(GPTlite))
    tokens = random_tokens(2, 9)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 16
    before, after = model(tokens), model(changed)
    assert_close(after[:, :-1], before[:, :-1])
    assert utils.largest_difference(after[:, -1], before[:, -1]) > 0.1
    before, _ = flash_attention(Q, K, V, True, 4, 4)
    K[:, :, -1], V[:, :, -1] = 5.0, 5.0
    after, _ = flash_attention(Q, K, V, True, 4, 4)
    assert torch.equal(after[:, :, :-1], before[:, :, :-1]) and not torch.equal(after, before)


def test_no_dropout_in_evaluation_mode():
    model = use_sdpa(tiny_model(GPTlite, dropout_p=0.5))
    plain = tiny_model(GPTlite, dropout_p=0.5)
    tokens = random_tokens(2, 9)
    assert torch.equal(model(tokens), model(tokens))
    assert_close(model(tokens), plain(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))
    data = random_tokens(1, 200)[0]
    loss = utils.validation_loss(model, data, 4)
    assert model.training and loss == utils.validation_loss(model, data, 4)
    assert_close(loss, utils.validation_loss(plain, data, 4), 1e-6)


def test_attention_weights_drop_out_in_training():
    mha = MultiHeadAttention_SDPA(8, 2, 4, 0.5).double().train()
    mha.dropout.forward = lambda x: x  # leaves the dropout inside the fused call
    x = draw((1, 6, 8))[0]
    assert not torch.equal(mha(x), mha(x))


def test_log_sum_exp_after_a_shift_of_the_keys():
    """Subtracting the mean key changes no weight, but every log-sum-exp by scale * q . mean."""
    Q, K, V = draw((1, 1, 3, 4), (1, 1, 6, 4), (1, 1, 6, 4), dtype=torch.float32)
    K = K + 5
    mean = K.mean(dim=2, keepdim=True)  # over the sequence
    out, lse = flash_attention(Q, K, V, False)
    smooth_out, smooth_lse = flash_attention(Q, K - mean, V, False)
    removed = (Q * mean).sum(dim=-1) / 2  # scale 1/sqrt(4)
    assert_close(smooth_out, out, 1e-6)
    assert_close(smooth_lse + removed, lse, 2e-6)
    wrong_axis, _ = flash_attention(Q, K - K.mean(dim=3, keepdim=True), V, False)
    assert utils.largest_difference(wrong_axis, out) > 0.05
    K2, V2 = draw((1, 1, 5, 4), (1, 1, 5, 4), seed=1, dtype=torch.float32)
    other = flash_attention(Q, K2, V2, False)
    whole, _ = flash_attention(Q, torch.cat([K, K2], dim=2), torch.cat([V, V2], dim=2), False)
    assert_close(merge_attention(smooth_out, smooth_lse + removed, *other)[0], whole, 1e-5)
    assert utils.largest_difference(merge_attention(smooth_out, smooth_lse, *other)[0], whole) > 0.05


# In the model


@given(st.integers(1, 3), st.integers(1, 16), st.integers(0, 99))
def test_the_model_gives_the_same_logits(batch_size, T, seed):
    tokens = random_tokens(batch_size, T, seed)
    assert_close(use_sdpa(tiny_model(GPTlite))(tokens), tiny_model(GPTlite)(tokens))


def test_masks_of_the_module():
    plain = tiny_model(GPTlite).blocks[0].mha
    fused = use_sdpa(tiny_model(GPTlite)).blocks[0].mha
    x = draw((2, 5, 32))[0]
    window = causal(5, 5) & ~causal(5, 5).tril(-2)
    for mask in (True, False, window, partly_visible(5, 5)):
        assert_close(fused(x, mask), plain(x, mask))


@pytest.mark.parametrize("mha_class", [MultiHeadAttention, MultiHeadAttention_SDPA])
def test_queries_without_keys_in_the_module(mha_class):
    """Zeros from the attention, so the projection's bias alone, and finite gradients everywhere."""
    mha = tiny_model(GPTlite).blocks[0].mha
    mha.__class__ = mha_class
    x = draw((2, 5, 32), requires_grad=True)[0]
    out = mha(x, partly_visible(5, 5))
    assert_close(out[:, 1], mha.out_proj.bias.expand(2, 32))
    out.square().sum().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in mha.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mha_class", [MultiHeadAttention, MultiHeadAttention_SDPA])
def test_the_module_with_scores_larger_than_16_bits_hold(mha_class, dtype):
    mha = MultiHeadAttention(64, 1, 64, 0.0)
    mha.__class__ = mha_class
    for projection in (mha.query_proj, mha.key_proj, mha.value_proj, mha.out_proj):
        torch.nn.init.eye_(projection.weight)
        torch.nn.init.zeros_(projection.bias)
    x = torch.full((1, 3, 64), 40.0)
    for mask in (True, False, causal(3, 3)):
        assert_close(mha.to(dtype)(x.to(dtype), mask), x.to(dtype))


def test_use_sdpa_keeps_the_weights():
    model = tiny_model(GPTlite)
    parameters = [p.data_ptr() for p in model.parameters()]
    names = list(model.state_dict())
    assert use_sdpa(model) is model and use_sdpa(model) is model
    assert [p.data_ptr() for p in model.parameters()] == parameters and list(model.state_dict()) == names
    assert all(type(block.mha) is MultiHeadAttention_SDPA for block in model.blocks)
    assert type(tiny_model(GPTlite).blocks[0].mha) is MultiHeadAttention  # other models are untouched
    with pytest.raises(ValueError, match="MultiHeadAttention_KVCache"):
        use_sdpa(tiny_model(GPTlite_KVCache))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda(dtype):
    Q, K, V = (t.cuda().to(dtype).requires_grad_() for t in draw(*[(2, 2, 300, 64)] * 3))
    exact = reference(Q.double(), K.double(), V.double(), causal(300, 300).cuda())
    out, lse = flash_attention(Q, K, V, True, 128, 128)
    assert_close(out.float(), exact[0].float(), 1e-5 if dtype == torch.float32 else 2e-2)
    assert_close(lse, exact[1].float(), 1e-5 if dtype == torch.float32 else 2e-2)
    grads = torch.autograd.grad(out.float().square().sum(), (Q, K, V))
    assert all(g.isfinite().all() for g in grads)


# The script


def test_what_attention_can_gain_is_told_by_its_share():
    small = words.part("Attention", 2.0, 10.0, "TTFT")
    large = words.part("Attention", 8.0, 10.0, "TTFT")
    assert "smaller part of the TTFT, 20%" in small and "1.25 times as fast, no more" in small
    assert "most of the TTFT, 80%" in large and "5.00 times" in large
    assert "not measured" in words.part("Attention", None, 10.0, "TTFT")
    assert words.about("one head", small).startswith("One head: Attention takes")
    with pytest.raises(TypeError):
        words.about("one head", "a sentence that no figure chose")


def test_script(tmp_path):
    figure = tmp_path / "figure.png"
    run = run_script("main_flash_attention.py", "--quick", "--json", "-", "--plot", figure)
    assert run.status == 0, run.stderr
    report = run.json
    assert report["checks"] and all(report["checks"].values())
    textbook, fused = report["rows"]
    assert [row["method"] for row in report["rows"]] == ["textbook", "SDPA"]
    assert textbook["same_output"] and fused["same_output"]
    assert abs(fused["loss_difference"]) < 1e-4
    assert fused["peak_memory_mb"] < textbook["peak_memory_mb"]
    times, peaks = report["sweeps"].values()
    assert [row["tokens"] for row in times] == [row["tokens"] for row in peaks] == [256, 512, 1024]
    for form in ("from scratch", "SDPA"):
        assert peaks[-1][form] < peaks[-1]["textbook"] / 3
        assert peaks[-1][form] / peaks[0][form] < peaks[-1]["textbook"] / peaks[0]["textbook"] / 2
    assert figure.stat().st_size > 1000 and len(report["why"]) == 4


def test_script_refuses_bad_input():
    run = run_script("main_flash_attention.py", "--batch-size", 0)
    assert run.status == 2 and "not a number from 1 up" in run.stderr
    assert main_flash_attention.__doc__.startswith("FlashAttention")
