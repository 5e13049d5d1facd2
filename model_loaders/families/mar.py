"""MAR (Li et al., arXiv:2406.11838), class-conditional, and the pack's text-conditional models of the same layout.

Accepts the released .pth files, of which the averaged weights (``model_ema``) are used, and safetensors. Everything is
read from tensor shapes, except the number of attention heads (fused attention weights do not show it), which comes from
our metadata or the released sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...limits.limits import bounded_int
from ...models.continuous_model import MaskedModel
from ...models.networks.diffusion_head import TRAINING_STEPS, DiffusionHead, NoiseSchedule
from ...models.networks.mar import MAR, MARConfig
from ...models.sizes import legal_grid
from ...models.text.prompt_encoders import ClassEncoder, MissingEncoder, PromptEncoder, WordEncoder
from ...samplers.continuous_contract import ContinuousParams
from ..declarations import Family
from ..decoders.kl_vae import KL16
from ..files.checkpoint import Checkpoint
from ..files.errors import CheckpointError
from ..files.names import count, rename
from ..files.weights import load_weights
from .llamagen import class_names

_NAME = "mar"
SCALE = 0.2325  # of the released KL-16 latents, to unit variance
_HEADS = {768: 12, 1024: 16, 1280: 16}  # dim -> heads of the official sizes
_CFG = {768: 2.9, 1024: 3.0, 1280: 3.2}  # and the guidance of the authors' evaluation
PRECISE = ("head.",)  # in fp32: its first step multiplies rounding errors by over 300
_NET = "diffloss.net."
PARTS = {"diffloss.": "head.", "": "backbone."}  # of a MaskedModel: released -> ours


def recognise(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this is a MAR transformer with its diffusion head."""
    return "encoder_pos_embed_learned" in tensors and any(name.startswith(_NET) for name in tensors)


def config_of(tensors: dict[str, Tensor], heads: int | None, grid: tuple[int, int] | None, path: Path) -> MARConfig:
    """Sizes from shapes. Raises CheckpointError if heads or grid are unknown or do not fit."""
    captions, classes = tensors.get("caption_proj.weight"), tensors.get("class_emb.weight")
    conditions = captions.shape[1] if captions is not None else 0 if classes is None else len(classes)
    places = tensors["diffusion_pos_embed_learned"].shape
    length, dim = places[1], places[2]
    heads = heads or _HEADS.get(dim)
    if heads is None or dim % bounded_int("heads", heads, 1, dim):
        raise CheckpointError(
            f"{path.name} has width {dim}, which is not a released MAR size, so its number of heads is unknown"
            f"{'' if heads is None else f' ({heads} does not divide it)'}. Add safetensors metadata "
            'specar = {"heads": ...}.'
        )
    side = math.isqrt(length)
    rows, cols = grid or (side, side)
    if rows * cols != length:
        asked = f"a grid of {cols} x {rows} was requested" if grid else "which is not a square number: set the grid"
        raise CheckpointError(f"{path.name} has positions for {length} tokens; {asked}.")
    return MARConfig(
        dim,
        count(tensors, "encoder_blocks."),
        count(tensors, "decoder_blocks."),
        heads,
        rows,
        cols,
        tensors["z_proj.weight"].shape[1],
        tensors["encoder_pos_embed_learned"].shape[1] - length,
        conditions,
        captions is not None,
    )


def head_of(
    tensors: dict[str, Tensor],
    config: MARConfig,
    steps: int,
    path: Path,
    operations=nn,
    first: int = TRAINING_STEPS - 1,
) -> DiffusionHead:
    """The diffusion head by its shapes, to denoise starting at step ``first``.

    Raises CheckpointError for one that does not predict noise and variance.
    """
    width, channels = tensors[f"{_NET}input_proj.weight"].shape
    outputs = tensors[f"{_NET}final_layer.linear.weight"].shape[0]
    if channels != config.channels or outputs != 2 * channels:
        raise CheckpointError(
            f"{path.name}: the diffusion head reads tokens of {channels} channels and predicts {outputs}, but the "
            f"tokens of this model have {config.channels}, so {2 * config.channels} (noise and variance) are needed. "
            "This head is not supported."
        )
    return DiffusionHead(channels, config.dim, width, count(tensors, f"{_NET}res_blocks."), steps, operations, first)


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, grid: tuple[int, int] | None, search: Sequence[Path], operations=nn
) -> MaskedModel:
    """Build the model on the CPU. Raises CheckpointError if tensors are missing, unknown, misshapen or not finite."""
    path, meta, tensors = checkpoint.path, checkpoint.metadata, checkpoint.tensors
    grid = grid or meta.get("grid")
    try:
        config = config_of(tensors, meta.get("heads"), legal_grid(grid) if grid else None, path)
        if not config.conditions:
            raise KeyError("class_emb.weight")
        defaults = defaults_of(meta, config.dim, path)
        with torch.device("meta"):
            backbone = MAR(config, operations)
            head = head_of(tensors, config, defaults.steps, path, operations, first_step(meta))
    except (KeyError, IndexError) as error:  # a tensor that determines a size is missing or misshapen
        raise CheckpointError(f"{path.name} is incomplete or damaged ({error}). Download it again.") from error
    encoder = prompt_encoder(config, meta, path)
    model = MaskedModel(
        backbone, head, _NAME, meta.get("scale", SCALE), defaults, encoder, meta.get("pixels_per_token", 16)
    )
    model.dtype = dtype
    return load_weights(model, rename(tensors, PARTS), checkpoint, dtype, precise=PRECISE)


def first_step(meta: dict[str, Any]) -> int:
    """The first denoising step: the pack's small models skip the most sensitive ones."""
    return meta.get("first_step", TRAINING_STEPS - 1)


def defaults_of(meta: dict[str, Any], dim: int, path: Path) -> ContinuousParams:
    """The default settings: the metadata, or the authors' evaluation settings for the size."""
    given = {"cfg": _CFG.get(dim, 3.0), "steps": meta.get("head_steps", 100)} | meta.get("defaults", {})
    try:
        params = ContinuousParams(**given)
        params.check()
        NoiseSchedule.cosine(params.steps, params.kind, first=first_step(meta))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path.name}: the default settings in its metadata are invalid: {error}.") from error
    return params


def prompt_encoder(config: MARConfig, meta: dict[str, Any], path: Path) -> PromptEncoder:
    """Class names and numbers, or for the pack's models the word table beside the file.

    Raises CheckpointError if the word vectors have another width than the model reads.
    """
    if not config.captions:
        return ClassEncoder(config.conditions, class_names(config.conditions))
    words = path.parent / "text_encoder.safetensors"
    if not words.is_file():
        return MissingEncoder(f"{path.name} reads prompts through text_encoder.safetensors. Put it beside the model.")
    encoder = WordEncoder.open(words, min(meta.get("caption_slots", config.slots), config.slots))
    if encoder.table.shape[1] != config.conditions:
        raise CheckpointError(
            f"{words.name} has word vectors of width {encoder.table.shape[1]}, but {path.name} reads "
            f"{config.conditions}. They do not match."
        )
    return encoder


FAMILY = Family(("MAR",), {_NAME: KL16}, recognise, load, continuous=True)
