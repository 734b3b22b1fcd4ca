"""Pruned models against the dense ones whose removed parts hooks set to zero; the experiment; the script."""

import copy
import inspect
import runpy
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import ROOT, assert_close, random_tokens, run_script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from data.shakespeare import get_batch
from gptlite import GPTlite
from gptlite_gqa import GPTlite_GQA
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from inference_training import distill
from inference_utils import GPTLITE_DISTILLED_CKPT_PATH
from main_kvcache import generate, generate_kvcache, generate_static
from main_mla import GPTlite_MLA
from main_pruning import compute_importance, mask, prune, prune_linear, sum_responses

SIGNATURES = {
    compute_importance: "model data n_batches batch_size seqlen",
    prune_linear: "linear rows columns",
    prune: "model heads neurons n_heads n_neurons",
    mask: "model heads neurons n_heads n_neurons",
}
H, D, E, N = 4, 8, 32, 128  # heads, their size, width, neurons
CONTEXT = 16
DATA = random_tokens(1, 400)[0]


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_signature(function):
    assert " ".join(inspect.signature(function).parameters) == SIGNATURES[function]


def four_heads(model_class=GPTlite, **kwargs):
    return tiny_model(model_class, n_heads=H, d_head=D, **kwargs)


def scores(kept, n, n_layers=2):
    """Importances [L, n] by which `kept` are the largest in every layer."""
    row = torch.zeros(n)
    row[list(kept)] = 1.0
    return row.expand(n_layers, -1)


def logits_of(model, tokens):
    out = model(tokens)
    return out[0] if isinstance(out, tuple) else out


def zeroed_logits(model, tokens, heads, neurons):
    """Logits of the dense model whose other heads' outputs and other neurons' activations become zero."""

    def keep_only(units, size):
        def hook(_module, args):
            x = args[0].clone()
            for i in range(x.shape[-1] // size):
                if i not in units:
                    x[..., i * size : (i + 1) * size] = 0
            return (x,)

        return hook

    hooks = []
    for block in model.blocks:
        hooks.append(block.mha.out_proj.register_forward_pre_hook(keep_only(heads, D)))
        hooks.append(block.ffwd.net[2].register_forward_pre_hook(keep_only(neurons, 1)))
    logits = logits_of(model, tokens)
    for hook in hooks:
        hook.remove()
    return logits


# ---- prune_linear ----


@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.data())
def test_prune_linear(n_in, n_out, bias, data):
    linear = nn.Linear(n_in, n_out, bias, dtype=torch.float64).eval()
    before = copy.deepcopy(linear.state_dict())
    rows = data.draw(st.none() | st.lists(st.integers(0, n_out - 1), min_size=1, unique=True))
    columns = data.draw(st.none() | st.lists(st.integers(0, n_in - 1), min_size=1, unique=True))
    state = torch.get_rng_state()
    pruned = prune_linear(linear, rows, columns)
    assert torch.equal(torch.get_rng_state(), state)  # later batches must not depend on it
    rows, columns = rows or range(n_out), columns or range(n_in)
    assert (pruned.out_features, pruned.in_features) == (len(rows), len(columns))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            assert pruned.weight[i, j] == linear.weight[row, column]
    assert (pruned.bias is None) == (not bias)
    if bias:
        assert torch.equal(pruned.bias, linear.bias[list(rows)])
    assert not pruned.training and pruned.weight.requires_grad and pruned.weight.dtype == torch.float64
    with torch.no_grad():
        pruned.weight.add_(1.0)
    assert all(torch.equal(t, before[name]) for name, t in linear.state_dict().items())


