"""Encoding the images of prompts by a model's own encoder, under ComfyUI's memory management."""

from __future__ import annotations

import torch
from torch import Tensor

from ...model_loaders.detect import load_encoder
from .memory import load_models_gpu
from .models import LoadedModel
from .runs import bring_the_rest


def encode_source(loaded: LoadedModel, image: Tensor) -> Tensor:
    """Tokens [h, w] (int64, CPU) of an image [H, W, 3] as the encoder in the model's files sees it. Raises ValueError
    for files without it."""
    held = loaded.part(load_encoder, lambda encoder: encoder)
    encoder = held.content
    patches = image.shape[0] * image.shape[1] // encoder.config.patch**2
    load_models_gpu([held.patcher], memory_required=encoder.activation_bytes(patches))
    bring_the_rest(encoder, encoder.device)
    with torch.inference_mode():
        return encoder(image).cpu()
