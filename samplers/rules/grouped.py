"""Grouped acceptance: a draft is tested together with the tokens that are about as likely and look alike.

The rule of GSD, "Grouped speculative decoding for autoregressive image generation" (So et al., ICCV 2025,
arXiv:2508.07747), whose group of a token follows the authors' published code.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.verification import EPS
from ..contract import ARModel
from ..settings import setting
from .acceptance import AcceptanceRule

WIDEST = 64
_CHANNELS = 8  # of the code vectors at a time, as a window of positions times the codebook takes a lot of memory


@dataclass(frozen=True)
class Grouped(AcceptanceRule):
    """f(x) = min(1, p(C_x) / q(C_x)), where the group C_x holds x and every y that

    - is near in rank: with p sorted in descending order, y is in the ``window`` (1 to 64; 1: exact) places around x,
      the extra one of an even window below it;
    - is near in probability: |p(y) - p(x)| < ``gap`` (0..1);
    - looks alike: squared distance of the code vectors < ``radius`` (>= 0, in the units of the model's codebook).

    A peaked x can be accepted less often than by the exact rule. So the residual [p - q]+ of the authors' code is not
    optimal; here it is [p - q f]+ with f of every token. Strength s multiplies the neighbours' probabilities by s. At
    the ends of the ranking the window is cut off (the authors' code leaves the group there).
    """

    window: int = setting(14, 1, WIDEST, exact=1)
    gap: float = setting(0.15, 0, 1, exact=0)
    radius: float = setting(0.5, 0, exact=0)
    codes: Any = field(default=None, repr=False, compare=False)  # [V, C] of a bound rule, else None
    name, label = "grouped", "grouped"

    def bind(self, model: ARModel) -> AcceptanceRule:
        """The rule with the model's code vectors. Raises ValueError if the model has none yet."""
        if model.codebook is None:
            raise ValueError(
                "The grouped rule compares code vectors, but this model has no image decoder. Load it "
                "with its own, or choose another rule."
            )
        return replace(self, codes=model.codebook.to(model.device, torch.float32))

    def accepted_mass(self, p: Tensor, q: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        """From one sort of p, in which members of a group are near each other."""
        sorted_p, order = p.sort(dim=-1, descending=True, stable=True)
        sorted_q = q.gather(-1, order)
        group_p, group_q = sorted_p.clone(), sorted_q.clone()
        # Special tokens have no code vector. (fp32, as Metal cannot read bools at offsets that are no multiple of 4.)
        real = (order < len(self.codes)).float()
        weight = strength.unsqueeze(-1)
        for step, distance in enumerate(self._distances(order), start=1):
            upper, lower = (..., slice(None, -step)), (..., slice(step, None))
            alike = (distance < self.radius) & (sorted_p[upper] - sorted_p[lower] < self.gap)
            share = weight * (alike * real[upper] * real[lower])
            group_p[upper] += share * sorted_p[lower]
            group_q[upper] += share * sorted_q[lower]
            if step <= (self.window - 1) // 2:
                group_p[lower] += share * sorted_p[upper]
                group_q[lower] += share * sorted_q[upper]
        # In this order of operations a group of one gives exactly min(q, p).
        accepted = torch.minimum(sorted_q, sorted_q / group_q.clamp(min=EPS) * group_p)
        return torch.zeros_like(p).scatter(-1, order, accepted)

    def _distances(self, order: Tensor) -> list[Tensor]:
        """Squared distances [..., V+ - s] of the codes s = 1, 2, .. places apart in ``order`` [..., V+]."""
        order = order.clamp(max=len(self.codes) - 1)
        total: list[Tensor | float] = [0.0] * (self.window // 2)
        for channels in self.codes.split(_CHANNELS, dim=-1):
            vectors = channels[order]
            for i in range(len(total)):
                total[i] += (vectors[..., : -i - 1, :] - vectors[..., i + 1 :, :]).square().sum(-1)
        return total
