"""The positions of an image's tokens in its sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLayout:
    """The token sequence of one image: a grid of codes in raster order, with forced tokens between or among them.

    forced [1 or B, S] (int64): -1 where the model samples, else the id at that position (an end-of-line token, or a
    token that the user keeps). Position = lead + row * stride + column; stride - cols forced tokens follow every row,
    and S - lead - rows * stride tokens follow the last. lead: tokens before the grid, which the model samples, too (the
    preview of GLM-Image). First guesses and adaptive trees take rows of ``stride`` from position 0 on: where lead is
    not a multiple of it, they look at a worse neighbour, which costs acceptance and changes no distribution.
    """

    rows: int
    cols: int
    stride: int
    forced: Tensor
    lead: int = 0

    @classmethod
    def plain(cls, rows: int, cols: int) -> TokenLayout:
        """A grid without any forced token."""
        return cls.with_row_ends(rows, cols, (), ())

    @classmethod
    def with_row_ends(
        cls, rows: int, cols: int, row_end: Sequence[int], endings: Sequence[int], lead: int = 0
    ) -> TokenLayout:
        """A grid after ``lead`` tokens, with the ids ``row_end`` after every row and the ids ``endings`` after the
        last."""
        row = torch.tensor([-1] * cols + list(row_end), dtype=torch.int64)
        before, after = row.new_full((lead,), -1), torch.tensor(list(endings), dtype=torch.int64)
        return cls(rows, cols, len(row), torch.cat((before, row.repeat(rows), after))[None], lead)

    @property
    def length(self) -> int:
        return self.forced.shape[1]

    @property
    def end(self) -> Tensor:
        """[1 or B] (int64): the position after the last token that the model samples. What follows is forced, and needs
        no forward pass. S where all tokens are forced, since the last of them is left to the sampler."""
        place = torch.arange(1, self.length + 1, device=self.forced.device)
        last = torch.where(self.forced < 0, place, 0).amax(1)
        return torch.where(last > 0, last, self.length)

    @property
    def forces(self) -> bool:
        """Is any token forced? Reads the device."""
        return bool((self.forced >= 0).any())

    @property
    def sampled_tokens(self) -> int:
        """How many tokens of an image the model samples (the most of any image). Reads the device."""
        return int((self.forced < 0).sum(1).max())

    def forced_ids(self, position: Tensor) -> Tensor:
        """The id forced at positions [B, T] or -1; past the end, that of the last position."""
        return self.forced.expand(len(position), -1).gather(1, position.clamp(max=self.length - 1))

    def to_grid(self, values: Tensor) -> Tensor:
        """Values [..., S] of a sequence -> [..., rows, cols] of the image."""
        body = values[..., self.lead : self.lead + self.rows * self.stride]
        return body.unflatten(-1, (self.rows, self.stride))[..., : self.cols]

    def spread(self, grid: Tensor, fill: float) -> Tensor:
        """Values [B, rows, cols] of images -> [B, S] of sequences, with ``fill`` at the other positions."""
        values = torch.full((len(grid), self.length), fill, dtype=grid.dtype, device=grid.device)
        self.to_grid(values).copy_(grid)  # to_grid returns a view
        return values

    def keeping(self, tokens: Tensor, keep: Tensor) -> TokenLayout:
        """The layout with ``tokens`` [B, rows, cols] forced wherever ``keep`` [B, rows, cols] (bool) is true."""
        forced = self.forced.to(tokens.device).expand(tokens.shape[0], -1).clone()
        self.to_grid(forced)[keep] = tokens[keep]  # to_grid returns a view
        return replace(self, forced=forced)

    def beginning(self, tokens: int) -> TokenLayout:
        """The shortest prefix of the sequence in which every image samples so many tokens, or all of it.

        rows and cols stay the same, and so do prompts and positions. But a run over it stops early, and its values do
        not fill the grid.
        """
        enough = ((self.forced < 0).cumsum(1) >= tokens).all(0)
        return replace(self, forced=self.forced[:, : int(enough.long().argmax()) + 1]) if enough.any() else self

    def to(self, device: torch.device | str) -> TokenLayout:
        return replace(self, forced=self.forced.to(device))
