"""Normalising and rotating queries and keys, and storing keys and values: the Triton kernel of rotation.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .rotation import EPS, Norms


def rotate_and_keep(
    every: Tensor, factors: Tensor, halves: bool, norms: Norms | None, buffer: Tensor, rows: Tensor, slots: Tensor
) -> None:
    """See rotation.rotate_and_keep. The last dimension of ``every``, ``factors`` and ``buffer`` must be dense."""
    batch, count, heads, dim = every.shape
    given = (every,) * 4 if norms is None else tuple(norm.contiguous() for norm in norms)  # never read if not there
    _rotate_and_keep[(batch * count, heads)](
        every, *every.stride()[:3], factors, factors.stride(0) if len(factors) > 1 else 0, factors.stride(1), buffer,
        *buffer.stride()[:3], slots, *slots.stride(), *given, count, heads - buffer.shape[1],
        heads - buffer.shape[1] // 2, dim, EPS, HALVES=halves, NORMED=norms is not None,
        SHARED_NORMS=norms is not None and len(norms[0]) == 1, BLOCK=triton.next_power_of_2(dim // 2), num_warps=1,
    )


@triton.jit
def _rotate_and_keep(
    every, every_row, every_place, every_head, factors, factors_row, factors_place, buffer, buffer_row, buffer_head,
    buffer_slot, slots, slots_row, slots_place, query_weight, query_bias, key_weight, key_bias, count, queries, rotated,
    dim, eps, HALVES: tl.constexpr, NORMED: tl.constexpr, SHARED_NORMS: tl.constexpr, BLOCK: tl.constexpr,
):
    """One head of one token: heads below ``rotated`` are normalised and turned, those from ``queries`` on stored.
    SHARED_NORMS: do all heads have the same norm."""
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
    a = tl.load(every + first, mask=there, other=0.0)
    b = tl.load(every + second, mask=there, other=0.0)
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
        if NORMED:
            weight, bias, norm = query_weight, query_bias, head
            if head >= queries:
                weight, bias, norm = key_weight, key_bias, head - queries
            if not SHARED_NORMS:
                weight += norm * dim
                bias += norm * dim
            mean = (tl.sum(x) + tl.sum(y)) / dim
            x = tl.where(there, x - mean, 0.0)
            y = tl.where(there, y - mean, 0.0)
            shrink = tl.rsqrt((tl.sum(x * x) + tl.sum(y * y)) / dim + eps)
            x = x * shrink * tl.load(weight + first, mask=there) + tl.load(bias + first, mask=there)
            y = y * shrink * tl.load(weight + second, mask=there) + tl.load(bias + second, mask=there)
        a = (x * cos - y * sin).to(a.dtype)
        b = (x * sin + y * cos).to(b.dtype)
        tl.store(every + first, a, mask=there)
        tl.store(every + second, b, mask=there)
    if head >= queries:
        slot = tl.load(slots + row * slots_row + place * slots_place)
        buffer += row * buffer_row + (head - queries) * buffer_head + slot * buffer_slot
        tl.store(buffer + first, a, mask=there)
        tl.store(buffer + second, b, mask=there)
