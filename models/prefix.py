"""What stands before the image tokens of a LlamaGen model: caption features or a class.

Parameter names are those of the released files (``cls_embedding.*``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CaptionProjection(nn.Module):
    def __init__(self, caption_dim: int, dim: int, operations):
        super().__init__()
        self.fc1 = operations.Linear(caption_dim, dim, bias=False)
        self.fc2 = operations.Linear(dim, dim, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(features), approximate="tanh"))


class CaptionPrefix(nn.Module):
    """Caption features [B, n, caption_dim] -> prefix embeddings [B, n, dim].

    LlamaGen pads captions on the left to ``slots`` and zeroes the padding; a padded slot then contributes nothing, so
    only the n valid slots are kept, and an unconditional prefix of n slots uses the last n learned rows.
    """

    def __init__(self, caption_dim: int, slots: int, dim: int, operations=nn):
        super().__init__()
        self.slots = slots
        self.cap_proj = CaptionProjection(caption_dim, dim, operations)
        self.register_buffer("uncond_embedding", torch.zeros(slots, caption_dim))

    def forward(self, features: Tensor) -> Tensor:
        return self.cap_proj(features.to(self.uncond_embedding.dtype))

    def unconditional(self, length: int, device: torch.device) -> Tensor:
        """Prefix embeddings [1, length, dim] of the learned null caption, computed on ``device``."""
        return self.cap_proj(self.uncond_embedding[None, -length:].to(device))


class ClassPrefix(nn.Module):
    """Class numbers [B, 1, 1] -> prefix embeddings [B, 1, dim]; the last row of the table is the null class."""

    def __init__(self, classes: int, dim: int, operations=nn):
        super().__init__()
        self.classes = classes
        self.embedding_table = operations.Embedding(classes + 1, dim)

    def forward(self, features: Tensor) -> Tensor:
        return self.embedding_table(features[..., 0].long())

    def unconditional(self, length: int, device: torch.device) -> Tensor:
        """Prefix embeddings [1, length, dim] of the null class, computed on ``device``."""
        return self.embedding_table(torch.full((1, length), self.classes, device=device))
