"""What the user sees of a run: progress bar, previews, and on the node (web/js/result.js) its numbers and notices.

During a run and after it, a number means the same: passes are the model's forward passes, tokens those of one image.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import comfy.model_management as mm
import comfy.utils
import torch
from comfy_execution.utils import get_executing_context
from PIL import Image

from ...reports.run_report import choice_and_drafting, drawing, judgement
from ...samplers.generate import AnyRequest
from ...samplers.trace import Trace
from .memory import is_out_of_memory
from .previews import Previews

log = logging.getLogger(__name__)
SHARE = 0.01  # maximum fraction of a run's time for the bar: each update is a message to every client ...
SECONDS = (0.05, 0.5)  # ... while the interval between updates stays within these bounds
READING = 0.5  # seconds between two texts, so that they can be read


def show_text(text: str) -> None:
    """Show a text on the node that is executing. ComfyUI draws it and decides how long it stays."""
    if found := _page():
        server, node_id = found
        server.send_progress_text(text, node_id, server.client_id)


def show_run(run: dict[str, Any]) -> None:
    """Show how far a run is (see Status) on the node that is executing."""
    send("specar.run", run=run)


def notify(notices: Iterable[str]) -> None:
    """Show sentences on the node that is executing, instead of those of its last run; none: take these away."""
    send("specar.notices", notices=list(notices))


def send(event: str, **data: Any) -> None:
    """Send an event to our own JavaScript, with the id of the executing node as ``node``."""
    if found := _page():
        server, node_id = found
        server.send_sync(event, {"node": node_id, **data}, server.client_id)


def _page() -> tuple[Any, str] | None:
    """The server and the id of the executing node; None if no page follows this run: without a server, or for a prompt
    that names no client."""
    module = sys.modules.get("server")  # importing it without a server would import all of ComfyUI's nodes
    server = getattr(getattr(module, "PromptServer", None), "instance", None)
    context = get_executing_context()
    if context is None or getattr(server, "client_id", None) is None:
        return None
    return server, context.node_id


class Status:
    """Says how far a run is."""

    def __init__(self, request: AnyRequest):
        self.request = request
        self.total = request.count_sampled(torch.full((request.batch,), request.length))
        self.first: tuple[float, float] | None = None  # time and tokens when first asked, after the prompt was read

    def show(self, progress: Any) -> None:
        """Show it on the node that is executing."""
        show_run(self(progress))

    def __call__(self, progress: Any) -> dict[str, Any]:
        """After a pass, with the seconds that are left, once these are known."""
        now, done = time.perf_counter(), self.request.count_sampled(progress.committed)
        self.first = self.first or (now, done)
        began, before = self.first
        run = counts(self.request.batch, progress.passes, done, self.total)
        if done == before:
            return run
        return run | {"left": duration((now - began) * (self.total - done) / (done - before))}


def finished_run(request: AnyRequest, trace: Trace, pixels_per_token: int) -> dict[str, Any]:
    """After a run: also the passes that one for each sampled token would be (``plain``), the seconds that it took, the
    ``size`` (width, height) of an image, the settings that were ``used``, and ``notices`` of what was asked for but not
    done."""
    whole, settings = torch.full((request.batch,), request.length), trace.settings
    tokens = request.count_sampled(whole)
    used = [": ".join(filter(None, choice_and_drafting(settings))), judgement(settings), drawing(settings)]
    if settings["lossless"]:
        del used[1]
    return counts(request.batch, trace.totals["target_passes"], tokens, tokens) | {
        "plain": round(tokens / request.group),
        "seconds": duration(trace.totals["seconds"]),
        "size": [trace.cols * pixels_per_token, trace.rows * pixels_per_token],
        "used": "; ".join(used),
        "notices": trace.notices,
    }


def counts(images: int, passes: int, done: float, total: float) -> dict[str, Any]:
    return {"images": images, "passes": passes, "done": round(done), "total": round(total)}


def duration(seconds: float) -> str:
    """Seconds in words, rounded: "0.4 s", "12 s", "3 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


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
            if not is_out_of_memory(error):
                raise
            log.warning("Not enough memory to decode previews: this run continues without them.")
            self.previews = None
            return None
        return preview and ("JPEG", preview, previews.longest)
