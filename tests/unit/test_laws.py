"""Laws of vectors: densities against torch.distributions, samples against distribution functions."""

import pytest
import torch
from comfyui_specar.samplers.distributions import Mixture, Normal, join
from torch import distributions as D

from ..support.toy_heads import correlation, ks, normal_cdf

ALMOST_ONE = 1 - 2**-24  # the largest uniform number


def normal_law(*lead: int, channels: int = 3) -> Normal:
    g = torch.Generator().manual_seed(5)
    return Normal(torch.randn(*lead, channels, generator=g), 0.3 * torch.randn(*lead, channels, generator=g),
                  torch.randn(lead, generator=g))


def mixture_law(*lead: int, parts: int = 4, channels: int = 2) -> Mixture:
    g = torch.Generator().manual_seed(6)
    return Mixture(torch.randn(*lead, parts, generator=g), 2 * torch.randn(*lead, parts, channels, generator=g),
                   0.3 * torch.randn(*lead, parts, channels, generator=g))


def numbers(count: int, channels: int):
    g = torch.Generator().manual_seed(7)
    return torch.randn(count, channels, generator=g), torch.rand(count, generator=g)


def test_normal_density_is_joint_over_dimensions():
    law, x = normal_law(2, 5), torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))
    wanted = D.Independent(D.Normal(law.mean, law.log_std.exp()), 1).log_prob(x)
    assert torch.allclose(law.log_density(x), wanted, atol=1e-5)


def test_mixture_density():
    law, x = mixture_law(2, 5), torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(1))
    parts = D.Independent(D.Normal(law.means, law.log_stds.exp()), 1)
    wanted = D.MixtureSameFamily(D.Categorical(logits=law.log_weights), parts).log_prob(x)
    assert torch.allclose(law.log_density(x), wanted, atol=1e-5)
    shifted = Mixture(law.log_weights + 7, law.means, law.log_stds)
    assert torch.allclose(shifted.log_density(x), wanted, atol=1e-5)


def test_densities_broadcast_over_proposals():
    """x may have leading dimensions that the law has not."""
    for law in (normal_law(5, channels=2), mixture_law(5)):
        x = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(1))
        assert torch.allclose(law.log_density(x)[1], law.log_density(x[1]))


def test_normal_draws_follow_the_law_and_the_token_is_its_mean():
    law, count = normal_law(), 20_000
    normal, uniform = numbers(count, 3)
    u = normal_cdf((law.sample(normal, uniform) - law.mean) / law.log_std.exp())
    assert max(map(ks, u.unbind(1))) < 2.3 and correlation(u) < 5
    many = law.map(lambda t: t.expand(count, *t.shape))
    assert torch.equal(many.token(normal, uniform), many.mean)


def test_mixture_draws_follow_the_law():
    law, count = mixture_law(), 20_000
    normal, uniform = numbers(count, 2)
    many = law.map(lambda t: t.expand(count, *t.shape))
    x = many.sample(normal, uniform)
    assert torch.equal(many.token(normal, uniform), x)
    weight = law.log_weights.softmax(-1)
    for c in range(2):
        cdf = (weight * normal_cdf((x[:, None, c] - law.means[:, c]) / law.log_stds[:, c].exp())).sum(-1)
        assert ks(cdf) < 2.3
        wrong = normal_cdf((x[:, None, c] - law.means[:, c]) / law.log_stds[:, c].exp()).mean(-1)
        assert ks(wrong) > 10  # equal weights: the test sees the difference
    part = (x[:, None] == law.means + law.log_stds.exp() * normal[:, None]).all(-1)
    counts = part.sum(0)
    assert int(counts.sum()) == count
    assert ((counts - count * weight) ** 2 / (count * weight)).sum() < 25


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE])
def test_a_part_of_weight_zero_is_never_drawn(uniform):
    weights = torch.tensor([-torch.inf, 0.0, 0.5, -torch.inf])
    means = torch.tensor([[9.0], [1.0], [2.0], [9.0]])
    x = Mixture(weights, means, torch.zeros(4, 1)).sample(torch.zeros(1), torch.tensor(uniform))
    assert float(x) in (1.0, 2.0)


@pytest.mark.parametrize("law", [normal_law(2, 5, channels=2), mixture_law(2, 5)], ids=["normal", "mixture"])
def test_map_and_join_change_every_tensor_alike(law):
    x = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(1))
    whole = law.log_density(x)
    flat = law.map(lambda t: t.flatten(0, 1))
    assert type(flat) is type(law)
    assert torch.equal(flat.log_density(x.flatten(0, 1)), whole.flatten())
    parts = [law.map(lambda t, i=i: t[:, i : i + 2]) for i in range(0, 5, 2)]
    together = join(parts)
    assert type(together) is type(law)
    for name in law.__dataclass_fields__:
        assert torch.equal(getattr(together, name), getattr(law, name))
    assert torch.equal(join([law, law], dim=0).log_density(torch.cat((x, x))), torch.cat((whole, whole)))
