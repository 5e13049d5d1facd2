"""What a profiler tells of a run on a GPU: synchronisations between polls, and launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from comfyui_specar.kernels.graphs import Graphs
from comfyui_specar.samplers.engine.session import Session
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..passes import Sampler

POLL = "cudaEventSynchronize"  # the host reads how far the images are, one step late
BLOCKING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "Memcpy DtoH (Device -> Pageable)")


class Eager(dict):
    """In place of what runs leave with a model: every session is new, and its graphs are switched off."""

    def pop(self, key: Any, default: Any = None) -> Session:
        return Session(Graphs(torch.device("cpu")))


def between_polls(events: Iterable[tuple[float, str]]) -> dict[str, Any]:
    """Polls, and what else blocked the host between the first and the last of them. events: (start, name)."""
    events = sorted(events)
    polls = [start for start, name in events if name == POLL]
    inside = (name for start, name in events if polls and polls[0] < start < polls[-1])
    return {"polls": len(polls), "between": dict(Counter(name for name in inside if name in BLOCKING))}


def per_pass(polls: Sequence[float], launched: Iterable[float]) -> float | None:
    """How many of the moments ``launched`` lie between two polls on average (None: there were no two polls)."""
    inside = sum(min(polls) < moment < max(polls) for moment in launched) if polls else 0
    return round(inside / (len(polls) - 1), 1) if len(polls) > 1 else None


def synchronisations(contestant: Sampler, device: torch.device) -> dict[str, Any]:
    """Of a run whose graphs were captured before: polls, other synchronisations, and what the device did in a pass
    (kernels and copies, each of which was launched by itself or as a part of a graph)."""
    for seed in range(2):
        contestant(seed)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, acc_events=True) as prof:
        ran = contestant(2)
    events = prof.events()
    found = between_polls((event.time_range.start, event.name) for event in events)
    polls = [event.time_range.start for event in events if event.name == POLL]
    launched = (
        event.time_range.start
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    return found | {"passes": ran.passes, "launches": per_pass(polls, launched)}
