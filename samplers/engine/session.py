"""What a decoding loop has around its steps: captured graphs that outlive a run, and news from the device.

On a GPU a loop does not wait for the step it has just launched: it learns how far the images are one step late, and so
launches one step more than it needs. Steps leave finished images as they are. (Adaptive trees and skipped verification
do wait, once a round: what is launched next depends on the outcome.)
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.graphs import Graphs
from ..contract import ARModel, Drafter, SamplingParams
from ..probabilities import DeviceParams
from ..trace import Record

log = logging.getLogger(__name__)
KEPT = 2  # kinds of runs whose memory and graphs stay with a model


@dataclass
class Session:
    """A kind of run: its graphs, and whose memory they work on: the states of the model and the drafter, the record."""

    graphs: Graphs
    state: Any = None
    draft_state: Any = None
    record: Record | None = None
    numbers: Tensor | None = None  # of sampling parameters, see DeviceParams

    def adopt(self, state: Any, draft_state: Any = None) -> None:
        """Take over the states of a run. Graphs over other memory are of no use."""
        if state is not self.state or draft_state is not self.draft_state:
            self.graphs.forget()
        self.state, self.draft_state = state, draft_state

    def params(self, asked: SamplingParams, device: torch.device) -> SamplingParams:
        """A run's sampling parameters as its steps take them: with numbers on the device if they are captured."""
        if not self.graphs.active:
            return asked
        params = DeviceParams.of(asked, device, self.numbers)
        self.numbers = params.numbers
        return params


@contextmanager
def session(model: ARModel, key: Hashable, drafter: Drafter | None = None) -> Iterator[Session]:
    """The session for runs of the kind ``key`` (method, settings, sizes), kept with the model for the next one.

    Without graphs nothing is kept. Graphs need all weights on the device, in place.
    """
    kept = model.kept.pop(key, None) or Session(Graphs(model.device))
    parts = [model] if drafter is None else [model, drafter.module]
    if kept.graphs.active and not all(p.device == model.device for part in parts for p in part.parameters()):
        log.warning("The model is only partly in GPU memory, so this run goes on without CUDA graphs (slower).")
        kept.graphs.active = False
    while len(model.kept) >= KEPT:
        model.kept.pop(next(iter(model.kept)))
    # Streams and Triton's launches go to the current GPU, which need not be the model's.
    with torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext():
        yield kept
    if kept.graphs.active:
        model.kept[key] = kept


class Poll:
    """Counts [B] of every image on the host: of this step on the CPU, on a GPU those of the step before.

    ``lag``: how many steps the counts are behind the newest one that was launched.
    """

    def __init__(self, device: torch.device, batch: int):
        self.lag = int(device.type == "cuda")
        self.steps = 0
        if self.lag:
            self.counts = [torch.zeros(batch, dtype=torch.int64, pin_memory=True) for _ in range(2)]
            self.arrived = [torch.cuda.Event() for _ in range(2)]

    def __call__(self, counts: Tensor) -> Tensor:
        """Hand in the counts [B] (int64) after a step; returns those known by now [B] on the CPU."""
        if not self.lag:
            return counts.cpu()
        now, before = self.steps % 2, (self.steps + 1) % 2
        self.counts[now].copy_(counts, non_blocking=True)
        self.arrived[now].record()
        if self.steps > 0:
            self.arrived[before].synchronize()
        self.steps += 1
        return self.counts[before].clone()
