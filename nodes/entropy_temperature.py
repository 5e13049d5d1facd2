"""Entropy Temperature: a model whose samplers heat or cool each token by how certain the model is of it."""

from __future__ import annotations

from dataclasses import replace

from comfy_api.latest import io

from ..samplers.contract import check_entropy
from .comfy_runtime.models import LoadedModel
from .search import found_by
from .sockets import ARModel


class EntropyTemperature(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecAREntropyTemperature",
            display_name="Entropy Temperature",
            category="SpecAR/sampling",
            **found_by("dynamic temperature", "sampling parameter", "certainty", "model patch"),
            description="Raises the temperature where the model is certain of a token (flat areas) and lowers it where "
            "it is very uncertain (detail; by default from 5.5 nats on). For every AR sampler of token ids; exact "
            "methods stay exact.",
            inputs=[
                ARModel.Input("model", tooltip="The model, from Load AR Checkpoint."),
                io.Float.Input(
                    "strength",
                    default=2.5,
                    min=0,
                    max=10,
                    step=0.1,
                    round=0.001,
                    tooltip="How much the temperature of a certain token exceeds that of an uncertain one. "
                    "Higher: more varied flat areas. 0 to 3 is sensible. Default: 2.5, the paper's T0.",
                ),
                io.Float.Input(
                    "decay",
                    default=3.0,
                    min=0.01,
                    max=100,
                    step=0.1,
                    round=0.001,
                    tooltip="Entropy (in nats) over which this excess falls by a factor of e. Higher: more "
                    "tokens are heated; 0.5 to 4 is sensible, less for a small model. Default: 3, the "
                    "paper's alpha.",
                ),
                io.Float.Input(
                    "floor",
                    default=0.6,
                    min=0.01,
                    max=5,
                    step=0.05,
                    round=0.001,
                    tooltip="Factor on the temperature of the most uncertain tokens. Lower: cleaner detail, "
                    "less varied; 0.5 to 1 is sensible. Default: 0.6, the paper's theta.",
                ),
            ],
            outputs=[ARModel.Output("ar_model", display_name="AR_MODEL", tooltip="For the model input of a sampler.")],
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
