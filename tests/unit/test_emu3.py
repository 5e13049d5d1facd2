"""Emu3's and Emu3.5's files: which models are theirs, tokenizers, sizes by name, and what is refused."""

import shutil

import pytest
import torch
from comfyui_specar.model_loaders.detect import family_of, load_model
from comfyui_specar.model_loaders.families import emu3, emu35
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint
from safetensors.torch import save_file

from ..support import tiny_emu3 as tiny
from ..support import tiny_emu35 as tiny35
from ..support.bad_files import refused
from ..support.reference import on_meta
from ..support.tiny_folder import edited


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The two models without the second one's decoder."""
    return {
        "emu3": tiny.write(tmp_path_factory.mktemp("emu3")),
        "emu3.5": tiny35.write(tmp_path_factory.mktemp("emu3.5"), decoder=False),
    }


@pytest.fixture(scope="module")
def model(folders):
    return load_model(folders["emu3"])


@pytest.fixture
def changed(folders, tmp_path):
    """changed(family, name, **settings): another folder with the same files and other settings."""
    return lambda family, name, **settings: edited(shutil.copytree(folders[family], tmp_path / name), **settings)


# What they are


def test_models_of_other_families_are_not_taken_for_them(tmp_path):
    weights = tiny.language_weights(tiny.text_config(67), "model.", "")
    assert not emu3.recognise(weights)  # any language model of plain names and another number of words
    assert not emu3.recognise({name.replace("model.", "model.text_model."): t for name, t in weights.items()})
    save_file(weights, str(tmp_path / "llama.safetensors"))
    refused(tmp_path / "llama.safetensors", "family", "Emu3")

    named = on_meta({name: tuple(tensor.shape) for name, tensor in weights.items()})
    named["model.embed_tokens.weight"] = torch.empty(emu3._WORDS, 32, device="meta")
    biases = {f"model.layers.0.self_attn.{part}_proj.bias": torch.empty(32, device="meta") for part in "qkvo"}
    assert family_of(Checkpoint(named | biases)) is emu3.FAMILY, "SimpleAR is not all that has biases"

    tensors, norm = on_meta(tiny35.shapes(tiny35.config())), "model.layers.0.self_attn.q_norm"
    assert emu35.recognise(tensors) and not emu3.recognise(tensors)
    assert not emu35.recognise(tensors | {f"{norm}.weight": torch.empty(1, 16, device="meta")}), "a Chameleon"
    assert not emu35.recognise(tensors | {f"{norm}.bias": torch.empty(16, device="meta")}), "a LayerNorm"
    for left_out in ("_norm", "lm_head.weight"):
        assert not emu35.recognise({name: tensor for name, tensor in tensors.items() if left_out not in name})


def test_models_that_generate_no_images(changed):
    for name in ("Emu3-Chat", "emu3-chat-hf"):
        refused(changed("emu3", name), name, "Use Emu3-Gen")
    qwen3 = changed("emu3.5", "Qwen3-8B", vocabulary_map=None)  # has the same layers
    refused(qwen3, "Qwen3-8B", "297 ids", "only text", "BAAI/Emu3.5-Image")


# Tokenizers


def test_tokenizers_of_either_layout_are_found(tmp_path, folders):
    bare, beside = tmp_path / "bare", tmp_path / "Emu3-Chat"
    assert emu3.open_tokenizer(bare / "model.safetensors", []).file is None
    tiny.write_ranks(beside)  # that of a model which lies beside it; all Emu3 models share one
    found = emu3.open_tokenizer(bare / "model.safetensors", [])
    assert found.file == beside / "emu3.tiktoken"
    (beside / "tokenizer.json").write_bytes((folders["emu3"] / "tokenizer.json").read_bytes())
    assert emu3.open_tokenizer(bare / "model.safetensors", []).file == beside / "tokenizer.json"
    tiny.write_ranks(bare)  # its own goes first
    assert emu3.open_tokenizer(bare / "model.safetensors", []).file == bare / "emu3.tiktoken"
    second = emu3.open_tokenizer(bare / "model.safetensors", [], emu3.special_names(131072), "BAAI/Emu3.5-Image")
    assert len(second) == 264 + 3 + 205 + 3 + 131072


def test_the_ranks_of_another_model_are_refused(changed):
    path = changed("emu3", "model")
    (path / "tokenizer.json").unlink()
    tiny.write_ranks(path)
    with pytest.raises(ValueError, match="emu3.tiktoken.*another model"):
        load_model(path).encode_prompt("a cup")


