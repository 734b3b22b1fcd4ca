"""Divergence and loss behind what is reused, by hand, and every outcome of what is said about them."""

import math

import pytest
import torch
from helpers import assert_close, random_tokens, tiny_model

import inference_reuse as reuse
from gptlite_kvcache import GPTlite_KVCache


def test_divergence_and_loss_by_hand():
    reference, logits = (
        torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log(),
        torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log(),
    )
    by_hand = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert_close(reuse.kl_divergence(reference, logits), torch.tensor([0.0, by_hand]))
    kl, loss = reuse.behind(reference, logits, torch.tensor([0, 1]))
    assert kl == pytest.approx(by_hand / 2, abs=1e-6) and loss == pytest.approx(math.log(2), abs=1e-6)


def test_a_token_that_is_ruled_out_adds_nothing():
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    assert reuse.kl_divergence(logits, logits).item() == 0.0
    assert reuse.kl_divergence(logits, torch.zeros(1, 3)).isfinite().all()


@torch.no_grad()
def test_quality_of_the_model_itself_and_of_another():
    model, other = tiny_model(GPTlite_KVCache), tiny_model(GPTlite_KVCache, seed=1)
    windows = random_tokens(3, 13)
    found, full = reuse.measure_quality(
        model, windows, 8, lambda t: {"same": lambda: model(t)[0][:, 8:], "other": lambda: other(t)[0][:, 8:]}
    )
    assert [kl for kl, _ in full] == [0.0] * 3 and found["same"] == full
    figures = reuse.quality_figures(found["other"], full)
    assert figures["kl"] > 0 and figures["loss_difference_se"] > 0
    losses = [loss for _, loss in found["other"]]
    assert figures["continuation_loss"] == pytest.approx(sum(losses) / 3)
    assert reuse.quality_figures(found["same"], full)["loss_difference"] == 0
    assert reuse.quality_line(found["other"], full)["KL (nats)"] == figures["kl"]
    assert "loss_difference" not in reuse.quality_figures(full)


@torch.no_grad()
def test_computed_share_is_counted_at_the_blocks():
    model, tokens = tiny_model(GPTlite_KVCache), random_tokens(1, 10)
    assert reuse.computed_share(model, lambda: model(tokens), 10) == 1.0
    _, cache = model(tokens[:, :6])
    assert reuse.computed_share(model, lambda: model(tokens[:, 6:], cache), 10) == pytest.approx(0.4)
    assert not any(block.ffwd._forward_pre_hooks for block in model.blocks)


def test_lower_at_has_words_for_every_outcome():
    low, high = ([(kl, 1.0) for kl in kls] for kls in ([0.1, 0.11, 0.12], [0.2, 0.21, 0.22]))
    found = {("one", 0.3): low, ("other", 0.3): high, ("one", 0.6): high, ("other", 0.6): low}
    texts = [reuse.lower_at(found, "one", "other", shares) for shares in ([0.3], [0.3, 0.6], [0.6], [])]
    assert "at every share" in texts[0] and "at 30%, not at all" in texts[1]
    assert "no lower divergence" in texts[2] and "not measured" in texts[3]
    assert "no lower divergence" in reuse.lower_at({("a", 0.3): low, ("b", 0.3): low}, "a", "b", [0.3])
