"""Triton kernels of drafting.py: one program for each draft that gets children, and one for the tree of an image.

In the first a lane looks after the ids that are equal modulo the number of lanes, and holds the best that is left of
them. Taking the best of all lanes therefore costs one reduction, whatever the vocabulary, and only its lane looks for
the next one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 2**12
BLOCK = 2**10  # candidates held at once
NONE = tl.constexpr(2**30)  # above every id


def children(
    q: Tensor, noise: Tensor | None, score: Tensor, most: Tensor, child: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See drafting.children."""
    (batch, drafts, vocab), width = q.shape, len(child)
    token = torch.empty((batch, width), dtype=torch.int64, device=q.device)
    probability, scores = (torch.empty((batch, width), device=q.device) for _ in range(2))
    lanes = min(max(triton.next_power_of_2(vocab), 32), LANES)
    q = q.contiguous()
    given, values = (q, q) if noise is None else (noise, torch.empty_like(q))
    _children[(batch * drafts,)](
        q,
        given,
        *given.stride()[:2],
        values,
        score,
        *score.stride(),
        most,
        most.stride(0),
        child,
        token,
        probability,
        scores,
        drafts,
        vocab,
        width,
        count,
        NOISE=noise is not None,
        LANES=lanes,
        TURNS=triton.next_power_of_2(triton.cdiv(vocab, lanes)),
        WIDTH=triton.next_power_of_2(width),
        num_warps=max(lanes // 256, 4),
    )
    return token, probability, scores


@triton.jit
def _children(
    q, noise, noise_image, noise_draft,
    values,
    scores, scores_image, scores_draft, most, most_image, children,
    token, probability, score,
    drafts, vocab, width, count,
    NOISE: tl.constexpr, LANES: tl.constexpr, TURNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``values`` [B, F, V]: what is compared, q itself without NOISE."""
    image = (tl.program_id(0) // drafts).to(tl.int64)
    draft = tl.program_id(0) % drafts
    q += tl.program_id(0).to(tl.int64) * vocab
    values += tl.program_id(0).to(tl.int64) * vocab
    noise += image * noise_image + draft * noise_draft
    lane = tl.arange(0, LANES)
    largest = tl.full([LANES], float("-inf"), tl.float32)
    place = tl.full([LANES], NONE, tl.int32)
    for start in range(0, vocab, LANES):
        i = start + lane
        value = tl.load(q + i, mask=i < vocab, other=0.0)
        if NOISE:
            value = tl.log(value) + tl.load(noise + i, mask=i < vocab, other=0.0)
            tl.store(values + i, value, mask=i < vocab)
        better = (i < vocab) & ((value > largest) | (place == NONE))  # NaN is not
        largest = tl.where(better & (value == value), value, largest)
        place = tl.where(better, i, place)
    tl.debug_barrier()  # other threads read what this one wrote
    w = tl.arange(0, WIDTH)
    child = tl.load(children + w, mask=w < width, other=-1)
    tokens = tl.zeros([WIDTH], tl.int32)
    for rank in range(count):
        best = tl.max(largest, 0)
        first = tl.min(tl.where(largest == best, place, NONE), 0)
        tokens = tl.where(child == draft * count + rank, tl.where(first < vocab, first, 0), tokens)
        i = first % LANES + LANES * tl.arange(0, TURNS)
        value = tl.load(values + i, mask=i < vocab, other=float("-inf"))
        value = tl.where(value == value, value, float("-inf"))
        later = (i < vocab) & ((value < best) | ((value == best) & (i > first)))
        value = tl.where(later, value, float("-inf"))
        next_best = tl.max(value, 0)
        next_place = tl.min(tl.where(later & (value == next_best), i, NONE), 0)
        largest = tl.where(lane == first % LANES, next_best, largest)
        place = tl.where(lane == first % LANES, next_place, place)
    mine = (w < width) & (child // count == draft)
    p = tl.load(q + tokens, mask=mine, other=0.0)
    above = tl.load(scores + image * scores_image + draft * scores_draft)
    allowed = tl.load(most + image * most_image)
    tl.store(token + image * width + w, tokens.to(tl.int64), mask=mine)
    tl.store(probability + image * width + w, p, mask=mine)
    tl.store(score + image * width + w, tl.where(child % count < allowed, above + tl.log(p), float("-inf")), mask=mine)


def keep_best(
    token: Tensor, probability: Tensor, score: Tensor, expanded: Tensor, root: Tensor, nodes: int, top_k: int
) -> tuple[Tensor, ...]:
    """See drafting.keep_best."""
    (batch, total), device = score.shape, score.device
    nodes = min(nodes, total)
    slots = 1 + nodes
    sizes = [4 * batch * slots, batch * slots * top_k]
    numbers, children = torch.zeros(sum(sizes), dtype=torch.int64, device=device).split(sizes)
    sizes = [batch * slots, batch * slots * slots]
    exists, mask = torch.zeros(sum(sizes), dtype=torch.bool, device=device).split(sizes)
    q = torch.empty((batch, slots), device=device)
    _keep_best[(batch,)](
        token,
        probability,
        score,
        score.topk(nodes).values,
        expanded,
        root,
        numbers,
        exists,
        q,
        mask,
        children,
        torch.empty((batch, total), dtype=torch.int32, device=device),
        batch,
        total,
        slots,
        top_k,
        SLOTS=triton.next_power_of_2(slots),
        BLOCK=min(triton.next_power_of_2(total), BLOCK),
        num_warps=8,
    )
    tree = (*numbers.view(4, batch, slots).unbind(), exists.view(batch, slots), q)
    return *tree, mask.view(batch, slots, slots), children.view(batch, slots, top_k)


@triton.jit
def _keep_best(
    tokens, probabilities, scores, best, expanded, roots,
    numbers, exists, probability, mask, children,
    slot_of,
    batch, total, slots, top_k,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``best`` [B, slots - 1]: the best scores. ``numbers`` [4, B, slots]: token, parent, depth and rank, zeros as the
    other results but ``probability``. ``slot_of`` [B, total]: the slot of every candidate."""
    image = tl.program_id(0).to(tl.int64)
    candidates = image * total
    first = image * slots
    token = numbers + first
    parent = token + batch * slots
    depth = parent + batch * slots
    rank = depth + batch * slots
    expanded += image * (total - top_k) // top_k  # of all candidates but the root's
    least = tl.load(best + first - image + slots - 2)
    s = tl.arange(0, SLOTS)
    tl.store(probability + first + s, tl.where(s == 0, 1.0, 0.0), mask=s < slots)
    tl.store(exists + first + s, s == 0, mask=s < slots)
    tl.store(token, tl.load(roots + image))
    above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        above += (tl.load(scores + candidates + i, mask=i < total, other=float("-inf")) > least).to(tl.int32)
    ties = slots - 1 - tl.sum(above, 0)  # how many with just this score are kept: those with the smallest numbers
    tl.debug_barrier()  # other threads write to what this one wrote
    last = tl.zeros((), tl.int32)  # slot given away
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(scores + candidates + i, mask=i < total, other=float("-inf"))
        tie = ((value == least) & (i < total)).to(tl.int32)
        kept = ((value > least) | ((tie > 0) & (tl.cumsum(tie, 0) <= ties))) & (value > float("-inf"))
        slot = last + tl.cumsum(kept.to(tl.int32), 0)
        tl.store(slot_of + candidates + i, tl.where(kept, slot, 0), mask=i < total)
        tl.store(token + slot, tl.load(tokens + candidates + i, mask=kept, other=0), mask=kept)
        tl.store(rank + slot, (i % top_k).to(tl.int64), mask=kept)
        tl.store(exists + first + slot, kept, mask=kept)
        q = tl.load(probabilities + candidates + i, mask=kept, other=0.0)
        tl.store(probability + first + slot, q, mask=kept)
        level = tl.where(i < top_k, 1, 2 + (i - top_k) // (top_k * top_k))
        tl.store(depth + slot, level.to(tl.int64), mask=kept)
        number = tl.load(expanded + i // top_k - 1, mask=kept & (level > 1), other=-1)
        number += tl.where(level > 2, top_k + (level - 3) * (top_k * top_k), 0)
        tl.store(parent + slot, number, mask=kept)  # as a candidate; -1: the root
        last += tl.sum(kept.to(tl.int32), 0)
        ties -= tl.sum(tie, 0)
    tl.debug_barrier()  # other threads read what this one wrote
    draft = (s > 0) & (s <= last)
    number = tl.load(parent + s, mask=draft, other=-1)
    above_it = tl.load(slot_of + candidates + number, mask=number >= 0, other=0)
    tl.store(parent + s, above_it.to(tl.int64), mask=draft)
    place = (first + above_it) * top_k + tl.load(rank + s, mask=draft, other=0)
    tl.store(children + place, s.to(tl.int64), mask=draft)
    tl.debug_barrier()
    line = s.to(tl.int64)
    for _ in range(0, total, top_k * top_k):  # at least the levels
        tl.store(mask + (first + s) * slots + line, s < slots, mask=s < slots)
        line = tl.load(parent + line, mask=s < slots, other=0)
    tl.store(mask + (first + s) * slots + line, s < slots, mask=s < slots)
