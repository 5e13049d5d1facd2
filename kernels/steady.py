"""Batch invariance on a CPU: what a row gives does not depend on how many others are computed with it.

With 16 bits a number, a processor adds up the products of 2 rows in another order than those of 64, and those of one
row in yet another. The last bit then differs, sooner or later a near-tie between two tokens falls the other way, and
the rest of an image changes: SJD in Gumbel mode would not give next token's image, nor a batch that of its members. So
products are taken by blocks of rows within which the order is one, and nothing is computed for a single row or a few
queries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)
QUERIES = 32  # in a block of torch's attention on a CPU
FEWEST = 8  # of them; other routines multiply fewer
_BLOCKS = (64, 32, 16, 8, 4)  # of rows, tried from the first; the last is what remains
_steady: dict[tuple[torch.dtype, int, int | type, int], int] = {}


def applies(x: Tensor) -> bool:
    """Is this a tensor whose results could depend on what is computed with it?"""
    return x.device.type == "cpu" and x.dtype in HALF


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x) for x [..., inputs], by blocks of rows where that matters."""
    if not applies(x):
        return layer(x)
    rows = x.flatten(0, -2)
    outputs = len(layer.weight) if hasattr(layer, "weight") else type(layer)  # a model has one of a kind of its own
    shape = x.dtype, rows.shape[1], outputs, torch.get_num_threads()
    if shape not in _steady:
        _steady[shape] = steady_rows(layer, x.dtype, rows.shape[1])
    return in_blocks(layer, rows, _steady[shape]).unflatten(0, x.shape[:-1])


def in_blocks(product: Callable[[Tensor], Tensor], rows: Tensor, block: int) -> Tensor:
    """``product`` of rows [M, inputs], of 2 to ``block`` at a time."""
    if 1 < len(rows) <= block:
        return product(rows)
    if len(rows) % block == 1:
        return in_blocks(product, torch.cat((rows, rows[-1:])), block)[:-1]
    return torch.cat([product(part) for part in rows.split(block)])


def steady_rows(product: Callable[[Tensor], Tensor], dtype: torch.dtype, inputs: int) -> int:
    """The largest block of rows in which each gets what it gets in a smaller one of at least 2 rows.

    Found by trying: it is a matter of the processor, and of the routines that torch was built with.
    """
    rows = torch.randn(_BLOCKS[0], inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    for block in _BLOCKS[:-1]:
        expected = in_blocks(product, rows, block)
        counts = {2, 3, 5, block // 4, block // 2, block // 2 + 1, block - 1}
        if all(torch.equal(product(rows[:count]), expected[:count]) for count in counts):
            return block
    return _BLOCKS[-1]


def enough(q: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [R, H, T, d] and their mask [R, 1, T, N], the last of them repeated where a block would have too few."""
    last = q.shape[2] % QUERIES
    if not 0 < last < FEWEST or not applies(q):
        return q, mask
    more = FEWEST - last
    q, mask = (torch.cat((x, x[:, :, -1:].expand(-1, -1, more, -1)), dim=2) for x in (q, mask))
    return q, mask
