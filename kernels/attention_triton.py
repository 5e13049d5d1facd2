"""Attention of few queries to a long cache (twin of attention.py), split along the cache so that it fills a GPU.

Queries that share a key head are rows of one tile, so that keys and values are read once; slots that no query of a tile
sees are not read at all. Partial results are combined by their maxima and sums (Dao et al., "Flash-Decoding for
long-context inference", 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512  # enough to fill a GPU
QUERIES = 128  # bytes of a channel of the queries held at once
TILE = 8192  # bytes of keys held at once: with queries, values and what is under way, little enough for every GPU


def attend_few(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """See attention.attend_few. The last dimension of every argument must be dense."""
    rows, heads, count, dim = q.shape
    key_heads, slots = k.shape[1:3]
    shared = heads // key_heads
    queries = shared * count  # rows that read the same keys
    mask = mask.expand(rows, 1, count, slots)
    block_m = min(max(triton.next_power_of_2(queries), 16), QUERIES // q.dtype.itemsize)
    block_d = max(triton.next_power_of_2(dim), 16)
    block_n = max(min(TILE // (block_d * q.dtype.itemsize), 64), 16)
    tiles = rows * key_heads, triton.cdiv(queries, block_m)
    parts = min(max(PROGRAMS // (tiles[0] * tiles[1]), 1), triton.cdiv(slots, block_n), 64)
    per_part = triton.cdiv(triton.cdiv(slots, block_n), parts) * block_n
    out = torch.empty((rows, count, heads, dim), dtype=q.dtype, device=q.device).transpose(1, 2)
    place = (out, out)
    if parts > 1:
        partial = torch.empty((rows, heads, count, parts, dim), device=q.device)
        place = (partial, torch.empty((2, rows, heads, count, parts), device=q.device))
    _part[(*tiles, parts)](
        q, *q.stride()[:3], k, *k.stride()[:3], v, *v.stride()[:3], mask, mask.stride(0), mask.stride(2), *place,
        *out.stride()[:3], dim**-0.5, rows * heads * count * parts, key_heads, count, queries, slots, per_part, parts,
        SHARED=shared, DIM=dim, WHOLE=parts == 1, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_D=block_d, num_warps=4, num_stages=2,
    )
    if parts > 1:
        _combine[(rows * heads * count,)](
            *place, out, *out.stride()[:3], rows * heads * count * parts, heads, count, parts, DIM=dim,
            PARTS=triton.next_power_of_2(parts), BLOCK_D=block_d, num_warps=4,
        )
    return out


@triton.jit
def _part(
    q, q_row, q_head, q_place, k, k_row, k_head, k_slot, v, v_row, v_head, v_slot, mask, mask_row, mask_place, out,
    scales, out_row, out_head, out_place, scale, second, key_heads, count, queries, slots, per_part, parts,
    SHARED: tl.constexpr, DIM: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attention of BLOCK_M queries of one key head to one part of the slots: the whole result if there is one part,
    else ``out`` [queries of all heads, parts, DIM] weighted by exp(score - maximum), maxima in ``scales`` and sums
    ``second`` behind them.
    """
    row = (tl.program_id(0) // key_heads).to(tl.int64)
    key_head = tl.program_id(0) % key_heads
    part = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    head = key_head * SHARED + m // count
    place = m % count
    asked = m < queries
    x = tl.load(
        q + row * q_row + head[:, None] * q_head + place[:, None] * q_place + d[None, :],
        mask=asked[:, None] & (d < DIM)[None, :], other=0.0,
    )
    k += row * k_row + key_head * k_head
    v += row * v_row + key_head * v_head
    mask += row * mask_row
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(part * per_part, tl.minimum(part * per_part + per_part, slots), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        bias = tl.load(
            mask + place[:, None] * mask_place + n[None, :], mask=asked[:, None] & (n < slots)[None, :],
            other=float("-inf"),
        ).to(tl.float32)
        seen = tl.max(bias, 0) > float("-inf")
        keys = tl.load(
            k + n[None, :].to(tl.int64) * k_slot + d[:, None], mask=seen[None, :] & (d < DIM)[:, None], other=0.0
        )
        values = tl.load(
            v + n[:, None].to(tl.int64) * v_slot + d[None, :], mask=seen[:, None] & (d < DIM)[None, :], other=0.0
        )
        scores = tl.dot(x, keys, input_precision="ieee") * scale + bias
        higher = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # of a query that has seen nothing yet
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(maximum - base)
        mass = mass * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        maximum = higher
    if WHOLE:
        result = result / tl.where(mass == 0, 1.0, mass)[:, None]
        out += row * out_row + head[:, None] * out_head + place[:, None] * out_place + d[None, :]
        tl.store(out, result.to(out.dtype.element_ty), mask=asked[:, None] & (d < DIM)[None, :])
    else:
        index = ((row * key_heads * SHARED + head) * count + place) * parts + part
        tl.store(out + index[:, None] * DIM + d[None, :], result, mask=asked[:, None] & (d < DIM)[None, :])
        tl.store(scales + index, maximum, mask=asked)
        tl.store(scales + index + second, mass, mask=asked)


@triton.jit
def _combine(
    partial, scales, out, out_row, out_head, out_place, second, heads, count, parts, DIM: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Put the parts of one query together."""
    query = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    d = tl.arange(0, BLOCK_D)
    there = part < parts
    maximum = tl.load(scales + query * parts + part, mask=there, other=float("-inf"))
    mass = tl.load(scales + second + query * parts + part, mask=there, other=0.0)
    highest = tl.max(maximum, 0)
    weight = tl.exp(maximum - tl.where(highest == float("-inf"), 0.0, highest))
    result = tl.load(
        partial + (query * parts + part[:, None]) * DIM + d[None, :], mask=there[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    mass = tl.sum(mass * weight, 0)
    result = tl.sum(result * weight[:, None], 0) / tl.where(mass == 0, 1.0, mass)
    row = query // (heads * count)
    head = query // count % heads
    out += row * out_row + head * out_head + query % count * out_place + d
    tl.store(out, result.to(out.dtype.element_ty), mask=d < DIM)
