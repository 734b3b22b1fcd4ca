"""Linear attention for GPTlite: what a layer remembers of a text is one matrix, not a row for every token.

Each head keeps a state S [D, D]. A token writes its value under its key into it, and a query reads S^T q, so
a step costs the same after ten tokens as after a million, and nothing grows. Six rules say how the state is
written; they differ in what is forgotten (nothing, a share of all, a share of each channel) and in what a key
does to the value that it had before (adds to it, or replaces it: the delta rule):

    linear        S += k v^T                           decay        S = a S + k v^T
    gla           S = diag(a) S + k v^T                delta        S += k (b (v - S^T k))^T
    gated delta   S = a S, then delta                  kda          S = diag(a) S, then delta

recurrent() runs a rule token by token, as it is written. chunked() computes the same for all six by matrix
products over chunks of tokens, as one reads a prompt or trains: within a chunk by scores between its tokens,
across chunks by the state. What it loses: D * D numbers hold at most D pairs of keys and values, and
everything that a text says must share them.

Source: Katharopoulos et al., Transformers are RNNs, 2020 (linear); Sun et al., RetNet, 2023, and Dao and Gu,
Mamba-2, 2024 (decay); Yang et al., Gated Linear Attention, 2023 (gla; chunks); Yang et al., Parallelizing
Linear Transformers with the Delta Rule, 2024 (delta by chunks); Yang et al., Gated Delta Networks, 2024;
Kimi Team, Kimi Linear, 2025 (kda). Letters: as in gptlite.py; C tokens of a chunk, N chunks.
"""

import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from gptlite import MultiHeadAttention
from gptlite_kvcache import GPTlite_KVCache, checked_window

# ---- The rules, one token each: state S [B, H, D, Dv], k [B, H, D], v [B, H, Dv] -> the next state.
#      log_decay [B, H, 1 or D] is the logarithm of what stays, beta [B, H, 1] how much of v is written ----


def read(S, q):
    """What the state holds under a key or query [B, H, D]: S^T q, [B, H, Dv]."""
    return (q.unsqueeze(-2) @ S).squeeze(-2)


def write(S, k, v):
    """S + k v^T"""
    return S + k.unsqueeze(-1) * v.unsqueeze(-2)


def linear_rule(S, k, v, log_decay, beta):
    return write(S, k, v)


def decay_rule(S, k, v, log_decay, beta):
    return write(log_decay.exp().unsqueeze(-1) * S, k, v)  # one share for a head, [B, H, 1, 1]


def gla_rule(S, k, v, log_decay, beta):
    return write(log_decay.exp().unsqueeze(-1) * S, k, v)  # one for each row of S, [B, H, D, 1]


def delta_rule(S, k, v, log_decay, beta):
    return write(S, k, beta * (v - read(S, k)))  # with a key of length 1 and beta 1 the old value is replaced


def gated_delta_rule(S, k, v, log_decay, beta):
    S = log_decay.exp().unsqueeze(-1) * S  # decay first: the error is that of the decayed state
    return delta_rule(S, k, v, log_decay, beta)


def kda_rule(S, k, v, log_decay, beta):
    S = log_decay.exp().unsqueeze(-1) * S  # [B, H, D, 1] * [B, H, D, Dv]
    return delta_rule(S, k, v, log_decay, beta)


RULES = {  # name: the rule
    "linear": linear_rule,
    "decay": decay_rule,
    "gla": gla_rule,
    "delta": delta_rule,
    "gated delta": gated_delta_rule,
    "kda": kda_rule,
}


def recurrent(rule, q, k, v, log_decay=None, beta=None, state=None):
    """The naive form: one token after the other is written into the state, then read from it.

    Args: rule: one of RULES; q, k [B, H, T, D]; v [B, H, T, Dv]; log_decay: logarithm of what stays of the
        state at each token, at most 0, [B, H, T, 1] for a head or [B, H, T, D] for its channels; beta: how
        much is written, [B, H, T, 1]; both None where the rule has none; state: S [B, H, D, Dv] of the
        tokens before, None for a new text; it is not modified.
    Returns: outputs S^T q [B, H, T, Dv], without any scale, and the state behind the last token, both in
        float32 at least: in 16 bits a state drifts.
    """
    update, S = RULES[rule], first_state(q, k, v, state)
    log_decay, beta = (None if t is None else t.to(S.dtype) for t in (log_decay, beta))
    q, k, v, out = q.to(S.dtype), k.to(S.dtype), v.to(S.dtype), []
    for t in range(k.shape[-2]):
        decay_t, beta_t = (None if part is None else part[..., t, :] for part in (log_decay, beta))
        S = update(S, k[..., t, :], v[..., t, :], decay_t, beta_t)  # [B, H, D, Dv]
        out.append(read(S, q[..., t, :]))  # [B, H, Dv]
    return torch.stack(out, dim=-2), S


