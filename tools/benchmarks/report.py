"""What every measurement is filed under: machine, versions, commit; and how repeated times are summed up."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import comfyui_specar as specar
import torch


def cpu_name() -> str:
    """The processor as the kernel names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"processor": cpu_name(), "threads": torch.get_num_threads(), "gpu": gpu, "torch": torch.__version__}


def versions() -> dict[str, str | None]:
    """Of Python, and of the packages that have a part in the numbers (None: not installed)."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "transformers", "triton", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str:
    """The commit of the tree, with a mark if it was changed ("unknown" in a copy without git)."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(describe, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    except FileNotFoundError:
        return "unknown"
    return result.stdout.strip() or "unknown"


def find(name: str) -> Path:
    """A file or folder, or else the bundled model of that name."""
    return Path(name) if Path(name).exists() else specar.bundled(name)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Least, quartiles and median of repeated measurements, rounded to four digits."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    found = {"min": min(values), "quartile_1": low, "median": middle, "quartile_3": high}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def write(report: dict[str, Any], out: Path) -> None:
    """Write a report, so far as it has come."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
