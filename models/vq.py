"""The VQGAN image tokenizer (Esser et al., arXiv:2012.09841) as LlamaGen (arXiv:2406.06525, section 2.1) and Chameleon
(arXiv:2405.09818) use it, shared by every family with one of their tokenizers.

Parameter names follow the published LlamaGen files. Level 0 of the encoder is the full resolution; block 0 of the
decoder is the deepest level.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROWS, _PAIRS = 1024, 2**25  # the most vectors, and pairs of vector and code, compared at once: 128 MiB of distances


@dataclass(frozen=True)
class VQConfig:
    """Sizes of a tokenizer; the defaults are VQ-16. Everything here can be read from tensor shapes.

    ``ch_mult`` holds one channel multiplier per level, so the image is ``2 ** (len(ch_mult) - 1)`` times the grid.
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

    @property
    def factor(self) -> int:
        """Pixels per token along each side."""
        return 2 ** (len(self.ch_mult) - 1)


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


class Encoder(nn.Module):
    def __init__(self, config: VQConfig, operations) -> None:
        super().__init__()
        widths = [config.base_channels * m for m in config.ch_mult]
        self.conv_in = operations.Conv2d(3, config.base_channels, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        for i, (before, after) in enumerate(zip([config.base_channels, *widths], widths, strict=False)):
            deepest = i == len(widths) - 1
            level = Level(before, after, config.num_res_blocks, deepest and config.attention, operations)
            if not deepest:
                level.downsample = Downsample(after, operations)
            self.conv_blocks.append(level)
        self.mid = _mid(widths[-1], operations)
        self.norm_out = normalisation(widths[-1], operations)
        self.conv_out = operations.Conv2d(widths[-1], config.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    def __init__(self, config: VQConfig, operations) -> None:
        super().__init__()
        widths = [config.base_channels * m for m in reversed(config.ch_mult)]
        self.conv_in = operations.Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid = _mid(widths[0], operations)
        self.conv_blocks = nn.ModuleList()
        for i, (before, after) in enumerate(zip([widths[0], *widths], widths, strict=False)):
            level = Level(before, after, config.num_res_blocks + 1, i == 0 and config.attention, operations)
            if i < len(widths) - 1:
                level.upsample = Upsample(after, operations)
            self.conv_blocks.append(level)
        self.norm_out = normalisation(widths[-1], operations)
        self.conv_out = operations.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        for block in (*self.mid, *self.conv_blocks):
            x = block(x)
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
        self.encoder = Encoder(config, operations)
        self.decoder = Decoder(config, operations)
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


def _mid(channels: int, operations) -> nn.ModuleList:
    first, last = (ResBlock(channels, channels, operations) for _ in range(2))
    return nn.ModuleList([first, AttentionBlock(channels, operations), last])
