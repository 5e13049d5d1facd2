"""A GPU simulated by tensors without data, which refuse to be mixed across devices as real ones do."""

import comfy.model_management as mm
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfyui_specar.device import dispatch
from comfyui_specar.models.networks import prefix
from comfyui_specar.nodes.comfy_runtime import runs
from torch._subclasses.fake_tensor import FakeTensorMode

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


def load_half(module: torch.nn.Module) -> None:
    """Load one half of a module onto the simulated GPU, as ComfyUI does with what does not fit."""
    patcher = ModelPatcher(module, GPU, CPU)
    patcher.load(GPU, lowvram_model_memory=patcher.model_size() // 2)
    runs.bring_the_rest(module, GPU)
    assert {parameter.device for parameter in module.parameters()} == {GPU, CPU}


@pytest.fixture
def gpu(monkeypatch):
    """Within it, tensors have no data, and may be moved to a GPU that is not there."""
    monkeypatch.setattr(mm, "device_supports_non_blocking", lambda device: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(dispatch, "runs_triton", lambda device: False)
    monkeypatch.setattr(prefix, "check_class", lambda number, classes: None)  # it reads what such tensors have not
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)
