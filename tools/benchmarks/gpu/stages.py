"""The stages in order, and running one of them in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .findings import NEEDS_DEVICE

ROOT = Path(__file__).resolve().parents[3]
SANITIZER = "compute-sanitizer"
STARTING = 25.0  # seconds that a stage has in any case: importing torch and waking the device take some
GRACE = 30.0  # seconds, or a third: a stage begins nothing new so long before it is ended
NATIVE = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}  # what ComfyUI chooses on many systems
LOG = 1500  # characters of a stage's first and last words
OK, WARNING, CUT, FAILED, NOT_RUN = "ok", "warning", "cut off", "failed", "not run"


@dataclass(frozen=True)
class Stage:
    """A part of the proof. ``share`` of the time; ``where`` its function is; ``environment`` and ``before``: variables
    and a program that its process is started with."""

    name: str
    title: str
    share: float
    where: str
    environment: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    on_a_cpu: bool = True  # has a dry run anything to try?


STAGES = (
    Stage("device", "The machine", 1, "device.run"),
    Stage("graphs", "Captured steps against called ones", 6, "graphs.run", NATIVE),
    Stage("failed", "A capture that fails", 1, "graphs.run_failed", NATIVE),
    Stage("storages", "A pass in bf16, int8 and int4", 3, "passes.run_storages"),
    Stage("plain", "The same without Triton", 3, "passes.run_storages", {"SPECAR_DISABLE_TRITON": "1"}, on_a_cpu=False),
    Stage("unloading", "Memory before and after unloading", 1, "graphs.run_unloading"),
    Stage("kernels", "Triton kernels against their torch references", 8, "kernels.run"),
    Stage(
        "races",
        f"Triton kernels under {SANITIZER}",
        3,
        "kernels.run_races",
        before=(SANITIZER, "--tool", "racecheck", "--error-exitcode", "86"),
        on_a_cpu=False,
    ),
    Stage("allocator", "Captured steps with cudaMallocAsync", 4, "graphs.run_allocator", ALLOCATOR),
    Stage("captures", "Captures of an image of LlamaGen-XL", 4, "graphs.run_captures"),
    Stage("passes", "What a pass costs", 10, "passes.run"),
    Stage("ratios", "How much faster the methods are", 5, "passes.run_ratios"),
    Stage("prompts", "Prompts in ComfyUI", 5, "prompts.run"),
    # The last, as nothing is run after a failure: up to torch 2.11 this may end the process.
    Stage("failed-async", "A failed capture with cudaMallocAsync", 1, "graphs.run_failed", ALLOCATOR, on_a_cpu=False),
)


def process(stage: Stage, seconds: float, folder: Path, arguments: list[str], dry: bool) -> dict[str, Any]:
    """Run a stage for so many seconds at most, and judge what it wrote into ``folder``."""
    into, log = folder / f"{stage.name}.json", folder / f"{stage.name}.log"
    soft = seconds - min(GRACE, seconds / 3)
    command = [*stage.before, sys.executable, "-m", "tools.benchmarks", "gpu", "--stage", stage.name]
    command += ["--into", str(into), "--seconds", f"{soft:.1f}", *arguments, *(["--dry"] if dry else [])]
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


def in_turn(stages: tuple[Stage, ...], seconds: float, folder: Path, arguments: list[str], dry: bool):
    """Yield the entry of every stage. What a stage leaves of its time goes to those after it."""
    ends, failed = time.perf_counter() + seconds, None
    for number, stage in enumerate(stages):
        left = ends - time.perf_counter()
        if failed:
            yield not_run(stage, f"the stage {failed} failed")
        elif dry and not stage.on_a_cpu:
            yield not_run(stage, NEEDS_DEVICE)
        elif left <= 0:
            yield not_run(stage, "out of time")
        else:
            share = stage.share / sum(other.share for other in stages[number:])
            entry = process(stage, max(left * share, min(left, STARTING)), folder, arguments, dry)
            failed = stage.name if entry["verdict"] == FAILED else None
            yield entry
