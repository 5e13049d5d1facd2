"""Conversion between LATENT dictionaries and token grids. Pure torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.changed_latents import is_changed, whole_ids
from ..models.continuous_model import ContinuousBase
from ..models.discrete_model import DiscreteModel
from ..models.latents import quantize
from ..models.sizes import unsupported_size
from ..samplers.contract import Output, Request
from ..samplers.generate import AnyRequest

Latent = dict[str, Any]
CELL = "downscale_ratio_spacial"  # where Empty Latent Image says how many pixels wide a cell is
Model = DiscreteModel | ContinuousBase
TORN = (
    "The image in latent_image is not as it was generated or encoded, so what is kept of it is torn: another node "
    "scaled, blended or changed it. Change the image before VAE Encode instead (Upscale Image)."
)
NOTHING = (
    "The mask selects no token, so all of the image is kept. Mask more of it: a token needs half of its area masked."
)
EVERYTHING = "The mask selects every token, so nothing of the image is kept. Mask less of it."


def empty_latent(model: Model, rows: int, cols: int, batch: int) -> Latent:
    """A LATENT that sets only number and size of images: zeros [B, C, rows, cols]."""
    return {"samples": torch.zeros(batch, model.latent_channels, rows, cols)}


def grid_of(latent: Latent, model: Model) -> tuple[int, int]:
    """Rows and columns of tokens of a LATENT. An empty one of newer core nodes tells the pixels of its cells, which are
    then those that were asked for. Raises ValueError where these are no whole tokens."""
    rows, cols = latent["samples"].shape[-2:]
    cell = latent.get(CELL)
    if cell is None or latent["samples"].any():
        return rows, cols
    return whole_tokens(model, cols * cell, rows * cell)


def whole_tokens(model: Model, width: int, height: int) -> tuple[int, int]:
    """Rows and columns of tokens of an image of so many pixels. Raises ValueError, with the sizes that the model
    generates, where they are no whole tokens."""
    side = model.pixels_per_token
    if width % side or height % side:
        raise ValueError(unsupported_size(model, width, height))
    return height // side, width // side


def describe_unused(latent: Latent, model: Model, keep: Tensor | None = None) -> list[str]:
    """What a sampler does not use of a LATENT, or cannot use as it is, a sentence each. keep: see keep_mask()."""
    samples, codebook = latent["samples"], None if model.continuous else model.codebook
    if not samples.any():
        return []
    if latent.get("noise_mask") is not None:
        vectors = codebook is not None and samples.shape[1] == codebook.shape[1]
        torn = [TORN] * is_changed(samples, codebook if vectors else None)
        if keep is None or (keep.any() and not keep.all()):
            return torn
        return [*torn, NOTHING if keep.any() else EVERYTHING]
    return ["latent_image holds an image, but only its size is used. Add Set Latent Noise Mask to keep parts of it."]


def image_samples(latent: Latent, model: Model) -> Tensor:
    """The samples [B, C, h, w] of a LATENT that contains an image of this model. Raises ValueError otherwise."""
    samples = latent["samples"]
    if samples.ndim != 4 or samples.shape[1] != model.latent_channels:
        raise ValueError(
            f"latent_image has shape {list(samples.shape)}, but this model's latents are [images, "
            f"{model.latent_channels} channels, rows, columns]. Encode the image with the VAE of Load AR Checkpoint (a "
            "model without its image decoder cannot inpaint)."
        )
    if not samples.any():
        raise ValueError(
            "latent_image has a noise mask but no image to keep. Encode one with VAE Encode, or remove the mask."
        )
    return samples


def with_output(latent: Latent, output: Output, request: AnyRequest) -> Latent:
    """``latent`` with the generated images, the same noise mask and batch index. Kept vectors are bitwise unchanged."""
    latent = {key: value for key, value in latent.items() if key != CELL}
    if isinstance(request, Request):
        samples = output.tokens[:, None].float() if output.latent is None else output.latent
        return {**latent, "samples": samples, "ar_tokens": output.tokens}
    assert output.latent is not None, "continuous models always return a latent"
    samples = output.latent
    if request.kept is not None:
        keep = request.kept.unflatten(1, request.grid)[:, None].to(samples.device)
        samples = torch.where(keep, latent["samples"].to(samples), samples)
    return {**latent, "samples": samples}


def tokens_of(latent: Latent, model: Model) -> Tensor:
    """Tokens of a LATENT: ids [B, h, w] (int64), or vectors [B, h, w, C] (fp32) of a continuous model.

    ``ar_tokens`` is used if it matches the samples (ComfyUI's nodes that crop, flip or mix change only those);
    otherwise the code nearest to each vector. Raises ValueError if the latent contains no image of this model.
    """
    samples, tokens = image_samples(latent, model), latent.get("ar_tokens")
    if model.continuous:
        return model.from_latent(samples).unflatten(1, samples.shape[2:])
    if model.codebook is None:
        return whole_ids(samples).clamp(0, model.vocab - 1)
    if are_tokens(tokens, samples, model.vocab) and torch.equal(model.dequantize(tokens), samples):
        return tokens
    return quantize(model, samples)


def are_tokens(tokens: Any, samples: Tensor, vocab: int) -> bool:
    """Whether this is a valid token id for every position of ``samples`` [B, C, h, w]. (Other nodes may change it.)"""
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.shape != samples[:, 0].shape:
        return False
    return bool(((tokens >= 0) & (tokens < vocab)).all())


def token_means(mask: Tensor, batch: int, rows: int, cols: int, name: str) -> Tensor:
    """A mask [1 or B, (1,) H, W] of any size, averaged over each token: [1 or B, rows, cols] (fp32).

    Raises ValueError (naming the mask) for another number of masks.
    """
    return F.adaptive_avg_pool2d(planes(mask, batch, name), (rows, cols))[:, 0]


def planes(mask: Tensor, batch: int, name: str) -> Tensor:
    """A mask [1 or B, (1,) H, W] as [1 or B, 1, H, W] (fp32). Raises ValueError (naming it) for another number."""
    mask = mask.reshape(-1, 1, *mask.shape[-2:]).float()
    if mask.shape[0] not in (1, batch):
        more = f" or {batch}" * (batch > 1)
        raise ValueError(f"The {name} holds {mask.shape[0]} masks for a batch of {batch}. Use 1{more}.")
    return mask


def keep_mask(noise_mask: Tensor, batch: int, rows: int, cols: int) -> Tensor:
    """Keep mask [B, rows, cols] (bool): tokens with less than half of their area masked (1: generate again)."""
    return (token_means(noise_mask, batch, rows, cols, "noise mask") < 0.5).expand(batch, -1, -1)


def strength(where: Tensor | None, batch: int, rows: int, cols: int) -> Tensor | None:
    """Strength of a rule at each token [1 or B, rows, cols] (0: exact, 1: full), from a MASK of any size; None: 1
    everywhere.

    Raises ValueError for another number of masks.
    """
    return None if where is None else token_means(where, batch, rows, cols, "rule's mask").clamp(0, 1)


def skippable(where: Tensor | None, batch: int, rows: int, cols: int) -> Tensor | None:
    """Where drafts may skip verification [1 or B, rows, cols] (bool), from a MASK of any size; None: everywhere.

    Only tokens without any part below 0.5, so that a protected area is protected up to its edge. Raises ValueError
    for another number of masks.
    """
    if where is None:
        return None
    return F.adaptive_max_pool2d(1 - planes(where, batch, "sampler's mask"), (rows, cols))[:, 0] <= 0.5


def first_image(latent: Latent) -> int:
    """Index of the first image in its original batch, which is added to the seed.

    Raises ValueError for images taken from a batch out of order, whose seeds would not be consecutive.
    """
    index = latent.get("batch_index")
    if index is None:
        return 0
    if len(index) != len(latent["samples"]) or not all(isinstance(number, int) for number in index):
        raise ValueError(
            f"latent_image numbers its images {list(index)[:8]}, but holds {len(latent['samples'])}. Connect the "
            "LATENT from before it was last changed."
        )
    if list(index) != list(range(index[0], index[0] + len(index))):
        raise ValueError(
            f"latent_image holds the images {list(index)} of its batch, but one run samples consecutive ones. "
            "Sample them one by one (Latent From Batch)."
        )
    return int(index[0])
