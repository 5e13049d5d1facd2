"""Acceptance rules: with what probability a drafted token is kept, and what is drawn when it is not.

Notation: p target law, q law the draft was drawn from (rows [..., V+], fp32), token [...] the draft (int64), depth
[...] its place in the draft, from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.sampling import at, categorical, residual


class AcceptanceRule(Protocol):
    lossless: bool

    def accept_probability(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Probability [...] in [0, 1] of keeping ``token``."""
        ...

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        """Unnormalised law [..., V+] to draw from after a rejection."""
        ...


@dataclass(frozen=True)
class Exact:
    """min(1, p/q) and [p - q]+: the output law is exactly p (Leviathan et al., ICML 2023, appendix A.1)."""

    lossless = True

    def accept_probability(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return (at(p, token) / at(q, token).clamp(min=1e-30)).clamp(max=1)

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor) -> Tensor:
        return residual(p, q)


@dataclass(frozen=True)
class Draft:
    """Drafted tokens [B, T], the laws q [B, T, V+] they were drawn from, depth [B, T], and where a draft exists.

    Where ``exists`` [B, T] is false, q is zero and the token meaningless.
    """

    token: Tensor
    q: Tensor
    depth: Tensor
    exists: Tensor


def accept_or_redraw(rule: AcceptanceRule, p: Tensor, draft: Draft, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Test every draft on its own against p [B, T, V+]: (tokens [B, T], accepted [B, T]).

    Without a draft the token is drawn from p. u, v [B, T]: independent uniform numbers for the test and the redraw.
    With the exact rule this is the maximal coupling of q and p: the result follows p and keeps the draft as often as
    any rule can.
    """
    accepted = draft.exists & (u < rule.accept_probability(p, draft.q, draft.token, draft.depth))
    law = torch.where(draft.exists.unsqueeze(-1), rule.residual(p, draft.q, draft.token, draft.depth), p)
    return torch.where(accepted, draft.token, categorical(law, v)), accepted
