"""Triton twin of linear.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of x -> columns of the result and depth of a step of one program, its warps, and steps under way at once. With
# more rows, more columns share what is read of them. 16 rows are the least that tensor cores multiply.
_TILES = {16: (16, 256, 2, 4), 32: (32, 128, 4, 4), 64: (32, 128, 4, 3), 128: (64, 64, 4, 3)}


def few_rows(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """Every program reads its part of the matrix once, and all of x. Nothing is shared between programs, so the order
    of summation does not depend on timing."""
    (count, inner), outer = x.shape, len(weight)
    out = x.new_empty(count, outer)
    fp8, narrow = weight.dtype == torch.uint8, weight.view(torch.int8)  # whose sign is wanted, of either
    rows = max(16, triton.next_power_of_2(count))
    columns, depth, warps, stages = _TILES[rows]
    _few_rows[(triton.cdiv(outer, columns),)](
        x.contiguous(), narrow, narrow if scale is None else scale, out, count, outer, inner, fp8, scale is not None,
        rows, columns, depth,
        num_warps=warps, num_stages=min(2, stages) if x.dtype == torch.float32 else stages,
    )  # fmt: skip
    return out


@triton.jit
def _few_rows(
    x, weight, scale, out, count, outer, inner, FP8: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = row[:, None] < count
    wanted = column[None, :] < outer
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, DEPTH):
        k = start + tl.arange(0, DEPTH)
        a = tl.load(x + row[:, None] * inner + k[None, :], there & (k < inner)[None, :], 0.0)
        b = tl.load(weight + column[None, :] * inner + k[:, None], wanted & (k < inner)[:, None], 0)
        if FP8:  # the bits of a 256th of the number in fp16
            b = ((b.to(tl.int16) << 7) & -16385).to(tl.float16, bitcast=True)
        total = tl.dot(a, b.to(a.dtype), total, input_precision="ieee")
    if FP8:
        total *= 256
    if SCALED:
        total *= tl.load(scale + column, column < outer, 0.0)[None, :]
    tl.store(out + row[:, None] * outer + column[None, :], total.to(out.dtype.element_ty), there & wanted)
