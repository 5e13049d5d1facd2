"""GLM-Image's positions: on three axes (time, row, column), through a prompt, a small preview and the image."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from .backbone import Rotation

PREVIEW = 16  # tokens per side of a square image's preview


def preview_grid(grid: tuple[int, int], side: int = PREVIEW) -> tuple[int, int]:
    """Grid (rows, cols) of the preview of an image of ``grid``: its shape, with the area of a square of ``side`` tokens
    per side. Rounded down in this order of operations, as for training."""
    rows, cols = grid
    ratio = rows / cols
    return int(sqrt(ratio) * side), int(sqrt(1 / ratio) * side)


@dataclass(frozen=True)
class AxisPositions:
    """Three positions per token: time, row and column.

    sections: how many of the rotated pairs of channels follow each of the three, in this order; pair i of all P turns
    by position * theta^(-i / P). The other pairs of a head stay as they are. side: see ``preview_grid``.

    Prompt token i stands at (i, i, i). The tokens of a grid that starts at s stand at (s, s + row, s + column): the
    preview's s is the length of the prompt, and the image's s follows the preview's larger side.
    """

    sections: tuple[int, int, int]
    theta: float = 10000.0
    side: int = PREVIEW

    def prompt(self, count: int, head_dim: int, device: torch.device | str) -> Rotation:
        """Rotation [1, count, ...] of a prompt of ``count`` tokens."""
        places = torch.arange(count, device=device)[None]
        return self._rotation(places, places, places, head_dim)

    def image(self, places: Tensor, prompts: Tensor, grid: tuple[int, int], head_dim: int) -> Rotation:
        """Rotation [R, T, ...] of the tokens at ``places`` [R, T] of an image (see Positions)."""
        small = preview_grid(grid, self.side)
        lead = small[0] * small[1]
        first = places < lead
        start = prompts[:, None] + torch.where(first, 0, max(small))
        place, cols = torch.where(first, places, places - lead), torch.where(first, small[1], grid[1])
        return self._rotation(start, start + place // cols, start + place % cols, head_dim)

    def _rotation(self, time: Tensor, row: Tensor, col: Tensor, head_dim: int) -> Rotation:
        """Rotation of tokens at these positions [R, T]."""
        pairs = sum(self.sections)
        steps = torch.arange(pairs, device=time.device, dtype=torch.float32)
        parts = (self.theta ** (-steps / pairs)).split(self.sections)
        angles = [place[..., None] * part for place, part in zip((time, row, col), parts, strict=True)]
        still = torch.zeros((*time.shape, head_dim // 2 - pairs), device=time.device)
        turned = torch.cat((*angles, still), dim=-1)
        return Rotation(turned.cos(), turned.sin(), halves=True)
