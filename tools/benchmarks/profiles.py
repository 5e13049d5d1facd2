"""What a profiler tells: shares of a pass; on a GPU also synchronisations between polls, and Triton kernels beside
their torch references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from comfyui_specar.kernels import dispatch
from comfyui_specar.kernels.graphs import Graphs, leaves
from comfyui_specar.samplers.engine.session import Session
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from .calls import copied, triton_kernel, watched
from .passes import Sampler, Span, timed

POLL = "cudaEventSynchronize"  # the host reads how far the images are, one step late
BLOCKING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "Memcpy DtoH (Device -> Pageable)")
PROFILED = 4  # passes: reading a profile takes much longer than making it
PARTS = ("prompt", "forward", "drafter")


class Eager(dict):
    """In place of what runs leave with a model: every session is new, and its graphs are switched off."""

    def pop(self, key: Any, default: Any = None) -> Session:
        return Session(Graphs(torch.device("cpu")))


def _activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")


def work(make: Callable[[Span], Sampler], device: torch.device) -> dict[str, float]:
    """Milliseconds of a pass that the device works for the model, the drafter and the sampler, launched one by one
    (which takes the same kernels as a graph of them); on a CPU also those of the host between torch's operations."""
    contestant = make(record_function)
    contestant.staged.sessions, contestant.most = Eager(), PROFILED
    contestant(0)
    with profile(activities=_activities(device), acc_events=True) as prof, record_function("run"):
        ran = contestant(1)
    events = [event for event in prof.events() if event.device_type == DeviceType.CPU]
    spent = "device_time_total" if device.type == "cuda" else "cpu_time_total"
    run = next(event for event in events if event.name == "run")
    parts = {part: sum(getattr(event, spent) for event in events if event.name == part) for part in PARTS}
    if device.type == "cuda":
        found = {"sampling": getattr(run, spent) - sum(parts.values())}
    else:
        found = {"sampling": sum(event.cpu_time_total for event in run.cpu_children if event.name not in PARTS)}
        found["host"] = run.cpu_time_total - sum(parts.values()) - found["sampling"]
    parts.pop("prompt")
    passes = ran.passes + (device.type == "cuda")  # one more was launched than the host knew of
    return {part: us / 1e3 / passes for part, us in (parts | found).items()}


def shares(timed_shares: dict[str, float], worked: dict[str, float], pass_ms: float) -> dict[str, float]:
    """Shares of a pass that lasts ``pass_ms``, from ``work``: of the model, the drafter, the sampler and the host (on a
    GPU: the time in which the device has nothing to do). On a CPU the model's and the drafter's were timed, without a
    profiler, and only the rest is divided."""
    if "host" not in worked:
        found = {part: ms / pass_ms for part, ms in worked.items()}
        found["host"] = max(1 - sum(found.values()), 0.0)
    else:
        rest = 1 - sum(timed_shares.values())
        ours = worked["sampling"] / max(worked["sampling"] + worked["host"], 1e-9)
        found = timed_shares | {"sampling": rest * ours, "host": rest * (1 - ours)}
    return {part: round(share, 4) for part, share in found.items()}


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
    with profile(activities=_activities(device), acc_events=True) as prof:
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


@torch.inference_mode()
def kernels(contestants: Iterable[Sampler], device: torch.device) -> list[dict[str, Any]]:
    """Every Triton kernel that these runs call, beside its torch reference, on what it is called with first: do the two
    agree, and milliseconds of both."""
    first: dict[str, tuple[Callable[..., Any], tuple]] = {}

    def keep(name: str, reference: Callable[..., Any], given: tuple) -> Any:
        if name not in first:
            first[name] = reference, copied(given)
        return reference(*given)

    with watched(keep):
        for contestant in contestants:
            contestant.staged.sessions = Eager()
            contestant(0)
    return [beside(name, reference, given, device) for name, (reference, given) in sorted(first.items())]


def beside(name: str, reference: Callable[..., Any], given: tuple, device: torch.device) -> dict[str, Any]:
    """A row of ``kernels``."""
    shapes = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in leaves(given)]
    row: dict[str, Any] = {"kernel": name, "inputs": shapes, "reference_ms": _best(lambda: reference(*given), device)}
    try:
        kernel = triton_kernel(name)
        here, there = copied(given), copied(given)  # either may write in its arguments
        pairs = zip(leaves((reference(*here), here)), leaves((kernel(*there), there)), strict=True)
        agree = all(dispatch.alike(a, b) for a, b in pairs)
        row |= {"agree": agree, "triton_ms": _best(lambda: kernel(*given), device)}
    except Exception as error:  # whatever a compiler or driver may raise: the other kernels are still measured
        row["failed"] = f"{type(error).__name__}: {error}"[:500]
    return row | {"reference_ms": _best(lambda: reference(*given), device)}


def _best(call: Callable[[], Any], device: torch.device, inner: int = 10) -> float:
    """Milliseconds of a call, the least of five times ``inner`` calls after a first one."""
    call()
    return round(min(timed(lambda: [call() for _ in range(inner)], device, 5)) / inner, 4)
