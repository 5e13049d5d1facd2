"""The diffusion head of MAR (Li et al., "Autoregressive image generation without vector quantization", NeurIPS 2024,
arXiv:2406.11838, section 3.2): a small MLP that denoises one token, conditioned on the backbone's vector z.

Parameter names follow the published files (``diffloss.net.*``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate, repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...device.continuous_steps import Graphs, captured_step, padded_rows, with_rows

TRAINING_STEPS = 1000
KINDS = ("ddpm", "ddim")


@dataclass(frozen=True)
class NoiseSchedule:
    """A cosine noise schedule (Nichol & Dhariwal, 2021, eq. 17), respaced to T of its 1000 steps.

    Every table is [T], index 0 being the last denoising step. kind: "ddpm" samples with the learned variance, "ddim"
    (Song et al., 2021, eta = 0) adds no noise. timesteps (int64): the step numbers that the network was trained on.
    """

    kind: str
    last_width: float  # nominal standard deviation of the last step, in latent units (about 0.0063 at any T)
    timesteps: Tensor
    signal: Tensor  # x_t = signal * x_0 + noise * epsilon before the step ...
    noise: Tensor
    signal_next: Tensor  # ... and after it
    noise_next: Tensor
    log_beta: Tensor  # log of the largest plausible variance of a step ...
    log_posterior: Tensor  # ... and of the smallest
    from_clean: Tensor  # posterior mean = from_clean * x_0 + from_noisy * x_t
    from_noisy: Tensor

    @classmethod
    def cosine(
        cls, steps: int = 100, kind: str = "ddpm", device: torch.device | str = "cpu", first: int = TRAINING_STEPS - 1
    ) -> NoiseSchedule:
        """``steps`` of the original steps, evenly spaced from ``first`` to 0.

        The first step of published models multiplies the network's errors by over 300; small models are less precise
        and begin a little later. Raises ValueError for an illegal number or kind.
        """
        if not 1 <= first < TRAINING_STEPS:
            raise ValueError(f"Denoising begins at step 1 to {TRAINING_STEPS - 1}; {first} was asked for.")
        if not 2 <= steps <= first + 1:
            raise ValueError(f"The diffusion head takes 2 to {first + 1} steps a token; {steps} were asked for.")
        if kind not in KINDS:
            raise ValueError(f"The diffusion head samples by {' or '.join(KINDS)}; {kind!r} was asked for.")
        on = {"dtype": torch.float64, "device": "cpu"}  # also where models are built on another default device
        t = torch.arange(TRAINING_STEPS + 1, **on) / TRAINING_STEPS
        signal = torch.cos((t + 0.008) / 1.008 * math.pi / 2).square()
        betas = (1 - signal[1:] / signal[:-1]).clamp(max=0.999)
        stride = first / (steps - 1)
        # Accumulated, not multiplied: the published code rounds ties between two timesteps by its accumulated error.
        spaced = [round(t) for t in accumulate(repeat(stride, steps - 1), initial=0.0)]
        timesteps = torch.tensor(spaced, device="cpu")
        alpha_bar = torch.cumprod(1 - betas, 0)[timesteps]
        after = torch.cat((torch.ones(1, **on), alpha_bar[:-1]))
        beta = 1 - alpha_bar / after
        posterior = beta * (1 - after) / (1 - alpha_bar)
        posterior[0] = posterior[1]  # the last step's would be 0
        tables = (
            alpha_bar.sqrt(),
            (1 - alpha_bar).sqrt(),
            after.sqrt(),
            (1 - after).sqrt(),
            beta.log(),
            posterior.log(),
            beta * after.sqrt() / (1 - alpha_bar),
            (1 - after) * (1 - beta).sqrt() / (1 - alpha_bar),
        )
        last_width = math.sqrt(float(posterior[0]))
        return cls(kind, last_width, timesteps, *(table.float() for table in tables)).to(device)

    @property
    def steps(self) -> int:
        return len(self.timesteps)

    def to(self, device: torch.device | str) -> NoiseSchedule:
        tables = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: t.to(device) for name, t in tables.items() if isinstance(t, Tensor)})

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """All tables of numbers, in the order of Numbers."""
        return tuple(getattr(self, name) for name in Numbers._fields)

    def mean_log_variance(self, x: Tensor, output: Tensor, index: Tensor | int) -> tuple[Tensor, Tensor]:
        """Mean and log variance of x_{t-1} given x_t [..., C] and the network's output [..., 2C] (noise, variance)."""
        at = torch.as_tensor(index)
        tables = (table[at].unsqueeze(-1) if at.ndim else table[at] for table in self.tables)
        return Numbers(*tables).mean_log_variance(self.kind, x, output)


