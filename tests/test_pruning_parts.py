"""Channels that are cut, against models in which they are zero, and PyTorch's layer norm."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from gptlite_pruned import with_kv_cache
from pruning_parts import (
    LayerNorm_Pruned,
    channel_importance,
    mask_channels,
    prune_channels,
    prune_layer_norm,
)

E, CONTEXT = 32, 16
DATA = random_tokens(1, 400)[0]


def importance_of(kept, n=E):
    scores = torch.zeros(n)
    scores[list(kept)] = 1.0
    return scores


@given(st.sets(st.integers(0, E - 1), min_size=1), st.integers(0, 99))
def test_layer_norm_of_some_channels(kept, seed):
    """Equal to PyTorch's over all channels, the others zero."""
    kept = torch.tensor(sorted(kept))
    generator = torch.Generator().manual_seed(seed)
    norm = torch.nn.LayerNorm(E, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(E, generator=generator))
        norm.bias.copy_(torch.randn(E, generator=generator))
    x = 5 * torch.randn(3, len(kept), generator=generator, dtype=torch.float64) + 2  # [B, kept]
    full = torch.zeros(3, E, dtype=torch.float64)
    full[:, kept] = x
    assert_close(prune_layer_norm(norm, kept)(x), norm(full)[:, kept])
    plain = F.layer_norm(x, x.shape[-1:], norm.weight[kept], norm.bias[kept], norm.eps)
    assert_close(prune_layer_norm(norm, kept, exact=False)(x), plain)
    twice = prune_layer_norm(prune_layer_norm(norm, kept), torch.arange(len(kept)))
    assert twice.n_full == E


@given(st.sets(st.integers(0, E - 1), min_size=1), st.integers(1, CONTEXT), st.integers(0, 99))
def test_channels_that_are_cut_are_channels_that_are_zero(kept, n, seed):
    tokens, importance = random_tokens(2, n, seed), importance_of(kept)
    expected = mask_channels(tiny_model(GPTlite), importance, len(kept))(tokens)
    assert_close(prune_channels(tiny_model(GPTlite), importance, len(kept))(tokens), expected)
    cached = prune_channels(tiny_model(GPTlite_KVCache), importance, len(kept))
    assert_close(cached(tokens)[0], expected)
    assert cached.ln.weight.shape == cached.token_embedding.weight.shape[1:] == (len(kept),)


def test_masked_channels_stay_zero():
    """What the residual stream holds there, in front of every block and of the head, and what is read."""
    model = mask_channels(tiny_model(GPTlite), importance_of(range(20)), 20)
    seen = []
    for module in [*model.blocks, model.ln, *(b.ln1 for b in model.blocks), *(b.ln2 for b in model.blocks)]:
        module.register_forward_hook(lambda _module, args, out: seen.extend([args[0], out]))
    model(random_tokens(2, CONTEXT))
    assert len(seen) == 2 * 7
    for x in seen:
        assert not x[..., 20:].any() and x[..., :20].any()


@pytest.mark.parametrize("exact", [True, False])
def test_all_channels_is_the_identity(exact):
    model, tokens = tiny_model(GPTlite), random_tokens(2, CONTEXT)
    pruned = prune_channels(copy.deepcopy(model), torch.rand(E), E, exact)
    assert_close(pruned(tokens), model(tokens))
    assert isinstance(pruned.ln, LayerNorm_Pruned) == exact


def test_plain_channels_are_a_gptlite_of_that_width():
    """Its weights load into one, it decodes with a cache, and it is not the exact one."""
    importance, tokens = importance_of(range(4, 24)), random_tokens(2, CONTEXT)
    pruned = prune_channels(tiny_model(GPTlite), importance, 20, exact=False)
    narrow = tiny_model(GPTlite, d_model=20)
    for block in narrow.blocks:
        for name, n_out, n_in in (("0", 128, 20), ("2", 20, 128)):
            setattr(block.ffwd.net, name, torch.nn.Linear(n_in, n_out, dtype=torch.float64))
    utils.load_weights(narrow, pruned.state_dict())
    assert_close(narrow(tokens), pruned(tokens))
    assert_close(utils.cached_logits(with_kv_cache(pruned), tokens, 5)[0], pruned(tokens))
    exact = prune_channels(tiny_model(GPTlite), importance, 20)
    assert utils.largest_difference(exact(tokens), pruned(tokens)) > 0.1


