"""A linear layer with its norm, gate and residual: in one kernel where that may stand in for the layers."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from comfyui_specar.device import batch_invariant, dispatch
from comfyui_specar.models.networks import products
from comfyui_specar.models.networks.backbone import Backbone, BackboneConfig
from comfyui_specar.models.networks.positions import Rotation
from comfyui_specar.models.networks.products import product
from comfyui_specar.models.networks.quantised import NarrowLinear, quantise, quantise_groups
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


@pytest.mark.parametrize(
    ("rows", "asked", "wide", "narrow"),
    [
        (16, False, True, True),
        (17, False, False, True),
        (512, False, False, True),
        (513, False, False, False),
        (513, True, True, True),
    ],
)
def test_which_rows_take_it(kernel, rows, asked, wide, narrow):
    """A narrow matrix is not widened in memory for any step; whatever asks for batch invariance gets it."""
    linear, norm, _ = layers()
    x, narrow_linear = torch.randn(rows, DIM).bfloat16(), NarrowLinear(*quantise(linear.weight), None, DIM)
    for layer, takes_it in ((linear, wide), (narrow_linear, narrow)):
        kernel.clear()
        with batch_invariant.asking(asked):
            found = product(layer, x, norm, gate=True)
        torch.testing.assert_close(found, by_layers(layer, norm, x) - x, atol=0.05, rtol=0.02)
        assert len(kernel) == takes_it


@pytest.mark.parametrize("in_place", [False, True])
def test_many_rows_are_added_to_by_the_product_itself(kernel, in_place):
    """In fp32 before anything is rounded."""
    linear, norm, _ = layers()
    x, residual = (torch.randn(2, 40, size).bfloat16() for size in (DIM, 2 * DIM))
    before = residual.clone()
    found = product(linear, x, norm, residual=residual, in_place=in_place)
    wanted = residual.float().flatten(0, 1).addmm(norm(x).float().flatten(0, 1), linear.weight.float().t())
    torch.testing.assert_close(found.flatten(0, 1), (wanted - residual.flatten(0, 1) + before.flatten(0, 1)).bfloat16())
    assert torch.equal(residual, found if in_place else before) and not kernel


def test_a_pass_leaves_what_it_is_given(kernel):
    """Its layers overwrite what they have made, and compute what layers do that overwrite nothing."""
    torch.manual_seed(0)
    model = Backbone(BackboneConfig(DIM, 2, 2, DIM, 8)).bfloat16().eval()
    x = torch.randn(1, 20, DIM).bfloat16()
    rotation, before = Rotation(*torch.randn(2, 1, 20, DIM // 4)), x.clone()
    found = model(x, rotation)
    assert torch.equal(x, before) and not kernel
    torch.testing.assert_close(found, model.float()(x.float(), rotation).bfloat16(), atol=0.05, rtol=0.05)


def test_no_norm_of_a_pass_is_torchs_own(kernel, monkeypatch):
    """In some versions the order of its sums depends on the number of rows: SJD would not give next token's image."""
    rms_norm, called = products.rms_norm, []
    monkeypatch.setattr(products, "rms_norm", lambda *given: called.append(given) or rms_norm(*given))
    model = Backbone(BackboneConfig(DIM, 2, 2, DIM, 8, post_norms=True)).bfloat16().eval()
    x, rotation = torch.randn(1, 3, DIM).bfloat16(), Rotation(*torch.randn(2, 1, 3, DIM // 4))
    model(x, rotation)
    assert len(called) == sum(isinstance(layer, nn.RMSNorm) for layer in model.modules()) == 9


@pytest.mark.parametrize("why", ["fp32", "elsewhere", "another dtype", "LoRA", "own", "training"])
def test_whatever_a_kernel_must_not_stand_in_for_is_called(kernel, why):
    """ComfyUI's layers bring over weights from elsewhere, and change them for a LoRA, when they are called."""
    linear, norm, x = layers(torch.float32 if why == "fp32" else torch.bfloat16)
    called = []
    linear.register_forward_hook(lambda *given: called.append(given))
    wanted = by_layers(linear, norm, x)
    if why in ("elsewhere", "another dtype"):
        kept = linear.weight
        linear.weight = nn.Parameter(kept.to("meta") if why == "elsewhere" else kept.float())
        linear.forward = lambda x: F.linear(x, kept)
    if why == "LoRA":
        linear.weight_function = [lambda weight: weight]
    if why == "own":
        own, linear = linear, SimpleNamespace()
        linear = type("Head", (nn.Module,), {"forward": lambda self, x: own(x)})()
    called.clear()
    with torch.set_grad_enabled(why == "training"):
        found = product(linear, x, norm, gate=True, residual=x)
    assert torch.equal(found, wanted) and not kernel
    usable = why in ("fp32", "training")  # a CPU may multiply by the matrix, see cpu.linear
    assert called or usable


def test_a_norm_that_is_elsewhere_is_called(kernel):
    linear, norm, x = layers()
    wanted, kept = by_layers(linear, norm, x), norm.weight
    norm.weight = nn.Parameter(kept.to("meta"))
    norm.forward = lambda x: F.rms_norm(x, kept.shape, kept, norm.eps)
    assert torch.equal(product(linear, x, norm, gate=True, residual=x), wanted) and len(kernel) == 1


def test_no_kernel_runs_on_a_cpu(monkeypatch):
    linear, norm, x = layers(torch.bfloat16)
    monkeypatch.setattr(products, "few_rows", lambda *given: pytest.fail("there is no Triton for CPUs"))
    with torch.no_grad():
        wanted = linear(norm(x))
        torch.testing.assert_close(product(linear, x, norm), wanted)
