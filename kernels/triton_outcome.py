"""What the kernels of verification_triton.py write: the outcome of a tree or chain, in three tensors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .verification import Verified

BONUS = tl.constexpr(4)


def outputs(like: Tensor, batch: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Path, token, source and rank; q, ratio and leak; the number accepted."""
    device = like.device
    return (torch.empty((4, batch, levels + 1), dtype=torch.int64, device=device),
            torch.empty((3, batch, levels + 1), device=device), torch.empty(batch, dtype=torch.int64, device=device))


def verified(ints: Tensor, floats: Tensor, accepted: Tensor) -> Verified:
    path, token, source, rank = ints.unbind()
    return Verified(path[:, :-1], accepted, token, source, rank, *floats.unbind())


@triton.jit
def clear(ints, floats, root, size, columns, COLUMNS: tl.constexpr):
    """No test at any column of this image: path 0, the root's token, source BONUS."""
    i = tl.arange(0, COLUMNS)
    inside = i < columns
    nothing = tl.zeros([COLUMNS], tl.int64)
    tl.store(ints + i, nothing, mask=inside)
    tl.store(ints + size + i, nothing + root, mask=inside)
    tl.store(ints + 2 * size + i, nothing + BONUS, mask=inside)
    tl.store(ints + 3 * size + i, nothing, mask=inside)
    for field in tl.static_range(3):
        tl.store(floats + field * size + i, tl.zeros([COLUMNS], tl.float32), mask=inside)
    tl.debug_barrier()


@triton.jit
def note(ints, floats, size, column, source, rank, q, ratio, leak):
    """The last test at a column."""
    tl.store(ints + 2 * size + column, source.to(tl.int64))
    tl.store(ints + 3 * size + column, rank.to(tl.int64))
    tl.store(floats + column, q)
    tl.store(floats + size + column, ratio)
    tl.store(floats + 2 * size + column, leak)


@triton.jit
def finish(ints, accepted, size, levels, number, last):
    """The number accepted, and the token behind them (which the last column holds in any case)."""
    tl.store(accepted, number.to(tl.int64))
    tl.store(ints + size + number, last)
    tl.store(ints + size + levels, last)
