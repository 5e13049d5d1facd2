"""Counter-based random numbers, computed by kernels/noise.py.

A number is a function of (seed, position, purpose, draw) alone. Image i of a batch uses seed + i, so it equals a single
run with that seed, on every device and whatever the window or the acceptance. Different purposes are independent
streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from ..kernels import noise


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


@dataclass(frozen=True)
class Stream:
    """Random numbers of a batch; ``keys`` [B, 2] (int64) are the low and high words of each image's seed.

    Every method takes positions [B, T] (int64), and a counter ``draw`` (an int or int64 [B or 1, T or 1]) for repeated
    uses of a purpose at a position.
    """

    keys: Tensor

    @classmethod
    def of(cls, seed: int, batch: int, device: torch.device | str) -> Stream:
        """Streams for seeds seed, seed + 1, ... (modulo 2^64)."""
        seeds = [(seed + i) % 2**64 for i in range(batch)]
        return cls(torch.tensor([[s & noise.WORD, s >> 32] for s in seeds], dtype=torch.int64, device=device))

    def uniform(self, positions: Tensor, purpose: Purpose, draw: int | Tensor = 0) -> Tensor:
        """Numbers in [0, 1) (fp32, multiples of 2^-24) for positions [B, T]."""
        return noise.uniform(positions, self.keys, (int(purpose),), draw)[0]

    def uniforms(self, positions: Tensor, purposes: Sequence[Purpose], draw: int | Tensor = 0) -> tuple[Tensor, ...]:
        """``uniform`` for each of several purposes, at little more than the cost of one."""
        return noise.uniform(positions, self.keys, tuple(map(int, purposes)), draw).unbind()

    def gumbel(
        self, positions: Tensor, vocab: int, purpose: Purpose = Purpose.TARGET, draw: int | Tensor = 0
    ) -> Tensor:
        """Standard Gumbel noise [B, T, vocab] (fp32); by default one fixed vector per image and position."""
        return noise.gumbel(positions, self.keys, vocab, int(purpose), draw)

    def normal(self, positions: Tensor, count: int, purpose: Purpose, draw: int | Tensor = 0) -> Tensor:
        """Standard normal numbers [B, T, count] (fp32). The first ones do not depend on ``count``."""
        return noise.normal(positions, self.keys, count, int(purpose), draw)
