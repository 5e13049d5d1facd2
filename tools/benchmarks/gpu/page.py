"""A report as a page."""

from __future__ import annotations

from typing import Any

from ..report import grid

DRY = (
    "**Dry run, without a CUDA device:** tiny models on a CPU, a tape in place of CUDA graphs, Triton's interpreter "
    "in place of its compiler. It shows that the command works, and nothing about a GPU."
)


def page(report: dict[str, Any]) -> str:
    """The report in Markdown: verdicts, then what every stage found."""
    parts = [f"# {report['device']}", f"{report['minutes']:g} minutes, commit {report['commit']}."]
    if report["dry"]:
        parts.append(DRY)
    rows = [
        (entry["title"], f"**{entry['verdict']}**", _cell(entry["why"]), f"{entry['seconds']:g}")
        for entry in report["stages"]
    ]
    parts.append(grid(("stage", "verdict", "", "seconds"), rows))
    for entry in report["stages"]:
        parts += _stage(entry)
    return "\n\n".join(parts) + "\n"


def _stage(entry: dict[str, Any]) -> list[str]:
    found = []
    for name in ("failures", "warnings"):
        if lines := entry.get(name):
            found.append("\n".join((f"{name.capitalize()}:", "", *(f"* {_cell(line)}" for line in lines))))
    if rows := entry.get("rows"):
        columns = list(dict.fromkeys(key for row in rows for key in row))
        found.append(grid(columns, [[_cell(row.get(key, "")) for key in columns] for row in rows]))
    if left := entry.get("not_run"):
        found.append("\n".join(f"* {what}: not run ({_cell(why)})" for what, why in left.items()))
    return [f"## {entry['title']}", *found] if found else []


def _cell(value: Any) -> str:
    """A value on one line of a table."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    text = f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)
    return " ".join(text.replace("|", "\\|").split())
