"""The acceptance ratio on numbers worked out by hand, and the residual against numerical integration."""

import math
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar.samplers.continuous_distributions import Mixture, Normal
from comfyui_specar.samplers.methods import continuous
from comfyui_specar.samplers.methods.continuous import MODES, ContinuousRun, first_accepted, log_ratio, sample_residual

from ..support.toy_heads import ks

RUNS = 40_000


def gaussian(mean, std, path=0.0):
    mean = torch.as_tensor(mean, dtype=torch.float32)
    return Normal(mean, torch.as_tensor(std, dtype=torch.float32).log().expand(mean.shape), torch.tensor(float(path)))


# The ratio

P, Q = gaussian([0.0, 1.0], [1.0, 0.5], path=-2.0), gaussian([0.5, 1.0], [2.0, 0.5], path=-1.5)
X = torch.tensor([1.0, 2.0])
# p: exponents 1/2 and 1/(2/4) = 2; q: 0.25/8 and 2; widths: ln 2 - ln 1; log Sigma = -1.5 + 2.
BY_HAND = -0.5 + 0.03125 + math.log(2)


def test_log_ratio_by_hand():
    assert float(log_ratio(X, P, Q)) == pytest.approx(BY_HAND, abs=1e-6)
    assert float(P.log_density(X) - Q.log_density(X)) == pytest.approx(BY_HAND, abs=1e-6)


@pytest.mark.parametrize(("sign", "added"), [(0.0, 0.0), (1.0, 0.5), (-1.0, -0.5)])
def test_sigma_is_the_drafters_path_over_the_targets(sign, added):
    """Eq. 8, and its inverse as the published code has it."""
    assert float(log_ratio(X, P, Q, sign=sign)) == pytest.approx(BY_HAND + added, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "sign", "clamped"),
    [(49, 1, 49), (51, 1, 50), (1e30, 1, 50), (-1e4, 1, -50), (1e4, -1, -50), (math.inf, 1, 50)],
)
def test_sigma_is_clamped(path, sign, clamped):
    p, q = gaussian([0.0], [1.0], path=0.0), gaussian([0.0], [1.0], path=path)
    assert float(log_ratio(torch.zeros(1), p, q, sign=float(sign))) == pytest.approx(clamped)


@pytest.mark.parametrize("kappa", [0.5, 1.0, 42.0])
def test_kappa_widens_the_exponents_alone(kappa):
    """Both Gaussians widened alike keep the ratio of their heights."""
    wanted = (BY_HAND - math.log(2)) / kappa**2 + math.log(2)
    assert float(log_ratio(X, P, Q, kappa=kappa)) == pytest.approx(wanted, abs=1e-5)
    wide_p, wide_q = (gaussian(one.mean, kappa * one.log_std.exp()) for one in (P, Q))
    assert float(log_ratio(X, wide_p, wide_q)) == pytest.approx(wanted, abs=1e-5)


def test_the_ends_of_kappa():
    assert float(log_ratio(X, P, Q, kappa=math.inf)) == math.inf
    none = log_ratio(X, P, Q, kappa=0.0)
    assert none.isfinite() and none < -1e6
    same = gaussian([0.3, 0.7], [0.1, 0.2])
    assert float(log_ratio(same.mean, same, same, kappa=0.0)) == 0


# The residual


def mixture(weights, means, stds):
    column = [torch.tensor(t, dtype=torch.float32) for t in (weights, means, stds)]
    return Mixture(column[0].log(), column[1][:, None], column[2].log()[:, None])


PAIRS = {
    "shifted": (gaussian([0.0], [1.0]), gaussian([0.7], [0.8]), 0.0),
    "narrow": (gaussian([0.0], [0.5]), gaussian([0.1], [1.5]), 0.0),
    "wide": (gaussian([0.0], [1.5]), gaussian([0.1], [0.5]), 0.0),
    "close": (gaussian([0.0], [1.0]), gaussian([0.2], [1.05]), 0.0),
    "sigma above 1": (gaussian([0.0], [1.0], path=0.0), gaussian([0.7], [0.8], path=0.4), 1.0),
    "sigma below 1": (gaussian([0.0], [1.0], path=0.0), gaussian([0.7], [0.8], path=-0.4), 1.0),
    "sigma inverted": (gaussian([0.0], [1.0], path=0.0), gaussian([0.7], [0.8], path=0.4), -1.0),
    "mixtures": (mixture([0.3, 0.7], [-1.0, 1.0], [0.4, 0.7]), mixture([0.6, 0.4], [-0.8, 1.2], [0.5, 0.5]), 0.0),
}


def numbers(tries, runs, channels=1, seed=1):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tries, runs, channels, generator=g),
        torch.rand(tries, runs, generator=g),
        torch.rand(tries, runs, generator=g),
    )


def wide(one, runs):
    return one.map(lambda t: t.expand(runs, *t.shape))


def integrated(p, q, sign):
    """Grid [n], the distribution function of norm([Sigma p - q]+) on it, and its mass as a share of Sigma."""
    grid = torch.linspace(-9, 9, 40_001, dtype=torch.float64)
    sigma = math.exp(sign * float(q.path - p.path)) if isinstance(p, Normal) else 1.0
    density = [one.map(lambda t: t.double()).log_density(grid[:, None]).exp() for one in (p, q)]
    rest = (sigma * density[0] - density[1]).clamp(min=0)
    total = rest.cumsum(0)
    return grid, total / total[-1], float(total[-1] * (grid[1] - grid[0])) / sigma


def at(grid, function, x):
    """Linear interpolation."""
    place = (x.double() - grid[0]) / (grid[1] - grid[0])
    low = place.floor().long().clamp(0, len(grid) - 2)
    return torch.lerp(function[low], function[low + 1], place - low)


