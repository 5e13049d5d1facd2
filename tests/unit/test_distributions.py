"""Distributions of vectors: densities against torch.distributions, samples against distribution functions."""

import pytest
import torch
from comfyui_specar.samplers.continuous_distributions import Mixture, Normal, join
from torch import distributions as D

from ..support.toy_heads import correlation, ks, normal_cdf

ALMOST_ONE = 1 - 2**-24  # the largest uniform number


def normal_distribution(*lead: int, channels: int = 3) -> Normal:
    g = torch.Generator().manual_seed(5)
    return Normal(
        torch.randn(*lead, channels, generator=g),
        0.3 * torch.randn(*lead, channels, generator=g),
        torch.randn(lead, generator=g),
    )


def mixture_distribution(*lead: int, parts: int = 4, channels: int = 2) -> Mixture:
    g = torch.Generator().manual_seed(6)
    return Mixture(
        torch.randn(*lead, parts, generator=g),
        2 * torch.randn(*lead, parts, channels, generator=g),
        0.3 * torch.randn(*lead, parts, channels, generator=g),
    )


def numbers(count: int, channels: int):
    g = torch.Generator().manual_seed(7)
    return torch.randn(count, channels, generator=g), torch.rand(count, generator=g)


def test_normal_density_is_joint_over_dimensions():
    distribution, x = normal_distribution(2, 5), torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))
    wanted = D.Independent(D.Normal(distribution.mean, distribution.log_std.exp()), 1).log_prob(x)
    assert torch.allclose(distribution.log_density(x), wanted, atol=1e-5)


def test_mixture_density():
    distribution, x = mixture_distribution(2, 5), torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(1))
    parts = D.Independent(D.Normal(distribution.means, distribution.log_stds.exp()), 1)
    wanted = D.MixtureSameFamily(D.Categorical(logits=distribution.log_weights), parts).log_prob(x)
    assert torch.allclose(distribution.log_density(x), wanted, atol=1e-5)
    shifted = Mixture(distribution.log_weights + 7, distribution.means, distribution.log_stds)
    assert torch.allclose(shifted.log_density(x), wanted, atol=1e-5)


def test_samples_of_a_gaussian_follow_the_distribution_and_the_token_is_its_mean():
    distribution, count = normal_distribution(), 20_000
    normal, uniform = numbers(count, 3)
    u = normal_cdf((distribution.sample(normal, uniform) - distribution.mean) / distribution.log_std.exp())
    assert max(map(ks, u.unbind(1))) < 2.3 and correlation(u) < 5
    many = distribution.map(lambda t: t.expand(count, *t.shape))
    assert torch.equal(many.token(normal, uniform), many.mean)


def test_samples_of_a_mixture_follow_the_distribution():
    distribution, count = mixture_distribution(), 20_000
    normal, uniform = numbers(count, 2)
    many = distribution.map(lambda t: t.expand(count, *t.shape))
    x = many.sample(normal, uniform)
    assert torch.equal(many.token(normal, uniform), x)
    weight = distribution.log_weights.softmax(-1)
    for c in range(2):
        z = (x[:, None, c] - distribution.means[:, c]) / distribution.log_stds[:, c].exp()
        cdf = (weight * normal_cdf(z)).sum(-1)
        assert ks(cdf) < 2.3
        wrong = normal_cdf(z).mean(-1)
        assert ks(wrong) > 10  # equal weights: the test sees the difference
    part = (x[:, None] == distribution.means + distribution.log_stds.exp() * normal[:, None]).all(-1)
    counts = part.sum(0)
    assert int(counts.sum()) == count
    assert ((counts - count * weight) ** 2 / (count * weight)).sum() < 25


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE])
def test_a_component_of_weight_zero_is_never_sampled(uniform):
    weights = torch.tensor([-torch.inf, 0.0, 0.5, -torch.inf])
    means = torch.tensor([[9.0], [1.0], [2.0], [9.0]])
    x = Mixture(weights, means, torch.zeros(4, 1)).sample(torch.zeros(1), torch.tensor(uniform))
    assert float(x) in (1.0, 2.0)


@pytest.mark.parametrize(
    "distribution", [normal_distribution(2, 5, channels=2), mixture_distribution(2, 5)], ids=["normal", "mixture"]
)
def test_map_and_join_change_every_tensor_alike(distribution):
    x = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(1))
    whole = distribution.log_density(x)
    flat = distribution.map(lambda t: t.flatten(0, 1))
    assert type(flat) is type(distribution)
    assert torch.equal(flat.log_density(x.flatten(0, 1)), whole.flatten())
    parts = [distribution.map(lambda t, i=i: t[:, i : i + 2]) for i in range(0, 5, 2)]
    together = join(parts)
    assert type(together) is type(distribution)
    for name in distribution.__dataclass_fields__:
        assert torch.equal(getattr(together, name), getattr(distribution, name))
    twice = join([distribution, distribution], dim=0).log_density(torch.cat((x, x)))
    assert torch.equal(twice, torch.cat((whole, whole)))
