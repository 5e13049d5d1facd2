"""Automatic precision on a CPU: bf16 for large models of token ids, where the processor multiplies faster in it."""

import comfy.model_management as mm
import pytest
import torch
from comfyui_specar.kernels import cpu
from comfyui_specar.nodes.comfy_runtime import models as runtime
from torch import nn


def dtype_of(nodes, run, name: str) -> torch.dtype:
    return run(nodes["SpecARLoadCheckpoint"], model_name=name, dtype="auto", grid="auto").result[0].model.dtype


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("large", [True, False])
def test_a_large_model_takes_bf16_where_that_is_faster(tiny, nodes, run, monkeypatch, large, faster):
    monkeypatch.setattr(runtime, "LARGE", 1 if large else 10**9)
    monkeypatch.setattr(runtime, "bf16_is_faster", lambda: faster)
    assert dtype_of(nodes, run, "tiny") == (torch.bfloat16 if large and faster else torch.float32)


def test_continuous_models_and_a_user_who_forces_fp32_are_left_in_fp32(tiny, continuous, nodes, run, monkeypatch):
    monkeypatch.setattr(runtime, "LARGE", 1)
    monkeypatch.setattr(runtime, "bf16_is_faster", lambda: True)
    assert dtype_of(nodes, run, "vectors") == torch.float32
    monkeypatch.setattr(mm, "FORCE_FP32", True)
    assert dtype_of(nodes, run, "tiny") == torch.float32


@pytest.mark.parametrize(("slow", "faster"), [(torch.float32, True), (torch.bfloat16, False)])
def test_the_trial_tells_the_faster_dtype(monkeypatch, slow, faster):
    """Products in ``slow`` are repeated until they are far slower than the others on any processor."""

    def linear(layer: nn.Module, x: torch.Tensor, own_weights: bool) -> torch.Tensor:
        return [layer(x) for _ in range(200 if x.dtype == slow else 1)][-1]

    monkeypatch.setattr(cpu, "linear", linear)
    assert cpu.bf16_is_faster.__wrapped__() == faster
