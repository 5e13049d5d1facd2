"""Janus-Pro's files: both layouts in every container, prompts, sizes, and what is wrong with those that do not load."""

import json

import pytest
import torch
from comfyui_specar.model_loaders.detect import find_image_decoder, load_image_decoder, load_model
from comfyui_specar.model_loaders.files.checkpoint import weight_file
from comfyui_specar.samplers.contract import SamplingParams
from safetensors.torch import save_file

from ..support.bad_files import refused
from ..support.tiny import vq_weights
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


def test_special_tokens_in_a_prompt_are_tokens(model):
    ids = model.encode_prompt("<image_placeholder>")[0][0].flatten().tolist()
    assert FIRST + SPECIALS.index("<image_placeholder>") in ids
    assert ids.count(BEGIN) == ids.count(IMAGE) == 1


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


def test_another_decoder_beside_it(tmp_path, caplog):
    folder = write(tmp_path / "Janus")
    save_file(vq_weights() | {"quantize.embedding.weight": torch.randn(64, 8)}, str(folder / "vq.safetensors"))
    assert load_model(folder).codebook.shape == (32, 8), "its own"
    assert "vq.safetensors" in caplog.text and "32 codes" in caplog.text
    decoder = load_image_decoder(folder / "model.safetensors")
    assert decoder.encode(decoder.decode_tokens(IMAGE_TOKENS)).shape == IMAGE_TOKENS.shape
