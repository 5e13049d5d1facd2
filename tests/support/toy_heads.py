"""Models of vectors small enough to write down the distribution of every token: heads of a few denoising steps over a
linear dependence on the known tokens, and mixtures of Gaussians.

Everything is added up element by element in a fixed order, so that a row of a batch and a run of its own agree to the
last bit, as far as a processor's tanh, sin and exp do not depend on where in a tensor a number stands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from comfyui_specar.samplers.continuous_contract import ContinuousParams, ContinuousRequest, masked_guidance
from comfyui_specar.samplers.continuous_distributions import Mixture, Normal
from torch import Tensor

GRID = (2, 2)


@dataclass(frozen=True)
class ToySchedule:
    """T denoising steps; ddim: the head adds no noise. The nominal width is that of the default target."""

    steps: int
    kind: str = "ddpm"
    last_width: float = 0.35


class Toy:
    """What the toys share: the context a token is sampled in, a + sum of w x over the known tokens, plus guidance.

    Strict about the protocol: what is asked for must be unknown, distinct and no more than ``seen``.
    """

    group, device, order = 1, torch.device("cpu"), None

    def __init__(
        self, channels: int = 1, grid: tuple[int, int] = GRID, seed: int = 1, noise: float = 0.0, coupling: float = 0.6
    ):
        """noise: how far this model's tables are from those of the model of the same seed without."""
        self.channels, self.grid, self.defaults = channels, grid, ContinuousParams(steps=3)
        length = grid[0] * grid[1]
        generator = torch.Generator().manual_seed(seed)
        own = torch.Generator().manual_seed(seed + 1)

        def table(*shape: int, scale: float) -> Tensor:
            values, extra = (torch.randn(*shape, generator=g) for g in (generator, own))
            return scale * (values + noise * extra)

        self.base = table(length, channels, scale=1.0)
        self.guide = table(length, channels, scale=0.5)
        self.weights = table(length, length, channels, channels, scale=coupling / channels)
        self.calls: list[tuple[int, ...]] = []
        self.sessions, self.module = {}, None

    def start(
        self, conditioning: Any, negative: Any, batch: int, grid: tuple[int, int], guided: bool, graphs: Any = None
    ) -> bool:
        return guided

    def guidance(self, params: ContinuousParams, before: Tensor, after: Tensor, length: int) -> Tensor:
        return masked_guidance(params, before, after, length)

    def schedule(self, params: ContinuousParams) -> ToySchedule:
        return ToySchedule(params.steps, params.kind)

    def context(self, tokens: Tensor, known: Tensor, query: Tensor, cfg: Tensor | float) -> Tensor:
        """[B, V, M, C] of tokens [B, S, C] under known [B, V, S] at query [B, V, M]."""
        scale = cfg[..., None] - 1 if isinstance(cfg, Tensor) else cfg - 1
        context = self.base[query] + scale * self.guide[query]
        weights = self.weights[query]
        for j in range(tokens.shape[1]):
            for c in range(self.channels):
                x = torch.where(known[:, :, j], tokens[:, None, j, c], 0.0)
                context = context + weights[..., j, c, :] * x[..., None, None]
        return context

    def predict(
        self,
        state: bool,
        tokens: Tensor,
        known: Tensor,
        query: Tensor,
        seen: int,
        cfg: Tensor,
        temperature: float,
        noise0: Tensor,
        noise_t: Tensor,
        schedule: ToySchedule,
    ):
        assert known.shape[:2] == query.shape[:2] == cfg.shape[:2] and cfg.shape == query.shape
        assert noise0.shape == (*query.shape, self.channels) and noise_t.shape == (schedule.steps, *noise0.shape)
        assert tokens.dtype == noise0.dtype == noise_t.dtype == cfg.dtype == torch.get_default_dtype()
        assert int(known.sum(-1).max()) <= seen <= tokens.shape[1]
        self.calls.append(tuple(query.shape))
        context = self.context(tokens, known, query, cfg if state else 1.0)
        return self.distribution(context, temperature, noise0, noise_t, schedule)


