"""A static key/value cache: fixed buffers, explicit slots, ragged rows.

Every row keeps its own committed length. A pass writes its tokens behind that length; committing moves the length (and,
for a tree, first gathers the accepted path), rolling back is simply not committing. Nothing here reads a device value
on the host, and whatever outlives a pass stays where it is in memory, so a decoding step can run without
synchronisation and be replayed as a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.attention import FEW, attend_cached
from ..kernels.cache import keep_path, open_slots
from ..kernels.rotation import Norms

BUCKET = 128  # slots come in multiples of it, so that prompts of similar lengths make steps of one shape
CPU_BUCKET = 32  # of the slots that steps look at: another shape costs nothing there


def rounded(slots: int, bucket: int = BUCKET) -> int:
    """The next multiple of a bucket."""
    return -(-slots // bucket) * bucket


def slots_of(prompt: int, places: int) -> int:
    """Slots of a cache for a prompt of so many tokens and so many places behind it.

    Both are rounded up, so that prompts of 1 to 128 tokens lead to caches of one size, and to one set of graphs.
    """
    return rounded(prompt) + rounded(places)


class RotaryTable(NamedTuple):
    """Rotations made ready for all layers of a pass, and a layer's norms of queries and keys (see kernels/rotation.py).
    """

    factors: Tensor
    halves: bool
    norms: Norms | None = None


class KVCache:
    """Keys and values ``buffer`` [layers, rows, 2 * heads, capacity, head_dim], the heads of keys first.

    ``lengths`` [rows] (int64): committed slots per row. ``reach``: steps look at the first so many slots.
    """

    def __init__(
        self, layers: int, rows: int, heads: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ):
        self.heads, self.reach = heads, capacity
        self.buffer = torch.zeros((layers, rows, 2 * heads, capacity, head_dim), dtype=dtype, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._rows = torch.arange(rows, device=device)[:, None]
        self._columns = torch.arange(capacity, device=device)
        # In memory of their own: what a captured pass allocates must not outlive its capture. Of the open tokens:
        self._slots = torch.zeros((rows, capacity), dtype=torch.int64, device=device)
        self._arrived = torch.zeros((rows, heads, FEW), dtype=torch.int32, device=device)  # see kernels/attention.py
        self._count = 0

    @property
    def capacity(self) -> int:
        return self.buffer.shape[3]

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
        cls, layers: int, rows: int, heads: int, slots: int, head_dim: int, dtype: torch.dtype, device: torch.device,
        into: KVCache | None = None,
    ) -> KVCache:
        """An empty cache of ``slots`` slots; ``into`` itself, emptied, where its sizes are these."""
        shape = (layers, rows, 2 * heads, slots, head_dim)
        if into is None or (into.buffer.shape, into.buffer.dtype, into.buffer.device) != (shape, dtype, device):
            return cls(layers, rows, heads, slots, head_dim, dtype, device)
        into.lengths.zero_()
        into.buffer.zero_()  # what is not seen is multiplied by zero, which NaN of an earlier run would survive
        into.reach = into.capacity
        return into

    def look_at(self, slots: int | None) -> int:
        """Promise that nothing of worth will stand behind the first ``slots`` (None: behind the last). Returns the
        reach, a little further."""
        bucket = CPU_BUCKET if self.buffer.device.type == "cpu" else BUCKET
        self.reach = self.capacity if slots is None else min(rounded(slots, bucket), self.capacity)
        return self.reach

    def open(self, count: int, tree_mask: Tensor | None = None, behind: int = 0) -> Tensor:
        """Reserve the next pass's ``count`` slots, after every row's length and ``behind`` uncommitted tokens.

        tree_mask [rows, count, behind + count] (bool): may token i see uncommitted token j; None is a chain. Returns
        what is added to attention scores [rows, 1, count, reach]: 0 for a slot that is seen, else minus infinity. Slots
        past the capacity are folded onto the last one; the caller provides slack so that only tokens behind the end of
        the image get there.
        """
        self._count = count
        return open_slots(
            self._slots, self.lengths, self._columns, tree_mask, count, behind, self.reach, self.buffer[0, 0, 0, 0]
        )

    def attend(self, layer: int, every: Tensor, rotary: RotaryTable, mask: Tensor) -> Tensor:
        """Attention [rows, count, H, head_dim] of the open tokens. Of their queries, keys and values ``every``
        [rows, count, H + 2 * heads, head_dim], the first two are rotated, and the last two stored in the open slots.

        mask [rows, 1, count, reach]: what is added to the scores, see kernels/attention.py.
        """
        slots = self._slots[:, : self._count]
        return attend_cached(every, *rotary, self.buffer[layer], self._rows, slots, mask, self._arrived)

    def commit(self, count: Tensor, path: Tensor | None = None) -> None:
        """Keep the first ``count`` [rows] tokens of the last pass, or of ``path`` [rows, P]: offsets into the pass,
        which increase as far as they count.

        The rotation of a kept key stays right as long as a node's position is root + depth.
        """
        if path is not None:
            keep_path(self.buffer, self.lengths, path)
        self.lengths += count
