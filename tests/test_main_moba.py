"""MoBA: what a query sees, gathered forms equal the mask, all blocks equal dense attention, training on."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, large_scores, quick_report, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_gqa import grouped_attention
from gptlite_sparse import GPTlite_Sparse, use_choice
from main_moba import block_means, choose_blocks, moba_attention, moba_prefill, moba_step


def draw(B, H, G, Sq, Sk, D=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, Sq, D), (B, G, Sk, D), (B, G, Sk, D)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_one_block_is_the_own_block_only():
    Q, K, _ = draw(1, 2, 2, 8, 8)
    assert choose_blocks(Q, K, 4, 1).sum(-1).tolist() == [[[1, 2, 3, 4, 1, 2, 3, 4]] * 2]


def test_early_queries_have_fewer_blocks_to_choose():
    """Three blocks of four: no block twice, none of the future."""
    Q, K, _ = draw(1, 1, 1, 9, 9)
    counts = choose_blocks(Q, K, 4, 3).sum(-1).flatten().tolist()
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_the_best_blocks_by_hand():
    """One query, four blocks of two keys: the mean decides, not the best key."""
    K = torch.tensor([[9.0, -9.0], [1.0, 2.0], [4.0, 0.0], [0.0, 0.0]]).view(1, 1, 8, 1)
    visible = choose_blocks(torch.ones(1, 1, 1, 1), K, 2, 3)
    assert visible.flatten().int().tolist() == [0, 0, 1, 1, 1, 1, 1, 1]


@given(st.data())
def test_gathered_forms_equal_the_definition(data):
    G, group = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 3)]))
    T, size, top_k = (data.draw(st.integers(1, n)) for n in (30, 9, 6))
    Q, K, V = draw(2, G * group, G, T, T, seed=data.draw(st.integers(0, 99)))
    expected = moba_attention(Q, K, V, size, top_k)
    assert_close(moba_prefill(Q, K, V, size, top_k), expected)
    assert_close(moba_step(Q[:, :, -1:], K, V, block_means(K, size), size, top_k), expected[:, :, -1:])
    for t in range(T):  # one token at a time
        one = moba_attention(Q[:, :, t : t + 1], K[:, :, : t + 1], V[:, :, : t + 1], size, top_k)
        assert_close(one, expected[:, :, t : t + 1])
    if top_k * size >= T + size - 1:
        assert_close(expected, grouped_attention(Q, K, V))


def test_the_last_key_changes_no_earlier_output():
    Q, K, V = draw(2, 4, 2, 11, 11)
    before = [form(Q, K, V, 4, 2) for form in (moba_attention, moba_prefill)]
    K[:, :, 10], V[:, :, 10] = 50.0, 50.0
    for form, expected in zip((moba_attention, moba_prefill), before, strict=True):
        assert_close(form(Q, K, V, 4, 2)[:, :, :10], expected[:, :, :10])


def test_heads_of_a_group_choose_once():
    Q, K, _ = draw(2, 6, 2, 20, 20)
    visible = choose_blocks(Q, K, 4, 2)
    assert torch.equal(visible[:, 0:1].expand(-1, 3, -1, -1), visible[:, :3])
    assert not torch.equal(visible[:, 0], visible[:, 3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_larger_than_16_bits_hold(dtype):
    for Q, K, V, expected in large_scores(dtype):
        assert_close(moba_attention(Q, K, V, 1, 2), expected)
        assert_close(moba_prefill(Q, K, V, 1, 2), expected)
        assert_close(moba_step(Q[:, :, 1:], K, V, block_means(K, 1), 1, 2), expected[:, :, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types(dtype):
    Q, K, V = (t.to(dtype) for t in draw(1, 2, 2, 40, 40))
    out = moba_prefill(Q, K, V, 8, 5)
    assert out.dtype == dtype
    exact = F.scaled_dot_product_attention(*(t.double() for t in (Q, K, V)), is_causal=True)
    assert_close(out.double(), exact, {torch.float32: 5e-6, torch.bfloat16: 3e-2}[dtype])


def test_bad_arguments():
    q, K, V = draw(1, 1, 1, 1, 9)
    for size, top_k in ((0, 1), (4, 0)):
        with pytest.raises(ValueError, match="at least 1 block"):
            choose_blocks(q, K, size, top_k)
        with pytest.raises(ValueError, match="at least 1 block"):
            moba_step(q, K, V, K[:, :, :2], size, top_k)
    with pytest.raises(ValueError, match="2 means are not those of 9 keys in blocks of 3"):
        moba_step(q, K, V, block_means(K, 4), 3, 2)


# In the model


def moba_model(size, top_k, **kwargs):
    return use_choice(tiny_model(GPTlite_Sparse, **kwargs), lambda Q, K: choose_blocks(Q, K, size, top_k))


def test_all_blocks_are_the_model_unchanged():
    tokens = random_tokens(2, 16)
    assert_close(moba_model(4, 4)(tokens)[0], tiny_model(GPTlite)(tokens))
    assert (moba_model(4, 2)(tokens)[0] - tiny_model(GPTlite)(tokens)).abs().max() > 1e-3


@given(st.integers(1, 16), st.integers(1, 5), st.integers(1, 4), st.integers(0, 20))
def test_every_split_of_a_text_gives_one_pass(n, size, top_k, seed):
    model, tokens = moba_model(size, top_k), random_tokens(2, 16, seed)
    whole = model(tokens)[0]
    assert_close(utils.cached_logits(model, tokens, n)[0], whole)
    first, cache = model(tokens[:, :n])
    if n < 16:
        assert_close(torch.cat([first, model(tokens[:, n:], cache)[0]], dim=1), whole)


def test_training_reaches_all_projections():
    model = moba_model(4, 2, dtype=torch.float32).train()
    model(random_tokens(2, 16))[0].logsumexp(-1).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
    assert model.blocks[0].mha.key_proj.weight.grad.abs().max() > 0


# The script


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("main_moba.py", tmp_path, distilled_checkpoint)  # --quick
    assert all(report["checks"].values()) and len(report["checks"]) == 4 and len(report["why"]) == 4
    rows = {row["method"]: row for row in report["rows"]}
    dense, moba, less, window = (rows[n] for n in ("dense", "MoBA 64", "MoBA 32", "window 32"))
    assert dense["baseline"] and dense["keys_read"] == 128.5
    assert less["keys_read"] < window["keys_read"] < moba["keys_read"] < 64
    assert 0.4 < less["mass"] < moba["mass"] < 1 and 0 < moba["best_missed"] < less["best_missed"]
    assert less["approximate"] and less["kv_bytes_per_token"] == dense["kv_bytes_per_token"]
    assert less["uptrained_loss"] > 0 and "control after 1 steps" in report["why"][1]
    losses, steps, prompts = report["sweeps"].values()
    assert [line["rule"] for line in losses] == ["MoBA", "MoBA, trained on", "MoBA", "window"]
    assert [line["keys"] for line in steps] == [line["tokens"] for line in prompts] == [1024, 4096]
