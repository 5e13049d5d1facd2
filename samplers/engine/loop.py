"""The loop around a step: launch it until all images are complete, and tell the host how far they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..contract import Progress, Request
from .session import Poll, Session


class Carry(Protocol):
    """What a step hands to the next one: tensors in frozen dataclasses."""

    @property
    def committed(self) -> Tensor:
        """[B] (int64), tokens decided so far."""
        ...

    @property
    def draft(self) -> Tensor | None:
        """[B, D] (int64), the guesses behind these that the next step feeds; None: it feeds no guess."""
        ...


C = TypeVar("C", bound=Carry)


def kind(request: Request, *settings: Hashable) -> tuple[Hashable, ...]:
    """The session's key: all that is not a tensor, and the shapes of all that are.

    Of the sampling parameters only guidance, which doubles the rows; the others are told to every graph.
    """
    where = (None if each is None else each.shape for each in (request.strength, request.skippable))
    layout, model = request.layout, request.model
    sizes = layout.rows, layout.cols, layout.stride, layout.forced.shape, layout.forces, *where
    # A rule or a schedule that is bound to the model may have tables of its codebook.
    return *settings, request.params.guided, request.batch, *sizes, id(model.codebook), str(model.device)


def decode(
    request: Request, kept: Session, state: Any, step: Callable[[C], C], carry: C, width: int, given: Tensor,
    begun: float,
) -> list[float]:
    """Repeat ``step``, which feeds ``width`` tokens behind the decided ones, until all images are complete.

    ``carry`` is that of the first prediction, behind the prompt and ``given`` [B] tokens (on the CPU); ``begun``
    (perf_counter) is when the run began. Returns the milliseconds of every pass. On a GPU one step more than necessary
    is launched.
    """
    length, model = request.layout.length, request.model
    poll = Poll(model.device, request.batch)
    times = [begun]
    while True:
        known = torch.maximum(poll(carry.committed), given)
        times.append(time.perf_counter())
        if request.callback:
            passes = len(times) - 1 - poll.lag
            request.callback(Progress(kept.record.image, known, length, passes, carry.draft, carry.committed))
        if int(known.min()) >= length:
            break
        # Of those that are launched but not yet known, a step decides ``width`` tokens at most.
        ahead = min(length, int(known.max()) + (poll.lag + 1) * width)
        attention_length = model.set_attention_length(state, None if kept.graphs.one_shape else ahead)
        carry = kept.graphs((attention_length, request.params.switches), step, carry)
    times = times[:1] + times[1 + poll.lag :]
    return [1000 * (after - before) for before, after in zip(times, times[1:], strict=False)]
