"""The decoding loop: launch a step until all images are complete, and report progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..contract import Progress, Request
from .session import Poll, Session


class DecodeState(Protocol):
    """What a step passes to the next one: tensors in frozen dataclasses."""

    @property
    def committed(self) -> Tensor:
        """[B] (int64), tokens decided so far."""
        ...

    @property
    def draft(self) -> Tensor | None:
        """[B, D] (int64), the guesses after these that the next step feeds; None if it feeds no guess."""
        ...


S = TypeVar("S", bound=DecodeState)


def decode(
    request: Request,
    session: Session,
    model_state: Any,
    step: Callable[[S], S],
    state: S,
    width: int,
    prefix_length: Tensor,
    start_time: float,
    past_end: int = 0,
) -> list[float]:
    """Repeat ``step``, which feeds ``width`` tokens past the decided ones, until all images are complete.

    state: after the first prediction, that is after the prompt and the first prefix_length [B] (int64, on the CPU)
    tokens of the image. start_time: perf_counter() at the start of the run. past_end: how many slots after those of the
    image a step needs; a chain needs none, as its tokens there are past the end. Returns the milliseconds of every
    forward pass. On a GPU one step more than necessary is launched.
    """
    length, model = request.layout.length, request.model
    poll = Poll(model.device, request.batch)
    times = [start_time]
    while True:
        known = torch.maximum(poll(state.committed), prefix_length)
        times.append(time.perf_counter())
        if request.callback:
            passes = len(times) - 1 - poll.lag
            record = session.record
            request.callback(Progress(record.image, known, length, passes, state.draft, state.committed, record.p))
        if int(known.min()) >= length:
            break
        # A step decides at most ``width`` tokens, also a step that is launched but not yet known.
        longest = min(length + past_end, int(known.max()) + (poll.lag + 1) * width)
        attention_length = model.set_attention_length(model_state, None if session.graphs.one_shape else longest)
        state = session.launch((attention_length, request.params.switches), step, state)
    times = times[:1] + times[1 + poll.lag :]
    return [1000 * (after - before) for before, after in zip(times, times[1:], strict=False)]
