"""Checks of requests to models of token ids."""

from __future__ import annotations

import torch
from torch import Tensor


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
