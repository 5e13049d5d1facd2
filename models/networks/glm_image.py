"""GLM-Image's positions: on three axes (time, row, column), through source images, a prompt, a small preview and the
image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from .positions import Positions, Rotation

PREVIEW = 16  # tokens per side of a square image's preview


def preview_grid(grid: tuple[int, int], side: int = PREVIEW) -> tuple[int, int]:
    """Grid (rows, cols) of the preview of an image of ``grid``: its shape, with the area of a square of ``side`` tokens
    per side. Rounded down in this order of operations, as for training."""
    rows, cols = grid
    ratio = rows / cols
    return int(sqrt(ratio) * side), int(sqrt(1 / ratio) * side)


@dataclass(frozen=True)
class AxisPositions(Positions):
    """Three positions per token: time, row and column.

    sections: how many of the rotated pairs of channels follow each of the three, in this order; pair i of all P turns
    by position * theta^(-i / P). The other pairs of a head stay as they are. side: see ``preview_grid``. images: grids
    of the source images, with which the prompt begins, each between two tokens.

    A token of the prompt stands at (s, s, s), where s counts from 0; the tokens of a grid that starts at s stand at
    (s, s + row, s + column), and what follows them at s + the grid's larger side. Grids are source images, the preview,
    which starts at the end of the prompt, and the image. After source images there is no preview.
    """

    sections: tuple[int, int, int]
    theta: float = 10000.0
    side: int = PREVIEW
    images: tuple[tuple[int, int], ...] = ()

    def reading(self, images: Sequence[tuple[int, int]]) -> AxisPositions:
        """The positions of prompts that begin with images of these grids (rows, cols)."""
        return replace(self, images=tuple(images))

    def prompt(self, count: int, head_dim: int, device: torch.device | str) -> Rotation:
        """Rotation [1, count, ...] of a prompt of ``count`` tokens."""
        parts, start = [], 0  # of [3, n]
        for rows, cols in self.images:
            begin = torch.full((3, 1), start)
            axes = torch.zeros(1, dtype=torch.int64), torch.arange(rows), torch.arange(cols)
            start += 1 + max(rows, cols)
            parts += [begin, begin + 1 + torch.cartesian_prod(*axes).T, torch.full((3, 1), start)]
            start += 1
        words = torch.arange(count - sum(part.shape[1] for part in parts)) + start
        places = torch.cat((*parts, words.expand(3, -1)), dim=1).to(device)
        time, row, col = places[:, None]
        return self._rotation(time, row, col, head_dim)

    def image(self, places: Tensor, prompts: Tensor, grid: tuple[int, int], head_dim: int) -> Rotation:
        """Rotation [R, T, ...] of the tokens at ``places`` [R, T] of an image (see Positions)."""
        small = (0, 0) if self.images else preview_grid(grid, self.side)
        lead = small[0] * small[1]
        first = places < lead
        fewer = sum(rows * cols - max(rows, cols) for rows, cols in self.images)  # positions than prompt tokens
        start = prompts[:, None] - fewer + torch.where(first, 0, max(small))
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
