"""The recurrences against the papers' matrix forms, the chunked form against them, and the layer's cache."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, random_tokens, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from gptlite import GPTlite
from gptlite_kvcache import GPTlite_KVCache
from gptlite_linear import (
    RULES,
    GatedDelta,
    GPTlite_Linear,
    MultiHeadAttention_Linear,
    causal_conv,
    chunked,
    convert_to_linear,
    decayed_scores,
    delta_rule,
    gated_delta_rule,
    hide_padding,
    read,
    recurrent,
    state_bytes,
)
from inference_utils import cache_tensors, cached_logits
from main_kvcache import generate, generate_kvcache

every_rule = pytest.mark.parametrize("rule", RULES)
PER_CHANNEL, UNGATED = ("gla", "kda"), ("linear", "delta")


def inputs(rule, T, B=2, H=2, D=16, Dv=12, dtype=torch.float64, seed=0, forget=0.3, with_state=True):
    """q, k, v, log_decay, beta, state for a rule; keys have length 1, decays are at least exp(-forget)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, uniform=False):
        kind = torch.rand if uniform else torch.randn
        return kind(shape, generator=generator, dtype=torch.float64)

    q, k = F.normalize(draw(2, B, H, T, D), dim=-1)
    v, S = draw(B, H, T, Dv), draw(B, H, D, Dv)
    log_decay = -forget * draw(B, H, T, D if rule in PER_CHANNEL else 1, uniform=True)
    log_decay = None if rule in UNGATED else log_decay
    beta = draw(B, H, T, 1, uniform=True) if "delta" in rule or rule == "kda" else None
    parts = q, k, v, log_decay, beta, S if with_state else None
    return [None if part is None else part.to(dtype) for part in parts]


# ---- The rules ----


@every_rule
def test_rules_are_the_papers(rule):
    """S = (I - b k k^T) diag(a) S + b k v^T with the matrices written out, where a rule has them."""
    q, k, v, log_decay, beta, S = inputs(rule, 5, B=1, H=1)
    out, last = recurrent(rule, q, k, v, log_decay, beta, S)
    S = S[0, 0]
    for t in range(5):
        decay = torch.ones(16, dtype=S.dtype) if log_decay is None else log_decay[0, 0, t].exp().expand(16)
        b = torch.ones(1, dtype=S.dtype) if beta is None else beta[0, 0, t]
        key, value = k[0, 0, t], v[0, 0, t]
        erase = torch.eye(16, dtype=S.dtype) - (0 if beta is None else b * torch.outer(key, key))
        S = erase @ torch.diag(decay) @ S + b * torch.outer(key, value)
        assert_close(out[0, 0, t], q[0, 0, t] @ S, 1e-12)
    assert_close(last[0, 0], S, 1e-12)


