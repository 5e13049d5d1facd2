"""The KL-regularised autoencoder of latent diffusion (Rombach et al., 2022, arXiv:2112.10752), the tokenizer of MAR
(KL-16, 16 channels at a sixteenth of the resolution) and of models built like it.

Parameter names follow the published files. Level 0 is the full resolution in ``down`` and in ``up``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from . import vq
from .vq import AttentionBlock, Downsample, ResBlock, Upsample, normalisation


@dataclass(frozen=True)
class KLConfig:
    """Sizes of a model; the defaults are KL-16. Everything here can be read from tensor names and shapes.

    encoder_attention, decoder_attention: is there attention after every residual block of the deepest level.
    middle_attention: and between the two of the middle.
    """

    channels: int = 16
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    base_channels: int = 128
    num_res_blocks: int = 2
    encoder_attention: bool = True
    decoder_attention: bool = False
    middle_attention: bool = True

    @property
    def factor(self) -> int:
        """Pixels per token along each side."""
        return 2 ** (len(self.ch_mult) - 1)

    @property
    def widths(self) -> list[int]:
        """Channels of every level."""
        return [self.base_channels * m for m in self.ch_mult]


class Level(vq.Level):
    """A level in the names of these files."""

    name = "block"


class Middle(nn.Module):
    """Residual block, attention if asked, residual block at the deepest resolution."""

    def __init__(self, channels: int, attention: bool, operations):
        super().__init__()
        self.block_1 = ResBlock(channels, channels, operations)
        self.attn_1 = AttentionBlock(channels, operations) if attention else nn.Identity()
        self.block_2 = ResBlock(channels, channels, operations)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    """Pixels [B, 3, H, W] -> moments before their 1x1 convolution [B, 2C, h, w]."""

    def __init__(self, config: KLConfig, operations):
        super().__init__()
        widths, last = config.widths, len(config.ch_mult) - 1
        self.conv_in = operations.Conv2d(3, config.base_channels, 3, padding=1)
        self.down = nn.ModuleList()
        for i, (before, after) in enumerate(zip([config.base_channels, *widths], widths, strict=False)):
            attention = config.encoder_attention and i == last
            level = Level(before, after, config.num_res_blocks, attention, operations)
            if i < last:
                level.downsample = Downsample(after, operations)
            self.down.append(level)
        self.mid = Middle(widths[-1], config.middle_attention, operations)
        self.norm_out = normalisation(widths[-1], operations)
        self.conv_out = operations.Conv2d(widths[-1], 2 * config.channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """Latent after its 1x1 convolution [B, C, h, w] -> pixels [B, 3, H, W]."""

    def __init__(self, config: KLConfig, operations):
        super().__init__()
        widths, last = config.widths, len(config.ch_mult) - 1
        self.conv_in = operations.Conv2d(config.channels, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1], config.middle_attention, operations)
        self.up = nn.ModuleList()
        for i, (before, after) in enumerate(zip([*widths[1:], widths[-1]], widths, strict=True)):
            attention = config.decoder_attention and i == last
            level = Level(before, after, config.num_res_blocks + 1, attention, operations)
            if i > 0:
                level.upsample = Upsample(after, operations)
            self.up.append(level)
        self.norm_out = normalisation(widths[0], operations)
        self.conv_out = operations.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class KLModel(nn.Module):
    """Pixels to latents and back. ``operations`` supplies Conv2d and GroupNorm (``torch.nn`` or a compatible class)."""

    def __init__(self, config: KLConfig, operations=nn):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config, operations)
        self.decoder = Decoder(config, operations)
        self.quant_conv = operations.Conv2d(2 * config.channels, 2 * config.channels, 1)
        self.post_quant_conv = operations.Conv2d(config.channels, config.channels, 1)

    def encode_moments(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W] in [-1, 1] -> mean and log variance [B, C, h, w] of the latent's normal distribution.

        Raises ValueError unless H and W are multiples of the factor.
        """
        height, width = pixels.shape[-2:]
        if height % self.config.factor or width % self.config.factor:
            raise ValueError(f"{width} x {height} pixels: both sides must be multiples of {self.config.factor}")
        mean, log_variance = self.quant_conv(self.encoder(pixels)).chunk(2, dim=1)
        return mean, log_variance.clamp(-30.0, 20.0)

    def decode(self, latent: Tensor) -> Tensor:
        """[B, C, h, w] in the dtype of the weights -> [B, 3, H, W], about [-1, 1], not clamped."""
        return self.decoder(self.post_quant_conv(latent))
