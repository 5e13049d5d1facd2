"""The chart of quality against forward passes, as SVG that is readable on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP, CLOSE = 640, 300, 60, 16, 30, 50, 24  # pixels
FONT, LETTER = 11, 6.2  # of labels: their height, and the width of a letter
STYLE = """<style>
text { font: 12px sans-serif; fill: #24292f } .label { font-size: 11px } .title { font-weight: bold }
.exact { fill: #0072b2 } .drifts { fill: #cc79a7 }
line.drifts { stroke: #cc79a7; stroke-width: 1 } .axis { stroke: #8c959f; stroke-width: 1; fill: none }
.grid { stroke: #8c959f; stroke-width: 1; stroke-opacity: 0.25 }
.leader { stroke: #8c959f; stroke-width: 1; fill: none }
.front { stroke: #57606a; stroke-width: 1.5; stroke-dasharray: 5 3; fill: none }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .front { stroke: #c9d1d9 } }
</style>"""


class Point(NamedTuple):
    """A setting in a panel. loss: what its images lose, at least 0, with the interval that it lies in; exact methods
    lose nothing. listed: whether its label goes before those of others, where there is room for few."""

    name: str
    passes: float
    loss: float
    interval: tuple[float, float]
    exact: bool
    listed: bool


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def nearest(self, point: tuple[float, float]) -> tuple[float, float]:
        """Of its own points."""
        x, y = point
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other point beats: none has as few passes and as little loss, and less of one. Fewest passes
    first."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.passes, point.loss)):
        if not found or point.loss < found[-1].loss:
            found.append(point)
    return found


def quality_chart(panels: Sequence[tuple[str, Sequence[Point]]]) -> str:
    """panels: what is lost, and the points, of which at least one is not exact or none is."""
    height = TOP + len(panels) * (PANEL + GAP) + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Quality against forward passes</title>",
        STYLE,
    ]
    for number, (title, points) in enumerate(panels):
        parts += Panel(title, points, TOP + number * (PANEL + GAP)).drawn()
    y = height - 46
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{y}" text-anchor="end">forward passes per image</text>')
    y = height - 14
    for x, kind, text in (
        (LEFT, "exact", "exact: differs by chance"),
        (LEFT + 170, "drifts", "may drift, with 95 % interval"),
    ):
        parts += [f'<circle class="{kind}" cx="{x}" cy="{y - 4}" r="5"/>', f'<text x="{x + 10}" y="{y}">{text}</text>']
    parts += [
        f'<path class="front" d="M{LEFT + 390} {y - 4}h28"/>',
        f'<text x="{LEFT + 424}" y="{y}">the front: best of all</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class Panel:
    """Loss (on a scale of square roots) against forward passes (on a logarithmic one), 300 pixels high."""

    def __init__(self, title: str, points: Sequence[Point], top: int):
        self.title, self.points, self.top, self.floor = title, points, top, top + PANEL
        passes = [point.passes for point in points]
        self.least, self.most = math.log(min(passes) / 1.15), math.log(max(passes) * 1.15)
        self.worst = 1.1 * max(max(point.loss, point.interval[1]) for point in points) or 1.0

    def x(self, passes: float) -> float:
        share = (math.log(passes) - self.least) / (self.most - self.least)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, loss: float) -> float:
        return self.floor - math.sqrt(max(0.0, loss) / self.worst) * PANEL

    def drawn(self) -> list[str]:
        parts = [f'<text class="title" x="{LEFT}" y="{self.top - 10}">{escape(self.title)}</text>', *self.axes()]
        best = front(self.points)
        steps = f"M{self.x(best[0].passes):.1f} {self.top}"
        steps += "".join(
            f"V{self.y(point.loss):.1f}H{self.x(after.passes):.1f}"
            for point, after in zip(best, best[1:], strict=False)
        )
        parts.append(f'<path class="front" d="{steps}V{self.y(best[-1].loss):.1f}H{WIDTH - RIGHT}"/>')
        for point in self.points:
            x, kind = self.x(point.passes), "exact" if point.exact else "drifts"
            if not point.exact:
                low, high = map(self.y, point.interval)
                parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
            parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{self.y(point.loss):.1f}" r="4"/>')
        return [*parts, *self.labels(best)]

    def axes(self) -> list[str]:
        parts = [f'<path class="axis" d="M{LEFT} {self.top}V{self.floor}H{WIDTH - RIGHT}"/>']
        for passes in (8, 16, 32, 48, 64, 96, 128, 192, 256):
            if self.least <= math.log(passes) <= self.most:
                x = self.x(passes)
                parts += [
                    f'<path class="axis" d="M{x:.1f} {self.floor}v4"/>',
                    f'<text x="{x:.1f}" y="{self.floor + 17}" text-anchor="middle">{passes}</text>',
                ]
        for loss in self.ticks():
            y = self.y(loss)
            parts += [
                f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>',
                f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:g}</text>',
            ]
        return parts

    def ticks(self) -> list[float]:
        """0, and those of 1, 2, 5, 10, ... below the worst that are not too close to each other."""
        power, found = math.floor(math.log10(self.worst)), [0.0]
        for loss in (float(f"{digit}e{power - down}") for down in range(4) for digit in (5, 2, 1)):
            apart = min(abs(self.y(loss) - self.y(other)) for other in found)
            if loss <= self.worst and apart >= CLOSE:
                found.append(loss)
        return found

    def labels(self, best: Sequence[Point]) -> list[str]:
        """Beside the points where there is room and no other point is nearer: the front's first, then those that are
        listed, then the others. Of the first two also across lines or further away, with a line to the point, if there
        is no other room."""
        dots = [(self.x(point.passes), self.y(point.loss)) for point in self.points]
        taken = [Box(x - 4, y - 4, x + 4, y + 4) for x, y in dots]
        lines = [
            Box(self.x(p.passes) - 1, self.y(p.interval[1]), self.x(p.passes) + 1, self.y(p.interval[0]))
            for p in self.points
            if not p.exact
        ]
        above = (self.worst, *(point.loss for point in best))  # the front's line above each point on it
        lines += [
            Box(self.x(p.passes) - 1, self.y(loss), self.x(p.passes) + 1, self.y(p.loss))
            for p, loss in zip(best, above, strict=False)
        ]
        parts: list[str] = []
        others = sorted((point for point in self.points if point not in best), key=lambda point: not point.listed)
        for point in (*reversed(best), *others):
            x, y, wide = self.x(point.passes), self.y(point.loss), LETTER * len(point.name)
            places = [(x + 3, y - 7), (x - wide - 3, y - 7), (x + 3, y + 15), (x - wide - 3, y + 15)]
            if point not in best:  # whose line goes right
                places = [(x + 7, y + 4), (x - 7 - wide, y + 4), *places]
            tries = [(place, [*taken, *lines]) for place in places]
            if point in best or point.listed:
                tries += [(place, taken) for place in places]
                away = [(x + right, y - up) for up in range(20, PANEL, 7) for right in range(10, PANEL, 10)]
                tries += [(place, [*taken, *lines]) for place in sorted(away, key=lambda at: math.dist(at, (x, y)))]
            for (left, base), obstacles in tries:
                box = Box(left, base - FONT + 1, left + wide, base + 2)
                across = left >= LEFT and box.right <= WIDTH - 2
                down = self.top - 4 <= box.top and box.bottom <= self.floor
                leader = Box(x, y, left - 2, base - 4) if base < y - 7 else None
                free = not any(box.meets(other) for other in obstacles)
                own = leader or math.dist((x, y), box.nearest((x, y))) <= min(
                    math.dist(dot, box.nearest(dot)) for dot in dots
                )
                if across and down and free and own and not (leader and crosses(leader, taken)):
                    taken.append(box)
                    if leader:
                        taken += along(leader)
                        parts.append(f'<path class="leader" d="M{x:.1f} {y:.1f}L{left - 2:.1f} {base - 4:.1f}"/>')
                    parts.append(f'<text class="label" x="{left:.1f}" y="{base:.1f}">{escape(point.name)}</text>')
                    break
        return parts


def along(line: Box) -> list[Box]:
    """Small boxes along the straight line from a box's first corner to its second, but for its first 8 pixels, where
    the point itself is."""
    wide, high = line.right - line.left, line.bottom - line.top
    length = math.hypot(wide, high)
    at = [pixels / length for pixels in range(8, int(length), 3)]
    return [Box(x - 1, y - 1, x + 1, y + 1) for x, y in ((line.left + t * wide, line.top + t * high) for t in at)]


def crosses(line: Box, boxes: Sequence[Box]) -> bool:
    return any(step.meets(box) for step in along(line) for box in boxes)
