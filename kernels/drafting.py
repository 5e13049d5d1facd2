"""Growing draft trees: the children of a level's drafts, and a tree of the best of all candidates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device.dispatch import Accelerated


@Accelerated
def children(
    q: Tensor, noise: Tensor | None, score: Tensor, most: Tensor, child: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Children of the F drafts of a level: those with the largest q, or with noise the largest log q + noise.

    q [B, F, V]: probabilities after each draft; noise [B, F, V]; score [B, F] (fp32): the drafts' cumulative
    log probability, minus infinity for one that does not exist; most [B, 1] (int64): how many children they may have;
    child [w] (int64): which of the F * count best tokens, ``count`` of each draft in descending order, become children.
    The Triton kernel has equal ones in the order of their ids.

    Returns the children's tokens (int64), q and scores [B, w]. The score of one that ``most`` forbids, that has no
    probability or that the vocabulary lacks (most <= V) is minus infinity, or NaN if q is.
    """
    values = q if noise is None else q.log().add_(noise)
    legal = min(count, q.shape[-1])
    best = F.pad(values.topk(legal).indices, (0, count - legal)).flatten(1)
    parent, rank = child // count, child % count
    token = best[:, child]
    probability = q.flatten(1).gather(1, parent * q.shape[-1] + token)
    return token, probability, (score[:, parent] + probability.log()).masked_fill_(rank >= most, -torch.inf)


@Accelerated
def keep_best(
    token: Tensor, probability: Tensor, score: Tensor, expanded: Tensor, root: Tensor, nodes: int, top_k: int
) -> tuple[Tensor, ...]:
    """EAGLE-2's reranking: the root and the ``nodes`` candidates with the highest scores, in the order of their
    numbers.

    Candidates are numbered over all levels: token (int64), probability and score (fp32) are [B, C], the first ``top_k``
    of the root ([B], its token), then ``top_k`` of each draft expanded [B, (levels - 1) * top_k] (int64), ``top_k``
    numbers among the candidates of each level but the last. A score of minus infinity or NaN: there is no such
    candidate. A parent has a smaller number than its child and never a lower score, and ties go to the smaller number:
    so the tree holds every draft's parent, and before the draft.

    Returns the first fields of a Tree [B, M + 1]: token, parent, depth, rank, exists and probability; its tree mask
    [B, M + 1, M + 1], and the slots of every slot's children [B, M + 1, top_k], 0 for none. Drafts that do not exist
    are zeros.
    """
    total, levels = score.shape[1], expanded.shape[1] // top_k + 1
    # Before a level's candidates are top_k, and top_k**2 of each level after the first.
    level = torch.arange(expanded.shape[1], device=score.device) // top_k
    above = F.pad(expanded + (level > 0) * (top_k + (level - 1) * top_k**2), (1, 0), value=-1)  # -1: the root
    best = score.sort(dim=1, descending=True, stable=True)
    number, exists = best.indices[:, :nodes], best.values[:, :nodes] > -torch.inf
    # By number, the missing ones last. In int32, as Apple's GPUs have sorted more than 256 int64 numbers wrongly.
    order = torch.where(exists, number, total + number).int().sort(dim=1).values.long()
    exists, number = order < total, order % total
    # Slot of every candidate number. The last entry, where the parent -1 points, is the root's slot 0.
    slot = torch.arange(1, number.shape[1] + 1, device=number.device).expand_as(number)
    slot_of = torch.zeros((len(number), total + 1), dtype=torch.int64, device=number.device)
    slot_of = slot_of.scatter(1, torch.where(exists, number, total), torch.where(exists, slot, 0))
    parent = slot_of.gather(1, above.gather(1, number // top_k) % (total + 1))
    depth = 2 + torch.div(number - top_k, top_k**2, rounding_mode="floor")
    drafts = token.gather(1, number), parent, depth, number % top_k, exists, probability.gather(1, number)
    drafts = (values.masked_fill(~exists, 0) for values in drafts)
    roots = root, *[torch.zeros_like(root)] * 3, torch.ones_like(root, dtype=torch.bool), torch.ones_like(score[:, 0])
    tree = [torch.cat((first[:, None], rest), dim=1) for first, rest in zip(roots, drafts, strict=True)]
    return *tree, ancestors(tree[1], levels), children_of(tree[1], tree[3], tree[4], top_k)


def ancestors(parent: Tensor, levels: int) -> Tensor:
    """Mask [B, M + 1, M + 1] (bool) of trees whose slots have these parents [B, M + 1] (int64; the root's is 0): is
    slot j slot i itself or an ancestor of it."""
    own = torch.eye(parent.shape[1], dtype=torch.bool, device=parent.device)
    mask = own.expand(len(parent), -1, -1)
    for _ in range(levels):
        mask = own | mask.gather(1, parent.unsqueeze(-1).expand_as(mask))
    return mask


def children_of(parent: Tensor, rank: Tensor, exists: Tensor, width: int) -> Tensor:
    """Slots [B, M + 1, width] (int64) of the children of every slot, at their rank; 0 for none. All [B, M + 1]: parent
    and rank < width (int64) of every slot, and does it exist (bool)."""
    batch, slots = parent.shape
    table = torch.zeros((batch, slots * width + 1), dtype=torch.int64, device=parent.device)  # the last is scratch
    index = torch.arange(slots, device=parent.device)
    entry = torch.where(exists & (index > 0), parent * width + rank, slots * width)
    return table.scatter(1, entry, index.expand(batch, -1))[:, :-1].unflatten(1, (slots, width))
