"""Stage ``half``: a 7B model of which ComfyUI loads a half, as with --reserve-vram; its other weights are copied to the
GPU while it computes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from .. import sizes
from ..passes import CHUNK, Sampler, copy_speed
from ..subjects import BASE, STORAGES
from . import prompts, subjects
from .faults import free_memory
from .findings import Findings
from .passes import STORED, busy, on_device, profiled

METHODS, DRY_METHODS = (BASE, "sjd coupled w32"), (BASE,)
TOKENS = 48
STORED_AS = ("", ":int8", ":int4")
LEFT = {"half": 0.5, "a little": 0.02}  # share of the weights that stays in main memory


def run(findings: Findings) -> None:
    """Milliseconds of a pass beside those of copying what was not loaded, and how much of the copying is hidden."""
    dry, device = findings.dry, subjects.device_of(findings.dry)
    prompts.memory_management(dry)
    models = import_module("comfyui_specar.nodes.comfy_runtime.models")
    runs = import_module("comfyui_specar.nodes.comfy_runtime.runs")
    link = None if dry else link_speed(device)
    for storage in findings.each(STORED_AS, "storages"):
        name = STORED + storage
        for left, share in LEFT.items():
            about = {"model": name, "left in main memory": left}
            listed = [method for method in (METHODS, DRY_METHODS)[dry] if not findings.has(**about, method=method)]
            if not listed:
                continue
            with findings.trying(", ".join(about.values())):
                size, stored = subjects.size_of(STORED, dry), STORAGES[storage[1:]] if storage else None
                model = sizes.build(size, subjects.dtype_of(dry), device, stored, models.Operations)
                model.to("cpu")
                patcher = models.patcher_of(model, model)
                patcher.load(device, lowvram_model_memory=int((1 - share) * patcher.model_size()))
                runs.bring_the_rest(model, device)
                case = subjects.subject_of(name, model, dry, TOKENS)
                for method in findings.each(listed, f"methods of {name}, {left}"):
                    with findings.item(**about, method=method) as row:
                        copied = patcher.model_size() - patcher.loaded_size()
                        row |= streamed(case.sampler(method), copied, link)
                patcher.detach()
                del model, patcher, case
            free_memory(dry)
    passes = (f"{row['model']}, {row['left in main memory']}: {row.get('ms', '?')} ms" for row in findings.rows)
    findings.content["summary"] = "; ".join(passes)


def link_speed(device: torch.device) -> float:
    """Bytes per second from pinned memory to the GPU."""
    there = torch.empty(CHUNK, dtype=torch.uint8).pin_memory()
    return copy_speed(there, torch.empty(CHUNK, dtype=torch.uint8, device=device))


def streamed(contestant: Sampler, copied: int, link: float | None) -> dict[str, Any]:
    """A row. link: bytes per second (None: there is no device)."""
    run = [contestant(seed) for seed in range(2)][-1]
    row: dict[str, Any] = {"passes": run.passes, "left, MB": round(copied / 1e6, 3)}
    if link is None:
        return row
    events = on_device(profiled(contestant))
    copies = sum(end - begin for begin, end, name in events if "HtoD" in name)
    kernels = sum(end - begin for begin, end, name in events if "HtoD" not in name)
    hidden = copies + kernels - busy(events)
    return row | {
        "ms": round(run.pass_ms, 2),
        "of the link, ms": round(1e3 * copied / link, 2),
        "copies, ms": round(1e-3 * copies / run.passes, 2),
        "kernels, ms": round(1e-3 * kernels / run.passes, 2),
        "at the same time, ms": round(1e-3 * hidden / run.passes, 2),
    }
