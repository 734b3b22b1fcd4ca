"""more/sparsity_outliers.py: channels made large without changing the function."""

import copy

import pytest
import torch
from helpers import random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from inference_calibration import linear_layers
from inference_utils import GPTLITE_DISTILLED_CKPT_PATH
from main_sparsity import prune_model
from sparsity_outliers import largest_norm, rescale_channels


@given(n_channels=st.integers(0, 32), factor=st.sampled_from([1, 4, 32, 0.5]))
def test_rescaled_channels_change_neither_the_function_nor_wanda(n_channels, factor):
    model, tokens = tiny_model(GPTlite), random_tokens(4, 16)
    rescaled = rescale_channels(copy.deepcopy(model), n_channels, factor)
    assert torch.equal(rescaled(tokens), model(tokens))
    pruned, other = (prune_model(m, tokens, "Wanda", "row", 0.5) for m in (model, rescaled))
    for one, two in zip(linear_layers(pruned).values(), linear_layers(other).values(), strict=True):
        assert torch.equal(one.weight == 0, two.weight == 0)
    assert torch.equal(pruned(tokens), other(tokens))


def test_rescaled_channels_lose_their_weights_to_magnitude():
    model = tiny_model(GPTlite)
    channels = model.blocks[0].ln2.weight.abs().topk(4).indices
    rescale_channels(model, 4, 1024)
    prune_model(model, random_tokens(4, 16), "magnitude", "layer", 0.5)
    assert not model.blocks[0].ffwd.net[0].weight[:, channels].any()


def test_the_largest_norm_grows_with_the_channels():
    model, tokens = tiny_model(GPTlite), random_tokens(4, 16)
    before = largest_norm(model, tokens)
    assert before >= 1 and largest_norm(rescale_channels(model, 2, 1024), tokens) > 100 * before


@pytest.mark.slow
def test_quick_run(distilled_checkpoint):
    if distilled_checkpoint != GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("what sparsity costs needs trained weights")
    run = run_script("more/sparsity_outliers.py", "--quick", "--json", "-", checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr
    assert len(run.json["checks"]) == 2 and all(run.json["checks"].values())
    ((first, last),) = run.json["sweeps"].values()
    assert last["magnitude"] > first["magnitude"] and last["magnitude"] > last["Wanda"] > last["SparseGPT"]
    assert last["largest norm / median"] > first["largest norm / median"]
    assert len(run.json["rows"]) == 8 and len(run.json["why"]) == 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--n-channels", "193"], "193 channels: the model has 192"),
        (["--repeats", "3"], "unrecognized arguments: --repeats"),  # nothing is timed
    ],
)
def test_bad_options(args, message, distilled_checkpoint):
    run = run_script("more/sparsity_outliers.py", "--quick", *args, checkpoint=distilled_checkpoint)
    assert run.status == 2 and message in run.stderr
