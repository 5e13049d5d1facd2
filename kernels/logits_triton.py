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
    logits,
    row_stride,
    step_stride,
    forced,
    forced_row,
    forced_step,
    p,
    unconditional,
    steps,
    total,
    vocab,
    cfg,
    temperature,
    top_k,
    top_p,
    first,
    decay,
    last,
    values,
    NUMBERS: tl.constexpr,
    GUIDED: tl.constexpr,
    GREEDY: tl.constexpr,
    ENTROPY: tl.constexpr,
    FORCED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    K_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    lowest = tl.full((), 0, tl.uint32)  # least ordered bits of a logit that passes the filters
    mass = 1.0
    if GREEDY:
        token = _first(p, largest, vocab, BLOCK)
    else:
        if TOP_K and K_FIRST:
            lowest = _kth(p, top_k, vocab, BLOCK)
        if TOP_P:
            lowest = tl.maximum(lowest, _dropped(p, largest, lowest, top_p, vocab, BLOCK) + 1)
        if TOP_K and not K_FIRST:
            lowest = tl.maximum(lowest, _kth(p, top_k, vocab, BLOCK))
        if ENTROPY:
            heat = temperature * (first * tl.exp(-_entropy(p, largest, lowest, vocab, BLOCK) / decay) + last)
            _heat(p, lowest, heat, vocab, BLOCK)
            largest = largest / heat
            lowest = tl.full((), 0, tl.uint32)
        mass = _mass(p, largest, lowest, vocab, BLOCK)
    if FORCED:
        given = tl.load(forced + row.to(tl.int64) * forced_row + step.to(tl.int64) * forced_step)
        sound = sound | (given >= 0)
        token = tl.where(given >= 0, given, token)
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        z = _block(p, start, vocab, BLOCK)
        probs = tl.where(_ordered_bits(z) >= lowest, tl.exp(z - largest) / mass, 0.0)
        probs = tl.where(token >= 0, tl.where(i == token, 1.0, 0.0), tl.where(i < vocab, probs, 0.0))
        tl.store(p + i, tl.where(sound | (i >= vocab), probs, float("nan")), mask=i < total)


@triton.jit
def _block(row, start, vocab, BLOCK: tl.constexpr):
    """Logits of BLOCK ids; -inf for ids >= ``vocab``."""
    i = start + tl.arange(0, BLOCK)
    return tl.load(row + i, mask=i < vocab, other=float("-inf"))


@triton.jit
def _ordered_bits(z):
    """Unsigned integers in the order of the floats z; 0.0 and -0.0 are equal."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


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
    """The sum of exp(logit - largest) over the logits whose ordered bits are at least ``lowest``."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        z = _block(row, start, vocab, BLOCK)
        sums += tl.where(_ordered_bits(z) >= lowest, tl.exp(z - largest), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _entropy(row, largest, lowest, vocab, BLOCK: tl.constexpr):
    """The entropy (nats) of the softmax over the logits whose ordered bits are at least ``lowest``."""
    sums = tl.zeros([BLOCK], tl.float32)
    moments = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        z = _block(row, start, vocab, BLOCK)
        kept = (_ordered_bits(z) >= lowest) & (z > float("-inf"))
        weight = tl.where(kept, tl.exp(z - largest), 0.0)
        sums += weight
        moments += tl.where(kept, weight * (z - largest), 0.0)
    mass = tl.sum(sums, 0)
    return tl.log(mass) - tl.sum(moments, 0) / mass


@triton.jit
def _heat(row, lowest, heat, vocab, BLOCK: tl.constexpr):
    """Divide the logits whose ordered bits are at least ``lowest`` by ``heat``, and set the others to -inf."""
    tl.debug_barrier()  # other threads may still read
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        z = _block(row, start, vocab, BLOCK)
        tl.store(row + i, tl.where(_ordered_bits(z) >= lowest, z / heat, float("-inf")), mask=i < vocab)
    tl.debug_barrier()  # other threads read what this one wrote


@triton.jit
def _kth(row, k, vocab, BLOCK: tl.constexpr):
    """The k-th largest ordered bits of the logits, found bit by bit: the largest integer that k logits reach."""
    found = tl.full((), 0, tl.uint32)
    bit = tl.full((), 2147483648, tl.uint32)
    for _ in range(32):
        reached = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab, BLOCK):
            reached += (_ordered_bits(_block(row, start, vocab, BLOCK)) >= (found | bit)).to(tl.int32)
        found = tl.where(tl.sum(reached, 0) >= k, found | bit, found)
        bit = bit >> 1
    return found


@triton.jit
def _dropped(row, largest, lowest, top_p, vocab, BLOCK: tl.constexpr):
    """The largest ordered bits that top-p drops: logits with larger ones have more than top_p of the probability. Only
    logits with ordered bits of at least ``lowest`` count."""
    limit = top_p * _mass(row, largest, lowest, vocab, BLOCK)
    found = tl.full((), 0, tl.uint32)
    bit = tl.full((), 2147483648, tl.uint32)
    for _ in range(32):
        above = _mass(row, largest, tl.maximum(lowest, (found | bit) + 1), vocab, BLOCK)
        found = tl.where(above > limit, found | bit, found)
        bit = bit >> 1
    return found
