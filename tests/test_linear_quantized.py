"""linear_quantized.py: packing is exact, and each fast form against the dense product and torch's kernels."""

import copy

import pytest
import torch
from helpers import assert_close
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import linear_quantized
from linear_quantized import (
    LinearInt4Fast,
    LinearInt4Kernel,
    LinearInt8Fast,
    fast_form,
    pack_int4,
    unpack_int4,
)
from main_quantization import LinearInt4, LinearInt8


def linear(n_out, n_in, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(n_in, n_out).to(dtype).requires_grad_(False)
    for p in layer.parameters():
        p.copy_(torch.randn(p.shape, generator=generator))
    return layer


def rows(n, n_in, dtype=torch.float32):
    return torch.randn(n, n_in, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("n", [1, 3, 8, 9])
@pytest.mark.parametrize("value", range(-8, 8))
def test_every_code_in_every_place_comes_back(n, value):
    """Case N-40: no two's complement read as an offset, no borrow, no clipped sign, odd widths too."""
    for place in range(n):
        codes = torch.full((2, n), -8 if value > 0 else 7, dtype=torch.int8)
        codes[0, place] = value
        packed = pack_int4(codes)
        assert packed.dtype == torch.uint8 and packed.shape == (2, -(-n // 2))
        assert torch.equal(torch.cat(unpack_int4(packed), dim=-1)[:, :n], codes)


@given(st.lists(st.integers(-8, 7), max_size=12))
def test_codes_are_neighbours_behind_each_other(codes):
    codes = torch.tensor(codes, dtype=torch.int8)
    low, high = unpack_int4(pack_int4(codes))
    half = -(-len(codes) // 2)
    assert torch.equal(low, codes[:half]) and torch.equal(high[: len(codes) - half], codes[half:])


@pytest.mark.parametrize("n_in", [16, 48, 15, 100, 104, 120, 200])
@pytest.mark.parametrize("n_rows", [1, 3])
def test_int8_of_every_width(n_in, n_rows):
    """Widths that are no multiple of 16 would end the process in torch's kernel: they never get there."""
    naive = LinearInt8(linear(7, n_in))
    x, expected = rows(n_rows, n_in), naive(rows(n_rows, n_in))
    exact = n_in % 16 != 0
    assert_close(LinearInt8Fast(naive)(x), expected, 1e-5 if exact else 3e-2)
    assert LinearInt8Fast(naive)(x[:, None]).shape == (n_rows, 1, 7)
    assert LinearInt8Fast(naive)(x[:0]).shape == (0, 7)


def test_int8_kernel_gets_16_bits_and_integers(monkeypatch):
    """With float32 inputs it takes a hundred times as long, and says nothing."""
    seen = []
    kernel = torch._weight_int8pack_mm
    monkeypatch.setattr(
        torch, "_weight_int8pack_mm", lambda *args: seen.append([t.dtype for t in args]) or kernel(*args)
    )
    naive = LinearInt8(linear(8, 32)).float()  # its scales are float32 now
    x = rows(2, 32)
    assert_close(LinearInt8Fast(naive)(x), naive(x), 3e-2)
    assert seen == [[torch.bfloat16, torch.int8, torch.bfloat16]]


def test_int8_without_the_kernel_is_exact(monkeypatch):
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    naive = LinearInt8(linear(8, 32, dtype=torch.float64))
    for n_rows in (1, 3):
        x = rows(n_rows, 32, torch.float64)
        assert_close(LinearInt8Fast(naive)(x), naive(x), 1e-12)


@given(
    st.integers(1, 5), st.sampled_from([2, 6, 32]), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9)
)
def test_int4_sums_of_groups_are_the_dense_product(n_out, group, n_groups, n_rows, seed):
    naive = LinearInt4(linear(n_out, group * n_groups, seed, torch.float64), group)
    x = rows(n_rows, group * n_groups, torch.float64)
    assert_close(LinearInt4Fast(naive)(x), naive(x), 1e-5)  # which unpacks to float32
    assert_close(naive(x), x @ naive.dense().double().T + naive.bias, 1e-12)


def test_int4_of_an_odd_group():
    naive = LinearInt4(linear(3, 15), 5)
    for n_rows in (1, 2):
        assert_close(LinearInt4Fast(naive)(rows(n_rows, 15)), naive(rows(n_rows, 15)))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("n_rows", [1, 5])
def test_int4_kernel(group, n_rows):
    """torch's kernel reads the very weights that the naive form multiplies with."""
    naive = LinearInt4(linear(32, 256), group)
    x = rows(n_rows, 256).bfloat16()
    kernel = LinearInt4Kernel(naive)
    assert kernel.weight.numel() == naive.weight.numel() and kernel.weight.dtype == torch.uint8
    expected = x.double() @ naive.dense().double().T + naive.bias
    assert_close(kernel(x), expected, 3e-2)
    assert_close(kernel.float()(x.float()[:, None]), expected[:, None], 3e-2)
    ones = torch.eye(256)[:n_rows]  # one weight each: nothing but its own rounding to 16 bits
    assert_close(kernel(ones) - naive.bias, naive.dense()[:, :n_rows].T, 1e-2)


def test_which_form_serves_how_many_rows(monkeypatch):
    int8, int4 = LinearInt8(linear(16, 64)), LinearInt4(linear(16, 64), 32)
    assert type(fast_form(int8, 1)) is type(fast_form(int8, 8)) is LinearInt8Fast
    assert type(fast_form(int4, 1)) is LinearInt4Fast and type(fast_form(int4, 8)) is LinearInt4Kernel
    for other in (LinearInt4(linear(16, 64), 16), LinearInt4(linear(15, 64), 32)):  # no kernel for these
        assert type(fast_form(other, 8)) is LinearInt4Fast
        assert_close(fast_form(other, 8)(rows(8, 64)), other(rows(8, 64)))
    monkeypatch.delattr(torch, "_weight_int4pack_mm_for_cpu")
    assert type(linear_quantized.fast_form(int4, 8)) is LinearInt4Fast


def test_a_fast_form_shares_what_it_reads():
    naive = LinearInt4(linear(16, 64), 32)
    fast = fast_form(copy.deepcopy(naive), 1)
    assert len(list(fast.parameters())) == len(list(naive.parameters())) == 4
