"""Write the tables of numbers into the documents, from tools/benchmarks/results.

    python -m tools.benchmarks documents

In a document, what stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` is such a table, and what stands
between ``<!-- n: NAME -->`` and ``<!-- /n -->`` such a number. A test checks that all of them are those of the results.
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

from . import automatic, quality_tables
from . import results_tables as found
from .chart import passes_chart
from .quality_chart import Point, quality_chart
from .results_tables import cases, drift, grid, results
from .size_chart import size_chart

ROOT = Path(__file__).resolve().parents[2]
CHART, SIZE_CHART, QUALITY_CHART = (ROOT / f"docs/pictures/{name}.svg" for name in ("passes", "sizes", "quality"))
SHIPPED = ROOT / "reports/quality.json"  # what Find Fastest shows of a setting's images
TABLE = re.compile(r"(<!-- table: ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"(<!-- n: ([^>]+) -->).*?(<!-- /n -->)")
GUIDANCE = 2.0  # of all numbers in the README: the bundled model's own
B, L = "default@llamagen-b", "default@llamagen-l"  # the models of the README's times
TIMED = {B: ("speed-cpu-bf16", "speed-cpu-bf16-amd"), L: ("speed-cpu-bf16-l-amd",)}  # their reports, by processor
LATER = {B: ("speed-cpu-bf16-sjd-amd",)}  # of methods that those have not
FULL = ("speed-cpu-fp32", "speed-cpu-fp32-amd")  # those of the first in fp32
GROWING = (("default", "speed-cpu-amd"), (B, TIMED[B][-1]), (L, TIMED[L][-1]))  # models by size, on one processor
PAYING = ("sjd coupled w16", "sjd coupled w32", "chain of 5", "EAGLE-1, 57 drafts", "Cool-SD delta 2")  # methods there
PROCESSORS = {"Intel(R) Xeon(R) Processor": "Intel Xeon (AMX)", "AMD EPYC": "AMD EPYC (Zen 5)"}

# Methods in the README: name with its settings, page in docs/methods, node, and the name of the measured case.
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
    ("LANTERN, delta 0.3", "lantern", "SpecARLanternSampler", "LANTERN delta 0.3"),
    ("LANTERN++, k 10, lambda 2", "lantern", "SpecARLanternSampler", "LANTERN++ k 10, lambda 2"),
    ("Cool-SD, delta 2", "cool-sd", "SpecARCoolSDSampler", "Cool-SD delta 2"),
    ("VVS, every 4th, EAGLE-1 tree", "vvs", "SpecARVVSSampler", "VVS every 4th, EAGLE-1"),
)
CHOICES = {  # case -> how AR Sampler calls it
    "next_token": "next token",
    "sjd coupled w32": "fast, exact",
    "sjd gumbel w32": "same image as next token",
    "SJD coupled, TV budget 0.1, w32": "fastest, may drift",
}
SETTINGS = (
    "Bundled model, {tokens} tokens per image, guidance {guidance:g}, temperature {temperature:g}, SJD with "
    "window 32 (automatic in fp32 on a CPU: 16); passes: mean of {images} images, of {prompts} prompts. Time, "
    "next token = 1: these passes at the cost of a round (a pass with its drafts and its sampling), which was "
    "measured on the same model enlarged to the sizes of LlamaGen-B and -L (87 and {millions} M parameters, "
    "the same images), in bf16 on {threads} threads of {processors}, -L and the TV budget on the second "
    "only. VVS takes the first drawn path."
)
QUALITY = (
    " Quality: of {images} images each ({dtype}), the change of their tokens' mean log-probability from next "
    "token's, in nats per token, and the fraction that shows all that was asked for, both with 95 % intervals; "
    "no two methods share seeds, so exact methods differ by chance, and that set of next-token images came out "
    "low, by 0.01 to 0.02 of log p. Relaxed rules resample from the residual that drifts least, their nodes' "
    "default; with LANTERN's own, at delta 0.3, the change of log p is 0 and the drift bound 0.20 "
    "([quality](docs/quality.md#in-short))."
)
HOW_TO_READ = (
    "Every point is a method or a setting: further left it needs fewer forward passes, further down it "
    "changes less of that measure. Exact methods are drawn at 0, as they change nothing but by chance; no "
    "setting is below the dashed steps. SJD's window is 32 if none is named. The vertical scale is a square "
    "root, the horizontal one a logarithm; points without a name are other settings of *quality*'s tables."
)
UNMEASURED = "The [quality](docs/quality.md) of every method's images: not measured yet."
CHINESE = {
    "change of log p": "log p的变化",
    "as asked": "符合提示词",
    "Quality against forward passes": "质量与前向次数",
    QUALITY: " 质量：每种方法{images}张图像（{dtype}），token的平均对数概率与逐token相比的变化"
    "（每个token，nat），以及完全符合提示词的图像的比例，均附95 %区间；"
    "各方法的种子互不相同，所以精确的方法之间的差别只是偶然，而且那一组逐token图像的log p碰巧低0.01到0.02。"
    "放宽的规则按节点的默认设置，从偏移最小的残差分布中重新采样；用LANTERN论文的残差（delta 0.3），"
    "log p的变化为0，偏移上界为0.20"
    "（[质量](quality.md#in-short)）。",
    HOW_TO_READ: "每个点是一种方法或一种设置：越靠左，前向次数越少；越靠下，该指标的变化越小。"
    "精确的方法画在0处，因为它们的变化只是偶然；没有任何设置低于虚线。未注明时SJD的窗口为32。"
    "纵轴为平方根刻度，横轴为对数刻度；未标名称的点是“质量”一页各表中的其他设置。",
    UNMEASURED: "各种方法的图像[质量](quality.md)：尚未测量。",
    "method": "方法",
    "node": "节点",
    "exact": "精确",
    "yes": "是",
    "forward passes": "前向次数",
    "time, LlamaGen-B": "时间，LlamaGen-B",
    "time, LlamaGen-L": "时间，LlamaGen-L",
    "next token": "逐token",
    "SJD, coupled (MC-SJD)": "SJD，耦合（MC-SJD）",
    "SJD, coupled, TV budget 0.1": "SJD，耦合，TV预算0.1",
    "SJD, redraw": "SJD，重新采样",
    "SJD, same seed": "SJD，相同种子",
    "SJD++ reuse (paper)": "SJD++复用（论文）",
    "EAGLE-1, 57 drafts": "EAGLE-1，57个草稿token",
    "EAGLE-2, 58 drafts": "EAGLE-2，58个草稿token",
    "LANTERN, delta 0.3": "LANTERN，delta 0.3",
    "LANTERN++, k 10, lambda 2": "LANTERN++，k 10，lambda 2",
    "Cool-SD, delta 2": "Cool-SD，delta 2",
    "VVS, every 4th, EAGLE-1 tree": "VVS，每4轮一次，EAGLE-1树",
    "no, drift bound unknown": "否，偏移上界未知",
    "no, drift bound {:.2f} per token": "否，每个token的偏移上界{:.2f}",
    "no, drift measured {:.2f} per token (not limited in advance)": "否，测得每个token偏移{:.2f}（事先没有限制）",
    SETTINGS: "自带模型，每张图像{tokens}个token，引导{guidance:g}，温度{temperature:g}，"
    "SJD的窗口为32（在CPU上用fp32时自动取16）；"
    "前向次数是{prompts}个提示词的{images}张图像的平均值。时间以逐token为1：按这些前向次数和每一轮（一次前向，连同草稿和采样）的代价计算，"
    "后者在放大到LlamaGen-B和-L大小（8700万和{millions}00万参数，图像相同）的同一模型上、以bf16用{processors}的"
    "{threads}个线程测得，-L、前端草稿和TV预算只用后者测量。VVS取最先抽取的路径。",
    "{} and {}": "{}和{}",
    "{} to {}": "{}至{}",
}


def bound_of(case: str) -> float | None:
    """The drift bound per token of a case: of the images of the quality report, if it has them, else of the report of
    passes (None: not known)."""
    image = quality_tables.measured("default").get(case)
    return image["tv_bound_per_token"] if image else drift(cases("default-cpu", GUIDANCE)[case])


def exactness(case: str, word: Callable[[str], str]) -> str:
    """Whether a measured case is exact, or what is known of its drift, in the words of a language."""
    bound = bound_of(case)
    if bound is None:
        return word("no, drift bound unknown")
    if cases("default-cpu", GUIDANCE).get(case, {}).get("skipped_tokens"):  # no rule limits an unverified token's drift
        return word("no, drift measured {:.2f} per token (not limited in advance)").format(bound)
    return word("no, drift bound {:.2f} per token").format(bound) if bound else word("yes")


def mean_passes() -> tuple[dict[str, float], int, int]:
    """Mean forward passes of the README's methods, of how many images and prompts: those of the quality report once it
    has them all, each image of which has a prompt of its own, else those that ``methods`` has."""
    wanted, images = [case for *_, case in METHODS], quality_tables.measured("default")
    if images.keys() >= {*wanted}:
        count = quality_tables.model("default")["images"]
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


def span(numbers: list[float], decimals: int, word: Callable[[str], str] = str) -> str:
    """From the least to the most: "0.39 to 0.51"; "" of none."""
    if not numbers:
        return ""
    low, high = f"{min(numbers):.{decimals}f}", f"{max(numbers):.{decimals}f}"
    return low if low == high else word("{} to {}").format(low, high)


def methods(language: str) -> str:
    """The README's table, and the settings that it was measured with."""
    word = (lambda text: CHINESE.get(text, text)) if language == "zh" else str
    docs = "" if language == "zh" else "docs/"  # README.zh-CN.md lies there
    nodes = json.loads((ROOT / f"locales/{language}/nodeDefs.json").read_text(encoding="utf-8"))
    measured, report = cases("default-cpu", GUIDANCE), results("default-cpu")
    machines = [results(name)["machine"] for name in TIMED[B]]
    passes, count, prompts = mean_passes()
    rows, images = [], quality_tables.measured("default")
    for label, page, node, case in METHODS:
        if case not in passes:
            continue
        names = [nodes[node]["display_name"]]
        if choice := CHOICES.get(case):
            names.insert(0, f"{nodes['SpecARSampler']['display_name']}, *{choice}*")
        rows.append(
            (
                f"[{word(label)}]({docs}methods/{page}.md)",
                "; ".join(names),
                exactness(case, word),
                f"{passes[case]:.0f}",
                *(span(times(case, size), 2, word) for size in TIMED),
                *quality_tables.brief(images.get(case)),
            )
        )
    settings = word(SETTINGS).format(
        tokens=found.tokens(measured["next_token"]),
        guidance=GUIDANCE,
        temperature=report["settings"]["temperature"],
        images=count,
        prompts=prompts,
        threads=machines[0]["threads"],
        millions=round(found.measured_speed(L, GUIDANCE, TIMED[L][0])["parameters"] / 1e6),
        processors=word("{} and {}").format(*(PROCESSORS[machine["processor"]] for machine in machines)),
    )
    if images:
        about = quality_tables.model("default")
        settings += word(QUALITY).format(images=about["images"], dtype=about["dtype"].removeprefix("torch."))
    head = tuple(
        map(
            word,
            (
                "method",
                "node",
                "exact",
                "forward passes",
                "time, LlamaGen-B",
                "time, LlamaGen-L",
                "change of log p",
                "as asked",
            ),
        )
    )
    return grid(head, rows) + f"\n\n{settings}"


