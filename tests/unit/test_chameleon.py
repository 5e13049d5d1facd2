"""Lumina-mGPT, Lumina-mGPT 2.0 and Anole: distinguished by weights and vocabulary, sizes by name, whose tokenizer is
read, and what is refused."""

import shutil

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.families import chameleon
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.model_loaders.text.chameleon_prompts import Vocabulary
from safetensors.torch import load_file, save_file

from ..support.tiny_chameleon import config, random_weights, shapes, vocabulary, write
from ..support.tiny_folder import byte_tokenizer, edited, write_folder

IDS, IDS2 = vocabulary(32), vocabulary(32, "lumina2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: write(tmp_path_factory.mktemp(kind), kind=kind) for kind in ("lumina", "lumina2", "anole")}


@pytest.fixture
def copy(folders, tmp_path):
    """A copy of a tiny model's folder, under another name."""
    return lambda kind, name="some-64": shutil.copytree(folders[kind], tmp_path / name)


def prompt_of(folder):
    """Ids of a prompt."""
    return api.load_model(folder).encode_prompt("a fox")[0][0].flatten().int().tolist()


# What they are


def test_weights_distinguish_the_two_whatever_the_folder_is_called(copy):
    assert api.load_model(copy("anole", "Lumina-mGPT-64")).family == "anole"
    assert api.load_model(copy("lumina", "Anole-64")).family == "lumina-mgpt"


@pytest.mark.parametrize(
    ("path", "grid", "size"),
    [
        ("Lumina-mGPT-7B-512/model.safetensors", None, 512),
        ("Lumina-mGPT-7B-768-Omni/model.safetensors.index.json", None, 768),
        ("Lumina-mGPT-7B-768-Omni/model.safetensors", (32, 32), 768),
        ("Lumina-mGPT-7B-1024/pytorch_model.bin", None, 1024),
        ("LLM/Lumina-mGPT-7B-768_fp8.safetensors", None, 768),
        ("some_lumina.safetensors", (32, 32), 512),
        *((f"{name}/model.safetensors", None, None) for name in ("20240320_lumina", "Lumina-mGPT-v128", "0f96c2e1d4")),
        ("a7512bc0/model.safetensors", None, None),  # 512 within another number
        ("Lumina-mGPT-7B/model.safetensors", (32, 48), None),
    ],
)
def test_a_released_name_gives_the_size_or_else_a_square_grid(tmp_path, path, grid, size):
    if size is None:
        with pytest.raises(CheckpointError, match="size.*512, 768 or 1024.*grid"):
            chameleon.target_size(tmp_path / path, {}, grid)
    else:
        assert chameleon.target_size(tmp_path / path, {}, grid) == size


@pytest.mark.parametrize("name", ["Lumina-mGPT-2.0-Omni", "mine"])
def test_every_name_of_the_second_means_the_area_of_768_pixels(copy, name):
    folder = edited(copy("lumina2", name), specar=None)
    (folder / "movqgan_270M.ckpt").unlink()
    model = api.load_model(folder)
    assert model.grid == (96, 96) and len(model.grids) == 73 and model.pixels_per_token == 8
    with pytest.raises(ValueError, match="1024 x 1024 pixels.*128 x 128 tokens.*768 x 768"):
        model.layout(128, 128)


def test_a_length_that_was_carried_over_from_a_smaller_model_is_not_believed():
    for side, stated, wanted in ((64, 10240, 10240), (64, 4096, None), (32, 4096, 4096)):
        grids = chameleon.size_table(side)
        assert chameleon.longest({"max_position_embeddings": stated}, grids) == wanted
    assert chameleon.longest({}, grids) is None


# Prompts


def test_released_ids_without_a_vocabulary_map(tmp_path):
    """As released: 65536 words, of which 4 .. 8195 are codes; of the second model, literals of the authors' code."""
    settings = {key: value for key, value in config("lumina", width=8).items() if key != "vocabulary_map"}
    settings |= {"vocab_size": 65536, "num_hidden_layers": 1}
    weights = random_weights(shapes("lumina", settings), seed=0)
    model = api.load_model(write_folder(tmp_path / "Lumina-mGPT-7B-512", weights, settings))
    assert model.word_ids == (*range(4, 8196), 8803, 8196) and model.defaults.top_k == 2000
    assert model.prefix.null(torch.zeros(1, 1, 1), (32, 32))[0, :, 0].tolist() == [8197, 8820, 8820]
    assert torch.equal(model.backbone.output.weight[8192], weights["lm_head.weight"][8803])
    assert torch.equal(model.backbone.tok_embeddings.weight[7], weights["model.embed_tokens.weight"][11])

    words = Vocabulary.of({"vocabulary_map": {"IMGIMGAZ": 4}}, 171385, tmp_path / "config.json")
    assert (words.images, words.patch) == (range(155000, 171384), 8)
    names = ("<racm3:break>", "<eoss>", "<reserved08796>", "<reserved08799>", "<reserved08824>")
    assert [words[name] for name in names] == [151665, 151666, 151667, 151670, 151695]


def test_all_repositories_of_the_first_share_a_tokenizer(folders, copy):
    folder = copy("anole", "lonely-64")
    (folder / "tokenizer.json").unlink()
    shutil.copytree(folders["lumina"], folder.parent / "Lumina-mGPT-7B-768")
    assert api.load_model(folder).encode_prompt("a fox")


@pytest.mark.parametrize(
    "names",
    [
        {"bos_token": "<|image|>"},
        {"bos_token": {"content": "<|image|>", "special": True}},
        {"bos_token": None, "eos_token": {"content": "<|image|>"}},
    ],
)
def test_the_first_token_of_the_second_is_that_of_its_tokenizer(copy, names):
    assert prompt_of(edited(copy("lumina2"), "tokenizer_config.json", **names))[0] == IDS2["<|image|>"]


def test_the_end_of_a_turn_may_be_several_tokens(copy):
    folder, names = copy("lumina2"), [name if name != "<reserved08706>" else "<unused>" for name in IDS2]
    byte_tokenizer(names).save(str(folder / "tokenizer.json"))
    end = [ord(letter) - 33 for letter in "<reserved08706>"]
    assert prompt_of(folder)[-3 - len(end) : -3] == end


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bos_token": None, "eos_token": None}, "tokenizer_config.json.*first token.*Download"),
        ({"eos_token": 3}, "tokenizer_config.json.*first token.*Download"),
        (None, "tokenizer_config.json.*first token.*Download"),
        ({"bos_token": "\ud800"}, "tokenizer.json.*cannot be read"),  # half of a pair, which JSON can state
    ],
)
def test_without_a_first_token_there_is_no_prompt(copy, settings, words):
    folder = copy("lumina2")
    if settings is None:
        (folder / "tokenizer_config.json").unlink()
    else:
        edited(folder, "tokenizer_config.json", **settings)
    with pytest.raises(CheckpointError, match=words):
        prompt_of(folder)


