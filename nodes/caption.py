"""AR Caption: a question about an image, answered by the model that generates images."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from torch import Tensor

from .comfy_runtime import captions, models
from .schema import schema
from .sockets import ARModel


class Caption(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARCaption",
            category="SpecAR/sampling",
            search=("caption", "describe image", "image to text", "vqa", "question", "interrogate", "vision"),
            inputs=[
                ARModel.Input("model"),
                io.Image.Input("image"),
                io.String.Input("question", multiline=True, default="Describe the image."),
                io.Int.Input("max_tokens", default=512, min=1, max=8192),
                io.Float.Input("temperature", default=0, min=0, max=5, step=0.05, round=0.01),
                io.Int.Input("seed", default=0, min=0, max=0xFFFFFFFFFFFFFFFF, control_after_generate=True),
                io.Vae.Input("vae", optional=True),
            ],
            outputs=[io.String.Output("text", is_output_list=True)],
        )

    @classmethod
    def execute(
        cls,
        model: models.LoadedModel,
        image: Tensor,
        question: str,
        max_tokens: int,
        temperature: float,
        seed: int,
        vae: Any = None,
    ) -> io.NodeOutput:
        return io.NodeOutput(captions.answer(model, image, question, max_tokens, temperature, seed, vae))
