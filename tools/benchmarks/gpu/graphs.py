"""Stages about CUDA graphs and memory: ``graphs``, ``allocator``, ``captures``, ``failed``, ``unloading``."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from comfyui_specar.kernels import graphs
from comfyui_specar.samplers.engine import run as engine
from comfyui_specar.samplers.engine import session

from .. import sizes
from ..passes import Sampler
from ..subjects import Subject
from . import subjects
from .findings import Findings, NotRun
from .stages import ALLOCATOR

SEED = 7
CAPTURED = ("next_token", "sjd coupled w32", "chain of 5", "EAGLE-1, 57 drafts", "ADT-Tree")
FEW = 128  # tokens of a run whose memory is measured
KEPT = 64 * 2**20  # bytes that a library may keep for itself


class Eager(dict):
    """In place of what runs leave with a model: every session is new, and its graphs are switched off."""

    def pop(self, key: Any, default: Any = None) -> session.Session:
        return session.Session(graphs.Graphs(torch.device("cpu")))


@dataclass
class Captures:
    """Seconds that every capture took, in order."""

    seconds: list[float] = field(default_factory=list)

    def taken(self) -> list[float]:
        """Those since the last call."""
        found, self.seconds = self.seconds, []
        return found


@contextmanager
def captures(dry: bool) -> Iterator[Captures]:
    """Steps of sessions that begin meanwhile are captured, and every capture is counted. In a dry run the tests' tape
    stands in for CUDA graphs, on the CPU, and the host learns late what was decided, as on a GPU."""
    found, base = Captures(), graphs.Graphs
    with ExitStack() as stack:
        if dry:
            from comfyui_specar.tests.support.tape import LatePoll, TapeGraphs

            base = TapeGraphs
            stack.enter_context(patch.object(engine, "Poll", LatePoll))

        class Counted(base):
            def _capture(self, *given):
                begun = time.perf_counter()
                try:
                    return super()._capture(*given)
                finally:
                    found.seconds.append(time.perf_counter() - begun)

        stack.enter_context(patch.object(session, "Graphs", Counted))
        yield found


# Captured steps give the tokens of called ones, at first and when replayed


def models(dry: bool) -> list[tuple[str, torch.dtype]]:
    """Names and dtypes of what is compared: a tiny model of each family, and the bundled one."""
    dtypes = (torch.float32,) if dry else (torch.bfloat16, torch.float32)
    return [(name, dtype) for dtype in dtypes for name in (*subjects.FAMILIES, "default")]


def methods(number: int, dry: bool) -> Sequence[str]:
    """Those of a model. The tape is slow: a dry run takes a few, and of all models but the first two."""
    return subjects.DRY_METHODS[: None if number == 0 else 2] if dry else subjects.methods()


def made(name: str, dtype: torch.dtype, dry: bool) -> Subject:
    if name == "default":
        return subjects.bundled_subject(dry, dtype)
    size = subjects.tiny(sizes.SIZES[name])
    return subjects.random_subject(name, dry, size.grid[0] ** 2, size, dtype)


def run(findings: Findings, **_options: object) -> None:
    """The stage ``graphs``."""
    compare(findings, models(findings.dry))


def run_allocator(findings: Findings, **_options: object) -> None:
    """The stage ``allocator``: the same in a process with ComfyUI's allocator."""
    wanted = ALLOCATOR["PYTORCH_CUDA_ALLOC_CONF"].partition(":")[2]
    findings.needs_device(f"the allocator {wanted}")
    if not findings.dry and (found := torch.cuda.get_allocator_backend()) != wanted:
        raise NotRun(f"torch's allocator is {found} although {os.environ.get('PYTORCH_CUDA_ALLOC_CONF')} was asked for")
    compare(findings, models(findings.dry)[: 1 if findings.dry else None])


