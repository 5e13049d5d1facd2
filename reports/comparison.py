"""Several runs beside each other: a table with every measure, and a chart with few. Pure PIL, no ComfyUI.

``written_table`` and ``Chart`` also show the trials of Find Fastest (trials.py). A chart is drawn here, in colours that
fit ComfyUI's dark palette, and by the page (web/js/chart.js), in its own.

Bars are Okabe and Ito's blue, or their purple, which acceptance maps have for tokens that a relaxed rule accepted. The
two stay apart with every common colour-vision deficiency.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..limits.limits import MESSAGE, QUOTED
from ..limits.printable import printable
from ..samplers.trace import Source, Trace
from .acceptance_map import SOURCES
from .run_report import exact, labels

EXACT, APPROXIMATE = (SOURCES[kind][1] for kind in (Source.ACCEPTED, Source.RELAXED))
PAPER, INK, FAINT, RULE, CHOSEN = (34, 34, 34), (221, 221, 221), (160, 160, 160), (70, 70, 70), (58, 52, 30)
WIDTH, LABELS, ROW, HEAD, MARGIN, BAR = 640, 290, 46, 56, 12, 10  # pixels


@dataclass(frozen=True)
class Column:
    """One measure: its heading, its unit, a number per run (None: not known), how it is written, and, where a number
    stands for several, the least and the greatest of them."""

    name: str
    unit: str
    values: list[float | None]
    form: Callable[[float], str]
    spans: list[tuple[float, float] | None] | None = None

    def text(self, run: int) -> str:
        value = self.values[run]
        return "-" if value is None else self.form(value)

    def range_text(self, run: int) -> str:
        """With the least and the greatest, where they differ."""
        span = self.spans[run] if self.spans else None
        if not span or span[0] == span[1]:
            return self.text(run)
        return f"{self.text(run)} ({self.form(span[0])} to {self.form(span[1])})"


def columns(traces: list[Trace]) -> list[Column]:
    """The measures, per image. Wall times only of runs that may be compared (see :func:`times_compare`)."""
    totals = [t.summary() for t in traces]
    chosen = [
        Column("model passes", "per image", [sum(t["passes_per_image"]) / t["images"] for t in totals], _count),
        Column("draft passes", "per run", [t["draft_passes"] for t in totals], _count),
        Column("tokens", "per model pass", [t["accepted_length"] for t in totals], "{:.2f}".format),
        Column("acceptance", "of drafts", [_acceptance(t) for t in totals], "{:.0%}".format),
    ]
    if not all(t.continuous for t in traces):
        bounds = [t.drift_bound for t in traces]
        chosen.append(Column("drift bound", "sum per image", bounds, "{:.2f}".format))
    if any(t.continuous for t in traces):
        chosen.append(Column("distance", "mean square", [_distance(t) for t in totals], "{:.3g}".format))
    if not times_compare(traces):
        chosen.append(Column("wall time", "seconds per run", [t["seconds"] for t in totals], "{:.2f}".format))
    return chosen


def times_compare(traces: list[Trace]) -> str:
    """Why the wall times of these runs do not compare, in a sentence; empty if they do."""
    servers = {t.settings.get("server") for t in traces}
    if None in servers or len(servers) > 1:
        return "No wall times: they compare only for runs of the same running ComfyUI server."
    if len({(t.totals["images"], t.totals["tokens"]) for t in traces}) > 1:
        return "No wall times: these runs sampled different numbers of images or tokens, so their times do not compare."
    return ""


def _acceptance(totals: dict) -> float | None:
    return totals["acceptance_rate"] if totals["accepted_drafts"] or totals["draft_passes"] else None


def _distance(totals: dict) -> float | None:
    """Between the samples of both models, where there were two."""
    return totals.get("mean_square_distance") if totals["draft_passes"] else None


def _count(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def table(traces: list[Trace]) -> str:
    """The measures as a Markdown table, one run per line, and what is to be said about it."""
    measures = columns(traces)
    head = ["run", "distribution", *(f"{c.name} ({c.unit})" for c in measures)]
    rows = [
        [", ".join(label), "exact" if exact(trace) else "approximate", *(c.text(i) for c in measures)]
        for i, (trace, label) in enumerate(zip(traces, labels(traces), strict=True))
    ]
    return "\n".join([written_table(head, rows), *filter(None, ["", times_compare(traces)])]).rstrip()


def written_table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, its columns aligned."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in [head, ["-" * w for w in widths], *rows]
    )


@dataclass(frozen=True)
class Bar:
    """A measure of a run as it is written, and its share of the greatest (0..1)."""

    text: str
    share: float


@dataclass(frozen=True)
class Row:
    """A run: its two-line name, a bar per measure (None: not known), what is said of its exactness, whether it is
    exact, and whether it was chosen."""

    name: str
    detail: str
    bars: list[Bar | None]
    fidelity: str
    exact: bool
    chosen: bool = False


@dataclass(frozen=True)
class Chart:
    """heads: name and unit of each measure, of which less is better; remark: a sentence below, or "". JSON-ready with
    ``dataclasses.asdict``."""

    heads: list[tuple[str, str]]
    rows: list[Row]
    remark: str = ""


def bars(column: Column) -> list[Bar | None]:
    """The bars of a measure."""
    most = max((value for value in column.values if value is not None), default=0)
    shares = [value / most if value and isfinite(value / most) else 0 for value in column.values]
    return [None if value is None else Bar(column.text(run), shares[run]) for run, value in enumerate(column.values)]


def comparison(traces: list[Trace]) -> Chart:
    """Passes and, where they compare, seconds of each run, and whether it is exact."""
    shown = [column for column in columns(traces) if column.name in ("model passes", "wall time")]
    cells = zip(*map(bars, shown), strict=True)
    rows = [
        Row(*label, list(each), *_exactness(trace))
        for trace, label, each in zip(traces, labels(traces), cells, strict=True)
    ]
    return Chart([(column.name, column.unit) for column in shown], rows, times_compare(traces))


def _exactness(trace: Trace) -> tuple[str, bool]:
    lossless = exact(trace)
    return "same" if lossless else "may drift", lossless


def chart(traces: list[Trace]) -> np.ndarray:
    """The same as an image [H, 640, 3] (uint8)."""
    return draw(comparison(traces))


def draw(chart: Chart) -> np.ndarray:
    """A chart as an image [H, 640, 3] (uint8): a row per run, a column per measure, and one for the quality."""
    bold, font, small = (ImageFont.load_default(size) for size in (15, 14, 12))
    remark = _lines(chart.remark, small, WIDTH - 2 * MARGIN)
    image = Image.new("RGB", (WIDTH, HEAD + ROW * len(chart.rows) + 18 * len(remark) + MARGIN), PAPER)
    pen = ImageDraw.Draw(image)
    step = (WIDTH - LABELS) / (len(chart.heads) + 1)
    lefts = [LABELS + number * step for number in range(len(chart.heads) + 1)]
    for left, (name, unit) in zip(lefts, [*chart.heads, ("quality", "")], strict=True):
        pen.text((left, MARGIN), name, INK, font)
        pen.text((left, MARGIN + 19), unit, FAINT, small)
    for number, row in enumerate(chart.rows):
        top = HEAD + number * ROW
        if row.chosen:
            pen.rectangle((0, top, WIDTH, top + ROW - 1), CHOSEN)
        pen.line((0, top, WIDTH, top), RULE)
        width = LABELS - 2 * MARGIN
        pen.text((MARGIN, top + 5), _fitted(row.name + " (chosen)" * row.chosen, bold, width), INK, bold)
        pen.text((MARGIN, top + 25), _fitted(row.detail, small, width), FAINT, small)
        for left, bar in zip(lefts, row.bars, strict=False):
            pen.text((left, top + 6), bar.text if bar else "-", INK, font)
            if bar and (length := bar.share * (step - MARGIN)) >= 1:
                colour = EXACT if row.exact else APPROXIMATE
                pen.rectangle((left, top + 28, left + length, top + 28 + BAR), colour)
        pen.text((lefts[-1], top + 6), row.fidelity, INK if row.exact else APPROXIMATE, font)
    for number, line in enumerate(remark):
        pen.text((MARGIN, HEAD + ROW * len(chart.rows) + 6 + 18 * number), line, FAINT, small)
    return np.asarray(image)


def _lines(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """The text in lines of at most ``width`` pixels, split at its spaces."""
    lines: list[str] = []
    for word in printable(text, MESSAGE).split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _fitted(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The text, cut with an ellipsis where it is wider than ``width`` pixels."""
    text = printable(text, QUOTED)  # PIL measures no line breaks
    if font.getlength(text) <= width:
        return text
    while font.getlength(text + " ...") > width:
        text = text[:-1]
    return text + " ..."
