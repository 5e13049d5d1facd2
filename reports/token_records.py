"""What a trace holds of every token, as a file for the front end, which shows the records of the token pointed at."""

from __future__ import annotations

import json
import math
from typing import Any

from ..samplers.trace import Trace
from .acceptance_map import CONTINUOUS_NAMES, SOURCES

DIGITS = 4  # significant ones that are kept of fractions


def token_numbers(trace: Trace, image: int, map_size: tuple[int, int], legend: dict[str, Any]) -> str:
    """Strict JSON (no NaN, no Infinity) of one image's records.

    map_size: (width, height) of the token grid in the image beside the file. ``fields`` has an array per record of
    the trace, row by row; records of nothing but zeros are left out. ``sources`` names the values of "source".
    legend: of the map (see legend_records of acceptance_map.py).
    """
    names = {kind: name for kind, (name, _) in SOURCES.items()} | (CONTINUOUS_NAMES if trace.continuous else {})
    grids = {name: trace.grid(name)[image] for name in trace.positions}
    fields = {name: [_short(value) for value in grid.flatten().tolist()] for name, grid in grids.items() if grid.any()}
    return json.dumps(
        {
            "rows": trace.rows,
            "cols": trace.cols,
            "map": map_size,
            "continuous": trace.continuous,
            "sources": [names[kind] for kind in sorted(names)],
            "fields": fields,
            "legend": legend,
        },
        allow_nan=False,
        separators=(",", ":"),
    )


def _short(value: int | float) -> int | float | str:
    """A fraction with DIGITS significant digits; "inf", "-inf", "nan" where there is no number."""
    if isinstance(value, int):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
