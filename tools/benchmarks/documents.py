"""Write the tables of numbers into the documents, from tools/benchmarks/results.

    python -m tools.benchmarks documents

In a document, what stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` is such a table. A test checks that all
of them are those of the results.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import automatic, launches, quality_tables
from . import results_tables as found
from .charts import Point, quality_chart
from .results_tables import grid, results

ROOT = Path(__file__).resolve().parents[2]
QUALITY_CHART = ROOT / "docs/pictures/quality.svg"
SHIPPED = ROOT / "reports/quality.json"  # what Find Fastest shows of a setting's images
TABLE = re.compile(r"(<!-- table: ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)
GUIDANCE = 2.0  # of all numbers: the bundled model's own
B, L = "default@llamagen-b", "default@llamagen-l"  # the bundled model, enlarged
PROCESSORS = {"AMD EPYC": "AMD EPYC (Zen 5)", "AMD EPYC, family 25, model 17": "AMD EPYC (Zen 4)"}

# Methods in docs/numbers.md: name with its settings, page in docs/methods, and the name of the measured case.
METHODS = (
    ("next token", "next-token", "next_token"),
    ("SJD, coupled (MC-SJD)", "sjd", "sjd coupled w32"),
    ("SJD, coupled, TV budget 0.1", "rules", "SJD coupled, TV budget 0.1, w32"),
    ("SJD, redraw", "sjd", "sjd resample w32"),
    ("SJD, same seed", "sjd-plus-plus", "sjd gumbel w32"),
    ("SJD++ reuse (paper)", "sjd-plus-plus", "sjd threshold_paper w32"),
    ("EAGLE-1, 57 drafts", "draft-trees", "EAGLE-1, 57 drafts"),
    ("EAGLE-2, 58 drafts", "draft-trees", "EAGLE-2"),
    ("ADT-Tree", "adt-tree", "ADT-Tree"),
    ("LANTERN, k 1000, delta 0.3", "lantern", "LANTERN delta 0.3"),
    ("LANTERN++, k 10, lambda 2", "lantern", "LANTERN++ k 10, lambda 2"),
    ("Cool-SD, delta 2", "cool-sd", "Cool-SD delta 2"),
    ("VVS, every 4th, EAGLE-1 tree", "vvs", "VVS every 4th, EAGLE-1"),
)
IN_PAPERS = {  # case of METHODS -> the papers' settings of the same method, and their case
    "LANTERN delta 0.3": ("LANTERN, k 1000, delta 0.3, as in the paper", "LANTERN delta 0.3, as published"),
    "VVS every 4th, EAGLE-1": ("VVS, every 4th, as in the paper", "VVS every 4th, as published"),
}
CHOICES = {  # case -> how AR Sampler calls it
    "next_token": "slow",
    "sjd coupled w16": "fast, same quality",
    "sjd gumbel w16": "fast, same image as slow",
}
ONE_RUN = "speed-cpu-bf16-auto-amd"  # the report of these and of the methods at their default sizes
RELAXED = ("budget", "LANTERN", "Cool-SD", "VVS")  # in the names of its methods that may drift from the model
GPU = "gpu-nvidia-h200"  # the report of the one GPU
HOW_TO_READ = (
    "Every point is a method or a setting: further left it needs fewer forward passes, further down it changes less of "
    "that measure. Exact methods are drawn at 0, as they change nothing but by chance; no setting is below the dashed "
    "steps. SJD's window is 32 if none is named. The vertical scale is a square root, the horizontal one a logarithm; "
    "points without a name are other settings of the tables."
)
WORDS = {  # the columns of the README's table, by language
    "en": ("*AR Sampler*", "forward passes", "seconds"),
    "zh": ("“AR采样器”", "前向次数", "秒"),
}


def in_seconds(seconds: float) -> str:
    return f"{seconds:.{2 if seconds < 0.995 else 1}f}"


def choices(language: str) -> str:
    """The README's table: AR Sampler's choices."""
    rows = one_run()[B]
    return grid(
        WORDS[language],
        [(f"*{choice}*", passes_of(rows[case]), in_seconds(median(rows[case]))) for case, choice in CHOICES.items()],
    )


def rows_of(size: str, report: str) -> dict[str, dict[str, Any]]:
    """The rows of a speed report about a model, by case."""
    return {row["name"]: row for row in found.measured_speed(size, GUIDANCE, report)["rows"]}


def one_run() -> dict[str, dict[str, dict[str, Any]]]:
    """The methods at their default sizes, in one run, by model and case."""
    return {size: rows_of(size, ONE_RUN) for size in (B, L)}


def passes_of(row: dict[str, Any]) -> str:
    """Mean forward passes of a row."""
    return f"{row['pictures_passes']:.0f}"


def median(row: dict[str, Any]) -> float:
    """Seconds of an image."""
    return row["seconds"]["median"]


def name_of(case: str) -> str:
    """A case of that run as AR Sampler calls it, or in words."""
    return f"*{CHOICES[case]}*" if case in CHOICES else found.said(case)


def times_of_methods() -> str:
    """docs/numbers.md: passes and seconds of the methods at their default sizes."""
    sizes = one_run()

    def cells(rows: dict[str, dict[str, Any]], case: str) -> tuple[str, ...]:
        row = rows[case]
        return passes_of(row), in_seconds(median(row)), f"{median(rows['next_token']) / median(row):.1f}x"

    table = [
        (
            name_of(case),
            "no" if any(word in case for word in RELAXED) else "yes",
            *(cell for rows in sizes.values() for cell in cells(rows, case)),
        )
        for case in sizes[B]
    ]
    columns = [f"{size}: {what}" for size in "BL" for what in ("passes", "seconds", "faster")]
    return grid(("method", "same quality", *columns), table)


def quality_of_methods() -> str:
    """docs/numbers.md: what methods do to images."""
    images = quality_tables.measured("default")
    if not images:
        return quality_tables.NONE
    rows = []
    for name, page, measured in METHODS:
        for label, case in filter(None, ((name, measured), IN_PAPERS.get(measured))):
            if case in images:
                drift = quality_tables.drift(images[case])
                rows.append((f"[{label}](methods/{page}.md)", drift, *quality_tables.brief(images[case])))
    return grid(("method", "drift bound per token", "change of log p", "as asked"), rows)


def sizes_and_gpu() -> str:
    """docs/numbers.md: next token and AR Sampler's default by the size of the model, and on a GPU."""
    rows, both = [], ("next_token", "sjd coupled w16")
    for size, report, model in (
        ("default", "speed-cpu-amd", "bundled, 7 M, fp32"),
        (B, ONE_RUN, "LlamaGen-B, 87 M, bf16"),
        (L, ONE_RUN, "LlamaGen-L, 310 M, bf16"),
    ):
        each, machine = rows_of(size, report), results(report)["machine"]
        processor = f"{PROCESSORS[machine['processor']]}, {machine['threads']} threads"
        rows.append((model, processor, *(median(each[case]) for case in both)))
    [stage] = [stage for stage in results(GPU)["stages"] if stage["stage"] == "ratios"]
    each = {row["method"]: row for row in stage["rows"]}
    rows.append(("LlamaGen-XL, bf16", results(GPU)["device"], *(each[case]["seconds"] for case in both)))
    return grid(
        ("model", "machine", "*slow*", "*fast, same quality*", "faster"),
        [
            (model, machine, f"{in_seconds(plain)} s", f"{in_seconds(fast)} s", f"{plain / fast:.1f}x")
            for model, machine, plain, fast in rows
        ],
    )


