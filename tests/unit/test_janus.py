"""Janus-Pro's files: both layouts in every container, prompts, sizes, and what is wrong with those that do not load."""

import json

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.decoders import KINDS, vq
from comfyui_specar.model_loaders.detect import find_image_decoder, load_image_decoder, load_model
from comfyui_specar.model_loaders.families import FAMILIES, janus
from comfyui_specar.model_loaders.files.checkpoint import weight_file
from comfyui_specar.samplers.contract import SamplingParams
from safetensors.torch import save_file

from ..support.bad_files import refused
from ..support.tiny import llamagen_weights, vq_weights
from ..support.tiny_folder import byte_tokenizer, write_folder
from ..support.tiny_janus import (
    BEGIN,
    CODES,
    FIRST,
    IMAGE,
    PAD,
    SIDE,
    SPECIALS,
    WORDS,
    config,
    released,
    weights,
    write,
)

IMAGE_TOKENS = torch.arange(SIDE * SIDE).view(1, SIDE, SIDE) * 7 % CODES


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write(tmp_path_factory.mktemp("Janus-Pro-1B")))


def logits(model):
    return model.teacher_forced(model.encode_ids([BEGIN, 7, 9, IMAGE]), IMAGE_TOKENS)


@pytest.mark.parametrize(
    ("original", "shards", "pickled"),
    [(False, 3, False), (True, 1, False), (True, 2, False), (True, 1, True), (True, 2, True)],
)
def test_every_layout_gives_the_same_model(tmp_path, model, original, shards, pickled):
    folder = write(tmp_path / "again", shards=shards, original=original, pickled=pickled)
    found = load_model(folder)
    assert torch.equal(logits(found), logits(model))
    assert find_image_decoder(folder, found.family) == weight_file(folder)  # in the same file
    assert torch.equal(found.codebook, model.codebook) and found.pixels_per_token == 2


def test_what_a_model_says_of_itself(model):
    assert model.family == "janus-pro" and model.grid == (SIDE, SIDE) and model.grids == ((SIDE, SIDE),)
    assert model.vocab == model.vocab_total == CODES and model.longest == 16384
    assert model.defaults == SamplingParams(cfg=5.0) and model.dtype == torch.float32
    assert model.prefix.words == WORDS and not any(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match="16 x 4 pixels.*8 x 8 pixels"):
        model.layout(2, 8)


def test_only_what_generates_is_read(tmp_path, model):
    """Vision tower, its aligner and the head for words may hold anything; statistics of the tokenizer too."""
    for original in (False, True):
        tensors = released(weights()) if original else weights()
        for name in tensors:
            if name.startswith(("model.vision_model", "vision_model", "model.aligner", "aligner")) or "lm_head" in name:
                tensors[name] = torch.full_like(tensors[name], torch.nan)
        settings = config(original) | {"vision_config": {"num_image_tokens": SIDE * SIDE}}
        folder = write_folder(tmp_path / f"{original}", tensors, settings)
        assert torch.equal(logits(load_model(folder)), logits(model))


def test_families_are_distinguished():
    for tensors in (weights(), released(weights())):
        assert [family for family in FAMILIES if family.recognise(tensors)] == [janus.FAMILY]
        assert [kind for kind in KINDS if kind.recognise(tensors)] == [vq.KIND]
    for others in (llamagen_weights(True), llamagen_weights(False), vq_weights(), {"model.vqmodel.encoder.x": 0}):
        assert not janus.recognise(others)


# Prompts


def test_the_second_branch_reads_padding(model):
    """As long as the prompt, and just as the first where nobody wrote it otherwise: first and last token stay."""
    features = model.encode_prompt("a cat")[0][0]
    assert features[0, [0, -1], 0].tolist() == [BEGIN, IMAGE]
    wanted = torch.tensor([BEGIN, *[PAD] * (features.shape[1] - 2), IMAGE])
    null = model.prefix.unconditional(features, model.grid)
    assert torch.equal(null[0], model.prefix.embedding.weight[wanted])
    assert torch.equal(features, model.encode_prompt("a cat")[0][0])  # untouched
    state = model.start(model.encode_prompt("a cat"), None, 2, model.layout(), slack=0, guided=True)
    assert state.cache.lengths.tolist() == [features.shape[1]] * 4


def test_prompts_of_several_lengths_and_a_negative_one(model):
    cat, long = model.encode_prompt("a cat"), model.encode_prompt("anything but a very long prompt")
    layout = model.layout()
    guided = model.start(cat, long, 1, layout, slack=0, guided=True).prefill.logits
    for conditioning, row in ((cat, 0), (long, 1)):
        alone = model.start(conditioning, None, 1, layout, slack=0, guided=False).prefill.logits
        assert torch.allclose(guided[row], alone[0], atol=1e-5)


def test_special_tokens_in_a_prompt_are_tokens(model):
    ids = model.encode_prompt("<image_placeholder>")[0][0].flatten().tolist()
    assert FIRST + SPECIALS.index("<image_placeholder>") in ids
    assert ids.count(BEGIN) == ids.count(IMAGE) == 1


def test_too_long_a_prompt(tmp_path):
    folder = write(tmp_path / "short")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings["text_config"]["max_position_embeddings"] = 40
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    model = load_model(folder)
    with pytest.raises(ValueError, match=r"40.*Shorten"):
        api.sample(model, model.encode_prompt("a prompt that is too long"), temperature=0)


