"""Stages about what goes wrong, and about memory: ``interrupted``, ``full``, ``workspace``, ``unloading``, ``failed``.

None of it may cost the image, the process, or memory, and steps are captured afterwards.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from threading import Lock, Thread
from typing import Any
from unittest.mock import patch

import torch
from comfyui_specar.device import graphs
from comfyui_specar.samplers.engine import session
from torch import Tensor

from .. import sizes
from ..passes import Sampler
from . import prompts, subjects
from .findings import Findings
from .graphs import SEED, Eager, captures

METHOD, DRAFTED = "sjd coupled w16", "chain of 5"
FEW = 128  # tokens of a run whose memory is measured
KEPT = 64 * 2**20  # bytes that a library may keep for itself
WAYS = {  # an interruption -> does a run wait until a capture is over, and which layer raises
    "held back": (True, "tok_embeddings"),
    "raised by the first layer": (False, "tok_embeddings"),
    "raised by the last layer": (False, "output"),
}
WAITING = 0.05  # seconds after which a thread has met the lock
FREE = (0.3, 0.1, 0.03, 0.0)  # GiB that a run finds
PIECES = (2**30, 2**25, 2**21)  # bytes of what fills the rest of a memory
CANARY, CANARIES = 0x5A, 4  # of 32 MiB, the size of cuBLAS's workspace on large GPUs


def tiny(dry: bool, method: str = METHOD) -> Callable[[], Sampler]:
    """Makes samplers of a tiny LlamaGen in fp32, each of which is another model to the pack."""
    size = subjects.tiny(sizes.SIZES["llamagen-xl"])
    case = subjects.random_subject("llamagen-xl", dry, subjects.DRY_TOKENS, size, torch.float32)
    return lambda: case.sampler(method)


def called(sampler: Sampler) -> Tensor:
    """The tokens of called steps."""
    sampler.staged.sessions = Eager()
    return sampler.output(SEED).tokens


# ComfyUI's layers ask whether the user has interrupted, and raise a BaseException


@dataclass(frozen=True)
class Flag:
    """``ask`` raises ``error`` once ``put(True)`` was called; ``waits``: meanwhile whoever interrupts waits."""

    by: str
    error: type[BaseException]
    ask: Callable[[], None]
    put: Callable[[bool], None]
    waits: Callable[[], AbstractContextManager]


class Interrupted(BaseException):
    """What ComfyUI raises."""


def flag(dry: bool) -> Flag:
    """ComfyUI's own, with what the pack does about it; without ComfyUI a stand-in."""
    if "COMFYUI_PATH" in os.environ:
        mm = prompts.memory_management(dry)
        waits = import_module("comfyui_specar.nodes.comfy_runtime.runs").hold_interrupts
        error, ask = mm.InterruptProcessingException, mm.throw_exception_if_processing_interrupted
        return Flag("ComfyUI", error, ask, mm.interrupt_current_processing, waits)
    lock, interrupted = Lock(), [False]

    def ask() -> None:
        if interrupted[0]:
            raise Interrupted

    def put(value: bool) -> None:
        with lock:
            interrupted[0] = value

    @contextmanager
    def waits() -> Iterator[None]:
        with lock:
            yield

    return Flag("a stand-in", Interrupted, ask, put, waits)


@contextmanager
def interrupting(put: Callable[[bool], None]) -> Iterator[None]:
    """In the first capture of sessions that begin meanwhile, another thread interrupts."""
    threads: list[Thread] = []

    class Interrupting(session.Graphs):
        def _record(self, run: Callable[[], Any]) -> Any:
            def recorded() -> Any:
                if not threads:
                    threads.append(Thread(target=put, args=(True,)))
                    threads[0].start()
                    time.sleep(WAITING)
                return run()

            return super()._record(recorded)

    with patch.object(session, "Graphs", Interrupting):
        yield
    for thread in threads:
        thread.join()


def run_interrupted(findings: Findings) -> None:
    """Stages ``interrupted`` and ``interrupted-async``: the process lives, and the next run is captured."""
    dry, how = findings.dry, flag(findings.dry)
    subjects.need_graphs(dry)
    with torch.inference_mode(), findings.listening(), captures(dry):
        made = tiny(dry)
        wanted = called(made())
        for way in findings.each(WAYS, "interruptions", "interruption"):
            waits, layer = WAYS[way]
            with (
                findings.item(interruption=way, by=how.by) as row,
                patch.object(graphs, "uninterrupted", how.waits if waits else nullcontext),
            ):
                sampler, row["raised"] = made(), False
                asks = sampler.staged.backbone.get_submodule(layer).register_forward_pre_hook(lambda *_: how.ask())
                try:
                    with interrupting(how.put):
                        sampler.output(SEED, lambda _: how.ask())
                except how.error:
                    row["raised"] = True
                finally:
                    how.put(False)
                    asks.remove()
                gc.collect()
                row["same image"] = all(torch.equal(sampler.output(SEED).tokens, wanted) for _ in range(2))
                row["graphs on"] = not graphs._failed
                if not all(row.values()):
                    findings.failure(f"an interruption that is {way}: {row}")
    findings.content["summary"] = f"{len(findings.rows)} interruptions by {how.by} ended a run and nothing else"


