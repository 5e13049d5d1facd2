"""Triton kernel of records.py: a program stores one token, and reads its distribution once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
MOST = 16  # values of a kind


def write(
    table: Tensor,
    tokens: Tensor,
    position: Tensor,
    meant: Tensor,
    token: Tensor | None,
    p: Tensor | None,
    columns: Tensor,
    values: tuple[Tensor, ...],
) -> None:
    """See records.write. The table, tokens, and the last dimension of p must be dense."""
    batch, size, fields = table.shape
    shape = batch, position.shape[1]
    integers, floats = (
        [value.expand(shape) for value in values if value.is_floating_point() == real] for real in (False, True)
    )
    # A tensor that stands for None is never read.
    ints = torch.stack(integers) if integers else tokens
    reals = torch.stack(floats) if floats else table
    position, meant = position.expand(shape), meant.expand(shape)
    chosen = position if token is None else token.expand(shape)
    probs = table if p is None else p.expand(*shape, -1)
    _write[(shape[0] * shape[1],)](
        table,
        tokens,
        position,
        *position.stride(),
        meant,
        *meant.stride(),
        chosen,
        *chosen.stride(),
        probs,
        *probs.stride()[:2],
        columns,
        ints,
        reals,
        shape[0] * shape[1],
        shape[1],
        size,
        fields,
        len(integers),
        len(floats),
        probs.shape[-1],
        TOKEN=token is not None,
        PROBS=p is not None,
        MOST=MOST,
        BLOCK=BLOCK,
        num_warps=8,
    )


@triton.jit
def _write(
    table,
    tokens,
    position,
    position_row,
    position_column,
    meant,
    meant_row,
    meant_column,
    token,
    token_row,
    token_column,
    p,
    p_row,
    p_column,
    columns,
    ints,
    floats,
    total,
    count,
    size,
    fields,
    integers,
    reals,
    vocab,
    TOKEN: tl.constexpr,
    PROBS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token of [B, count], if it is meant. ``size``: slots of an image; ``fields``: numbers per slot."""
    i = tl.program_id(0)
    row = (i // count).to(tl.int64)
    column = (i % count).to(tl.int64)
    if tl.load(meant + row * meant_row + column * meant_column):
        place = row * size + tl.load(position + row * position_row + column * position_column)
        table += place * fields
        n = tl.arange(0, MOST)
        whole = tl.load(ints + n * total + i, mask=n < integers, other=0)
        tl.store(table + tl.load(columns + n, mask=n < integers, other=0), whole.to(tl.float32), mask=n < integers)
        columns += integers
        real = tl.load(floats + n * total + i, mask=n < reals, other=0.0)
        tl.store(table + tl.load(columns + n, mask=n < reals, other=0), real, mask=n < reals)
        columns += reals
        if TOKEN:
            x = tl.load(token + row * token_row + column * token_column)
            tl.store(tokens + place, x)
            if PROBS:
                p += row * p_row + column * p_column
                sums = tl.zeros([BLOCK], tl.float32)
                largest = tl.zeros([BLOCK], tl.float32)
                for start in range(0, vocab, BLOCK):
                    k = start + tl.arange(0, BLOCK)
                    probs = tl.load(p + k, mask=k < vocab, other=0.0)
                    sums -= tl.where(probs == 0, 0.0, probs * tl.log(probs))
                    largest = tl.maximum(largest, probs)
                tl.store(table + tl.load(columns), tl.load(p + x))
                tl.store(table + tl.load(columns + 1), tl.sum(sums, 0))
                tl.store(table + tl.load(columns + 2), tl.max(largest, 0))