def first_state(q, k, v, state):
    """The state to begin with, in float32 at least. ValueError for tensors that do not fit."""
    shape = (*k.shape[:-2], k.shape[-1], v.shape[-1])
    if q.shape != k.shape or k.shape[:-1] != v.shape[:-1] or k.shape[-2] == 0:
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
        raise ValueError(
            f"q, k, v must be [B, H, T, D], [B, H, T, D], [B, H, T, Dv], T above 0, not {shapes}"
        )
    if state is None:
        return k.new_zeros(shape, dtype=torch.promote_types(k.dtype, torch.float32))
    if state.shape != shape:
        raise ValueError(
            f"a state {list(state.shape)} does not fit: these keys and values need {list(shape)}"
        )
    return state.to(torch.promote_types(state.dtype, torch.promote_types(k.dtype, torch.float32)))


# ---- The chunked form, one for all rules ----


def decay_behind(log_decay):
    """Decay from behind each token to the end: exp of the sum over all later tokens, [..., C, 1 or D].

    Summed from the end, not as a difference of two sums: that is exact for any decay, 0 (-inf) included.
    """
    later = F.pad(log_decay[..., 1:, :], (0, 0, 0, 1))  # [..., C, D]: row t holds token t + 1
    return later.flip(-2).cumsum(-2).flip(-2).exp()


def decayed_scores(q, k, log_decay):
    """q_i . k_j for j <= i, each channel times its decay over tokens j + 1 to i, 0 for j > i: [..., C, C].

    Args: q, k [..., C, D], C a power of two (q may have dimensions in front of those of k); log_decay
        [..., C, 1 or D], at most 0.
    The textbook factors it into (q_i e^{G_i}) . (k_j e^{-G_j}), G the sum of log_decay up to a token, whose
    second factor overflows where much is forgotten. Here no exponent is above 0. With one decay for all
    channels it stands outside the product. With one for each, two halves of a chunk meet in the middle: the
    decay from j to i is that from j to the middle times that from the middle to i; the halves are halved.
    """
    C = k.shape[-2]
    if log_decay.shape[-1] == 1:
        below = torch.ones(C, C, dtype=torch.bool, device=q.device).tril(-1)  # [C, C]
        between = (
            log_decay.expand(*log_decay.shape[:-1], C).masked_fill(~below, 0.0).cumsum(-2)
        )  # [..., C, C]
        above = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
        return (q @ k.mT) * between.masked_fill(above, float("-inf")).exp()  # hidden before exp, or inf * 0
    scores = (q * k).sum(-1)[..., None, None]  # [..., C, 1, 1]: each token with itself
    half = 1
    while half < C:  # blocks [..., C / half, half, half] become half as many of twice the size
        q_late = q.unflatten(-2, (-1, 2, half))[..., 1, :, :]  # [..., C / (2 * half), half, D]
        k_early = k.unflatten(-2, (-1, 2, half))[..., 0, :, :]
        g_early, g_late = log_decay.unflatten(-2, (-1, 2, half)).unbind(-3)
        across = (q_late * g_late.cumsum(-2).exp()) @ (k_early * decay_behind(g_early)).mT
        early, late = scores.unflatten(-3, (-1, 2)).unbind(-3)  # [..., C / (2 * half), half, half]
        upper = torch.cat([early, torch.zeros_like(across)], dim=-1)
        scores = torch.cat([upper, torch.cat([across, late], dim=-1)], dim=-2)
        half *= 2
    return scores.squeeze(-3)