def opened(folder):
    return emu3.open_tokenizer(folder / "model.safetensors", [])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return opened(tiny.write_ranks(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", []),
        ("  red", [32, 259]),
        ("e\u0301", [195, 169]),
        ("<|image start|>", [473]),
        ("red<|extra_0|><|nope|>", [257, 100, 267, 60, 124, 110, 111, 112, 101, 124, 62]),
    ],
)
def test_ids_of_the_file_of_ranks(ranks, text, wanted):
    """Of whole prompts: tests/parity."""
    assert ranks.ids(text) == wanted


def test_special_tokens_follow_the_ranks(ranks):
    assert len(ranks) == 264 + 3 + 205 + 3 + 32768
    assert ranks.id("<|endoftext|>") == 264 and ranks.id("<|visual token 000000|>") == 264 + 211
    with pytest.raises(ValueError, match=r"<\|nonsense\|>"):
        ranks.id("<|nonsense|>")


@pytest.mark.parametrize("content", [b"YQ== 0\nYg==\n", b"YQ== zero\n", b"!!! 0\n", b"YQ== 0\nYg== 1\n", b""])
def test_damaged_ranks(tmp_path, content):
    (tmp_path / "emu3.tiktoken").write_bytes(content)
    with pytest.raises(ValueError, match=r"emu3\.tiktoken.*(read|incomplete).*Download"):
        opened(tmp_path).ids("a")


# Sizes


@pytest.mark.parametrize(
    ("name", "settings", "grid", "wanted"),
    [
        ("Emu3-Gen", {}, None, (90, 90)),
        ("my_Emu3_Gen_v2", {}, None, (90, 90)),
        ("emu3_stage1-bf16", {}, None, (64, 64)),
        ("mine", {"image_area": 518400}, None, (90, 90)),
        ("Emu3-Gen", {"image_area": 262144}, None, (64, 64)),
        ("mine", {}, (64, 64), (64, 64)),
        ("mine", {}, (68, 120), (68, 120)),
        ("Emu3-Gen", {}, (68, 120), (68, 120)),
    ],
)
def test_which_sizes_a_checkpoint_generates(tmp_path, name, settings, grid, wanted):
    checkpoint = Checkpoint({}, path=tmp_path / name / "model.safetensors.index.json")
    assert emu3.generated_sizes(checkpoint, settings, 8, grid) == (wanted, emu3.size_table(64 if 64 in wanted else 90))


def test_a_size_that_nothing_states(changed, folders):
    path = changed("emu3", "genshin-emu3", image_area=None)
    refused(path, "genshin-emu3", "Emu3-Gen", "Emu3-Stage1", "90 x 90", "64 x 64")
    refused(path, "Emu3-Gen", "Emu3-Stage1", grid=(50, 50))
    refused(folders["emu3"], "5 x 5 tokens", "nearest", grid=(5, 5))
    assert load_model(folders["emu3"], grid=(3, 5)).grid == (3, 5)


def test_sizes_of_the_released_models(model, changed):
    with pytest.raises(ValueError, match=r"10 x 10 pixels.*nearest.*\d+ x \d+"):
        model.layout(5, 5)
    path = changed("emu3.5", "Emu3.5-Image", specar=None)
    second = load_model(path)
    assert second.grid == (55, 73) and second.grids == emu35.GRIDS and second.defaults.cfg == 5.0
    assert load_model(path, grid=(32, 32)).grid == (32, 32)
    refused(path, "60 x 60", "nearest", grid=(60, 60))
    with pytest.raises(ValueError, match=r"1024 x 768 pixels.*nearest"):
        second.layout(48, 64)


# Damage


def test_a_missing_or_wrong_vocabulary_map_is_refused(changed):
    ids, first, second = tiny.vocabulary(), "<|visual token 000000|>", "<|visual token 000001|>"
    swapped = ids | {first: ids[second], second: ids[first]}
    lacking = {name: id for name, id in ids.items() if name != "<|extra_200|>"}
    beyond = ids | {"<|visual token 000032|>": max(ids.values()) + 1}
    for i, wrong in enumerate((None, {}, swapped, lacking, beyond)):
        refused(changed("emu3", str(i), vocabulary_map=wrong), " 67 ", "config")


@pytest.mark.parametrize(("heads", "word"), [(2, "norm"), (8, "norm"), (3, "attention heads")])
def test_another_number_of_heads_is_refused(changed, heads, word):
    """The norms of the heads tell how wide they are."""
    refused(changed("emu3.5", "model", num_attention_heads=heads), word)
