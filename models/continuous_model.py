"""A masked model of continuous tokens as samplers see it: prompt features and known tokens in, distributions of the
other tokens out.

It joins a transformer, a diffusion head and a prompt encoder; families differ in what they pass here and in ``start``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from einops import rearrange
from torch import Tensor, nn

from ..device.continuous_steps import Graphs, captured_pass, padded_tokens
from ..limits.limits import SIDE, bounded_int
from ..samplers.continuous_contract import ContinuousCallback, ContinuousParams, ContinuousRequest, masked_guidance
from ..samplers.continuous_distributions import Normal
from ..samplers.contract import check_both, check_grids, chosen_params
from .networks.diffusion_head import DiffusionHead, NoiseSchedule
from .networks.mar import MAR, PositionTables
from .sizes import check_grid
from .text.prompt_encoders import PromptEncoder
from .text.prompts import Conditioning, Prompted


@dataclass
class MaskedState:
    """Encoded prompts of all rows (branches * B, conditional first), and position tables.

    prompts: for MAR slot vectors [branches * B, slots, D]. graphs: see ContinuousModel.start.
    """

    prompts: Any
    branches: int
    positions: PositionTables
    graphs: Graphs | None


class ContinuousBase(Prompted):
    """Base class of continuous models: prompts, units, and the attributes that samplers and nodes read.

    grid: the (rows, cols) the model was trained on. scale: factor that gives latents of its VAE unit variance.
    ``device``: the compute device, set by ComfyUI's model management. A smaller model of the family can be the drafter
    of a larger one.
    """

    continuous, any_grid = True, False
    tokens = "vectors"  # what it samples, in words
    group = 1
    order: Tensor | None = None
    codebook = image_decoder = None  # tokens are vectors, and files contain no decoder

    def __init__(
        self,
        family: str,
        grid: tuple[int, int],
        channels: int,
        scale: float,
        defaults: ContinuousParams,
        prompt_encoder: PromptEncoder,
        pixels_per_token: int = 16,
    ):
        super().__init__()
        if not (isinstance(scale, int | float) and 0 < scale < math.inf):
            raise ValueError(f"The scale of latents is {scale!r}, but must be a positive number.")
        self.family, self.grid, self.grids, self.scale = family, grid, (grid,), scale
        self.channels = self.latent_channels = channels
        defaults.check()  # a file may name them
        self.defaults, self.prompt_encoder = defaults, prompt_encoder
        self.pixels_per_token = bounded_int("pixels_per_token", pixels_per_token, 1, SIDE)
        self.dtype = torch.float32
        self.sessions: dict[Hashable, Any] = {}

    def request(
        self,
        conditioning: Conditioning,
        negative: Conditioning | None = None,
        *,
        seed: int = 0,
        batch: int = 1,
        grid: tuple[int, int] | None = None,
        tokens: Tensor | None = None,
        kept: Tensor | None = None,
        callback: ContinuousCallback | None = None,
        **params: Any,
    ) -> ContinuousRequest:
        """The request for a sampling method, with the prompts encoded.

        kept [B, rows, cols] (bool): keep mask for ``tokens`` [B, rows, cols, C]. params: fields of ContinuousParams;
        None: the model's default. Raises ValueError for unsupported values.
        """
        grid = check_grid(self, *(grid or ()))
        check_grids((batch, *grid), kept=kept)
        check_grids((batch, *grid, self.channels), tokens=tokens)
        check_both(tokens, kept)
        asked = chosen_params(self.defaults, params, "continuous models")
        positive = self.unpack_prompt(conditioning, batch, "positive")
        other = self.unpack_prompt(negative, batch, "negative")
        notices = self.notices(conditioning, negative, asked.cfg, self.defaults.cfg, grid)
        tokens, kept = tokens if tokens is None else tokens.flatten(1, -2), kept if kept is None else kept.flatten(1)
        return ContinuousRequest(self, positive, grid, asked, other, seed, batch, callback, tokens, kept, notices)

    @property
    def module(self) -> nn.Module:
        """The module that model management moves, as for every drafter."""
        return self

    @property
    def prompt_kind(self) -> str:
        """Description of the prompts that the model reads."""
        return "text"

    @property
    def cells(self) -> str:
        """Description of the generation order."""
        return "any" if self.order is None else f"cells of {self.group} tokens"

    @overload
    def features(self, conditioning: Conditioning, batch: int, name: Literal["positive"]) -> Tensor: ...

    @overload
    def features(self, conditioning: Conditioning | None, batch: int, name: str) -> Tensor | None: ...

    def features(self, conditioning: Conditioning | None, batch: int, name: str) -> Tensor | None:
        """Features [batch, n, F] of a CONDITIONING; None for no negative prompt. Raises ValueError for one of another
        model."""
        prompt = self.unpack_prompt(conditioning, batch, name)
        return None if prompt is None else prompt.features.expand(batch, -1, -1)

    def to_latent(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Latents [B, C, h, w] of the VAE (fp32) for tokens [B, S, C]."""
        return rearrange(tokens.float(), "b (h w) c -> b c h w", h=grid[0]) / self.scale

    def from_latent(self, latent: Tensor) -> Tensor:
        """Tokens [B, S, C] for latents [B, C, h, w] of the VAE."""
        return rearrange(latent.float(), "b c h w -> b (h w) c") * self.scale


