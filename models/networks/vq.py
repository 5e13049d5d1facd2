"""The VQGAN image tokenizer (Esser et al., arXiv:2012.09841) as LlamaGen (arXiv:2406.06525, section 2.1) and Chameleon
(arXiv:2405.09818) use it, shared by every family with one of their tokenizers.

Parameter names follow the published LlamaGen files. Level 0 of the encoder is the full resolution; block 0 of the
decoder is the deepest level.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROWS, _PAIRS = 1024, 2**25  # the most vectors, and pairs of vector and code, compared at once: 128 MiB of distances


class Levels:
    """Sizes of an autoencoder with a level for every resolution, the full one first.

    ``ch_mult`` holds one multiple of the base channels per level, so the image is ``2 ** (len(ch_mult) - 1)`` times the
    grid.
    """

    ch_mult: tuple[int, ...]
    base_channels: int

    @property
    def factor(self) -> int:
        """Pixels per token along each side."""
        return 2 ** (len(self.ch_mult) - 1)

    @property
    def widths(self) -> list[int]:
        """Channels of every level."""
        return [self.base_channels * multiple for multiple in self.ch_mult]


@dataclass(frozen=True)
class VQConfig(Levels):
    """Sizes of a tokenizer; the defaults are VQ-16. Everything here can be read from tensor shapes.

    attention: is there attention after each block of the deepest level, as in LlamaGen. unit_codes: are code vectors
    normalised to length 1 whenever they are used, as in LlamaGen. by_product: does a pixel's vector become the code of
    the largest dot product, as in IBQ (arXiv:2412.02692), not the nearest one.
    """

    codebook_size: int = 16384
    codebook_dim: int = 8
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    base_channels: int = 128
    z_channels: int = 256
    num_res_blocks: int = 2
    attention: bool = True
    unit_codes: bool = True
    by_product: bool = False


def normalisation(channels: int, operations) -> nn.Module:
    """The group norm of every block of these autoencoders."""
    return operations.GroupNorm(32, channels, eps=1e-6, affine=True)


class ResBlock(nn.Module):
    """Two normalised 3x3 convolutions with a residual connection."""

    def __init__(self, channels_in: int, channels_out: int, operations) -> None:
        super().__init__()
        self.norm1 = normalisation(channels_in, operations)
        self.conv1 = operations.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm2 = normalisation(channels_out, operations)
        self.conv2 = operations.Conv2d(channels_out, channels_out, 3, padding=1)
        self.nin_shortcut = operations.Conv2d(channels_in, channels_out, 1) if channels_in != channels_out else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return (x if self.nin_shortcut is None else self.nin_shortcut(x)) + h


class AttentionBlock(nn.Module):
    """Single-head self-attention over all positions of the feature map."""

    def __init__(self, channels: int, operations) -> None:
        super().__init__()
        self.norm = normalisation(channels, operations)
        self.q, self.k, self.v, self.proj_out = (operations.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q, k, v = (layer(n).flatten(2).transpose(1, 2).unsqueeze(1) for layer in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v).squeeze(1)
        return x + self.proj_out(h.transpose(1, 2).reshape(x.shape))


class Downsample(nn.Module):
    """Halves the resolution; the padding is one-sided (right and bottom)."""

    def __init__(self, channels: int, operations) -> None:
        super().__init__()
        self.conv = operations.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Doubles the resolution by nearest neighbour, then smooths."""

    def __init__(self, channels: int, operations) -> None:
        super().__init__()
        self.conv = operations.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """Residual blocks of one resolution, attention after each where asked, then a change of resolution.

    Autoencoders of this kind differ in their residual blocks, and in what their files call them.
    """

    residual: type[nn.Module] = ResBlock
    name = "res"

    def __init__(self, channels_in: int, channels_out: int, blocks: int, attention: bool, operations) -> None:
        super().__init__()
        widths = [channels_in, *[channels_out] * (blocks - 1)]
        self.add_module(self.name, nn.ModuleList(self.residual(width, channels_out, operations) for width in widths))
        self.attn = nn.ModuleList(AttentionBlock(channels_out, operations) for _ in range(blocks if attention else 0))
        self.downsample: nn.Module | None = None
        self.upsample: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.get_submodule(self.name)):
            x = block(x)
            if len(self.attn) > 0:
                x = self.attn[i](x)
        for resample in (self.downsample, self.upsample):
            if resample is not None:
                x = resample(x)
        return x


class Coder(nn.Module):
    """What encoders and decoders of this kind share, whatever their files call it.

    levels: name of the list of levels, whose class is ``level``; backwards: does the list begin with the level that
    runs last. middle: names of the parts between the levels and the latent.
    """

    levels: ClassVar[str] = "conv_blocks"
    backwards: ClassVar[bool] = False
    level: ClassVar[type[Level]] = Level
    middle: ClassVar[tuple[str, str, str]] = ("0", "1", "2")

    def add_middle(self, channels: int, attention: bool, operations) -> None:
        """``mid``: residual block, attention if asked, residual block at the deepest resolution."""
        between = AttentionBlock(channels, operations) if attention else nn.Identity()
        first, last = (ResBlock(channels, channels, operations) for _ in range(2))
        self.mid = nn.Sequential(OrderedDict(zip(self.middle, (first, between, last), strict=True)))

    def add_levels(self, levels: list[Level]) -> None:
        """The levels, in the order in which they run."""
        self.add_module(self.levels, nn.ModuleList(levels[::-1] if self.backwards else levels))

    def through_levels(self, x: Tensor) -> Tensor:
        levels = list(self.get_submodule(self.levels).children())
        for level in levels[::-1] if self.backwards else levels:
            x = level(x)
        return x


