"""Front drafts: several drafts for the first token of a Jacobi window instead of one.

Where the first draft of a window is rejected, a pass decides one token only. With K front drafts it is fed K - 1 more
drafts for that position, each after the root. They are tested one after the other by recursive rejection sampling
(kernels/verification.py), which leaves the distribution exactly p: the first one is the window's own, sampled from q,
and the others are sampled from q without replacement, again in every pass.

What the target predicts after them is of use as well. After an accepted one it decides the next token; after a
rejection, the prediction after the draft most like the token sampled instead refines the next position.

The idea is "proactive drafting" of SJD-PAC (CVPR 2026, arXiv:2603.18599). Its published code grows several levels,
prefers the path of which most is accepted, and tests samples of a residual as if they were samples of p. Neither is
exact; tests/unit/test_front.py shows that of variants like these.

A pass is fed the window of W tokens, slots 0 (the root) to W - 1, then the other front drafts, slots W to W + K - 2.
The first token of the window is that of column 0; where the first ones are settled (settling.py), it is that of the
first column to be tested.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.sampling import take
from ..constants import counting, numbers
from ..drafts.trees import Tree
from ..rng import Purpose
from ..trace import Source
from ..verification.tree import RoundRandom, Verified, recursive_rejection
from .window import JacobiRun, JacobiState, VerifiedWindow, committed_count, strength_at


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


def draft_front(run: JacobiRun, state: JacobiState) -> Tree:
    """The front drafts of a pass."""
    window, column = state.window, state.window.first_tested[:, None]
    position = window.committed[:, None] + column
    q = run.memory.draft_probs.at(position)
    noise = state.stream.gumbel(position, q.shape[-1], Purpose.DRAFT, state.step_index)
    root, first = (window.token.gather(1, column + i) for i in (0, 1))
    return front_drafts(root, first, q, noise, run.method.front)


def verify_front(run: JacobiRun, state: JacobiState, tree: Tree, p: Tensor) -> FrontOutcome:
    """Test the front drafts against p [B, T, V+] of all tokens fed, one after the other.

    The next column is predicted after the accepted draft, or else after the one whose code vector is nearest to the
    token sampled instead; without a codebook that is the first. This choice may depend on tokens up to this column
    only: if it looked further, the guesses past them would no longer be samples from their q.
    """
    column = state.window.first_tested
    position = state.committed + column
    others = counting(p.shape[1], p.device)[run.width :].expand(len(p), -1)
    slots = torch.cat((column[:, None], column[:, None] + 1, others), dim=1)
    verified = recursive_rejection(
        run.rule,
        tree,
        take(p, slots),
        strength_at(state, position[:, None]),
        RoundRandom(state.stream, state.step_index, position),
    )
    rank = torch.where(verified.accepted > 0, verified.rank[:, 0], _nearest(tree, verified.token[:, 0], run.codebook))
    return FrontOutcome(verified, column, slots.gather(1, rank[:, None] + 1)[:, 0])


def with_front(state: JacobiState, verified: VerifiedWindow, front: FrontOutcome) -> VerifiedWindow:
    """The outcome of a window in which front drafts decide a column.

    Where another one than the first is accepted, the image commits it and the token after it: no draft was fed after
    that.
    """
    first, column = front.verified, counting(verified.p.shape[1], front.column.device) == front.column[:, None]

    def joined(decided: Tensor, others: Tensor) -> Tensor:
        return torch.where(column, decided[:, :1], others)

    accepted = joined(first.path > 0, verified.accepted)
    count = committed_count(state, accepted)
    count = torch.where(front.slot == front.column + 1, count, torch.minimum(count, front.column + 2))
    relaxed = tv_bound = None
    if verified.relaxed is not None:
        relaxed = joined(first.source == Source.RELAXED, verified.relaxed)
        tv_bound = joined(first.tv_bound, verified.tv_bound)
    return replace(
        verified,
        token=joined(first.token, verified.token),
        accepted=accepted,
        q=joined(first.q, verified.q),
        ratio=joined(first.ratio, verified.ratio),
        relaxed=relaxed,
        tv_bound=tv_bound,
        count=count,
        rank=joined(first.rank, torch.zeros_like(verified.token)),
    )


def _nearest(tree: Tree, token: Tensor, codebook: Tensor | None) -> Tensor:
    """The rank [B] (int64) of the draft whose code vector is the nearest to that of token [B]; ties go to the first."""
    if codebook is None:
        return torch.zeros_like(token)
    draft, token = (ids.clamp(max=len(codebook) - 1) for ids in (tree.token[:, 1:], token[:, None]))
    distance = (codebook[draft] - codebook[token]).square().sum(-1)
    return distance.masked_fill(~tree.exists[:, 1:], torch.inf).argmin(1)
