"""Stage ``device``: what the machine is, and what the pack makes of it."""

from __future__ import annotations

import os

import torch
from comfyui_specar.device import dispatch
from comfyui_specar.device.graphs import capturable
from torch.utils import collect_env

from ..passes import CHUNK, bandwidth
from ..report import cpu_name, versions
from . import packages, subjects
from .findings import Findings


def run(findings: Findings) -> None:
    """One row for every fact; a warning where the pack has to do without Triton or graphs."""
    facts: dict[str, object] = {"processor": cpu_name(), **{name: found for name, found in versions().items() if found}}
    if not findings.dry:
        facts |= of_the_gpu(findings)
    facts["COMFYUI_PATH"] = os.environ.get("COMFYUI_PATH", "not set")
    for name, without in packages.missing().items():
        findings.not_run(name, f"is not installed, and so not run: {without}")
    for fact, value in facts.items():
        with findings.item(fact=fact) as row:
            row["value"] = str(value)
    findings.content["summary"] = str(facts.get("name", facts["processor"]))


def of_the_gpu(findings: Findings) -> dict[str, object]:
    """Facts of the GPU; what is wrong with them goes to ``findings``."""
    device = subjects.device_of(dry=False)
    about = torch.cuda.get_device_properties(device)
    if not dispatch.runs_triton(device):
        findings.warning("the slower torch versions of the kernels run on this GPU")
    if not capturable(device):
        findings.warning(subjects.NO_GRAPHS)
    return {
        "name": about.name,
        "capability": f"{about.major}.{about.minor}",
        "memory": f"{about.total_memory / 2**30:.1f} GiB",
        "multiprocessors": about.multi_processor_count,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) or "unknown",
        "CUDA of torch": torch.version.cuda,
        "allocator": torch.cuda.get_allocator_backend(),
        "copying moves": f"{bandwidth(device, CHUNK) / 1e9:.0f} GB/s",
    }
