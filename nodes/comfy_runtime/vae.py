"""An image decoder as a VAE: VAE Decode, VAE Encode and their tiled versions work with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...model_loaders.detect import load_image_decoder
from ...models.changed_latents import CHANGED, is_changed, whole_ids
from ...models.image_decoder import Autoencoder, ImageDecoder
from .memory import free_memory, is_out_of_memory, load_models_gpu, to_output_device
from .operations import Operations
from .previews import Palette
from .progress import notify

log = logging.getLogger(__name__)
TILE = 256  # pixels per side, if memory runs out


@dataclass(eq=False, repr=False)  # ComfyUI quotes the inputs of a node that failed
class LoadedDecoder:
    """An image decoder under ComfyUI's memory management. palette: colours of its tokens, computed on first use."""

    decoder: Autoencoder
    patcher: ModelPatcher
    palette: Palette | None = None

    def load(self, pixels: int) -> int:
        """Move it to the compute device, with memory for at least one image of ``pixels``, and return how many fit at
        once."""
        memory = self.bytes_for(pixels)
        load_models_gpu([self.patcher], memory_required=memory, force_full_load=True)
        return max(1, int(free_memory(self.patcher) / memory))

    @property
    def area(self) -> int:
        """Pixels of a token."""
        return self.decoder.factor**2

    def bytes_for(self, pixels: int) -> int:
        """Bytes of the activations while an image is decoded or encoded (fp32).

        The largest feature maps have base_channels channels at full resolution. Five of them are alive at once in
        VQ-16, Chameleon's VQGAN and KL-16, four in Cosmos, ten in MoVQ; the rest is for convolution workspaces.
        """
        return 12 * self.decoder.module.config.base_channels * pixels * 4


def open_decoder(path: Path) -> LoadedDecoder:
    """Load an image decoder in fp32 (it is small, and rounding would change tokens). Raises ValueError."""
    return manage_decoder(load_image_decoder(path, dtype=torch.float32, operations=Operations))


def manage_decoder(decoder: Autoencoder) -> LoadedDecoder:
    """An image decoder under ComfyUI's memory management."""
    return LoadedDecoder(decoder, ModelPatcher(decoder.module, mm.vae_device(), mm.vae_offload_device()))


