"""Triton kernels of sampling.py: one program per row, which reads it twice, in blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import drafting
from .noise import row

BLOCK = 2048


@triton.jit
def weights(left, right, minus, i, inside):
    """[left[i] - right[i]]+, or where the int ``minus`` is 0 left[i]; 0 outside."""
    a = tl.load(left + i, mask=inside, other=0.0)
    b = tl.load(right + i, mask=inside & (minus != 0), other=0.0)
    return tl.maximum(a - b, 0.0)


@triton.jit
def sampled(left, right, minus, count, uniform, BLOCK: tl.constexpr):
    """The first i < count whose cumulative weight exceeds uniform times the total. An i of weight zero is never
    sampled: if round-off leaves no such i, it is the last of positive weight; -1 if all weights are zero."""
    sums = tl.zeros([BLOCK], tl.float32)
    places = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        weight = weights(left, right, minus, i, i < count)
        sums += weight
        places = tl.where(weight > 0, i, places)
    threshold = uniform * tl.sum(sums)
    last = tl.max(places)
    before = 0.0
    found = count
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        weight = weights(left, right, minus, i, i < count)
        beyond = (weight > 0) & (before + tl.cumsum(weight) > threshold)
        found = tl.minimum(found, tl.min(tl.where(beyond, i, count)))
        before += tl.sum(weight)
    return tl.where(found < count, found, last)


@triton.jit
def _redraw_kernel(p, q, v, out, count, MINUS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    uniform = tl.load(v + row)
    token = sampled(p + row * count, q + row * count, MINUS, count, uniform, BLOCK)
    if MINUS:
        if token < 0:
            token = sampled(p + row * count, q + row * count, 0, count, uniform, BLOCK)
    tl.store(out + row, tl.maximum(token, 0).to(tl.int64))


def _launch(p: Tensor, q: Tensor | None, v: Tensor) -> Tensor:
    vocab = p.shape[-1]
    p, out = p.contiguous(), torch.empty(p.shape[:-1], dtype=torch.int64, device=p.device)
    second = p if q is None else q.contiguous()
    _redraw_kernel[(out.numel(),)](p, second, v.contiguous(), out, vocab, int(q is not None), BLOCK, num_warps=8)
    return out


def categorical(weights: Tensor, u: Tensor) -> Tensor:
    """See sampling.categorical."""
    return _launch(weights, None, u)


def redraw(p: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """See sampling.redraw."""
    return _launch(p, q, v)


def perturbed_argmax(p: Tensor, noise: Tensor) -> Tensor:
    """See sampling.perturbed_argmax. It is the only child of a draft, whatever its score."""
    rows, noise = (values.contiguous().view(-1, 1, p.shape[-1]) for values in (p, noise))
    zero = row((0,), p.device)[0]
    tokens, _, _ = drafting.children.kernel(rows, noise, rows[..., 0], zero.expand(len(rows), 1), zero[0], 1)
    return tokens.view(p.shape[:-1])
