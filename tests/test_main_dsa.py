"""Training of DSA's indexers: the frozen model stays, the indexer learns where attention goes; the script."""

import pytest
import torch
from helpers import quick_report, tiny_model
from test_gptlite_dsa import dsa_model

import inference_utils as utils
from gptlite import GPTlite
from main_dsa import batches, train_sparse, warm_up

DATA = torch.arange(600) * 7 % 16


def test_batches_are_those_of_every_training():
    found = [x for x, _, _ in batches(DATA, 3, 1e-3, 2, 16, 42, torch.device("cpu"))]
    generator = torch.Generator().manual_seed(42)
    assert all(torch.equal(x, utils.get_batch(DATA, 2, 16, generator)[0]) for x in found)
    rates = [rate for *_, rate in batches(DATA, 20, 1e-3, 2, 16, 42, torch.device("cpu"))]
    assert 0 < rates[0] < max(rates) <= 1e-3 and rates[-1] < 1e-4


def test_warm_up_trains_the_indexers_alone():
    model, dense = dsa_model(dtype=torch.float32), tiny_model(GPTlite, dtype=torch.float32)
    before = {name: p.clone() for name, p in model.named_parameters()}
    frozen = {name: p.clone() for name, p in dense.named_parameters()}
    losses = warm_up(model, dense, DATA, 40, 1e-2, 4, 16)
    assert len(losses) == 40 and sum(losses[-5:]) < 0.9 * sum(losses[:5])
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != (".indexer." in name), name
    assert all(torch.equal(p, frozen[name]) for name, p in dense.named_parameters())
    assert warm_up(model, dense, DATA, 0, 1e-2, 4, 16) == []


def test_sparse_training_trains_both():
    model = dsa_model(dtype=torch.float32)
    before = {name: p.clone() for name, p in model.named_parameters()}
    loss = utils.validation_loss(model, DATA, 4)
    losses = train_sparse(model, DATA, 15, 3e-3, 4, 16)
    assert len(losses) == 15 and utils.validation_loss(model, DATA, 4) < loss
    assert not model.training and all(block.mha.index_loss is None for block in model.blocks)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert any(".indexer." in name for name in changed) and any("fc_out" in name for name in changed)


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("main_dsa.py", tmp_path, distilled_checkpoint)  # --quick
    assert all(report["checks"].values()) and len(report["checks"]) == 2 and len(report["why"]) == 4
    rows = {row["method"]: row for row in report["rows"]}
    dense, dsa, first = (rows[name] for name in ("dense", "DSA 32", "DSA, not warmed up"))
    oracle = rows["oracle for all heads 32"]
    assert dense["baseline"] and dsa["keys_read"] == first["keys_read"] == oracle["keys_read"]
    if distilled_checkpoint == utils.GPTLITE_DISTILLED_CKPT_PATH:
        assert first["mass"] < dsa["mass"] < oracle["mass"] and first["recall"] < dsa["recall"]
    extra = 32 / (2 * 192)  # index keys beside keys and values
    assert abs(dsa["kv_bytes_per_token"] / dense["kv_bytes_per_token"] - 1 - extra) < 1e-9
    assert dsa["approximate"] and "control after 1 steps" in report["why"][1]
    times, losses = report["sweeps"].values()
    rules = ["DSA", "DSA, trained on", "oracle for all heads", "window"]
    assert [line["rule"] for line in losses] == rules
    assert [line["keys"] for line in times] == [1024, 4096]
