"""Several runs beside each other: a table in text and a chart of bars. Pure PIL, no ComfyUI.

``written_table`` and ``bars`` also show the trials of Find Fastest (trials.py).

Bars are Okabe and Ito's blue, or their purple, which acceptance maps have for tokens that a relaxed rule accepted. The
two stay apart with every common colour-vision deficiency.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..common.limits import QUOTED
from ..common.printable import printable
from ..samplers.trace import Source, Trace
from .acceptance_map import SOURCES
from .run_report import exact, labels

EXACT, APPROXIMATE = (0, 114, 178), SOURCES[Source.RELAXED][1]
INK, RULE, CHOSEN = (20, 20, 20), (205, 205, 205), (255, 243, 199)
WIDTH, LABELS, ROW, HEAD, MARGIN, BAR = 1024, 340, 58, 78, 16, 16  # pixels


@dataclass(frozen=True)
class Column:
    """One measure: its heading, its unit, which values are better ("lower" or "higher"), a number per run (None: not
    known), how it is written, and, where a number stands for several, the least and the greatest of them."""

    name: str
    unit: str
    better: str
    values: list[float | None]
    form: Callable[[float], str]
    spans: list[tuple[float, float] | None] | None = None

    def written(self, run: int) -> str:
        value = self.values[run]
        return "-" if value is None else self.form(value)

    def ranged(self, run: int) -> str:
        """With the least and the greatest, where they differ."""
        span = self.spans[run] if self.spans else None
        if not span or span[0] == span[1]:
            return self.written(run)
        return f"{self.written(run)} ({self.form(span[0])} to {self.form(span[1])})"


def columns(traces: list[Trace]) -> list[Column]:
    """The measures, per image. Wall times only of runs that may be compared (see :func:`times_compare`)."""
    totals = [t.summary() for t in traces]
    chosen = [
        Column(
            "model passes", "per image", "lower", [sum(t["passes_per_image"]) / t["images"] for t in totals], _count
        ),
        Column("draft passes", "per run", "lower", [t["draft_passes"] for t in totals], _count),
        Column("tokens", "per model pass", "higher", [t["accepted_length"] for t in totals], "{:.2f}".format),
        Column("acceptance", "of drafts", "higher", [_acceptance(t) for t in totals], "{:.0%}".format),
    ]
    if not all(t.continuous for t in traces):
        bounds = [t.tv_bound for t in traces]
        chosen.append(Column("drift bound", "sum per image", "lower", bounds, "{:.2f}".format))
    if any(t.continuous for t in traces):
        chosen.append(Column("distance", "mean square", "lower", [_distance(t) for t in totals], "{:.3g}".format))
    if not times_compare(traces):
        chosen.append(Column("wall time", "seconds per run", "lower", [t["seconds"] for t in totals], "{:.2f}".format))
    return chosen


def times_compare(traces: list[Trace]) -> str:
    """Why the wall times of these runs do not compare, in a sentence; empty if they do."""
    servers = {t.settings.get("server") for t in traces}
    if None in servers or len(servers) > 1:
        return "No wall times: these runs were not all made by the same running server, so their times do not compare."
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
        [", ".join(label), "exact" if exact(trace) else "approximate", *(c.written(i) for c in measures)]
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


def chart(traces: list[Trace]) -> np.ndarray:
    """The same as an image [H, 1024, 3] (uint8): one row per run, one column of bars per measure."""
    return bars(labels(traces), [exact(trace) for trace in traces], columns(traces), times_compare(traces))


def bars(
    names: list[tuple[str, str]],
    lossless: list[bool],
    measures: list[Column],
    remark: str,
    notes: list[str] | None = None,
    chosen: int | None = None,
) -> np.ndarray:
    """A chart [H, 1024, 3] (uint8): a row for each two-line name, coloured by whether it is lossless, and a column per
    measure. notes: what to write in the rows that have no numbers; chosen: the row to mark."""
    height = HEAD + ROW * len(names) + (84 if remark else 60)
    image = Image.new("RGB", (WIDTH, height), "white")
    draw, bold, font, small = ImageDraw.Draw(image), *(ImageFont.load_default(size) for size in (16, 15, 13))
    step = (WIDTH - LABELS - MARGIN) / len(measures)
    for number, column in enumerate(measures):
        left = LABELS + number * step
        draw.text((left, MARGIN), column.name, INK, bold)
        draw.text((left, MARGIN + 22), column.unit, INK, small)
        draw.text((left, MARGIN + 38), f"{column.better} is better", INK, small)
    for run, (first, second) in enumerate(names):
        top = HEAD + run * ROW
        if run == chosen:
            draw.rectangle((0, top - 6, WIDTH, top + ROW - 7), CHOSEN)
            first += " (chosen)"
        draw.line((MARGIN, top - 6, WIDTH - MARGIN, top - 6), RULE)
        draw.text((MARGIN, top), _fitted(draw, first, bold, LABELS - 2 * MARGIN), INK, bold)
        draw.text((MARGIN, top + 25), _fitted(draw, second, small, LABELS - 2 * MARGIN), INK, small)
        if notes and all(column.values[run] is None for column in measures):
            draw.text((LABELS, top + 12), _fitted(draw, notes[run], font, WIDTH - LABELS - MARGIN), INK, font)
            continue
        colour = EXACT if lossless[run] else APPROXIMATE
        for number, column in enumerate(measures):
            left = LABELS + number * step
            draw.text((left, top), column.written(run), INK, font)
            _bar(draw, column, run, left, step - MARGIN, top + 24, colour)
    foot = HEAD + ROW * len(names) + 10
    for colour, left, text in (
        (EXACT, MARGIN, "exact: the model's own distribution"),
        (APPROXIMATE, MARGIN + 330, "approximate: drifts from it"),
    ):
        draw.rectangle((left, foot, left + 24, foot + 15), colour)
        draw.text((left + 34, foot - 1), text, INK, font)
    draw.text((MARGIN, foot + 32), _fitted(draw, remark, small, WIDTH - 2 * MARGIN), INK, small)
    return np.asarray(image)


def _bar(
    draw: ImageDraw.ImageDraw, column: Column, run: int, left: float, width: float, top: int, colour: tuple[int, ...]
) -> None:
    """A number as a bar, the longest of its column ``width`` pixels wide, with a line from least to greatest."""
    ends = [end for span in column.spans or [] if span for end in span]
    most = max([v for v in column.values if v is not None] + ends, default=0)
    length = (column.values[run] or 0) / most * width if most else 0
    if length >= 1:
        draw.rectangle((left, top, left + length, top + BAR), colour)
    span = column.spans[run] if column.spans else None
    if span and span[0] != span[1]:
        low, high = (left + end / most * width for end in span)
        draw.line((low, top + BAR + 4, high, top + BAR + 4), INK, 2)


def _fitted(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The text, cut with an ellipsis where it is wider than ``width`` pixels."""
    text = printable(text, QUOTED)  # PIL measures no line breaks
    if draw.textlength(text, font) <= width:
        return text
    while draw.textlength(text + " ...", font) > width:
        text = text[:-1]
    return text + " ..."
