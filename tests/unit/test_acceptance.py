"""The acceptance rules against hand-computed numbers, and what accept_or_resample makes of the exact one."""

from dataclasses import replace

import pytest
import torch
from comfyui_specar.kernels import verification
from comfyui_specar.kernels.sampling import point_mass
from comfyui_specar.samplers.rules.acceptance import Draft, Exact, accept_or_resample, check_strength
from comfyui_specar.samplers.rules.cool_sd import CoolSD, UniformRSD
from comfyui_specar.samplers.rules.lantern import Lantern, LanternPP
from comfyui_specar.samplers.rules.tv_budget import TVMetered
from comfyui_specar.samplers.trace import Source

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
        assert close(probs, [rest] * 4) and close(rule.tv_bound(*given), [drift] * 4)
        kernel = Q * accept + (1 - accepted) * probs[0]
        assert close((kernel - P).clamp(min=0).sum(), drift)


@pytest.mark.parametrize(("epsilon", "omega"), [(0.01, 1.05), (0.05, 1.25), (0.1, 1.5), (0.2, 2), (0.3, 4), (1, 6)])
def test_golden_numbers_of_the_metered_rule(epsilon, omega):
    """From 0.4 = TV(P, Q) on, the largest ratio Q/P = 6 is reached and everything is accepted."""
    rule, given = TVMetered(epsilon), (P.expand(4, -1), Q.expand(4, -1), torch.arange(4), DEPTH, ONE)
    assert close(rule.omega(P, Q, DEPTH[0], ONE[0]), omega, 1e-5)
    assert close(rule.tv_bound(*given), [min(epsilon, 0.4)] * 4)
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


def test_a_floor_scales_what_stays_above_it_by_a_common_factor():
    free, floored = CoolSD(1.5, 0.4, 8, floor=False).omegas(), CoolSD(1.5, 0.4, 8).omegas()
    above = [i for i, omega in enumerate(floored) if omega > 1]
    assert 0 < len(above) < 8 and min(floored) == 1
    assert max(floored[i] / free[i] for i in above) - min(floored[i] / free[i] for i in above) < 1e-9


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


@pytest.mark.parametrize("child", range(4))
def test_relaxed_certain_children(child):
    """The residual of every rule then is p without the child; the metered one drifts by min(epsilon, 1 - p)."""
    token = torch.tensor(child)
    given = P, point_mass(token, 4), token, DEPTH[0], ONE[0]
    p, rest = float(P[child]), torch.where(torch.arange(4) == child, 0, P)
    table = torch.tensor([[b for b in range(4) if b != a] for a in range(4)], dtype=torch.int32)
    absorbed, _ = Lantern(3, 0.2, table=table).aggregate(P, token, ONE[0])
    for rule, f in (
        (UniformRSD(2.5), min(1, 2.5 * p)),
        (CoolSD(2.5, 0), min(1, 2.5 * p)),
        (Lantern(3, 0.2, table=table), min(1, p + float(absorbed))),
        (TVMetered(0.1), min(1, p + 0.1)),
        (TVMetered(0.9), min(1, p + 0.9)),
    ):
        assert close(rule.accept_probability(*given), f), rule
        assert close(rule.residual(*given), rest.tolist()) and close(rule.tv_bound(*given), f - p), rule