# A run that finds no memory


@contextmanager
def filled(gib: float, dry: bool) -> Iterator[None]:
    """All of the memory but so much is taken. In a dry run, the tape's replays find none."""
    if dry:
        from comfyui_specar.tests.support.tape import Tape, TapeGraphs

        class NoMemory(Tape):
            def replay(self) -> None:
                raise torch.OutOfMemoryError("out of memory")

        with patch.object(TapeGraphs, "tape", NoMemory):
            yield
        return
    device, held = subjects.device_of(dry), []
    for piece in PIECES:
        try:
            while (free := torch.cuda.mem_get_info(device)[0] - gib * 2**30) > 0:
                held.append(torch.empty(max(piece, int(free) // 2), dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            continue
    try:
        yield
    finally:
        held.clear()
        torch.cuda.empty_cache()


def run_full(findings: Findings) -> None:
    """The stage ``full``: a run whose graphs, or prompt, find no memory ends with torch's error, and the next one,
    which has memory, gives the same image, captured."""
    dry = findings.dry
    subjects.need_graphs(dry)
    with torch.inference_mode(), findings.listening(), captures(dry) as counted:
        sampler = subjects.random_subject("llamagen-xl", dry, FEW).sampler(METHOD)
        wanted = sampler.output(SEED).tokens
        for gib in findings.each(FREE[:1] if dry else FREE, "sizes", "GiB free"):
            with findings.item(**{"GiB free": gib}) as row:
                if dry:
                    sampler.staged.sessions.clear()  # a tape is made with its replay
                before = free_memory(dry)
                with filled(gib, dry):
                    try:
                        row["outcome"] = "image" if torch.equal(sampler.output(SEED).tokens, wanted) else "another"
                    except torch.OutOfMemoryError:
                        row["outcome"] = "out of memory"
                row["kept, MiB"] = max(0, before - free_memory(dry)) / 2**20
                counted.taken()
                row["same image"] = bool(torch.equal(sampler.output(SEED).tokens, wanted))
                row["captures"], row["graphs on"] = len(counted.taken()), not graphs._failed
                if row["outcome"] == "another" or not row["same image"] or row["kept, MiB"] > KEPT / 2**20:
                    findings.failure(f"a run that finds {gib} GiB costs an image or memory: {row}")
    outcomes = (f"{row['GiB free']} GiB: {row['outcome']}" for row in findings.rows)
    findings.content["summary"] = "; ".join(outcomes)


# A workspace of cuBLAS that another node frees


def run_workspace(findings: Findings) -> None:
    """The stage ``workspace``: replays write to no memory that somebody else has since got."""
    dry = findings.dry
    subjects.need_graphs(dry)
    device = subjects.device_of(dry)
    with torch.inference_mode(), findings.listening(), captures(dry):
        for method in findings.each((METHOD, DRAFTED), "methods", "method"):
            with findings.item(method=method) as row:
                sampler = tiny(dry, method)()
                wanted = [sampler.output(SEED).tokens for _ in range(2)][-1]
                if not dry:
                    torch._C._cuda_clearCublasWorkspaces()
                number = 1 if dry else CANARIES
                canaries = [torch.full((2**25,), CANARY, dtype=torch.uint8, device=device) for _ in range(number)]
                row["same image"] = bool(torch.equal(sampler.output(SEED).tokens, wanted))
                row["canaries overwritten"] = sum(not bool(canary.eq(CANARY).all()) for canary in canaries)
                if not row["same image"] or row["canaries overwritten"]:
                    findings.failure(f"{method}: graphs use a workspace that was freed: {row}")
    overwritten = sum(row["canaries overwritten"] for row in findings.rows)
    findings.content["summary"] = f"{overwritten} blocks of others were overwritten"


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


def run_failed(findings: Findings) -> None:
    """Stages ``failed`` and ``failed-async``: a failed capture costs neither the image nor memory, and what comes after
    it in the process works."""
    dry = findings.dry
    subjects.need_graphs(dry)
    allocator = "the tape's" if dry else torch.cuda.get_allocator_backend()
    with torch.inference_mode(), findings.item(allocator=allocator) as row, captures(dry):
        made = tiny(dry)
        captured, after, wanted = made(), made(), called(made())
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


def run_unloading(findings: Findings) -> None:
    """Stage ``unloading``: what a run used is free when its model is gone."""
    dry = findings.dry
    with findings.listening(), captures(dry), findings.item(model="llamagen-xl") as row:
        free, used = [], 0
        for _ in range(2):  # the first time also loads libraries and kernels
            case = subjects.random_subject("llamagen-xl", dry, FEW)
            for method in (METHOD, DRAFTED):
                case.sampler(method)(SEED)
            used = free_memory(dry)
            del case
            free.append(free_memory(dry))
        row["used, MiB"] = max(0, free[-1] - used) / 2**20
        row["kept, MiB"] = max(0, free[0] - free[1]) / 2**20
        if row["kept, MiB"] > KEPT / 2**20:
            findings.failure(f"{row['kept, MiB']:.0f} MiB are not given back when the model is gone")
    findings.content["summary"] = "; ".join(f"{row['kept, MiB']:.0f} MiB kept" for row in findings.rows)
