"""Entropy Temperature: a model whose samplers heat or cool each token by how certain the model is of it."""

from __future__ import annotations

from dataclasses import replace

from comfy_api.latest import io

from ..samplers.contract import check_entropy
from .comfy_runtime.models import LoadedModel
from .schema import schema
from .sockets import ARModel


class EntropyTemperature(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecAREntropyTemperature",
            category="SpecAR/sampling",
            search=("dynamic temperature", "sampling parameter", "certainty", "model patch"),
            inputs=[
                ARModel.Input("model"),
                io.Float.Input("strength", default=2.5, min=0, max=10, step=0.1, round=0.001),
                io.Float.Input("decay", default=3.0, min=0.01, max=100, step=0.1, round=0.001),
                io.Float.Input("floor", default=0.6, min=0.01, max=5, step=0.05, round=0.001),
            ],
            outputs=[ARModel.Output("ar_model")],
        )

    @classmethod
    def execute(cls, model: LoadedModel, strength: float, decay: float, floor: float) -> io.NodeOutput:
        if model.model.continuous:
            raise ValueError(
                f"{model.name} is a continuous model: its tokens are vectors, whose entropy is not known. Connect it "
                "to the sampler directly, or load a model of token ids."
            )
        check_entropy(strength, decay, floor)
        return io.NodeOutput(replace(model, sampling={**model.sampling, "entropy": (strength, decay, floor)}))
