"""The one Llama-like transformer behind every discrete model of the pack.

Pre-norm blocks with RMSNorm, rotary positions and a SwiGLU feed-forward network. Parameter names follow LlamaGen's
released files. Callers pass the rotation as cosines and sines, so a family defines its own positions (see
positions.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.attention import NewTokens, attend
from ...kernels.rotation import EPS, Norm, normalise, rotate
from .cache import KVCache, Mask
from .positions import RotaryTable, Rotation
from .products import apply_norm, product

T = TypeVar("T")


@dataclass(frozen=True)
class BackboneConfig:
    """Sizes of a backbone; ``vocab`` counts the rows of the token embedding and of the head.

    kv_heads: heads of keys and values, each shared by heads / kv_heads queries (0: one for every query head).
    qkv_bias: do the projections of queries, keys and values have a bias, as in Qwen2. attention_norm: does a block
    normalise what its attention reads. head_norms: rows of the LayerNorm that queries and keys get per head before they
    are rotated, as in Chameleon: 0 (none), 1 (shared by all heads) or ``heads`` (``kv_heads`` for keys). head_rms: do
    they get an RMSNorm instead, shared by all heads, as in Qwen3. head_dim: channels of a head (0: dim / heads).
    post_norms: does a block also normalise what attention and feed-forward network add to its input, as in GLM-4.
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
    head_rms: bool = False
    head_dim: int = 0
    post_norms: bool = False

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.dim // self.heads)

    @property
    def cached_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads


class HeadNorm(nn.Module):
    """LayerNorm of every head of x [R, T, H, head_dim], with weights [rows, head_dim] (rows: H, or 1 for all heads)."""

    def __init__(self, rows: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, head_dim))
        self.bias = nn.Parameter(torch.zeros(rows, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x, *self.of(x))

    def of(self, x: Tensor) -> Norm:
        """The norm with its parameters in the dtype and on the device of x."""
        return self.weight.to(x), self.bias.to(x), EPS


class HeadRMSNorm(nn.Module):
    """RMSNorm of every head of x [R, T, H, head_dim], with one weight [head_dim] for all heads."""

    def __init__(self, head_dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(head_dim))

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x, *self.of(x))

    def of(self, x: Tensor) -> Norm:
        """The norm with its parameters in the dtype and on the device of x."""
        return self.weight.to(x)[None], None, self.eps


def _head_norm(config: BackboneConfig, heads: int) -> nn.Module:
    """The norm of so many heads of queries or keys."""
    if config.head_rms:
        return HeadRMSNorm(config.head_dim, config.norm_eps)
    return HeadNorm(min(config.head_norms, heads), config.head_dim) if config.head_norms else nn.Identity()


class Attention(nn.Module):
    def __init__(self, config: BackboneConfig, operations):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.cached_heads, config.head_dim
        self.q_norm, self.k_norm = (_head_norm(config, heads) for heads in (self.heads, self.kv_heads))
        self.normed = config.head_rms or config.head_norms > 0
        width = (self.heads + 2 * self.kv_heads) * config.head_dim
        self.wqkv = operations.Linear(config.dim, width, bias=config.qkv_bias)
        self.wo = operations.Linear(self.heads * config.head_dim, config.dim, bias=False)

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        post_norm: nn.Module,
        rotary: RotaryTable,
        layer: int,
        cache: KVCache | None,
        mask: Mask,
    ) -> Tensor:
        """x plus post_norm of the attention of norm(x). x may be overwritten, but in the first layer."""
        qkv = product(self.wqkv, x, norm).unflatten(-1, (-1, self.head_dim))  # heads of queries, of keys, of values
        if cache is None:
            assert not isinstance(mask, NewTokens), "there is no cache"
            attended = self._uncached(qkv, rotary, mask)
        else:
            norms = (self.q_norm.of(qkv), self.k_norm.of(qkv)) if self.normed else None
            assert isinstance(mask, NewTokens), "what the cache's open returned"
            attended = cache.attend(layer, qkv, rotary._replace(norms=norms), mask)
        return _added(self.wo, attended.flatten(2), post_norm, x, layer > 0)  # the first layer's x is the caller's

    def _uncached(self, qkv: Tensor, rotary: RotaryTable, mask: Tensor | None) -> Tensor:
        """Attention [R, T, H, d] of tokens to each other, for their queries, keys and values [R, T, H + 2 * Hkv, d]."""
        if self.normed:
            q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=2)
        rotate(qkv[:, :, : self.heads + self.kv_heads], *rotary[:2])
        q, k, v = qkv.transpose(1, 2).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return attend(q, k, v, mask).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU; gate (w1 of the released files) and input (w3) are one projection."""

    def __init__(self, config: BackboneConfig, operations):
        super().__init__()
        self.w1_w3 = operations.Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.w2 = operations.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor, norm: nn.Module, post_norm: nn.Module) -> Tensor:
        """x plus post_norm of the network's output for norm(x). x may be overwritten."""
        return _added(self.w2, product(self.w1_w3, x, norm, gate=True), post_norm, x, True)


