"""What every measurement is filed under: machine, versions, commit; and how repeated times are summed up."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKED = "$Format:%h$"  # git writes the commit here in an archive


def plain_command(what: str, about: str | None) -> argparse.ArgumentParser:
    """The command line of ``python -m tools.benchmarks WHAT``, without options."""
    return argparse.ArgumentParser(
        prog=f"python -m tools.benchmarks{what}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def command(what: str, about: str | None) -> argparse.ArgumentParser:
    """The same with the options that measurements have in common."""
    parser = plain_command(f" {what}", about)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own)")
    parser.add_argument("--out", type=Path, help="JSON report to write")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, after threads were set."""
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def cpu_info() -> dict[str, str]:
    """What the kernel says of the first processor; nothing where it has no /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    pairs = (line.split(":", 1) for line in reversed(lines) if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cpu_name() -> str:
    """The processor as the kernel names it."""
    return cpu_info().get("model name", platform.processor())


def cpu_generation() -> str:
    """The processor with what tells its generation, which the name of a virtual machine's may not."""
    about = cpu_info()
    return (
        f"{cpu_name()}, family {about['cpu family']}, model {about['model']}" if "cpu family" in about else cpu_name()
    )


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"processor": cpu_generation(), "threads": torch.get_num_threads(), "gpu": gpu, "torch": torch.__version__}


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
    if "Format" not in PACKED:
        return PACKED
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(describe, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    except FileNotFoundError:
        return "unknown"
    return result.stdout.strip() or "unknown"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Least, quartiles and median of repeated measurements, rounded to four digits."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    found = {"min": min(values), "quartile_1": low, "median": middle, "quartile_3": high}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def grid(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown, without the columns that have no entries."""
    filled = [i for i in range(len(head)) if any(row[i] not in ("", None) for row in rows)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(line[i]) for i in filled) + " |" for line in lines)


def measured_on(device: torch.device) -> dict[str, Any]:
    """What every report says of its origin."""
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
    }


class Record:
    """A report that is written to a file as it grows, so that nothing is lost when the program is cut off.

    What begins nothing new once ``in_time`` is false ends within ``seconds``.
    """

    def __init__(self, content: dict[str, Any], out: Path | None, seconds: float):
        self.content: dict[str, Any] = content | {"not_run": {}}
        self.out, self._ends = out, time.perf_counter() + seconds

    @property
    def in_time(self) -> bool:
        return time.perf_counter() < self._ends

    def save(self) -> None:
        if self.out:
            write(self.content, self.out)

    def not_run(self, what: str, why: str) -> None:
        self.content["not_run"][what] = why
        self.save()

    @contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """Whatever goes wrong with one thing (memory, a driver, a compiler) is written down, and the others go on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.not_run(what, f"failed: {type(error).__name__}: {str(error)[:300]}")


def write(report: dict[str, Any], out: Path) -> None:
    """Write a report, so far as it has come."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
