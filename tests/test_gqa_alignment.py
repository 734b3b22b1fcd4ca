"""Heads that are rotated before they are averaged: the rotation changes nothing, the mean loses less."""

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa
from gptlite_kvcache import GPTlite_KVCache
from gqa_alignment import align_heads, attention_inputs, procrustes_rotations

GROUPS = [1, 2, 4]  # of 4 heads of 8


def gqa_model(n_groups):
    return tiny_model(GPTlite_GQA, n_heads=4, d_head=8, n_groups=n_groups)


def mha_model(model_class=GPTlite, **kwargs):
    return tiny_model(model_class, n_heads=4, d_head=8, **kwargs)


@pytest.mark.parametrize("model_class", [GPTlite, GPTlite_KVCache])
def test_attention_inputs(model_class):
    model, tokens = mha_model(model_class), random_tokens(5, 6)
    inputs = attention_inputs(model, tokens, batch_size=2)
    x = model.token_embedding(tokens) + model.position_embedding(torch.arange(6))
    assert len(inputs) == 2
    assert_close(inputs[0], model.blocks[0].ln1(x).flatten(0, 1))
    assert not model.blocks[0].mha._forward_pre_hooks


@settings(max_examples=8)
@given(n_groups=st.sampled_from(GROUPS), n_texts=st.sampled_from([1, 8]), seed=st.integers(0, 99))
def test_rotated_heads_compute_the_same(n_groups, n_texts, seed):
    model, tokens = mha_model(seed=seed), random_tokens(n_texts, 16, seed)
    state = model.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    expected = model(tokens)
    inputs = attention_inputs(model, tokens)
    rotated = align_heads(state, 4, 8, n_groups, inputs)
    assert all(torch.equal(state[name], before[name]) for name in state)  # not modified
    model.load_state_dict(rotated)
    assert_close(model(tokens), expected)


@pytest.mark.parametrize("n_groups", [1, 2])
def test_heads_that_differ_by_a_rotation_merge_without_loss(n_groups):
    model, tokens = mha_model(), random_tokens(8, 16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for block in model.blocks:
            for proj in (block.mha.key_proj, block.mha.value_proj):
                for h in range(4):
                    source = h * n_groups // 4 * (4 // n_groups)  # the first head of the group
                    noise = torch.randn(8, 8, generator=generator, dtype=torch.float64)
                    R = torch.linalg.qr(noise).Q if h != source else torch.eye(8, dtype=torch.float64)
                    for tensor in (proj.weight, proj.bias):
                        heads = tensor.view(4, 8, -1)
                        heads[h] = R @ heads[source]
    expected = model(tokens)
    inputs = attention_inputs(model, tokens)
    aligned = align_heads(model.state_dict(), 4, 8, n_groups, inputs)
    merged = utils.load_weights(gqa_model(n_groups), convert_mha_to_gqa(aligned, 4, 8, n_groups))
    assert_close(merged(tokens)[0], expected, 1e-8)
    mean = utils.load_weights(gqa_model(n_groups), convert_mha_to_gqa(model.state_dict(), 4, 8, n_groups))
    assert utils.largest_difference(mean(tokens)[0], expected) > 0.1


def test_rotations_bring_heads_closer():
    A = torch.randn(2, 3, 40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    R = procrustes_rotations(A)
    assert_close(R @ R.mT, torch.eye(5, dtype=torch.float64).expand(2, 3, 5, 5))

    def spread(heads):
        return ((heads - heads.mean(dim=1, keepdim=True)) ** 2).sum()

    assert spread(A @ R) < spread(A)


def test_hooks_go_even_if_the_model_fails():
    model = mha_model()
    with pytest.raises(ValueError, match="context"):
        attention_inputs(model, random_tokens(2, 17))
    assert not any(block.mha._forward_pre_hooks for block in model.blocks)


# ---- The script ----


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != utils.GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("the order of losses needs trained weights, and there are none")
    run = run_script("more/gqa_alignment.py", "--quick", "--json", "-", "--plot", "a.png", cwd=tmp_path)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert all(report["checks"].values()) and (tmp_path / "a.png").is_file()
    rows = {row["method"]: row for row in report["rows"]}
    mean, aligned = rows["GQA 1, mean"], rows["GQA 1, aligned"]
    assert rows["MHA"]["valid_loss"] < aligned["valid_loss"] < mean["valid_loss"] - 0.5
    assert aligned["kv_bytes_per_token"] == mean["kv_bytes_per_token"] == 2 * 3 * 64 * 4
    assert aligned["uptrained_loss"] < mean["uptrained_loss"] < mean["valid_loss"]
    assert rows["MHA, trained on"]["loss_difference_se"] is not None
    assert "GQA 1, aligned is lower than that of GQA 1, mean" in report["why"][0]
