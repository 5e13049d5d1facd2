"""The one Llama-like transformer behind every discrete model of the pack.

Pre-norm blocks with RMSNorm, rotary positions and a SwiGLU feed-forward network. Parameter names follow LlamaGen's
released files. The rotation is handed in as cosines and sines, so that a family decides what a position is
(see positions.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..kernels.attention import attend
from .cache import KVCache


@dataclass(frozen=True)
class BackboneConfig:
    """Sizes of a backbone; ``vocab`` counts the rows of the token embedding and of the head.

    kv_heads: heads of keys and values, each shared by heads / kv_heads queries (0: one for every query head).
    qkv_bias: do the projections of queries, keys and values have a bias, as in Qwen2. attention_norm: does a block
    normalise what its attention reads. head_norms: rows of the LayerNorm that queries and keys get per head before they
    are rotated, as in Chameleon: 0 (none), 1 (shared by all heads) or ``heads`` (``kv_heads`` for keys).
    """

    dim: int
    layers: int
    heads: int
    ffn_dim: int
    vocab: int
    norm_eps: float = 1e-5
    kv_heads: int = 0
    qkv_bias: bool = False
    attention_norm: bool = True
    head_norms: int = 0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def cached_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads


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
        self.heads, self.kv_heads = config.heads, config.cached_heads
        self.q_norm, self.k_norm = (
            HeadNorm(min(config.head_norms, heads), config.head_dim) if config.head_norms else nn.Identity()
            for heads in (self.heads, self.kv_heads)
        )
        width = (self.heads + 2 * self.kv_heads) * config.head_dim
        self.wqkv = operations.Linear(config.dim, width, bias=config.qkv_bias)
        self.wo = operations.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, layer: int, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        every = rearrange(self.wqkv(x), "r t (h d) -> r h t d", h=self.heads + 2 * self.kv_heads)
        q, k, v = every.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotation(self.q_norm(q)), rotation(self.k_norm(k))
        if cache is not None:
            k, v = cache.write(layer, k, v)
        return self.wo(rearrange(attend(q, k, v, mask), "r h t d -> r t (h d)"))


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

    ``operations`` supplies Linear, Embedding and RMSNorm: ``torch.nn``, or ComfyUI's casting twins. A family with
    another way from tokens to embeddings or from hidden states to logits puts its own modules in place of the two.
    """

    def __init__(self, config: BackboneConfig, operations=nn):
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Module = operations.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config, operations) for _ in range(config.layers))
        self.norm = operations.RMSNorm(config.dim, eps=config.norm_eps)
        self.output: nn.Module = operations.Linear(config.dim, config.vocab, bias=False)

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
