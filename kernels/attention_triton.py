"""Triton kernels of attention.py: attention of few new tokens to a long cache, in three launches.

``_prepare`` normalises and rotates queries and keys, and stores keys and values in the cache. ``_decode`` splits the
cache into parts, so that there are enough programs to fill a GPU (Dao et al., "Flash-Decoding for long-context
inference", 2023). Queries that share a key head are rows of one tile, so keys and values are read once. Committed slots
need no mask; only the blocks after them have one. ``_combine`` adds up the parts.

It is batch invariant by construction: for any number of queries and rows, a part has the same slots, processed in the
same blocks and order by the same instruction (mma.sync, whose result for a row does not depend on the other rows of its
tile). So a tile has at most 32 queries: from 64 on, newer GPUs would use another instruction. Blocks with a mask and
without one are computed alike, multiplications with additions in one explicit step; slots and parts that a query does
not see add zero to its sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import NewTokens
from .rotation import Norms

AHEAD = tl.constexpr(4)  # parts loaded at once when they are combined
MOST_HALVINGS = tl.constexpr(5)  # of 32 numbers to their sum
TILE = 8192  # bytes of keys held at once: with queries, values and prefetched tiles, this fits every GPU
HEADS = 8  # of a token, prepared by one program
ROUND = tl.constexpr(1.5 * 2**23)  # added and subtracted, leaves the nearest integer
LOG2E = 1.4426950408889634


def attend_few(
    qkv: Tensor,
    factors: Tensor,
    halves: bool,
    norms: Norms | None,
    buffer: Tensor,
    scales: Tensor | None,
    new: NewTokens,
) -> Tensor:
    """See attention.attend_few."""
    batch, count, every, dim = qkv.shape
    cached, capacity = buffer.shape[1:3]
    heads, key_heads, narrow = every - cached, cached // 2, scales is not None
    queries = heads // key_heads * count  # rows that read the same keys
    block_d = max(triton.next_power_of_2(dim), 16)
    roomy = qkv.dtype != torch.float32 and dim == block_d <= 128  # others need more registers
    block_m = 32 if queries > 16 and roomy else 16
    block_n = max(min(TILE // (block_d * qkv.dtype.itemsize), 32), 16)
    assert capacity % block_n == 0, "blocks are read whole"
    part = 128 if block_d <= 64 else 256  # slots; combining parts costs more for wider heads
    parts = triton.cdiv(new.reach, part)
    out = qkv.new_empty(batch, count, heads, dim)  # holds the queries until they are answered
    sums = torch.empty((batch, key_heads, parts, queries, dim), device=out.device)
    maxima, masses = torch.empty((2, *sums.shape[:4]), device=out.device)
    weights, eps, centred, one_norm = (qkv,) * 4, 0.0, False, False  # unused without norms
    if norms is not None:
        (query_weight, query_bias, eps), (key_weight, key_bias, _) = norms
        centred, one_norm = query_bias is not None, len(query_weight) == 1
        biases = (query_bias, key_bias) if centred else (query_weight, key_weight)  # unused without biases
        weights = tuple(each.contiguous() for each in (query_weight, biases[0], key_weight, biases[1]))
    cache = buffer, scales if narrow else buffer, new.lengths, key_heads, count, new.uncommitted, capacity
    shape = {"DIM": dim, "NARROW": narrow, "BLOCK_D": block_d}
    _prepare[(batch * count, triton.cdiv(every, HEADS))](
        qkv.contiguous(),
        factors,
        factors.stride(0) if len(factors) > 1 else 0,
        factors.stride(1),
        *weights,
        out,
        *cache,
        heads,
        eps,
        torch.finfo(qkv.dtype).tiny,
        HALVES=halves,
        NORMED=norms is not None,
        CENTRED=centred,
        ONE_NORM=one_norm,
        BLOCK_H=HEADS,
        **shape,
        num_warps=4,
    )
    tree = new.lengths[:, None] if new.tree_mask is None else new.tree_mask  # never read if there is none
    _decode[(batch * key_heads, triton.cdiv(queries, block_m), parts)](
        out,
        *cache,
        new.reach,
        tree,
        *tree.stride()[:2],
        sums,
        maxima,
        masses,
        dim**-0.5 * LOG2E,
        SHARED=queries // count,
        TREE=new.tree_mask is not None,
        PART=part,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        **shape,
        num_warps=block_m // (8 if narrow else 16) if roomy else 4,  # int8 is widened in registers
        num_stages=2,
    )
    _combine[(batch, key_heads, queries)](
        sums,
        maxima,
        masses,
        new.lengths,
        new.uncommitted + count,
        new.reach,
        out,
        SHARED=queries // count,
        DIM=dim,
        PART=part,
        MOST=triton.next_power_of_2(parts),
        BLOCK_D=block_d,
        num_warps=1,
    )
    return out


@triton.jit
def _prepare(
    qkv, factors, factors_row, factors_token,
    query_weight, query_bias, key_weight, key_bias,
    queries,
    buffer, scales, lengths, key_heads, count, uncommitted, capacity,
    heads, eps, tiny,
    HALVES: tl.constexpr, NORMED: tl.constexpr, CENTRED: tl.constexpr, ONE_NORM: tl.constexpr, BLOCK_H: tl.constexpr,
    DIM: tl.constexpr, NARROW: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of a token. NORMED: heads get a LayerNorm (CENTRED) or an RMSNorm, which has no bias. ONE_NORM: all
    heads share one. NARROW: the cache is in int8. A channel is loaded with the other one of its pair."""
    row = (tl.program_id(0) // count).to(tl.int64)
    token = tl.program_id(0) % count
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    if HALVES:
        partner = (d + DIM // 2) % DIM
        cos, sin, sign = d, DIM + d, 1.0
    else:
        partner = d ^ 1
        cos, sin, sign = d & -2, d | 1, tl.where(d % 2 == 0, -1.0, 1.0)[None, :]
    here = d < DIM
    there = (head < heads + 2 * key_heads)[:, None] & here[None, :]
    turns = there & (head < heads + key_heads)[:, None]
    x = qkv + (tl.program_id(0).to(tl.int64) * (heads + 2 * key_heads) + head)[:, None] * DIM
    own = tl.load(x + d[None, :], there, 0.0)
    a, b = own.to(tl.float32), tl.load(x + partner[None, :], there, 0.0).to(tl.float32)
    if NORMED:
        if CENTRED:
            mean = (tl.sum(a, 1) / DIM)[:, None]
            a, b = tl.where(there, a - mean, 0.0), tl.where(there, b - mean, 0.0)
        shrink = tl.rsqrt(tl.sum(a * a, 1) / DIM + eps)[:, None]
        norm = tl.where(head < heads, head, head - heads) * (0 if ONE_NORM else DIM)
        weight = (tl.where(head < heads, query_weight, key_weight) + norm)[:, None]
        a *= shrink * tl.load(weight + d[None, :], turns, 0.0)
        b *= shrink * tl.load(weight + partner[None, :], turns, 0.0)
        if CENTRED:
            bias = (tl.where(head < heads, query_bias, key_bias) + norm)[:, None]
            a += tl.load(bias + d[None, :], turns, 0.0)
            b += tl.load(bias + partner[None, :], turns, 0.0)
    factors += row * factors_row + token * factors_token
    c, s = tl.load(factors + cos, here, 0.0)[None, :], tl.load(factors + sin, here, 0.0)[None, :]
    x = tl.where(turns, tl.fma(a, c, b * s * sign).to(own.dtype), own)
    asks = there & (head < heads)[:, None]
    tl.store(queries + (tl.program_id(0).to(tl.int64) * heads + head)[:, None] * DIM + d[None, :], x, asks)
    slot = tl.minimum(tl.load(lengths + row) + uncommitted + token, capacity - 1)
    place = (row * 2 * key_heads + head - heads) * capacity + slot
    if NARROW:
        x = x.to(tl.float32)
        largest = tl.max(tl.abs(x), 1) + tl.sum(x - x, 1)  # NaN if one is not finite
        scale = tl.maximum(tl.div_rn(largest, 127.0).to(own.dtype).to(tl.float32), tiny, tl.PropagateNan.ALL)
        tl.store(scales + place, scale.to(own.dtype), (head >= heads) & (head < heads + 2 * key_heads))
        x = tl.div_rn(x, scale[:, None]).to(own.dtype).to(tl.float32)
        x = tl.clamp(x + ROUND - ROUND, -127.0, 127.0).to(tl.int8)
    tl.store(buffer + place[:, None] * DIM + d[None, :], x, there & (head >= heads)[:, None])


@triton.jit
def _decode(
    queries,
    buffer, scales, lengths, key_heads, count, uncommitted, capacity,
    reach, tree, tree_row, tree_token,
    sums, maxima, masses, scale,
    SHARED: tl.constexpr, TREE: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, NARROW: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one key head, and PART slots. TREE: ``tree`` tells which uncommitted tokens they see. NARROW:
    the cache is in int8.

    sums [rows, key heads, parts, queries, DIM]: of values, weighted by 2 ** (score - maximum); maxima and masses, which
    are the sums of these weights: [rows, key heads, parts, queries].
    """
    row = (tl.program_id(0) // key_heads).to(tl.int64)
    key_head = tl.program_id(0) % key_heads
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    length = tl.load(lengths + row).to(tl.int32)
    begin = tl.program_id(2) * PART
    stop = tl.minimum(begin + PART, tl.minimum(length + uncommitted + count, reach))
    token = m // SHARED
    asked = (token < count) & (begin < stop)
    head = key_head * SHARED + m % SHARED
    wanted = asked[:, None] & (d < DIM)[None, :]
    x = tl.load(queries + ((row * count + token) * key_heads * SHARED + head)[:, None] * DIM + d[None, :], wanted, 0.0)
    n = tl.arange(0, BLOCK_N)
    first = (row * 2 * key_heads + key_head) * capacity
    keys = buffer + first * DIM + n[:, None] * DIM + d[None, :]
    scales += first + n
    values = key_heads * capacity  # slots after those of keys
    tree += row * tree_row
    line = tl.minimum(token, count - 1)[:, None] * tree_token
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    committed = begin + tl.maximum(tl.minimum(length, stop) - begin, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, committed, BLOCK_N):
        maximum, mass, result = _attended(
            maximum, mass, result, x, None, keys + start * DIM, scales + start, values, scale, DIM, NARROW
        )
    for start in range(committed, stop, BLOCK_N):
        offset, exists = (start + n - length)[None, :], (start + n < stop)[None, :]
        if TREE:
            seen = tl.load(tree + (line + offset), exists & (offset >= 0), 1).to(tl.int32) != 0
        else:
            seen = offset <= uncommitted + token[:, None]
        maximum, mass, result = _attended(
            maximum, mass, result, x, seen & exists, keys + start * DIM, scales + start, values, scale, DIM, NARROW
        )
    part = (tl.program_id(0).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)) * (SHARED * count) + m
    tl.store(maxima + part, maximum * scale, asked)
    tl.store(masses + part, in_order(mass, BLOCK_M, BLOCK_N), asked)
    tl.store(sums + part[:, None] * DIM + d[None, :], result, wanted)


@triton.jit
def _attended(maximum, mass, result, x, seen, keys, scales, values, scale, DIM: tl.constexpr, NARROW: tl.constexpr):
    """Maximum, mass and result of the queries x after another block of slots, of which they attend to those ``seen``
    (None: all)."""
    here = (tl.arange(0, x.shape[1]) < DIM)[None, :]
    k = tl.load(keys, here, 0.0).to(x.dtype)
    scores = tl.dot(x, tl.trans(k), input_precision="ieee")
    if NARROW:
        scores *= tl.load(scales).to(tl.float32)[None, :]
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(maximum, tl.max(scores, 1))
    finite = _finite(higher)
    weights = tl.exp2(tl.fma(scores, scale, (-scale * finite)[:, None]))
    shrink = tl.exp2((maximum - finite) * scale)[:, None]
    mass = tl.fma(mass, shrink, weights)
    if NARROW:
        weights *= tl.load(scales + values).to(tl.float32)[None, :]
    v = tl.load(keys + values * DIM, here, 0.0).to(x.dtype)
    return higher, mass, tl.dot(weights.to(x.dtype), v, result * shrink, input_precision="ieee")


@triton.jit
def _finite(maximum):
    """The maximum of a query's scores, or 0 if it has seen no slot yet."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def in_order(x, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """The sum over the last dimension of x [ROWS, DEPTH]: of pairs of neighbours, then of pairs of sums, and so on.
    This order is fixed; that of tl.sum depends on the tile. DEPTH: a power of two, at most 2**MOST_HALVINGS."""
    for _ in tl.static_range(MOST_HALVINGS):
        if x.shape[1] > 1:
            left, right = tl.split(tl.reshape(x, (ROWS, x.shape[1] // 2, 2)))
            x = left + right
    return tl.reshape(x, (ROWS,))


@triton.jit
def _combine(
    sums, maxima, masses,
    lengths, fed, reach,
    out,
    SHARED: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, MOST: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One query's result, from the sums of its parts, which are at most MOST (see ``_decode``)."""
    row, key_head, m = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    key_heads, queries = tl.num_programs(1), tl.num_programs(2)
    live = tl.cdiv(tl.minimum(tl.load(lengths + row).to(tl.int32) + fed, reach), PART)
    index = (row * key_heads + key_head) * tl.cdiv(reach, PART) * queries + m
    every = tl.arange(0, MOST)
    top = _finite(tl.max(tl.load(maxima + index + every * queries, every < live, float("-inf")), 0))
    d = tl.arange(0, BLOCK_D)
    mass = 0.0
    result = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, live, AHEAD):
        for i in tl.static_range(AHEAD):
            part, there = index + (first + i) * queries, first + i < live
            weight = tl.exp2(tl.load(maxima + part, there, float("-inf")) - top)
            mass = tl.fma(tl.load(masses + part, there, 0.0), weight, mass)
            result = tl.fma(tl.load(sums + part * DIM + d, there & (d < DIM), 0.0), weight, result)
    head = (row * (queries // SHARED) + m // SHARED) * key_heads + key_head
    out += (head * SHARED + m % SHARED) * DIM + d
    tl.store(out, (result / tl.where(mass == 0, 1.0, mass)).to(out.dtype.element_ty), d < DIM)
