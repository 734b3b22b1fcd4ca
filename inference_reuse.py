"""What reused keys and values cost in quality, and how much of the model runs all the same.

measure_quality() compares the tokens behind what is reused with the full computation, quality_figures() and
quality_line() make rows of that, computed_share() counts what runs, lower_at() says at which shares one
choice beats another.
"""

import torch
import torch.nn.functional as F

import inference_words as words
from inference_utils import first_of, loss_difference

COLUMNS = {
    "computed": ("layers computed", "{:.0%}"),
    "stored_mb": ("stored MB", "{:.1f}"),
    "kl": ("KL (nats)", "{:.2e}"),
    "continuation_loss": ("loss behind", "{:.4f}"),
}


def kl_divergence(reference, logits):
    """KL divergence in nats of each next-token distribution [T, V] from the reference's [T, V]: [T]."""
    right, guess = (x.float().log_softmax(dim=-1) for x in (reference, logits))  # [T, V]
    p = right.exp()  # 0 where a token is ruled out: it adds nothing, though its difference may be NaN
    return torch.where(p > 0, p * (right - guess), 0.0).sum(dim=-1)


def behind(reference, logits, targets):
    """(mean KL divergence, mean loss) in nats over T tokens, logits [T, V] and targets [T], as floats."""
    loss = F.cross_entropy(logits.float(), targets)
    return kl_divergence(reference, logits).mean().item(), loss.item()


@torch.no_grad()
def measure_quality(model, windows, n, ways):
    """Compares ways to reuse the first n tokens of each window with the full pass over it.

    Args: model: token ids [1, T] -> (logits [1, T, V], ...); windows [N, T + 1]; ways: function of the tokens
        [1, T], returns {key: function that gives the logits behind the first n, [1, T - n, V], or a tuple
        that begins with them}.
    Returns: {key: behind() of each window}, and the same of the full pass itself.
    """
    found, full = {}, []
    for window in windows:
        tokens, targets = window[None, :-1], window[n + 1 :]  # [1, T], [T - n]
        reference = first_of(model(tokens))[0, n:]  # [T - n, V]
        full.append(behind(reference, reference, targets))
        for key, way in ways(tokens).items():
            found.setdefault(key, []).append(behind(reference, first_of(way())[0], targets))
    return found, full


def quality_figures(pairs, reference=None):
    """Figures of a row from behind() of N windows; reference: the same of the baseline, None for itself."""
    kl, losses = torch.tensor(pairs, dtype=torch.float64).T  # [N] each
    figures = {"kl": kl.mean().item(), "continuation_loss": losses.mean().item()}
    if reference is not None:
        baseline = torch.tensor(reference, dtype=torch.float64)[:, 1]  # [N]
        difference, se = loss_difference(losses, baseline)
        figures |= {"loss_difference": difference, "loss_difference_se": se}
    return figures


def quality_line(pairs, full):
    """The same as columns of a further table, with standard errors."""
    figures = quality_figures(pairs, full)
    return {
        "KL (nats)": figures["kl"],
        "rise of loss": figures["loss_difference"],
        "+-": figures["loss_difference_se"],
    }


def computed_share(model, run, n_tokens):
    """Which share of a pass of n_tokens tokens through all blocks run() computes, counted at the blocks."""
    counted = []
    hooks = [
        block.ffwd.register_forward_pre_hook(lambda _module, args: counted.append(args[0].shape[:-1].numel()))
        for block in model.blocks
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counted) / (n_tokens * len(model.blocks))


def lower_at(found, one, other, shares):
    """At which shares the divergence of one choice is lower than that of another, beyond chance.

    Args: found: of measure_quality(), by (choice, share); one, other: the choices.
    """
    lower, listed = [], []
    for share in shares:
        a, b = (torch.tensor(found[c, share], dtype=torch.float64)[:, 0] for c in (one, other))  # [N]
        difference, se = loss_difference(a, b)
        lower += [f"{100 * share:g}%"] if difference < -2 * se else []
        listed.append(f"{a.mean():.1e} against {b.mean():.1e} at {100 * share:g}%")
    figures = f"(KL {', '.join(listed) or 'not measured'})"
    what = f"than the same number of tokens, {other},"
    return words.choose(
        len(lower) / max(len(listed), 1),
        (1, f"{one} leaves a lower divergence {what} at every share {figures}."),
        (1e-9, f"{one} leaves a lower divergence {what} at {', '.join(lower)}, not at all shares {figures}."),
        f"{one} leaves no lower divergence {what} at any share, beyond chance {figures}.",
    )
