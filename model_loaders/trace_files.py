"""Traces on disk: every array in a .safetensors file, the report for other programs in a .json of the same name."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..samplers.trace import CONTINUOUS_FIELDS, POSITION_FIELDS, SCHEMA, Trace


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write ``path``.json (report) and ``path``.safetensors (every array)."""
    path = Path(path)
    tensors = {f"positions.{k}": v.contiguous() for k, v in trace.positions.items()}
    tensors |= {f"rounds.{k}": v.contiguous() for k, v in trace.rounds.items()}
    header = {"rows": trace.rows, "cols": trace.cols, "stride": trace.stride, "totals": trace.totals,
              "settings": trace.settings, "schema": SCHEMA, "continuous": trace.continuous}
    save_file(tensors, str(path.with_suffix(".safetensors")), metadata={"specar": json.dumps(header)})
    path.with_suffix(".json").write_text(json.dumps(trace.report(), indent=1), encoding="utf-8")


def load_trace(path: str | Path) -> Trace:
    """Read a trace written by save_trace (its .safetensors file). Raises ValueError if it is something else."""
    path = Path(path).with_suffix(".safetensors")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("specar", "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        message = f"{path.name} cannot be read as a trace ({error}). Save it again with Save Trace."
        raise ValueError(message) from error
    schema = header.get("schema") if isinstance(header, dict) else None
    if schema != SCHEMA:
        found = schema or "no schema"
        raise ValueError(f"{path.name} is not a {SCHEMA} trace (found {found}). Save it again with Save Trace.")
    wanted = CONTINUOUS_FIELDS if header.get("continuous") else POSITION_FIELDS
    absent = [f"positions.{name}" for name in wanted if f"positions.{name}" not in tensors]
    absent += [name for name in ("rows", "cols", "stride", "totals", "settings") if name not in header]
    if absent:
        raise ValueError(f"{path.name} is incomplete ({', '.join(absent)}). Save it again with Save Trace.")
    positions, rounds = (
        {key.removeprefix(group): tensor for key, tensor in tensors.items() if key.startswith(group)}
        for group in ("positions.", "rounds.")
    )
    return Trace(header["rows"], header["cols"], header["stride"], positions, rounds, header["totals"],
                 header["settings"])
