"""SimpleAR: its files, prompts and sizes, and what is refused. Numbers against Qwen2: tests/parity."""

import json

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import family_of, load_model
from comfyui_specar.model_loaders.families import simplear
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint
from comfyui_specar.samplers.methods.next_token import NextToken
from safetensors.torch import load_file, save_file

from ..support.bad_files import refused
from ..support.models import of_ids
from ..support.tiny_folder import byte_tokenizer, edited
from ..support.tiny_simplear import CODES, GRID, SPECIALS, config, tokenizer, weights, write

END = "<|soi|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("models") / "SimpleAR-0.5B-RL")


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def words(text):
    return tokenizer().encode(text, add_special_tokens=False).ids


def read(model, conditioning, name="positive"):
    return model.unpack_prompt(conditioning, 1, name).features[0, :, 0].long().tolist()


def without(key, settings):
    return {name: value for name, value in settings.items() if name != key}


def test_recognition(folder):
    checkpoint = open_checkpoint(folder / "model.safetensors")
    assert family_of(checkpoint) is simplear.FAMILY
    names = dict.fromkeys(checkpoint.tensors)
    assert not simplear.recognise(names | {"visual.blocks.0.weight": None})  # a model that also reads images
    assert not simplear.recognise({n: None for n in names if not n.endswith(".bias")})  # a Llama


def test_sizes(tmp_path):
    """The released models generate 1024 and 512 pixels, and say so when asked for others."""
    path = write(tmp_path / "model", grid=(64, 64), decoder=False)
    model = load_model(edited(path, specar=without("grid", config(grid=(64, 64))["specar"])))
    assert model.grid == (64, 64) and model.layout(32, 32).length == 1024
    assert load_model(path, grid=(32, 32)).grid == (32, 32)
    with pytest.raises(ValueError, match="768 x 768 pixels.*nearest.*1024 x 1024, 512 x 512"):
        model.layout(48, 48)
    refused(path, "16 x 16 tokens", " 32 x 32 or 64 x 64", grid=(16, 16))


def test_a_prompt_with_its_own_beginning_is_read_as_it_is_written(model):
    for text in ("<|t2i|>A drawing of a cup", "<|t2i|>A drawing of a cup" + END):
        for name in ("positive", "negative"):
            assert read(model, model.encode_prompt(text), name) == words("<|t2i|>A drawing of a cup" + END)
    assert read(model, of_ids(model, [1, 2, 3]), "negative") == [1, 2, 3]


def test_a_prompt_that_is_too_long(model):
    with pytest.raises(ValueError, match=r"prompt.* 5\d\d tokens.* 16.*512"):
        api.sample(model, model.encode_prompt("cup " * 130), NextToken())


def test_a_tied_head_is_stored_once(model, tmp_path):
    names = [name for name in model.state_dict() if "layers" not in name]
    assert sorted(names) == ["backbone.norm.weight", "backbone.tok_embeddings.weight", "prefix.embedding.weight"]
    hidden = torch.randn(1, 1, 32)
    before = model.backbone.logits(hidden)
    with torch.no_grad():
        model.backbone.tok_embeddings.weight.mul_(2)
        assert torch.allclose(model.backbone.logits(hidden), 2 * before)  # it is the same memory
        model.backbone.tok_embeddings.weight.div_(2)
    other = load_model(write(tmp_path / "untied", tied=False, decoder=False), dtype=torch.bfloat16)
    assert other.backbone.output.weight.shape == (CODES, 32) and other.backbone.output.weight.dtype == torch.bfloat16
    assert not torch.equal(other.backbone.output.weight, other.backbone.tok_embeddings.weight)


def test_shards_and_single_files(folder, model, tmp_path):
    shards = load_model(write(tmp_path / "shards", shards=3))
    tensors = load_file(folder / "model.safetensors")
    single = tmp_path / "SimpleAR-0.5B-RL.safetensors"
    save_file(tensors, single, {"specar": json.dumps({"codes": CODES, "grid": GRID, "heads": 4})})
    single.with_suffix("").mkdir()
    tokenizer().save(str(single.with_suffix("") / "tokenizer.json"))
    for other in (shards, load_model(single)):
        assert other.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(other.state_dict()[n], t) for n, t in model.state_dict().items())
        assert read(other, other.encode_prompt("x")) == read(model, model.encode_prompt("x"))


def test_the_older_tokenizer_files(folder, model, tmp_path):
    path = write(tmp_path / "model", decoder=False)
    (path / "tokenizer.json").unlink()
    vocab = {text: i for text, i in tokenizer().get_vocab().items() if text not in SPECIALS}
    (path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (path / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    (path / "added_tokens.json").write_text(json.dumps({text: 256 + i for i, text in enumerate(SPECIALS)}), "utf-8")
    other = load_model(path)
    assert other.word_ids == model.word_ids
    for text in ("a red cup", "été <|sov|> 3"):
        assert read(other, other.encode_prompt(text)) == read(model, model.encode_prompt(text))
    added = {f"<|{i}|>": 300 + i for i in range(70_000)}
    (path / "added_tokens.json").write_text(json.dumps(added), "utf-8")
    refused(path, "added_tokens.json has ", " bytes; the limit")


def test_the_tokenizer_of_another_model(tmp_path):
    path = write(tmp_path / "model", decoder=False)
    byte_tokenizer([*SPECIALS, "<|more|>"]).save(str(path / "tokenizer.json"))  # the codes do not begin behind it
    refused(path, "tokenizer.json has 265 tokens", "264", "another model")
    byte_tokenizer([*SPECIALS, "<|more|>"], first=300).save(str(path / "tokenizer.json"))
    refused(path, "<|t2i|>", "another model")
    edited(path, specar=without("words", config()["specar"]))
    refused(path, "301", "309 tokens", "tokenizer.json")


def test_a_language_model_that_generates_no_images(tmp_path):
    """Qwen2.5 has the same tensors, and fewer words."""
    settings = config()
    save_file(weights(settings), str(tmp_path / "qwen.safetensors"))
    refused(tmp_path / "qwen.safetensors", "301", "64000", "Qwen2 language model")
