"""First guesses of Jacobi decoding: the distributions of a position's neighbours in the image."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Accelerated


def neighbours_of(known: Tensor, position: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Left and upper neighbours [B, T] (int64) of positions [B, T] after ``known`` [B, 1], the last known position.

    Left: ``known`` if it is in the same row, else the upper neighbour. Upper: the nearest known position in the same
    column; if there is none, ``known``.
    """
    above = known - (known - position) % stride
    above = torch.where(above < 0, known, above)
    return torch.where(known // stride == position // stride, known, above), above


@Accelerated
def mean_probs(rows: Tensor, known: Tensor, position: Tensor, stride: int) -> Tensor:
    """The mean [B, T, V] of the left and the upper neighbour's probabilities. rows [B, R, V] (fp32): position i has
    slot i mod R; known, position: see ``neighbours_of``; stride: positions per row."""
    batch, slots, _ = rows.shape
    first = torch.arange(0, batch * slots, slots, device=rows.device)[:, None]
    left, above = (
        rows.flatten(0, 1).index_select(0, (first + source % slots).flatten()).unflatten(0, source.shape)
        for source in neighbours_of(known, position, stride)
    )
    return left.add_(above).div_(2)
