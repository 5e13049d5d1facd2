"""Triton kernel of neighbours.py: one program per draft."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def nearest(p, norm, table, count, budget, BLOCK: tl.constexpr):
    """c_J and J of the ``count`` codes that a row of the table lists, with probabilities p / norm."""
    limit = tl.where(budget > 0, budget, -1.0)
    before = 0.0
    most = 0.0
    number = 0
    for start in range(0, count, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = j < count
        near = tl.load(table + j, mask=inside, other=0)
        mass = tl.div_rn(tl.load(p + near, mask=inside, other=0.0), norm)
        cumulative = before + tl.cumsum(mass)
        within = inside & (cumulative <= limit)
        most = tl.maximum(most, tl.max(tl.where(within, cumulative, 0.0)))
        number += tl.sum(within.to(tl.int32))
        before += tl.sum(mass)
    return most, number


@triton.jit
def _aggregate(p, token, budget, table, mass, number, vocab, codes, columns, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(token + row)
    most = tl.where(x < codes, tl.load(budget + row), 0.0)
    x = tl.minimum(x, codes - 1)
    absorbed, found = nearest(p + row * vocab, 1.0, table + x * columns, count, most, BLOCK)
    tl.store(mass + row, absorbed)
    tl.store(number + row, found.to(tl.int64))


def aggregate(p: Tensor, token: Tensor, budget: Tensor, table: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See neighbours.aggregate."""
    mass, number = torch.empty_like(token, dtype=p.dtype), torch.empty_like(token)
    _aggregate[(token.numel(),)](
        p.contiguous(),
        token.contiguous(),
        budget.expand_as(token).contiguous(),
        table,
        mass,
        number,
        p.shape[-1],
        *table.shape,
        count,
        BLOCK,
    )
    return mass, number
