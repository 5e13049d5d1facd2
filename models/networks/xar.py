"""The transformer of xAR (Ren et al., "Beyond next-token: next-X prediction for autoregressive visual generation",
arXiv:2502.20388): an image of square cells, each denoised by flow matching with attention to the clean cells before it.

A token's index is in cell order throughout: cell by cell, raster order inside. N is the number of tokens of a cell: 64
in the released models. Parameter names follow the published files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ...device.continuous_steps import Graphs, captured_step
from . import vit
from .diffusion_head import KINDS, Endpoint, TimeEmbedding
from .positions import Rotation, grid_angles

GRID = 16  # tokens of a side
TRAINING_STEPS = 1000  # times are rounded down to thousandths

KeysValues = list[tuple[Tensor, Tensor]]  # of every block, [R, heads, n, head_dim] each


@dataclass(frozen=True)
class XARConfig:
    """Sizes of a model; the defaults are xAR-B. ``classes`` does not count the null class after them; ``side``: tokens
    of a side of a cell (the paper's k), which divides GRID."""

    dim: int = 768
    encoder_layers: int = 8
    decoder_layers: int = 8
    heads: int = 12
    hidden: int = 2048
    channels: int = 16
    classes: int = 1000
    side: int = 8

    @property
    def cell(self) -> int:
        """Tokens of a cell."""
        return self.side**2

    @property
    def cells(self) -> int:
        """Cells of an image."""
        return (GRID // self.side) ** 2


@dataclass(frozen=True)
class Flow:
    """The times of T denoising steps, [T + 1], from 1 (noise) to 0 (clean): x_t = (1 - t) x + t noise.

    kind: "ddpm" is Euler-Maruyama on the reverse SDE with diffusion 2t, whose last step adds no noise; "ddim" is
    Euler on the flow itself, without any noise (score-based sampling of a flow as in SiT, arXiv:2401.08740).
    """

    kind: str
    times: tuple[float, ...]

    @classmethod
    def of(cls, steps: int, kind: str = "ddpm") -> Flow:
        """Evenly spaced steps; "ddpm" ends at 0.04 and jumps to 0. Raises ValueError for an illegal number or kind."""
        if not 2 <= steps <= TRAINING_STEPS:
            raise ValueError(f"A cell can be denoised in 2 to {TRAINING_STEPS} steps; {steps} were asked for.")
        if kind == "ddpm":
            times = (*torch.linspace(1, 0.04, steps, dtype=torch.float64).tolist(), 0.0)
        elif kind == "ddim":
            times = tuple(torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist())
        else:
            raise ValueError(f"A cell is denoised by {' or '.join(KINDS)}; {kind!r} was asked for.")
        return cls(kind, times)

    @property
    def steps(self) -> int:
        return len(self.times) - 1

    @property
    def last_width(self) -> float:
        """Nominal standard deviation of the last step, in latent units (0.057 for "ddpm")."""
        return self.width(self.steps - 1)

    def width(self, index: int) -> float:
        """Standard deviation of step ``index``."""
        return math.sqrt(2 * self.times[index] * (self.times[index] - self.times[index + 1]))

    def numbers(self, temperature: float, device: torch.device | str) -> Tensor:
        """The FlowNumbers of every step [T, 3] (fp32)."""
        before = (0.0, *(self.width(index) * temperature for index in range(self.steps - 1)))
        rows = [(width, 2 - t, after - t) for width, t, after in zip(before, self.times, self.times[1:], strict=False)]
        return torch.tensor(rows, dtype=torch.float32, device=device)


class FlowNumbers(NamedTuple):
    """The numbers of one denoising step at time t: the width of the noise that is added before it, 2 - t, and how much
    t changes."""

    width: Tensor
    factor: Tensor
    change: Tensor

    def mean(self, kind: str, x: Tensor, velocity: Tensor) -> Tensor:
        """x after the step with the predicted velocity (noise - data), without noise.

        The score of a linear flow is -((1 - t) velocity + x) / t, so the SDE's drift is x + (2 - t) velocity.
        """
        return x + self.change * (x + self.factor * velocity if kind == "ddpm" else velocity)


@dataclass(frozen=True)
class CellDenoising:
    """R cells between two denoising steps: what the last step left, and what the next one reads.

    mean [R, N, C]; classes, places, past, mask, cfg: see XAR.denoise. Of the next step: time [D]; noise [R, N, C],
    which is added before it; numbers [3]: FlowNumbers.
    """

    mean: Tensor
    classes: Tensor
    places: Places
    past: KeysValues | None
    mask: Tensor | None
    cfg: Tensor
    time: Tensor
    noise: Tensor
    numbers: Tensor


class Places(NamedTuple):
    """Learned positions [R or 1, G, N, D] of G cells in encoder and decoder, and the rotation of all their tokens."""

    encoder: Tensor
    decoder: Tensor
    rotation: Rotation


class Attention(vit.Attention):
    """The layers of a vision transformer's, with rotated positions and the keys and values of earlier tokens."""

    def forward(
        self, x: Tensor, rotation: Rotation, past: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The output for x [R, n, D], which attends to ``past`` and itself, and its own keys and values."""
        q, k, v = rearrange(self.qkv(x), "r n (three h d) -> three r h n d", three=3, h=self.heads)
        q, k = rotation(q), rotation(k)
        keys, values = (k, v) if past is None else (torch.cat(pair, dim=2) for pair in zip(past, (k, v), strict=True))
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.proj(rearrange(out, "r h n d -> r n (h d)")), (k, v)


class MLP(nn.Module):
    """A gated feed-forward network with a GELU gate."""

    def __init__(self, dim: int, hidden: int, operations):
        super().__init__()
        self.fc1_g = operations.Linear(dim, hidden)
        self.fc1_x = operations.Linear(dim, hidden)
        self.fc2 = operations.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1_g(x)) * self.fc1_x(x))


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """RMS normalisation without weights, then scale and shift from the condition."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


class Block(nn.Module):
    """A pre-norm block whose normalisations and residuals are modulated per cell (adaLN)."""

    def __init__(self, config: XARConfig, operations):
        super().__init__()
        self.attn = Attention(config.dim, config.heads, operations)
        self.mlp = MLP(config.dim, config.hidden, operations)
        self.ada_lin = nn.Sequential(nn.SiLU(), operations.Linear(config.dim, 6 * config.dim))

    def forward(
        self, x: Tensor, condition: Tensor, rotation: Rotation, past: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [R, G, N, D] of G cells, given conditions [R, G, D]."""
        gain1, gain2, scale1, scale2, shift1, shift2 = self.ada_lin(condition).unsqueeze(2).chunk(6, dim=-1)
        attended, own = self.attn(modulate(x, scale1, shift1).flatten(1, 2), rotation, past, mask)
        x = x + gain1 * attended.view_as(x)
        return x + gain2 * self.mlp(modulate(x, scale2, shift2)), own


class XAR(nn.Module):
    """Noisy cells, their time and class, and the keys and values of earlier clean cells -> velocity (noise - data)."""

    def __init__(self, config: XARConfig, operations=nn):
        super().__init__()
        self.config = config
        dim = config.dim
        self.class_emb = operations.Embedding(config.classes + 1, dim)
        self.time_embed = TimeEmbedding(dim, operations)
        self.z_proj = operations.Linear(config.channels, dim)
        self.z_proj_ln = operations.RMSNorm(dim, eps=1e-6)
        self.encoder_pos_embed_learned = nn.Parameter(torch.zeros(1, GRID * GRID, dim))
        self.encoder_blocks = nn.ModuleList(Block(config, operations) for _ in range(config.encoder_layers))
        self.encoder_norm = operations.RMSNorm(dim, eps=1e-6)
        self.decoder_embed = operations.Linear(dim, dim)
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, GRID * GRID, dim))
        self.decoder_blocks = nn.ModuleList(Block(config, operations) for _ in range(config.decoder_layers))
        self.decoder_norm = operations.RMSNorm(dim, eps=1e-6)
        self.pred = operations.Linear(dim, config.channels)

    @property
    def dtype(self) -> torch.dtype:
        return self.encoder_pos_embed_learned.dtype

    def places(self, cells: Tensor) -> Places:
        """Positions of the cells numbered cells [R, G] (int64)."""
        tables = self.encoder_pos_embed_learned, self.decoder_pos_embed_learned
        shape = self.config.cells, self.config.cell
        places = cell_order(self.config.side, cells.device).view(shape)[cells].flatten(1)
        angles = grid_angles(places, GRID, self.config.dim // self.config.heads)
        encoder, decoder = (table.to(cells.device).view(*shape, -1)[cells] for table in tables)
        return Places(encoder, decoder, Rotation(angles.cos(), angles.sin()))

    def times(self, times: Iterable[float], device: torch.device | str) -> Tensor:
        """Embeddings [T, D] of times between 0 and 1."""
        steps = (torch.tensor(list(times), device=device, dtype=torch.float32) * TRAINING_STEPS).long()
        return self.time_embed(steps, self.dtype)

    def forward(
        self,
        tokens: Tensor,
        condition: Tensor,
        places: Places,
        past: KeysValues | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Velocity [R, G, N, C] of the cells tokens [R, G, N, C], given conditions [R, G, D], and their keys and
        values.

        Tokens attend to ``past`` (n tokens) and all G cells, except where mask [R or 1, 1, 1 or G * N, n + G * N]
        (bool) is false. A condition is the sum of class and time embedding.
        """
        own = []

        def through(blocks: nn.ModuleList, x: Tensor) -> Tensor:
            for block in blocks:
                x, pair = block(x, condition, places.rotation, None if past is None else past[len(own)], mask)
                own.append(pair)
            return x

        x = self.z_proj_ln(self.z_proj(tokens.to(self.dtype)) + places.encoder)
        x = self.encoder_norm(through(self.encoder_blocks, x))
        x = through(self.decoder_blocks, self.decoder_embed(x) + places.decoder)
        return self.pred(self.decoder_norm(x)), own

    def read(self, cells: Tensor, classes: Tensor) -> KeysValues:
        """Keys and values of the first G cells, clean: cells [R, G, N, C] with class embeddings [R, D].

        A cell attends to itself and those before it, so its keys and values do not depend on later ones.
        """
        index = torch.arange(cells.shape[1], device=cells.device)
        sees = (index[:, None] >= index).repeat_interleave(cells.shape[2], 0).repeat_interleave(cells.shape[2], 1)
        condition = (classes + self.times([0], cells.device))[:, None].expand(-1, len(index), -1)
        return self(cells, condition, self.places(index[None]), mask=sees[None, None])[1]

    def denoise(
        self,
        cells: Tensor,
        classes: Tensor,
        past: KeysValues | None,
        mask: Tensor | None,
        cfg: Tensor,
        temperature: float,
        noise0: Tensor,
        noise_t: Tensor,
        schedule: Flow,
        graphs: Graphs | None = None,
    ) -> Endpoint:
        """One cell per row, number cells [R], from noise0 [R, N, C] along noise_t [T, R, N, C] (the last is unused).

        classes [R, D]: class embeddings; [2R, D], conditional rows first, with guidance, whose scales are cfg
        [R, N, 1]: the velocity is u + cfg (c - u). past, mask: as many rows as classes. The path of the endpoint is 0,
        because the widths of the steps do not depend on the model; a flow without noise has nominal widths. graphs:
        capture the steps.
        """
        places = self.places(cells.repeat(len(classes) // len(cells))[:, None])
        times = self.times(schedule.times[:-1], cells.device).unbind()
        numbers = schedule.numbers(temperature, cells.device).unbind()
        x = noise0.float()
        still = torch.zeros_like(x)
        state = CellDenoising(x, classes, places, past, mask, cfg, times[0], still, numbers[0])
        for time, added, of_step in zip(times, (still, *noise_t[:-1].float()), numbers, strict=True):
            state = replace(state, time=time, noise=added, numbers=of_step)
            settings = self, schedule.kind, past is None
            state = captured_step(graphs, settings, partial(self.step, schedule.kind), state)
        x = state.mean.clone()
        width = schedule.last_width * (temperature if schedule.kind == "ddpm" else 1)
        return Endpoint(x, torch.full_like(x, math.log(width) if width > 0 else -math.inf), x.new_zeros(x.shape[:-1]))

    def step(self, kind: str, state: CellDenoising) -> CellDenoising:
        """One denoising step, of a Flow of this kind."""
        numbers, x = FlowNumbers(*state.numbers.unbind()), state.mean
        if kind == "ddpm":
            x = x + numbers.width * state.noise
        branches = len(state.classes) // len(x)
        rows = x.repeat(branches, 1, 1)[:, None]
        velocity = self(rows, (state.classes + state.time)[:, None], state.places, state.past, state.mask)[0]
        velocity = velocity[:, 0].float()
        if branches == 2:
            velocity, unguided = velocity.chunk(2)
            velocity = unguided + state.cfg * (velocity - unguided)
        return replace(state, mean=numbers.mean(kind, x, velocity))


def cell_order(side: int, device: torch.device | str = "cpu") -> Tensor:
    """Raster positions [GRID * GRID] (int64) in cell order, with cells of side * side tokens: row by row of cells."""
    count = GRID // side
    raster = torch.arange(GRID * GRID, device=device)
    return rearrange(raster, "(row y col x) -> (row col y x)", y=side, col=count, x=side)
