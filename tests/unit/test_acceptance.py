"""The acceptance rules against hand-computed numbers."""

from dataclasses import replace

import pytest
import torch
from comfyui_specar.samplers.rules.acceptance import Exact
from comfyui_specar.samplers.rules.cool_sd import CoolSD, UniformRSD
from comfyui_specar.samplers.rules.lantern import Lantern, LanternPP
from comfyui_specar.samplers.rules.tv_budget import TVMetered

P = torch.tensor([0.5, 0.3, 0.15, 0.05])
Q = torch.tensor([0.2, 0.2, 0.3, 0.3])
DEPTH = torch.ones(4, dtype=torch.int64)
ONE = torch.ones(4)


def close(found, wanted, atol=1e-6):
    found, wanted = (torch.as_tensor(x, dtype=torch.float32) for x in (found, wanted))
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("omega", "f", "accepted", "rest", "drift"),
    [
        (0.5, (1, 0.75, 0.25, 0.083333), 0.45, (0.545455, 0.272727, 0.136364, 0.045455), 0),
        (1, (1, 1, 0.5, 0.166667), 0.6, (0.75, 0.25, 0, 0), 0),
        (2, (1, 1, 1, 0.333333), 0.8, (0.75, 0.25, 0, 0), 0.2),
        (4, (1, 1, 1, 0.666667), 0.9, (0.75, 0.25, 0, 0), 0.3),
    ],
)
def test_golden_numbers_of_a_scaled_ratio(omega, f, accepted, rest, drift):
    """P and Q are 0.4 apart. The exact rule keeps 0.6 of the drafts and resamples the others from (.75, .25, 0, 0)."""
    rules = [UniformRSD(omega), CoolSD(omega, decay=0, floor=False)] + [Exact()] * (omega == 1)
    for rule in rules:
        given = P.expand(4, -1), Q.expand(4, -1), torch.arange(4), DEPTH, ONE
        accept = rule.accept_probability(*given)
        assert close(accept, f) and close((Q * accept).sum(), accepted)
        probs = rule.residual(*given)
        probs = probs / probs.sum(-1, keepdim=True)
        assert close(probs, [rest] * 4) and close(rule.drift_bound(*given), [drift] * 4)
        kernel = Q * accept + (1 - accepted) * probs[0]
        assert close((kernel - P).clamp(min=0).sum(), drift)


@pytest.mark.parametrize(("epsilon", "omega"), [(0.01, 1.05), (0.05, 1.25), (0.1, 1.5), (0.2, 2), (0.3, 4), (1, 6)])
def test_golden_numbers_of_the_metered_rule(epsilon, omega):
    """From 0.4 = TV(P, Q) on, the largest ratio Q/P = 6 is reached and everything is accepted."""
    rule, given = TVMetered(epsilon), (P.expand(4, -1), Q.expand(4, -1), torch.arange(4), DEPTH, ONE)
    assert close(rule.omega(P, Q, DEPTH[0], ONE[0]), omega, 1e-5)
    assert close(rule.drift_bound(*given), [min(epsilon, 0.4)] * 4)
    assert close(rule.accept_probability(*given), UniformRSD(omega).accept_probability(*given), 1e-5)


@pytest.mark.parametrize(
    ("rule", "omegas"),
    [
        (CoolSD(1.1, 0.2, 5, floor=False), (1.5772, 1.2913, 1.0572, 0.8656, 0.7087)),
        (CoolSD(2, 0.2, 5, floor=False), (2.8676, 2.3478, 1.9222, 1.5738, 1.2885)),
        (CoolSD(2, 0.5, 5, floor=False), (4.2866, 2.5999, 1.5769, 0.9565, 0.5801)),
        (CoolSD(2, 0.2, 5, "linear", floor=False), (2.4, 2.2, 2.0, 1.8, 1.6)),
        (CoolSD(2, 0.2, 5), (2.8676, 2.3478, 1.9222, 1.5738, 1.2885)),  # nothing below 1: the floor changes nothing
        (CoolSD(1.1, 0.2, 5), (1.3746, 1.1254, 1, 1, 1)),
        (CoolSD(1.1, 0, 5), (1.1,) * 5),
        (CoolSD(1, 0.7, 5), (1,) * 5),
        (CoolSD(1.1, 1e6, 3), (1.3, 1, 1)),
    ],
)
def test_schedules(rule, omegas):
    rule.check()
    assert close(rule.omegas(), omegas, 5e-5)
    assert abs(sum(rule.omegas()) / rule.steps - rule.delta) < 1e-9, "the mean is the budget"
    depth = torch.arange(1, rule.steps + 3)
    assert close(rule.omega(P, Q, depth, torch.ones(len(depth))), (*omegas, 1, 1), 5e-5), "exact beyond its steps"
    assert close(rule.omega(P, Q, depth, torch.full((len(depth),), 0.5)), [(1 + w) / 2 for w in (*omegas, 1, 1)], 5e-5)


NEAR = torch.tensor([[0] * 5, [0] * 5, [3, 1, 0, 5, 4], [0] * 5, [0] * 5, [0] * 5], dtype=torch.int32)
LOOKALIKES = torch.tensor([0.30, 0.05, 0.10, 0.04, 0.31, 0.20])  # cumulative from 2 on: .04 .09 .39 .59 .90


@pytest.mark.parametrize(
    ("rule", "count", "surrogate"),
    [
        (Lantern(2, 0.1), 2, 0.19),
        (Lantern(3, 0.1), 2, 0.19),
        (Lantern(3, 0.5), 3, 0.49),
        (Lantern(5, 0.05), 1, 0.14),
        (LanternPP(5, 2), 2, 0.19),
        (LanternPP(5, 3), 2, 0.19),
        (Lantern(1, 1.0), 1, 0.14),
        (Lantern(5, 0.03), 0, 0.10),
    ],
)
def test_golden_numbers_of_lantern(rule, count, surrogate):
    rule = replace(rule, table=NEAR)
    absorbed, number = rule.aggregate(LOOKALIKES, torch.tensor(2), torch.tensor(1.0))
    assert int(number) == count and close(absorbed, surrogate - 0.1)
    q = torch.full((6,), 0.5)
    assert close(rule.accept_probability(LOOKALIKES, q, torch.tensor(2), DEPTH[0], ONE[0]), surrogate / 0.5)


def test_a_budget_that_is_just_met_counts():
    """In numbers that binary fractions hold: 1/8 and 1/8 fill a budget of 1/4, and p(x) = 1/4 one of lambda = 2."""
    p, token = torch.tensor([0.25, 0.125, 0.125, 0.5]), torch.tensor(0)
    table = torch.tensor([[1, 2, 3]] * 4, dtype=torch.int32)
    for rule in (Lantern(3, 0.25, table=table), LanternPP(3, 2, table=table)):
        assert [float(x) for x in rule.aggregate(p, token, ONE[0])] == [0.25, 2]
