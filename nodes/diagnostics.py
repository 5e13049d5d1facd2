"""Acceptance Map, Compare Runs, Save Trace, Load Trace: what runs did, to look at, to compute with, and to keep."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui

from ..model_loaders.trace_files import load_trace, save_trace
from ..samplers.trace import Trace
from . import compare, folders, maps
from .frames import check_pictures
from .numbers import token_numbers
from .sockets import ARTrace
from .wording import describe

MOST_RUNS = 8  # traces that Compare Runs takes
TOKEN_PIXELS = 16  # side of a token in maps drawn without a picture


def shown(trace: Trace, **more: Any) -> dict[str, Any]:
    """UI output: the text for the node and the report for programs (every value a list, as ComfyUI wants)."""
    return {"text": [describe(trace)], "specar": [trace.report()], **more}


def as_pictures(arrays: list[np.ndarray]) -> torch.Tensor:
    """uint8 arrays [H, W, 3] -> an IMAGE batch [B, H, W, 3] in 0..1."""
    return torch.from_numpy(np.stack(arrays).astype(np.float32) / 255)


class AcceptanceMap(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARAcceptanceMap",
            display_name="Acceptance Map",
            category="SpecAR/diagnostics",
            description="Shows, token by token, where guesses were accepted, how long it took, how sure the model was.",
            inputs=[
                ARTrace.Input("trace", tooltip="The trace of an AR sampler, or of Load Trace."),
                io.Combo.Input("metric", options=list(maps.METRICS), default="source",
                               tooltip="source: how each token came about. pass: which pass fixed it. accepted "
                               "length: how many were fixed with it. ratio p/q: how well the guess fitted "
                               "(blue: accepted for certain). entropy, top-1: how sure the model was. tree depth, tree "
                               "width: the draft tree that the token came from. skipped, accepted by relaxation, TV "
                               "leak: where and how much the run departed from the model. For continuous models: "
                               "distance between the draws of both models, log ratio of the test, order of drawing, "
                               "block (the round that guessed it), tries to redraw."),
                io.Float.Input("opacity", default=0.5, min=0, max=1, step=0.05, round=0.01,
                               tooltip="How much the map covers the picture; 1 hides it."),
                io.Image.Input("image", optional=True, tooltip="Decoded pictures of this run, to lay the map over."),
            ],
            outputs=[
                io.Image.Output("overlay", display_name="overlay", tooltip="Map over picture, enlarged, with legend."),
                io.Image.Output("map", display_name="map", tooltip="The map alone, as large as the picture."),
                io.Mask.Output("mask", display_name="mask", tooltip="The metric from 0 to 1, at picture size. "
                               "For source: 1 where a guess was accepted; for the ratios: the probability of it."),
                io.String.Output("report", display_name="report", tooltip="Settings and totals (JSON specar.trace/1)."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls, trace: Trace, metric: str, opacity: float, image: torch.Tensor | None = None
    ) -> io.NodeOutput:
        batch = trace.positions["source"].shape[0]
        if image is not None:
            check_pictures(trace, len(image))
        pictures = [None] * batch if image is None else list((image * 255).round().byte().cpu().numpy()[..., :3])
        height, width = (trace.rows * TOKEN_PIXELS, trace.cols * TOKEN_PIXELS) if image is None else image.shape[1:3]
        drawn = [maps.token_map(trace, metric, i) for i in range(batch)]
        layers = [maps.overlay(m, picture, opacity) for m, picture in zip(drawn, pictures, strict=True)]
        tallest = max(len(layer) for layer in layers)  # legends may differ in length
        sizes = [(x.shape[1], len(x) - maps.legend_height(m)) for x, m in zip(layers, drawn, strict=True)]
        layers = [np.pad(x, ((0, tallest - len(x)), (0, 0), (0, 0)), constant_values=255) for x in layers]
        overlay = as_pictures(layers)
        colours = as_pictures([maps.enlarge(m.colours, height, width) for m in drawn])
        mask = torch.from_numpy(np.stack([maps.enlarge(m.strength, height, width) for m in drawn]))
        preview = ui.PreviewImage(overlay, cls=cls).as_dict()
        numbers = [folders.save_beside(picture, token_numbers(trace, i, sizes[i]))
                   for i, picture in enumerate(preview["images"])]
        told = shown(trace, **preview, specar_tokens=numbers)
        return io.NodeOutput(overlay, colours, mask, json.dumps(trace.report(), indent=1), ui=told)


class CompareTraces(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARCompareTraces",
            display_name="Compare Runs",
            category="SpecAR/diagnostics",
            description="Puts runs beside each other: passes of model and drafter, tokens per pass, drift, and, for "
            "runs made by the same server, wall time.",
            inputs=[
                ARTrace.Input("trace_1", tooltip="The trace of an AR sampler, or of Load Trace."),
                *(ARTrace.Input(f"trace_{number}", optional=True, tooltip="Another trace.")
                  for number in range(2, MOST_RUNS + 1)),
            ],
            outputs=[
                io.Image.Output("chart", display_name="chart", tooltip="A row per run, a column per measure."),
                io.String.Output("table", display_name="table", tooltip="The same numbers as a Markdown table."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, **traces: Trace) -> io.NodeOutput:
        runs = [traces[name] for name in sorted(traces) if traces[name] is not None]  # one digit each
        chart = as_pictures([compare.chart(runs)])
        preview = ui.PreviewImage(chart, cls=cls).as_dict()
        reports = {"specar": [trace.report() for trace in runs]}
        return io.NodeOutput(chart, compare.table(runs), ui=preview | reports)


class SaveTrace(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARSaveTrace",
            display_name="Save Trace",
            category="SpecAR/diagnostics",
            description="Writes a run's report (.json) and its record of all tokens (.safetensors) to output.",
            inputs=[
                ARTrace.Input("trace", tooltip="The trace of an AR sampler."),
                io.String.Input("filename_prefix", default="specar/trace",
                                tooltip="Folder and beginning of the file names, as in Save Image; a number follows."),
            ],
            outputs=[],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, trace: Trace, filename_prefix: str) -> io.NodeOutput:
        path, subfolder = folders.next_output(filename_prefix)
        save_trace(trace, path)
        files = [{"filename": path.with_suffix(suffix).name, "subfolder": subfolder, "type": "output"}
                 for suffix in (".json", ".safetensors")]
        return io.NodeOutput(ui=shown(trace, files=files))


class LoadTrace(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARLoadTrace",
            display_name="Load Trace",
            category="SpecAR/diagnostics",
            description="Reads a trace written by Save Trace, from the output or the input folder.",
            inputs=[
                io.Combo.Input("trace_name", options=folders.trace_choices(),
                               tooltip="A trace in the output or input folder (.safetensors beside its .json). "
                               "Press R to refresh the list."),
            ],
            outputs=[ARTrace.Output("trace", display_name="AR_TRACE", tooltip="For Acceptance Map.")],
        )

    @classmethod
    def fingerprint_inputs(cls, trace_name: str) -> str:
        return folders.stamp([folders.trace_path(trace_name)])

    @classmethod
    def execute(cls, trace_name: str) -> io.NodeOutput:
        return io.NodeOutput(load_trace(folders.trace_path(trace_name)))
