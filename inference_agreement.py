"""How far a model's predictions are from another's: KL divergence and shared best tokens, beside the loss.

The loss of a text hardly tells apart methods that change predictions a little: some guesses become better by
chance. The divergence from the model that is approximated only grows with what is lost.
"""

import torch

import inference_words as words
from inference_reuse import kl_divergence
from inference_utils import first_of

COLUMNS = {"kl": ("KL", "{:.1e}"), "top1": ("same best", "{:.1%}")}


@torch.no_grad()
def agreement(model, reference, tokens, batch_size=8):
    """How well a model predicts what another one predicts, teacher-forced: figures of a row.

    Args: model, reference: token ids [B, T] -> logits [B, T, V], or a tuple that begins with them;
        tokens [N, T].
    Returns: {"kl": mean KL divergence of the model's predictions from the reference's, nats per token,
        "top1": share of tokens for which the two find the same token the likeliest}.
    """
    kl, same = [], []
    for batch in tokens.split(batch_size):
        expected, logits = (first_of(one(batch)) for one in (reference, model))  # [B, T, V]
        kl.append(kl_divergence(expected, logits).flatten())
        same.append((expected.argmax(dim=-1) == logits.argmax(dim=-1)).flatten())
    mean = max(torch.cat(kl).double().mean().item(), 0.0)  # rounding may end below 0
    return {"kl": mean, "top1": torch.cat(same).double().mean().item()}


def closer(one, other):
    """How the divergence of one row stands to that of another, a sentence."""
    rows = [{"method": row["method"], "KL divergence": row.get("kl")} for row in (one, other)]
    return words.compare(*rows, "KL divergence")


def counted_bits(name, n_bits, counted, dense_bits):
    """What a number of n_bits takes when all that it needs is counted, against dense_bits: a sentence."""
    if not words.known(counted) or counted <= 0:
        return words.Reason(f"What a number of {name} takes was not counted.")
    less = f"{dense_bits / counted:.1f} times less"
    figures = f"A number of {name} takes {counted:.2f} with all that belongs to it, of {dense_bits}"
    return words.choose(
        dense_bits / counted,
        (0.9 * dense_bits / n_bits, f"{figures}: {less}, as its bits say."),
        (1.01, f"{figures}: {less}, not the {dense_bits / n_bits:.0f} times of the bits alone."),
        f"{figures}: nothing is saved.",
    )
