"""Drawing of a run pass by pass: the picture as far as it is decided, the latest tokens tinted. Pure numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..samplers.trace import Source, Trace
from .acceptance_map import SOURCES

UNDRAWN = (128, 128, 128)  # colour of what is not drawn yet
TRAIL = 4  # frames in which a token is tinted, ...
FADE = 0.5  # ... in each of them so much as in the one before


def check_pictures(trace: Trace, count: int) -> None:
    """Raise ValueError unless ``count`` pictures are as many as a trace tells of."""
    batch = trace.positions["source"].shape[0]
    if count != batch:
        raise ValueError(f"The trace tells of {batch} pictures, but {count} are connected as image. "
                         "Connect the pictures that were decoded from the same sampler.")


def passes_of(trace: Trace, image: int, most: int) -> list[int]:
    """The passes that image number ``image`` is drawn after: all from the first that decided a token of it to the last,
    or ``most`` (1 or more) of them at even distances, with the last and, unless that is the only one, the first."""
    decided = _grid(trace, "finalised_at", image)[_grid(trace, "source", image) != Source.FORCED]
    if not len(decided):  # all of it was kept
        return [0]
    first, last = int(decided.min()), int(decided.max())
    count = min(most, last - first + 1)
    return [last] if count == 1 else np.linspace(first, last, count).round().astype(int).tolist()


def draw_frames(
    trace: Trace, image: int, picture: np.ndarray, after: list[int], tint: float
) -> Iterator[np.ndarray]:
    """The decoded picture [H, W, 3] (fp32 in 0..1) of image number ``image``, as far as it was decided ``after`` each
    of these passes (rising), the rest grey.

    A token has the colour of its Source (see maps) with the strength ``tint`` (0..1) in the frame in which it appears,
    and fades. What was kept is there from the first frame on, and never tinted.
    """
    source = _grid(trace, "source", image)
    appears = np.searchsorted(after, _grid(trace, "finalised_at", image))  # in this frame
    appears = np.where(source == Source.FORCED, -TRAIL, appears)
    tops, lefts = (edges(size, count) for size, count in zip(picture.shape, source.shape, strict=False))
    canvas = np.empty_like(picture)
    canvas[:] = np.divide(UNDRAWN, 255)
    for number in range(len(after)):
        age = number - appears
        for row, col in np.argwhere(age >= 0 if number == 0 else age == 0):
            area = np.s_[tops[row] : tops[row + 1], lefts[col] : lefts[col + 1]]
            canvas[area] = picture[area]
        frame = canvas.copy()
        for row, col in np.argwhere((age >= 0) & (age < TRAIL)):
            area = np.s_[tops[row] : tops[row + 1], lefts[col] : lefts[col + 1]]
            colour = np.divide(SOURCES[source[row, col]][1], 255, dtype=np.float32)
            frame[area] += tint * FADE ** age[row, col] * (colour - frame[area])
        yield frame


def edges(size: int, count: int) -> np.ndarray:
    """Where ``count`` tokens begin on a side of so many pixels, and its end: the same areas as in maps.enlarge."""
    return -(-np.arange(count + 1) * size // count)


def _grid(trace: Trace, name: str, image: int) -> np.ndarray:
    return trace.grid(name)[image].numpy()
