"""Bytes of the weights of a model of token ids, and the part of them that stays in main memory."""

from __future__ import annotations

import torch
from torch import nn

from .discrete_model import DiscreteModel
from .networks.prefix import TextPrefix
from .networks.quantised import bytes_in


def word_embedding(model: DiscreteModel) -> nn.Embedding | None:
    """The embedding of a language model's words; None for a model of captions or classes."""
    return model.prefix.embedding if isinstance(model.prefix, TextPrefix) else None


def offload_embedding(model: nn.Module) -> None:
    """Keep the word embedding of a language model, if any, in main memory: up to 1.5 GiB that only prompts need.
    It is then no longer among the modules that are moved to a device."""
    if isinstance(model, DiscreteModel) and isinstance(model.prefix, TextPrefix):
        model.prefix.offload()


def weight_bytes(model: DiscreteModel, dtype: torch.dtype, storage: torch.dtype | None) -> int:
    """Bytes of the weights, were the model loaded in ``dtype`` and ``storage`` (see ``load_model``), without the word
    embedding."""
    return bytes_in(model, dtype, storage, word_embedding(model))
