"""Slots of a key/value cache: those of a forward pass's tokens, and those of the accepted ones."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Accelerated


@Accelerated
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
    """Write the slots of a forward pass's ``count`` tokens to the first columns of slots [rows, capacity], in place.

    The slots follow ``lengths`` [rows] committed and ``uncommitted`` further tokens; those past the capacity are
    clamped to the last slot. columns [capacity] (int64) counts from 0.

    Returns the additive attention mask [rows, 1, count, reach] in the dtype of ``like``: 0 where a token sees a slot,
    else minus infinity. A token sees all committed tokens, and the uncommitted token j where tree_mask
    [rows, count, uncommitted + count] (bool) is true; None is a chain.
    """
    here = lengths[:, None] + columns[uncommitted : uncommitted + count]
    slots[:, :count] = here.clamp(max=len(columns) - 1)
    if tree_mask is None:
        hidden = columns[:reach] > here[..., None]
    else:
        fed = uncommitted + count
        offset = columns[:reach] - lengths[:, None]
        index = offset.clamp(0, fed - 1)[:, None].expand(-1, count, -1)
        hidden = (offset >= 0)[:, None] & ~(tree_mask.gather(2, index) & (offset < fed)[:, None])
    return like.new_zeros((len(lengths), 1, count, reach)).masked_fill_(hidden[:, None], -torch.inf)


@Accelerated
def keep_path(buffer: Tensor, lengths: Tensor, path: Tensor) -> None:
    """In every layer and head, move slot lengths + path[:, i] to slot lengths + i, in place.

    buffer [layers, rows, heads, capacity, d]; lengths [rows]; path [rows, P] (int64): increasing offsets of the slots
    to keep. Entries with path[:, i] < i pad shorter paths and move nothing. Slots past the capacity are clamped to the
    last one.
    """
    target = torch.arange(path.shape[1], device=path.device)
    target, source = ((lengths[:, None] + x).clamp(max=buffer.shape[3] - 1) for x in (target, path.maximum(target)))
    rows = torch.arange(len(path), device=path.device)[:, None]
    buffer[:, rows, :, target] = buffer[:, rows, :, source]
