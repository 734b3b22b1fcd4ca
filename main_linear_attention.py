"""Linear attention: a state of fixed size instead of a cache that grows, and what forgetting adds to it.

Without the softmax, attention is a product of three matrices that may be multiplied in another order: the sum
of k v^T over all earlier tokens is a matrix [D, D], which a query reads. Four layers: features elu + 1 with
the sum of the weights as divisor (the first form), a fixed decay for each head (RetNet), one that the token
decides (Mamba-2), and one for each channel (GLA). The trained weights are copied, and a few steps follow.

The forms of a layer are equal: all scores at once, chunks, and token by token. Against softmax attention each
is approximate, and as converted it is useless until it is trained on. Wins memory from 33 tokens on where
state and cache are of one type (64 * 64 numbers for each head against 2 * 64 for each token), a decode step
that costs the same at every length, and prefill that grows linearly. Loses quality, and time on short texts:
products over chunks of 64 tokens are small, and PyTorch calls them one after the other. The delta rule, which
corrects what a key holds: main_delta_rule.py.

Run: python main_linear_attention.py            (--uptrain-steps 0 for the times alone)

Source: Katharopoulos et al., Transformers are RNNs, 2020; Sun et al., RetNet, 2023; Yang et al., GLA, 2023;
Dao and Gu, Mamba-2, 2024. Without the output gates of the last three, which trained weights do not know.
"""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from gptlite_linear import DecayGate, MultiHeadAttention_Linear, chunked, recurrent


def all_at_once(q, k, v, log_decay=None):
    """As attention is written, without a softmax: the whole matrix of scores, times the values.

    Args: q, k [B, H, T, D]; v [B, H, T, Dv]; log_decay [B, H, T, 1 or D] or None.
    Returns: [B, H, T, Dv]. The naive form of chunked(): T * T scores, and T * T * D decays.
    """
    T = q.shape[-2]
    if log_decay is None:
        log_decay = torch.zeros_like(k[..., :1])
    G = log_decay.cumsum(-2)  # [B, H, T, 1 or D]
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1).unsqueeze(-1)  # [T, T, 1]
    decay = (
        (G.unsqueeze(-2) - G.unsqueeze(-3)).masked_fill(later, float("-inf")).exp()
    )  # [B, H, T, T, 1 or D]
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3) * decay).sum(-1)  # [B, H, T, T]
    return scores @ v


class EluAttention(MultiHeadAttention_Linear):
    """The first linear attention: weights phi(q) . phi(k) above 0, divided by their sum as in a softmax."""

    rule = "linear"

    def features(self, q, k):
        return F.elu(q) + 1, F.elu(k) + 1  # [B, H, T, D], above 0

    def attend(self, q, k, v, log_decay, beta, state):
        v = F.pad(v, (0, 1), value=1.0)  # [B, H, T, D + 1]: a value that is always 1 sums up the weights
        out, state = super().attend(q, k, v, log_decay, beta, state)  # state [B, H, D, D + 1]
        return out[..., :-1] / (out[..., -1:] + 1e-6), state  # [B, H, T, D]

    def normalise(self, out):
        return out


class RetNetAttention(MultiHeadAttention_Linear):
    """A fixed decay: head h keeps 1 - 2^(-5 - h) of its state at every token, so it looks 2^(5 + h) back."""

    rule = "decay"

    def gates(self, x):
        heads = torch.arange(self.n_heads, device=x.device)
        log_decay = torch.log1p(-(2.0 ** (-5 - heads)))  # [H]
        return log_decay.view(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[1], 1), None  # [B, H, T, 1]


class Mamba2Attention(MultiHeadAttention_Linear):
    """A decay for each head that follows from the token: it can clear the state where a scene ends."""

    rule = "decay"

    def __init__(self, d_model, n_heads, d_head, dropout_p):
        super().__init__(d_model, n_heads, d_head, dropout_p)
        self.decay = DecayGate(d_model, n_heads, n_heads)

    def gates(self, x):
        return self.by_head(self.decay(x)), None  # [B, H, T, 1]


