"""The script of GQA as a user runs it, and its technique: the mean of heads, then a few steps."""

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model

import inference_utils as utils
from gptlite import GPTlite
from gptlite_gqa import GPTlite_GQA, convert_mha_to_gqa
from gptlite_kvcache import scaled_dot_product_attention_kv_cache
from main_gqa import convert_and_uptrain, decode_attention


def test_convert_and_uptrain():
    """The converted model holds the means; its copy was trained, on the same steps as train_steps alone."""
    state = tiny_model(GPTlite, n_heads=4, d_head=8, dtype=torch.float32).state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    data = torch.arange(400) % 7
    gqa = tiny_model(GPTlite_GQA, n_heads=4, d_head=8, n_groups=2, seed=5, dtype=torch.float32)
    model, trained = convert_and_uptrain(state, gqa, data, 12, 3e-3, 4, 16)
    expected = convert_mha_to_gqa(before, 4, 8, 2)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(state[name], before[name]) for name in state)
    assert utils.validation_loss(trained, data, 8) < utils.validation_loss(model, data, 8)
    assert not (model.training or trained.training)
    same, untouched = convert_and_uptrain(state, gqa, data, 0, 3e-3, 4, 16)
    tokens = random_tokens(2, 9)
    assert torch.equal(same(tokens)[0], untouched(tokens)[0])


def test_forms_of_a_decode_step():
    Q, K, V = torch.randn(2, 6, 1, 8), torch.randn(2, 6, 33, 8), torch.randn(2, 6, 33, 8)
    forms = decode_attention(Q, K, V, [3, 1])
    assert list(forms) == ["MHA", "3 grouped", "3 expanded", "1 grouped", "1 expanded"]
    assert_close(forms["MHA"](), scaled_dot_product_attention_kv_cache(Q, K, V))
    for G in (3, 1):
        copies = (t[:, :G].repeat_interleave(6 // G, dim=1) for t in (K, V))
        expected = scaled_dot_product_attention_kv_cache(Q, *copies)
        assert_close(forms[f"{G} grouped"](), expected)
        assert_close(forms[f"{G} expanded"](), expected)


def test_script(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != utils.GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("the order of losses needs trained weights, and there are none")
    run = run_script("main_gqa.py", "--quick", "--json", "-", "--plot", "a.png", cwd=tmp_path)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert all(report["checks"].values()) and (tmp_path / "a.png").is_file()
    rows = {row["method"]: row for row in report["rows"]}
    mha, mean, expanded = rows["MHA"], rows["GQA 1, mean"], rows["GQA 1, expanded"]
    assert mha["baseline"] and mha["kv_bytes_per_token"] == 2 * 3 * 192 * 4
    assert mean["kv_bytes_per_token"] == expanded["kv_bytes_per_token"] == mha["kv_bytes_per_token"] / 3
    assert mean["forward_tokens"] == mha["forward_tokens"] and mean["tpot_ms"] > 0
    assert mean["n_parameters"] < mha["n_parameters"] and mean["peak_memory_mb"] < mha["peak_memory_mb"]
    assert mean["uptrained_loss"] < mean["valid_loss"] and mha["valid_loss"] < mean["valid_loss"] - 0.5
    assert expanded["valid_loss"] == pytest.approx(mean["valid_loss"], abs=1e-4)
    assert mean["loss_difference_se"] > 0 and mean["uptrained_loss_difference"] > 0
    assert rows["MHA, trained on"]["valid_loss"] == pytest.approx(mha["valid_loss"], abs=0.05)
    assert len(report["sweeps"]) == 2
    assert all(
        [*row] == ["context", "MHA", "1 grouped", "1 expanded"]
        for s in report["sweeps"].values()
        for row in s
    )
    assert "GQA 1, mean" in report["why"][3] and "control after 1 steps" in report["why"][3]


@pytest.mark.slow
def test_script_in_16_bits(distilled_checkpoint):
    """Losses and bytes are those of the type: nothing is halved for a run that was not."""
    run = run_script(
        "main_gqa.py", "--quick", "--json", "-", "--dtype", "bfloat16", checkpoint=distilled_checkpoint
    )
    assert run.status == 0, run.stderr + run.stdout
    assert run.json["rows"][0]["kv_bytes_per_token"] == 2 * 3 * 192 * 2


def test_script_refuses_groups_that_do_not_divide(distilled_checkpoint):
    run = run_script("main_gqa.py", "--quick", "--n-groups", "2", checkpoint=distilled_checkpoint)
    assert run.status == 2
    assert run.stderr.strip().splitlines()[-1] == (
        "main_gqa.py: 3 heads cannot share 2 groups of keys and values evenly"
    )


@pytest.mark.slow
def test_training_on_does_not_harm_the_control(checkpoint):
    """The default rate and warm-up, half the default steps: GPTlite itself must not get worse by them."""
    if checkpoint != utils.GPTLITE_CKPT_PATH:
        pytest.skip("needs trained weights, and there is no checkpoints/gptlite.pth")
    from data.shakespeare import get_shakespeare_data
    from inference_training import UPTRAIN_LR, uptrained

    vocab_size, train_data, valid_data, _, _ = get_shakespeare_data()
    model = utils.load_model(GPTlite, vocab_size)
    after = utils.window_losses(uptrained(model, train_data, 40, UPTRAIN_LR, 8, 256), valid_data, 32)
    difference, se = utils.loss_difference(after, utils.window_losses(model, valid_data, 32))
    assert difference <= 2 * se  # as far as the windows tell
