"""main_sparsity.py: one-shot pruning against brute force on tiny layers, whole models, and training on."""

import copy

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_training as training
from gptlite import GPTlite
from inference_calibration import input_products, input_squares, linear_layers, relative_error, sum_inputs
from inference_utils import GPTLITE_DISTILLED_CKPT_PATH
from main_sparsity import (
    METHODS,
    keep_zeros,
    prune_magnitude,
    prune_model,
    prune_sparsegpt,
    prune_wanda,
    removed,
    zeros_as_asked,
)

sparsities = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.7, 0.9, 1.0])
groups = st.sampled_from(["row", "layer"])
seeds = st.integers(0, 1000)


def random_matrix(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_layer(n_out, n_in, n_tokens, seed=0):
    """Weights [out, in] and inputs [N, in] that go together, as those of a model do."""
    X = random_matrix(n_tokens, n_in, seed=seed) @ random_matrix(n_in, n_in, seed=seed + 1)
    return random_matrix(n_out, n_in, seed=seed + 2), X


def known_of(method, X):
    statistic = METHODS[method][1]
    return None if statistic is None else statistic(X)


# ---- Counts ----


@given(rows=st.integers(1, 6), columns=st.integers(1, 9), share=sparsities, by=groups, seed=seeds)
def test_removed_takes_the_lowest_and_exactly_so_many(rows, columns, share, by, seed):
    scores = (random_matrix(rows, columns, seed=seed) * 2).round().abs()  # many ties
    gone = removed(scores, share, by)
    for row, mask in zip(scores, gone, strict=True) if by == "row" else [(scores, gone)]:
        assert mask.sum() == round(share * mask.numel())
        if mask.any() and not mask.all():
            assert row[mask].max() <= row[~mask].min()


@given(share=sparsities, by=groups, method=st.sampled_from(list(METHODS)), columns=st.integers(1, 13))
def test_share_of_the_whole_matrix_is_exact(share, by, method, columns):
    W, X = random_layer(5, columns, 30, seed=columns)
    how = {"block_size": 4} if method == "SparseGPT" else {}
    zero = METHODS[method][0](W, known_of(method, X), share, by, **how) == 0
    if by == "row":
        assert (zero.sum(dim=1) == round(share * columns)).all()
    else:
        assert zero.sum() == round(share * (5 * columns))


def test_zeros_as_asked_looks_at_every_group():
    W = torch.tensor([[0.0, 0, 1, 1], [0, 1, 1, 0]])
    assert (
        zeros_as_asked(W, 0.5, "row") and zeros_as_asked(W, 0.5, "layer") and zeros_as_asked(W, "2:4", "row")
    )
    uneven = torch.tensor([[0.0, 0, 0, 1], [0, 1, 1, 1]])
    assert zeros_as_asked(uneven, 0.5, "layer")
    assert not zeros_as_asked(uneven, 0.5, "row") and not zeros_as_asked(uneven, "2:4", "row")


def test_wanda_counts_per_row_where_scores_tie():
    W = torch.arange(1.0, 7.0).expand(3, 6).clone()
    squares = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    kept = prune_wanda(W, squares, 0.5) != 0
    assert (kept.sum(dim=1) == 3).all()
    assert kept[:, [0, 5]].all()  # the live inputs stay
    assert kept[:, 4].all()  # and of the dead the largest


def test_wanda_compares_by_row_magnitude_by_layer():
    W = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    assert prune_wanda(W, torch.ones(2), 0.5).tolist() == [[0, 2], [0, 20]]
    assert prune_magnitude(W, None, 0.5).tolist() == [[0, 0], [10, 20]]
    assert prune_wanda(W, torch.tensor([9.0, 1.0]), 0.5).tolist() == [[1, 0], [10, 0]]  # norms 3 and 1


@pytest.mark.parametrize("sparsity, by", [(1.5, "row"), (-0.1, "layer"), ("4:8", "row"), (0.5, "column")])
def test_bad_sparsity_is_refused(sparsity, by):
    W, X = random_layer(4, 8, 20)
    for method, (prune, _) in METHODS.items():
        with pytest.raises(ValueError, match="sparsity is a share|by row or by layer"):
            prune(W, known_of(method, X), sparsity, by)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
@pytest.mark.parametrize("sparsity, by", [(0.5, "row"), (0.5, "layer"), ("2:4", "row")])
def test_a_matrix_of_nothing(shape, sparsity, by):
    weight = torch.zeros(shape)
    assert removed(weight, sparsity, by).shape == shape
    assert prune_magnitude(weight, None, sparsity, by).shape == shape
    assert prune_wanda(weight, torch.ones(shape[1]), sparsity, by).shape == shape
    assert zeros_as_asked(weight, sparsity, by)


def test_strided_weights_are_pruned_alike():
    W, X = random_layer(8, 8, 40)
    for method, (prune, _) in METHODS.items():
        for sparsity in (0.5, "2:4"):
            expected = prune(W.T.contiguous(), known_of(method, X), sparsity, "row")
            assert_close(prune(W.T, known_of(method, X), sparsity, "row"), expected)


# ---- 2:4 ----


@given(seed=seeds)
def test_2_4_keeps_the_two_best_of_every_four(seed):
    W, X = random_layer(4, 8, 30, seed)
    norms = X.norm(dim=0)
    for pruned, scores in (
        (prune_magnitude(W, None, "2:4"), W.abs()),
        (prune_wanda(W, input_squares(X), "2:4"), W.abs() * norms),
    ):
        for row in range(4):
            for start in (0, 4):
                best = set(sorted(range(start, start + 4), key=lambda i: -scores[row, i].item())[:2])
                assert {i for i in range(start, start + 4) if pruned[row, i] != 0} == best
    assert zeros_as_asked(prune_sparsegpt(W, input_products(X), "2:4"), "2:4", "row")
    assert ((prune_sparsegpt(W, input_products(X), "2:4", block_size=4) == 0).sum(dim=1) == 4).all()


def test_2_4_needs_inputs_by_fours():
    W, X = random_layer(4, 6, 20)
    for method, (prune, _) in METHODS.items():
        with pytest.raises(ValueError, match="by fours"):
            prune(W, known_of(method, X), "2:4", "row")


# ---- SparseGPT against brute force ----


def brute_force_sparsegpt(W, H, gone_of_row):
    """Row by row and column by column, each step solved anew by the inverse of what is still free."""
    W = W.clone()
    n_in = W.shape[1]
    for row, gone in zip(W, gone_of_row, strict=True):
        for j in range(n_in):
            if gone[j]:
                inverse = torch.linalg.inv(H[j:, j:])
                row[j:] -= row[j] * inverse[:, 0] / inverse[0, 0]
                row[j] = 0.0
    return W


def damped(H, damping=0.01):
    return H + damping * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)


