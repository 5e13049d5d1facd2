"""Sessions, which keep the caches and captured graphs of a run for the next one like it, and polling the device.

On a GPU a decoding loop does not wait for the step it has just launched. It learns the progress of the images one step
late, and so launches one step more than it needs; steps leave finished images unchanged. (Adaptive trees and skipped
verification do wait once per round, because the next launch depends on the outcome.)
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...device.graphs import Graphs
from ..continuous_contract import ContinuousModel, ContinuousRequest
from ..contract import Drafter, Method, Request, SamplingParams
from ..probabilities import DeviceParams
from ..trace import Record

log = logging.getLogger(__name__)
MAX_SESSIONS = 2  # per model; the oldest one makes room for a new one


@dataclass
class Session:
    """Captured graphs, and the memory they work on: the states of model and drafter, and the record."""

    graphs: Graphs
    state: Any = None
    draft_state: Any = None
    record: Record | None = None
    numbers: Tensor | None = None  # the sampling parameters on the device, see DeviceParams

    def adopt(self, state: Any, draft_state: Any = None) -> None:
        """Use the states of a run from now on. Graphs over other memory are dropped."""
        if state is not self.state or draft_state is not self.draft_state:
            self.graphs.forget()
        self.state, self.draft_state = state, draft_state

    @property
    def active_graphs(self) -> Graphs | None:
        """The graphs, if steps are captured."""
        return self.graphs if self.graphs.active else None

    def params(self, requested: SamplingParams, device: torch.device) -> SamplingParams:
        """The sampling parameters that steps take: with numbers on the device if steps are captured."""
        if not self.graphs.active:
            return requested
        params = DeviceParams.of(requested, device, self.numbers)
        self.numbers = params.numbers
        return params


def session_key(request: Request, *settings: Hashable) -> tuple[Hashable, ...]:
    """The key of a request's session: everything that is not a tensor, and the shapes of everything that is.

    Of the sampling parameters it holds only guidance, which doubles the rows; every graph gets the others as inputs.
    """
    where = (None if each is None else each.shape for each in (request.strength, request.skippable))
    layout, model = request.layout, request.model
    sizes = layout.rows, layout.cols, layout.stride, layout.lead, layout.forced.shape, layout.forces, *where
    # A rule or a schedule that is bound to the model may have tables of its codebook.
    return *settings, request.params.guided, request.batch, *sizes, id(model.codebook), str(model.device)


def continuous_session_key(request: ContinuousRequest, *settings: Hashable) -> tuple[Hashable, ...]:
    """The same for vectors. A session has graphs of several shapes, and only numbers depend on parameters."""
    return *settings, request.guided, request.batch, request.grid, str(request.model.device)


@contextmanager
def use_session(
    method: Method, request: Request | ContinuousRequest, drafter: Drafter | ContinuousModel | None = None
) -> Iterator[Session]:
    """The model's session of the method's key (see session_key), or a new one, which stays with the model afterwards.

    Without graphs no session stays. Graphs need all weights on the device, in place.
    """
    model, key = request.model, method.session_key(request)
    session = model.sessions.pop(key, None)
    if session is None or not Graphs.may_capture(model.device):
        session = Session(Graphs(model.device))
    parts: list[Any] = [model] if drafter is None else [model, drafter.module]
    if session.graphs.active and not all(p.device == model.device for part in parts for p in part.parameters()):
        log.warning("The model is only partly in GPU memory, so this run goes on without CUDA graphs (slower).")
        session.graphs.active = False
    while len(model.sessions) >= MAX_SESSIONS:
        model.sessions.pop(next(iter(model.sessions)))
    # Streams and Triton's launches go to the current GPU, which need not be the model's.
    try:
        with torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext():
            yield session
    except RuntimeError:  # what a GPU refused may have left anything; other errors only stop the run
        session.graphs.active = False
        raise
    finally:
        if session.graphs.active:
            model.sessions[key] = session


class Poll:
    """Reads the progress of every image on the host: of the newest step on the CPU, of the step before it on a GPU.

    ``lag``: how many steps the counts are older than the newest step launched.
    """

    def __init__(self, device: torch.device, batch: int):
        self.lag = int(device.type == "cuda")
        self.steps = 0
        if self.lag:
            self.counts = [torch.zeros(batch, dtype=torch.int64, pin_memory=True) for _ in range(2)]
            self.arrived = [torch.cuda.Event() for _ in range(2)]

    def __call__(self, counts: Tensor) -> Tensor:
        """Submit the counts [B] (int64) after a step. Returns the latest known counts [B] on the CPU."""
        if not self.lag:
            return counts.cpu()
        now, before = self.steps % 2, (self.steps + 1) % 2
        self.counts[now].copy_(counts, non_blocking=True)
        self.arrived[now].record()
        if self.steps > 0:
            self.arrived[before].synchronize()
        self.steps += 1
        return self.counts[before].clone()
