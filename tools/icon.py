"""Draws assets/icon.png and assets/banner.png: accepted tokens in blue, a resampled one in red."""

from pathlib import Path

import resvg_py

ASSETS = Path(__file__).resolve().parent.parent / "assets"
ICON, BANNER = 400, (1260, 540)  # the registry takes a square of at most 400 pixels, and 21:9
# The colours of Acceptance Map: accepted, resampled; and tokens that follow.
REDRAWN, LATER, FAR, GROUND = "#d55e00", "#2f4858", "#26282e", "#17181c"
SHADES = ("#56b4e9", "#4aa3d8", "#6cc0f0", "#3f93c7")
ROWS = ("AAAA", "AAAA", "AARL", "LLFF")


def tokens(rows: tuple[str, ...], left: float, top: float, pitch: float) -> str:
    """Rounded squares, one per letter: Accepted, Redrawn, Later (guessed, not yet verified), Far."""
    side = 0.84 * pitch
    fill = {"R": REDRAWN, "L": LATER, "F": FAR}
    return "".join(
        f'<rect x="{left + x * pitch}" y="{top + y * pitch}" width="{side}" height="{side}" rx="{0.18 * side}" '
        f'fill="{fill.get(kind, SHADES[(3 * y + x) % len(SHADES)])}"/>'
        for y, row in enumerate(rows)
        for x, kind in enumerate(row)
    )


def icon() -> str:
    pitch, margin = 86, 34
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {ICON} {ICON}">'
        f'<rect width="{ICON}" height="{ICON}" rx="72" fill="{GROUND}"/>'
        f"{tokens(ROWS, margin + 1, margin + 1, pitch)}</svg>"
    )


def banner() -> str:
    width, height = BANNER
    rows = ("AAAAAAAA", "AAAAAAAA", "AAAAAAAA", "AAAAARLL", "LLLLLLFF", "FFFFFFFF")
    lines = (
        "Pictures from autoregressive models",
        "in a fraction of the passes, with a map",
        "of where the model agreed.",
    )
    text = "".join(
        f'<text x="640" y="{300 + 46 * i}" font-size="29" fill="#c8ccd2">{line}</text>' for i, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="DejaVu Sans">'
        f'<rect width="{width}" height="{height}" fill="{GROUND}"/>{tokens(rows, 50, 68, 68)}'
        f'<text x="638" y="220" font-size="92" font-weight="bold" fill="#f2f4f7">SpecAR</text>{text}</svg>'
    )


def main() -> None:
    for name, svg in (("icon", icon()), ("banner", banner())):
        (ASSETS / f"{name}.png").write_bytes(bytes(resvg_py.svg_to_bytes(svg_string=svg)))


if __name__ == "__main__":
    main()
