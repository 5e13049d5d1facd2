"""Attention of new tokens to a key/value cache, to which their keys and values are added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device.batch_invariant import padded_queries
from ..device.dispatch import Accelerated
from .rotation import Norms, normalise, rotate
from .sampling import may_read

FEW = 128  # tokens; torch's fused kernels are for longer prompts


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive form of a boolean mask (true: visible): 0 or minus infinity. Made once for all layers of a pass."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def once(compute: Callable[[Any], Tensor]) -> property:
    """A property that is computed once. functools' has a lock up to Python 3.11, over which torch cannot trace."""
    name = f"_once_{compute.__name__}"

    def get(self: Any) -> Tensor:
        if not hasattr(self, name):
            object.__setattr__(self, name, compute(self))
        return getattr(self, name)

    return property(get, doc=compute.__doc__)


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of a forward pass: where a cache of ``capacity`` slots keeps them, and what they attend to.

    They follow ``lengths`` [R] (int64) committed and ``uncommitted`` further tokens. Each of the ``count`` sees all
    committed tokens, and the uncommitted one j where tree_mask [R, count, uncommitted + count] (bool) is true; None is
    a chain. reach: leading slots that are read. dtype: what is computed in.
    """

    lengths: Tensor
    tree_mask: Tensor | None
    count: int
    uncommitted: int
    reach: int
    capacity: int
    dtype: torch.dtype

    @once
    def _after(self) -> Tensor:
        """[R, count] (int64): the tokens before each one in a chain."""
        first = self.uncommitted
        return self.lengths[:, None] + torch.arange(first, first + self.count, device=self.lengths.device)

    @once
    def slots(self) -> Tensor:
        """[R, count] (int64): those of their keys and values. Past the capacity it is the last one."""
        return self._after.clamp(max=self.capacity - 1)

    @once
    def mask(self) -> Tensor:
        """The additive mask [R, 1, count, reach], made once for all layers: 0 where a token sees a slot, else minus
        infinity."""
        columns = torch.arange(self.reach, device=self.lengths.device)
        if self.tree_mask is None:
            seen = columns <= self._after[..., None]
        else:
            fed = self.tree_mask.shape[2]
            offset = columns - self.lengths[:, None]
            index = offset.clamp(0, fed - 1)[:, None].expand(-1, self.count, -1)
            seen = (offset < 0)[:, None] | self.tree_mask.gather(2, index) & (offset < fed)[:, None]
        return additive(seen[:, None], self.dtype)


def attend_cached(
    qkv: Tensor,
    factors: Tensor,
    halves: bool,
    norms: Norms | None,
    buffer: Tensor,
    scales: Tensor | None,
    new: NewTokens,
) -> Tensor:
    """Attention of new tokens to a cache, and to each other where their mask allows it.

    Queries and keys are normalised (with ``norms``) and rotated; keys and values are stored in the cache, then read.

    qkv [R, T, H + 2 Hkv, d]: queries, keys, values; factors as of ``factors_of`` (fp32); buffer [R, 2 Hkv, N, d]:
    keys, values. If it is int8, scales [R, 2 Hkv, N, 1] (in qkv's dtype; else None): every key and every value has its
    own, so what is stored for a token does not depend on the pass that stored it. Returns [R, T, H, d]; zeros for a
    query that sees no slot.
    """
    attended = attend_few if new.count <= FEW else attend_few.reference
    return attended(qkv, factors, halves, norms, buffer, scales, new)


@Accelerated
def attend_few(
    qkv: Tensor,
    factors: Tensor,
    halves: bool,
    norms: Norms | None,
    buffer: Tensor,
    scales: Tensor | None,
    new: NewTokens,
) -> Tensor:
    """``attend_cached`` for up to FEW tokens. buffer and scales are contiguous, tree_mask is in its last dimension.

    The Triton kernels are batch invariant: a query's result does not depend on the other rows and tokens, their number,
    or the slots that it does not see. They read int8 as it is, while the reference widens what it reads in a copy.
    """
    queries, stored = _prepared(qkv, factors, halves, norms, buffer.shape[1])
    if scales is not None:
        scale = (stored.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(qkv.dtype).tiny)  # > 0 for zeros, too
        write_slots(scales, new.slots, scale)
        stored = (stored / scale).round().clamp(-127, 127).to(torch.int8)
    write_slots(buffer, new.slots, stored)
    every = buffer[:, :, : new.reach]
    k, v = (every if scales is None else every * scales[:, :, : new.reach]).chunk(2, dim=1)
    return attend(queries.transpose(1, 2), k, v, new.mask).transpose(1, 2)


def write_slots(buffer: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write new [R, T, H, d] to slots [R, T] (int64) of buffer [R, H, N, d]."""
    if not may_read(slots):
        buffer[torch.arange(len(slots), device=slots.device)[:, None], :, slots] = new
        return
    for row, at, values in zip(buffer, slots.tolist(), new.transpose(1, 2), strict=True):
        whole = slice(at[0], at[0] + len(at))
        row[:, whole if at == [*range(whole.start, whole.stop)] else at] = values  # a slice is copied in less time


def _prepared(qkv: Tensor, factors: Tensor, halves: bool, norms: Norms | None, cached: int) -> tuple[Tensor, Tensor]:
    """New tokens normalised and rotated: queries [R, T, H, d], and the ``cached`` keys and values [R, T, 2 Hkv, d]."""
    heads = qkv.shape[2]
    qkv = qkv.clone()
    queries, keys, _ = qkv.split((heads - cached, cached // 2, cached // 2), dim=2)
    if norms is not None:
        queries.copy_(normalise(queries, *norms[0]))
        keys.copy_(normalise(keys, *norms[1]))
    rotate(qkv[:, :, : heads - cached // 2], factors, halves)
    return queries, qkv[:, :, heads - cached :]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of queries [R, H, T, d] to keys and values [R, Hkv, N, d], by torch's fused kernels; None is causal.

    mask [R, 1, T, N] is added to the scores (see ``additive``). The fused kernels need as many key heads as query
    heads. Queries that share a key head are therefore concatenated along T, which copies nothing of the cache.
    """
    shared = q.shape[1] // k.shape[1]
    if shared == 1:
        return _batch_invariant(q, k, v, mask)
    if mask is None:
        causal = torch.ones((1, 1, q.shape[2], k.shape[2]), dtype=torch.bool, device=q.device).tril()
        rows = additive(causal, q.dtype)[:, :, None]
    else:
        rows = mask[:, :, None]
    together = q.unflatten(1, (-1, shared)).flatten(2, 3)  # [R, Hkv, shared * T, d]
    rows = rows.expand(-1, -1, shared, -1, -1).flatten(2, 3)
    return _batch_invariant(together, k, v, rows).unflatten(2, (shared, -1)).flatten(1, 2)


def _batch_invariant(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """torch's attention, with queries padded so that results do not depend on their number (see batch_invariant.py)."""
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    padded, masks = padded_queries(q, mask)
    return F.scaled_dot_product_attention(padded, k, v, attn_mask=masks)[:, :, : q.shape[2]]