def picture(language: str, folder: str) -> str:
    """The chart of quality, and how to read it; or that there is none yet."""
    word = (lambda text: CHINESE.get(text, text)) if language == "zh" else str
    if not quality_tables.measured("default"):
        return word(UNMEASURED).replace("docs/", folder)
    return f"![{word('Quality against forward passes')}]({folder}pictures/quality.svg)\n\n{word(HOW_TO_READ)}"


TABLES: dict[str, Callable[[], str]] = {
    "methods": partial(methods, "en"),
    "methods, Chinese": partial(methods, "zh"),
    "passes, guidance 1": partial(found.passes, 1.0),
    "passes, guidance 2": partial(found.passes, 2.0),
    "paired, guidance 1": partial(found.paired, 1.0),
    "paired, guidance 2": partial(found.paired, 2.0),
    "speed": partial(found.speed, "default", GUIDANCE, "speed-cpu"),
    "speed, speed-cpu-amd": partial(found.speed, "default", GUIDANCE, "speed-cpu-amd"),
    **{
        f"speed, {report}": partial(found.speed, size, GUIDANCE, report)
        for size, reports in (*TIMED.items(), *LATER.items(), (B, FULL))
        for report in reports
    },
    "baselines": partial(found.baselines, "speed-next-token-cpu-fp32-amd", "speed-next-token-cpu-bf16-amd"),
    "batches, LlamaGen-XL": partial(found.passes_of_batches, "llamagen-xl", 7.5, "batches-xl-cpu-bf16-amd"),
    "batches, LlamaGen-B": partial(found.batches, B, GUIDANCE, "batches-cpu-bf16-amd"),
    "continuous": found.continuous,
    "continuous, paper": found.continuous_paper,
    "same seed": found.same_seed,
    "dtype auto": automatic.table,
    "quality chart": partial(picture, "en", "docs/"),
    "quality chart, Chinese": partial(picture, "zh", ""),
    "quality chart, page": partial(picture, "en", ""),
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


def fewer() -> str:
    """How many times fewer passes SJD with coupled refinement needs, as the README says."""
    passes, *_ = mean_passes()
    return f"{passes['next_token'] / passes['sjd coupled w32']:.1f}"


def fewer_in_fp32() -> str:
    """The same with the window that is automatic in fp32 on a CPU."""
    measured = cases("default-cpu", GUIDANCE)
    return f"{measured['next_token']['passes'] / measured['sjd coupled w16']['passes']:.1f}"


def faster() -> str:
    """How many times faster exact SJD is at LlamaGen-B's size in bf16, with its mean passes, by processor."""
    return span([1 / time for time in times("sjd coupled w32", B)], 1)


def exact_trees() -> str:
    """The time of draft trees that are exact, at LlamaGen-B's size in bf16."""
    return span(
        [
            time
            for _, _, node, case in METHODS
            for time in times(case, B)
            if node in ("SpecARDraftTreeSampler", "SpecARADTTreeSampler") and bound_of(case) == 0
        ],
        1,
    )


def may_drift(text: str = "{} passes, log p {}") -> str:
    """What AR Sampler's relaxed choice needs and costs."""
    row = quality_tables.measured("default").get("SJD coupled, TV budget 0.1, w32")
    return text.format(f"{row['passes']['value']:.0f}", quality_tables.brief(row)[0]) if row else "not measured yet"


NUMBERS = {
    "may drift": may_drift,
    "may drift, Chinese": lambda: may_drift("{} 次前向，log p {}"),
    "fewer passes": fewer,
    "fewer passes, window 16": fewer_in_fp32,
    "times faster": faster,
    "time, exact trees": exact_trees,
    "times faster, Chinese": lambda: faster().replace(" to ", "至"),
    "time, exact trees, Chinese": lambda: exact_trees().replace(" to ", "至"),
}


def written(text: str) -> str:
    """A document with its tables and numbers of today. Raises KeyError for a name that there is none of."""
    text = TABLE.sub(lambda block: f"{block[1]}\n{TABLES[block[2]]()}\n\n{block[3]}", text)
    return NUMBER.sub(lambda block: f"{block[1]}{NUMBERS[block[2]]()}{block[3]}", text)


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
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("web/docs/*/*.md")])


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


if __name__ == "__main__":
    main()