def published() -> str:
    """What the papers report: passes saved, and times as fast."""
    rows = [(f"[{what}](../../../docs/methods/{page}.md)", *more) for page, what, *more in results("published")]
    return grid(("what", "model", "fewer passes", "faster", "source"), rows)


def picture() -> str:
    """The chart of quality, and how to read it; or that there is none yet."""
    if not quality_tables.measured("default"):
        return quality_tables.NONE
    return f"![Quality against forward passes](../../../docs/pictures/quality.svg)\n\n{HOW_TO_READ}"


TABLES: dict[str, Callable[[], str]] = {
    "times of methods": times_of_methods,
    "quality of methods": quality_of_methods,
    "sizes and GPU": sizes_and_gpu,
    "published": published,
    **{f"choices, {language}": partial(choices, language) for language in WORDS},
    "baselines": partial(found.baselines, "speed-next-token-cpu-fp32-amd", "speed-next-token-cpu-bf16-amd"),
    "batches, LlamaGen-B": partial(found.batches, B, GUIDANCE, "batches-cpu-bf16-amd"),
    "same seed": found.same_seed,
    "dtype auto": automatic.table,
    "launches": launches.page,
    "quality chart": picture,
    "quality, papers": quality_tables.papers,
    **{f"quality, {model}": partial(quality_tables.quality, model) for model in ("default", "continuous")},
    **{
        f"distances, {model}, {space}": partial(quality_tables.distances, model, space)
        for model in ("default", "continuous")
        for space in quality_tables.SPACES
    },
    **{
        f"quality of {node}, {language}": partial(quality_tables.help_page, node, language)
        for node in quality_tables.HELP_PAGES
        for language in quality_tables.HELP
    },
}