class ToyHead(Toy):
    """A head of T denoising steps that starts from shared noise: x <- slope x + shift context + width noise.

    widths [T] and slopes [T] are those of the steps, the last one first as in ``Schedule``. bend: makes steps and
    widths depend on x, so that the distribution is no Gaussian any more.
    """

    def __init__(self, *args, widths=(0.35, 0.6, 0.9), slopes=(0.8, 0.6, 0.7), bend: float = 0.0, **options):
        super().__init__(*args, **options)
        self.widths, self.slopes, self.bend = widths, slopes, bend

    def distribution(self, context: Tensor, temperature: float, noise0: Tensor, noise_t: Tensor, schedule: ToySchedule):
        x, path = noise0, torch.zeros_like(noise0[..., 0])
        for turn, index in enumerate(range(schedule.steps - 1, -1, -1)):
            log_width = math.log(self.widths[index]) + 0.5 * self.bend * torch.tanh(x)
            x = self.slopes[index] * x + (1 - self.slopes[index]) * context + self.bend * torch.sin(2 * x)
            if index:
                for c in range(self.channels):
                    path = path + log_width[..., c]
                if schedule.kind == "ddpm":
                    x = x + temperature * log_width.exp() * noise_t[turn]
        if schedule.kind == "ddim":
            return Normal(x, torch.full_like(x, math.log(schedule.last_width)), torch.zeros_like(path))
        return Normal(x, log_width + math.log(temperature), path)

    def moments(self, context: Tensor, temperature: float = 1.0, last: bool = True) -> tuple[Tensor, float]:
        """Mean and standard deviation of a token with its last step's noise (or without), in closed form (bend 0)."""
        gain, variance = 1.0, 0.0
        for index, (slope, width) in enumerate(zip(self.slopes, self.widths, strict=True)):
            variance += (gain * temperature * width) ** 2 if index or last else 0.0
            gain *= slope
        return (1 - gain) * context, math.sqrt(variance + gain**2)


class ToyMixture(Toy):
    """A head that is a mixture of K Gaussians around the context, in closed form."""

    def __init__(self, *args, parts: int = 3, spread: float = 1.5, noise: float = 0.0, seed: int = 1, **options):
        super().__init__(*args, noise=noise, seed=seed, **options)
        length = self.base.shape[0]
        generator, own = (torch.Generator().manual_seed(seed + 10 + i) for i in (0, 1))

        def table(*shape: int) -> Tensor:
            values, extra = (torch.randn(*shape, generator=g) for g in (generator, own))
            return values + noise * extra

        self.weight, self.offset = table(length, parts), spread * table(length, parts, self.channels)
        self.log_std = 0.3 * table(length, parts, self.channels) - 0.7

    def distribution(self, context: Tensor, temperature: float, noise0: Tensor, noise_t: Tensor, schedule: ToySchedule):
        raise NotImplementedError("a mixture needs the positions: see predict")

    def predict(
        self,
        state: bool,
        tokens: Tensor,
        known: Tensor,
        query: Tensor,
        seen: int,
        cfg: Tensor,
        temperature: float,
        noise0: Tensor,
        noise_t: Tensor,
        schedule: ToySchedule,
    ) -> Mixture:
        self.calls.append(tuple(query.shape))
        return self.at(self.context(tokens, known, query, cfg if state else 1.0), query)

    def at(self, context: Tensor, query: Tensor) -> Mixture:
        means = context.unsqueeze(-2) + self.offset[query]
        return Mixture(self.weight[query], means, self.log_std[query])


def request(model: Toy, batch: int = 1, seed: int = 0, **options) -> ContinuousRequest:
    """A request; parameters of ContinuousParams may be given by name."""
    names = ContinuousParams.__dataclass_fields__
    params = replace(model.defaults, **{name: options.pop(name) for name in tuple(options) if name in names})
    return ContinuousRequest(model, None, model.grid, params, seed=seed, batch=batch, **options)


# How far samples are from a distribution. Every score is about 1 or below for a sample of the distribution itself.


def normal_cdf(x: Tensor) -> Tensor:
    return torch.special.ndtr(x.double())


