"""NSA: branches by definition and gathered, nothing of the future, limits that equal dense attention."""

import pytest
import torch
from helpers import assert_close, large_scores, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_gqa import grouped_attention
from gptlite_sparse import causal
from main_nsa import (
    GPTlite_NSA,
    Sizes,
    branches,
    check_sizes,
    compress,
    convert_mha_to_nsa,
    nsa_attention,
    nsa_step,
    select_blocks,
    shared_pieces,
)

OVERLAP = Sizes(4, 2, 8, 2, 3)  # blocks of summaries overlap, and are not those that are selected
SIZES = [OVERLAP, Sizes(4, 4, 4, 2, 1), Sizes(2, 1, 3, 3, 5), Sizes(6, 2, 2, 4, 2)]


def draw(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def inputs(B, H, G, T, seed=0):
    Q, K, V, gates = draw((B, H, T, 8), (B, G, T, 8), (B, G, T, 8), (3, B, H, T, 1), seed=seed)
    return Q, K, V, gates.sigmoid()


def nsa_model(sizes, gates=(0.1, 0.5, 0.5), seed=0, **kwargs):
    model = tiny_model(GPTlite_NSA, sizes=sizes, seed=seed, **kwargs)
    base = tiny_model(GPTlite, seed=seed, **kwargs).state_dict()
    model.load_state_dict(convert_mha_to_nsa(base, 16, gates))
    return model


def test_summaries_are_means_of_complete_blocks():
    (x,) = draw((2, 3, 9, 5))
    means = compress(x, OVERLAP)
    assert means.shape == (2, 3, 3, 5)  # tokens 0-3, 2-5, 4-7
    assert_close(means[:, :, 1], x[:, :, 2:6].mean(dim=2))
    assert compress(x[:, :, :3], OVERLAP).shape == (2, 3, 0, 5)


@pytest.mark.parametrize("sizes", SIZES)
def test_pieces_that_a_summary_shares_with_a_block(sizes):
    n, n_blocks = 12, 7
    pieces = shared_pieces(n, n_blocks, sizes)
    for i in range(n):
        mine = {i + m for m in range(sizes.block // sizes.stride)}
        for j in range(n_blocks):
            per_block = sizes.selection // sizes.stride
            assert pieces[i, j] == len(mine & set(range(j * per_block, (j + 1) * per_block)))


def test_equal_sizes_select_by_the_weights_themselves():
    """Block 0 and the own one always, then that with the most weight; none of the future, none twice."""
    sizes = Sizes(2, 2, 2, 3, 1)
    weights = torch.tensor([0.1, 0.2, 0.5, 0.2]).expand(1, 1, 2, 4)
    chosen = select_blocks(weights, 1, 9, sizes)[0, 0].int().tolist()  # queries 7 and 8 of blocks 3 and 4
    assert chosen == [[1, 0, 1, 1, 0], [1, 0, 1, 0, 1]]
    early = select_blocks(torch.zeros(1, 1, 5, 2), 1, 5, sizes)[0, 0].int().tolist()
    assert early == [[1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("sizes", SIZES)
def test_branches(sizes):
    Q, K, V, _ = inputs(2, 4, 2, 19)
    outputs, weights, selected, window = branches(Q, K, V, sizes)
    assert outputs.isfinite().all()
    assert (outputs[0, :, :, : sizes.block - 1] == 0).all()  # no block is complete yet
    assert (weights[:, :, : sizes.block - 1] == 0).all()
    assert_close(weights[:, :, sizes.block - 1 :].sum(-1), torch.ones(2, 4, 20 - sizes.block).double())
    assert not (selected & ~causal(19, 19)).any() and selected.diagonal(dim1=-2, dim2=-1).all()
    assert torch.equal(selected[:, ::2], selected[:, 1::2])  # once for a group
    assert selected.sum(-1).max() <= sizes.n_selected * sizes.selection
    assert window.sum(-1).tolist() == [min(t + 1, sizes.window) for t in range(19)]
    assert_close(outputs[1], grouped_attention(Q, K, V, selected))
    assert_close(outputs[2], grouped_attention(Q, K, V, window))


@given(
    st.integers(1, 24), st.sampled_from(SIZES), st.sampled_from([(1, 1), (2, 2), (4, 2)]), st.integers(0, 99)
)
def test_one_token_at_a_time_equals_one_pass(T, sizes, heads, seed):
    """Masked and gathered, at every length, before and behind the first complete block."""
    Q, K, V, gates = inputs(2, *heads, T, seed)
    expected = nsa_attention(Q, K, V, gates, sizes)
    for t in range(T):
        q, k, v, g = Q[:, :, t : t + 1], K[:, :, : t + 1], V[:, :, : t + 1], gates[:, :, :, t : t + 1]
        assert_close(nsa_attention(q, k, v, g, sizes), expected[:, :, t : t + 1])
        means = compress(k, sizes), compress(v, sizes)
        assert_close(nsa_step(q, k, v, means, g, sizes), expected[:, :, t : t + 1])


@pytest.mark.parametrize("sizes", SIZES)
def test_the_last_token_changes_no_earlier_output(sizes):
    Q, K, V, gates = inputs(1, 2, 2, 17)
    before = nsa_attention(Q, K, V, gates, sizes)
    K[:, :, 16], V[:, :, 16] = 50.0, 50.0
    assert_close(nsa_attention(Q, K, V, gates, sizes)[:, :, :16], before[:, :, :16])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_larger_than_16_bits_hold(dtype):
    for Q, K, V, expected in large_scores(dtype):
        sizes, gates = Sizes(1, 1, 1, 2, 2), torch.full((3, 1, 1, 2, 1), 1 / 3, dtype=dtype)
        assert_close(nsa_attention(Q, K, V, gates, sizes), expected)  # all branches see both keys
        means = compress(K, sizes), compress(V, sizes)
        step = nsa_step(Q[:, :, 1:], K, V, means, gates[:, :, :, 1:], sizes)
        assert_close(step, expected[:, :, 1:])


@pytest.mark.parametrize(
    "sizes, message",
    [
        (Sizes(3, 2, 4, 2, 1), "multiples of the stride"),
        (Sizes(4, 2, 3, 2, 1), "multiples of the stride"),
        (Sizes(4, 2, 4, 2, 0), "at least 1"),
        (Sizes(4, 2, 4, 1, 1), "the first and the own"),
    ],
)
def test_bad_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        check_sizes(sizes)
    with pytest.raises(ValueError, match=message):
        tiny_model(GPTlite_NSA, sizes=sizes)


# In the model


def test_one_branch_that_sees_everything_is_the_model_unchanged():
    tokens = random_tokens(2, 16)
    dense = tiny_model(GPTlite)(tokens)
    assert_close(
        nsa_model(Sizes(4, 4, 4, 4, 1), (0.0, 1.0, 0.0))(tokens)[0], dense
    )  # selection of all blocks
    assert_close(nsa_model(Sizes(4, 4, 4, 2, 16), (0.0, 0.0, 1.0))(tokens)[0], dense)  # window of the context
    assert_close(nsa_model(Sizes(1, 1, 1, 2, 1), (1.0, 0.0, 0.0))(tokens)[0], dense)  # summaries of one token
    assert (nsa_model(OVERLAP)(tokens)[0] - dense).abs().max() > 1e-3


@given(st.integers(1, 16), st.sampled_from(SIZES), st.integers(0, 20))
def test_every_split_of_a_text_gives_one_pass(n, sizes, seed):
    model, tokens = nsa_model(sizes), random_tokens(2, 16, seed)
    whole = model(tokens)[0]
    assert_close(utils.cached_logits(model, tokens, n)[0], whole)
    if n < 16:
        first, past = model(tokens[:, :n])
        assert_close(torch.cat([first, model(tokens[:, n:], past)[0]], dim=1), whole)


def test_training_reaches_all_weights():
    model = nsa_model(OVERLAP, dtype=torch.float32).train()
    model(random_tokens(2, 16))[0].logsumexp(-1).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, name


def test_gates_of_a_conversion():
    state = convert_mha_to_nsa(tiny_model(GPTlite).state_dict(), 16, (0.25, 0.5, 0.75))
    model = tiny_model(GPTlite_NSA, sizes=OVERLAP)
    model.load_state_dict(state)
    gates = model.blocks[1].mha.gate_proj(torch.randn(1, 1, 32).double()).sigmoid().view(3, 2)
    assert_close(gates, torch.tensor([[0.25] * 2, [0.5] * 2, [0.75] * 2]).double())


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("main_nsa.py", tmp_path, distilled_checkpoint)  # --quick
    assert all(report["checks"].values()) and len(report["checks"]) == 3 and len(report["why"]) == 4
    dense, nsa, window, after = report["rows"]
    assert dense["baseline"] and nsa["method"].startswith("NSA ") and window["budget"] == nsa["budget"]
    assert 30 < nsa["keys_read"] < 72 and nsa["approximate"]
    assert (
        nsa["uptrained_loss"] > 0
        and window["uptrained_loss"] > 0
        and "control after 1 steps" in report["why"][0]
    )
    assert nsa["n_parameters"] - dense["n_parameters"] == 3 * (192 * 9 + 9)
    losses, times = report["sweeps"].values()
    rules = ["NSA", "window", "NSA, trained on", "window, trained on"]
    assert [line["rule"] for line in losses] == rules
    assert [line["keys"] for line in times] == [1024, 4096]


def test_script_refuses_sizes_that_do_not_fit(distilled_checkpoint):
    run = run_script("main_nsa.py", "--quick", "--sizes", 8, 3, 8, 3, 16, checkpoint=distilled_checkpoint)
    assert run.status == 2 and "multiples of the stride" in run.stderr
