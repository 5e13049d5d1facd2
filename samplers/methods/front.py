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
from ..engine.run import Run
from ..rng import Purpose
from ..trace import Source
from ..verification.tree import RoundRandom, Verified, recursive_rejection
from .window import Tested, Window


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


def draft_front(run: Run, window: Window) -> Tree:
    """The front drafts of a pass."""
    column = window.first_tested[:, None]
    position = window.committed[:, None] + column
    q = run.memory.draft_probs.at(position)
    noise = run.stream.gumbel(position, q.shape[-1], Purpose.DRAFT, window.passes)
    root, first = (window.token.gather(1, column + i) for i in (0, 1))
    return front_drafts(root, first, q, noise, run.method.front)


def fed(window: Window, tree: Tree, token: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a pass is fed: tokens and positions [B, W] of the window, then the other front drafts; and the tree mask
    [B, T, T] (bool).

    The window is a chain, and a front draft attends to the window before the column that it is a draft for. With W = 4
    and two other drafts for column 0:

        root    1
        guess   1 1
        guess   1 1 1
        guess   1 1 1 1
        draft   1 0 0 0 1
        draft   1 0 0 0 0 1
    """
    width, column, others = token.shape[1], window.first_tested, tree.token[:, 2:]  # the first is in the window
    here = (window.committed + column)[:, None].expand_as(others)
    slot = counting(width + others.shape[1], column.device)
    chain, own = slot <= slot[:, None], slot == slot[:, None]
    mask = torch.where(slot[:, None] < width, chain, own | (slot <= column[:, None, None]))
    return torch.cat((token, others), dim=1), torch.cat((position, here), dim=1), mask


@dataclass(frozen=True)
class Front:
    """What the front drafts decide: ``verified`` for the ``column`` [B], and the ``slot`` [B] after which the next
    column is predicted (int64)."""

    verified: Verified
    column: Tensor
    slot: Tensor

    def path(self, width: int) -> Tensor:
        """The slots [B, W] that predict the window's columns. Those that are accepted stay in the cache."""
        column = counting(width, self.slot.device)
        return torch.where(column == self.column[:, None] + 1, self.slot[:, None], column)

    def joined(self, tested: Tested) -> Tested:
        """What a pass finds if front drafts decide a column."""
        first, column = self.verified, counting(tested.token.shape[1], self.column.device) == self.column[:, None]

        def joined(decided: Tensor, others: Tensor) -> Tensor:
            return torch.where(column, decided[:, :1], others)

        relaxed = tv_bound = None
        if tested.relaxed is not None:
            relaxed = joined(first.source == Source.RELAXED, tested.relaxed)
            tv_bound = joined(first.tv_bound, tested.tv_bound)
        return replace(
            tested,
            token=joined(first.token, tested.token),
            accepted=joined(first.path > 0, tested.accepted),
            q=joined(first.q, tested.q),
            ratio=joined(first.ratio, tested.ratio),
            relaxed=relaxed,
            tv_bound=tv_bound,
            rank=joined(first.rank, torch.zeros_like(tested.token)),
        )

    def limited(self, count: Tensor) -> Tensor:
        """How many tokens [B] are decided, of ``count``: where another draft than the first is accepted, that one and
        the token after it, as no draft was fed after that."""
        return torch.where(self.slot == self.column + 1, count, torch.minimum(count, self.column + 2))


def verify_front(run: Run, window: Window, tree: Tree, p: Tensor) -> Front:
    """Test the front drafts against p [B, T, V+] of all tokens fed, one after the other.

    The next column is predicted after the accepted draft, or else after the one whose code vector is nearest to the
    token sampled instead; without a codebook that is the first. This choice may depend on tokens up to this column
    only: if it looked further, the guesses past them would no longer be samples from their q.
    """
    column = window.first_tested
    position = window.committed + column
    others = counting(p.shape[1], p.device)[run.method.window :].expand(len(p), -1)
    slots = torch.cat((column[:, None], column[:, None] + 1, others), dim=1)
    random = RoundRandom(run.stream, window.passes, position)
    strength = run.strength_at(position[:, None])
    verified = recursive_rejection(run.method.rule, tree, take(p, slots), strength, random)
    rank = torch.where(verified.accepted > 0, verified.rank[:, 0], _nearest(tree, verified.token[:, 0], run.codebook))
    return Front(verified, column, slots.gather(1, rank[:, None] + 1)[:, 0])


def _nearest(tree: Tree, token: Tensor, codebook: Tensor | None) -> Tensor:
    """The rank [B] (int64) of the draft whose code vector is the nearest to that of token [B]; ties go to the first."""
    if codebook is None:
        return torch.zeros_like(token)
    draft, token = (ids.clamp(max=len(codebook) - 1) for ids in (tree.token[:, 1:], token[:, None]))
    distance = (codebook[draft] - codebook[token]).square().sum(-1)
    return distance.masked_fill(~tree.exists[:, 1:], torch.inf).argmin(1)
