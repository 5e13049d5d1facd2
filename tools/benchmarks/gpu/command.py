"""The command line: all stages, or (in the processes that this starts) one of them."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..report import commit, grid, plain_command, write
from . import __doc__ as about
from .findings import Findings, NotRun, read
from .stages import ALLOCATORS, FAILED, ROOT, STAGES, in_turn

SCHEMA = "specar.gpu/1"
RESULTS = ROOT / "tools/benchmarks/results"
DRY = (
    "**Dry run, without a CUDA device:** tiny models on a CPU, a tape in place of CUDA graphs, Triton's interpreter "
    "in place of its compiler. It shows that the command works, and nothing about a GPU."
)


def main() -> None:
    parser = plain_command(" gpu", about)
    parser.add_argument("--minutes", type=float, default=10, help="time for all stages together (3, 10 or 30)")
    parser.add_argument(
        "--of", type=float, metavar="MINUTES", help="time of several calls together, which go on with one report"
    )
    parser.add_argument("--only", nargs="+", choices=[stage.name for stage in STAGES], help="run only these stages")
    parser.add_argument(
        "--dry", action="store_true", help="run on the CPU with tiny models (always if there is no GPU)"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON report, with its page next to it (default: tools/benchmarks/results/)"
    )
    for name, kind in (("--stage", str), ("--into", Path), ("--seconds", float)):  # of the processes of the stages
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        one_stage(options)
    else:
        sys.exit(all_stages(options))


def all_stages(options: argparse.Namespace) -> str | None:
    """Run the stages, and write the report after each. Returns what failed."""
    here = torch.cuda.is_available()
    dry = options.dry or not here
    device = torch.cuda.get_device_name() if here and not dry else "dry run"
    if dry and not options.dry:
        print("There is no CUDA device, so this is a dry run: nothing in it was measured on a GPU.", flush=True)
    out = options.out or RESULTS / f"gpu-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"
    about = {"schema": SCHEMA, "device": device, "dry": dry, "commit": commit()}
    known = {entry["stage"]: entry for entry in (begun(out, about) if options.of else ())}
    stages = tuple(stage for stage in STAGES if not options.only or stage.name in options.only)
    times = 60 * options.minutes, 60 * (options.of or 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for entry in in_turn(stages, times[0], Path(folder), dry, known, times[1]):
            known[entry["stage"]] = entry
            report = about | {"minutes": options.of or options.minutes}
            report["stages"] = [known[stage.name] for stage in STAGES if stage.name in known]
            write(report, out)
            out.with_suffix(".md").write_text(page(report), encoding="utf-8")
            print(f"{entry['title']:46} {entry['verdict']:8} {entry['seconds']:6.1f} s  {entry['why']}", flush=True)
    print(f"Report: {out.with_suffix('.md')}")
    failed = [entry["title"] for entry in known.values() if entry["verdict"] == FAILED]
    return f"Failed: {'; '.join(failed)}." if failed else None


def begun(out: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The stages of a report that an earlier call began with the same code on the same kind of GPU."""
    report = read(out)
    return report["stages"] if about.items() <= report.items() else []


def one_stage(options: argparse.Namespace) -> None:
    """Run one stage in this process."""
    [stage] = [stage for stage in STAGES if stage.name == options.stage]
    module, function = stage.where.split(".")
    findings = Findings(options.into, options.seconds, options.dry)
    try:
        wanted = stage.environment.get(ALLOCATORS, "").partition(":")[2]
        if wanted and not options.dry and (here := torch.cuda.get_allocator_backend()) != wanted:
            raise NotRun(f"torch's allocator is {here} although {wanted} was asked for")
        getattr(import_module(f".{module}", __package__), function)(findings)
    except NotRun as reason:
        findings.not_run(stage.title, str(reason))
    findings.save()


# A report as a page


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
