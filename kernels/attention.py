"""Attention of a few new tokens to a cache of keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of queries [R, H, T, d] to keys and values [R, Hkv, N, d]; mask [R, 1, T, N] (bool), None is causal.

    Queries that share a key head are laid behind each other, so that the fused kernels, which know only as many heads
    of keys as of queries, need no copies of the cache.
    """
    shared = q.shape[1] // k.shape[1]
    if shared == 1:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    out = F.scaled_dot_product_attention(
        rearrange(q, "r (h s) t d -> r h (s t) d", s=shared), k, v, attn_mask=mask.repeat(1, 1, shared, 1)
    )
    return rearrange(out, "r h (s t) d -> r (h s) t d", s=shared)