@given(seed=seeds, share=st.sampled_from([0.25, 0.5, 0.75]), by=groups)
def test_sparsegpt_equals_brute_force(seed, share, by):
    W, X = random_layer(3, 8, 40, seed)
    H = damped(input_products(X))
    costs = torch.stack([1 / torch.linalg.inv(H[j:, j:])[0, 0] for j in range(8)])  # of removing a 1
    gone = removed(W.square() * costs, share, by)
    expected = brute_force_sparsegpt(W, H, gone)
    assert_close(prune_sparsegpt(W, input_products(X), share, by), expected, 1e-8)


@given(seed=seeds)
def test_sparsegpt_in_blocks_chooses_anew_but_updates_alike(seed):
    W, X = random_layer(3, 12, 40, seed)
    pruned = prune_sparsegpt(W, input_products(X), 0.5, "row", block_size=5)
    expected = brute_force_sparsegpt(W, damped(input_products(X)), pruned == 0)  # its own choice
    assert_close(pruned, expected, 1e-8)
    fours = prune_sparsegpt(W, input_products(X), "2:4")
    assert_close(fours, brute_force_sparsegpt(W, damped(input_products(X)), fours == 0), 1e-8)


def test_sparsegpt_solves_least_squares_for_what_it_keeps():
    """Where all removed columns come first, the others are all free: plain least squares."""
    W, X = random_layer(4, 10, 60)
    W[:, :4] *= 1e-3
    pruned = prune_sparsegpt(W, input_products(X), 0.4, "row", damping=0.0)
    assert (pruned[:, :4] == 0).all()
    expected = torch.linalg.lstsq(X[:, 4:], X @ W.T).solution.T  # [out, 6]
    assert_close(pruned[:, 4:], expected, 1e-8)


