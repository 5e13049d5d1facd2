"""The stages in order, and running one of them in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..report import write
from .findings import OUT_OF_TIME

ROOT = Path(__file__).resolve().parents[3]
SANITIZER = "compute-sanitizer"
NEEDS_DEVICE = "needs a CUDA device"
STARTING = 25.0  # seconds that a stage has at least: importing torch and waking the device take some
GRACE = 30.0  # seconds, or a third: a stage begins nothing new so long before it is ended
NO_TRITON = {"SPECAR_DISABLE_TRITON": "1"}
ALLOCATORS = "PYTORCH_CUDA_ALLOC_CONF"
NATIVE = {ALLOCATORS: "backend:native"}
ALLOCATOR = {ALLOCATORS: "backend:cudaMallocAsync"}  # what ComfyUI chooses on many systems
FOUND = ("summary", "rows", "failures", "warnings", "not_run")  # of a stage's entry, what it wrote itself
LOG = 1500  # characters of a stage's first and last words
OK, WARNING, CUT, FAILED, NOT_RUN = "ok", "warning", "cut off", "failed", "not run"


@dataclass(frozen=True)
class Stage:
    """A part of the proof. ``minutes`` of half an hour, in proportion of any other time; ``where`` its function is;
    ``environment`` and ``before``: variables and a program that its process is started with."""

    name: str
    title: str
    minutes: float
    where: str
    environment: dict[str, str] = field(default_factory=lambda: ALLOCATOR)
    before: tuple[str, ...] = ()
    on_a_cpu: bool = True  # has a dry run anything to try?


STAGES = (
    Stage("device", "The machine", 0.3, "device.run", {}),
    Stage("passes", "What a pass costs, with torch's own allocator", 1.5, "passes.run", NATIVE),
    Stage("passes-async", "The same with ComfyUI's allocator", 1, "passes.run_allocator", on_a_cpu=False),
    Stage("interrupted", "An interruption in a capture, torch's own allocator", 0.4, "faults.run_interrupted", NATIVE),
    Stage("interrupted-async", "The same with ComfyUI's allocator", 0.4, "faults.run_interrupted", on_a_cpu=False),
    Stage("full", "A run without free memory", 0.7, "faults.run_full"),
    Stage("captures", "Captures of the first images of a process", 3, "graphs.run_captures"),
    Stage("kernels", "Triton kernels against their torch references", 2.2, "kernels.run"),
    Stage("replays", "What a replay consists of, by kernel", 3, "replays.run"),
    Stage("products", "Products of few rows", 2, "parts.run_products"),
    Stage("attention", "Attention of new tokens to a cache", 1.5, "parts.run_attention"),
    Stage("storages", "A pass in bf16, int8 and int4", 1.5, "passes.run_storages"),
    Stage("plain", "The same without Triton", 1.5, "passes.run_storages", ALLOCATOR | NO_TRITON, on_a_cpu=False),
    Stage("ratios", "How much faster the methods are", 3, "passes.run_ratios"),
    Stage("workspace", "A workspace that somebody frees", 0.3, "faults.run_workspace", NATIVE),
    Stage("unloading", "Memory before and after unloading", 0.4, "faults.run_unloading"),
    Stage("graphs", "Captured steps against called ones", 1, "graphs.run", NATIVE),
    Stage("graphs-async", "The same with ComfyUI's allocator", 1, "graphs.run", on_a_cpu=False),
    Stage("prompts", "Prompts in ComfyUI", 2.5, "prompts.run", {}),
    Stage("half", "A model of which half is loaded", 1.5, "streaming.run"),
    Stage(
        "races",
        f"Triton kernels under {SANITIZER}",
        0.5,
        "kernels.run_races",
        before=(SANITIZER, "--tool", "racecheck", "--error-exitcode", "86"),
        on_a_cpu=False,
    ),
    Stage("failed", "A capture that fails", 0.4, "faults.run_failed", NATIVE),
    # Up to torch 2.11 this may end the process.
    Stage("failed-async", "A failed capture with cudaMallocAsync", 0.4, "faults.run_failed", on_a_cpu=False),
)


def process(stage: Stage, seconds: float, folder: Path, dry: bool) -> dict[str, Any]:
    """Run a stage for so many seconds at most, and judge what it wrote into ``folder``, where it finds what an earlier
    call and other stages have written."""
    into, log = folder / f"{stage.name}.json", folder / f"{stage.name}.log"
    soft = seconds - min(GRACE, seconds / 3)
    command = [*stage.before, sys.executable, "-m", "tools.benchmarks", "gpu", "--stage", stage.name]
    command += ["--into", str(into), "--seconds", f"{soft:.1f}", *(["--dry"] if dry else [])]
    begun, code = time.perf_counter(), None
    with log.open("wb") as words:
        try:
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | stage.environment,
                stdout=words,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            return not_run(stage, f"{error.filename} is not installed")
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end(child)
    found = json.loads(into.read_text(encoding="utf-8")) if into.is_file() else {}
    words = log.read_text(errors="replace", encoding="utf-8")
    words = words if len(words) <= 2 * LOG else f"{words[:LOG]} ... {words[-LOG:]}"
    verdict, why = judged(found, code, seconds, words)
    return {
        "stage": stage.name,
        "title": stage.title,
        "verdict": verdict,
        "why": why,
        "seconds": round(time.perf_counter() - begun, 1),
        **found,
    }


def end(child: subprocess.Popen) -> None:
    """End a process that still runs, with those that it started: a sanitizer's would go on without it."""
    if child.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.wait()


