"""Counter-based random numbers: Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A number depends on (key, position, purpose, draw) alone: position, purpose and draw are words of the counter, and its
fourth word is the lane in a vector. Keys [B, 2] (int64) are the low and high words of each image's seed; positions
[B, T] (int64) and ``draw`` (an int or int64 [B or 1, T or 1]) must be in [0, 2^32).
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from ..device.dispatch import Accelerated

log = logging.getLogger(__name__)
WORD = 0xFFFFFFFF
ROUNDS = 10
_EXACT = ("cpu", "cuda", "meta")  # device types known to multiply exactly; meta tensors hold no numbers


@cache
def _constants(device: torch.device) -> tuple[Tensor, ...]:
    """The multipliers of words 0 and 2 [2], the Weyl increments of the key's two words in each round [ROUNDS, 2], 32,
    and the mask of a word: as tensors, which torch takes faster than Python numbers."""
    weyl = [[0x9E3779B9 * i & WORD, 0xBB67AE85 * i & WORD] for i in range(ROUNDS)]
    numbers = [0xD2511F53, 0xCD9E8D57], weyl, 32, WORD
    return tuple(torch.tensor(number, dtype=torch.int64, device=device) for number in numbers)


@cache
def multiplies_exactly(device: torch.device) -> bool:
    """Are products of int64 numbers exact modulo 2^64 on this device? Other devices than CPUs and NVIDIA and AMD GPUs
    are tested once."""
    if device.type in _EXACT:
        return True
    words = torch.tensor([0xD2511F53, 0xCD9E8D57, 2**24 + 1, WORD], dtype=torch.int64, device="cpu")
    there = words.to(device)
    exact = torch.equal((there[:, None] * there).cpu(), words[:, None] * words)
    if not exact:
        log.warning("%s multiplies int64 numbers wrongly: random numbers are computed on the CPU (slower).", device)
    return exact


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words for four counter words and two key words (int64 tensors in [0, 2^32), broadcast together).

    Words 0 and 2 are in one tensor, 1 and 3 in another, so both halves of a round are the same operations. The 64-bit
    products wrap modulo 2^64 in int64; an arithmetic shift and a mask give their high words.
    """
    device = key[0].device
    if not multiplies_exactly(device):
        words = philox(*(tuple(x.cpu() for x in given) for given in (counter, key)))
        return tuple(word.to(device) for word in words)
    multipliers, weyl, half, mask = _constants(device)
    pairs = [torch.stack(torch.broadcast_tensors(*pair)) for pair in (counter[::2], counter[1::2], key)]
    rank = max(words.ndim for words in pairs)
    even, odd, keys = (words.reshape(2, *[1] * (rank - words.ndim), *words.shape[1:]) for words in pairs)
    multipliers = multipliers.reshape(2, *[1] * (rank - 1))
    for round_key in ((keys + weyl.reshape(ROUNDS, *multipliers.shape)) & mask).unbind():
        product = (even * multipliers).roll(1, 0)  # swaps the products: each changes the other half's words
        even = ((product >> half) ^ round_key ^ odd).bitwise_and_(mask)
        odd = product.bitwise_and_(mask)
    return even[0], odd[0], even[1], odd[1]


@Accelerated
def uniform(positions: Tensor, keys: Tensor, purposes: tuple[int, ...], draw: int | Tensor) -> Tensor:
    """Numbers in [0, 1) (fp32, multiples of 2^-24) for every purpose and position: [purposes, B, T]."""
    counter = (positions, row(purposes, positions.device), draws(draw, positions), positions.new_zeros(()))
    return (philox(counter, (keys[:, :1], keys[:, 1:]))[0] >> 8).float().mul_(2**-24)


@Accelerated
def gumbel(positions: Tensor, keys: Tensor, count: int, purpose: int, draw: int | Tensor) -> Tensor:
    """Standard Gumbel noise [B, T, count] (fp32), always finite. The first numbers do not depend on ``count``."""
    # v in (0, 1), finest near 0, which gives the largest noise. It must not be 0 or round to 1: infinite noise plus the
    # log of a probability of zero is NaN, which argmax takes for the largest.
    v = _fractions(positions, keys, count, purpose, draw).clamp_(2**-33, 1 - 2**-24)
    return v.neg_().log1p_().neg_().log_().neg_()[..., :count]


@Accelerated
def normal(positions: Tensor, keys: Tensor, count: int, purpose: int, draw: int | Tensor) -> Tensor:
    """Standard normal numbers [B, T, count] (fp32), by the Box-Muller transform. The first numbers do not depend on
    ``count``."""
    radius, angle = _fractions(positions, keys, count, purpose, draw).unflatten(-1, (-1, 2)).unbind(-1)
    radius = (-2 * radius.clamp(2**-33, 1).log()).sqrt()
    angle = angle * (2 * torch.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(-2)[..., :count]


def _fractions(positions: Tensor, keys: Tensor, count: int, purpose: int, draw: int | Tensor) -> Tensor:
    """(word + 1/2) / 2^32 of the words of every lane: [B, T, count], ``count`` rounded up to a multiple of four."""
    lanes = torch.arange((count + 3) // 4, device=positions.device)
    purposes = row((purpose,), positions.device)[0, 0]
    counter = (positions.unsqueeze(-1), purposes, draws(draw, positions).unsqueeze(-1), lanes)
    words = philox(counter, (keys[:, :1, None], keys[:, 1:, None]))
    fractions = torch.empty((len(keys), positions.shape[1], len(lanes), 4), device=positions.device)
    for column, word in zip(fractions.unbind(-1), words, strict=True):
        column.copy_(word)
    return fractions.flatten(-2).add_(0.5).mul_(2**-32)


@cache
def row(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers as a tensor [n, 1, 1], made once because it is a copy from the host."""
    return torch.tensor(numbers, device=device)[:, None, None]


def draws(draw: int | Tensor, positions: Tensor) -> Tensor:
    """``draw`` as a tensor that broadcasts over positions."""
    return draw if isinstance(draw, Tensor) else row((draw,), positions.device)[0]
