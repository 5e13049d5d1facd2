"""Janus-Pro's files: both layouts in every container, prompts, sizes, and what is wrong with those that do not load."""

import json

import pytest
import torch
from comfyui_specar.model_loaders.detect import find_image_decoder, load_model
from comfyui_specar.model_loaders.families import janus
from comfyui_specar.model_loaders.files.checkpoint import weight_file
from comfyui_specar.samplers.contract import SamplingParams
from safetensors.torch import save_file
from tokenizers import Tokenizer

from ..support.bad_files import refused
from ..support.models import of_ids, teacher_forced
from ..support.tiny_folder import byte_tokenizer, edited, write_folder
from ..support.tiny_janus import BEGIN, CODES, HEADS, IMAGE, SIDE, SPECIALS, WORDS, config, released, weights, write

IMAGE_TOKENS = torch.arange(SIDE * SIDE).view(1, SIDE, SIDE) * 7 % CODES


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write(tmp_path_factory.mktemp("Janus-Pro-1B")))


def logits(model):
    return teacher_forced(model, of_ids(model, [BEGIN, 7, 9, IMAGE]), IMAGE_TOKENS)


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


# Fine-tunes as they are released (Janus-4o, Janus-Pro-R1, Janus-FocusDiff, ReasonGen-R1, T2I-R1)


def test_a_fine_tune_without_its_processor_takes_the_tokenizer_of_the_model_it_was_made_from(
    tmp_path, model, monkeypatch
):
    """Saved by save_pretrained of a class of its own: DeepSeek's names in safetensors, Llama's ids, no processor."""
    monkeypatch.setitem(janus._RELEASED, 64, ("Janus-Pro-7B", HEADS))
    write(tmp_path / "Janus-Pro-7B")
    folder = write_folder(tmp_path / "Janus-FocusDiff-7B", released(weights()), config(True), shards=3)
    edited(folder, architectures=["JanusLLamaModel"])
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(ids), encoding="utf-8")
    (folder / "processor_config.json").write_text(f'{{"num_image_tokens": {SIDE * SIDE}}}', encoding="utf-8")
    found = load_model(folder)
    assert torch.equal(logits(found), logits(model))
    assert torch.equal(found.encode_prompt("a fox")[0][0], model.encode_prompt("a fox")[0][0])


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_a_state_that_a_training_saved_alone(tmp_path, monkeypatch, prefix):
    """Janus-Pro-R1's training writes iter_N.pth, which its inference loads into Janus-Pro-7B. Width tells the heads."""
    monkeypatch.setitem(janus._RELEASED, 64, ("Janus-Pro-7B", HEADS))
    write(tmp_path / "Janus-Pro-7B")
    tensors = {f"{prefix}{name}": tensor for name, tensor in released(weights()).items()}
    torch.save(tensors, tmp_path / "iter_999.pth")
    found = load_model(tmp_path / "iter_999.pth")
    assert found.grid == (24, 24) and found.backbone.config.heads == HEADS
    assert found.encode_prompt("a fox")[0][0].shape[1] > 3


def test_the_prompts_of_t2i_r1_name_the_two_as_its_training_did(tmp_path, model):
    tokenizer = Tokenizer.from_file(str(write(tmp_path / "T2I-R1", original=True) / "tokenizer.json"))
    wanted = tokenizer.encode("User: a fox\n\nAssistant:<begin_of_image>").ids  # it puts its first token in itself
    found = load_model(tmp_path / "T2I-R1")
    assert found.encode_prompt("a fox")[0][0].flatten().tolist() == wanted
    assert model.encode_prompt("a fox")[0][0].flatten().tolist() != wanted


# Prompts


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
