"""The window of Jacobi decoding: what goes from pass to pass, and what a pass decides of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..constants import numbers
from ..contract import ARModel, SamplingParams
from ..drafts.guesses import Memory
from ..layout import TokenLayout
from ..rng import Stream
from ..rules.acceptance import AcceptanceRule
from ..trace import Record


@dataclass(frozen=True)
class Window:
    """The root and the guesses of a batch, one row per image.

    committed [B]: n, tokens decided so far; token [B, W + 1]: the root, which is token n - 1, then the guesses at
    positions n .. n+W-1. The last of them is a placeholder: column W - 1 predicts that position without a guess.
    settled [B] (int64): the number of guesses, the first ones, that the next pass accepts without a test (None: no
    settling).
    """

    committed: Tensor
    token: Tensor
    settled: Tensor | None = None

    @property
    def guess(self) -> Tensor:
        """[B, W]"""
        return self.token[:, 1:]

    @property
    def first_tested(self) -> Tensor:
        """The first column [B] whose guess is tested."""
        return torch.zeros_like(self.committed) if self.settled is None else self.settled


@dataclass(frozen=True)
class JacobiRun:
    """What all steps of a run share. forcing: does the layout force any token; codebook [V, C]: for front drafts."""

    method: Any  # SJD
    rule: AcceptanceRule  # bound to the model
    params: SamplingParams
    width: int
    forcing: bool
    model: ARModel
    model_state: Any
    memory: Memory
    record: Record
    codebook: Tensor | None = None


@dataclass(frozen=True)
class JacobiState:
    """The DecodeState of Jacobi decoding.

    step_index [1, 1] (int64): forward passes so far; initial [B, S + 2 W]: uniform numbers for the first guess at every
    position; strength [1 or B, S]: see Request.
    """

    window: Window
    step_index: Tensor
    stream: Stream
    initial: Tensor
    layout: TokenLayout
    strength: Tensor | None

    @property
    def committed(self) -> Tensor:
        return self.window.committed

    @property
    def draft(self) -> Tensor:
        return self.window.token[:, 1:-1]


@dataclass(frozen=True)
class VerifiedWindow:
    """The outcome of a forward pass, [B, W] for the columns that predict ``position``.

    Where front drafts are tested: q, ratio and rank of the last one, tv_bound of all.

    exists (bool): does the column have a guess; p [B, W, V+]: target probabilities; q, ratio: q_k(x_k) and
    p_k(x_k) / q_k(x_k) of the guess (0 without one); token (int64): the guess where it is ``accepted`` (bool), else the
    token sampled in its place; relaxed (bool): accepted by a relaxed rule only; tv_bound: the drift it adds (both None
    where nothing is relaxed); count [B]: tokens that each image commits; u, v: uniform numbers for the test and for
    sampling (None with Gumbel noise); rank (int64; None without front drafts); moved: total variation of q_k and p_k
    (None without settling).
    """

    position: Tensor
    exists: Tensor
    p: Tensor
    q: Tensor
    ratio: Tensor
    token: Tensor
    accepted: Tensor
    relaxed: Tensor | None
    tv_bound: Tensor | None
    count: Tensor
    u: Tensor | None
    v: Tensor | None
    rank: Tensor | None = None
    moved: Tensor | None = None


def committed_count(state: JacobiState, accepted: Tensor) -> Tensor:
    """Tokens [B] that images commit: their accepted guesses, accepted [B, W] (bool), and the token after them."""
    columns, device = accepted.shape[1], accepted.device
    # The number (from 1) of the first column that is not accepted. The last one has no guess and never is.
    last = numbers((columns,), device, torch.int64)
    number = numbers(tuple(range(1, columns + 1)), device, torch.int64)
    return torch.where(accepted, last, number).amin(-1).minimum(state.layout.length - state.committed)


def strength_at(state: JacobiState, position: Tensor) -> Tensor:
    """How far a relaxed rule may go at positions [B, T]."""
    if state.strength is None:
        return torch.ones(position.shape, device=position.device)
    return state.strength.expand(len(position), -1).gather(1, position.clamp(max=state.layout.length - 1))
