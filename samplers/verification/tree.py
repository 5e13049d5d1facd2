"""Verification of a draft tree against the target: the path it accepts, and the token sampled after the path.

Every function decides for all images at once. p are the target's probabilities [B, M + 1, V+] after every slot of the
tree (row 0: after the root). Where the host can read slots at no cost, p may instead be a function slot [B] (int64) ->
[B, V+], which is called for visited slots only. Uniform numbers depend on the image's seed, the position and the round
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...kernels import verification as kernels
from ...kernels.sampling import categorical, row_of, take
from ...kernels.verification import BONUS, Verified
from ..constants import constant, counting
from ..drafts.growing import DRAWS
from ..drafts.trees import Tree
from ..rng import Purpose, Stream
from ..rules.acceptance import AcceptanceRule

TargetProbs = Tensor | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RoundRandom:
    """Random numbers of round ``round_index`` [] (int64); ``committed`` [B] (int64): tokens decided before it."""

    stream: Stream
    round_index: Tensor
    committed: Tensor

    def uniforms(self, purposes: Sequence[Purpose], column: Tensor, draw: Tensor | int = 0) -> tuple[Tensor, ...]:
        """For each purpose uniform numbers [B, n] for columns [n] or [B, n]; draw: see Stream, below DRAWS."""
        return self.stream.uniforms(self.committed[:, None] + column, purposes, self.round_index * DRAWS + draw)

    def uniform(self, purpose: Purpose, column: Tensor, draw: Tensor | int = 0) -> Tensor:
        return self.uniforms((purpose,), column, draw)[0]


def recursive_rejection(
    rule: AcceptanceRule, tree: Tree, p: TargetProbs, strength: Tensor, random: RoundRandom
) -> Verified:
    """Recursive rejection sampling: test siblings one by one, each against what the rejected ones left of p and q.

    See kernels.recursive_rejection_sampling. With the exact rule the output distribution is exactly p. strength
    [B, L or more]: see rules/acceptance.py.
    """
    device, levels, width = tree.token.device, tree.levels, tree.width
    # A number for every test, level by level, and one to sample the token after a path of every length.
    columns = tuple(level for level in range(levels) for _ in range(width)) + tuple(range(levels + 1))
    ranks = tuple(range(width)) * levels + (0,) * (levels + 1)
    columns, ranks = (constant(values, device, torch.int64) for values in (columns, ranks))
    accept, redraw = random.uniforms((Purpose.ACCEPT, Purpose.REDRAW), columns, ranks)
    u, v = accept[:, : levels * width].unflatten(1, (levels, width)), redraw[:, levels * width :]
    arguments = tree.token, tree.children(), tree.draft_probs, tree.draft_row, u, v, strength, rule
    if callable(p):
        return kernels.recursive_rejection_sampling(p, *arguments)
    if rule.is_exact or rule.has_budget:
        return kernels.rejection_sampling(p, *arguments)
    return kernels.recursive_rejection_sampling(partial(row_of, p), *arguments)


def sample_after_root(tree: Tree, p: TargetProbs, random: RoundRandom) -> Verified:
    """The outcome of a tree without drafts: the token after the root."""
    root = torch.zeros_like(tree.token[:, 0])
    after = p(root) if callable(p) else p[:, 0]
    token = categorical(after, random.uniform(Purpose.REDRAW, counting(1, root.device))[:, 0])[:, None]
    none, nothing = torch.zeros_like(token), torch.zeros_like(token, dtype=torch.float32)
    return Verified(token[:, :0], root, token, none + BONUS, none, nothing, nothing, nothing)


def draft_tv(tree: Tree, slots: Tensor, p: Tensor) -> Tensor | None:
    """Total variation [B, n] of the target p [B, n, V+] and the drafter after slots [B, n] of a tree.

    None if the drafter did not sample; meaningless after slots without children.
    """
    if tree.draft_probs is None or tree.draft_row is None:
        return None
    return (p - take(tree.draft_probs, tree.draft_row[slots])).clamp(min=0).sum(-1)


def verify_by_sampling(tree: Tree, p: TargetProbs, random: RoundRandom) -> Verified:
    """Exact verification of deterministic children: sample after the root, and go on while that is a child.

    The distribution is that of recursive rejection sampling with point masses, at the cost of one sample per level.
    """
    slots = counting(tree.token.shape[1], tree.token.device)
    arguments = tree.token, tree.children(), tree.levels, random.uniform(Purpose.REDRAW, tree.depth, slots)
    return kernels.sample_and_match(p, *arguments) if callable(p) else kernels.sample_and_match_rows(p, *arguments)


def block_verification(tree: Tree, p: Tensor, random: RoundRandom) -> Verified:
    """Verify a chain as a block (Sun et al., ICLR 2025): exact, and never shorter on average. See kernels.block."""
    columns = counting(tree.levels + 1, p.device)
    u, v = random.uniforms((Purpose.ACCEPT, Purpose.REDRAW), columns)
    return kernels.block(p, tree.draft_probs, tree.token, tree.exists, u[:, :-1], v)
