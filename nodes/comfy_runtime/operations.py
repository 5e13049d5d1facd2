"""ComfyUI's casting layers, for models whose names and shapes are compared with a file before loading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import comfy.ops
import torch
from torch import Tensor, nn


@contextmanager
def fetch(weight: Tensor, scale: Tensor | None, device: torch.device) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Weight and scale of a NarrowLinear on a device, for use in this context, copied as ComfyUI copies its own layers.

    From pinned memory it copies in streams beside the one that computes: the host does not wait, and the weights of the
    next layer arrive while this one computes. What is on the device is used in place, as captured steps must.
    """
    if all(tensor is None or tensor.device == device for tensor in (weight, scale)):
        yield weight, scale
        return
    pair = SimpleNamespace(weight=weight, bias=scale, weight_function=[], bias_function=[])
    kept = None if scale is None else scale.dtype
    *copies, stream = comfy.ops.cast_bias_weight(pair, None, weight.dtype, device, kept, offloadable=True)
    try:
        yield tuple(copies)
    finally:
        comfy.ops.uncast_bias_weight(pair, *copies, stream)


class Operations(comfy.ops.disable_weight_init):
    """ComfyUI's layers, with parameters after construction.

    Under dynamic VRAM, ComfyUI's own Linear and Embedding have no parameters until a state dict is loaded, so that
    Windows commits no memory for them. Ours are built on the meta device, where parameters take no memory, and
    load_weights needs their names and shapes.
    """

    class Linear(comfy.ops.disable_weight_init.Linear):
        fetch = staticmethod(fetch)

        def __init__(self, *sizes: Any, **options: Any):
            nn.Linear.__init__(self, *sizes, **options)

        _load_from_state_dict = nn.Module._load_from_state_dict

    class Embedding(comfy.ops.disable_weight_init.Embedding):
        def __init__(self, *sizes: Any, **options: Any):
            nn.Embedding.__init__(self, *sizes, **options)

        _load_from_state_dict = nn.Module._load_from_state_dict
