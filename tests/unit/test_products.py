"""A linear layer with its norm, gate and residual: in one kernel where that may stand in for the layers."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from comfyui_specar.kernels import dispatch
from comfyui_specar.models import products
from comfyui_specar.models.products import product
from comfyui_specar.models.quantised import NarrowLinear, quantise, quantise_groups
from torch import nn

DIM = 32


@pytest.fixture
def kernel(monkeypatch):
    """Calls of the kernel, as on a GPU that runs Triton: here its reference computes."""
    calls, few_rows = [], products.few_rows
    monkeypatch.setattr(dispatch, "runs_triton", lambda device: True)
    monkeypatch.setattr(products, "few_rows", lambda *given: calls.append(given) or few_rows(*given))
    with torch.no_grad():
        yield calls


def layers(dtype=torch.bfloat16, bias=False):
    torch.manual_seed(0)
    norm = nn.RMSNorm(DIM, eps=1e-5)
    nn.init.normal_(norm.weight)
    return nn.Linear(DIM, 2 * DIM, bias=bias).to(dtype), norm.to(dtype), torch.randn(2, 3, DIM).to(dtype)


def by_layers(linear, norm, x):
    gate, value = linear(norm(x)).chunk(2, dim=-1)
    return x + F.silu(gate) * value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_take_one_kernel(kernel, dtype, bias):
    linear, norm, x = layers(dtype, bias)
    assert torch.equal(product(linear, x, norm, gate=True, residual=x), by_layers(linear, norm, x))
    assert torch.equal(product(linear, x, nn.Identity()), linear(x))
    assert len(kernel) == 2 and kernel[0][0].shape == (6, DIM)


@pytest.mark.parametrize("rounding", [quantise, quantise_groups])
def test_narrow_matrices_take_it_too(kernel, rounding):
    linear, norm, x = layers()
    narrow = NarrowLinear(*rounding(linear.weight), None, DIM)
    torch.testing.assert_close(product(narrow, x, norm, True, x), by_layers(narrow, norm, x))
    assert kernel[0][1] is narrow.weight
    rows = torch.randn(products.FEW_WIDE + 1, DIM).bfloat16()
    product(narrow, rows)
    assert len(kernel) == 2, "they are widened where they are multiplied, which pays for longer"


@pytest.mark.parametrize(
    "why", ["fp32", "rows", "elsewhere", "another dtype", "norm elsewhere", "LoRA", "own", "training"]
)
def test_whatever_a_kernel_must_not_stand_in_for_is_called(kernel, why):
    """ComfyUI's layers bring over weights from elsewhere, and change them for a LoRA, when they are called."""
    linear, norm, x = layers(torch.float32 if why == "fp32" else torch.bfloat16)
    called = []
    linear.register_forward_hook(lambda *given: called.append(given))
    wanted = by_layers(linear, norm, x)
    if why == "rows":
        x = torch.randn(products.FEW_WIDE + 1, DIM).bfloat16()
        wanted = by_layers(linear, norm, x)
    if why in ("elsewhere", "norm elsewhere", "another dtype"):
        layer = norm if why == "norm elsewhere" else linear
        kept = layer.weight
        layer.weight = nn.Parameter(kept.to("meta") if "elsewhere" in why else kept.float())
        layer.forward = lambda x: F.linear(x, kept) if layer is linear else F.rms_norm(x, kept.shape, kept, layer.eps)
    if why == "LoRA":
        linear.weight_function = [lambda weight: weight]
    if why == "own":
        own, linear = linear, SimpleNamespace()
        linear = type("Head", (nn.Module,), {"forward": lambda self, x: own(x)})()
    called.clear()
    with torch.set_grad_enabled(why == "training"):
        found = product(linear, x, norm, gate=True, residual=x)
    assert torch.equal(found, wanted) and not kernel
    usable = why in ("rows", "fp32", "norm elsewhere", "training")  # a CPU may multiply by the matrix, see cpu.linear
    assert called or usable


def test_no_kernel_runs_on_a_cpu(monkeypatch):
    linear, norm, x = layers(torch.bfloat16)
    monkeypatch.setattr(products, "few_rows", lambda *given: pytest.fail("there is no Triton for CPUs"))
    with torch.no_grad():
        wanted = linear(norm(x))
        torch.testing.assert_close(product(linear, x, norm), wanted)
