"""Our Cosmos tokenizer in two dimensions against the official one in three, on the same random weights, in fp32.

cosmos.safetensors holds what https://github.com/NVIDIA/Cosmos-Tokenizer gave at commit 3584ae7 on a CPU (torch 2.13)
for CausalDiscreteVideoTokenizer with the "DV" configuration, spatial_compression=16, temporal_compression=8, dtype
fp32, channels=32, channels_mult=[1, 1, 2], z_channels=4, num_res_blocks=1, levels=[4, 4, 2], embedding_dim=3, in
evaluation mode, filled with the values that ``fill`` in tests/support/tiny.py derives from the names of its parameters:
  decoded   decoder_jit() of the codes 5, 16, 27, ... (mod 32) as one frame of 2 x 3
  latent    quant_conv(encoder(...)) of two images as videos of one frame
  codes     encoder_jit() of the same
RELEASED are numbers of tensors, numbers in them, and a SHA-256 of names and shapes of its two halves in the sizes that
were released, without buffers; CODEBOOK is a SHA-256 of quantizer.implicit_codebook in fp32.
"""

import hashlib
from pathlib import Path

import pytest
import torch
from comfyui_specar.model_loaders.detect import load_image_decoder
from comfyui_specar.models.networks.cosmos import Cosmos, CosmosConfig
from safetensors.torch import load_file

from ..support.closeness import assert_as_exact, decided
from ..support.reference import digest
from ..support.tiny import fill
from ..support.tiny_simplear import CODES, cosmos_shapes, write_cosmos

OFFICIAL = load_file(Path(__file__).parent / "cosmos.safetensors")
RELEASED = {
    ("decoder.", "post_quant_conv."): (
        178,
        66_148_080,
        "259a942ce8a89712c9210c18b2ab005d7f8b76b48d553ff7d58eb618162df056",
    ),
    ("encoder.", "quant_conv."): (144, 46_324_102, "e9dbe22ef06c836b687fbdf5cd584877ed5c2e31fc333cff31a984855e4ea553"),
}
CODEBOOK = "aa9d181919035807d5576e6f0c4a9d469abb28a52b1d5984ae2d9146e4138044"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_image_decoder(write_cosmos(tmp_path_factory.mktemp("cosmos")))


def test_decoded_pixels(tokenizer):
    codes = torch.tensor([(11 * i + 5) % CODES for i in range(6)]).view(1, 2, 3)
    assert_as_exact(lambda: tokenizer.module.decode(tokenizer.dequantize(codes)), OFFICIAL["decoded"])


def test_encoded_images(tokenizer):
    images = torch.stack([fill(f"{name} embedding", (3, 32, 48)) for name in ("picture", "other")]) / 2
    assert_as_exact(lambda: tokenizer.module.encode_latent(images), OFFICIAL["latent"])
    assert torch.equal(decided(lambda: tokenizer.module.encode(images)).int(), OFFICIAL["codes"])


@pytest.mark.parametrize("half", RELEASED)
def test_released_sizes_have_the_official_names_and_shapes(half):
    shapes = {name: list(shape) for name, shape in cosmos_shapes(CosmosConfig()).items() if name.startswith(half)}
    assert tuple(digest(shapes)) == RELEASED[half]


def test_the_released_codebook():
    with torch.device("meta"):
        module = Cosmos(CosmosConfig(levels=(8, 8, 8, 5, 5, 5), widths=(32,)))
    module.post_quant_conv.to_empty(device="cpu")  # its device is where the codes are wanted
    codebook = module.codebook()
    assert codebook.shape == (64000, 6) and codebook.dtype == torch.float32
    assert hashlib.sha256(codebook.numpy().tobytes()).hexdigest() == CODEBOOK
