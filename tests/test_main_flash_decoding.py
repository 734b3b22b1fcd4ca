"""Flash decoding: any number of splits gives the unsplit result, alone and in the model."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, large_scores, random_tokens, run_script, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import inference_utils as utils
from gptlite_kvcache import GPTlite_KVCache, GPTlite_StaticKVCache, StaticKVCache
from main_flash_attention import flash_attention
from main_flash_decoding import (
    GPTlite_FlashDecoding,
    choose_n_splits,
    flash_decoding,
    fused_partial_attention,
    merge_attention,
    merge_parts,
    partial_attention,
    slots_of,
)
from main_kvcache import generate, generate_kvcache, generate_static


def draw(B, H, Sk, D, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, 1, D), (B, H, Sk, D), (B, H, Sk, D)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def test_names_and_signatures():
    assert " ".join(inspect.signature(flash_decoding).parameters) == "q K V n_splits attend"
    assert " ".join(inspect.signature(merge_attention).parameters) == "out_a lse_a out_b lse_b"
    same = inspect.signature(partial_attention)  # the twin by definition, and the fused one
    assert inspect.signature(fused_partial_attention) == same


@given(st.data())
def test_equals_pytorch(data):
    """From one split to more splits than keys, so with empty ones."""
    B, H = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 3)]))
    Sk = data.draw(st.integers(1, 40))
    n_splits = data.draw(st.integers(1, Sk + 3))
    q, K, V = draw(B, H, Sk, data.draw(st.sampled_from([1, 5, 16])), seed=data.draw(st.integers(0, 99)))
    assert_close(flash_decoding(q, K, V, n_splits), F.scaled_dot_product_attention(q, K, V))


@pytest.mark.parametrize("Sk", [1, 7, 12, 16])
def test_every_number_of_splits(Sk):
    q, K, V = draw(2, 2, Sk, 4)
    unsplit = flash_decoding(q, K, V, 1)
    for n_splits in range(2, Sk + 6):
        assert_close(flash_decoding(q, K, V, n_splits), unsplit)


def test_rows_of_a_longer_buffer():
    """As in a static cache: keys are the first rows of a window, and are not written to."""
    q, K, V = draw(2, 3, 32, 4)
    before = K.clone(), V.clone()
    for n in (1, 8, 13, 32):
        k, v = K[:, :, :n], V[:, :, :n]
        for n_splits in (1, 2, 4, 5):
            assert_close(flash_decoding(q, k, v, n_splits), F.scaled_dot_product_attention(q, k, v))
    assert torch.equal(K, before[0]) and torch.equal(V, before[1])


def test_splits_are_views_and_one_call():
    """As many pieces of work at once as sequences, heads and splits; nothing of a cache is copied."""
    q, K, V = draw(2, 3, 32, 4)
    for rows in (32, 28):  # of a window of 32
        calls = []

        def spy(q, k, v, calls=calls):
            calls.append((k.shape, k.data_ptr() == K.data_ptr(), v.data_ptr() == V.data_ptr()))
            return partial_attention(q, k, v)

        flash_decoding(q, K[:, :, :rows], V[:, :, :rows], 4, spy)
        assert calls == [((6, 4, rows // 4, 4), True, True)]


def test_the_unsplit_form_is_one_piece_of_work_a_head(monkeypatch):
    """A kernel that does not split keys, instead of a product of matrices that a library splits."""
    kernel, shapes = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, []

    def spy(q, K, V):
        shapes.append((q.shape, K.shape))
        return kernel(q, K, V)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", spy)
    monkeypatch.setattr(torch, "bmm", None)
    q, K, V = draw(2, 3, 32, 4)
    flash_decoding(q, K, V, 1)
    flash_decoding(q, K, V, 4)
    assert shapes == [((6, 1, 1, 4), (6, 1, 32, 4)), ((6, 4, 1, 4), (6, 4, 8, 4))]


def test_the_kernel_of_cuda_is_asked_for_the_log_sum_exp(monkeypatch):
    """With a stand-in, which pads the queries to 32 as the kernel does; other types and sizes go without."""

    class OnCuda(torch.Tensor):
        device = property(lambda self: torch.device("cuda"))

    calls = []

    def kernel(q, K, V, bias, compute_log_sumexp):
        assert q.is_contiguous() and bias is None and compute_log_sumexp is True
        calls.append(q.dtype)
        out, lse = partial_attention(q, K, V)
        return out, F.pad(lse, (0, 31), value=math.inf), None, None

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", kernel)
    for dtype, D in ((torch.float32, 8), (torch.bfloat16, 16), (torch.float64, 8), (torch.float32, 5)):
        q, K, V = (t.as_subclass(OnCuda) for t in draw(2, 3, 13, D, dtype=dtype))
        out, lse = fused_partial_attention(q, K, V)
        assert_close((out, lse), partial_attention(q, K, V))
    assert calls == [torch.float32, torch.bfloat16]


@given(st.sampled_from([1, 3]), st.integers(0, 9), st.integers(1, 9), st.integers(0, 99))
def test_the_fused_twin_equals_the_definition(B, S, D, seed):
    q, K, V = draw(B, 2, S, D, seed)
    assert_close(fused_partial_attention(q, K, V), partial_attention(q, K, V))
    for n_splits in (1, 2, 5):
        both = [
            flash_decoding(q, K, V, n_splits, attend)
            for attend in (fused_partial_attention, partial_attention)
        ]
        assert_close(*both)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attend", [partial_attention, fused_partial_attention])
def test_scores_larger_than_16_bits_hold(dtype, attend):
    for Q, K, V, expected in large_scores(dtype):
        for n_splits in (1, 2):
            assert_close(flash_decoding(Q[:, :, 1:], K, V, n_splits, attend), expected[:, :, 1:])


def test_no_keys():
    q, K, V = draw(1, 2, 4, 4)
    for n_splits in (1, 3):
        assert (flash_decoding(q, K[:, :, :0], V[:, :, :0], n_splits) == 0).all()


def test_large_scores():
    """One split holds scores far above the others'; nothing overflows and nothing is lost."""
    q, K, V = draw(1, 1, 12, 4, dtype=torch.float32)
    q, K = 30 * q, 30 * K
    K[:, :, 4:8] *= 5
    assert_close(flash_decoding(q, K, V, 3), F.scaled_dot_product_attention(q, K, V))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype):
    q, K, V = draw(1, 2, 100, 16, dtype=dtype)
    out = flash_decoding(q, K, V, 7)
    assert out.dtype == dtype
    tolerance = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    exact = F.scaled_dot_product_attention(q.double(), K.double(), V.double())
    assert_close(out.double(), exact, tolerance)


