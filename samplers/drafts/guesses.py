"""The state of drafting in Jacobi decoding, and the first guesses at new positions.

The first guess at a position is sampled from the probabilities at a neighbour in the image ("spatial prior" in SJD).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.sampling import categorical, point_mass
from ..constants import counting, uniform_probs
from ..layout import TokenLayout

INITIAL = ("mixed", "left", "upper", "uniform", "repeat", "repeat_upper")


@dataclass(frozen=True)
class Ring:
    """A ring buffer: a row of numbers for each of the latest positions of every image, position i in slot i mod R.

    rows [B, R, V+] (fp32) are written in place, as key/value caches are.
    """

    rows: Tensor

    @classmethod
    def empty(cls, batch: int, slots: int, total: int, device: torch.device) -> Ring:
        return cls(torch.zeros((batch, slots, total), device=device))

    def index(self, position: Tensor) -> Tensor:
        """Index [B, T] of positions [B, T] into the flattened rows [B * R, V+]."""
        batch, slots, _ = self.rows.shape
        slot = position % slots
        return slot if batch == 1 else counting(batch * slots, position.device, slots)[:, None] + slot

    def at(self, position: Tensor) -> Tensor:
        """Rows [B, T, V+] of positions [B, T]."""
        return self.rows.flatten(0, 1).index_select(0, self.index(position).flatten()).unflatten(0, position.shape)

    def entry(self, position: Tensor, token: Tensor) -> Tensor:
        """The number [B, T] of token [B, T] in the row of each position."""
        return self.rows.flatten(0, 1)[self.index(position), token]

    def put(self, position: Tensor, rows: Tensor) -> None:
        """Write rows [B, T, V+] for distinct positions [B, T], T <= R."""
        self.rows.flatten(0, 1)[self.index(position).flatten()] = rows.flatten(0, 1)


@dataclass(frozen=True)
class DraftState:
    """What is known of the latest positions of every image, written in place.

    Mostly target_probs and draft_probs are one ring, as the q of the next pass is the p of this one; only
    reuse="threshold_exact" has two. target_probs: the target's latest probabilities p at a position; before its first
    forward pass, those its guess was sampled from. draft_probs: the q that the guess was sampled from. noise: the fixed
    Gumbel noise of each position, for reuse="gumbel" only. tokens: the token or guess there, for initial="repeat_upper"
    only (exact in fp32, as ids are below 2^24).

    A window of W positions follows one row of the image, whose probabilities it may need, and is followed by up to W
    new positions.
    """

    target_probs: Ring
    draft_probs: Ring
    noise: Ring | None
    tokens: Ring | None

    @classmethod
    def empty(
        cls, reuse: str, initial: str, batch: int, stride: int, width: int, total: int, device: torch.device
    ) -> DraftState:
        def ring(numbers: int = total) -> Ring:
            return Ring.empty(batch, max(stride, width) + width, numbers, device)

        target_probs = ring()
        draft_probs = ring() if reuse == "threshold_exact" else target_probs
        noise = ring() if reuse == "gumbel" else None
        return cls(target_probs, draft_probs, noise, ring(1) if initial == "repeat_upper" else None)


def neighbours_of(known: Tensor, position: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Left and upper neighbours [B, T] (int64) of positions [B, T] after ``known`` [B, 1], the last known position.

    Left: ``known`` if it is in the same row, else the upper neighbour. Upper: the nearest known position in the same
    column; if there is none, ``known``.
    """
    above = known - (known - position) % stride
    above = torch.where(above < 0, known, above)
    return torch.where(known // stride == position // stride, known, above), above


def neighbour_probs(
    initial: str, target_probs: Ring, known: Tensor, position: Tensor, layout: TokenLayout, vocab: int, forcing: bool
) -> Tensor:
    """Probabilities [B, T, V+] to sample guesses at new positions [B, T] from.

    known [B, 1]: the last position with probabilities. forcing: does the layout force any token.
    left: the probabilities at the left neighbour; in the first column, and where the window has crossed into a new row,
    those at the upper one. upper: those one row up (several rows, if that position has none yet); in the first row,
    those at the left neighbour. mixed: the mean of both. uniform: the uniform distribution, which also replaces a
    neighbour that is a forced token.
    """
    stride, total = layout.stride, target_probs.rows.shape[-1]
    if initial in ("uniform", "repeat", "repeat_upper"):
        return uniform_probs(vocab, total, position.device).expand(*position.shape, -1)
    left, above = neighbours_of(known, position, stride)
    sources = {"left": (left,), "upper": (above,), "mixed": (left, above)}[initial]
    source = torch.cat(sources, dim=1)
    rows = target_probs.at(source)
    if forcing:
        uniform = uniform_probs(vocab, total, position.device)
        rows = torch.where(layout.forced_ids(source).unsqueeze(-1) < 0, rows, uniform)
    if len(sources) == 1:
        return rows
    left, above = rows.chunk(2, dim=1)
    return left.add_(above).div_(2)


def first_guesses(
    initial: str,
    state: DraftState,
    known: Tensor,
    last: Tensor,
    position: Tensor,
    u: Tensor,
    noise: Tensor | None,
    layout: TokenLayout,
    vocab: int,
    forcing: bool,
) -> tuple[Tensor, Tensor]:
    """Guesses [B, T] at positions [B, T] that no forward pass has seen, and the q [B, T, V+] they are sampled from.

    last [B, 1]: the token at position ``known`` [B, 1]; u [B, T]: uniform numbers. initial: see neighbour_probs();
    repeat copies the last token along its row (q is a point mass) and is uniform past the row; repeat_upper copies the
    token one row up, and in the first row the last token. With Gumbel decoding a guess uses the ``noise`` [B, T, V+] of
    its own position, which makes it equal the final token more often.
    """
    q = neighbour_probs(initial, state.target_probs, known, position, layout, vocab, forcing)
    if state.tokens is not None:
        _, above = neighbours_of(known, position, layout.stride)
        token = state.tokens.at(above).squeeze(-1).long()
        q = point_mass(token, q.shape[-1])
    elif initial == "repeat":
        same_row = known // layout.stride == position // layout.stride
        token = torch.where(same_row, last, categorical(q, u))
        q = torch.where(same_row.unsqueeze(-1), point_mass(token, q.shape[-1]), q)
    elif noise is not None:
        token = (q.log() + noise).argmax(-1)
    else:
        token = categorical(q, u)
    if forcing:
        forced = layout.forced_ids(position)
        token = torch.where(forced >= 0, forced, token)
        q = torch.where((forced >= 0).unsqueeze(-1), point_mass(forced.clamp(min=0), q.shape[-1]), q)
    return token, q
