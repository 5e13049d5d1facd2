"""Places in a cache of keys and values: those of a pass's tokens, and those where the accepted ones belong."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import accelerated


def _own_slots(slots: Tensor, *rest: Tensor | int | None) -> tuple:
    """A trial of ``open_slots``."""
    return slots.clone(), *rest


@accelerated(trial=_own_slots)
def open_slots(
    slots: Tensor, lengths: Tensor, columns: Tensor, tree_mask: Tensor | None, count: int, behind: int, reach: int,
    like: Tensor,
) -> Tensor:
    """Put the slots of a pass's ``count`` tokens, after ``lengths`` [rows] and ``behind`` uncommitted tokens, in the
    first columns of slots [rows, capacity], in place. Slots past the capacity are folded onto the last one.

    Returns what is added to attention scores [rows, 1, count, reach], in the dtype of ``like``: 0 where a token sees a
    slot, else minus infinity. It sees all committed tokens and, with tree_mask [rows, count, behind + count] (bool),
    uncommitted token j where that is true; None is a chain. columns [capacity] (int64) counts from 0.
    """
    here = lengths[:, None] + columns[behind : behind + count]
    slots[:, :count] = here.clamp(max=len(columns) - 1)
    if tree_mask is None:
        hidden = columns[:reach] > here[..., None]
    else:
        fed = behind + count
        offset = columns[:reach] - lengths[:, None]
        index = offset.clamp(0, fed - 1)[:, None].expand(-1, count, -1)
        hidden = (offset >= 0)[:, None] & ~(tree_mask.gather(2, index) & (offset < fed)[:, None])
    return like.new_zeros((len(lengths), 1, count, reach)).masked_fill_(hidden[:, None], -torch.inf)


def _one_layer(buffer: Tensor, lengths: Tensor, path: Tensor) -> tuple:
    """A trial of ``keep_path``: every layer is moved alike, and a whole cache may have gigabytes."""
    return buffer[-1:].clone(), lengths, path


@accelerated(trial=_one_layer)
def keep_path(buffer: Tensor, lengths: Tensor, path: Tensor) -> None:
    """In every layer and head, move slot lengths + path[:, i] to slot lengths + i, in place.

    buffer [layers, rows, heads, capacity, d]; lengths [rows]; path [rows, P] (int64): increasing offsets of the slots
    to keep. Entries with path[:, i] < i fill up shorter paths: nothing moves there. Slots past the capacity are folded
    onto the last one.
    """
    target = torch.arange(path.shape[1], device=path.device)
    target, source = ((lengths[:, None] + x).clamp(max=buffer.shape[3] - 1) for x in (target, path.maximum(target)))
    rows = torch.arange(len(path), device=path.device)[:, None]
    buffer[:, rows, :, target] = buffer[:, rows, :, source]
