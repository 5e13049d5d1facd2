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
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...kernels.sampling import row_of
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


@cache  # for good: captured steps keep reading it
def fed_mask(width: int, count: int, device: torch.device) -> Tensor:
    """The tree mask [1, T, T] (bool) of a pass: the window is a chain, every other front draft attends to the root."""
    mask = torch.eye(width + count - 1, dtype=torch.bool)
    mask[:width, :width] = torch.ones((width, width), dtype=torch.bool).tril()
    mask[:, 0] = True
    return mask[None].to(device)


@dataclass(frozen=True)
class FrontOutcome:
    """What the front drafts decide at column 0: ``verified``, and the slot [B] (int64) after which column 1 is
    predicted."""

    verified: Verified
    slot: Tensor

    def window(self, p: Tensor, width: int) -> Tensor:
        """The probabilities [B, W, V+] of the window's columns among those of the tokens fed, p [B, T, V+]."""
        return torch.cat((p[:, :1], row_of(p, self.slot)[:, None], p[:, 2:width]), dim=1)

    def path(self, width: int) -> Tensor:
        """The slots [B, W] of which the accepted ones stay in the cache."""
        column = counting(width, self.slot.device)
        return torch.where(column == 1, self.slot[:, None], column)


def verify_front(
    rule: AcceptanceRule, tree: Tree, p: Tensor, width: int, strength: Tensor, random: RoundRandom,
    codebook: Tensor | None,
) -> FrontOutcome:
    """Test the front drafts against p [B, T, V+], one after the other. strength [B, 1]: see AcceptanceRule.

    Column 1 is predicted after the accepted draft, or else after the one whose code vector is nearest to the token
    sampled instead; without a codebook [V, C] that is the first. This choice may depend on the tokens of column 0 only:
    if it looked further, the guesses past them would no longer be samples from their q.
    """
    slots = (0, 1, *range(width, p.shape[1]))
    rows = p.index_select(1, numbers(slots, p.device, torch.int64))
    verified = recursive_rejection(rule, tree, rows, strength, random)
    rank = torch.where(verified.accepted > 0, verified.rank[:, 0], _nearest(tree, verified.token[:, 0], codebook))
    return FrontOutcome(verified, numbers(slots[1:], p.device, torch.int64)[rank])


def _nearest(tree: Tree, token: Tensor, codebook: Tensor | None) -> Tensor:
    """The rank [B] (int64) of the draft whose code vector is the nearest to that of token [B]; ties go to the first."""
    if codebook is None:
        return torch.zeros_like(token)
    draft, token = (ids.clamp(max=len(codebook) - 1) for ids in (tree.token[:, 1:], token[:, None]))
    distance = (codebook[draft] - codebook[token]).square().sum(-1)
    return distance.masked_fill(~tree.exists[:, 1:], torch.inf).argmin(1)
