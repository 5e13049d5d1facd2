"""A run, forward pass by forward pass: the image as far as it is decided, the latest tokens tinted. Pure numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..samplers.trace import Source, Trace
from .acceptance_map import SOURCES
from .images import Images, as_bytes, check_images

UNDRAWN = (128, 128, 128)  # colour of what is not decided yet
TRAIL = 4  # frames in which a token is tinted, ...
FADE = 0.5  # ... in each of them so much as in the one before
MOST = 240  # frames of a run, where the user names no number
SECONDS = 4.0  # that a run takes to play
FASTEST = 60  # frames per second


def timeline_frames(
    trace: Trace, image: Images, number: int = 0, frames: int = MOST, tint: float = 0.5
) -> list[np.ndarray]:
    """A run as a film: frames [H, W, 3] (uint8) of image ``number``, which grow from the first tokens to all of them.

    image: all images of the run, [B, H, W, 3] (floating point in 0..1 as an image decoder returns, or uint8; Tensor or
    numpy; a run of one image also takes [H, W, 3]). frames: one per forward pass, but no more than this (1 or more).
    tint (0..1): how strongly a new token is coloured by how it came about. Raises ValueError where the images are not
    of this run, or there is no image ``number``.
    """
    images = as_bytes(image)
    check_number(trace, len(images), number)
    finished = images[number].astype(np.float32) / 255
    drawn = draw_frames(trace, number, finished, passes_of(trace, number, frames), tint)
    return [as_bytes(frame)[0] for frame in drawn]


def check_number(trace: Trace, count: int, number: int, name: str = "number") -> None:
    """Raise ValueError unless ``count`` images are as many as the trace has, and ``number`` (the parameter ``name``) is
    one of them."""
    check_images(trace, count)
    if not 0 <= number < count:
        generated, legal = ("one image", "0") if count == 1 else (f"{count} images", f"0 to {count - 1}")
        raise ValueError(f"{name} is {number}, but this run generated {generated}: use {legal}.")


def frame_rate(count: int) -> float:
    """Frames per second at which so many frames take about SECONDS."""
    return float(min(FASTEST, max(1, round(count / SECONDS))))


def passes_of(trace: Trace, image: int, most: int) -> list[int]:
    """The passes after which image number ``image`` is shown: all from the first that decided a token of it to the
    last, or ``most`` (1 or more) of them at even distances, with the last and, unless that is the only one, the
    first."""
    decided = _grid(trace, "finalised_at", image)[_grid(trace, "source", image) != Source.FORCED]
    if not len(decided):  # all of it was kept
        return [0]
    first, last = int(decided.min()), int(decided.max())
    count = min(most, last - first + 1)
    return [last] if count == 1 else np.linspace(first, last, count).round().astype(int).tolist()


def draw_frames(trace: Trace, image: int, pixels: np.ndarray, after: list[int], tint: float) -> Iterator[np.ndarray]:
    """The decoded pixels [H, W, 3] (fp32 in 0..1) of image number ``image``, as far as it was decided ``after`` each
    of these passes (rising), the rest grey.

    A token has the colour of its Source (see acceptance_map) with the strength ``tint`` (0..1) in the frame in which
    it appears, and fades. What was kept is there from the first frame on, and never tinted.
    """
    source = _grid(trace, "source", image)
    appears = np.searchsorted(after, _grid(trace, "finalised_at", image))  # in this frame
    appears = np.where(source == Source.FORCED, -TRAIL, appears)
    down, across = (np.arange(size) * count // size for size, count in zip(pixels.shape, source.shape, strict=False))
    colours = np.empty((len(Source), 3), np.float32)
    for kind, (_, colour) in SOURCES.items():
        colours[kind] = np.divide(colour, 255)
    canvas = np.empty_like(pixels)
    canvas[:] = np.divide(UNDRAWN, 255)
    for number in range(len(after)):
        age = number - appears
        shown, tinted = age >= 0 if number == 0 else age == 0, (age >= 0) & (age < TRAIL)
        rows = np.flatnonzero((shown | tinted).any(1)[down])  # of pixels, which change
        tokens = np.ix_(down[rows], across)
        canvas[rows] = np.where(shown[tokens][..., None], pixels[rows], canvas[rows])
        frame = canvas.copy()
        strength = np.where(tinted, tint * FADE ** np.clip(age, 0, TRAIL), 0).astype(np.float32)
        frame[rows] += strength[tokens][..., None] * (colours[source[tokens]] - frame[rows])
        yield frame


def _grid(trace: Trace, name: str, image: int) -> np.ndarray:
    return trace.grid(name)[image].numpy()
