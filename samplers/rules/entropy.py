"""Entropy-aware acceptance: the lower the entropy of the prediction, the more drafts are accepted.

Ma et al., "Towards better & faster autoregressive image generation: from the perspective of entropy", NeurIPS 2025
(arXiv:2510.09012), section on acceptance. With H the entropy of p (nats) and rho = min(1, p(x) / q(x)), a draft passes
if

    rho > (H / e) (1/2 + (r - 1/2) (1 - H / lambda)),  r ~ U[0, 1).

(The paper prints the last factor as 1 - lambda H, which lambda = 16 rules out.) As a probability over r, with
s = 1 - H / lambda, that is f(x) = clip(1/2 + (rho e / H - 1/2) / s, 0, 1). It is less than min(1, p/q) where rho is
small, so the paper's residual [p - q]+ adds an error of its own; here it is the optimal one, [p - q f]+.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.sampling import entropy
from ...kernels.verification import EPS
from ..contract import ARModel
from ..settings import setting
from .acceptance import AcceptanceRule, exact_probability


@dataclass(frozen=True)
class Entropy(AcceptanceRule):
    """scale (1 to 64 nats): e, the entropy below which drafts pass more easily, as the threshold is scaled by H / e.
    decay (2 to 128 nats, above the entropy of any token): lambda, how fast the random part of the test shrinks as
    entropy grows.

    The strength mixes this f with min(1, p/q). No value of e or lambda is exact.
    """

    scale: float = setting(8.0, 1, 64, advice="the paper's e, 8")
    decay: float = setting(16.0, 2, 128, advice="the paper's lambda, 16")
    name, label = "entropy", "entropy"

    def bind(self, model: ARModel) -> AcceptanceRule:
        """Raises ValueError where a token's entropy may reach lambda."""
        if self.decay <= math.log(model.vocab):
            raise ValueError(
                f"decay is {self.decay:g}, but must be above the largest entropy of this model's {model.vocab} codes, "
                f"{math.log(model.vocab):.3g}. Use a value from there to 128."
            )
        return self

    def accept_probability(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        ratio = exact_probability(p, q, token)
        return torch.lerp(ratio, self._relaxed(ratio, entropy(p)), strength)

    def accepted_mass(self, p: Tensor, q: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        ratio = (p / q.clamp(min=EPS)).clamp(max=1)
        relaxed = q * self._relaxed(ratio, entropy(p).unsqueeze(-1))
        return torch.lerp(torch.minimum(p, q), relaxed, strength.unsqueeze(-1))  # exact to the last bit at strength 0

    def _relaxed(self, ratio: Tensor, entropy: Tensor) -> Tensor:
        """f [...] at strength 1 of drafts with these ratios [...] where the target has this entropy [...]."""
        spread = 1 - entropy / self.decay
        return (0.5 + (ratio * self.scale / entropy.clamp(min=EPS) - 0.5) / spread).clamp(0, 1)
