"""The VQ tokenizer: published sizes and names, shapes, and what quantisation must satisfy."""

import pytest
import torch
from comfyui_specar.models.vq import VQConfig, VQModel

from ..support.closeness import fp64

SMALL = VQConfig(codebook_size=64, codebook_dim=8, ch_mult=(1, 2), base_channels=32, z_channels=64, num_res_blocks=1)


@pytest.fixture(scope="module")
def model() -> VQModel:
    torch.manual_seed(0)
    return VQModel(SMALL).eval().requires_grad_(False)


def shapes(config: VQConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in VQModel(config).state_dict().items()}


# 65,536 usage counters of the released files are statistics, not parameters.
@pytest.mark.parametrize(("ch_mult", "millions"), [((1, 1, 2, 2, 4), 71.95), ((1, 2, 2, 4), 70.2)])
def test_released_sizes(ch_mult, millions):
    total = sum(torch.Size(shape).numel() for shape in shapes(VQConfig(ch_mult=ch_mult)).values())
    assert (total + 65536) / 1e6 == pytest.approx(millions, abs=0.05)


def test_released_names():
    keys = shapes(VQConfig())
    expected = {
        "quantize.embedding.weight": (16384, 8),
        "quant_conv.weight": (8, 256, 1, 1),
        "post_quant_conv.weight": (256, 8, 1, 1),
        "decoder.conv_in.weight": (512, 256, 3, 3),
        "decoder.mid.0.conv1.weight": (512, 512, 3, 3),
        "decoder.mid.1.proj_out.weight": (512, 512, 1, 1),
        "decoder.conv_blocks.0.attn.2.norm.weight": (512,),
        "decoder.conv_blocks.0.upsample.conv.weight": (512, 512, 3, 3),
        "decoder.conv_blocks.1.res.0.nin_shortcut.weight": (256, 512, 1, 1),
        "decoder.conv_out.weight": (3, 128, 3, 3),
        "encoder.conv_blocks.0.downsample.conv.weight": (128, 128, 3, 3),
        "encoder.conv_blocks.4.res.1.conv2.weight": (512, 512, 3, 3),
        "encoder.conv_blocks.4.attn.1.q.weight": (512, 512, 1, 1),
        "encoder.conv_out.weight": (256, 512, 3, 3),
    }
    assert {name: keys.get(name) for name in expected} == expected
    assert not [name for name in keys if "conv_blocks.4.upsample" in name or "conv_blocks.4.downsample" in name]
    assert not [
        name
        for name in keys
        if ".attn." in name and "encoder.conv_blocks.4" not in name and "decoder.conv_blocks.0" not in name
    ]


def test_shapes_of_a_round_trip(model):
    pixels = torch.rand(2, 3, 16, 24) * 2 - 1
    tokens = model.encode(pixels)
    assert tokens.shape == (2, 8, 12) and tokens.dtype == torch.int64
    latent = model.dequantize(tokens)
    assert latent.shape == (2, 8, 8, 12)
    assert model.decode(latent).shape == pixels.shape


def test_codes_are_unit_vectors_and_quantise_to_themselves(model):
    with fp64():
        torch.testing.assert_close(model.codebook().norm(dim=1), torch.ones(64))
    tokens = torch.arange(64).view(1, 8, 8)
    scaled = model.dequantize(tokens) * 3.7  # only the direction counts
    assert torch.equal(model.quantize_latent(scaled), tokens)


def test_nearest_code_is_chosen(model):
    latent = torch.randn(1, 8, 5, 5)
    unit = torch.nn.functional.normalize(latent, dim=1)[0].flatten(1).T
    distances = torch.cdist(unit.double(), model.codebook().double())
    assert torch.equal(model.quantize_latent(latent).flatten(), distances.argmin(1))


def test_sides_that_do_not_fit_are_named(model):
    with pytest.raises(ValueError, match="17 x 16 pixels.*multiples of 2"):
        model.encode(torch.zeros(1, 3, 16, 17))
