"""Sizes of images in pixels, and which a model generates."""

from __future__ import annotations

from collections.abc import Iterable
from math import log

Grid = tuple[int, int]  # rows, columns of tokens


def unsupported_size(width: int, height: int, grids: Iterable[Grid], side: int) -> str:
    """Error message for a size in pixels that a model with tokens of ``side`` pixels does not generate, with the
    nearest of those that it does: ``grids``."""
    asked = max(1, height), max(1, width)  # which has a logarithm
    legal = [(rows * side, cols * side) for rows, cols in grids]
    near = sorted(legal, key=lambda size: sum(abs(log(a / b)) for a, b in zip(size, asked, strict=True)))
    sizes = ", ".join(f"{w} x {h}" for h, w in near[:3])
    end = f". The nearest supported sizes are {sizes} pixels." if near[1:] else f", only {sizes} pixels."
    tokens = f"{width / side:g} x {height / side:g} tokens"
    return f"This model does not generate {width} x {height} pixels ({tokens}){end}"
