"""For files of the released sizes, whose names and shapes are on the meta device: no memory holds them."""

import pytest
import torch
from comfyui_specar.model_loaders.decoders import image_decoder
from comfyui_specar.model_loaders.families import language_models


@pytest.fixture
def nothing_is_read(monkeypatch):
    """Loaders take tensors on the meta device, and check that each has its place and its shape, not its values."""
    monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.ones(()))
    monkeypatch.setattr(torch.Tensor, "any", lambda tensor: True)


@pytest.fixture
def every_tensor_has_its_place(monkeypatch):
    """Loaders do not fill their modules, and leave out no tensor of a file: each has its place, and its shape."""

    def check(module, found, *_):
        wanted = module.state_dict()
        assert wanted.keys() == found.keys()
        for name, parts in found.items():
            parts = parts if isinstance(parts, tuple) else (parts,)
            rows = [sum(len(part) for part in parts)] if parts[0].ndim else []
            assert [*rows, *parts[0].shape[1:]] == list(wanted[name].shape), name
        return module

    for module in (language_models, image_decoder):
        monkeypatch.setattr(module, "load_weights", check)
