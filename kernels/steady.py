"""Batch invariance on a CPU: a row's result does not depend on the number of rows computed with it.

In 16-bit floats, a processor adds up the products of 2 rows in another order than those of 64, and those of one row in
a third order. The last bit then differs, at some point a near-tie between two tokens is decided the other way, and the
rest of the image changes: SJD in Gumbel mode would not give the image of next-token sampling, and a batch not those of
its members. So products are computed in blocks of rows that share one order, and never for one row or a few queries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)
QUERIES = 32  # queries per block of torch's attention on a CPU
FEWEST = 8  # queries per block; torch multiplies fewer by other routines
_BLOCKS = (64, 32, 16, 8, 4)  # rows per block, tried in this order; the last is used untested
_steady: dict[tuple[torch.dtype, int, int | type, int], int] = {}


def applies(x: Tensor) -> bool:
    """Can a row's result depend on the other rows, for tensors of this device and dtype?"""
    return x.device.type == "cpu" and x.dtype in HALF


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x) for x [..., inputs], in blocks of rows where that matters."""
    if not applies(x):
        return layer(x)
    rows = x.flatten(0, -2)
    outputs = len(layer.weight) if hasattr(layer, "weight") else type(layer)  # a model has one layer of such a class
    shape = x.dtype, rows.shape[1], outputs, torch.get_num_threads()
    if shape not in _steady:
        _steady[shape] = steady_rows(layer, x.dtype, rows.shape[1])
    return in_blocks(layer, rows, _steady[shape]).unflatten(0, x.shape[:-1])


def in_blocks(product: Callable[[Tensor], Tensor], rows: Tensor, block: int) -> Tensor:
    """``product`` of rows [M, inputs], 2 to ``block`` rows at a time."""
    if 1 < len(rows) <= block:
        return product(rows)
    if len(rows) % block == 1:
        return in_blocks(product, torch.cat((rows, rows[-1:])), block)[:-1]
    return torch.cat([product(part) for part in rows.split(block)])


def steady_rows(product: Callable[[Tensor], Tensor], dtype: torch.dtype, inputs: int) -> int:
    """The largest block in which each row has the same result as in smaller blocks of at least 2 rows.

    Found by trying: it depends on the processor and on the libraries that torch was built with.
    """
    rows = torch.randn(_BLOCKS[0], inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    for block in _BLOCKS[:-1]:
        expected = in_blocks(product, rows, block)
        counts = {2, 3, 5, block // 4, block // 2, block // 2 + 1, block - 1}
        if all(torch.equal(product(rows[:count]), expected[:count]) for count in counts):
            return block
    return _BLOCKS[-1]


def enough(q: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [R, H, T, d] and their mask [R, 1, T, N]; the last query is repeated if a block would have too few."""
    last = q.shape[2] % QUERIES
    if not 0 < last < FEWEST or not applies(q):
        return q, mask
    more = FEWEST - last
    q, mask = (torch.cat((x, x[:, :, -1:].expand(-1, -1, more, -1)), dim=2) for x in (q, mask))
    return q, mask
