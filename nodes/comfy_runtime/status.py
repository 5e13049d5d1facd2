"""A run in two lines, for its node: forward passes so far, what they save, and the time left."""

from __future__ import annotations

import time
from typing import Any

import torch

from ...samplers.generate import AnyRequest


class Status:
    """Says of a run's progress how many forward passes of the model it took and how many tokens each decided.

    Its passes are compared with those of next-token sampling. Seconds are not, as passes of other methods take longer.
    """

    def __init__(self, request: AnyRequest):
        self.request, self.whole = request, torch.full((request.batch,), request.length)
        self.total = request.sampled(self.whole)
        self.began = time.perf_counter()
        self.first: tuple[float, float] | None = None  # time and tokens when first asked, after the prompt was read

    def __call__(self, progress: Any) -> str:
        """The text after a pass."""
        now, done = time.perf_counter(), self.request.sampled(progress.committed)
        self.first = self.first or (now, done)
        began, before = self.first
        if done == before:
            return self._text(progress.passes, progress.committed)
        left = (now - began) * (self.total - done) / (done - before)
        return self._text(progress.passes, progress.committed, f", about {duration(left)} left")

    def finished(self, progress: Any) -> str:
        """The text of a complete run."""
        return self._text(progress.passes, self.whole, f", {duration(time.perf_counter() - self.began)} in all")

    def _text(self, passes: int, committed: torch.Tensor, seconds: str = "") -> str:
        if not passes:
            return "Reading the kept part of the image"
        if not self.total:
            return "The mask is empty: all of it is kept.\nTo paint one, right-click Load Image"
        plain, each = self.request.next_token_passes(committed), self.request.sampled(committed) / passes
        count = f"{passes} forward pass{'es' if passes > 1 else ''}"
        fewer = f" instead of {plain:.0f}" if round(plain) > passes else ""
        together = f", {self.request.batch} images together" if self.request.batch > 1 else ""
        return f"{count}{fewer}{together}\n{each:.1f} tokens per pass{seconds}"


def duration(seconds: float) -> str:
    """Seconds in words, rounded: "0.4 s", "12 s", "3 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
