"""Early exit: nobody leaving is the model, everybody the static cut, and any pieces give one pass."""

import pytest
import torch
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from main_early_exit import (
    GPTlite_EarlyExit,
    blocks_of_a_step,
    confidence,
    copy_state,
    depths_of,
    static_cut,
)
from main_kvcache import generate_kvcache

N_LAYERS = 4


def leaving(first=1, threshold=0.5, **kwargs):
    return tiny_model(GPTlite_EarlyExit, n_layers=N_LAYERS, first=first, threshold=threshold, **kwargs)


def some_threshold(model, tokens, share):
    """A threshold that so large a share of the confidences behind the first block reaches."""
    x = model.token_embedding(tokens) + model.position_embedding.weight[: tokens.shape[1]]
    return confidence(model, model.blocks[0](x)[0]).flatten().quantile(1 - share).item()


def token_by_token(model, tokens):
    """By definition: each token alone, block after block, with the keys and values that the others left."""
    logits, depths = [], []
    kept = [[[], []] for _ in model.blocks]  # of each block keys and values, [B, H, 1, D] each
    for t in range(tokens.shape[1]):
        x = model.token_embedding(tokens[:, t : t + 1]) + model.position_embedding.weight[t]  # [1, 1, E]
        inside, depth = True, 0
        for i, block in enumerate(model.blocks):
            if inside and i >= model.first:
                best = model.fc_out(model.ln(x)).softmax(-1).flatten().sort(descending=True).values
                inside = not best[0] - best[1] > model.threshold
            h = block.ln1(x)
            for store, project in zip(kept[i], (block.mha.key_proj, block.mha.value_proj), strict=True):
                store.append(block.mha.split_heads(project(h)))
            if inside:
                K, V = (torch.cat(store, dim=2) for store in kept[i])
                Q = block.mha.split_heads(block.mha.query_proj(h))
                out = torch.nn.functional.scaled_dot_product_attention(Q, K, V)
                x = x + block.mha.out_proj(block.mha.merge_heads(out))
                x = x + block.ffwd(block.ln2(x))
                depth += 1
        logits.append(model.fc_out(model.ln(x)))
        depths.append(depth)
    return torch.cat(logits, dim=1), torch.tensor([depths])


@pytest.mark.parametrize("first", [1, 2, 4])
def test_nobody_leaves(first):
    tokens, model = random_tokens(2, 16), leaving(first, 1.0)
    assert_close(model(tokens)[0], tiny_model(GPTlite, n_layers=N_LAYERS)(tokens))
    assert (depths_of(model, tokens) == N_LAYERS).all() and model.depths is None


@pytest.mark.parametrize("first", [1, 2, 4])
def test_everybody_leaves(first):
    """A static cut, with and without the blocks that are not used; each token passes `first` of them."""
    tokens, model = random_tokens(2, 16), leaving(first, -1.0)
    cut = static_cut(tiny_model(GPTlite_KVCache, n_layers=N_LAYERS), first)
    logits, cache = cut(tokens)
    assert_close(model(tokens)[0], logits)
    assert (depths_of(model, tokens) == first).all() and len(cache) == first
    assert_close(utils.cached_logits(model, tokens, 5)[0], logits)
    expected, chosen = (generate_kvcache(m, tokens[:, :4], 8, 16) for m in (cut, model))
    assert torch.equal(chosen, expected)


@given(st.sampled_from([1, 2, 3]), st.sampled_from([0.1, 0.3, 0.5, 0.8]), st.integers(0, 30))
def test_each_token_leaves_by_itself(first, share, seed):
    tokens, model = random_tokens(1, 12, seed), leaving(first)
    model.threshold = some_threshold(model, tokens, share) + 1e-6
    expected, depths = token_by_token(model, tokens)
    logits, cache = model(tokens)
    assert_close(logits, expected)
    assert torch.equal(depths_of(model, tokens), depths)
    assert all(k.shape == v.shape == (1, 2, 12, 16) for k, v in cache)  # no block lacks a token


