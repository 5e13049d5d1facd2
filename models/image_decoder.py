"""Latents <-> pixels in ComfyUI's convention (pixels [B, H, W, 3] in 0..1)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..limits.limits import LEVELS, bounded_int
from ..model_loaders.files.checkpoint import Checkpoint
from ..model_loaders.files.names import count_modules
from ..model_loaders.files.weights import Weights, load_weights
from .networks.vq import nearest_codes

A = TypeVar("A", bound="Autoencoder")
RESIZE = "Scale it (Upscale Image) or change its padding before VAE Encode."


def encoder_sizes(tensors: Mapping[str, Tensor], levels: str, blocks: str) -> tuple[int, tuple[int, ...], int]:
    """Base channels of an encoder, multiples of them by level, and residual blocks of a level, by its tensors' shapes.

    levels, blocks: names of the lists of levels and of a level's blocks. Raises KeyError or ValueError if they are
    missing.
    """
    root = f"encoder.{levels}."
    base = len(tensors["encoder.conv_in.weight"])
    depth = count_modules(tensors, re.escape(root), LEVELS)
    widths = [len(tensors[f"{root}{level}.{blocks}.0.conv1.weight"]) for level in range(depth)]
    return (
        base,
        tuple(width // base for width in widths),
        count_modules(tensors, rf"{re.escape(root)}0\.{blocks}\.", LEVELS),
    )


def planar(x: Tensor) -> Tensor:
    """A copy of [B, C, H, W] that lies in memory in this order.

    In channels_last, the order of ComfyUI's images, a group norm on a CPU takes E[x^2] - E[x]^2 for the variance, which
    leaves no digits of an even surface.
    """
    return x.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Autoencoder:
    """factor: pixels per token side. channels: of a latent. name: of its file.

    margin: tokens repeated around an image before decoding; their pixels are cropped. Some decoders produce a bright
    spike in a corner, which affects their group norms; a file requests a margin in its metadata.
    """

    module: Any
    factor: int
    channels: int
    name: str
    margin: int = 0

    @classmethod
    def load(
        cls: type[A],
        module: nn.Module,
        factor: int,
        channels: int,
        tensors: Weights,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
    ) -> A:
        """A decoder with a module on the meta device, filled with tensors of a checkpoint; see load_weights."""
        load_weights(module, tensors, checkpoint, dtype).to(memory_format=torch.contiguous_format)
        margin = bounded_int("margin", checkpoint.metadata.get("margin", 0), 0, 64)
        return cls(module, factor, channels, checkpoint.path.name, margin)

    @property
    def codes(self) -> int:
        """Number of codes; 0: latents are continuous."""
        return 0

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    @torch.inference_mode()
    def decode(self, latent: Tensor) -> Tensor:
        """Latents [B, C, h, w] -> pixels [B, H, W, 3] (fp32) in 0..1. Raises TypeError for no tensor, ValueError for
        another shape."""
        if not isinstance(latent, Tensor):
            raise TypeError(f"latent is {latent!r:.60}, but must be a tensor, as that of sample() is.")
        if latent.ndim != 4 or latent.shape[1] != self.channels:
            raise ValueError(
                f"latent has the shape {list(latent.shape)}, but must be [images, {self.channels}, rows, columns], as "
                "that of sample() is."
            )
        latent = F.pad(planar(latent.to(self.device, self.dtype)), (self.margin,) * 4, mode="replicate")
        pixels = self.module.decode(latent)
        cut = self.margin * self.factor
        pixels = pixels[..., cut : pixels.shape[-2] - cut, cut : pixels.shape[-1] - cut]
        return rearrange(pixels.float() / 2 + 0.5, "b c h w -> b h w c").clamp(0, 1)

    def planes(self, pixels: Tensor) -> Tensor:
        """Pixels [B, H, W, 3] in 0..1 -> [B, 3, H, W] in [-1, 1], on the module's device.

        Raises ValueError unless H and W are multiples of factor.
        """
        height, width = pixels.shape[1:3]
        if height % self.factor or width % self.factor:
            raise ValueError(
                f"The image is {width} x {height}, but both sides must be multiples of {self.factor} pixels. {RESIZE}"
            )
        return planar((rearrange(pixels[..., :3].float(), "b h w c -> b c h w") * 2 - 1).to(self.device, self.dtype))

    def encode_latent(self, pixels: Tensor) -> Tensor:
        """The latent [B, C, h, w] of pixels [B, H, W, 3] in 0..1."""
        raise NotImplementedError


class ImageDecoder(Autoencoder):
    """A VQ tokenizer: latents are code vectors."""

    @property
    def codebook(self) -> Tensor:
        """Code vectors [V, C], normalised as the decoder expects them."""
        return self.module.codebook()

    @property
    def codes(self) -> int:
        return len(self.codebook)

    @torch.inference_mode()
    def dequantize(self, tokens: Tensor) -> Tensor:
        """Tokens [B, h, w] -> code vectors [B, C, h, w]."""
        return self.module.dequantize(tokens.to(self.device))

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels [B, H, W, 3] in 0..1 -> tokens [B, h, w]. Raises ValueError unless H and W are multiples of factor."""
        return self.module.encode(self.planes(pixels))

    def tokens_of(self, vectors: Tensor) -> Tensor:
        """Code vectors [B, C, h, w] -> tokens [B, h, w] (int64, CPU)."""
        return nearest_codes(vectors.cpu(), self.codebook.detach().cpu())

    def encode_latent(self, pixels: Tensor) -> Tensor:
        """Pixels [B, H, W, 3] in 0..1 -> code vectors [B, C, h, w] of its tokens."""
        return self.dequantize(self.encode(pixels))


class LatentDecoder(Autoencoder):
    """A KL autoencoder. Latents are in its units; a model's tokens are latents times the model's scale."""

    @torch.inference_mode()
    def encode_latent(self, pixels: Tensor) -> Tensor:
        """Pixels [B, H, W, 3] in 0..1 -> the mean latent [B, C, h, w] (fp32).

        Raises ValueError unless H and W are multiples of factor.
        """
        return self.module.encode_moments(self.planes(pixels))[0].float()
