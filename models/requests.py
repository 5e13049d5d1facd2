"""What a request to a model of token ids is checked with, and which parameters it has by default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..samplers.contract import SamplingParams


def image_defaults(model: Any) -> SamplingParams:
    """The own sampling parameters of a DiscreteModel for prompts with images."""
    return replace(model.defaults, **(model.image_prompts.params if model.image_prompts else {}))


def check_kept(tokens: Tensor, kept: Tensor, vocab: int) -> None:
    """Raise ValueError unless ``kept`` is a mask, and the tokens that it keeps are ids from 0 to ``vocab`` - 1."""
    if tokens.is_floating_point():
        raise ValueError(f"tokens are {tokens.dtype}, but must be whole numbers: the ids of an image.")
    if kept.dtype != torch.bool:
        raise ValueError(f"kept is {kept.dtype}, but must be bool: which tokens to keep.")
    ids = torch.where(kept, tokens, 0)
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(
            f"tokens to keep are {int(ids.min())} to {int(ids.max())}, but this model has the image "
            f"tokens 0 to {vocab - 1}."
        )


def check_length(prompt: int, image: int, longest: int | None) -> None:
    """Raise ValueError if prompt and image have more tokens than the model reads (None: any number)."""
    if longest is not None and prompt + image > longest:
        raise ValueError(
            f"The prompt has {prompt} tokens and the image {image}, but the model reads at most "
            f"{longest}. Shorten the prompt, or generate a smaller image."
        )
