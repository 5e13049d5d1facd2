"""Rotary positions: rotating queries and keys in place, and storing keys and values on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import accelerated


def factors_of(cos: Tensor, sin: Tensor, halves: bool) -> Tensor:
    """Cosines and sines [R or 1, T, d / 2] as ``rotate`` takes them: [.., d] pairs of both, or for ``halves`` [.., 2d]
    what either half is multiplied with, and then what the other half is."""
    if halves:
        return torch.cat((cos, cos, -sin, sin), dim=-1)
    return torch.stack((cos, sin), dim=-1).flatten(-2)


def rotate(x: Tensor, factors: Tensor, halves: bool) -> None:
    """Rotate x [R, T, H, d] in place, in fp32: two adjacent channels, or with ``halves`` the i-th of either half."""
    wide = x.float()  # x itself if it is fp32
    if halves:
        cos, sin = factors.unsqueeze(2).chunk(2, dim=-1)
        x.copy_(wide * cos + wide.roll(wide.shape[-1] // 2, -1) * sin)
        return
    turns = torch.view_as_complex(factors.unflatten(-1, (-1, 2))).unsqueeze(2)
    torch.view_as_complex(wide.unflatten(-1, (-1, 2))).mul_(turns)
    if wide.dtype != x.dtype:
        x.copy_(wide)


def _copied(
    every: Tensor, factors: Tensor, halves: bool, buffer: Tensor, rows: Tensor, slots: Tensor
) -> tuple:
    """A trial of ``rotate_and_keep``."""
    return every.clone(), factors, halves, buffer.clone(), rows, slots


@accelerated(trial=_copied)
def rotate_and_keep(
    every: Tensor, factors: Tensor, halves: bool, buffer: Tensor, rows: Tensor, slots: Tensor
) -> None:
    """Rotate queries and keys in place, and store keys and values.

    every [R, T, H + 2 Hkv, d]: queries, keys, values; factors as of ``factors_of`` (fp32); buffer [R, 2 Hkv, N, d];
    rows [R, 1] counts from 0; slots [R, T] (int64): where each token's keys and values go.
    """
    kept = buffer.shape[1]
    rotate(every[:, :, : every.shape[2] - kept // 2], factors, halves)
    buffer[rows, :, slots] = every[:, :, every.shape[2] - kept :]
