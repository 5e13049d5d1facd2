"""Attention to a cache that new tokens join: the Triton kernel agrees with torch, whatever is seen, and is batch
invariant."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from comfyui_specar.kernels.attention import FEW, additive, attend, attend_cached, attend_few
from comfyui_specar.kernels.rotation import factors_of, rotate
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.closeness import assert_as_exact, fp64
from ..support.triton_kernels import interpreted

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def case(
    rows,
    key_heads,
    shared,
    count,
    slots,
    dim,
    dtype=torch.float32,
    seed=0,
    halves=False,
    common=False,
    norms=0,
    further=3,
):
    """Arguments of attend_few: the projection is part of a longer row, and the buffer one of several layers, with NaN
    in the ``further`` slots, where nobody looks. Everybody sees the first slot, nobody the last ones.

    common: one rotation for all rows; norms: 0 (none), 1 (a LayerNorm shared by all heads), 2 (one for each) or
    3 (a shared RMSNorm).
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    heads = key_heads * shared
    every = noise(rows, count, 1 + heads + 2 * key_heads, dim)[:, :, 1:]
    angles = 6 * torch.rand((1 if common else rows, count, dim // 2), generator=generator)
    sizes = [(n if norms == 2 else 1, dim) for n in (heads, heads, key_heads, key_heads)]
    parts = [noise(*size) for size in sizes] if norms else []
    each = (
        tuple((w, None, 1e-6) if norms == 3 else (w, b, 1e-5) for w, b in zip(parts[::2], parts[1::2], strict=True))
        or None
    )
    buffer = noise(3, rows, 2 * key_heads, slots + further, dim)[1]
    buffer[:, :, slots:] = math.nan
    where = torch.stack([torch.randperm(slots, generator=generator)[:count] for _ in range(rows)])
    seen = torch.rand((rows, 1, count, slots), generator=generator) < 0.5
    seen[..., int(0.6 * slots) :] = False
    seen[..., 0] = True
    return (
        every,
        factors_of(angles.cos(), angles.sin(), halves),
        halves,
        each,
        buffer,
        torch.arange(rows)[:, None],
        where,
        additive(seen, dtype),
        torch.zeros((rows, key_heads, FEW), dtype=torch.int32),
    )


def both(given, near=None):
    """What the kernel returns, after comparing it, and what it writes, with the reference: in fp32 both are as close to
    the result in fp64 as rounding allows, in half precision they are within ``near`` of each other."""
    every, buffer, rows, slots = given[0].clone(), given[4].clone(), *given[5:7]

    def reference():
        written = buffer.clone()
        return attend_few(*given[:4], written, *given[5:]), written[rows, :, slots]

    found = interpreted("attention.attend_few", *given)
    results = found, given[4][rows, :, slots]
    if near is None:
        assert_as_exact(reference, results)
    for ours, wanted in zip(results, reference(), strict=True):
        assert ours.shape == wanted.shape and ours.dtype == wanted.dtype
        assert near is None or torch.allclose(ours, wanted, rtol=near, atol=near)
    elsewhere = given[4].clone()
    elsewhere[rows, :, slots] = buffer[rows, :, slots]
    assert torch.equal(elsewhere.nan_to_num(), buffer.nan_to_num())
    assert torch.equal(given[0], every) and not given[8].any()
    return found


@settings(deadline=None, max_examples=15)
@given(
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(4, 300),
    st.sampled_from([8, 16, 20, 48]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 999),
)
def test_results_agree(rows, key_heads, shared, count, slots, dim, halves, common, norms, seed):
    both(case(rows, key_heads, shared, count, slots, dim, torch.float32, seed, halves, common, norms))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_agree_in_half_precision(dtype):
    """Within a few roundings: the interpreter cuts off what bf16 does not hold."""
    both(case(1, 2, 2, 3, 200, 16, dtype), near=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("slots", [20, 190])
def test_a_query_that_sees_nothing_gets_zeros(slots):
    given = case(2, 1, 1, 3, slots, 16)
    given[7][1, :, 2] = -torch.inf
    found = both(given)
    assert found[1, 1].any() and not found[1, 2].any()


def test_rows_may_share_a_mask():
    given = case(2, 1, 2, 2, 50, 16)
    both((*given[:7], given[7][:1], given[8]))


def test_slots_that_nobody_sees_are_not_read():
    given = case(1, 2, 1, 2, 180, 16)
    buffer, where, mask = given[4], given[6], given[7]
    where[0, 0] = 0
    wanted = interpreted("attention.attend_few", *given[:4], buffer.clone(), *given[5:])
    unseen = (mask == -torch.inf).all(2)[0, 0]
    assert unseen[108:].all()
    unseen[where] = False
    buffer[:, :, :180][:, :, unseen] = math.nan
    assert torch.equal(interpreted("attention.attend_few", *given), wanted)


def test_what_is_stored_past_the_slots_that_are_seen():
    """Tokens past the end of an image have the last slot of the cache."""
    given = case(2, 1, 2, 3, 150, 16)
    given[6][:, 1] = 152
    both(given)
    assert given[4][:, :, 152].isfinite().all() and given[4][:, :, 150:152].isnan().all()


@pytest.mark.parametrize("halves", [False, True])
def test_what_is_rotated_and_what_is_stored(halves):
    """Queries and keys turn by the angles, values do not; keys and values lie where the slots say, and nowhere else."""
    given = case(2, 2, 2, 3, 30, 8, torch.bfloat16, halves=halves)
    every, factors, _, _, buffer, _, slots, mask, _ = given
    before, turned = buffer.clone(), every[:, :, :6].clone()
    rotate(turned, factors, halves)
    found = attend_few(*given)
    for row in range(2):
        assert torch.equal(buffer[row, :2, slots[row]].transpose(0, 1), turned[row, :, 4:])
        assert torch.equal(buffer[row, 2:, slots[row]].transpose(0, 1), every[row, :, 6:])
        before[row, :, slots[row]] = buffer[row, :, slots[row]]
    assert torch.equal(before.view(torch.int16), buffer.view(torch.int16))
    k, v = buffer[:, :, :30].float().repeat_interleave(2, 1).chunk(2, 1)
    wanted = F.scaled_dot_product_attention(turned[:, :, :4].transpose(1, 2).float(), k, v, mask.float())
    assert torch.allclose(found.float(), wanted.transpose(1, 2), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("norms", [1, 2, 3])
def test_heads_are_normalised_before_they_turn(norms):
    every, factors, halves, weights, buffer, *rest = case(2, 2, 2, 3, 30, 8, halves=True, norms=norms)
    normed, other = every.clone(), buffer.clone()
    for heads, (weight, bias, _) in zip((slice(0, 4), slice(4, 6)), weights, strict=True):
        if norms == 3:
            normed[:, :, heads] = F.rms_norm(every[:, :, heads], (8,), eps=1e-6) * weight
        else:
            normed[:, :, heads] = F.layer_norm(every[:, :, heads], (8,), eps=1e-5) * weight + bias
    found = attend_few(every, factors, halves, weights, buffer, *rest)
    assert torch.equal(found, attend_few(normed, factors, halves, None, other, *rest))
    assert torch.equal(buffer.view(torch.int32), other.view(torch.int32))


def test_longer_prompts_are_for_torch(monkeypatch):
    called = []
    monkeypatch.setattr("comfyui_specar.kernels.dispatch.runs_triton", lambda device: called.append(device))
    given = case(1, 1, 2, FEW + 1, 200, 8)
    assert attend_cached(*given).shape == (1, FEW + 1, 2, 8) and not called


# Batch invariance


@pytest.fixture(
    scope="module",
    params=[
        (torch.bfloat16, 1, 64, 0),
        (torch.bfloat16, 2, 16, 2),
        (torch.float16, 3, 64, 1),
        (torch.float32, 1, 20, 0),
        (torch.bfloat16, 2, 16, 3),
    ],
    ids=str,
)
def window(request):
    """The arguments of a window of 32 tokens in two rows that see each other, and what the kernel gives for them.
    Their keys and values are in the cache now."""
    dtype, shared, dim, norms = request.param
    given = case(2, 2, shared, 32, 400, dim, dtype, norms=norms, further=0)
    return given, interpreted("attention.attend_few", *given)


def alone(given, row, token, slots=None):
    """The result [1, 1, H, d] of one token, with ``slots`` more slots that it does not see."""
    every, factors, halves, norms, buffer, rows, where, mask, arrived = (
        t[row : row + 1] if isinstance(t, torch.Tensor) else t for t in given
    )
    token = slice(token, token + 1)
    if slots:
        buffer, mask = F.pad(buffer, (0, 0, 0, slots), value=1.0), F.pad(mask, (0, slots), value=-math.inf)
    return interpreted(
        "attention.attend_few",
        every[:, token],
        factors[:, token],
        halves,
        norms,
        buffer,
        rows * 0,
        where[:, token],
        mask[:, :, token],
        arrived,
    )


def equal_bits(a, b):
    return torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype]))


@pytest.mark.parametrize(("row", "token"), [(0, 0), (0, 15), (1, 16), (1, 31)])
def test_a_query_does_not_depend_on_the_others(window, row, token):
    """To the last bit, alone as among 32 in two rows. Triton's interpreter multiplies; of the GPU's instruction see
    test_kernels_compiled.py."""
    given, together = window
    assert equal_bits(alone(given, row, token), together[row : row + 1, token : token + 1])


@pytest.mark.parametrize("slots", [8, 300])
def test_nor_on_the_size_of_the_cache(window, slots):
    given, together = window
    assert equal_bits(alone(given, 1, 7, slots), together[1:, 7:8])


def test_nor_on_which_part_is_the_last(window):
    """Programs of a GPU finish in any order."""
    given, together = window
    assert equal_bits(interpreted("attention.attend_few", *given, backwards=True), together)
    assert not given[8].any(), "the next launch finds nobody counted in"


# The function for longer prompts


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("masked", [False, True])
def test_query_heads_attend_to_the_key_head_they_share(heads, masked):
    """Causal without a mask. Against the scores written down, head by head."""
    generator = torch.Generator().manual_seed(heads)
    q, k, v = (torch.randn(3, n, 5, 8, generator=generator) for n in (heads, 2, 2))
    seen = torch.ones(5, 5).tril() > 0
    if masked:
        seen = (torch.rand(3, 1, 5, 5, generator=generator) < 0.6) | torch.eye(5, dtype=torch.bool)
    shared = torch.arange(heads) // (heads // 2)
    with fp64():
        scores = (q @ k[:, shared].mT / 8**0.5).masked_fill(~seen, -torch.inf)
        found = attend(q, k, v, additive(seen, torch.float64) if masked else None)
        wanted = scores.softmax(-1) @ v[:, shared]
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)
