"""The list of nodes for ComfyUI's V3 interface."""

from __future__ import annotations

import logging

from comfy_api.latest import ComfyExtension, io

from ..limits.printable import PrintableLog
from ..samplers.methods import pass_costs
from . import (
    caption,
    chosen_method,
    continuous,
    diagnostics,
    entropy_temperature,
    example,
    fastest,
    glm_image,
    image_prompt,
    loaders,
    model_info,
    regions,
    rules,
    samplers,
    timeline,
    tree_samplers,
)
from .checks import checked
from .comfy_runtime import folders
from .comfy_runtime.kept_costs import load_costs
from .comfy_runtime.templates import sort_templates

folders.register_folders()
folders.set_mmap()
pass_costs.known = load_costs()
sort_templates()
logging.getLogger(__name__.rsplit(".", 2)[0]).addHandler(PrintableLog())  # prompts and names of files are in its lines


def node_classes() -> list[type[io.ComfyNode]]:
    """Every node of the pack, in the order of the menu. When a link is released on the canvas, ComfyUI suggests only
    the first four that take it, so what a model is connected to first stands at the beginning."""
    classes = [
        loaders.LoadCheckpoint,
        samplers.ARSampler,
        loaders.EmptyLatent,
        loaders.LoadDrafter,
        loaders.LoRA,
        model_info.ModelInfo,
        loaders.LoadImageDecoder,
        regions.ContinueImage,
        example.ExampleImage,
        image_prompt.ImagePrompt,
        glm_image.GLMImageDecode,
        caption.Caption,
        samplers.NextTokenSampler,
        samplers.SJDSampler,
        tree_samplers.DraftTreeSampler,
        tree_samplers.LanternSampler,
        tree_samplers.CoolSDSampler,
        tree_samplers.ADTTreeSampler,
        tree_samplers.VVSSampler,
        continuous.ContinuousNextTokenSampler,
        continuous.ContinuousSampler,
        chosen_method.AutoSampler,
        entropy_temperature.EntropyTemperature,
        *rules.NODES,
        diagnostics.AcceptanceMap,
        timeline.DecodingTimeline,
        diagnostics.CompareRuns,
        fastest.FindFastest,
        diagnostics.SaveTrace,
        diagnostics.LoadTrace,
    ]
    return [checked(node) for node in classes]


class SpecARExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return node_classes()
