"""The block of a vision transformer: MAR, SigLIP and GLM-Image's vision tower consist of these.

Parameter names follow timm, as the published files do.
"""

from __future__ import annotations

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


class Attention(nn.Module):
    """Full self-attention; ``seen`` [R, n] (bool) hides keys, None hides none."""

    def __init__(self, dim: int, heads: int, operations):
        super().__init__()
        self.heads = heads
        self.qkv = operations.Linear(dim, 3 * dim)
        self.proj = operations.Linear(dim, dim)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "r n (three h d) -> three r h n d", three=3, h=self.heads)
        mask = None if seen is None else seen[:, None, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(rearrange(out, "r h n d -> r n (h d)"))


class MLP(nn.Module):
    def __init__(self, dim: int, operations):
        super().__init__()
        self.fc1 = operations.Linear(dim, 4 * dim)
        self.fc2 = operations.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, dim: int, heads: int, operations):
        super().__init__()
        self.norm1 = operations.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads, operations)
        self.norm2 = operations.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, operations)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), seen)
        return x + self.mlp(self.norm2(x))
