"""Linear layers on a CPU: products with packed weights, whose rows do not depend on each other."""

import pytest
import torch
import torch.nn.functional as F
from comfyui_specar.device import cpu
from comfyui_specar.models.networks import precision, products
from torch import nn

COUNTS = (1, 2, 3, 4, 5, 7, 8, 16, 31, 33, 36, 64, 65, 127, 128, 129, 140)
SIZES = [(96, 100, True), (192, 1024, False), (768, 2304, True), (2048, 768, False)]  # inputs, outputs, with a bias
PARTS = slice(300), slice(300, 500), slice(500, None)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def made(inputs=96, outputs=100, bias=False, dtype=torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias, dtype=dtype).requires_grad_(False)


def packs(dtype) -> bool:
    """Can oneDNN pack weights of it on this processor?"""
    try:
        cpu.pack(made(dtype=dtype))
    except (RuntimeError, AttributeError):
        return False
    return True


@pytest.fixture
def fresh(monkeypatch):
    """Nothing is known of products."""
    monkeypatch.setattr(cpu, "_blocks", {})
    monkeypatch.setattr(cpu, "_refused", set())


@pytest.fixture(params=["packed", "without"])
def onednn(request, fresh, monkeypatch):
    """Also as on a processor, or with a torch, that has no such product."""
    if request.param == "without":
        monkeypatch.setattr(cpu, "pack", refuse)
    return request.param == "packed"


def refuse(layer, error=RuntimeError):
    raise error("could not create a primitive descriptor")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_row_of_a_product_does_not_depend_on_the_others(onednn, dtype, size):
    layer, x = made(*size, dtype), torch.randn(1, 140, size[0]).to(dtype)
    bias = None if layer.bias is None else layer.bias.double()
    exact = F.linear(x.double(), layer.weight.double(), bias)
    largest = F.linear(x.abs().double(), layer.weight.abs().double(), bias).abs()  # of any sum of its products
    with torch.inference_mode():
        together = products.product(layer, x)
        assert cpu.is_packed(layer) == (onednn and packs(dtype))
        roundings = size[0] * torch.finfo(torch.float32).eps + 2 * torch.finfo(dtype).eps  # of sums, and of the result
        assert ((together - exact).abs() <= roundings * largest).all()
        if not cpu.is_packed(layer) and dtype == torch.float32:
            return  # torch's own products in fp32 do depend on the number of rows
        for count in COUNTS:
            for first in (0, 5):
                part = products.product(layer, x[:, first : first + count])
                assert torch.equal(part, together[:, first : first + count]), count


@pytest.mark.parametrize("shape", [(96,), (0, 96), (1, 96), (2, 1, 96), (2, 17, 96), (1, 130, 96)])
def test_a_product_has_the_shape_of_its_input(onednn, shape):
    x, layer = torch.randn(shape), made()
    wanted = layer(x)
    with torch.inference_mode():
        found = products.product(layer, x)
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, TypeError])
def test_what_onednn_refuses_is_asked_once(fresh, monkeypatch, error):
    asked = []
    monkeypatch.setattr(cpu, "pack", lambda layer: (asked.append(layer), refuse(layer, error)))
    layer, x = made(), torch.randn(2, 96)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(products.product(layer, x), layer(x))
        assert len(asked) == 1
        products.product(made(96, 50), x)
    assert len(asked) == 2, "other shapes are asked for"


