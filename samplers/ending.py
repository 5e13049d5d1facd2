"""Sequences that end at a token, such as texts: a run stops when each of them has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .contract import Callback, Method, Progress, Request
from .generate import AnyRequest, Reserve, generate, leave_in_place

EVERY = 8  # passes between two looks at a GPU's tokens, which wait for it


class _EndedError(Exception):
    """Every sequence has ended: these are their tokens."""


def until(tokens: Tensor, end: int) -> list[list[int]]:
    """Ids of each sequence [B, n] before its first ``end``, or all."""
    return [row[: row.index(end)] if end in row else row for row in tokens.tolist()]


def generate_until(method: Method, request: Request, end: int, reserve: Reserve = leave_in_place) -> list[list[int]]:
    """Generate the sequences of ``request`` with ``method``, each up to its first token ``end``, which is left out.

    The distribution is the method's: what would follow the end is not sampled. reserve: see ``generate``. Raises
    ValueError for illegal settings.
    """
    every = EVERY if request.model.device.type == "cuda" else 1

    @contextmanager
    def watched(method: Method, request: AnyRequest) -> Iterator[Callback]:
        with reserve(method, request) as callback:

            def see(progress: Progress) -> None:
                if callback:
                    callback(progress)
                if progress.passes % every == 0:
                    decided = torch.arange(progress.length) < progress.committed[:, None]
                    tokens = torch.where(decided, progress.tokens.cpu(), -1)
                    if (tokens == end).any(1).all():
                        raise _EndedError(tokens)

            yield see

    try:
        tokens = generate(method, request, watched).tokens.flatten(1)
    except _EndedError as ended:
        [tokens] = ended.args
    return until(tokens, end)