class GatedLinearAttention(MultiHeadAttention_Linear):
    """A decay for each channel of the keys, sigmoid(W2 W1 x)^(1/16), by a product of rank 16."""

    rule = "gla"

    def __init__(self, d_model, n_heads, d_head, dropout_p):
        super().__init__(d_model, n_heads, d_head, dropout_p)
        self.decay_down = nn.Linear(d_model, 16, bias=False)
        self.decay_up = nn.Linear(16, n_heads * d_head)

    def gates(self, x):
        logits = self.split_heads(self.decay_up(self.decay_down(x)))  # [B, H, T, D]
        return F.logsigmoid(logits.to(torch.promote_types(x.dtype, torch.float32))) / 16, None


LAYERS = {"elu + 1": EluAttention, "RetNet": RetNetAttention, "Mamba-2": Mamba2Attention}
LAYERS["GLA"] = GatedLinearAttention


# ---- Attention alone, where the text can be longer than GPTlite's context ----


def random_inputs(n, n_heads, d_head, device=None, dtype=torch.float32):
    """q, k, v and decays of n tokens, [1, n_heads, n, d_head] each; keys have length 1."""
    q, k, v, decay = torch.randn(4, 1, n_heads, n, d_head, device=device)
    return [t.to(dtype) for t in (q / 8, F.normalize(k, dim=-1), v, -decay.abs())]


def prompt_forms(q, k, v, log_decay):
    """Functions that attend with all of a prompt: {name: function}."""
    return {
        "SDPA": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True),
        "one decay": partial(chunked, q, k, v, log_decay[..., :1]),
        "decay by channel": partial(chunked, q, k, v, log_decay),
    }


def step_forms(q, k, v, log_decay):
    """Functions that attend with the last token: over all keys and values, and over a state [1, H, D, D]."""
    new = [t[..., -1:, :].contiguous() for t in (q, k, v, log_decay[..., :1])]  # [1, H, 1, D] each
    state = k.mT.float() @ v.float()  # whatever it holds, the step costs the same
    forms = {"SDPA": partial(F.scaled_dot_product_attention, new[0], k, v)}
    return forms | {"one decay": partial(recurrent, "decay", *new, None, state)}


if __name__ == "__main__":
    import inference_linear as study
    import inference_report as harness
    import inference_words as words
    from gptlite_kvcache import GPTlite_KVCache
    from inference_utils import parameters_of
    from main_kvcache import generate_kvcache

    with harness.script(study.options(__doc__, max_tokens=65536)) as args:
        text, (mha,) = harness.load_text(args), harness.load_models(args, GPTlite_KVCache)
        L, E, H, D, *_ = p = parameters_of(mha)
        report = harness.Report(args, "linear attention", mha, study.COLUMNS, study.HIDE, text)

        # In GPTlite: converted, then as many steps as the control, which keeps its softmax
        makers = study.makers(args, text, LAYERS)
        rows, _ = study.compare_trained(args, report, text, mha, generate_kvcache, makers)
        gated, soft = rows["Mamba-2"], rows["softmax"]
        report.check("a state takes H * D * D numbers a layer", gated["state_bytes"] == 4 * L * H * D * D)

        # Attention alone: equal forms, and their time over the length of the text
        for rule, width in (("linear", 0), ("decay", 1), ("gla", D)):
            q, k, v, log_decay = random_inputs(100, 2, D, args.device)
            inputs = q, k, v, log_decay[..., :width] if width else None
            one = recurrent(rule, *inputs)[0]
            report.check_close(f"{rule}: all at once equals token by token", all_at_once(*inputs), one)
            report.check_close(f"{rule}: by chunks equals token by token", chunked(*inputs)[0], one)
        tables, cases = [], (("A prompt", 1, prompt_forms), ("A decode step", H, step_forms))
        for what, n_heads, forms in cases:

            def functions(n, n_heads=n_heads, forms=forms):
                return forms(*random_inputs(n, n_heads, D, args.device, args.dtype))

            title = f"{what}: attention alone, heads: {n_heads} (ms)"
            tables.append(report.time_sweep(title, "tokens", study.lengths(args), functions))
            report.plot_sweep(title)

        kv_bytes, pair = soft["kv_bytes_per_token"], ("one decay", "SDPA")
        report.why(words.state_size("A state", gated["state_bytes"], kv_bytes, p.seqlen))
        prompt, step = (words.crossover(t, "tokens", *pair) + words.growth(t, "tokens", pair) for t in tables)
        report.why(words.about("a prompt", prompt))
        report.why(words.about("a decode step", step) + words.compare(gated, soft))
        report.why(study.explain_losses(args, report, rows, LAYERS))
        study.plot_memory(report, rows, LAYERS, p.seqlen)
        report.finish()