@given(st.integers(1, 15), st.integers(0, 30))
def test_every_split_of_a_text_gives_one_pass(n, seed):
    tokens, model = random_tokens(3, 16, seed), leaving()
    model.threshold = some_threshold(model, tokens, 0.4) + 1e-6
    whole, cache = model(tokens)
    assert 0 < (depths_of(model, tokens) == 1).double().mean() < 1
    pieces, again = utils.cached_logits(model, tokens, n)
    assert_close(pieces, whole)
    assert_close([t for kv in again for t in kv], [t for kv in cache for t in kv])
    alone = model(tokens[1:2])[0]  # the rows of a batch do not change each other
    assert_close(alone, whole[1:2])


def test_skipped_blocks_compute_keys_and_values_alone(monkeypatch):
    """When all rows have left, nothing of a block runs but these two projections."""
    model, ran = leaving(1, -1.0), []
    for i, block in enumerate(model.blocks):
        for name, module in block.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda *_, which=(i, name): ran.append(which))
    model(random_tokens(2, 3))
    assert {name for i, name in ran if i > 0} == {"mha.key_proj", "mha.value_proj"}
    assert len([name for i, name in ran if i == 0]) == 6


def test_a_copied_state_is_what_the_block_itself_keeps():
    block, x = leaving().blocks[1], torch.randn(2, 5, 32, dtype=torch.float64)
    _, expected = block(x, None, 16)
    assert_close(copy_state(block, x, None, 16), expected)
    first = copy_state(block, x[:, :3], None, 16)
    assert_close(copy_state(block, x[:, 3:], first, 16), expected)
    assert_close(copy_state(block, x[:, 3:], first, 4), [t[:, :, 1:] for t in expected])


def test_confidence_is_the_lead_of_the_best_token():
    model = leaving()
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    p = model.fc_out(model.ln(x)).softmax(-1).sort(-1).values
    assert_close(confidence(model, x), p[..., -1] - p[..., -2])


def test_confidence_that_is_no_number_stays():
    model = leaving(1, -1.0)
    with torch.no_grad():
        model.fc_out.bias[0] = float("nan")
    assert (depths_of(model, random_tokens(1, 2)) == N_LAYERS).all()


def test_past_the_window():
    """As the cache without exits, whatever the window is."""
    tokens, plain = random_tokens(1, 30), tiny_model(GPTlite_KVCache, n_layers=N_LAYERS)
    two = static_cut(tiny_model(GPTlite_KVCache, n_layers=N_LAYERS), 2)
    for model, expected in ((leaving(1, 1.0), plain), (leaving(2, -1.0), two)):
        assert_close(utils.cached_logits(model, tokens, 16)[0], utils.cached_logits(expected, tokens, 16)[0])


def test_blocks_of_a_step():
    depths = torch.tensor([[1, 4], [2, 1], [3, 1], [1, 1]])
    assert blocks_of_a_step(depths, 1) == 14 / 8
    assert blocks_of_a_step(depths, 2) == (2 + 4 + 3 + 1) / 4
    assert blocks_of_a_step(depths, 3) == (3 + 4) / 2 and blocks_of_a_step(depths, 4) == 3.5


def test_bad_arguments():
    for first in (0, 5):
        with pytest.raises(ValueError, match="before it leaves"):
            leaving(first)
    for n in (0, 5):
        with pytest.raises(ValueError, match="the model has 4"):
            static_cut(leaving(), n)
    with pytest.raises(ValueError, match="no tokens"):
        leaving()(random_tokens(1, 0))


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("main_early_exit.py", tmp_path, distilled_checkpoint)  # --quick
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["all blocks, batch 1"]["baseline"] and rows["all blocks, batch 1"]["n_blocks"] == 3
    assert 1 <= rows["from block 1, 0.7, batch 1"]["n_blocks"] <= 3
    cuts = {row["n_blocks"] for name, row in rows.items() if name.startswith("cut")}
    assert cuts == {1, 2} and all(row.get("approximate") or row["baseline"] for row in report["rows"])
    (steps,) = report["sweeps"].values()
    deepest = [line["from block 1, 0.7"] for line in steps]
    assert deepest == sorted(deepest) and len(report["checks"]) == 2 and len(report["why"]) == 4


def test_script_refuses_bad_input():
    run = run_script("main_early_exit.py", "--thresholds", "1.5")
    assert run.status == 2 and "not a share" in run.stderr
