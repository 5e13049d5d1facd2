"""What a round of drafting feeds to the target, keeps in its cache, and hands on to the next round."""

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
class Pending:
    """Decided tokens [B, P] (int64) that the target has not been fed, the root last; ``count`` [B] of them are meant.

    q [B, P] is the probability with which each was drafted, where it was taken unverified.
    """

    token: Tensor
    q: Tensor
    count: Tensor

    @property
    def root(self) -> Tensor:
        return self.token.gather(1, self.count[:, None] - 1)[:, 0]


@dataclass(frozen=True)
class Told:
    """What the drafter is to take over: tokens [B, U] from positions ``begin`` [B] on, ``count`` [B] of them, with the
    target's hidden states [R, U, D] before each."""

    token: Tensor
    begin: Tensor
    count: Tensor
    hidden: Tensor

    def where(self, condition: Tensor, other: Told) -> Told:
        """These for the images where condition [B], else ``other``."""
        return Told(*(choose(condition, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    def padded(self, width: int) -> Told:
        """With U at least ``width``: rounds of one shape are captured once."""
        missing = max(0, width - self.token.shape[1])
        pad = torch.nn.functional.pad
        return replace(self, token=pad(self.token, (0, missing)), hidden=pad(self.hidden, (0, 0, 0, missing)))


@dataclass(frozen=True)
class Decided:
    """A round's new tokens [B, T] of which ``count`` [B] are meant."""

    token: Tensor
    count: Tensor
    told: Told

    def where(self, condition: Tensor, other: Decided) -> Decided:
        """These for the images where condition [B], else ``other``."""
        return Decided(choose(condition, self.token, other.token), choose(condition, self.count, other.count),
                       self.told.where(condition, other.told))


@dataclass(frozen=True)
class Carry:
    """What goes from round to round, all of it tensors: first what the run was asked, then how far it is.

    stream, layout, strength and skippable [B, S]: see Request. committed [B]: tokens decided so far. told: by the last
    round, of which the drafter does not know yet. pending: see there. history, plan, extent: what the structure
    remembers, its next trees, and what the host must know of them (drafts/structures.py). skipped [B]: was the last
    round taken unverified; own_passes [B]: passes that judged each image; features [R, G, D], known [B]: the target's
    newest hidden states and how many there are, where rounds are skipped. turn []: number of the round, from 1.
    """

    stream: Stream
    layout: TokenLayout
    strength: Tensor
    skippable: Tensor | None
    committed: Tensor
    told: Told
    pending: Pending
    history: Any
    plan: tuple[Tensor, Tensor] | None
    extent: Tensor | None
    skipped: Tensor
    own_passes: Tensor
    features: Tensor | None
    known: Tensor
    turn: Tensor


def fed_mask(pending: Pending, tree: Tree) -> Tensor:
    """Who sees whom [B, P + M, P + M] (bool): pending tokens those before them, drafts these and their ancestors."""
    batch, width = pending.token.shape
    ancestors = tree.ancestors()
    if width == 1:  # the root stands for itself
        return ancestors
    index = counting(width, pending.token.device)
    meant = index < pending.count[:, None]
    among = (index <= index[:, None]) & meant[:, None] | torch.eye(width, dtype=torch.bool, device=index.device)
    drafts = ancestors[:, 1:, 1:]
    above = torch.cat((among, drafts.new_zeros((batch, width, drafts.shape[1]))), dim=2)
    below = torch.cat((meant[:, None].expand(-1, drafts.shape[1], -1), drafts), dim=2)
    return torch.cat((above, below), dim=1)


def kept_slots(pending: Pending, verified: Verified) -> Tensor:
    """Places [B, P + L] among the fed tokens of what stays: the pending ones, then the accepted path."""
    width, levels = pending.token.shape[1], verified.path.shape[1]
    index = counting(width + levels, pending.token.device)
    behind = (index - pending.count[:, None]).clamp(0, levels - 1)
    return torch.where(index < pending.count[:, None], index, width - 1 + verified.path.gather(1, behind))


def after_verification(
    pending: Pending, verified: Verified, hidden: Tensor, kept: Tensor, committed: Tensor, length: int,
    judged: Tensor, refresh: bool,
) -> Decided:
    """What a verified round decided for the images ``judged`` [B]; hidden [R, P + M, D] are the pass's hidden states.

    With ``refresh`` the drafter takes over again, with true hidden states, what it was told after a skipped round.
    """
    levels = verified.path.shape[1]
    count = torch.where(judged, torch.minimum(verified.accepted + 1, length - committed), 0)
    early = pending.count - 1 if refresh else torch.zeros_like(pending.count)  # tokens told before, now again
    first = pending.count - 1 - early
    index = counting(pending.token.shape[1] + levels, kept.device)
    again = pending.token.gather(1, (index + 1).expand(len(kept), -1).clamp(max=pending.token.shape[1] - 1))
    new = verified.token.gather(1, (index - early[:, None]).clamp(0, levels))
    token = torch.where(index < early[:, None], again, new)
    before = kept.gather(1, (first[:, None] + index).clamp(max=kept.shape[1] - 1))
    told = Told(token, committed - early, torch.where(judged, count + early, 0), take(hidden, before))
    return Decided(verified.token, count, told)


def rejoin(pending: Pending, decided: Decided, q: Tensor, skip: Tensor, width: int) -> Pending:
    """Pending tokens of the next round: behind a skipped one all so far, else the last decided token alone."""
    index = counting(width, skip.device)
    old = pending.token.shape[1]
    place = (index - pending.count[:, None]).clamp(min=0)
    is_old = index < pending.count[:, None]

    def joined(before: Tensor, after: Tensor) -> Tensor:
        return torch.where(is_old, before.gather(1, index.clamp(max=old - 1).expand(len(skip), -1)),
                           after.gather(1, place.clamp(max=after.shape[1] - 1)))

    last = decided.token.gather(1, (decided.count[:, None] - 1).clamp(min=0))
    last = torch.where(decided.count[:, None] > 0, last, pending.root[:, None])
    token = torch.where(skip[:, None], joined(pending.token, decided.token), last)
    return Pending(token, joined(pending.q, q), torch.where(skip, pending.count + decided.count, 1))
