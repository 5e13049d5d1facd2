"""Front drafts: several drafts for the first token of a Jacobi window instead of one.

Where the first draft of a window is rejected, a pass decides one token only. With K front drafts it is fed K - 1 more
drafts for that position, each after the root. They are tested one after the other by recursive rejection sampling
(kernels/verification.py), which leaves the distribution exactly p: the first one is the window's own, sampled from q,
and the others are sampled from q without replacement, anew in every pass.

What the target predicts after them is of use as well. After an accepted one it decides the next token; after a
rejection, the prediction after the draft most like the token sampled instead refines the next position.

The idea is "proactive drafting" of SJD-PAC (CVPR 2026, arXiv:2603.18599). Its published code grows several levels,
prefers the path of which most is accepted, and tests samples of a residual as if they were samples of p; both of that
is biased, which tests/unit/test_front.py shows.

A pass is fed the window of W tokens, slots 0 (the root) to W - 1, then the other front drafts, slots W to W + K - 2.
The first token of the window is that of column 0; where the first ones are settled (settling.py), it is that of the
first column to be tested.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.sampling import take
from ..constants import counting, numbers
from ..drafts.trees import Tree
from ..rules.acceptance import AcceptanceRule
from ..verification.tree import RoundRandom, Verified, recursive_rejection


def front_drafts(root: Tensor, first: Tensor, q: Tensor, noise: Tensor, count: int) -> Tree:
    """``count`` front drafts as a tree of one level.

    root, first [B, 1] (int64): the last decided token, and the window's draft after it, sampled from q [B, 1, V+]. The
    others are the largest entries of log q + Gumbel noise [B, 1, V+] without the first, in descending order, that is
    sampled from q without replacement. A draft for which q has no mass does not exist: a forced token has no others.
    """
    left = q[:, 0].scatter(1, first, 0)
    others = (left.log() + noise[:, 0]).topk(count - 1).indices
    mass = left.gather(1, others)
    token = torch.cat((root, first, others), dim=1)
    certain = torch.ones_like(first, dtype=q.dtype)
    probability = torch.cat((certain, q[:, 0].gather(1, first), mass), dim=1)
    exists = torch.cat(((certain > 0).expand(-1, 2), mass > 0), dim=1)
    rank = numbers((0, *range(count)), q.device, torch.int64).expand_as(token)
    depth = numbers((0,) + (1,) * count, q.device, torch.int64).expand_as(token)
    parent = torch.zeros_like(token)
    return Tree(token, parent, depth, rank, exists, probability, 1, count, q, parent[0])


def fed_mask(width: int, count: int, column: Tensor) -> Tensor:
    """The tree mask [B, T, T] (bool) of a pass: the window is a chain, and every other front draft attends to the
    window before the column [B] (int64) that they are drafts for."""
    slot = counting(width + count - 1, column.device)
    chain, own = slot <= slot[:, None], slot == slot[:, None]
    return torch.where(slot[:, None] < width, chain, own | (slot <= column[:, None, None]))


@dataclass(frozen=True)
class FrontOutcome:
    """What the front drafts decide: ``verified`` for the ``column`` [B], and the ``slot`` [B] after which the next
    column is predicted (int64)."""

    verified: Verified
    column: Tensor
    slot: Tensor

    def path(self, width: int) -> Tensor:
        """The slots [B, W] that predict the window's columns. Those that are accepted stay in the cache."""
        column = counting(width, self.slot.device)
        return torch.where(column == self.column[:, None] + 1, self.slot[:, None], column)


def verify_front(
    rule: AcceptanceRule, tree: Tree, p: Tensor, width: int, column: Tensor, strength: Tensor, random: RoundRandom,
    codebook: Tensor | None,
) -> FrontOutcome:
    """Test the front drafts of a column [B] against p [B, T, V+], one after the other. strength [B, 1]: see
    AcceptanceRule.

    The next column is predicted after the accepted draft, or else after the one whose code vector is nearest to the
    token sampled instead; without a codebook [V, C] that is the first. This choice may depend on tokens up to this
    column only: if it looked further, the guesses past them would no longer be samples from their q.
    """
    others = counting(p.shape[1], p.device)[width:].expand(len(p), -1)
    slots = torch.cat((column[:, None], column[:, None] + 1, others), dim=1)
    verified = recursive_rejection(rule, tree, take(p, slots), strength, random)
    rank = torch.where(verified.accepted > 0, verified.rank[:, 0], _nearest(tree, verified.token[:, 0], codebook))
    return FrontOutcome(verified, column, slots.gather(1, rank[:, None] + 1)[:, 0])


def _nearest(tree: Tree, token: Tensor, codebook: Tensor | None) -> Tensor:
    """The rank [B] (int64) of the draft whose code vector is the nearest to that of token [B]; ties go to the first."""
    if codebook is None:
        return torch.zeros_like(token)
    draft, token = (ids.clamp(max=len(codebook) - 1) for ids in (tree.token[:, 1:], token[:, None]))
    distance = (codebook[draft] - codebook[token]).square().sum(-1)
    return distance.masked_fill(~tree.exists[:, 1:], torch.inf).argmin(1)