def ks(u: Tensor) -> float:
    """Kolmogorov's sqrt(n) D of numbers [n] that should be uniform. Above 2.3 with probability 5e-5."""
    u, n = u.double().sort().values, len(u)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum(steps[1:] - u, u - steps[:-1]).max()) * math.sqrt(n)


def ks_two(a: Tensor, b: Tensor) -> float:
    """The same for two samples of one dimension."""
    a, b = a.double().sort().values, b.double().sort().values
    both = torch.cat((a, b))
    distance = torch.searchsorted(a, both, right=True) / len(a) - torch.searchsorted(b, both, right=True) / len(b)
    return float(distance.abs().max()) * math.sqrt(len(a) * len(b) / (len(a) + len(b)))


def correlation(u: Tensor) -> float:
    """Largest sqrt(n) |correlation| between columns [n, k] of independent uniform numbers, and of how far off 1/2 they
    are. Above 5 with probability below 1e-4 for k <= 12.
    """
    columns = u.shape[1]
    table = torch.corrcoef(torch.cat((u, (u - 0.5).abs()), dim=1).double().T)
    same = torch.eye(columns, dtype=torch.bool).repeat(2, 2)  # a number and its own distance from 1/2
    return float(table.masked_fill(same, 0).abs().max()) * math.sqrt(len(u))


def uniforms(
    model: Toy, tokens: Tensor, order: Tensor, cfg: float = 1.0, temperature: float = 1.0, last: bool = True
) -> Tensor:
    """[B, S, C]: every number of the images through the distribution of the model itself, given those before it
    (Rosenblatt).

    Independent and uniform if the images [B, S, C] were sampled by the model in their order [B, S] (place -> position),
    with linear guidance; ``last``: with the noise of the last step. Entry i belongs to position i.
    """
    batch, length, channels = tokens.shape
    rank = order.argsort(dim=1)
    out = []
    for k in range(length):
        query = order[:, None, k : k + 1]
        scale = 1 + (cfg - 1) * min(k + 1, length - 1) / length
        context = model.context(tokens, (rank < k)[:, None], query, torch.full(query.shape, scale))
        x = tokens.gather(1, order[:, k, None, None].expand(-1, 1, channels))[:, 0]
        if isinstance(model, ToyHead):
            mean, std = model.moments(context[:, 0, 0], temperature, last)
            out.append(normal_cdf((x - mean) / std))
        else:
            out.append(_mixture_uniforms(model.at(context, query).map(lambda t: t[:, 0, 0].double()), x.double()))
    return torch.stack(out, dim=1).gather(1, rank[..., None].expand(-1, -1, channels))


def _mixture_uniforms(distribution: Mixture, x: Tensor) -> Tensor:
    """Conditional distribution functions [B, C] of the numbers of x [B, C], each given those before it."""
    weight, out = distribution.log_weights.log_softmax(-1), []
    for c in range(x.shape[-1]):
        z = (x[:, None, c] - distribution.means[..., c]) / distribution.log_stds[..., c].exp()
        out.append((weight.softmax(-1) * normal_cdf(z)).sum(-1))
        weight = weight - 0.5 * z.square() - distribution.log_stds[..., c]
    return torch.stack(out, dim=-1)


def drawing_order(decoded) -> Tensor:
    """[B, S]: the position sampled k-th."""
    return decoded.trace.positions["order"].long().argsort(dim=1)


@dataclass(frozen=True)
class Score:
    """How far samples are from a distribution, in units of what chance allows: below 1 for the distribution itself."""

    ks: float
    correlation: float

    @property
    def worst(self) -> float:
        return max(self.ks / 2.3, self.correlation / 5)


def score(
    model: Toy, decoded, cfg: float = 1.0, temperature: float = 1.0, last: bool = True, free: Tensor | None = None
) -> Score:
    """Of images decoded from the model (``free`` [S], bool: at some of their positions), see ``uniforms``."""
    u = uniforms(model, decoded.tokens, drawing_order(decoded), cfg, temperature, last)
    u = (u if free is None else u[:, free]).flatten(1)
    return Score(max(map(ks, u.unbind(1))), correlation(u))