def test_more_splits_than_keys_take_no_memory():
    q, K, V = draw(1, 2, 256, 16)
    expected = F.scaled_dot_product_attention(q, K, V)
    few = utils.peak_memory_mb(lambda: flash_decoding(q, K, V, 256))
    for n_splits in (257, 2**18, 10**20):
        assert utils.peak_memory_mb(lambda n=n_splits: flash_decoding(q, K, V, n)) <= few
        assert_close(flash_decoding(q, K, V, n_splits), expected)


def test_bad_input():
    q, K, V = draw(1, 2, 4, 4)
    with pytest.raises(ValueError, match="at least 1 split"):
        flash_decoding(q, K, V, 0)
    with pytest.raises(ValueError, match="one query per sequence, not 4"):
        flash_decoding(K, K, V, 2)


# Merging


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 99), st.randoms())
def test_merging_parts_gives_the_whole(sizes, seed, random):
    """Any cut, empty parts included, merged in any order."""
    Sk = sum(sizes)
    Q, K, V = split_draw((2, 2, 3, 4), (2, 2, Sk, 4), (2, 2, Sk, 4), seed=seed)
    parts = [
        flash_attention(Q, k, v, False, 2, 2)
        for k, v in zip(K.split(sizes, dim=2), V.split(sizes, dim=2), strict=True)
    ]
    while len(parts) > 1:
        random.shuffle(parts)
        parts.append(merge_attention(*parts.pop(), *parts.pop()))
    assert_close(parts[0], flash_attention(Q, K, V, False))
    if Sk:
        assert_close(parts[0][0], F.scaled_dot_product_attention(Q, K, V))


def split_draw(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_merging_nothing():
    zeros, nothing = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -math.inf)
    out, lse = merge_attention(zeros, nothing, zeros, nothing)
    assert (out == 0).all() and (lse == -math.inf).all()
    some, some_lse = torch.ones(1, 1, 2, 3), torch.zeros(1, 1, 2)
    assert_close(merge_attention(zeros, nothing, some, some_lse), (some, some_lse))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_merging_empty_parts_has_finite_gradients(dtype):
    """None, one or both parts without keys, in one call."""
    lse_a = torch.tensor([[[-math.inf, -math.inf, 0.5, 1.0]]], requires_grad=True)
    lse_b = torch.tensor([[[-math.inf, 2.0, -math.inf, 3.0]]], requires_grad=True)
    out_a, out_b = (torch.full((1, 1, 4, 2), x, dtype=dtype, requires_grad=True) for x in (1.0, 2.0))
    out, lse = merge_attention(out_a, lse_a, out_b, lse_b)
    assert out.dtype == dtype and lse.dtype == torch.float32
    share = 1 / (1 + math.exp(2))
    assert_close(out[0, 0, :, 0].float(), torch.tensor([0.0, 2.0, 1.0, share + 2 * (1 - share)]), 1e-2)
    inputs = (out_a, lse_a, out_b, lse_b)
    gradients = torch.autograd.grad(out.float().sum() + lse[lse.isfinite()].sum(), inputs)
    assert all(g.isfinite().all() for g in gradients)
    assert all((g[0, 0, 0] == 0).all() for g in gradients)  # where both are empty nothing has an effect
    assert_close(gradients[1][0, 0], torch.tensor([0.0, 0.0, 1.0, share - 2 * share * (1 - share)]), 1e-2)


