"""Triton kernel of attention.py: attention of few new tokens to a long cache, in one launch.

The cache is split into parts, so that there are enough programs to fill a GPU (Dao et al., "Flash-Decoding for
long-context inference", 2023). A program stores the new keys and values of its part, and no other program reads them,
so no program waits for another. Queries that share a key head are rows of one tile, so keys and values are read once;
slots that no query of a tile sees are not read.

Each program stores the result of its part and increments a counter. The last program of a tile combines the parts.
Which one is last varies, but the parts are combined in a fixed order.

It is batch invariant by construction: for any number of queries and rows, a part has the same slots, processed in the
same order by the same instruction (mma.sync, whose result for a row does not depend on the other rows of its tile). So
a tile has at most 32 queries: from 64 on, newer GPUs would use another instruction. Slots and parts that a query does
not see add zero to its sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rotation import Norms

AHEAD = tl.constexpr(4)  # parts loaded at once when they are combined
MOST_HALVINGS = tl.constexpr(7)  # of 128 numbers to their sum
NEW = tl.constexpr(16)  # keys normalised, rotated and stored at once: more need more registers
TILE = 8192  # bytes of keys held at once: with queries, values and prefetched tiles, this fits every GPU


def attend_few(
    qkv: Tensor,
    factors: Tensor,
    halves: bool,
    norms: Norms | None,
    buffer: Tensor,
    rows: Tensor,
    slots: Tensor,
    mask: Tensor,
    arrived: Tensor,
) -> Tensor:
    """See attention.attend_few."""
    batch, count, heads, dim = qkv.shape
    key_heads, reach = buffer.shape[1] // 2, mask.shape[-1]
    shared = heads // key_heads - 2
    queries = shared * count  # rows that read the same keys
    block_d = max(triton.next_power_of_2(dim), 16)
    roomy = qkv.dtype != torch.float32 and dim == block_d <= 128  # others need more registers
    block_m = 32 if queries > 16 and roomy else 16
    block_n = max(min(TILE // (block_d * qkv.dtype.itemsize), 64), 16)
    part = 128 if block_d <= 64 else 256  # slots; combining parts costs more for wider heads
    tiles, parts = triton.cdiv(queries, block_m), triton.cdiv(reach, part)
    assert tiles <= arrived.shape[2], "more tiles of queries than counters"
    out = qkv.new_empty(batch, count, heads - 2 * key_heads, dim)
    partial = scales = out  # unused if there is one part
    if parts > 1:
        partial = torch.empty((batch, key_heads, parts, queries, dim), device=out.device)
        scales = torch.empty((2, batch, key_heads, parts, queries), device=out.device)
    mask = mask.expand(batch, 1, count, reach)
    weights, eps, centred, one_norm = (qkv,) * 4, 0.0, False, False  # unused without norms
    if norms is not None:
        (query_weight, query_bias, eps), (key_weight, key_bias, _) = norms
        centred, one_norm = query_bias is not None, len(query_weight) == 1
        biases = (query_bias, key_bias) if centred else (query_weight, key_weight)  # unused without biases
        weights = tuple(each.contiguous() for each in (query_weight, biases[0], key_weight, biases[1]))
    _attend[(batch * key_heads, tiles, parts)](
        qkv,
        *qkv.stride()[:3],
        factors,
        factors.stride(0) if len(factors) > 1 else 0,
        factors.stride(1),
        *weights,
        buffer,
        *buffer.stride()[:3],
        slots,
        *slots.stride(),
        mask,
        mask.stride(0),
        mask.stride(2),
        out,
        partial,
        scales,
        scales[0].numel(),
        arrived,
        dim**-0.5,
        eps,
        key_heads,
        count,
        reach,
        SHARED=shared,
        DIM=dim,
        HALVES=halves,
        NORMED=norms is not None,
        CENTRED=centred,
        ONE_NORM=one_norm,
        WHOLE=parts == 1,
        PART=part,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=2 if roomy and block_m == 16 else 4,  # two with 32 queries need more registers
        num_stages=3,
    )
    return out


@triton.jit
def _attend(
    qkv,
    qkv_row,
    qkv_token,
    qkv_head,
    factors,
    factors_row,
    factors_token,
    query_weight,
    query_bias,
    key_weight,
    key_bias,
    buffer,
    buffer_row,
    buffer_head,
    buffer_slot,
    slots,
    slots_row,
    slots_token,
    mask,
    mask_row,
    mask_token,
    out,
    partial,
    scales,
    second,
    arrived,
    scale,
    eps,
    key_heads,
    count,
    reach,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    HALVES: tl.constexpr,
    NORMED: tl.constexpr,
    CENTRED: tl.constexpr,
    ONE_NORM: tl.constexpr,
    WHOLE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_M queries of one key head, and PART slots. WHOLE: there is one part. NORMED: heads get a
    LayerNorm (CENTRED) or an RMSNorm, which has no bias. ONE_NORM: all heads share one.

    partial [rows, key heads, parts, queries, DIM]: sums of values, weighted by exp(score - maximum); scales: the maxima
    [rows, key heads, parts, queries], and ``second`` numbers later the sums of the weights.
    """
    row = (tl.program_id(0) // key_heads).to(tl.int64)
    key_head = tl.program_id(0) % key_heads
    part = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = m // SHARED
    head = key_head * SHARED + m % SHARED
    asked = token < count
    qkv += row * qkv_row
    factors += row * factors_row
    norm = tl.zeros_like(head) if ONE_NORM else head
    x = _rotated(
        qkv + token * qkv_token + head * qkv_head,
        factors + token * factors_token,
        query_weight + norm * DIM,
        query_bias + norm * DIM,
        asked,
        eps,
        DIM,
        HALVES,
        NORMED,
        CENTRED,
        BLOCK_D,
    )
    keys = buffer + row * buffer_row + key_head * buffer_head
    values = keys + key_heads * buffer_head
    own_key = key_heads * SHARED + key_head
    own_value = own_key + key_heads
    for first in range(0, count, NEW):
        new = first + tl.arange(0, NEW)
        slot = tl.load(slots + row * slots_row + new * slots_token, new < count, 0)
        mine = (new < count) & (tl.minimum(slot // PART, tl.num_programs(2) - 1) == part)
        if tl.max(mine.to(tl.int32), 0) > 0:  # most parts get no new keys
            key_norm = tl.zeros_like(new) if ONE_NORM else tl.zeros_like(new) + key_head
            key = _rotated(
                qkv + new * qkv_token + own_key * qkv_head,
                factors + new * factors_token,
                key_weight + key_norm * DIM,
                key_bias + key_norm * DIM,
                mine,
                eps,
                DIM,
                HALVES,
                NORMED,
                CENTRED,
                BLOCK_D,
            )
            there = mine[:, None] & (d < DIM)[None, :]
            value = tl.load(qkv + new[:, None] * qkv_token + own_value * qkv_head + d[None, :], there)
            place = slot[:, None] * buffer_slot + d[None, :]
            tl.store(keys + place, key, there)
            tl.store(values + place, value, there)
    tl.debug_barrier()  # other threads read what this one stored
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    masses = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    mask += row * mask_row
    for start in range(part * PART, part * PART + PART, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        bias = tl.load(
            mask + token[:, None] * mask_token + n[None, :], asked[:, None] & (n < reach)[None, :], float("-inf")
        ).to(tl.float32)
        seen = tl.max(bias, 0) > float("-inf")
        k = tl.load(keys + n[None, :].to(tl.int64) * buffer_slot + d[:, None], seen[None, :] & (d < DIM)[:, None], 0.0)
        v = tl.load(
            values + n[:, None].to(tl.int64) * buffer_slot + d[None, :], seen[:, None] & (d < DIM)[None, :], 0.0
        )
        scores = tl.dot(x, k, input_precision="ieee") * scale + bias
        higher = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp(scores - _finite(higher)[:, None])
        shrink = tl.exp(maximum - _finite(higher))
        masses = masses * shrink[:, None] + weights
        result = tl.dot(weights.to(v.dtype), v, result * shrink[:, None], input_precision="ieee")
        maximum = higher
    mass = in_order(masses, BLOCK_M, BLOCK_N)
    wanted = asked[:, None] & (d < DIM)[None, :]
    out += ((row * count + token[:, None]) * key_heads * SHARED + head[:, None]) * DIM + d[None, :]
    if WHOLE:
        tl.store(out, (result / tl.where(mass == 0, 1.0, mass)[:, None]).to(out.dtype.element_ty), wanted)
    else:
        parts = tl.num_programs(2)
        queries = SHARED * count
        index = tl.program_id(0).to(tl.int64) * parts * queries + m
        tl.store(scales + index + part * queries, maximum, asked)
        tl.store(scales + index + part * queries + second, mass, asked)
        tl.store(partial + (index + part * queries)[:, None] * DIM + d[None, :], result, wanted)
        tl.debug_barrier()  # all threads have stored before the counter is incremented
        arrived += tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        # acq_rel: the last program sees what all others have stored.
        if tl.atomic_add(arrived, 1, sem="acq_rel") == parts - 1:
            tl.store(arrived, 0)  # for the next launch
            maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
            mass = tl.zeros([BLOCK_M], tl.float32)
            result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for first in range(0, parts, AHEAD):
                for i in tl.static_range(AHEAD):
                    there = first + i < parts
                    place = index + (first + i) * queries
                    # .cg: from the cache shared by all programs
                    highest = tl.load(scales + place, asked & there, float("-inf"), cache_modifier=".cg")
                    weight = tl.load(scales + place + second, asked & there, 0.0, cache_modifier=".cg")
                    theirs = tl.load(
                        partial + place[:, None] * DIM + d[None, :], wanted & there, 0.0, cache_modifier=".cg"
                    )
                    higher = tl.maximum(maximum, highest)
                    shrink = tl.exp(maximum - _finite(higher))
                    grow = tl.exp(highest - _finite(higher))
                    mass = mass * shrink + weight * grow
                    result = result * shrink[:, None] + theirs * grow[:, None]
                    maximum = higher
            tl.store(out, (result / tl.where(mass == 0, 1.0, mass)[:, None]).to(out.dtype.element_ty), wanted)


@triton.jit
def _finite(maximum):
    """The maximum of a query's scores, or 0 if it has seen no slot yet."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _rotated(
    x,
    factors,
    weight,
    bias,
    wanted,
    eps,
    DIM: tl.constexpr,
    HALVES: tl.constexpr,
    NORMED: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The heads at x [M], normalised and rotated: [M, BLOCK_D]. A channel is loaded with the other one of its pair."""
    d = tl.arange(0, BLOCK_D)
    there = wanted[:, None] & (d < DIM)[None, :]
    if HALVES:
        partner = (d + DIM // 2) % DIM
        cos, sin, sign = d, DIM + d, 1.0
    else:
        partner = d ^ 1
        cos, sin, sign = d & -2, d | 1, tl.where(d % 2 == 0, -1.0, 1.0)[None, :]
    own = tl.load(x[:, None] + d[None, :], there, 0.0)
    mean, shrink = 0.0, 1.0
    if NORMED:
        if CENTRED:
            mean = _sum(x, mean, wanted, False, DIM, BLOCK_D)[:, None] / DIM
        shrink = tl.rsqrt(_sum(x, mean, wanted, True, DIM, BLOCK_D) / DIM + eps)[:, None]
    a = _normalised(own, mean, shrink, weight, bias, d, there, NORMED, CENTRED)
    other = tl.load(x[:, None] + partner[None, :], there, 0.0)  # not before the sums, which need registers
    b = _normalised(other, mean, shrink, weight, bias, partner, there, NORMED, CENTRED)
    c = tl.load(factors[:, None] + cos[None, :], there, 0.0)
    s = tl.load(factors[:, None] + sin[None, :], there, 0.0)
    return (a * c + b * s * sign).to(own.dtype)


@triton.jit
def _sum(x, mean, wanted, SQUARED: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The sum [M] of all channels at x [M], or of the squares of their differences from the mean. Sums of all channels
    at once would need more registers than there are in Triton 3.4 to 3.6."""
    CHANNELS: tl.constexpr = 64 if BLOCK_D > 64 else BLOCK_D
    total = tl.zeros([x.shape[0]], tl.float32)
    for first in range(0, DIM, CHANNELS):
        d = first + tl.arange(0, CHANNELS)
        there = wanted[:, None] & (d < DIM)[None, :]
        a = tl.load(x[:, None] + d[None, :], there, 0.0).to(tl.float32)
        if SQUARED:
            a = tl.where(there, a - mean, 0.0)
            a = a * a
        total += in_order(a, x.shape[0], CHANNELS)
    return total


@triton.jit
def _normalised(x, mean, shrink, weight, bias, d, there, NORMED: tl.constexpr, CENTRED: tl.constexpr):
    """x [M, channels d] in fp32, after the norm if there is one."""
    x = x.to(tl.float32)
    if NORMED:
        x = (x - mean) * shrink * tl.load(weight[:, None] + d[None, :], there)
        if CENTRED:
            x += tl.load(bias[:, None] + d[None, :], there)
    return x


@triton.jit
def in_order(x, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """The sum over the last dimension of x [ROWS, DEPTH]: of pairs of neighbours, then of pairs of sums, and so on.
    This order is fixed; that of tl.sum depends on the tile. DEPTH: a power of two, at most 2**MOST_HALVINGS."""
    for _ in tl.static_range(MOST_HALVINGS):
        if x.shape[1] > 1:
            left, right = tl.split(tl.reshape(x, (ROWS, x.shape[1] // 2, 2)))
            x = left + right
    return tl.reshape(x, (ROWS,))
