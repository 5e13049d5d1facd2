"""First guesses of Jacobi decoding: the laws of a position's neighbours in the image."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import accelerated


def neighbours_of(known: Tensor, position: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Left and upper neighbours [B, T] (int64) of positions [B, T] behind ``known`` [B, 1], the last with a law.

    Left: ``known``, if it is in the same row, else the upper one. Upper: as many rows up as it takes to be known; in
    the first row ``known``.
    """
    above = known - (known - position) % stride
    above = torch.where(above < 0, known, above)
    return torch.where(known // stride == position // stride, known, above), above


@accelerated
def mean_law(rows: Tensor, known: Tensor, position: Tensor, stride: int) -> Tensor:
    """Laws [B, T, V]: half of the left, half of the upper neighbour's. rows [B, R, V] (fp32): that of position i lies
    in slot i mod R; known, position and stride as above."""
    batch, slots, _ = rows.shape
    first = torch.arange(0, batch * slots, slots, device=rows.device)[:, None]
    left, above = (
        rows.flatten(0, 1).index_select(0, (first + source % slots).flatten()).unflatten(0, source.shape)
        for source in neighbours_of(known, position, stride)
    )
    return left.add_(above).div_(2)