def test_many_parts_at_once_are_parts_one_by_one():
    lse = torch.tensor([0.3, -math.inf, 2.0, -1.0, -math.inf], dtype=torch.float64)
    out = split_draw((5, 3))[0]
    whole, whole_lse = merge_parts(out, lse)
    one, one_lse = out[0].view(1, 1, 1, 3), lse[0].view(1, 1, 1)
    for i in range(1, 5):
        one, one_lse = merge_attention(one, one_lse, out[i].view(1, 1, 1, 3), lse[i].view(1, 1, 1))
    assert_close((whole, whole_lse), (one[0, 0, 0], one_lse[0, 0, 0]))


# The rule


@pytest.mark.parametrize(
    ("batch_size", "context", "expected"),
    [(1, 256, 1), (1, 1024, 4), (1, 4096, 16), (1, 16384, 32), (1, 65536, 37)]
    + [(8, 4096, 16), (8, 65536, 5), (64, 65536, 1)],
)
def test_rule_on_132_multiprocessors(batch_size, context, expected):
    """FlashAttention-2's numbers for 6 heads of 64."""
    assert choose_n_splits(batch_size, 6, context, 264) == expected


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 10**6), st.integers(1, 300))
def test_rule_stays_in_bounds(batch_size, n_heads, context, n_slots):
    n = choose_n_splits(batch_size, n_heads, context, n_slots)
    assert 1 <= n <= min(128, n_slots, math.ceil(context / 256))
    if batch_size * n_heads >= n_slots:
        assert n == 1  # every core has a piece of work already


def test_slots():
    assert slots_of(torch.device("cpu")) == torch.get_num_threads()


# In the model


@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_the_model_gives_the_same_tokens(batch_size, T, n_splits, seed):
    prompt = random_tokens(batch_size, T, seed)
    model = tiny_model(GPTlite_FlashDecoding, n_splits=n_splits)
    cached = tiny_model(GPTlite_KVCache)
    tokens = generate_static(model, prompt, 16 - T, StaticKVCache(model, batch_size))
    assert torch.equal(tokens, generate(lambda x: cached(x)[0], prompt, 16 - T, 16))


@pytest.mark.parametrize("n_splits", [1, 3, 4])
def test_across_the_window(n_splits):
    prompt = random_tokens(2, 10)
    model, cached = tiny_model(GPTlite_FlashDecoding, n_splits=n_splits), tiny_model(GPTlite_KVCache)
    tokens = generate_static(model, prompt, 20, StaticKVCache(model, 2))
    assert torch.equal(tokens, generate_kvcache(cached, prompt, 20, 16))


def test_logits_and_cache_equal_the_static_models():
    tokens = random_tokens(2, 20)
    model, static = tiny_model(GPTlite_FlashDecoding, n_splits=3), tiny_model(GPTlite_StaticKVCache)
    cache, expected_cache = None, None
    for piece in (tokens[:, :6], *tokens[:, 6:].split(1, dim=1)):
        logits, cache = model(piece, cache)
        expected, expected_cache = static(piece, expected_cache)
        assert_close(logits, expected)
        assert_close((cache.k, cache.v), (expected_cache.k, expected_cache.v))
    assert cache.length == 20


def test_a_cache_is_used_again():
    model = tiny_model(GPTlite_FlashDecoding, n_splits=2)
    cache = StaticKVCache(model, 1)
    first = generate_static(model, random_tokens(1, 7), 6, cache)
    generate_static(model, random_tokens(1, 3, seed=1), 12, cache)
    assert torch.equal(generate_static(model, random_tokens(1, 7), 6, cache), first)


@pytest.mark.cuda
def test_cuda():
    q, K, V = (t.cuda() for t in draw(1, 6, 5000, 64, dtype=torch.float32))
    for n_splits in (1, 4, choose_n_splits(1, 6, 5000, slots_of(q.device))):
        assert_close(flash_decoding(q, K, V, n_splits), F.scaled_dot_product_attention(q, K, V), 1e-5)


# The script


def test_script(tmp_path):
    figure = tmp_path / "figure.png"
    run = run_script("main_flash_decoding.py", "--quick", "--json", "-", "--plot", figure)
    assert run.status == 0, run.stderr
    report = run.json
    assert report["checks"] and all(report["checks"].values())
    rows = report["rows"]
    assert [row["method"] for row in rows] == ["static cache", "unsplit", "split"]
    assert [row.get("splits") for row in rows] == [None, 1, 4] or rows[2]["splits"] > 1
    for key in ("kv_bytes_per_token", "forward_tokens", "valid_loss"):
        assert len({round(row[key], 4) for row in rows}) == 1
    assert all(row["same_output"] for row in rows)
    *tables, by_rule = report["sweeps"].values()
    assert len(tables) == 3 and all([row["keys"] for row in table] == [1024, 2048, 4096] for table in tables)
    assert by_rule[0] == {"keys": 1024, "batch 1": 4, "batch 8": 4}
    assert figure.stat().st_size > 1000 and len(report["why"]) == 4


def test_script_takes_a_number_of_splits():
    run = run_script("main_flash_decoding.py", "--n-splits", 0)
    assert run.status == 2 and "not a number from 1 up" in run.stderr
