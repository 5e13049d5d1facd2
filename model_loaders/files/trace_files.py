"""Trace files: all arrays in a .safetensors file, and a report for other programs in a .json of the same name."""

from __future__ import annotations

import json
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from ...common.files import replace
from ...common.limits import IMAGES, RUN, SIDE, FileError, bounded_int
from ...samplers.trace import CONTINUOUS_FIELDS, POSITION_FIELDS, SCHEMA, Source, Trace, derived_totals
from .checkpoint import open_checkpoint
from .errors import CheckpointError

SCHEMA_1 = "specar.trace/1"  # read, but no longer written
RENAMED = {  # position fields and totals of SCHEMA_1 -> their names in SCHEMA
    "tv_leak": "tv_bound",
    "given": "prefix_tokens",
    "last_resorts": "failed_resamples",
}
LATER = ("draft_tv", "similarity")  # position fields that earlier files lack; zero stands for "not known"


def save_trace(trace: Trace, path: str | Path) -> tuple[Path, Path]:
    """Write ``path``.json (report) and ``path``.safetensors (every array), and return both.

    The files appear only after both are written completely. Raises OSError that names the file that failed.
    """
    path = stem(path)
    tensors = {f"positions.{k}": v.contiguous() for k, v in trace.positions.items()}
    tensors |= {f"rounds.{k}": v.contiguous() for k, v in trace.rounds.items()}
    header = {
        "rows": trace.rows,
        "cols": trace.cols,
        "stride": trace.stride,
        "lead": trace.lead,
        "totals": trace.totals,
        "settings": trace.settings,
        "schema": SCHEMA,
        "continuous": trace.continuous,
    }
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
    """Read a trace written by save_trace (its .safetensors file). Raises ValueError for other files.

    Totals are those in the file. Files of earlier versions have other names (see RENAMED) or lack totals, which are
    computed here.
    """
    path = with_ending(stem(path), ".safetensors")
    try:
        checkpoint = open_checkpoint(path, mapped=False)  # the file may be replaced while the trace is shown
    except CheckpointError as error:
        raise FileError(f"{path.name} cannot be read as a trace: {error} Save it again with Save Trace.") from error
    header, tensors = checkpoint.metadata, checkpoint.tensors
    schema = header.get("schema")
    if schema not in (SCHEMA, SCHEMA_1):
        found = schema or "no schema"
        raise FileError(f"{path.name} is not a {SCHEMA} trace (found {found}). Save it again with Save Trace.")
    positions, rounds = (
        {key.removeprefix(group): tensor for key, tensor in tensors.items() if key.startswith(group)}
        for group in ("positions.", "rounds.")
    )
    if schema == SCHEMA_1:
        positions = renamed(positions)
    wanted = CONTINUOUS_FIELDS if header.get("continuous") else POSITION_FIELDS
    if "source" in positions and wanted is POSITION_FIELDS:
        shape = positions["source"].shape
        positions = {name: torch.zeros(shape) for name in LATER} | positions  # one each: files hold no tensor twice
    absent = [f"positions.{name}" for name in wanted if name not in positions]
    absent += [name for name in ("rows", "cols", "stride", "totals", "settings") if name not in header]
    if absent:
        raise FileError(f"{path.name} is incomplete ({', '.join(absent)}). Save it again with Save Trace.")
    trace = Trace(
        header["rows"],
        header["cols"],
        header["stride"],
        positions,
        rounds,
        header["totals"],
        header["settings"],
        header.get("lead", 0),
    )  # earlier files have no lead
    try:
        if schema == SCHEMA_1:
            trace.totals = renamed(trace.totals)
        complete(trace)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise FileError(f"{path.name} is damaged ({error}). Save it again with Save Trace.") from error
    return trace


def renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Position fields or totals of SCHEMA_1 under their names in SCHEMA."""
    return {RENAMED.get(name, name): value for name, value in values.items()}


def complete(trace: Trace) -> None:
    """Complete the totals of a trace. Raises an exception of any kind if its arrays or totals are inconsistent."""
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
        stored = trace.totals.setdefault(name, number)
        if type(stored) is not type(number) or (stored != number and not isinstance(number, float)):
            raise FileError(f"{name} is {stored!r:.100}, but its records say {number!r}")
    trace.summary()  # needs totals that no records tell
