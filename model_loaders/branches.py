"""Rows of guidance branches, and states that are reused by later runs."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from torch import Tensor


class Cached(Protocol):
    """A state whose memory is a cache and a table of rotations."""

    cache: Any
    table: Any


T = TypeVar("T", bound=Cached)


def repeated(rows: Tensor, branches: int) -> Tensor:
    """Rows [B, ...] repeated for every guidance branch [R, ...]. Read-only: may be a view."""
    if branches == 1 or len(rows) == 1:
        return rows.expand(branches * len(rows), *rows.shape[1:])
    return rows.repeat(branches, *[1] * (rows.ndim - 1))


def taken_over(into: T | None, fresh: T) -> T:
    """``into``, filled with the contents of a fresh state, if its memory fits; else the fresh state."""
    if into is None or into.cache is not fresh.cache or into.table is not fresh.table:
        return fresh
    vars(into).update(vars(fresh))
    return into
