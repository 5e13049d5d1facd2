"""Write the tables of numbers into the documents, from benchmarks/results and published.py.

    python -m benchmarks documents

In a document, what stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` is such a table, and what stands
between ``<!-- n: NAME -->`` and ``<!-- /n -->`` such a number. A test checks that all of them are those of the results.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import results_tables as found
from .chart import passes_chart
from .published import PUBLISHED
from .results_tables import cases, drift, grid, results

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "docs/pictures/passes.svg"
TABLE = re.compile(r"(<!-- table: ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"(<!-- n: ([^>]+) -->).*?(<!-- /n -->)")
GUIDANCE = 3.0  # of all numbers in the README

# Methods in the README: name, page in docs/methods, node, and the name of the measured case.
METHODS = (
    ("next token", "next-token", "SpecARNextTokenSampler", "next_token"),
    ("SJD", "sjd", "SpecARSJDSampler", "sjd coupled w32"),
    ("SJD, same seed", "sjd-plus-plus", "SpecARSJDSampler", "sjd gumbel w32"),
    ("SJD++", "sjd-plus-plus", "SpecARSJDSampler", "sjd threshold_paper w32"),
    ("EAGLE-1", "draft-trees", "SpecARDraftTreeSampler", "EAGLE-1, 57 drafts"),
    ("EAGLE-2", "draft-trees", "SpecARDraftTreeSampler", "EAGLE-2"),
    ("ADT-Tree", "adt-tree", "SpecARADTTreeSampler", "ADT-Tree"),
    ("LANTERN", "lantern", "SpecARLanternSampler", "LANTERN delta 0.3"),
    ("LANTERN++", "lantern", "SpecARLanternSampler", "LANTERN++ k 10, lambda 2"),
    ("Cool-SD", "cool-sd", "SpecARCoolSDSampler", "Cool-SD delta 2"),
    ("VVS", "vvs", "SpecARVVSSampler", "VVS every 4th, EAGLE-1"),
)
SETTINGS = ("Bundled model, {tokens} tokens per image, guidance {guidance:g}, temperature {temperature:g}; mean of "
            "{images} images. Time on {threads} threads of one {processor}.")
CHINESE = {
    "method": "方法", "node": "节点", "exact": "精确", "yes": "是", "forward passes": "前向次数",
    "time (next token = 1)": "时间（逐token = 1）",
    "time, LlamaGen-B": "时间，LlamaGen-B", "next token": "逐token", "SJD, same seed": "SJD，相同种子",
    "no, drift bound unknown": "否，偏移上界未知", "no, drift bound {}": "否，偏移上界{}",
    SETTINGS:
        "自带模型，每张图像{tokens}个token，引导{guidance:g}，温度{temperature:g}；{images}张图像的平均值。"
        "时间在{processor}的{threads}个线程上测得。",
}  # fmt: skip


def methods(language: str) -> str:
    """The README's table, and the settings that it was measured with."""
    word = (lambda text: CHINESE.get(text, text)) if language == "zh" else str
    nodes = json.loads((ROOT / f"locales/{language}/nodeDefs.json").read_text(encoding="utf-8"))
    measured, large, report = cases("default-cpu", GUIDANCE), times("llamagen-b"), results("default-cpu")
    base, rows = measured["next_token"], []
    for label, page, node, case in METHODS:
        row, bound = measured[case], drift(measured[case])
        exact = word("no, drift bound unknown") if bound is None else \
            word("no, drift bound {}").format(f"{bound:.0f}") if bound else word("yes")
        rows.append((f"[{word(label)}](docs/methods/{page}.md)", nodes[node]["display_name"], exact,
                     f"{row['passes']:.0f}", f"{row['seconds'] / base['seconds']:.2f}", large.get(case, "")))
    settings = word(SETTINGS).format(
        tokens=round(base["passes"]), guidance=GUIDANCE, temperature=report["settings"]["temperature"],
        images=report["pictures_per_method"], threads=report["machine"]["threads"],
        processor=report["machine"]["processor"],
    )  # fmt: skip
    head = tuple(map(word, ("method", "node", "exact", "forward passes", "time (next token = 1)", "time, LlamaGen-B")))
    return grid(head, rows) + f"\n\n{settings}"


def times(size: str) -> dict[str, str]:
    """Time of whole images at the cost of a larger model's passes, relative to next token's, by case; none if the speed
    report has none."""
    models = (model for model in results("speed-cpu")["models"]
              if model["name"] == f"default@{size}" and model["settings"]["cfg"] == GUIDANCE)
    return {row["name"]: f"{1 / row['seconds_over']['next_token']:.2f}" for model in models for row in model["rows"]}


TABLES: dict[str, Callable[[], str]] = {
    "methods": partial(methods, "en"),
    "methods, Chinese": partial(methods, "zh"),
    "passes, guidance 1": partial(found.passes, 1.0),
    "passes, guidance 3": partial(found.passes, 3.0),
    "paired, guidance 1": partial(found.paired, 1.0),
    "paired, guidance 3": partial(found.paired, 3.0),
    "speed, guidance 1": partial(found.speed, "default", 1.0),
    "speed, guidance 3": partial(found.speed, "default", 3.0),
    "speed, LlamaGen-B": partial(found.speed, "llamagen-b", 7.5),
    "batches": found.batches,
    "throughput, one process": partial(found.throughput, "1x1"),
    "throughput, two processes": partial(found.throughput, "2x1"),
    "continuous": found.continuous,
    "continuous, paper": found.continuous_paper,
    "determinism": found.determinism,
    "same seed": found.same_seed,
    "storage": found.storage,
    "faults": found.faults,
    **{f"published, {row.method}": partial(found.published, row.method) for row in PUBLISHED},
}


def fewer() -> str:
    """How many times fewer passes exact SJD needs, as the README says."""
    measured = cases("default-cpu", GUIDANCE)
    return f"{measured['next_token']['passes'] / measured['sjd coupled w32']['passes']:.1f}"


NUMBERS = {"fewer passes": fewer}


def written(text: str) -> str:
    """A document with its tables and numbers of today. Raises KeyError for a name that there is none of."""
    text = TABLE.sub(lambda block: f"{block[1]}\n{TABLES[block[2]]()}\n\n{block[3]}", text)
    return NUMBER.sub(lambda block: f"{block[1]}{NUMBERS[block[2]]()}{block[3]}", text)


def chart() -> str:
    """docs/pictures/passes.svg."""
    measured = cases("default-cpu", GUIDANCE)
    rows = [(label, measured[case]) for label, _, _, case in METHODS]
    return passes_chart([(label, row["passes"], drift(row) == 0) for label, row in rows])


def files() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks documents", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for file in files():
        file.write_text(written(file.read_text(encoding="utf-8")), encoding="utf-8")
    CHART.write_text(chart(), encoding="utf-8")


if __name__ == "__main__":
    main()
