"""Janus-Pro's files: both layouts in every container, prompts, sizes, and what is wrong with those that do not load."""

import json

import pytest
import torch
from comfyui_specar.model_loaders.detect import find_image_decoder, load_model
from comfyui_specar.model_loaders.files.checkpoint import weight_file
from comfyui_specar.samplers.contract import SamplingParams
from safetensors.torch import save_file

from ..support.bad_files import refused
from ..support.tiny_folder import byte_tokenizer, write_folder
from ..support.tiny_janus import BEGIN, CODES, FIRST, IMAGE, SIDE, SPECIALS, WORDS, config, released, weights, write

IMAGE_TOKENS = torch.arange(SIDE * SIDE).view(1, SIDE, SIDE) * 7 % CODES


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write(tmp_path_factory.mktemp("Janus-Pro-1B")))


def logits(model):
    return model.teacher_forced(model.encode_ids([BEGIN, 7, 9, IMAGE]), IMAGE_TOKENS)


@pytest.mark.parametrize(("original", "shards", "pickled"), [(False, 3, False), (True, 1, False), (True, 2, True)])
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


def test_special_tokens_in_a_prompt_are_tokens(model):
    ids = model.encode_prompt("<image_placeholder>")[0][0].flatten().tolist()
    assert FIRST + SPECIALS.index("<image_placeholder>") in ids
    assert ids.count(BEGIN) == ids.count(IMAGE) == 1


def test_a_tokenizer_whose_ids_have_no_row_is_refused(tmp_path):
    folder = write(tmp_path / "Janus")
    byte_tokenizer(SPECIALS, WORDS).save(str(folder / "tokenizer.json"))
    refused("a cat", str(WORDS + len(SPECIALS)), f" {WORDS}", loader=load_model(folder).encode_prompt)


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
    generating = ("gen_", "model.generation", "model.vqmodel")
    looking = {name: tensor for name, tensor in tensors.items() if not name.startswith(generating)}
    folder = write_folder(tmp_path / "looking", looking, config(original))
    refused(folder, "looking", "reads images", "deepseek-ai/Janus-Pro-1B")