@pytest.mark.parametrize("by", ["row", "layer"])
def test_sparsegpt_with_independent_inputs_is_magnitude_within_blocks(by):
    W = random_matrix(6, 16)
    pruned = prune_sparsegpt(W, torch.eye(16, dtype=W.dtype), 0.5, by, block_size=8)
    expected = torch.cat([prune_magnitude(part, None, 0.5, by) for part in W.split(8, dim=1)], dim=1)
    assert torch.equal(pruned, expected)
    fours = prune_sparsegpt(W, torch.eye(16, dtype=W.dtype), "2:4")
    assert torch.equal(fours, prune_magnitude(W, None, "2:4"))


@pytest.mark.parametrize("by", ["row", "layer"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_sparsegpt_updates_lower_the_error(share, by):
    updated = zeroed = 0.0  # over many layers: an update looks ahead only, so a single one can lose
    for seed in range(30):
        W, X = random_layer(6, 16, 80, seed)
        pruned, H = prune_sparsegpt(W, input_products(X), share, by), input_products(X)
        updated += relative_error(W, pruned, H)
        zeroed += relative_error(W, W.masked_fill(pruned == 0, 0.0), H)
    assert updated < 0.95 * zeroed


# ---- Limits ----


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("by", ["row", "layer"])
def test_keeping_all_is_the_identity(method, by):
    W, X = random_layer(5, 8, 20)
    X[:, 3] = 0.0
    before = W.clone()
    assert torch.equal(METHODS[method][0](W, known_of(method, X), 0.0, by), before)
    assert not METHODS[method][0](W, known_of(method, X), 1.0, by).any()
    assert torch.equal(W, before)  # the weights that were given are not modified


def test_dead_inputs_go_first():
    W, X = random_layer(5, 12, 40)
    dead = [0, 5, 11]
    X[:, dead] = 0.0
    for prune, known in ((prune_wanda, input_squares(X)), (prune_sparsegpt, input_products(X))):
        pruned = prune(W, known, 0.5, "row")
        assert pruned.isfinite().all()
        assert ((pruned == 0).sum(dim=1) == 6).all()
        assert not pruned[:, dead].any()


@pytest.mark.parametrize("sparsity, by", [(0.5, "row"), (0.5, "layer"), ("2:4", "row")])
def test_calibration_of_zeros_leaves_magnitude(sparsity, by):
    W = random_matrix(5, 8)
    expected = prune_magnitude(W, None, sparsity, by)
    assert torch.equal(prune_wanda(W, torch.zeros(8), sparsity, by), expected)
    assert torch.equal(prune_sparsegpt(W, torch.zeros(8, 8, dtype=W.dtype), sparsity, by), expected)


# ---- Models ----


@pytest.mark.parametrize("method", METHODS)
def test_batches_of_the_calibration_do_not_matter(method):
    tokens = random_tokens(5, 12)
    one, all_at_once = (
        prune_model(tiny_model(GPTlite), tokens, method, "row", 0.5, batch_size) for batch_size in (1, 5)
    )
    assert_close(list(one.parameters()), list(all_at_once.parameters()), 1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_only_the_linear_layers_of_the_blocks_change(method):
    model = tiny_model(GPTlite)
    before = copy.deepcopy(model.state_dict())
    prune_model(model, random_tokens(4, 16), method, "row", 0.5)
    pruned = {f"blocks.{name}.weight" for name in linear_layers(model.blocks)}
    assert len(pruned) == 12
    for name, tensor in model.state_dict().items():
        if name in pruned:
            assert ((tensor == 0).sum(dim=1) == tensor.shape[1] // 2).all()
        else:
            assert torch.equal(tensor, before[name])


def test_a_block_is_calibrated_on_what_the_pruned_blocks_before_it_give():
    model, tokens = tiny_model(GPTlite), random_tokens(4, 16)
    expected = copy.deepcopy(model)
    for block in expected.blocks:
        layers = linear_layers(block)
        # all earlier blocks are pruned by now, and the model runs from its beginning
        squares = sum_inputs(layers, input_squares, lambda: expected(tokens))
        for name, layer in layers.items():
            layer.weight.data = prune_wanda(layer.weight.data, squares[name], 0.5)
    prune_model(model, tokens, "Wanda", "row", 0.5)
    assert_close(list(model.parameters()), list(expected.parameters()))


def test_keeping_all_leaves_the_model_as_it_was():
    tokens, model = random_tokens(4, 16), tiny_model(GPTlite)
    expected = model(tokens)
    for method in METHODS:
        assert torch.equal(prune_model(model, tokens, method, "layer", 0.0)(tokens), expected)


def test_sparsegpt_gives_up_a_large_weight_of_a_dead_input_first():
    X = random_matrix(50, 4)
    X[:, 0] = 0
    W = torch.tensor([[10.0, 0.01, 0.02, 0.03]], dtype=torch.float64)
    for sparsity, gone in ((0.25, [0]), ("2:4", [0, 1])):
        pruned = prune_sparsegpt(W, X.T @ X, sparsity, by="row")
        assert (pruned[0] == 0).nonzero()[:, 0].tolist() == gone


# ---- Training on ----


def trained(keep):
    model = prune_model(tiny_model(GPTlite), random_tokens(4, 16), "magnitude", "row", 0.5)
    handles = keep_zeros(model.blocks) if keep else []
    training.train_steps(model, random_tokens(1, 200)[0], 3, 1e-2, 4, 16)
    return model, handles


def test_zeros_stay_when_a_model_is_trained_on_and_grow_back_without_care():
    def zeros(model):
        return [layer.weight == 0 for layer in linear_layers(model.blocks).values()]

    before = prune_model(tiny_model(GPTlite), random_tokens(4, 16), "magnitude", "row", 0.5)
    model, handles = trained(keep=True)
    assert all(torch.equal(*pair) for pair in zip(zeros(model), zeros(before), strict=True))
    changed = zip(linear_layers(model.blocks).values(), linear_layers(before.blocks).values(), strict=True)
    assert not any(torch.equal(now.weight, old.weight) for now, old in changed)
    assert not any(zero.any() for zero in zeros(trained(keep=False)[0]))
    for handle in handles:
        handle.remove()
    training.train_steps(model, random_tokens(1, 200)[0], 3, 1e-2, 4, 16)
    assert sum(zero.sum() for zero in zeros(model)) < 0.1 * sum(zero.sum() for zero in zeros(before))


# ---- The script ----


def test_quick_run(distilled_checkpoint, tmp_path):
    if distilled_checkpoint != GPTLITE_DISTILLED_CKPT_PATH:
        pytest.skip("what sparsity costs needs trained weights")
    args = ("--quick", "--json", "-", "--plot", tmp_path / "figure.png")
    run = run_script("main_sparsity.py", *args, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stderr
    assert len(run.json["checks"]) == 4 and all(run.json["checks"].values())
    rise, error, times = run.json["sweeps"].values()
    for table in (rise, error):
        assert [row["zeros"] for row in table] == ["50%", "2:4"]
        for row in table:
            values = {name: value for name, value in row.items() if name != "zeros" and value is not None}
            assert len(values) == (6 if row["zeros"] == "50%" else 3)
            assert min(values, key=values.get).startswith("SparseGPT")
    assert all(row["SparseGPT"] > row["magnitude"] for row in times)  # it solves for what it keeps
    dense, *others = run.json["rows"]
    assert dense["baseline"] and len(others) == 9 and len(run.json["why"]) == 4
    assert all(row["valid_loss"] > dense["valid_loss"] for row in others)
    assert all(row["loss_difference_se"] > 0 for row in others)
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_bad_options():
    run = run_script("main_sparsity.py", "--quick", "--sparsities", "1.5")
    assert run.status == 2 and "1.5 is not a share from 0 to 1" in run.stderr


def test_blocks_that_cut_groups_of_four_are_refused():
    with pytest.raises(ValueError, match="groups of four"):
        prune_sparsegpt(torch.randn(3, 12), torch.eye(12), "2:4", block_size=6)
