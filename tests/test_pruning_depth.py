"""Blocks that are removed, against models in which they add zero, and the script's order."""

import copy
import runpy
import sys

import pytest
import torch
from helpers import ROOT, assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from gptlite_pruned import with_kv_cache
from main_kvcache import generate, generate_kvcache, generate_static
from main_pruning import compute_importance
from pruning_depth import block_influence, mask_blocks, narrow_to, remove_blocks

CONTEXT = 16
DATA = random_tokens(1, 400)[0]


@given(st.sets(st.integers(0, 3), max_size=3), st.integers(1, CONTEXT), st.integers(0, 99))
def test_blocks_that_are_removed_are_blocks_that_add_zero(layers, n, seed):
    tokens = random_tokens(2, n, seed)
    expected = mask_blocks(tiny_model(GPTlite, n_layers=4), layers)(tokens)
    removed = remove_blocks(tiny_model(GPTlite, n_layers=4), layers)
    assert_close(removed(tokens), expected)
    assert len(removed.blocks) == 4 - len(layers)


def test_caches_of_a_model_without_a_block():
    """PR-2: three layers of cache, numbered anew, and the same tokens with and without."""
    prompt = random_tokens(2, 5)
    model = remove_blocks(tiny_model(GPTlite, n_layers=4), [1])
    expected = generate(model, prompt, 8, CONTEXT)
    cached = remove_blocks(tiny_model(GPTlite_KVCache, n_layers=4), [1])
    assert torch.equal(generate_kvcache(cached, prompt, 8, CONTEXT), expected)
    assert torch.equal(generate_kvcache(with_kv_cache(model), prompt, 8, CONTEXT), expected)
    assert len(cached(prompt)[1]) == 3
    static = remove_blocks(tiny_model(GPTlite_StaticKVCache, n_layers=4), [1])
    buffers = StaticKVCache(static, 2)
    assert torch.equal(generate_static(static, prompt, 8, buffers), expected)
    assert buffers.k.shape[0] == len(static.blocks) == 3
    # the names of a saved model are those of a model with three layers
    three = utils.load_weights(tiny_model(GPTlite, n_layers=3), model.state_dict())
    assert torch.equal(three(prompt), model(prompt))


@pytest.mark.parametrize("layers", [[4], [-1], [0, 1, 2, 3]], ids=str)
def test_blocks_that_cannot_be_removed(layers):
    model = tiny_model(GPTlite, n_layers=4)
    with pytest.raises(ValueError, match="cannot remove blocks"):
        remove_blocks(model, layers)
    assert len(model.blocks) == 4


@pytest.mark.parametrize("model_class", [GPTlite, GPTlite_KVCache])
def test_block_influence(model_class):
    model, windows = tiny_model(model_class, n_layers=3), utils.sample_prompts(DATA, 12, CONTEXT)
    mask_blocks(model, [1])
    influence = block_influence(model, DATA, 12, CONTEXT)
    x = model.token_embedding(windows) + model.position_embedding(torch.arange(CONTEXT))
    out = model.blocks[0](x)
    out = out[0] if isinstance(out, tuple) else out
    cosine = (x * out).sum(-1) / (x.norm(dim=-1) * out.norm(dim=-1))
    assert_close(influence[0], 1 - cosine.mean())
    assert abs(influence[1]) < 1e-12 and influence[2] > 1e-3
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("n_blocks", [1, 2, 3])
def test_narrower_models_of_as_many_parameters(n_blocks):
    """With the heads and neurons of the blocks that stay, and with the channels that come closest."""
    model = tiny_model(GPTlite, n_layers=4, d_model=64, n_heads=4, d_head=16)
    n_wanted = utils.n_parameters(remove_blocks(copy.deepcopy(model), range(n_blocks)))
    heads, neurons = compute_importance(model, DATA, 1, 4, CONTEXT)
    fewer, narrower = narrow_to(model, n_wanted, heads, neurons, torch.arange(64.0))
    assert fewer.blocks[0].mha.n_heads == 4 - n_blocks
    assert fewer.blocks[0].ffwd.net[0].out_features == 256 - 64 * n_blocks
    assert utils.n_parameters(fewer) == pytest.approx(
        n_wanted, rel=0.05
    )  # norms and biases of the blocks stay
    of_one = (utils.n_parameters(model) - utils.n_parameters(narrower)) / (64 - narrower.ln.weight.numel())
    assert abs(utils.n_parameters(narrower) - n_wanted) <= of_one / 2
    assert len(model.blocks) == 4 and model.blocks[0].mha.n_heads == 4  # copies were cut
    assert narrower(random_tokens(2, 5)).shape == fewer(random_tokens(2, 5)).shape == (2, 5, 16)


# ---- The script ----


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "figure.png"
    args = ("--quick", "--json", "-", "--plot", figure)
    run = run_script("more/pruning_depth.py", *args, cwd=tmp_path, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert len(report["checks"]) == 2 and all(report["checks"].values())
    whole, *students = report["rows"][:4]
    before = report["rows"][4:]
    assert whole["baseline"] and students[0]["method"] == "1 of 3 blocks cut"
    for row, cut in zip(students, before, strict=True):
        assert (
            cut["method"] == f"{row['method']}, not distilled" and row["n_parameters"] == cut["n_parameters"]
        )
        assert row["n_parameters"] == pytest.approx(students[0]["n_parameters"], rel=0.01)
        assert 0.6 * whole["n_parameters"] < row["n_parameters"] < 0.7 * whole["n_parameters"]
        assert row["peak_memory_mb"] < 0.8 * whole["peak_memory_mb"]
        assert row["loss_difference_se"] > 0 and cut["loss_difference_se"] > 0
    # fewer blocks or heads have less cache, fewer channels have as much
    cache = [row["kv_bytes_per_token"] for row in (whole, *students)]
    assert cache == [4608, 3072, 3072, 4608]
    alone, together = report["sweeps"].values()
    assert [row["block"] for row in alone] == [0, 1, 2] and len(together) == 1
    cheapest = min(alone, key=lambda row: row["training loss"])  # the choice is made on training text
    assert together[0]["blocks"] == str(cheapest["block"])
    assert together[0]["rise of the validation loss"] == cheapest["rise of the validation loss"]
    if distilled_checkpoint == utils.GPTLITE_DISTILLED_CKPT_PATH:  # the first block is what all others read
        assert max(alone, key=lambda row: row["rise of the validation loss"])["block"] == 0
    assert len(report["why"]) == 4 and figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("n", ["0", "3"])
def test_script_refuses_to_remove_nothing_or_everything(n, monkeypatch, capsys):
    script = str(ROOT / "more" / "pruning_depth.py")
    monkeypatch.setattr(sys, "argv", [script, "--quick", "--blocks", n])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert end.value.code == 2
    assert capsys.readouterr().err == f"pruning_depth.py: --blocks is 1 to 2, not {n}\n"
