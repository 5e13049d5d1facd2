"""Load AR Checkpoint, Load AR Drafter, AR LoRA, Load AR Image Decoder, Empty AR Latent."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..model_loaders.detect import missing_decoder
from ..model_loaders.families import RELEASED_DECODERS
from ..models.sizes import check_grid
from .checks import available
from .comfy_runtime import folders, models
from .comfy_runtime.clip import ARClip
from .comfy_runtime.glm_image import GlmImageVae
from .comfy_runtime.vae import ARVae, open_decoder
from .latents import empty_latent, whole_tokens
from .schema import schema
from .search import FAMILIES, START
from .sockets import ARDrafter, ARModel
from .widgets import fold_away

GRIDS = ("auto", "16", "24", "32", "48", "64", "90")


class LoadCheckpoint(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARLoadCheckpoint",
            category="SpecAR/loaders",
            search=(*START, "speculative decoding", "load model", "checkpoint loader", *FAMILIES),
            inputs=[
                io.Combo.Input("model_name", options=folders.model_choices(), default=folders.BUNDLED),
                io.Combo.Input("dtype", options=list(models.DTYPES), default="auto"),
                fold_away(io.Combo.Input("grid", options=list(GRIDS), default="auto")),
            ],
            outputs=[ARModel.Output("ar_model"), io.Clip.Output("clip"), io.Vae.Output("vae")],
        )

    @classmethod
    def validate_inputs(cls, model_name: str | None = None) -> bool | str:
        return available(model_name, lambda name: folders.resolve(name, folders.MODELS))

    @classmethod
    def fingerprint_inputs(cls, model_name: str, **_others: str) -> str:
        return folders.file_stamp(model_name, folders.MODELS) + folders.companions()

    @classmethod
    def execute(cls, model_name: str, dtype: str, grid: str) -> io.NodeOutput:
        if grid not in GRIDS:
            raise ValueError(f"grid is {grid!r}; choose one of: {', '.join(map(repr, GRIDS))}.")
        side = None if grid == "auto" else (int(grid), int(grid))
        loaded = models.open_model(model_name, dtype, side)
        family = loaded.model.family
        if RELEASED_DECODERS[family].node:
            vae = GlmImageVae(model_name)
        else:
            vae = ARVae(loaded.decoder, missing_decoder(model_name, family))
        return io.NodeOutput(loaded, ARClip(loaded.model), vae)


class LoadDrafter(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARLoadDrafter",
            category="SpecAR/loaders",
            search=("speculative decoding", "draft model", "eagle", "assistant model"),
            inputs=[
                ARModel.Input("model"),
                io.Combo.Input("drafter_name", options=folders.drafter_choices(), default=folders.BUNDLED_DRAFTER),
            ],
            outputs=[ARDrafter.Output("drafter")],
        )

    @classmethod
    def validate_inputs(cls, drafter_name: str | None = None) -> bool | str:
        return available(drafter_name, lambda name: folders.resolve(name, folders.DRAFTERS))

    @classmethod
    def fingerprint_inputs(cls, drafter_name: str, **_others: Any) -> str:
        return folders.file_stamp(drafter_name, folders.DRAFTERS)

    @classmethod
    def execute(cls, model: models.LoadedModel, drafter_name: str) -> io.NodeOutput:
        return io.NodeOutput(models.open_drafter(drafter_name, model))


class LoRA(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARLoadLora",
            category="SpecAR/loaders",
            search=("lora loader", "adapter", "peft", "fine-tune"),
            inputs=[
                ARModel.Input("model"),
                io.Combo.Input("lora_name", options=folders.lora_choices()),
                io.Float.Input("strength", default=1.0, min=-100, max=100, step=0.01, round=0.001),
            ],
            outputs=[ARModel.Output("ar_model")],
        )

    @classmethod
    def validate_inputs(cls, lora_name: str | None = None) -> bool | str:
        return available(lora_name, lambda name: folders.resolve(name, folders.LORAS))

    @classmethod
    def fingerprint_inputs(cls, lora_name: str, **_others: Any) -> str:
        return folders.file_stamp(lora_name, folders.LORAS)

    @classmethod
    def execute(cls, model: models.LoadedModel, lora_name: str, strength: float) -> io.NodeOutput:
        return io.NodeOutput(models.with_lora(model, lora_name, strength) if strength else model)


class LoadImageDecoder(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARLoadImageDecoder",
            category="SpecAR/loaders",
            search=("load vae", "tokenizer", "vqgan", "vq-vae"),
            inputs=[io.Combo.Input("decoder_name", options=folders.decoder_choices(), default=folders.BUNDLED)],
            outputs=[io.Vae.Output("vae")],
        )

    @classmethod
    def validate_inputs(cls, decoder_name: str | None = None) -> bool | str:
        return available(decoder_name, lambda name: folders.resolve(name, "vae", folders.MODELS))

    @classmethod
    def fingerprint_inputs(cls, decoder_name: str) -> str:
        return folders.file_stamp(decoder_name, "vae", folders.MODELS)

    @classmethod
    def execute(cls, decoder_name: str) -> io.NodeOutput:
        return io.NodeOutput(ARVae(open_decoder(folders.resolve(decoder_name, "vae", folders.MODELS))))


class EmptyLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecAREmptyLatent",
            category="SpecAR/latent",
            search=(*START, "image size", "width height", "batch", "resolution"),
            inputs=[
                ARModel.Input("model"),
                io.Int.Input("width", default=0, min=0, max=4096, step=8),
                io.Int.Input("height", default=0, min=0, max=4096, step=8),
                io.Int.Input("batch_size", default=1, min=1, max=64),
            ],
            outputs=[io.Latent.Output("latent")],
        )

    @classmethod
    def execute(cls, model: models.LoadedModel, width: int, height: int, batch_size: int) -> io.NodeOutput:
        side = model.model.pixels_per_token
        own_rows, own_cols = model.model.grid
        grid = whole_tokens(model.model, width or own_cols * side, height or own_rows * side)
        rows, cols = check_grid(model.model, *grid)
        return io.NodeOutput(empty_latent(model.model, rows, cols, batch_size))
