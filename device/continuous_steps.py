"""Steps of models that run in many sizes, for capture (device/graphs.py): a few sizes, and passes as steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .graphs import leaves, shapes_and_dtypes

T = TypeVar("T")
Graphs = Callable[[Hashable, Callable[[Any], Any], Any], Any]  # graphs.Graphs of a run that captures
ROWS = 16
PARTS = 8  # of an image


def padded_rows(count: int) -> int:
    """The rows of a captured step for ``count`` independent ones: a power of two up to ROWS, then a multiple of it."""
    return min(1 << (count - 1).bit_length(), -(-count // ROWS) * ROWS)


def padded_tokens(count: int, length: int) -> int:
    """The tokens that a captured pass reads where ``count`` of ``length`` are known: a multiple of ``length`` /
    PARTS."""
    part = -(-length // PARTS)
    return min(length, max(1, -(-count // part)) * part)


def with_rows(tensor: Tensor, count: int) -> Tensor:
    """[..., count, C]: the rows [..., N, C], and zeros."""
    return F.pad(tensor, (0, 0, 0, count - tensor.shape[-2])) if tensor.shape[-2] < count else tensor


def captured_step(graphs: Graphs | None, settings: Hashable, step: Callable[[T], T], state: T) -> T:
    """step(state), captured by ``graphs`` if there are any. settings: what differs besides shapes, the module
    included."""
    return step(state) if graphs is None else graphs((settings, *shapes_and_dtypes(leaves(state))), step, state)


def captured_pass(
    graphs: Graphs | None,
    settings: Hashable,
    function: Callable[..., Tensor],
    inputs: tuple[Any, ...],
    size: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """function(*inputs), a tensor of this size and dtype, as ``captured_step``. It is valid until the next step."""
    if graphs is None:
        return function(*inputs)
    state = inputs, torch.empty(size, dtype=dtype, device=device)
    return captured_step(graphs, settings, lambda state: (state[0], function(*state[0])), state)[1]