@pytest.mark.parametrize("at_once", [True, False])
def test_a_token_that_is_sampled_is_followed_where_it_is_a_child(at_once):
    """A root with the children 2 and 1, of which the first has the children 0 and 2. The target is always certain."""
    token, none = torch.tensor([[5, 2, 1, 0, 2]]).expand(5, -1), [-1, -1]
    children = torch.tensor([[1, 2], [3, 4], none, none, none]).expand(5, -1, -1)
    after = [[2, 0, 3, 1, 3], [2, 2, 3, 3, 1], [1, 3, 0, 3, 3], [0, 3, 3, 3, 3], [2, 3, 0, 0, 0]]
    p = point_mass(torch.tensor(after), 6)
    u = torch.full((5, 5), 0.5)
    found = (
        verification.sample_and_match_rows(p, token, children, 2, u)
        if at_once
        else verification.sample_and_match(lambda slot: p[torch.arange(5), slot], token, children, 2, u)
    )
    assert found.accepted.tolist() == [2, 2, 1, 0, 1]
    assert found.path.tolist() == [[1, 3], [1, 4], [2, 0], [0, 0], [1, 0]]
    tokens = [row[: count + 1] for row, count in zip(found.token.tolist(), found.accepted.tolist(), strict=True)]
    assert tokens == [[2, 0, 1], [2, 2, 1], [1, 0], [0], [2, 3]]
    ends = [(found.source[b, count].item(), found.rank[b, count].item()) for b, count in enumerate([2, 2, 1, 0, 1])]
    assert ends == [(Source.BONUS, 0)] * 3 + [(Source.RESIDUAL, 1)] * 2  # the last child is the one that was refused
    assert found.rank[:, 0].tolist() == [0, 0, 1, 1, 0] and found.rank[:2, 1].tolist() == [0, 1]
    accepted = torch.arange(3) < found.accepted[:, None]
    assert (found.source[accepted] == Source.ACCEPTED).all() and (found.ratio[accepted] == 1).all()
    assert found.ratio[3, 0] == found.ratio[4, 1] == 0 and (found.tv_bound == 0).all()


def test_a_token_of_target_probability_zero_is_never_kept():
    given = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([0]), DEPTH[:1], ONE[:1]
    for rule in (Exact(), UniformRSD(100), CoolSD(100), TVMetered(1)):
        assert float(rule.accept_probability(*given)) == 0
        assert close(rule.tv_bound(*given), [0])


def test_strength_is_checked():
    device = torch.device("cpu")
    assert check_strength(None, 2, 3, device) is None
    assert check_strength(torch.ones(1, 3, dtype=torch.float64), 2, 3, device).dtype == torch.float32
    for wrong in (torch.ones(3), torch.ones(2, 4), torch.ones(3, 3)):
        with pytest.raises(ValueError, match=r"strength.*1 or 2, 3"):
            check_strength(wrong, 2, 3, device)
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"strength.*0.* to 1"):
            check_strength(torch.tensor([[0, value, 1]]), 2, 3, device)


def run(p, q, exists=True, draws=100_000):
    """Frequencies of (token, accepted) over a grid of drafts sampled from q and independent u, v."""
    generator = torch.Generator().manual_seed(0)
    token = torch.multinomial(q if exists else p, draws, replacement=True, generator=generator)[:, None]
    u, v = torch.rand((2, draws, 1), generator=generator)
    there = torch.full_like(token, exists).bool()
    draft = Draft(token, (q * exists).expand(draws, 1, -1), torch.ones_like(token), there)
    outcome = accept_or_resample(Exact(), p.expand(draws, 1, -1), draft, u, v, torch.ones_like(u))
    assert not outcome.relaxed.any()
    return outcome.token[:, 0], outcome.accepted[:, 0], token[:, 0]


def assert_shares(drawn, wanted):
    """Shares of many samples, each within 4.5 standard deviations: one in 150 000 of the distribution itself would not
    be.
    """
    deviation = (wanted * (1 - wanted) / len(drawn)) ** 0.5
    assert ((drawn.bincount(minlength=len(wanted)) / len(drawn) - wanted).abs() < 4.5 * deviation + 1e-9).all()


MASS = point_mass(torch.tensor(3), 4)


@pytest.mark.parametrize(
    ("p", "q", "exists", "kept"),
    [(P, Q, True, 0.6), (P, P, True, 1), (P, Q, False, 0), (MASS, MASS, True, 1), (MASS, Q, True, 0.3)],
    ids=["other", "equal", "no draft", "both forced", "forced target"],
)
def test_the_result_follows_p_and_is_the_draft_as_often_as_possible(p, q, exists, kept):
    out, accepted, token = run(p, q, exists)
    assert_shares(out, p)
    assert_shares(accepted.long(), torch.tensor([1 - kept, kept]))
    assert torch.equal(out[accepted], token[accepted])
    assert (p > q * exists)[out[~accepted]].all(), "a token of the residual"
