"""Two runs side by side on one clock: their images as far as they were decided, passes and seconds. numpy and PIL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..samplers.trace import Trace
from .images import as_bytes
from .run_report import choice_and_drafting
from .timeline_frames import draw_frames

WIDTH = 768  # pixels of a film
FRAMES = 120  # where the user names no number
MARGIN, HEAD, FOOT = 16, 48, 68  # pixels beside, above and below the images
GROUND, INK, QUIET, BAR, DONE = (24, 24, 24), (230, 230, 230), (150, 150, 150), (60, 60, 60), (86, 180, 233)


def panel_size(height: int, width: int) -> tuple[int, int]:
    """Width and height of each of a film's two images. The height is even, as video codecs want it of the whole."""
    across = (WIDTH - 3 * MARGIN) // 2
    return across, round(across * height / width / 2) * 2


def film_size(height: int, width: int) -> tuple[int, int]:
    """Height and width of a film of images [height, width]."""
    return panel_size(height, width)[1] + HEAD + FOOT, WIDTH


def race_frames(
    traces: Sequence[Trace], number: int, pictures: Sequence[np.ndarray], frames: int, tint: float
) -> Iterator[np.ndarray]:
    """Frames [H, WIDTH, 3] (uint8), evenly spaced from the start to the end of the slowest run.

    pictures: what each run decoded for image ``number``, [h, w, 3] (fp32 in 0..1). frames: 1 or more. tint: see
    draw_frames. A run's passes are taken to last equally long, because its trace has their sum alone.
    """
    slowest = max(trace.totals["seconds"] for trace in traces) or 1.0
    clock = slowest * np.arange(1, frames + 1) / frames
    size = panel_size(*pictures[0].shape[:2])
    names = [choice_and_drafting(trace.settings)[0] for trace in traces]
    shown = []
    for trace, picture in zip(traces, pictures, strict=True):
        passes, seconds = trace.totals["target_passes"], trace.totals["seconds"] or slowest
        rounds = int(trace.grid("finalised_at")[number].max()) + 1  # one without the model is no pass
        over = np.minimum(rounds, (clock / seconds * rounds + 1e-6).astype(int))
        done = over * passes // rounds
        pixels = np.asarray(Image.fromarray(as_bytes(picture)[0]).resize(size, Image.Resampling.LANCZOS))
        drawn = draw_frames(trace, number, pixels.astype(np.float32) / 255, [*(over - 1)], tint)
        shown.append(zip(drawn, done, np.minimum(clock, seconds), [passes] * frames, strict=True))
    for panels in zip(*shown, strict=True):
        canvas = Image.new("RGB", (WIDTH, HEAD + size[1] + FOOT), GROUND)
        for place, (name, (pixels, done, seconds, passes)) in enumerate(zip(names, panels, strict=True)):
            image = Image.fromarray(as_bytes(pixels)[0])
            text = f"{seconds:.1f} s", f"{done} of {passes} forward passes"
            draw_panel(canvas, place, image, name, done / passes, *text)
        yield np.asarray(canvas)


def draw_panel(
    canvas: Image.Image, place: int, image: Image.Image, title: str, share: float, first: str, second: str
) -> None:
    """An image below its title, above a bar that is filled to a share, and two lines of text."""
    draw, left, below = ImageDraw.Draw(canvas), MARGIN + place * (image.width + MARGIN), HEAD + image.height
    canvas.paste(image, (left, HEAD))
    draw.text((left, 16), title, INK, ImageFont.load_default(20))
    draw.rectangle((left, below + 6, left + image.width - 1, below + 11), BAR)
    if share:
        draw.rectangle((left, below + 6, left + share * image.width - 1, below + 11), DONE)
    draw.text((left, below + 18), first, INK, ImageFont.load_default(20))
    draw.text((left, below + 44), second, QUIET, ImageFont.load_default(15))
