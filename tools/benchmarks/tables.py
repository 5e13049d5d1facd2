"""Rows of a speed report, and the report as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .passes import Run
from .report import grid, spread

OTHERS = ("generate, static cache", "generate, dynamic cache", "plain loop")
LEGEND = "The columns are explained in tools/benchmarks/results/measured.md."


def row_of(name: str, runs: dict[str, list[Run]], base: str, prompts: int = 1) -> dict[str, Any]:
    """A contestant's row. runs: all contestants' runs, equal indices being neighbours in time, ``prompts`` of them in
    turns."""
    own = runs[name]
    row: dict[str, Any] = {
        "name": name,
        "passes": statistics.fmean(run.passes for run in own),
        "draft_passes": statistics.fmean(run.draft_passes for run in own),
        "pass_ms": spread([run.pass_ms for run in own]),
        "seconds": spread([run.seconds for run in own]),
    }
    for key, of in (("ms_over", lambda run: run.pass_ms), ("seconds_over", lambda run: run.seconds)):
        row[key] = {
            other: float(f"{statistics.harmonic_mean(_paired(runs[other], own, of, prompts)):.4g}")
            for other in (base, *OTHERS)
            if other in runs
        }
    return row


def _paired(others: Sequence[Run], own: Sequence[Run], of, prompts: int) -> list[float]:
    """For each prompt, the median ratio of another contestant's runs to the own ones beside them."""
    ratios = [of(a) / of(b) for a, b in zip(others, own, strict=False)]
    return [statistics.median(ratios[prompt::prompts]) for prompt in range(prompts)]


def table(report: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    machine = report["machine"]
    about = (
        machine["gpu"] or machine["processor"],
        f"{machine['threads']} threads",
        *(f"{name} {found}" for name, found in report["versions"].items()),
        f"commit {report['commit']}",
    )
    turns = f"1 warm-up, {report['repetitions']} repetitions, in turns."
    parts = [f"# Speed, {report['device']}", f"{', '.join(about)}. {turns}", LEGEND]
    for model in report["models"]:
        parts += _model(model)
    if report["not_run"]:
        parts += ["## Not run", "\n".join(f"* {what}: not run ({why})" for what, why in report["not_run"].items())]
    return "\n\n".join(parts) + "\n"


def _model(model: dict[str, Any]) -> list[str]:
    settings = ", ".join(f"{key} {value}" for key, value in model["settings"].items() if key != "order")
    found = [
        f"## {model['name']}, guidance {model['settings']['cfg']:g}",
        f"{model['parameters'] / 1e6:.1f} M parameters in {model['dtype']}, {model['picture_tokens']} tokens; "
        f"{settings}. A pass reads {model['weights_read'] / 1e6:.0f} MB of weights; copying a buffer as large moves "
        f"{model['copy_bytes_per_second'] / 1e9:.1f} GB/s.",
    ]
    if model.get("rows"):
        found.append(_methods(model["rows"]))
    if points := model.get("batches"):
        names = list(points[0]["seconds"])
        rows = [
            (point["pictures"], *(round(point["seconds"][name]["median"] / point["pictures"], 3) for name in names))
            for point in points
        ]
        found += ["Seconds per image:", grid(("pictures", *names), rows)]
    return found


def _methods(rows: list[dict[str, Any]]) -> str:
    """The table of methods and baselines."""
    base, lines = rows[0], []
    for row in rows:
        ms, over, baseline = row["pass_ms"], row["ms_over"], row["name"] in OTHERS
        fewer, faster = base["pictures_passes"] / row["pictures_passes"], row["seconds_over"][base["name"]]
        beside = {other: "" if baseline or other not in over else f"{over[other]:.2f}" for other in OTHERS}
        lines.append(
            {
                "method": row["name"],
                "passes": "" if baseline else f"{row['pictures_passes']:.0f}",
                "ms per pass": f"{ms['median']:g} ({ms['min']:g}; {ms['quartile_1']:g} to {ms['quartile_3']:g})",
                "floor, ms (share)": f"{row['floor_ms']:.3g} ({row['of_floor']:.0%})",
                "seconds": f"{row['seconds']['median']:.3g}",
                "cost": f"{1 / over[base['name']]:.2f}",
                "fewer passes": "" if baseline else f"{fewer:.2f}",
                "faster": f"{faster:.2f}",
                "quotient": "" if baseline else f"{faster / fewer:.2f}",
                **{f"x {other.removeprefix('generate, ')}": times for other, times in beside.items()},
            }
        )
    return grid([*lines[0]], [[*line.values()] for line in lines])
