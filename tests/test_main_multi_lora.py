"""Multi-LoRA: every row of a mixed batch gets what a model with its adapter merged gives it alone."""

import copy

import pytest
import torch
from helpers import assert_close, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from test_gptlite_lora import random_adapter

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from gptlite_lora import adapter_bytes, in_type, merge, new_adapter, with_adapters
from inference_utils import make_model, weight_bytes, window_losses
from main_kvcache import generate_kvcache
from main_multi_lora import (
    MergedModels,
    gathered_product,
    generate_in_turn,
    generate_merged,
    generate_switching,
    generate_together,
    grouped_product,
    kept_in,
    naive_product,
    train_adapter,
)

MODEL = tiny_model(GPTlite_KVCache)
ADAPTERS = [random_adapter(MODEL, rank, i) for i, rank in enumerate((1, 4, 3, 8))]
MANY = {f: with_adapters(MODEL, ADAPTERS, f) for f in (naive_product, gathered_product, grouped_product)}
ALONE = [MODEL, *(merge(copy.deepcopy(MODEL), adapter) for adapter in ADAPTERS)]  # by adapter, 0 for none


@given(st.lists(st.integers(0, 4), min_size=1, max_size=7), st.integers(0, 10**6), st.integers(1, 8))
def test_every_row_gets_its_own_adapter(which, seed, n_tokens):
    """Any mixture and order, rows without an adapter among them, prompts to the end of the context."""
    prompts = random_tokens(len(which), 1 + seed % 9, seed)
    expected = [
        generate_kvcache(ALONE[a], prompt[None], n_tokens, 16)
        for a, prompt in zip(which, prompts, strict=True)
    ]
    for many in MANY.values():
        assert torch.equal(
            generate_together(many, prompts, n_tokens, torch.tensor(which)), torch.cat(expected)
        )
    assert torch.equal(
        generate_in_turn(MANY[grouped_product], prompts, n_tokens, torch.tensor(which)), torch.cat(expected)
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 10**6))
def test_merged_weights_give_the_same(which, seed):
    prompts, adapters = random_tokens(len(which), 6, seed), torch.tensor(which)
    expected = generate_together(MANY[gathered_product], prompts, 6, adapters)
    merged = MergedModels(MODEL, ADAPTERS, adapters)
    assert torch.equal(generate_merged(merged, prompts, 6, adapters), expected)
    MANY[gathered_product].rows.use(adapters)
    assert_close(merged(prompts), MANY[gathered_product](prompts)[0])
    switched = copy.deepcopy(MODEL)
    assert torch.equal(generate_switching(switched, prompts, 6, adapters, ADAPTERS), expected)
    for p, q in zip(switched.parameters(), MODEL.parameters(), strict=True):
        assert_close(p, q)


def test_grouping_asks_each_adapter_once():
    """Rows are sorted once a batch; an adapter of rank 1 is not computed at the largest rank."""
    many = MANY[grouped_product]
    generate_together(many, random_tokens(6, 4), 1, torch.tensor([3, 0, 1, 3, 0, 1]))
    assert many.rows.groups == [(0, 0, 2), (1, 2, 4), (3, 4, 6)]
    assert many.blocks[0].mha.query_proj.ranks == [0, 1, 4, 3, 8]
    with torch.no_grad():
        for module in many.modules():  # what lies beyond the rank is never read
            if hasattr(module, "ranks"):
                assert not module.A[1, :, 1:].any()
    poisoned = copy.deepcopy(many)
    for module in poisoned.modules():
        if hasattr(module, "ranks"):
            module.A.data[1, :, 1:] = torch.nan
    poisoned.rows.use(torch.tensor([1, 1]))
    assert not poisoned(random_tokens(2, 4))[0].isnan().any()


def test_training_an_adapter_leaves_the_model_alone():
    model = tiny_model(GPTlite, dtype=torch.float32, seqlen=16)
    before, data = copy.deepcopy(model.state_dict()), torch.arange(4000) % 7
    adapter = train_adapter(model, 2, data, 40, 1e-2, 4, 16)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    losses = window_losses(model, data, 8), window_losses(merge(copy.deepcopy(model), adapter), data, 8)
    assert (losses[1] < losses[0] - 0.5).all()
    again = train_adapter(model, 2, data, 40, 1e-2, 4, 16)
    assert all(
        torch.equal(A, B)
        for pair, other in zip(adapter, again, strict=True)
        for A, B in zip(pair, other, strict=True)
    )


