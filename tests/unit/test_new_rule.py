"""An acceptance rule in one function: accept a draft with a floor under its probability.

The pack has no such rule, which would be a poor one. It is here to be read, and copied, when adding one.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.rules.acceptance import AcceptanceRule, bind_rule
from comfyui_specar.samplers.settings import setting
from torch import Tensor

from ..support.enumerated import MODELS, assert_exact, distance, draw


@dataclass(frozen=True)
class Floor(AcceptanceRule):
    """f(x) = max(min(1, p/q), s floor): ``accepted_mass`` is q f of every token, and what is sampled after a rejection
    and the rule's distance from the model's distribution follow from it. At strength s = 0, f is the exact rule's."""

    floor: float = setting(0.25, 0, 1, exact=0)
    name, label = "floor", "floor"

    def accepted_mass(self, p: Tensor, q: Tensor, depth: Tensor, strength: Tensor) -> Tensor:
        return torch.maximum(torch.minimum(p, q), q * self.floor * strength.unsqueeze(-1))


def kernel(rule, p, q, strength):
    """What a test of one draft samples, K = q f + (1 - sum q f) G, of p and q [V]: everything enumerated."""
    row, depth, strength = (torch.tensor([x]) for x in (0, 1, strength))
    mass = rule.accepted_mass(p[None], q[None], depth, strength)[0]
    rest = rule.residual(p[None], q[None], row, depth, strength)[0]
    return mass + (1 - mass.sum()) * rest / rest.sum()


def test_a_draft_is_tested_as_the_rule_says():
    p, q = torch.rand(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(-1)
    assert torch.allclose(kernel(Floor(), p, q, 0.0), p) and torch.allclose(kernel(Floor(0), p, q, 1.0), p)
    moved = (kernel(Floor(0.9), p, q, 1.0) - p).clamp(min=0).sum()
    limit = Floor(0.9).drift_bound(p[None], q[None], torch.tensor([0]), torch.tensor([1]), torch.tensor([1.0]))
    assert moved > 0.01 and torch.allclose(moved, limit[0])


def test_it_is_checked_before_a_run():
    assert bind_rule(Floor(), MODELS["row"]) == Floor()
    with pytest.raises(ValueError, match="floor is 1.5"):
        draw(SJD(rule=Floor(1.5)), "row")


def test_it_accepts_more_drafts_and_is_exact_without_strength():
    relaxed, plain = (draw(SJD(4, rule=rule), "row", batch=8000) for rule in (Floor(0.9), Floor(0)))
    assert_exact(plain.tokens, "row")
    assert distance(relaxed.tokens, "row").z > 4, "this notices a bias"
    one_by_one = draw(NextToken(), "row", batch=8000)
    passes = [sum(run.trace.totals["passes_per_image"]) for run in (relaxed, plain, one_by_one)]
    assert passes == sorted(set(passes))
