"""Trace files: all arrays in a .safetensors file, and a report for other programs in a .json of the same name."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..limits.limits import HEADER, IMAGES, RUN, SIDE, FileError, bounded_int, parse_json
from ..limits.replacing import replace
from .trace import CONTINUOUS_FIELDS, POSITION_FIELDS, SCHEMA, Source, Trace, derived_totals

HEADER_FIELDS = ("rows", "cols", "stride", "lead", "totals", "settings")


def save_trace(trace: Trace, path: str | Path) -> tuple[Path, Path]:
    """Write ``path``.json (report) and ``path``.safetensors (every array), and return both.

    The files appear only after both are written completely. Raises OSError that names the file that failed.
    """
    path = stem(path)
    tensors = {f"positions.{k}": v.contiguous() for k, v in trace.positions.items()}
    tensors |= {f"rounds.{k}": v.contiguous() for k, v in trace.rounds.items()}
    header = {name: getattr(trace, name) for name in HEADER_FIELDS}
    header |= {"schema": SCHEMA, "continuous": trace.continuous}
    contents = {
        with_ending(path, ".safetensors"): save(tensors, metadata={"specar": json.dumps(header)}),
        with_ending(path, ".json"): json.dumps(trace.report(), indent=1).encode(),
    }
    write_together(contents)
    record, report = contents
    return report, record


def stem(path: str | Path) -> Path:
    """Path of a trace without the extension. (A name may contain dots.)"""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".json", ".safetensors") else path


def with_ending(path: Path, ending: str) -> Path:
    return path.parent / (path.name + ending)


def write_together(contents: dict[Path, bytes]) -> None:
    """Write several files atomically: all or none. Raises OSError."""
    parts = {file: with_ending(file, ".part") for file in contents}
    file = next(iter(contents))
    try:
        for file, content in contents.items():
            parts[file].write_bytes(content)
        for file, part in parts.items():
            replace(part, file)
    except OSError as error:
        for part in parts.values():
            with suppress(OSError):
                part.unlink()
        full = " The disk is full: free some space." if error.errno in (ENOSPC, EDQUOT) else ""
        raise OSError(error.errno, f"{file} could not be written ({error.strerror}).{full}") from error


def load_trace(path: str | Path) -> Trace:
    """Read a trace written by save_trace (its .safetensors file). Raises ValueError for other files."""
    path = with_ending(stem(path), ".safetensors")
    try:
        tensors, header = _read(path)
    except (OSError, MemoryError, SafetensorError, ValueError) as error:
        raise FileError(f"{path.name} cannot be read as a trace ({error}). Save it again with Save Trace.") from error
    if header.get("schema") != SCHEMA:
        found = header.get("schema") or "no schema"
        raise FileError(f"{path.name} is not a {SCHEMA} trace (found {found}). Save it again with Save Trace.")
    positions, rounds = (
        {key.removeprefix(group): tensor for key, tensor in tensors.items() if key.startswith(group)}
        for group in ("positions.", "rounds.")
    )
    wanted = CONTINUOUS_FIELDS if header.get("continuous") else POSITION_FIELDS
    absent = [f"positions.{name}" for name in wanted if name not in positions]
    absent += [name for name in HEADER_FIELDS if name not in header]
    if absent:
        raise FileError(f"{path.name} is incomplete ({', '.join(absent)}). Save it again with Save Trace.")
    rows, cols, stride, lead, totals, settings = (header[name] for name in HEADER_FIELDS)
    trace = Trace(rows, cols, stride, positions, rounds, totals, settings, lead)
    try:
        check_trace(trace)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise FileError(f"{path.name} is damaged ({error}). Save it again with Save Trace.") from error
    return trace


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The arrays of a file, in memory, as it may be replaced while the trace is shown; and its header."""
    if not os.path.isfile(path):  # unlike Path.is_file, it accepts invalid names
        raise FileError("it does not exist")
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if length > HEADER:
        raise FileError(f"its header has {length} bytes")
    tensors = load(content)  # which checks the header
    strings = parse_json(content[8 : 8 + length]).get("__metadata__") or {}
    header = parse_json(strings.get("specar", "{}"))
    return tensors, header if isinstance(header, dict) else {}


def check_trace(trace: Trace) -> None:
    """Raise an exception of any kind if the arrays or totals of a trace are inconsistent."""
    sizes = tuple(bounded_int("a side of its grid", side, 1, SIDE) for side in (trace.rows, trace.cols))
    bounded_int("its number of tokens per row", trace.stride, trace.cols, 2 * SIDE)
    bounded_int("its number of tokens before the grid", trace.lead, 0, SIDE**2)
    shape = trace.positions["source"].shape
    if len(shape) != 2 or not 1 <= shape[0] <= IMAGES or trace.lead + trace.rows * trace.stride > shape[1]:
        raise FileError(f"grid {sizes} after {trace.lead} tokens does not fit records of shape {list(shape)}")
    known = POSITION_FIELDS | CONTINUOUS_FIELDS
    for name, tensor in trace.positions.items():
        if tensor.shape != shape or tensor.dtype != known.get(name, tensor.dtype):
            raise FileError(f"{name} is {tensor.dtype} {list(tensor.shape)}")
    if trace.positions["source"].max() > max(Source):
        raise FileError("unknown token source")
    first, last = (int(number) for number in trace.positions["finalised_at"].aminmax())
    if not 0 <= first <= last <= shape[1] + 1:
        raise FileError("a token was decided in a pass that there was not")  # every pass decides one
    if not isinstance(trace.settings, dict) or len(json.dumps(trace.settings)) > RUN:
        raise FileError(f"settings are not a JSON object of at most {RUN} characters")
    for name, number in derived_totals(trace.positions, trace.totals).items():
        stored = trace.totals[name]
        if type(stored) is not type(number) or (stored != number and not isinstance(number, float)):
            raise FileError(f"{name} is {stored!r:.100}, but its records say {number!r}")
    trace.summary()  # needs totals that no records tell
