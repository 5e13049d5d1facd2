"""AR Example Image: what templates that edit an image begin with, so that they work before one has been loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from comfy_api.latest import io
from PIL import Image

from .diagnostics import preview
from .schema import schema

FAINT = 0.6  # how transparent the node shows what is masked
FILE = Path(__file__).resolve().parent.parent / "assets/example.png"


class ExampleImage(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARExampleImage",
            category="SpecAR/latent",
            search=("load image", "sample image", "test image", "mask"),
            inputs=[],
            outputs=[io.Image.Output("image"), io.Mask.Output("mask")],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        with Image.open(FILE) as file:
            pixels = torch.from_numpy(np.array(file.convert("RGBA"))).float()[None] / 255
        image, mask = pixels[..., :3], 1 - pixels[..., 3]
        shown = torch.cat([image, (1 - FAINT * mask)[..., None]], -1)
        return io.NodeOutput(image, mask, ui=preview(shown, cls))
