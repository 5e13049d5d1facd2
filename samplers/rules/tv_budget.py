"""TV budget: the user sets how far the test of a draft may drift, and the rule accepts as much as that allows.

Based on Li et al., "Annealed relaxation of speculative decoding for faster autoregressive image generation", AAAI 2026
(arXiv:2601.09212): with acceptance min(1, omega p/q) and the optimal residual (eq. 10), the total variation that a test
adds is exactly g(omega) = sum [min(q, omega p) - p]+ (eqs. 8 and 9). This rule solves g(omega) = epsilon for omega at
every test.
Windows and chains test one draft per position, so that a token drifts by epsilon at most; in a tree the siblings
tested at a position add up.
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
    """epsilon in 0..1: total variation allowed per tested draft. Its expected sum over all tests of an image bounds
    that of the image's distribution (where it is below 1; a total variation is never above).

    g rises from 0 at omega = 1 to sum [q - p]+ over tokens with p > 0, where every such draft is accepted; a larger
    epsilon changes nothing. Tokens with p = 0, which the sampling filters exclude, are never accepted.
    """

    epsilon: float = setting(0.05, 0, 1, exact=0, advice="0.01 to 0.2 are sensible")
    name, label = "tv_metered", "TV budget"
    plain = True  # omega >= 1: eq. (11)

    @property
    def has_budget(self) -> bool:
        return False  # omega depends on p and q

    def omega(self, p: Tensor, q: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        """Solve g(omega) = epsilon [...] without iterating.

        Between two neighbouring ratios r = q/p, g is linear: g = sum of q - p over smaller ratios + (omega - 1) times
        the sum of p over the others. Ratios are sorted in descending order, so that both are sums without cancellation.
        """
        budget = (self.epsilon * strength).unsqueeze(-1)
        ratio, order = torch.where(_relaxable(p, q), (q / p).clamp(max=1 / EPS), 1).sort(-1, descending=True)
        sorted_p = p.gather(-1, order)
        slope = sorted_p.cumsum(-1)  # sum of p over this and all larger ratios
        excess = (ratio - 1) * sorted_p
        below = excess.flip(-1).cumsum(-1).flip(-1) - excess  # sum of q - p over all smaller ratios
        drift = below + (ratio - 1) * slope  # g at every ratio, descending
        segment = ((drift >= budget).sum(-1, keepdim=True) - 1).clamp(min=0)
        below, slope, largest = below.gather(-1, segment), slope.gather(-1, segment), ratio[..., :1]
        omega = 1 + (budget - below).clamp(min=0) / slope
        return torch.minimum(omega, largest).squeeze(-1)

    def drift_bound(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        relaxable = ((q - p) * _relaxable(p, q)).sum(-1)
        return torch.minimum(self.epsilon * strength, relaxable)


def _relaxable(p: Tensor, q: Tensor) -> Tensor:
    """Tokens [..., V+] that the exact rule may reject and a larger omega accepts."""
    return (q > p) & (p > 0)
