"""Rows of guidance branches, their prompts, and states that are reused by later runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

from torch import Tensor

from .networks.cache import KVCache, Mask
from .networks.positions import Rotation

PROMPT_PASS = 1024  # prompt tokens of a forward pass: an image takes 4096, and attention has a mask over all before it


class Cached(Protocol):
    """A state whose memory is a cache and a table of rotations."""

    cache: Any
    table: Any


T = TypeVar("T", bound=Cached)


def repeat_rows(rows: Tensor, branches: int) -> Tensor:
    """Rows [B, ...] repeated for every guidance branch [R, ...]. Read-only: may be a view."""
    if branches == 1 or len(rows) == 1:
        return rows.expand(branches * len(rows), *rows.shape[1:])
    return rows.repeat(branches, *[1] * (rows.ndim - 1))


def prompt_passes(rotation: Rotation, lengths: Tensor, cache: KVCache) -> Iterator[tuple[slice, Rotation, Mask]]:
    """The forward passes that read prompts of ``lengths`` [R] (int64) tokens into an empty cache: which of the tokens,
    their part of ``rotation`` [1, n, ...], and their mask (see ``KVCache.open``).

    A shorter prompt is padded after its end: causal attention hides the padding, which is not committed, so that the
    image's tokens overwrite it. Afterwards steps attend to the whole cache again.
    """
    for begin in range(0, rotation.cos.shape[1], PROMPT_PASS):
        part = slice(begin, min(begin + PROMPT_PASS, rotation.cos.shape[1]))
        count = part.stop - begin
        cache.set_attention_length(part.stop)
        yield part, rotation._replace(cos=rotation.cos[:, part], sin=rotation.sin[:, part]), cache.open(count)
        cache.commit((lengths - begin).clamp(0, count))
    cache.set_attention_length(cache.capacity)


def take_over(into: T | None, fresh: T) -> T:
    """``into``, filled with the contents of a fresh state, if its memory fits; else the fresh state."""
    if into is None or into.cache is not fresh.cache or into.table is not fresh.table:
        return fresh
    vars(into).update(vars(fresh))
    return into
