"""How GLM-Image reads source images, to edit or combine them: their sizes, and the encoder in the model's own files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, sqrt
from pathlib import Path

import torch
from torch import Tensor, nn

from ...limits.limits import bounded_int
from ...models.discrete_model import DiscreteModel
from ...models.networks.glm_image_vision import SourceEncoder, VisionConfig
from ...models.pictures import resize, resize_by_torch
from ...models.sizes import Grid
from ...models.text.tokenizer import find_tokenizer
from ..files.checkpoint import Checkpoint, read_settings, title
from ..files.errors import CheckpointError, as_released
from ..files.names import count, rename
from ..files.weights import load_weights
from ..llama import matrix

FOLDERS = ("processor", "GLM-Image/processor")  # of tokenizer and image processor
MOST = 3  # images; the release states no limit
_ASPECT, _HEADS = 4, 16
_LARGEST = 4096**2  # pixels; the release's images have a quarter
_NAMES = {  # prefixes in the file -> ours
    "model.visual.patch_embed.proj.": "patch_embed.",
    "model.visual.embeddings.position_embedding.weight": "pos_embed",
    "model.visual.": "",
    "model.vqmodel.quant_conv.": "quant_conv.",
    "model.vqmodel.quantize.embedding.weight": "codebook",
}
Colours = tuple[float, float, float]


@dataclass(frozen=True)
class Scaling:
    """What preprocessor_config.json says of images; the defaults are those of the processor's code in transformers.

    min_pixels, max_pixels: squares of the least shorter and the largest longer side. image_mean, image_std: of the
    three colours, 0..1.
    """

    min_pixels: int = 512**2
    max_pixels: int = 2048**2
    image_mean: Colours = (0.48145466, 0.4578275, 0.40821073)
    image_std: Colours = (0.26862954, 0.26130258, 0.27577711)

    def grid(self, height: int, width: int, side: int) -> Grid:
        """Grid of tokens, of ``side`` pixels a side, of an image of so many pixels; GlmImageImageProcessor's rounding.

        Raises ValueError for images that are smaller, wider or taller than the model reads.
        """
        patch, shorter, longer = side // 2, min(height, width), max(height, width)
        if shorter < patch or longer > _ASPECT * shorter:
            raise ValueError(
                f"The image is {width} x {height} pixels, but GLM-Image reads images of at least {patch} pixels a side "
                f"and up to {_ASPECT}:1. Crop or enlarge it."
            )
        least, most = (round(sqrt(pixels)) for pixels in (self.min_pixels, self.max_pixels))
        scale = max(1.0, least / shorter)
        if longer * scale > most:
            scale = most / longer
        rows, cols = (max(1, round(pixels // 2 * scale / patch)) for pixels in (height, width))
        return rows, cols

    def scale(self, image: Tensor, side: int) -> Tensor:
        """An image [H, W, 3] in 0..1 in the size of its grid, as the decoder's VAE reads it (diffusers' pipeline; where
        that fails, as its two sizes differ, in the size of the tokens)."""
        rows, cols = self.grid(image.shape[0], image.shape[1], side)
        return resize(image, rows * side, cols * side, "lanczos")

    def scale_to_encode(self, image: Tensor, side: int) -> Tensor:
        """An image [H, W, 3] in 0..1 in half the size of its grid, as the encoder reads it."""
        rows, cols = self.grid(image.shape[0], image.shape[1], side)
        return resize_by_torch(image, rows * side // 2, cols * side // 2)


def open_scaling(path: Path, search: Sequence[Path]) -> Scaling:
    """How images are scaled for the model in a weight file. Raises CheckpointError for a damaged file."""
    file = find_tokenizer(path, FOLDERS, search, ("preprocessor_config.json",))
    if file is None:
        return Scaling()
    with as_released(file):
        settings, usual = read_settings(file), Scaling()
        size = settings.get("size") or {}
        least = settings.get("min_pixels") or size.get("shortest_edge") or usual.min_pixels
        most = settings.get("max_pixels") or size.get("longest_edge") or usual.max_pixels
        for name, pixels in (("min_pixels", least), ("max_pixels", most)):
            bounded_int(name, pixels, 1, _LARGEST)
        mean, std = (colours(settings.get(name) or getattr(usual, name), name) for name in ("image_mean", "image_std"))
        return Scaling(least, most, mean, std)


def colours(numbers: Sequence[float], name: str) -> Colours:
    """A number of each of the three colours. Raises ValueError unless they are between 0 and 1."""
    red, green, blue = (float(number) for number in numbers)
    if not all(0 < number <= 1 for number in (red, green, blue)):
        raise ValueError(f"{name} is {numbers!r:.100}, but must be three numbers between 0 and 1")
    return red, green, blue


def load_encoder(checkpoint: Checkpoint, model: DiscreteModel, search: Sequence[Path], operations=nn) -> SourceEncoder:
    """What of the model's files encodes images, on the CPU and in the model's dtype. Raises CheckpointError for a file
    without it, and for tensors that are missing, unknown, misshapen or not finite."""
    path, scaling = checkpoint.path, open_scaling(checkpoint.path, search)
    own = {n: t for n, t in checkpoint.tensors.items() if n.startswith(tuple(_NAMES))}
    tensors = rename(own, _NAMES)
    if not {"patch_embed.weight", "pos_embed", "quant_conv.weight", "codebook"} <= tensors.keys():
        raise CheckpointError(
            f"{title(path)} was saved without its vision encoder (model.visual, model.vqmodel), so it reads no images. "
            "To edit some, use all files of vision_language_encoder in zai-org/GLM-Image."
        )
    config = config_of(checkpoint, tensors)
    if 2 * config.patch != model.pixels_per_token:
        raise CheckpointError(
            f"{title(path)} has patches of {config.patch} pixels a side, but its tokens stand for "
            f"{model.pixels_per_token}: twice as many as of patches are supported. Use the files of zai-org/GLM-Image."
        )
    with torch.device("meta"):
        module = SourceEncoder(config, scaling.image_mean, scaling.image_std, operations)
    return load_weights(module, tensors, checkpoint, model.dtype)


def config_of(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> VisionConfig:
    """Sizes of the encoder, by its weights. Raises CheckpointError for impossible ones."""
    path = checkpoint.path
    places, codebook = matrix(tensors, "pos_embed", path), matrix(tensors, "codebook", path)
    patch, side, dim = tensors["patch_embed.weight"].shape[-1], isqrt(len(places)), places.shape[1]
    heads = (checkpoint.settings.get("vision_config") or {}).get("num_heads", _HEADS)
    if side**2 != len(places) or type(heads) is not int or heads < 1 or dim % heads:
        raise CheckpointError(
            f"{title(path)} has a vision encoder of {len(places)} positions, width {dim} and {heads} heads, which is "
            "impossible. Download config.json and the weights again."
        )
    return VisionConfig(dim, count(tensors, "blocks."), heads, patch, side, *codebook.shape)
