"""NVIDIA's Cosmos tokenizer for discrete video, 8 x 16 x 16 (arXiv:2501.03575), for a video of one frame.

The original pads time with copies of the first frame, so for a single frame every filter over time sees three equal
frames and is the 1 x 1 filter of its summed weights. Attention over time has one frame and returns its values. The
wavelet bands of differences in time are zero. The result is this two-dimensional network, equal to the original.
Parameter names are those of the published files, without the names of their wrappers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from . import vq

PATCH = 4  # pixels that two wavelet steps fold into channels, along each side


@dataclass(frozen=True)
class CosmosConfig:
    """Sizes of a tokenizer; the defaults are the released ones. Everything here can be read from tensor shapes.

    levels: steps per channel of a code, as in finite scalar quantisation (arXiv:2309.15505). widths: channels per
    resolution, the finest first. stem: channels that the encoder starts with. num_res_blocks: of a resolution of the
    encoder; the decoder has one more.
    """

    levels: tuple[int, ...] = (8, 8, 8, 5, 5, 5)
    widths: tuple[int, ...] = (256, 512, 512)
    stem: int = 128
    z_channels: int = 16
    num_res_blocks: int = 2

    @property
    def factor(self) -> int:
        """Pixels per token along each side."""
        return PATCH * 2 ** (len(self.widths) - 1)

    @property
    def codebook_size(self) -> int:
        return prod(self.levels)

    @property
    def base_channels(self) -> int:
        """Channels of the widest maps, had they as many numbers at full resolution."""
        return max(self.widths) // PATCH**2


def norm(channels: int, operations) -> nn.Module:
    """A group norm over all channels together."""
    return operations.GroupNorm(1, channels, eps=1e-6, affine=True)


def space_and_time(channels_in: int, channels_out: int, operations) -> nn.Sequential:
    """A filter in space, then one in time."""
    return nn.Sequential(
        operations.Conv2d(channels_in, channels_out, 3, padding=1), operations.Conv2d(channels_out, channels_out, 1)
    )


class ResBlock(vq.ResBlock):
    """vq.ResBlock with filters in pairs and norms over one group."""

    def __init__(self, channels_in: int, channels_out: int, operations):
        super().__init__(channels_in, channels_out, operations)
        self.norm1, self.norm2 = norm(channels_in, operations), norm(channels_out, operations)
        self.conv1 = space_and_time(channels_in, channels_out, operations)
        self.conv2 = space_and_time(channels_out, channels_out, operations)


class SpaceAttention(vq.AttentionBlock):
    def __init__(self, channels: int, operations):
        super().__init__(channels, operations)
        self.norm = norm(channels, operations)


class TimeAttention(nn.Module):
    """Attention over time with a single frame: the projected values."""

    def __init__(self, channels: int, operations):
        super().__init__()
        self.norm = norm(channels, operations)
        self.v, self.proj_out = (operations.Conv2d(channels, channels, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj_out(self.v(self.norm(x)))


class Middle(nn.Module):
    def __init__(self, channels: int, operations):
        super().__init__()
        self.block_1 = ResBlock(channels, channels, operations)
        self.attn_1 = nn.Sequential(SpaceAttention(channels, operations), TimeAttention(channels, operations))
        self.block_2 = ResBlock(channels, channels, operations)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Downsample(nn.Module):
    """Halves the resolution. conv2 exists where the original also halves time."""

    def __init__(self, channels: int, in_time: bool, operations):
        super().__init__()
        self.conv1 = operations.Conv2d(channels, channels, 3, stride=2)
        self.conv2 = operations.Conv2d(channels, channels, 1) if in_time else None
        self.conv3 = operations.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(F.pad(x, (0, 1, 0, 1))) + F.avg_pool2d(x, 2)
        return self.conv3(x if self.conv2 is None else x + self.conv2(x))


class Upsample(nn.Module):
    """Doubles the resolution. conv1 exists where the original also doubles time."""

    def __init__(self, channels: int, in_time: bool, operations):
        super().__init__()
        self.conv1 = operations.Conv2d(channels, channels, 1) if in_time else None
        self.conv2 = operations.Conv2d(channels, channels, 3, padding=1)
        self.conv3 = operations.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.conv1 is None else x + self.conv1(x)
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv3(x + self.conv2(x))


class Level(vq.Level):
    """A level of these residual blocks, under their name in the files, without attention."""

    residual, name = ResBlock, "block"

    def __init__(self, channels_in: int, channels_out: int, blocks: int, operations):
        super().__init__(channels_in, channels_out, blocks, False, operations)


class Encoder(nn.Module):
    def __init__(self, config: CosmosConfig, operations):
        super().__init__()
        self.conv_in = space_and_time(3 * PATCH**3, config.stem, operations)
        self.down = nn.ModuleList()
        for before, after in pairwise((config.stem, *config.widths)):
            self.down.append(Level(before, after, config.num_res_blocks, operations))
        for i, width in enumerate(config.widths[:-1]):
            self.down[i].downsample = Downsample(width, i == 0, operations)
        self.mid = Middle(config.widths[-1], operations)
        self.norm_out = norm(config.widths[-1], operations)
        self.conv_out = space_and_time(config.widths[-1], config.z_channels, operations)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.conv_in(fold(fold(pixels)))
        for level in (*self.down, self.mid):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    """Level 0 of ``up`` is the finest resolution, and the last to run."""

    def __init__(self, config: CosmosConfig, operations):
        super().__init__()
        deepest = len(config.widths) - 1
        self.conv_in = space_and_time(config.z_channels, config.widths[-1], operations)
        self.mid = Middle(config.widths[-1], operations)
        self.up = nn.ModuleList()
        for before, after in pairwise((*config.widths, config.widths[-1])):
            self.up.append(Level(after, before, config.num_res_blocks + 1, operations))
        for i in range(1, deepest + 1):
            self.up[i].upsample = Upsample(config.widths[i], i == deepest - 1, operations)
        self.norm_out = norm(config.widths[0], operations)
        self.conv_out = space_and_time(config.widths[0], 3 * PATCH**3, operations)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        for level in (self.mid, *reversed(self.up)):
            x = level(x)
        return unfold(unfold(self.conv_out(F.silu(self.norm_out(x)))))


def fold(x: Tensor) -> Tensor:
    """One step of the Haar wavelet over two equal frames [B, C, H, W] -> bands [B, 8C, H/2, W/2].

    The bands' order is that of three binary digits: sum or difference in time (zero here), in height, in width.
    """
    x = rearrange(x, "b c (h i) (w j) -> i j b c h w", i=2, j=2)
    top, bottom = x[0], x[1]
    rows = top + bottom, top - bottom
    bands = torch.cat([band for left, right in rows for band in (left + right, left - right)], dim=1) / 4
    return torch.cat((bands, torch.zeros_like(bands)), dim=1)


def unfold(bands: Tensor) -> Tensor:
    """The inverse step: of bands [B, 8C, H, W], the later of the two frames [B, C, 2H, 2W]."""
    low, high = bands.chunk(2, dim=1)
    (ll, lh), (hl, hh) = (half.chunk(2, dim=1) for half in (low - high).chunk(2, dim=1))
    top, bottom = (ll + hl, lh + hh), (ll - hl, lh - hh)
    x = torch.stack([pixel for even, odd in (top, bottom) for pixel in (even + odd, even - odd)])
    return rearrange(x, "(i j) b c h w -> b c (h i) (w j)", i=2)


class Cosmos(nn.Module):
    """Pixels to tokens and back. ``operations`` supplies Conv2d and GroupNorm (``torch.nn`` or a compatible class).

    no_encoder: the reason why the model has no encoder; empty if it has one.
    """

    def __init__(self, config: CosmosConfig, operations=nn, no_encoder: str = ""):
        super().__init__()
        self.config, self.no_encoder = config, no_encoder
        channels = len(config.levels)
        if not no_encoder:
            self.encoder = Encoder(config, operations)
            self.quant_conv = operations.Conv2d(config.z_channels, channels, 1)
        self.post_quant_conv = operations.Conv2d(channels, config.z_channels, 1)
        self.decoder = Decoder(config, operations)

    def codebook(self) -> Tensor:
        """[V, C] fp32 code vectors, in steps between -1 and 1."""
        return self._codes(torch.arange(self.config.codebook_size, device=self.post_quant_conv.weight.device))

    def _codes(self, tokens: Tensor) -> Tensor:
        """Code vectors [..., C] (fp32) of tokens [...]: their digits, the first one running fastest."""
        levels, weights = self._digits(tokens.device)
        half = levels // 2
        return (tokens[..., None] // weights % levels - half) / half

    def _digits(self, device: torch.device) -> tuple[Tensor, Tensor]:
        levels = self.config.levels
        weights = accumulate((1, *levels[:-1]), int.__mul__)
        return torch.tensor(levels, device=device), torch.tensor(list(weights), device=device)

    def dequantize(self, tokens: Tensor) -> Tensor:
        """[B, h, w] int64 -> [B, C, h, w] fp32 code vectors."""
        return self._codes(tokens).movedim(-1, 1).contiguous()

    def decode(self, latent: Tensor) -> Tensor:
        """[B, C, h, w] in the dtype of the weights -> [B, 3, H, W], about [-1, 1], not clamped."""
        return self.decoder(self.post_quant_conv(latent))

    def encode_latent(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] in [-1, 1] -> [B, C, h, w] before quantisation; H and W are multiples of the factor.

        Raises ValueError if there is no encoder.
        """
        if self.no_encoder:
            raise ValueError(self.no_encoder)
        return self.quant_conv(self.encoder(pixels))

    def quantize_latent(self, latent: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, h, w] int64: each channel is bounded to its range and rounded to a level."""
        levels, weights = self._digits(latent.device)
        half = (levels - 1) * (1 + 1e-3) / 2
        offset = torch.where(levels % 2 == 0, 0.5, 0.0)
        steps = (latent.float().movedim(1, -1) + (offset / half).atanh()).tanh() * half - offset
        return ((steps.round().long() + levels // 2) * weights).sum(-1)

    def encode(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] in [-1, 1] -> tokens [B, h, w] int64. Raises ValueError if there is no encoder."""
        return self.quantize_latent(self.encode_latent(pixels))