def test_prune_linear_takes_masks_and_refuses_nothing():
    linear = nn.Linear(3, 4)
    rows, columns = torch.tensor([True, False, False, True]), torch.tensor([False, True, True])
    assert torch.equal(prune_linear(linear, rows, columns).weight, linear.weight[[0, 3]][:, [1, 2]])
    for nothing in ({"rows": []}, {"columns": torch.zeros(3, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="would be left"):
            prune_linear(linear, **nothing)


# ---- prune ----


@pytest.mark.parametrize("model_class", [GPTlite, GPTlite_KVCache])
def test_keeping_everything_is_the_identity(model_class):
    model, tokens = four_heads(model_class), random_tokens(2, CONTEXT)
    generator = torch.Generator().manual_seed(0)
    heads, neurons = torch.rand(2, H, generator=generator), torch.rand(2, N, generator=generator)
    pruned = prune(copy.deepcopy(model), heads, neurons, H, N)
    assert torch.equal(logits_of(pruned, tokens), logits_of(model, tokens))
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in pruned.state_dict().items())


@pytest.mark.parametrize("kept", [(0, 2), (1, 3), (3,), (0,)], ids=str)
@pytest.mark.parametrize("model_class", [GPTlite, GPTlite_KVCache])
def test_heads_that_are_not_adjacent(kept, model_class):
    """PR-1"""
    model, tokens = four_heads(model_class), random_tokens(2, CONTEXT)
    expected = zeroed_logits(model, tokens, kept, range(N))
    pruned = prune(model, scores(kept, H), torch.zeros(2, N), len(kept), N)
    assert pruned is model
    assert_close(logits_of(pruned, tokens), expected)
    for block in pruned.blocks:
        mha = block.mha
        assert (mha.n_heads, mha.d_head) == (len(kept), D)
        for linear in (mha.query_proj, mha.key_proj, mha.value_proj):
            assert (linear.out_features, linear.in_features) == (len(kept) * D, E)
            assert linear.bias.shape == (len(kept) * D,)
        assert (mha.out_proj.out_features, mha.out_proj.in_features) == (E, len(kept) * D)


@given(
    st.sets(st.integers(0, H - 1), min_size=1),
    st.sets(st.integers(0, N - 1), min_size=1),
    st.integers(1, CONTEXT),
    st.integers(0, 99),
)
def test_pruned_equals_dense_with_the_removed_zeroed(heads, neurons, n, seed):
    tokens = random_tokens(2, n, seed)
    expected = zeroed_logits(four_heads(), tokens, heads, neurons)
    kept = (scores(heads, H), scores(neurons, N), len(heads), len(neurons))
    assert_close(prune(four_heads(), *kept)(tokens), expected)
    assert_close(prune(four_heads(GPTlite_KVCache), *kept)(tokens)[0], expected)
    assert_close(mask(four_heads(), *kept)(tokens), expected)


@pytest.mark.parametrize("kept", [(0, 1), (2, 3)], ids=str)
def test_a_group_of_grouped_query_attention(kept):
    """PR-1: 4 query heads share 2 heads of keys and values; the group that stays keeps its own."""
    model = four_heads(GPTlite_GQA, n_groups=2)
    tokens = random_tokens(2, CONTEXT)
    expected = zeroed_logits(model, tokens, kept, range(N))
    # by the mean of a group, not by the largest head
    importance = scores(kept, H) + torch.tensor([[0.0, 1.5, 0.0, 0.0]] if kept == (2, 3) else [[0.0] * 4])
    pruned = prune(model, importance, torch.zeros(2, N), 2, N)
    assert_close(pruned(tokens)[0], expected)
    mha = pruned.blocks[0].mha
    assert (mha.n_heads, mha.n_groups, mha.key_proj.out_features) == (2, 1, D)
    assert pruned(tokens)[1][0][0].shape == (2, 1, CONTEXT, D)


def test_single_heads_of_a_group_are_refused():
    model = four_heads(GPTlite_GQA, n_groups=2)
    with pytest.raises(ValueError, match="2 query heads share keys and values"):
        prune(model, scores((0,), H), torch.zeros(2, N), 3, N)


@given(st.sets(st.integers(0, H - 1), min_size=1, max_size=3), st.integers(1, 12), st.integers(0, 8))
@settings(max_examples=10)
def test_generating_with_a_cache(heads, prompt_len, n_tokens):
    """All forms of cache take the pruned shape; the cache holds the kept heads only."""
    kept = (scores(heads, H), scores(range(40), N), len(heads), 40)
    prompt = random_tokens(2, prompt_len)
    n_tokens = min(n_tokens, CONTEXT - prompt_len)
    expected = generate(prune(four_heads(), *kept), prompt, n_tokens, CONTEXT)
    cached = prune(four_heads(GPTlite_KVCache), *kept)
    assert torch.equal(generate_kvcache(cached, prompt, n_tokens, CONTEXT), expected)
    static = prune(four_heads(GPTlite_StaticKVCache), *kept)
    buffers = StaticKVCache(static, 2)
    assert torch.equal(generate_static(static, prompt, n_tokens, buffers), expected)
    assert cached(prompt)[1][0][0].shape == (2, len(heads), prompt_len, D)
    assert buffers.k.shape[2] == len(heads)


@pytest.mark.parametrize(
    "sizes", [(0, N), (H + 1, N), (H, 0), (H, N + 1), (-1, N)], ids=lambda sizes: f"{sizes[0]},{sizes[1]}"
)
def test_numbers_out_of_range(sizes):
    model = four_heads()
    with pytest.raises(ValueError, match="cannot keep"):
        prune(model, torch.zeros(2, H), torch.zeros(2, N), *sizes)
    assert model.blocks[0].mha.n_heads == H and model.blocks[0].ffwd.net[0].out_features == N


def test_importances_of_another_model():
    for heads, neurons in ((torch.zeros(2, 3), torch.zeros(2, N)), (torch.zeros(2, H), torch.zeros(2, 64))):
        with pytest.raises(ValueError, match="were weighed"):
            prune(four_heads(), heads, neurons, 2, 32)
    with pytest.raises(ValueError):
        prune(four_heads(), torch.zeros(1, H), torch.zeros(1, N), 2, 32)


def test_ties_keep_the_first():
    model = prune(four_heads(), torch.ones(2, H), torch.ones(2, N), 2, 3)
    dense = four_heads()
    assert torch.equal(model.blocks[1].ffwd.net[0].weight, dense.blocks[1].ffwd.net[0].weight[:3])
    assert torch.equal(model.blocks[1].mha.query_proj.weight, dense.blocks[1].mha.query_proj.weight[: 2 * D])


def test_pruning_twice_is_pruning_once():
    """Importances of what is left, as the rounds do."""
    tokens = random_tokens(2, CONTEXT)
    once = prune(four_heads(), scores((1, 3), H), scores((5, 7, 90), N), 2, 3)
    twice = prune(four_heads(), scores((0, 1, 3), H), scores((5, 6, 7, 90), N), 3, 4)
    prune(twice, scores((1, 2), 3), scores((0, 2, 3), 4), 2, 3)
    assert torch.equal(once(tokens), twice(tokens))


# ---- compute_importance ----


def importance_by_hand(model, windows):
    """Sums over all tokens: of the length of every head's output, and of every ReLU's output."""
    heads, neurons = [], []
    with torch.no_grad():
        x = model.token_embedding(windows) + model.position_embedding(torch.arange(windows.shape[1]))
        for block in model.blocks:
            mha, h = block.mha, block.ln1(x)
            q, k, v = (mha.split_heads(f(h)) for f in (mha.query_proj, mha.key_proj, mha.value_proj))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            heads.append(out.square().sum(-1).sqrt().sum(dim=(0, 2)))
            x = x + mha.out_proj(mha.merge_heads(out))
            neurons.append(block.ffwd.net[0](block.ln2(x)).clamp(min=0).sum(dim=(0, 1)))
            x = x + block.ffwd(block.ln2(x))
    return heads, neurons


@pytest.mark.parametrize("model_class", [GPTlite, GPTlite_KVCache])
def test_importance_is_lists_of_sums_over_batches_of_get_batch(model_class):
    """As the post has it: a tensor a block, summed over what get_batch draws."""
    torch.manual_seed(0)
    windows = torch.cat([get_batch(DATA, 4, CONTEXT)[0] for _ in range(3)])  # [n, T]
    torch.manual_seed(0)
    heads, neurons = compute_importance(four_heads(model_class), DATA, 3, 4, CONTEXT)
    assert isinstance(heads, list) and isinstance(neurons, list) and len(heads) == len(neurons) == 2
    assert all(one.shape == (H,) for one in heads) and all(one.shape == (N,) for one in neurons)
    assert_close([heads, neurons], importance_by_hand(four_heads(), windows))
    again = compute_importance(four_heads(model_class), DATA, 3, 4, CONTEXT)  # other batches
    assert not torch.equal(again[0][0], heads[0])


@given(st.integers(1, 12), st.sampled_from([torch.float64, torch.float32, torch.float16]))
@settings(max_examples=10)
def test_responses_do_not_depend_on_the_split(batch_size, dtype):
    windows = random_tokens(12, CONTEXT)
    expected = importance_by_hand(four_heads(), windows)
    found = sum_responses(four_heads(dtype=dtype), windows.split(batch_size))
    assert_close(found, expected, 2e-2 if dtype == torch.float16 else 1e-4)


def test_responses_of_float16_that_overflow_when_squared():
    """The squares of a head's output, numbers of 300, are beyond float16."""
    model = four_heads(dtype=torch.float16)
    with torch.no_grad():
        for name in ("value_proj", "out_proj"):
            getattr(model.blocks[0].mha, name).weight.zero_()
        model.blocks[0].mha.value_proj.bias.fill_(300.0)
    heads, _ = sum_responses(model, [random_tokens(2, CONTEXT)])
    assert_close(heads[0], torch.full((H,), 2 * CONTEXT * 300.0 * D**0.5, dtype=torch.float64), 1e-2)


def test_importance_after_pruning():
    model = four_heads()
    prune(model, *compute_importance(model, DATA, 1, 12, CONTEXT), 3, 50)
    heads, neurons = compute_importance(model, DATA, 1, 12, CONTEXT)
    assert all(one.shape == (3,) for one in heads) and all(one.shape == (50,) for one in neurons)


def test_what_is_silent_has_no_importance():
    model = four_heads()
    with torch.no_grad():
        model.blocks[0].ffwd.net[0].weight[5] = 0
        model.blocks[0].ffwd.net[0].bias[5] = -1.0
        model.blocks[1].mha.value_proj.weight[2 * D : 3 * D] = 0
        model.blocks[1].mha.value_proj.bias[2 * D : 3 * D] = 0
    heads, neurons = compute_importance(model, DATA, 2, 2, CONTEXT)
    assert neurons[0][5] == 0 and (neurons[0] == 0).sum() < N / 2
    assert heads[1][2] == 0 and sum((one == 0).sum() for one in heads) == 1


def test_importance_without_text():
    for n_batches, batch_size in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="are no windows"):
            compute_importance(four_heads(), DATA, n_batches, batch_size, CONTEXT)
    with pytest.raises(ValueError, match="too short"):
        compute_importance(four_heads(), DATA[:CONTEXT], 1, 1, CONTEXT)


