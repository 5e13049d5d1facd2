"""ComfyUI's casting layers, for models whose names and shapes are compared with a file before loading."""

from __future__ import annotations

from typing import Any

import comfy.ops
from torch import nn


class Operations(comfy.ops.disable_weight_init):
    """ComfyUI's layers, with parameters after construction.

    Under dynamic VRAM, ComfyUI's own Linear and Embedding have no parameters until a state dict is loaded, so that
    Windows commits no memory for them. Ours are built on the meta device, where parameters take no memory, and
    load_weights needs their names and shapes.
    """

    class Linear(comfy.ops.disable_weight_init.Linear):
        def __init__(self, *sizes: Any, **options: Any):
            nn.Linear.__init__(self, *sizes, **options)

        _load_from_state_dict = nn.Module._load_from_state_dict

    class Embedding(comfy.ops.disable_weight_init.Embedding):
        def __init__(self, *sizes: Any, **options: Any):
            nn.Embedding.__init__(self, *sizes, **options)

        _load_from_state_dict = nn.Module._load_from_state_dict
