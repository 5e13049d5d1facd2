"""Batch invariance: a row's result does not depend on the number of rows computed with it.

A processor adds up the products of 2 rows in another order than those of 64, and those of one row in a third order.
The last bit then differs, at some point a near-tie between two tokens is decided the other way, and the rest of the
image changes: SJD in Gumbel mode would not give the image of next-token sampling, and a batch not those of its members.
So products are computed in blocks of rows that share one order, and never for a few rows or queries; and attention
reads only such numbers of keys as share one order, too.

All that is about CPUs. On a GPU our kernels are batch invariant, but for many rows a library's are faster. So there a
method must ask for it (``asking``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

QUERIES = 32  # queries per block of torch's attention on a CPU
MIN_QUERIES = (4, 8)  # queries per block, tried in this order; the last is used untested
KEYS = 512  # keys per block of torch's attention on a CPU
BUCKET = 32  # numbers of keys are multiples of it
FEWEST = 4  # rows; two or three take longer than four (AMD's Zen 4), and one has an order of its own
BLOCKS = (128, 64, 32, 16, 8, 4)  # rows per block, tried in this order; the last is used untested

_asked = False


def is_wanted() -> bool:
    """Is batch invariance asked for on a GPU? Otherwise the fastest kernels run."""
    return _asked


@contextmanager
def asking(wanted: bool) -> Iterator[None]:
    """In this context batch invariance is asked for if it is ``wanted``."""
    global _asked
    before, _asked = _asked, wanted
    try:
        yield
    finally:
        _asked = before


def split(product: Callable[[Tensor], Tensor], rows: Tensor, block: int) -> Tensor:
    """``product`` of rows [M, inputs], FEWEST to ``block`` rows at a time."""
    rest = len(rows) % block
    if 0 < rest < FEWEST:
        return split(product, torch.cat((rows, rows[-1:].expand(FEWEST - rest, -1))), block)[: len(rows)]
    if len(rows) <= block:
        return product(rows)
    return torch.cat([product(part) for part in rows.split(block)])


def invariant_rows(product: Callable[[Tensor], Tensor], rows: Tensor) -> int:
    """The largest block in which each of ``rows`` [M, inputs] has the same result as in smaller blocks of at least
    FEWEST rows; M is the largest that is tried."""
    for block in BLOCKS[:-1]:
        expected = split(product, rows, block)
        if all(torch.equal(product(rows[:count]), expected[:count]) for count in _counts(block)):
            return block
    return BLOCKS[-1]


def _counts(block: int) -> set[int]:
    """Numbers of rows, up to a block, that are multiplied by different routines."""
    return {count for count in (4, 5, 7, block // 4, block // 2, block // 2 + 1, block - 1) if count >= FEWEST}


def padded_queries(q: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [R, H, T, d] and their mask [R, 1, T, N]; the last query is repeated if a block would have too few."""
    last = q.shape[2] % QUERIES
    if last == 0 or q.device.type != "cpu" or torch.compiler.is_compiling():  # a compiler cannot try
        return q, mask
    more = min_queries(q.dtype, q.shape[-1]) - last
    if more > 0:
        q, mask = (_repeated(x, more) for x in (q, mask))
    return q, mask


def _repeated(x: Tensor, more: int) -> Tensor:
    """x [R, H, T, N] with its last query ``more`` times again."""
    if x.shape[1] == x.shape[2] == 1:
        return x.expand(-1, -1, 1 + more, -1)  # a mask, which torch reads as it is; a copy takes time in every layer
    return torch.cat((x, x[:, :, -1:].expand(-1, -1, more, -1)), dim=2)


@cache
def min_queries(dtype: torch.dtype, width: int) -> int:
    """How many queries a block of a head of that width must have: torch multiplies fewer by other routines, which sum
    in another order. Found by trying: the smallest of a few numbers from which on a query has the result that it has
    in a whole block."""
    *tried, last = MIN_QUERIES
    for count in tried:
        if all(_same_in_part(dtype, width, keys, range(count, last)) for keys in (*invariant_lengths(dtype), 2 * KEYS)):
            return count
    return last


def _same_in_part(dtype: torch.dtype, width: int, keys: int, counts: Iterable[int]) -> bool:
    """Do the first queries of a block of them have the results that they have in the whole block?"""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 12, n, width, generator=generator).to(dtype) for n in (QUERIES, keys, keys))
    mask = torch.zeros(2, 1, QUERIES, keys, dtype=dtype)
    mask[..., keys - 7 :] = -torch.inf
    whole = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return all(
        torch.equal(
            F.scaled_dot_product_attention(q[:, :, :count], k, v, attn_mask=mask[:, :, :count]), whole[:, :, :count]
        )
        for count in counts
    )


def padded_length(keys: int, dtype: torch.dtype) -> int:
    """How many keys attention on a CPU reads, some of them masked, so that more masked ones change nothing: the next
    multiple of BUCKET, of which some are left out.

    A shorter last block of keys may be summed in an order that depends on its length (on AMD's Zen 5 between 192 and
    384 keys).
    """
    whole, rest = divmod(keys, KEYS)
    return whole * KEYS + (next(length for length in invariant_lengths(dtype) if length >= rest) if rest else 0)


@cache
def invariant_lengths(dtype: torch.dtype) -> tuple[int, ...]:
    """Lengths of the last block of keys, up to KEYS, at which attention gives what it gives with KEYS keys of which the
    others are masked. Found by trying, on enough numbers that their last bits tell."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 16, n, 64, generator=generator).to(dtype) for n in (QUERIES, KEYS, KEYS))

    def invariant(length: int) -> bool:
        mask = torch.zeros(1, 1, QUERIES, KEYS, dtype=dtype)
        mask[..., length:] = -torch.inf
        short = F.scaled_dot_product_attention(q, k[:, :, :length], v[:, :, :length], attn_mask=mask[..., :length])
        return torch.equal(short, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    return *filter(invariant, range(BUCKET, KEYS, BUCKET)), KEYS
