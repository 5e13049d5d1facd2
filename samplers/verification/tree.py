"""Verifying a draft tree against the target: which path is accepted, and what is drawn behind it.

Every function decides for all images at once and takes the target's laws p [B, M + 1, V+] behind every slot of the tree
(row 0: behind the root). Where the host can read the slots for nothing, p may be a function of them instead, slot [B]
(int64) -> laws [B, V+], which is asked for no more than the slots visited. Uniform numbers depend on the image's seed,
the position and the round alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...kernels import verification as kernels
from ...kernels.sampling import row_of
from ...kernels.verification import Verified
from ..constants import counting
from ..constants import numbers as constant
from ..drafts.growing import DRAWS
from ..drafts.trees import Tree
from ..rng import Purpose, Stream
from ..rules.acceptance import AcceptanceRule, Exact

Laws = Tensor | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Numbers:
    """Random numbers of a round: ``turn`` its number, ``committed`` [B] the tokens decided before it."""

    stream: Stream
    turn: Tensor
    committed: Tensor

    def uniforms(self, purposes: Sequence[Purpose], column: Tensor, draw: Tensor | int = 0) -> tuple[Tensor, ...]:
        """For each purpose numbers [B, n] for columns [n] or [B, n] and draws below DRAWS."""
        return self.stream.uniforms(self.committed[:, None] + column, purposes, self.turn * DRAWS + draw)

    def uniform(self, purpose: Purpose, column: Tensor, draw: Tensor | int = 0) -> Tensor:
        return self.uniforms((purpose,), column, draw)[0]


def recursive_rejection(
    rule: AcceptanceRule, tree: Tree, p: Laws, strength: Tensor, numbers: Numbers
) -> Verified:
    """Test siblings one after the other, each against what the rejected ones left of p and q.

    See kernels.recursive_rejection_sampling. With the exact rule the output law is exactly p. strength [B, L]: see
    AcceptanceRule.
    """
    device, levels, width = tree.token.device, tree.levels, tree.width
    # A number for every test, level by level, and one for the draw behind a path of every length.
    columns = tuple(level for level in range(levels) for _ in range(width)) + tuple(range(levels + 1))
    ranks = tuple(range(width)) * levels + (0,) * (levels + 1)
    columns, ranks = (constant(values, device, torch.int64) for values in (columns, ranks))
    accept, redraw = numbers.uniforms((Purpose.ACCEPT, Purpose.REDRAW), columns, ranks)
    u, v = accept[:, : levels * width].unflatten(1, (levels, width)), redraw[:, levels * width :]
    given = tree.token, tree.children(), tree.laws, tree.law_of, u, v, strength, rule
    if callable(p):
        return kernels.recursive_rejection_sampling(p, *given)
    if type(rule) is Exact:  # not a subclass, which may answer otherwise
        return kernels.exact_rejection_sampling(p, *given)
    if rule.has_budget:
        return kernels.relaxed_rejection_sampling(p, *given)
    return kernels.recursive_rejection_sampling(partial(row_of, p), *given)


def sample_and_match(tree: Tree, p: Laws, numbers: Numbers) -> Verified:
    """Exact verification of children proposed for certain: draw behind the root, follow while the draw is a child.

    The law is that of recursive rejection with point masses, at the cost of one draw per level.
    """
    slots = counting(tree.token.shape[1], tree.token.device)
    given = tree.token, tree.children(), tree.levels, numbers.uniform(Purpose.REDRAW, tree.depth, slots)
    return kernels.sample_and_match(p, *given) if callable(p) else kernels.sample_and_match_rows(p, *given)


def block_verification(tree: Tree, p: Tensor, numbers: Numbers) -> Verified:
    """Verify a chain as a block: exact, and never shorter on average (see kernels.block)."""
    columns = counting(tree.levels + 1, p.device)
    u, v = numbers.uniforms((Purpose.ACCEPT, Purpose.REDRAW), columns)
    return kernels.block(p, tree.laws, tree.token, tree.exists, u[:, :-1], v)
