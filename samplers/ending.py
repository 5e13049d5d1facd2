"""Sequences that end at a token, such as texts: a run stops when each of them has ended."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from .contract import Method, Progress, Request
from .engine.first_use import check_captured
from .generate import Reserve, unmanaged

EVERY = 8  # passes between two looks at a GPU's tokens, which wait for it


class _EndedError(Exception):
    """Every sequence has ended."""


def until(tokens: Tensor, end: int) -> list[list[int]]:
    """Ids of each sequence [B, n] before its first ``end``, or all."""
    return [row[: row.index(end)] if end in row else row for row in tokens.tolist()]


def generate_until(method: Method, request: Request, end: int, reserve: Reserve = unmanaged) -> list[list[int]]:
    """Generate the sequences of ``request`` with ``method``, each up to its first token ``end``, which is left out.

    The distribution is the method's: what would follow the end is not sampled. reserve: see ``generate``. Raises
    ValueError for illegal settings.
    """
    method.check(request)
    every = EVERY if request.model.device.type == "cuda" else 1
    found: list[Tensor] = []
    with torch.inference_mode(), reserve(method, request) as callback:
        check_captured(method, request)

        def see(progress: Progress) -> None:
            if callback:
                callback(progress)
            if progress.passes % every == 0:
                decided = torch.arange(progress.length) < progress.committed[:, None]
                tokens = torch.where(decided, progress.tokens.cpu(), -1)
                if (tokens == end).any(1).all():
                    found.append(tokens)
                    raise _EndedError

        with suppress(_EndedError):
            found.append(method.sample(replace(request, callback=see)).tokens)
    return until(found[0], end)
