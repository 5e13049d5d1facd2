"""The stage ``replays``: what one replay of a step consists of, by the name of a kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from . import subjects
from .faults import free_memory
from .findings import Findings
from .graphs import captures
from .passes import MODELS, Event, busy, on_device, polls_of, profiled

METHODS = ("next_token", "sjd coupled w32", "chain of 5", "EAGLE-1, 57 drafts", "LANTERN delta 0.3")
TOKENS = 64  # of a run under the profiler
MOST = 25  # kernels that have a row of their own
NAME = 80  # characters of a kernel's name: those of libraries hold all their types
OTHERS, GAPS = "(others)", "(gaps)"


def run(findings: Findings) -> None:
    """Rows of one method are made together, so that a second run goes on with the next method."""
    dry = findings.dry
    wanted = subjects.methods()
    with findings.listening(), captures(dry):
        for name in MODELS[: 1 if dry else None]:
            listed = subjects.DRY_METHODS[:1] if dry else [method for method in METHODS if method in wanted]
            listed = [method for method in listed if not findings.has(model=name, method=method)]
            if not listed:
                continue
            case = subjects.random_subject(name, dry, TOKENS)
            for method in findings.each(listed, f"methods of {name}"):
                with findings.trying(f"{name}, {method}"):
                    sampler = case.sampler(method)
                    if dry:
                        rows = [{"kernel": "any", "passes": sampler(0).passes}]
                    else:
                        events = profiled(sampler)
                        rows = by_kernel(polls_of(events), on_device(events))
                    findings.rows.extend({"model": name, "method": method} | row for row in rows)
            del case
            free_memory(dry)
    gaps = (f"{row['model']}, {row['method']}: {row['us']} us" for row in findings.rows if row["kernel"] == GAPS)
    findings.content["summary"] = f"gaps in a replay: {'; '.join(gaps) or 'not known'}"


def by_kernel(polls: Sequence[float], events: Iterable[Event]) -> list[dict[str, Any]]:
    """A row for every name: launches and microseconds in a pass, and the time in which nothing ran. The longest come
    first."""
    if len(polls) < 2:
        return []
    inside = [event for event in events if min(polls) < event[0] < max(polls)]
    passes = len(polls) - 1
    found: dict[str, list[float]] = defaultdict(list)
    for begin, end, name in inside:
        found[name[:NAME]].append(end - begin)
    gaps = max((end for _, end, _ in inside), default=min(polls)) - min(polls) - busy(inside)
    longest = sorted(found, key=lambda name: sum(found[name]), reverse=True)
    parts = [(name, found[name]) for name in longest[:MOST]]
    if rest := [us for name in longest[MOST:] for us in found[name]]:
        parts.append((OTHERS, rest))
    rows = [
        {"kernel": name, "launches": round(len(us) / passes, 1), "us": round(sum(us) / passes, 1)} for name, us in parts
    ]
    return [*rows, {"kernel": GAPS, "us": round(gaps / passes, 1)}]
