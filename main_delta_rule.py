"""The delta rule: a linear layer that corrects what a key holds instead of adding to it.

A plain linear layer adds k v^T for every token, so a key that is written twice reads the sum of both values,
and keys that are not at right angles disturb each other. The delta rule first reads what the state holds
under the key, and writes only the error: v replaces the old value. Three layers, each behind a convolution
over four tokens: DeltaNet, the same with a decay for each head (Gated DeltaNet), and one for each channel
(KDA, of Kimi Linear). One more has the decay alone, to show what the correction adds.

The chunked form equals the rule, though each write depends on the one before: within a chunk the errors solve
a triangular system. Against softmax attention the layers are approximate; their weights are copied, then
trained on. Wins as every linear layer does: memory and steps that do not grow. Loses against adding: a prompt
takes longer, for the triangular system, and a state of 64 x 64 still holds at most 64 pairs, where a cache of
keys and values holds them all.

Run: python main_delta_rule.py            (--uptrain-steps 0 for recall and times alone)

Source: Schlag et al., Linear Transformers Are Secretly Fast Weight Programmers, 2021; Yang et al., DeltaNet,
2024; Yang et al., Gated Delta Networks, 2024; Kimi Team, Kimi Linear, 2025. Without SiLU and output gates.
"""

from functools import partial

import torch
import torch.nn.functional as F

from gptlite_linear import DecayGate, GatedDelta, chunked, recurrent


def delta_by_matrices(q, k, v, log_decay, beta, state):
    """The rule as the papers write it: S = (I - beta k k^T) diag(decay) S + beta k v^T, then S^T q.

    Args: as in recurrent(), log_decay [B, H, T, 1 or D] or None. Returns: outputs [B, H, T, Dv], the state.
    The naive form of chunked(): a product of two matrices [D, D] for every token.
    """
    eye, out, S = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device), [], state  # [D, D]
    for t in range(k.shape[-2]):
        key, b = k[..., t, :, None], beta[..., t, :, None]  # [B, H, D, 1], [B, H, 1, 1]
        decay = eye if log_decay is None else eye * log_decay[..., t, :, None].exp()  # diagonal, [B, H, D, D]
        S = (eye - b * key @ key.mT) @ decay @ S + b * key @ v[..., t, None, :]  # [B, H, D, Dv]
        out.append((S.mT @ q[..., t, :, None]).squeeze(-1))  # [B, H, Dv]
    return torch.stack(out, dim=-2), S


class DeltaNet(GatedDelta):
    """The delta rule alone: nothing is forgotten but by being replaced."""

    rule = "delta"

    def __init__(self, d_model, n_heads, d_head, dropout_p):
        super().__init__(d_model, n_heads, d_head, dropout_p)
        del self.decay

    def gates(self, x):
        return None, self.by_head(self.beta_proj(x).sigmoid())  # [B, H, T, 1]


class KimiDelta(GatedDelta):
    """KDA: a decay for each channel of the keys, by a product of rank d_head, then the delta rule."""

    rule = "kda"

    def __init__(self, d_model, n_heads, d_head, dropout_p):
        super().__init__(d_model, n_heads, d_head, dropout_p)
        self.decay = DecayGate(d_model, n_heads * d_head, n_heads, n_inner=d_head)

    def gates(self, x):
        return self.split_heads(self.decay(x)), self.by_head(self.beta_proj(x).sigmoid())  # [B, H, T, D], 1


class DecayAlone(GatedDelta):
    """What Gated DeltaNet is without the delta rule: the same keys, convolution and decay, values added."""

    rule = "decay"

    def __init__(self, d_model, n_heads, d_head, dropout_p):
        super().__init__(d_model, n_heads, d_head, dropout_p)
        del self.beta_proj

    def gates(self, x):
        return self.by_head(self.decay(x)), None


LAYERS = {"decay alone": DecayAlone, "DeltaNet": DeltaNet, "Gated DeltaNet": GatedDelta, "KDA": KimiDelta}


# ---- What a state holds: facts are pairs of a key and a value ----


def read_back(rule, keys, values):
    """Writes the pairs one after the other, then asks for all of them.

    Args: rule: "linear", "delta", or "softmax", which keeps all pairs; keys [B, H, N, D] of length 1; values
        [B, H, N, Dv].
    Returns: what each key reads [B, H, N, Dv].
    """
    if rule == "softmax":  # sharp: a key's own score is D, that of another one about sqrt(D) at most
        return F.scaled_dot_product_attention(keys, keys, values, scale=keys.shape[-1])
    beta = torch.ones_like(keys[..., :1]) if rule == "delta" else None
    _, S = chunked(keys, keys, values, None, beta)  # [B, H, D, Dv]
    return keys.to(S.dtype) @ S


