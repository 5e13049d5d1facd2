"""A run in two lines, for its node: forward passes so far, what they save, and the time left."""

from __future__ import annotations

import time
from typing import Any

import torch

from ...samplers.generate import AnyRequest


class Status:
    """Says of a run's progress how many forward passes of the model it took and how many tokens each decided.

    Its passes are compared with those of next-token sampling, which decides one token in each. Seconds are not: a pass
    of another method may take longer.
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
        count = f"{passes} forward pass{'es' if passes > 1 else ''}"
        first = count if round(done) <= passes else f"{count} instead of {done:.0f}"
        return f"{first}\n{done / passes:.1f} tokens per pass" + (f", {seconds}" if seconds else "")


def duration(seconds: float) -> str:
    """Seconds in words, rounded: "0.4 s", "12 s", "3 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