def written(text: str) -> str:
    """A document with its tables of today. Raises KeyError for a name that there is none of."""
    return TABLE.sub(lambda block: f"{block[1]}\n{TABLES[block[2]]()}\n\n{block[3]}", text)


def quality_points(loss: Callable[[dict[str, Any]], dict[str, Any]]) -> list[Point]:
    """The cases of the quality report. loss: of a row, a value with its interval. Exact methods that passed the check
    lose nothing."""
    labels, points = {case: label for label, *_, case in METHODS}, []
    for name, row in quality_tables.measured("default").items():
        exact = row["lossless"] and row.get("inside", True)
        value, ends = (0.0, (0.0, 0.0)) if exact else (loss(row)["value"], loss(row)["interval"])
        low, high = sorted(map(abs, ends)) if min(ends) * max(ends) >= 0 else (0.0, max(map(abs, ends)))
        label = labels.get(name, found.said(name)).replace(", window 32", "")  # SJD's window here, unless named
        points.append(Point(label, row["passes"]["value"], abs(value), (low, high), row["lossless"], name in labels))
    return points


def chart_of_quality() -> str | None:
    """docs/pictures/quality.svg, if quality was measured."""
    model = quality_tables.model("default")
    if model is None:
        return None
    space = model["spaces"][-1]
    return quality_chart(
        [
            ("Change of log p per token (nats), up or down", quality_points(lambda row: row["changes"]["log_p"])),
            (
                f"Kernel distance from next token's images ({quality_tables.SPACES[space]} features)",
                quality_points(lambda row: _above_zero(row["distances"][space]["reference"]["kernel"])),
            ),
        ]
    )


def _above_zero(distance: dict[str, Any]) -> dict[str, Any]:
    """An unbiased distance that came out below 0 is 0."""
    return {"value": max(0.0, distance["value"]), "interval": [max(0.0, end) for end in distance["interval"]]}


def generated() -> dict[Path, str]:
    """The files that follow from the results."""
    shipped = quality_tables.shipped()
    made = {QUALITY_CHART: chart_of_quality(), SHIPPED: json.dumps(shipped, indent=1) + "\n" if shipped else None}
    return {file: text for file, text in made.items() if text is not None}


def files() -> list[Path]:
    """Documents that have tables or commands."""
    folders = ("*.md", ".github/*.md", "docs/**/*.md", "web/docs/*/*.md", "tools/benchmarks/*/*.md")
    return sorted(file for folder in folders for file in ROOT.glob(folder))


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m tools.benchmarks documents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    for file in files():
        file.write_text(written(file.read_text(encoding="utf-8")), encoding="utf-8")
    for file, text in generated().items():
        file.write_text(text, encoding="utf-8")
