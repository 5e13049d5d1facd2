"""Batch invariance on a CPU: a row's result does not depend on the number of rows computed with it.

In 16-bit floats, a processor adds up the products of 2 rows in another order than those of 64, and those of one row in
a third order. The last bit then differs, at some point a near-tie between two tokens is decided the other way, and the
rest of the image changes: SJD in Gumbel mode would not give the image of next-token sampling, and a batch not those of
its members. So products are computed in blocks of rows that share one order, and never for one row or a few queries;
and attention reads only such numbers of keys as share one order, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)
QUERIES = 32  # queries per block of torch's attention on a CPU
MIN_QUERIES = (4, 8)  # queries per block, tried in this order; the last is used untested
KEYS = 512  # keys per block of torch's attention on a CPU
BUCKET = 32  # numbers of keys are multiples of it
BLOCKS = (128, 64, 32, 16, 8, 4)  # rows per block, tried in this order; the last is used untested
TIMED_ROWS = (2, 34)  # of a pass with guidance: of one token, and of a window of 17
TRIES = 3


class Plan(NamedTuple):
    """How the products of one shape are computed, and how many rows at a time."""

    product: Callable[[nn.Module, Tensor], Tensor]
    block: int


_plans: dict[tuple[torch.dtype, int, int | type, int, bool], Plan] = {}


def applies(x: Tensor) -> bool:
    """Can a row's result depend on the other rows, for tensors of this device and dtype?"""
    return x.device.type == "cpu" and x.dtype in HALF


def linear(layer: nn.Module, x: Tensor, own_weights: bool = False) -> Tensor:
    """layer(x) for x [..., inputs], in blocks of rows where that matters.

    own_weights: the layer is an nn.Linear whose parameters may be used instead of calling it.
    """
    if not applies(x):
        return layer(x)
    rows = x.flatten(0, -2)
    outputs = len(layer.weight) if hasattr(layer, "weight") else type(layer)  # a model has one layer of such a class
    shape = x.dtype, rows.shape[1], outputs, torch.get_num_threads(), own_weights
    if shape not in _plans:
        _plans[shape] = plan(layer, x.dtype, rows.shape[1], own_weights)
    product, block = _plans[shape]
    return in_blocks(partial(product, layer), rows, block).unflatten(0, x.shape[:-1])


def called(layer: nn.Module, rows: Tensor) -> Tensor:
    return layer(rows)


def transposed(layer: nn.Linear, rows: Tensor) -> Tensor:
    """(W x^T)^T: processors with matrix units read a large W faster as the first factor."""
    return (layer.weight @ rows.T).T.contiguous()


def plan(layer: nn.Module, dtype: torch.dtype, inputs: int, own_weights: bool) -> Plan:
    """The faster of two plans that give the same results. Found by trying: it depends on the processor and on the
    libraries that torch was built with. The time decides only which of two equal results is computed."""
    rows = torch.randn(BLOCKS[0], inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain = Plan(called, invariant_rows(partial(called, layer), rows))
    if not own_weights or layer.bias is not None:
        return plain
    other = Plan(transposed, invariant_rows(partial(transposed, layer), rows))

    def compute(plan: Plan, count: int) -> Tensor:
        return in_blocks(partial(plan.product, layer), rows[:count], plan.block)

    if not all(torch.equal(compute(plain, count), compute(other, count)) for count in _counts(BLOCKS[0])):
        return plain
    return min(plain, other, key=lambda plan: sum(shortest(partial(compute, plan, n), TRIES) for n in TIMED_ROWS))


def shortest(run: Callable[[], object], tries: int) -> float:
    """Seconds of the shortest of several runs: what other programs do meanwhile hardly changes that."""
    seconds = []
    for _ in range(tries):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def in_blocks(product: Callable[[Tensor], Tensor], rows: Tensor, block: int) -> Tensor:
    """``product`` of rows [M, inputs], 2 to ``block`` rows at a time."""
    if 1 < len(rows) <= block:
        return product(rows)
    if len(rows) % block == 1:
        return in_blocks(product, torch.cat((rows, rows[-1:])), block)[:-1]
    return torch.cat([product(part) for part in rows.split(block)])


def invariant_rows(product: Callable[[Tensor], Tensor], rows: Tensor) -> int:
    """The largest block in which each of ``rows`` [M, inputs] has the same result as in smaller blocks of at least 2
    rows; M is the largest that is tried."""
    for block in BLOCKS[:-1]:
        expected = in_blocks(product, rows, block)
        if all(torch.equal(product(rows[:count]), expected[:count]) for count in _counts(block)):
            return block
    return BLOCKS[-1]


def _counts(block: int) -> set[int]:
    """Numbers of rows, up to a block, that are multiplied by different routines."""
    return {2, 3, 5, block // 4, block // 2, block // 2 + 1, block - 1}


def padded_queries(q: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [R, H, T, d] and their mask [R, 1, T, N]; the last query is repeated if a block would have too few."""
    last = q.shape[2] % QUERIES
    if last == 0 or not applies(q):
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
    multiple of BUCKET, of which in 16-bit floats some are left out.

    A shorter last block of keys may be summed in an order that depends on its length (on AMD's Zen 5 between 192 and
    384 keys).
    """
    whole, rest = divmod(keys, KEYS)
    lengths = invariant_lengths(dtype) if dtype in HALF else range(BUCKET, KEYS + 1, BUCKET)
    return whole * KEYS + (next(length for length in lengths if length >= rest) if rest else 0)


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
