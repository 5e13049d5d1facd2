"""The callback of a sampler after every pass: interruption, progress bar, previews."""

from __future__ import annotations

import logging
import time
from typing import Any

import comfy.model_management as mm
import comfy.utils
from comfy.cli_args import args
from PIL import Image

from .memory import out_of_memory
from .previews import Previews

log = logging.getLogger(__name__)
SHARE = 0.01  # maximum fraction of a run's time for the bar: each update is a message to every client ...
SECONDS = (0.05, 0.5)  # ... while the interval between updates stays within these bounds


class Report:
    """The sampler's callback. Most calls only check for an interruption and the time."""

    def __init__(self, length: int, previews: Previews | None):
        self.previews, self.length = previews, length
        self.bar = comfy.utils.ProgressBar(length)
        self.last: Any = None
        self.due = time.perf_counter() + SECONDS[0]

    def __call__(self, progress: Any) -> None:
        """Report progress. Raises InterruptProcessingException if the user interrupts."""
        mm.throw_exception_if_processing_interrupted()
        self.last = progress
        if time.perf_counter() >= self.due:
            self._tell(int(progress.committed.float().mean()))

    def finish(self) -> None:
        """The run is complete."""
        if self.bar.current < self.length:
            self._tell(self.length)

    def _tell(self, done: int) -> None:
        preview, began = self._preview(), time.perf_counter()
        self.bar.update_absolute(done, self.length, preview)
        now = time.perf_counter()
        shortest, longest = SECONDS
        self.due = now + min(longest, max(shortest, (now - began) / SHARE))
        if self.previews:
            self.previews.spent += now - began

    def _preview(self) -> tuple[str, Image.Image, int] | None:
        if self.previews is None or self.last is None:
            return None
        try:
            preview = self.previews(self.last)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            log.warning("Not enough memory to decode previews: this run continues without them.")
            self.previews = None
            return None
        return preview and ("JPEG", preview, args.preview_size)