def compare(findings: Findings, listed: list[tuple[str, torch.dtype]]) -> None:
    """Every method on every model: once with called steps, twice with captured ones."""
    subjects.need_graphs(findings.dry)
    with torch.inference_mode(), findings.listening(), captures(findings.dry) as counted:
        for number, (name, dtype) in enumerate(findings.each(listed, "models")):
            case = None
            with findings.trying(name):
                case = made(name, dtype, findings.dry)
            if case is None:
                continue
            for method in findings.each(methods(number, findings.dry), f"methods of {name}, {dtype}"):
                about = {"model": name, "dtype": str(dtype).removeprefix("torch."), "method": method}
                with findings.item(**about) as row:
                    sampler, title = case.sampler(method), ", ".join(about.values())
                    row |= compared(sampler, case.sampler(method), counted)
                    if not row["same"]:
                        findings.failure(
                            f"{title}: captured steps draw other tokens than called ones: first run from token "
                            f"{row['first']}, repeated {row['again']}"
                        )
                    if not row["captures"]:
                        findings.failure(f"{title}: nothing was captured")
    same = sum(row["same"] for row in findings.rows)
    findings.content["summary"] = (
        f"{same} of {len(findings.rows)} methods draw the same tokens captured, replayed and called"
    )


def compared(called: Sampler, captured: Sampler, counted: Captures) -> dict[str, object]:
    """A row: the first token that differs in the captured run and in its repetition (None: none), and captures."""
    called.staged.sessions = Eager()
    wanted = called.output(SEED).tokens.flatten()
    counted.taken()
    runs = [captured.output(SEED).tokens.flatten() for _ in range(2)]
    first, again = (int(unlike.byte().argmax()) if (unlike := run != wanted).any() else None for run in runs)
    return {"same": first is None and again is None, "first": first, "again": again, "captures": len(counted.taken())}


# How often an image makes steps be captured, how long that takes, and what repeats it


def run_captures(findings: Findings, **_options: object) -> None:
    """A whole image twice, then parts of images after every change that a user may make between two runs."""
    dry = findings.dry
    subjects.need_graphs(dry)
    findings.needs_device("milliseconds of captures")
    whole = subjects.random_subject("llamagen-xl", dry, sizes.SIZES["llamagen-xl"].grid[0] ** 2)
    with findings.listening(), captures(dry) as counted:
        for method in findings.each(subjects.DRY_METHODS[:2] if dry else CAPTURED, "methods"):
            with findings.item(method=method) as row:
                row |= of_an_image(whole.sampler(method), counted, dry)
                if row["second image"]:
                    findings.failure(
                        f"{method}: a second image with the same settings captures {row['second image']} steps again"
                    )
            with findings.trying(f"{method}, changed settings"):
                for change, number in after_changes(whole, method, counted):
                    row[change] = number
                    if number:
                        findings.warning(f"{method}: {number} steps are captured again after another {change}")
    findings.content["summary"] = f"{', '.join(str(row['captures']) for row in findings.rows)} captures of an image"


def of_an_image(contestant: Sampler, counted: Captures, dry: bool) -> dict[str, object]:
    """Captures of the first image (with milliseconds of one and of all, on a device) and of the second."""
    counted.taken()
    contestant(0)
    taken = counted.taken()
    row: dict[str, object] = {"captures": len(taken)}
    if taken and not dry:
        row |= {"ms of one": round(1e3 * statistics.median(taken), 1), "ms in all": round(1e3 * sum(taken), 1)}
    contestant(1)
    return row | {"second image": len(counted.taken())}