def recall_error(rule, n_pairs, d_head, n_texts=16, device=None):
    """Length of the error of what is read back, against that of the value, over random pairs."""
    generator = torch.Generator().manual_seed(n_pairs)
    keys, values = torch.randn(2, n_texts, 1, n_pairs, d_head, generator=generator).to(device)
    found = read_back(rule, F.normalize(keys, dim=-1), values)
    return ((found - values).norm() / values.norm()).item()


def recall_table(d_head, device=None):
    """Rows of recall_error over the number of pairs: both rules, and attention that keeps all pairs."""
    rules = ("linear", "delta", "softmax")
    return [
        {"pairs": n} | {rule: recall_error(rule, n, d_head, device=device) for rule in rules}
        for n in (1, 8, 16, 32, 64, 128)
    ]


# ---- Attention alone, where the text can be longer than GPTlite's context ----


def random_inputs(n, n_heads, d_head, device=None, dtype=torch.float32):
    """q, k, v [1, n_heads, n, d_head], log_decay of that shape, beta [1, n_heads, n, 1]; keys of length 1."""
    q, k, v, decay = torch.randn(4, 1, n_heads, n, d_head, device=device)
    beta = torch.rand(1, n_heads, n, 1, device=device)
    return [t.to(dtype) for t in (q / 8, F.normalize(k, dim=-1), v, -decay.abs(), beta)]


def prompt_forms(q, k, v, log_decay, beta):
    """Functions that attend with all of a prompt [B, H, T, D]: {name: function}."""
    return {
        "SDPA": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True),
        "decay alone": partial(chunked, q, k, v, log_decay[..., :1]),
        "DeltaNet": partial(chunked, q, k, v, None, beta),
        "Gated DeltaNet": partial(chunked, q, k, v, log_decay[..., :1], beta),
        "KDA": partial(chunked, q, k, v, log_decay, beta),
    }


if __name__ == "__main__":
    import inference_linear as study
    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import GPTlite_KVCache
    from inference_utils import parameters_of
    from main_kvcache import generate_kvcache

    with harness.script(study.options(__doc__, max_tokens=16384)) as args:
        text, (mha,) = harness.load_text(args), harness.load_models(args, GPTlite_KVCache)
        p = parameters_of(mha)
        D = p.d_head
        report = harness.Report(args, "delta rule", mha, study.COLUMNS, study.HIDE, text)

        # In GPTlite: converted, then as many steps as the control, which keeps its softmax
        makers = study.makers(args, text, LAYERS)
        rows, models = study.compare_trained(args, report, text, mha, generate_kvcache, makers)

        # The rule alone: equal forms, what is found again, and the time over the length of the text
        q, k, v, log_decay, beta = random_inputs(100, 2, D, args.device)
        empty = torch.zeros(1, 2, D, D, device=args.device)
        for rule, decays in (("delta", None), ("gated delta", log_decay[..., :1]), ("kda", log_decay)):
            given = q, k, v, decays, beta
            one, by_matrices = recurrent(rule, *given)[0], delta_by_matrices(*given, empty)[0]
            report.check_close(f"{rule}: by matrices equals token by token", by_matrices, one)
            report.check_close(f"{rule}: by chunks equals token by token", chunked(*given)[0], one)
        twice, last, both = k[:, :, :1].expand(-1, -1, 2, -1), v[:, :, 1], v[:, :, 0] + v[:, :, 1]
        for rule, name, expected in (("delta", "the last value", last), ("linear", "the sum", both)):
            found = read_back(rule, twice, v[:, :, :2])[:, :, 1]
            report.check_close(f"{rule}: a key written twice reads {name}", found, expected)
        title, time_title = f"N pairs in {D} x {D} numbers: error of what is read", "A prompt, one head (ms)"
        recall = report.sweep(title, recall_table(D, args.device))
        inputs = partial(random_inputs, n_heads=1, d_head=D, device=args.device, dtype=args.dtype)
        sizes = study.lengths(args)
        times = report.time_sweep(time_title, "tokens", sizes, lambda n: prompt_forms(*inputs(n)))

        few, many = (words.at_size(recall[i], "pairs", "delta", "linear", "error") for i in (2, 4))
        report.why(few + many)
        fast = words.crossover(times, "tokens", "Gated DeltaNet", "SDPA")
        report.why(fast + words.crossover(times, "tokens", "decay alone", "Gated DeltaNet"))
        one, other = (study.between(report, models, "Gated DeltaNet", name) for name in [*LAYERS][:2])
        report.why(one + other)
        report.why(study.explain_losses(args, report, rows, LAYERS))
        report.plot_sweep(title, "error, in lengths of a value", "x")
        report.plot_sweep(time_title)
        study.plot_memory(report, rows, LAYERS, p.seqlen)
        report.finish()
