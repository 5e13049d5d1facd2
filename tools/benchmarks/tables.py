"""Rows of a speed report, and the report as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .passes import Run
from .report import grid, spread

OTHERS = ("generate, static cache", "generate, dynamic cache", "plain loop")
LEGEND = "\n".join(
    (
        "* **ms per pass**: median, and in brackets least and quartiles; a round of a drafter's method counts as one "
        "pass. The prompt's pass is left out.",
        "* **floor**: weights and cache that a pass must read (with those of the drafter's passes), over the "
        "bandwidth of copying on this machine; wide passes also have to compute, which on a CPU takes longer than "
        "reading.",
        "* **cost**: a pass over a pass of next-token, the median of neighbouring runs; **fewer passes**: of "
        "next-token over those of the method, which with random weights are those of the bundled model (at the "
        "highest guidance measured); **faster** is one over the other, measured for whole images of the bundled model "
        "and predicted elsewhere. **quotient**: *faster* over *fewer passes*, the share of the saved passes that is "
        "saved time.",
        "* With several prompts, *cost* and the time of an image relative to next-token's are their means.",
        "* **x static, x dynamic, x loop**: milliseconds per pass of `generate` of transformers with static and "
        "dynamic cache, and of a plain loop like the published ones, over ours.",
    )
)


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
    about = report["machine"]
    machine = ", ".join(
        str(part)
        for part in (
            about.get("gpu") or about.get("processor"),
            about.get("threads") and f"{about['threads']} threads",
            *(f"{name} {found}" for name, found in report["versions"].items()),
            f"commit {report['commit']}",
        )
        if part
    )
    turns = f"1 warm-up, {report['repetitions']} repetitions, in turns."
    parts = [f"# Speed, {report['device']}", f"{machine}. {turns}", LEGEND]
    for model in report["models"]:
        parts += _model(model)
    if report["not_run"]:
        parts += ["## Not run", "\n".join(f"* {what}: not run ({why})" for what, why in report["not_run"].items())]
    return "\n\n".join(parts) + "\n"


def _model(model: dict[str, Any]) -> list[str]:
    drawn, whole = model["drawn"], model["drawn"]["tokens"] == model["picture_tokens"]
    what = "whole images" if whole else f"{drawn['tokens']} tokens in the middle"
    widened = " widened to these shapes" if "@" in model["name"] else ""
    kind = "random weights" if model["random_weights"] else f"the bundled model{widened}"
    settings = ", ".join(f"{key} {value}" for key, value in model["settings"].items() if key != "order")
    found = [
        f"## {model['name']}, guidance {model['settings']['cfg']:g}",
        f"{kind}, {model['parameters'] / 1e6:.1f} M parameters in {model['dtype']}, {model['picture_tokens']} tokens: "
        f"{what}; {settings}. A pass reads {model['weights_read'] / 1e6:.0f} MB of weights; copying a buffer as large "
        f"moves {model['copy_bytes_per_second'] / 1e9:.1f} GB/s.",
    ]
    if model.get("rows"):
        found.append(_methods(model))
    if model.get("batches"):
        names = list(model["batches"][0]["ms"])
        rows = [
            (point["pictures"], *(f"{point['ms'][name]['median'] / point['pictures']:.4g}" for name in names))
            for point in model["batches"]
        ]
        title = "Milliseconds of a pass for each of the images generated together:"
        found += [title, grid(("pictures", *names), rows)]
    if model.get("batches") and model["batches"][0]["whole"]:
        names = list(model["batches"][0]["seconds"])
        rows = [
            (point["pictures"], *(round(point["seconds"][name]["median"] / point["pictures"], 3) for name in names))
            for point in model["batches"]
        ]
        found += ["Seconds per image:", grid(("pictures", *names), rows)]
    return found


def _methods(model: dict[str, Any]) -> str:
    """The table of methods and baselines."""
    rows = []
    base = model["rows"][0]
    for row in model["rows"]:
        ms, over = row["pass_ms"], row["ms_over"]
        cost = 1 / over[base["name"]]
        baseline = row["name"] in OTHERS
        fewer = None if baseline or not row["pictures_passes"] else base["pictures_passes"] / row["pictures_passes"]
        faster = row["seconds_over"][base["name"]] if not model["random_weights"] else fewer and fewer / cost
        rows.append(
            (
                row["name"],
                f"{row['pictures_passes']:.0f}" if fewer else "",
                f"{ms['median']:g} ({ms['min']:g}; {ms['quartile_1']:g} to {ms['quartile_3']:g})",
                f"{row['floor_ms']:.3g} ({row['of_floor']:.0%})",
                f"{row['seconds']['median']:.3g}" if not model["random_weights"] else "",
                f"{cost:.2f}",
                f"{fewer:.2f}" if fewer else "",
                f"{faster:.2f}" if faster else "",
                f"{faster / fewer:.2f}" if faster and fewer else "",
                *("" if baseline or other not in over else f"{over[other]:.2f}" for other in OTHERS),
            )
        )
    return grid(
        (
            "method",
            "passes",
            "ms per pass",
            "floor, ms (share)",
            "seconds",
            "cost",
            "fewer passes",
            "faster",
            "quotient",
            "x static",
            "x dynamic",
            "x loop",
        ),
        rows,
    )