class MaskedModel(ContinuousBase):
    """MAR, implementing the ContinuousModel protocol of samplers/continuous_contract.py."""

    def __init__(
        self,
        backbone: MAR,
        head: DiffusionHead,
        family: str,
        scale: float,
        defaults: ContinuousParams,
        prompt_encoder: PromptEncoder,
        pixels_per_token: int = 16,
    ):
        config = backbone.config
        super().__init__(
            family, (config.rows, config.cols), config.channels, scale, defaults, prompt_encoder, pixels_per_token
        )
        self.backbone, self.head = backbone, head

    @property
    def prompt_kind(self) -> str:
        config = self.backbone.config
        return f"captions of {config.conditions} numbers a word" if config.captions else f"{config.conditions} classes"

    def schedule(self, params: ContinuousParams) -> NoiseSchedule:
        """The denoising schedule. Raises ValueError for an invalid number of steps or kind."""
        return NoiseSchedule.cosine(params.steps, params.kind, self.device, self.head.first)

    def guidance(self, params: ContinuousParams, before: Tensor, after: Tensor, length: int) -> Tensor:
        """Guidance scale (fp32) of tokens sampled when ``before`` of ``length`` are known (see masked_guidance)."""
        return masked_guidance(params, before, after, length)

    def start(
        self,
        conditioning: Conditioning,
        negative: Conditioning | None,
        batch: int,
        grid: tuple[int, int],
        guided: bool,
        graphs: Graphs | None = None,
    ) -> MaskedState:
        """Slot vectors of both guidance branches; without ``negative``, the second is unconditional."""
        prompts = [self.backbone.prompt(self.features(conditioning, batch, "positive"))]
        if guided:
            other = self.features(negative, batch, "negative")
            prompts.append(self.backbone.unconditional(batch) if other is None else self.backbone.prompt(other))
        prompts = torch.cat([p.to(self.dtype) for p in prompts])
        return MaskedState(prompts, len(prompts) // batch, self.backbone.positions(*grid), graphs)

    def condition_vectors(self, state: MaskedState, tokens: Tensor, known: Tensor, seen: int) -> Tensor:
        """z [branches, B, V, S, D] for tokens [B, S, C] with the known masks [B, V, S] (bool)."""
        if state.graphs is not None:
            seen = padded_tokens(seen, known.shape[-1])
        shape = state.branches, *known.shape
        fixed = replace(state, prompts=None, graphs=None)  # what a graph keeps

        def condition_vectors(prompts: Any, tokens: Tensor, known: Tensor) -> Tensor:
            rows = tokens[None, :, None].expand(*shape, -1).flatten(0, 2)
            z = self.transform(replace(fixed, prompts=prompts), rows, known.expand(shape).flatten(0, 2), seen)
            return z.unflatten(0, shape[:3])

        return captured_pass(
            state.graphs,
            (self, seen),
            condition_vectors,
            (state.prompts, tokens, known),
            (*shape, self.backbone.config.dim),
            self.dtype,
            tokens.device,
        )

    def transform(self, state: MaskedState, tokens: Tensor, known: Tensor, seen: int) -> Tensor:
        """z [R, S, D] for rows of tokens [R, S, C], R = branches * B * V."""
        prompts = state.prompts.repeat_interleave(len(tokens) // len(state.prompts), dim=0)
        return self.backbone(prompts, tokens, known, seen, state.positions)

    def predict(
        self,
        state: MaskedState,
        tokens: Tensor,
        known: Tensor,
        query: Tensor,
        seen: int,
        cfg: Tensor,
        temperature: float,
        noise0: Tensor,
        noise_t: Tensor,
        schedule: NoiseSchedule,
    ) -> Normal:
        """The distribution of the tokens at query [B, V, M] (see ContinuousModel): where the head's denoising ends."""
        z = self.condition_vectors(state, tokens, known, seen)
        index = query[None, ..., None].expand(len(z), *query.shape, z.shape[-1])
        z = z.gather(3, index).flatten(1, 3)
        end = self.head.denoise(
            z[0],
            z[1] if len(z) > 1 else None,
            cfg.flatten(),
            temperature,
            noise0.flatten(0, 2),
            noise_t.flatten(1, 3),
            schedule,
            state.graphs,
        )
        if schedule.kind == "ddim":  # it has no noise and no variances: the acceptance test uses the nominal ones
            end = end._replace(
                log_std=torch.full_like(end.mean, math.log(schedule.last_width)), path=torch.zeros_like(end.path)
            )
        return Normal(*(part.unflatten(0, query.shape) for part in end))

    def run_bytes(self, rows: int, tokens: int, draws: int) -> int:
        """Rough bytes of activations of a pass over rows of ``tokens`` tokens that samples ``draws`` of them."""
        config = self.backbone.config
        transformer = rows * (tokens + config.slots) * config.dim * 12
        head = rows * draws * self.head.net.input_proj.out_features * 8
        return transformer * self.dtype.itemsize + head * self.head.dtype.itemsize
