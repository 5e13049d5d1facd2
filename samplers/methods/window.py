"""The window of Jacobi decoding, and what a pass finds of its guesses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Window:
    """The root and the guesses of a batch, one row per image: the state of Jacobi decoding.

    committed [B]: n, tokens decided so far; token [B, W + 1]: the root, which is token n - 1, then the guesses at
    positions n .. n+W-1. The last of them is a placeholder: column W - 1 predicts that position without a guess.
    passes [1, 1] (int64): forward passes so far; initial_u [B, S + 2 W]: uniform numbers for the first guess at every
    position; settled_count [B] (int64): the number of guesses, the first ones, that the next pass accepts without a
    test (None: no settling).
    """

    committed: Tensor
    token: Tensor
    passes: Tensor
    initial_u: Tensor
    settled_count: Tensor | None = None
    extent: ClassVar[None] = None

    @property
    def guess(self) -> Tensor:
        """The guesses [B, W], of which the last is a placeholder."""
        return self.token[:, 1:]

    @property
    def draft(self) -> Tensor:
        """The guesses [B, W - 1] without the placeholder."""
        return self.token[:, 1:-1]


@dataclass(frozen=True)
class Draft:
    """Guesses [B, W] (int64), the q [B, W, V+] they were sampled from, and their depth [B, W] (int64), from 1.

    Where there is no guess, q is zero and the token meaningless.
    """

    token: Tensor
    q: Tensor
    depth: Tensor


@dataclass(frozen=True)
class Tested:
    """What a pass finds of the guesses, [B, W].

    token (int64): the guess where it is ``accepted`` (bool), else the token sampled in its place; q, ratio: q_k(x_k)
    and p_k(x_k) / q_k(x_k) of the guess (0 without one); relaxed (bool): accepted by a relaxed rule only; drift_bound:
    what it adds to that (both None where nothing is relaxed); u, v: uniform numbers for the test and for sampling (None
    where tokens are compared); tv_change: total variation of q_k and p_k (None without settling).
    """

    token: Tensor
    accepted: Tensor
    q: Tensor
    ratio: Tensor
    relaxed: Tensor | None = None
    drift_bound: Tensor | None = None
    u: Tensor | None = None
    v: Tensor | None = None
    tv_change: Tensor | None = None
