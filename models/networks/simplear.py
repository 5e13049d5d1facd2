"""SimpleAR's head (arXiv:2504.11455): tied to the token embedding, as in the small Qwen2 models."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class TiedHead(nn.Module):
    """Hidden states [..., D] -> logits [..., V] by the rows of an embedding.

    The embedding is not a submodule of the head, so it is moved, saved and counted once.
    """

    def __init__(self, embedding: nn.Module):
        super().__init__()
        self._embedding = (embedding,)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._embedding[0].weight.to(hidden.device, hidden.dtype))