class Encoder(Coder):
    """Pixels [B, 3, H, W] -> [B, outputs, h, w]. attention: in the deepest level; middle_attention: after it."""

    def __init__(
        self, config: Levels, blocks: int, outputs: int, attention: bool, operations, middle_attention: bool = True
    ) -> None:
        super().__init__()
        widths = config.widths
        self.conv_in = operations.Conv2d(3, config.base_channels, 3, padding=1)
        deepest, levels = len(widths) - 1, []
        for i, (before, after) in enumerate(pairwise((config.base_channels, *widths))):
            levels.append(self.level(before, after, blocks, attention and i == deepest, operations))
            if i < deepest:
                levels[i].downsample = Downsample(after, operations)
        self.add_levels(levels)
        self.add_middle(widths[-1], middle_attention, operations)
        self.norm_out = normalisation(widths[-1], operations)
        self.conv_out = operations.Conv2d(widths[-1], outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.through_levels(self.conv_in(x)))
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(Coder):
    """[B, inputs, h, w] -> pixels [B, 3, H, W]. ``blocks``, attention: as in its encoder; middle_attention: before the
    deepest level."""

    def __init__(
        self, config: Levels, blocks: int, inputs: int, attention: bool, operations, middle_attention: bool = True
    ) -> None:
        super().__init__()
        widths = config.widths[::-1]
        self.conv_in = operations.Conv2d(inputs, widths[0], 3, padding=1)
        self.add_middle(widths[0], middle_attention, operations)
        levels = []
        for i, (before, after) in enumerate(pairwise((widths[0], *widths))):
            levels.append(self.level(before, after, blocks + 1, attention and i == 0, operations))
            if i < len(widths) - 1:
                levels[i].upsample = Upsample(after, operations)
        self.add_levels(levels)
        self.norm_out = normalisation(widths[-1], operations)
        self.conv_out = operations.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.through_levels(self.mid(self.conv_in(z)))
        return self.conv_out(F.silu(self.norm_out(x)))


class Quantizer(nn.Module):
    """The codebook as stored, not normalised."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_dim)


class VQModel(nn.Module):
    """Pixels to tokens and back. ``operations`` supplies Conv2d and GroupNorm (``torch.nn`` or a compatible class)."""

    def __init__(self, config: VQConfig, operations=nn) -> None:
        super().__init__()
        self.config = config
        sizes = config.num_res_blocks, config.z_channels, config.attention
        self.encoder = Encoder(config, *sizes, operations)
        self.decoder = Decoder(config, *sizes, operations)
        self.quantize = Quantizer(config)
        self.quant_conv = operations.Conv2d(config.z_channels, config.codebook_dim, 1)
        self.post_quant_conv = operations.Conv2d(config.codebook_dim, config.z_channels, 1)

    def codebook(self) -> Tensor:
        """[V, C] fp32 code vectors, as the decoder expects them."""
        codes = self.quantize.embedding.weight.float()
        return F.normalize(codes, dim=-1) if self.config.unit_codes else codes

    def encode_latent(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] in [-1, 1] -> [B, C, h, w] before quantisation. H and W must be multiples of the factor."""
        if pixels.shape[-1] % self.config.factor or pixels.shape[-2] % self.config.factor:
            height, width = pixels.shape[-2:]
            raise ValueError(f"{width} x {height} pixels: both sides must be multiples of {self.config.factor}")
        return self.quant_conv(self.encoder(pixels))

    def quantize_latent(self, latent: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, h, w] int64: the nearest code, or that of the largest dot product."""
        return nearest_codes(latent, self.codebook(), self.config.by_product)

    def encode(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] in [-1, 1] -> tokens [B, h, w] int64."""
        return self.quantize_latent(self.encode_latent(pixels))

    def dequantize(self, tokens: Tensor) -> Tensor:
        """[B, h, w] int64 -> [B, C, h, w] fp32 rows of the codebook."""
        return F.embedding(tokens, self.codebook()).permute(0, 3, 1, 2).contiguous()

    def decode(self, latent: Tensor) -> Tensor:
        """[B, C, h, w] in the dtype of the weights -> [B, 3, H, W], about [-1, 1], not clamped."""
        return self.decoder(self.post_quant_conv(latent))


def nearest_codes(latent: Tensor, codebook: Tensor, by_product: bool = False) -> Tensor:
    """[B, C, h, w] -> [B, h, w] int64: the nearest rows of the codebook [V, C]; by_product: see VQConfig.

    |z - e|^2 = |z|^2 - 2 (z e - |e|^2 / 2): among codes of one length, that is the one of highest cosine similarity.
    """
    codebook = codebook.float()
    lengths = codebook.square().sum(-1)
    rest = torch.zeros_like(lengths) if by_product else (lengths.mean() - lengths) / 2
    rows = latent.float().movedim(1, -1).flatten(0, -2).split(max(1, min(_ROWS, _PAIRS // len(codebook))))
    tokens = torch.cat([torch.addmm(rest, part, codebook.T).argmax(-1) for part in rows])
    return tokens.view(len(latent), *latent.shape[2:])
