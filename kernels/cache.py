"""Slots of a key/value cache: those of accepted tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Accelerated


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
