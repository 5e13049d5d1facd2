"""What tools/benchmarks/results say, as tables in Markdown; documents.py puts them into README and docs."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from math import nan
from operator import itemgetter
from pathlib import Path
from typing import Any

from comfyui_specar.samplers.methods.jacobi import REUSE

from .report import grid

RESULTS = Path(__file__).parent / "results"
PAIRED = (
    "EAGLE-1, 57 drafts",
    "EAGLE-2",
    "LANTERN++ k 10, lambda 2",
    "Cool-SD delta 1.1",
    "Cool-SD delta 2",
    "VVS every 4th, EAGLE-1",
)  # the first is what the others are compared with
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


def cases(report: str, guidance: float) -> dict[str, dict[str, Any]]:
    """The methods whose passes a report has at a guidance, by name; the first is next token."""
    run = next(run for run in results(report)["runs"] if run["cfg"] == guidance)
    return {row["name"]: row for row in run["methods"]}


def drift(row: dict[str, Any]) -> float | None:
    """The drift bound per token of an image (None: not known). Earlier reports say 0 of SJD++."""
    bound = row.get("drift_bound")
    return None if bound is None or "threshold_paper" in row["name"] else bound / tokens(row)


def tokens(row: dict[str, Any]) -> int:
    """The tokens of an image."""
    return round(row["passes"] * row["step_compression"])


def said(name: str) -> str:
    """A measured case in words."""
    jacobi = re.match(r"(?:sjd|SJD) (\w+),? ?w?(\d+)?", name)
    if not name.startswith("sjd ") or not jacobi:
        for short, words in NAMES.items():
            name = name.replace(short, words)
        return name
    return name.replace(jacobi[0], f"{REUSE[jacobi[1]]}, window {jacobi[2]}").replace(" init ", ", first draft token ")


def over_prompts(report: str, each: Sequence[float]) -> float:
    """Standard error of a mean over a report's images, which come prompt by prompt: that of the prompts' means, as
    images of a prompt are alike."""
    prompts = len(results(report)["prompts"])
    seeds = len(each) // prompts
    means = [statistics.fmean(each[at : at + seeds]) for at in range(0, len(each), seeds)]
    return statistics.stdev(means) / prompts**0.5


def passes(guidance: float) -> str:
    """Everything that was measured of all methods at a guidance."""
    measured, rows = cases("default-cpu", guidance), []
    for row in measured.values():
        bound = drift(row)
        rows.append(
            (
                said(row["name"]),
                "unknown" if bound is None else f"{bound:.2f}" if bound else "exact",
                f"{row['passes']:.0f} ± {over_prompts('default-cpu', row['passes_each']):.0f}",
                round(row["draft_passes"]) or "",
                f"{row['acceptance_rate']:.0%}" if row["acceptance_rate"] else "",
            )
        )
    return grid(("method", "drift per token", "passes", "draft passes", "accepted"), rows)


def paired(guidance: float) -> str:
    """Differences of passes, image by image, from the EAGLE-1 tree."""
    measured, rows = cases("default-cpu", guidance), []
    base = measured[PAIRED[0]]["passes_each"]
    for name in PAIRED:
        apart = [own - other for own, other in zip(measured[name]["passes_each"], base, strict=True)]
        error = over_prompts("default-cpu", apart)
        rows.append(
            (
                said(name),
                f"{measured[name]['passes']:.0f}",
                f"{statistics.fmean(apart):+.1f} ± {error:.1f}" if error else "",
            )
        )
    return grid(("method", "passes", "difference"), rows)


def measured_speed(name: str, guidance: float, report: str) -> dict[str, Any]:
    """What a speed report has of a model at a guidance."""
    return next(m for m in results(report)["models"] if (m["name"], m["settings"]["cfg"]) == (name, guidance))


def times(name: str, guidance: float, report: str, passes: Mapping[str, float]) -> dict[str, float]:
    """Time of an image relative to next token's, calculated for these mean ``passes``: a round's cost, which is the
    same for all prompts, times the passes over next token's. By case, NaN where one of them was not measured."""
    rows = measured_speed(name, guidance, report)["rows"]
    return defaultdict(
        lambda: nan,
        {
            row["name"]: passes[row["name"]] / passes["next_token"] / row["ms_over"]["next_token"]
            for row in rows
            if row["name"] in passes
        },
    )


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


def continuous() -> str:
    """All cases of the continuous pair."""
    rows = []
    for case in results("continuous-cpu")["cases"]:
        drafts = case["draft_passes"]
        rows.append(
            (
                case["name"],
                f"{case['target_passes']:.0f}",
                f"{drafts:.0f}" if drafts else "",
                f"{case['acceptance_rate']:.0%}" if drafts else "",
                f"{case['wall_ratio_alone']:.1f}x",
                f"{case['wall_ratio_of_8']:.1f}x",
                f"{case['psnr_to_target']:.0f}",
            )
        )
    return grid(("case", "passes", "draft passes", "accepted", "1 image", "8 images", "dB"), rows)


def continuous_paper() -> str:
    """Blocks of the continuous pair beside the paper's."""
    report, again = (
        {case["name"]: case for case in results(name)["cases"]} for name in ("continuous-cpu", "continuous-cpu-again")
    )
    paper, rows = results("continuous-cpu")["paper"], []
    for length in paper["acceptance"]:
        own, second = report[f"block of {length}"], again[f"block of {length}"]
        rows.append(
            (
                length,
                f"{own['acceptance_rate']:.0%} ({paper['acceptance'][length]:.0%})",
                f"{own['mean_square_distance']:.2f} ({paper['distance_aligned'][length]:.2f})",
                *(
                    f"{own[key]:.1f}x, {second[key]:.1f}x ({paper[f'speed_at_batch_{n}'][length]:.2f}x)"
                    for n, key in ((1, "wall_ratio_alone"), (8, "wall_ratio_of_8"))
                ),
            )
        )
    return grid(("draft length", "accepted", "squared distance", "1 image", "8 images"), rows)


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
