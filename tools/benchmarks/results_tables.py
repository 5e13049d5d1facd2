"""What tools/benchmarks/results say, as tables in Markdown; documents.py puts them into README and docs."""

from __future__ import annotations

import json
import re
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from comfyui_specar.samplers.methods.jacobi import REUSE

from .report import grid

RESULTS = Path(__file__).parent / "results"
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}
NAMES = {
    "next_token": "next token",
    "TV-metered": "TV budget",
    "UniformRSD": "Uniform Relaxation",
    "w32": "window 32",
    "LANTERN delta": "LANTERN k 1000, delta",
    "Cool-SD delta 1.1, as published": "Cool-SD delta 1.1, reconstructed",
    "Cool-SD delta 2, as published": "Cool-SD delta 2, reconstructed",
}


@cache
def results(name: str) -> dict[str, Any]:
    """A report of tools/benchmarks/results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def said(name: str) -> str:
    """A measured case in words."""
    jacobi = re.match(r"(?:sjd|SJD) (\w+),? ?w?(\d+)?", name)
    if not name.startswith("sjd ") or not jacobi:
        for short, words in NAMES.items():
            name = name.replace(short, words)
        return name
    return name.replace(jacobi[0], f"{REUSE[jacobi[1]]}, window {jacobi[2]}").replace(" init ", ", first draft token ")


def measured_speed(name: str, guidance: float, report: str) -> dict[str, Any]:
    """What a speed report has of a model at a guidance."""
    return next(m for m in results(report)["models"] if (m["name"], m["settings"]["cfg"]) == (name, guidance))


def baselines(*reports: str) -> str:
    """Next token in seconds per image, and the time of what users run today over it, for every model of the reports."""
    models = [model for report in reports for model in results(report)["models"]]
    others = [row["name"] for row in models[0]["rows"] if row["name"] != "next_token"]
    rows = []
    for model in sorted(models, key=itemgetter("parameters")):
        own = next(row for row in model["rows"] if row["name"] == "next_token")
        size = model["name"].partition("@")[2] or "itself"
        rows.append(
            (
                f"{size} ({model['parameters'] / 1e6:.0f} M)",
                SHORT[model["dtype"]],
                f"{model['settings']['cfg']:g}",
                f"{own['seconds']['median']:.2f}",
                *(f"{own['seconds_over'][other]:.2f}" for other in others),
            )
        )
    return grid(("bundled model, widened to", "precision", "guidance", "next token, s", *others), rows)


def batches(name: str, guidance: float, report: str) -> str:
    """Seconds per image by batch size, where the batches of a speed report are whole images."""
    rows = measured_speed(name, guidance, report)["batches"]
    methods = [*rows[0]["seconds"]]
    return grid(
        ("batch size", *map(said, methods)),
        [
            (row["pictures"], *(f"{row['seconds'][method]['median'] / row['pictures']:.2f}" for method in methods))
            for row in rows
        ],
    )


def same_seed() -> str:
    """How many images equal next token's, by method, processor and precision."""
    columns = {
        f"{report['machine']['processor'].split('(R)')[0].split()[0]}, {dtype}": found
        for report in map(results, ("same-seed-cpu", "same-seed-cpu-amd"))
        for dtype, found in report["dtypes"].items()
    }
    rows = [
        (said(case), *(f"{found[case]['same images']} of {found[case]['images']}" for found in columns.values()))
        for case in next(iter(columns.values()))
    ]
    return grid(("method", *columns), rows)
