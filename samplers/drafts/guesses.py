"""What Jacobi decoding remembers of every position, and first guesses: a position that no pass has seen yet borrows the
law of a neighbour in the picture.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.guesses import mean_probs, neighbours_of
from ...kernels.sampling import categorical, point_mass
from ..constants import counting, uniform_law
from ..layout import TokenLayout

INITIAL = ("mixed", "left", "upper", "uniform", "repeat")


@dataclass(frozen=True)
class Ring:
    """A row of numbers for each of the latest positions of every image; that of position i lies in slot i mod R.

    rows [B, R, V+] (fp32) stay where they are and are written in place, as key/value caches are.
    """

    rows: Tensor

    @classmethod
    def empty(cls, batch: int, slots: int, total: int, device: torch.device) -> Ring:
        return cls(torch.zeros((batch, slots, total), device=device))

    def index(self, position: Tensor) -> Tensor:
        """Of positions [B, T] in the rows of all images, one after the other."""
        batch, slots, _ = self.rows.shape
        slot = position % slots
        return slot if batch == 1 else counting(batch * slots, position.device, slots)[:, None] + slot

    def at(self, position: Tensor) -> Tensor:
        """Rows [B, T, V+] of positions [B, T]."""
        return self.rows.flatten(0, 1).index_select(0, self.index(position).flatten()).unflatten(0, position.shape)

    def entry(self, position: Tensor, token: Tensor) -> Tensor:
        """One number [B, T] of each row."""
        return self.rows.flatten(0, 1)[self.index(position), token]

    def put(self, position: Tensor, rows: Tensor) -> None:
        """Write rows [B, T, V+] for different positions [B, T], T being R at most."""
        self.rows.flatten(0, 1)[self.index(position).flatten()] = rows.flatten(0, 1)


@dataclass(frozen=True)
class Memory:
    """What is known of the latest positions of every image, written in place.

    laws: the target's last law of a position, or before its first pass the law its guess was drawn from; drawn: the law
    that the guess at a position was drawn from, which is another ring for reuse="threshold_exact" only. noise: the
    positions' fixed Gumbel vectors, for reuse="gumbel" only.

    A window W lies behind a row of the picture whose laws it may need, and is followed by W new positions.
    """

    laws: Ring
    drawn: Ring
    noise: Ring | None

    @classmethod
    def empty(cls, reuse: str, batch: int, stride: int, width: int, total: int, device: torch.device) -> Memory:
        def ring() -> Ring:
            return Ring.empty(batch, max(stride, width) + width, total, device)

        laws = ring()
        return cls(laws, ring() if reuse == "threshold_exact" else laws, ring() if reuse == "gumbel" else None)


def neighbour_laws(
    initial: str, laws: Ring, known: Tensor, position: Tensor, layout: TokenLayout, vocab: int, forcing: bool
) -> Tensor:
    """Laws [B, T, V+] from which guesses at new positions [B, T] are drawn; known [B, 1]: last position with a law.

    left: the law of the left neighbour; in the first column, and where the window has crossed into a new row, that of
    the upper one. upper: of the position one row up (several, if that has no law yet); in the first row, of the left
    one. mixed: half of each. Where a neighbour is a forced token, or for "uniform", the uniform law. forcing: does the
    layout force any token.
    """
    stride, total = layout.stride, laws.rows.shape[-1]
    if initial in ("uniform", "repeat") or forcing:
        uniform = uniform_law(vocab, total, position.device)
    if initial in ("uniform", "repeat"):
        return uniform.expand(*position.shape, -1)
    if initial == "mixed" and not forcing:
        return mean_probs(laws.rows, known, position, stride)
    left, above = neighbours_of(known, position, stride)

    def law(source: Tensor) -> Tensor:
        rows = laws.at(source)
        return torch.where(layout.forced_at(source).unsqueeze(-1) < 0, rows, uniform) if forcing else rows

    if initial == "left":
        return law(left)
    if initial == "upper":
        return law(above)
    return law(left).add_(law(above)).div_(2)


def fresh_guesses(
    initial: str, laws: Ring, known: Tensor, last: Tensor, position: Tensor, u: Tensor, noise: Tensor | None,
    layout: TokenLayout, vocab: int, forcing: bool,
) -> tuple[Tensor, Tensor]:
    """Guesses [B, T] for positions [B, T] no pass has seen, and the laws [B, T, V+] they are drawn from.

    last [B, 1] is the token at position ``known`` [B, 1]; u [B, T] are uniform numbers. repeat: copy the last token
    along its row (a point mass), uniform beyond. With Gumbel decoding a guess uses its position's own ``noise``
    [B, T, V+], which makes it agree with the final choice more often.
    """
    law = neighbour_laws(initial, laws, known, position, layout, vocab, forcing)
    if initial == "repeat":
        same_row = known // layout.stride == position // layout.stride
        token = torch.where(same_row, last, categorical(law, u))
        law = torch.where(same_row.unsqueeze(-1), point_mass(token, law.shape[-1]), law)
    elif noise is not None:
        token = (law.log() + noise).argmax(-1)
    else:
        token = categorical(law, u)
    if forcing:
        forced = layout.forced_at(position)
        token = torch.where(forced >= 0, forced, token)
        law = torch.where((forced >= 0).unsqueeze(-1), point_mass(forced.clamp(min=0), law.shape[-1]), law)
    return token, law
