"""GLM-Image's decoder under ComfyUI's memory management, and the VAE that stands for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...model_loaders.families import glm_image_diffusion as glm_image
from .folders import MODELS, resolve, search_folders, stamp
from .memory import load_models_gpu, to_output_device
from .operations import Operations
from .vae import ARVae, LoadedDecoder, manage_decoder

NODE = "GLM-Image Decode"


class LoadedVae(LoadedDecoder):
    def bytes_for(self, pixels: int) -> int:
        """See LoadedDecoder. Here the largest feature maps are those that the second level, four times as wide as the
        first, passes on at full resolution: up to five are alive at once."""
        return 5 * max(self.decoder.module.config.widths[:2]) * pixels * 4


class GlmImageVae:
    """The decoder of a model of Load AR Checkpoint, read from the folders beside the model's on first use.

    ComfyUI's own VAE nodes, which have no prompt, get an error that names the node.
    """

    def __init__(self, model_name: str):
        self._model_name = model_name
        self._loaded: tuple[str, LoadedGlmImage] | None = None  # with a stamp of its files

    def decode(self, *_inputs: Any, **_options: Any) -> Tensor:
        raise ValueError(
            f"GLM-Image's image decoder reads the prompt, too. Use {NODE} instead of VAE Decode: connect this VAE, the "
            "sampler's LATENT and the prompt's CONDITIONING to it."
        )

    def encode(self, *_inputs: Any, **_options: Any) -> Tensor:
        raise ValueError("GLM-Image's VAE encodes no images here, so it can neither inpaint nor continue one.")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"This VAE belongs to GLM-Image and has no {name}: use it with {NODE}.")

    def load(self) -> LoadedGlmImage:
        """Raises CheckpointError for folders that are missing, and for files that are damaged."""
        folder = glm_image.find_folder(resolve(self._model_name, MODELS), search_folders())
        files = stamp(sorted(file for part in glm_image.PARTS for file in (folder / part).iterdir() if file.is_file()))
        if self._loaded is None or self._loaded[0] != files:
            self._loaded = None  # free its memory first
            self._loaded = files, LoadedGlmImage(folder)
        return self._loaded[1]


class LoadedGlmImage:
    """ByT5, the diffusion transformer and the VAE, each moved to its device when it is its turn.

    The transformer may be loaded partially. It computes in bf16 if the device supports it well, else in fp32.
    """

    def __init__(self, folder: Path):
        self.device, self._folder = mm.get_torch_device(), folder
        dtype = torch.bfloat16 if mm.should_use_bf16(self.device) else torch.float32
        self.decoder = glm_image.load(folder, dtype, Operations)
        self._dit = ModelPatcher(self.decoder.dit, self.device, mm.unet_offload_device())
        self._reader = ModelPatcher(self.decoder.reader, mm.text_encoder_device(), mm.text_encoder_offload_device())
        vae = self.decoder.vae
        self._vae = ARVae(LoadedVae(vae, ModelPatcher(vae.module, mm.vae_device(), mm.vae_offload_device())))

    @cached_property
    def _encoder(self) -> ARVae:
        """The VAE's encoder, read when the first source image comes."""
        return ARVae(manage_decoder(glm_image.load_latent_encoder(self._folder, Operations)))

    def decode(
        self,
        tokens: Tensor,
        prompt: str,
        seed: int,
        steps: int,
        cfg: float,
        images: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Tensor:
        """Pixels [B, 32 * h, 32 * w, 3] of tokens [B, h, w] (int64); image i with seed + i. images: what the prompt
        edits, as tokens [h, w] (int64) and pixels [32 * h, 32 * w, 3] in 0..1. If memory is too short for a whole
        image, the VAE works in tiles. Raises InterruptProcessingException if the user interrupts, and CheckpointError
        for images if the VAE has no encoder."""
        sources = []
        for codes, image in images:
            mm.throw_exception_if_processing_interrupted()
            sources.append(glm_image.SourceImage(self._encoder.encode(image[None]), codes))
        load_models_gpu([self._reader], force_full_load=True)
        text, null = self.decoder.read(prompt)
        memory = self.decoder.dit.activation_bytes(
            4 * tokens[0].numel() + text.shape[1], [4 * source.tokens.numel() for source in sources]
        )
        load_models_gpu([self._dit], memory_required=memory)
        bar = comfy.utils.ProgressBar(len(tokens) * steps)

        def report(_step: int) -> None:
            mm.throw_exception_if_processing_interrupted()
            bar.update(1)

        mm.throw_exception_if_processing_interrupted()
        latents = self.decoder.latents(tokens, text, null, seed, steps, cfg, self.device, report, sources)
        return self._vae.decode(to_output_device(latents))
