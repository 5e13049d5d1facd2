"""A static key/value cache: fixed buffers, explicit slots, ragged rows.

Every row keeps its own committed length. A pass writes its tokens behind that length; committing moves the length (and,
for a tree, first gathers the accepted path), rolling back is simply not committing. Nothing here reads a device value
on the host, so a decoding step can run without synchronisation.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values [layers, rows, heads, capacity, head_dim]; ``lengths`` [rows] (int64) committed slots per row."""

    def __init__(
        self, layers: int, rows: int, heads: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ):
        shape = (layers, rows, heads, capacity, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._rows = torch.arange(rows, device=device)[:, None]
        self._columns = torch.arange(capacity, device=device)
        self._slots = torch.zeros((rows, 0), dtype=torch.int64, device=device)

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def open(self, count: int, tree_mask: Tensor | None = None, behind: int = 0) -> Tensor:
        """Reserve the next pass's ``count`` slots, after every row's length and ``behind`` uncommitted tokens.

        tree_mask [rows, count, behind + count] (bool): may token i see uncommitted token j; None is a chain. Returns
        who sees which slot [rows, 1, count, capacity] (bool). Slots past the capacity are folded onto the last one; the
        caller provides slack so that only tokens behind the end of the image get there.
        """
        lengths = self.lengths[:, None]
        offsets = behind + torch.arange(count, device=lengths.device)
        self._slots = (lengths + offsets).clamp(max=self.capacity - 1)
        offset_of_column = self._columns - lengths  # [rows, capacity]
        if tree_mask is None:
            return (offset_of_column[:, None] <= offsets[:, None])[:, None]
        inside = (offset_of_column >= 0) & (offset_of_column < behind + count)
        index = offset_of_column.clamp(0, behind + count - 1)[:, None].expand(-1, count, -1)
        return ((offset_of_column < 0)[:, None] | (inside[:, None] & tree_mask.gather(2, index)))[:, None]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [rows, heads, count, head_dim] in the open slots; return the layer's whole buffers."""
        self.keys[layer][self._rows, :, self._slots] = keys.transpose(1, 2)
        self.values[layer][self._rows, :, self._slots] = values.transpose(1, 2)
        return self.keys[layer], self.values[layer]

    def commit(self, count: Tensor, path: Tensor | None = None) -> None:
        """Keep the first ``count`` [rows] tokens of the last pass, or of ``path`` [rows, P] (offsets into the pass).

        The rotation of a kept key stays right as long as a node's position is root + depth.
        """
        if path is not None:
            source = (self.lengths[:, None] + path).clamp(max=self.capacity - 1)
            target = (self.lengths[:, None] + torch.arange(path.shape[1], device=path.device)).clamp(
                max=self.capacity - 1
            )
            for buffer in (self.keys, self.values):
                buffer[:, self._rows, :, target] = buffer[:, self._rows, :, source].clone()
        self.lengths = self.lengths + count
