"""Emu3.5's files: what is recognised, which prompts and sizes a model is given, and what is refused in words."""

import shutil

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.decoders import vq
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.model_loaders.families import emu3, emu35
from comfyui_specar.model_loaders.text.tiktoken_file import RankTokenizer
from comfyui_specar.models.vq import VQConfig, VQModel, nearest_codes
from safetensors.torch import load_file, save_file

from ..support import tiny_emu35 as tiny
from ..support.bad_files import refused
from ..support.tiny_emu3 import write_ranks
from ..support.tiny_folder import edited

BEGINNING, OPENING, IMAGE = (tiny.vocabulary()[f"<|{name}|>"] for name in ("extra_203", "image start", "image token"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("model"), shards=2)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def changed(folder, to, **settings):
    """Another folder with the same files but the decoder's, and other settings."""
    return edited(shutil.copytree(folder, to, ignore=shutil.ignore_patterns(tiny.DECODER)), **settings)


@pytest.mark.parametrize(("heads", "word"), [(2, "norm"), (8, "norm"), (3, "attention heads")])
def test_another_number_of_heads_is_refused(tmp_path, folder, heads, word):
    """The norms of the heads tell how wide they are."""
    refused(changed(folder, tmp_path / "model", num_attention_heads=heads), word)


def test_a_language_model_with_the_same_layers_is_refused(tmp_path, folder):
    """As Qwen3, which has no image tokens."""
    path = changed(folder, tmp_path / "Qwen3-8B", vocabulary_map=None)
    refused(path, "Qwen3-8B", "297 ids", "only text", "BAAI/Emu3.5-Image")


def test_models_of_other_families_are_not_taken_for_it(folder):
    shapes = tiny.shapes(tiny.config())
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    assert emu35.recognise(tensors) and not emu3.recognise(tensors)
    norm = "model.layers.0.self_attn.q_norm"
    assert not emu35.recognise(tensors | {f"{norm}.weight": torch.empty(1, 16, device="meta")}), "a Chameleon"
    assert not emu35.recognise(tensors | {f"{norm}.bias": torch.empty(16, device="meta")}), "a LayerNorm"
    assert not emu35.recognise({name: tensor for name, tensor in tensors.items() if "_norm" not in name})
    assert not emu35.recognise({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})


def test_bitsandbytes_copies_are_refused(tmp_path):
    path = tiny.write(tmp_path, decoder=False)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight.absmax"] = torch.ones(4)
    save_file(tensors, str(path / "model.safetensors"))
    refused(path, "quantised", "absmax", "as they were released")


# Prompts


def ids_of(text):
    """Ids of a tiny tokenizer: its printable letters count from the exclamation mark, and a space is 220."""
    return [220 if letter == " " else ord(letter) - 33 for letter in text]


def test_prompts_of_both_branches(model):
    answer = tiny.vocabulary()["<|extra_100|>"]

    def framed(text):
        return [BEGINNING, *ids_of(text), answer, OPENING, *ids_of("4*4"), IMAGE]

    def read(text, name):
        return model.read(model.encode_prompt(text), 1, name, (4, 4)).features[0, :, 0].long().tolist()

    wanted = framed("You are a helpful assistant for t2i task. USER: a {} cup ASSISTANT: ")
    assert read("a {} cup", "positive") == wanted
    assert read("blurry", "negative") == framed("You are a helpful assistant. USER: blurry ASSISTANT: ")
    null = model.prefix.null(torch.zeros(1, 3, 1), (4, 4))[0, :, 0].long().tolist()
    assert null == framed("You are a helpful assistant. USER:  ASSISTANT: ")


def test_the_file_of_ranks_is_read(tmp_path, folder):
    path = write_ranks(tmp_path / "Emu3.5-Image")
    found = emu3.open_tokenizer(path / "model.safetensors", [], emu3.ranked(131072), "BAAI/Emu3.5-Image")
    assert isinstance(found, RankTokenizer) and len(found) == 264 + 3 + 205 + 3 + 131072
    bare = emu3.open_tokenizer(tmp_path / "elsewhere/bare/model.safetensors", [], (), "BAAI/Emu3.5-Image")
    with pytest.raises(FileNotFoundError, match=r"emu3\.tiktoken.*BAAI/Emu3\.5-Image"):
        bare.ids("a")


# Sizes


def test_sizes_of_the_released_model(tmp_path, folder):
    path = changed(folder, tmp_path / "Emu3.5-Image", specar=None)
    model = load_model(path)
    assert model.grid == (55, 73) and model.grids == emu35.SIZES and model.defaults.cfg == 5.0
    assert load_model(path, grid=(32, 32)).grid == (32, 32)
    refused(path, "60 x 60", "64 x 64", grid=(60, 60))
    with pytest.raises(ValueError, match=r"1024 x 768 pixels.*nearest"):
        model.layout(48, 64)
    assert load_model(changed(folder, tmp_path / "Emu3.5")).defaults.cfg == 2.0


# The image decoder


def test_the_code_of_the_largest_product():
    codes = torch.tensor([[1.0, 0.0], [3.0, 0.5], [0.0, 1.0]])
    latent = torch.tensor([[1.0, 0.1], [0.1, 2.0]]).T.reshape(1, 2, 1, 2)
    assert nearest_codes(latent, codes).tolist() == [[[0, 2]]]
    assert nearest_codes(latent, codes, by_product=True).tolist() == [[[1, 2]]]


def test_large_codebooks_are_compared_in_parts(monkeypatch):
    latent, codes = torch.randn(1, 4, 6, 5), torch.randn(50, 4)
    wanted = nearest_codes(latent, codes)
    monkeypatch.setattr("comfyui_specar.models.vq._PAIRS", 120)
    assert torch.equal(nearest_codes(latent, codes), wanted)


def test_which_decoders_encode_by_products(tmp_path):
    assert api.load_image_decoder(tiny.write_decoder(tmp_path / "ibq")).module.config.by_product
    (tmp_path / "ibq/config.json").unlink()
    assert not api.load_image_decoder(tmp_path / "ibq/model.safetensors").module.config.by_product
    with torch.device("meta"):
        tensors = VQModel(VQConfig(131072, 16, (1, 2), 32, 16, 1)).state_dict()
    assert vq.config_of(tensors).by_product


def test_a_decoder_of_another_family_is_not_attached(tmp_path):
    path = tiny.write(tmp_path / "model", decoder=False)
    assert load_model(path).codebook is None
    tiny.write_decoder(path / tiny.DECODER, codes=16)
    assert load_model(path).codebook is None
