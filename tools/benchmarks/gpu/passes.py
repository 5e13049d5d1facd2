"""Stages about time: ``passes``, ``passes-async``, ``storages``, ``plain``, ``ratios``."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..passes import Run, Sampler, Stretch, bandwidth, weights_read
from ..runs import PROMPTS
from ..speed import beside_the_floor
from ..subjects import BASE, Subject
from ..tables import row_of
from . import subjects
from .faults import free_memory
from .findings import Findings
from .graphs import CAPTURED, Captures, captures

MODELS, METHODS = ("llamagen-xl", "lumina-mgpt-7b"), CAPTURED
TOKENS, REPETITIONS = 256, 3
PROFILED = 64  # tokens of a run under the profiler
SLOWEST = 7.5  # times the floor that a pass of next-token may take: beyond it, graphs are off or captures are timed
STORED, STORED_METHODS, STORED_TOKENS = "lumina-mgpt-7b", (BASE, "sjd coupled w32"), 128
APART = 5  # percent that a pass may take longer with the other allocator
POLL = "cudaEventSynchronize"  # the host reads how far the images are, one step late
Event = tuple[float, float, str]  # begin, end (us), name
BLOCKING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "Memcpy DtoH (Device -> Pageable)")


# What a pass of released shapes costs, beside the time that reading its weights takes


def run(findings: Findings, models: Sequence[str] = ()) -> None:
    """The stage ``passes``."""
    with findings.listening(), captures(findings.dry) as counted:
        for name in findings.each(models or MODELS, "models", "model"):
            with findings.trying(name):
                measure(findings, subjects.random_subject(name, findings.dry, TOKENS), counted)
            free_memory(findings.dry)
    summary = (f"{row['model']}: {row['ms']} ms, floor {row['floor, ms']}" for row in of_base(findings))
    findings.content["summary"] = "; ".join(summary) or f"{len(findings.rows)} runs went through"


def run_allocator(findings: Findings) -> None:
    """The stage ``passes-async``: the same for LlamaGen-XL, beside the stage ``passes``."""
    run(findings, models=MODELS[:1])
    compare_allocators(findings)


def compare_allocators(findings: Findings) -> None:
    """How much longer a pass takes than with torch's own allocator. A difference is a warning."""
    other = {(row["model"], row["method"]): row["ms"] for row in findings.of("passes") if "ms" in row}
    slower = {}
    for row in findings.rows:
        if native := other.get((row["model"], row["method"])):
            slower[row["method"]] = row["slower, %"] = round(100 * (row["ms"] / native - 1), 1)
    told = "; ".join(f"{method} {percent:+g} %" for method, percent in slower.items())
    findings.content["summary"] = f"milliseconds beside torch's own allocator: {told or 'not known'}"
    if any(abs(percent) > APART for percent in slower.values()):
        findings.warning(findings.content["summary"])


def of_base(findings: Findings) -> list[dict[str, Any]]:
    """The rows of next-token that have milliseconds."""
    return [row for row in findings.rows if row["method"] == BASE and "ms" in row]


def measure(findings: Findings, case: Subject, counted: Captures) -> None:
    """All methods of a model, in turns."""
    contestants: list[Sampler] = []
    for method in findings.each(subjects.DRY_METHODS[:3] if findings.dry else METHODS, f"methods of {case.name}"):
        with findings.trying(f"{case.name}, {method}, first runs"):
            contestant = case.sampler(method)
            for seed in range(2):
                contestant(seed)
            contestants.append(contestant)
    counted.taken()
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in contestants}
    for seed in findings.each(range(1, 2 if findings.dry else REPETITIONS + 1), f"repetitions of {case.name}"):
        with findings.trying(f"{case.name}, repetition {seed}"):
            for contestant in contestants:
                runs[contestant.name].append(contestant(seed))
    if captured := counted.taken():
        findings.failure(f"{case.name}: {len(captured)} captures were timed")
    bytes_per_second = bandwidth(case.model.device, weights_read(case.model.backbone))  # once, so that floors compare
    for contestant in contestants if all(runs.values()) else ():
        with findings.item(model=case.name, method=contestant.name) as row:
            if findings.dry:
                row["passes"] = runs[contestant.name][-1].passes
            else:
                row |= beside(case, contestant, runs, bytes_per_second)
        if contestant.name == BASE and row.get("times the floor", 0) > SLOWEST:
            findings.warning(
                f"{case.name}: a pass of next-token takes {row['times the floor']} times its floor (at "
                f"most {SLOWEST} is expected): are its graphs replayed?"
            )


