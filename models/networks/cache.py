"""A static key/value cache: fixed buffers, explicit slots, ragged rows.

Every row keeps its own committed length. A forward pass writes its tokens after that length; committing moves the
length (and, for a tree, first gathers the accepted path), rolling back is simply not committing. Nothing here reads a
device value on the host, and everything that outlives a pass keeps its address, so a decoding step can run without
synchronisation and be replayed as a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import batch_invariant
from ...kernels.attention import NewTokens, attend_cached
from .positions import RotaryTable

Mask = NewTokens | Tensor | None  # of a forward pass: with a cache what its ``open`` returned, else see Backbone
BUCKET = 128  # slots per allocation step: prompts of similar lengths lead to steps of one shape


def round_up(slots: int) -> int:
    """``slots`` rounded up to a multiple of BUCKET."""
    return -(-slots // BUCKET) * BUCKET


def cache_slots(prompt: int, places: int, dtype: torch.dtype, device: torch.device) -> int:
    """Slots of a cache for a prompt of ``prompt`` tokens and ``places`` tokens after it.

    Both are rounded up: prompts of 1 to 128 tokens lead to caches of one size, and to one set of graphs. A whole cache
    may be read, too.
    """
    return _read(round_up(prompt) + round_up(places), dtype, device)


def _read(slots: int, dtype: torch.dtype, device: torch.device) -> int:
    """Slots that a step attends to. A CPU has no graphs that a new shape would have to capture."""
    return batch_invariant.padded_length(slots, dtype) if device.type == "cpu" else round_up(slots)


class KVCache:
    """Keys and values ``buffer`` [layers, rows, 2 * heads, capacity, head_dim], the heads of keys first.

    narrow: store them in int8, with ``scales`` [layers, rows, 2 * heads, capacity, 1] in ``dtype`` (else None).
    ``lengths`` [rows] (int64): committed slots per row. ``attention_length``: leading slots that steps attend to.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        narrow: bool = False,
    ):
        self.heads, self.attention_length = heads, capacity
        slots = layers, rows, 2 * heads, capacity
        self.buffer = torch.zeros((*slots, head_dim), dtype=torch.int8 if narrow else dtype, device=device)
        self.scales = torch.zeros((*slots, 1), dtype=dtype, device=device) if narrow else None
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)

    @property
    def capacity(self) -> int:
        return self.buffer.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return self._parts[-1].dtype

    @property
    def _parts(self) -> list[Tensor]:
        return [self.buffer] if self.scales is None else [self.buffer, self.scales]

    @property
    def keys(self) -> Tensor:
        """[layers, rows, heads, capacity, head_dim]"""
        return self.buffer[:, :, : self.heads]

    @property
    def values(self) -> Tensor:
        """[layers, rows, heads, capacity, head_dim]"""
        return self.buffer[:, :, self.heads :]

    @classmethod
    def of(
        cls,
        layers: int,
        rows: int,
        heads: int,
        slots: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        into: KVCache | None = None,
        narrow: bool = False,
    ) -> KVCache:
        """An empty cache of ``slots`` slots: ``into`` itself, emptied, if it has these sizes."""
        asked = (layers, rows, 2 * heads, slots, head_dim), dtype, device, narrow
        if into is None or (into.buffer.shape, into.dtype, into.buffer.device, into.scales is not None) != asked:
            return cls(layers, rows, heads, slots, head_dim, dtype, device, narrow)
        into.lengths.zero_()
        for part in into._parts:
            part.zero_()  # hidden slots get weight zero, and 0 * NaN of an earlier run would be NaN
        into.attention_length = into.capacity
        return into

    def set_attention_length(self, slots: int | None) -> int:
        """Declare that only the first ``slots`` (None: all) will be used. Returns it, rounded up to a bucket."""
        read = self.capacity if slots is None else _read(slots, self.dtype, self.buffer.device)
        self.attention_length = min(read, self.capacity)
        return self.attention_length

    def open(self, count: int, tree_mask: Tensor | None = None, uncommitted: int = 0) -> NewTokens:
        """Reserve ``count`` slots for the next forward pass, after each row's committed and ``uncommitted`` tokens.

        tree_mask [rows, count, uncommitted + count] (bool): may token i see uncommitted token j; None is a chain.
        Slots past the capacity are clamped to the last one; callers leave enough room that only tokens past the end of
        the image get there.
        """
        return NewTokens(self.lengths, tree_mask, count, uncommitted, self.attention_length, self.capacity, self.dtype)

    def attend(self, layer: int, qkv: Tensor, rotary: RotaryTable, new: NewTokens) -> Tensor:
        """Attention [rows, count, H, head_dim] of the tokens that ``open`` returned.

        qkv [rows, count, H + 2 * heads, head_dim]: queries, keys and values. Queries and keys are rotated; keys and
        values are stored in the tokens' slots.
        """
        scales = None if self.scales is None else self.scales[layer]
        return attend_cached(qkv, *rotary, self.buffer[layer], scales, new)

    def commit(self, count: Tensor, path: Tensor | None = None) -> None:
        """Keep the first ``count`` [rows] tokens of the last forward pass, or of ``path`` [rows, P].

        path: offsets into the pass, increasing over the first ``count``. The rotation of a kept key stays valid as long
        as a node's position is root + depth.
        """
        if path is not None:
            for part in self._parts:
                keep_path(part, self.lengths, path)
        self.lengths += count


def keep_path(buffer: Tensor, lengths: Tensor, path: Tensor) -> None:
    """In every layer and head, move slot lengths + path[:, i] to slot lengths + i, in place.

    buffer [layers, rows, heads, capacity, d]; lengths [rows]; path [rows, P] (int64): increasing offsets of the slots
    to keep. Entries with path[:, i] < i pad shorter paths and move nothing. Slots past the capacity are clamped to the
    last one.
    """
    target = torch.arange(path.shape[1], device=path.device)
    target, source = ((lengths[:, None] + x).clamp(max=buffer.shape[3] - 1) for x in (target, path.maximum(target)))
    rows = torch.arange(len(path), device=path.device)[:, None]
    buffer[:, rows, :, target] = buffer[:, rows, :, source]