class ARVae:
    """The interface that ComfyUI's VAE nodes call. Latents [B, C, h, w]: of a KL autoencoder, or code vectors of a VQ
    tokenizer, which also reads token ids [B, 1, h, w] from a model without image decoder."""

    def __init__(self, loaded: LoadedDecoder | None, missing: str = ""):
        self._loaded, self._missing = loaded, missing

    def decode(self, latent: Tensor, **_options: Any) -> Tensor:
        """Latent -> pixels [B, H, W, 3] in 0..1; in tiles if memory runs out.

        Raises FileNotFoundError if no decoder was found, ValueError for the latent of another kind of model.
        """
        latent = self._vectors(latent)
        pixels = latent.shape[2] * latent.shape[3] * self._found.area
        whole = self._in_batches(self._found.decoder.decode, latent, pixels)
        return self._tiled(latent) if whole is None else whole

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels [B, H, W, 3] in 0..1 -> latents [B, C, h, w]: the mean latent, or the nearest code vectors; in tiles
        if memory runs out. Raises ValueError unless H and W are multiples of a token's side."""
        whole = self._in_batches(self._found.decoder.encode_latent, pixels, pixels.shape[1] * pixels.shape[2])
        return self.encode_tiled(pixels, TILE, TILE, TILE // 4) if whole is None else whole

    def tokens(self, pixels: Tensor, codes: int) -> Tensor:
        """Pixels [B, H, W, 3] in 0..1 -> tokens [B, h, w] (int64) of a model of so many ``codes``; in tiles if memory
        runs out. Raises ValueError for the decoder of another model, and for a size that is no whole tokens."""
        decoder = self._found.decoder
        if not isinstance(decoder, ImageDecoder) or decoder.codes != codes:
            raise ValueError(
                f"The image decoder {decoder.name} has {decoder.codes or 'no'} codes, but the model has {codes}: they "
                "do not belong together. Connect the VAE of Load AR Checkpoint of the same model."
            )
        whole = self._in_batches(decoder.encode, pixels, pixels.shape[1] * pixels.shape[2])
        if whole is not None:
            return whole
        return decoder.tokens_of(self.encode_tiled(pixels, TILE, TILE, TILE // 4))

    def decode_tiled(
        self,
        latent: Tensor,
        tile_x: int | None = None,
        tile_y: int | None = None,
        overlap: int | None = None,
        **_options: Any,
    ) -> Tensor:
        """As :meth:`decode`, in tiles of so many tokens that overlap. Tiles are decoded separately, so colours may
        differ slightly between them; overlaps are blended."""
        return self._tiled(self._vectors(latent), tile_x, tile_y, overlap)

    def _tiled(
        self, latent: Tensor, tile_x: int | None = None, tile_y: int | None = None, overlap: int | None = None
    ) -> Tensor:
        tile = max(1, TILE // self.downscale_ratio)
        width, height = (
            max(1, min(side or tile, size)) for side, size in ((tile_x, latent.shape[3]), (tile_y, latent.shape[2]))
        )
        self._found.load(width * height * self._found.area)
        overlap = tile // 4 if overlap is None else overlap
        return decode_tiled(self._found.decoder, latent, width, height, overlap)

    def encode_tiled(
        self, pixels: Tensor, tile_x: int = 512, tile_y: int = 512, overlap: int = 64, **_options: Any
    ) -> Tensor:
        """As :meth:`encode`, in tiles of so many pixels that overlap.

        Every token comes from the tile in which it is farther from the edge, because code vectors cannot be blended.
        """
        decoder, side = self._found.decoder, self.downscale_ratio
        decoder.planes(pixels[:1])  # raises for an unsupported size
        height, width = (size // side for size in pixels.shape[1:3])
        self._found.load(min(tile_x, pixels.shape[2]) * min(tile_y, pixels.shape[1]))
        latent = torch.zeros(len(pixels), decoder.channels, height, width)
        across, down = (
            tiles(size, max(1, tile // side), overlap // side) for size, tile in ((width, tile_x), (height, tile_y))
        )
        for index, (top, bottom, rows), (left, right, cols) in product(range(len(pixels)), down, across):
            tile = pixels[index : index + 1, top * side : bottom * side, left * side : right * side]
            encoded = decoder.encode_latent(tile)
            inside = encoded[..., rows.start - top : rows.stop - top, cols.start - left : cols.stop - left]
            latent[index, :, rows, cols] = inside[0].float().cpu()
        return to_output_device(latent)

    def spacial_compression_decode(self) -> int:  # ComfyUI's spelling
        return self.downscale_ratio

    spacial_compression_encode = spacial_compression_decode

    def temporal_compression_decode(self) -> None:
        return None

    @property
    def downscale_ratio(self) -> int:
        return self._found.decoder.factor

    @property
    def latent_channels(self) -> int:
        return self._found.decoder.channels

    @property
    def _found(self) -> LoadedDecoder:
        if self._loaded is None:
            raise FileNotFoundError(self._missing)
        return self._loaded

    def _in_batches(self, function: Callable[[Tensor], Tensor], batch: Tensor, pixels: int) -> Tensor | None:
        """The function of a batch of images of ``pixels``, as many at once as fit; None if not even one fits."""
        try:
            count = self._found.load(pixels)
            return torch.cat([to_output_device(function(part)) for part in batch.split(count)])
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            log.warning("Not enough memory for a whole image: using tiles of %d pixels.", TILE)
        return None

    def _vectors(self, latent: Tensor) -> Tensor:
        """The latent in the decoder's format, with a notice if another node changed it. Raises ValueError for one of
        another kind of model, and for ids that were blended."""
        decoder = self._found.decoder
        if latent.ndim == 4 and latent.shape[1] == 1 != decoder.channels and isinstance(decoder, ImageDecoder):
            latent = decoder.dequantize(self._checked(whole_ids(latent), len(decoder.codebook)))
        if latent.ndim != 4 or latent.shape[1] != decoder.channels:
            raise ValueError(
                f"This latent of shape {list(latent.shape)} has {latent.shape[1]} channels, but the image decoder "
                f"{decoder.name} reads {decoder.channels} ([images, channels, rows, columns]): it comes from another "
                "kind of model. Connect the VAE that belongs to that model."
            )
        found = is_changed(latent, decoder.codebook if isinstance(decoder, ImageDecoder) else None)
        if found:
            log.warning(CHANGED)
        notify([CHANGED] * found)
        return latent

    @staticmethod
    def _checked(tokens: Tensor, codes: int) -> Tensor:
        if tokens.min() < 0 or tokens.max() >= codes:
            raise ValueError(
                f"The latent holds token {int(tokens.max())}, but this image decoder has {codes} codes: "
                "they do not belong together. Load the image decoder that was released with the model."
            )
        return tokens


def image_tokens(vae: Any, pixels: Tensor, codes: int) -> Tensor:
    """Pixels [B, H, W, 3] in 0..1 -> tokens [B, h, w] (int64, CPU) of a model of so many ``codes``.

    Raises ValueError for what is not the VAE of such a model, and for a size that is no whole tokens.
    """
    if not isinstance(vae, ARVae):
        kind = type(vae).__name__
        raise ValueError(f"vae is of type {kind}, but must be the VAE of Load AR Checkpoint, of the same model.")
    return vae.tokens(pixels, codes).cpu()


def tiles(length: int, tile: int, overlap: int) -> list[tuple[int, int, slice]]:
    """Start and end of tiles that cover ``length`` tokens, and the range of tokens that each contributes: the border is
    the middle of an overlap."""
    if length <= tile:
        return [(0, length, slice(0, length))]
    step = tile - max(0, min(overlap, tile - 1))
    starts = [*range(0, length - tile, step), length - tile]
    borders = [0, *((start + tile + following) // 2 for start, following in pairwise(starts)), length]
    return [(start, start + tile, slice(*part)) for start, part in zip(starts, pairwise(borders), strict=True)]


def decode_tiled(decoder: Autoencoder, latent: Tensor, width: int, height: int, overlap: int) -> Tensor:
    """Latents [B, C, h, w] -> pixels [B, H, W, 3], decoded in tiles of so many tokens, blended where they overlap."""
    overlap = max(0, min(overlap, min(width, height) - 1))
    steps = len(latent) * comfy.utils.get_tiled_scale_steps(latent.shape[3], latent.shape[2], width, height, overlap)
    pixels = comfy.utils.tiled_scale(
        latent,
        lambda tile: decoder.decode(tile).movedim(-1, 1),
        width,
        height,
        overlap,
        upscale_amount=decoder.factor,
        output_device=mm.intermediate_device(),
        pbar=comfy.utils.ProgressBar(steps),
    )
    return pixels.movedim(1, -1)
