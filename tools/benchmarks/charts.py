"""The chart of the documents, drawn by matplotlib as SVG that is readable on light and on dark pages."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

WIDTH = 640  # pixels, as documents show it
COLOURS = {True: "#0072b2", False: "#cc79a7"}  # of exact methods, and of those that may drift
QUIET = "#8c959f"
INK = "#010203"  # stands for the page's own colour of text
THEME = "<style>svg { color: #24292f } @media (prefers-color-scheme: dark) { svg { color: #e6edf3 } }</style>"
SETTINGS = {
    "font.size": 12,
    "svg.fonttype": "none",  # letters of the page's fonts, which are no wider than those that were measured
    "svg.hashsalt": "specar",  # and the same file from the same numbers
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": QUIET,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


class Point(NamedTuple):
    """A setting in a panel. loss: what its images lose, at least 0, with the interval that it lies in; exact methods
    lose nothing. listed: whether it has a label, as those on the front have."""

    name: str
    passes: float
    loss: float
    interval: tuple[float, float]
    exact: bool
    listed: bool


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other point beats: none has as few passes and as little loss, and less of one. Fewest passes
    first."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.passes, point.loss)):
        if not found or point.loss < found[-1].loss:
            found.append(point)
    return found


def quality_chart(panels: Sequence[tuple[str, Sequence[Point]]]) -> str:
    """An SVG of panels below each other: what is lost (on a scale of square roots), and the points, against passes (on
    a logarithmic scale)."""
    title, height = "Quality against forward passes", 60 + 370 * len(panels)
    dots = {True: "exact: differs by chance", False: "may drift, with 95 % interval"}
    signs = [Line2D([], [], color=COLOURS[kind], marker="o", linestyle="none", label=dots[kind]) for kind in dots]
    signs.append(Line2D([], [], color=INK, linestyle="--", linewidth=1, label="the front: best of all"))
    with mpl.rc_context(SETTINGS):
        figure = Figure((WIDTH / 72, height / 72), dpi=72, layout="constrained")  # a point is a pixel
        axes: list[Axes] = list(figure.subplots(len(panels), squeeze=False).flat)
        for each, (lost, points) in zip(axes, panels, strict=True):
            draw_panel(each, lost, points)
        axes[-1].set_xlabel("forward passes per image")
        figure.legend(handles=signs, loc="outside lower center", ncols=len(signs), columnspacing=1.2)
        figure.savefig(file := io.StringIO(), format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', file.getvalue()).replace(INK, "currentColor")
    return re.sub(r"(<svg [^>]*>)", rf"\1\n<title>{title}</title>\n{THEME}", text, count=1)


def draw_panel(axes: Axes, title: str, points: Sequence[Point]) -> None:
    """Axes, the front's steps, and the points with their intervals."""
    passes, worst = [point.passes for point in points], max(max(p.loss, p.interval[1]) for p in points) or 1.0
    unit = 10 ** math.floor(math.log10(worst))
    axes.set_title(title, fontsize=12, fontweight="bold", loc="left")
    axes.set_xscale("log")
    axes.set_xlim(low := min(passes) / 1.15, high := max(passes) * 1.15)
    ticks = [tick for tick in (8, 16, 32, 48, 64, 96, 128, 192, 256) if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yscale("function", functions=(lambda y: y.clip(0) ** 0.5, lambda y: y**2))
    axes.set_ylim(0, 1.1 * worst)
    ticks = [unit * digit for digit in (0, 0.05, 0.2, 0.5, 1, 2, 5) if unit * digit < worst]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(axis="y")
    best = front(points)
    edges = [best[0].passes, *(point.passes for point in best), axes.get_xlim()[1]]
    heights = [1.1 * worst, *(point.loss for point in best), best[-1].loss]
    axes.step(edges, heights, where="post", color=INK, linestyle="--", linewidth=1)
    relaxed = [point for point in points if not point.exact]
    lows, highs = ([point.interval[end] for point in relaxed] for end in (0, 1))
    axes.vlines([point.passes for point in relaxed], lows, highs, color=COLOURS[False])
    losses, colours = [point.loss for point in points], [COLOURS[point.exact] for point in points]
    axes.scatter(passes, losses, c=colours, clip_on=False, zorder=3)
    name_points(axes, points)


def name_points(axes: Axes, points: Sequence[Point]) -> None:
    """Numbers above the front's points and those relaxed ones that are listed, and what they mean."""
    best, before, up = front(points), 0.0, 0
    named = [point for point in points if point in best or (point.listed and not point.exact)]
    named.sort(key=lambda point: point.passes)
    for number, point in enumerate(named, 1):
        up = up + 13 if point.passes < 1.04 * before else 7  # none on another
        before = point.passes
        at = point.passes, point.interval[1] if point.interval[1] < 1.1 * point.loss else point.loss
        axes.annotate(f"{number}", at, (0, up), textcoords="offset pixels", ha="center")
    handles = [
        Line2D([], [], linestyle="none", label=f"{number}: {point.name}") for number, point in enumerate(named, 1)
    ]
    axes.legend(handles=handles, loc="upper right", handlelength=0, handletextpad=0)
