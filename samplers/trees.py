"""Draft trees: their shapes, and the tree a drafter grew for every image of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """The drafts of a batch. Slot 0 is the root (the last token decided); every parent stands before its children.

    All [B, M + 1]: token (int64); parent, the slot it hangs from (int64; the root's is 0); depth below the root (int64);
    rank among its siblings in the order they were drawn, from 0 (int64); exists (bool); probability under the law it
    was drawn from (fp32; 1 for the root). levels: the deepest level; width: the most siblings (both on the host).
    laws [B, E, V+] and law_of [M + 1] (int64): slot s's children were drawn without replacement from row law_of[s].
    laws is None where children are simply the drafter's most likely tokens.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    rank: Tensor
    exists: Tensor
    probability: Tensor
    levels: int
    width: int
    laws: Tensor | None = None
    law_of: Tensor | None = None

    def children(self) -> Tensor:
        """Slots [B, M + 1, width] (int64) of every slot's children in the order they were drawn, -1 where none is."""
        batch, slots = self.token.shape
        table = torch.full((batch, slots * self.width + 1), -1, device=self.token.device)
        place = torch.where(self.exists, self.parent * self.width + self.rank, slots * self.width)
        place[:, 0] = slots * self.width  # the root is nobody's child
        index = torch.arange(slots, device=self.token.device).expand(batch, -1)
        return table.scatter(1, place, index)[:, :-1].unflatten(1, (slots, self.width))

    def ancestors(self) -> Tensor:
        """Mask [B, M + 1, M + 1] (bool): is slot j slot i itself or above it."""
        slots = self.token.shape[1]
        own = torch.eye(slots, dtype=torch.bool, device=self.token.device)
        seen = own.expand(len(self.token), -1, -1)
        for _ in range(self.levels):
            seen = own | seen.gather(1, self.parent.unsqueeze(-1).expand(-1, -1, slots))
        return seen

    def paths(self) -> Tensor:
        """Slots [B, M + 1, levels] (int64) from the root (left out) down to every slot; 0 behind its end."""
        slots = torch.arange(self.token.shape[1], device=self.token.device).expand_as(self.token)
        path = torch.zeros((*self.token.shape, self.levels + 1), dtype=torch.int64, device=self.token.device)
        for _ in range(self.levels):
            path = path.scatter(2, self.depth.gather(1, slots).unsqueeze(-1), slots.unsqueeze(-1))
            slots = self.parent.gather(1, slots)
        return path[..., 1:]

    def leaves(self) -> Tensor:
        """Is a slot [B, M + 1] (bool) a draft without children."""
        inner = torch.zeros_like(self.token).scatter_add(1, self.parent, self.exists.long()) > 0
        inner[:, 0] = True
        return self.exists & ~inner
