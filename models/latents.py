"""Latents of a model's tokens: code vectors or, without any, the ids; of continuous tokens, scaled vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .networks.vq import nearest_codes


def code_vectors(codebook: Tensor | None) -> Tensor:
    """The code vectors [V, C] of a model. Raises ValueError before any are attached."""
    if codebook is None:
        raise ValueError(
            "No image decoder is attached to this model, so its tokens have no code vectors. Load "
            "the one that was released with it."
        )
    return codebook


def quantize(model: Any, latent: Tensor) -> Tensor:
    """Tokens [B, h, w] of a latent [B, C, h, w] of a DiscreteModel: of the nearest code vectors, or of the nearest ids.

    Raises ValueError before a codebook is attached.
    """
    if model.id_latents:
        return latent[:, 0].round().long().clamp(0, model.vocab - 1)
    return nearest_codes(latent.cpu(), code_vectors(model.codebook))


def typical_latents(model: Any, count: int) -> Tensor:
    """Typical latents [count, C] of a DiscreteModel or a ContinuousBase; deterministic."""
    generator = torch.Generator().manual_seed(0)
    if model.continuous:
        return torch.randn((count, model.channels), generator=generator) / model.scale
    return code_vectors(model.codebook)[torch.randint(model.vocab, (count,), generator=generator)]
