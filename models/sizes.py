"""Sizes of images, in tokens and in pixels, and which a model generates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import log
from pathlib import Path
from typing import Protocol

from ..limits.limits import SIDE
from ..model_loaders.files.checkpoint import title
from ..model_loaders.files.errors import CheckpointError

Grid = tuple[int, int]  # rows, columns of tokens


def legal_grid(grid: Sequence[int]) -> Grid:
    """A grid as a tuple. Raises ValueError unless it is two integers from 1 to SIDE."""
    if len(grid) != 2 or not 1 <= min(grid) <= max(grid) <= SIDE:
        raise ValueError(f"grid is {tuple(grid)!r:.100}, but must be two numbers (rows, columns) between 1 and {SIDE}.")
    return int(grid[0]), int(grid[1])


def nearest_grids(wanted: Grid, grids: Iterable[Grid]) -> list[Grid]:
    """The three grids whose sides differ least from the wanted ones, by ratio."""

    def distance(grid: Grid) -> float:
        return sum(abs(log(side / asked)) for side, asked in zip(grid, wanted, strict=True))

    return sorted(grids, key=distance)[:3]


def choose_grid(path: Path, wanted: Sequence[int] | None, default: Sequence[int], grids: Sequence[Grid]) -> Grid:
    """The grid that the user ``wanted``, or the default one of the model in ``path``. Raises CheckpointError, which
    names the nearest supported ones, unless it is one of ``grids``."""
    grid = legal_grid(wanted or default)
    if grid not in grids:
        near = [f"{rows} x {cols}" for rows, cols in nearest_grids(grid, grids)]
        are = "grids are" if near[1:] else "grid is"
        raise CheckpointError(
            f"{title(path)} does not generate {grid[0]} x {grid[1]} tokens (rows x columns). Set grid to auto; the "
            f"nearest supported {are} {' or '.join(near)}."
        )
    return grid


class Sized(Protocol):
    """A model: its default grid, all supported ones, whether it generates any other, and pixels per token side."""

    grid: Grid
    grids: tuple[Grid, ...]
    any_grid: bool
    pixels_per_token: int


def check_grid(model: Sized, rows: int | None = None, cols: int | None = None) -> Grid:
    """The grid to generate, by default the model's. Raises ValueError for one that it does not generate."""
    grid = rows or model.grid[0], cols or model.grid[1]
    if model.any_grid:
        return legal_grid(grid)
    if grid not in model.grids:
        height, width = (tokens * model.pixels_per_token for tokens in grid)
        raise ValueError(unsupported_size(model, width, height))
    return grid


def unsupported_size(model: Sized, width: int, height: int) -> str:
    """Error message for a size in pixels that a model does not generate, with the nearest of those that it does."""
    side, grids = model.pixels_per_token, model.grids
    if model.any_grid:
        grids = product(*({max(1, pixels // side), pixels // side + 1} for pixels in (height, width)))
    asked = max(1, height), max(1, width)  # which has a logarithm
    near = nearest_grids(asked, [(rows * side, cols * side) for rows, cols in grids])
    sizes = ", ".join(f"{w} x {h}" for h, w in near)
    end = f". The nearest supported sizes are {sizes} pixels." if near[1:] else f", only {sizes} pixels."
    tokens = f"{width / side:g} x {height / side:g} tokens"
    return f"This model does not generate {width} x {height} pixels ({tokens}){end}"