def after_changes(whole: Subject, method: str, counted: Captures) -> Iterator[tuple[str, int]]:
    """What is captured after each change. Nothing begins or ceases to be filtered or guided by it."""
    few = replace(whole.stretch, behind=whole.stretch.layout.length // 3, tokens=subjects.FEW)
    base = replace(whole.params, cfg=4.0, temperature=0.9, top_k=50, top_p=0.9)
    contestant = replace(whole, stretch=few, params=base).sampler(method)
    [(features, *rest)] = contestant.conditioning
    for _ in range(2):
        contestant(0)
    counted.taken()
    for change, changed in {  # the prompt first, while the session of these settings is kept
        "prompt": {"conditioning": [(features.roll(1, 1), *rest)]},
        "guidance": {"params": replace(base, cfg=6.0)},
        "temperature": {"params": replace(base, temperature=0.8)},
        "top-k": {"params": replace(base, top_k=40)},
        "top-p": {"params": replace(base, top_p=0.8)},
    }.items():
        replace(contestant, **changed)(1)
        yield change, len(counted.taken())


# Memory, also after a capture that fails


def free_memory(dry: bool) -> int:
    """Bytes that are free on the GPU when nothing is held that could be given back."""
    gc.collect()
    device = subjects.device_of(dry)
    if device.type == "cpu":
        return 0
    graphs.return_memory(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


@contextmanager
def failing() -> Iterator[None]:
    """Captures of sessions that begin meanwhile fail at their end, as they read the device."""

    class Failing(session.Graphs):
        def _record(self, run: Callable[[], Any]) -> Any:
            return super()._record(lambda: (run(), torch.zeros(1, device=self.device).item()))

    with patch.object(session, "Graphs", Failing):
        yield


def run_failed(findings: Findings, **_options: object) -> None:
    """Stages ``failed`` and ``failed-async``: a failed capture costs neither the image nor memory, and what comes after
    it in the process works."""
    dry = findings.dry
    subjects.need_graphs(dry)
    allocator = "the tape's" if dry else torch.cuda.get_allocator_backend()
    with torch.inference_mode(), findings.item(allocator=allocator) as row, captures(dry):
        size = subjects.tiny(sizes.SIZES["llamagen-xl"])
        case = subjects.random_subject("llamagen-xl", dry, subjects.DRY_TOKENS, size, torch.float32)
        called, captured, after = (case.sampler("sjd coupled w16") for _ in range(3))
        called.staged.sessions = Eager()
        wanted = called.output(SEED).tokens
        free = []  # after two failures: the first one also loads libraries and kernels
        for _ in range(2):
            with failing():
                row["same image"] = bool(torch.equal(captured.output(SEED).tokens, wanted))
            captured.staged.sessions.clear()
            free.append(free_memory(dry))
            row["says so"], graphs._failed = graphs._failed, False
        row["kept, MiB"] = max(0, free[0] - free[1]) / 2**20
        row["next capture, same image"] = bool(torch.equal(after.output(SEED).tokens, wanted)) and not graphs._failed
        graphs._failed = False
        if not row["same image"] or not row["says so"] or row["kept, MiB"] > KEPT / 2**20:
            findings.failure(f"{allocator}: a failed capture costs the image or memory: {row}")
        if not row["next capture, same image"]:
            findings.warning(f"{allocator}: after a failed capture no other works, as the pack expects")
    findings.content["summary"] = "; ".join(f"{row['kept, MiB']:.0f} MiB kept" for row in findings.rows)


def run_unloading(findings: Findings, **_options: object) -> None:
    """Stage ``unloading``: what a run used is free when its model is gone."""
    dry = findings.dry
    with findings.listening(), captures(dry), findings.item(model="llamagen-xl") as row:
        free, used = [], 0
        for _ in range(2):  # the first time also loads libraries and kernels
            case = subjects.random_subject("llamagen-xl", dry, FEW)
            for method in ("sjd coupled w16", "chain of 5"):
                case.sampler(method)(SEED)
            used = free_memory(dry)
            del case
            free.append(free_memory(dry))
        row["used, MiB"] = max(0, free[-1] - used) / 2**20
        row["kept, MiB"] = max(0, free[0] - free[1]) / 2**20
        if row["kept, MiB"] > KEPT / 2**20:
            findings.failure(f"{row['kept, MiB']:.0f} MiB are not given back when the model is gone")
    findings.content["summary"] = "; ".join(f"{row['kept, MiB']:.0f} MiB kept" for row in findings.rows)
