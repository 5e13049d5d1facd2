"""Distributions of a continuous token, a vector x [..., C], as the head of a model predicts them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Distribution:
    """A distribution of vectors, as a frozen dataclass of tensors that share their leading dimensions."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Distribution:
        """The distribution with the same change (reshape, index) of every tensor."""
        return type(self)(*(change(getattr(self, field.name)) for field in fields(self)))

    def log_density(self, x: Tensor) -> Tensor:
        """Log density [...] at x [..., C], joint over the dimensions."""
        raise NotImplementedError

    def sample(self, normal: Tensor, uniform: Tensor) -> Tensor:
        """A sample [..., C] from standard normal [..., C] and uniform [...] numbers, which may have more leading
        dimensions than the distribution."""
        raise NotImplementedError

    def token(self, normal: Tensor, uniform: Tensor) -> Tensor:
        """The token [..., C] as the model itself samples it."""
        return self.sample(normal, uniform)


@dataclass(frozen=True)
class Normal(Distribution):
    """The last denoising step of a diffusion head: N(mean, exp(log_std)^2), given the noise of the earlier steps.

    mean, log_std [..., C]; path [...]: sum of log std over dimensions and all earlier steps. The head's own sample is
    the mean: its last step adds no noise.
    """

    mean: Tensor
    log_std: Tensor
    path: Tensor

    def log_density(self, x: Tensor) -> Tensor:
        return (-0.5 * ((x - self.mean) / self.log_std.exp()).square() - self.log_std - 0.5 * LOG_2PI).sum(-1)

    def sample(self, normal: Tensor, uniform: Tensor) -> Tensor:
        return self.mean + self.log_std.exp() * normal

    def token(self, normal: Tensor, uniform: Tensor) -> Tensor:
        return self.mean


@dataclass(frozen=True)
class Mixture(Distribution):
    """A Gaussian mixture (GIVT's head; eq. 52 of "Continuous speculative decoding"): density in closed form.

    log_weights [..., K] (normalised or not), means and log_stds [..., K, C].
    """

    log_weights: Tensor
    means: Tensor
    log_stds: Tensor

    def log_density(self, x: Tensor) -> Tensor:
        z = (x.unsqueeze(-2) - self.means) / self.log_stds.exp()
        parts = (-0.5 * z.square() - self.log_stds - 0.5 * LOG_2PI).sum(-1)
        return (self.log_weights.log_softmax(-1) + parts).logsumexp(-1)

    def sample(self, normal: Tensor, uniform: Tensor) -> Tensor:
        cumulative = self.log_weights.softmax(-1).cumsum(-1)
        part = (uniform.unsqueeze(-1) * cumulative[..., -1:] >= cumulative).sum(-1)
        index = part.clamp(max=cumulative.shape[-1] - 1)[..., None, None].expand(*part.shape, 1, normal.shape[-1])
        tables = (table.expand(*part.shape, *table.shape[-2:]) for table in (self.means, self.log_stds))
        mean, log_std = (table.gather(-2, index).squeeze(-2) for table in tables)
        return mean + log_std.exp() * normal


def join(parts: Sequence[Distribution], dim: int = 1) -> Distribution:
    """Distributions of one class, concatenated along a leading dimension."""
    first = parts[0]
    return type(first)(*(torch.cat([getattr(part, field.name) for part in parts], dim) for field in fields(first)))
