"""Triton twins of verification.py, each one launch: a program per position of a window, or per image of a batch.

A program of a tree or chain decides draft by draft and stops at the end of the path. What is left of the laws p and q
after a refused draft lies in two rows of scratch memory, and is divided by its sum wherever it is read.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .neighbours_triton import nearest
from .sampling_triton import drawn, weights
from .triton_outcome import clear, finish, note, outputs, verified
from .verification import AcceptanceBudget, Verified

BLOCK = 2048
WARPS = 8
EPS = tl.constexpr(1e-30)
ACCEPTED, RELAXED, RESIDUAL = (tl.constexpr(n) for n in (1, 2, 3))


@triton.jit
def _drawn_or(left, right, scale, minus, count, uniform, BLOCK: tl.constexpr):
    """A draw from norm([scale * left - right]+ (``minus`` 0: left)), or from ``left`` where that is empty."""
    token = drawn(left, right, scale, minus, count, uniform, BLOCK)
    if token < 0:
        token = drawn(left, left, 1.0, 0, count, uniform, BLOCK)
    return tl.maximum(token, 0).to(tl.int64)


@triton.jit
def _maximal_coupling(
    p, laws, position, token, exists, u, v, out, accepted, q_out, ratio_out, count, rows, vocab, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64)
    x = tl.load(token + place)
    law = p + place * vocab
    draft_law = laws + (place // count * rows + tl.load(position + place) % rows) * vocab
    q_x = tl.load(draft_law + x)
    ratio = tl.div_rn(tl.load(law + x), tl.maximum(q_x, EPS))
    there = tl.load(exists + place).to(tl.int32)
    passed = (there != 0) & (tl.load(u + place) < tl.minimum(ratio, 1.0))
    if not passed:
        x = _drawn_or(law, draft_law, 1.0, there, vocab, tl.load(v + place), BLOCK)
    tl.store(out + place, x)
    tl.store(accepted + place, passed)
    tl.store(q_out + place, q_x * there)
    tl.store(ratio_out + place, ratio * there)


def maximal_coupling(
    p: Tensor, laws: Tensor, position: Tensor, token: Tensor, exists: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See verification.maximal_coupling."""
    shape = p.shape[:2]
    out, accepted = torch.empty(shape, dtype=torch.int64, device=p.device), torch.empty_like(exists)
    q_out, ratio_out = p.new_empty(shape), p.new_empty(shape)
    given = (t.contiguous() for t in (p, laws, position, token, exists, u, v))
    _maximal_coupling[(out.numel(),)](
        *given, out, accepted, q_out, ratio_out, shape[1], laws.shape[1], p.shape[2], BLOCK, num_warps=WARPS
    )
    return out, accepted, q_out, ratio_out


@triton.jit
def _draft_law(q, q_norm, i, inside, x, DRAWN: tl.constexpr):
    """Entries of the law a draft x was drawn from: a row, or the point mass on it."""
    if DRAWN:
        return tl.div_rn(tl.load(q + i, mask=inside, other=0.0), q_norm)
    else:
        return (i == x).to(tl.float32)


