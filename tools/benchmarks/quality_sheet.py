"""A sheet of images for the documents: what relaxed rules do, for the same prompts. These are the first prompts of all,
so none was chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from . import quality_tables
from .quality_draw import pixels
from .quality_model import ModelUnderTest
from .results_tables import said

CASES = (
    "next_token",
    "sjd coupled w32",
    "SJD coupled, TV budget 0.1, w32",
    "SJD coupled, entropy rule, w32",
    "LANTERN delta 0.3",
    "VVS every 4th, EAGLE-1",
)
COLUMNS = 8
SIDE, GAP, LABEL = 128, 4, 256  # pixels: of an image, between images, for the names beside them
LINES = 19, 15, 15  # font sizes of a name and of the lines below it
QUIET = (95, 95, 95)


def sheet(tested: ModelUnderTest) -> Image.Image:
    """The first images of CASES. Raises ValueError where they were not drawn."""
    rows, by_name = [], {case.name: case for case in tested.cases}
    measured = quality_tables.measured(tested.name)
    for name in CASES:
        tested.check_drawn(by_name[name], COLUMNS)
        [images] = pixels(tested.drawn(by_name[name], COLUMNS), tested.model, tested.decoder, COLUMNS)
        rows.append(((said(name).removesuffix(", window 32"), *below(measured.get(name))), images))
    return arranged(rows)


def below(row: dict | None) -> tuple[str, ...]:
    """What the report says of a case."""
    if row is None:
        return ()
    change, asked = quality_tables.brief(row)
    return (
        f"{row['passes']['value']:.0f} forward passes",
        f"log p {change}" if row["changes"].get("log_p") else f"{asked} as asked",
    )


def arranged(rows: Sequence[tuple[tuple[str, ...], Tensor]]) -> Image.Image:
    """rows: lines of text, and images [n, 3, H, W] (in -1..1) beside them."""
    columns = max(len(images) for _, images in rows)
    canvas = Image.new("RGB", (LABEL + columns * (SIDE + GAP), len(rows) * (SIDE + GAP) - GAP), "white")
    draw = ImageDraw.Draw(canvas)
    for number, (lines, images) in enumerate(rows):
        top = number * (SIDE + GAP)
        at = top + 34
        for line, size in zip(lines, LINES, strict=False):
            draw.text((0, at), line, "black" if size == LINES[0] else QUIET, ImageFont.load_default(size))
            at += size + 6
        for column, image in enumerate(((images + 1) * 127.5).permute(0, 2, 3, 1).round().numpy().astype(np.uint8)):
            small = Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
            canvas.paste(small, (LABEL + column * (SIDE + GAP), top))
    return canvas
