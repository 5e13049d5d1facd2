"""Triton kernels of verification.py, each one launch: a program per position of a window, or per image of a batch.

A program of a tree or chain decides draft by draft and stops at the end of the path. It writes the outcome to three
tensors (see ``_outputs``).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling_triton import sampled
from .verification import Verified

BLOCK = 4096
WARPS = 8
EPS = tl.constexpr(1e-30)
ACCEPTED, RELAXED, RESIDUAL, BONUS = (tl.constexpr(n) for n in (1, 2, 3, 4))


def _outputs(like: Tensor, batch: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Path, token, source and rank [4, B, L + 1]; q, ratio and TV bound [3, B, L + 1]; the number accepted [B]."""
    device = like.device
    return (
        torch.empty((4, batch, levels + 1), dtype=torch.int64, device=device),
        torch.empty((3, batch, levels + 1), device=device),
        torch.empty(batch, dtype=torch.int64, device=device),
    )


def _verified(ints: Tensor, floats: Tensor, accepted: Tensor) -> Verified:
    path, token, source, rank = ints.unbind()
    return Verified(path[:, :-1], accepted, token, source, rank, *floats.unbind())


@triton.jit
def _clear(ints, floats, root, size, columns, COLUMNS: tl.constexpr):
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
def _record(ints, floats, size, column, source, rank, q, ratio, drift_bound):
    """The last test at a column."""
    tl.store(ints + 2 * size + column, source.to(tl.int64))
    tl.store(ints + 3 * size + column, rank.to(tl.int64))
    tl.store(floats + column, q)
    tl.store(floats + size + column, ratio)
    tl.store(floats + 2 * size + column, drift_bound)


@triton.jit
def _finish(ints, accepted, size, levels, number, last):
    """The number accepted, and the token after them (which the last column holds in any case)."""
    tl.store(accepted, number.to(tl.int64))
    tl.store(ints + size + number, last)
    tl.store(ints + size + levels, last)


@triton.jit
def _sampled_or(left, right, minus, count, uniform, BLOCK: tl.constexpr):
    """A sample from norm([left - right]+ (``minus`` 0: left)), or from ``left`` where that is empty."""
    token = sampled(left, right, minus, count, uniform, BLOCK)
    if token < 0:
        token = sampled(left, left, 0, count, uniform, BLOCK)
    return tl.maximum(token, 0).to(tl.int64)


