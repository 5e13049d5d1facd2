"""Triton kernels of noise.py: random numbers in one launch each. Triton's own generator is the same Philox-4x32-10."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .noise import draws

BLOCK = 128


def uniform(positions: Tensor, keys: Tensor, purposes: tuple[int, ...], draw: int | Tensor) -> Tensor:
    """See noise.uniform."""
    packed = sum(purpose << 8 * i for i, purpose in enumerate(purposes))
    rows, columns = len(keys), positions.shape[1]
    out = torch.empty((len(purposes), rows, columns), device=positions.device)
    grid = (triton.cdiv(rows * columns, BLOCK),)
    _uniform[grid](*_counter(positions, keys, draw), out, PURPOSES=packed, P=len(purposes), BLOCK=BLOCK)
    return out


def gumbel(positions: Tensor, keys: Tensor, count: int, purpose: int, draw: int | Tensor) -> Tensor:
    """See noise.gumbel."""
    return _vectors(positions, keys, count, purpose, draw, normal=False)


def normal(positions: Tensor, keys: Tensor, count: int, purpose: int, draw: int | Tensor) -> Tensor:
    """See noise.normal."""
    return _vectors(positions, keys, count, purpose, draw, normal=True)


def _vectors(positions: Tensor, keys: Tensor, count: int, purpose: int, draw: int | Tensor, normal: bool) -> Tensor:
    rows, columns = len(keys), positions.shape[1]
    out = torch.empty((rows, columns, count), device=positions.device)
    grid = (rows * columns, triton.cdiv(count, 4 * BLOCK))
    _vector[grid](*_counter(positions, keys, draw), out, count, purpose, NORMAL=normal, BLOCK=BLOCK)
    return out


def _counter(positions: Tensor, keys: Tensor, draw: int | Tensor) -> tuple:
    """The first arguments of both kernels: position, draw and key of every number, with their strides."""
    positions = positions.expand(len(keys), -1)
    draw = draws(draw, positions).expand(positions.shape)
    return positions, *positions.stride(), draw, *draw.stride(), keys.contiguous(), *positions.shape


@triton.jit
def _load(positions, position_row, position_column, draws, draw_row, draw_column, keys, row, column, inside):
    """Position, draw (uint32) and seed (int64) of the numbers at (row, column)."""
    position = tl.load(positions + row * position_row + column * position_column, mask=inside, other=0)
    draw = tl.load(draws + row * draw_row + column * draw_column, mask=inside, other=0)
    low = tl.load(keys + 2 * row, mask=inside, other=0)
    high = tl.load(keys + 2 * row + 1, mask=inside, other=0)
    return position.to(tl.uint32), draw.to(tl.uint32), low | (high << 32)


@triton.jit
def _uniform(
    positions, position_row, position_column, draws, draw_row, draw_column, keys, rows, columns,
    out,
    PURPOSES: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers of P purposes, packed in bytes."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < rows * columns
    position, draw, seed = _load(
        positions, position_row, position_column, draws, draw_row, draw_column, keys, i // columns, i % columns, inside
    )
    zero = tl.zeros([BLOCK], tl.uint32)
    for p in tl.static_range(P):
        word, _, _, _ = tl.philox(seed, position, zero + ((PURPOSES >> (8 * p)) & 255), draw, zero)
        tl.store(out + p * rows * columns + i, (word >> 8).to(tl.float32) * (1.0 / 16777216), mask=inside)


@triton.jit
def _vector(
    positions, position_row, position_column, draws, draw_row, draw_column, keys, rows, columns,
    out, count, purpose,
    NORMAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Four numbers for each of BLOCK lanes of one position."""
    i = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.uint32)
    position, draw, seed = _load(
        positions, position_row, position_column, draws, draw_row, draw_column, keys, i // columns, i % columns, True
    )
    a, b, c, d = tl.philox(seed, zero + position, zero + purpose, zero + draw, lane.to(tl.uint32))
    a, b, c, d = _fraction(a), _fraction(b), _fraction(c), _fraction(d)
    if NORMAL:
        a, b = _pair(a, b)
        c, d = _pair(c, d)
    else:
        a, b, c, d = _gumbel(a), _gumbel(b), _gumbel(c), _gumbel(d)
    out += i.to(tl.int64) * count
    tl.store(out + 4 * lane, a, mask=4 * lane < count)
    tl.store(out + 4 * lane + 1, b, mask=4 * lane + 1 < count)
    tl.store(out + 4 * lane + 2, c, mask=4 * lane + 2 < count)
    tl.store(out + 4 * lane + 3, d, mask=4 * lane + 3 < count)


@triton.jit
def _fraction(word):
    return (word.to(tl.float32) + 0.5) * (1.0 / 4294967296)


@triton.jit
def _gumbel(v):
    """-log(-log(1 - v)) without loss of digits in 1 - v: log(1 + x) = x log(y) / (y - 1) for y = 1 + x rounded."""
    v = tl.minimum(tl.maximum(v, 1.0 / 8589934592), 1 - 1.0 / 16777216)
    y = 1 - v
    return -tl.log(tl.where(y == 1, v, v * tl.log(y) / (y - 1)))


@triton.jit
def _pair(v, w):
    """Two normal numbers from two uniform ones."""
    radius = tl.sqrt(-2 * tl.log(tl.maximum(v, 1.0 / 8589934592)))
    angle = w * 6.283185307179586
    return radius * tl.cos(angle), radius * tl.sin(angle)
