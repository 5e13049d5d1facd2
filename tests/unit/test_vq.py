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
