"""Continuous speculative decoding as its paper prints it and as its code does it: what images these modes sample.

One token of one number, and a last step whose Gaussian does not depend on the steps before: p = N(0, 1), q = N(0.5,
1.2^2), and Sigma is the ratio of the widths of the step before. So the distribution of the output is an integral.
"""

import math

import pytest
import torch
from comfyui_specar.samplers.methods.continuous import TRIES, ContinuousSpeculative
from comfyui_specar.samplers.trace import Source

from ..support.toy_heads import ToyHead, ks, request

RUNS = 20_000
P, Q = (0.0, 1.0), (0.5, 1.2)  # mean, standard deviation
GRID = torch.linspace(-9, 9, 100_001, dtype=torch.float64)
STEP = float(GRID[1] - GRID[0])


def density(mean, std):
    return (-0.5 * ((GRID - mean) / std).square()).exp() / (std * math.sqrt(2 * math.pi))


def head(gaussian, width):
    """A model of one token that samples N(*gaussian) whatever the first of its two steps gave, of that width."""
    made = ToyHead(1, (1, 1), widths=(gaussian[1], width), slopes=(0.0, 0.7))
    made.base = torch.full_like(made.base, gaussian[0])
    return made


def sample(mode, sigma, tolerance=0.26, **options):
    """RUNS images where Sigma (eq. 8) is ``sigma``."""
    method = ContinuousSpeculative(head(Q, sigma), 1, 0, mode, tolerance=tolerance)
    return method.sample(request(head(P, 1.0), RUNS, steps=2, **options))


def residual(sigma):
    """Density of norm([Sigma p - q]+), and its mass before the normalisation."""
    rest = (sigma * density(*P) - density(*Q)).clamp(min=0)
    mass = float(rest.sum()) * STEP
    return rest / mass, mass


def printed(sigma):
    """Density of what algorithm 1 samples: drafts with probability min(1, Sigma p/q), else the residual."""
    kept = torch.minimum(sigma * density(*P), density(*Q))
    return kept + (1 - float(kept.sum()) * STEP) * residual(sigma)[0]


def uniform(pdf, x):
    """x through the distribution function of a density on the grid."""
    function = pdf.cumsum(0) * STEP
    place = ((x.double() - GRID[0]) / STEP).clamp(0, len(GRID) - 1.001)
    return torch.lerp(function[place.long()], function[place.long() + 1], place.frac())


def tv(a, b):
    return 0.5 * float((a - b).abs().sum()) * STEP


# Algorithm 1


@pytest.mark.parametrize(("sigma", "bias"), [(1.0, 0.0), (1.6, 0.108), (2.0, 0.134), (0.8, 0.101)])
def test_the_printed_algorithm_is_off_by_what_sigma_makes_of_it(sigma, bias):
    wanted = printed(sigma)
    assert tv(wanted, density(*P)) == pytest.approx(bias, abs=5e-4)
    decoded = sample("printed", sigma)
    x = decoded.tokens[:, 0, 0]
    assert ks(uniform(wanted, x)) < 2.3
    off = (wanted - density(*P)).cumsum(0).abs().max() * STEP  # Kolmogorov's distance of the two distributions
    assert (ks(uniform(density(*P), x)) > 2.3) == bool(bias), f"p itself is {float(off):.3f} away"
    rate = float(torch.minimum(sigma * density(*P), density(*Q)).sum()) * STEP
    error = (rate * (1 - rate) / RUNS) ** 0.5
    assert abs(decoded.trace.summary()["acceptance_rate"] - rate) < 4 * error


def test_without_sigma_the_printed_algorithm_is_the_exact_mode():
    """To the last bit: both models' earlier widths are the same, and so Sigma = 1."""
    target, drafter = ToyHead(2), ToyHead(2, noise=0.4, slopes=(0.75, 0.62, 0.65))
    exact, found = (
        ContinuousSpeculative(drafter, 3, 0.25, mode, path=path).sample(request(target, 200, cfg=1.5))
        for mode, path in (("exact", "off"), ("printed", "official"))
    )
    assert torch.equal(found.tokens, exact.tokens)
    for name in exact.trace.positions.keys() - {"source"}:  # which says whether the method is exact
        assert torch.equal(found.trace.positions[name], exact.trace.positions[name]), name
    assert 0.2 < exact.trace.summary()["acceptance_rate"] < 0.8


def test_another_sigma_changes_the_printed_algorithm_alone():
    exact, found = (sample(mode, 1.6) for mode in ("exact", "printed"))
    assert not torch.equal(found.tokens, exact.tokens)
    assert ks(uniform(density(*P), exact.tokens[:, 0, 0])) < 2.3


# The published code


@pytest.mark.parametrize("sigma", [0.8, 1.0, 1.1])
def test_the_published_code_keeps_the_mean_or_samples_its_residual(sigma):
    """Drafts are the mean of q, the test is widened and its Sigma inverted, and so is that of the residual, which is
    not widened."""
    decoded = sample("published", sigma, tolerance=0.15)
    kappa = decoded.trace.settings["kappa"]
    assert kappa == pytest.approx(0.15 / 0.35)  # the toys' nominal width
    rate = math.exp(-(((Q[0] - P[0]) / (kappa * P[1])) ** 2) / 2) * Q[1] / P[1] / sigma
    kept = decoded.trace.positions["source"][:, 0] == Source.RELAXED
    assert abs(float(kept.double().mean()) - rate) < 4 * (rate * (1 - rate) / RUNS) ** 0.5
    assert (decoded.tokens[kept] == Q[0]).all()
    pdf, mass = residual(1 / sigma)
    x, tries = (t[~kept][:, 0] for t in (decoded.tokens, decoded.trace.positions["tries"]))
    assert ks(uniform(pdf, x[tries > 0, 0])) < 2.3
    passes = sigma * mass  # with which probability a proposal passes
    wanted = (1 - (1 - passes) ** TRIES) / passes  # of a geometric number that ends at TRIES
    assert abs(float(tries.abs().double().mean()) - wanted) < 4 / passes / len(tries) ** 0.5


def test_the_published_code_leaves_zeros_where_the_residual_is_empty():
    decoded = sample("published", 1.6, tolerance=0.7)
    failed = decoded.trace.positions["source"][:, 0] == Source.RESIDUAL
    assert 0.2 < float(failed.double().mean()) < 0.8
    assert torch.equal(decoded.trace.positions["tries"][:, 0] == -TRIES, failed)
    assert (decoded.tokens[failed] == 0).all() and (decoded.tokens[~failed] == Q[0]).all()