# What is refused


def without(ids, name):
    return {"vocabulary_map": {key: value for key, value in ids.items() if key != name}}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("lumina", {"vocabulary_map": None}, "image tokens.*config.json"),
        ("lumina", {"vocabulary_map": IDS | {"IMGIMGBZ": 5}}, "order"),
        ("lumina", without(IDS, "<eoss>"), "<eoss>"),
        ("lumina", {"swin_norm": True}, "swin_norm.*34B.*7B"),
        ("lumina", {"mask_image_logits": True}, "output.*switched off.*Anole-7b-v0.1-hf"),
        ("lumina", {"num_attention_heads": None}, "width.* 32 .*heads"),
        ("lumina", {"specar": None}, "some-64.*size.*512, 768 or 1024.*grid"),
        ("lumina2", {"vocabulary_map": None}, "image tokens.*config.json"),
        ("lumina2", without(IDS2, "<MOVQGAN7>"), "image tokens.*config.json"),
        ("lumina2", without(IDS2, "<reserved08799>"), "<reserved08799>"),
    ],
)
def test_configs_of_others(copy, kind, changes, message):
    with pytest.raises(CheckpointError, match=message):
        api.load_model(edited(copy(kind), **changes))


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("anole", lambda n, t: None if ".vqmodel.decoder." in n else t, "output.*switched off"),
        ("anole", lambda n, t: t.repeat(2, 1) if "_norm." in n else t, "2 heads.*4 groups.*34B"),
        ("anole", lambda n, t: None if n == "model.layers.1.self_attn.k_norm.bias" else t, "k_norm.bias"),
        ("lumina", lambda n, t: t * 0 if n == "lm_head.weight" else t, "head.*zero.*image tokens"),
    ],
)
def test_weights_of_others(copy, kind, edit, message):
    file = copy(kind) / "model.safetensors"
    edited_ones = {name: edit(name, tensor) for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in edited_ones.items() if tensor is not None}, str(file))
    with pytest.raises(CheckpointError, match=message):
        api.load_model(file.parent)


def test_metas_own_layout_is_refused_with_a_remedy(tmp_path):
    names = ("tok_embeddings.weight", "norm.weight", "layers.0.attention.q_normalization.weight")
    torch.save({name: torch.zeros(4, 4) for name in names}, tmp_path / "consolidated.pth")
    with pytest.raises(CheckpointError, match="Meta.*layout.*leloy/Anole-7b-v0.1-hf"):
        api.load_model(tmp_path / "consolidated.pth")
