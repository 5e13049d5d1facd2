"""The KL-regularised autoencoder of latent diffusion (Rombach et al., 2022, arXiv:2112.10752), the tokenizer of MAR
(KL-16, 16 channels at a sixteenth of the resolution) and of models built like it.

Parameter names follow the published files. Level 0 is the full resolution in ``down`` and in ``up``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from . import vq


@dataclass(frozen=True)
class KLConfig(vq.Levels):
    """Sizes of a model; the defaults are KL-16. Everything here can be read from tensor names and shapes.

    encoder_attention, decoder_attention: is there attention after every residual block of the deepest level.
    """

    channels: int = 16
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    base_channels: int = 128
    num_res_blocks: int = 2
    encoder_attention: bool = True
    decoder_attention: bool = False


class Level(vq.Level):
    """A level in the names of these files."""

    name = "block"


MIDDLE = ("block_1", "attn_1", "block_2")


class Encoder(vq.Encoder):
    """An encoder in the names of these files."""

    levels, level, middle = "down", Level, MIDDLE


class Decoder(vq.Decoder):
    """A decoder in the names of these files, whose level 0 is the full resolution and runs last."""

    levels, backwards, level, middle = "up", True, Level, MIDDLE


class KLModel(nn.Module):
    """Pixels to latents and back. ``operations`` supplies Conv2d and GroupNorm (``torch.nn`` or a compatible class)."""

    def __init__(self, config: KLConfig, operations=nn):
        super().__init__()
        self.config = config
        blocks, channels = config.num_res_blocks, config.channels
        self.encoder = Encoder(config, blocks, 2 * channels, config.encoder_attention, operations)
        self.decoder = Decoder(config, blocks, channels, config.decoder_attention, operations)
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