def test_training_in_16_bits_is_training_in_float32():
    model = tiny_model(GPTlite, dtype=torch.bfloat16)
    adapter = train_adapter(model, 2, torch.arange(400) % 7, 2, 1e-2, 2, 16)
    assert adapter[0][0].dtype == torch.float32
    many = with_adapters(model, [adapter], gathered_product)
    many.rows.use(torch.tensor([1]))
    assert many(random_tokens(1, 4)).dtype == torch.bfloat16


def test_100_adapters_in_the_memory_of_two_models():
    """Rank 4 on all linear layers of GPTlite: 18 x 4 x 384 numbers a layer; in bfloat16 100 fit."""
    model = make_model(GPTlite, 96)
    whole, adapter = weight_bytes(model), new_adapter(model, 4)
    for dtype, n_bytes in ((torch.float32, 4), (torch.bfloat16, 2)):
        one = 6 * 18 * 4 * 384 * n_bytes
        assert adapter_bytes(in_type(adapter, dtype)) == one
        many = [in_type(new_adapter(model, 4, seed), dtype) for seed in range(100)]
        assert (whole + sum(map(adapter_bytes, many)) < 2 * whole) == (dtype == torch.bfloat16)
    assert whole // (2 * one) == 65 and whole // one == 130


def test_what_keeping_an_adapter_in_a_type_takes_and_costs():
    model, tokens = tiny_model(GPTlite, dtype=torch.float32), random_tokens(1, 400)[0]
    adapter = random_adapter(model, 3)
    exact, rounded = (kept_in(t, model, adapter, 10**6, tokens, 8) for t in (torch.float32, torch.bfloat16))
    assert exact["KB"] == 2 * rounded["KB"] == adapter_bytes(adapter) / 1e3
    assert exact["rise of loss"] == exact["+-"] == 0.0
    assert 0 < abs(rounded["rise of loss"]) < 0.05 and rounded["+-"] > 0
    losses = [
        window_losses(merge(copy.deepcopy(model), a), tokens, 8).mean().item()
        for a in (adapter, [(A.bfloat16().float(), B.bfloat16().float()) for A, B in adapter])
    ]
    assert rounded["rise of loss"] == pytest.approx(losses[1] - losses[0], abs=1e-6)
    assert rounded["MB of 100 and the model"] == 1 + 100 * rounded["KB"] / 1e3
    assert rounded["MB of two models"] == 2 and rounded["in the place of a copy"] == 10**6 // int(
        1e3 * rounded["KB"]
    )
    assert (exact["rank"], exact["type"], rounded["type"]) == (3, "float32", "bfloat16")
    assert adapter[0][0].dtype == torch.float32  # the adapter itself stays as it is


# The script


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    figure = tmp_path / "adapters.png"
    options = ["--quick", "--json", "-", "--plot", figure]
    run = run_script("main_multi_lora.py", *options, checkpoint=distilled_checkpoint)
    assert run.status == 0, run.stdout + run.stderr
    assert figure.stat().st_size > 1000
    assert run.json["checks"] and all(run.json["checks"].values())
    rows = {row["method"].partition(",")[0]: row for row in run.json["rows"]}
    assert {*rows} == {"merged copies", "merged in turn", "apart", "gathered", "grouped"}
    assert all(row["same_output"] for row in rows.values())
    assert rows["gathered"]["n_steps"] < rows["merged copies"]["n_steps"]
    assert rows["grouped"]["peak_memory_mb"] < rows["merged copies"]["peak_memory_mb"]
    (matrix,) = (lines for title, lines in run.json["sweeps"].items() if title.startswith("Loss"))
    assert [line["adapter"] for line in matrix] == ["base", "as-you-like-it", "richard-ii", "macbeth"]
    assert all(line[name] > 0 for line in matrix for name in ("as-you-like-it", "richard-ii", "macbeth"))
    memory = next(lines for title, lines in run.json["sweeps"].items() if title.startswith("Memory"))
    assert [(line["rank"], line["type"]) for line in memory] == [
        (rank, kind) for kind in ("float32", "bfloat16") for rank in (4, 8, 16)
    ]
    assert all(0 < line["share of the model"] < 0.25 for line in memory)
    assert memory[0]["KB"] * 4 == pytest.approx(memory[2]["KB"])
    assert memory[0]["KB"] == 2 * memory[3]["KB"] and memory[0]["rise of loss"] == 0


def test_script_refuses_what_leaves_the_context(distilled_checkpoint):
    options = ["--quick", "--prompt-len", "250", "--n-tokens", "20"]
    run = run_script("main_multi_lora.py", *options, checkpoint=distilled_checkpoint)
    assert run.status == 2 and "at most 257" in run.stderr
