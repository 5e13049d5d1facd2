"""Lumina-mGPT 2.0: told from its predecessor by its vocabulary, prompted as it was trained, refused in words."""

import shutil

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import find_image_decoder
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.model_loaders.text.chameleon_prompts import Vocabulary
from safetensors.torch import load_file, save_file

from ..support.bad_files import refused
from ..support.tiny_chameleon import movq_weights, vocabulary, write
from ..support.tiny_folder import byte_tokenizer, edited

IDS = vocabulary(32, "lumina2")
FIRST_WORD, BEGIN, ROW_END, TURN_END = (
    IDS[name] for name in ("<|endoftext|>", "<racm3:break>", "<reserved08799>", "<reserved08706>")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("models"), kind="lumina2")


@pytest.fixture(scope="module")
def model(folder):
    return api.load_model(folder)


@pytest.fixture
def copy(folder, tmp_path):
    """A copy of the folder, under another name."""
    return lambda name="Lumina": shutil.copytree(folder, tmp_path / name)


def prompt_of(model, grid=(4, 4)):
    return model.read(model.encode_prompt("a fox"), 1, "positive", grid).features[0, :, 0].long().tolist()


# What it is


@pytest.mark.parametrize("name", ["Lumina-mGPT-2.0", "Lumina-mGPT-2.0-Omni", "mine"])
def test_every_name_means_the_area_of_768_pixels(copy, name):
    folder = edited(copy(name), specar=None)
    (folder / "movqgan_270M.ckpt").unlink()
    model = api.load_model(folder)
    assert model.grid == (96, 96) and len(model.grids) == 73 and model.pixels_per_token == 8
    assert {(96, 96), (64, 144), (144, 64), (48, 192)} <= set(model.grids)
    assert all(rows % 4 == cols % 4 == 0 and rows * cols <= 9216 for rows, cols in model.grids)
    with pytest.raises(ValueError, match="1024 x 1024 pixels.*128 x 128 tokens.*768 x 768"):
        model.layout(128, 128)


def test_released_ids_without_the_names(tmp_path):
    """They are the ones that the authors' code has as literals."""
    words = Vocabulary.of({"vocabulary_map": {"IMGIMGAZ": 4}}, 171385, tmp_path / "config.json")
    assert (words.images, words.patch) == (range(155000, 171384), 8)
    names = ("<racm3:break>", "<eoss>", "<reserved08796>", "<reserved08799>", "<reserved08824>")
    assert [words[name] for name in names] == [151665, 151666, 151667, 151670, 151695]


# Prompts


def test_a_prompt_states_the_size_and_begins_with_qwens_first_token(model):
    asked = "Generate an image of 32x32 according to the following prompt:\na fox"
    text = byte_tokenizer(list(IDS)).encode(asked).ids
    opening = [BEGIN, IDS["<reserved08801>"], IDS["<reserved08801>"]]
    assert prompt_of(model) == [FIRST_WORD, *text, TURN_END, *opening]
    assert model.prefix.null(torch.zeros(1, 9, 1), (4, 4))[0, :, 0].tolist() == opening


@pytest.mark.parametrize(
    "names",
    [
        {"bos_token": "<|image|>"},
        {"bos_token": {"content": "<|image|>", "special": True}},
        {"bos_token": None, "eos_token": {"content": "<|image|>"}},
    ],
)
def test_the_first_token_is_that_of_the_tokenizer(copy, names):
    model = api.load_model(edited(copy(), "tokenizer_config.json", **names))
    assert prompt_of(model)[0] == IDS["<|image|>"]


def test_the_end_of_a_turn_may_be_several_tokens(copy):
    folder, names = copy(), [name if name != "<reserved08706>" else "<unused>" for name in IDS]
    byte_tokenizer(names).save(str(folder / "tokenizer.json"))
    ids = prompt_of(api.load_model(folder))
    assert ids[-3 - len("<reserved08706>") : -3] == [ord(letter) - 33 for letter in "<reserved08706>"]


@pytest.mark.parametrize("settings", [None, {"bos_token": None, "eos_token": None}, {"eos_token": 3}])
def test_without_a_first_token_there_is_no_prompt(copy, settings):
    folder = copy()
    if settings is None:
        (folder / "tokenizer_config.json").unlink()
    else:
        edited(folder, "tokenizer_config.json", **settings)
    with pytest.raises(CheckpointError, match="tokenizer_config.json.*first token.*Download"):
        api.load_model(folder).encode_prompt("a fox")


def test_a_first_token_that_is_no_text_is_refused(copy):
    """Half of a surrogate pair, which JSON can state and UTF-8 cannot."""
    folder = edited(copy(), "tokenizer_config.json", bos_token="\ud800")
    with pytest.raises(CheckpointError, match="tokenizer.json.*cannot be read"):
        api.load_model(folder).encode_prompt("a fox")


@pytest.mark.parametrize(
    "wrong",
    [
        ["<|endoftext|>"],
        ["<|endoftext|>", "<racm3:break>"],
        [{"<reserved08801>": "<reserved08802>", "<reserved08802>": "<reserved08801>"}.get(name, name) for name in IDS],
    ],
    ids=["of a language model", "without sizes", "other sizes"],
)
def test_the_tokenizer_of_another_model_is_refused(copy, wrong):
    folder = copy()
    byte_tokenizer(wrong).save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="tokenizer.*another model"):
        api.load_model(folder).encode_prompt("a fox")


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary_map": {k: v for k, v in IDS.items() if k != "<MOVQGAN7>"}}, "image tokens.*config.json"),
        ({"vocabulary_map": {k: v for k, v in IDS.items() if k != "<reserved08799>"}}, "<reserved08799>"),
        ({"vocabulary_map": None}, "image tokens.*config.json"),
        ({"num_attention_heads": None}, "width.* 32 .*heads"),
    ],
)
def test_configs_of_others(copy, changes, message):
    with pytest.raises(CheckpointError, match=message):
        api.load_model(edited(copy(), **changes))


def test_weights_of_an_untrained_model(copy):
    folder = copy()
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] * 0}, str(folder / "model.safetensors"))
    with pytest.raises(CheckpointError, match="head.*zero.*image tokens"):
        api.load_model(folder)


# The image decoder


def test_the_decoder_is_found_under_its_released_name(folder, copy, tmp_path):
    assert find_image_decoder(folder, "lumina-mgpt-2") == folder / "movqgan_270M.ckpt"
    bare, vae = copy("bare"), tmp_path / "vae"
    vae.mkdir()
    (bare / "movqgan_270M.ckpt").rename(vae / "movqgan_270M.ckpt")
    assert find_image_decoder(bare, "lumina-mgpt-2") is None
    assert find_image_decoder(bare, "lumina-mgpt-2", [vae]) == vae / "movqgan_270M.ckpt"
    assert api.load_model(bare, search_folders=[vae]).codebook.shape == (32, 4)


def test_the_smaller_movqgans_are_refused(tmp_path):
    path = tmp_path / "movqgan_67M.safetensors"
    save_file(movq_weights() | {"encoder.conv_in.weight": torch.zeros(128, 3, 3, 3)}, str(path))
    refused(path, "67M", "movqgan_270M.ckpt", loader=api.load_image_decoder)
