"""Cool-SD: accept with min(1, omega p/q), with a larger omega for the first drafts than for later ones.

Li et al., "Annealed relaxation of speculative decoding for faster autoregressive image generation", AAAI 2026
(arXiv:2601.09212).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.sampling import at
from ...kernels.verification import EPS, AcceptanceBudget
from ..settings import setting
from .acceptance import AcceptanceRule

SCHEDULES = ("exponential", "linear")
LONGEST = 64  # steps of a schedule; no draft is longer


def _budget() -> float:
    """The relaxation budget of both rules."""
    return setting(1.1, 1, 1000, exact=1, advice="1.1 and 2 are the paper's values")


class ScaledRatio(AcceptanceRule):
    """f = min(1, omega p/q) (eq. 12) with a factor omega [...] that a subclass chooses.

    q f = min(q, omega p), so the residual of eq. (10) is [p - min(q, omega p)]+. For omega >= 1 it equals [p - q]+
    (eq. 11). For omega < 1, where [p - q]+ would be biased, the test stays exact, but rejects more than it has to.
    """

    def omega(self, p: Tensor | None, q: Tensor | None, depth: Tensor, strength: Tensor) -> Tensor:
        raise NotImplementedError

    def acceptance_budget(self, depth: Tensor, strength: Tensor) -> AcceptanceBudget:
        omega = self.omega(None, None, depth, strength)
        return AcceptanceBudget(omega, torch.zeros_like(omega), torch.zeros_like(omega))

    def accept_probability(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        scaled = self.omega(p, q, depth, strength) * at(p, token)
        return (scaled / at(q, token).clamp(min=EPS)).clamp(max=1)

    def accepted_mass(self, p: Tensor, q: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        return torch.minimum(q, self.omega(p, q, depth, strength).unsqueeze(-1) * p)


@dataclass(frozen=True)
class UniformRSD(ScaledRatio):
    """Uniform Relaxation: omega = delta for every draft (eq. 13). delta >= 1 is the relaxation budget; 1 is exact."""

    delta: float = _budget()
    name, label = "uniform_rsd", "Uniform Relaxation"

    @property
    def lossless(self) -> bool:
        return self.delta <= 1

    @property
    def plain(self) -> bool:
        return self.delta >= 1

    def omega(self, p: Tensor, q: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        return 1 + (self.delta - 1) * strength


@dataclass(frozen=True)
class CoolSD(ScaledRatio):
    """omega decreases with the depth of a draft. Its mean over ``steps`` drafts is delta; past them it is 1 (exact).

    delta >= 1: the relaxation budget (the paper has 1.1 and 2); decay >= 0: the paper's nu (0 is
    UniformRSD, up to ``steps``); steps: the paper's L, 1 to 64; schedule: see below; floor: keep every omega at 1 or
    above.

    Our text copy of the paper lost eqs. (16) and (17) and the value of nu, and its repository has no code. Their form
    is reconstructed from the text around them: exponential, omega_i ~ exp(-nu i) with mean delta; linear,
    omega_i = delta + nu ((L + 1) / 2 - i). (Summaries of the paper by others have the same exponential, and nu = 0.7.)
    An omega below 1 rejects drafts without any gain in exactness. With ``floor`` it is 1 instead, and the others are
    scaled down by a common factor so that the mean stays delta.
    """

    delta: float = _budget()
    decay: float = setting(0.2, 0)
    steps: int = setting(5, 1, LONGEST, shown=False)
    schedule: str = setting("exponential", options=SCHEDULES)
    floor: bool = True
    name, label = "cool_sd", "Cool-SD"

    @property
    def lossless(self) -> bool:
        return max(self.omegas()) <= 1

    @property
    def plain(self) -> bool:
        return self.floor

    def check(self) -> None:
        super().check()
        if not self.floor and min(self.omegas()) < 0:
            largest_decay = 2 * self.delta / (self.steps - 1)
            raise ValueError(
                f"decay is {self.decay}, but the linear schedule with delta {self.delta} and {self.steps} steps falls "
                f"below zero. Use 0 to {largest_decay:.3g}, or turn floor on."
            )

    def omegas(self) -> list[float]:
        """omega_1 .. omega_L. Their mean is delta."""
        numbers, total = range(1, self.steps + 1), self.steps * self.delta
        if self.schedule == "linear":
            raw = [self.delta + self.decay * ((self.steps + 1) / 2 - i) for i in numbers]
        else:
            raw = [math.exp(-self.decay * (i - 1)) for i in numbers]
        if not self.floor:
            return [w * total / sum(raw) for w in raw]
        for above in range(self.steps, 0, -1):  # the number of omegas above 1, which share what the others leave
            share = total - (self.steps - above)
            if raw[above - 1] * share >= sum(raw[:above]):
                return [w * share / sum(raw[:above]) for w in raw[:above]] + [1.0] * (self.steps - above)
        raise AssertionError("omega_1 alone can always carry the budget")

    def omega(self, p: Tensor, q: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        excess = torch.zeros_like(strength)
        for i, omega in enumerate(self.omegas(), start=1):
            excess = torch.where(depth == i, omega - 1, excess)
        return 1 + excess * strength