def judged(found: dict[str, Any], code: int | None, seconds: float, words: str) -> tuple[str, str]:
    """Verdict on what a stage found, whose process ended with ``code`` (None: it was ended), and the reason."""
    if code is not None and code < 0:  # by a signal, which is worse than whatever it found
        return FAILED, f"its process ended with code {code} at: {found.get('at')}: {words.strip()}"
    if found.get("failures"):
        return FAILED, found["failures"][0]
    if code is None:
        return CUT, f"it was ended after {seconds:.0f} s at: {found.get('at') or 'its beginning'}"
    if code:
        return FAILED, f"its process ended with code {code}: {words.strip()}"
    if not found["rows"]:
        return NOT_RUN, "; ".join(found["not_run"].values()) or "it found nothing to do"
    return (WARNING, found["warnings"][0]) if found["warnings"] else (OK, found["summary"])


def not_run(stage: Stage, why: str) -> dict[str, Any]:
    """The entry of a stage that was not begun."""
    return {"stage": stage.name, "title": stage.title, "verdict": NOT_RUN, "why": why, "seconds": 0.0}


def left(entry: dict[str, Any] | None) -> bool:
    """Is there anything to do in a stage with this entry, if time allows?"""
    return not entry or entry["verdict"] == CUT or OUT_OF_TIME in (entry["why"], *entry.get("not_run", {}).values())


def in_turn(
    stages: tuple[Stage, ...],
    seconds: float,
    folder: Path,
    dry: bool,
    known: dict[str, dict[str, Any]] | None = None,
    plan: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """Yield the entry of every stage in which something is left to do. What a stage leaves of its time goes to those
    after it.

    known: entries of earlier calls, by stage: those that were begun go on at last. plan: seconds of all calls together,
    of which stages have their minutes (0: of this one).
    """
    known, ends = known or {}, time.perf_counter() + seconds
    plan = max(plan, seconds) - sum(entry["seconds"] for entry in known.values())
    for name, entry in known.items():
        found = {key: entry[key] for key in FOUND if key in entry}
        if "not_run" in found:
            found["not_run"] = {what: why for what, why in found["not_run"].items() if why != OUT_OF_TIME}
        write(found, folder / f"{name}.json")
    todo = [stage for stage in stages if left(known.get(stage.name))]
    todo.sort(key=lambda stage: bool(known.get(stage.name, {}).get("seconds")))
    for number, stage in enumerate(todo):
        before = known.get(stage.name, {}).get("seconds", 0.0)
        rest = ends - time.perf_counter()
        if dry and not stage.on_a_cpu:
            yield not_run(stage, NEEDS_DEVICE)
        elif rest < STARTING:
            yield known.get(stage.name) or not_run(stage, OUT_OF_TIME)
        else:
            share = stage.minutes / sum(other.minutes for other in todo[number:])
            entry = process(stage, min(rest, max(plan * share, STARTING)), folder, dry)
            plan -= entry["seconds"]
            yield entry | {"seconds": round(before + entry["seconds"], 1)}
