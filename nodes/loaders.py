"""Load AR Checkpoint, Load AR Drafter, Load AR Image Decoder, Empty AR Latent."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..model_loaders.detect import missing_decoder
from ..model_loaders.families import CONTINUOUS_NAMES, RELEASED_DECODERS
from .checks import available
from .comfy_runtime import folders, models
from .comfy_runtime.clip import ARClip
from .comfy_runtime.glm_image import GlmImageVae
from .comfy_runtime.vae import ARVae
from .latents import empty_latent, whole_tokens
from .search import FAMILIES, START, found_by
from .sockets import ARDrafter, ARModel
from .widgets import auto, folded

GRIDS = ("auto", "16", "24", "32", "48", "64", "90")


class LoadCheckpoint(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARLoadCheckpoint",
            display_name="Load AR Checkpoint",
            category="SpecAR/loaders",
            **found_by(*START, "speculative decoding", "load model", "checkpoint loader", *FAMILIES),
            description="Loads an autoregressive image model with its text encoder and image decoder. Put your own "
            "models into models/ar_models.",
            inputs=folded(
                [
                    io.Combo.Input(
                        "model_name",
                        options=folders.model_choices(),
                        default=folders.BUNDLED,
                        tooltip="A model that ships with this pack (default: token ids; continuous: vectors), or a "
                        "file or Hugging Face folder in models/ar_models. Its image decoder is searched for next to it "
                        "and in models/vae.",
                    ),
                    io.Combo.Input(
                        "dtype",
                        options=list(models.DTYPES),
                        default="auto",
                        tooltip="Precision of the weights. auto: on GPU bf16 (or fp16) if model and run fit in its "
                        "memory, else int8, else int4 (storage); on CPU fp32, or bf16 for large models if the "
                        "processor is faster in it. Lower precision halves memory and changes the image of a seed. fp8 "
                        "and int8 (storage): the large matrices are stored in 8 bits, half the memory of bf16, and "
                        "computed as in auto. int8 has the smaller rounding error. int8 (storage and KV cache): keys "
                        "and values too, for long images. int4 (storage): in 4 bits, a bit more than a quarter, with a "
                        "much larger error, for weights that do not fit otherwise.",
                    ),
                    io.Combo.Input(
                        "grid",
                        options=list(GRIDS),
                        default="auto",
                        tooltip="Tokens per side of the image if Empty AR Latent sets no size. Needed only for "
                        "LlamaGen files whose name does not tell it: 16 for 256, 24 for 384, 32 for 512 pixels. Other "
                        "models accept only their own values (Lumina-mGPT 768: 48; SimpleAR 1024: 64; Emu3 720: 90).",
                    ),
                ],
                "grid",
            ),
            outputs=[
                ARModel.Output(
                    "ar_model",
                    display_name="AR_MODEL",
                    tooltip="The model, for an AR sampler. Continuous "
                    f"models ({CONTINUOUS_NAMES}) need a continuous sampler.",
                ),
                io.Clip.Output(
                    "clip",
                    display_name="CLIP",
                    tooltip="The model's text encoder, for CLIP Text Encode. "
                    "Class-conditional models take a class name or number as text.",
                ),
                io.Vae.Output(
                    "vae", display_name="VAE", tooltip="The model's image decoder, for VAE Decode and VAE Encode."
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, model_name: str) -> bool | str:
        return available(model_name, lambda name: folders.resolve(name, folders.MODELS))

    @classmethod
    def fingerprint_inputs(cls, model_name: str, **_others: str) -> str:
        return folders.fingerprint(model_name, folders.MODELS) + folders.companions()

    @classmethod
    def execute(cls, model_name: str, dtype: str, grid: str) -> io.NodeOutput:
        if grid not in GRIDS:
            raise ValueError(f"grid is {grid!r}; choose one of {', '.join(GRIDS)}.")
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
        return io.Schema(
            node_id="SpecARLoadDrafter",
            display_name="Load AR Drafter",
            category="SpecAR/loaders",
            **found_by("speculative decoding", "draft model", "eagle", "assistant model"),
            description="Loads a small model that drafts tokens for a larger one. Put your own drafters into "
            "models/ar_drafters.",
            inputs=[
                ARModel.Input(
                    "model",
                    tooltip="The target model, from Load AR Checkpoint. A drafter works only with "
                    "the model it was trained for.",
                ),
                io.Combo.Input(
                    "drafter_name",
                    options=folders.drafter_choices(),
                    default=folders.BUNDLED_DRAFTER,
                    tooltip="A drafter that ships with this pack, or a file or folder in models/ar_drafters: an EAGLE "
                    "drafter, or a smaller model with the same tokens. A continuous model needs a continuous drafter.",
                ),
            ],
            outputs=[
                ARDrafter.Output(
                    "drafter",
                    display_name="AR_DRAFTER",
                    tooltip="For samplers with a drafter input, together with the same model.",
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, drafter_name: str) -> bool | str:
        return available(drafter_name, lambda name: folders.resolve(name, folders.DRAFTERS))

    @classmethod
    def fingerprint_inputs(cls, drafter_name: str, **_others: Any) -> str:
        return folders.fingerprint(drafter_name, folders.DRAFTERS)

    @classmethod
    def execute(cls, model: models.LoadedModel, drafter_name: str) -> io.NodeOutput:
        return io.NodeOutput(models.open_drafter(drafter_name, model))


class LoadImageDecoder(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecARLoadImageDecoder",
            display_name="Load AR Image Decoder",
            category="SpecAR/loaders",
            **found_by("load vae", "tokenizer", "vqgan", "vq-vae"),
            description="Loads the image tokenizer or autoencoder that converts a model's tokens to pixels and back. "
            "Needed only if Load AR Checkpoint did not find it.",
            inputs=[
                io.Combo.Input(
                    "decoder_name",
                    options=folders.decoder_choices(),
                    default=folders.BUNDLED,
                    tooltip="A file or folder in models/vae or models/ar_models (a model's folder may contain its "
                    "decoder). Use the decoder that was released with the model.",
                )
            ],
            outputs=[io.Vae.Output("vae", display_name="VAE", tooltip="For VAE Decode and VAE Encode.")],
        )

    @classmethod
    def validate_inputs(cls, decoder_name: str) -> bool | str:
        return available(decoder_name, lambda name: folders.resolve(name, "vae", folders.MODELS))

    @classmethod
    def fingerprint_inputs(cls, decoder_name: str) -> str:
        return folders.fingerprint(decoder_name, "vae", folders.MODELS)

    @classmethod
    def execute(cls, decoder_name: str) -> io.NodeOutput:
        return io.NodeOutput(ARVae(models.open_decoder(folders.resolve(decoder_name, "vae", folders.MODELS))))


class EmptyLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpecAREmptyLatent",
            display_name="Empty AR Latent",
            category="SpecAR/latent",
            **found_by(*START, "image size", "width height", "batch", "resolution"),
            description="Sets the size and number of images. A model generates only the sizes it was trained on.",
            inputs=[
                ARModel.Input(
                    "model", tooltip="The model that generates the images; it determines the possible sizes."
                ),
                io.Int.Input(
                    "width",
                    auto("width"),
                    default=0,
                    min=0,
                    max=4096,
                    step=8,
                    tooltip="Width in pixels. Larger takes longer, as the image has more tokens; most "
                    "models have sizes from 256 to 1024 (see AR Model Info). Default: 0 (auto), the model's "
                    "own size, the only one of the bundled models.",
                ),
                io.Int.Input(
                    "height",
                    auto("height"),
                    default=0,
                    min=0,
                    max=4096,
                    step=8,
                    tooltip="Height in pixels, as for width. Default: 0 (auto), the model's own size.",
                ),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=64,
                    tooltip="Images per run. More share the forward passes, which takes less time per "
                    "image, but need more memory; 1 to 8 is common. Image i uses seed + i, whatever the "
                    "batch size. Default: 1.",
                ),
            ],
            outputs=[io.Latent.Output("latent", display_name="LATENT", tooltip="For latent_image of an AR sampler.")],
        )

    @classmethod
    def execute(cls, model: models.LoadedModel, width: int, height: int, batch_size: int) -> io.NodeOutput:
        side = model.model.pixels_per_token
        own_rows, own_cols = model.model.grid
        grid = whole_tokens(model.model, width or own_cols * side, height or own_rows * side)
        grid = model.model.check_grid(*grid)
        return io.NodeOutput(empty_latent(model.model, *grid, batch_size))
