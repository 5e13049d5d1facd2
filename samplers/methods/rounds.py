"""What a round of speculative decoding hands on to the next one."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.sampling import images_where
from ..drafts.trees import Tree
from ..engine.run import Halfway


@dataclass(frozen=True)
class Observed:
    """What the drafter observes next: tokens [B, U] at positions ``begin`` [B] and on, the first ``count`` [B] valid.

    hidden [R, U, D]: the target's hidden state one position before each token.
    """

    token: Tensor
    begin: Tensor
    count: Tensor
    hidden: Tensor

    def where(self, condition: Tensor, other: Observed) -> Observed:
        """These for the images where condition [B], else ``other``."""
        return Observed(*(images_where(condition, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    def pad(self, width: int) -> Observed:
        """With U at least ``width``, so that rounds have one shape and are captured once."""
        missing = width - self.token.shape[1]
        if missing <= 0:
            return self
        pad = torch.nn.functional.pad
        return replace(self, token=pad(self.token, (0, missing)), hidden=pad(self.hidden, (0, 0, 0, missing)))


@dataclass(frozen=True)
class Round:
    """The state of speculative decoding.

    committed [B]: tokens decided so far; root [B]: the last of them, which is not in the target's cache yet; observed:
    what the drafter has not observed yet. history, plan, extent: the structure's memory, its next trees, and what the
    host must know of them (drafts/structures.py). passes [B]: forward passes that verified each image; index []: of
    the next round, from 1.
    """

    committed: Tensor
    root: Tensor
    observed: Observed
    history: Any
    plan: tuple[Tensor, Tensor] | None
    extent: Tensor | None
    passes: Tensor
    index: Tensor
    draft: ClassVar[None] = None


@dataclass(frozen=True)
class Drafted(Halfway):
    """A round whose trees are drafted, and not yet verified."""

    round: Round
    tree: Tree
    extent: ClassVar[None] = None
