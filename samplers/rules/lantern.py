"""LANTERN: a draft may count the probability of tokens that look alike as its own.

Jang et al., "LANTERN: accelerating visual autoregressive models with relaxed speculative decoding", ICLR 2025
(arXiv:2410.03355), and Park et al., "LANTERN++: enhancing relaxed speculative decoding with static tree drafting for
visual auto-regressive models", 2025 (arXiv:2502.06352).

For a draft x and its neighbours y_1, y_2, .. by distance of their code vectors, c_j = p(y_1) + .. + p(y_j) and J is the
largest j <= k whose c_j stays within a budget: delta for LANTERN, (lambda - 1) p(x) for LANTERN++. Then
p~(x) = p(x) + c_J and f = min(1, p~(x) / q(x)). The first neighbour that exceeds the budget ends the sum.
The budget limits what x alone may absorb; the output distribution can drift by more than delta. At temperature 0 p is a
point mass and nothing is relaxed but by a delta of 1 (the authors' code compares unprocessed probabilities there).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.sampling import at, residual, unless_empty
from ...kernels.verification import EPS, AcceptanceBudget
from ..contract import ARModel
from ..settings import setting, within
from .acceptance import AcceptanceRule

DEFAULT_NEIGHBOURS = 1000
RESIDUALS = ("optimal", "paper")


class NeighbourRule(AcceptanceRule):
    """What LANTERN and LANTERN++ share. ``redraw`` is the residual distribution after a rejection:

    optimal (default): [p - q]+, the best one for f >= min(1, p/q) (Li et al., "Annealed relaxation of speculative
        decoding", proposition 1).
    paper: [p~ - q]+, where p~ has taken the mass of y_1 .. y_J onto x; p if no mass is left. The authors' code instead
        takes the mass of the k + 1 nearest tokens from p or q whenever J > 0, which drifts more.
    """

    neighbours: int
    redraw: str
    table: Any  # [V, k] (int32) of a bound rule, else None

    @property
    def plain(self) -> bool:
        return self.redraw == "optimal"

    def acceptance_budget(self, depth: Tensor, strength: Tensor) -> AcceptanceBudget:
        """c_J <= budget(p(x)), which is linear in p(x)."""
        absolute = self.budget(torch.zeros_like(strength), strength)
        relative = self.budget(torch.ones_like(strength), strength) - absolute
        return AcceptanceBudget(torch.ones_like(strength), absolute, relative, self.table, self.neighbours)

    def budget(self, p_token: Tensor, strength: Tensor) -> Tensor:
        """The most probability [...] of neighbours that a draft with p(x) = p_token [...] may count as its own."""
        raise NotImplementedError

    def bind(self, model: ARModel) -> AcceptanceRule:
        """The rule with the model's neighbour table. Raises ValueError for more neighbours than there are codes.

        The default number, meant for codebooks of thousands, is lowered to all other codes.
        """
        others = model.vocab - 1
        count = min(self.neighbours, others) if self.neighbours == DEFAULT_NEIGHBOURS else self.neighbours
        if not 1 <= count <= others:
            legal = within(1, others, "choose another rule")
            raise ValueError(f"neighbours is {count}, but this model has {model.vocab} codes: {legal}.")
        table = model.neighbours(count).to(model.device, torch.int32)  # half the memory of int64
        return replace(self, neighbours=count, table=table)

    def describe(self) -> dict[str, Any]:
        limit = {} if self.table is None else {"neighbours_available": len(self.table) - 1}
        return super().describe() | limit

    def aggregate(self, p: Tensor, token: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
        """Probability c_J [...] (fp32) and number J [...] (int64) of the neighbours that a draft counts as its own."""
        near = self.table[token.clamp(max=len(self.table) - 1), : self.neighbours].long()
        cumulative = p.gather(-1, near).cumsum(-1)
        budget = self.budget(at(p, token), strength) * (token < len(self.table))  # special tokens have no neighbours
        within = (cumulative <= budget.unsqueeze(-1)) & (budget > 0).unsqueeze(-1)
        return torch.where(within, cumulative, 0).amax(-1), within.sum(-1)

    def accept_probability(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        absorbed, _ = self.aggregate(p, token, strength)
        return ((at(p, token) + absorbed) / at(q, token).clamp(min=EPS)).clamp(max=1)

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        if self.plain:
            return residual(p, q)
        absorbed, count = self.aggregate(p, token, strength)
        near = self.table[token.clamp(max=len(self.table) - 1)].long()  # meaningless for a special token: count is 0
        kept = torch.arange(near.shape[-1], device=p.device) >= count.unsqueeze(-1)
        relaxed_p = p.scatter(-1, near, p.gather(-1, near) * kept)
        relaxed_p = relaxed_p.scatter_add(-1, token.unsqueeze(-1), absorbed.unsqueeze(-1))
        return unless_empty((relaxed_p - q).clamp(min=0), p)

    def drift_bound(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        """[f - p/q]+ of the draft, an unbiased estimate: its mean over q is sum [q f - p]+.

        A residual other than the optimal one adds at most the mean of (1 - f) times the distance of the two.
        """
        f = self.accept_probability(p, q, token, depth, strength)
        excess = (f - at(p, token) / at(q, token).clamp(min=EPS)).clamp(min=0)
        if self.plain:
            return excess
        ours, best = self.residual(p, q, token, depth, strength), residual(p, q)
        apart = ours / ours.sum(-1, keepdim=True) - best / best.sum(-1, keepdim=True)
        return excess + (1 - f) * apart.clamp(min=0).sum(-1)


@dataclass(frozen=True)
class Lantern(NeighbourRule):
    """Budget delta in 0..1, whatever the draft's probability (0: exact). neighbours: k, the draft not counted."""

    neighbours: int = setting(DEFAULT_NEIGHBOURS, 1)
    delta: float = setting(0.1, 0, 1, exact=0, advice="papers use 0.1 to 0.6")
    redraw: str = setting("optimal", options=RESIDUALS)
    table: Any = field(default=None, repr=False, compare=False)
    name, label = "lantern", "LANTERN"

    def budget(self, p_token: Tensor, strength: Tensor) -> Tensor:
        return self.delta * strength


@dataclass(frozen=True)
class LanternPP(NeighbourRule):
    """LANTERN++: budget (ratio - 1) p(x), so p~ <= ratio p. ratio >= 1 (1: exact): the paper's lambda."""

    neighbours: int = setting(10, 1)
    ratio: float = setting(2.0, 1, exact=1, advice="the paper uses 2 to 20")
    redraw: str = setting("optimal", options=RESIDUALS)
    table: Any = field(default=None, repr=False, compare=False)
    name, label = "lantern_pp", "LANTERN++"

    def budget(self, p_token: Tensor, strength: Tensor) -> Tensor:
        return (self.ratio - 1) * strength * p_token
