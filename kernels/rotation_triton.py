"""Rotating queries and keys and storing keys and values in one launch (twin of rotation.py)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def rotate_and_keep(every: Tensor, factors: Tensor, halves: bool, buffer: Tensor, rows: Tensor, slots: Tensor) -> None:
    """See rotation.rotate_and_keep. The last dimension of ``every``, ``factors`` and ``buffer`` must be dense."""
    batch, count, heads, dim = every.shape
    _rotate_and_keep[(batch * count, heads)](
        every, *every.stride()[:3], factors, factors.stride(0) if len(factors) > 1 else 0, factors.stride(1), buffer,
        *buffer.stride()[:3], slots, *slots.stride(), count, heads - buffer.shape[1], heads - buffer.shape[1] // 2, dim,
        HALVES=halves, BLOCK=triton.next_power_of_2(dim // 2), num_warps=1,
    )


@triton.jit
def _rotate_and_keep(
    every, every_row, every_place, every_head, factors, factors_row, factors_place, buffer, buffer_row, buffer_head,
    buffer_slot, slots, slots_row, slots_place, count, queries, rotated, dim, HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one token: heads below ``rotated`` are turned, those from ``queries`` on stored."""
    row = (tl.program_id(0) // count).to(tl.int64)
    place = (tl.program_id(0) % count).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    half = dim // 2
    there = i < half
    if HALVES:
        first, second = i, half + i
    else:
        first, second = 2 * i, 2 * i + 1
    every += row * every_row + place * every_place + head * every_head
    a = tl.load(every + first, mask=there)
    b = tl.load(every + second, mask=there)
    if head < rotated:
        factors += row * factors_row + place * factors_place
        if HALVES:
            cos = tl.load(factors + i, mask=there)
            sin = tl.load(factors + dim + half + i, mask=there)
        else:
            cos = tl.load(factors + first, mask=there)
            sin = tl.load(factors + second, mask=there)
        x = a.to(tl.float32)
        y = b.to(tl.float32)
        a = (x * cos - y * sin).to(a.dtype)
        b = (x * sin + y * cos).to(b.dtype)
        tl.store(every + first, a, mask=there)
        tl.store(every + second, b, mask=there)
    if head >= queries:
        slot = tl.load(slots + row * slots_row + place * slots_place)
        buffer += row * buffer_row + (head - queries) * buffer_head + slot * buffer_slot
        tl.store(buffer + first, a, mask=there)
        tl.store(buffer + second, b, mask=there)
