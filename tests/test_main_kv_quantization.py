"""The quantised cache: rounding within half a step, packing to the bit, any pieces the same cache."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, large_scores, quick_report, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite import GPTlite
from gptlite_bounded import GPTlite_Bounded
from inference_agreement import closer
from inference_utils import cache_tensors
from main_kv_quantization import (
    QuantizedCache,
    dequantize_groups,
    enlarge_key_channels,
    pack,
    quantize,
    quantize_groups,
    unpack,
)


def draw(*shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def value_of(packed):
    return packed.codes.double() * packed.scale.double() + packed.zero.double()


# Rounding and packing


@given(
    st.sampled_from([2, 4, 8]),
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([-1, -2]),
    st.floats(1e-3, 1e3),
    st.floats(-300, 300),
    st.integers(0, 99),
)
def test_an_error_is_at_most_half_a_step(n_bits, dtype, dim, size, offset, seed):
    """Whatever the offset: the zero point is rounded to 16 bits, and no number may fall below it."""
    (x,) = draw((3, 5, 7), seed=seed)
    x = (x * size + offset).to(dtype)
    packed = quantize(x, n_bits, dim)
    assert packed.codes.dtype == torch.uint8 and packed.codes.max() <= 2**n_bits - 1
    assert packed.scale.dtype == packed.zero.dtype and packed.scale.element_size() == 2
    assert packed.scale.shape[dim] == 1 and packed.scale.numel() == 105 // x.shape[dim]
    error = (value_of(packed) - x.double()).abs()
    assert (error <= packed.scale.double() * 0.5001 + 1e-6).all()


@pytest.mark.parametrize("n_bits", [2, 4, 8])
def test_a_scale_of_nothing_and_of_one_outlier(n_bits):
    """N-39: rows of zeros, of numbers that 16 bits turn into zeros, of equal numbers; one of 10,000."""
    rows = torch.zeros(5, 8)
    rows[1], rows[2], rows[3] = 1e-9, 0.25, -7.0
    rows[4, 3] = 1e4
    for x in (rows, rows.half(), rows.double()):
        packed = quantize(x, n_bits, -1)
        value = value_of(packed)
        assert not value.isnan().any() and torch.equal(value[0], torch.zeros(8).double())
        assert (value[:4] - x[:4].double()).abs().max() <= 0.008
        assert ((value - x.double()).abs() <= packed.scale.double() / 2 * 1.001 + 1e-4).all()


def test_rounding_by_hand():
    """0, 1, 2, 3 in 2 bits are themselves; 10 in 2 bits of 0 to 30 is one step, 14 as well."""
    assert_close(value_of(quantize(torch.arange(4.0), 2, 0)), torch.arange(4.0), 0.005)
    packed = quantize(torch.tensor([0.0, 10.0, 14.0, 30.0]), 2, 0)
    assert packed.codes.tolist() == [0, 1, 1, 3]


@pytest.mark.parametrize("D", [1, 3, 8, 9, 64])
@pytest.mark.parametrize("n_bits", [2, 4, 8])
def test_packing_is_a_round_trip(n_bits, D):
    """N-40: every code at every place, odd widths too; as many bytes as the bits need."""
    for code in range(0, 2**n_bits, 1 if n_bits < 8 else 17):
        codes = torch.arange(D, dtype=torch.int64).mul(5).add(code).remainder(2**n_bits).to(torch.uint8)
        packed = pack(codes.expand(2, D), n_bits)
        assert packed.dtype == torch.uint8 and packed.shape == (2, -(-D * n_bits // 8))
        assert torch.equal(unpack(packed, n_bits, D), codes.expand(2, D))


def test_where_a_code_stands_in_a_byte():
    assert pack(torch.tensor([1, 2, 3, 15], dtype=torch.uint8), 4).tolist() == [1 + 16 * 3, 2 + 16 * 15]
    assert pack(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2).tolist() == [1 + 4 * 2 + 16 * 3]


def test_keys_by_channel_and_by_token():
    """A channel 50 times larger costs the others nothing by channel, nearly everything by token."""
    (K,) = draw((2, 3, 8, 16))
    K[..., 5] *= 50
    others = [i for i in range(16) if i != 5]
    errors = {}
    for by in ("channel", "token"):
        packed = quantize_groups(K, 2, 4, by)
        assert packed.codes.shape == (2, 3, 2, 4, 4)
        assert packed.scale.shape == {"channel": (2, 3, 2, 1, 16), "token": (2, 3, 2, 4, 1)}[by]
        errors[by] = (dequantize_groups(packed, 2, K) - K)[..., others].abs().mean()
    assert errors["token"] > 5 * errors["channel"]


# The cache


def by_definition(Q, K, V, bits, group, residual, keys_by):
    """Each query by itself: what its cache has packed is rounded, group by group, and the rest is not."""
    out = []
    for t in range(Q.shape[-2]):
        n = t + 1
        n_packed = max(n - residual, 0) // group * group
        k, v = K[:, :, :n].clone(), V[:, :, :n].clone()
        for start in range(0, n_packed, group):
            part = slice(start, start + group)
            for x, n_bits, by in ((k, bits[0], keys_by), (v, bits[1], "token")):
                packed = quantize(x[:, :, part], n_bits, {"channel": 2, "token": 3}[by])
                x[:, :, part] = value_of(packed)
        G = K.shape[1]
        k, v = (x.repeat_interleave(Q.shape[1] // G, dim=1) for x in (k, v))
        out.append(F.scaled_dot_product_attention(Q[:, :, t : t + 1], k, v))
    return torch.cat(out, dim=2)


@given(st.data())
def test_any_pieces_leave_the_same_cache(data):
    """N-44: to the bit, and what a query gets is what its own step's cache gives."""
    group, residual = data.draw(st.integers(2, 5)), data.draw(st.integers(0, 6))
    bits = data.draw(st.tuples(*[st.sampled_from([2, 4, 8])] * 2))
    keys_by = data.draw(st.sampled_from(["channel", "token"]))
    Q, K, V = draw((2, 4, 17, 6), (2, 2, 17, 6), (2, 2, 17, 6), seed=data.draw(st.integers(0, 99)))
    cuts = sorted({0, 17, *data.draw(st.lists(st.integers(1, 16)))})
    settings_ = {"group": group, "residual": residual, "keys_by": keys_by}
    whole, pieces = QuantizedCache(*bits, **settings_), QuantizedCache(*bits, **settings_)
    expected = by_definition(Q, K, V, bits, group, residual, keys_by)
    assert_close(whole.attend(Q, K, V), expected)
    parts = [pieces.attend(*(t[:, :, a:b] for t in (Q, K, V))) for a, b in itertools.pairwise(cuts)]
    assert_close(torch.cat(parts, dim=2), expected)
    tensors = [cache_tensors([cache.k, cache.v]) for cache in (whole, pieces)]
    assert len(tensors[0]) == len(tensors[1]) and all(map(torch.equal, *tensors))


