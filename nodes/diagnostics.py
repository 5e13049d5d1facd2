"""Acceptance Map, Compare Runs, Save Trace, Load Trace: showing, comparing and storing runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui

from ..reports import acceptance_map, comparison
from ..reports.images import batch_size
from ..reports.run_report import check_words, describe
from ..reports.token_records import token_numbers
from ..samplers.trace import Trace
from ..samplers.trace_files import load_trace, save_trace
from .checks import available
from .comfy_runtime import folders
from .schema import schema
from .search import REPORT
from .sockets import ARTrace
from .widgets import renamed, valid_choice

log = logging.getLogger(__name__)
MOST_RUNS = 8  # inputs of Compare Runs
LEFT_OUT = "Maps of the first {number} of {total} images: those of all are too large."


def ui_of(trace: Trace, **more: Any) -> dict[str, Any]:
    """UI output: text for the node and a report for programs (every value in a list, as ComfyUI requires)."""
    return {"text": [describe(trace)], "specar": [trace.report()], **more}


def as_images(arrays: Sequence[np.ndarray] | np.ndarray) -> torch.Tensor:
    """uint8 arrays [H, W, 3], or one [B, H, W, 3] -> an IMAGE batch [B, H, W, 3] in 0..1."""
    return torch.from_numpy(np.stack(arrays)).float().div_(255)


def preview(images: torch.Tensor, cls: type[io.ComfyNode], numbers: Sequence[str] = ()) -> dict[str, Any]:
    """UI output: images [B, H, W, 3] in ComfyUI's temp folder, and token records (``numbers``) beside them.

    Empty if they cannot be written, so that the unsaved images of a run are not lost.
    """
    try:
        saved = ui.PreviewImage(images, cls=cls).as_dict()
        beside = [folders.save_beside(*pair) for pair in zip(saved["images"], numbers, strict=False)]
    except OSError as error:
        log.error("%s shows no image, because the file could not be written: %s", cls.GET_SCHEMA().display_name, error)
        return {"images": []}
    return saved | ({"specar_tokens": beside} if beside else {})


class AcceptanceMap(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARAcceptanceMap",
            category="SpecAR/diagnostics",
            search=(*REPORT, "heat map", "visualize tokens", "entropy", "accepted drafts"),
            inputs=[
                ARTrace.Input("trace"),
                io.Combo.Input("metric", options=list(acceptance_map.METRICS), default="source"),
                io.Float.Input("opacity", default=0.5, min=0, max=1, step=0.05, round=0.01),
                io.Image.Input("image", optional=True),
            ],
            outputs=[
                io.Image.Output("overlay"),
                io.Image.Output("map"),
                io.Mask.Output("mask"),
                io.String.Output("report"),
            ],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, metric: str | None = None) -> bool | str:
        return valid_choice("metric", metric, acceptance_map.METRICS)

    @classmethod
    def execute(cls, trace: Trace, metric: str, opacity: float, image: torch.Tensor | None = None) -> io.NodeOutput:
        maps = acceptance_map.draw_maps(trace, image, renamed(metric), opacity, some=True)
        overlay, colours = as_images(maps.overlay), as_images(maps.colours)
        numbers = [token_numbers(trace, i, maps.map_size, legend) for i, legend in enumerate(maps.legends)]
        ui_output = ui_of(trace, **preview(overlay, cls, numbers))
        if len(maps.legends) < (images := batch_size(trace)):
            ui_output["text"][0] += "\n" + LEFT_OUT.format(number=len(maps.legends), total=images)
        return io.NodeOutput(
            overlay, colours, torch.from_numpy(maps.strength), json.dumps(trace.report(), indent=1), ui=ui_output
        )


class CompareRuns(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARCompareTraces",
            category="SpecAR/diagnostics",
            search=(*REPORT, "benchmark", "chart", "speed-up", "passes"),
            inputs=[
                ARTrace.Input("trace_1"),
                *(ARTrace.Input(f"trace_{number}", optional=True) for number in range(2, MOST_RUNS + 1)),
            ],
            outputs=[io.Image.Output("chart"), io.String.Output("table")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, **traces: Trace) -> io.NodeOutput:
        runs = [traces[name] for name in sorted(traces) if traces[name] is not None]  # one digit each
        chart = comparison.comparison(runs)
        image = as_images([comparison.draw(chart)])
        reports = {"specar": [trace.report() for trace in runs], "specar_chart": [json.dumps(asdict(chart))]}
        return io.NodeOutput(image, comparison.table(runs), ui=preview(image, cls) | reports)


class SaveTrace(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARSaveTrace",
            category="SpecAR/diagnostics",
            search=(*REPORT, "export", "json"),
            inputs=[ARTrace.Input("trace"), io.String.Input("filename_prefix", default="specar/trace")],
            outputs=[],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, trace: Trace, filename_prefix: str) -> io.NodeOutput:
        problem = folders.outside_output(filename_prefix)
        if problem:
            raise ValueError(problem)
        try:
            path, subfolder = folders.next_output(filename_prefix)
            written = save_trace(trace, path)
        except OSError as error:  # not raised: the image may not be decoded and saved yet
            log.error("Save Trace: %s", error)
            return io.NodeOutput(ui=ui_of(trace) | {"text": [f"NOT SAVED: {error}"], "files": []})
        files = [{"filename": file.name, "subfolder": subfolder, "type": "output"} for file in written]
        return io.NodeOutput(ui=ui_of(trace, files=files))

    @classmethod
    def validate_inputs(cls, filename_prefix: str | None = None) -> bool | str:
        """Reject a prompt before anything is sampled."""
        return folders.outside_output(filename_prefix) or True if isinstance(filename_prefix, str) else True


class LoadTrace(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARLoadTrace",
            category="SpecAR/diagnostics",
            search=(*REPORT, "import", "json"),
            inputs=[io.Combo.Input("trace_name", options=folders.trace_choices())],
            outputs=[ARTrace.Output("trace")],
        )

    @classmethod
    def validate_inputs(cls, trace_name: str | None = None) -> bool | str:
        return available(trace_name, folders.trace_path)

    @classmethod
    def fingerprint_inputs(cls, trace_name: str) -> str:
        return folders.stamp([folders.trace_path(trace_name)])

    @classmethod
    def execute(cls, trace_name: str) -> io.NodeOutput:
        trace = load_trace(folders.trace_path(trace_name))
        check_words(trace, trace_name)
        return io.NodeOutput(trace)
