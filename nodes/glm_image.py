"""GLM-Image Decode: from GLM-Image's tokens and the prompt to pixels."""

from __future__ import annotations

import logging
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..model_loaders.families.glm_image import FAMILY
from ..model_loaders.families.glm_image_diffusion import CFG, STEPS, unread_quotations
from ..models.text.prompts import prompt_text
from .checks import show
from .comfy_runtime.glm_image import GlmImageVae
from .comfy_runtime.progress import notify
from .latents import Latent
from .schema import schema
from .widgets import fold_away

log = logging.getLogger(__name__)
[OWN] = FAMILY.decoders


def glm_tokens(latent: Latent, codes: int) -> Tensor:
    """Tokens [B, h, w] (int64) of a LATENT of GLM-Image, whose only channel contains them. Raises ValueError for the
    latent of another model, and for one without an image."""
    samples = latent["samples"]
    tokens = samples[:, 0].round().long()
    if samples.shape[1] != 1 or tokens.min() < 0 or tokens.max() >= codes or (samples[:, 0] - tokens).abs().max() > 0.1:
        raise ValueError(
            f"samples has shape {list(samples.shape)} and is not of GLM-Image, whose latents are [images, 1, rows, "
            f"columns] with a token from 0 to {codes - 1} for every 32 x 32 pixels. Connect the LATENT of an AR "
            "sampler with GLM-Image; those of other models are for VAE Decode."
        )
    if not tokens.any():
        raise ValueError("samples contains no image, only a size. Connect the LATENT of an AR sampler with GLM-Image.")
    return tokens


def source_images(positive: list, codes: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens [h, w] (int64) and pixels [32 * h, 32 * w, 3] of every image that a prompt edits. Raises ValueError for
    some that do not fit each other, or the decoder, which has so many ``codes``."""
    found = []
    for number, source in enumerate(positive[0][1]["ar"].get("sources") or (), 1):
        tokens, image = source.get("tokens"), source.get("image")
        fits = isinstance(tokens, Tensor) and isinstance(image, Tensor) and tokens.ndim == 2 and tokens.numel() > 0
        if not fits or image.shape != (32 * tokens.shape[0], 32 * tokens.shape[1], 3):
            raise ValueError(
                f"Source image {number} of positive is {show(image)} with tokens {show(tokens)}, but a token is 32 x "
                "32 pixels: the image must be [32 * rows, 32 * columns, 3] for tokens [rows, columns]. Encode the "
                "prompt and its images again."
            )
        if tokens.is_floating_point() or tokens.min() < 0 or tokens.max() >= codes:
            raise ValueError(
                f"Source image {number} of positive has tokens from {tokens.min()} to {tokens.max()}, but the decoder "
                f"knows 0 to {codes - 1}: they do not belong together. Encode the prompt and its images with the CLIP "
                "of the same Load AR Checkpoint."
            )
        found.append((tokens.long(), image))
    return found


class GLMImageDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARDecodeGLMImage",
            category="SpecAR/latent",
            search=("vae decode", "diffusion decoder", *FAMILY.labels),
            inputs=[
                io.Latent.Input("samples"),
                io.Vae.Input("vae"),
                io.Conditioning.Input("positive"),
                io.Int.Input("seed", default=0, min=0, max=0xFFFFFFFFFFFFFFFF, control_after_generate=True),
                fold_away(io.Int.Input("steps", default=STEPS, min=1, max=200)),
                fold_away(io.Float.Input("cfg", default=CFG, min=1, max=30, step=0.1, round=0.01)),
            ],
            outputs=[io.Image.Output("image")],
        )

    @classmethod
    def execute(cls, samples: Latent, vae: Any, positive: list, seed: int, steps: int, cfg: float) -> io.NodeOutput:
        if not isinstance(vae, GlmImageVae):
            raise ValueError(
                f"vae is {show(vae)}, but must be that of GLM-Image, from Load AR Checkpoint. For other "
                "models use VAE Decode."
            )
        if len(positive) != 1 or positive[0][1].get("ar", {}).get("family") != OWN:
            raise ValueError(
                "positive is not a prompt of GLM-Image. Connect the CLIP Text Encode of the sampler, with "
                "the CLIP of the same Load AR Checkpoint."
            )
        loaded = vae.load()
        tokens = glm_tokens(samples, loaded.decoder.dit.config.codes)
        prompt = prompt_text(positive) or ""
        images = source_images(positive, loaded.decoder.dit.config.codes)
        pixels = loaded.decode(tokens, prompt, seed, steps, cfg, images)
        for notice in (found := unread_quotations(prompt)):
            log.warning("%s", notice)
        notify(found)
        return io.NodeOutput(pixels)
