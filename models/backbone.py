"""The one Llama-like transformer behind every discrete model of the pack.

Pre-norm blocks with RMSNorm, rotary positions and a SwiGLU feed-forward network. Parameter names follow LlamaGen's
released files. The rotation is handed in as cosines and sines, so that a family decides what a position is:
LlamaGen rotates image tokens by row and column and multiplies its prompt tokens by zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .cache import KVCache


@dataclass(frozen=True)
class BackboneConfig:
    """Sizes of a backbone; ``vocab`` counts the rows of the token embedding and of the head.

    attention_norm: does a block normalise what its attention reads. head_norms: rows of the LayerNorm that queries and
    keys get per head before they are rotated, as in Chameleon: 0 (none), 1 (shared by all heads) or ``heads``.
    """

    dim: int
    layers: int
    heads: int
    ffn_dim: int
    vocab: int
    norm_eps: float = 1e-5
    attention_norm: bool = True
    head_norms: int = 0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class Rotation(NamedTuple):
    """Cosines and sines [rows or 1, T, head_dim / 2] (fp32) that rotate pairs of query and key channels.

    A pair is two adjacent channels (LlamaGen), or with ``halves`` the i-th channel of either half (Chameleon).
    """

    cos: Tensor
    sin: Tensor
    halves: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x [R, H, T, head_dim] in fp32 and return it in its own dtype."""
        pair = -2 if self.halves else -1
        a, b = x.float().unflatten(-1, (2, -1) if self.halves else (-1, 2)).unbind(pair)
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=pair).flatten(-2).to(x.dtype)


def grid_rotation(
    rows: int, cols: int, head_dim: int, theta: float = 10000.0, device: torch.device | str = "cpu"
) -> Tensor:
    """Angles [rows * cols, head_dim / 2] (fp32) of LlamaGen's 2-D rotary embedding.

    The first half of the channel pairs turns with the row, the second half with the column, both with the frequencies
    theta^(-2i / (head_dim / 2)), i = 0 .. head_dim / 4 - 1.
    """
    half = head_dim // 2
    frequencies = theta ** (-torch.arange(0, half, 2, device=device, dtype=torch.float32)[: half // 2] / half)
    index = torch.arange(rows * cols, device=device)
    row, col = index // cols, index % cols
    return torch.cat((row[:, None] * frequencies, col[:, None] * frequencies), dim=-1)


class HeadNorm(nn.Module):
    """LayerNorm of every head of x [R, H, T, head_dim], with weights [rows, head_dim] (rows: H, or 1 for all heads)."""

    def __init__(self, rows: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, head_dim))
        self.bias = nn.Parameter(torch.zeros(rows, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (p.to(x)[:, None] for p in (self.weight, self.bias))
        return F.layer_norm(x, x.shape[-1:], eps=1e-5) * weight + bias


class Attention(nn.Module):
    def __init__(self, config: BackboneConfig, operations):
        super().__init__()
        self.heads = config.heads
        self.q_norm, self.k_norm = (
            HeadNorm(config.head_norms, config.head_dim) if config.head_norms else nn.Identity() for _ in range(2)
        )
        self.wqkv = operations.Linear(config.dim, 3 * config.dim, bias=False)
        self.wo = operations.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, layer: int, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        q, k, v = rearrange(self.wqkv(x), "r t (three h d) -> three r h t d", three=3, h=self.heads)
        q, k = rotation(self.q_norm(q)), rotation(self.k_norm(k))
        if cache is not None:
            k, v = cache.write(layer, k, v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.wo(rearrange(out, "r h t d -> r t (h d)"))


class FeedForward(nn.Module):
    def __init__(self, config: BackboneConfig, operations):
        super().__init__()
        self.w1 = operations.Linear(config.dim, config.ffn_dim, bias=False)
        self.w3 = operations.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = operations.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: BackboneConfig, operations):
        super().__init__()
        norm = operations.RMSNorm(config.dim, eps=config.norm_eps) if config.attention_norm else nn.Identity()
        self.attention_norm = norm
        self.attention = Attention(config, operations)
        self.ffn_norm = operations.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config, operations)

    def forward(self, x: Tensor, rotation: Rotation, layer: int, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, layer, cache, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Backbone(nn.Module):
    """Token embedding, blocks, final norm and head.

    ``operations`` supplies Linear, Embedding and RMSNorm: ``torch.nn``, or ComfyUI's casting twins.
    """

    def __init__(self, config: BackboneConfig, operations=nn):
        super().__init__()
        self.config = config
        self.tok_embeddings = operations.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config, operations) for _ in range(config.layers))
        self.norm = operations.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = operations.Linear(config.dim, config.vocab, bias=False)

    def forward(
        self, x: Tensor, rotation: Rotation, cache: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Hidden states [R, T, dim] after the final norm, for input embeddings x [R, T, dim].

        With a cache, keys and values are written at the cache's current slots and ``mask`` [R, 1, T, capacity] (bool)
        says which slots each token sees; without one, ``mask`` None means causal.
        """
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, index, cache, mask)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, T, vocab] in fp32."""
        return self.output(hidden).float()
