"""TV-metered acceptance: the user says how far a token's law may drift, and the rule accepts as much as that buys.

Ours, on the ground of Li et al., "Annealed relaxation of speculative decoding for faster autoregressive image
generation", AAAI 2026: with acceptance min(1, omega p/q) and the optimal residual the drift of a position is exactly
g(omega) = sum [min(q, omega p) - p]+ (its eq. 10). Here omega solves g(omega) = epsilon at every position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.verification import EPS
from ..settings import setting
from .cool_sd import ScaledRatio


@dataclass(frozen=True)
class TVMetered(ScaledRatio):
    """epsilon in 0..1: total variation allowed per tested token; the expected sum of it bounds the whole picture's.

    g rises from 0 at omega = 1 to sum [q - p]+ over tokens with p > 0, where every such draft is accepted: a larger
    epsilon buys nothing more. Tokens with p = 0, which the sampling filters rule out, are never accepted.
    """

    epsilon: float = setting(0.05, 0, 1, exact=0, advice="0.01 to 0.2 are sensible")
    name, label, paper = "tv_metered", "TV budget", "this pack"
    plain = True  # omega >= 1: eq. (11)
    has_budget = False  # omega depends on the laws

    @property
    def lossless(self) -> bool:
        return self.epsilon == 0

    def omega(self, p: Tensor, q: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        """Solve g(omega) = epsilon [...] without iterating.

        Between two neighbouring ratios r = q/p, g is linear: g = sum of q - p over smaller ratios + (omega - 1) times
        the p of the others. Ratios are sorted downwards, so that both sums are prefix sums free of cancellation.
        """
        budget = (self.epsilon * strength).unsqueeze(-1)
        ratio, order = torch.where(_relaxable(p, q), (q / p).clamp(max=1 / EPS), 1).sort(-1, descending=True)
        sorted_p = p.gather(-1, order)
        steeper = sorted_p.cumsum(-1)  # p of this and all larger ratios
        excess = (ratio - 1) * sorted_p
        settled = excess.flip(-1).cumsum(-1).flip(-1) - excess  # q - p of all smaller ratios
        drift = settled + (ratio - 1) * steeper  # g at every ratio, falling along the row
        segment = ((drift >= budget).sum(-1, keepdim=True) - 1).clamp(min=0)
        settled, steeper, largest = settled.gather(-1, segment), steeper.gather(-1, segment), ratio[..., :1]
        omega = 1 + (budget - settled).clamp(min=0) / steeper
        return torch.minimum(omega, largest).squeeze(-1)

    def tv_bound(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        most = ((q - p) * _relaxable(p, q)).sum(-1)
        return torch.minimum(self.epsilon * strength, most)


def _relaxable(p: Tensor, q: Tensor) -> Tensor:
    """Tokens [..., V+] that the exact rule sometimes refuses and a larger omega would accept."""
    return (q > p) & (p > 0)