def test_the_window_ages():
    """N-44: group 4, window 4, a prompt of 6 and 10 steps: 4 to 7 tokens wait, the rest in groups of 4."""
    K, V = draw((1, 1, 16, 4), (1, 1, 16, 4))
    cache = QuantizedCache(2, group=4, residual=4)
    cache.attend(K[:, :, :6], K[:, :, :6], V[:, :, :6])
    for n in range(6, 17):
        waiting = cache.new_k.shape[2]
        n_groups = 0 if cache.packed_k is None else cache.packed_k.codes.shape[2]
        assert waiting == cache.new_v.shape[2] and 4 <= waiting <= 7 and waiting + 4 * n_groups == n
        if n < 16:
            cache.attend(*(t[:, :, n : n + 1] for t in (K, K, V)))
    assert torch.equal(cache.new_k, K[:, :, 12:])  # as they were
    assert not torch.equal(dequantize_groups(cache.packed_k, 2, K), K[:, :, :12])


@pytest.mark.parametrize("n_bits", [2, 4, 8])
def test_bytes_are_those_of_all_tensors(n_bits):
    """By hand, for 96 tokens of which 64 are packed: codes, scales, zero points, the window."""
    B, G, D = 2, 3, 16
    K, V = draw((B, G, 96, D), (B, G, 96, D), dtype=torch.float32)
    cache = QuantizedCache(n_bits, group=32, residual=32)
    cache.attend(K, K, V)
    keys = 64 * D * n_bits // 8 + 2 * D * 2 * 2 + 32 * D * 4
    values = 64 * D * n_bits // 8 + 64 * 2 * 2 + 32 * D * 4
    for tensors, expected in ((cache.k, keys), (cache.v, values)):
        assert sum(t.untyped_storage().nbytes() for t in tensors) == B * G * expected
        assert sum(t.nbytes for t in tensors) == B * G * expected  # no view keeps more alive


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_larger_than_16_bits_hold(dtype):
    for Q, K, V, expected in large_scores(dtype):
        for residual in (0, 2):
            out = QuantizedCache(8, group=2, residual=residual).attend(Q, K, V)
            assert_close(out[:, :, 1:], expected[:, :, 1:], 0.05)


def test_a_cache_is_as_wide_as_its_type():
    (x,) = draw((1, 1, 8, 4), dtype=torch.bfloat16)
    cache = QuantizedCache(4, group=2, residual=2)
    assert cache.attend(x, x, x).dtype == torch.bfloat16
    assert {t.dtype for t in cache.k} == {torch.uint8, torch.bfloat16}


@pytest.mark.parametrize("settings_", [{"key_bits": 3}, {"value_bits": 16}, {"group": 1}, {"residual": -1}])
def test_bad_arguments(settings_):
    with pytest.raises(ValueError, match="bits: a number|groups of"):
        QuantizedCache(**{"key_bits": 4} | settings_)


