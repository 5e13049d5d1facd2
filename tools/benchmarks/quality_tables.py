"""What the report of ``python -m tools.benchmarks quality`` says, as tables in Markdown. All of them work with a report
that has some of the cases, or with none."""

from __future__ import annotations

import json
from typing import Any

from comfyui_specar.reports.quality import class_of

from . import results_tables
from .report import grid
from .results_tables import said

REPORT = "quality-cpu"
NONE = "Not measured yet (`python -m tools.benchmarks quality`)."
SPACES = {"own": "classifier", "imagenet": "ImageNet"}  # the features in which sets are compared

COOL_SD = ("Cool-SD delta 1.1", "Cool-SD delta 2")
HELP_PAGES = {  # node -> the cases that its help page shows, the default first
    "SpecARSJDSampler": ("sjd threshold_paper w32", "sjd coupled w32, settling 0.05"),
    "SpecARLanternSampler": ("LANTERN++ k 10, lambda 2", "LANTERN delta 0.1", "LANTERN delta 0.3"),
    "SpecARCoolSDSampler": COOL_SD,
    "SpecARVVSSampler": ("VVS every 4th, EAGLE-2", "VVS every 4th, EAGLE-1"),
    "SpecARRuleLantern": ("LANTERN delta 0.1", "LANTERN delta 0.3", "ADT-Tree, LANTERN delta 0.3"),
    "SpecARRuleLanternPP": ("LANTERN++ k 10, lambda 2",),
    "SpecARRuleUniformRSD": ("UniformRSD delta 2",),
    "SpecARRuleCoolSD": (*COOL_SD, "SJD coupled, Cool-SD delta 2, w32"),
    "SpecARRuleGrouped": ("grouped",),
    "SpecARRuleTVMetered": ("TV-metered 0.05", "SJD coupled, TV budget 0.1, w32"),
    "SpecARRuleEntropy": ("SJD coupled, entropy rule, w32",),
}
HELP = {  # language -> a line, what the lines show, what is said of trees, and that there are no lines
    "en": (
        "* {}: {} forward passes, log p {} per token, {} as asked",
        "Bundled model, {images} images each at guidance 2, temperature 1. log p: nats relative to next token. ±: half "
        "a 95 % interval. Other models may differ.",
        " Trees have the papers' 57 or 58 drafts; those of *auto* may be smaller and need more passes.",
        "Not measured yet.",
    ),
    "zh": (
        "* {}：前向 {} 次，每个 token 的 log p {}，{} 符合提示词",
        "自带模型，每项 {images} 张图像，引导 2，温度 1。log p：与逐 token 的差（nat）。±：95 % 区间的一半。"
        "其他模型可能不同。",
        "草稿树为论文的大小（57 或 58 个草稿）；*auto* 的树可能更小，需要更多次前向。",
        "尚未测量。",
    ),
}


def model(name: str) -> dict[str, Any] | None:
    """What the report has of a model, if it has anything."""
    file = results_tables.RESULTS / f"{REPORT}.json"
    if not file.exists():
        return None
    report = json.loads(file.read_text(encoding="utf-8"))
    return next((found for found in report["models"] if found["name"] == name), None)


def measured(name: str) -> dict[str, dict[str, Any]]:
    """The rows of a model, by case."""
    found = model(name)
    return {row["name"]: row for row in found["rows"]} if found else {}


def quality(name: str) -> str:
    """Passes, drift, likelihood and prompt agreement of every method's images, and what the classifier says of source
    images of the same prompts."""
    found = model(name)
    if found is None:
        return NONE
    rows = []
    for row in found["rows"]:
        log_p = row.get("log_p")
        rows.append(
            (
                said(row["name"]),
                f"{row['passes']['value']:.0f}",
                drift(row),
                interval(log_p, 2) if log_p else "",
                *_agreement(row),
                inside(row),
            )
        )
    rows.append(("source images", "", "", "", *_agreement(found["sources"]), ""))
    head = (
        "method",
        "passes",
        "drift per token",
        "log p per token",
        "as asked, %",
        "subject",
        "style",
        "background",
        "indistinguishable",
    )
    return f"{grid(head, rows)}\n\n{how_many(found)}"


