"""What every image decoder is asked alike: images, batches, half precision, and files that cannot be used."""

import re
from pathlib import Path

import pytest
import torch
from comfyui_specar.model_loaders.decoders import KINDS
from comfyui_specar.model_loaders.decoders.image_decoder import ImageDecoder
from comfyui_specar.model_loaders.detect import load_image_decoder, load_model
from safetensors.torch import load_file, save_file

from ..support import tiny_chameleon, tiny_emu3, tiny_emu35, tiny_mar, tiny_simplear
from ..support.bad_files import refused
from ..support.closeness import fp64
from ..support.tiny import fill, vq_weights


def saved(path, tensors):
    save_file(tensors, str(path))
    return path


WRITE = {  # (folder) -> the file
    "LlamaGen's VQGAN": lambda folder: saved(folder / "vq.safetensors", vq_weights()),
    "Chameleon's VQGAN": lambda folder: tiny_chameleon.write_vqgan(folder / "vqgan.safetensors"),
    "Emu3.5's IBQ": lambda folder: tiny_emu35.write_decoder(folder) / "model.safetensors",
    "Emu3's MoVQ": lambda folder: tiny_emu3.write_decoder(folder) / "model.safetensors",
    "MoVQGAN": lambda folder: saved(folder / "movqgan_270M.safetensors", tiny_chameleon.movq_weights()),
    "Cosmos": lambda folder: tiny_simplear.write_cosmos(folder, ("autoencoder",)) / "autoencoder.safetensors",
    "KL": lambda folder: tiny_mar.write_kl_vae(folder) or folder / "kl16.safetensors",
}


@pytest.fixture(scope="module", params=WRITE)
def file(request, tmp_path_factory) -> Path:
    """The file of a kind, which tests must not change."""
    return WRITE[request.param](tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def decoder(file):
    return load_image_decoder(file)


def images(decoder):
    return fill("two pictures embedding", (2, 2 * decoder.factor, 3 * decoder.factor, 3)).sigmoid()


def test_one_kind_recognises_a_file(file):
    assert len([kind for kind in KINDS if kind.recognise(load_file(file))]) == 1


@torch.inference_mode()
def test_images_become_latents_and_images_again(decoder):
    pixels = images(decoder)
    latent = decoder.encode_latent(pixels)
    assert latent.shape == (2, decoder.channels, 2, 3) and latent.dtype == torch.float32
    back = decoder.decode(latent)
    assert back.shape == pixels.shape and back.dtype == torch.float32 and 0 <= back.min() < back.max() <= 1
    if isinstance(decoder, ImageDecoder):
        tokens = decoder.encode(pixels)
        assert tokens.dtype == torch.int64 and 0 <= tokens.min() <= tokens.max() < decoder.codes
        assert torch.equal(decoder.dequantize(tokens), latent) and torch.equal(decoder.decode_tokens(tokens), back)
        assert torch.equal(decoder.codebook[tokens].movedim(-1, 1), latent)
    assert decoder.decode(latent[:1, :, :1, :2]).shape == (1, decoder.factor, 2 * decoder.factor, 3)


@fp64()
@torch.inference_mode()
def test_images_of_a_batch_do_not_mix(decoder):
    latent = fill("latents embedding", (2, decoder.channels, 2, 3))
    torch.testing.assert_close(decoder.decode(latent)[1:], decoder.decode(latent[1:]))


def test_sides_that_are_no_whole_tokens(decoder):
    with pytest.raises(ValueError, match=rf"multiples of {decoder.factor}.*Resize"):
        decoder.encode_latent(torch.rand(1, 2 * decoder.factor, 3 * decoder.factor + 1, 3))


def test_half_precision(file, decoder):
    coarse = load_image_decoder(file, dtype=torch.bfloat16)
    assert coarse.dtype == torch.bfloat16
    latent = decoder.encode_latent(images(decoder))
    assert (coarse.decode(latent) - decoder.decode(latent)).abs().mean() < 0.02


def test_spoilt_files_are_refused(file, tmp_path):
    """Every third of the tensors that each part of a decoder begins and ends with."""
    tensors, path = load_file(file), tmp_path / file.name
    ends = re.compile(r"conv_in|block_1\.|mid\.0\.|norm_out|conv_out|quant_conv")
    names = list(filter(ends.search, tensors))
    for name in names[::3]:
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, str(path))
        refused(path, path.name, loader=load_image_decoder)
    name = next(name for name in names if name.startswith("decoder.") and name.endswith("weight"))
    spoilt = tensors[name].clone()
    spoilt.view(-1)[-1] = torch.nan
    save_file(tensors | {name: spoilt}, str(path))
    refused(path, path.name, "NaN or infinite", loader=load_image_decoder)
    save_file(tensors | {"decoder.surplus.weight": torch.zeros(1)}, str(path))
    refused(path, "1 unknown", "decoder.surplus", loader=load_image_decoder)
    for part in ("encoder.", "decoder."):
        half = {name: tensor for name, tensor in tensors.items() if not name.startswith(part)}
        save_file(half, str(path))
        refused(path, path.name, loader=load_image_decoder)


def test_a_decoder_is_no_model(file):
    refused(file, file.name, "image decoder", "Load AR Image Decoder", loader=load_model)