# In the model


def model_with(*caches, **kwargs):
    """A tiny model whose layers take these caches in turn."""
    makes = itertools.cycle(caches)
    return tiny_model(GPTlite_Bounded, make_cache=lambda: next(makes)(), **kwargs)


def test_a_window_of_the_whole_text_is_the_model_unchanged():
    tokens = random_tokens(2, 16)
    model = model_with(lambda: QuantizedCache(2, group=2, residual=16))
    assert_close(utils.cached_logits(model, tokens, 5)[0], tiny_model(GPTlite)(tokens))


@pytest.mark.parametrize("n", [1, 5, 9, 15])
def test_every_split_of_a_text_gives_one_pass(n):
    """Batch 2, and a layer that is left out (N-45): layer 1 packs nothing."""
    kinds = lambda: QuantizedCache(2, group=4, residual=3), lambda: QuantizedCache(2, group=2, residual=16)
    tokens = random_tokens(2, 16)
    whole, cache = model_with(*kinds)(tokens)
    pieces, again = utils.cached_logits(model_with(*kinds), tokens, n)
    assert_close(pieces, whole)
    assert cache.layers[1].n_packed == 0 < cache.layers[0].n_packed == again.layers[0].n_packed
    exact = tiny_model(GPTlite)(tokens)
    assert (whole - exact).abs().max() > 1e-3  # it is quantised
    alone = model_with(*kinds)(tokens[1:])[0]
    assert_close(whole[1:], alone)


def test_more_bits_are_closer():
    tokens, exact = random_tokens(4, 16), tiny_model(GPTlite)(random_tokens(4, 16))
    errors = [
        (model_with(lambda b=b: QuantizedCache(b, group=4, residual=0))(tokens)[0] - exact).abs().mean()
        for b in (2, 4, 8)
    ]
    assert errors[0] > 4 * errors[1] and errors[1] > 4 * errors[2] > 0


def test_larger_channels_are_the_same_function():
    """And what they cost keys by token: errors of logits, not only of keys (N-45)."""
    tokens, model = random_tokens(4, 16), tiny_model(GPTlite)
    exact = model(tokens)
    larger = enlarge_key_channels(tiny_model(GPTlite), 50.0)
    assert_close(larger(tokens), exact)
    ratio = larger.blocks[0].mha.key_proj.weight / model.blocks[0].mha.key_proj.weight
    assert_close(ratio[:, 0], torch.tensor([50.0, 50.0] + [1.0] * 14).double().repeat(2))
    errors = {}
    for by in ("channel", "token"):
        cached = model_with(lambda by=by: QuantizedCache(4, group=4, residual=0, keys_by=by))
        cached.load_state_dict(larger.state_dict())
        errors[by] = (cached(tokens)[0] - exact).abs().mean()
    assert errors["token"] > 3 * errors["channel"]


# The script


@pytest.mark.slow
def test_script(distilled_checkpoint, tmp_path):
    report = quick_report("main_kv_quantization.py", tmp_path, distilled_checkpoint)  # --quick
    assert len(report["checks"]) == 4 and len(report["why"]) == 4
    dense, kivi, by_token, bare = report["rows"]
    assert dense["baseline"] and dense["number_bits"] == 32 and "kl" not in dense
    assert kivi["approximate"] and kivi["tpot_ms"] > 0 and by_token["tpot_ms"] is None
    # 224 of 256 tokens in 2 bits, scales and zero points of 16 bits, a window of 32 bits
    keys, values = 224 * 64 * 2 + 7 * 64 * 32 + 32 * 64 * 32, 224 * 64 * 2 + 224 * 32 + 32 * 64 * 32
    assert kivi["number_bits"] == (keys + values) / (2 * 256 * 64)
    assert kivi["number_bits"] / 32 == kivi["kv_bytes_per_token"] / dense["kv_bytes_per_token"]
    assert bare["number_bits"] < 3 < by_token["number_bits"] < kivi["number_bits"]
    by_bits, larger = report["sweeps"].values()
    assert [line["bits"] for line in by_bits] == [2] and by_bits[0]["KIVI"] == kivi["kl"] > 0
    assert [line["factor"] for line in larger] == [1, 8, 32]
    assert larger[-1]["by token"] > 3 * larger[-1]["by channel"]  # by construction, whatever the weights are


def test_script_refuses_other_numbers_of_bits(distilled_checkpoint):
    run = run_script("main_kv_quantization.py", "--quick", "--group", "1", checkpoint=distilled_checkpoint)
    assert run.status == 2 and run.stderr.startswith("main_kv_quantization.py: groups of 1 tokens")


def test_words_follow_the_figures():
    one, other = {"method": "a", "kl": 0.1}, {"method": "b", "kl": 0.2}
    assert "2.00 times lower" in closer(one, other) and "2.00 times higher" in closer(other, one)
    assert "no KL divergence to compare" in closer({"method": "dense"}, one)