@triton.jit
def _recursive_rejection_sampling(
    p, token, children, laws, law_of, u, v, scale, absolute, relative, table, codes, near_columns, neighbours,
    scratch, ints, floats, accepted, slots, rows, vocab, levels, width,
    DRAWN: tl.constexpr, CLAIMS: tl.constexpr, NEAR: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    columns = levels + 1
    size = tl.num_programs(0).to(tl.int64) * columns
    p += image * slots * vocab
    laws += image * rows * vocab
    token += image * slots
    children += image * slots * width
    u += image * levels * width
    v += image * columns
    ints += image * columns
    floats += image * columns
    p_left = scratch + 2 * image * vocab
    q_left = p_left + vocab
    clear(ints, floats, tl.load(token), size, columns, COLUMNS)

    zero = tl.program_id(0) * 0  # an int32 of the device, as the interpreter's own ints are not
    node = image * 0
    level = zero
    rank = zero
    worn = zero  # drafts refused at this node: the laws lie in scratch memory
    p_norm = 1.0
    q_norm = 1.0
    leak = 0.0
    going = zero + 1
    while going != 0:
        child = tl.load(children + node * width + rank, mask=rank < width, other=-1)
        if child < 0:
            going = zero
        else:
            x = tl.load(token + child)
            p_row = p + node * vocab
            q_row = laws
            if DRAWN:
                q_row = laws + tl.load(law_of + node) * vocab
            if worn != 0:
                p_row = p_left
                q_row = q_left
            p_x = tl.div_rn(tl.load(p_row + x), p_norm)
            q_x = 1.0
            if DRAWN:
                q_x = tl.div_rn(tl.load(q_row + x), q_norm)
            ratio = tl.div_rn(p_x, tl.maximum(q_x, EPS))
            f = ratio
            omega = 1.0
            if CLAIMS:
                place = image * levels + level
                omega = tl.load(scale + place)
                claim = omega * p_x
                if NEAR:
                    budget = tl.load(absolute + place) + tl.load(relative + place) * p_x
                    budget = tl.where(x < codes, budget, 0.0)
                    near = table + tl.minimum(x, codes - 1) * near_columns
                    absorbed, _ = nearest(p_row, p_norm, near, neighbours, budget, BLOCK)
                    claim += absorbed
                f = tl.div_rn(claim, tl.maximum(q_x, EPS))
            f = tl.minimum(f, 1.0)
            uniform = tl.load(u + level * width + rank)
            passed = uniform < f
            source = tl.where(passed, tl.where(uniform < ratio, ACCEPTED, RELAXED), RESIDUAL)
            rests = tl.zeros([BLOCK], tl.float32)
            p_sums = tl.zeros([BLOCK], tl.float32)
            q_sums = tl.zeros([BLOCK], tl.float32)
            others = tl.zeros([BLOCK], tl.float32)  # of q without x
            drifts = tl.zeros([BLOCK], tl.float32)
            drift = 0.0
            if NEAR:
                drift = tl.maximum(f - ratio, 0.0)
            if (passed == 0) | (CLAIMS and not NEAR):  # a relaxed ratio's drift is a sum over all ids
                for start in range(0, vocab, BLOCK):
                    i = start + tl.arange(0, BLOCK)
                    inside = i < vocab
                    a = tl.div_rn(tl.load(p_row + i, mask=inside, other=0.0), p_norm)
                    b = _draft_law(q_row, q_norm, i, inside, x, DRAWN)
                    rests += tl.maximum(a - b, 0.0)
                    p_sums += a
                    q_sums += b
                    others += tl.where(i == x, 0.0, b)
                    drifts += tl.maximum(tl.minimum(b, omega * a) - a, 0.0)
            leak += drift
            if CLAIMS and not NEAR:
                leak += tl.sum(drifts)
            note(ints, floats, size, level, source, rank, q_x, ratio, leak)
            if passed:
                tl.store(ints + level, child)
                tl.store(ints + size + level, x)
                node = child
                level += 1
                rank = zero
                worn = zero
                p_norm = 1.0
                q_norm = 1.0
                leak = 0.0
                going = tl.where(level < levels, 1, 0)
            else:
                rest = tl.sum(rests)
                without = tl.sum(others)
                q_kept = tl.where(without > 0, 0.0, q_x)
                for start in range(0, vocab, BLOCK):
                    i = start + tl.arange(0, BLOCK)
                    inside = i < vocab
                    a = tl.div_rn(tl.load(p_row + i, mask=inside, other=0.0), p_norm)
                    b = _draft_law(q_row, q_norm, i, inside, x, DRAWN)
                    tl.store(p_left + i, tl.where(rest > 0, tl.maximum(a - b, 0.0), a), mask=inside)
                    if DRAWN:
                        tl.store(q_left + i, tl.where(i == x, q_kept, b), mask=inside)
                tl.debug_barrier()
                p_norm = tl.where(rest > 0, rest, tl.sum(p_sums))
                q_norm = tl.where(without > 0, without, tl.sum(q_sums))
                worn = zero + 1
                rank += 1

    law = p + node * vocab
    if worn != 0:
        law = p_left
    last = drawn(law, law, 1.0, 0, vocab, tl.load(v + level), BLOCK)
    finish(ints, accepted + image, size, levels, level, tl.maximum(last, 0).to(tl.int64))


def _launch(
    p: Tensor, token: Tensor, children: Tensor, laws: Tensor | None, law_of: Tensor | None, u: Tensor, v: Tensor,
    budget: AcceptanceBudget | None,
) -> Verified:
    batch, levels, width = u.shape
    slots, vocab = p.shape[1:]
    p = p.contiguous()
    laws, law_of, rows = (p, token, 0) if laws is None else (laws.contiguous(), law_of, laws.shape[1])
    scratch = p.new_empty((batch, 2, vocab))
    written = outputs(p, batch, levels)
    scale, absolute, relative = (p,) * 3 if budget is None else (
        t.expand(batch, levels).contiguous() for t in (budget.scale, budget.absolute, budget.relative))
    near = budget is not None and budget.table is not None
    table = (budget.table, *budget.table.shape, budget.neighbours) if near else (token, 0, 0, 0)
    small = (t.contiguous() for t in (token, children))
    _recursive_rejection_sampling[(batch,)](
        p, *small, laws, law_of, u.contiguous(), v.contiguous(), scale, absolute, relative, *table, scratch, *written,
        slots, rows, vocab, levels, width,
        rows > 0, budget is not None, near, triton.next_power_of_2(levels + 1), BLOCK, num_warps=WARPS,
    )
    return verified(*written)


def exact_rejection_sampling(
    p: Tensor, token: Tensor, children: Tensor, laws: Tensor | None, law_of: Tensor | None, u: Tensor, v: Tensor,
    strength: Tensor, rule: Any,
) -> Verified:
    """See verification.exact_rejection_sampling."""
    return _launch(p, token, children, laws, law_of, u, v, None)


def relaxed_rejection_sampling(
    p: Tensor, token: Tensor, children: Tensor, laws: Tensor | None, law_of: Tensor | None, u: Tensor, v: Tensor,
    strength: Tensor, rule: Any,
) -> Verified:
    """See verification.relaxed_rejection_sampling."""
    levels = u.shape[1]
    budget = rule.acceptance_budget(torch.arange(1, levels + 1, device=p.device), strength[:, :levels])
    return _launch(p, token, children, laws, law_of, u, v, budget)


@triton.jit
def _sample_and_match(
    p, token, children, u, ints, floats, accepted, slots, vocab, levels, width, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    columns = levels + 1
    size = tl.num_programs(0).to(tl.int64) * columns
    p += image * slots * vocab
    token += image * slots
    children += image * slots * width
    u += image * slots
    ints += image * columns
    floats += image * columns
    clear(ints, floats, tl.load(token), size, columns, COLUMNS)

    zero = tl.program_id(0) * 0
    node = image * 0
    level = zero
    x = tl.maximum(drawn(p, p, 1.0, 0, vocab, tl.load(u), BLOCK), 0).to(tl.int64)
    going = zero + 1
    while going != 0:
        r = tl.arange(0, WIDTH)
        kids = tl.load(children + node * width + r, mask=r < width, other=-1)
        tokens = tl.load(token + kids, mask=kids >= 0, other=-1)
        number = tl.sum((kids >= 0).to(tl.int32))
        first = tl.min(tl.where(tokens == x, r, WIDTH))
        found = first < WIDTH
        rank = tl.where(found, first, number - 1)
        going = zero
        if number > 0:
            draft = tl.sum(tl.where(r == rank, tokens, 0))
            ratio = tl.load(p + node * vocab + draft)
            one = ratio * 0.0 + 1.0
            note(ints, floats, size, level, tl.where(found, ACCEPTED, RESIDUAL), rank, one, ratio, ratio * 0.0)
            if found:
                node = tl.sum(tl.where(r == rank, kids, 0))
                tl.store(ints + level, node)
                tl.store(ints + size + level, x)
                level += 1
                x = tl.maximum(drawn(p + node * vocab, p, 1.0, 0, vocab, tl.load(u + node), BLOCK), 0).to(tl.int64)
                going = tl.where(level < levels, 1, 0)
    finish(ints, accepted + image, size, levels, level, x)


def sample_and_match_rows(p: Tensor, token: Tensor, children: Tensor, levels: int, u: Tensor) -> Verified:
    """See verification.sample_and_match_rows."""
    (batch, slots, vocab), width = p.shape, children.shape[2]
    written = outputs(p, batch, levels)
    _sample_and_match[(batch,)](
        *(t.contiguous() for t in (p, token, children, u)), *written, slots, vocab, levels, width,
        triton.next_power_of_2(width), triton.next_power_of_2(levels + 1), BLOCK, num_warps=WARPS,
    )
    return verified(*written)


@triton.jit
def _mass(p, q, weight, vocab, BLOCK: tl.constexpr):
    """The sum of [weight * p - q]+."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        sums += weights(p, q, weight, 1, i, i < vocab)
    return tl.sum(sums)


@triton.jit
def _block(
    p, laws, token, exists, u, v, ints, floats, accepted, vocab, levels, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    image = tl.program_id(0).to(tl.int64)
    columns = levels + 1
    size = tl.num_programs(0).to(tl.int64) * columns
    p += image * columns * vocab
    laws += image * levels * vocab
    token += image * columns
    exists += image * columns
    u += image * levels
    v += image * columns
    ints += image * columns
    floats += image * columns
    clear(ints, floats, tl.load(token), size, columns, COLUMNS)

    zero = tl.program_id(0) * 0
    weight = 1.0
    best = zero
    best_weight = 1.0
    for i in range(0, levels):
        there = tl.load(exists + i + 1) != 0
        x = tl.load(token + i + 1)
        row = image * 0 + i
        ratio = tl.div_rn(tl.load(p + row * vocab + x), tl.maximum(tl.load(laws + row * vocab + x), EPS))
        weight = tl.minimum(weight * ratio, 1.0)
        h = weight
        if (i + 1 < levels) & (tl.load(exists + i + 2, mask=i + 1 < levels, other=0) != 0):
            mass = _mass(p + (row + 1) * vocab, laws + (row + 1) * vocab, weight, vocab, BLOCK)
            h = tl.div_rn(mass, tl.maximum(mass + 1 - weight, EPS))
        passed = there & (tl.load(u + i) < h)
        best = tl.where(passed, i + 1, best)
        best_weight = tl.where(passed, weight, best_weight)

    for i in range(0, levels):
        if (tl.load(exists + i + 1) != 0) & (i <= best):
            x = tl.load(token + i + 1)
            row = image * 0 + i
            q_x = tl.load(laws + row * vocab + x)
            ratio = tl.div_rn(tl.load(p + row * vocab + x), tl.maximum(q_x, EPS))
            note(ints, floats, size, i, tl.where(i < best, ACCEPTED, RESIDUAL), zero, q_x, ratio, ratio * 0.0)
            if i < best:
                tl.store(ints + i, row + 1)
                tl.store(ints + size + i, x)

    row = image * 0 + best
    refused = (best < levels) & (tl.load(exists + best + 1, mask=best < levels, other=0) != 0)
    minus = tl.where(refused, 1, 0)
    scale = tl.where(refused, best_weight, 1.0)
    last = _drawn_or(p + row * vocab, laws + row * vocab, scale, minus, vocab, tl.load(v + best), BLOCK)
    finish(ints, accepted + image, size, levels, best, last)


def block(p: Tensor, laws: Tensor, token: Tensor, exists: Tensor, u: Tensor, v: Tensor) -> Verified:
    """See verification.block."""
    batch, levels = u.shape
    written = outputs(p, batch, levels)
    given = (t.contiguous() for t in (p, laws, token, exists, u, v))
    _block[(batch,)](
        *given, *written, p.shape[2], levels, triton.next_power_of_2(levels + 1), BLOCK, num_warps=WARPS
    )
    return verified(*written)
