"""What a round of speculative decoding hands on to the next one, and what the target is fed.

A round feeds the target T = P + M tokens: P uncached tokens, the root last, then M drafts. Verified is the outcome of
verification (kernels/verification.py); its path holds slots of the tree, slot 0 being the root.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.sampling import choose, take
from ..constants import counting
from ..drafts.trees import Tree
from ..layout import TokenLayout
from ..rng import Stream
from ..verification.tree import Verified


@dataclass(frozen=True)
class Uncached:
    """Decided tokens [B, P] (int64) that are not yet in the target's cache.

    The first ``count`` [B] are valid, the last of them is the root. q [B, P]: the draft probability of tokens that were
    accepted unverified.
    """

    token: Tensor
    q: Tensor
    count: Tensor

    @property
    def root(self) -> Tensor:
        return self.token.gather(1, self.count[:, None] - 1)[:, 0]


@dataclass(frozen=True)
class DrafterInputs:
    """What the drafter observes next: tokens [B, U] at positions ``begin`` [B] and on, the first ``count`` [B] valid.

    hidden [R, U, D]: the target's hidden state one position before each token.
    """

    token: Tensor
    begin: Tensor
    count: Tensor
    hidden: Tensor

    def where(self, condition: Tensor, other: DrafterInputs) -> DrafterInputs:
        """These for the images where condition [B], else ``other``."""
        return DrafterInputs(*(choose(condition, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    def padded(self, width: int) -> DrafterInputs:
        """With U at least ``width``, so that rounds have one shape and are captured once."""
        missing = max(0, width - self.token.shape[1])
        pad = torch.nn.functional.pad
        return replace(self, token=pad(self.token, (0, missing)), hidden=pad(self.hidden, (0, 0, 0, missing)))


@dataclass(frozen=True)
class Decided:
    """The new tokens [B, L] of a round, the first ``count`` [B] valid."""

    token: Tensor
    count: Tensor
    drafter_inputs: DrafterInputs

    def where(self, condition: Tensor, other: Decided) -> Decided:
        """These for the images where condition [B], else ``other``."""
        return Decided(
            choose(condition, self.token, other.token),
            choose(condition, self.count, other.count),
            self.drafter_inputs.where(condition, other.drafter_inputs),
        )


@dataclass(frozen=True)
class RoundState:
    """The DecodeState of speculative decoding: what a round passes to the next one, all of it tensors.

    stream, layout, strength and skippable [B, S]: see Request. committed [B]: tokens decided so far. drafter_inputs:
    what the drafter has not observed yet. uncached: see there. history, plan, extent: the structure's memory, its next
    trees, and what the host must know of them (drafts/structures.py). skipped [B]: did the last round skip
    verification; own_passes [B]: forward passes that verified each image; features [R, G, D], known [B]: the target's
    latest hidden states and their number, for methods that skip verification. round_index []: from 1.
    """

    stream: Stream
    layout: TokenLayout
    strength: Tensor
    skippable: Tensor | None
    committed: Tensor
    drafter_inputs: DrafterInputs
    uncached: Uncached
    history: Any
    plan: tuple[Tensor, Tensor] | None
    extent: Tensor | None
    skipped: Tensor
    own_passes: Tensor
    features: Tensor | None
    known: Tensor
    round_index: Tensor


def fed_mask(uncached: Uncached, tree: Tree) -> Tensor:
    """The tree mask [B, T, T] (bool) of the tokens fed: which fed tokens each of them attends to.

    An uncached token attends to those before it, a draft to all uncached tokens and its ancestors. Tokens that are not
    valid attend to themselves only.
    """
    batch, width = uncached.token.shape
    tree_mask = tree.tree_mask()
    if width == 1:  # only the root, which is slot 0 of the tree
        return tree_mask
    index = counting(width, uncached.token.device)
    valid = index < uncached.count[:, None]
    causal = (index <= index[:, None]) & valid[:, None] | torch.eye(width, dtype=torch.bool, device=index.device)
    drafts = tree_mask[:, 1:, 1:]
    uncached_rows = torch.cat((causal, drafts.new_zeros((batch, width, drafts.shape[1]))), dim=2)
    draft_rows = torch.cat((valid[:, None].expand(-1, drafts.shape[1], -1), drafts), dim=2)
    return torch.cat((uncached_rows, draft_rows), dim=1)


def commit_path(uncached: Uncached, verified: Verified) -> Tensor:
    """Indices [B, P + L] of the fed tokens that stay in the cache: the uncached ones, then the accepted path."""
    width, levels = uncached.token.shape[1], verified.path.shape[1]
    index = counting(width + levels, uncached.token.device)
    level = (index - uncached.count[:, None]).clamp(0, levels - 1)
    # Slot s >= 1 of the tree is fed at index P + s - 1.
    return torch.where(index < uncached.count[:, None], index, width - 1 + verified.path.gather(1, level))


def after_verification(
    uncached: Uncached,
    verified: Verified,
    hidden: Tensor,
    path: Tensor,
    committed: Tensor,
    length: int,
    verifying: Tensor,
    refresh: bool,
) -> Decided:
    """The accepted drafts and the token after them, for the images ``verifying`` [B]; the others decide nothing.

    hidden [R, T, D]: of the forward pass; path: see commit_path(). The drafter observes the new tokens; with
    ``refresh`` also, once more, the uncached tokens after the first one. It has observed those after a skipped round
    with stale hidden states, and now gets the true ones.
    """
    width, levels = uncached.token.shape[1], verified.path.shape[1]
    count = torch.where(verifying, torch.minimum(verified.accepted + 1, length - committed), 0)
    again = uncached.count - 1 if refresh else torch.zeros_like(uncached.count)  # tokens observed once more
    index = counting(width + levels, path.device)
    old = uncached.token.gather(1, (index + 1).expand(len(path), -1).clamp(max=width - 1))
    new = verified.token.gather(1, (index - again[:, None]).clamp(0, levels))
    token = torch.where(index < again[:, None], old, new)
    # The token before the first new one is the root, number count - 1 of the path.
    first = uncached.count - 1 - again
    before = path.gather(1, (first[:, None] + index).clamp(max=path.shape[1] - 1))
    drafter_inputs = DrafterInputs(
        token, committed - again, torch.where(verifying, count + again, 0), take(hidden, before)
    )
    return Decided(verified.token, count, drafter_inputs)


def next_uncached(uncached: Uncached, decided: Decided, q: Tensor, skip: Tensor, width: int) -> Uncached:
    """The uncached tokens [B, width] of the next round.

    After verification, the last new token alone (of a finished image the old root). Where verification was skipped,
    skip [B], the old uncached tokens and then the new ones, of draft probability q [B, L].
    """
    index = counting(width, skip.device)
    is_old = index < uncached.count[:, None]
    old_index = index.clamp(max=uncached.token.shape[1] - 1).expand(len(skip), -1)
    new_index = (index - uncached.count[:, None]).clamp(min=0)

    def joined(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(is_old, old.gather(1, old_index), new.gather(1, new_index.clamp(max=new.shape[1] - 1)))

    last = decided.token.gather(1, (decided.count[:, None] - 1).clamp(min=0))
    last = torch.where(decided.count[:, None] > 0, last, uncached.root[:, None])
    token = torch.where(skip[:, None], joined(uncached.token, decided.token), last)
    return Uncached(token, joined(uncached.q, q), torch.where(skip, uncached.count + decided.count, 1))
