"""One pass that weighs all parts, shapes of a size, models cut to them, and training on stored answers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from gptlite_pruned import with_kv_cache
from inference_training import windows_of_step
from main_distillation import distillation_loss, store_soft_labels
from main_kvcache import generate, generate_kvcache
from main_pruning import sum_responses
from pruning_depth import block_influence
from pruning_parts import channel_importance
from pruning_search import (
    Importance,
    Shape,
    candidates,
    cut,
    n_parameters_in,
    shape_of,
    train_on_answers,
    try_shapes,
    weigh_all_parts,
)

CONTEXT, L, H, D, N, E = 16, 3, 4, 8, 128, 32
DATA = random_tokens(1, 400)[0]


def model_of(model_class=GPTlite, **kwargs):
    return tiny_model(model_class, n_layers=L, n_heads=H, d_head=D, **kwargs)


def importance_of(model, seed=0):
    return weigh_all_parts(model, random_tokens(8, CONTEXT, seed))


# ---- Importance ----


@pytest.mark.parametrize("model_class", [GPTlite, GPTlite_KVCache])
def test_one_pass_weighs_as_three_do(model_class):
    model, windows, calls = model_of(model_class), utils.sample_prompts(DATA, 12, CONTEXT), []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    found = weigh_all_parts(model, windows, batch_size=5)
    hook.remove()
    assert len(calls) == 3  # 12 windows once
    heads, neurons = sum_responses(model, windows.split(8))
    assert_close([found.heads, found.neurons], [torch.stack(heads), torch.stack(neurons)])
    assert_close(found.channels / windows.numel(), channel_importance(model, DATA, 12, CONTEXT))
    assert_close(found.blocks / windows.numel(), block_influence(model, DATA, 12, CONTEXT))
    shapes = [tuple(one.shape) for one in found]
    assert shapes == [(L,), (L, H), (L, N), (E,)]


# ---- Shapes ----


@given(st.tuples(st.integers(1, L), st.integers(1, H), st.integers(1, N), st.integers(2, E)))
def test_parameters_of_a_shape_are_those_of_the_cut_model(sizes):
    """PR-1, PR-2: and it decodes with a cache."""
    model, shape = model_of(), Shape(*sizes)
    student = cut(model, importance_of(model), shape)
    assert shape_of(student) == shape
    assert utils.n_parameters(student) == n_parameters_in(model, shape)
    prompt = random_tokens(2, 5)
    expected = generate(student, prompt, 4, CONTEXT)
    assert torch.equal(generate_kvcache(with_kv_cache(student), prompt, 4, CONTEXT), expected)
    assert shape_of(model) == Shape(L, H, N, E)


@pytest.mark.parametrize("share", [0.25, 0.4, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("distilled", [True, False])
def test_candidates_have_the_size(share, distilled):
    with torch.device("meta"):
        model = utils.make_model(GPTlite, 96, distilled)
    n_wanted = round(share * utils.n_parameters(model))
    shapes, whole = candidates(model, n_wanted), shape_of(model)
    assert set(shapes) == {"depth", "heads and neurons", "channels", "all widths"}
    for shape in shapes.values():
        assert all(1 <= n <= n_all for n, n_all in zip(shape, whole, strict=True))
        assert n_parameters_in(model, shape) == pytest.approx(n_wanted, rel=0.003)
    assert all(shape.n_blocks == whole.n_blocks for name, shape in shapes.items() if name != "depth")
    depth, channels = shapes["depth"], shapes["channels"]
    assert (depth.n_heads, depth.n_channels) == (whole.n_heads, whole.n_channels)
    assert channels.n_heads == whole.n_heads and channels.n_neurons > 0.9 * whole.n_neurons
    fewer = depth._replace(n_blocks=depth.n_blocks - 1, n_neurons=whole.n_neurons)
    assert n_parameters_in(model, fewer) < n_wanted  # no shallower model is large enough


def test_everything_is_a_candidate_and_nothing_is_none():
    model = model_of()
    whole = shape_of(model)
    assert set(candidates(model, utils.n_parameters(model)).values()) == {whole}
    with pytest.raises(ValueError, match="no shape of this model has 5 parameters"):
        candidates(model, 5)


# ---- Cutting ----


def test_nothing_cut_is_the_identity():
    model, tokens = model_of(), random_tokens(2, CONTEXT)
    assert_close(cut(model, importance_of(model), shape_of(model))(tokens), model(tokens))


def test_the_most_important_parts_stay():
    """Of the blocks that stay, their own heads and neurons, not those of the block before."""
    model = model_of()
    heads, neurons = torch.zeros(L, H), torch.zeros(L, N)
    heads[0, 1] = heads[2, 3] = 1.0
    neurons[0, [3, 100]] = neurons[2, [0, 127]] = 1.0
    channels = torch.ones(E)
    channels[5] = 0.0
    found = cut(
        model, Importance(torch.tensor([0.2, 0.1, 0.3]), heads, neurons, channels), Shape(2, 1, 2, E - 1)
    )
    stays = [c for c in range(E) if c != 5]
    for block, whole, head, kept in ((0, 0, 1, [3, 100]), (1, 2, 3, [0, 127])):
        mha, expected = found.blocks[block].mha, model.blocks[whole].mha
        rows = slice(head * D, (head + 1) * D)
        assert torch.equal(mha.query_proj.weight, expected.query_proj.weight[rows][:, stays])
        first = model.blocks[whole].ffwd.net[0]
        assert torch.equal(found.blocks[block].ffwd.net[0].weight, first.weight[kept][:, stays])
    assert torch.equal(found.token_embedding.weight, model.token_embedding.weight[:, stays])


# ---- Training ----


def test_training_on_stored_answers():
    """KD-2: every step's answers are those of its windows; the whole model's own copy starts at 0."""
    whole = model_of(dtype=torch.float32)
    windows, seen = utils.sample_prompts(DATA, 12, CONTEXT + 1), []
    answers = store_soft_labels(whole, windows[:, :-1], 1.0)
    student = cut(whole, importance_of(whole), Shape(L, 2, 64, E))
    before = copy.deepcopy(whole.state_dict())

    def losses(model):
        with torch.no_grad():
            return distillation_loss(model(windows[:, :-1]), whole(windows[:, :-1]), 1.0).item()

    start = losses(student)
    hook = student.register_forward_pre_hook(
        lambda _, args: seen.append(args[0]) if student.training else None
    )
    train_on_answers({"": student}, windows, answers, range(3, 23), 1e-2, 4, 7, DATA)
    hook.remove()
    assert losses(student) < 0.5 * start and len(seen) == 20
    for step, tokens in zip(range(3, 23), seen, strict=True):
        assert torch.equal(tokens, windows[windows_of_step(12, 4, 7, step), :-1])
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole.state_dict().items())
    twin = copy.deepcopy(whole)
    train_on_answers({"": twin}, windows, answers, range(1), 0.0, 4, 7, DATA)
    assert losses(twin) == 0


def test_text_alone_does_not_read_the_answers():
    windows = utils.sample_prompts(DATA, 8, CONTEXT + 1)
    nonsense = torch.full((8, CONTEXT, 16), float("nan"))
    student = model_of(dtype=torch.float32)
    start = F.cross_entropy(student(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    train_on_answers({"": student}, windows, nonsense, range(20), 1e-2, 8, 7, DATA, alpha=1.0)
    assert F.cross_entropy(student(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()) < start - 0.3


def test_shapes_are_tried_alike():
    """Losses before and after one training of all; the models are those that were trained."""
    model, trained = model_of(), []
    shapes = {"a": Shape(L, H, 64, E), "b": Shape(1, H, N, E)}

    def train(models):
        trained.append(dict(models))
        for one in models.values():
            torch.nn.init.zeros_(one.fc_out.weight)

    def loss_of(one):
        return one.fc_out.weight.abs().sum().item()

    models, before, after = try_shapes(model, importance_of(model), shapes, train, loss_of)
    assert trained == [models] and {name: shape_of(one) for name, one in models.items()} == shapes
    assert all(before[name] > 0 and after[name] == 0 for name in shapes)


# ---- The script ----


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("more/pruning_search.py", tmp_path, distilled_checkpoint)  # --quick
    assert len(report["checks"]) == 2 and len(report["why"]) == 4
    whole, *rows = report["rows"]
    assert whole["baseline"] and whole["training_steps"] == 0 and len(rows) == 6
    assert [row["training_steps"] for row in rows].count(3) == 3 and [
        row["training_steps"] for row in rows
    ].count(1) == 3
    for row in rows:
        assert row["n_parameters"] == pytest.approx(whole["n_parameters"] / 2, rel=0.01)
        assert row["loss_difference_se"] > 0 and row["tokens_per_s"] > 0 and row["approximate"]
    (trials,) = report["sweeps"].values()
    best = min(trials, key=lambda line: line["1 steps"])
    (row,) = [row for row in rows if row["method"] == f"50% {best['cut']}"]
    assert row["training_steps"] == 3
    depth = next(line for line in trials if line["cut"] == "depth")
    assert (depth["n_blocks"], depth["n_heads"], depth["n_channels"]) == (2, 3, 192)
    if (
        distilled_checkpoint == utils.GPTLITE_DISTILLED_CKPT_PATH
    ):  # what was learned is worth more than 3 steps
        assert all(row["valid_loss"] < one["valid_loss"] - 0.1 for one in rows if "random" in one["method"])


def test_script_refuses_what_leaves_nothing():
    run = run_script("more/pruning_search.py", "--quick", "--keep", "0")
    assert run.status == 2 and run.stderr.startswith("pruning_search.py: no shape of this model has")
