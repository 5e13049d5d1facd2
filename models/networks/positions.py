"""Positions of tokens, as rotations of queries and keys (rotary positions, Su et al., arXiv:2104.09864)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...kernels.rotation import Norms, factors_of, rotate


class Rotation(NamedTuple):
    """Cosines and sines [rows or 1, T, head_dim / 2] (fp32) that rotate pairs of query and key channels.

    A pair is two adjacent channels (LlamaGen), or with ``halves`` the i-th channel of either half (Chameleon).
    """

    cos: Tensor
    sin: Tensor
    halves: bool = False

    def table(self) -> RotaryTable:
        """The factors, computed once for all layers of a forward pass."""
        return RotaryTable(factors_of(self.cos, self.sin, self.halves), self.halves)

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x [R, H, T, head_dim] in fp32 and return it in its own dtype."""
        rotated = x.transpose(1, 2).clone()
        rotate(rotated, *self.table()[:2])
        return rotated.transpose(1, 2)


class RotaryTable(NamedTuple):
    """Rotary factors shared by all layers of a forward pass, and one layer's norms of queries and keys.

    factors: see kernels.rotation.factors_of; halves: see Rotation; norms: see kernels.rotation.Norms.
    """

    factors: Tensor
    halves: bool
    norms: Norms | None = None

    def table(self) -> RotaryTable:
        """Itself, as a Rotation gives one."""
        return self


class Positions(Protocol):
    """The positions of a model family."""

    def prompt(self, count: int, head_dim: int, device: torch.device | str) -> Rotation:
        """Rotation [1, count, ...] of a prompt of ``count`` tokens."""
        ...

    def image(self, places: Tensor, prompts: Tensor, grid: tuple[int, int], head_dim: int) -> Rotation:
        """Rotation [R, T, ...] of the tokens at ``places`` [R, T] of an image of the ``grid`` (rows, cols), after
        prompts of ``prompts`` [R] tokens. Past the end of the image any rotation is valid."""
        ...

    def reading(self, images: Sequence[tuple[int, int]]) -> Positions:
        """The positions of prompts with images of these grids (rows, cols). Default: the same, images being read like
        words."""
        return self


def grid_angles(places: Tensor, cols: int, head_dim: int, theta: float = 10000.0) -> Tensor:
    """Angles [..., head_dim / 2] (fp32) of tokens at ``places`` [...] of an image of ``cols`` columns.

    The first half of the channel pairs rotates with the row, the second half with the column, at the frequencies
    theta^(-2i / (head_dim / 2)), i = 0 .. head_dim / 4 - 1.
    """
    half = head_dim // 2
    steps = torch.arange(0, half, 2, device=places.device, dtype=torch.float32)[: half // 2]
    frequencies = theta ** (-steps / half)
    return torch.cat([index[..., None] * frequencies for index in (places // cols, places % cols)], dim=-1)


@dataclass(frozen=True)
class GridPositions(Positions):
    """LlamaGen's (arXiv:2406.06525): image tokens rotate by row and column, prompt tokens are multiplied by zero.

    prompt_keys: prompt tokens are left as they are instead, so that image tokens can attend to some of them (ours).
    """

    theta: float = 10000.0
    prompt_keys: bool = False

    def prompt(self, count: int, head_dim: int, device: torch.device | str) -> Rotation:
        """Rotation [1, count, ...] of a prompt of ``count`` tokens."""
        cos = torch.full((1, count, head_dim // 2), float(self.prompt_keys), device=device)
        return Rotation(cos, torch.zeros_like(cos))

    def image(self, places: Tensor, prompts: Tensor, grid: tuple[int, int], head_dim: int) -> Rotation:
        """Rotation [R, T, ...] of the tokens at ``places`` [R, T] of an image (see Positions)."""
        angles = grid_angles(places, grid[1], head_dim, self.theta)
        return Rotation(angles.cos(), angles.sin())


@dataclass(frozen=True)
class SequencePositions(Positions):
    """Those of language models: positions count prompt and image tokens. Channels i and i + head_dim / 2 are a pair,
    rotated by position * theta^(-2i / head_dim)."""

    theta: float = 10000.0

    def prompt(self, count: int, head_dim: int, device: torch.device | str) -> Rotation:
        """Rotation [1, count, ...] of a prompt of ``count`` tokens."""
        return self._rotation(torch.arange(count, device=device)[None], head_dim)

    def image(self, places: Tensor, prompts: Tensor, grid: tuple[int, int], head_dim: int) -> Rotation:
        """Rotation [R, T, ...] of the tokens at ``places`` [R, T] of an image (see Positions)."""
        return self._rotation(places + prompts[:, None], head_dim)

    def _rotation(self, places: Tensor, head_dim: int) -> Rotation:
        steps = torch.arange(0, head_dim, 2, device=places.device, dtype=torch.float32)
        angles = places[..., None] * self.theta ** (-steps / head_dim)
        return Rotation(angles.cos(), angles.sin(), halves=True)


class Table(NamedTuple):
    """Rotations of the first places of every row's image, looked up instead of computed in every forward pass.

    factors [R, P, ...] (fp32): see kernels.rotation.factors_of; rows [R, 1] (int64) counts from 0.
    """

    factors: Tensor
    rows: Tensor
    halves: bool

    @classmethod
    def of(
        cls,
        positions: Positions,
        places: int,
        prompts: Tensor,
        grid: tuple[int, int],
        head_dim: int,
        into: Table | None = None,
    ) -> Table:
        """The table of ``places`` places of images of the ``grid`` (rows, cols), after prompts of ``prompts`` [R]
        tokens: ``into`` itself, overwritten, if it has these sizes."""
        every = torch.arange(places, device=prompts.device).expand(len(prompts), -1)
        factors, halves, _ = positions.image(every, prompts, grid, head_dim).table()
        if into is None or (into.factors.shape, into.factors.device) != (factors.shape, factors.device):
            return cls(factors, torch.arange(len(prompts), device=prompts.device)[:, None], halves)
        into.factors.copy_(factors)
        return into

    def at(self, places: Tensor) -> RotaryTable:
        """The factors at places [R, T]; places past the last one are clamped to it."""
        return RotaryTable(self.factors[self.rows, places.clamp(max=self.factors.shape[1] - 1)], self.halves)


def rotation_at(
    positions: Positions, prompt: int, count: int, grid: tuple[int, int], head_dim: int, device: torch.device | str
) -> Rotation:
    """Rotation [1, prompt + count, ...] of a prompt of ``prompt`` tokens and the first ``count`` of an image."""
    before = positions.prompt(prompt, head_dim, device)
    places, prompts = torch.arange(count, device=device)[None], torch.tensor([prompt], device=device)
    image = positions.image(places, prompts, grid, head_dim)
    cos, sin = (torch.cat(pair, dim=1) for pair in ((before.cos, image.cos), (before.sin, image.sin)))
    return Rotation(cos, sin, image.halves)
