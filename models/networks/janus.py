"""Janus' image token embedding and image head (arXiv:2501.17811).

They replace a backbone's token embedding and head: text tokens and image codes share no parameters.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .products import product


class CodeEmbedding(nn.Module):
    """Image tokens [B, T] -> embeddings [B, T, dim]: a table of code vectors, then a small MLP."""

    def __init__(self, codes: int, code_dim: int, dim: int, operations=nn):
        super().__init__()
        self.table = operations.Embedding(codes, code_dim)
        self.fc1 = operations.Linear(code_dim, dim)
        self.fc2 = operations.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return product(self.fc2, F.gelu(product(self.fc1, self.table(tokens))))


class CodeHead(nn.Module):
    """Hidden states [R, T, dim] -> logits [R, T, codes]."""

    def __init__(self, dim: int, inner: int, codes: int, operations=nn):
        super().__init__()
        self.fc1 = operations.Linear(dim, inner)
        self.fc2 = operations.Linear(inner, codes)

    def forward(self, hidden: Tensor) -> Tensor:
        return product(self.fc2, F.gelu(product(self.fc1, hidden)))
