"""Triton kernel of guesses.py: a program reads blocks of two distributions and writes their mean."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def mean_probs(rows: Tensor, known: Tensor, position: Tensor, stride: int) -> Tensor:
    """See guesses.mean_probs."""
    batch, slots, vocab = rows.shape
    count = position.shape[1]
    probs = torch.empty((batch, count, vocab), device=rows.device)
    _mean_probs[(batch * count, triton.cdiv(vocab, BLOCK))](
        rows,
        rows.stride(0),
        rows.stride(1),
        known,
        known.stride(0),
        position,
        *position.stride(),
        probs,
        stride,
        slots,
        count,
        vocab,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return probs


@triton.jit
def _mean_probs(
    rows,
    rows_image,
    rows_slot,
    known,
    known_image,
    position,
    position_image,
    position_column,
    probs,
    stride,
    slots,
    count,
    vocab,
    BLOCK: tl.constexpr,
):
    """A block of one row of probs [B, count, vocab]."""
    image = (tl.program_id(0) // count).to(tl.int64)
    column = (tl.program_id(0) % count).to(tl.int64)
    last = tl.load(known + image * known_image)
    place = tl.load(position + image * position_image + column * position_column)
    above = place - (place - last + stride - 1) // stride * stride  # place > last
    above = tl.where(above < 0, last, above)
    left = tl.where(last // stride == place // stride, last, above)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows += image * rows_image + i
    a = tl.load(rows + left % slots * rows_slot, mask=i < vocab, other=0.0)
    b = tl.load(rows + above % slots * rows_slot, mask=i < vocab, other=0.0)
    tl.store(probs + tl.program_id(0).to(tl.int64) * vocab + i, (a + b) * 0.5, mask=i < vocab)
