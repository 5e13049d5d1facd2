"""A run in two lines, for its node: forward passes so far, what they save, and the time left."""

from __future__ import annotations

import time
from typing import Any

import torch

from ...samplers.generate import AnyRequest

NOTICEABLE = 1.05  # times fewer passes: below, nothing is said of it


class Status:
    """Says of a run's progress how many forward passes of the model it took and how many tokens each decided.

    Passes are compared with one token per pass, which next-token sampling needs. Seconds are not: a pass of another
    method may take longer.
    """

    def __init__(self, request: AnyRequest):
        self.sampled = request.sampled
        self.total = request.sampled(torch.full((request.batch,), request.length))
        self.began = time.perf_counter()
        self.first: tuple[float, float] | None = None  # time and tokens when first asked, after the prompt was read

    def __call__(self, progress: Any) -> str:
        """The text after a pass."""
        now, done = time.perf_counter(), self.sampled(progress.committed)
        self.first = self.first or (now, done)
        began, before = self.first
        left = (now - began) * (self.total - done) / (done - before) if done > before else None
        return self._lines(progress.passes, done, None if left is None else f"about {duration(left)} left")

    def finished(self, progress: Any) -> str:
        """The text of a complete run."""
        return self._lines(progress.passes, self.total, f"{duration(time.perf_counter() - self.began)} in all")

    def _lines(self, passes: int, done: float, seconds: str | None) -> str:
        if not passes:
            return "Reading the kept part of the image"
        each = done / passes
        saved = f"{each:.1f} times fewer passes than one token at a time" if each > NOTICEABLE else None
        lines = [f"Forward passes: {passes}, tokens per pass: {each:.1f}", "; ".join(filter(None, (saved, seconds)))]
        return "\n".join(filter(None, lines))


def duration(seconds: float) -> str:
    """Seconds in words, rounded: "0.4 s", "12 s", "3 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