def beside(
    case: Subject, contestant: Sampler, runs: dict[str, list[Run]], bytes_per_second: float
) -> dict[str, object]:
    """A row: milliseconds of a pass, those of copying what it must read, the cost in passes of next-token; and of a
    profiled run, what is launched in a pass and what else makes the host wait."""
    measured = row_of(contestant.name, runs, BASE)
    floor = beside_the_floor(case, measured, bytes_per_second)["floor_ms"]
    ms = measured["pass_ms"]["median"]
    cost = round(1 / measured["ms_over"][BASE], 2)
    seen = synchronisations(case.sampler(contestant.name, Stretch.middle(case.stretch.layout, PROFILED)))
    return {
        "ms": ms,
        "floor, ms": floor,
        "times the floor": round(ms / floor, 1),
        "cost": cost,
        "launches": seen["launches"],
        "synchronisations": seen["between"] or "none",
    }


# What a profiler tells of a run on a GPU


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


def profiled(contestant: Sampler) -> Any:
    """The events of a run whose graphs were captured before."""
    for seed in range(2):
        contestant(seed)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, acc_events=True) as prof:
        contestant(2)
    return prof.events() or ()


def polls_of(events: Any) -> list[float]:
    """When the host polled."""
    return [event.time_range.start for event in events if event.name == POLL]


def on_device(events: Any) -> list[Event]:
    """What the device did: kernels and copies, each of which was launched by itself or as a part of a graph."""
    did = (event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation)
    return [(event.time_range.start, event.time_range.end, event.name) for event in did]


def busy(events: Iterable[Event]) -> float:
    """How long at least one of the events lasts."""
    total, until = 0.0, float("-inf")
    for begin, end, _ in sorted(events):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def synchronisations(contestant: Sampler) -> dict[str, Any]:
    """Of a run: polls, other synchronisations, and how much the device did in a pass."""
    events = profiled(contestant)
    launches = per_pass(polls_of(events), (begin for begin, _, _ in on_device(events)))
    return between_polls((event.time_range.start, event.name) for event in events) | {"launches": launches}


# Narrow weights


def run_storages(findings: Findings) -> None:
    """Stages ``storages`` and ``plain``: milliseconds of a pass of a 7B model in bf16, int8 and int4."""
    dry = findings.dry
    with captures(dry):
        for storage in findings.each(("", ":int8") if dry else ("", ":int8", ":int4"), "storages"):
            listed = STORED_METHODS[: 1 if dry else None]
            for method in findings.each(listed, "methods", "method", model=STORED + storage):
                with findings.item(model=STORED + storage, method=method) as row:
                    sampler = subjects.random_subject(STORED + storage, dry, STORED_TOKENS).sampler(method)
                    runs = [sampler(seed) for seed in range(2 if dry else 4)]
                    row |= {"passes": runs[-1].passes} | ({} if dry else {"ms": min(run.pass_ms for run in runs[2:])})
                    del sampler
                free_memory(dry)
    summary = (f"{row['model']}: {row['ms']:.3g} ms" for row in of_base(findings))
    findings.content["summary"] = "; ".join(summary) or f"{len(findings.rows)} runs went through"


# How much faster every method is on images of a large model that was trained


def run_ratios(findings: Findings) -> None:
    """The stage ``ratios``. The bundled model is too small to tell what a pass costs on a GPU. Widened to a larger
    model's shapes by channels and layers that add nothing, it generates the same images at the larger one's cost."""
    dry = findings.dry
    case = subjects.bundled_subject(dry, subjects.dtype_of(dry), "default" if dry else "default@llamagen-xl")
    asked = case.conditionings(PROMPTS[: 1 if dry else 3])
    listed = subjects.DRY_METHODS[:3] if dry else subjects.methods()
    with findings.listening():
        for method in findings.each(listed, "methods", "method"):
            with findings.item(method=method) as row:
                sampler = case.sampler(method)
                if not dry:
                    sampler(0)  # captures, compiles
                runs = [sampler.asked(prompt)(seed) for seed, prompt in enumerate(asked)]
                passes = statistics.fmean(run.passes + 1 for run in runs)  # and that of the prompt
                seconds = statistics.fmean(run.seconds for run in runs)
                row |= {"passes": round(passes, 1)} | ({} if dry else {"seconds": round(seconds, 3)})
                base = (findings.rows or [row])[0]  # next-token
                row["fewer passes"] = round(base["passes"] / passes, 2)
                if not dry:
                    row["faster"] = round(base["seconds"] / seconds, 2)
    timed = [row for row in findings.rows if "faster" in row and row["method"] != BASE]
    best = max(timed, key=lambda row: row["faster"], default=None)
    findings.content["summary"] = (
        f"{best['method']} is {best['faster']} times as fast as next-token"
        if best
        else f"{len(findings.rows)} runs went through"
    )
