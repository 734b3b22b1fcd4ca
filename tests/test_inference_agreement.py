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
    expected, logits = (x.flatten(0, 1) for x in (reference(tokens), model(tokens)[0]))  # [N, V]
    p, q = expected.log_softmax(-1), logits.log_softmax(-1)
    kl = F.kl_div(q, p, reduction="batchmean", log_target=True)
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
    def text(n_bits, counted):
        return counted_bits(f"{n_bits} bits", n_bits, counted, 32)

    assert "A number of 2 bits takes 6.40" in text(2, 6.4) and "not the 16 times of the bits" in text(2, 6.4)
    assert "as its bits say" in text(8, 8.1) and "not the" not in text(8, 8.1)
    assert "nothing is saved" in text(8, 32.0) and "nothing is saved" in text(8, 40.0)
    assert "not counted" in text(8, None)
