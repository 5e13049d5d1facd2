"""Devices whose memory ComfyUI knows little of, and options of its command line."""

import comfy.model_management as mm
import pytest
import torch
from comfy.cli_args import args
from comfyui_specar.device import graphs, switches
from comfyui_specar.nodes.comfy_runtime import runs
from comfyui_specar.nodes.comfy_runtime.memory import is_out_of_memory
from comfyui_specar.nodes.comfy_runtime.models import NO_GRAPHS, open_model
from comfyui_specar.nodes.comfy_runtime.vae import ARVae
from comfyui_specar.samplers.methods.next_token import NextToken

SHORT = {  # where -> what it says
    "CUDA": mm.OOM_EXCEPTION("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "MPS": RuntimeError(
        "MPS backend out of memory (MPS allocated: 8.20 GB, other allocations: 384.00 KB, max allowed: "
        "9.07 GB). Tried to allocate 1.00 GB on private pool."
    ),
    "DirectML": RuntimeError(
        "Could not allocate tensor with 1073741824 bytes. There is not enough GPU video memory available!"
    ),
    "CPU": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "Windows": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you "
        "tried to allocate 4000000000000 bytes."
    ),
}


OTHERS = [
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    ValueError("out of memory"),
    RuntimeError("Expected all tensors to be on the same device"),
]


def test_errors_that_mean_too_little_memory_and_others():
    assert all(map(is_out_of_memory, SHORT.values())) and not any(map(is_out_of_memory, OTHERS))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)  # what this version of torch says
    assert is_out_of_memory(caught.value)


def test_what_comfyui_knows_counts(monkeypatch):
    monkeypatch.setattr(mm, "is_oom", lambda error: "error 2" in str(error), raising=False)
    assert is_out_of_memory(RuntimeError("error 2")) and not is_out_of_memory(RuntimeError("error 3"))


def test_other_errors_while_decoding_are_reported(tiny, monkeypatch):
    monkeypatch.setattr(type(tiny[0].decoder.decoder), "decode", lambda *_: torch.ones(2) + torch.ones(3))
    with pytest.raises(RuntimeError, match="must match"):
        ARVae(tiny[0].decoder).decode(torch.randn(1, 8, 4, 4))


def test_directml_has_more_than_comfyui_says(tiny, positive, monkeypatch):
    """It takes 1 GiB for every GPU there, whose size torch-directml does not tell."""
    monkeypatch.setattr(mm, "get_total_memory", lambda device=None, torch_total_too=False: 2**30)
    monkeypatch.setattr(NextToken, "run_bytes", lambda self, request: 2**31)
    run = tiny[0], None, NextToken(), tiny[0].model.request(positive)
    with pytest.raises(runs.TooLargeError), runs.place(*run):
        pass
    monkeypatch.setattr(mm, "directml_enabled", True)
    with runs.place(*run):
        pass


@pytest.mark.parametrize("disabled", [None, False, True])
@pytest.mark.parametrize("option", ["disable_cuda_graphs", "disable_comfy_compiler"])
def test_comfyuis_options_against_cuda_graphs_are_obeyed(option, disabled, models, monkeypatch):
    """Only newer ComfyUIs have them."""
    monkeypatch.delenv(switches.NO_GRAPHS, raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    for each in NO_GRAPHS:
        monkeypatch.delattr(args, each, raising=False)
    if disabled is not None:
        monkeypatch.setattr(args, option, disabled, raising=False)
    try:
        open_model("tiny", "auto", None)
        assert graphs.capturable(torch.device("cuda:0")) is not bool(disabled)
    finally:
        graphs.allow(True)