@pytest.mark.parametrize("n", [0, E + 1])
def test_channels_out_of_range(n):
    with pytest.raises(ValueError, match="cannot keep"):
        prune_channels(tiny_model(GPTlite), torch.ones(E), n)


def test_channel_importance_by_hand():
    model, windows = tiny_model(GPTlite), utils.sample_prompts(DATA, 12, CONTEXT)
    with torch.no_grad():
        x = model.token_embedding(windows) + model.position_embedding(torch.arange(CONTEXT))
        expected = torch.zeros(E, dtype=torch.float64)
        for block in model.blocks:
            middle = x + block.mha(block.ln1(x))
            expected += block.ln1(x).abs().mean(dim=(0, 1)) + block.ln2(middle).abs().mean(dim=(0, 1))
            x = middle + block.ffwd(block.ln2(middle))
        expected += model.ln(x).abs().mean(dim=(0, 1))
    assert_close(channel_importance(model, DATA, 12, CONTEXT), expected)
    assert_close(channel_importance(tiny_model(GPTlite_KVCache), DATA, 12, CONTEXT), expected)
    assert not any(m._forward_hooks for m in model.modules())


# ---- The script ----


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "figure.png"
    args = ("--quick", "--json", "-", "--plot", figure)
    run = run_script("more/pruning_parts.py", *args, cwd=tmp_path, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr + run.stdout
    report = run.json
    assert len(report["checks"]) == 4 and all(report["checks"].values())
    whole, neurons, heads, exact, plain = report["rows"]
    assert whole["baseline"]
    for row in (neurons, heads, exact, plain):
        assert row["n_parameters"] < whole["n_parameters"] and row["loss_difference_se"] > 0
        assert row["peak_memory_mb"] < whole["peak_memory_mb"]
    assert exact["n_parameters"] == plain["n_parameters"]
    # heads take their cache along: 2 of 3 stay
    cache = [row["kv_bytes_per_token"] for row in report["rows"]]
    assert cache == [4608, 4608, 3072, 4608, 4608]
    (parts,) = report["sweeps"].values()
    assert [row["part"] for row in parts] == ["neurons", "heads", "channels (exact)", "channels (plain)"]
    if distilled_checkpoint == utils.GPTLITE_DISTILLED_CKPT_PATH:
        assert all(row["rise of the loss"] > 0 for row in parts)
        assert exact["valid_loss"] < plain["valid_loss"]
    assert len(report["why"]) == 4 and figure.read_bytes().startswith(b"\x89PNG")


def test_channels_pruned_twice():
    """Plain, then exact: the second cut is exact for the model that the first one left."""
    tokens = random_tokens(2, 8)
    for exact in (False, True):
        once = prune_channels(tiny_model(GPTlite), torch.arange(32.0), 20, exact=exact)
        masked = mask_channels(copy.deepcopy(once), torch.arange(20.0), 16)
        twice = prune_channels(copy.deepcopy(once), torch.arange(20.0), 16)
        assert_close(twice(tokens), masked(tokens))
        assert_close(prune_channels(copy.deepcopy(once), torch.arange(20.0), 20)(tokens), once(tokens))


def test_layer_norm_of_large_numbers_in_float16():
    norm, x = torch.nn.LayerNorm(64), 100 * torch.randn(4, 64)
    pruned = prune_layer_norm(norm, torch.arange(48))
    assert_close(pruned.half()(x[:, :48].half()).float(), pruned.float()(x[:, :48]), 2e-2)


def test_weights_of_exact_channels_fit_no_plain_model():
    """Their layer norms divide by another number, which only the state knows."""
    cut = prune_channels(tiny_model(GPTlite, d_model=32), torch.arange(32.0), 16)
    plain = prune_channels(tiny_model(GPTlite, d_model=32), torch.arange(32.0), 16, exact=False)
    with pytest.raises(ValueError, match="has blocks.0.ln1.n_full besides"):
        utils.load_weights(plain, cut.state_dict())
    with pytest.raises(ValueError, match="10 channels were weighed, the model has 32"):
        prune_channels(tiny_model(GPTlite), torch.arange(10.0), 4)
