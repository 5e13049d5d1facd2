"""Triton kernel of cache.py: moving accepted tokens in all layers in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def keep_path(buffer: Tensor, lengths: Tensor, path: Tensor) -> None:
    """See cache.keep_path. The last dimension of the buffer must be dense."""
    layers, rows, heads, capacity, dim = buffer.shape
    _keep_path[(layers * rows * heads,)](
        buffer,
        *buffer.stride()[:4],
        lengths.contiguous(),
        path,
        *path.stride(),
        rows,
        heads,
        capacity,
        path.shape[1],
        dim,
        BLOCK_P=triton.next_power_of_2(path.shape[1]),
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=4,
    )


@triton.jit
def _keep_path(
    buffer,
    layer_stride,
    row_stride,
    head_stride,
    slot_stride,
    lengths,
    path,
    path_row,
    path_column,
    rows,
    heads,
    capacity,
    count,
    dim,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One head of one row of one layer. Everything is read before anything is written: sources and targets overlap."""
    i = tl.program_id(0)
    row = i // heads % rows
    place = tl.arange(0, BLOCK_P)
    kept = tl.load(path + row * path_row + place * path_column, mask=place < count, other=0)
    length = tl.load(lengths + row)
    last = tl.zeros([BLOCK_P], tl.int64) + (capacity - 1)
    target = tl.minimum(length + place, last)
    source = tl.minimum(length + tl.maximum(kept, place.to(tl.int64)), last)
    d = tl.arange(0, BLOCK_D)
    there = ((place < count) & (source != target))[:, None] & (d < dim)[None, :]
    buffer += (i // (heads * rows)).to(tl.int64) * layer_stride + row.to(tl.int64) * row_stride + d[None, :]
    buffer += (i % heads).to(tl.int64) * head_stride
    slots = tl.load(buffer + source[:, None] * slot_stride, mask=there)
    tl.debug_barrier()
    tl.store(buffer + target[:, None] * slot_stride, slots, mask=there)
