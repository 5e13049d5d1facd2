"""Two rows with large matrices in fp32 on a CPU: multiplied the faster way, which changes no token."""

import comfyui_specar as specar
import pytest
import torch
from comfyui_specar.kernels import steady, two_rows
from comfyui_specar.models import products
from torch import nn


@pytest.fixture
def ways(monkeypatch):
    """What was multiplied the other way; it counts as the faster one."""
    found, transposed = [], steady.transposed
    monkeypatch.setattr(two_rows, "faster", lambda: True)
    monkeypatch.setattr(steady, "transposed", lambda layer, rows: (found.append(layer), transposed(layer, rows))[1])
    return found


def layer(inputs=1024, outputs=512, **options) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=options.pop("bias", False), **options).requires_grad_(False)


@pytest.mark.parametrize("shape", [(2, 1, 1024), (1, 2, 1024), (2, 1024)])
def test_two_rows_are_those_of_the_layer(ways, shape):
    large, x = layer(), torch.randn(shape)
    with torch.inference_mode():
        found = products.product(large, x)
    assert ways == [large] and found.is_contiguous()
    torch.testing.assert_close(found, large(x))


@pytest.mark.parametrize("what", ["one row", "three rows", "bf16", "bias", "small", "patched", "slower"])
def test_all_others_are_multiplied_as_before(ways, monkeypatch, what):
    dtype = torch.bfloat16 if what == "bf16" else torch.float32
    used = layer(outputs=511 if what == "small" else 512, bias=what == "bias", dtype=dtype)
    x = torch.randn({"one row": 1, "three rows": 3}.get(what, 2), 1024, dtype=dtype)
    if what == "patched":
        used.weight_function = [lambda weight: weight]
    if what == "slower":
        monkeypatch.setattr(two_rows, "faster", lambda: False)
    if what == "bf16":  # has its own choice between the two
        monkeypatch.setattr(steady, "plan", lambda *_: steady.Plan(steady.called, 4))
        monkeypatch.setattr(steady, "_plans", {})
    with torch.inference_mode():
        found = products.product(used, x)
    assert ways == []
    torch.testing.assert_close(found, used(x))


@pytest.mark.parametrize("ratio", [1.1, 1.4])
def test_noise_does_not_decide(monkeypatch, ratio):
    """It is used where it is faster by far, once as fast as it can be."""
    clock = iter([t for n in range(two_rows.TRIES) for t in (0, ratio * (1 + n), 0, 1 + 5 * n)])
    monkeypatch.setattr(two_rows.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(two_rows, "TRIED", (4, 4))
    assert two_rows.faster.__wrapped__() == (ratio > two_rows.GAIN)


def test_tokens_are_the_same_either_way(ways, monkeypatch):
    """Of the bundled model, whose matrices are small, as if they were large."""
    monkeypatch.setattr(two_rows, "LEAST", 1)
    model = specar.load_model(specar.bundled("default"), device="cpu", dtype=torch.float32)
    prompt, tokens = model.encode_prompt("cat, noto, on a yellow background"), []
    for faster in (True, False):
        monkeypatch.setattr(two_rows, "faster", lambda faster=faster: faster)
        tokens.append(specar.sample(model, prompt, specar.methods.NextToken(), cfg=2, seed=3).latent)
    assert ways and torch.equal(*tokens)
