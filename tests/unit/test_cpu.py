"""Linear layers on a CPU: a few rows in fp32 are multiplied by a faster routine, which changes no token."""

import comfyui_specar as specar
import pytest
import torch
from comfyui_specar.kernels import cpu
from comfyui_specar.models import products
from torch import nn


def layer(inputs=1024, outputs=512, **options) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=options.pop("bias", False), **options).requires_grad_(False)


@pytest.fixture(params=["oneDNN", "without"])
def onednn(request, monkeypatch):
    """Also as on a processor without oneDNN's product."""
    if request.param == "without":
        monkeypatch.setattr(cpu, "has_onednn", lambda: False)
    elif not cpu.has_onednn():
        pytest.skip("this torch has no oneDNN")


@pytest.mark.parametrize("shape", [(1024,), (1, 1024), (2, 1, 1024), (1, 3, 1024), (2, 17, 1024), (128, 1024)])
def test_products_are_those_of_the_layer(onednn, monkeypatch, shape):
    x, matrix = torch.randn(shape), layer()
    wanted = matrix(x)
    monkeypatch.setattr(nn.Linear, "forward", lambda *_: pytest.fail("the layer was called"))
    with torch.inference_mode():
        found = products.product(matrix, x)
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("what", ["many rows", "bf16", "bias", "patched", "training"])
def test_all_others_are_multiplied_by_the_layer(monkeypatch, what):
    dtype = torch.bfloat16 if what == "bf16" else torch.float32
    matrix = layer(bias=what == "bias", dtype=dtype)
    x = torch.randn(129 if what == "many rows" else 2, 1024, dtype=dtype)
    if what == "patched":
        matrix.weight_function = [lambda weight: weight]
    monkeypatch.setattr(cpu, "onednn", lambda *_: pytest.fail("another routine"))
    with torch.set_grad_enabled(what == "training"):
        found = products.product(matrix, x)
    torch.testing.assert_close(found, matrix(x))
    assert found.requires_grad == (what == "training" and matrix.weight.requires_grad)


@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_a_torch_with_another_onednn_does_without(monkeypatch, error):
    def other(*given):
        raise error

    monkeypatch.setattr(cpu, "onednn", other)
    assert not cpu.has_onednn.__wrapped__()


@pytest.mark.parametrize("method", [specar.methods.NextToken(), specar.methods.SJD(window=16)], ids=lambda m: m.name)
def test_tokens_are_those_of_torchs_own_routine(onednn, monkeypatch, method):
    model = specar.load_model(specar.bundled("default"), device="cpu", dtype=torch.float32)
    prompt, tokens = model.encode_prompt("cat, noto, on a yellow background"), []
    for few in (cpu.few_fp32_rows, lambda layer, x: False):
        monkeypatch.setattr(cpu, "few_fp32_rows", few)
        tokens.append(specar.sample(model, prompt, method, cfg=2, seed=3).tokens)
    assert torch.equal(*tokens)
