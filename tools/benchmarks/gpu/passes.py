"""Stage ``passes``: what a pass of released shapes costs, beside the time that reading its weights takes."""

from __future__ import annotations

import gc

import torch

from .. import sizes
from ..passes import Run, Sampler, Stretch, bandwidth, weights_read
from ..speed import beside_the_floor
from ..subjects import BASE, Subject
from ..tables import row_of
from . import packages, profiles, subjects
from .captures import METHODS
from .findings import NEEDS_DEVICE, Findings
from .graphs import Captures, captures

MODELS = ("llamagen-xl", "lumina-mgpt-7b")
TOKENS, REPETITIONS = 256, 3
PROFILED = 64  # tokens of a run under the profiler
SLOWEST = 7.5  # times the floor that a pass of next-token may take: beyond it, graphs are off or captures are timed


def run(findings: Findings, generate: bool = False, **_options: object) -> None:
    dry = findings.dry
    if dry:
        findings.not_run("milliseconds, floor, launches, synchronisations", NEEDS_DEVICE)
    device, dtype = subjects.device_of(dry), torch.float32 if dry else torch.bfloat16
    with findings.listening(), captures(dry) as counted:
        for name in findings.each(MODELS, "models"):
            size = subjects.tiny(sizes.SIZES[name]) if dry else sizes.SIZES[name]
            with findings.trying(name):
                case = subjects.random_subject(name, size, device, dtype, subjects.DRY_TOKENS if dry else TOKENS)
                measure(findings, case, counted, generate)
            case = None
            gc.collect()
            if not dry:
                torch.cuda.empty_cache()
    findings.content["summary"] = (
        f"{len(findings.rows)} runs went through"
        if dry
        else "; ".join(
            f"{row['model']}: {row['ms']} ms, floor {row['floor, ms']}"
            for row in findings.rows
            if row["method"] == BASE
        )
    )


def measure(findings: Findings, case: Subject, counted: Captures, generate: bool) -> None:
    """All methods of a model, in turns."""
    contestants = []
    for method in findings.each(subjects.DRY_METHODS[:3] if findings.dry else METHODS, f"methods of {case.name}"):
        with findings.trying(f"{case.name}, {method}, first runs"):
            contestant = case.sampler(method)
            for seed in range(2):
                contestant(seed)
            contestants.append(contestant)
    if generate:
        with findings.trying(f"{case.name}, generate"):
            packages.need("transformers", "einops")
            for baseline in case.baselines():
                baseline(0)
                contestants.append(baseline)
    counted.taken()
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in contestants}
    for seed in findings.each(range(1, 2 if findings.dry else REPETITIONS + 1), f"repetitions of {case.name}"):
        with findings.trying(f"{case.name}, repetition {seed}"):
            for contestant in contestants:
                runs[contestant.name].append(contestant(seed))
    if captured := counted.taken():
        findings.failure(f"{case.name}: {len(captured)} captures were timed")
    for contestant in contestants if all(runs.values()) else ():
        with findings.item(model=case.name, method=contestant.name) as row:
            if findings.dry:
                row["passes"] = runs[contestant.name][-1].passes
            else:
                row |= beside(case, contestant, runs)
        if contestant.name == BASE and row.get("times the floor", 0) > SLOWEST:
            findings.warning(
                f"{case.name}: a pass of next-token takes {row['times the floor']} times its floor (at "
                f"most {SLOWEST} is expected): are its graphs replayed?"
            )


def beside(case: Subject, contestant: Sampler, runs: dict[str, list[Run]]) -> dict[str, object]:
    """A row: milliseconds of a pass, those of copying what it must read, the cost in passes of next-token; and of a
    profiled run, what is launched in a pass and what else makes the host wait."""
    measured = row_of(contestant.name, runs, BASE)
    device = case.model.device
    floor = beside_the_floor(case, measured, bandwidth(device, weights_read(case.model.backbone)))
    ms = measured["pass_ms"]["median"]
    row = {
        "ms": ms,
        "floor, ms": floor["floor_ms"],
        "times the floor": round(ms / floor["floor_ms"], 1),
        "cost": round(1 / measured["ms_over"][BASE], 2),
    }
    if not isinstance(contestant, Sampler):
        return row
    short = case.sampler(contestant.name, Stretch.middle(case.stretch.layout, PROFILED))
    seen = profiles.synchronisations(short, device)
    return row | {"launches": seen["launches"], "synchronisations": seen["between"] or "none"}