def chunked(q, k, v, log_decay=None, beta=None, state=None, chunk=64):
    """What recurrent() computes, by matrix products: the rule follows from which gates are given.

    Args: as in recurrent(); beta None: values are added, else the delta rule; chunk: tokens of a chunk, a
        power of two. A last chunk that is not full is padded with tokens that write and forget nothing.
    Raises ValueError for another chunk, or tensors that do not fit together.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"a chunk of {chunk} tokens: it must be a power of two, to be halved")
    S, T = first_state(q, k, v, state), k.shape[-2]
    if log_decay is None:
        log_decay = torch.zeros_like(k[..., :1])
    parts = [q, k, v, log_decay] + ([] if beta is None else [beta])
    with torch.autocast(q.device.type, enabled=False):
        parts = [F.pad(t.to(S.dtype), (0, 0, 0, -T % chunk)).unflatten(-2, (-1, chunk)) for t in parts]
        q, k, v, log_decay = parts[:4]  # [B, H, N, C, D]
        if beta is None:
            scores = decayed_scores(q, k, log_decay)  # [B, H, N, C, C]
        else:
            scores, within = decayed_scores(torch.stack([q, k]), k, log_decay)  # the decays once for both
        decay = log_decay.cumsum(-2).exp()  # from the chunk's begin up to each token, [B, H, N, C, 1 or D]
        q, k_begin, k_end = q * decay, k * decay, k * decay_behind(log_decay)  # [B, H, N, C, D]
        if beta is not None:
            # token i writes u_i = b_i (v_i - what S and the chunk's tokens before it hold under its key): a
            # triangular system, solved for all chunks at once with S left open: u = U - W S
            within = parts[4] * within.tril(-1)  # [B, H, N, C, C]
            right = parts[4] * torch.cat([v, k_begin], dim=-1)  # [B, H, N, C, Dv + D]
            solved = torch.linalg.solve_triangular(within, right, upper=False, unitriangular=True)
            v, W = solved.split([v.shape[-1], k.shape[-1]], dim=-1)  # v: U from here on
        out = []
        for n in range(k.shape[2]):
            u = v[:, :, n] if beta is None else v[:, :, n] - W[:, :, n] @ S  # [B, H, C, Dv]
            out.append(q[:, :, n] @ S + scores[:, :, n] @ u)  # earlier chunks, then this one
            S = decay[:, :, n, -1, :, None] * S + k_end[:, :, n].mT @ u  # [B, H, D, Dv]
    return torch.cat(out, dim=-2)[..., :T, :], S


def hide_padding(k, real, log_decay=None, beta=None):
    """k, log_decay, beta with zeros where real [B, T] is False: such a token writes and forgets nothing.

    With them a batch of texts of several lengths, padded on either side, leaves each text its own state.
    """
    real = real[:, None, :, None]  # [B, 1, T, 1]
    return tuple(None if t is None else t.masked_fill(~real, 0.0) for t in (k, log_decay, beta))


def causal_conv(x, weight, tail=None):
    """Each channel's own weighted sum over its last W tokens: the short convolution in front of a delta rule.

    Args: x [B, T, channels]; weight [W, channels], the newest token's last; tail: the W - 1 tokens before
        x, [B, W - 1, channels], None for a new text; it is not modified.
    Returns: [B, T, channels], and the tail for the next piece, however short this one was.
    """
    W, T = weight.shape[0], x.shape[1]
    if tail is None:
        tail = x.new_zeros(x.shape[0], W - 1, x.shape[2])
    x = torch.cat([tail, x], dim=1)  # [B, W - 1 + T, channels]
    return sum(weight[i] * x[:, i : i + T] for i in range(W)), x[:, T:].clone()


# ---- The layer: GPTlite's projections around a state ----


class MultiHeadAttention_Linear(MultiHeadAttention):
    """Attention by a state; a rule is a subclass, with its `rule`, its gates() and features().

    The cache of a layer is (state [B, H, D, Dv], tail of the convolution [B, W - 1, 3*H*D] or None).
    The published layers also have an output gate and a SiLU behind the convolution; trained softmax weights
    know neither, so they are left out. kernel: W of the convolution, 0 for none.
    """

    rule, kernel, chunk = "linear", 0, 64

    def __init__(self, d_model, n_heads, d_head, dropout_p):
        super().__init__(d_model, n_heads, d_head, dropout_p)
        # a softmax average of GPTlite's values is about this long in each channel
        self.out_gain = nn.Parameter(torch.full((n_heads, 1, d_head), 0.25))
        if self.kernel:  # it begins as if it were not there: the newest token alone
            taps = torch.zeros(self.kernel, 3 * n_heads * d_head)
            self.conv_taps = nn.Parameter(taps.index_fill(0, torch.tensor(self.kernel - 1), 1.0))

    def gates(self, x):
        """x [B, T, E] -> log_decay [B, H, T, 1 or D] and beta [B, H, T, 1], None where the rule has none."""
        return None, None

    def features(self, q, k):
        """What the rule makes of queries and keys [B, H, T, D]."""
        return q / math.sqrt(self.d_head), k

    def normalise(self, out):
        """Softmax weights sum to one; here each output [B, H, T, D] is brought to length sqrt(D) * gain."""
        return self.out_gain * F.rms_norm(out, out.shape[-1:], eps=1e-5)

    def forward(self, x, kv_cache=None, causal_mask=True, max_seqlen=None):
        """[B, T, E] and the cache of the tokens before -> [B, T, E] and the next cache.

        The cache that is given is not modified, so keeping it is a snapshot. Raises ValueError for another
        mask than the causal one; a state has no window, so max_seqlen changes nothing.
        """
        if causal_mask is not True:
            raise ValueError("a state has seen all earlier tokens: no other mask than the causal one")
        state, tail = (None, None) if kv_cache is None else kv_cache
        x_qkv = torch.cat([self.query_proj(x), self.key_proj(x), self.value_proj(x)], dim=-1)  # [B, T, 3*H*D]
        if self.kernel:
            x_qkv, tail = causal_conv(x_qkv, self.conv_taps, tail)
        q, k, v = (self.split_heads(part) for part in x_qkv.chunk(3, dim=-1))  # [B, H, T, D]
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = self.features(q.to(wide), k.to(wide))
        out, state = self.attend(q, k, v, *self.gates(x), state)  # [B, H, T, D]
        out = self.merge_heads(self.normalise(out)).to(x.dtype)  # [B, T, H*D]
        return self.dropout(self.out_proj(out)), (state, tail)

    def attend(self, q, k, v, log_decay, beta, state):
        """One token by its rule, several by chunks: a short piece by a chunk no longer than it needs."""
        if k.shape[-2] == 1:
            return recurrent(self.rule, q, k, v, log_decay, beta, state)
        chunk = min(self.chunk, 1 << (k.shape[-2] - 1).bit_length())
        return chunked(q, k, v, log_decay, beta, state, chunk)

    def by_head(self, x):
        """[B, T, H] -> [B, H, T, 1]"""
        return x.transpose(1, 2).unsqueeze(-1)


class DecayGate(nn.Module):
    """Mamba-2's decay of each head from the token itself: -e^A softplus(W x + b), [B, T, E] -> [B, T, width].

    A rate e^A from 1 to 16 and a step softplus(b) from 0.001 to 0.1 spread the heads from long to short
    memories; W begins with zeros, so that at first a decay does not depend on the token. n_inner: width of a
    first product, of low rank, 0 for none.
    """

    def __init__(self, d_model, width, n_heads, n_inner=0):
        super().__init__()
        self.inner = nn.Linear(d_model, n_inner, bias=False) if n_inner else nn.Identity()
        self.proj = nn.Linear(n_inner or d_model, width)
        step = torch.logspace(-3, -1, n_heads).repeat_interleave(width // n_heads)  # [width]
        self.log_rate = nn.Parameter(torch.linspace(1, 16, n_heads).log().repeat_interleave(width // n_heads))
        nn.init.zeros_(self.proj.weight)
        with torch.no_grad():
            self.proj.bias.copy_(step.expm1().log())  # softplus of it is the step

    def forward(self, x):
        x = self.proj(self.inner(x))
        return -self.log_rate.exp() * F.softplus(x.to(torch.promote_types(x.dtype, torch.float32)))


class GatedDelta(MultiHeadAttention_Linear):
    """Gated DeltaNet: forget a share, then replace what the key held. Keys and queries have length 1."""

    rule, kernel = "gated delta", 4

    def __init__(self, d_model, n_heads, d_head, dropout_p):
        super().__init__(d_model, n_heads, d_head, dropout_p)
        self.decay = DecayGate(d_model, n_heads, n_heads)
        self.beta_proj = nn.Linear(d_model, n_heads)
        nn.init.zeros_(self.beta_proj.weight)  # at first every token writes half of the error
        nn.init.zeros_(self.beta_proj.bias)

    def features(self, q, k):
        return F.normalize(q, dim=-1) / math.sqrt(self.d_head), F.normalize(k, dim=-1)

    def gates(self, x):
        return self.by_head(self.decay(x)), self.by_head(self.beta_proj(x).sigmoid())


# ---- The model ----


class TextState(NamedTuple):
    """What a model keeps of a text: the number of tokens and, for each layer, keys and values or a state.

    Nothing in it is ever changed in place: a state that is kept is a snapshot. Keys and values can be cut to
    an earlier token, a state cannot: going back needs a snapshot of exactly there.
    """

    n_tokens: int
    layers: tuple  # (k, v) [B, H, S, D] each, or (state [B, H, D, Dv], tail or None)


class GPTlite_Linear(GPTlite_KVCache):
    """GPTlite whose blocks attend by a state, but for those in full_layers, which keep softmax attention.

    Args: linear_class: a MultiHeadAttention_Linear for all other blocks; full_layers: numbers of blocks.
    Raises ValueError for a block that is not there.
    """

    def __init__(self, *args, linear_class=GatedDelta, full_layers=(), **kwargs):
        super().__init__(*args, **kwargs)
        if wrong := sorted(set(full_layers) - set(range(len(self.blocks)))):
            raise ValueError(f"full_layers names block {wrong[0]}; there are 0 to {len(self.blocks) - 1}")
        for number, block in enumerate(self.blocks):
            if number not in full_layers:
                old, width = block.mha, block.ln1.normalized_shape[0]
                block.mha = linear_class(width, old.n_heads, old.d_head, old.dropout.p)
                block.mha.load_state_dict(old.state_dict(), strict=False)  # the gates keep their beginning

    def forward(self, x, kv_cache=None, max_seqlen=None):
        """New tokens [B, Sq] and the TextState of earlier ones -> (logits [B, Sq, V], the next TextState).

        As GPTlite_KVCache: tokens past the window all get its last position, and full layers see only the
        window; a state has seen all of the text. Raises ValueError for no tokens, or an impossible window.
        """
        window = checked_window(self, max_seqlen)
        if x.shape[1] == 0:
            raise ValueError("no tokens: an empty prompt has nothing to continue")
        n_past, layers = (0, [None] * len(self.blocks)) if kv_cache is None else kv_cache
        positions = torch.arange(n_past, n_past + x.shape[1], device=x.device)  # [Sq]
        x = self.token_embedding(x) + self.position_embedding(positions.clamp(max=window - 1))  # [B, Sq, E]
        new_layers = []
        for block, layer in zip(self.blocks, layers, strict=True):
            x, layer = block(x, layer, window)  # [B, Sq, E]
            new_layers.append(layer)
        return self.fc_out(self.ln(x)), TextState(n_past + positions.shape[0], tuple(new_layers))


def linear_layers(model):
    """Numbers of the blocks of a GPTlite_Linear that keep a state."""
    return [i for i, block in enumerate(model.blocks) if isinstance(block.mha, MultiHeadAttention_Linear)]


def convert_to_linear(state_dict, model):
    """Puts GPTlite's weights into a GPTlite_Linear and returns it: gates, convolutions, gains keep their own.

    Raises ValueError for weights that the model has no place for.
    """
    own = model.state_dict()
    if unknown := [name for name in state_dict if name not in own]:
        raise ValueError(f"{type(model).__name__} has no {unknown[0]}: these are not weights of GPTlite")
    model.load_state_dict(own | dict(state_dict))
    return model


def state_bytes(text_state, batch_size=1):
    """Bytes that a TextState holds for one sequence of its batch, over all layers."""
    tensors = [t for layer in text_state.layers for t in layer if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors) // batch_size