# ---- Pruning and distilling ----


def n_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_the_experiment_of_the_post():
    """All at once and in rounds, called as the post calls it."""
    teacher, train_data, lr, batch_size, seqlen = four_heads(dtype=torch.float32), DATA, 1e-3, 2, CONTEXT
    keep_ratios, distill_iters = [0.75, 0.5], 6
    before = copy.deepcopy(teacher.state_dict())

    def importance(model):
        return compute_importance(model, train_data, 2, batch_size, seqlen)

    def target_size(ratio):
        return round(H * ratio), round(N * ratio)

    model = prune(copy.deepcopy(teacher), *importance(teacher), *target_size(keep_ratios[-1]))
    distill(model, teacher, train_data, distill_iters, lr, batch_size, seqlen)
    assert shape_of(model) == [(2, 64), (2, 64)] and not model.training
    model, seen = copy.deepcopy(teacher), []
    for ratio in keep_ratios:
        prune(model, *importance(model), *target_size(ratio))
        distill(model, teacher, train_data, distill_iters // len(keep_ratios), lr, batch_size, seqlen)
        seen += shape_of(model)[:1]
    assert seen == [(3, 96), (2, 64)] and n_hooks(model) == n_hooks(teacher) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


def shape_of(model):
    return [(block.mha.n_heads, block.ffwd.net[0].out_features) for block in model.blocks]


def test_nothing_pruned_starts_at_loss_0():
    teacher = four_heads(dtype=torch.float32)
    student = prune(copy.deepcopy(teacher), torch.ones(2, H), torch.ones(2, N), H, N)
    assert abs(distill(student, teacher, DATA, 1, 0.0, 2, CONTEXT)[0]) < 1e-6


# ---- The script ----


def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "figure.png"
    args = ("--quick", "--json", "-", "--plot", figure)
    run = run_script("main_pruning.py", *args, checkpoint=distilled_checkpoint)
    report = run.json
    assert run.status == 0, run.stderr + run.stdout
    assert len(report["checks"]) == 2 and all(report["checks"].values())
    whole, cut, one_shot, rounds, blank = report["rows"]
    assert [row["method"] for row in report["rows"][2:4]] == ["one shot", "rounds"]
    assert whole["baseline"] and whole["divergence"] == 0 and whole["same_best_token"] == 1
    assert whole["loss_difference"] is None
    for row in (cut, one_shot, rounds, blank):  # 2 of 3 heads, 384 of 768 neurons
        assert row["n_parameters"] == cut["n_parameters"] < 0.6 * whole["n_parameters"]
        assert row["kv_bytes_per_token"] * 3 == whole["kv_bytes_per_token"] * 2 == 2 * 2 * 3 * 192 * 4
        assert row["peak_memory_mb"] < 0.7 * whole["peak_memory_mb"]
        assert row["loss_difference_se"] > 0 and row["divergence"] > 0
    if (
        distilled_checkpoint == GPTLITE_DISTILLED_CKPT_PATH
    ):  # what was learned before is worth more than steps
        assert whole["valid_loss"] < one_shot["valid_loss"] < cut["valid_loss"]
        assert max(one_shot["valid_loss"], rounds["valid_loss"]) < blank["valid_loss"] - 0.1
    assert 3 <= len(report["why"]) <= 4 and figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ratios", [["0"], ["1.5"], ["nan"], ["0.5", "0.7"]], ids=" ".join)
def test_script_refuses_shares_out_of_range(ratios, monkeypatch, capsys):
    script = str(ROOT / "main_pruning.py")
    monkeypatch.setattr(sys, "argv", [script, "--quick", "--keep-ratios", *ratios])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("main_pruning.py: --keep-ratios are falling shares above 0")


def test_attention_with_shared_latents_is_refused_untouched():
    model = tiny_model(GPTlite_MLA, d_latent=32)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="shares latents"):
        prune(model, [torch.rand(2)] * 2, [torch.rand(128)] * 2, 1, 64)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