def scalar_delta(beta, decay, rule=gated_delta_rule):
    """A state of 2 under the key 1, then the value 5."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    S = rule(2 * one[..., None], one, 5 * one, torch.log(decay * one), beta * one)
    return S.item()


def test_the_error_is_that_of_the_decayed_state():
    assert scalar_delta(1.0, 0.5) == pytest.approx(5.0)  # 4 if the error were taken first
    assert scalar_delta(0.5, 0.5) == pytest.approx(3.0)  # else 2.5
    assert scalar_delta(0.5, 1.0) == pytest.approx(scalar_delta(0.5, 1.0, delta_rule)) == pytest.approx(3.5)


@pytest.mark.parametrize("chunk", [1, 2, 16])
def test_a_key_that_is_written_twice(chunk):
    """The delta rule replaces the value, plain linear attention adds the second to the first."""
    k = torch.tensor([[1.0, 0.0], [1.0, 0.0]])[None, None]  # [1, 1, 2, 2]
    v = torch.tensor([[2.0, 0.0], [0.0, 5.0]])[None, None]
    out, _ = chunked(k, k, v, beta=torch.ones(1, 1, 2, 1), chunk=chunk)
    assert_close(out[0, 0], torch.tensor([[2.0, 0.0], [0.0, 5.0]]))
    out, _ = chunked(k, k, v, chunk=chunk)
    assert_close(out[0, 0], torch.tensor([[2.0, 0.0], [2.0, 5.0]]))


def test_keys_that_are_not_of_length_one():
    """The rules take keys as they are: one of length 3 overshoots ninefold. The layer brings them to 1."""
    k, v = torch.tensor([[[3.0, 0.0]]]), torch.tensor([[[2.0, 4.0]]])
    one = torch.ones(1, 1, 1)
    S = delta_rule(torch.zeros(1, 1, 2, 2), k, v, None, one)
    assert_close(read(S, k), 9 * v)
    S = delta_rule(torch.zeros(1, 1, 2, 2), F.normalize(k, dim=-1), v, None, one)
    assert_close(read(S, F.normalize(k, dim=-1)), v)
    layer = GatedDelta(32, 2, 16, 0.0)
    q, k = layer.features(5 * torch.randn(1, 2, 3, 16), 3 * torch.randn(1, 2, 3, 16))
    assert_close(k.norm(dim=-1), torch.ones(1, 2, 3))
    assert_close(q.norm(dim=-1), torch.full((1, 2, 3), 1 / math.sqrt(16)))


# ---- The chunked form ----


@every_rule
@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
def test_chunked_equals_recurrent(rule, T):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        for with_state in (True, False):
            parts = inputs(rule, T, dtype=dtype, with_state=with_state)
            expected = recurrent(rule, *parts)
            assert_close(chunked(*parts), expected, tolerance)
    if T == 65:
        for chunk in (1, 2, 16, 128):
            assert_close(chunked(*parts, chunk=chunk), expected, 5e-6)


@given(
    rule=st.sampled_from([*RULES]),
    lengths=st.lists(st.integers(1, 21), min_size=1, max_size=4),
    chunk=st.sampled_from([1, 4, 16]),
    forget=st.sampled_from([0.0, 0.1, 8.0]),
    seed=st.integers(0, 99),
)
def test_pieces_equal_the_whole(rule, lengths, chunk, forget, seed):
    """A text in pieces with the state carried on, by either form in turns; the given state is left alone."""
    parts = inputs(rule, sum(lengths), B=1, D=5, Dv=3, seed=seed, forget=forget)
    *whole, S = parts
    expected, last = recurrent(rule, *parts)
    before, out, start = S.clone(), [], 0
    first = S
    for number, length in enumerate(lengths):
        piece = [None if t is None else t[..., start : start + length, :] for t in whole]
        form = recurrent if number % 2 else None
        o, S = form(rule, *piece, S) if form else chunked(*piece, S, chunk)
        out.append(o)
        start += length
    assert_close(torch.cat(out, dim=-2), expected, 1e-11)
    assert_close(S, last, 1e-11)
    assert torch.equal(first, before)


@pytest.mark.parametrize("rule", ["decay", "gla", "gated delta", "kda"])
@pytest.mark.parametrize("forget", [5.0, 60.0])
def test_decays_that_overflow_when_they_are_factored(rule, forget):
    parts = inputs(rule, 130, D=8, dtype=torch.float32, forget=0.0)
    parts[3] = torch.full_like(parts[3], -forget)
    parts[3][..., ::7, :] = -0.01  # and some that forget next to nothing
    G = parts[3][..., :64, :].cumsum(-2)
    factored = (parts[0][..., :64, :] * G.exp()) @ (parts[1][..., :64, :] * (-G).exp()).mT
    assert not factored.isfinite().all()  # what the textbook computes
    assert_close(chunked(*parts), recurrent(rule, *parts), 5e-6)


@pytest.mark.parametrize("rule", ["decay", "gla", "gated delta", "kda"])
def test_everything_forgotten(rule):
    """A decay of exactly 0, log_decay -inf: the state begins anew, and gradients are finite."""
    parts = inputs(rule, 20)
    parts[3][..., 7, :] = -math.inf
    out, S = chunked(*parts, chunk=16)
    assert_close((out, S), recurrent(rule, *parts), 1e-12)
    later = [None if t is None else t[..., 7:, :] for t in parts[:5]]
    assert_close(out[..., 7:, :], chunked(*later)[0], 1e-12)
    leaves = [t.clone().requires_grad_() for t in parts if t is not None]
    with_beta = len(leaves) == 6
    q, k, v, g, *rest = leaves
    chunked(q, k, v, g, rest[0] if with_beta else None, rest[-1], 16)[0].sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@every_rule
def test_gradients_equal(rule):
    grads = []
    for form in ("recurrent", "chunked"):
        parts = [None if t is None else t.requires_grad_() for t in inputs(rule, 21, B=1)]
        out, S = recurrent(rule, *parts) if form == "recurrent" else chunked(*parts, chunk=8)
        (out.sin().sum() + S.cos().sum()).backward()
        grads.append([t.grad for t in parts if t is not None])
    assert_close(*grads, 1e-11)


@every_rule
def test_later_tokens_change_nothing(rule):
    parts = inputs(rule, 70)
    out, _ = chunked(*parts)
    for part in parts[:5]:
        if part is not None:
            part[..., 50:, :] *= 0.5
    assert torch.equal(chunked(*parts)[0][..., :50, :], out[..., :50, :])


@every_rule
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_texts_of_several_lengths(rule, left):
    """A padded batch leaves each text the state that it has alone, where the pads are hidden."""
    lengths, T = (3, 9, 20), 20
    q, k, v, log_decay, beta, S = inputs(rule, T, B=3)
    columns = torch.arange(T)
    real = torch.stack([columns >= T - n if left else columns < n for n in lengths])  # [B, T]
    hidden = hide_padding(k, real, log_decay, beta)
    out, states = chunked(q, hidden[0], v, *hidden[1:], S, 8)
    for row in range(3):
        alone = [None if t is None else t[row : row + 1, :, real[row]] for t in (q, k, v, log_decay, beta)]
        expected, state = recurrent(rule, *alone, S[row : row + 1])
        assert_close(out[row : row + 1, :, real[row]], expected, 1e-12)
        assert_close(states[row : row + 1], state, 1e-12)
    if log_decay is not None:
        k, log_decay, beta = hidden  # a pad that decays is seen in the state
        changed = chunked(q, k, v, torch.where(real[:, None, :, None], log_decay, -1.0), beta, S, 8)[1]
        assert (changed[0] - states[0]).abs().max() > 0.1


def test_no_decay_is_the_ungated_rule():
    parts = inputs("gated delta", 40)
    parts[3] = torch.zeros_like(parts[3])
    assert_close(chunked(*parts), recurrent("delta", *parts), 1e-12)


def test_16_bits_keep_a_state_of_32():
    parts = inputs("gated delta", 40, dtype=torch.bfloat16)
    exact = [None if t is None else t.double() for t in parts]
    for out, S in (recurrent("gated delta", *parts), chunked(*parts)):
        assert out.dtype == S.dtype == torch.float32
        assert_close((out, S), recurrent("gated delta", *exact), 1e-5)


def test_scores_of_one_decay_and_of_equal_channels_agree():
    q, k, _, log_decay, *_ = inputs("decay", 32)
    assert_close(
        decayed_scores(q, k, log_decay), decayed_scores(q, k, log_decay.expand(-1, -1, -1, 16)), 1e-12
    )


def test_what_does_not_fit_is_refused():
    q, k, v, log_decay, beta, S = inputs("kda", 6)
    for chunk in (0, -4, 3, 48):
        with pytest.raises(ValueError, match="power of two"):
            chunked(q, k, v, chunk=chunk)
    for form in (chunked, lambda *parts: recurrent("linear", *parts)):
        with pytest.raises(ValueError, match="q, k, v must be"):
            form(q, k[..., :5, :], v)
        with pytest.raises(ValueError, match="T above 0"):
            form(q[..., :0, :], k[..., :0, :], v[..., :0, :])
        with pytest.raises(ValueError, match="does not fit"):
            form(q, k, v, log_decay, beta, S[:1])


# ---- The short convolution ----


def test_convolution_is_pytorchs_by_transposed_weights():
    x, weight = torch.randn(2, 9, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    expected = F.conv1d(F.pad(x.mT, (3, 0)), weight.T.unsqueeze(1), groups=5).mT
    assert_close(causal_conv(x, weight)[0], expected)
    taps = torch.arange(6.0).view(3, 1, 2)[:, 0]  # [W, channels]: each channel's taps are a column
    assert_close(
        causal_conv(torch.eye(3)[:1].T[None].expand(1, 3, 2), taps.flip(0))[0][0].T,
        torch.tensor([[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]),
    )


@pytest.mark.parametrize("pieces", [(5, 1, 1), (1,) * 7, (2, 5), (7,)])
def test_convolution_in_pieces_shorter_than_its_kernel(pieces):
    x, weight = torch.randn(2, 7, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    expected, last = causal_conv(x, weight)
    tail, out = None, []
    for piece in x.split(pieces, dim=1):
        kept = None if tail is None else tail.clone()
        o, new_tail = causal_conv(piece, weight, tail)
        assert kept is None or torch.equal(tail, kept)  # whoever shares it still has it
        tail, out = new_tail, [*out, o]
    assert_close(torch.cat(out, dim=1), expected)
    assert_close(tail, last)


# ---- The layer and the model ----

FULL = {"all linear": (), "hybrid": (1,)}
every_layout = pytest.mark.parametrize("full", FULL.values(), ids=FULL)


class Plain(MultiHeadAttention_Linear):
    """No gates, no convolution."""


@pytest.mark.parametrize("linear_class", [GatedDelta, Plain])
@every_layout
@given(prompt_len=st.integers(1, 13), seed=st.integers(0, 9))
def test_cached_decoding_equals_one_pass(linear_class, full, prompt_len, seed):
    model = tiny_model(GPTlite_Linear, linear_class=linear_class, full_layers=full, seed=seed)
    tokens = random_tokens(2, 13, seed)
    assert_close(cached_logits(model, tokens, prompt_len)[0], model(tokens)[0])


@every_layout
def test_pieces_past_the_context_equal_one_at_a_time(full):
    model, tokens = tiny_model(GPTlite_Linear, full_layers=full), random_tokens(1, 40)
    with torch.no_grad():
        whole, last = model(tokens)
        cache, out = None, []
        for piece in tokens.split([7, 2, 1, 20, 10], dim=1):
            logits, cache = model(piece, cache)
            out.append(logits)
    assert_close(torch.cat(out, dim=1), whole)
    assert cache.n_tokens == last.n_tokens == 40


@every_layout
def test_generates_what_one_pass_chooses(full):
    model, prompt = tiny_model(GPTlite_Linear, full_layers=full), random_tokens(2, 5)
    expected = generate(lambda tokens: model(tokens)[0], prompt, 9, 16)
    assert torch.equal(generate_kvcache(model, prompt, 9, 16), expected)


def test_all_layers_full_is_the_model_unchanged():
    state = tiny_model(GPTlite).state_dict()
    model = convert_to_linear(state, tiny_model(GPTlite_Linear, full_layers=(0, 1), seed=1))
    tokens = random_tokens(2, 9)
    assert_close(model(tokens)[0], tiny_model(GPTlite_KVCache)(tokens)[0], 1e-12)


@every_layout
def test_a_stored_state_serves_many_and_is_never_changed(full):
    """Two requests behind one prefix, token by token, then the first again; and a new text from zero."""
    model, prefix = tiny_model(GPTlite_Linear, full_layers=full), random_tokens(1, 5)
    with torch.no_grad():
        stored = model(prefix)[1]
        copies = [t.clone() for t in cache_tensors(stored)]
        answers = []
        for seed in (1, 2, 1):
            request, cache, rows = random_tokens(1, 3, seed), stored, []
            for token in request.split(1, dim=1):
                logits, cache = model(token, cache)
                rows.append(logits)
            expected = model(torch.cat([prefix, request], dim=1))[0][:, 5:]
            assert_close(torch.cat(rows, dim=1), expected)
            answers.append(expected)
        assert torch.equal(answers[0], answers[2]) and not torch.equal(answers[0], answers[1])
        assert all(map(torch.equal, copies, cache_tensors(stored))) and stored.n_tokens == 5
        assert torch.equal(model(prefix)[0], model(prefix)[0])


def test_conversion_copies_and_keeps_the_gates():
    state = tiny_model(GPTlite).state_dict()
    model, own = (tiny_model(GPTlite_Linear, full_layers=(1,), seed=1) for _ in range(2))
    converted = convert_to_linear(state, model).state_dict()
    assert set(converted) == set(own.state_dict()) and set(state) < set(converted)
    assert torch.equal(converted["blocks.0.mha.key_proj.weight"], state["blocks.0.mha.key_proj.weight"])
    name = "blocks.0.mha.beta_proj.weight"
    assert (
        torch.equal(converted[name], own.state_dict()[name])
        and "blocks.1.mha.beta_proj.weight" not in converted
    )
    with pytest.raises(ValueError, match="no head.weight"):
        convert_to_linear(state | {"head.weight": torch.zeros(1)}, model)


def test_a_fresh_layer_writes_half_and_its_convolution_does_nothing():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer, x = GatedDelta(32, 2, 16, 0.0), torch.randn(1, 6, 32)
    log_decay, beta = layer.gates(x)
    assert torch.equal(beta, torch.full((1, 2, 6, 1), 0.5))
    assert_close(log_decay.exp()[0, :, 0, 0], torch.tensor([math.exp(-0.001), math.exp(-1.6)]), 1e-5)
    qkv = torch.randn(1, 6, 96)
    assert_close(causal_conv(qkv, layer.conv_taps)[0], qkv)


@every_layout
def test_bytes_of_a_state_do_not_grow(full):
    model = tiny_model(GPTlite_Linear, full_layers=full)
    n_linear, size = 2 - len(full), 8
    for T in (3, 12):
        kv = len(full) * 2 * 2 * 16 * T
        expected = size * (n_linear * (2 * 16 * 16 + 3 * 3 * 32) + kv)
        assert state_bytes(model(random_tokens(3, T))[1], 3) == expected


def test_impossible_arguments():
    with pytest.raises(ValueError, match="full_layers names block 5"):
        tiny_model(GPTlite_Linear, full_layers=(0, 5))
    model = tiny_model(GPTlite_Linear)
    with pytest.raises(ValueError, match="no tokens"):
        model(random_tokens(1, 0))
    with pytest.raises(ValueError, match="max_seqlen"):
        model(random_tokens(1, 3), max_seqlen=17)
    with pytest.raises(ValueError, match="no other mask"):
        model.blocks[0].mha(torch.zeros(1, 2, 32).double(), causal_mask=False)
