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
from math import isnan
from pathlib import Path
from typing import Any

from . import automatic, launches, quality_tables
from . import results_tables as found
from .charts import Point, passes_chart, quality_chart, size_chart
from .results_tables import cases, drift, grid, results

ROOT = Path(__file__).resolve().parents[2]
CHART, SIZE_CHART, QUALITY_CHART = (ROOT / f"docs/pictures/{name}.svg" for name in ("passes", "sizes", "quality"))
SHIPPED = ROOT / "reports/quality.json"  # what Find Fastest shows of a setting's images
TABLE = re.compile(r"(<!-- table: ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)
GUIDANCE = 2.0  # of all numbers: the bundled model's own
B, L = "default@llamagen-b", "default@llamagen-l"  # the bundled model, enlarged
TIMED = {B: ("speed-cpu-bf16", "speed-cpu-bf16-amd"), L: ("speed-cpu-bf16-l-amd",)}  # their reports, by processor
LATER = {B: ("speed-cpu-bf16-sjd-amd",)}  # of methods that those have not
GROWING = (("default", "speed-cpu-amd"), (B, TIMED[B][-1]), (L, TIMED[L][-1]))  # models by size, on one processor
PAYING = ("sjd coupled w16", "sjd coupled w32", "chain of 5", "EAGLE-1, 57 drafts", "Cool-SD delta 2")  # methods there
PROCESSORS = {
    "Intel(R) Xeon(R) Processor": "Intel Xeon (AMX)",
    "AMD EPYC": "AMD EPYC (Zen 5)",
    "AMD EPYC, family 25, model 17": "AMD EPYC (Zen 4)",
}

# Methods in docs/numbers.md: name with its settings, page in docs/methods, node, and the name of the measured case.
METHODS = (
    ("next token", "next-token", "SpecARNextTokenSampler", "next_token"),
    ("SJD, coupled (MC-SJD)", "sjd", "SpecARSJDSampler", "sjd coupled w32"),
    ("SJD, coupled, TV budget 0.1", "rules", "SpecARSJDSampler", "SJD coupled, TV budget 0.1, w32"),
    ("SJD, redraw", "sjd", "SpecARSJDSampler", "sjd resample w32"),
    ("SJD, same seed", "sjd-plus-plus", "SpecARSJDSampler", "sjd gumbel w32"),
    ("SJD++ reuse (paper)", "sjd-plus-plus", "SpecARSJDSampler", "sjd threshold_paper w32"),
    ("EAGLE-1, 57 drafts", "draft-trees", "SpecARDraftTreeSampler", "EAGLE-1, 57 drafts"),
    ("EAGLE-2, 58 drafts", "draft-trees", "SpecARDraftTreeSampler", "EAGLE-2"),
    ("ADT-Tree", "adt-tree", "SpecARADTTreeSampler", "ADT-Tree"),
    ("LANTERN, k 1000, delta 0.3", "lantern", "SpecARLanternSampler", "LANTERN delta 0.3"),
    ("LANTERN++, k 10, lambda 2", "lantern", "SpecARLanternSampler", "LANTERN++ k 10, lambda 2"),
    ("Cool-SD, delta 2", "cool-sd", "SpecARCoolSDSampler", "Cool-SD delta 2"),
    ("VVS, every 4th, EAGLE-1 tree", "vvs", "SpecARVVSSampler", "VVS every 4th, EAGLE-1"),
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
SETTINGS = (
    "Bundled model, {tokens} tokens per image, guidance {guidance:g}, temperature {temperature:g}, SJD with window "
    "32 (automatic: 16). *Passes*: the mean of {images} images, each of its own prompt. *Time*, next "
    "token = 1: these passes at the cost of a round, which was measured on the same model enlarged to the sizes of "
    "LlamaGen-B and -L (87 and {millions} M parameters, the same images), in bf16 on {threads} threads of "
    "{processors}; -L and the TV budget on the second only. VVS takes the first drawn path."
)
QUALITY = (
    " *Change of log p*: of a token's mean log-probability from next token's, in nats; *as asked*: the fraction of "
    "images that show all that was asked for; both of {images} images each ({dtype}), with 95 % intervals. No two "
    "methods share seeds, so exact methods differ by chance, and that set of next-token images came out low, by 0.01 "
    "to 0.02 of log p. Relaxed rules resample from the residual that drifts least, their nodes' default; with "
    "LANTERN's own, at delta 0.3, the change of log p is 0 and the drift bound 0.20."
)
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


def bound_of(case: str) -> float | None:
    """The drift bound per token of a case: of the images of the quality report, if it has them, else of the report of
    passes (None: not known)."""
    image = quality_tables.measured("default").get(case)
    return image["drift_bound_per_token"] if image else drift(cases("default-cpu", GUIDANCE)[case])


def exactness(case: str) -> str:
    """Whether a measured case is exact, or what is known of its drift."""
    bound = bound_of(case)
    if bound is None:
        return "no, drift bound unknown"
    if cases("default-cpu", GUIDANCE).get(case, {}).get("skipped_tokens"):  # no rule limits an unverified token's drift
        return f"no, drift measured {bound:.2f} per token (not limited in advance)"
    return f"no, drift bound {bound:.2f} per token" if bound else "yes"


def mean_passes() -> tuple[dict[str, float], int, int]:
    """Mean forward passes of METHODS, of how many images and prompts: those of the quality report once it
    has them all, each image of which has a prompt of its own, else those that ``methods`` has."""
    wanted, images = [case for *_, case in METHODS], quality_tables.measured("default")
    if images.keys() >= {*wanted}:
        count = next(iter(images.values()))["images"]
        return {case: images[case]["passes"]["value"] for case in wanted}, count, count
    report, measured = results("default-cpu"), cases("default-cpu", GUIDANCE)
    passes = {case: measured[case]["passes"] for case in wanted if case in measured}
    return passes, report["pictures_per_method"], len(report["prompts"])


def times(case: str, size: str) -> list[float]:
    """The time of a method's image relative to next token's at a size in bf16, with its mean passes, by report: of
    TIMED those that have the method, else of LATER."""
    passes, *_ = mean_passes()

    def of(reports: tuple[str, ...]) -> list[float]:
        each = (found.times(size, GUIDANCE, report, passes)[case] for report in reports)
        return [time for time in each if not isnan(time)]

    return of(TIMED[size]) or of(LATER.get(size, ()))


def span(numbers: list[float], decimals: int) -> str:
    """From the least to the most: "0.39 to 0.51"; "" of none."""
    if not numbers:
        return ""
    low, high = f"{min(numbers):.{decimals}f}", f"{max(numbers):.{decimals}f}"
    return low if low == high else f"{low} to {high}"


def in_seconds(seconds: float) -> str:
    return f"{seconds:.{2 if seconds < 0.995 else 1}f}"


def methods() -> str:
    """Every method, and the settings that they were measured with."""
    nodes = json.loads((ROOT / "locales/en/nodeDefs.json").read_text(encoding="utf-8"))
    machines = [results(name)["machine"] for name in TIMED[B]]
    passes, count, _ = mean_passes()
    rows, images = [], quality_tables.measured("default")
    for label, page, node, case in METHODS:
        if case in passes:
            rows.append(
                (
                    f"[{label}](../../../docs/methods/{page}.md)",
                    nodes[node]["display_name"],
                    exactness(case),
                    f"{passes[case]:.0f}",
                    *(span(times(case, size), 2) for size in TIMED),
                    *quality_tables.brief(images.get(case)),
                )
            )
    settings = SETTINGS.format(
        tokens=found.tokens(cases("default-cpu", GUIDANCE)["next_token"]),
        guidance=GUIDANCE,
        temperature=results("default-cpu")["settings"]["temperature"],
        images=count,
        threads=machines[0]["threads"],
        millions=round(found.measured_speed(L, GUIDANCE, TIMED[L][0])["parameters"] / 1e6),
        processors=" and ".join(PROCESSORS[machine["processor"]] for machine in machines),
    )
    if about := quality_tables.model("default"):
        settings += QUALITY.format(images=about["images"], dtype=about["dtype"].removeprefix("torch."))
    timed = ("time, LlamaGen-B", "time, LlamaGen-L")
    head = ("method", "node", "same quality", "forward passes", *timed, "change of log p", "as asked")
    return f"{grid(head, rows)}\n\n{settings}"


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
    for name, page, _, measured in METHODS:
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


def speed_of_defaults() -> str:
    """The same run at length."""
    rows = [
        (
            size.rpartition("@")[2],
            name_of(case),
            passes_of(row),
            in_seconds(median(row)),
            f"{median(each['next_token']) / median(row):.2f}",
            f"{row['least_seconds_over']:.2f}",
        )
        for size, each in one_run().items()
        for case, row in each.items()
    ]
    return grid(("size", "method", "forward passes", "seconds", "times as fast", "on its slowest prompt"), rows)


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
    "methods": methods,
    "speed of defaults": speed_of_defaults,
    "published": published,
    **{f"choices, {language}": partial(choices, language) for language in WORDS},
    "passes, guidance 1": partial(found.passes, 1.0),
    "passes, guidance 2": partial(found.passes, 2.0),
    "paired, guidance 1": partial(found.paired, 1.0),
    "paired, guidance 2": partial(found.paired, 2.0),
    "baselines": partial(found.baselines, "speed-next-token-cpu-fp32-amd", "speed-next-token-cpu-bf16-amd"),
    "batches, LlamaGen-B": partial(found.batches, B, GUIDANCE, "batches-cpu-bf16-amd"),
    "continuous": found.continuous,
    "continuous, paper": found.continuous_paper,
    "same seed": found.same_seed,
    "dtype auto": automatic.table,
    "launches": launches.page,
    "quality chart": picture,
    "quality, papers": quality_tables.papers,
    "sampling parameters": quality_tables.sampling,
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


def chart() -> str:
    """docs/pictures/passes.svg."""
    passes, *_ = mean_passes()
    return passes_chart([(label, passes[case], bound_of(case) == 0) for label, _, _, case in METHODS if case in passes])


def chart_of_sizes() -> str:
    """docs/pictures/sizes.svg."""
    measured = cases("default-cpu", GUIDANCE)
    passes, sizes, each = {name: row["passes"] for name, row in measured.items()}, [], []
    for size, report in GROWING:
        model = found.measured_speed(size, GUIDANCE, report)
        seconds = next(row["seconds"]["median"] for row in model["rows"] if row["name"] == "next_token")
        precision = found.SHORT[model["dtype"]]
        sizes.append((f"{model['parameters'] / 1e6:.0f} M, {precision}", f"next token {seconds:.2g} s"))
        each.append(found.times(size, GUIDANCE, report, passes))
    return size_chart(
        sizes, [(found.said(case), [times[case] for times in each], drift(measured[case]) == 0) for case in PAYING]
    )


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
    made = {
        CHART: chart(),
        SIZE_CHART: chart_of_sizes(),
        QUALITY_CHART: chart_of_quality(),
        SHIPPED: json.dumps(shipped, indent=1) + "\n" if shipped else None,
    }
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
