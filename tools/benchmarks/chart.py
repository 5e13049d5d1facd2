"""The chart of forward passes, as SVG that is readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, ROW, LABEL, TOP = 640, 26, 220, 12  # pixels
LONGEST = WIDTH - LABEL - 60
STYLE = """<style>
text { font: 14px sans-serif; fill: #24292f }
.exact { fill: #0072b2 } .drifts { fill: #cc79a7 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }
</style>"""


def passes_chart(rows: Sequence[tuple[str, float, bool]]) -> str:
    """rows: a method's name, its forward passes per image, and whether it is exact."""
    most, height = max(passes for _, passes, _ in rows), TOP + ROW * len(rows) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Forward passes per image</title>",
        STYLE,
    ]
    for number, (name, passes, exact) in enumerate(rows):
        y, length = TOP + ROW * number, LONGEST * passes / most
        kind = "exact" if exact else "drifts"
        parts += [
            f'<text x="{LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="{kind}" x="{LABEL}" y="{y + 2}" width="{length:.0f}" height="{ROW - 8}" rx="3"/>',
            f'<text x="{LABEL + length + 8:.0f}" y="{y + 15}">{passes:.0f}</text>',
        ]
    y = height - 20
    for x, kind, text in (
        (LABEL, "exact", "exact: the model's own distribution"),
        (LABEL + 270, "drifts", "may drift from it"),
    ):
        parts += [
            f'<rect class="{kind}" x="{x}" y="{y}" width="12" height="12" rx="3"/>',
            f'<text x="{x + 18}" y="{y + 11}">{text}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
