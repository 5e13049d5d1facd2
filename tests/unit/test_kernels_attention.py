"""Attention to a long cache: the Triton twin agrees with torch's fused kernels, whatever is seen, and compiles."""

import math

import pytest
import torch
from comfyui_specar.kernels.attention import added, attend_few
from hypothesis import given, settings
from hypothesis import strategies as st

from .twins import compiled_everywhere, interpreted


def case(rows, key_heads, shared, count, slots, dim, dtype=torch.float32, seed=0, capacity=0):
    """q, k, v, mask with keys and values as slices of a longer cache, filled with NaN where nobody may look."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    q = noise(rows, count, key_heads * shared, dim).transpose(1, 2)
    cache = noise(rows, 2 * key_heads, slots + capacity, dim)
    cache[:, :, slots:] = math.nan
    seen = torch.rand((rows, 1, count, slots), generator=generator) < 0.5
    seen[..., int(0.6 * slots) :] = False
    seen[:, :, :, 0] = True
    return q, cache[:, :key_heads, :slots], cache[:, key_heads:, :slots], added(seen, dtype)


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.integers(1, 100),
       st.sampled_from([8, 16, 20, 48]), st.integers(0, 999))
def test_results_agree(rows, key_heads, shared, count, slots, dim, seed):
    given = case(rows, key_heads, shared, count, slots, dim, seed=seed, capacity=3)
    wanted, found = attend_few(*given), interpreted("attention.attend_few", *given)
    assert found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-5)


def test_results_agree_in_half_precision():
    """In fp16: of bf16 the interpreter multiplies the bits."""
    given = case(1, 2, 2, 3, 70, 16, torch.float16)
    wanted, found = attend_few(*given), interpreted("attention.attend_few", *given)
    assert found.dtype == torch.float16 and torch.allclose(found, wanted, atol=4e-3)


def test_more_queries_than_a_tile_holds():
    given = case(1, 1, 3, 40, 40, 16)
    assert torch.allclose(interpreted("attention.attend_few", *given), attend_few(*given), atol=1e-5)


@pytest.mark.parametrize("slots", [20, 90])
def test_a_query_that_sees_nothing_gets_zeros(slots):
    q, k, v, mask = case(2, 1, 1, 3, slots, 16)
    mask[1, :, 2] = -torch.inf
    found = interpreted("attention.attend_few", q, k, v, mask)
    assert torch.allclose(found, attend_few(q, k, v, mask), atol=1e-5) and not found[1, :, 2].any()


def test_rows_may_share_a_mask():
    q, k, v, mask = case(2, 1, 2, 2, 50, 16)
    given = q, k, v, mask[:1]
    assert torch.allclose(interpreted("attention.attend_few", *given), attend_few(*given), atol=1e-5)


def test_slots_that_nobody_sees_are_not_read():
    q, k, v, mask = case(1, 2, 1, 2, 80, 16)
    wanted = attend_few(q, k, v, mask)
    unseen = (mask == -torch.inf).all(2)[0, 0]
    assert unseen[48:].all()
    for x in (k, v):
        x[:, :, unseen] = math.nan
    assert torch.allclose(interpreted("attention.attend_few", q, k, v, mask), wanted, atol=1e-5)


@pytest.mark.parametrize(("rows", "key_heads", "shared", "count", "slots", "dim", "dtype"), [
    (2, 20, 1, 1, 640, 64, torch.bfloat16), (32, 20, 1, 17, 384, 80, torch.bfloat16),
    (2, 12, 4, 17, 384, 128, torch.float32),
])
def test_the_kernels_compile(rows, key_heads, shared, count, slots, dim, dtype):
    q = torch.empty(rows, count, key_heads * shared, dim, dtype=dtype).transpose(1, 2)
    k = torch.empty(1, key_heads, slots, dim, dtype=dtype).expand(rows, -1, -1, -1)
    kernels = compiled_everywhere("attention.attend_few", q, k, k, torch.empty(rows, 1, count, slots, dtype=dtype))
    assert {kernel.name for kernel in kernels} == ({"_part", "_combine"} if rows * key_heads < 512 else {"_part"})
