"""Attention to a cache that new tokens join: the Triton kernels agree with torch, whatever is seen, and are batch
invariant."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from comfyui_specar.kernels.attention import FEW, NewTokens, additive, attend, attend_cached, attend_few
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
    uncommitted=0,
    tree=False,
    narrow=False,
):
    """Arguments of attend_few: the projection is part of a longer row, and the buffer one of several layers, with NaN
    in the last 32 slots, where nobody looks. Rows have any number of committed tokens.

    common: one rotation for all rows; norms: 0 (none), 1 (a LayerNorm shared by all heads), 2 (one for each) or
    3 (a shared RMSNorm); tree: tokens see some of the uncommitted ones; narrow: the cache is in int8.
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
    buffer, scales = noise(3, rows, 2 * key_heads, slots + 32, dim)[1], None
    if narrow:
        buffer = (60 * buffer).clamp(-127, 127).to(torch.int8)
        scales = noise(3, rows, 2 * key_heads, slots + 32, 1)[1].abs() / 60
    (buffer if scales is None else scales)[:, :, slots:] = math.nan
    fed = uncommitted + count
    seen = None
    if tree:
        seen = torch.rand((rows, count, fed), generator=generator) < 0.5
    lengths = torch.randint(slots - fed + 1, (rows,), generator=generator)
    new = NewTokens(lengths, seen, count, uncommitted, slots, slots + 32, dtype)
    return every, factors_of(angles.cos(), angles.sin(), halves), halves, each, buffer, scales, new


def stored(given):
    """Keys and values of the new tokens in the cache, and their scales."""
    *_, buffer, scales, new = given
    rows = torch.arange(len(buffer))[:, None]
    return tuple(cache[rows, :, new.slots] for cache in (buffer, scales) if cache is not None)


def copied(given):
    """The same with a cache of its own; nothing is known of its mask."""
    *others, buffer, scales, new = given
    return *others, buffer.clone(), None if scales is None else scales.clone(), replace(new)


def both(given, near=None):
    """What the kernels return, after comparing it, and what they write, with the reference: in fp32 both are as close
    to the result in fp64 as rounding allows, in half precision they are within ``near`` of each other."""
    every, before = given[0].clone(), copied(given)

    def reference():
        fresh = copied(before)
        return attend_few(*fresh), *stored(fresh)

    found = interpreted("attention.attend_few", *given)
    results = found, *stored(given)
    if near is None:
        assert_as_exact(reference, results)
    for ours, wanted in zip(results, reference(), strict=True):
        assert ours.shape == wanted.shape and ours.dtype == wanted.dtype
        assert near is None or torch.allclose(ours.float(), wanted.float(), rtol=near, atol=near)
    rows, slots = torch.arange(len(given[4]))[:, None], given[6].slots
    for ours, theirs in zip(given[4:6], before[4:6], strict=True):
        if ours is not None:
            elsewhere = ours.clone()
            elsewhere[rows, :, slots] = theirs[rows, :, slots]
            assert torch.equal(elsewhere.nan_to_num(), theirs.nan_to_num())
    assert torch.equal(given[0], every)
    return found


