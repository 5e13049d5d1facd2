"""LATENT dictionaries <-> tokens on a grid. Pure torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model_loaders.ar_model import DiscreteModel
from ..model_loaders.continuous_model import ContinuousBase
from ..samplers.layout import TokenLayout

Latent = dict[str, Any]
Model = DiscreteModel | ContinuousBase


def empty_latent(model: Model, rows: int, cols: int, batch: int) -> Latent:
    """A LATENT that only says how many pictures of which size: zeros [B, C, rows, cols]."""
    return {"samples": torch.zeros(batch, channels(model), rows, cols)}


def grid_of(model: Model, rows: int, cols: int) -> tuple[int, int]:
    """The token grid to draw on. Raises ValueError for one that the model does not draw."""
    if isinstance(model, ContinuousBase):
        return model.check_grid(rows, cols)
    layout = model.layout(rows, cols)
    return layout.rows, layout.cols


def channels(model: Model) -> int:
    """Channels of the model's latents: its tokens' own, code vectors, or one of token ids while it knows no decoder."""
    if isinstance(model, ContinuousBase):
        return model.channels
    return 1 if model.codebook is None else model.codebook.shape[1]


def picture_of(latent: Latent, model: Model) -> Tensor:
    """The samples [B, C, h, w] of a LATENT that holds a picture of this model. Raises ValueError if it does not."""
    samples = latent["samples"]
    if samples.ndim != 4 or samples.shape[1] != channels(model):
        raise ValueError(
            f"latent_image has the shape {list(samples.shape)}, but this model's latents are [pictures, "
            f"{channels(model)} channels, rows, columns]. Encode the picture with the VAE of Load AR Checkpoint (a "
            "model without its image decoder cannot inpaint)."
        )
    if not samples.any():
        raise ValueError(
            "latent_image has a noise mask but no picture to keep. Encode one with VAE Encode, or remove the mask."
        )
    return samples


def with_tokens(latent: Latent, tokens: Tensor, model: DiscreteModel) -> Latent:
    """``latent`` (its noise mask and batch index stay) with the drawn tokens [B, h, w] in it."""
    samples = tokens[:, None].float() if model.codebook is None else model.dequantize(tokens)
    return {**latent, "samples": samples, "ar_tokens": tokens}


def tokens_of(latent: Latent, model: DiscreteModel) -> Tensor:
    """Token ids [B, h, w] (int64) of a LATENT.

    ``ar_tokens`` counts while it still fits the samples (core nodes that crop, flip or mix change only those);
    otherwise the code nearest to each vector. Raises ValueError if the latent holds no picture of this model.
    """
    samples, tokens = picture_of(latent, model), latent.get("ar_tokens")
    if model.codebook is None:
        return samples.round().long()[:, 0].clamp(0, model.vocab - 1)
    if are_tokens(tokens, samples, model.vocab) and torch.equal(model.dequantize(tokens), samples):
        return tokens
    return model.quantize(samples)


def are_tokens(tokens: Any, samples: Tensor, vocab: int) -> bool:
    """Is this a token id for every place of ``samples`` [B, C, h, w]? (Other nodes may put anything into a LATENT.)"""
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
        raise ValueError(f"The {name} holds {mask.shape[0]} masks for a batch of {batch}. Use 1 or {batch}.")
    return mask


def kept(noise_mask: Tensor, batch: int, rows: int, cols: int) -> Tensor:
    """Which tokens [B, rows, cols] (bool) stay: those with less than half of their area masked (1: draw anew)."""
    return (token_means(noise_mask, batch, rows, cols, "noise mask") < 0.5).expand(batch, -1, -1)


def strength(where: Tensor | None, layout: TokenLayout, batch: int) -> Tensor | None:
    """How lenient a rule may be at each position [1 or B, S] (0..1), from a MASK of any size; None: fully everywhere.

    Raises ValueError for another number of masks.
    """
    if where is None:
        return None
    return layout.spread(token_means(where, batch, layout.rows, layout.cols, "rule's mask").clamp(0, 1), fill=1.0)


def skippable(where: Tensor | None, layout: TokenLayout, batch: int) -> Tensor | None:
    """Where drafts may be taken unverified [1 or B, S] (bool), from a MASK of any size; None: everywhere.

    Only tokens without any part below one half: what the user protects is protected up to its edge. Raises ValueError
    for another number of masks.
    """
    if where is None:
        return None
    protected = F.adaptive_max_pool2d(1 - planes(where, batch, "sampler's mask"), (layout.rows, layout.cols))[:, 0]
    return layout.spread(protected <= 0.5, fill=True)


def first_image(latent: Latent) -> int:
    """Number of the first image in its original batch: it is drawn with that many added to the seed.

    Raises ValueError for images taken from a batch out of order, whose seeds would not be consecutive.
    """
    index = latent.get("batch_index")
    if index is None:
        return 0
    if len(index) != len(latent["samples"]) or not all(isinstance(number, int) for number in index):
        raise ValueError(
            f"latent_image numbers its images {list(index)[:8]}, but holds {len(latent['samples'])}. Connect the "
            "LATENT of the node before the last one that changed it."
        )
    if list(index) != list(range(index[0], index[0] + len(index))):
        raise ValueError(
            f"latent_image holds the images {list(index)} of its batch, but one run draws consecutive ones. "
            "Sample them one by one (Latent From Batch)."
        )
    return int(index[0])
