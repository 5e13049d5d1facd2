"""Triton kernel of linear.py.

It is batch invariant by construction: for any tile, every number of the result is the sum over K in the same order, by
the same instruction (mma.sync, whose result for a row does not depend on the other rows of its tile). So a tile has at
most 32 rows: from 64 on, newer GPUs would use another instruction. More rows are more programs, which read the matrix
from the GPU's cache. Programs share nothing, and nothing depends on timing.

Tiles have 16 rows, the fewest that tensor cores multiply, or 32. A norm is a launch of its own: normalising rows in
every tile of their product takes a GPU longer than all the rest.

The weights are read as fast as enough of them are asked for at once: on the fastest GPUs 3 MB or more. A matrix of few
rows is SLIM: it has smaller tiles, so more programs, and each asks for more of its tiles ahead (fewer of narrow
matrices, whose programs are bound by instructions on GPUs with less bandwidth, and must be many per multiprocessor).
Dividing K between programs would need a second launch, to add up, and would save less than that takes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .linear import GROUP, stored_as

SLIM = 4096  # rows of a matrix that with tiles of 32 has fewer programs than large GPUs have multiprocessors
STORED = {"int8": 1, "float8_e4m3fn": 2, "int4": 3}  # formats of linear.stored_as; 0: the dtype of x


def few_rows(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    gate: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """See linear.few_rows."""
    x = x.contiguous()
    (count, inner), outer = x.shape, len(weight) // (1 + gate)
    out = x.new_empty(count, outer)
    stored = STORED.get(stored_as(weight), 0)
    slim, fp32 = count <= 32 and len(weight) <= SLIM, x.dtype == torch.float32
    rows = 16 if slim or count <= 16 else 32
    columns = 16 if slim else 2 * rows
    ahead = {0: 8, 3: 4}.get(stored, 6) if slim else 4 if rows == 16 else 3
    few = triton.cdiv(count, rows)
    given = (out if t is None else t.contiguous() for t in (scale, bias, residual))  # unused if None
    _few_rows[(few * triton.cdiv(len(weight), columns),)](
        x,
        weight.view(torch.int8) if stored == 2 else weight,
        *given,
        out,
        few,
        count,
        outer,
        inner,
        STORED=stored,
        GROUP=GROUP,
        SCALED=scale is not None,
        BIASED=bias is not None,
        GATED=gate,
        ADDED=residual is not None,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=32 if fp32 else 128,
        num_warps=2 if slim else 4,
        num_stages=2 if fp32 else ahead,
    )
    return out


@triton.jit
def _few_rows(
    x, weight, scale, bias, residual,
    out,
    few, count, outer, inner,
    STORED: tl.constexpr, GROUP: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Products of ROWS rows of x with COLUMNS rows of the matrix, DEPTH numbers of K at a time.

    GATED: a gate's row of the matrix is followed by its value's, so that one product has both. few: the number of row
    tiles; the programs of one column tile are consecutive, so they read the same part of the matrix at the same time.
    STORED: 0 the dtype of x, 1 int8, 2 bits of fp8, 3 groups of 4 bits.
    """
    row = tl.program_id(0) % few * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) // few * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    there = row[:, None] < count
    wanted = column < outer
    if GATED:
        wanted = column < 2 * outer
        column = column // 2 + column % 2 * outer
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if STORED == 3:
        total = _in_groups(x, weight, scale, row, column, inner, there, wanted, total, GROUP)
    else:
        for start in range(0, inner, DEPTH):
            k = start + tl.arange(0, DEPTH)
            a = tl.load(x + row[:, None] * inner + k[None, :], there & (k < inner)[None, :], 0.0)
            b = tl.load(weight + column[None, :] * inner + k[:, None], wanted[None, :] & (k < inner)[:, None], 0)
            total = tl.dot(a, _widened(b, a, STORED), total, input_precision="ieee")
    if STORED == 2:
        total *= 256
    if SCALED and STORED != 3:
        total *= tl.load(scale + column, wanted, 0.0)[None, :]
    if BIASED:
        total += tl.load(bias + column, wanted, 0.0).to(tl.float32)[None, :]
    if GATED:
        gate, value = tl.split(tl.reshape(total, (ROWS, COLUMNS // 2, 2)))
        total = gate / (1 + tl.exp(-gate)) * value
        column = first // 2 + tl.arange(0, COLUMNS // 2)
    place = row[:, None] * outer + column[None, :]
    inside = there & (column < outer)[None, :]
    if ADDED:
        total += tl.load(residual + place, inside, 0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), inside)


@triton.jit
def _widened(b, a, STORED: tl.constexpr):
    """Stored numbers in the dtype of a; those of fp8 divided by 256."""
    if STORED == 2:
        bits = ((b.to(tl.int16) << 7) & -16385).to(tl.int16)  # an int32 in Triton 3.1
        b = bits.to(tl.float16, bitcast=True).to(tl.float32)  # Triton 3.1 cannot multiply what was just bits
    return b.to(a.dtype)


@triton.jit
def _in_groups(x, weight, scale, row, column, inner, there, wanted, total, GROUP: tl.constexpr):
    """The loop of _few_rows for groups of 4 bits, a group at a time: the products with the lower halves of its bytes,
    then those with the upper halves, which are half a group further on."""
    HALF: tl.constexpr = GROUP // 2
    groups = (inner + GROUP - 1) // GROUP
    for start in range(0, groups, 2):
        for more in tl.static_range(2):
            group = start + more
            inside = wanted[None, :] & (group < groups)
            place = (column * groups + group)[None, :]
            bits = tl.load(weight + place * HALF + tl.arange(0, HALF)[:, None], inside, 0)
            step = tl.load(scale + 2 * place, inside, 0.0).to(tl.float32)
            minimum = tl.load(scale + 2 * place + 1, inside, 0.0).to(tl.float32)
            for half in tl.static_range(2):
                k = group * GROUP + half * HALF + tl.arange(0, HALF)
                a = tl.load(x + row[:, None] * inner + k[None, :], there & (k < inner)[None, :], 0.0)
                b = ((bits.to(tl.int32) >> 4 * half) & 15).to(tl.float32) * step + minimum
                total = tl.dot(a, b.to(a.dtype), total, input_precision="ieee")
    return total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See linear.rms_norm. Every row has a program of its own."""
    x, inner = x.contiguous(), x.shape[-1]
    out, block = torch.empty_like(x), triton.next_power_of_2(inner)
    _rms_norm[(x.numel() // inner,)](x, weight.contiguous(), out, inner, eps, BLOCK=block, num_warps=8)
    return out


@triton.jit
def _rms_norm(x, weight, out, inner, eps, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    place = tl.program_id(0) * inner + k
    row = tl.load(x + place, k < inner, 0.0).to(tl.float32)
    row *= tl.rsqrt(tl.sum(row * row, 0) / inner + eps)
    row *= tl.load(weight + k, k < inner, 0.0).to(tl.float32)
    tl.store(out + place, row.to(out.dtype.element_ty), k < inner)
