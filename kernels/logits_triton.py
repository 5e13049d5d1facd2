"""Triton kernel of logits.py: logits -> probabilities in one launch, with one program per row.

The row is written to its place in the result, and read from there block by block as often as the filters need it: a
block fits into registers for any vocabulary, and a row into the cache of a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2**13  # ids held at once, 16 per thread


def probabilities(
    logits: Tensor,
    forced: Tensor | None,
    cfg: float,
    temperature: float,
    vocab: int,
    top_k: int,
    top_p: float,
    order: tuple[str, str],
    entropy: tuple[float, float, float] | None = None,
    numbers: Tensor | None = None,
) -> Tensor:
    """See logits.probabilities."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, steps, total = logits.shape
    batch = rows if cfg == 1 else rows // 2
    p = torch.empty((batch, steps, total), device=logits.device)
    block = min(max(triton.next_power_of_2(total), 32), BLOCK)
    where = logits if forced is None else forced  # unused if None
    values = logits if numbers is None else numbers  # unused if None
    _probabilities[(batch * steps,)](
        logits,
        *logits.stride()[:2],
        where,
        *where.stride()[:2],
        p,
        batch * logits.stride(0),
        steps,
        total,
        vocab,
        float(cfg),
        float(temperature),
        top_k,
        float(top_p),
        *map(float, entropy or (0, 1, 1)),
        values,
        NUMBERS=numbers is not None,
        GUIDED=cfg != 1,
        GREEDY=temperature == 0,
        ENTROPY=entropy is not None,
        FORCED=forced is not None,
        TOP_K=top_k > 0,
        TOP_P=top_p < 1,
        K_FIRST=order[0] == "top_k",
        BLOCK=block,
        num_warps=max(block // 512, 4),
    )
    return p


@triton.jit
def _probabilities(
    logits, row_stride, step_stride,
    forced, forced_row, forced_step,
    p,
    unconditional, steps, total, vocab,
    cfg, temperature, top_k, top_p, first, decay, last, values,
    NUMBERS: tl.constexpr, GUIDED: tl.constexpr, GREEDY: tl.constexpr, ENTROPY: tl.constexpr,
    FORCED: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, K_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of p [B, steps, total]. ``unconditional``: offset from a row's conditional to its unconditional logits;
    ``values``: the memory of cfg, temperature, top_k, top_p and the three of entropy, with NUMBERS."""
    if NUMBERS:
        cfg = tl.load(values)
        temperature = tl.load(values + 1)
        top_k = tl.load(values + 2).to(tl.int32)
        top_p = tl.load(values + 3)
        first = tl.load(values + 4)
        decay = tl.load(values + 5)
        last = tl.load(values + 6)
    row = tl.program_id(0) // steps
    step = tl.program_id(0) % steps
    logits += row.to(tl.int64) * row_stride + step.to(tl.int64) * step_stride
    p += tl.program_id(0).to(tl.int64) * total
    maxima = tl.full([BLOCK], float("-inf"), tl.float32)
    odds = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        z = tl.load(logits + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
        if GUIDED:
            u = tl.load(logits + unconditional + i, mask=i < vocab, other=0.0).to(tl.float32)
            z = u + cfg * (z - u)
        if not GREEDY and not ENTROPY:
            z = z / temperature
        tl.store(p + i, z, mask=i < vocab)
        maxima = tl.maximum(maxima, z)
        odds = tl.maximum(odds, (z != z).to(tl.int32))
    tl.debug_barrier()  # other threads read what this one wrote
    largest = tl.max(maxima, 0)
    sound = (tl.max(odds, 0) == 0) & (largest > float("-inf")) & (largest < float("inf"))
    token = tl.full((), -1, tl.int64)  # of a point mass, else -1
    lowest = tl.full((), float("-inf"), tl.float32)  # least logit that passes the filters
    mass = 1.0
    if GREEDY:
        token = _first(p, largest, vocab, BLOCK)
    else:
        if TOP_K and K_FIRST:
            lowest = _least(p, largest, lowest, top_k - 0.5, False, vocab, BLOCK)
        if TOP_P:
            limit = top_p * _mass(p, largest, lowest, vocab, BLOCK)
            lowest = tl.maximum(lowest, _least(p, largest, lowest, limit, True, vocab, BLOCK))
        if TOP_K and not K_FIRST:
            lowest = tl.maximum(lowest, _least(p, largest, lowest, top_k - 0.5, False, vocab, BLOCK))
        if ENTROPY:
            heat = temperature * (first * tl.exp(-_entropy(p, largest, lowest, vocab, BLOCK) / decay) + last)
            _heat(p, lowest, heat, vocab, BLOCK)
            largest = largest / heat
            lowest = tl.full((), float("-inf"), tl.float32)
        mass = _mass(p, largest, lowest, vocab, BLOCK)
    if FORCED:
        given = tl.load(forced + row.to(tl.int64) * forced_row + step.to(tl.int64) * forced_step)
        sound = sound | (given >= 0)
        token = tl.where(given >= 0, given, token)
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        z = _block(p, start, vocab, BLOCK)
        probs = tl.where(z >= lowest, tl.exp(z - largest) / mass, 0.0)
        probs = tl.where(token >= 0, tl.where(i == token, 1.0, 0.0), tl.where(i < vocab, probs, 0.0))
        tl.store(p + i, tl.where(sound | (i >= vocab), probs, float("nan")), mask=i < total)


@triton.jit
def _block(row, start, vocab, BLOCK: tl.constexpr):
    """Logits of BLOCK ids; -inf for ids >= ``vocab``."""
    i = start + tl.arange(0, BLOCK)
    return tl.load(row + i, mask=i < vocab, other=float("-inf"))


@triton.jit
def _float(number):
    """The float at an int32 in the order of all floats: -inf for the lowest numbers, NaN for the highest."""
    number = tl.maximum(number, -2139095041)
    return tl.where(number < 0, number ^ 2147483647, number).to(tl.float32, bitcast=True)


@triton.jit
def _first(row, largest, vocab, BLOCK: tl.constexpr):
    """The first id of the largest logit."""
    firsts = tl.zeros([BLOCK], tl.int32) + vocab
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        firsts = tl.minimum(firsts, tl.where(_block(row, start, vocab, BLOCK) == largest, i, vocab))
    return tl.min(firsts, 0).to(tl.int64)


@triton.jit
def _mass(row, largest, lowest, vocab, BLOCK: tl.constexpr):
    """The sum of exp(logit - largest) over the logits that are at least ``lowest``."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        z = _block(row, start, vocab, BLOCK)
        sums += tl.where(z >= lowest, tl.exp(z - largest), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _entropy(row, largest, lowest, vocab, BLOCK: tl.constexpr):
    """The entropy (nats) of the softmax over the logits that are at least ``lowest``."""
    sums = tl.zeros([BLOCK], tl.float32)
    moments = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        z = _block(row, start, vocab, BLOCK)
        kept = (z >= lowest) & (z > float("-inf"))
        weight = tl.where(kept, tl.exp(z - largest), 0.0)
        sums += weight
        moments += tl.where(kept, weight * (z - largest), 0.0)
    mass = tl.sum(sums, 0)
    return tl.log(mass) - tl.sum(moments, 0) / mass


@triton.jit
def _heat(row, lowest, heat, vocab, BLOCK: tl.constexpr):
    """Divide the logits that are at least ``lowest`` by ``heat``, and set the others to -inf."""
    tl.debug_barrier()  # other threads may still read
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        z = _block(row, start, vocab, BLOCK)
        tl.store(row + i, tl.where(z >= lowest, z / heat, float("-inf")), mask=i < vocab)
    tl.debug_barrier()  # other threads read what this one wrote


@triton.jit
def _least(row, largest, lowest, limit, MASS: tl.constexpr, vocab, BLOCK: tl.constexpr):
    """The largest float for which the logits that reach it are more than ``limit``, found two bits at a time; -inf if
    there is none. With MASS a logit counts exp(logit - largest), else 1; those below ``lowest`` do not count."""
    found = tl.full((), -2147483648, tl.int32)
    unit = tl.full((), 1073741824, tl.int32)
    for _ in range(16):
        one = tl.zeros([BLOCK], tl.float32)
        two = tl.zeros([BLOCK], tl.float32)
        three = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            z = _block(row, start, vocab, BLOCK)
            weight = tl.where(z >= lowest, tl.exp(z - largest) if MASS else 1.0, 0.0)
            one += tl.where(z >= _float(found + unit), weight, 0.0)
            two += tl.where(z >= _float(found + 2 * unit), weight, 0.0)
            three += tl.where(z >= _float(found + 3 * unit), weight, 0.0)
        more = (tl.sum(one, 0) > limit).to(tl.int32) + (tl.sum(two, 0) > limit) + (tl.sum(three, 0) > limit)
        found += more * unit
        unit = unit >> 2
    return _float(found)
