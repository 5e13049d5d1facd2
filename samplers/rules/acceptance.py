"""Acceptance rules: the probability of accepting a draft, and the residual distribution to sample from otherwise.

Notation: p target probabilities, after guidance, temperature and filters; q the draft probabilities that the draft was
sampled from (rows [..., V+], fp32); token [...] the draft (int64); depth [...] its place in the draft, from 1; strength
[...] (fp32, 0..1) how far the rule may depart from the exact one (0: not at all). The q of a deterministic draft is the
point mass on it.

With acceptance probability f and residual distribution G, a token is distributed as K = q f + (1 - sum q f) G. The
total variation of K and p is least, sum [q f - p]+, for G ~ [p - q f]+ (Li et al., "Annealed relaxation of speculative
decoding for faster autoregressive image generation", proposition 3; that G is eq. 10); a rule's ``drift_bound`` is that
distance. Its sum over the tested positions bounds, in expectation, the total variation between the generated images and
the model's own (theorem 2, eqs. 8 and 9; that G minimises this bound).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.sampling import at, residual, unless_empty
from ...kernels.verification import EPS, AcceptanceBudget
from ..contract import ARModel
from ..settings import check_settings, settings_of

TRIED = 5  # positions, at which `bind_rule` tries a rule
SLACK = 1e-5  # of what it computes


@dataclass(frozen=True)
class AcceptanceRule:
    """A rule. Rules are frozen dataclasses whose fields are their settings."""

    name: ClassVar[str]  # in traces
    label: ClassVar[str]  # for people
    plain: ClassVar[bool] = False  # is the residual [p - q]+

    @property
    def lossless(self) -> bool:
        """Is the output distribution exactly p, whatever the strength? By default where a setting is ``exact``."""
        return any(
            getattr(self, name) == each.exact for name, each in settings_of(self).items() if each.exact is not None
        )

    @property
    def has_budget(self) -> bool:
        """Is it plain and does it have an ``acceptance_budget``?"""
        return self.plain and type(self).acceptance_budget is not AcceptanceRule.acceptance_budget

    @property
    def is_exact(self) -> bool:
        """Is this the exact rule, for which there are faster forms? (Not a subclass, which may answer otherwise.)"""
        return type(self) is Exact

    def check(self) -> None:
        """Raise ValueError naming the first illegal setting and its legal values, TypeError for an incomplete rule."""
        check_settings(self)
        if not hasattr(self, "name"):
            raise TypeError(f"The rule {type(self).__name__} has no name.")

    def bind(self, model: ARModel) -> AcceptanceRule:
        """The rule with what it needs of a model. Raises ValueError if the model does not have it."""
        return self

    def describe(self) -> dict[str, Any]:
        """The rule's name and settings, JSON-ready."""
        return {"rule": self.name} | {f.name: getattr(self, f.name) for f in fields(self) if f.repr}

    @classmethod
    def in_words(cls, settings: dict[str, Any]) -> str:
        """What ``describe`` says, for people: "LANTERN++ (neighbours 10, ratio 2)"."""
        numbers = (name for name, each in settings_of(cls).items() if each.shown and not each.options)
        details = [f"{name} {settings[name]:g}" for name in numbers if name in settings]
        return cls.label + (f" ({', '.join(details)})" if details else "")

    def accept_probability(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        """Probability f(token) [...] in [0, 1] of accepting ``token``."""
        return at(self.accepted_mass(p, q, depth, strength), token) / at(q, token).clamp(min=EPS)

    def accepted_mass(self, p: Tensor, q: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        """q f of every token [..., V+]: from 0 to q, and to p where the rule is lossless. Not needed of a rule that
        defines the other three methods itself."""
        raise NotImplementedError(f"{type(self).__name__} has no accepted_mass(p, q, depth, strength)")

    def residual(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        """Unnormalised distribution [..., V+] to sample from after a rejection, here G. No row is all zero."""
        if self.plain:
            return residual(p, q)
        return unless_empty((p - self.accepted_mass(p, q, depth, strength)).clamp(min=0), p)

    def drift_bound(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        """Total variation [...] of the output of this test and p: its value, or an unbiased estimate of a bound."""
        return (self.accepted_mass(p, q, depth, strength) - p).clamp(min=0).sum(-1)

    def acceptance_budget(self, depth: Tensor, strength: Tensor) -> AcceptanceBudget:
        """The budget of drafts at depth [L] (int64), with strength [B, L]: f(x) = min(1, budget / q(x)).

        For rules with ``has_budget`` only.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Exact(AcceptanceRule):
    """min(1, p/q) and [p - q]+: the output distribution is exactly p (Leviathan et al., ICML 2023, appendix A.1).

    Windows take kernels.verification.maximal_coupling instead, which does the same in one go.
    """

    name = label = "exact"
    plain = True

    @property
    def lossless(self) -> bool:
        return True

    def accept_probability(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        return exact_probability(p, q, token)

    def drift_bound(self, p: Tensor, q: Tensor, token: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        return torch.zeros_like(strength)


def bind_rule(rule: AcceptanceRule, model: ARModel) -> AcceptanceRule:
    """The rule, bound to the model. Raises ValueError if its ``accepted_mass`` is illegal for random p and q."""
    rule = rule.bind(model)
    if type(rule).accepted_mass is AcceptanceRule.accepted_mass:
        return rule
    chance = torch.Generator().manual_seed(0)
    some = torch.rand(2, 1, TRIED, model.vocab_total, generator=chance).mul(1.5).sub(0.5).clamp(min=0).pow(8)
    some[..., 0] += EPS  # some probabilities are 0, but not all
    p, q = (some / some.sum(-1, keepdim=True)).to(model.device)
    depth = torch.arange(1, TRIED + 1, device=model.device)[None]
    for strength in (0.0, 1.0):
        mass = rule.accepted_mass(p, q, depth, torch.full_like(depth, strength, dtype=p.dtype))
        most = torch.minimum(p, q) if rule.lossless or not strength else q
        if mass.shape != q.shape or not ((mass >= -SLACK) & (mass <= most + SLACK)).all():
            raise ValueError(
                f"accepted_mass of the rule {type(rule).__name__} is illegal. It is q times the probability of "
                "accepting each token, of q's shape: from 0 to q, and at most p where strength is 0 or the rule "
                "has lossless = True."
            )
    return rule


def exact_probability(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """min(1, p/q) of the exact rule [...]."""
    return (at(p, token) / at(q, token).clamp(min=EPS)).clamp(max=1)
