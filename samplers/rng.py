"""Counter-based random numbers: Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A number is a function of (seed, position, purpose, draw) alone. Image i of a batch uses seed + i, so it equals a single
run with that seed, on every device and whatever the window or the acceptance. Different purposes are independent
streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Purpose(IntEnum):
    """What a number is used for; part of the counter."""

    TARGET = 0
    ACCEPT = 1
    REDRAW = 2
    INITIAL = 3
    DRAFT = 4
    SKIP = 5
    SHAPE = 6
    ORDER = 7
    NOISE = 8
    DRAFT_NOISE = 9


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words (int64 tensors) for four counter words and two key words (int64 tensors in [0, 2^32)).

    The 64-bit products wrap modulo 2^64 in int64; their high word is recovered by an arithmetic shift and a mask.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & _WORD) ^ c1 ^ k0,
            second & _WORD,
            ((first >> 32) & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


@dataclass(frozen=True)
class Stream:
    """Random numbers of a batch; ``keys`` [B, 2] (int64) are the low and high words of each image's seed."""

    keys: Tensor

    @classmethod
    def of(cls, seed: int, batch: int, device: torch.device | str) -> Stream:
        """Streams for seeds seed, seed + 1, ... (modulo 2^64)."""
        seeds = [(seed + i) % 2**64 for i in range(batch)]
        return cls(torch.tensor([[s & _WORD, s >> 32] for s in seeds], dtype=torch.int64, device=device))

    def uniform(self, positions: Tensor, purpose: Purpose, draw: int | Tensor = 0) -> Tensor:
        """Numbers in [0, 1) (fp32, multiples of 2^-24) for positions [B, T]; ``draw`` numbers repeated uses."""
        counter = (positions, torch.full_like(positions, purpose), torch.zeros_like(positions) + draw,
                   torch.zeros_like(positions))
        key = (self.keys[:, :1], self.keys[:, 1:])
        return (philox(counter, key)[0] >> 8).float() * 2**-24

    def gumbel(
        self, positions: Tensor, vocab: int, purpose: Purpose = Purpose.TARGET, draw: int | Tensor = 0
    ) -> Tensor:
        """Standard Gumbel noise [B, T, vocab] (fp32) for positions [B, T]; ``draw`` numbers repeated uses.

        By default one fixed vector per image and position.
        """
        lanes = torch.arange((vocab + 3) // 4, device=positions.device)
        position = positions.unsqueeze(-1)
        draws = (torch.zeros_like(positions) + draw).unsqueeze(-1)
        counter = torch.broadcast_tensors(position, torch.full_like(position, purpose), draws, lanes)
        key = (self.keys[:, :1, None], self.keys[:, 1:, None])
        words = torch.stack(philox(counter, key), dim=-1).flatten(-2)[..., :vocab]
        # v in (0, 1), finest near 0, where the largest noise comes from. It must not round to 1 or reach 0: infinite
        # noise would turn a token of probability zero into NaN, which arg-max takes for the largest.
        v = ((words.float() + 0.5) * 2**-32).clamp(2**-33, 1 - 2**-24)
        return -torch.log(-torch.log1p(-v))

    def normal(self, positions: Tensor, count: int, purpose: Purpose, draw: int | Tensor = 0) -> Tensor:
        """Standard normal numbers [B, T, count] (fp32) for positions [B, T], by Box and Muller's transform.

        The first ones do not depend on ``count``. ``draw`` numbers repeated uses.
        """
        lanes = torch.arange((count + 3) // 4, device=positions.device)
        position = positions.unsqueeze(-1)
        draws = (torch.zeros_like(positions) + draw).unsqueeze(-1)
        counter = torch.broadcast_tensors(position, torch.full_like(position, purpose), draws, lanes)
        key = (self.keys[:, :1, None], self.keys[:, 1:, None])
        words = torch.stack(philox(counter, key), dim=-1).flatten(-2)
        radius, angle = ((words.float() + 0.5) * 2**-32).unflatten(-1, (-1, 2)).unbind(-1)
        radius = (-2 * radius.clamp(2**-33, 1).log()).sqrt()
        angle = angle * (2 * torch.pi)
        return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(-2)[..., :count]
