"""Moving accepted tokens of a tree to where they belong in a cache of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import accelerated


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
