"""Decoding Timeline: a run as frames of a video, or two side by side."""

from __future__ import annotations

import logging

import comfy.utils
import torch
import torch.nn.functional as F
from comfy_api.latest import io, ui
from torch import Tensor

from ..limits.limits import PIXELS
from ..reports import race
from ..reports.timeline_frames import MOST, check_number, draw_frames, frame_rate, passes_of
from ..samplers.trace import Trace
from .schema import schema
from .search import REPORT
from .sockets import ARTrace
from .widgets import fold_away

log = logging.getLogger(__name__)

SHOWN = 768  # longest side in pixels of the video on the node


def check_fit(count: int, hold: int, height: int, width: int) -> None:
    """Raise ValueError if ``count`` frames, with the last held, need too much memory. height, width: pixels."""
    fit = PIXELS // (height * width) - hold
    if count > fit:
        raise ValueError(
            f"{count} frames of {width} x {height} pixels, with the last held {hold} times, need "
            f"{(count + hold) * 12 * height * width / 2**30:.1f} GiB of memory, more than the limit of "
            f"{12 * PIXELS / 2**30:.0f} GiB or {fit + hold} frames. Lower frames and hold, or use a "
            "smaller image (Upscale Image By)."
        )


def passes_shown(trace: Trace, index: int, count: int, hold: int, height: int, width: int) -> list[int]:
    """The passes that get a frame, for image ``index``. count: number of frames, 0: automatic; height, width: pixels.
    Raises ValueError if they need too much memory."""
    fit = PIXELS // (height * width) - hold
    shown = passes_of(trace, index, count or max(2, min(MOST, fit)))
    check_fit(len(shown), hold, height, width)
    return shown


def race_film(traces: list[Trace], images: list[Tensor], frames: int, tint: float, hold: int, number: int) -> Tensor:
    """The film [F, H, W, 3] of two runs on one clock. Raises ValueError if it needs too much memory."""
    pictures = [image[number, ..., :3].float().cpu().numpy() for image in images]
    size, count = race.film_size(*pictures[0].shape[:2]), frames or race.FRAMES
    check_fit(count, hold, *size)
    pixels, bar = torch.empty(count + hold, *size, 3), comfy.utils.ProgressBar(count)
    for place, frame in enumerate(race.race_frames(traces, number, pictures, count, tint)):
        pixels[place] = torch.from_numpy(frame.copy()) / 255
        bar.update(1)
    final = race.race_frames(traces, number, pictures, 1, 0.0)  # without tint, as held
    pixels[count:] = torch.from_numpy(next(final).copy()) / 255
    return pixels


def film(pixels: Tensor, fps: float, cls: type[io.ComfyNode]) -> dict:
    """UI output: the frames [F, H, W, 3] as an animated image, at most SHOWN pixels per side.

    Empty if it cannot be written, so that the unsaved frames are not lost.
    """
    longest = max(pixels.shape[1:3])
    if longest > SHOWN:
        size = [max(1, side * SHOWN // longest) for side in pixels.shape[1:3]]
        pixels = F.interpolate(pixels.movedim(-1, 1), size, mode="area").movedim(1, -1)
    try:
        saved = ui.ImageSaveHelper.save_animated_webp(
            pixels, "ComfyUI_temp_timeline", io.FolderType.temp, cls, fps, lossless=False, quality=80, method=0
        )
    except OSError as error:
        log.error("Decoding Timeline shows no animation, because the file could not be written: %s", error)
        return {"images": []}
    return ui.SavedImages([saved], is_animated=True).as_dict()


class DecodingTimeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARTimeline",
            category="SpecAR/diagnostics",
            search=(*REPORT, "animation", "video", "frames"),
            inputs=[
                ARTrace.Input("trace"),
                io.Image.Input("image"),
                io.Int.Input("frames", default=0, min=0, max=1000),
                fold_away(io.Float.Input("tint", default=0.5, min=0, max=1, step=0.05, round=0.01)),
                fold_away(io.Int.Input("hold", default=12, min=0, max=1000)),
                io.Int.Input("picture", default=0, min=0, max=4095),
                ARTrace.Input("other_trace", optional=True),
                io.Image.Input("other_image", optional=True),
            ],
            outputs=[io.Image.Output("film"), io.Float.Output("fps")],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        trace: Trace,
        image: Tensor,
        frames: int,
        tint: float,
        hold: int,
        picture: int,
        other_trace: Trace | None = None,
        other_image: Tensor | None = None,
    ) -> io.NodeOutput:
        check_number(trace, len(image), picture, name="picture")
        if (other_trace is None) != (other_image is None):
            raise ValueError("Connect both other_trace and other_image for a race of two runs, or neither of them.")
        if other_trace is not None and other_image is not None:
            check_number(other_trace, len(other_image), picture, name="picture")
            pixels = race_film([trace, other_trace], [image, other_image], frames, tint, hold, picture)
            fps = frame_rate(len(pixels) - hold)
            return io.NodeOutput(pixels, fps, ui=film(pixels, fps, cls))
        finished = image[picture, ..., :3].float().cpu()
        shown = passes_shown(trace, picture, frames, hold, *finished.shape[:2])
        pixels = finished.repeat(len(shown) + hold, 1, 1, 1)
        bar = comfy.utils.ProgressBar(len(shown))
        for number, frame in enumerate(draw_frames(trace, picture, finished.numpy(), shown, tint)):
            pixels[number] = torch.from_numpy(frame)
            bar.update(1)
        fps = frame_rate(len(shown))
        return io.NodeOutput(pixels, fps, ui=film(pixels, fps, cls))
