"""Divergence and shared best tokens against PyTorch's own, and the words that bits choose."""

import torch.nn.functional as F
from helpers import assert_close, random_tokens, tiny_model

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from inference_agreement import agreement, closer, counted_bits


def test_agreement_is_pytorchs_divergence():
    """Over batches of unequal size, of models that return a cache as well."""
    reference, model = tiny_model(GPTlite), tiny_model(GPTlite_KVCache, seed=1)
    tokens = random_tokens(5, 9)
    figures = agreement(model, reference, tokens, batch_size=2)
    expected, logits = reference(tokens), model(tokens)[0]
    kl = F.kl_div(
        logits.log_softmax(-1).flatten(0, 1),
        expected.log_softmax(-1).flatten(0, 1),
        reduction="batchmean",
        log_target=True,
    )
    assert_close(figures["kl"], kl.item(), 1e-5)
    assert figures["top1"] == (logits.argmax(-1) == expected.argmax(-1)).double().mean()
    assert 0 < figures["top1"] < 1


def test_a_model_agrees_with_itself():
    model = tiny_model(GPTlite)
    assert agreement(model, model, random_tokens(2, 5)) == {"kl": 0.0, "top1": 1.0}


def test_closer():
    rows = [{"method": name, "kl": kl} for name, kl in (("a", 0.1), ("b", 0.3), ("c", 0.1))]
    assert "KL divergence of a is 3.00 times lower than that of b" in closer(rows[0], rows[1])
    assert "3.00 times higher" in closer(rows[1], rows[0]) and "equals" in closer(rows[0], rows[2])
    assert "no KL divergence" in closer({"method": "dense", "kl": None}, rows[0])


def test_counted_bits():
    assert "5.0 times less, not the 16 times of the bits alone" in counted_bits("a", 2, 6.4, 32)
    assert "as its bits say" in counted_bits("a", 8, 8.1, 32) and "not the" not in counted_bits(
        "a", 8, 8.1, 32
    )
    assert "nothing is saved" in counted_bits("a", 8, 32.0, 32) and "nothing" in counted_bits(
        "a", 8, 40.0, 32
    )
    assert "not counted" in counted_bits("a", 8, None, 32)