def test_a_missing_tokenizer_is_named_when_it_is_used(tmp_path):
    folder = write(tmp_path / "Janus")
    file = folder / "tokenizer.json"
    content = file.read_bytes()
    file.unlink()
    model = load_model(folder)
    ids = model.encode_ids([BEGIN, 7, 9, IMAGE])
    null = model.encode_ids([BEGIN, PAD, PAD, IMAGE])
    drawn = api.sample(model, ids, negative=null, temperature=0).tokens
    for use in (lambda: model.encode_prompt("a cat"), lambda: api.sample(model, ids)):
        with pytest.raises(FileNotFoundError, match=r"tokenizer\.json.*deepseek-ai/Janus-Pro"):
            use()
    beside = tmp_path / "Janus-Pro"
    beside.mkdir()
    (beside / "tokenizer.json").write_bytes(content)
    again = load_model(folder)  # in the folder of another download
    assert torch.equal(api.sample(again, ids, temperature=0).tokens, drawn)


@pytest.mark.parametrize(
    ("specials", "first", "words"),
    [
        (("<s>", "</s>"), FIRST, ("token", "another model")),
        (SPECIALS, WORDS, (str(WORDS + len(SPECIALS)), f" {WORDS}")),
    ],
)
def test_another_models_tokenizer(tmp_path, specials, first, words):
    folder = write(tmp_path / "Janus")
    byte_tokenizer(specials, first).save(str(folder / "tokenizer.json"))
    refused("a cat", *words, loader=load_model(folder).encode_prompt)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    refused("a cat", "tokenizer.json", "Download", loader=load_model(folder).encode_prompt)


# Sizes


def test_the_grid_is_the_models_own(tmp_path, model):
    folder = write(tmp_path / "Janus", original=True)
    assert load_model(folder, grid=(SIDE, SIDE)).grid == (SIDE, SIDE)
    refused(folder, "4 x 4", "24 x 24", grid=(24, 24))
    (folder / "processor_config.json").unlink()
    assert load_model(folder).grid == (24, 24)  # the released ones
    for wrong in (15, -4, "16"):
        (folder / "processor_config.json").write_text(json.dumps({"num_image_tokens": wrong}), encoding="utf-8")
        refused(folder, f"{wrong} tokens", "square")
    alone = tmp_path / "alone.safetensors"
    specar = {"grid": [2, 2], "heads": 4, "defaults": {"cfg": 2.0, "top_k": 5}}
    save_file(weights(), str(alone), metadata={"specar": json.dumps(specar)})
    refused(alone, "width 64", "config.json")  # a width that was never released
    folder = write(tmp_path / "ours")
    save_file(weights(), str(folder / "model.safetensors"), metadata={"specar": json.dumps(specar)})
    found = load_model(folder)
    assert found.grid == (2, 2) and found.defaults == SamplingParams(cfg=2.0, top_k=5)


# Files that cannot be used


@pytest.mark.parametrize("original", [False, True])
def test_models_that_only_look_at_images(tmp_path, original):
    tensors = released(weights()) if original else weights()
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(("gen_", "model.generation", "model.vqmodel"))
    }
    folder = write_folder(tmp_path / "looking", tensors, config(original))
    refused(folder, "looking", "reads images", "deepseek-ai/Janus-Pro-1B")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.generation_head.vision_head.weight"), ("vision_head.weight", "incomplete")),
        (lambda w: w.pop("model.generation_aligner.fc1.bias"), ("fc1.bias", "incomplete")),
        (lambda w: w.pop("model.language_model.layers.1.self_attn.k_proj.weight"), ("k_proj", "incomplete")),
        (lambda w: w.pop("model.language_model.layers.1.mlp.up_proj.weight"), ("w3", "missing")),
        (
            lambda w: w.update({"model.generation_aligner.hidden_layers.1.bias": torch.zeros(64)}),
            ("unknown", "layers.1"),
        ),
        (lambda w: w.update({"model.generation_head.proj_out.bias": torch.zeros(7)}), ("[7]", "[64]")),
        (lambda w: w["model.generation_embeddings.weight"][3].fill_(torch.nan), ("table.weight", "NaN")),
        (lambda w: w["model.language_model.layers.0.self_attn.v_proj.weight"][3].fill_(torch.inf), ("wqkv", "NaN")),
        (lambda w: w.pop("model.vqmodel.decoder.conv_out.bias"), ("decoder.conv_out.bias", "missing")),
    ],
)
def test_damaged_files(tmp_path, change, words):
    tensors = weights()
    change(tensors)
    refused(write_folder(tmp_path / "Janus", tensors, config(False)), *words)


def test_missing_parts_of_a_folder(tmp_path):
    folder = write(tmp_path / "Janus-Pro-7B", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "Janus-Pro-7B", "incomplete", "model-00002-of-00003.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "no model.safetensors")


def test_another_decoder_beside_it(tmp_path, caplog):
    folder = write(tmp_path / "Janus")
    save_file(vq_weights() | {"quantize.embedding.weight": torch.randn(64, 8)}, str(folder / "vq.safetensors"))
    assert load_model(folder).codebook.shape == (32, 8), "its own"
    assert "vq.safetensors" in caplog.text and "32 codes" in caplog.text
    decoder = load_image_decoder(folder / "model.safetensors")
    assert decoder.encode(decoder.decode_tokens(IMAGE_TOKENS)).shape == IMAGE_TOKENS.shape
