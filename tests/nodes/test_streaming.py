"""Weights that do not fit: what an image costs in copies, and that it falls with the number of forward passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from comfyui_specar import api
from comfyui_specar.models.networks import products
from comfyui_specar.nodes.comfy_runtime.models import open_model
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from torch import nn

METHODS = {"next token": NextToken(), "SJD": SJD(window=6), "wider": SJD(window=12)}
PROMPT = "red apple"


def load_partially(dtype: str):
    """The tiny model with half of its weights loaded, as ComfyUI loads what does not fit."""
    loaded = open_model("tiny", dtype, None)
    loaded.patcher.load(loaded.patcher.load_device, lowvram_model_memory=loaded.patcher.model_size() // 2)
    return loaded.model


def streamed(model: nn.Module) -> list[nn.Module]:
    """Layers of which ComfyUI left the weights in main memory."""
    return [
        layer
        for layer in model.modules()
        if [*layer.parameters(recurse=False)]
        and hasattr(layer, "comfy_cast_weights")
        and not getattr(layer, "comfy_patched_weights", False)
    ]


def size(*layers: nn.Module) -> int:
    """Bytes of the layers' own weights."""
    return sum(p.numel() * p.element_size() for layer in layers for p in layer.parameters(recurse=False))


@contextmanager
def copies(model: nn.Module) -> Iterator[list[int]]:
    """Bytes that a GPU would copy meanwhile: those of a streamed layer, whenever it is used."""
    copied, layers, own_weights = [], set(streamed(model)), products._own_weights
    hooks = [layer.register_forward_pre_hook(lambda layer, _inputs: copied.append(size(layer))) for layer in layers]
    try:
        # Their weights would be on another device, so each layer is called.
        with patch.object(products, "_own_weights", lambda layer, x: layer not in layers and own_weights(layer, x)):
            yield copied
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("dtype", ["fp32", "fp8 (storage)", "int8 (storage)", "int4 (storage)"])
def test_every_forward_pass_copies_all_streamed_layers_once(models, dtype):
    model = load_partially(dtype)
    left = [layer for layer in streamed(model) if layer in set(model.backbone.modules())]
    once = size(*left)
    assert 0.3 * size(*model.modules()) < once < 0.9 * size(*model.modules())
    assert any("layers." in name for name, layer in model.named_modules() if layer in left)
    prompt = model.encode_prompt(PROMPT)
    for method in METHODS.values():
        with copies(model.backbone) as copied:
            out = api.sample(model, prompt, method, cfg=2.0, seed=3)
        assert sum(copied) == once * out.trace.summary()["target_passes"]
