"""AR Model Info."""

from __future__ import annotations

from dataclasses import asdict

from comfy_api.latest import io

from ..model_loaders.detect import family_of, missing_decoder
from ..model_loaders.files.checkpoint import outline, weight_file
from .comfy_runtime import folders, models
from .facts import facts_of, fitting, in_words
from .sockets import ARModel


class ModelInfo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARModelInfo",
            display_name="AR Model Info",
            category="SpecAR/loaders",
            description="Describes a loaded model: family and size, memory use, image sizes, default settings, image "
            "decoder, and compatible drafters.",
            inputs=[ARModel.Input("model", tooltip="The model, from Load AR Checkpoint.")],
            outputs=[io.String.Output("info", display_name="info", tooltip="The report as text.")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model: models.LoadedModel) -> io.NodeOutput:
        family = family_of(outline(weight_file(folders.resolve(model.name, folders.MODELS))))
        drafters = {name: folders.resolve(name, folders.DRAFTERS) for name in folders.drafter_choices()}
        decoder = model.decoder and model.decoder.decoder
        facts = facts_of(model.model, decoder, fitting(drafters, model.model, family))
        text = in_words(model.name, facts, missing_decoder(model.name, model.model.family))
        return io.NodeOutput(text, ui={"text": [text], "specar": [asdict(facts)]})
