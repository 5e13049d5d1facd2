"""Stages ``graphs`` and ``allocator``: captured steps give the tokens of called ones, at first and when replayed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from comfyui_specar.kernels.graphs import Graphs
from comfyui_specar.samplers.engine import run as engine
from comfyui_specar.samplers.engine import session

from .. import sizes
from ..passes import Sampler
from ..subjects import Subject
from . import subjects
from .findings import NEEDS_DEVICE, Findings, NotRun
from .profiles import Eager
from .stages import ALLOCATOR

SEED = 7


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
    found, base = Captures(), Graphs
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


def models(dry: bool) -> Iterator[tuple[str, torch.dtype]]:
    """Names and dtypes of what is compared: a tiny model of each family, and the bundled one."""
    for dtype in (torch.float32,) if dry else (torch.bfloat16, torch.float32):
        for name in (*subjects.FAMILIES, "default"):
            yield name, dtype


def methods(number: int, dry: bool) -> Sequence[str]:
    """Those of a model. The tape is slow: a dry run takes a few, and of all models but the first two."""
    return subjects.DRY_METHODS[: None if number == 0 else 2] if dry else subjects.methods()


def made(name: str, dtype: torch.dtype, dry: bool) -> Subject:
    device = subjects.device_of(dry)
    if name == "default":
        return subjects.bundled_subject(device, dtype, subjects.DRY_TOKENS if dry else 0)
    size = subjects.tiny(sizes.SIZES[name])
    return subjects.random_subject(name, size, device, dtype, subjects.DRY_TOKENS if dry else size.grid[0] ** 2)


def run(findings: Findings, **_options: object) -> None:
    """The stage ``graphs``."""
    compare(findings, list(models(findings.dry)))


def run_allocator(findings: Findings, **_options: object) -> None:
    """The stage ``allocator``: the same in a process with ComfyUI's allocator, in bf16."""
    wanted = ALLOCATOR["PYTORCH_CUDA_ALLOC_CONF"].partition(":")[2]
    if findings.dry:
        findings.not_run(f"the allocator {wanted}", NEEDS_DEVICE)
    elif (found := torch.cuda.get_allocator_backend()) != wanted:
        raise NotRun(f"torch's allocator is {found} although {os.environ.get('PYTORCH_CUDA_ALLOC_CONF')} was asked for")
    listed = list(models(findings.dry))
    compare(findings, listed[:1] if findings.dry else listed)


def compare(findings: Findings, listed: list[tuple[str, torch.dtype]]) -> None:
    """Every method on every model: once with called steps, twice with captured ones."""
    subjects.need_graphs(findings.dry)
    total = same = 0
    with torch.inference_mode(), findings.listening(), captures(findings.dry) as counted:
        for number, (name, dtype) in enumerate(findings.each(listed, "models")):
            case = None
            with findings.trying(name):
                case = made(name, dtype, findings.dry)
            for method in findings.each(methods(number, findings.dry) if case else (), f"methods of {name}, {dtype}"):
                about = {"model": name, "dtype": str(dtype).removeprefix("torch."), "method": method}
                with findings.item(**about) as row:
                    sampler = case.sampler(method)
                    row |= compared(sampler, case.sampler(method), counted)
                    total, same = total + 1, same + row["same"]
                    if not row["same"]:
                        findings.failure(
                            f"{', '.join(about.values())}: captured steps draw other tokens than called "
                            f"ones: first run from token {row['first']}, repeated {row['again']}"
                        )
                    if not row["captures"] and sampler.method.one_shape:
                        findings.failure(f"{', '.join(about.values())}: nothing was captured")
    findings.content["summary"] = f"{same} of {total} methods draw the same tokens captured, replayed and called"


def compared(called: Sampler, captured: Sampler, counted: Captures) -> dict[str, object]:
    """A row: the first token that differs in the captured run and in its repetition (None: none), and captures."""
    called.staged.sessions = Eager()
    wanted = called.output(SEED).tokens.flatten()
    counted.taken()
    runs = [captured.output(SEED).tokens.flatten() for _ in range(2)]
    first, again = (int(unlike.byte().argmax()) if (unlike := run != wanted).any() else None for run in runs)
    return {"same": first is None and again is None, "first": first, "again": again, "captures": len(counted.taken())}
