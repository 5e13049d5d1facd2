"""What is asked of a GPU first: a capture that fails, passes in every storage with and without Triton, and whether
memory comes back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from comfyui_specar.kernels import graphs
from comfyui_specar.samplers.engine import session

from .. import sizes
from ..subjects import BASE
from . import subjects
from .findings import NEEDS_DEVICE, Findings
from .graphs import SEED, captures
from .profiles import Eager

MODEL, METHODS = "lumina-mgpt-7b", (BASE, "sjd coupled w32")
TOKENS = 128
KEPT = 64 * 2**20  # bytes that a library may keep for itself


def free_memory(dry: bool) -> int:
    """Bytes that are free on the GPU when nothing is held that could be given back."""
    gc.collect()
    if dry:
        return 0
    device = subjects.device_of(dry)
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
    subjects.need_graphs(findings.dry)
    dry, device = findings.dry, subjects.device_of(findings.dry)
    allocator = "the tape's" if dry else torch.cuda.get_allocator_backend()
    with torch.inference_mode(), findings.item(allocator=allocator) as row, ExitStack() as stack:
        stack.enter_context(captures(dry))
        size = subjects.tiny(sizes.SIZES["llamagen-xl"])
        case = subjects.random_subject("llamagen-xl", size, device, torch.float32, subjects.DRY_TOKENS)
        called, captured, after = (case.sampler("sjd coupled w16") for _ in range(3))
        called.staged.sessions = Eager()
        wanted = called.output(SEED).tokens
        before = free_memory(dry)
        with failing():
            row["same image"] = bool(torch.equal(captured.output(SEED).tokens, wanted))
        captured.staged.sessions.clear()
        row["kept, MiB"] = max(0, before - free_memory(dry)) / 2**20
        row["says so"], graphs._failed = graphs._failed, False
        row["next capture, same image"] = bool(torch.equal(after.output(SEED).tokens, wanted)) and not graphs._failed
        graphs._failed = False
        if not row["same image"] or not row["says so"] or row["kept, MiB"] > KEPT / 2**20:
            findings.failure(f"{allocator}: a failed capture costs the image or memory: {row}")
        if not row["next capture, same image"]:
            findings.warning(f"{allocator}: after a failed capture no other works, as the pack expects")
    findings.content["summary"] = "; ".join(f"{row['kept, MiB']:.0f} MiB kept" for row in findings.rows)


def run_storages(findings: Findings, **_options: object) -> None:
    """Stages ``storages`` and ``plain``: milliseconds of a pass of a 7B model in bf16, int8 and int4."""
    dry = findings.dry
    if dry:
        findings.not_run("milliseconds of a pass", NEEDS_DEVICE)
    device, dtype = subjects.device_of(dry), torch.float32 if dry else torch.bfloat16
    size = subjects.tiny(sizes.SIZES[MODEL]) if dry else sizes.SIZES[MODEL]
    with captures(dry):
        for storage in findings.each(("", ":int8") if dry else ("", ":int8", ":int4"), "storages"):
            for method in METHODS[: 1 if dry else None]:
                with findings.item(model=MODEL + storage, method=method) as row:
                    tokens = subjects.DRY_TOKENS if dry else TOKENS
                    sampler = subjects.random_subject(MODEL + storage, size, device, dtype, tokens).sampler(method)
                    runs = [sampler(seed) for seed in range(2 if dry else 4)]
                    row |= {"passes": runs[-1].passes} | ({} if dry else {"ms": min(run.pass_ms for run in runs[2:])})
                sampler = None
                free_memory(dry)
    findings.content["summary"] = (
        f"{len(findings.rows)} runs went through"
        if dry
        else "; ".join(f"{row['model']}: {row['ms']:.3g} ms" for row in findings.rows if row["method"] == BASE)
    )


def run_unloading(findings: Findings, **_options: object) -> None:
    """Stage ``unloading``: what a run used is free when its model is gone."""
    dry, device = findings.dry, subjects.device_of(findings.dry)
    with findings.listening(), captures(dry), findings.item(model="llamagen-xl") as row:
        size = subjects.tiny(sizes.SIZES["llamagen-xl"]) if dry else sizes.SIZES["llamagen-xl"]
        before = free_memory(dry)
        case = subjects.random_subject(
            "llamagen-xl",
            size,
            device,
            torch.float32 if dry else torch.bfloat16,
            subjects.DRY_TOKENS if dry else TOKENS,
        )
        for method in ("sjd coupled w16", "chain of 5"):
            case.sampler(method)(SEED)
        row["used, MiB"] = max(0, before - free_memory(dry)) / 2**20
        case = None
        row["kept, MiB"] = max(0, before - free_memory(dry)) / 2**20
        if row["kept, MiB"] > KEPT / 2**20:
            findings.failure(f"{row['kept, MiB']:.0f} MiB are not given back when the model is gone")
    findings.content["summary"] = "; ".join(f"{row['kept, MiB']:.0f} MiB kept" for row in findings.rows)
