"""The callback of a sampler after every pass: interruption, progress bar, previews, and numbers on the node."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import comfy.model_management as mm
import comfy.utils
from PIL import Image

from .memory import out_of_memory
from .previews import Previews

log = logging.getLogger(__name__)
SHARE = 0.01  # maximum fraction of a run's time for the bar: each update is a message to every client ...
SECONDS = (0.05, 0.5)  # ... while the interval between updates stays within these bounds
READING = 0.5  # seconds between two texts, so that they can be read


class Report:
    """The sampler's callback. Most calls only check for an interruption and the time.

    length: what the bar counts; previews, show (puts the progress into words on the node): None for none.
    """

    def __init__(self, length: int, previews: Previews | None, show: Callable[[Any], None] | None = None):
        self.previews, self.show, self.length = previews, show, length
        self.bar = comfy.utils.ProgressBar(length)
        self.last: Any = None
        self.due = self.text_due = time.perf_counter() + SECONDS[0]

    def __call__(self, progress: Any) -> None:
        """Report progress. Raises InterruptProcessingException if the user interrupts."""
        mm.throw_exception_if_processing_interrupted()
        self.last = progress
        if time.perf_counter() >= self.due:
            self._tell(int(progress.committed.float().mean()), self._preview(progress))

    def finish(self) -> None:
        """The run is complete: so are the bar and the preview, also that of a run too short for any before."""
        preview = self._preview(self.last, finished=True)
        if preview or self.bar.current < self.length:
            self._tell(self.length, preview)

    def _tell(self, done: int, preview: tuple[str, Image.Image, int] | None) -> None:
        began = time.perf_counter()
        self.bar.update_absolute(done, self.length, preview)
        if self.show and began >= self.text_due:
            self.show(self.last)
            self.text_due = began + READING
        now = time.perf_counter()
        shortest, longest = SECONDS
        self.due = now + min(longest, max(shortest, (now - began) / SHARE))
        if self.previews:
            self.previews.spent += now - began

    def _preview(self, progress: Any, finished: bool = False) -> tuple[str, Image.Image, int] | None:
        """The preview if one is due, or the last one of a finished run."""
        previews = self.previews
        if previews is None or (finished and not previews.unfinished):
            return None
        try:
            preview = previews.show_finished(progress) if finished else previews(progress)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            log.warning("Not enough memory to decode previews: this run continues without them.")
            self.previews = None
            return None
        return preview and ("JPEG", preview, previews.longest)
