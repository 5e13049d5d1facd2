"""A few rows in fp32 on a CPU: multiplied the fastest way, which changes no token."""

import comfyui_specar as specar
import pytest
import torch
import torch.nn.functional as F
from comfyui_specar.kernels import fp32
from comfyui_specar.models import products
from torch import nn

needs_onednn = pytest.mark.skipif(not fp32.has_onednn(), reason="this torch has no oneDNN")
OTHERS = [fp32.transposed, pytest.param(fp32.onednn, marks=needs_onednn)]


@pytest.fixture
def used(monkeypatch):
    """What ``routine`` was asked for: (power, large); it says F.linear."""
    asked = []
    monkeypatch.setattr(fp32, "routine", lambda *what: asked.append(what) or F.linear)
    return asked


def layer(inputs=1024, outputs=512, **options) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=options.pop("bias", False), **options).requires_grad_(False)


@pytest.mark.parametrize("routine", OTHERS)
@pytest.mark.parametrize("shape", [(1024,), (1, 1024), (2, 1, 1024), (1, 3, 1024), (2, 17, 1024)])
def test_products_are_those_of_the_layer(monkeypatch, routine, shape):
    monkeypatch.setattr(fp32, "routine", lambda *what: routine)
    x, matrix = torch.randn(shape), layer()
    with torch.inference_mode():
        found = products.product(matrix, x)
    assert found.is_contiguous()
    torch.testing.assert_close(found, matrix(x))


@pytest.mark.parametrize(("rows", "power"), [(1, 0), (2, 1), (3, 1), (4, 2), (34, 5), (128, 7)])
@pytest.mark.parametrize("large", [False, True])
def test_each_number_of_rows_and_size_has_its_own_routine(used, rows, power, large):
    with torch.inference_mode():
        products.product(layer(outputs=1024 if large else 1023), torch.randn(rows, 1024))
    assert used == [(power, large)]


@pytest.mark.parametrize("what", ["many rows", "bf16", "bias", "patched", "training"])
def test_all_others_are_multiplied_by_the_layer(used, what):
    dtype = torch.bfloat16 if what == "bf16" else torch.float32
    matrix = layer(bias=what == "bias", dtype=dtype)
    x = torch.randn(129 if what == "many rows" else 2, 1024, dtype=dtype)
    if what == "patched":
        matrix.weight_function = [lambda weight: weight]
    with torch.set_grad_enabled(what == "training"):
        torch.testing.assert_close(products.product(matrix, x), matrix(x))
    assert used == []


@pytest.mark.parametrize(
    ("power", "seconds", "expected"),
    [
        (1, (10, 11, 9), "onednn"),  # noise does not decide
        (1, (10, 13, 9), "linear"),
        (1, (10, 5, 7), "transposed"),
        (2, (10, 11), "onednn"),
        (2, (10, 13), "linear"),
        (2, (10,), "linear"),  # this torch has no oneDNN
    ],
)
def test_torchs_own_routine_is_replaced_where_another_is_faster(monkeypatch, power, seconds, expected):
    def shortest(ways, count, tries):
        for way in ways.values():
            for number in range(count):
                way(number)
        return dict(zip(ways, seconds, strict=True))

    def onednn(rows, weight):
        return rows @ weight.T

    monkeypatch.setattr(fp32, "onednn", onednn)
    monkeypatch.setattr(fp32.trials, "shortest", shortest)
    monkeypatch.setattr(fp32, "has_onednn", lambda: len(seconds) > 1)
    monkeypatch.setattr(fp32, "TRIED", {False: (4, 4)})
    monkeypatch.setattr(fp32, "WEIGHTS", {False: 64})
    assert fp32.routine.__wrapped__(power, False).__name__ == expected


@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_a_torch_with_another_onednn_does_without(monkeypatch, error):
    def other(*given):
        raise error

    monkeypatch.setattr(fp32, "onednn", other)
    assert not fp32.has_onednn.__wrapped__()


@pytest.mark.parametrize("routine", OTHERS)
@pytest.mark.parametrize("name", ["next_token", "sjd"])
def test_tokens_are_the_same_either_way(monkeypatch, routine, name):
    model = specar.load_model(specar.bundled("default"), device="cpu", dtype=torch.float32)
    method = {"next_token": specar.methods.NextToken(), "sjd": specar.methods.SJD(window=16)}[name]
    prompt, tokens, used = model.encode_prompt("cat, noto, on a yellow background"), [], set()
    for way in (routine, F.linear):
        monkeypatch.setattr(fp32, "routine", lambda *what, way=way: used.add(what[0]) or way)
        tokens.append(specar.sample(model, prompt, method, cfg=2, seed=3).latent)
    assert used and torch.equal(*tokens)
