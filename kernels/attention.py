"""Attention of a few new tokens to a cache of keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import accelerated
from .steady import enough

FEW = 64  # queries; longer prompts are work for the fused kernels of torch


def added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What a mask (bool: who sees what) adds to scores: 0 or minus infinity. Made once for all layers of a pass."""
    return None if mask is None else torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, -torch.inf
    )


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of queries [R, H, T, d] to keys and values [R, Hkv, N, d]; None is causal.

    mask [R, 1, T, N] is added to the scores (see ``added``). A query that sees nothing gets zeros.
    """
    if mask is None or q.shape[2] > FEW:
        return _fused(q, k, v, mask)
    return attend_few(q, k, v, mask)


@accelerated
def attend_few(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """``attend`` for few queries and a mask in the dtype of q, all of them dense in their last dimension."""
    return _fused(q, k, v, mask)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """By torch's fused kernels. They know only as many heads of keys as of queries: so queries that share a key head
    are laid behind each other, which needs no copies of the cache."""
    shared = q.shape[1] // k.shape[1]
    if shared == 1:
        return _steady(q, k, v, mask)
    if mask is None:
        seen = torch.ones((1, 1, q.shape[2], k.shape[2]), dtype=torch.bool, device=q.device).tril()
        mask = added(seen, q.dtype)
    together = q.unflatten(1, (-1, shared)).flatten(2, 3)  # [R, Hkv, shared * T, d]
    rows = mask[:, :, None].expand(-1, -1, shared, -1, -1).flatten(2, 3)
    return _steady(together, k, v, rows).unflatten(2, (shared, -1)).flatten(1, 2)


def _steady(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """torch's attention, of enough queries for results that do not depend on their number (see steady.py)."""
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    several, masks = enough(q, mask)
    return F.scaled_dot_product_attention(several, k, v, attn_mask=masks)[:, :, : q.shape[2]]