@triton.jit
def _maximal_coupling(
    p, draft_probs, position, token, exists, u, v,
    out, accepted, q_out, ratio_out,
    count, rows, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    x = tl.load(token + place)
    p_row = p + place * vocab
    q_row = draft_probs + (place // count * rows + tl.load(position + place) % rows) * vocab
    q_x = tl.load(q_row + x)
    ratio = tl.div_rn(tl.load(p_row + x), tl.maximum(q_x, EPS))
    there = tl.load(exists + place).to(tl.int32)
    passed = (there != 0) & (tl.load(u + place) < tl.minimum(ratio, 1.0))
    if not passed:
        x = _sampled_or(p_row, q_row, there, vocab, tl.load(v + place), BLOCK)
    tl.store(out + place, x)
    tl.store(accepted + place, passed)
    tl.store(q_out + place, q_x * there)
    tl.store(ratio_out + place, ratio * there)


def maximal_coupling(
    p: Tensor, draft_probs: Tensor, position: Tensor, token: Tensor, exists: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See verification.maximal_coupling."""
    shape = p.shape[:2]
    out, accepted = torch.empty(shape, dtype=torch.int64, device=p.device), torch.empty_like(exists)
    q_out, ratio_out = p.new_empty(shape), p.new_empty(shape)
    given = (t.contiguous() for t in (p, draft_probs, position, token, exists, u, v))
    _maximal_coupling[(out.numel(),)](
        *given, out, accepted, q_out, ratio_out, shape[1], draft_probs.shape[1], p.shape[2], BLOCK, num_warps=WARPS
    )
    return out, accepted, q_out, ratio_out


@triton.jit
def _budget(
    p_row, p_norm, p_x, x,
    omega, absolute, relative, table, codes, near_columns, neighbours,
    NEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The AcceptanceBudget of a draft x: omega * p(x), with NEAR plus that of the codes nearest to it."""
    budget = omega * p_x
    if NEAR:
        limit = tl.load(absolute) + tl.load(relative) * p_x
        limit = tl.where(x < codes, limit, 0.0)
        near = table + tl.minimum(x, codes - 1) * near_columns
        budget += _nearest(p_row, p_norm, near, neighbours, limit, BLOCK)
    return budget


@triton.jit
def _nearest(p, norm, table, count, budget, BLOCK: tl.constexpr):
    """The probability c_J of the codes that a row of the table lists, with probabilities p / norm."""
    limit = tl.where(budget > 0, budget, -1.0)
    before = 0.0
    most = 0.0
    for start in range(0, count, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = j < count
        near = tl.load(table + j, mask=inside, other=0)
        cumulative = before + tl.cumsum(tl.div_rn(tl.load(p + near, mask=inside, other=0.0), norm))
        most = tl.maximum(most, tl.max(tl.where(inside & (cumulative <= limit), cumulative, 0.0)))
        before = tl.max(cumulative)
    return most


@triton.jit
def _leave(
    p_row, p_norm, q_row, q_norm, x, omega, p_left, q_left, refused, vocab, SAMPLED: tl.constexpr, BLOCK: tl.constexpr
):
    """Store what a draft x leaves if it is ``refused``, not normalised: [p - q]+ and, with SAMPLED, q without x (else q
    is the point mass on x). Their sums over all ids, and that of [min(q, omega p) - p]+, the drift of a relaxed ratio.
    """
    residuals = tl.zeros([BLOCK], tl.float32)
    others = tl.zeros([BLOCK], tl.float32)
    drifts = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < vocab
        a = tl.div_rn(tl.load(p_row + i, mask=inside, other=0.0), p_norm)
        if SAMPLED:
            b = tl.div_rn(tl.load(q_row + i, mask=inside, other=0.0), q_norm)
            without = tl.where(i == x, 0.0, b)
            tl.store(q_left + i, without, mask=inside & refused)
            others += without
        else:
            b = (i == x).to(tl.float32)
        left = tl.maximum(a - b, 0.0)
        tl.store(p_left + i, left, mask=inside & refused)
        residuals += left
        drifts += tl.maximum(tl.minimum(b, omega * a) - a, 0.0)
    tl.debug_barrier()  # other threads read what was stored
    return tl.sum(residuals), tl.sum(others), tl.sum(drifts)


@triton.jit
def _recursive_rejection_sampling(
    p, token, children, draft_probs, draft_row, u, v,
    scale, absolute, relative, table, codes, near_columns, neighbours,
    scratch,
    ints, floats, accepted,
    slots, rows, vocab, levels, width,
    SAMPLED: tl.constexpr, RELAX: tl.constexpr, NEAR: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One image. The loop is that of verification.recursive_rejection_sampling over levels and siblings, as one: each
    turn tests the sibling ``rank`` of ``node``. It is accepted, and becomes the node, or it is rejected, and the next
    sibling is tested against what is left of p and q, unless that is nothing. It lies in one of two rows of scratch
    memory, so that the next rest can be written to the other one, and is divided by its sum wherever it is read
    (p_norm, q_norm). The loop ends at the last level, or when no sibling is left.

    SAMPLED: children were sampled from draft_probs, or else proposed for certain; RELAX: there is an AcceptanceBudget,
    with NEAR one with neighbours.
    """
    image = tl.program_id(0).to(tl.int64)
    columns = levels + 1
    size = tl.num_programs(0).to(tl.int64) * columns
    p += image * slots * vocab
    draft_probs += image * rows * vocab
    token += image * slots
    children += image * slots * width
    u += image * levels * width
    v += image * columns
    ints += image * columns
    floats += image * columns
    scratch += 4 * image * vocab
    _clear(ints, floats, tl.load(token), size, columns, COLUMNS)

    zero = tl.program_id(0) * 0  # an int32 of the device, as the interpreter's own ints are not
    node = image * 0
    level = zero
    rank = zero
    p_row = p
    q_row = draft_probs
    if SAMPLED:
        q_row += tl.load(draft_row) * vocab
    p_turn = zero
    q_turn = zero
    p_norm = 1.0
    q_norm = 1.0
    drift_bound = 0.0
    going = zero + 1
    while going != 0:
        child = tl.load(children + node * width + rank, mask=rank < width, other=-1)
        if child < 0:
            going = zero
        else:
            x = tl.load(token + child)

            # Test: u < f(x).
            p_x = tl.div_rn(tl.load(p_row + x), p_norm)
            q_x = 1.0
            if SAMPLED:
                q_x = tl.div_rn(tl.load(q_row + x), q_norm)
            ratio = tl.div_rn(p_x, tl.maximum(q_x, EPS))
            f = ratio
            omega = 1.0
            if RELAX:
                place = image * levels + level
                omega = tl.load(scale + place)
                budget = _budget(
                    p_row,
                    p_norm,
                    p_x,
                    x,
                    omega,
                    absolute + place,
                    relative + place,
                    table,
                    codes,
                    near_columns,
                    neighbours,
                    NEAR,
                    BLOCK,
                )
                f = tl.div_rn(budget, tl.maximum(q_x, EPS))
            f = tl.minimum(f, 1.0)
            uniform = tl.load(u + level * width + rank)
            passed = uniform < f
            p_left = scratch + p_turn * vocab
            q_left = scratch + (2 + q_turn) * vocab
            residual = 0.0
            others = 0.0
            drift = 0.0
            if (passed == 0) | (RELAX and not NEAR):  # a relaxed ratio's drift is a sum over all ids
                residual, others, drift = _leave(
                    p_row, p_norm, q_row, q_norm, x, omega, p_left, q_left, passed == 0, vocab, SAMPLED, BLOCK
                )

            # Record.
            if NEAR:
                drift_bound += tl.maximum(f - ratio, 0.0)
            elif RELAX:
                drift_bound += drift
            source = tl.where(passed, tl.where(uniform < ratio, ACCEPTED, RELAXED), RESIDUAL)
            _record(ints, floats, size, level, source, rank, q_x, ratio, drift_bound)

            # Descend to the child, or leave the residual to the next sibling.
            if passed:
                tl.store(ints + level, child)
                tl.store(ints + size + level, x)
                node = child
                level += 1
                rank = zero
                p_row = p + node * vocab
                if SAMPLED:
                    q_row = draft_probs + tl.load(draft_row + node) * vocab
                p_norm = 1.0
                q_norm = 1.0
                drift_bound = 0.0
                going = tl.where(level < levels, 1, 0)
            else:
                if residual > 0:
                    p_row = p_left
                    p_norm = residual
                    p_turn = 1 - p_turn
                if others > 0:
                    q_row = q_left
                    q_norm = others
                    q_turn = 1 - q_turn
                rank += 1

    last = sampled(p_row, p_row, 0, vocab, tl.load(v + level), BLOCK)
    _finish(ints, accepted + image, size, levels, level, tl.maximum(last, 0).to(tl.int64))


def rejection_sampling(
    p: Tensor,
    token: Tensor,
    children: Tensor,
    draft_probs: Tensor | None,
    draft_row: Tensor | None,
    u: Tensor,
    v: Tensor,
    strength: Tensor,
    rule: Any,
) -> Verified:
    """See verification.rejection_sampling."""
    batch, levels, width = u.shape
    slots, vocab = p.shape[1:]
    p = p.contiguous()
    budget = None
    if not rule.is_exact:
        budget = rule.acceptance_budget(torch.arange(1, levels + 1, device=p.device), strength[:, :levels])
    rows = 0 if draft_probs is None else draft_probs.shape[1]
    draft_probs, draft_row = (p, token) if draft_probs is None else (draft_probs.contiguous(), draft_row)
    scratch = p.new_empty((batch, 4, vocab))
    written = _outputs(p, batch, levels)
    scale, absolute, relative = (
        (p,) * 3
        if budget is None
        else (t.expand(batch, levels).contiguous() for t in (budget.scale, budget.absolute, budget.relative))
    )
    near = budget is not None and budget.table is not None
    table = (budget.table, *budget.table.shape, budget.neighbours) if near else (token, 0, 0, 0)
    small = (t.contiguous() for t in (token, children))
    _recursive_rejection_sampling[(batch,)](
        p,
        *small,
        draft_probs,
        draft_row,
        u.contiguous(),
        v.contiguous(),
        scale,
        absolute,
        relative,
        *table,
        scratch,
        *written,
        slots,
        rows,
        vocab,
        levels,
        width,
        rows > 0,
        budget is not None,
        near,
        triton.next_power_of_2(levels + 1),
        BLOCK,
        num_warps=WARPS,
    )
    return _verified(*written)


@triton.jit
def _sample_and_match(
    p, token, children, u,
    ints, floats, accepted,
    slots, vocab, levels, width,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    columns = levels + 1
    size = tl.num_programs(0).to(tl.int64) * columns
    p += image * slots * vocab
    token += image * slots
    children += image * slots * width
    u += image * slots
    ints += image * columns
    floats += image * columns
    _clear(ints, floats, tl.load(token), size, columns, COLUMNS)

    zero = tl.program_id(0) * 0
    node = image * 0
    level = zero
    x = tl.maximum(sampled(p, p, 0, vocab, tl.load(u), BLOCK), 0).to(tl.int64)
    going = zero + 1
    while going != 0:
        r = tl.arange(0, WIDTH)
        siblings = tl.load(children + node * width + r, mask=r < width, other=-1)
        tokens = tl.load(token + siblings, mask=siblings >= 0, other=-1)
        number = tl.sum((siblings >= 0).to(tl.int32))
        first = tl.min(tl.where(tokens == x, r, WIDTH))
        found = first < WIDTH
        rank = tl.where(found, first, number - 1)
        going = zero
        if number > 0:
            draft = tl.sum(tl.where(r == rank, tokens, 0))
            ratio = tl.load(p + node * vocab + draft)
            one = ratio * 0.0 + 1.0
            _record(ints, floats, size, level, tl.where(found, ACCEPTED, RESIDUAL), rank, one, ratio, ratio * 0.0)
            if found:
                node = tl.sum(tl.where(r == rank, siblings, 0))
                tl.store(ints + level, node)
                tl.store(ints + size + level, x)
                level += 1
                x = tl.maximum(sampled(p + node * vocab, p, 0, vocab, tl.load(u + node), BLOCK), 0).to(tl.int64)
                going = tl.where(level < levels, 1, 0)
    _finish(ints, accepted + image, size, levels, level, x)


def sample_and_match_rows(p: Tensor, token: Tensor, children: Tensor, levels: int, u: Tensor) -> Verified:
    """See verification.sample_and_match_rows."""
    (batch, slots, vocab), width = p.shape, children.shape[2]
    written = _outputs(p, batch, levels)
    _sample_and_match[(batch,)](
        *(t.contiguous() for t in (p, token, children, u)),
        *written,
        slots,
        vocab,
        levels,
        width,
        triton.next_power_of_2(width),
        triton.next_power_of_2(levels + 1),
        BLOCK,
        num_warps=WARPS,
    )
    return _verified(*written)
