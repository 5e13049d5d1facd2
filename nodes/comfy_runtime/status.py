"""A run in numbers, for the text on its node (web/js/result.js): forward passes, tokens, time, and what *auto* was.

During a run and after it, a number means the same: passes are the model's forward passes, tokens those of one image.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ...reports.run_report import drawing, judgement, named
from ...samplers.generate import AnyRequest
from ...samplers.trace import Trace
from .messages import show_run

Run = dict[str, Any]


class Status:
    """Says how far a run is."""

    def __init__(self, request: AnyRequest):
        self.request = request
        self.total = request.sampled(torch.full((request.batch,), request.length))
        self.first: tuple[float, float] | None = None  # time and tokens when first asked, after the prompt was read

    def show(self, progress: Any) -> None:
        """Show it on the node that is executing."""
        show_run(self(progress))

    def __call__(self, progress: Any) -> Run:
        """After a pass, with the seconds that are left, once these are known."""
        now, done = time.perf_counter(), self.request.sampled(progress.committed)
        self.first = self.first or (now, done)
        began, before = self.first
        run = numbers(self.request.batch, progress.passes, done, self.total)
        if done == before:
            return run
        return run | {"left": duration((now - began) * (self.total - done) / (done - before))}


def finished_run(request: AnyRequest, trace: Trace, pixels_per_token: int) -> Run:
    """After a run: also the passes that one for each sampled token would be (``plain``), the seconds that it took, the
    ``size`` (width, height) of an image, the settings that were ``used``, and ``notices`` of what was asked for but not
    done."""
    whole, settings = torch.full((request.batch,), request.length), trace.settings
    tokens = request.sampled(whole)
    used = [": ".join(filter(None, named(settings))), judgement(settings), drawing(settings)]
    if settings["lossless"]:
        del used[1]
    return numbers(request.batch, trace.totals["target_passes"], tokens, tokens) | {
        "plain": round(tokens / request.group),
        "seconds": duration(trace.totals["seconds"]),
        "size": [trace.cols * pixels_per_token, trace.rows * pixels_per_token],
        "used": "; ".join(used),
        "notices": trace.notices,
    }


def numbers(images: int, passes: int, done: float, total: float) -> Run:
    return {"images": images, "passes": passes, "done": round(done), "total": round(total)}


def duration(seconds: float) -> str:
    """Seconds in words, rounded: "0.4 s", "12 s", "3 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