class Numbers(NamedTuple):
    """The numbers of one denoising step, of a Schedule's tables: fp32, of any shape that broadcasts."""

    signal: Tensor
    noise: Tensor
    signal_next: Tensor
    noise_next: Tensor
    log_beta: Tensor
    log_posterior: Tensor
    from_clean: Tensor
    from_noisy: Tensor

    def mean_log_variance(self, kind: str, x: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of x_{t-1} (see Schedule). The variance is interpolated in log space between its bounds
        (Nichol & Dhariwal, arXiv:2102.09672, eq. 15)."""
        noise, share = output.chunk(2, dim=-1)
        clean = (x - self.noise * noise) / self.signal
        share = (share + 1) / 2
        log_variance = share * self.log_beta + (1 - share) * self.log_posterior
        if kind == "ddim":
            return self.signal_next * clean + self.noise_next * noise, log_variance
        return self.from_clean * clean + self.from_noisy * x, log_variance


class Endpoint(NamedTuple):
    """The end of a denoising: the distribution N(mean, exp(log_std)^2) of its last step. The mean is the sample.

    mean, log_std [..., C] (fp32, temperature included); path [...]: sum of log std over dimensions and all earlier
    steps (without the temperature, which cancels in comparisons).
    """

    mean: Tensor
    log_std: Tensor
    path: Tensor


@dataclass(frozen=True)
class Denoising:
    """N tokens between two denoising steps: the distribution that the last step left, and what the next one reads.

    mean, log_variance [N, C], path [N]: see Endpoint; before the first step the initial noise, 0 and 0. condition [N or
    2N, width]; scale [N, 1]: of guidance. Of the next step: time [1, width]; noise [N, C], which is added before it
    (0 before the first); numbers [9]: those of Numbers, and the temperature.
    """

    mean: Tensor
    log_variance: Tensor
    path: Tensor
    condition: Tensor
    scale: Tensor
    time: Tensor
    noise: Tensor
    numbers: Tensor


class TimeEmbedding(nn.Module):
    def __init__(self, width: int, operations):
        super().__init__()
        self.mlp = nn.Sequential(operations.Linear(256, width), nn.SiLU(), operations.Linear(width, width))

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """Timesteps [N] (any real numbers) -> [N, width]."""
        frequencies = torch.exp(-math.log(10000) * torch.arange(128, device=t.device, dtype=torch.float32) / 128)
        angles = t.float()[:, None] * frequencies
        return self.mlp(torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype))


class ResBlock(nn.Module):
    """LayerNorm, shift and scale from the condition, MLP, gated residual (adaLN)."""

    def __init__(self, width: int, operations):
        super().__init__()
        self.in_ln = operations.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(operations.Linear(width, width), nn.SiLU(), operations.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), operations.Linear(width, 3 * width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(y).chunk(3, dim=-1)
        return x + gate * self.mlp(self.in_ln(x) * (1 + scale) + shift)


class FinalLayer(nn.Module):
    def __init__(self, width: int, channels: int, operations):
        super().__init__()
        self.norm_final = operations.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear = operations.Linear(width, channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), operations.Linear(width, 2 * width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(y).chunk(2, dim=-1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class DenoisingMLP(nn.Module):
    """x_t [N, C], time and condition vectors [N, width] -> noise and variance logits [N, 2C]."""

    def __init__(self, channels: int, condition_dim: int, width: int, depth: int, operations=nn):
        super().__init__()
        self.time_embed = TimeEmbedding(width, operations)
        self.cond_embed = operations.Linear(condition_dim, width)
        self.input_proj = operations.Linear(channels, width)
        self.res_blocks = nn.ModuleList(ResBlock(width, operations) for _ in range(depth))
        self.final_layer = FinalLayer(width, 2 * channels, operations)

    def forward(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """``time`` = time_embed(t), ``condition`` = cond_embed(z); either may be [1, width]."""
        y = time + condition
        x = self.input_proj(x)
        for block in self.res_blocks:
            x = block(x, y)
        return self.final_layer(x, y)


class DiffusionHead(nn.Module):
    """The denoising MLP with its schedule. ``schedule`` is the model's own; a call may pass another."""

    def __init__(
        self,
        channels: int,
        condition_dim: int,
        width: int,
        depth: int,
        steps: int = 100,
        operations=nn,
        first: int = TRAINING_STEPS - 1,
    ):
        super().__init__()
        self.net = DenoisingMLP(channels, condition_dim, width, depth, operations)
        self.first = first  # the original step that denoising begins at
        self.schedule = NoiseSchedule.cosine(steps, first=first)
        self.dtype = torch.float32

    def embed(self, z: Tensor) -> Tensor:
        """Condition vectors [N, width] of backbone vectors z [N, D], computed once per denoising."""
        return self.net.cond_embed(z.to(self.dtype))

    def mean_log_variance(
        self, x: Tensor, t: Tensor | int, z: Tensor, schedule: NoiseSchedule | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and log variance [N, C] (fp32) of x_{t-1} given x_t [N, C], backbone vectors z [N, D].

        t: index into the respaced schedule, int64 [N] or one number, T-1 (noise) to 0 (last step).
        """
        schedule = (schedule or self.schedule).to(x.device)
        index = torch.as_tensor(t, device=x.device).expand(len(x))
        time = self.net.time_embed(schedule.timesteps[index], self.dtype)
        output = self.net(x.to(self.dtype), time, self.embed(z)).float()
        return schedule.mean_log_variance(x.float(), output, index)

    def denoise(
        self,
        z: Tensor,
        z_uncond: Tensor | None,
        cfg: Tensor | float,
        temperature: float,
        noise0: Tensor,
        noise_t: Tensor,
        schedule: NoiseSchedule | None = None,
        graphs: Graphs | None = None,
    ) -> Endpoint:
        """One token per row, from noise0 [N, C] along noise_t [T, N, C] (entry 0 is used at t = T-1; the last is not).

        z, z_uncond [N, D]: the backbone's vectors; without z_uncond there is no guidance, and cfg is not used. cfg: one
        scale or one per row [N]. Noise is predicted as u + cfg (c - u); the variance is that of the conditional row.
        graphs: capture the steps, for a few numbers of rows. Raises ValueError unless noise_t has one entry per step.
        """
        schedule = (schedule or self.schedule).to(noise0.device)
        if len(noise_t) != schedule.steps:
            raise ValueError(f"noise_t has {len(noise_t)} entries for a schedule of {schedule.steps} steps.")
        count = len(noise0)
        rows = count if graphs is None else padded_rows(count)
        cfg = torch.as_tensor(cfg, dtype=torch.float32, device=noise0.device).expand(count)[:, None]
        z, scale, x, noise = (with_rows(given, rows) for given in (z, cfg, noise0, noise_t[:-1]))
        x, still = x.float(), torch.zeros_like(x, dtype=torch.float32)
        condition = self.embed(z if z_uncond is None else torch.cat((z, with_rows(z_uncond, rows))))
        times = self.net.time_embed(schedule.timesteps, self.dtype).flip(0).split(1)
        numbers = torch.stack((*schedule.tables, torch.full_like(schedule.signal, temperature)), dim=1).flip(0).unbind()
        state = Denoising(x, still, still.sum(-1), condition, scale, times[0], still, numbers[0])
        for time, added, of_step in zip(times, (still, *noise.float()), numbers, strict=True):
            state = replace(state, time=time, noise=added, numbers=of_step)
            state = captured_step(graphs, (self, schedule.kind), partial(self.step, schedule.kind), state)
        log_std = 0.5 * state.log_variance[:count] + (math.log(temperature) if temperature > 0 else -math.inf)
        return Endpoint(state.mean[:count].clone(), log_std, state.path[:count].clone())

    def step(self, kind: str, state: Denoising) -> Denoising:
        """One denoising step, of a Schedule of this kind."""
        *numbers, temperature = state.numbers.unbind()
        x = state.mean
        if kind == "ddpm":
            x = x + (0.5 * state.log_variance).exp() * state.noise * temperature
        guided = len(state.condition) > len(x)
        rows = x.to(self.dtype).repeat(2, 1) if guided else x.to(self.dtype)
        output = self.net(rows, state.time, state.condition).float()
        if guided:
            output, other = output.chunk(2)
            noise, variance = output.chunk(2, dim=-1)
            unguided = other.chunk(2, dim=-1)[0]
            output = torch.cat((unguided + state.scale * (noise - unguided), variance), dim=-1)
        mean, log_variance = Numbers(*numbers).mean_log_variance(kind, x, output)
        path = state.path + 0.5 * state.log_variance.sum(-1)
        return replace(state, mean=mean, log_variance=log_variance, path=path)

    def sample(
        self,
        z_cond: Tensor,
        z_uncond: Tensor | None,
        cfg: Tensor | float,
        temperature: float,
        noise0: Tensor,
        noise_t: Tensor,
    ) -> Tensor:
        """Tokens [N, C] (fp32): the end of :meth:`denoise`."""
        return self.denoise(z_cond, z_uncond, cfg, temperature, noise0, noise_t).mean