@pytest.mark.parametrize("name", PAIRS)
def test_the_residual_has_its_distribution_after_one_over_its_mass_proposals(name):
    """1 / TV on average (for Sigma = 1), geometrically distributed."""
    p, q, sign = PAIRS[name]
    normal, uniform, accept = numbers(60, RUNS)
    y, tries = sample_residual(wide(p, RUNS), wide(q, RUNS), normal, uniform, accept, sign)
    grid, function, mass = integrated(p, q, sign)
    assert ks(at(grid, function, y[tries > 0, 0])) < 2.3
    unlucky = (1 - mass) ** 60
    assert abs(float((tries < 0).double().mean()) - unlucky) < 4 * (unlucky / RUNS) ** 0.5 + 1e-4
    unrejected = wide(p, RUNS).sample(normal[0], uniform[0])[:, 0]
    assert ks(at(grid, function, unrejected)) > 10, "the test must see p itself"
    for n in (1, 2, 5):
        wanted = mass * (1 - mass) ** (n - 1)
        assert abs(float((tries == n).double().mean()) - wanted) < 4 * (wanted * (1 - wanted) / RUNS) ** 0.5
    if unlucky < 1e-7:
        error = ((1 - mass) / mass**2 / RUNS) ** 0.5
        assert abs(float(tries.double().mean()) - 1 / mass) < 4 * error


def test_the_residual_of_two_dimensions():
    """Distributions that differ in one dimension alone: there the residual of one dimension, and p in the other."""
    p, q = gaussian([0.0, 0.5], [1.0, 0.3]), gaussian([0.7, 0.5], [0.8, 0.3])
    y, tries = sample_residual(wide(p, RUNS), wide(q, RUNS), *numbers(60, RUNS, 2))
    grid, function, _ = integrated(gaussian([0.0], [1.0]), gaussian([0.7], [0.8]), 0.0)
    assert (tries > 0).all()
    assert ks(at(grid, function, y[:, 0])) < 2.3
    assert ks(torch.special.ndtr((y[:, 1].double() - 0.5) / 0.3)) < 2.3
    assert abs(float(torch.corrcoef(y.T)[0, 1])) < 4 / RUNS**0.5


@pytest.mark.parametrize(
    ("mode", "tries", "parts", "token", "count"),
    [
        ("exact", [7], [0], 0, 7),
        ("exact", [-100, -100, 7], [0, 1, 2], 2, 207),
        ("exact", [-100, 5], [0, 1], 1, 105),
        ("exact", [-100] * 100, [*range(100)], 99, -10_000),
        ("prefix", [-100, 5], [0], 0, -100),
        ("prefix", [3], [0], 0, 3),
        ("printed", [-100, 5], [0, 1], 1, 105),
        ("published", [-100, 5], [0], None, -100),
        ("published", [3], [0], 0, 3),
    ],
)
@pytest.mark.parametrize("wanted", [True, False])
def test_proposals_are_made_until_one_passes(monkeypatch, mode, tries, parts, token, count, wanted):
    """Other modes than "exact" and "printed" give up after the first hundred, and all do where no token is wanted.
    Mode "published" then leaves zeros."""
    asked, run = [], object.__new__(ContinuousRun)
    run.method = SimpleNamespace(decisions=MODES[mode], sigma="off")
    run.proposals = lambda positions, part: (part, None, None)

    def residual(p, q, part, *_):
        asked.append(part)
        return torch.full((1, 1, 2), 1.0 + part), torch.tensor([[tries[part]]])

    monkeypatch.setattr(continuous, "sample_residual", residual)
    found, number = run.resample(None, None, torch.zeros(1, 1), torch.tensor([[wanted]]))
    if not wanted:
        parts, token, count = [0], token and 0, tries[0]
    value = 0.0 if token is None else 1.0 + token
    assert asked == parts and found.tolist() == [[[value, value]]] and int(number) == count


def test_the_first_proposal_that_passes_is_taken_and_else_the_last():
    """It passes if accept < 1 - exp(-ratio); a ratio of NaN always does."""
    half = math.log(2)  # passes below a half
    ratio = torch.tensor([[half, half, -1.0], [half, half, -1.0], [half, math.nan, -1.0]])
    accept = torch.tensor([[0.6, 0.7, 0.0], [0.4, 0.8, 0.0], [0.1, 0.9, 0.0]])
    proposals = torch.arange(18.0).reshape(3, 3, 2)
    token, tries = first_accepted(proposals, ratio, accept)
    assert tries.tolist() == [2, 3, -3]
    assert torch.equal(token, torch.stack([proposals[1, 0], proposals[2, 1], proposals[2, 2]]))


@pytest.mark.parametrize("gap", [0.25, 1e3, 1e18])
def test_a_residual_far_from_the_draft_is_the_target(gap):
    """q is nothing where p is: the first proposal passes, however large the numbers."""
    p, q = gaussian([0.0], [0.006]), gaussian([gap], [0.006])
    normal, uniform, accept = numbers(5, 50)
    y, tries = sample_residual(wide(p, 50), wide(q, 50), normal, uniform, accept)
    assert (tries == 1).all() and torch.allclose(y, 0.006 * normal[0])


def test_where_one_of_the_two_is_a_mixture_the_ratio_is_that_of_the_densities():
    mixture = Mixture(torch.zeros(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.zeros(2, 2))
    for p, q in ((P, mixture), (mixture, P), (mixture, mixture)):
        wanted = p.log_density(X) - q.log_density(X)
        assert torch.allclose(log_ratio(X, p, q, kappa=3.0, sign=1.0), wanted)
