"""The chart of time against model size, as SVG that is readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, FOOT = 640, 400, 50, 210, 20, 52  # pixels
LINE = 15  # between labels
STYLE = """<style>
text { font: 12px sans-serif; fill: #24292f }
.exact { stroke: #0072b2 } .drifts { stroke: #cc79a7 } .exact, .drifts { stroke-width: 2; fill: none }
circle.exact { fill: #0072b2 } circle.drifts { fill: #cc79a7 } .grid { stroke: #8c959f; stroke-opacity: 0.25 }
.one { stroke: #57606a; stroke-width: 1.5; stroke-dasharray: 5 3 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .one { stroke: #c9d1d9 } }
</style>"""


def size_chart(sizes: Sequence[tuple[str, str]], lines: Sequence[tuple[str, Sequence[float], bool]]) -> str:
    """sizes: two lines of text below each model. lines: a method's name, the time of its image relative to next token's
    with each of them, and whether it is exact."""
    most, floor = 1.08 * max(max(times) for _, times, _ in lines), HEIGHT - FOOT
    apart = (WIDTH - RIGHT - LEFT - 70) / max(1, len(sizes) - 1)
    columns = [LEFT + 50 + number * apart for number in range(len(sizes))]

    def height(time: float) -> float:
        return floor - time / most * (floor - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Time per image against model size</title>",
        STYLE,
    ]
    for half in range(int(2 * most) + 1):
        y, kind = height(half / 2), "one" if half == 2 else "grid"
        parts += [
            f'<path class="{kind}" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>',
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{half / 2:g}</text>',
        ]
    for x, texts in zip(columns, sizes, strict=True):
        parts += [
            f'<text x="{x:.1f}" y="{floor + 20 + LINE * down}" text-anchor="middle">{escape(text)}</text>'
            for down, text in enumerate(texts)
        ]
    for _, times, exact in lines:
        kind, points = "exact" if exact else "drifts", [*zip(columns, map(height, times), strict=True)]
        parts.append(f'<path class="{kind}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>')
        parts += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points]
    labels = [
        *((height(times[-1]), f"{name}: {times[-1]:.2f}") for name, times, _ in lines),
        (height(1.0), "next token: 1"),
    ]
    below = float("-inf")
    for y, text in sorted(labels):
        below = max(y, below + LINE)
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{below + 4:.1f}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