def _added(linear: nn.Module, y: Tensor, post_norm: nn.Module, x: Tensor, in_place: bool) -> Tensor:
    """x + post_norm(linear(y)); without a norm, one launch. in_place: may x be overwritten?"""
    if isinstance(post_norm, nn.Identity):
        return product(linear, y, residual=x, in_place=in_place)
    return x + apply_norm(post_norm, product(linear, y))


class Block(nn.Module):
    def __init__(self, config: BackboneConfig, operations):
        super().__init__()

        def norm(present: bool) -> nn.Module:
            return operations.RMSNorm(config.dim, eps=config.norm_eps) if present else nn.Identity()

        self.attention_norm = norm(config.attention_norm)
        self.attention = Attention(config, operations)
        self.attention_post_norm = norm(config.post_norms)
        self.ffn_norm = norm(True)
        self.feed_forward = FeedForward(config, operations)
        self.ffn_post_norm = norm(config.post_norms)

    def forward(self, x: Tensor, rotary: RotaryTable, layer: int, cache: KVCache | None, mask: Mask) -> Tensor:
        x = self.attention(x, self.attention_norm, self.attention_post_norm, rotary, layer, cache, mask)
        return self.feed_forward(x, self.ffn_norm, self.ffn_post_norm)


def join_gates(tensors: Mapping[str, T]) -> dict[str, T | tuple[T, ...]]:
    """w1 (gate) and w3 (input) of every feed-forward network, as released files name them, as one pair w1_w3, if both
    are present."""
    joined: dict[str, T | tuple[T, ...]] = dict(tensors)
    for name in tensors:
        other = name.replace("feed_forward.w1.", "feed_forward.w3.")
        if other != name and other in tensors:
            del joined[name], joined[other]
            joined[name.replace(".w1.", ".w1_w3.")] = tensors[name], tensors[other]
    return joined


class TiedHead(nn.Module):
    """Hidden states [..., D] -> logits [..., V] by the rows of the token embedding, as in the small Qwen2 models.

    The embedding is not a submodule of the head, so it is moved, saved and counted once.
    """

    def __init__(self, embedding: nn.Module):
        super().__init__()
        self._embedding = (embedding,)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._embedding[0].weight.to(hidden.device, hidden.dtype))


class Backbone(nn.Module):
    """Token embedding, blocks, final norm and head.

    ``operations`` supplies Linear, Embedding and RMSNorm: ``torch.nn``, or ComfyUI's casting versions. A family with
    another token embedding or head replaces these two modules with its own.
    """

    def __init__(self, config: BackboneConfig, operations=nn):
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Module = operations.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config, operations) for _ in range(config.layers))
        self.norm = operations.RMSNorm(config.dim, eps=config.norm_eps)
        self.output: nn.Module = operations.Linear(config.dim, config.vocab, bias=False)

    def speaking(self, tok_embeddings: nn.Module, output: nn.Module, vocab: int) -> Backbone:
        """A backbone of the same blocks and norm, shared, with another embedding and head of ``vocab`` tokens."""
        other = Backbone.__new__(Backbone)
        nn.Module.__init__(other)
        other.config = replace(self.config, vocab=vocab)
        other.tok_embeddings, other.layers, other.norm, other.output = tok_embeddings, self.layers, self.norm, output
        return other.eval()

    def forward(
        self, x: Tensor, rotation: Rotation | RotaryTable, cache: KVCache | None = None, mask: Mask = None
    ) -> Tensor:
        """Hidden states [R, T, dim] after the final norm, for input embeddings x [R, T, dim].

        With a cache, keys and values are written at the slots of ``mask``, which the cache's ``open`` returned. Without
        one, mask [R, 1, T, T], in the dtype of x, is added to the scores of attention (see kernels.attention.additive);
        None is causal.
        """
        rotary = rotation.table()
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, index, cache, mask)
        return apply_norm(self.norm, x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, T, vocab] in the dtype of the hidden states."""
        return product(self.output, hidden)
