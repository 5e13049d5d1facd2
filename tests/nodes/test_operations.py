"""Layers that have their parameters from the start, whatever manages the memory."""

from importlib.util import find_spec

import comfy.ops
import pytest
import torch
from comfyui_specar.nodes.comfy_runtime.operations import Operations

from .conftest import DYNAMIC_VRAM

LAYERS = {"Linear": ((3, 2), (2, 3)), "Embedding": ((5, 2), (5, 2))}


def test_dynamic_vram_is_simulated_where_this_comfyui_has_it():
    assert DYNAMIC_VRAM == (find_spec("comfy.memory_management") is not None)
    layer = comfy.ops.disable_weight_init.Linear(3, 2)
    assert (layer.weight is None) == DYNAMIC_VRAM, "else these tests would prove nothing"


@pytest.mark.parametrize("kind", LAYERS)
def test_names_and_shapes_are_known_before_a_file_is_read(kind):
    sizes, shape = LAYERS[kind]
    with torch.device("meta"):
        layer = getattr(Operations, kind)(*sizes)
    assert isinstance(layer, getattr(comfy.ops.disable_weight_init, kind)), "ComfyUI must know it"
    assert layer.weight.shape == shape and layer.weight.is_meta
    assert set(layer.state_dict()) == ({"weight", "bias"} if kind == "Linear" else {"weight"})
    weights = {name: torch.randn(value.shape) for name, value in layer.state_dict().items()}
    layer.load_state_dict(weights, assign=True)
    assert layer.weight.data_ptr() == weights["weight"].data_ptr(), "nothing is copied"


def test_weights_are_cast_on_use():
    layer = Operations.Linear(3, 2, bias=False, dtype=torch.float16)
    layer.load_state_dict({"weight": torch.arange(6.0).reshape(2, 3).half()}, assign=True)
    layer.comfy_cast_weights = True
    assert torch.equal(layer(torch.ones(1, 3)), torch.tensor([[3.0, 12.0]]))
