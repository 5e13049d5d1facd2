"""Logits -> probabilities in one launch (twin of logits.py): a program holds a row in registers and reads it once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def probabilities(
    logits: Tensor, forced: Tensor | None, cfg: float, temperature: float, vocab: int, top_k: int, top_p: float,
    order: tuple[str, str], numbers: Tensor | None = None,
) -> Tensor:
    """See logits.probabilities."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, steps, total = logits.shape
    batch = rows if cfg == 1 else rows // 2
    p = torch.empty((batch, steps, total), device=logits.device)
    block = max(triton.next_power_of_2(total), 32)
    where = logits if forced is None else forced  # never read if there is none
    values = logits if numbers is None else numbers  # never read either
    _probabilities[(batch * steps,)](
        logits, *logits.stride()[:2], where, *where.stride()[:2], p, batch * logits.stride(0), steps, total, vocab,
        float(cfg), float(temperature), top_k, float(top_p), values, NUMBERS=numbers is not None, GUIDED=cfg != 1,
        GREEDY=temperature == 0, FORCED=forced is not None, TOP_K=top_k > 0, TOP_P=top_p < 1,
        K_FIRST=order[0] == "top_k", BLOCK=block, num_warps=min(max(block // 512, 4), 32),
    )
    return p


@triton.jit
def _probabilities(
    logits, row_stride, step_stride, forced, forced_row, forced_step, p, unconditional, steps, total, vocab, cfg,
    temperature, top_k, top_p, values, NUMBERS: tl.constexpr, GUIDED: tl.constexpr, GREEDY: tl.constexpr,
    FORCED: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, K_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):
    """One row of p [B, steps, total]; ``unconditional``: from a row's conditional logits to its others; ``values``:
    where cfg, temperature, top_k and top_p are to be read, with NUMBERS."""
    if NUMBERS:
        cfg = tl.load(values)
        temperature = tl.load(values + 1)
        top_k = tl.load(values + 2).to(tl.int32)
        top_p = tl.load(values + 3)
    row = tl.program_id(0) // steps
    step = tl.program_id(0) % steps
    ids = tl.arange(0, BLOCK)
    place = logits + row.to(tl.int64) * row_stride + step.to(tl.int64) * step_stride + ids
    z = tl.load(place, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    if GUIDED:
        u = tl.load(place + unconditional, mask=ids < vocab, other=0.0).to(tl.float32)
        z = u + cfg * (z - u)
    if not GREEDY:
        z = z / temperature
    largest = tl.max(z, 0)
    sound = (tl.max((z != z).to(tl.int32), 0) == 0) & (largest > float("-inf")) & (largest < float("inf"))
    if GREEDY:
        first = tl.min(tl.where(z == largest, ids, BLOCK), 0)
        law = tl.where(ids == first, 1.0, 0.0)
    else:
        e = tl.exp(z - largest)
        if TOP_K or TOP_P:
            order = _image(z)
            if TOP_K and K_FIRST:
                e = tl.where(order >= _kth(order, top_k), e, 0.0)
            if TOP_P:
                e = tl.where(order > _dropped(order, e, top_p), e, 0.0)
            if TOP_K and not K_FIRST:
                e = tl.where(order >= _kth(order, top_k), e, 0.0)
        law = e / tl.sum(e, 0)
    law = tl.where(ids < vocab, tl.where(sound, law, float("nan")), 0.0)
    if FORCED:
        token = tl.load(forced + row.to(tl.int64) * forced_row + step.to(tl.int64) * forced_step)
        law = tl.where(token >= 0, tl.where(ids == token, 1.0, 0.0), law)
    tl.store(p + tl.program_id(0).to(tl.int64) * total + ids, law, mask=ids < total)


@triton.jit
def _image(z):
    """Unsigned integers in the order of the floats z; both zeros are one."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _kth(order, k):
    """The k-th largest of the unsigned integers, found bit by bit: the largest that k of them reach."""
    found = tl.full((), 0, tl.uint32)
    bit = tl.full((), 2147483648, tl.uint32)
    for _ in range(32):
        reached = tl.sum((order >= (found | bit)).to(tl.int32), 0)
        found = tl.where(reached >= k, found | bit, found)
        bit = bit >> 1
    return found


@triton.jit
def _dropped(order, weights, top_p):
    """The largest unsigned integer above which there is more than top_p of the weight; what is larger stays."""
    limit = top_p * tl.sum(weights, 0)
    found = tl.full((), 0, tl.uint32)
    bit = tl.full((), 2147483648, tl.uint32)
    for _ in range(32):
        above = tl.sum(tl.where(order > (found | bit), weights, 0.0), 0)
        found = tl.where(above > limit, found | bit, found)
        bit = bit >> 1
    return found