@pytest.mark.parametrize("dtype", list(filter(packs, DTYPES)))
class TestPacked:
    @pytest.fixture
    def layer(self, dtype):
        layer = made(dtype=dtype)
        layer.was = layer.weight.clone()
        with torch.inference_mode():
            layer.x = torch.randn(2, 96).to(dtype)
            layer.gives = products.product(layer, layer.x)
        assert cpu.is_packed(layer) and not layer.weight.requires_grad
        return layer

    def test_it_is_the_only_copy_and_keeps_every_number(self, layer):
        assert layer.weight.nbytes == layer.was.nbytes and layer.weight.shape == layer.was.shape
        assert cpu.is_packed(layer.to("cpu"))
        cpu.unpack(nn.Sequential(nn.ReLU(), layer))
        assert torch.equal(layer.weight, layer.was) and not layer.weight.is_inference()

    def test_every_parameter_has_a_storage_and_its_size(self, layer):
        for weight in (*layer.parameters(), *layer.state_dict().values()):
            weight.untyped_storage()  # ComfyUI 0.18 to 0.22 ask every model's for marks
        assert sum(weight.nbytes for weight in layer.parameters()) == layer.was.nbytes

    def test_a_use_that_is_no_product_of_ours_is_seen(self, layer):
        with torch.inference_mode():
            assert layer(layer.x).isnan().all() and not layer.gives.isnan().any()

    @pytest.mark.parametrize("why", ["training", "patched"])
    def test_a_layer_that_must_be_called_gets_its_own_again(self, layer, why):
        if why == "patched":
            layer.weight_function = [lambda weight: weight]
        with torch.set_grad_enabled(why == "training"):
            found = products.product(layer, layer.x.clone())
        assert torch.equal(layer.weight, layer.was)
        torch.testing.assert_close(found, layer(layer.x.clone()))

    def test_another_weight_is_packed_anew(self, layer):
        layer.weight = nn.Parameter(2 * layer.was, requires_grad=False)
        with torch.inference_mode():
            assert torch.equal(products.product(layer, layer.x), 2 * layer.gives)
        assert cpu.is_packed(layer)

    def test_others_that_share_the_weight_keep_it(self, layer):
        weight = nn.Parameter(layer.was.clone(), requires_grad=False)
        table, layer.weight = nn.Embedding.from_pretrained(weight), weight
        with torch.inference_mode():
            products.product(layer, layer.x)
        assert torch.equal(table(torch.arange(100)), layer.was)


def test_gradients_flow_through_the_layer():
    layer, x = made().requires_grad_(True), torch.randn(2, 96)
    products.product(layer, x).sum().backward()
    assert layer.weight.grad is not None
    with torch.inference_mode():
        products.product(layer, x)
    assert not cpu.is_packed(layer), "an optimiser may hold it"


def test_precisions_are_compared_with_packed_weights(fresh, monkeypatch):
    asked, pack = set(), cpu.pack
    monkeypatch.setattr(cpu, "pack", lambda layer: (asked.add(layer.weight.dtype), pack(layer)))
    precision.bf16_is_faster.__wrapped__()
    assert asked == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_are_found_for_every_number_of_threads(fresh, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            cpu.linear(made(dtype=torch.bfloat16), torch.randn(2, 96).bfloat16(), own_weights=True)
    finally:
        torch.set_num_threads(before)
    assert [kind[-1] for kind in cpu._blocks] == [threads]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_that_are_tried_tell_the_order_of_their_sums(dtype, bias):
    """Rounding to 16 bits hides it in nearly every product of other numbers."""

    def differ(layer, rows) -> float:
        a, b, c = (F.linear(rows[:, part].float(), layer.weight[:, part].float()) for part in PARTS)
        return ((a + b + c).to(dtype) != (a + (b + c)).to(dtype)).float().mean().item()

    layer, x = made(768, 96, bias, dtype), torch.randn(128, 768).to(dtype)
    with torch.inference_mode():
        other, rows = cpu.trial(layer, 768, dtype)
        assert other.weight.shape == layer.weight.shape and (other.bias is None) == (layer.bias is None)
        assert differ(other, rows) > 0.1 and (dtype == torch.float32 or differ(layer, x) < 0.01)


def test_a_layer_without_weights_is_called_in_blocks(fresh):
    given = []

    class Head(nn.Module):
        def forward(self, rows):
            given.append(len(rows))
            return rows.clone()

    x = torch.arange(260.0).view(130, 2).bfloat16()
    with torch.inference_mode():
        assert torch.equal(products.product(Head(), x), x)
        assert given[-2:] == [128, 4]
        given.clear()
        products.product(Head(), x.float())
        assert given == [130], "fp32: one call, as no blocks are known to help"
