"""Encoding the images of prompts by a model's own encoder, under ComfyUI's memory management."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...model_loaders.detect import load_encoder
from .memory import Patcher, load_models_gpu
from .models import LoadedModel, patcher_of
from .runs import bring_the_rest


@dataclass(frozen=True, repr=False)  # ComfyUI quotes the inputs of a node that failed
class LoadedEncoder:
    """The encoder of a model's files, under ComfyUI's memory management."""

    module: Any  # a SourceEncoder
    patcher: Patcher

    def tokens(self, image: Tensor) -> Tensor:
        """Tokens [h, w] (int64, CPU) of an image [H, W, 3] as the encoder sees it."""
        patches = image.shape[0] * image.shape[1] // self.module.config.patch**2
        load_models_gpu([self.patcher], memory_required=self.module.activation_bytes(patches))
        bring_the_rest(self.module, self.module.device)
        with torch.inference_mode():
            return self.module(image).cpu()


# As long as a model is loaded: its encoder is read when the first image is.
_encoders: WeakKeyDictionary[torch.nn.Module, LoadedEncoder] = WeakKeyDictionary()


def encoder_of(loaded: LoadedModel) -> LoadedEncoder:
    """The encoder in a model's files. Raises ValueError for files without it."""
    if loaded.model not in _encoders:
        module = loaded.more(load_encoder)
        _encoders[loaded.model] = LoadedEncoder(module, patcher_of(module, loaded.model))
    return _encoders[loaded.model]
