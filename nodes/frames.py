"""Drawing of a run pass by pass: the picture as far as it is decided, the latest tokens tinted. Pure numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..samplers.trace import Source, Trace
from .maps import SOURCES, enlarge
from .previews import GREY

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
    source, height, width = _grid(trace, "source", image), *picture.shape[:2]
    appears = np.searchsorted(after, _grid(trace, "finalised_at", image))  # in this frame
    appears = np.where(source == Source.FORCED, -TRAIL, appears)
    colours = np.zeros((max(SOURCES) + 1, 3), np.float32)
    for kind, (_, colour) in SOURCES.items():
        colours[kind] = np.divide(colour, 255)
    colours = enlarge(colours[source], height, width)
    grey = np.divide(GREY, 255).astype(np.float32)
    for number in range(len(after)):
        age = number - appears
        frame = np.where(enlarge(age >= 0, height, width)[..., None], picture, grey)
        strength = np.where((age >= 0) & (age < TRAIL), tint * FADE ** np.maximum(age, 0.0), 0).astype(np.float32)
        tinted = enlarge(strength > 0, height, width)
        frame[tinted] += enlarge(strength, height, width)[tinted][:, None] * (colours[tinted] - frame[tinted])
        yield frame


def _grid(trace: Trace, name: str, image: int) -> np.ndarray:
    return trace.grid(name)[image].numpy()
