"""Emu3's files: what is recognised, which prompts and sizes a model is given, and what is refused in words."""

import shutil

import pytest
import torch
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.model_loaders.families import emu3
from comfyui_specar.model_loaders.text.tiktoken_file import RankTokenizer, joined
from safetensors.torch import load_file, save_file

from ..support import tiny_emu3 as tiny
from ..support.bad_files import refused
from ..support.tiny import write_llamagen
from ..support.tiny_folder import edited


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("model"), shards=2)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def test_models_of_other_families_are_not_taken_for_it(tmp_path, folder):
    assert not emu3.recognise(load_file(write_llamagen(tmp_path / "model.safetensors", False)))
    weights = tiny.language_weights(tiny.text_config(67), "model.", "")
    assert not emu3.recognise(weights)  # any language model of plain names and another number of words
    assert not emu3.recognise({name.replace("model.", "model.text_model."): t for name, t in weights.items()})
    refused(save(tmp_path / "llama.safetensors", weights), "family", "Emu3")


def save(path, weights):
    save_file(weights, str(path))
    return path


# Prompts


def test_prompts_name_the_size_and_are_framed(model):
    ids = tiny.vocabulary()
    frame = [ids[name] for name in ("<|extra_203|>", "<|image start|>", "<|image token|>")]

    def read(text, grid, name="positive"):
        return model.read(model.encode_prompt(text), 1, name, grid).features[0, :, 0].int().tolist()

    words = ["a", "red", "cup", "masterpiece", ",", "film", "grained", ",", "best", "quality", "."]
    wanted = [frame[0], *(ids[word] for word in words), frame[1], ids["4"], ids["*"], ids["4"], frame[2]]
    assert model.encode_prompt("a red cup")[0][0][0, :, 0].int().tolist() == wanted
    assert read("a red cup", (4, 4)) == wanted
    assert read("a red cup", (2, 8))[-4:] == [ids["2"], ids["*"], ids["8"], frame[2]]
    # What not to generate is written without the words of praise.
    assert read("bad cup", (4, 5), "negative") == [
        frame[0],
        ids["bad"],
        ids["cup"],
        frame[1],
        ids["4"],
        ids["*"],
        ids["5"],
        frame[2],
    ]
    null = model.prefix.null(torch.zeros(1, 3, 1), (3, 5))[0, :, 0].int().tolist()
    assert null == read(emu3.NEGATIVE, (3, 5), "negative")


@torch.inference_mode()
def test_the_negative_prompt_of_a_run_is_the_users_or_the_models(model):
    layout, positive = model.layout(3, 5), model.encode_prompt("a cup")
    own = model.start(positive, None, 1, layout, slack=0, guided=True)
    same = model.start(positive, model.encode_prompt(emu3.NEGATIVE), 1, layout, slack=0, guided=True)
    other = model.start(positive, model.encode_prompt("blurry"), 1, layout, slack=0, guided=True)
    assert torch.allclose(own.prefill.logits, same.prefill.logits, atol=1e-5)
    assert not torch.allclose(own.prefill.logits[1], other.prefill.logits[1], atol=0.1)


def test_tokenizers_of_either_layout_are_found(tmp_path, folder):
    bare, beside = tmp_path / "bare", tmp_path / "Emu3-Chat"
    assert emu3.open_tokenizer(bare / "model.safetensors", []).file is None
    tiny.write_ranks(beside)  # that of a model which lies beside it; all Emu3 models share one
    found = emu3.open_tokenizer(bare / "model.safetensors", [])
    assert isinstance(found, RankTokenizer) and found.file == beside / "emu3.tiktoken"
    (beside / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert emu3.open_tokenizer(bare / "model.safetensors", []).file == beside / "tokenizer.json"
    tiny.write_ranks(bare)  # its own goes first
    assert emu3.open_tokenizer(bare / "model.safetensors", []).file == bare / "emu3.tiktoken"


def test_the_tokenizer_of_another_model_is_refused(tmp_path, folder):
    path = edited(shutil.copytree(folder, tmp_path / "model"))
    (path / "tokenizer.json").unlink()
    tiny.write_ranks(path)
    with pytest.raises(ValueError, match="emu3.tiktoken.*another model"):
        load_model(path).encode_prompt("a cup")


# The file of ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return RankTokenizer(
        tiny.write_ranks(tmp_path_factory.mktemp("ranks")) / "emu3.tiktoken", emu3._PATTERN, emu3._RANKED
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a red", [97, 259]),
        ("red", [257, 100]),
        ("the best", [116, 104, 101, 263]),
        ("", []),
        ("abed 12", [97, 98, 101, 100, 32, 49, 50]),
        ("  red", [32, 259]),
        ("é", [195, 169]),
        ("e\u0301", [195, 169]),
        ("<|image start|>", [473]),
        ("red<|extra_0|><|nope|>", [257, 100, 267, 60, 124, 110, 111, 112, 101, 124, 62]),
    ],
)
def test_ids_of_the_file_of_ranks(ranks, text, wanted):
    assert ranks.ids(text) == wanted


def test_pairs_are_joined_by_rank_from_the_left():
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"aa": 256, b"ab": 257, b"aab": 258}
    assert joined(b"aaa", ranks) == [256, 97] and joined(b"aaab", ranks) == [256, 257]
    assert joined(b"aab", ranks) == [258]  # known as a whole
    assert joined(b"baab", ranks) == [98, 258]