def distances(name: str, space: str) -> str:
    """How far every method's images are from the source images, and from next token's, in a space of features. Kernel
    distances are in thousandths."""
    found = model(name)
    if found is None or space not in found["spaces"]:
        return NONE
    rows = []
    for row in found["rows"]:
        apart = row["distances"][space]
        sources, reference = apart["sources"], apart.get("reference")
        both = sources, reference
        rows.append(
            (
                said(row["name"]),
                *(interval(each["kernel"], 1, 1e3) if each else "" for each in both),
                f"{sources['precision']:.2f}",
                f"{sources['recall']:.2f}",
                inside(row),
            )
        )
    other = said(found["reference"])
    head = ("method", "kernel, sources", f"kernel, {other}", "precision", "recall", "indistinguishable")
    return f"{grid(head, rows)}\n\n{how_many(found)}"


def papers() -> str:
    """Our images with the settings of papers beside what the papers print for theirs: model, passes saved, scores (with
    next token's of the same table) and where they stand."""
    rows, found = [], measured("default")
    base = next(iter(found.values()), None)
    for case, model_, fewer, scores, source in results_tables.results("papers"):
        row, ours = found.get(case), ("", "", "")
        if row and base:
            ours = (f"{base['passes']['value'] / row['passes']['value']:.2f}x", *brief(row))
        rows.append((said(case), *ours, model_, fewer, scores, source))
    head = (
        "setting",
        "fewer passes, ours",
        "change of log p",
        "as asked",
        "paper's model",
        "fewer passes, paper",
        "paper (next token)",
        "source",
    )
    return grid(head, rows)


def brief(row: dict[str, Any] | None) -> tuple[str, str]:
    """A row in two cells: change of log p per token from the reference, and the fraction of images as asked. Empty
    where nothing was measured."""
    if row is None:
        return "", ""
    change = row["changes"].get("log_p")
    return interval(change, 2, sign="+") if change else "0", f"{interval(row['agreement']['all'], 0, 100)} %"


def help_page(node: str, language: str) -> str:
    """What the help page of a node with relaxed settings says of their images, beside next token's."""
    found, (line, about, trees, none) = model("default"), HELP[language]
    rows = measured("default")
    wanted = [rows[name] for name in HELP_PAGES[node] if name in rows]
    if found is None or not wanted:
        return none
    lines = [
        line.format(said(row["name"]), f"{row['passes']['value']:.0f}", *brief(row))
        for row in (found["rows"][0], *wanted)
    ]
    about += trees * any(not row["name"].lower().startswith("sjd") for row in wanted)
    return "\n".join([*lines, "", about.format(images=found["images"])])


def shipped() -> list[dict[str, Any]]:
    """What Find Fastest shows (reports/quality.py): a row for each class of settings of the bundled model, the first of
    the class that was measured."""
    found, rows = model("default"), []
    if found is None:
        return []
    for row in found["rows"]:
        one = class_of(found["cases"][row["name"]])
        if one not in [other["class"] for other in rows]:
            change = row["changes"].get("log_p", {"value": 0.0, "interval": [0.0, 0.0]})  # the reference has none
            low, high = change["interval"]
            quality = {
                "images": row["images"],
                "loss": 0.0 - change["value"],
                "error": float(f"{(high - low) / 2:.5g}"),
                "agreement": row["agreement"]["all"]["value"],
                "plain_agreement": found["rows"][0]["agreement"]["all"]["value"],
            }
            rows.append({"name": row["name"], "class": one, "quality": quality})
    return rows


def how_many(found: dict[str, Any]) -> str:
    """How many images stand behind each row, and which rows are to come."""
    text = f"{found['images']} images of each, {found['dtype'].removeprefix('torch.')}."
    missing = "; ".join(map(said, found["missing"]))
    return f"{text} Not measured yet: {missing}." if missing else text


def drift(row: dict[str, Any]) -> str:
    """The drift bound per token."""
    if row["lossless"]:
        return "exact"
    bound = row["drift_bound_per_token"]
    return "unknown" if bound is None else f"{bound:.2f}"


def inside(row: dict[str, Any]) -> str:
    """Whether the tests could not tell a row's images from the reference's."""
    return {True: "yes", False: "no"}[row["inside"]] if "inside" in row and row["p_values"] else ""


def _agreement(row: dict[str, Any]) -> tuple[str, ...]:
    parts = (f"{row['agreement'][part]['value']:.1%}" for part in ("subject", "style", "background"))
    return interval(row["agreement"]["all"], 1, 100), *parts


def interval(found: dict[str, Any], digits: int, times: float = 1, sign: str = "") -> str:
    """A value and half the width of its interval."""
    low, high = (times * end for end in found["interval"])
    return f"{times * found['value']:{sign}.{digits}f} ± {(high - low) / 2:.{digits}f}"
