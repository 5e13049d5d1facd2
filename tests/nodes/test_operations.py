"""Layers that have their parameters from the start, whatever manages the memory."""

from importlib.util import find_spec

import comfy.model_management as mm
import comfy.ops
import pytest
import torch
from comfy.cli_args import args
from comfyui_specar.models.networks import quantised
from comfyui_specar.models.networks.quantised import narrow_matrix, put_narrow
from comfyui_specar.nodes.comfy_runtime.operations import Operations

from ..support.simulated_gpu import GPU
from .conftest import DYNAMIC_VRAM

LAYERS = {"Linear": ((3, 2), (2, 3)), "Embedding": ((5, 2), (5, 2))}


@pytest.fixture(autouse=True)
def windows(monkeypatch):
    """ComfyUI 0.23 to 0.28 make layers without weights on Windows alone."""
    monkeypatch.setattr(mm, "WINDOWS", True)


def test_dynamic_vram_is_simulated_where_this_comfyui_has_it():
    assert (find_spec("comfy.memory_management") is not None) == DYNAMIC_VRAM
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


class Stream:
    """Says in ``events`` what is done in it, and what it waits for."""

    def __init__(self, name, events, running):
        self.name, self.events, self.running = name, events, running

    def __enter__(self):
        self.running.append(self.name)

    def __exit__(self, *error):
        self.running.pop()

    def wait_stream(self, other):
        self.events.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch, request):
    """What happens, in order, on a simulated GPU with two streams for copies beside the one that computes."""
    events, running = [], ["computing"]
    computing, *beside = (Stream(name, events, running) for name in ("computing", "copying 1", "copying 2"))

    def note(function, what):
        def noted(*inputs, **options):
            events.append(f"{what} in {running[-1]}")
            return function(*inputs, **options)

        return noted

    monkeypatch.setattr(mm, "current_stream", lambda device: computing)
    monkeypatch.setattr(mm, "STREAMS", {GPU: beside})
    monkeypatch.setattr(mm, "stream_counters", {})
    monkeypatch.setattr(mm, "NUM_STREAMS", 2)
    monkeypatch.setattr(args, "cuda_malloc", True)  # else newer versions copy to a buffer that they keep
    monkeypatch.setattr(quantised, "linear_narrow", note(quantised.linear_narrow, "product"))
    monkeypatch.setattr(torch, "empty_like", note(torch.empty_like, "copy"))
    request.getfixturevalue("gpu")
    return events


def narrow_layers(storage, device="cpu"):
    model = torch.nn.Sequential(*(Operations.Linear(64, 64, bias=False) for _ in range(2)))
    for name in "01":
        put_narrow(model, name, *narrow_matrix(torch.randn(64, 64, device=device), storage))
    return model


@pytest.mark.parametrize("storage", quantised.NARROW, ids=str)
def test_narrow_weights_arrive_while_the_layer_before_computes(storage, streams):
    model = narrow_layers(storage)
    tensors = sum(1 for _ in model[0].parameters())  # a weight, or a weight and its scale
    assert model(torch.zeros(1, 64, device=GPU)).device == GPU
    assert streams == [
        "copying 1 waits for computing",
        *["copy in copying 2"] * tensors,
        "computing waits for copying 2",
        "product in computing",
        "copying 2 waits for computing",  # nothing else may be written there before
        "copying 2 waits for computing",
        *["copy in copying 1"] * tensors,
        "computing waits for copying 1",
        "product in computing",
        "copying 1 waits for computing",
    ]


def test_narrow_weights_on_the_device_are_used_in_place(streams):
    model = narrow_layers(torch.int8, GPU)
    model(torch.zeros(1, 64, device=GPU))
    assert streams == ["product in computing"] * 2, "a copy would be captured, and a wait end the capture"


def test_a_narrow_layer_that_fails_releases_its_stream(streams, monkeypatch):
    def fail(*_):
        raise mm.InterruptProcessingException

    monkeypatch.setattr(quantised, "linear_narrow", fail)
    with pytest.raises(mm.InterruptProcessingException):
        narrow_layers(torch.int8)(torch.zeros(1, 64, device=GPU))
    assert streams[-1] == "copying 2 waits for computing"


@pytest.mark.parametrize("storage", quantised.NARROW, ids=str)
def test_copied_narrow_weights_are_those_of_the_layer(storage):
    """The copies of ComfyUI keep dtypes and numbers: on a CPU, to a device that is named otherwise."""
    weight, scale = narrow_matrix(torch.randn(64, 64), storage)
    with Operations.Linear.fetch(weight, scale, torch.device("cpu", 0)) as copies:
        assert copies[0].dtype == weight.dtype and torch.equal(copies[0], weight)
        assert scale is None and copies[1] is None or torch.equal(copies[1], scale)
        assert copies[0].data_ptr() != weight.data_ptr(), "else this test would prove nothing"