def test_special_tokens_follow_the_ranks(ranks):
    assert len(ranks) == 264 + 3 + 205 + 3 + 32768
    assert ranks.id("<|endoftext|>") == 264 and ranks.id("<|visual token 000000|>") == 264 + 211
    with pytest.raises(ValueError, match=r"<\|nonsense\|>"):
        ranks.id("<|nonsense|>")


@pytest.mark.parametrize("content", [b"YQ== 0\nYg==\n", b"YQ== zero\n", b"!!! 0\n", b"YQ== 0\nYg== 1\n", b""])
def test_damaged_ranks(tmp_path, content):
    (tmp_path / "emu3.tiktoken").write_bytes(content)
    with pytest.raises(ValueError, match=r"emu3\.tiktoken.*(read|incomplete).*Download"):
        RankTokenizer(tmp_path / "emu3.tiktoken", emu3._PATTERN, emu3._RANKED).ids("a")


# Sizes


def test_sizes_are_those_of_one_area(model):
    assert model.grids[0] == (8, 2) and model.grids[-1] == (2, 8) and (3, 5) in model.grids
    with pytest.raises(ValueError, match=r"10 x 10 pixels.*nearest.*\d+ x \d+"):
        model.layout(5, 5)
    assert all(0.8 < rows * cols / 8100 < 1.2 for rows, cols in emu3.size_table(90))
    assert {(90, 90), (68, 120), (120, 68), (180, 45), (45, 180)} <= set(emu3.size_table(90))
    assert {(64, 64), (48, 85), (55, 74)} <= set(emu3.size_table(64))


@pytest.mark.parametrize(
    ("name", "settings", "grid", "wanted"),
    [
        ("Emu3-Gen", {}, None, (90, 90)),
        ("Emu3-Gen-hf", {}, None, (90, 90)),
        ("emu3_stage1-bf16", {}, None, (64, 64)),
        ("mine", {"image_area": 518400}, None, (90, 90)),
        ("mine", {"image_area": 262144}, None, (64, 64)),
        ("Emu3-Gen", {"image_area": 262144}, None, (64, 64)),
        ("mine", {}, (64, 64), (64, 64)),
        ("mine", {}, (68, 120), (68, 120)),
        ("Emu3-Gen", {}, (68, 120), (68, 120)),
    ],
)
def test_which_sizes_a_checkpoint_generates(tmp_path, folder, name, settings, grid, wanted):
    path = edited(shutil.copytree(folder, tmp_path / name), **{"image_area": None, "vq_config": None, **settings})
    found, grids = emu3.sizes_of(checkpoint_of(path), {**settings}, 8, grid)
    assert found == wanted and grids == emu3.size_table(64 if 64 in wanted else 90)


def checkpoint_of(path):
    from comfyui_specar.model_loaders.files.checkpoint import Checkpoint

    return Checkpoint({}, path=path / "model.safetensors.index.json")


def test_a_size_that_nothing_states(tmp_path, folder):
    path = edited(shutil.copytree(folder, tmp_path / "mine"), image_area=None)
    refused(path, "mine", "Emu3-Gen", "Emu3-Stage1", "90 x 90", "64 x 64")
    with pytest.raises(ValueError, match="Emu3-Gen.*Emu3-Stage1"):
        load_model(path, grid=(50, 50))
    with pytest.raises(ValueError, match=r"5 x 5 tokens.*nearest.*\d x \d or "):
        load_model(folder, grid=(5, 5))
    assert load_model(folder, grid=(3, 5)).grid == (3, 5)


def test_a_model_that_only_reads_images(tmp_path, folder):
    for name in ("Emu3-Chat", "emu3-chat-hf"):
        refused(edited(shutil.copytree(folder, tmp_path / name)), name, "Use Emu3-Gen")


# Damage


def test_a_missing_or_wrong_vocabulary_map_is_refused(tmp_path, folder):
    ids = tiny.vocabulary()
    swapped = ids | {
        "<|visual token 000000|>": ids["<|visual token 000001|>"],
        "<|visual token 000001|>": ids["<|visual token 000000|>"],
    }
    lacking = {name: id for name, id in ids.items() if name != "<|extra_200|>"}
    beyond = ids | {"<|visual token 000032|>": max(ids.values()) + 1}
    for i, wrong in enumerate((None, {}, swapped, lacking, beyond)):
        refused(edited(shutil.copytree(folder, tmp_path / str(i)), vocabulary_map=wrong), " 67 ", "config")


def test_the_decoder_of_another_family(tmp_path, folder):
    weights = load_file(tiny.write(tmp_path / "model") / "model.safetensors")
    save(
        tmp_path / "model" / "model.safetensors",
        {n: t for n, t in weights.items() if ".vqmodel." not in n or "quantize" in n},
    )
    assert load_model(tmp_path / "model").codebook is None  # the language model alone, whose own decoder was taken out
    decoder = tiny.write_decoder(tmp_path / "Emu3-VisionTokenizer")
    found = load_model(tmp_path / "model", search_folders=[tmp_path])
    assert found.codebook.shape == (32, 4) and found.pixels_per_token == tiny.FACTOR
    tiny.write_decoder(decoder, codes=16)
    assert load_model(tmp_path / "model", search_folders=[tmp_path]).codebook is None
