"""Emu3's image tokenizer: its files, and what it does with code vectors and images."""

import pytest
import torch
from comfyui_specar.model_loaders.decoders import movq
from comfyui_specar.model_loaders.detect import load_image_decoder
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint
from safetensors.torch import save_file

from ..support import tiny_emu3 as tiny
from ..support.closeness import fp64
from ..support.tiny import fill

CODES = torch.arange(24).view(2, 3, 4) * 5 % tiny.CODES


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return load_image_decoder(tiny.write_decoder(tmp_path_factory.mktemp("vq")))


def test_every_layout_holds_the_same_tokenizer(tmp_path, decoder):
    assert (decoder.factor, decoder.channels, decoder.name) == (2, 4, "model.safetensors")
    assert decoder.module.config.codebook_size == 32 and decoder.module.config.base_channels == 32
    wanted = decoder.module.state_dict()
    for i, layout in enumerate((tiny.NEW, tiny.OLD)):  # inside a model, in shards: the language model stays unread
        other = load_image_decoder(tiny.write(tmp_path / str(i), shards=3, layout=layout)).module.state_dict()
        assert wanted.keys() == other.keys() and all(torch.equal(other[name], wanted[name]) for name in wanted)
    save_file(tiny.vq_weights(), str(tmp_path / "movq.safetensors"))  # transformers' names in a file of its own
    other = load_image_decoder(tmp_path / "movq.safetensors").module.state_dict()
    assert all(torch.equal(other[name], wanted[name]) for name in wanted)


@torch.inference_mode()
def test_any_code_vectors_are_decoded(decoder):
    latent = decoder.dequantize(CODES)
    assert latent.shape == (2, 4, 3, 4) and torch.equal(latent[1, :, 2, 3], decoder.codebook[CODES[1, 2, 3]])
    pixels = decoder.decode(latent)
    assert pixels.shape == (2, 6, 8, 3) and pixels.min() >= 0 and pixels.max() <= 1 and pixels.std() > 0.05
    with fp64():
        exact = decoder.decode(latent)
        torch.testing.assert_close(exact, decoder.decode_tokens(CODES))
        torch.testing.assert_close(exact[:1], decoder.decode(latent[:1]))  # images of a batch do not mix
    nearby = decoder.decode(latent + 1e-4)  # not a code of the book
    assert 0 < (nearby - pixels).abs().max() < 0.02


@torch.inference_mode()
def test_images_become_the_nearest_codes(decoder):
    pixels = fill("two pictures embedding", (2, 6, 8, 3)).sigmoid()
    latent = decoder.module.encode_latent(decoder.planes(pixels))
    assert latent.shape == (2, 4, 3, 4)
    codebook = latent.movedim(1, -1).reshape(-1, 4) + 0.002 * fill("codes embedding", (24, 4))
    before = decoder.codebook[:24].clone()
    decoder.codebook[:24] = codebook
    tokens = decoder.encode(pixels)
    wanted = torch.cdist(latent.movedim(1, -1).double(), decoder.codebook.double()[None]).argmin(-1)
    assert tokens.dtype == torch.int64 and torch.equal(tokens, wanted) and len(tokens.unique()) > 8
    assert torch.equal(decoder.encode_latent(pixels), decoder.dequantize(tokens))
    decoder.codebook[:24] = before
    with pytest.raises(ValueError, match="multiples of 2"):
        decoder.encode(pixels[:, :5])


def test_sizes_are_read_from_shapes():
    settings = movq.settings_of(movq.native_tensors(tiny.original_vq_weights()))
    assert settings == tiny.VQ | {"double_latent": False}
    with pytest.raises(ValueError, match="incomplete"):
        movq.load(Checkpoint({"quantize.embedding.weight": torch.zeros(2, 2)}), torch.float32)
