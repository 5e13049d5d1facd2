"""Triton kernels of cache.py: the mask of a forward pass, and moving accepted tokens in all layers in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


def open_slots(
    slots: Tensor,
    lengths: Tensor,
    columns: Tensor,
    tree_mask: Tensor | None,
    count: int,
    uncommitted: int,
    reach: int,
    like: Tensor,
) -> Tensor:
    """See cache.open_slots."""
    rows, capacity = slots.shape
    mask = like.new_empty((rows, 1, count, reach))
    tree = slots[..., None] if tree_mask is None else tree_mask  # never read if there is none
    _open_slots[(rows * count, triton.cdiv(reach, BLOCK))](
        slots,
        slots.stride(0),
        lengths.contiguous(),
        tree,
        *tree.stride(),
        mask,
        count,
        uncommitted,
        reach,
        capacity,
        TREE=tree_mask is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return mask


@triton.jit
def _open_slots(
    slots,
    slots_row,
    lengths,
    tree,
    tree_row,
    tree_token,
    tree_column,
    mask,
    count,
    uncommitted,
    reach,
    capacity,
    TREE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one token's mask; the program of the first block stores the token's slot."""
    i = tl.program_id(0)
    row = (i // count).to(tl.int64)
    token = i % count
    length = tl.load(lengths + row)
    here = length + uncommitted + token
    if tl.program_id(1) == 0:
        tl.store(slots + row * slots_row + token, tl.minimum(here, capacity - 1))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < reach
    if TREE:
        offset = column - length
        fed = inside & (offset >= 0) & (offset < uncommitted + count)
        tree += row * tree_row + token * tree_token
        seen = (offset < 0) | (tl.load(tree + offset * tree_column, mask=fed, other=0).to(tl.int32) != 0)
    else:
        seen = column <= here
    tl.store(mask + i.to(tl.int64) * reach + column, tl.where(seen, 0.0, float("-inf")), mask=inside)


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
