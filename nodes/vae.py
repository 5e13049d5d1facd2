"""An image decoder behind core's VAE socket: VAE Decode, VAE Encode and their tiled twins work with it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..model_loaders.image_decoder import ImageDecoder
from . import host


class ARVae:
    """What core's VAE nodes call. Latents [B, C, h, w] are a KL autoencoder's, or code vectors of a VQ tokenizer, which
    also reads token ids [B, 1, h, w] from a model that was loaded without it."""

    def __init__(self, loaded: host.LoadedDecoder | None, missing: str = ""):
        self._loaded, self._missing = loaded, missing

    def decode(self, latent: Tensor, **_options: Any) -> Tensor:
        """Latent -> pixels [B, H, W, 3] in 0..1. Raises FileNotFoundError if no decoder was found."""
        batch, channels, rows, cols = latent.shape
        decoder = self._found.load(batch * rows * cols * self.downscale_ratio**2)
        if channels == 1 and isinstance(decoder, ImageDecoder):
            latent = decoder.dequantize(self._checked(latent.round().long()[:, 0]))
        elif channels != self.latent_channels:
            raise ValueError(
                f"This latent has {channels} channels, but the image decoder reads {self.latent_channels}: "
                "it comes from another kind of model. Connect the VAE that belongs to that model."
            )
        return host.output(decoder.decode(latent))

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels [B, H, W, 3] in 0..1 -> latents [B, C, h, w]: the mean latent, or the nearest code vectors."""
        decoder = self._found.load(pixels.shape[0] * pixels.shape[1] * pixels.shape[2])
        return host.output(decoder.encode_latent(pixels))

    def decode_tiled(self, latent: Tensor, **_options: Any) -> Tensor:
        """As :meth:`decode`: the decoder attends to the whole picture, so tiles would change it, and it fits."""
        return self.decode(latent)

    def encode_tiled(self, pixels: Tensor, **_options: Any) -> Tensor:
        return self.encode(pixels)

    def spacial_compression_decode(self) -> int:  # core's spelling
        return self.downscale_ratio

    def temporal_compression_decode(self) -> None:
        return None

    @property
    def downscale_ratio(self) -> int:
        return self._found.decoder.factor

    @property
    def latent_channels(self) -> int:
        return self._found.decoder.channels

    @property
    def _found(self) -> host.LoadedDecoder:
        if self._loaded is None:
            raise FileNotFoundError(self._missing)
        return self._loaded

    def _checked(self, tokens: Tensor) -> Tensor:
        codes = self._found.decoder.module.config.codebook_size
        if tokens.min() < 0 or tokens.max() >= codes:
            raise ValueError(
                f"The latent holds token {int(tokens.max())}, but this image decoder has {codes} codes: "
                "they do not belong together. Load the VQ file that was released with the model."
            )
        return tokens