@settings(deadline=None, max_examples=20)
@given(
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from([8, 16, 20, 48]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 4),
    st.booleans(),
    st.integers(0, 999),
)
def test_results_agree(rows, key_heads, shared, count, blocks, dim, halves, common, norms, uncommitted, tree, seed):
    each = seed, halves, common, norms, uncommitted, tree
    both(case(rows, key_heads, shared, count, 32 * blocks, dim, torch.float32, *each))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_agree_in_half_precision(dtype):
    """Within a few roundings: the interpreter cuts off what bf16 does not hold."""
    both(case(1, 2, 2, 3, 224, 16, dtype), near=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_results_agree_in_int8(dtype, tree):
    """What is stored is the same to the last bit. Values that are all zero have a scale, too."""
    given = case(2, 2, 2, 3, 224, 16, dtype, tree=tree, uncommitted=2, narrow=True)
    given[1][..., 0::2], given[1][..., 1::2] = 1.0, 0.0  # nothing turns, which would be rounded twice
    given[0][0, 0, -1] = 0.0
    fresh = copied(given)
    found = interpreted("attention.attend_few", *given)
    wanted = attend_few(*fresh)
    for ours, theirs in zip(stored(given), stored(fresh), strict=True):
        assert torch.equal(ours, theirs)
    near = 8 * torch.finfo(dtype).eps
    assert torch.allclose(found, wanted, rtol=near, atol=near)


def test_what_is_not_finite_is_not_hidden_in_int8():
    given = case(1, 1, 1, 2, 32, 16, narrow=True)
    given[0][0, 1, 1, 3] = math.nan
    found = interpreted("attention.attend_few", *given)
    assert found[0, 0].isfinite().all() and found[0, 1].isnan().all()


@pytest.mark.parametrize("slots", [32, 192])
def test_a_query_that_sees_nothing_gets_zeros(slots):
    given = case(2, 1, 1, 3, slots, 16, tree=True)
    given[6].lengths[1], given[6].tree_mask[1, 2] = 0, False
    given[6].tree_mask[1, 1, 0] = True
    found = both(given)
    assert found[1, 1].any() and not found[1, 2].any()


def test_rows_may_share_a_tree():
    given = case(2, 1, 2, 3, 64, 16, tree=True)
    both((*given[:6], replace(given[6], tree_mask=given[6].tree_mask[:1].expand(2, -1, -1))))


def test_parts_and_blocks_past_the_last_token_are_not_read():
    given = case(2, 2, 1, 2, 480, 16)
    given[6].lengths.copy_(torch.tensor([61, 130]))  # blocks end at 64 and 160
    fresh = copied(given)
    wanted = interpreted("attention.attend_few", *fresh)
    given[4][0, :, 64:], given[4][1, :, 160:] = math.nan, math.nan
    assert torch.equal(interpreted("attention.attend_few", *given), wanted)


def test_what_is_stored_past_the_slots_that_are_read():
    """A token past the end of an image has the last slot of the cache."""
    given = case(2, 1, 2, 1, 160, 16)
    given[4][:, :, 160:] = 0.0
    given[6].lengths[:] = 195  # of 192
    found = interpreted("attention.attend_few", *given)
    assert given[4][:, :, 191].any(-1).all() and not given[4][:, :, 160:191].any() and found.isfinite().all()


@pytest.mark.parametrize("halves", [False, True])
def test_what_is_rotated_and_what_is_stored(halves):
    """Queries and keys turn by the angles, values do not; keys and values lie where the slots say, and nowhere else."""
    given = case(2, 2, 2, 3, 30, 8, torch.bfloat16, halves=halves)
    every, factors, _, _, buffer, _, new = given
    before, turned = buffer.clone(), every[:, :, :6].clone()
    rotate(turned, factors, halves)
    found = attend_few(*given)
    for row, slots in enumerate(new.slots):
        assert torch.equal(buffer[row, :2, slots].transpose(0, 1), turned[row, :, 4:])
        assert torch.equal(buffer[row, 2:, slots].transpose(0, 1), every[row, :, 6:])
        before[row, :, slots] = buffer[row, :, slots]
    assert torch.equal(before.view(torch.int16), buffer.view(torch.int16))
    k, v = buffer[:, :, :30].float().repeat_interleave(2, 1).chunk(2, 1)
    wanted = F.scaled_dot_product_attention(turned[:, :, :4].transpose(1, 2).float(), k, v, new.mask.float())
    assert torch.allclose(found.float(), wanted.transpose(1, 2), rtol=0.02, atol=0.02)


def test_longer_prompts_are_for_torch(monkeypatch):
    called = []
    monkeypatch.setattr("comfyui_specar.device.dispatch.runs_triton", lambda device: called.append(device))
    given = case(1, 1, 2, FEW + 1, 200, 8)
    assert attend_cached(*given).shape == (1, FEW + 1, 2, 8) and not called


# What tokens see


@st.composite
def openings(draw):
    """New tokens of chains and trees, some of them past the capacity, trees shared by rows or not."""
    rows, capacity = draw(st.integers(1, 3)), draw(st.sampled_from([12, 300]))
    count, uncommitted, reach = draw(st.integers(1, 5)), draw(st.integers(0, 4)), draw(st.integers(9, capacity))
    lengths = torch.tensor(draw(st.lists(st.integers(0, capacity), min_size=rows, max_size=rows)))
    tree = None
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        tree = torch.rand((draw(st.sampled_from([1, rows])), count, uncommitted + count), generator=generator) < 0.5
        tree = tree.expand(rows, -1, -1)
    return NewTokens(lengths, tree, count, uncommitted, reach, capacity, draw(st.sampled_from(list(BITS))))


@settings(max_examples=20)
@given(openings())
def test_slots_and_who_sees_whom(new):
    assert new.mask.dtype == new.dtype and new.mask is new.mask, "made once for all layers"
    for row, length in enumerate(new.lengths.tolist()):
        for i in range(new.count):
            assert new.slots[row, i] == min(length + new.uncommitted + i, new.capacity - 1)
            chain = [j <= new.uncommitted + i for j in range(new.uncommitted + new.count)]
            fed = chain if new.tree_mask is None else new.tree_mask[row, i].tolist()
            seen = [*[True] * length, *fed, *[False] * new.reach][: new.reach]
            assert (new.mask[row, 0, i] == 0).tolist() == seen


# Batch invariance


@pytest.fixture(
    scope="module",
    params=[
        (torch.bfloat16, 1, 64, 0, False),
        (torch.bfloat16, 2, 16, 2, False),
        (torch.float16, 3, 64, 1, False),
        (torch.float32, 1, 20, 0, False),
        (torch.float16, 2, 16, 3, True),
    ],
    ids=str,
)
def window(request):
    """The arguments of a window of 32 tokens in two rows after 60 and 239 others, and what the kernels give for them.
    Their keys and values are in the cache now."""
    dtype, shared, dim, norms, narrow = request.param
    given = case(2, 2, shared, 32, 384, dim, dtype, norms=norms, narrow=narrow)
    given[6].lengths.copy_(torch.tensor([60, 239]))
    return given, interpreted("attention.attend_few", *given)


def alone(given, row, token, committed, tree=False, slots=0):
    """The result [1, 1, H, d] of one token of the window after ``committed`` more tokens of it, which are in the cache:
    of the others before it are some uncommitted. tree: by a mask. slots: more of them, which it does not see."""
    every, factors, halves, norms, buffer, scales, new = given
    one = slice(row, row + 1)
    every, factors = every[one, token : token + 1], factors[one, token : token + 1]
    buffer, scales = (None if cache is None else cache[one] for cache in (buffer, scales))
    if slots:
        buffer, scales = (None if cache is None else F.pad(cache, (0, 0, 0, slots)) for cache in (buffer, scales))
    uncommitted = token - committed
    new = replace(
        new,
        lengths=new.lengths[one] + committed,
        tree_mask=torch.ones(1, 1, uncommitted + 1, dtype=torch.bool) if tree else None,
        count=1,
        uncommitted=uncommitted,
        reach=new.reach + slots,
        capacity=new.capacity + slots,
    )
    return interpreted("attention.attend_few", every, factors, halves, norms, buffer, scales, new)


def equal_bits(a, b):
    return torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype]))


@pytest.mark.parametrize(("row", "token"), [(0, 0), (0, 15), (1, 16), (1, 31)])
def test_a_query_does_not_depend_on_the_others(window, row, token):
    """To the last bit, alone as among 32 in two rows: whether the tokens before it are committed, so that their blocks
    have no mask, or not, in a chain or a tree. Triton's interpreter multiplies; of the GPU's instruction see
    test_kernels_compiled.py."""
    given, together = window
    for committed, tree in {(token, False), (token, True), (token // 2, False), (0, True)}:
        found = alone(given, row, token, committed, tree)
        assert equal_bits(found, together[row : row + 1, token : token + 1])


@pytest.mark.parametrize("slots", [32, 320])
def test_nor_on_the_size_of_the_cache(window, slots):
    given, together = window
    assert equal_bits(alone(given, 1, 7, 7, slots=slots), together[1:, 7:8])


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
